"""What a caller may give to a group; what it may not raises ValueError, with the remedy."""

import sys
from collections.abc import Callable, Iterable
from operator import index

import numpy as np

from minidist.backend import Array, is_half, on_gpu
from minidist.comm.collectives import ALGORITHMS, split_sizes

REDUCTIONS = {"sum": "add", "max": "maximum", "min": "minimum", "prod": "multiply"}


def numeric(x, axis: int | None = None) -> Array:
    """Return x as a numeric array, with the axis that is asked for."""
    if type(x) is not np.ndarray:
        arraylike = hasattr(x, "dtype") and hasattr(x, "nbytes")
        if not arraylike and not isinstance(x, int | float | complex | list):
            raise ValueError(
                f"only arrays travel between ranks, not {type(x).__name__}; "
                "pass a tensor's .data or .grad"
            )
        refuse_masked(x)
        x = x if on_gpu(x) else np.asarray(x)  # and no subclass
    numeric_dtype(x.dtype)
    if axis is not None and not -x.ndim <= axis < x.ndim:
        raise ValueError(f"axis {axis} does not exist in an array of shape {list(x.shape)}")
    return x


def numeric_dtype(dtype: np.dtype | str) -> np.dtype:
    try:
        dtype = np.dtype(dtype)
    except TypeError:
        raise ValueError(
            f"{dtype!r} is not a dtype; use a numeric one, such as 'float32'"
        ) from None
    if dtype.kind not in "biufc" and not is_half(dtype):
        raise ValueError(f"arrays of {dtype} do not travel between ranks; use numbers")
    return dtype


def refuse_masked(x) -> None:
    masked = sys.modules.get("numpy.ma")  # before its import, of 1 MB, there is no masked array
    if isinstance(x, getattr(masked, "MaskedArray", ())):  # another thread may be importing it
        raise ValueError(
            "masked arrays do not travel between ranks; use .filled(), .compressed() or .data"
        )


def whole(x, what: str, kind: str = "a whole number") -> int:
    """Return x as an int, whatever whole number it is; nothing is rounded."""
    try:
        return index(x)
    except TypeError:
        raise ValueError(f"{what} is {kind}, not {x!r}") from None


def whole_64(x, what: str, kind: str = "a whole number") -> int:
    """Return x as an int that fits 64 bits."""
    if not -(2**63) <= whole(x, what, kind) < 2**63:
        raise ValueError(f"{what} is {kind} of 64 bits, not {x}")
    return index(x)


def listed(items: Iterable, what: str) -> list:
    try:
        return list(items)
    except TypeError:
        raise ValueError(f"{what} are a list, not {items!r}") from None


def pieces_of(rows: int, ranks: int, sizes: list[int] | None) -> list[int]:
    """Return rows per rank: those given, or as equal as can be, the larger first."""
    if sizes is None:
        return split_sizes(rows, ranks)
    sizes = [whole(n, "a size") for n in listed(sizes, "sizes")]
    if len(sizes) != ranks or sum(sizes) != rows or min(sizes) < 0:
        raise ValueError(f"sizes {sizes} do not cut {rows} rows into {ranks} pieces")
    return sizes


def check_place(out: Array) -> None:
    """Raise ValueError unless `out` is an array that can be written to."""
    refuse_masked(out)
    if not isinstance(out, np.ndarray) and not on_gpu(out):
        raise ValueError(f"out must be an array, not {type(out).__name__}; use group.empty")
    if isinstance(out, np.ndarray) and not out.flags.writeable:
        raise ValueError("out is read-only; use an array that can be written to")


def check_out(out: Array, x: Array) -> None:
    check_place(out)
    if out.shape != x.shape or out.dtype != x.dtype:
        raise ValueError(
            f"out is {out.dtype}{list(out.shape)}, x is {x.dtype}{list(x.shape)}: they must agree"
        )


def check_algorithm(algorithm: str | None) -> None:
    if algorithm is not None and algorithm not in ALGORITHMS:
        names = ", ".join(ALGORITHMS)
        raise ValueError(f"unknown algorithm {algorithm!r}; choose one of {names}, or None")


def ufunc(op: str, xp=np) -> Callable:
    """Return the function of NumPy, or of xp, that combines two arrays."""
    if op not in list(REDUCTIONS):
        raise ValueError(f"unknown reduction {op!r}; choose one of {', '.join(REDUCTIONS)}")
    return getattr(xp, REDUCTIONS[op])
