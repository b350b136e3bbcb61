"""Simulated devices for the lessons, on any machine: layers that sleep.

    model = nn.Sequential([Device(f"layers.{i}", 64, 0.6e-3, 1.2e-3) for i in range(4)])
    log = quiet(lambda log: cluster.run(worker, log=log), seconds=0.2)
    print(length(log), idle(log))

A rank that sleeps needs no core, so four ranks act as four devices even on two cores.
"""

import time
from collections.abc import Callable

from minidist import nn
from minidist.autograd import Function
from minidist.events import EventLog


class Nap(Function):
    """Y = X, after `forward` seconds per row  =>  dX = dY, after `backward` seconds per row."""

    def __init__(self, forward: float, backward: float):
        self.seconds = forward, backward

    def forward(self, x):
        time.sleep(self.seconds[0] * len(x))
        return x

    def backward(self, grad):
        time.sleep(self.seconds[1] * len(grad))
        return grad


class Device(nn.Module):
    """A linear layer X[B, C] -> Y[B, C] that takes `forward` and `backward` seconds per row."""

    def __init__(self, name: str, width: int, forward: float, backward: float, dtype="float32"):
        self.linear = nn.Linear(width, width, name=name, dtype=dtype)
        self.seconds = forward, backward

    def forward(self, x, randomness=None):
        return Nap(*self.seconds)(self.linear(x))


def length(log: EventLog) -> float:
    """Return the seconds from the start of the first compute event to the end of the last."""
    busy = [e for e in log.events if e.category == "compute"]
    return max(e.end for e in busy) - min(e.start for e in busy)


def idle(log: EventLog) -> float:
    """Return the share of the ranks' time, from first to last, in which nothing is computed."""
    busy = [e for e in log.events if e.category == "compute"]
    ranks = 1 + max(e.rank for e in busy)
    return 1 - sum(e.seconds for e in busy) / (ranks * length(log))


def quiet(run: Callable[[EventLog], object], seconds: float, most: int = 4) -> EventLog:
    """Return the log of the shortest of several runs, because noise only adds time.

    It runs until a run takes at most 10% longer than `seconds`, but not more than `most` times.
    """
    logs: list[EventLog] = []
    while len(logs) < most and (not logs or length(logs[-1]) > 1.1 * seconds):
        logs.append(EventLog())
        run(logs[-1])
    return min(logs, key=length)
