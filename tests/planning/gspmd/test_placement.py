"""Placements: what they mean, their duals, and the collectives between them."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist import run
from minidist.planning.gspmd import (
    PARTIAL,
    REPLICATED,
    Partial,
    Split,
    collective,
    dual,
    part,
    redistribute,
)
from minidist.verify.mistakes.register import find
from tests.planted import planted
from tests.strategies import arrays, seeds, shapes


def placements(axes):
    return [REPLICATED, PARTIAL, *map(Split, range(axes))]


def parts_of(x, placement, size, seed=0):
    """Return what the ranks have; the terms of a partial sum are any integers."""
    if placement != PARTIAL:
        return [part(x, placement, rank, size) for rank in range(size)]
    terms = [np.rint(9 * arrays(*x.shape, seed=seed + r)) for r in range(size - 1)]
    return [*terms, x - sum(terms, start=np.zeros_like(x))]


def full(parts, placement):
    """Return X from what the ranks have: the meaning of a placement."""
    match placement:
        case Split(axis):
            return np.concatenate(parts, axis=axis)
        case Partial():
            return sum(parts[1:], start=parts[0])
    for rank, x in enumerate(parts):
        if x.shape != parts[0].shape or not np.allclose(x, parts[0], rtol=1e-9, atol=1e-12):
            raise ValueError(f"a replicated value differs on ranks 0 and {rank}")
    return parts[0]


def why_no_pair(x, dx, placement, size):
    """Say why a value and its gradient do not pair, each element once; None if they do."""
    found = sum(
        (a * b).sum()
        for a, b in zip(
            parts_of(x, placement, size), parts_of(dx, dual(placement), size, 50), strict=True
        )
    )
    want = (x * dx).sum()
    if found == want:
        return None
    if placement == dual(placement) == REPLICATED:
        return (
            f"<X, dX> is counted {size} times; the gradient of a replicated value is a partial "
            f"sum, not {dual(placement)}"
        )
    return f"<X, dX> of {placement} and {dual(placement)} is {found}, not {want}"


@pytest.mark.parametrize("placement", placements(2), ids=str)
@pytest.mark.parametrize("size", [2, 3])
def test_a_value_and_its_gradient_pair_each_element_once(placement, size):
    x, dx = (np.rint(9 * arrays(4, 5, seed=seed)) for seed in (1, 2))
    why = why_no_pair(x, dx, placement, size)
    assert why is None, why


def test_a_gradient_that_is_not_dual_is_named():
    x = np.ones((2, 2))
    with planted("gradient_not_dual"):
        assert find("gradient_not_dual").diagnosis in why_no_pair(x, x, REPLICATED, 2)


def test_the_dual_of_the_dual_is_the_placement_itself():
    assert all(dual(dual(placement)) == placement for placement in placements(3))


@given(shape=shapes(1, 3, 5), size=st.integers(1, 5), seed=seeds)
def test_the_parts_of_a_value_are_the_value(shape, size, seed):
    x = np.rint(9 * arrays(*shape, seed=seed))
    for placement in placements(len(shape)):
        np.testing.assert_array_equal(full(parts_of(x, placement, size), placement), x)
        parts = [part(x, placement, rank, size) for rank in range(size)]
        np.testing.assert_array_equal(full(parts, placement), x)


def test_ranks_that_differ_do_not_replicate():
    with pytest.raises(ValueError, match="differs on ranks 0 and 1"):
        full([np.zeros(2), np.ones(2)], REPLICATED)


def convert_all(group, x, given):
    """Return {(source, target): (this rank's part, whether bytes were sent)}."""
    found = {}
    for source, target in product(placements(x.ndim), repeat=2):
        before = group.ledger.total
        y = redistribute(given[source][group.rank], group, source, target)
        found[source, target] = y, group.ledger.total > before
    return found


@pytest.mark.parametrize("size", [1, 2, 3])
def test_between_all_placements_a_collective_keeps_the_value(size):
    x = np.rint(9 * arrays(4, 5))
    given = {placement: parts_of(x, placement, size) for placement in placements(2)}
    ranks = run(convert_all, size, x, given, transport="thread")
    for source, target in ranks[0]:
        parts = [found[source, target][0] for found in ranks]
        np.testing.assert_array_equal(full(parts, target), x, err_msg=f"{source} -> {target}")
        sent = any(found[source, target][1] for found in ranks)
        assert sent == (size > 1 and collective(source, target) is not None)
