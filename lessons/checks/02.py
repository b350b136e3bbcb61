"""Lesson 2's exercises: checks, worked solutions, hints, tempting wrong answers."""

import numbers
from math import ceil, log2

import numpy as np

from minidist import Cluster


class Clock:
    """The messages of a group; each takes one step, and a rank sends one at a time."""

    def __init__(self, group):
        self.group, self.rank, self.size = group, group.rank, group.size
        self.now = self.out_is_free = self.in_is_free = self.sent = 0
        self.targets = set()

    def send(self, array, to):
        self.sent += np.asarray(array).nbytes
        self.targets.add(to)
        self.out_is_free = max(self.out_is_free, self.now) + 1
        self.group.send(array, to)
        self.group.send(np.array([self.out_is_free]), to, tag=1)

    def recv(self, source):
        array, arrival = self.group.recv(source), self.group.recv(source, tag=1)[0]
        self.now = self.in_is_free = max(self.now, arrival, self.in_is_free + 1)
        return array


def broadcast_by(group, attempt, n, chunks):
    """Return whether x is right, the targets and the bytes of this rank's sends, and the steps."""
    x, clock = np.arange(n, dtype=np.float32) * (group.rank == 0), Clock(group)
    attempt(clock, x, chunks)
    right = np.array_equal(x, np.arange(n))
    return right, clock.targets, clock.sent, max(clock.now, clock.out_is_free)


def check_1(attempt, n=1200, chunks=6):
    for N in (3, 4):
        with Cluster(N, "thread") as cluster:
            found = cluster.run(broadcast_by, attempt, n, chunks)
        right, targets, sent, steps = zip(*found, strict=True)
        if not all(right):
            return f"rank {right.index(False)} of {N} does not have rank 0's array in x"
        for r, to in enumerate(targets):
            if to - {r + 1}:
                return f"rank {r} may send only to rank {r + 1}, not to {sorted(to - {r + 1})}"
        if list(sent) != [4 * n] * (N - 1) + [0]:
            return f"the array arrives, but {N} ranks sent {list(sent)} bytes"
        if max(steps) > N + chunks - 2:
            return f"it arrives after {max(steps):.0f} steps; {N + chunks - 2} are enough"


def solution_1(group, x, chunks):
    for chunk in np.array_split(x, chunks):
        if group.rank > 0:
            chunk[...] = group.recv(group.rank - 1)
        if group.rank < group.size - 1:
            group.send(chunk, group.rank + 1)


hints_1 = (
    "When the first chunk has come in, a rank can send it on before it asks for the second.",
    "for chunk in np.array_split(x, chunks): each is a view, so chunk[...] = ... fills x.",
    "Rank 0 only sends, the last rank only receives; all others do both for each chunk.",
)


def all_in_then_all_on(group, x, chunks):
    pieces = np.array_split(x, chunks)
    if group.rank > 0:
        for chunk in pieces:
            chunk[...] = group.recv(group.rank - 1)
    if group.rank < group.size - 1:
        for chunk in pieces:
            group.send(chunk, group.rank + 1)


def from_rank_0_to_all(group, x, chunks):
    for chunk in np.array_split(x, chunks):
        if group.rank > 0:
            chunk[...] = group.recv(0)
        else:
            for r in range(1, group.size):
                group.send(chunk, r)


tempting_1 = [all_in_then_all_on, from_rank_0_to_all, lambda group, x, chunks: None]


def check_2(attempt):
    for N, alpha, beta in ((4, 2e-5, 1e-9), (6, 1.0, 0.5), (1000, 5e-6, 4e-11)):
        S = attempt(N, alpha, beta)
        if not isinstance(S, numbers.Real) or not S > 0:
            return f"{S!r:.60} is not a number of bytes"
        tree = 2 * ceil(log2(N)) * (alpha + beta * S)
        ring = 2 * (N - 1) * (alpha + beta * S / N)
        if not np.isclose(tree, ring, rtol=1e-9):
            return f"N = {N}, S = {S:,.0f}: the tree takes {tree:.3g} s, the ring {ring:.3g} s"


def solution_2(N, alpha, beta):
    levels = ceil(log2(N))
    return alpha * (N - 1 - levels) / (beta * (levels - (N - 1) / N))


hints_2 = (
    "Write the time of each row of the table: steps times (alpha + beta times bytes of a step).",
    "2 levels (alpha + beta S) = 2 (N - 1) (alpha + beta S / N), with levels = ceil(log2(N)).",
    "Bring the terms with S to one side: beta S (levels - (N - 1)/N) = alpha (N - 1 - levels).",
)


def by_the_busiest_rank(N, alpha, beta):
    levels = ceil(log2(N))
    return 2 * alpha * (N - 1 - levels) / (beta * (levels - 2 * (N - 1) / N))


tempting_2 = [by_the_busiest_rank, lambda N, alpha, beta: None]


def blocking_ring(group, exchange):
    """Add up the ranks' numbers by handing them round; a send waits until it is received."""
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    x = total = np.array(group.rank)
    calls = []

    def send():
        calls.append("send")
        group.send(x, right)
        group.recv(right, tag=1)  # the receiver has taken it

    def recv():
        calls.append("recv")
        array = group.recv(left)
        group.send(np.empty(0), left, tag=1)
        return array

    for _ in range(group.size - 1):
        calls.clear()
        x = exchange(group.rank, send, recv)
        if sorted(calls) != ["recv", "send"]:
            raise ValueError(f"rank {group.rank} called {calls}, not send and recv, once each")
        if not isinstance(x, np.ndarray):
            raise ValueError(f"exchange returned {x!r:.40}, not what recv returned")
        total = total + x
    return int(total)


def check_3(attempt):
    for N in (2, 3, 4):
        with Cluster(N, "thread") as cluster:
            sums = cluster.run(blocking_ring, attempt)
        if sums != [N * (N - 1) // 2] * N:
            return f"the sums of 0 to {N - 1} are {sums}"


def solution_3(rank, send, recv):
    if rank == 0:
        array = recv()
        send()
    else:
        send()
        array = recv()
    return array


hints_3 = (
    "The error says which rank waits for which. It is a circle.",
    "If one rank does something different, the circle is broken.",
    "Let rank 0 receive first; then its left neighbour's send returns, and so on round the ring.",
)


def send_first(rank, send, recv):
    send()
    return recv()


def receive_first(rank, send, recv):
    array = recv()
    send()
    return array


tempting_3 = [send_first, receive_first, lambda rank, send, recv: None]
