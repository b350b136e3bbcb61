"""A clock as a device has one: what time it was is known only when somebody waits."""

from minidist.events import Clock


class QueueClock(Clock):
    """A moment is a mark in a queue, which the device reaches `apart` seconds after the one before.

    waits  how often somebody has waited
    """

    def __init__(self, apart: float = 1.0):
        self.apart, self.marks, self.waits = apart, 0, 0

    def now(self):
        assert not self.waits, "a wait before the last mark: it would be a part of what is timed"
        self.marks += 1
        return f"mark {self.marks}"

    def seconds(self, moment):
        self.waits += 1
        return self.apart * int(moment.split()[1])


def clock_of_a_gpu(device: str) -> QueueClock:
    """Stand in for backend.clock where it should be asked for the clock of a GPU."""
    assert device.startswith("gpu"), f"the clock of {device} does not know what a GPU does"
    return QueueClock(apart=0.25)
