"""What a program asks of the device: copies, bytes, waits and kernel launches, counted.

Not a part of CuPy. `with counting() as counts:` gives the numbers of a block of code in this
process. A launch is one call that starts a kernel or a memset; CuPy calls that start several are
counted as one, so launches are a lower bound. An empty array starts none.
"""

import contextlib
import dataclasses
import threading


@dataclasses.dataclass
class Counts:
    """to_device, to_host: copies; *_bytes: their sizes; waits: the host stands still."""

    to_device: int = 0
    to_device_bytes: int = 0
    to_host: int = 0
    to_host_bytes: int = 0
    waits: int = 0
    launches: int = 0


TOTAL = Counts()
LOCK = threading.Lock()


def copied_to_device(nbytes: int) -> None:
    with LOCK:
        TOTAL.to_device += 1
        TOTAL.to_device_bytes += nbytes


def copied_to_host(nbytes: int) -> None:
    with LOCK:
        TOTAL.to_host += 1
        TOTAL.to_host_bytes += nbytes


def waited() -> None:
    with LOCK:
        TOTAL.waits += 1


def launched(size: int = 1) -> None:
    """Count a launch, unless there is nothing to compute."""
    if size:
        with LOCK:
            TOTAL.launches += 1


@contextlib.contextmanager
def counting():
    """Give a Counts that holds, at the end of the block, what happened inside it."""
    before, result = dataclasses.astuple(TOTAL), Counts()
    yield result
    after = dataclasses.astuple(TOTAL)
    for field, a, b in zip(dataclasses.fields(Counts), before, after, strict=True):
        setattr(result, field.name, b - a)
