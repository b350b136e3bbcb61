"""What a computation and its backward refuse, and what to do instead."""

from collections.abc import Sequence
from numbers import Integral
from typing import NoReturn, Protocol

import numpy as np
from numpy import ndarray

from minidist.backend import (
    Array,
    array_module,
    as_array,
    is_float,
    on_device_of,
    on_gpu,
    to_host,
    whole_numbers,
)
from minidist.errors import WrongInput, check_number

NUMBERS = (float, int)
EXPONENT = "an exponent is a number; for a tensor b write a ** b as exp(b * log(a))"


class Leaf(Protocol):
    """What is read of a Tensor here."""

    data: Array
    requires_grad: bool
    name: str | None
    updated: int


class Node(Protocol):
    """What is read of a Function here."""

    order: int

    @property
    def inputs(self) -> Sequence: ...


def numbers(x, requires_grad: bool) -> Array:
    """Return the array of a new tensor; ValueError if it has no numbers, or drops a gradient."""
    if hasattr(x, "requires_grad"):
        if x.requires_grad:
            raise WrongInput(
                "a tensor made of another one has no gradient to give it; use that one, or detach()"
            )
        x = x.data
    x = as_array(x)
    if not is_float(x.dtype) and (requires_grad or x.dtype.kind not in "iub"):
        rule = "only floats have gradients" if requires_grad else "a tensor holds real numbers"
        raise WrongInput(f"{rule}, not {x.dtype}; use .astype")
    return x


def no_comparison(*_: object) -> NoReturn:
    raise WrongInput(
        "a tensor has no truth value and no order; compare .data, or use `is`. For membership use "
        "a set or a dict, not a list"
    )


def only_itself(x: object, other: object) -> bool:
    """Answer what a weak dictionary asks, whether it is the same tensor; ValueError for others."""
    return other is x or no_comparison()


def no_numpy(*_: object, **options: object) -> NoReturn:
    raise WrongInput(
        "NumPy's functions do not differentiate; use the operators and methods of tensors and "
        "the functions of minidist.autograd, such as concatenate, or .data if no gradient is wanted"
    )


def no_exponent(*_: object) -> NoReturn:
    raise WrongInput(EXPONENT)


def check_exponent(n: float) -> float:
    """Return an exponent as a number of Python's."""
    check_number(EXPONENT, n, lambda _: True)
    return int(n) if isinstance(n, Integral) else float(n)  # NumPy's would widen float32


def check_rate(rate: float) -> None:
    check_number("a dropout rate lies in [0, 1)", rate, lambda x: 0 <= x < 1)


def check_axes(axis: int | tuple[int, ...] | None, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape; ValueError unless these are axes of it, each once."""
    axes = () if axis is None else axis if isinstance(axis, tuple) else (axis,)
    n = len(shape)
    fit = all(isinstance(i, Integral) and -n <= i < n for i in axes)
    if not fit or len({i % n for i in axes}) < len(axes):
        allowed = f" from {-n} to {n - 1}, each once" if n else ", and a 0-d tensor has none"
        raise WrongInput(f"axis={axis} of a tensor {list(shape)}: axes are whole numbers{allowed}")
    return shape


def alike(function: Node, arrays: list, inputs: tuple) -> list:
    """Return the inputs' arrays, which must have one dtype and one device, and Python numbers."""
    dtype = None
    for x in arrays:
        if type(x) is ndarray and (dtype is None or x.dtype is dtype):
            dtype = x.dtype
        elif type(x) not in NUMBERS:
            return made_alike(function, arrays, inputs)
    return arrays  # the common case, in as few steps as possible


def made_alike(function: Node, arrays: list, inputs: tuple) -> list:
    dtype, kind, mixed = None, None, False
    for i, x in enumerate(arrays):
        if isinstance(x, NUMBERS):
            arrays[i] = float(x) if isinstance(x, np.floating) else x  # np.float64 is a float
            continue
        x = arrays[i] = as_array(x)
        if dtype is None:
            dtype, kind = x.dtype, type(x)
        elif x.dtype != dtype:
            raise WrongInput(
                f"{type(function).__name__} of {dtype} and {x.dtype}; use .astype on the model, or "
                "on an array before a tensor is made of it"
            )
        elif type(x) is not kind:
            mixed = True
    return on_one_device(function, arrays, inputs) if mixed else arrays


def on_one_device(function: Node, arrays: list, inputs: tuple) -> list:
    """If some are on a GPU, make the host's scalars numbers; ValueError for its arrays."""
    if not any(on_gpu(x) for x in arrays):
        return arrays  # of subclasses of numpy.ndarray
    for i, (source, x) in enumerate(zip(inputs, arrays, strict=True)):
        if isinstance(x, ndarray):
            if x.ndim or hasattr(source, "requires_grad"):
                raise WrongInput(
                    f"{type(function).__name__} of an array on the host, {x.dtype}{list(x.shape)}, "
                    "and one on a GPU; move one of them with backend.to_device, or a model "
                    "with model.to"
                )
            arrays[i] = x.item()
    return arrays


def first_gradient(root: Leaf, grad: Array | None) -> Array:
    """Return the gradient with which backward begins at root."""
    data = root.data
    if not root.requires_grad or (grad is None and data.size != 1):
        raise no_first_gradient(root)
    grad = array_module(data).ones_like(data) if grad is None else as_array(grad)
    if (on_gpu(grad), grad.shape, grad.dtype) != (on_gpu(data), data.shape, data.dtype):
        raise unlike(grad, data)
    return grad


def no_first_gradient(root: Leaf) -> ValueError:
    if not root.requires_grad:
        return WrongInput("this tensor does not depend on anything that requires a gradient")
    return WrongInput(
        f"backward needs grad= of shape {root.data.shape}: only one element may default to 1"
    )


def unlike(grad: Array, data: Array) -> ValueError:
    if on_gpu(grad) != on_gpu(data):
        return WrongInput(
            "grad and the tensor are not on the same device: one is on the host, one on a GPU; "
            "move grad with backend.to_device"
        )
    return WrongInput(
        f"grad is {grad.dtype}{list(grad.shape)}, the tensor is {data.dtype}{list(data.shape)}"
    )


def not_one_per_input(function: Node, gradients: tuple) -> ValueError:
    return WrongInput(
        f"{type(function).__name__}.backward must return a gradient, or None, for each "
        f"input of forward: {len(function.inputs)}, not {len(gradients)}"
    )


def freed() -> ValueError:
    return WrongInput(
        "an earlier backward has already freed this graph; "
        "add losses up and call backward once, or run the forward pass again"
    )


def updated_since(leaf: Leaf) -> ValueError:
    return WrongInput(
        f"{leaf.name} was updated after the forward pass that this backward belongs to, so the "
        "gradient would mix old and new weights; run the forward pass again"
    )


def check_indices(
    indices: Leaf | Array,
    what: str,
    count: int,
    other: Array | None = None,
    domain: str = "a vocabulary of {}",
    first: int = 0,
) -> Array:
    """Return indices, int64, beside `other` or by default on the host; from `first`, below `count`.

    ValueError for others, but not where they stay on a GPU, for which a look would have to wait:
    there the kernels make nan of one that is outside, so that it shows in the loss.
    """
    indices = whole_numbers(indices, f"{what} indices")
    if on_gpu(indices) and other is not None and on_gpu(other):
        return indices
    indices = to_host(indices)
    if indices.size and not first <= indices.min() <= indices.max() < count:
        raise outside(indices, what, domain.format(count), first)
    return indices if other is None else on_device_of(indices, other)


def outside(indices: Array, what: str, domain: str, first: int) -> ValueError:
    if indices.min() >= first:
        return WrongInput(f"{what} {indices.max()} is outside {domain}")
    ignored = f"; what does not count is IGNORED = {first}" if first else ""
    return WrongInput(f"{what} index {indices.min()} is negative{ignored}")


def is_basic(index) -> bool:
    """Return whether an index has no arrays, and so names every element at most once."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is None or part is Ellipsis or isinstance(part, int | slice) for part in parts)


def check_index(index, a: Array) -> None:
    """Raise IndexError if an array in the index names no element.

    If the index is on the GPU, too, the host waits for it.
    """
    if not on_gpu(a) or is_basic(index):
        return  # NumPy checks it; a GPU would wrap it silently
    parts: list[Array] = [
        part if part is None or part is Ellipsis or isinstance(part, slice) else as_array(part)
        for part in (index if isinstance(index, tuple) else (index,))
    ]
    used = [axes_of(part) for part in parts]
    for i, part in enumerate(parts):
        if not (is_basic(part) or part.dtype == bool) and part.size:
            after = any(before is Ellipsis for before in parts[:i])
            size = a.shape[a.ndim - sum(used[i:]) if after else sum(used[:i])]
            for extreme in (int(part.min()), int(part.max())):
                if not -size <= extreme < size:
                    raise IndexError(f"index {extreme} is outside an axis of {size}")


def axes_of(part) -> int:
    """Return the number of axes of an array that a part of an index takes."""
    if part is None or part is Ellipsis:
        return 0
    return part.ndim if not isinstance(part, slice) and part.dtype == bool else 1
