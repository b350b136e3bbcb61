"""GSPMD: annotate a few tensors; the placements of all others, and the collectives, follow.

Xu et al., GSPMD: General and Scalable Parallelization for ML Computation Graphs (2021). The
annotations of a mesh axis spread through forward: where an operand is split along a letter of an
op, the op is cut by this letter, and its other operands are split along it.

    W_1[C, F/N]                 Y = X W_1 is cut by F: Y[B, F/N], its bias [F/N] and its relu too
    then W_2[F/N, C]            Z = Y W_2 is cut by F, which is summed: Z[B, C]{+N}
    the bias of Z needs Z       all_reduce: Megatron's g
    dX = dY W_1^T               backward is cut as forward was: dX[B, C]{+N}
    X is replicated             all_reduce: Megatron's f

Elementwise ops spread first, then the others, forward and backward, until nothing changes; what is
annotated stays. A value that nothing splits is replicated. A mesh axis cuts no letter that another
one cuts already. A partial sum is added up where it is used, once, and not before: several
gradients of a value are added first.
"""

from numbers import Integral

from minidist.errors import WrongInput, check_name
from minidist.planning.graphs.gradients import d, with_gradients
from minidist.planning.graphs.graph import Graph, Op
from minidist.planning.gspmd.placement import (
    PARTIAL,
    REPLICATED,
    Partial,
    Placement,
    Replicated,
    Split,
    collective,
)
from minidist.planning.gspmd.program import Compute, Layout, Move, Placements
from minidist.planning.gspmd.rules import Rule, adjoint_rule, cut, repeated, rules


def propagate(graph: Graph, placements: dict[str, dict[str, Placement]]) -> Layout:
    """Return every value's placement, forward and backward, and the collectives between them.

    placements  {mesh axis: {value: Replicated() or Split(axis)}}, outermost mesh axis first
    """
    letters: list[dict[int, str]] = []
    kept: list[dict[str, Placement]] = []
    every = list(placements.values())
    for k, (axis, annotated) in enumerate(placements.items()):
        check(graph, axis, annotated)
        more = spread(graph, annotated, letters, kept + every[k + 1 :])
        letters.append(more[0])
        kept.append(more[1])
    return Builder(graph, tuple(placements), letters, kept).layout()


def check(graph: Graph, axis: str, annotated: dict[str, Placement]) -> None:
    """Raise ValueError for an annotation that no value can have."""
    for name, placement in annotated.items():
        check_name(f"value of {axis}", name, graph.values)
        shape = graph.values[name].shape
        if not isinstance(placement, Split | Replicated):
            what = "partial" if isinstance(placement, Partial) else repr(placement)
            raise WrongInput(
                f"{axis}: {name} cannot be annotated as {what}; use Split or Replicated"
            )
        whole = isinstance(placement, Split) and isinstance(placement.axis, Integral)
        if isinstance(placement, Split) and not (whole and 0 <= placement.axis < len(shape)):
            raise WrongInput(f"{axis}: {name}{list(shape)} has no axis {placement.axis} to split")


def spread(graph: Graph, annotated: dict, letters: list, others: list) -> tuple[dict, dict]:
    """Return {op's number: the letter that cuts it} and {value: Split or annotation}, of one axis.

    letters  the first of both, of each mesh axis before
    others   {value: placement} of each other mesh axis: all of those before, the annotations of
             those that follow
    """
    chosen, placed = {}, dict(annotated)
    for name, placement in annotated.items():
        if isinstance(placement, Split) and any(placement == other.get(name) for other in others):
            raise WrongInput(f"two mesh axes cannot split axis {placement.axis} of {name}; use one")
    order = [*range(len(graph.ops)), *reversed(range(len(graph.ops)))]
    order = sorted(order, key=lambda i: not is_elementwise(graph.ops[i]))  # these first
    changed = True
    while changed:
        changed = False
        for i in order:
            op = graph.ops[i]
            taken = op.whole | {before.get(i) for before in letters}
            if i not in chosen and (letter := wanted(graph, op, placed, taken)):
                chosen[i] = letter
                rule = cut(op, letter)
                for (name, _), own in zip(op.operands, (*rule.inputs, rule.output), strict=True):
                    free = not any(other.get(name) == own for other in others)
                    if isinstance(own, Split) and name not in placed and free:
                        placed[name] = own
                changed = True
                break
    return chosen, placed


def is_elementwise(op: Op) -> bool:
    return set(op.letters) == set(op.terms[1]) and not op.whole and op.kind != "matmul"


def wanted(graph: Graph, op: Op, placed: dict, taken: frozenset) -> str | None:
    """Return the letter along which the most bytes of the operands are split already."""
    votes: dict[str, int] = {}
    for name, term in op.operands:
        own = placed.get(name)
        if isinstance(own, Split) and term[own.axis] not in taken:
            letter = term[own.axis]
            votes[letter] = votes.get(letter, 0) + graph.values[name].nbytes
    return max(votes, key=lambda letter: votes[letter]) if votes else None


class Builder:
    """Make the program: choose each op's rule on each mesh axis, and move what it needs."""

    def __init__(self, graph: Graph, axes: tuple[str, ...], letters: list, kept: list):
        self.forward, self.axes, self.letters, self.kept = graph, axes, letters, kept
        self.graph, self.owners = with_gradients(graph)
        self.steps: list[Compute | Move] = []
        self.copies: dict[str, list[Placements]] = {}
        self.rules: dict[tuple[int, int], Rule] = {}

    def layout(self) -> Layout:
        values, wanted = self.graph.values, {}
        for name, value in values.items():
            if value.kind != "result":
                self.copies[name] = [self.target(name)]
        for i in range(len(self.graph.ops)):
            self.place(i)
        loss = self.forward.ops[-1].output
        for name, value in values.items():
            if d(name) in self.copies and value.kind != "result":
                wanted[d(name)] = self.target(name)
        wanted[loss] = (REPLICATED,) * len(self.axes)
        for name, target in wanted.items():
            self.need(name, target)
        made = {name: copies[0] for name, copies in self.copies.items()}
        made |= {name: self.target(name) for placed in self.kept for name in placed}
        return Layout(self.graph, self.axes, made, self.steps, wanted)

    def target(self, name: str) -> Placements:
        """Return where a value belongs: where it is split or annotated, else replicated."""
        return tuple(placed.get(name, REPLICATED) for placed in self.kept)

    def place(self, i: int) -> None:
        """Choose the rule of an op on each mesh axis; move its inputs; record what it makes."""
        op = self.graph.ops[i]
        chosen = [self.rule(i, op, k) for k in range(len(self.axes))]
        inputs = tuple(tuple(rule.inputs[j] for rule in chosen) for j in range(len(op.inputs)))
        output = tuple(rule.output for rule in chosen)
        for name, needed in zip(op.inputs, inputs, strict=True):
            self.need(name, needed)
        self.steps.append(Compute(op, inputs, output))
        self.copies[op.output] = [output]
        if i < len(self.forward.ops):
            self.need(op.output, self.settled(op.output, output))

    def settled(self, name: str, made: Placements) -> Placements:
        """Return where a result is kept: where it belongs, else as it was made.

        What one mesh axis splits because it belongs there, another one does not split, too.
        """
        belongs = [placed.get(name) for placed in self.kept]
        found = []
        for own, where in zip(made, belongs, strict=True):
            taken = where is None and isinstance(own, Split) and own in belongs
            found.append(REPLICATED if taken else where or own)
        return tuple(found)

    def rule(self, i: int, op: Op, k: int) -> Rule:
        """Return forward's choice, its adjoint, or how the gradients of several uses are added."""
        held = tuple(self.copies[name][-1][k] for name in op.inputs)
        if (made := self.owners[i]) is not None:
            owner, place = made
            return adjoint_rule(self.forward.ops[owner], self.rules[owner, k], place, op)
        if i >= len(self.forward.ops):  # the sum over uses
            own = self.target(op.output.removeprefix("d "))[k]
            alike = set(held) in ({REPLICATED}, {PARTIAL})
            return Rule(held, held[0]) if alike else Rule((own,) * len(held), own)
        letter = self.letters[k].get(i)
        chosen = repeated(op) if letter is None else cut(op, letter)
        linear = Rule((PARTIAL,) * len(op.inputs), PARTIAL)
        if letter is None and held == linear.inputs and linear in rules(op):
            chosen = linear
        self.rules[i, k] = chosen
        return chosen

    def need(self, name: str, target: Placements) -> None:
        """Have a copy of a value in this placement: move the one that takes fewest collectives."""
        copies = self.copies[name]
        if target in copies:
            return
        paths = [path(source, target) for source in copies]
        best = min(paths, key=lambda moves: sum(bool(collective(a[k], b[k])) for a, b, k in moves))
        self.steps += [Move(name, *move) for move in best]
        copies.append(target)


def path(source: Placements, target: Placements) -> list[tuple[Placements, Placements, int]]:
    """Return (before, after, mesh axis) of each move; no two axes ever split the same one.

    Splits that end come first, then those that change their axis, then those that begin.
    """
    now, found = list(source), []

    def move(k: int, placement: Placement) -> None:
        before = tuple(now)
        now[k] = placement
        found.append((before, tuple(now), k))

    for k, to in enumerate(target):
        if isinstance(now[k], Split) and now[k] != to and (not isinstance(to, Split) or to in now):
            move(k, REPLICATED)
    for begins in (False, True):
        for k, to in enumerate(target):
            if now[k] != to and (begins or isinstance(now[k], Split) or not isinstance(to, Split)):
                move(k, to)
    return found
