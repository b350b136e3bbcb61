"""Every synchronous schedule, on real ranks, leaves what one device does: losses, gradients, steps.

Drawn are models, batches, cuts and options.
"""

import numpy as np
from hypothesis import event, given, settings
from hypothesis import strategies as st

from minidist import nn, optim
from minidist.verify.strategies import Case
from tests.pipeline_parallel.training import (
    STEPS,
    assert_equals_one_device,
    mlp_case,
    transformer_case,
)
from tests.strategies import cuts, pipelines, seeds


@settings(max_examples=25)
@given(pipeline=pipelines(), data=st.data(), seed=seeds)
def test_an_mlp(cluster, pipeline, data, seed):
    """Uneven layers and cuts; some parameters frozen; a batch from one example."""
    stages = pipeline["stages"]
    layers = stages + data.draw(st.integers(0, 2))
    widths = data.draw(st.lists(st.integers(1, 6), min_size=layers + 1, max_size=layers + 1))
    widths[-1] = max(2, widths[-1])
    examples = data.draw(st.integers(1, 9))
    case = mlp_case(widths, examples, seed, data.draw(st.sampled_from(["relu", "gelu"])))
    names = list(case.model.named_parameters())
    if frozen := data.draw(st.sets(st.sampled_from(names), max_size=3)):
        case.model.freeze(*frozen)
    cut = data.draw(st.none() | cuts(layers, stages))
    m = pipeline["options"]["micro_batches"]
    event("m > examples" if m > examples else "m <= examples")
    event("m < stages" if m < stages else "m >= stages")
    assert_equals_one_device(cluster(pipeline["p"]), case, STEPS, cut=cut, **pipeline["options"])


@settings(max_examples=20)
@given(
    pipeline=pipelines(),
    data=st.data(),
    seed=seeds,
    tied=st.booleans(),
    dropout=st.sampled_from([0.0, 0.3]),
)
def test_a_transformer(cluster, pipeline, data, seed, tied, dropout):
    """Tied and not, with dropout and without."""
    stages = pipeline["stages"]
    layers = max(2, stages) + data.draw(st.integers(0, 1))
    examples = data.draw(st.integers(1, 6))
    case = transformer_case(layers - 2, examples, seed, tied, dropout)
    if data.draw(st.booleans()):
        names = list(case.model.named_parameters())
        case.model.freeze(data.draw(st.sampled_from(names)))
    cut = data.draw(st.none() | cuts(layers, stages))
    assert_equals_one_device(cluster(pipeline["p"]), case, STEPS, cut=cut, **pipeline["options"])


@settings(max_examples=10)
@given(pipeline=pipelines(), seed=seeds)
def test_small_integers_come_out_equal_to_the_last_bit(cluster, pipeline, seed):
    """ReLU, squared error, 2^k targets: every sum is exact, in whatever order."""
    random = np.random.default_rng(seed)
    model = nn.MLP([4, *[3] * (pipeline["stages"] - 1), 4], "relu", dtype="float64")
    for p in model.parameters():
        p.data[...] = random.integers(-2, 3, p.shape)
    x, y = random.integers(-2, 3, (2, 8, 4)).astype(float)
    case = Case("integers", model, x, y, nn.squared_error)
    rule = {"optimizer": halves}
    ranks = cluster(pipeline["p"])
    assert_equals_one_device(ranks, case, 1, bound=0.0, **rule, **pipeline["options"])


def halves(parameters):
    return optim.SGD(parameters, lr=2.0**-4)
