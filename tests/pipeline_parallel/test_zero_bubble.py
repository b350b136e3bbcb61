"""Zero bubble for real: which weight gradients have been computed when, on real ranks."""

from itertools import product

import numpy as np
import pytest

from minidist import nn
from minidist.autograd.deferred import Product
from minidist.nn.datasets import Batch
from minidist.pipeline_parallel import Pipeline
from minidist.pipeline_parallel.stage import Stage
from tests.strategies import arrays

WIDTH = 8


def products_done(group, schedule, m, weights_last):
    """Return, per compute action, how many weight gradients have been computed so far."""
    model = nn.MLP([WIDTH] * (2 * group.size + 1), "gelu", dtype="float64")
    pipeline = Pipeline(model, group, schedule, m, weights_last=weights_last)
    (stage,) = pipeline.stages
    count, found, call = [0], [], Product.__call__

    def counted(self, out=None):
        count[0] += 1
        return call(self, out)

    def told(name):
        method = getattr(stage, name)

        def wrapper(i):
            method(i)
            found.append((name, i, count[0], bool(stage.parameters()[0].grad is not None)))

        setattr(stage, name, wrapper)

    for name in ("forward", "backward", "backward_input", "backward_weights"):
        told(name)
    Product.__call__ = counted
    try:
        pipeline.backward(Batch(arrays(m * 2, WIDTH), np.zeros(m * 2, int)))
    finally:
        Product.__call__ = call
    return found


@pytest.mark.parametrize("p", [1, 2, 3])
def test_the_input_half_computes_no_weight_gradient_and_the_weight_half_computes_all(cluster, p):
    for schedule, m in product(("zb_h1", "zb_h2"), (1, 5)):
        for found in cluster(p).run(products_done, schedule, m, False):
            done = 0
            for name, what, products, has_gradient in found:
                assert name != "backward"
                if name == "backward_weights":
                    done += 2  # of two linear layers, however many micro-batches at once
                assert products == done and has_gradient == (done > 0), (name, what)
            halves = [i for name, i, *_ in found if name == "backward_input"]
            weights = [i for name, run, *_ in found if name == "backward_weights" for i in run]
            assert halves == weights == list(range(m))


class Slices(nn.Module):
    """Y = linear(X[:, :2]) + X[:, 2:]: what a function does to X itself may be deferred."""

    def __init__(self):
        self.linear = nn.Linear(2, 2, dtype="float64")

    def forward(self, x, randomness=None):
        return self.linear(x[:, :2]) + x[:, 2:]


@pytest.mark.parametrize("recompute", [False, True])
def test_the_input_half_gives_all_of_dx_to_the_stage_before(recompute):
    layer = Slices()
    stage = Stage([layer], first=False, last=False, recompute=recompute)
    stage.begin([Batch(arrays(3, 4), np.zeros(3, int))])
    stage.received[0], stage.output_gradients[0] = arrays(3, 4), arrays(3, 2, seed=1)
    stage.forward(0)
    stage.backward_input(0)
    dx = stage.input_gradient(0)
    dy = arrays(3, 2, seed=1)
    np.testing.assert_allclose(dx, np.hstack([dy @ layer.linear.weight.data.T, dy]))
    assert layer.linear.weight.grad is None
    stage.backward_weights([0])
    np.testing.assert_allclose(layer.linear.weight.grad, arrays(3, 4)[:, :2].T @ dy)
