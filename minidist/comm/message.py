"""What travels from one rank to another: an array, under a key that says where it belongs."""

from typing import NamedTuple

import numpy as np


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


class Message(NamedTuple):
    """An array on the host, and whether the sender had it on a GPU."""

    array: np.ndarray
    was_on_gpu: bool


# Fast path: skip at first reading. A NamedTuple's own constructor is a Python function (0.2 us).
make_tuple = tuple.__new__  # make_tuple(Message, (array, was_on_gpu))
