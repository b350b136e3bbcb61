"""The ways to cut one op that FlexFlow knows: sample, operator, attribute, parameter (SOAP).

    bti,io->bto    Y[b, t, o] = sum_i X[b, t, i] W[i, o]

    b  sample      the axis of the examples; it cuts what the batch cuts
    t  attribute   an axis of every example; it cuts no parameter
    o  parameter   it cuts W
    -  operator    which ranks have this op: another op may run at the same time on others
    i  reduction   summed over: not in the paper; the parts are partial sums, added where they go

    Cut((("b", 2), ("o", 2)), first=4)    rank 4  X[:B/2], W[:, :F/2] -> Y[:B/2, :, :F/2]
                                          rank 5  X[:B/2], W[:, F/2:] -> Y[:B/2, :, F/2:]
                                          rank 6  X[B/2:], W[:, :F/2] -> Y[B/2:, :, :F/2]
                                          rank 7  X[B/2:], W[:, F/2:] -> Y[B/2:, :, F/2:]

Jia, Zaharia, Aiken 2019, Beyond Data and Model Parallelism for Deep Neural Networks, section 4.
Parts are equal, so that a degree divides its axis, and each is one task. The paper lets a task have
any rank; here, as in the released code, the parts of an op have ranks in a row, from any one on. An
op whose output is a sum over the examples, a loss, may be cut along them too: it has no other axis.
"""

import math
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, permutations, product
from numbers import Integral
from operator import attrgetter
from typing import TYPE_CHECKING

from minidist.errors import WrongInput

if TYPE_CHECKING:
    from minidist.planning.graphs.graph import Graph, Op


Box = tuple[tuple[int, int], ...]  # (first, last + 1) per axis: a part of an array
MOST_RANKS = 1_000
KINDS = {"S": "sample", "A": "attribute", "P": "parameter", "R": "reduction"}


@dataclass(frozen=True)
class Cut:
    """Cut an op into equal parts.

    degrees    ((letter, parts along it), ...); the last letter changes fastest from part to part
    first      the rank of the first part; each following part has the following rank
    """

    degrees: tuple[tuple[str, int], ...] = ()
    first: int = 0

    @property
    def parts(self) -> int:
        return math.prod(degree for _, degree in self.degrees)

    @property
    def ranks(self) -> range:
        return range(self.first, self.first + self.parts)

    def boxes(self, letters: str, shape: tuple[int, ...]) -> list[Box]:
        """Return what each part has of an array whose axes are these letters."""
        return [
            tuple(self._slice(part, letter, n) for letter, n in zip(letters, shape, strict=True))
            for part in range(self.parts)
        ]

    def _slice(self, part: int, letter: str, n: int) -> tuple[int, int]:
        for name, degree in reversed(self.degrees):
            part, place = divmod(part, degree)
            if name == letter:
                return place * n // degree, (place + 1) * n // degree
        return 0, n


def kinds(graph: "Graph") -> dict[str, dict[str, str]]:
    """Return {output of an op: {letter: sample, attribute, parameter or reduction}}.

    The examples are along axis 0 of every input; whole letters are left out.
    """
    samples = {name: 0 for name, value in graph.values.items() if value.kind == "input"}
    found = {}
    for op in graph.ops:
        *operands, (_, output) = op.operands
        sample = {letters[samples[name]] for name, letters in operands if name in samples}
        weights = "".join(x for name, x in operands if graph.values[name].kind == "parameter")
        found[op.output] = {
            letter: "sample"
            if letter in sample
            else "reduction"
            if letter not in output
            else "parameter"
            if letter in weights
            else "attribute"
            for letter in graph.lengths(op)
            if letter not in op.whole
        }
        for axis, letter in enumerate(output):
            if letter in sample:
                samples[op.output] = axis
    return found


def cuts(graph: "Graph", ranks: int, dims: str = "SOAP") -> dict[str, list[Cut]]:
    """Return {output of an op: all its cuts over at most this many ranks}.

    dims    which of S, O, A, P and R may be used; without O the first part is on rank 0
    """
    if wrong := set(dims) - set("SOAPR"):
        raise WrongInput(f"{sorted(wrong)[0]!r} is no dimension of SOAP; use letters of 'SOAPR'")
    if not isinstance(ranks, Integral) or not 1 <= ranks <= MOST_RANKS:
        raise WrongInput(
            f"an op cannot be cut over {ranks} ranks; use 1 or more, and {MOST_RANKS:,} at most, "
            "for a cut begins on any of them"
        )
    allowed, found = {KINDS[d] for d in dims if d != "O"}, {}
    for op, kind in zip(graph.ops, kinds(graph).values(), strict=True):
        n = graph.lengths(op)
        letters = [letter for letter in n if kind.get(letter) in allowed]
        found[op.output] = [
            Cut(order, first)
            for degrees in _degrees(letters, n, ranks)
            for order in permutations(degrees)
            for first in range(ranks - math.prod(d for _, d in degrees) + 1 if "O" in dims else 1)
        ]
    return found


def _degrees(letters: list[str], n: dict[str, int], ranks: int) -> Iterator[tuple]:
    """Yield every ((letter, degree), ...) of at most `ranks` parts; degrees of 1 are left out."""
    if not letters:
        yield ()
        return
    letter, *others = letters
    for degree in range(1, min(ranks, n[letter]) + 1):
        if n[letter] % degree == 0:
            own = ((letter, degree),) if degree > 1 else ()
            for rest in _degrees(others, n, ranks // degree):
                yield own + rest


def check(graph: "Graph", op: "Op", cut: Cut, ranks: int) -> None:
    """Raise ValueError if an op cannot be cut so, or not on so many ranks."""
    n, last, letters = graph.lengths(op), cut.first + cut.parts - 1, dict(cut.degrees)
    if len(letters) < len(cut.degrees):
        raise WrongInput(f"the cut of {op.output} names a letter twice; use one degree for each")
    for letter, degree in letters.items():
        if letter not in n or letter in op.whole:
            raise WrongInput(
                f"the cut of {op.output} splits {letter}, which {op.indices} does not allow; "
                f"use {', '.join(x for x in n if x not in op.whole)}"
            )
        if degree < 1 or n[letter] % degree:
            raise WrongInput(
                f"the cut of {op.output} splits {letter}, of length {n[letter]}, into {degree} "
                "parts that are not equal; use a divisor"
            )
    if not 0 <= cut.first <= last < ranks:
        raise WrongInput(
            f"the cut of {op.output} needs ranks {cut.first} to {last} of {ranks}; use fewer "
            "parts, or another first rank"
        )


def data_parallel(graph: "Graph", ranks: int) -> dict[str, Cut]:
    """Return the strategy that cuts each op along the examples alone, into as many parts as it can.

    What has no axis of examples is done on rank 0.
    """
    found = cuts(graph, ranks, "S").items()
    return {name: max(own, key=attrgetter("parts")) for name, own in found}


def shared(a: Box, b: Box) -> int:
    """Return how many elements two boxes have in common."""
    return math.prod(
        max(0, min(top, other_top) - max(low, other_low))
        for (low, top), (other_low, other_top) in zip(a, b, strict=True)
    )


def pieces(boxes: Sequence[tuple[Hashable, Box]]) -> Counter:
    """Return {who has them: elements}, where the boxes of these owners overlap, and no other."""
    found: Counter = Counter()
    if boxes:
        edges = [sorted(set(chain(*slices))) for slices in zip(*(b for _, b in boxes), strict=True)]
        for cell in product(*map(pairwise, edges)):
            size = shared(cell, cell)
            owners = frozenset(owner for owner, box in boxes if shared(cell, box) == size)
            found[owners] += size
        found.pop(frozenset(), None)
    return found
