"""Tofu: cut every op and every value into equal parts, step by step; the least bytes travel.

Wang, Huang and Li, Supporting Very Large Models using Automatic Dataflow Graph Partitioning (2019).
Partition-n-reduce: a step cuts an op along one letter of its index description into k parts.

    "bi,io->bo"    cut b    needs X[b/k, i], all of W          makes Y[b/k, o]    concatenated
                   cut o    needs all of X, W[i, o/k]          makes Y[b, o/k]    concatenated
                   cut i    needs X[b, i/k], W[i/k, o]         makes Y[b, o]{+k}  reduced

It cuts a value along one of its axes: nothing is kept twice, not even parameters. A rank fetches
what its part of an op needs and it does not have, and sends what it makes for others. N ranks take
one step for each prime factor k of N: a step halves the parts of the last one. Then a value of S
bytes makes these bytes travel in an op, all ranks together:

    S A - S / M    A: product of k over the steps whose letter the value lacks
                   M: product of k over the steps that cut another axis of the value itself

A product does not change with the order of the steps. An axis can be cut if N divides its length:
then a step can give the elements whose digit of this step is i to part i, and cuts meet evenly.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from math import prod
from numbers import Integral
from typing import NamedTuple

from minidist.errors import WrongInput
from minidist.pieces import prime_factors
from minidist.planning.graph import Graph, adjoint, d, has_gradient

MOST_RANKS = 10**12  # whose prime factors are looked for: a million numbers are tried
Letter = str | None  # None: the first of the k parts does all of it, because no letter can be cut
Axis = int | None  # None: the first of the k parts keeps all of it, because no axis can be cut


@dataclass(frozen=True)
class Cuts:
    """What each step cuts.

    factors  k of each step; their product is the number of ranks
    values   {name: the axis of each step}, of a value and of its gradient
    ops      {name: the letter of each step}; "x of y": the gradient of x in the backward of y
    """

    factors: tuple[int, ...]
    values: dict[str, tuple[Axis, ...]]
    ops: dict[str, tuple[Letter, ...]]


class Work(NamedTuple):
    """An op of forward or backward.

    operands  (value, its letters): what it needs and, last, what it makes; a gradient has the name
              of its value
    letters   those that can be cut
    """

    name: str
    operands: tuple[tuple[str, str], ...]
    letters: tuple[Letter, ...]


def tofu(graph: Graph, ranks: int, together: int = 1) -> tuple[Cuts, int]:
    """Return the cuts, and the bytes that all ranks together send in a training step.

    together  steps that are searched at once: 1 as in the paper; all of them find the fewest bytes
    """
    counts = all(isinstance(n, Integral) and n >= 1 for n in (ranks, together))
    if not counts or ranks > MOST_RANKS:
        raise WrongInput(
            f"a graph cannot be cut over {ranks} ranks, {together} steps at once; use 1 or more, "
            f"and {MOST_RANKS:,} ranks at most"
        )
    works = works_of(graph, ranks)
    cuts = Cuts((), dict.fromkeys(graph.values, ()), {work.name: () for work in works})
    factors = prime_factors(ranks)
    for step in range(0, len(factors), together):
        cuts = cut_again(graph, works, cuts, factors[step : step + together], ranks)
    return cuts, cost(graph, works, cuts)


def cut_again(graph: Graph, works: list[Work], cuts: Cuts, factors: tuple, ranks: int) -> Cuts:
    """Return the cuts with further steps, into these factors, so that the fewest bytes travel."""
    first, after = coalesced(graph), (*cuts.factors, *factors)
    roots = {work.name: [first[name] for name, _ in work.operands] for work in works}

    def steps(choices: Sequence[Letter | Axis]) -> list[tuple]:
        return list(product(choices, repeat=len(factors)))

    def term(work: Work) -> Callable:
        letters = [cuts.ops[work.name] + added for added in steps(work.letters)]
        before = [cuts.values[name] for name, _ in work.operands]

        @cache
        def cheapest(*axes: tuple) -> tuple[int, tuple]:
            kept = [one + added for one, added in zip(before, axes, strict=True)]
            costs = [bytes_of(graph, work, cut, kept, after) for cut in letters]
            return min(costs), letters[costs.index(min(costs))]

        return cheapest

    cheapest = {work.name: term(work) for work in works}

    def fewest(name: str, *axes: tuple) -> int:
        return cheapest[name](*axes)[0]

    axes = least(
        [(roots[name], partial(fewest, name)) for name in roots],
        {name: steps(axes_of(graph, name, ranks)) for name in dict.fromkeys(first.values())},
    )
    return Cuts(
        after,
        {name: before + axes[first[name]] for name, before in cuts.values.items()},
        {name: cheapest[name](*(axes[root] for root in roots[name]))[1] for name in roots},
    )


def least(terms: list[tuple[list, Callable]], options: dict) -> dict:
    """Return the choice of each variable that gives the least sum of the terms.

    terms  (variables, cost of their choices); options  {variable: its possible choices}
    Dynamic programming: for each choice of the live variables, which later terms need again, only
    the best choice of the earlier ones is kept.
    """
    last = {name: i for i, (names, _) in enumerate(terms) for name in names}
    live: list = []
    states: dict[tuple, tuple] = {(): (0, None)}  # {choices of the live: (sum, how it came)}
    for i, (names, cost) in enumerate(terms):
        new = [name for name in dict.fromkeys(names) if name not in live]
        live, kept = live + new, [name for name in live + new if last[name] > i]
        best: dict[tuple, tuple] = {}
        for state, (before, trail) in states.items():
            for added in product(*(options[name] for name in new)):
                chosen = dict(zip(live, state + added, strict=True))
                total = before + cost(*(chosen[name] for name in names))
                key = tuple(chosen[name] for name in kept)
                if key not in best or total < best[key][0]:
                    best[key] = total, (trail, dict(zip(new, added, strict=True)))
        live, states = kept, best
    ((_, trail),) = states.values()
    choices = {name: choice[0] for name, choice in options.items()}
    while trail is not None:
        trail, chosen = trail
        choices |= chosen
    return choices


def cost(graph: Graph, works: list[Work], cuts: Cuts) -> int:
    """Return the bytes that all ranks together send in a training step."""
    return sum(
        bytes_of(
            graph,
            work,
            cuts.ops[work.name],
            [cuts.values[name] for name, _ in work.operands],
            cuts.factors,
        )
        for work in works
    )


def bytes_of(graph: Graph, work: Work, letters: tuple, kept: list[tuple], factors: tuple) -> int:
    """Return the bytes that travel in one op, if its steps cut these letters: S A - S / M.

    kept  of each operand, the axes that the steps cut it by
    """
    total = 0
    for (name, term), axes in zip(work.operands, kept, strict=True):
        steps = list(zip(factors, letters, axes, strict=True))
        size = graph.values[name].nbytes
        lacking = [k for k, letter, _ in steps if letter is not None and letter not in term]
        other = [
            k
            for k, letter, axis in steps
            if (letter is None or letter in term)
            and letter != (None if axis is None else term[axis])
        ]
        total += size * prod(lacking) - size // prod(other)
    return total


def works_of(graph: Graph, ranks: int) -> list[Work]:
    """Return the ops of forward and backward: an op, and then what its backward makes of it.

    So values are needed again soon after they were made.
    """
    works = []
    for op in graph.ops:
        n = graph.lengths(op)
        can = [x for x in op.letters if x not in op.whole and n[x] % ranks == 0]
        letters: tuple[Letter, ...] = tuple(can) or (None,)
        done = {op.output: op} | {
            f"{name} of {op.output}": adjoint(op, place, d(name))
            for place, name in enumerate(op.inputs)
            if has_gradient(graph.values, name)
        }
        values = {d(name): name for name in (*op.inputs, op.output)}
        for name, each in done.items():
            *needs, made = each.operands
            operands = (*dict.fromkeys(needs), made)
            works.append(
                Work(name, tuple((values.get(x, x), term) for x, term in operands), letters)
            )
    return works


def axes_of(graph: Graph, name: str, ranks: int) -> list[Axis]:
    """Return the axes that a value can be cut by: N divides their length."""
    shape = graph.values[name].shape
    return [axis for axis, n in enumerate(shape) if n % ranks == 0] or [None]


def coalesced(graph: Graph) -> dict[str, str]:
    """Return {value: the first of the values that are cut like it}: the coarsened graph.

    An op that sums nothing is cut like its output, with those inputs that have all its letters.
    """
    first = {name: name for name in graph.values}
    for op in graph.ops:
        terms, output = op.terms
        alike = [name for name, term in zip(op.inputs, terms, strict=True) if term == output]
        if set("".join(terms)) <= set(output) and alike:
            ends = {first[name] for name in (*alike, op.output)}
            one = next(name for name in graph.values if name in ends)
            first = {name: one if end in ends else end for name, end in first.items()}
    return first
