"""Time an all_reduce of 16 MB, and count the bytes that leave each host.

mpiexec ... python -m mpi4py all_reduce.py [ALGORITHM]      without one: MPI's own, called bare
"""

import json
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from mpi4py import MPI

import minidist
from minidist import Group

S, ROUNDS = 16 * 2**20, 5  # bytes of the array; measurements


def bytes_sent() -> int:
    """Return the bytes, headers included, that this host has put on its link so far."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        if line.strip().startswith("eth0:"):
            return int(line.split()[9])
    raise RuntimeError("no eth0: this is none of the hosts")


def measure(barrier: Callable[[], None], all_reduce: Callable[[np.ndarray], np.ndarray]) -> dict:
    """Return this rank's host, and for every round its seconds and its host's bytes."""
    x = np.ones(S // 4, np.float32)
    seconds, sent = [], []
    for _ in range(ROUNDS):
        barrier()
        before, begin = bytes_sent(), time.perf_counter()
        total = all_reduce(x)
        seconds.append(time.perf_counter() - begin)
        barrier()
        sent.append(bytes_sent() - before)
    assert (total == MPI.COMM_WORLD.size).all()
    return {"host": socket.gethostname(), "seconds": seconds, "sent": sent}


def bare() -> list[dict]:
    world, total = MPI.COMM_WORLD, np.empty(S // 4, np.float32)

    def all_reduce(x):
        world.Allreduce(x, total)
        return total

    return world.allgather(measure(world.Barrier, all_reduce))


def ours(group: Group, algorithm: str) -> dict:
    return measure(group.barrier, lambda x: group.all_reduce(x, algorithm=algorithm))


if __name__ == "__main__":
    world = MPI.COMM_WORLD
    found = minidist.run(ours, world.size, sys.argv[1], transport="mpi") if sys.argv[1:] else bare()
    if world.rank == 0:
        print(json.dumps(found))
