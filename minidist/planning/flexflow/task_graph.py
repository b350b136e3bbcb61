"""Tasks that wait for each other, on devices that do one at a time: the simulator of FlexFlow.

              0   1   2   3   4   5 s
    rank 0    |-- A --|       |-C-|       C waits for A and m
    rank 1    |-B-|                       m, a message, waits for B
    link          |---- m ----|

Jia, Zaharia, Aiken 2019, Beyond Data and Model Parallelism for Deep Neural Networks, section 5.2,
algorithm 1: tasks are taken in the order in which they become ready, as in Dijkstra's shortest
paths, and a device does its own in this order (assumption A3). What shares no device overlaps.
"""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field

Device = int | tuple[str, int]  # a rank, or a link of one: ("network", rank)


@dataclass
class TaskGraph:
    """Tasks by number: a name, the device that does it, its seconds and bytes, who waits for it."""

    names: list[str] = field(default_factory=list)
    devices: list[Device] = field(default_factory=list)
    seconds: list = field(default_factory=list)
    bytes: list = field(default_factory=list)
    following: list[list[int]] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)  # for how many others

    def add(self, name: str, device: Device, seconds, after: Iterable[int] = (), bytes=0) -> int:
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
        self.following[earlier].append(later)
        self.waits[later] += 1

    def replay(self) -> list:
        """Return when each task ends. Of tasks that are ready at once the lower number is first."""
        waits, ready, ends = list(self.waits), [0] * len(self.names), [None] * len(self.names)
        queue = [(0, task) for task, others in enumerate(waits) if not others]
        free: dict[Device, float] = {}  # when a device has done its last task
        while queue:
            time, task = heapq.heappop(queue)
            device = self.devices[task]
            end = ends[task] = free[device] = max(time, free.get(device, 0)) + self.seconds[task]
            for other in self.following[task]:
                ready[other] = max(ready[other], end)
                waits[other] -= 1
                if not waits[other]:
                    heapq.heappush(queue, (ready[other], other))
        return ends
