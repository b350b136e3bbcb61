"""Hosts have clocks of their own; the events of all ranks are shown by the clock of process 0.

A process asks process 0 for its time. The answer was true at some moment between the question and
its arrival, so half of that interval bounds the error; the shortest of several intervals is taken
(Cristian 1989, "Probabilistic clock synchronization").
"""

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpi4py import MPI

ROUNDS = 10


def seconds_behind_first(
    comm: "MPI.Comm", hosts: list[int], clock: Callable[[], float] = time.monotonic
) -> list[float]:
    """Return the seconds to add to each process's clock to get process 0's time; all call this.

    hosts  the number of each process's host; those on the host of process 0 share its clock
    clock  returns seconds
    """
    mine = 0.0
    for process in [p for p in range(comm.size) if hosts[p] != hosts[0]]:
        shortest = math.inf
        for _ in range(ROUNDS if comm.rank in (0, process) else 0):
            if comm.rank == 0:
                comm.recv(source=process)
                comm.send(clock(), process)
                continue
            asked = clock()
            comm.send(None, 0)
            answer, came = comm.recv(source=0), clock()
            if came - asked < shortest:
                shortest, mine = came - asked, answer - (asked + came) / 2
    return comm.allgather(mine)
