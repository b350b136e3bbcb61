"""A position travels once to each rank of its experts: who travels, the result, bytes, memory."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist import nn
from minidist.autograd.gradient_check import gradcheck
from minidist.expert_parallel import keep_own_experts
from minidist.expert_parallel.once_per_rank import SumInto, travellers
from minidist.nn.router import choose, route
from minidist.pieces import split_ends
from minidist.verify.equivalence import check
from minidist.verify.strategies import Case
from minidist.verify.strategies.cases import todays_experts
from tests.strategies import arrays, leaf, seeds


@st.composite
def batches(draw):
    """Draw the choices of N ranks, chosen[N][positions, k], and the number of experts."""
    N, E = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    random, k = np.random.default_rng(draw(seeds)), draw(st.integers(1, E))
    sizes = draw(st.lists(st.integers(0, 5), min_size=N, max_size=N))
    return [choose(random.random((1, n, E)), k)[0] for n in sizes], E


def rows_of(chosen, E):
    """Return (position of each row, load), rows sorted by expert."""
    routing = route(chosen[None], E)
    return routing.order() // chosen.shape[1], routing.load


@given(batches())
def test_each_position_travels_once_to_each_rank_that_has_an_expert_of_it(drawn):
    ranks, E = drawn
    ends = split_ends(E, len(ranks))
    for chosen in ranks:
        who, places = travellers(*rows_of(chosen, E), ends)
        for (a, b), there, place in zip(pairwise(ends), who, places, strict=True):
            inside = (chosen >= a) & (chosen < b)
            assert there.tolist() == np.flatnonzero(inside.any(axis=1)).tolist()
            rows = sorted((e, n) for n, row in enumerate(chosen) for e in row if a <= e < b)
            assert there[place].tolist() == [n for _, n in rows]


def through(group, ranks, E, once, seed):
    """Return (Y, dX, dg, gradients of the own experts) of one rank."""
    layer = nn.MixtureOfExperts(3, E, top_k=1, dtype="float64")
    position, load = rows_of(ranks[group.rank], E)
    x = leaf(len(ranks[group.rank]), 3, seed=seed + group.rank)
    g = leaf(len(position), 1, seed=seed + 10 + group.rank)
    keep_own_experts(layer, group, "positions" if once else "rows")
    y = (layer.run_positions or layer.run_rows)(layer.experts, x, g, position, load)
    y.backward(arrays(*y.shape, seed=seed + 20 + group.rank))
    grads = {p.name: p.grad for expert in layer.experts for p in expert.parameters()}
    return y.data, x.grad, g.grad, grads


@given(batches(), st.integers(0, 2**31))
@settings(max_examples=15)
def test_results_and_gradients_are_those_of_rows_that_travel_one_by_one(cluster, drawn, seed):
    ranks, E = drawn
    both = [
        cluster(len(ranks), "thread").run(through, ranks, E, once, seed) for once in (True, False)
    ]
    for (y, dx, dg, grads), (*rows, want) in zip(*both, strict=True):
        for a, b in zip((y, dx, dg), rows, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)
        assert grads.keys() == want.keys()
        for name, grad in want.items():
            np.testing.assert_allclose(grads[name], grad, rtol=1e-9, atol=1e-12, err_msg=name)


def test_sums_of_rows_pass_their_gradient_back():
    position = np.array([2, 0, 2, 2])
    gradcheck(lambda x: SumInto(position, 4)(x), arrays(4, 3))
    assert not SumInto(position, 4)(leaf(4, 3)).data[[1, 3]].any()


def case_of(model, examples=5, **options):
    tokens, nexts = np.random.default_rng(2).integers(0, 11, (2, examples, 8))
    return Case("todays experts", model, tokens, nexts, options=options)


FROZEN = {
    "all but the gates": lambda name: ".gate.weight" in name,
    "all but experts of one rank": lambda name: "blocks.1.experts.0" in name,
    "experts and all before": lambda name: name.startswith("head"),
    "embedding and experts": lambda name: not ("experts" in name or "embedding" in name),
}


@pytest.mark.parametrize("trains", FROZEN)
def test_frozen_parts_need_no_journey_back(cluster, ledgers, trains):
    """Of X, Y, dY and dX travel those that are needed, and no others."""
    model = todays_experts()
    model.freeze(*[n for n in model.named_parameters() if not FROZEN[trains](n)])
    case = case_of(model, dispatch="positions")
    case = replace(case, name=f"{case.name}, {trains}")
    row = check("expert", case, 2, cluster(2, "thread"))
    assert row["ok"], row["detail"]
    ledgers.check(row)


def test_groups_bound_the_ranks_that_a_position_travels_to_and_so_the_bytes(cluster):
    """4 of 8 experts in at most 2 of 4 groups, a group on each rank."""

    def sent(group, dispatch):
        layer = nn.MixtureOfExperts(
            64, 8, top_k=4, capacity=None, groups=4, most_groups=2, dtype="float64"
        )
        keep_own_experts(layer, group, dispatch)
        y = layer(leaf(1, 32, 64, seed=group.rank))
        y.backward(np.ones(y.shape))
        return group.ledger.total

    rows, once = (sum(cluster(4, "thread").run(sent, way)) for way in ("rows", "positions"))
    most = 4 * 4 * 32 * 2 * 64 * 8  # journeys, ranks, positions, groups, C, bytes
    assert once < 0.55 * rows and once < most < rows
