"""Matrix products (CuPy: _core/_routines_linalg.pyx, matmul), float16 accumulated in float32."""

import numpy as np

from ._storage import launch, operands, store


def matmul(a, b, /, out=None):
    """Multiply device arrays; a host array is a TypeError."""
    x, y = operands(a, b)
    if x.ndim == 0 or y.ndim == 0:
        raise ValueError("Scalar operands are not allowed, use '*' instead")
    result = np.promote_types(x.dtype, y.dtype)
    wide = np.float32 if result == np.float16 else result
    with np.errstate(all="ignore"):
        host = np.matmul(x.astype(wide, copy=False), y.astype(wide, copy=False))
        host = np.asarray(host).astype(result, copy=False)
    return launch(host) if out is None else store(out, host)
