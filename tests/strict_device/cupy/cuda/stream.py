"""Streams and events: here every call is finished when it returns (CuPy: cuda/stream.pyx)."""

import threading
import time

from .. import _counters
from . import device

THREAD = threading.local()


class Event:
    """A point in a stream; its time is the host's."""

    def __init__(self, block=False, disable_timing=False, interprocess=False):
        self.timing, self.time = not disable_timing, None

    def record(self, stream=None):
        self.time = time.perf_counter()

    def synchronize(self):
        _counters.waited()

    @property
    def done(self) -> bool:
        return True


def get_elapsed_time(start_event, end_event) -> float:
    """Return milliseconds; both events must be recorded, with timing."""
    if not (start_event.timing and end_event.timing):
        from .runtime import CUDARuntimeError

        raise CUDARuntimeError("cudaErrorInvalidResourceHandle: invalid resource handle")
    return (end_event.time - start_event.time) * 1000


class Stream:
    """A queue of one device; `with stream:` and `stream.use()` make it this thread's."""

    null: "Stream"

    def __init__(self, null=False, non_blocking=False, ptds=False):
        self.ptr = 0 if null else id(self)
        self.device_id = -1 if null else device.current()

    def use(self):
        streams()[device.current()] = self
        return self

    def __enter__(self):
        entered().append(get_current_stream())
        return self.use()

    def __exit__(self, *_):
        entered().pop().use()

    def synchronize(self):
        _counters.waited()

    def record(self, event=None):
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event):
        pass

    @property
    def done(self) -> bool:
        return True


def streams() -> dict[int, Stream]:
    """Return this thread's stream of each device that has another than the null stream."""
    return THREAD.__dict__.setdefault("streams", {})


def entered() -> list[Stream]:
    return THREAD.__dict__.setdefault("entered", [])


def get_current_stream(device_id=-1) -> Stream:
    return streams().get(device.current() if device_id == -1 else device_id, Stream.null)


Stream.null = Stream(null=True)
