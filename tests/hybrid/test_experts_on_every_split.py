"""A Transformer with experts under strategies that know nothing of them: the same gradient.

Drops and the balancing loss are decided for each example alone, so no split can change them.
"""

import copy
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist import nn, optim
from minidist.comm import Mesh
from minidist.context_parallel import plain, zigzag
from minidist.data_parallel.replicated import DataParallel
from minidist.hybrid import Hybrid
from minidist.nn.datasets import Batch
from minidist.rng import Randomness
from minidist.tensor_parallel.sequence_parallel import sequence_parallel
from minidist.verify.compare import BOUND, compare
from minidist.verify.equivalence import check
from minidist.verify.strategies import Case
from minidist.verify.strategies.cases import random_weights, todays_experts
from tests.strategies import gradients, seeds


@given(seeds, st.integers(1, 3), st.sampled_from([None, 0.5, 1.25]))
def test_parts_of_a_batch_add_up_to_its_gradient_and_drop_the_same(seed, parts, capacity):
    options = {"experts": 3, "capacity": capacity, "balance": 0.3}
    whole = nn.Transformer(7, 4, 2, 1, 5, 3, "float64", dropout=0.2, **options)
    tokens, targets = np.random.default_rng(seed).integers(0, 7, (2, 4, 5))
    cut, reports = copy.deepcopy(whole), []
    nn.cross_entropy(whole(tokens, Randomness(0, 0, np.arange(4))), targets).backward()
    for rows in np.array_split(np.arange(4), parts):
        logits = cut(tokens[rows], Randomness(0, 0, rows, batch=4))
        nn.cross_entropy(logits, targets[rows], targets.size).backward()
        reports.append(cut.layers[1].mixture.report)
    want = whole.layers[1].mixture.report
    for name, g in gradients(cut).items():
        np.testing.assert_allclose(g, gradients(whole)[name], rtol=1e-9, atol=1e-12, err_msg=name)
    np.testing.assert_array_equal(sum(r.load for r in reports), want.load)
    np.testing.assert_array_equal(sum(r.dropped for r in reports), want.dropped)
    assert sum(r.balance for r in reports) == pytest.approx(want.balance)


def test_a_rank_without_an_expert_has_the_copies_of_shared_ones_in_the_same_runs(cluster):
    options = {"experts": 1, "top_k": 1, "shared": 2}
    model = nn.Transformer(7, 4, 2, 2, 5, 3, "float64", **options)
    tokens, targets = np.random.default_rng(0).integers(0, 7, (2, 4, 5))
    case = Case("one", random_weights(model), tokens, targets, options={"dp": 2, "ep": 2})
    row = check("hybrid", case, 2, cluster(2, "thread"))
    assert row["ok"], row["detail"]


@settings(max_examples=15)
@given(
    attention=st.sampled_from(["ring_attention", "ulysses"]),
    cut=st.sampled_from([plain, zigzag]),
    size=st.integers(2, 3),
    more=st.integers(0, 6),
    k=st.integers(1, 3),
    capacity=st.sampled_from([None, 0.3, 0.75]),
    seed=seeds,
)
def test_any_cut_of_a_sequence_drops_and_balances_as_one_device(
    cluster, attention, cut, size, more, k, capacity, seed
):
    T = size + more
    options = {"experts": 3, "top_k": k, "capacity": capacity, "balance": 0.5}
    model = nn.Transformer(7, 12, 6, 2, T, 2, "float64", 0.2, **options)
    tokens, targets = np.random.default_rng(seed).integers(0, 7, (2, 2, T))
    case = Case("drawn", random_weights(model), tokens, targets, seed=seed, options={"cut": cut})
    row = check(attention, case, size, cluster(size, "thread"))
    assert row["error"] <= BOUND, row["detail"]


def test_a_sequence_that_is_split_between_the_matrices_is_refused():
    with pytest.raises(ValueError, match="show a mixture of experts a part of each sequence"):
        sequence_parallel(nn.Transformer(11, 6, 3, 2, 6, experts=3), None)


def meshes(most):
    """Yield (ranks, axes) of every mesh of up to so many ranks, with every ep that divides dp."""
    sizes = range(1, most + 1)
    for dp, pp, cp, tp in product(sizes, (1, 2), sizes, sizes):
        if dp * pp * cp * tp <= most and 8 % tp == 0:
            for ep in (n for n in range(1, dp + 1) if dp % n == 0):
                yield dp * pp * cp * tp, {"dp": dp, "pp": pp, "cp": cp, "ep": ep}


MESHES = list(meshes(8))
FEW = [MESHES[n] for n in range(7, len(MESHES), len(MESHES) // 5)]


def assert_certified(cluster, size, axes, dispatch):
    tokens, targets = np.random.default_rng(size).integers(0, 11, (2, 5, 8))
    options = axes | {"dispatch": dispatch, "micro_batches": 2}
    case = Case("today's experts", todays_experts(16, 8), tokens, targets, options=options)
    row = check("hybrid", case, size, cluster(size, "thread"))
    assert row["ok"], row["detail"]


@pytest.mark.parametrize("size, axes", FEW)
def test_todays_experts_are_one_device_s_on_a_mesh(cluster, size, axes):
    for dispatch in ("rows", "positions"):
        assert_certified(cluster, size, axes, dispatch)


@pytest.mark.slow
@pytest.mark.grid(20)
@pytest.mark.parametrize("dispatch", ["rows", "positions"])
@pytest.mark.parametrize("size, axes", MESHES)
def test_todays_experts_are_one_device_s_on_every_mesh_of_up_to_8_ranks(
    cluster, size, axes, dispatch
):
    assert_certified(cluster, size, axes, dispatch)


def steps(trainer, optimizer, count=4):
    for step in range(count):
        tokens, targets = np.random.default_rng(step).integers(0, 11, (2, 5, 8))
        trainer.backward(Batch(tokens, targets, step=step))
        optimizer.clip_global_norm(0.5, trainer.sum_squares)
        trainer.step(optimizer)
    return trainer.state()


@pytest.mark.parametrize(
    "size, axes",
    [(2, {"dp": 2}), (2, {"pp": 2, "tp": 1}), (4, {"dp": 2, "ep": 2}), (4, {"cp": 2, "dp": 2})],
)
@pytest.mark.parametrize("zero", [0, 1])
def test_weights_and_biases_after_some_steps_are_one_device_s(cluster, size, axes, zero):
    def worker(group, alone):
        if alone:
            trainer = DataParallel(todays_experts(16, 8), group)
        else:
            own = {"dp": 1, "pp": 1, "cp": 1} | {n: k for n, k in axes.items() if n != "ep"}
            mesh = Mesh(group, **own | {"tp": group.size // np.prod(list(own.values()))})
            trainer = Hybrid(todays_experts(16, 8), mesh, ep=axes.get("ep", 1), zero=zero)
        return steps(trainer, optim.SGD(trainer.parameters(), lr=0.1))

    (want,) = cluster(1, "thread").run(worker, True)
    first = todays_experts(16, 8).state()
    biases = [name for name in want if name.endswith("choice_bias")]
    assert len(biases) == 2 and all((want[name] != first[name]).any() for name in biases)
    assert compare(cluster(size, "thread").run(worker, False), want).ok
