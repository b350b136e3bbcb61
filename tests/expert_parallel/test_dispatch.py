"""Rows go to the ranks of their experts and back: the routes as a value, the result, the bytes."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist import nn
from minidist.expert_parallel import Dispatch
from minidist.nn.mixture_of_experts import run_each
from minidist.pieces import split_ends
from tests.strategies import arrays, leaf, seeds


@st.composite
def loads(draw):
    """Draw the rows that each of N ranks has for each expert, [N, E]; many have none."""
    N, E, random = draw(st.integers(1, 4)), draw(st.integers(1, 6)), draw(seeds)
    return np.random.default_rng(random).integers(0, 4, (N, E)) * draw(st.integers(0, 1))


def through_experts(group, rows, seed):
    """Return (Y, dX, gradients of the own experts, bytes) of one rank."""
    N, E = rows.shape
    experts = [nn.Expert(3, name=str(e), dtype="float64") for e in range(E)]
    ends, load = split_ends(E, N), rows[group.rank]
    own = experts[ends[group.rank] : ends[group.rank + 1]]
    x = leaf(load.sum(), 3, seed=seed + group.rank)
    y = Dispatch(group, ends)(own, x, load)
    y.backward(arrays(*y.shape, seed=seed + 10 + group.rank))
    grads = {p.name: p.grad for expert in own for p in expert.parameters()}
    return y.data, x.grad, grads, group.ledger.total


@given(loads(), st.integers(0, 2**31))
@settings(max_examples=15)
def test_results_and_gradients_are_those_of_all_experts_on_one_device(cluster, rows, seed):
    N, E = rows.shape
    found = cluster(N, "thread").run(through_experts, rows, seed)
    experts, moved = [nn.Expert(3, name=str(e), dtype="float64") for e in range(E)], 0
    ends = split_ends(E, N)
    for r, (y, dx, _, _) in enumerate(found):
        x = leaf(rows[r].sum(), 3, seed=seed + r)
        want = run_each(experts, x, rows[r])
        np.testing.assert_allclose(y, want.data, rtol=1e-12)
        want.backward(arrays(*want.shape, seed=seed + 10 + r))
        np.testing.assert_allclose(dx, x.grad, rtol=1e-12)
        moved += 4 * 3 * 8 * (rows[r].sum() - rows[r, ends[r] : ends[r + 1]].sum())
    assert sum(sent for *_, sent in found) == moved + (N - 1) * E * 8
    grads = {name: g for _, _, own, _ in found for name, g in own.items()}
    assert len(grads) == sum(len(own) for _, _, own, _ in found)  # each on one rank
    for p in (p for expert in experts for p in expert.parameters()):
        np.testing.assert_allclose(grads[p.name], p.grad, rtol=1e-9, atol=1e-12, err_msg=p.name)
