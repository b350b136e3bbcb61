"""GSPMD: annotate a few tensors; the placements of all others, and the collectives, follow.

Xu et al., GSPMD: General and Scalable Parallelization for ML Computation Graphs (2021). A placement
says how a value is on the ranks of a mesh axis:

    Replicated     X         every rank has X
    Split(axis)    X/N       rank r has part r along an axis
    Partial        X{+N}     every rank has a term; X is their sum

    from / to      Replicated       Split(b)            Partial
    Replicated     nothing          own part            rank 0 has X, the others zeros
    Split(a)       all_gather       all_to_all          as by Replicated
    Partial        all_reduce       reduce_scatter      nothing

The annotations of a mesh axis spread through forward: where an operand is split along a letter of
an op, the op is cut by this letter, and its other operands are split along it.

    W_1[C, F/N]                 Y = X W_1 is cut by F: Y[B, F/N], its bias [F/N] and its relu too
    then W_2[F/N, C]            Z = Y W_2 is cut by F, which is summed: Z[B, C]{+N}
    the bias of Z needs Z       all_reduce: Megatron's g
    dX = dY W_1^T               backward is cut as forward was: dX[B, C]{+N}
    X is replicated             all_reduce: Megatron's f

Elementwise ops spread first, then the others, forward and backward, until nothing changes; what is
annotated stays. A value that nothing splits is replicated. A mesh axis cuts no letter that another
one cuts already. A partial sum is added up where it is used, once, and not before: several
gradients of a value are added first. The result is a program, and runs:

    Compute(matmul, ((R,), (S1,)), (S1,))        Y[B, F/N] = X[B, C] W[C, F/N]
    Move("matmul.1", (P,), (R,), 0)              all_reduce Z{+N} -> Z over mesh axis 0
"""

from dataclasses import dataclass
from numbers import Integral
from typing import NamedTuple

import numpy as np

from minidist.backend import Array, array_module
from minidist.comm import Group, Mesh
from minidist.errors import WrongInput, check_name
from minidist.parallel.collective_functions import exchange, reduce_scatter_along
from minidist.pieces import split_ends
from minidist.planning.computation import compute
from minidist.planning.graph import Graph, Op, d, with_gradients


@dataclass(frozen=True)
class Replicated:
    """X: every rank has all of it."""

    def __str__(self):
        return "R"


@dataclass(frozen=True)
class Split:
    """X/N: rank r has part r along an axis; parts are as equal as can be, the larger first."""

    axis: int

    def __str__(self):
        return f"S{self.axis}"


@dataclass(frozen=True)
class Partial:
    """X{+N}: every rank has a term of a sum."""

    def __str__(self):
        return "P"


Placement = Replicated | Split | Partial
REPLICATED, PARTIAL = Replicated(), Partial()


def part(x: Array, placement: Placement, rank: int, size: int) -> Array:
    """Return a rank's part of X; of a partial sum rank 0 has X, the others zeros."""
    match placement:
        case Split(axis):
            ends = split_ends(x.shape[axis], size)
            return x[(slice(None),) * axis + (slice(ends[rank], ends[rank + 1]),)]
        case Partial() if rank:
            return array_module(x).zeros_like(x)
    return x


def dual(placement: Placement) -> Placement:
    """Return the placement of the gradient of a value that ranks used in this one, each a part."""
    duals: dict[Placement, Placement] = {REPLICATED: PARTIAL, PARTIAL: REPLICATED}
    return duals.get(placement, placement)


def collective(source: Placement, target: Placement) -> str | None:
    """Return the name of the collective between two placements; None: no bytes travel."""
    match source, target:
        case _ if source == target:
            return None
        case Split(), Split():
            return "all_to_all"
        case Split(), _:
            return "all_gather"
        case Partial(), Replicated():
            return "all_reduce"
        case Partial(), Split():
            return "reduce_scatter"
    return None


def redistribute(x: Array, group: Group, source: Placement, target: Placement) -> Array:
    """Return this rank's part of a value in another placement."""
    name = f"{source}->{target}"
    match collective(source, target), source, target:
        case "all_to_all", Split(a), Split(b):
            return exchange(x, group, cut=b, joined=a)
        case "all_gather", Split(a), _:
            x = group.all_gather(x, a, label=name)
            return redistribute(x, group, REPLICATED, target)
        case "all_reduce", _, _:
            return group.all_reduce(x, label=name)
        case "reduce_scatter", _, Split(b):
            return reduce_scatter_along(x, group, b)
    return x if source == target else part(x, target, group.rank, group.size)


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
    ways = [repeated(op), *(cut(op, x) for x in op.letters if x not in op.whole)]
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
        ways.append(Rule(inputs, PARTIAL))
    return ways


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


Placements = tuple[Placement, ...]  # one for each mesh axis


@dataclass(frozen=True)
class Compute:
    """Compute an op from inputs in these placements."""

    op: Op
    inputs: tuple[Placements, ...]
    output: Placements


@dataclass(frozen=True)
class Move:
    """Bring a value from a placement to another one, over one mesh axis."""

    value: str
    source: Placements
    target: Placements
    axis: int

    @property
    def collective(self) -> str | None:
        return collective(self.source[self.axis], self.target[self.axis])


@dataclass(frozen=True)
class Layout:
    """What `propagate` returns.

    graph       forward and backward
    axes        the names of the mesh axes
    placements  {value: its placement on each axis} where it is given, annotated, or made
    steps       Compute and Move, in order: the program of every rank
    results     {the loss and the gradients: where they are at the end}
    """

    graph: Graph
    axes: tuple[str, ...]
    placements: dict[str, Placements]
    steps: list[Compute | Move]
    results: dict[str, Placements]

    @property
    def collectives(self) -> list[tuple[str, str, str]]:
        """Return (value, mesh axis, collective) of every step that sends bytes."""
        return [
            (step.value, self.axes[step.axis], step.collective)
            for step in self.steps
            if isinstance(step, Move) and step.collective
        ]


def execute(layout: Layout, mesh: Mesh, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Run the program on this rank; return its parts of the loss and of the gradients wanted.

    arrays  whole parameters and inputs by name, in the model's shapes; each rank cuts out its part
    """
    groups = [getattr(mesh, axis) for axis in layout.axes]
    values, held = layout.graph.values, {}
    for name, value in values.items():
        if value.kind != "result":
            array = np.ones(()) if name not in arrays and name.startswith("d ") else arrays[name]
            x = np.asarray(array, value.dtype).reshape(value.shape)
            for group, placement in zip(groups, layout.placements[name], strict=True):
                x = part(x, placement, group.rank, group.size)
            held[name, layout.placements[name]] = x
    for step in layout.steps:
        if isinstance(step, Move):
            source, target = step.source[step.axis], step.target[step.axis]
            x = held[step.value, step.source]
            held[step.value, step.target] = redistribute(x, groups[step.axis], source, target)
        else:
            inputs = zip(step.op.inputs, step.inputs, strict=True)
            parts = spans(layout.graph, step, groups)
            y = compute(step.op, [held[key] for key in inputs], parts)
            held[step.op.output, step.output] = y
    return {name: held[name, placements] for name, placements in layout.results.items()}


def spans(graph: Graph, step: Compute, groups: list) -> dict[str, tuple[int, int]]:
    """Return (begin, end) of this rank's part of every letter."""
    lengths = graph.lengths(step.op)
    bounds = {letter: (0, n) for letter, n in lengths.items()}
    for (_, term), placements in zip(step.op.operands, (*step.inputs, step.output), strict=True):
        for group, placement in zip(groups, placements, strict=True):
            if isinstance(placement, Split):
                letter = term[placement.axis]
                ends = split_ends(lengths[letter], group.size)
                bounds[letter] = ends[group.rank], ends[group.rank + 1]
    return bounds


def whole(layout: Layout, mesh: Mesh, parts: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return {name: all of it, in the model's shape} on every rank, of what `execute` returned."""
    arrays = {}
    for name, x in parts.items():
        for axis, placement in zip(layout.axes, layout.results[name], strict=True):
            x = redistribute(x, getattr(mesh, axis), placement, REPLICATED)
        value = layout.graph.values[name]
        arrays[name] = x.reshape(value.whole or value.shape)
    return arrays


def propagate(graph: Graph, placements: dict[str, dict[str, Placement]]) -> Layout:
    """Return every value's placement, forward and backward, and the collectives between them.

    placements  {mesh axis: {value: Replicated() or Split(axis)}}, outermost mesh axis first
    """
    letters: list[dict[int, str]] = []
    kept: list[dict[str, Placement]] = []
    every = list(placements.values())
    for k, (axis, annotated) in enumerate(placements.items()):
        check(graph, axis, annotated)
        chosen, placed = spread(graph, annotated, letters, kept + every[k + 1 :])
        letters.append(chosen)
        kept.append(placed)
    return Builder(graph, tuple(placements), letters, kept).layout()


def check(graph: Graph, axis: str, annotated: dict[str, Placement]) -> None:
    """Raise ValueError for an annotation that no value can have."""
    for name, placement in annotated.items():
        check_name(f"value of {axis}", name, graph.values)
        shape = graph.values[name].shape
        if not isinstance(placement, Split | Replicated):
            description = "partial" if isinstance(placement, Partial) else repr(placement)
            raise WrongInput(
                f"{axis}: {name} cannot be annotated as {description}; use Split or Replicated"
            )
        integral = isinstance(placement, Split) and isinstance(placement.axis, Integral)
        if isinstance(placement, Split) and not (integral and 0 <= placement.axis < len(shape)):
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
                for (name, _), placement in zip(
                    op.operands, (*rule.inputs, rule.output), strict=True
                ):
                    free = not any(other.get(name) == placement for other in others)
                    if isinstance(placement, Split) and name not in placed and free:
                        placed[name] = placement
                changed = True
                break
    return chosen, placed


def is_elementwise(op: Op) -> bool:
    return set(op.letters) == set(op.terms[1]) and not op.whole and op.kind != "matmul"


def wanted(graph: Graph, op: Op, placed: dict, taken: frozenset) -> str | None:
    """Return the letter along which the most bytes of the operands are split already."""
    votes: dict[str, int] = {}
    for name, term in op.operands:
        placement = placed.get(name)
        if isinstance(placement, Split) and term[placement.axis] not in taken:
            letter = term[placement.axis]
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
        placements = []
        for placement, where in zip(made, belongs, strict=True):
            taken = where is None and isinstance(placement, Split) and placement in belongs
            placements.append(REPLICATED if taken else where or placement)
        return tuple(placements)

    def rule(self, i: int, op: Op, k: int) -> Rule:
        """Return forward's choice, its adjoint, or how the gradients of several uses are added."""
        held = tuple(self.copies[name][-1][k] for name in op.inputs)
        if (made := self.owners[i]) is not None:
            owner, place = made
            return adjoint_rule(self.forward.ops[owner], self.rules[owner, k], place, op)
        if i >= len(self.forward.ops):  # the sum over uses
            target = self.target(op.output.removeprefix("d "))[k]
            alike = set(held) in ({REPLICATED}, {PARTIAL})
            return Rule(held, held[0]) if alike else Rule((target,) * len(held), target)
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
    now, moves = list(source), []

    def move(k: int, placement: Placement) -> None:
        before = tuple(now)
        now[k] = placement
        moves.append((before, tuple(now), k))

    for k, to in enumerate(target):
        if isinstance(now[k], Split) and now[k] != to and (not isinstance(to, Split) or to in now):
            move(k, REPLICATED)
    for begins in (False, True):
        for k, to in enumerate(target):
            if now[k] != to and (begins or isinstance(now[k], Split) or not isinstance(to, Split)):
                move(k, to)
    return moves
