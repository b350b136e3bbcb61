"""What a rank holds of a model and of its optimizer, as slices of global arrays.

Whatever cuts a model (split matrices, stages of a pipeline, shards of ZeRO, experts on other
ranks), a rank's parameters say which elements of which global arrays they hold (nn.Slice). So a
checkpoint is a set of (slice, values), and loading it on another mesh is to slice again.

    embedding.token.weight                a weight
    optimizer.0/embedding.token.weight    the first array of its optimizer's state, as long as it

    saved by 2 ranks      a a a a | b b b
    wanted by 3           a a a | a b | b b       the second: element 3 of a, element 0 of b
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Protocol

import numpy as np

from minidist.backend import Array, array_module, on_device_of, to_host, widen
from minidist.errors import WrongInput
from minidist.nn import Parameter, Slice
from minidist.nn.flat_parameters import FlatSlice
from minidist.parallel.mixed_precision import AnyOptimizer


@dataclass(frozen=True, eq=False)
class Part:
    """Elements of a global array, and their values: a vector, or an array of the global shape."""

    cut: Slice
    values: Array

    def on_host(self) -> np.ndarray:
        """Return the values on the host, in one piece, shaped like the part they are all of."""
        values = np.ascontiguousarray(to_host(self.values)).reshape(-1)
        values = values.astype(values.dtype.newbyteorder("="), copy=False)
        is_whole = len(values) == np.prod(self.cut.part_shape)
        return values.reshape(self.cut.part_shape) if is_whole else values


class Holder(Protocol):
    """A model, or what split it: Hybrid, Pipeline."""

    def named_parameters(self) -> dict[str, Parameter]: ...


class Source(Protocol):
    """What a run goes on from: a checkpoint, perhaps as a larger model sees it (Grown)."""

    path: Path
    about: dict

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def part(self, cut: Slice) -> np.ndarray: ...


def parts_of(model: Holder, optimizer: AnyOptimizer) -> list[Part]:
    """Return this rank's parts of the weights and of the optimizer's state.

    Of 16-bit weights it is their float32 copies: the weights are the copies, rounded. What has no
    copies is saved in float32, too, since files have no bfloat16.
    What an optimizer changes is not copied: save it before the next update.
    """
    parts: list[Part] = []
    slices = optimizer.slices
    weights = optimizer.copies or [s.data for s in slices]
    states = optimizer.state or [[] for _ in slices]
    for s, values, state in zip(slices, weights, states, strict=True):
        for cut, at in placed(s.slices):
            parts.append(Part(cut, widen(values[at])))
            parts += [Part(of_state(cut, i), widen(array[at])) for i, array in enumerate(state)]
    for p in model.named_parameters().values():
        # frozen parameters, such as a batch norm's running mean
        if not p.requires_grad and not p.placement.elsewhere:
            parts.append(Part(p.slices[0], widen(p.data).copy()))  # a forward pass may change it
    return parts


def placed(cuts: tuple[Slice, ...]) -> list[tuple[Slice, slice]]:
    """Return each slice with its place in the vector that they make up together."""
    ends = np.cumsum([0, *map(len, cuts)]).tolist()
    return [(cut, slice(*ends)) for cut, ends in zip(cuts, pairwise(ends), strict=True)]


def of_state(cut: Slice, number: int) -> Slice:
    """Return the same elements of an array of the optimizer's state."""
    return replace(cut, name=f"optimizer.{number}/{cut.name}")


def about(optimizer: AnyOptimizer) -> dict:
    """Return the manifest's entry of an optimizer."""
    return {
        "kind": optimizer.kind,
        "steps": optimizer.steps,
        "loss_scale": None if optimizer.scale is None else optimizer.scale.state,
    }


def restore(saved: Source, model: Holder, optimizer: AnyOptimizer) -> None:
    """Give this rank its parts of the weights and the optimizer's state, between two steps.

    ValueError if the checkpoint lacks an array or has it in another shape, in a dtype that the
    parameter cannot hold, or the state of another kind of optimizer.
    """
    state = saved.about.get("optimizer")
    if state is None:
        raise WrongInput(
            f"{saved.path} says nothing of an optimizer; take its weights with checkpoint.load, or "
            "save it with about={'optimizer': parts.about(optimizer)}"
        )
    if state["kind"] != optimizer.kind:
        raise WrongInput(
            f"{saved.path} has the state of {state['kind']}, not of {optimizer.kind}; go on with "
            f"{state['kind']}, or use another folder"
        )
    here = [p for p in model.named_parameters().values() if not p.placement.elsewhere]
    for p in dict.fromkeys([*here, *optimizer.parameters]):
        values = [saved.part(cut) for cut in p.slices]
        fill(p.data, values, p.name, rounds=bool(optimizer.scale) and p.requires_grad)
        p.note_replaced()
    for s, copy in zip(optimizer.slices, optimizer.copies, strict=False):
        fill(copy, [saved.part(cut) for cut in s.slices], "a float32 copy")
    if optimizer.scale and state.get("loss_scale"):
        optimizer.scale.state = state["loss_scale"]
    optimizer.steps, optimizer.state = state["steps"], None
    if arrays := arrays_of_state(saved.shapes):
        optimizer.state = [
            [
                state_of(saved, s, i, optimizer.state_like(s))
                for i in range(min(arrays, optimizer.arrays_for(s)))
            ]
            for s in optimizer.slices
        ]


def arrays_of_state(names: Iterable[str]) -> int:
    """Return how many arrays of the optimizer's state a checkpoint has, of a parameter at most.

    Its names say so. A rank that saves may not know: all of its own parameters may be frozen.
    """
    return len({name.partition("/")[0] for name in names if name.startswith("optimizer.")})


def state_of(saved: Source, s: FlatSlice, number: int, like: Array) -> Array:
    """Return one array of the optimizer's state for a flat slice, in the dtype of `like`."""
    array = array_module(like).empty_like(like)
    fill(array, [saved.part(of_state(cut, number)) for cut in s.slices], "the optimizer's state")
    return array


def fill(array: Array, values: list[np.ndarray], name: str, rounds: bool = False) -> None:
    """Write vectors, one after the other, into an array; ValueError if that would round them."""
    vector = np.concatenate([np.empty(0, array.dtype), *values]) if len(values) != 1 else values[0]
    cast = vector.astype(array.dtype, copy=False)
    exact = rounds or np.can_cast(vector.dtype, array.dtype, "safe")
    if not exact and not np.array_equal(cast.astype(vector.dtype), vector):
        raise WrongInput(
            f"{name} is {array.dtype} in the model, and would round the {vector.dtype} of the "
            "checkpoint; use a model of its dtype"
        )
    array[...] = on_device_of(cast, array).reshape(array.shape)


def have_all(described: Iterable[dict], shape: Sequence[int]) -> bool:
    """Return whether described slices have all elements of an array: see manifest.describe.

    The slices of one part have to make it up, and such parts the array, along one axis.
    """
    parts: dict[tuple, list] = defaultdict(list)
    whole: dict[int, list] = defaultdict(list)
    for cut in described:
        parts[cut["axis"], tuple(map(tuple, cut["runs"] or ()))].append((cut["start"], cut["stop"]))
    for (axis, runs), intervals in parts.items():
        sides = list(shape)
        if axis is not None:
            sides[axis] = sum(b - a for a, b in runs)
        if cover(intervals, prod(sides)):
            if axis is None:
                return True
            whole[axis] += runs
    return any(cover(runs, shape[axis]) for axis, runs in whole.items())


def cover(intervals: Iterable[tuple[int, int]], end: int) -> bool:
    """Return whether every number from 0 to `end` is in one of these intervals."""
    at = 0
    for a, b in sorted(intervals):
        if a <= at:
            at = max(at, b)
    return at >= end
