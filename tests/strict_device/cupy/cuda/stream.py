"""Streams and events (CuPy: cuda/stream.pyx).

Every call is finished when it returns; order.py finds what a GPU might do in another order.
"""

import itertools
import threading
import time
import weakref

from .. import _counters
from . import allocations, device, order

THREAD = threading.local()
LIVE: "weakref.WeakValueDictionary[int, Stream]" = weakref.WeakValueDictionary()  # by ptr
NUMBERS = itertools.count(16, 16)  # for none to be taken for one that is gone


class Event:
    """A point in a stream; its time is the host's."""

    def __init__(self, block=False, disable_timing=False, interprocess=False):
        self.timing, self.time, self.clock = not disable_timing, None, {}
        self.device_id = device.current()

    def record(self, stream=None):
        self.time = time.perf_counter()
        self.clock = clock_of(get_current_stream() if stream is None else stream)

    def synchronize(self):
        _counters.waited()
        host_waits(self.clock)

    @property
    def done(self) -> bool:
        return True


def get_elapsed_time(start_event, end_event) -> float:
    """Return milliseconds; both events must be recorded, with timing, on one device."""
    one_device = start_event.device_id == end_event.device_id
    if not (start_event.timing and end_event.timing and one_device):
        from .runtime import CUDARuntimeError

        raise CUDARuntimeError("cudaErrorInvalidResourceHandle: invalid resource handle")
    return (end_event.time - start_event.time) * 1000


class Stream:
    """A queue of one device; `with stream:` and `stream.use()` make it this thread's."""

    null: "Stream"

    def __init__(self, null=False, non_blocking=False, ptds=False):
        self.ptr = 0 if null else next(NUMBERS)
        self.device_id = -1 if null else device.current()
        self.non_blocking = non_blocking
        LIVE[self.ptr] = self
        if not null:
            order.count_streams(1)
            if not non_blocking:
                order.BLOCKING.add(key(self))

    def __del__(self):
        if self.ptr and order is not None:
            order.BLOCKING.discard((self.device_id, self.ptr))
            order.count_streams(-1)

    def use(self):
        check_device(self)
        streams()[device.current()] = self
        return self

    def __enter__(self):
        check_device(self)
        entered().append(get_current_stream())
        return self.use()

    def __exit__(self, *_):
        entered().pop().use()

    def synchronize(self):
        _counters.waited()
        host_waits(clock_of(self))

    def record(self, event=None):
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event):
        with order.LOCK:
            order.learn(order.CLOCKS[key(self)], event.clock)

    @property
    def done(self) -> bool:
        return True


def key(stream: Stream | None = None) -> tuple[int, int]:
    """Return the device and the number of a stream, or of the current one."""
    stream = get_current_stream() if stream is None else stream
    return (device.current() if stream.device_id < 0 else stream.device_id), stream.ptr


def clock_of(stream: Stream) -> dict:
    """Return how many works of every stream are done when this one's are."""
    with order.LOCK:
        return dict(order.work(key(stream)))


def host_waits(clock: dict) -> None:
    """Let the host know what is done, and other processes see it."""
    with order.LOCK:
        order.host_learns(clock)
        allocations.flush(clock)
        order.raise_found()


def check_device(stream: Stream) -> None:
    """Refuse a stream of another device (stream.pyx:check_stream_device_match)."""
    if stream.device_id not in (-1, device.current()):
        raise RuntimeError(
            f"The device that the stream is created on ({stream.device_id}) does not match with "
            f"the current device ({device.current()})"
        )


def streams() -> dict[int, Stream]:
    """Return this thread's stream of each device that has another than the null stream."""
    return THREAD.__dict__.setdefault("streams", {})


def entered() -> list[Stream]:
    return THREAD.__dict__.setdefault("entered", [])


def get_current_stream(device_id=-1) -> Stream:
    return streams().get(device.current() if device_id == -1 else device_id, Stream.null)


Stream.null = Stream(null=True)
