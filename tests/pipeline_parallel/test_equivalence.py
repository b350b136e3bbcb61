"""Every synchronous schedule, on real ranks, leaves what one device does: losses, gradients, steps.

Drawn are models, batches, cuts and options; the full grid of schedules, ranks and micro-batches
runs with -m slow.
"""

from itertools import product

import numpy as np
import pytest
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
from tests.strategies import SYNCHRONOUS, chunks_of, cuts, fitting, pipelines, seeds


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


FULL = [
    (schedule, p, m)
    for schedule, p, m in product(SYNCHRONOUS, range(1, 6), range(1, 13))
    if fitting(schedule, p, m) == m
]


@pytest.mark.slow
@pytest.mark.grid(12)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["mlp", "tied", "untied"])
@pytest.mark.parametrize("schedule", SYNCHRONOUS)
def test_the_full_grid(cluster, schedule, kind):
    for number, (_, p, m) in enumerate(row for row in FULL if row[0] == schedule):
        chunks = chunks_of(schedule)
        stages = p * chunks
        if kind == "mlp":
            case = mlp_case([3 + i % 3 for i in range(stages + 2)], 7, number)
        else:
            case = transformer_case(max(0, stages - 2), 5, number, kind == "tied", 0.2)
        for recompute, last, safe in product([False, True], repeat=3):
            options = {"recompute": recompute, "weights_last": last, "rendezvous_safe": safe}
            more = {"schedule": schedule, "micro_batches": m, "chunks": chunks}
            ranks = cluster(p, "thread")  # the everyday tests take processes
            assert_equals_one_device(ranks, case, 1 + recompute, **more, **options)
