"""A Transformer with experts under strategies that know nothing of them: the same gradient.

Drops and the balancing loss are decided for each example alone, so no split can change them.
"""

import copy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist import nn
from minidist.context_parallel import plain, zigzag
from minidist.rng import Randomness
from minidist.tensor_parallel.sequence_parallel import sequence_parallel
from minidist.verify.compare import BOUND
from minidist.verify.equivalence import check
from minidist.verify.strategies import Case
from minidist.verify.strategies.cases import random_weights
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
