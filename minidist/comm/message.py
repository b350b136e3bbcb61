"""What travels from one rank to another: an array, under a key that says where it belongs."""

from functools import cached_property
from typing import NamedTuple

import numpy as np

from minidist.backend import Array, on_gpu, to_host
from minidist.dtypes import float_dtype


class Key(NamedTuple):
    """The queue that a message belongs to; messages of one source and one key keep their order.

    run     the number of the run
    group   the splits that made the group, () for the group of all ranks
    kind    "message" for send and recv, "collective" for what a collective sends
    number  the tag of a message, or which collective of its group this is
    """

    run: int
    group: tuple[int, ...]
    kind: str
    number: int


# An array, and whether the sender had it on a GPU. Between processes it is on the host.
Message = tuple[Array, bool]


def name_of(dtype: np.dtype) -> str:
    """Return a name by which another process finds the dtype; `.str` of bfloat16 is "V2"."""
    return dtype.str if dtype.kind != "V" else dtype.name


def dtype_of(name: str) -> np.dtype:
    return float_dtype(name) if name == "bfloat16" else np.dtype(name)


class Staged:
    """An array of a GPU, and its copy on the host, which the first of several sends makes."""

    def __init__(self, array: Array):
        self.array, self.nbytes = array, array.nbytes

    @cached_property
    def host(self) -> np.ndarray:
        return to_host(self.array)

    def copy(self) -> Array:
        return self.array.copy()


def staged(array: Array) -> Array | Staged:
    """Return what to send of an array that several ranks get, unchanged until the last send."""
    return Staged(array) if on_gpu(array) else array
