"""The clock of planning: tasks that wait for each other, on devices that do one at a time.

              0   1   2   3   4   5 s
    rank 0    |-- A --|       |-C-|       C waits for A and m
    rank 1    |-B-|                       m, a message, waits for B
    link          |---- m ----|

FlexFlow's strategies are such tasks (flexflow.py). The programs of a pipeline need no queue: their
order is given (simulator.py). Tasks are taken in the order in which they become ready, as in
Dijkstra's shortest paths, and a device does its own in this order (Jia, Zaharia, Aiken 2019, Beyond
Data and Model Parallelism for Deep Neural Networks, section 5.2, algorithm 1, with assumption A3).
What shares no device overlaps. All arithmetic is + and comparison: exact times stay exact.
"""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from numbers import Rational

Time = float  # or a Fraction, with which all arithmetic is exact
Device = int | tuple[str, int]  # a rank, or a link of one: ("network", rank)


@dataclass
class TaskGraph:
    """Tasks by number: a name, the device that does it, its seconds and bytes, who waits for it."""

    names: list = field(default_factory=list)
    devices: list[Device] = field(default_factory=list)
    seconds: list = field(default_factory=list)
    bytes: list = field(default_factory=list)
    following: list[list[int]] = field(default_factory=list)  # who waits for it
    waits: list[int] = field(default_factory=list)  # for how many others

    def add(self, name, device: Device, seconds, after: Iterable[int] = (), bytes=0) -> int:
        """Add a task that starts when the others are done; return its number."""
        number = len(self.names)
        self.names.append(name)
        self.devices.append(device)
        self.seconds.append(seconds)
        self.bytes.append(bytes)
        self.following.append([])
        self.waits.append(0)
        for earlier in after:
            self.order(earlier, number)
        return number

    def order(self, earlier: int, later: int) -> None:
        """Let a task start after the end of another."""
        self.following[earlier].append(later)
        self.waits[later] += 1

    def times(self) -> list:
        """Return (start, end) of each task; of those ready at once the lower number is first."""
        waits = list(self.waits)
        spans: list = [None] * len(self.names)
        ready: list[Time] = [0] * len(self.names)
        queue: list[tuple[Time, int]] = [
            (0, task) for task, others in enumerate(waits) if not others
        ]
        free: dict[Device, float] = {}  # when a device has done its last task
        while queue:
            start, task = heapq.heappop(queue)
            device = self.devices[task]
            start = max(start, free.get(device, 0))
            end = free[device] = start + self.seconds[task]
            spans[task] = start, end
            for other in self.following[task]:
                ready[other] = max(ready[other], end)
                waits[other] -= 1
                if not waits[other]:
                    heapq.heappush(queue, (ready[other], other))
        return spans


def divided(a, b):
    """Divide, exactly where both are exact."""
    if isinstance(a, int) and isinstance(b, int) and b and a % b == 0:
        return a // b  # faster than a Fraction, in all that is added to it
    return Fraction(a) / b if isinstance(a, Rational) and isinstance(b, Rational) else a / b
