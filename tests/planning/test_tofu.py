"""Tofu's cuts, against ranks that count what they fetch, and against all cuts there are."""

from functools import cache
from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist.pieces import prime_factors
from minidist.planning import tofu
from minidist.planning.graph import Graph, Value
from minidist.planning.tofu import (
    Work,
    axes_of,
    bytes_of,
    coalesced,
    least,
    works_of,
)
from tests.planning.test_graphs import layers

EXPRESSIONS = ["bi,io->bo", "bi,io->bio", "bi,bi->", "bi->bi", "bi->ib", "b,i->bi", "bij,jk->bik"]


def part(shape, axes, rank, factors):
    """Return the elements, as a mask, of the part whose digits are `rank`, if so cut."""
    mask, place = np.ones(shape, bool), 1
    for axis, digit, k in zip(axes, rank, factors, strict=True):
        if axis is None:
            mask &= digit == 0
        elif axis >= 0:
            where = np.arange(shape[axis]) // place % k == digit
            mask &= where.reshape([-1 if i == axis else 1 for i in range(len(shape))])
        place *= k
    return mask


def needed(letters, own):
    """Return the axes of a value that an op's letters cut; -1: none, all of it is needed."""
    return [None if letter is None else own.find(letter) for letter in letters]


def fetched(shapes, letters, indices, kept, factors):
    """Return the elements that travel between ranks, counted one by one."""
    total = 0
    for rank in product(*map(range, factors)):
        for shape, own, axes in zip(shapes, indices, kept, strict=True):
            here = part(shape, needed(letters, own), rank, factors)
            total += int((here & ~part(shape, axes, rank, factors)).sum())
    return total


@st.composite
def one_op(draw):
    """Draw (factors, an op's letters of each operand, shapes, what each step cuts)."""
    factors = draw(st.sampled_from([(2,), (3,), (2, 2), (3, 2), (2, 2, 2)]))
    inputs, output = draw(st.sampled_from(EXPRESSIONS)).split("->")
    indices = [*inputs.split(","), output]
    N = int(np.prod(factors))
    n = {letter: N * draw(st.integers(1, 2)) for letter in sorted({*"".join(indices)})}
    shapes = [tuple(n[letter] for letter in own) for own in indices]
    letters = tuple(draw(st.sampled_from(sorted(n))) for _ in factors)
    kept = [
        tuple(draw(st.sampled_from(range(len(own)))) if own else None for _ in factors)
        for own in indices
    ]
    return factors, indices, shapes, letters, kept


def bytes_by_formula(factors, indices, shapes, letters, kept):
    names = [f"v{i}" for i in range(len(shapes))]
    values = {
        name: Value(name, shape, np.dtype("float64"), "result")
        for name, shape in zip(names, shapes, strict=True)
    }
    work = Work("op", tuple(zip(names, indices, strict=True)), ())
    return bytes_of(Graph(values, []), work, letters, kept, factors)


def test_partial_sums_travel_and_what_is_forgotten_is_named():
    """bi,io->bo cut along i by 2 ranks: each sends half of its sum of Y to the other."""
    shapes, indices = [(2, 4), (4, 6), (2, 6)], ["bi", "io", "bo"]
    found = bytes_by_formula((2,), indices, shapes, "i", [(1,), (0,), (1,)])
    assert found == 8 * 2 * 6, f"partial sums of Y are not reduced: {found} of 96 bytes travel"


@given(one_op())
def test_the_bytes_of_an_op_are_those_that_ranks_count(drawn):
    factors, indices, shapes, letters, kept = drawn
    found = fetched(shapes, letters, indices, kept, factors)
    assert bytes_by_formula(*drawn) == 8 * found


@st.composite
def sums(draw):
    """Draw terms over a few variables, in an order in which variables come and go."""
    names = "uvwxyz"[: draw(st.integers(1, 6))]
    options = {name: list(range(draw(st.integers(1, 3)))) for name in names}
    seed, terms = draw(st.integers(0, 2**31)), []
    for i in range(draw(st.integers(1, 7))):
        own = draw(st.lists(st.sampled_from(names), min_size=1, max_size=3))
        terms.append((own, cache(lambda *choice, i=i: hash((seed, i, choice)) % 50)))
    return terms, options


def total(terms, chosen):
    return sum(cost(*(chosen[name] for name in names)) for names, cost in terms)


@given(sums())
def test_dynamic_programming_finds_the_least_sum(drawn):
    terms, options = drawn
    every = [dict(zip(options, choice, strict=True)) for choice in product(*options.values())]
    best, found = min(total(terms, chosen) for chosen in every), total(terms, least(terms, options))
    assert found == best, f"not the least sum: {found}, although {best} is possible"


def fewest_bytes(graph, ranks, free=False):
    """Return the fewest bytes of all cuts of all values and ops, in all their steps at once.

    free  values that are cut alike in the coarsened graph may be cut differently
    """
    factors, works = prime_factors(ranks), works_of(graph, ranks)
    first = {name: name for name in graph.values} if free else coalesced(graph)
    roots = [*dict.fromkeys(first.values())]

    @cache
    def of_work(i, kept):
        letters = product(works[i].letters, repeat=len(factors))
        return min(bytes_of(graph, works[i], own, kept, factors) for own in letters)

    axes = [product(axes_of(graph, name, ranks), repeat=len(factors)) for name in roots]
    best = float("inf")
    for choice in product(*axes):
        kept, found = dict(zip(roots, choice, strict=True)), 0
        for i, work in enumerate(works):
            found += of_work(i, tuple(kept[first[name]] for name, _ in work.operands))
            if found >= best:
                break
        best = min(best, found)
    return best


lengths = st.integers(1, 12).map(lambda n: 4 * n)


@given(lengths, st.lists(lengths, min_size=2, max_size=4))
def test_two_ranks_send_the_fewest_bytes_of_all_cuts(B, widths):
    graph = layers(B, widths)
    assert tofu(graph, 2)[1] == fewest_bytes(graph, 2) == fewest_bytes(graph, 2, free=True)


def of_halves(B, widths):
    """Return the bytes of cuts into halves of halves, and into all four parts at once."""
    graph = layers(B, widths)
    return tofu(graph, 4)[1], tofu(graph, 4, together=2)[1]


@settings(max_examples=6)
@given(lengths, st.lists(lengths, min_size=2, max_size=2))
def test_four_parts_at_once_send_the_fewest_bytes_of_all_cuts(B, widths):
    assert of_halves(B, widths) == (fewest_bytes(layers(B, widths), 4),) * 2


def test_halves_of_halves_may_miss_the_best_cuts():
    assert of_halves(8, [4, 12, 16]) == (7680, 7296)


def test_a_small_batch_is_cut_into_columns_and_rows():
    cuts, found = tofu(layers(8, [64, 256, 8]), 4)
    assert (cuts.ops["y0"], cuts.ops["y1"]) == (("o", "o"), ("o", "o"))
    assert (cuts.values["V"], cuts.values["W"]) == ((1, 1), (0, 0))
    x, y = 8 * 8 * 64, 8 * 8 * 8
    # x is fetched for y0 and dV, y1 reduced, dy1 fetched for dW and dh0, dx reduced
    assert found == 3 * (3 * x + 3 * y)


def test_every_rank_has_an_equal_part_of_every_value():
    graph = layers(24, [12, 36, 48])
    for ranks in (1, 2, 6):
        cuts, found = tofu(graph, ranks)
        assert int(np.prod(cuts.factors)) == ranks and (found > 0) == (ranks > 1)
        for name, value in graph.values.items():
            for rank in product(*map(range, cuts.factors)):
                mine = part(value.shape, cuts.values[name], rank, cuts.factors)
                assert mine.sum() * ranks == mine.size
