"""Which number types are accepted, and in which type sums are computed.

Half precision, float16 or bfloat16, is for storage only. Sums are in float32, and rounded once.
"""

import importlib.util
from typing import Any

import numpy as np

from minidist.errors import WrongInput

Array = Any  # numpy.ndarray or cupy.ndarray


def is_half(dtype: np.dtype) -> bool:
    """Return whether it is float16, or bfloat16 of ml_dtypes, whose kind NumPy calls "V"."""
    return dtype.itemsize == 2 and (dtype.kind == "f" or dtype.name == "bfloat16")


def is_float(dtype: np.dtype) -> bool:
    return dtype.kind == "f" or is_half(dtype)


def float_dtype(name) -> np.dtype:
    """Return a float dtype; ValueError for another one, or for bfloat16 without ml_dtypes."""
    if name == "bfloat16":
        if importlib.util.find_spec("ml_dtypes") is None:
            raise WrongInput("bfloat16 needs ml_dtypes: pip install 'minidist[bfloat16]'")
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    try:
        dtype = np.dtype(name)
    except TypeError:  # no type at all
        dtype = np.dtype(object)
    if not is_float(dtype):
        raise WrongInput(f"parameters are floats, such as float32, not {name}")
    return dtype


def widen(x: Array) -> Array:
    """Return half precision, which is for storage only, as float32, and other floats unchanged.

    ValueError for whole numbers: what follows is computed in floats, and rounded to x's dtype.
    """
    if is_half(x.dtype):
        return x.astype(np.float32)
    if x.dtype.kind != "f":
        raise WrongInput(f"this is computed in floats, not in {x.dtype}; use .astype")
    return x


def whole_numbers(x, what: str) -> Array:
    """Return x, of any of NumPy's integer types, as int64; ValueError for bool, floats, others."""
    x = x.data if hasattr(x, "requires_grad") else x  # a tensor
    x = x if hasattr(x, "dtype") else np.asarray(x)
    if x.size and x.dtype.kind not in "iu":
        raise WrongInput(f"{what} must be integers, not {x.dtype}")
    if x.dtype.kind == "u" and x.dtype.itemsize == 8:
        x = x - (x >> 63)  # the largest one becomes -2, not -1: that is IGNORED
    return x.astype(np.int64, copy=False)
