"""The algorithms of comm/collectives.py: their numbers, their bytes, their steps.

Ranks are threads. Each array is sent with its time of arrival, in steps: a rank sends one message
and takes one message per step, and a message can be used when it has arrived.
"""

import traceback
from math import ceil, log2
from unittest import mock

import numpy as np
import pytest

from minidist.comm import collectives, fabric
from minidist.comm.diagnosis import call_site
from minidist.course.answers import check
from minidist.course.inside import inside, task
from minidist.course.labs.ranks import on_ranks, refused


class Watched:
    """A channel that records how many bytes it sent to whom, and its current step."""

    def __init__(self, group):
        self.channel, self.rank, self.size = group.channel("recv"), group.rank, group.size
        self.clock = self.taken = self.bytes = 0
        self.receivers = []

    def send(self, array, to):
        self.clock += 1
        self.bytes += array.nbytes
        self.receivers.append(to)
        self.channel.send(array, to)
        self.channel.send(np.array(self.clock), to)

    def recv(self, source):
        array = self.channel.recv(source)
        self.taken = max(self.taken + 1, int(self.channel.recv(source)))
        self.clock = max(self.clock, self.taken)
        return array


def line_of_the_algorithm():
    for frame, line in traceback.walk_stack(None):
        if frame.f_code.co_filename == collectives.__file__:
            return f"collectives.py:{line}"
    return call_site()


def watched(N, worker):
    """Call worker(channel) on N ranks; a deadlock shows the lines of collectives.py that wait."""
    with mock.patch.object(fabric, "call_site", line_of_the_algorithm):
        return on_ranks(lambda group: worker(Watched(group)), N)


@inside
def star(root, pieces):
    """Give every rank its piece from the root, and collect all pieces at another time."""

    def worker(channel):
        here, mine = [p.copy() for p in pieces], pieces[channel.rank].copy()
        given = collectives.from_root(channel, here if channel.rank == root else None, root)
        down = channel.bytes
        found = collectives.to_root(channel, mine, root)
        fresh, kept = [given, *(found or [])], [*here, mine]
        return {
            "from_root": given,
            "to_root": found,
            "to_root is None": found is None,
            "bytes sent in from_root": down,
            "bytes sent in to_root": channel.bytes - down,
            "the caller's array is in the result": any(
                np.shares_memory(a, b) for a in fresh for b in kept
            ),
        }

    return watched(len(pieces), worker)


@inside
def reduce_pieces(op, pieces):
    pieces = [p.copy() for p in pieces]
    result = collectives.reduce_pieces(pieces, getattr(np, op))
    return {"the result": result, "the result is the first piece": result is pieces[0]}


@inside
def all_to_all(pieces):
    """Exchange pieces[r][s], from rank r to rank s."""

    def worker(channel):
        mine = [p.copy() for p in pieces[channel.rank]]
        result = collectives.all_to_all(channel, mine)
        copied = not np.shares_memory(result[channel.rank], mine[channel.rank])
        return {"the piece of rank": result, "its own piece is a copy": copied} | {
            "receivers": np.array(channel.receivers, int)
        }

    return watched(len(pieces), worker)


@inside
def all_reduce(algorithm, op, arrays):
    """Reduce one flat array per rank in place."""

    def worker(channel):
        x = arrays[channel.rank].copy()
        getattr(collectives, algorithm)(channel, x, getattr(np, op))
        return {"x": x, "bytes": channel.bytes, "the number of steps": channel.clock}

    return watched(len(arrays), worker)


@inside
def refusal(algorithm, N):
    """Return for each rank whether this number of ranks is refused."""
    reduce = getattr(collectives, algorithm)
    return watched(N, lambda channel: refused(reduce, channel, np.ones(4), np.add))


@task("2.1")
@pytest.mark.parametrize("N", [1, 2, 3, 5])
def test_a_root_gives_and_takes_pieces_and_keeps_none_of_them(N, rng):
    root, lengths = int(rng.integers(N)), rng.integers(0, 4, N)
    pieces = [rng.standard_normal((n, 2)) for n in lengths]
    sizes = [p.nbytes for p in pieces]
    want = [
        {
            "from_root": pieces[r],
            "to_root": pieces if r == root else None,
            "to_root is None": r != root,
            "bytes sent in from_root": sum(sizes) - sizes[root] if r == root else 0,
            "bytes sent in to_root": 0 if r == root else sizes[r],
            "the caller's array is in the result": False,
        }
        for r in range(N)
    ]
    check(star(root, pieces), want, bound=0.0)


@task("2.1")
@pytest.mark.parametrize("op", ["add", "subtract", "maximum"])
def test_pieces_are_reduced_in_rank_order_into_the_first(op, rng):
    tiny = rng.uniform(0.1, 0.4)  # beside 1e16 it is rounded away
    for x in rng.standard_normal((4, 3)), np.array([[1e16], [-1e16], [tiny], [tiny]]):
        f = getattr(np, op)
        want = {"the result": f(f(f(x[0], x[1]), x[2]), x[3])}
        got = reduce_pieces(op, list(x))
        check(got, want | {"the result is the first piece": True}, bound=0.0)


@task("2.2")
@pytest.mark.parametrize("N", [1, 2, 3, 4, 5])
def test_all_to_all_gives_each_rank_its_pieces_and_in_each_step_one(N, rng):
    pieces = [[rng.standard_normal(n) for n in row] for row in rng.integers(0, 4, (N, N))]
    answers = all_to_all(pieces)
    receivers = [answer.pop("receivers").tolist() for answer in answers]
    columns = [[row[r] for row in pieces] for r in range(N)]
    want = [{"the piece of rank": own, "its own piece is a copy": True} for own in columns]
    check(answers, want, bound=0.0)
    for r, to in enumerate(receivers):
        assert sorted(to) == [s for s in range(N) if s != r], f"rank {r} sends to {to}"
    for step, to in enumerate(zip(*receivers, strict=True), 1):
        assert len(set(to)) == N, f"in step {step} ranks 0, 1, ... send to {to}: two to one"


STEPS = {
    "ring": lambda N: 2 * (N - 1),
    "tree": lambda N: 2 * ceil(log2(N)),
    "halving_doubling": lambda N: 2 * ceil(log2(N)),
}
SIZES = {"ring": [1, 2, 3, 5], "tree": [1, 2, 3, 6, 8], "halving_doubling": [1, 2, 4, 8]}
CASES = [
    pytest.param(name, N, marks=task(f"2.{at}"))
    for at, name in enumerate(SIZES, 3)
    for N in SIZES[name]
]


def reduced(algorithm, op, arrays):
    """Judge numbers, bytes and steps; where N divides, a rank of the ring sends 1/N of all."""
    N, n = arrays.shape
    want = getattr(np, op).reduce(arrays).astype(arrays.dtype)
    answers = all_reduce(algorithm, op, list(arrays))
    total = sum(int(answer["bytes"]) for answer in answers)
    most = 2 * (N - 1) * -(-n // N) * want.itemsize
    check([{"x": answer["x"]} for answer in answers], [{"x": want}] * N)
    for r, answer in enumerate(answers):
        same = np.array_equal(answer["x"], answers[0]["x"])
        assert same, f"rank {r} has other bits than rank 0: each chunk is finished at one place"
        steps, least = answer["the number of steps"], STEPS[algorithm](N)
        assert steps <= least, f"the number of steps of rank {r} is {steps}, not {least}"
        assert algorithm == "tree" or answer["bytes"] <= most, f"rank {r} sends more than {most}"
    check({"bytes of all ranks": total}, {"bytes of all ranks": 2 * (N - 1) * n * want.itemsize})


@pytest.mark.parametrize("algorithm, N", CASES)
def test_sums_have_their_numbers_bytes_and_steps(algorithm, N, rng):
    for n in (N * int(rng.integers(1, 4)), N + int(rng.integers(1, max(2, N)))):
        reduced(algorithm, "add", rng.standard_normal((N, n)))


@pytest.mark.parametrize("algorithm, N", CASES)
def test_another_operation_is_no_sum(algorithm, N, rng):
    for op in ("maximum", "minimum"):
        reduced(algorithm, op, rng.standard_normal((N, N + 1)))


@pytest.mark.parametrize("algorithm, N", CASES)
def test_there_may_be_fewer_elements_than_ranks(algorithm, N, rng):
    for n in (int(rng.integers(N)), 0):
        reduced(algorithm, "add", rng.integers(-9, 10, (N, n)).astype(np.int32))


@task("2.5")
@pytest.mark.parametrize("N", [3, 5, 6, 7])
def test_ranks_that_are_no_power_of_two_are_refused(N):
    check(refusal("halving_doubling", N), [True] * N)
