"""The right ways to compute an op in parts: the placements of its inputs, and of its output.

    Y[b, o] = sum_i X[b, i] W[i, o]      X         W         Y
    repeated                             R         R         R
    cut by b                             S(b)      R         S(b)
    cut by o                             R         S(o)      S(o)
    cut by i                             S(i)      S(i)      P       partial sums, still to be added
    linear in X                          P         R         P
    linear in W                          R         P         P

Which letters there are the index description says; which inputs an op is linear in its kind says.
The adjoint of a rule needs none of its own: the gradients have the dual placements.
"""

from typing import NamedTuple

from minidist.planning.graphs.gradients import d
from minidist.planning.graphs.graph import Op
from minidist.planning.gspmd.placement import PARTIAL, REPLICATED, Placement, Split, dual

ADDITIVE = ("add", "sum", "take", "slice", "untake", "unslice", "repeat")
PRODUCTS = ("matmul", "multiply")


class Rule(NamedTuple):
    """One right way to compute an op in parts, over one mesh axis."""

    inputs: tuple[Placement, ...]
    output: Placement


def repeated(op: Op) -> Rule:
    """Every rank computes all of it."""
    return Rule((REPLICATED,) * len(op.inputs), REPLICATED)


def cut(op: Op, letter: str) -> Rule:
    """Every rank computes what belongs to its part of a letter."""
    *inputs, output = (
        Split(term.index(letter)) if letter in term else REPLICATED for _, term in op.operands
    )
    return Rule(tuple(inputs), output if letter in op.terms[1] else PARTIAL)


def rules(op: Op) -> list[Rule]:
    """Return all right ways: repeated, cut by a letter, or linear in partial sums."""
    found = [repeated(op), *(cut(op, x) for x in op.letters if x not in op.whole)]
    places = range(len(op.inputs))
    if op.kind in ADDITIVE:
        groups = [set(places)]
    elif op.kind in PRODUCTS:
        groups = [{place} for place in places]
    elif op.kind in ("embedding", "embedding_backward"):
        groups = [{1}]
    elif op.kind == "squared_error_backward":
        groups = [{0}, {1, 2}]  # in dL, and in both outputs and targets
    else:
        groups = [{0}] if op.kind.endswith("_backward") else []
    for group in groups:
        inputs = tuple(PARTIAL if place in group else REPLICATED for place in places)
        found.append(Rule(inputs, PARTIAL))
    return found


def adjoint_rule(op: Op, rule: Rule, place: int, backward: Op) -> Rule:
    """Return how to make the gradient of the input at this place, if forward used this rule."""
    if rule == repeated(op):
        return repeated(backward)
    kept = list(rule.inputs)
    if not backward.kind.endswith("_backward") or op.kind == "embedding":
        del kept[place]
    rest = iter(kept)
    taken = (dual(rule.output) if name == d(op.output) else next(rest) for name in backward.inputs)
    return Rule(tuple(taken), dual(rule.inputs[place]))
