"""A program of placed values: what each rank computes, and what travels in between; and its run.

    Compute(matmul, ((R,), (S1,)), (S1,))        Y[B, F/N] = X[B, C] W[C, F/N]
    Move("matmul.1", (P,), (R,), 0)              all_reduce Z{+N} -> Z over mesh axis 0

Every rank of a mesh runs the same program.
"""

from dataclasses import dataclass

import numpy as np

from minidist.comm import Mesh
from minidist.pieces import split_ends
from minidist.planning.graphs.computation import compute
from minidist.planning.graphs.graph import Graph, Op
from minidist.planning.gspmd.placement import (
    REPLICATED,
    Placement,
    Split,
    collective,
    part,
    redistribute,
)

Placements = tuple[Placement, ...]  # one for each mesh axis


@dataclass(frozen=True)
class Compute:
    """Compute an op from inputs in these placements."""

    op: Op
    inputs: tuple[Placements, ...]
    output: Placements

    @property
    def cuts(self) -> dict[str, int]:
        """Return {letter: the mesh axis that cuts it}."""
        return {
            term[placement.axis]: k
            for (_, term), own in zip(self.op.operands, (*self.inputs, self.output), strict=True)
            for k, placement in enumerate(own)
            if isinstance(placement, Split)
        }


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


def run(layout: Layout, mesh: Mesh, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Run the program on this rank; return its parts of the loss and of the gradients wanted.

    arrays  whole parameters and inputs by name, in the model's shapes; each rank cuts out its part
    """
    groups = [getattr(mesh, axis) for axis in layout.axes]
    values, held = layout.graph.values, {}
    for name, value in values.items():
        if value.kind != "result":
            given = np.ones(()) if name not in arrays and name.startswith("d ") else arrays[name]
            x = np.asarray(given, value.dtype).reshape(value.shape)
            for group, own in zip(groups, layout.placements[name], strict=True):
                x = part(x, own, group.rank, group.size)
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
    return {name: held[name, own] for name, own in layout.results.items()}


def spans(graph: Graph, step: Compute, groups: list) -> dict[str, tuple[int, int]]:
    """Return (begin, end) of this rank's part of every letter."""
    cuts, found = step.cuts, {}
    for letter, n in graph.lengths(step.op).items():
        found[letter] = (0, n)
        if letter in cuts:
            group = groups[cuts[letter]]
            ends = split_ends(n, group.size)
            found[letter] = ends[group.rank], ends[group.rank + 1]
    return found


def whole(layout: Layout, mesh: Mesh, parts: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return {name: all of it, in the model's shape} on every rank, of what `run` returned."""
    found = {}
    for name, x in parts.items():
        for axis, own in zip(layout.axes, layout.results[name], strict=True):
            x = redistribute(x, getattr(mesh, axis), own, REPLICATED)
        value = layout.graph.values[name]
        found[name] = x.reshape(value.whole or value.shape)
    return found
