"""A Transformer with experts under strategies that know nothing of them: the same gradient.

Drops and the balancing loss are decided for each example alone, so no split can change them.
"""

import copy
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist import nn
from minidist.context_parallel import plain, zigzag
from minidist.rng import Randomness
from minidist.tensor_parallel.sequence_parallel import sequence_parallel
from minidist.tools.compare import BOUND
from minidist.tools.equivalence import check
from minidist.tools.strategies import Case
from minidist.tools.strategies.cases import random_weights
from tests.strategies import gradients, seeds

SPLITS = {
    "naive": {"micro_batches": 2},
    "zero_2": {"micro_batches": 2},
    "zero_3": {},
    "parameter_server": {},
    "gpipe": {"micro_batches": 3},
    "1f1b": {"recompute": True},
    "zb_v": {"micro_batches": 5},
    "interleaved": {"micro_batches": 3},
    "hybrid": {"dp": 3, "micro_batches": 2},
    "attention": {},
    "pipedream": {"minibatches": 4},
}


def experts_case(k=2, capacity=0.75, depth=4):
    tokens, nexts = np.random.default_rng(5).integers(0, 11, (2, 5, 6))
    options = {"experts": 3, "top_k": k, "capacity": capacity, "balance": 0.3}
    model = nn.Transformer(11, 6, 3, depth, 6, 1, "float64", 0.1, True, **options)
    return Case("experts", model, tokens, nexts)


@pytest.mark.parametrize("strategy", SPLITS)
def test_a_strategy_that_knows_no_experts_computes_one_device_s_gradient(cluster, strategy):
    case = replace(experts_case(), options=SPLITS[strategy])
    if strategy in ("zero_3", "pipedream"):
        untied = nn.Transformer(11, 6, 3, 2, 6, 1, "float64", experts=3)
        case = replace(case, model=untied)
    row = check(strategy, case, 3, cluster(3, "thread"))
    assert row["error"] <= BOUND, row["detail"]
    assert strategy == "hybrid" or row["ok"], row["detail"]


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"pp": 2}, {"dp": 2, "pp": 2}, {"tp": 4}])
@pytest.mark.parametrize("capacity", [None, 0.5])
def test_a_mesh_splits_the_matrices_of_each_expert(cluster, mesh, capacity):
    case, mesh = experts_case(1, capacity), {"dp": 1, "pp": 1} | mesh
    experts = {"experts": 3, "top_k": 1, "capacity": capacity}
    model = nn.Transformer(11, 8, 4, 2, 6, 1, "float64", **experts)
    row = check("hybrid", replace(case, model=model, options=mesh), 4, cluster(4))
    assert row["error"] <= BOUND, row["detail"]


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
        sequence_parallel(experts_case().model, None)
