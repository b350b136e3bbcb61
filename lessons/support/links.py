"""Simulated links for the lessons, on any machine: transfers that sleep.

    links = Links(group, alpha=4e-3, beta=1e-8)     # messages: 4 ms each, and 10 ns per byte
    ring(links, x, np.add)                          # an algorithm of comm/collectives.py, or yours

    cluster = linked_cluster(4, alpha=2e-3, beta=15e-9)     # its groups' all_reduce is that slow
    run = watch_backward(cluster, way)                      # way(group, model, loss)

A rank that sleeps needs no core, so four ranks have four links even on two cores.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np

from minidist import Cluster, nn
from minidist.comm.cluster import TRANSPORTS
from minidist.comm.local.processes import ProcessRanks
from minidist.comm.local.shared_memory_communicator import SharedMemoryCommunicator
from minidist.events import EventLog

from .devices import Device


class Links:
    """The messages of a group, where each takes alpha + beta S seconds; S: its bytes.

    A rank sends one message at a time, and takes in one at a time, both at once. As in a group,
    `send` does not wait: the link works while the rank goes on.
    """

    def __init__(self, group, alpha: float, beta: float):
        self.group, self.rank, self.size = group, group.rank, group.size
        self.alpha, self.beta = alpha, beta
        self.out_is_free = self.in_is_free = 0.0  # on the clock that all ranks share

    def send(self, array: np.ndarray, to: int) -> None:
        seconds = self.alpha + self.beta * array.nbytes
        self.out_is_free = max(self.out_is_free, time.monotonic()) + seconds
        self.group.send(array, to)
        self.group.send(np.array([self.out_is_free, seconds]), to, tag=1)

    def recv(self, source: int) -> np.ndarray:
        array = self.group.recv(source)
        arrival, seconds = self.group.recv(source, tag=1)
        self.in_is_free = max(arrival, self.in_is_free + seconds)
        time.sleep(max(0.0, self.in_is_free - time.monotonic()))
        return array


class LinkedCommunicator(SharedMemoryCommunicator):
    """Shared memory whose all_reduce takes as long as a ring's on links of this speed.

    It takes 2 (N - 1) (alpha + beta S / N) seconds, from when the last rank has come.
    """

    alpha = beta = 0.0

    def all_reduce(self, call, x, op, out):
        result = super().all_reduce(call, x, op, out)
        ranks = self.others + 1
        time.sleep(2 * self.others * (self.alpha + self.beta * x.nbytes / ranks))
        return result


def connect(alpha: float, beta: float, fabric, new, parent):
    """Return a LinkedCommunicator: see Fabric.communicator."""
    found = LinkedCommunicator.connect(fabric, new, parent)
    if found is not None:
        found.alpha, found.beta = alpha, beta
    return found


def linked_cluster(size: int, alpha: float, beta: float) -> Cluster:
    """Return a Cluster of processes; alpha: seconds per message, beta: seconds per byte."""
    name = f"links of {alpha:g} s and {beta:g} s per byte"
    TRANSPORTS[name] = partial(ProcessRanks, connect=partial(connect, alpha, beta))
    return Cluster(size, name)


@dataclass
class Backward:
    """What rank 0 did in one backward pass: (start, length) in ms, from the beginning of the pass.

    layers     the backward of each layer, the last one's first
    sums       each all_reduce
    gradients  the bits of all gradients at the end
    """

    layers: list[tuple[float, float]]
    sums: list[tuple[float, float]]
    gradients: list[bytes]

    @property
    def ms(self) -> float:
        return max(start + length for start, length in self.layers + self.sums)


def watch_backward(cluster: Cluster, way: Callable, layers: int = 6, tries: int = 3) -> Backward:
    """Return the shortest of some backward passes through layers of 20 ms, with their sums.

    way     called on each rank as way(group, model, loss): it runs loss.backward(), and sums the
            gradients over the group
    """
    found = []
    for _ in range(tries):
        log = EventLog()
        marks, gradients = cluster.run(_backward, way, layers, log=log)[0]
        sums = [e for e in log.events if e.rank == 0 and e.name.startswith("all_reduce")]
        spans = [*pairwise(marks), *((e.start, e.end) for e in sums)]
        spans = [(1e3 * (start - marks[0]), 1e3 * (end - start)) for start, end in spans]
        found.append(Backward(spans[:layers], spans[layers:], gradients))
    return min(found, key=lambda run: run.ms)


def _backward(group, way: Callable, layers: int) -> tuple[list[float], list[bytes]]:
    """Return when backward started and when each layer was done, and the gradients."""
    model = nn.Sequential([Device(f"layers.{i}", 256, 1e-3, 20e-3) for i in range(layers)])
    loss, marks = model(np.ones((1, 256), "float32")).sum(), []
    for layer in model.layers:
        layer.linear.weight.add_hook(lambda p: marks.append(time.monotonic()))
    group.barrier()
    marks.append(time.monotonic())
    way(group, model, loss)
    return marks, [p.grad.tobytes() for p in model.parameters()]
