"""The parameters of a layer as views of one flat vector, and their gradients as views of another.

    vector    | weight[4, 2]             | bias[2] |        an optimizer: one rule over it
    gradient  | dweight                  | dbias   |        a bucket, a ZeRO shard: a slice

Contiguous, in the order of the parameters; a tied parameter has one entry; a frozen one has none.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from minidist.autograd.recording import tick
from minidist.backend import (
    Array,
    array_module,
    empty_on_device_of,
    on_device_of,
    same_device,
    to_device,
)
from minidist.errors import WrongInput
from minidist.nn.parameter import Parameter, Scale
from minidist.nn.shard import Slice


class FlatParameters:
    """One vector, where the parameters were; they become views of it.

    allocator         empty(shape, dtype) -> array, such as group.empty; ordinary memory is used if
                      it is None, or if its arrays are not where the parameters are
    before            the FlatParameters that this replaces: its allocator is the default, and where
                      it is, a vector of no parameters is, too
    vector, gradient  1-D arrays of `size` elements; a gradient may have a wider dtype
    offsets           where each parameter begins in them
    locked            None, or in words why no optimizer may update the vector now
    scale             None, or the LossScale that multiplies the gradient (mixed_precision.py)
    part_of           None, or the FlatParameters of which this vector is a part (a shard)
    """

    allocator: Callable[..., Array] | None
    locked: str | None = None
    scale: Scale | None = None
    touched = 0  # when `changed` was last called
    part_of: "FlatParameters | None" = None

    def __init__(
        self,
        parameters: list[Parameter],
        allocator: Callable[..., Array] | None = None,
        before: "FlatParameters | None" = None,
    ):
        dtypes = {str(p.dtype) for p in parameters}
        if len(dtypes) > 1:
            raise WrongInput(f"one flat vector holds one dtype, not {' and '.join(sorted(dtypes))}")
        self.parameters = list(parameters)
        self.shapes = [p.shape for p in parameters]
        *self.offsets, self.size = accumulate((p.size for p in parameters), initial=0)
        self.allocator = allocator
        if before is not None and allocator is None:
            self.allocator = before.allocator
        dtype = parameters[0].dtype if parameters else np.dtype("float32")
        self.grad_dtype = (parameters[0].format.grad_dtype if parameters else None) or dtype
        self.vector: Array = before.vector if before else np.empty(0)
        self.vector, self.gradient = (
            self.empty((self.size,), kind) for kind in (dtype, self.grad_dtype)
        )
        for p, view in zip(self.parameters, self.views(self.vector), strict=True):
            view[...] = on_device_of(p.data, view)
            p.home, p.grad = self, None
        self.bind(self.vector)

    def empty(self, shape, dtype) -> Array:
        """Return an uninitialised array where the parameters are, from the allocator if it can."""
        here = self.parameters[0].data if self.parameters else self.vector
        space = None if self.allocator is None else self.allocator(shape, dtype)
        if space is None or not same_device(space, here):
            return empty_on_device_of(here, shape, dtype)
        return space

    def views(self, vector: Array) -> list[Array]:
        """Cut a vector of `size` elements into arrays of the parameters' shapes."""
        ends = pairwise([*self.offsets, self.size])
        return [vector[a:b].reshape(shape) for (a, b), shape in zip(ends, self.shapes, strict=True)]

    def bind(self, vector: Array, gradient: Array | None = None) -> None:
        """Make the parameters views of another vector; the old arrays do not change."""
        gradient = self.gradient if gradient is None else gradient
        self.vector, self.gradient = vector, gradient
        for p, data, buffer in zip(
            self.parameters, self.views(vector), self.views(gradient), strict=True
        ):
            if p.home is self:
                p.place(data)
                p.grad_buffer = buffer

    def changed(self, at: int | None = None) -> None:
        """Record that the vector has changed in place: older graphs must not run backward.

        at  when, on the clock of `tick`; by default now
        """
        self.touched = tick() if at is None else max(self.touched, at)
        for p in self.parameters:
            p.updated = max(p.updated, self.touched)

    def last_changed(self) -> int:
        """Return when an element was last changed in place, on the clock of `tick`.

        `updated` alone does not say it: PipeDream sets it to 0 (weight_stashing.py).
        """
        above = 0 if self.part_of is None else self.part_of.last_changed()
        return max([above, self.touched, *(max(p.updated, p.replaced) for p in self.parameters)])

    def collect_gradients(self) -> None:
        """Write every parameter's `.grad`, wherever it is, into `gradient`; None counts as zero."""
        for p, at in zip(self.parameters, self.offsets, strict=True):
            if p.home is not self:
                raise moved(p.name)  # updates would be lost
            if p.grad is None or p.grad is not p.grad_buffer:  # which a tied one may not have
                place = self.gradient[at : at + p.size].reshape(p.shape)
                place[...] = 0 if p.grad is None else p.grad

    def to(self, device: str) -> None:
        """Move vector and gradient to a device; keep the gradients so far."""
        self.collect_gradients()
        self.bind(to_device(self.vector, device), to_device(self.gradient, device))
        for p in self.parameters:
            p.grad = None if p.grad is None else p.grad_buffer

    def __getstate__(self):
        # A copy has an optimizer of its own, or none, and may be in a process with another clock.
        left = "gradient", "allocator", "scale", "touched"
        kept = {k: v for k, v in vars(self).items() if k not in left}
        return kept | {"at_home": [p.home is self for p in self.parameters]}

    def __setstate__(self, state):
        at_home = state.pop("at_home")
        vars(self).update(state, allocator=None)
        for p, here in zip(self.parameters, at_home, strict=True):
            if here:
                p.home = self
        self.bind(self.vector, array_module(self.vector).zeros_like(self.vector, self.grad_dtype))


def moved(name: str) -> ValueError:
    return WrongInput(
        f"{name} is no longer in this flat vector, or no longer trained there: the model was "
        "frozen, cast or flattened after its optimizer, reducer, Zero, Hybrid or server was made; "
        "make those afterwards"
    )


def strays(parameters: Iterable[Parameter], flats: Iterable[FlatParameters]) -> list[str]:
    """Return the names of what is no longer as it was flattened: these vectors are what trains.

    A parameter was frozen or unfrozen by its `requires_grad`, or replaced, or flattened again.
    """
    flat_of = {p: flat for flat in flats for p in flat.parameters}
    trained = {p for p in parameters if p.requires_grad}
    left = {p for p, flat in flat_of.items() if p.home is not flat}
    return sorted(p.name for p in left | (flat_of.keys() ^ trained))


def check_flat(parameters: Iterable[Parameter], flats: Iterable[FlatParameters]) -> None:
    """Raise ValueError unless these vectors are what trains of the parameters."""
    if names := strays(parameters, flats):
        raise moved(names[0])


@dataclass(frozen=True)
class FlatSlice:
    """Elements start to stop of a FlatParameters, as the optimizer sees them."""

    home: FlatParameters
    start: int
    stop: int

    data = property(lambda self: self.home.vector[self.start : self.stop])
    gradient = property(lambda self: self.home.gradient[self.start : self.stop])

    def within(self, cut: slice) -> "FlatSlice":
        """Return the elements of a slice of it, counted from `start`."""
        first, last, _ = cut.indices(self.stop - self.start)
        return FlatSlice(self.home, self.start + first, self.start + last)

    @property
    def parts(self) -> dict[Parameter, slice]:
        """The parameters that begin in it, and where they are, counted from `start`."""
        begins = zip(self.home.parameters, self.home.offsets, strict=True)
        return {
            p: slice(at - self.start, at - self.start + p.size)
            for p, at in begins
            if self.start <= at < self.stop
        }

    @property
    def slices(self) -> tuple[Slice, ...]:
        """Which elements of which global arrays these are, in order."""
        cuts = []
        for p, at in zip(self.home.parameters, self.home.offsets, strict=True):
            for cut in p.slices:
                first, last = max(self.start, at), min(self.stop, at + len(cut))
                if first < last:
                    cuts.append(cut.within(first - at, last - at))
                at += len(cut)
        return tuple(cuts)


def flat_slices(parameters: list[Parameter]) -> list[FlatSlice]:
    """Return the fewest slices that cover the parameters that need gradients, each once."""
    slices: list[FlatSlice] = []
    for p in dict.fromkeys(parameters):
        if not p.requires_grad:
            continue
        home = getattr(p, "home", None)  # a plain tensor has none
        if home is None:
            raise WrongInput(
                f"parameter {p.name!r} is in no flat vector; call flatten() on its module first"
            )
        places = zip(home.parameters, home.offsets, strict=True)
        start = next(offset for other, offset in places if other is p)
        stop = start + p.size
        if slices and slices[-1].home is home and slices[-1].stop == start:
            start = slices.pop().start
        slices.append(FlatSlice(home, start, stop))
    return slices
