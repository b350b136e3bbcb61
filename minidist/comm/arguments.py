"""What a caller may give to a group; what it may not raises ValueError, with the remedy."""

import sys
from collections.abc import Callable, Iterable
from operator import index

import numpy as np

from minidist.backend import Array, is_half, on_gpu
from minidist.errors import WrongInput, check_name
from minidist.pieces import split_sizes

NUMERIC = "biufc"  # kinds of dtypes
REDUCTIONS = {"sum": "add", "max": "maximum", "min": "minimum", "prod": "multiply"}


def numeric(x, axis: int | None = None) -> Array:
    """Return x as a numeric array, with the axis that is asked for."""
    if type(x) is not np.ndarray:
        arraylike = hasattr(x, "dtype") and hasattr(x, "nbytes")
        if not arraylike and not isinstance(x, int | float | complex | list):
            raise WrongInput(
                f"only arrays travel between ranks, not {type(x).__name__}; "
                "pass a tensor's .data, or its .grad if it has one"
            )
        refuse_masked(x)
        x = x if on_gpu(x) else np.asarray(x)  # and no subclass
    if x.dtype.kind not in NUMERIC:
        numeric_dtype(x.dtype)
    if axis is not None and not -x.ndim <= axis < x.ndim:
        raise WrongInput(f"axis {axis} does not exist in an array of shape {list(x.shape)}")
    return x


def numeric_dtype(dtype: np.dtype | str) -> np.dtype:
    try:
        dtype = np.dtype(dtype)
    except TypeError:
        raise WrongInput(
            f"{dtype!r} is not a dtype; use a numeric one, such as 'float32'"
        ) from None
    if dtype.kind not in NUMERIC and not is_half(dtype):
        raise WrongInput(f"arrays of {dtype} do not travel between ranks; use numbers")
    return dtype


def refuse_masked(x) -> None:
    masked = sys.modules.get("numpy.ma")  # before its import, of 1 MB, there is no masked array
    if isinstance(x, getattr(masked, "MaskedArray", ())):  # another thread may be importing it
        raise WrongInput(
            "masked arrays do not travel between ranks; use .filled(), .compressed() or .data"
        )


def whole_number(x, what: str, kind: str = "a whole number") -> int:
    """Return x as an int, whatever whole number it is; nothing is rounded."""
    try:
        return index(x)
    except TypeError:
        raise WrongInput(f"{what} is {kind}, not {x!r}") from None


def whole_number_64(x, what: str, kind: str = "a whole number") -> int:
    """Return x as an int that fits 64 bits."""
    if not -(2**63) <= whole_number(x, what, kind) < 2**63:
        raise WrongInput(f"{what} is {kind} of 64 bits, not {x}")
    return index(x)


def valid_rank(rank, size: int, what: str) -> int:
    """Return a rank of a group of this size as an int."""
    rank = whole_number(rank, what)
    if not 0 <= rank < size:
        raise WrongInput(f"{what}={rank} is no rank of a group of {size}; use 0 to {size - 1}")
    return rank


def listed(items: Iterable, what: str) -> list:
    try:
        return list(items)
    except TypeError:
        raise WrongInput(f"{what} are a list, not {items!r}") from None


def pieces_of(rows: int, ranks: int, sizes: list[int] | None) -> list[int]:
    """Return rows per rank: those given, or as equal as can be, the larger first."""
    if sizes is None:
        return split_sizes(rows, ranks)
    sizes = [whole_number(n, "a size") for n in listed(sizes, "sizes")]
    if len(sizes) != ranks or sum(sizes) != rows or min(sizes) < 0:
        raise WrongInput(f"sizes {sizes} do not cut {rows} rows into {ranks} pieces")
    return sizes


def one_per_rank(arrays: list[Array], ranks: int) -> list[Array]:
    """Return the arrays of an all_to_all, which have one dtype."""
    arrays = [numeric(x) for x in listed(arrays, "arrays")]
    if len(arrays) != ranks:
        raise WrongInput(f"all_to_all needs one array per rank: {ranks}, got {len(arrays)}")
    dtypes = list(dict.fromkeys(str(x.dtype) for x in arrays))
    if len(dtypes) > 1:
        raise WrongInput(f"all_to_all needs one dtype, got {', '.join(dtypes)}")
    return arrays


def check_place(out: Array) -> None:
    """Raise ValueError unless `out` is an array that can be written to."""
    refuse_masked(out)
    if not isinstance(out, np.ndarray) and not on_gpu(out):
        raise WrongInput(f"out must be an array, not {type(out).__name__}; use group.empty")
    if isinstance(out, np.ndarray) and not out.flags.writeable:
        raise WrongInput("out is read-only; use an array that can be written to")


def check_out(out: Array, x: Array) -> None:
    check_place(out)
    if out.shape != x.shape or out.dtype != x.dtype:
        raise WrongInput(
            f"out is {out.dtype}{list(out.shape)}, x is {x.dtype}{list(x.shape)}: they must agree"
        )


def check_part(x: Array, out: Array, count: int, rank: int) -> None:
    """Raise ValueError unless x has the `count` elements of the 1-D `out` that this rank fills."""
    if out.ndim != 1 or x.shape != (count,) or x.dtype != out.dtype:
        raise WrongInput(
            f"x is {x.dtype}{list(x.shape)}; rank {rank}'s part of out, "
            f"{out.dtype}{list(out.shape)}, is 1-D and has {count} elements"
        )


def joined_along(axis: int, x: Array) -> tuple[np.dtype, tuple[int, ...], int]:
    """Return the dtype, other dims and axis that must agree between arrays to concatenate."""
    axis %= x.ndim
    return x.dtype, x.shape[:axis] + x.shape[axis + 1 :], axis


def ufunc(op: str, xp=np) -> Callable:
    """Return the function of NumPy, or of xp, that combines two arrays."""
    check_name("reduction", op, list(REDUCTIONS))
    return getattr(xp, REDUCTIONS[op])
