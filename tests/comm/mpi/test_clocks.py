"""The clocks of several hosts, which here are threads with clocks that differ."""

import queue
import threading
import time

from minidist.comm.mpi.transport import seconds_behind_first


class Wire:
    """What seconds_behind_first needs of MPI, between threads."""

    def __init__(self, rank, size, queues, barrier, gathered):
        self.rank, self.size, self.queues = rank, size, queues
        self.barrier, self.gathered = barrier, gathered

    def send(self, what, to):
        self.queues[self.rank, to].put(what)

    def recv(self, source):
        return self.queues[source, self.rank].get(timeout=10)

    def allgather(self, what):
        self.gathered[self.rank] = what
        self.barrier.wait(10)
        return [self.gathered[rank] for rank in range(self.size)]


def test_a_clock_that_is_ahead_or_behind_is_told_to_within_half_a_round_trip():
    ahead, hosts, found = [0.0, 1000.0, 0.0, -7.5], [0, 1, 0, 2], {}
    queues = {(a, b): queue.SimpleQueue() for a in range(4) for b in range(4)}
    barrier, gathered = threading.Barrier(4), {}

    def process(rank):
        wire = Wire(rank, 4, queues, barrier, gathered)
        clock = lambda: time.monotonic() + ahead[rank]  # noqa: E731
        found[rank] = seconds_behind_first(wire, hosts, clock)

    threads = [threading.Thread(target=process, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == found[1] == found[2] == found[3]
    assert found[0][0] == found[0][2] == 0.0  # they share a clock
    assert abs(found[0][1] + 1000) < 0.05 and abs(found[0][3] - 7.5) < 0.05
