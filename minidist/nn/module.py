"""Module: parameters with global names, in a fixed order.

A parameter is drawn by its name (`generator(seed, name)`): the same on every rank, whatever part of
the model the rank holds, and different for two layers of equal shape. Two parameters with the same
name in one model are an error.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TypeVar

import numpy as np

from minidist.autograd import Tensor
from minidist.autograd.losses import cross_entropy
from minidist.backend import (
    Array,
    as_array,
    check_device,
    float_dtype,
    host_copy,
    is_float,
    to_device,
)
from minidist.errors import WrongInput, check_name
from minidist.nn.flat_parameters import FlatParameters
from minidist.nn.parameter import Parameter
from minidist.rng import Randomness, generator

Kind = TypeVar("Kind")
__all__ = ["Module", "Parameter", "Sequential", "constant", "draw"]


def draw(name: str, shape, scale: float, seed: int, dtype) -> Parameter:
    """Return a normal parameter, mean 0 and standard deviation `scale`, drawn by its name."""
    values = generator(seed, name).standard_normal(shape) * scale
    return Parameter(values.astype(float_dtype(dtype)), name)


def constant(name: str, shape, value: float, dtype) -> Parameter:
    return Parameter(np.full(shape, value, float_dtype(dtype)), name)


class Module:
    """An object with parameters and a `forward`.

    Parameters and sub-modules are attributes, or elements of lists or tuples that are attributes.

    loss  (outputs, targets, reduction_size=None) -> a scalar tensor: what every trainer takes
    """

    flat: FlatParameters | None = None
    loss: Callable[..., Tensor] = staticmethod(cross_entropy)

    def forward(self, x: Tensor | Array, randomness: Randomness | None = None) -> Tensor:
        raise NotImplementedError

    def __call__(self, x: Tensor | Array, randomness: Randomness | None = None) -> Tensor:
        """x: a tensor, or an array or lists that need no gradient; randomness: see Randomness."""
        return self.forward(as_array(x) if isinstance(x, (list, tuple)) else x, randomness)

    @property
    def layers(self) -> list["Module"]:
        """The modules whose composition is this one; by default, this one alone."""
        return [self]

    @property
    def home(self) -> FlatParameters:
        """A layer's flat vector, as the parameters' own `home`; ValueError before `flatten`."""
        if self.flat is None:
            raise WrongInput(
                f"the {type(self).__name__} is in no flat vector; call flatten() on its model first"
            )
        return self.flat

    def members(self) -> Iterator["Parameter | Module"]:
        """Yield the parameters and modules that are attributes, in the order they were set."""
        for value in vars(self).values():
            for member in value if isinstance(value, list | tuple) else [value]:
                if isinstance(member, Parameter | Module):
                    yield member

    def named_parameters(self) -> dict[str, Parameter]:
        """Return {global name: parameter} in global order, each once; frozen ones too."""
        named: dict[str, Parameter] = {}
        for member in self.members():
            for p in [member] if isinstance(member, Parameter) else member.parameters():
                if named.setdefault(p.name, p) is not p:
                    raise WrongInput(
                        f"two parameters are named {p.name!r}; give each module a name of its own"
                    )
        return named

    def modules(self, kind: type[Kind]) -> Iterator[Kind]:
        """Yield this module and all modules in it, each once: those that are of this class."""
        modules: dict[int, Module] = {id(self): self}
        for member in self.members():
            if isinstance(member, Module):
                modules.update({id(module): module for module in member.modules(Module)})
        yield from (module for module in modules.values() if isinstance(module, kind))

    def train(self, training: bool = True) -> "Module":
        """Set the mode of training, in which BatchNorm uses the statistics of the batch."""
        for module in self.modules(Module):
            if hasattr(module, "training"):
                module.training = training
        return self

    def eval(self) -> "Module":
        """Set the mode of evaluation, in which BatchNorm uses its running statistics."""
        return self.train(False)

    def parameters(self) -> list[Parameter]:
        return list(self.named_parameters().values())

    def flatten(self, empty: Callable[..., Array] | None = None) -> "Module":
        """Lay each layer's parameters into one flat vector from `empty(shape, dtype)`.

        Without `empty`, use the last allocator again: at first, ordinary memory.
        """
        taken = set()
        for layer in self.layers:
            trained = [p for p in layer.parameters() if p.requires_grad and p not in taken]
            taken.update(trained)
            layer.flat = FlatParameters(trained, empty, before=layer.flat)
        for p in self.parameters():
            if not p.requires_grad and p.home is not None:  # it leaves an older vector
                p.place(p.data.copy())
                p.home, p.grad, p.grad_buffer = None, None, None
        return self

    def freeze(self, *names: str) -> "Module":
        """Fix the named parameters (no names: all). Do this before an optimizer is made."""
        parameters = self.named_parameters()
        for name in names or parameters:
            check_name("parameter", name, parameters)
        for name in names or parameters:
            parameters[name].requires_grad = False
        return self.flatten()

    def state(self) -> dict[str, np.ndarray]:
        """Return copies of all parameters by name, on the host; if split, this rank's parts.

        ValueError if a strategy has moved parameters elsewhere; the message says how to get them.
        """
        return {name: host_copy(p.data) for name, p in self._here().items()}

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        """Copy arrays by name into the parameters, which keep their dtype and device.

        The arrays are global: a split parameter takes its part. They must be floats; a number that
        overflows the parameter's dtype is a ValueError. After a ValueError nothing has changed.
        """
        parameters = self._here()
        new = cast_state(parameters, state)
        for name, p in parameters.items():
            p.load(new[name])

    def zero_grad(self) -> None:
        """Drop all gradients, also of parameters that no optimizer has."""
        for p in self.parameters():
            p.grad = None

    def _here(self) -> dict[str, Parameter]:
        """Return all parameters by name; ValueError if a value is elsewhere."""
        parameters = self.named_parameters()
        for name, p in parameters.items():
            if where := p.placement.elsewhere:
                raise WrongInput(f"this model no longer has the value of {name}: {where}")
        return parameters

    def to(self, device: str) -> "Module":
        """Move all parameters to "cpu", "gpu" or "gpu:N"; ValueError if there is none."""
        check_device(device)
        for layer in self.layers:
            if layer.flat is not None:
                layer.flat.to(device)
        for p in self.parameters():
            p.place(to_device(p.data, device))
        return self

    def astype(self, dtype, grad_dtype=None) -> "Module":
        """Round all parameters to another float dtype; drop gradients, build new flat vectors.

        grad_dtype  in which gradients are added up, also over ranks; by default dtype
        """
        dtype = float_dtype(dtype)
        for p in self.parameters():
            if p.format.keeps_dtype:
                continue
            p.place(p.data.astype(dtype))
            p.grad, p.grad_buffer = None, None
            wide = None if grad_dtype is None else float_dtype(grad_dtype)
            p.format = replace(p.format, grad_dtype=wide)
        return self.flatten()


def check_state(state: dict[str, np.ndarray], shapes: dict[str, tuple[int, ...]]) -> None:
    """Raise ValueError unless the state has floats of these names and shapes, and nothing else."""
    if wrong := sorted(set(shapes) ^ set(state)):
        where = "the model" if wrong[0] in state else "the state"
        raise WrongInput(f"state and model differ: {wrong[0]!r} is missing in {where}")
    for name, shape in shapes.items():
        array = as_array(state[name])
        if array.shape != shape:
            raise WrongInput(
                f"{name} is {list(shape)} in the model, {list(array.shape)} in the state"
            )
        if not is_float(array.dtype):
            raise WrongInput(
                f"{name} is {array.dtype} in the state; parameters are floats, such as float32"
            )


def cast_state(parameters: dict[str, Parameter], state: dict) -> dict[str, Array]:
    """Return the state's arrays as these parameters hold them, or raise ValueError."""
    check_state(state, {name: p.whole_shape for name, p in parameters.items()})
    arrays = {name: as_array(array) for name, array in state.items()}
    return {
        name: p.cast(arrays[name] if p.shard is None else p.shard.of(arrays[name]))
        for name, p in parameters.items()
    }


def as_layers(layers: Module | Iterable[Module]) -> list[Module]:
    """Return a module, or modules that follow each other, as a list; ValueError for others."""
    layers = [layers] if isinstance(layers, Module) else list(layers)
    for layer in layers:
        if not isinstance(layer, Module):
            raise WrongInput(
                f"a layer is an nn.Module, not {layer!r}; derive a class from nn.Module with a "
                "forward(x, randomness=None)"
            )
    return layers


class Sequential(Module):
    """The composition of its layers: layers[n](... layers[0](x)).

    >>> model = nn.Sequential([nn.Linear(3, 4, name="a"), nn.Linear(4, 2, name="b")])
    >>> model(np.ones((5, 3), np.float32)).shape
    (5, 2)
    """

    def __init__(self, layers: Module | Iterable[Module]):
        self.sequence = as_layers(layers)
        self.named_parameters()  # raises where two share a name
        self.flatten()

    @property
    def layers(self) -> list[Module]:
        return self.sequence

    def forward(self, x: Tensor | Array, randomness: Randomness | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, randomness)
        return x
