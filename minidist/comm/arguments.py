"""What a caller may give to a group; what it may not raises ValueError, with the remedy."""

from collections.abc import Callable
from operator import index

import numpy as np

from minidist.backend import Array, on_gpu
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
        x = x if on_gpu(x) else np.asarray(x)  # and no subclass
    if x.dtype.kind not in "biufc":
        raise ValueError(f"arrays of {x.dtype} do not travel between ranks; use numbers")
    if axis is not None and not -x.ndim <= axis < x.ndim:
        raise ValueError(f"axis {axis} does not exist in an array of shape {list(x.shape)}")
    return x


def whole_tag(tag: int) -> int:
    try:
        return index(tag)
    except TypeError:
        raise ValueError(f"a tag is a whole number, not {tag!r}") from None


def pieces_of(rows: int, ranks: int, sizes: list[int] | None) -> list[int]:
    """Return rows per rank: those given, or as equal as can be, the larger first."""
    sizes = split_sizes(rows, ranks) if sizes is None else [int(n) for n in sizes]
    if len(sizes) != ranks or sum(sizes) != rows or min(sizes) < 0:
        raise ValueError(f"sizes {sizes} do not cut {rows} rows into {ranks} pieces")
    return sizes


def check_out(out: Array, x: Array) -> None:
    if out.shape != x.shape or out.dtype != x.dtype:
        raise ValueError(
            f"out is {out.dtype}{list(out.shape)}, x is {x.dtype}{list(x.shape)}: they must agree"
        )


def check_algorithm(algorithm: str | None) -> None:
    if algorithm is not None and algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm {algorithm!r}: choose one of {', '.join(ALGORITHMS)}, None")


def ufunc(op: str, xp=np) -> Callable:
    """Return the function of NumPy, or of xp, that combines two arrays."""
    if op not in REDUCTIONS:
        raise ValueError(f"unknown reduction {op!r}; choose one of {', '.join(REDUCTIONS)}")
    return getattr(xp, REDUCTIONS[op])
