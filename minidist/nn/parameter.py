"""A parameter: a leaf with a global name, whose gradient is a view of its layer's flat vector."""

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from minidist.autograd import Tensor
from minidist.autograd.deferred import Gradient
from minidist.autograd.recording import tick
from minidist.autograd.tensor import unbroadcast
from minidist.backend import Array, array_module, as_array, is_float, on_device_of
from minidist.errors import WrongInput
from minidist.nn.shard import Shard, Slice

COPIED = "name", "requires_grad", "placement", "format"  # by a copy and a pickle, besides the data
IN_A_VECTOR = (
    "it is a view of a flat vector, which optimizers and strategies update; use p.load(array), "
    "which writes into it"
)
PARTS = "the ranks that hold its parts: pass sum_squares=, which adds up the squares of all ranks"


class Scale(Protocol):
    """What multiplies gradients, and how many steps were skipped: a LossScale."""

    value: float
    skipped: int


class Home(Protocol):
    """What is read of the FlatParameters that holds a parameter."""

    scale: Scale | None

    def changed(self) -> None: ...


@dataclass
class Placement:
    """Which elements of the model a parameter has on this rank, and who has the others.

    shard      which part of the global array it is, or None for all of it
    cuts       what it holds, if it is a vector of elements of other parameters; None: itself
    spread     None, or in words what the model's parameters are spread over, and which
               sum_squares= gives their global norm; set on one rank too, so that a program runs
               on any number
    elsewhere  None, or in words which rank has the current value; `Module.state` and `load_state`
               then raise
    """

    shard: Shard | None = None
    cuts: tuple[Slice, ...] | None = None
    spread: str | None = None
    elsewhere: str | None = None


class Parameter(Tensor):
    """A leaf with a global name, which knows whether this rank has the whole array.

    name, requires_grad
    placement    a Placement
    format       a NumberFormat

    Copies, pickles and parts keep these. The rest is of this run:

    data         its array; in a home a view of the home's vector, which `load` fills
    home         the FlatParameters that holds it, or None
    grad         a view of `grad_buffer` after backward, which the next gradient overwrites: copy to
                 keep it
    grad_buffer  its part of the home's gradient vector, or None
    summed_over  the ranks whose sum `grad` is: set it after the array, for a new array is no sum.
                 What is added to it later does not change it
    keeper       the shard that gets its summed gradient, with ZeRO; or None
    drops        how often the gradient was set to None
    replaced     when `load` last replaced the data, on the clock of `tick`; 0: never
    """

    name: str
    _data: Array
    _grad: Array | None = None
    grad_buffer: Array = None
    summed_over: frozenset[int] = frozenset()
    home: Home | None = None
    keeper: "Parameter | None" = None
    drops = 0
    replaced = 0

    def __init__(self, data, name: str, shard: Shard | None = None):
        super().__init__(data, requires_grad=True, name=name)
        self.placement = Placement(shard, spread=None if shard is None else PARTS)

    shard = property(lambda self: self.placement.shard)

    def part(self, shard: Shard, spread: str = PARTS) -> "Parameter":
        """Return a new parameter of the same name, a copy of this part of the data.

        The old parameter is marked as `elsewhere`: from now on its value is in the parts.
        """
        part = Parameter(shard.of(self.data), self.name)
        part.requires_grad, part.format = self.requires_grad, self.format
        part.placement = replace(self.placement, shard=shard, spread=spread, elsewhere=None)
        if self.format.product is not None:
            name = f"rows or columns of {self.name}"
            self.format.product.check_part(name, shard.indices, shard.full)
        self.placement.elsewhere = (
            "it was cut into parts; use state() and load_state() of what split the model (a split "
            "model shows this rank's parts, Hybrid the whole)"
        )
        return part

    def assign(self, array: Array) -> None:
        """Do what `p.data = array` says, outside of a flat vector; ValueError in one."""
        # Optimizers and strategies would go on with what is in the vector.
        if self.home is not None and array is not self._data:  # which it is after `p.data -= ...`
            reason = self.placement.elsewhere or IN_A_VECTOR
            raise WrongInput(f"{self.name} cannot be assigned: {reason}")
        self._data = array

    data = property(lambda self: self._data, assign)

    def cast(self, array: Array) -> Array:
        """Return an array as this parameter can hold it; ValueError if it cannot."""
        array = on_device_of(as_array(array), self.data)
        if array.shape != self.shape or not is_float(array.dtype):
            raise WrongInput(
                f"{self.name} is {list(self.shape)} of {self.dtype}, and cannot become "
                f"{list(array.shape)} of {array.dtype}; make a model of that shape, or call "
                "model.astype for another dtype"
            )
        with np.errstate(over="ignore"):
            new = array.astype(self.dtype)
        xp = array_module(new)
        if lost := int((xp.isinf(new) & ~xp.isinf(array)).sum()):
            raise WrongInput(
                f"{lost} numbers of {self.name} overflow {self.dtype}; load them into a model of "
                "the state's dtype"
            )
        return new

    def place(self, array: Array) -> None:
        """Let this array, which has the same values, be the data: a view, or on another device."""
        self._data = array

    def accumulate(self, contribution: Gradient) -> None:
        """Add to `.grad`; write the first contribution into the buffer, if there is one."""
        buffer, grad = self.grad_buffer, self._grad
        if buffer is None or (grad is not None and grad is not buffer):
            over = frozenset() if grad is None else self.summed_over
            super().accumulate(contribution)
            self.summed_over = over
            return
        if callable(contribution):
            in_place = grad is None and self.format.grad_dtype is None
            contribution = contribution(out=buffer) if in_place else contribution()
        dx = unbroadcast(contribution, self.shape)
        if grad is not None:
            buffer += dx
        elif dx is not buffer:
            buffer[...] = dx
        self.grad = buffer

    def use_buffer(self) -> None:
        """Let `.grad` be the buffer, which has its values."""
        self.grad, self.summed_over = self.grad_buffer, self.summed_over

    def load(self, values: Array) -> None:
        """Replace the data, in place. ValueError: they do not fit, or this rank has no data."""
        if self.placement.elsewhere:
            raise WrongInput(f"{self.name} cannot be loaded here: {self.placement.elsewhere}")
        self.data[...] = self.cast(values)
        self.note_replaced()

    def note_replaced(self) -> None:
        """Record that the data was replaced: whoever keeps a copy, or owes it a part, follows."""
        self.updated = self.replaced = tick()

    @property
    def grad(self) -> Array | None:
        return self._grad

    @grad.setter
    def grad(self, value: Array | None) -> None:
        if value is None:
            self.drops += 1
        if value is None or value is not self._grad:
            self.summed_over = frozenset()
        self._grad = value

    @property
    def summed_in(self) -> "Parameter":
        """The parameter that gets the summed gradient: itself or, with ZeRO, its shard."""
        return self if self.keeper is None else self.keeper

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape of the global array."""
        return self.shape if self.shard is None else self.shard.whole_shape(self.shape)

    @property
    def slices(self) -> tuple[Slice, ...]:
        """Which elements of which global arrays this parameter holds, in its own order."""
        if self.placement.cuts is not None:
            return self.placement.cuts
        return (Slice(self.name, self.whole_shape, self.shard, 0, self.size),)

    def __getstate__(self):
        """Pickle the data once, in the home's vector; a copy has no gradient, hooks or graph."""
        where = "_data" if self.home is None else "home"
        return {key: getattr(self, key) for key in (*COPIED, where)}
