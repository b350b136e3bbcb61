"""A parameter: a leaf with a global name, whose gradient is a view of its layer's flat vector."""

import weakref
from typing import Protocol

import numpy as np

from minidist.autograd import Tensor
from minidist.autograd.deferred import Gradient
from minidist.autograd.eight_bits import EightBits
from minidist.autograd.recording import tick
from minidist.autograd.tensor import unbroadcast
from minidist.backend import Array, array_module, as_array, is_float, on_device_of
from minidist.errors import WrongInput
from minidist.nn.shard import Shard, Slice

# Of this run and its graph: a copy, a pickle and a part leave these out.
OF_THIS_RUN = {"_data", "home", "grad", "grad_buffer", "creator", "hooks", "summed"}
OF_THIS_RUN |= {"updated", "loaded", "drops", "keeper"}  # of its clock, and its shard
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
    """What is used of a FlatParameters by the parameters that it holds.

    scale  None, or what multiplies the gradients (mixed_precision.py)
    """

    scale: Scale | None

    def changed(self) -> None: ...


class Parameter(Tensor):
    """A leaf with a global name, which knows whether this rank has the whole array.

    data         its array; in a home a view of the home's vector, which `load` fills
    grad         a view of `grad_buffer` after backward, which the next gradient overwrites: copy to
                 keep it
    grad_buffer  its part of the home's gradient vector, or None
    grad_dtype   None, or the buffer's dtype where gradients are added up in a wider one
    summed       None, or (weak reference to an array, ranks): see `summed_over`
    home         the FlatParameters that holds it, or None
    shard        which part of the global array it is, or None for all of it
    spread       None, or in words what the model's parameters are spread over, and which
                 sum_squares= gives their global norm; set on one rank too, so that a program runs
                 on any number
    elsewhere    None, or in words which rank has the current value; `Module.state` and `load_state`
                 then raise
    cuts         what it holds, if it is a vector of elements of other parameters; None: itself
    keeps_dtype  whether `astype` leaves it as it is
    loaded       when `load` last replaced the data, on the clock of `tick`; 0: never
    drops        how often the gradient was set to None
    keeper       the shard that gets its summed gradient, with ZeRO; or None
    """

    name: str
    _data: Array
    grad_buffer: Array = None
    grad_dtype: np.dtype | None = None
    summed: tuple[weakref.ref, frozenset[int]] | None = None
    home: Home | None = None
    shard: Shard | None = None
    spread: str | None = None
    elsewhere: str | None = None
    cuts: tuple[Slice, ...] | None = None
    keeps_dtype: bool = False
    product: EightBits | None = None
    loaded = 0
    drops: int = 0
    keeper: "Parameter | None" = None

    def __init__(self, data, name: str, shard: Shard | None = None):
        super().__init__(data, requires_grad=True, name=name)
        if shard is not None:
            self.shard, self.spread = shard, PARTS

    def part(self, shard: Shard, spread: str = PARTS) -> "Parameter":
        """Return a new parameter of the same name, a copy of this part of the data.

        The old parameter is marked as `elsewhere`: from now on its value is in the parts.
        """
        part = Parameter(shard.of(self.data), self.name)
        vars(part).update(self.traits(), shard=shard, spread=spread, elsewhere=None)
        if self.product is not None:
            name = f"rows or columns of {self.name}"
            self.product.check_part(name, shard.indices, shard.full)
        self.elsewhere = (
            "it was cut into parts; use state() and load_state() of what split the model (a split "
            "model shows this rank's parts, Hybrid the whole)"
        )
        return part

    def assign(self, array: Array) -> None:
        """Do what `p.data = array` says, outside of a flat vector; ValueError in one.

        Optimizers and strategies would go on with what is in the vector.
        """
        if self.home is not None and array is not self._data:  # which it is after `p.data -= ...`
            raise WrongInput(f"{self.name} cannot be assigned: {self.elsewhere or IN_A_VECTOR}")
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
        buffer, over = self.grad_buffer, self.summed_over
        if buffer is None or (self.grad is not None and self.grad is not buffer):
            super().accumulate(contribution)
        else:
            if callable(contribution):
                in_place = self.grad is None and self.grad_dtype is None
                contribution = contribution(out=buffer) if in_place else contribution()
            dx = unbroadcast(contribution, self.shape)
            if self.grad is not None:
                buffer += dx
            elif dx is not buffer:
                buffer[...] = dx
            self.grad = buffer
        if self.summed is not None:
            self.note_sum(over)  # also none: the buffer may hold an older sum

    @property
    def summed_over(self) -> frozenset[int]:
        """The ranks that `note_sum` recorded for `.grad`; later additions do not erase them."""
        if self.summed is None or self.grad is None or self.summed[0]() is not self.grad:
            return frozenset()
        return self.summed[1]

    def note_sum(self, over: frozenset[int]) -> None:
        """Record that the array in `.grad` now is a sum over these ranks."""
        self.summed = None if self.grad is None else (weakref.ref(self.grad), over)

    def use_buffer(self) -> None:
        """Let `.grad` be the buffer, which has its values; a part of a sum is still one."""
        over, self.grad = self.summed_over, self.grad_buffer
        if over:
            self.note_sum(over)

    def load(self, values: Array) -> None:
        """Replace the data, in place. ValueError: they do not fit, or this rank has no data."""
        if self.elsewhere:
            raise WrongInput(f"{self.name} cannot be loaded here: {self.elsewhere}")
        self.data[...] = self.cast(values)
        self.note_load()

    def note_load(self) -> None:
        """Record that the data was replaced: whoever keeps a copy, or owes it a part, follows."""
        self.updated = self.loaded = tick()

    @property
    def grad(self) -> Array | None:
        return vars(self).get("grad")

    @grad.setter
    def grad(self, value: Array | None) -> None:
        self.drops += value is None
        vars(self)["grad"] = value

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
        whole = Slice(self.name, self.whole_shape, self.shard, 0, self.size)
        return (whole,) if self.cuts is None else self.cuts

    def traits(self) -> dict:
        """Return what this parameter keeps, whatever its array is."""
        return {key: value for key, value in vars(self).items() if key not in OF_THIS_RUN}

    def __getstate__(self):
        """Pickle the data once, in the home's vector; a copy has no gradient, hooks or graph."""
        where = "_data" if self.home is None else "home"
        return self.traits() | {where: getattr(self, where)}
