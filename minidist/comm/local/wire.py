"""What two ranks send through their pair of sockets: large messages, and calls to wake up."""

import pickle
from multiprocessing.connection import Connection

import numpy as np

from minidist.comm.message import Key, Message, dtype_of, name_of

SMALL = 1 << 14  # bytes of an array up to which it travels with its header
WAKE_UP = b""


def wake_up(connection: Connection) -> None:
    """Tell the other end that there is a message in the ring buffer."""
    connection.send_bytes(WAKE_UP)


def write_message(connection: Connection, key: Key, message: Message) -> None:
    """Send a header with the bytes of the array, which follow it separately if they are many."""
    array, was_on_gpu = message
    array = np.ascontiguousarray(array).reshape(array.shape)
    small = array.tobytes() if array.nbytes <= SMALL else None
    connection.send((*key, was_on_gpu, name_of(array.dtype), array.shape, small))
    if small is None:
        connection.send_bytes(array.reshape(-1).view(np.uint8).data)


def read_message(connection: Connection) -> tuple[Key, Message] | None:
    """Return the (key, message) that was sent, or None for a call to wake up."""
    header = connection.recv_bytes()
    if header == WAKE_UP:
        return None
    *key, was_on_gpu, dtype, shape, small = pickle.loads(header)
    array = np.empty(shape, dtype_of(dtype))
    if small is None:
        connection.recv_bytes_into(array.reshape(-1).view(np.uint8))
    elif small:
        array.reshape(-1).view(np.uint8)[:] = np.frombuffer(small, np.uint8)
    return Key(*key), (array, was_on_gpu)
