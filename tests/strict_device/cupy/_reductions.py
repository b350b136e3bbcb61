"""Reductions give device arrays, of no dimension too (CuPy: _core/_routines_math.pyx and others).

They take no `initial` and no `where`.
"""

import numpy as np

from ._storage import Storage, launch, operand, store


def reduction(name: str, takes_dtype: bool, keep=False):
    """Return the method; float16 is summed in float32 (_routines_math.pyx:_sum_auto_dtype)."""

    def compute(self, axis, dtype, out, keepdims):
        x = operand(self)
        half = takes_dtype and x.dtype == np.float16 and dtype is None
        how = {"dtype": np.float32 if half else dtype} if takes_dtype else {}
        with np.errstate(all="ignore"):
            host = np.asarray(getattr(x, name)(axis=axis, keepdims=bool(keepdims), **how))
            host = host.astype(np.float16) if half else host
        return launch(host) if out is None else store(out, host)

    def with_dtype(self, axis=None, dtype=None, out=None, keepdims=keep):
        return compute(self, axis, dtype, out, keepdims)

    def without(self, axis=None, out=None, keepdims=False):
        return compute(self, axis, None, out, keepdims)

    return with_dtype if takes_dtype else without


class Reductions(Storage):
    __slots__ = ()

    sum, mean, prod = reduction("sum", True), reduction("mean", True), reduction("prod", True, None)
    max, min = reduction("max", False), reduction("min", False)
    all, any = reduction("all", False), reduction("any", False)

    def argmax(self, axis=None, out=None, dtype=None, keepdims=False):
        return launch(operand(self).argmax(axis, keepdims=keepdims))

    def argsort(self, axis=-1):
        """Sort stably, as Thrust does (_routines_sorting.pyx:_ndarray_argsort)."""
        return launch(operand(self).argsort(axis, kind="stable"))
