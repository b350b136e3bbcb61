"""Every op's rules against brute force: all placements of its inputs and of its output."""

from itertools import product

import numpy as np
import pytest

from minidist.pieces import split_ends
from minidist.planning.computation import compute
from minidist.planning.graph import Op, adjoint, d
from minidist.planning.gspmd import PARTIAL, Rule, Split, adjoint_rule, cut, repeated, rules
from minidist.verify.mistakes.register import find
from tests.planning.gspmd.test_placement import full, parts_of, placements
from tests.planted import planted
from tests.strategies import arrays

LENGTHS = dict(zip("abcdefgh", (4, 5, 3, 6, 4, 5, 4, 4), strict=True))
FORWARD = [
    Op("matmul", ("x", "w"), "y", "ac,cb->ab"),
    Op("matmul", ("x", "w"), "y", "abc,dc->abd"),
    Op("add", ("x", "w"), "y", "ab,ab->ab"),
    Op("add", ("x", "w"), "y", "ab,b->ab"),
    Op("multiply", ("x", "w"), "y", "ab,b->ba"),
    Op("sum", ("x",), "y", "abc->ac"),
    Op("take", ("x",), "y", "abc->cb", frozenset("a"), (2,)),
    Op("slice", ("x",), "y", "db->cb", frozenset("dc"), (1, 4)),
    Op("embedding", ("inputs", "w"), "y", "ab,dc->abc"),
    *(Op(kind, ("x",), "y", "ab->ba") for kind in ("relu", "gelu_tanh", "gelu_erf", "exp", "log")),
    *(Op(kind, ("x",), "y", "abc->abc", frozenset("b")) for kind in ("softmax", "log_softmax")),
    Op("causal_softmax", ("x",), "y", "baeg->baeg", frozenset("eg"), (0.5,)),
    Op("normalize", ("x",), "y", "abc->abc", frozenset("bc"), (1e-5,)),
    Op("cross_entropy", ("x", "targets"), "y", "abc,ab->", frozenset("c"), (20,)),
    Op("squared_error", ("x", "targets"), "y", "ab,ab->", frozenset(), (20,)),
]
BACKWARD = [
    adjoint(op, place, f"dx{place}")
    for op in FORWARD
    for place, name in enumerate(op.inputs)
    if name not in ("inputs", "targets")
]


def words(op):
    return f"{op.kind} {op.indices}"


def whole_inputs(op):
    """Return an array for each input: positive, so that a log has a value; or tokens, classes."""
    found = []
    for i, (name, term) in enumerate(zip(op.inputs, op.terms[0], strict=True)):
        shape = [LENGTHS[letter] for letter in term]
        x = np.abs(arrays(*shape, seed=i)) + 0.1
        integers = name == "inputs" or (name == "targets" and "cross" in op.kind)
        found.append((x * 2).astype(int) % 3 if integers else x)
    return found


def spans(op, placed, rank, size):
    """Return this rank's part of each letter that a placement splits."""
    found = {letter: (0, LENGTHS[letter]) for letter in op.letters}
    for term, placement in zip((*op.terms[0], op.terms[1]), placed, strict=False):
        if isinstance(placement, Split):
            ends = split_ends(LENGTHS[term[placement.axis]], size)
            found[term[placement.axis]] = ends[rank], ends[rank + 1]
    return found


def computed(op, rule, size=3):
    """Return the output's parts if each rank computes from its parts; None if it cannot."""
    given = [
        parts_of(x, placement, size, 70 + i)
        for i, (x, placement) in enumerate(zip(whole_inputs(op), rule.inputs, strict=True))
    ]
    try:
        with np.errstate(all="ignore"):
            return [
                compute(
                    op, [x[rank] for x in given], spans(op, (*rule.inputs, rule.output), rank, size)
                )
                for rank in range(size)
            ]
    except (ValueError, IndexError):
        return None


def wanted(op):
    return compute(op, whole_inputs(op), spans(op, repeated(op).inputs, 0, 1))


def makes(parts, placement, want):
    """Return whether these parts, in this placement, are the value."""
    try:
        whole = full(parts, placement)
    except ValueError:
        return False
    return whole.shape == want.shape and np.allclose(whole, want, rtol=1e-9, atol=1e-12)


def why_wrong(op, rule):
    """Say why a rule does not compute the op; None if it does."""
    want, parts = wanted(op), computed(op, rule)
    if parts is not None and makes(parts, rule.output, want):
        return None
    told = f"{words(op)} from {' '.join(map(str, rule.inputs))} to {rule.output}"
    cuts = [
        term[placement.axis]
        for term, placement in zip(
            (*op.terms[0], op.terms[1]), (*rule.inputs, rule.output), strict=True
        )
        if isinstance(placement, Split)
    ]
    if set(cuts) & op.whole:
        return f"{told}: {op.kind} cannot be cut by {cuts[0]}"
    if parts is not None and makes(parts, PARTIAL, want):
        return f"{told} forgets that the parts are terms of a sum"
    return f"{told} computes something else"


@pytest.mark.parametrize("op", [*FORWARD, *BACKWARD], ids=words)
def test_every_rule_computes_the_op(op):
    for rule in rules(op):
        why = why_wrong(op, rule)
        assert why is None, why


@pytest.mark.parametrize("name", ["partial_sum_forgotten", "whole_letter_cut"])
def test_what_a_wrong_rule_does_is_named(name):
    with planted(name):
        found = [why_wrong(op, rule) for op in FORWARD for rule in rules(op)]
    told = [why for why in found if why]
    assert told
    assert all(find(name).diagnosis in why for why in told)


@pytest.mark.parametrize("op", [*FORWARD, *BACKWARD], ids=words)
def test_no_other_placements_compute_the_op(op):
    """All placements of all inputs and of the output, by brute force."""
    want, found = wanted(op), set()
    choices = [
        placements(x.ndim)
        if x.dtype.kind == "f"
        else [p for p in placements(x.ndim) if p != PARTIAL]
        for x in whole_inputs(op)
    ]
    for inputs in product(*choices):
        for output in placements(want.ndim):
            rule = Rule(inputs, output)
            parts = computed(op, rule)
            if parts is not None and makes(parts, output, want):
                found.add(rule)
    assert found == set(rules(op))


def test_the_gradients_of_an_op_that_is_cut_have_the_dual_placements():
    """The adjoint of a rule is the rule by which the adjoint, as an op, is cut by this letter."""
    for op in FORWARD:
        for place, name in enumerate(op.inputs):
            if name in ("inputs", "targets"):
                continue
            backward = adjoint(op, place, d(name))
            for letter in set(op.letters) - op.whole:
                rule = cut(op, letter)
                assert adjoint_rule(op, rule, place, backward) == cut(backward, letter), words(op)
            for rule in rules(op):
                assert adjoint_rule(op, rule, place, backward) in rules(backward), words(op)
