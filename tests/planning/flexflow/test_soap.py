"""The cuts of FlexFlow: what a part is, what kind a letter has, and that none is left out."""

import math
from collections import Counter
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist.planning.flexflow import Cut, cuts, data_parallel, kinds, pieces, shared
from minidist.planning.graph import Graph, Op, Value
from tests.strategies import arrays, index_graphs

PRODUCTS = ["bi,io->bo", "bti,io->bto", "bo->bo", "bo,o->bo", "bhqd,bhkd->bhqk", "bo->", "bqk->bq"]


def graph_of(indices, n, parameters=()):
    """Return a graph of one op; n: letter -> length; parameters: which inputs are some."""
    inputs, output = indices.split("->")
    inputs = inputs.split(",")
    values = {
        f"x{i}": Value(
            f"x{i}",
            tuple(n[letter] for letter in letters),
            np.dtype("float64"),
            "parameter" if i in parameters else "input",
        )
        for i, letters in enumerate(inputs)
    }
    values["y"] = Value("y", tuple(n[letter] for letter in output), np.dtype("float64"), "result")
    return Graph(values, [Op("op", tuple(list(values)[:-1]), "y", indices)])


def taken(array, box):
    return array[tuple(slice(first, last) for first, last in box)]


@settings(max_examples=60)
@given(indices=st.sampled_from(PRODUCTS), data=st.data(), ranks=st.integers(1, 6))
def test_the_parts_compute_what_the_whole_op_does(indices, data, ranks):
    """Each part on its own boxes, and partial sums added where they are."""
    letters = sorted(set(indices) - set(",->"))
    n = {letter: data.draw(st.sampled_from([1, 2, 3, 4, 6])) for letter in letters}
    graph = graph_of(indices, n)
    cut = data.draw(st.sampled_from(cuts(graph, ranks, "SOAPR")["y"]))
    inputs, output = graph.ops[0].terms
    shapes = [graph.values[name].shape for name in graph.ops[0].inputs]
    given_arrays = [arrays(*shape, seed=i) for i, shape in enumerate(shapes)]
    want = np.einsum(indices, *given_arrays)
    boxes = [cut.boxes(x, shape) for x, shape in zip(inputs, shapes, strict=True)]
    got = np.zeros_like(want)
    for part, box in enumerate(cut.boxes(output, want.shape)):
        own = [taken(x, b[part]) for x, b in zip(given_arrays, boxes, strict=True)]
        got[tuple(slice(*side) for side in box)] += np.einsum(indices, *own)
    np.testing.assert_allclose(got, want, atol=1e-12)
    assert 0 <= cut.ranks[0] and cut.ranks[-1] < ranks


@pytest.mark.parametrize(
    "indices, parameters, want",
    [
        ("bti,io->bto", {1}, {"b": "sample", "t": "attribute", "o": "parameter", "i": "reduction"}),
        ("bto,o->bto", {1}, {"b": "sample", "t": "attribute", "o": "parameter"}),
        ("bto->bto", set(), {"b": "sample", "t": "attribute", "o": "attribute"}),
        (
            "bhqd,bhkd->bhqk",
            set(),
            {"b": "sample", "h": "attribute", "q": "attribute", "k": "attribute"},
        ),
        ("bo->", set(), {"b": "sample", "o": "reduction"}),
    ],
)
def test_letters_have_the_kinds_of_the_paper(indices, parameters, want):
    n = dict.fromkeys("bhqkdtio", 2)
    found = kinds(graph_of(indices, n, parameters))["y"]
    assert {letter: found[letter] for letter in want} == want


@given(graph=index_graphs())
def test_the_axis_of_the_examples_is_followed_through_the_graph(graph):
    found = kinds(graph)
    for op in graph.ops:
        assert found[op.output]["b"] == "sample"
        assert not op.whole & set(found[op.output])


def parts_by_hand(n, ranks):
    """Return every {letter: degree} that divides all letters into at most so many parts."""
    choices = [[(x, d) for d in range(1, ranks + 1) if size % d == 0] for x, size in n.items()]
    every = [{x: d for x, d in choice if d > 1} for choice in product(*choices)]
    return [degrees for degrees in every if math.prod(degrees.values()) <= ranks]


@given(indices=st.sampled_from(PRODUCTS), data=st.data(), ranks=st.integers(1, 6))
def test_no_cut_is_left_out_and_none_comes_twice(indices, data, ranks):
    letters = sorted(set(indices) - set(",->"))
    n = {letter: data.draw(st.sampled_from([1, 2, 3, 4, 6])) for letter in letters}
    graph = graph_of(indices, n)
    found = cuts(graph, ranks, "SOAPR")["y"]
    want = Counter()
    for degrees in parts_by_hand(n, ranks):
        orders, firsts = math.factorial(len(degrees)), ranks - math.prod(degrees.values()) + 1
        want[tuple(sorted(degrees.items()))] += orders * firsts
    assert Counter(tuple(sorted(cut.degrees)) for cut in found) == want
    assert len(set(found)) == len(found)


@given(graph=index_graphs(), ranks=st.integers(1, 4))
def test_a_dimension_more_only_adds_cuts(graph, ranks):
    spaces = [cuts(graph, ranks, dims) for dims in ("", "S", "SA", "SAP", "SOAP", "SOAPR")]
    for small, large in pairwise(spaces):
        assert all(set(small[name]) <= set(large[name]) for name in small)
    assert all(own == [Cut()] for own in spaces[0].values())
    for op in graph.ops:
        cut = data_parallel(graph, ranks)[op.output]
        B = graph.lengths(op)["b"]
        assert cut in spaces[1][op.output]
        assert cut.parts == max(d for d in range(1, ranks + 1) if B % d == 0)


sides = st.tuples(st.integers(0, 4), st.integers(0, 4)).map(sorted).map(tuple)
boxes = st.integers(0, 3).flatmap(lambda k: st.lists(st.tuples(*[sides] * k), max_size=4))


def elements(box):
    return set(product(*(range(*side) for side in box)))


@given(drawn=boxes)
def test_what_boxes_share_is_counted_element_by_element(drawn):
    for a, b in product(drawn, drawn):
        assert shared(a, b) == len(elements(a) & elements(b))
    owners = {}
    for number, box in enumerate(drawn):
        for element in elements(box):
            owners.setdefault(element, set()).add(number)
    assert pieces(list(enumerate(drawn))) == Counter(map(frozenset, owners.values()))


@pytest.mark.parametrize(
    "ranks, dims, message",
    [(2, "SOX", "'X' is no dimension of SOAP"), (0, "S", "cannot be cut over 0 ranks")],
)
def test_a_space_that_cannot_be_is_refused(ranks, dims, message):
    with pytest.raises(ValueError, match=message):
        cuts(graph_of("bo->bo", {"b": 2, "o": 2}), ranks, dims)
