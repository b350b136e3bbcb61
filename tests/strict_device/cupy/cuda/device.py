"""Several devices, of which each thread has one that is current (CuPy: cuda/device.pyx, Device)."""

import os
import threading

from .. import _counters

COUNT = int(os.environ.get("STRICT_DEVICE_COUNT", "4"))
THREAD = threading.local()


def current() -> int:
    """Return the number of this thread's device; a thread starts on device 0."""
    return getattr(THREAD, "device", 0)


def set_current(number: int) -> None:
    if not 0 <= number < COUNT:
        from .runtime import CUDARuntimeError

        raise CUDARuntimeError("cudaErrorInvalidDevice: invalid device ordinal")
    THREAD.device = number


def is_available() -> bool:
    return COUNT > 0


class Device:
    """One device; `with Device(n):` and `Device(n).use()` make it this thread's."""

    def __init__(self, device=None):
        self.id = current() if device is None else int(device)

    @property
    def pci_bus_id(self) -> str:
        return f"0000:{0x10 + self.id:02X}:00.0"

    def use(self):
        set_current(self.id)

    def synchronize(self):
        """Wait for all streams of the device."""
        from . import order, stream

        _counters.waited()
        with order.LOCK:
            for key in [key for key in order.CLOCKS if key[0] == self.id]:
                stream.host_waits(dict(order.CLOCKS[key]))

    def __enter__(self):
        THREAD.entered = [*getattr(THREAD, "entered", []), current()]
        self.use()
        return self

    def __exit__(self, *_):
        *THREAD.entered, before = THREAD.entered
        set_current(before)

    def __int__(self):
        return self.id

    def __eq__(self, other):
        return self.id == other.id if isinstance(other, Device) else NotImplemented

    def __hash__(self):
        return hash(self.id)

    def __repr__(self):
        return f"<CUDA Device {self.id}>"
