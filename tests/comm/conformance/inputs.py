"""What the ranks of a test give, and what reductions of it are."""

from functools import reduce

import numpy as np

from minidist.backend import to_device, to_host

DTYPES = ["bool", "int8", "uint16", "int64", "float16", "float32", "complex128"]
KINDS = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}


def put(group, values):
    """Return the values on the device of the run, as an ordinary array."""
    return to_device(values, group.device)


def places(group, values):
    """Return them ordinary, from `empty`, and from `empty` on all ranks but the last."""
    found = []
    for shared in (False, True, group.rank < group.size - 1):
        x = put(group, values.copy())
        found.append(group.empty(values.shape, values.dtype) if shared else x)
        found[-1][...] = x
    return found


def billed(group, call):
    """Return what the call returns, on the host, and how many bytes others have taken for it."""
    before = group.ledger.total
    result = call()
    return (None if result is None else to_host(result)), group.ledger.total - before


def mine(rank, shape, seed=0, dtype="float64"):
    """Return an array that differs between ranks."""
    return (4 * np.random.default_rng([seed, rank]).standard_normal(shape)).astype(dtype)


def total(size, shape, seed=0, dtype="float64", combine=np.add):
    """Return the reduction of these arrays in rank order."""
    return reduce(combine, [mine(rank, shape, seed, dtype) for rank in range(size)])


def same(got, want, to_the_bit=True):
    """Return whether an array is the one wanted; to a rounding, if its sum may have any order."""
    if (got.dtype, got.shape) != (want.dtype, want.shape):
        return False
    if to_the_bit or want.dtype.kind in "bui":
        return got.tobytes() == want.tobytes()
    near = 64 * np.finfo(want.dtype).eps
    return bool(np.allclose(got, want, near, near))
