"""Every synchronous schedule, on real ranks, leaves what one device does: losses, gradients, steps.

Drawn are models, batches, cuts and options; the full grid of schedules, ranks and micro-batches
runs with -m slow.
"""

from itertools import product

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from minidist import datasets, nn, optim
from minidist.pipeline_parallel import Pipeline
from minidist.tools.strategies import Case
from minidist.tools.strategies.cases import translator_case
from tests.pipeline_parallel.training import (
    STEPS,
    assert_equals_one_device,
    mlp_case,
    transformer_case,
)
from tests.strategies import SYNCHRONOUS, chunks_of, cuts, fitting, pipelines, seeds


@settings(max_examples=50)
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


@settings(max_examples=40)
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
def test_in_float32_within_its_own_bound(cluster, pipeline, seed):
    """1e-4 of the largest element, where float64 is held to 1e-9; SGD, since Adam divides by what
    may be rounding.
    """
    case = mlp_case([5, *[4] * pipeline["stages"], 3], 6, seed, dtype="float32")
    options = {"optimizer": sgd, **pipeline["options"]}
    assert_equals_one_device(cluster(pipeline["p"]), case, STEPS, bound=1e-4, **options)


def sgd(parameters):
    return optim.SGD(parameters, lr=0.1, momentum=0.9)


@settings(max_examples=20)
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


@pytest.mark.parametrize("schedule", SYNCHRONOUS)
@pytest.mark.parametrize("p", [1, 2, 3])
def test_a_residual_network_on_the_digits_cut_by_layers(cluster, schedule, p):
    images, labels = datasets.digits()
    model = nn.ResidualMLP(64, 12, 4, 10, dtype="float64")
    case = Case("residual", model, images[:14].astype("float64"), labels[:14])
    options = {"schedule": schedule, "micro_batches": 6, "chunks": chunks_of(schedule)}
    assert_equals_one_device(cluster(p), case, STEPS, **options)


ODD_CUT = [range(1), range(1, 5), range(5, 6)]  # within the encoder, behind the last block
TRANSLATED = [
    (2, {"schedule": "gpipe", "micro_batches": 3, "cut": [range(5), range(5, 6)]}),
    (3, {"schedule": "1f1b", "micro_batches": 4, "cut": ODD_CUT, "recompute": True}),
    (4, {"schedule": "1f1b", "micro_batches": 9, "rendezvous_safe": True}),
    (3, {"schedule": "interleaved", "micro_batches": 3, "chunks": 2, "recompute": True}),
    (2, {"schedule": "zb_h1", "micro_batches": 2, "cut": [range(3), range(3, 6)]}),
    (4, {"schedule": "zb_h1", "micro_batches": 5, "recompute": True, "weights_last": True}),
]


@pytest.mark.parametrize("p, options", TRANSLATED, ids=str)
def test_a_seq2seq_whose_source_and_target_pass_all_boundaries_in_one_array(cluster, p, options):
    """Seven examples, of which one has an empty source; in micro-batches of 0 to 4."""
    assert_equals_one_device(cluster(p, "thread"), translator_case(depth=2), 2, **options)


def test_what_a_seq2seq_sends_over_each_boundary_and_back(cluster):
    """All of X[B, S + T, C + 1] up to the last decoder block, which passes on X[B, T, C]."""

    def worker(group, case):
        Pipeline(case.model, group, "1f1b", 3, loss=case.loss).backward(case.inputs, case.targets)
        return group.ledger.total

    case = translator_case(width=6)
    (B, T), C = case.targets.shape, 6
    whole, target = 8 * B * case.inputs.shape[1] * (C + 1), 8 * B * T * C
    found = cluster(4, "thread").run(worker, case)
    assert found == [whole, 2 * whole, whole + target, target]


FULL = [
    (schedule, p, m)
    for schedule, p, m in product(SYNCHRONOUS, range(1, 6), range(1, 13))
    if fitting(schedule, p, m) == m
]


@pytest.mark.slow
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
            assert_equals_one_device(cluster(p), case, 1 + recompute, **more, **options)
