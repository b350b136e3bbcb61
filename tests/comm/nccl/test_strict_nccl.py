"""The stand-in for NCCL moves what NCCL moves, and what would hang or go astray is an error of it.

Ranks are threads here, with a simulated GPU each; `pytest --device strict`.
"""

import gc
import threading
import time

import numpy as np
import pytest

from minidist.comm import nccl as ours

pytestmark = pytest.mark.gpu
F8, SUM, MAX = 8, 0, 2  # ncclFloat64; ncclSum, ncclMax


@pytest.fixture(autouse=True)
def library(gpu, monkeypatch):
    """Return cupy.cuda.nccl, which waits for a second only."""
    from cupy.cuda import nccl

    if "strict_device" not in nccl.__file__:
        pytest.skip("needs pytest --device strict: it tests the stand-in")
    from cupy.cuda import _nccl_root

    monkeypatch.setattr(_nccl_root, "PATIENCE", 1.0)
    return nccl


class Rank:
    """What a program has: its end of a communicator, and x, 4 numbers, and y, 4 zeros."""

    def __init__(self, unique, size, rank, gpu):
        import cupy

        cupy.cuda.Device(gpu).use()
        self.cupy, self.nccl, self.rank = cupy, cupy.cuda.nccl, rank
        self.comm = self.nccl.NcclCommunicator(size, unique, rank)
        self.arrays = cupy.asarray(np.arange(4.0) + 10 * rank), cupy.zeros(4)
        self.x, self.y = (array.data.ptr for array in self.arrays)

    def sum(self, source=None, target=None, count=4, dtype=F8, op=SUM, stream=0):
        """Call allReduce; x, y and the rest unless they are given. Return y."""
        places = self.x if source is None else source, self.y if target is None else target
        self.comm.allReduce(*places, count, dtype, op, stream)
        return self.arrays[1].get().tolist()


def outcomes(library, program, size=2, gpus=(0, 1, 2, 3)):
    """Return what each rank's program returns, or the error that NCCL gives it, in words."""
    unique, found = library.get_unique_id(), [None] * size

    def work(number):
        rank = None
        try:
            rank = Rank(unique, size, number, gpus[number])
            found[number] = program(rank)
        except library.NcclError as error:
            found[number] = str(error)
        if rank is not None:
            rank.comm.destroy()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    return found


def test_collectives_do_what_nccl_says(library):
    def program(rank):
        piece, whole = rank.cupy.zeros(2), rank.cupy.zeros(8)
        found = [rank.sum(), rank.sum(op=MAX), rank.sum(rank.y)]
        rank.comm.reduceScatter(rank.x, piece.data.ptr, 2, F8, SUM, 0)
        rank.comm.allGather(rank.x, whole.data.ptr, 4, F8, 0)
        with ours.grouped():
            rank.comm.reduce(rank.x, rank.y if rank.rank == 1 else 0, 4, F8, SUM, 1, 0)
            rank.comm.broadcast(rank.x, rank.x, 4, F8, 1, 0)
        return [*found, piece.tolist(), whole.tolist(), *(a.tolist() for a in rank.arrays)]

    zero, one = outcomes(library, program)
    total, largest = [10.0, 12.0, 14.0, 16.0], [10.0, 11.0, 12.0, 13.0]
    twice = [2 * n for n in largest]
    both = [*np.arange(4.0), *largest]
    assert zero == [total, largest, twice, total[:2], both, largest, twice]
    assert one == [total, largest, twice, total[2:], both, largest, total]


def test_a_group_of_sends_and_receives_is_done_at_once_and_in_the_order_of_each_pair(library):
    def program(rank):
        other = 1 - rank.rank
        with ours.grouped():
            for half in (0, 16):
                rank.comm.send(rank.x + half, 2, F8, other, 0)
            for half in (16, 0):
                rank.comm.recv(rank.y + half, 2, F8, other, 0)
        return rank.arrays[1].tolist()

    assert outcomes(library, program) == [[12.0, 13.0, 10.0, 11.0], [2.0, 3.0, 0.0, 1.0]]


def of_another_gpu(rank):
    with rank.cupy.cuda.Device(3):
        far = rank.cupy.zeros(4)
    return rank.sum(far.data.ptr)


def freed(rank):
    gone = rank.cupy.zeros(4).data.ptr
    return rank.sum(gone)


def stream_of_another_gpu(rank):
    with rank.cupy.cuda.Device(3):
        stream = rank.cupy.cuda.Stream(non_blocking=True)
    return rank.sum(stream=stream.ptr)


def destroyed(rank):
    rank.comm.destroy()
    return rank.sum()


def two_threads(rank):
    """Call again while this rank waits for rank 1, which comes later."""
    if rank.rank == 1:
        time.sleep(0.3)
        return rank.sum()
    first = threading.Thread(target=rank.sum)
    first.start()
    time.sleep(0.1)
    try:
        return rank.sum()
    finally:
        first.join()


ALONE = [  # what a rank is told by itself; the other rank does the same
    (of_another_gpu, "no array of device"),
    (freed, "no array of device"),
    (lambda rank: rank.sum(count=5), "no array of device . has 40 bytes"),
    (lambda rank: rank.sum(0), "no array of device"),
    (lambda rank: rank.sum(rank.x, rank.x + 8, count=3), "overlap"),
    (lambda rank: rank.sum(count=0), "0 elements"),
    (lambda rank: rank.sum(dtype=9), "type 9"),
    (lambda rank: rank.sum(op=4), "operation 4"),
    (lambda rank: rank.comm.broadcast(rank.x, rank.y, 4, F8, 2, 0), "rank 2 of 2"),
    (lambda rank: rank.sum(stream=12345), "no stream of device"),
    (stream_of_another_gpu, "no stream of device"),
    (destroyed, "destroyed"),
]


@pytest.mark.parametrize("program, message", ALONE)
def test_a_call_that_would_go_astray_is_refused_on_its_rank(library, program, message):
    for found in outcomes(library, program):
        assert isinstance(found, str) and message in found.replace("device 0", "device .").replace(
            "device 1", "device ."
        ), found


TOGETHER = [  # what all ranks are told
    (lambda rank: rank.sum(count=4 - rank.rank), "do not call the same"),
    (lambda rank: rank.sum(op=rank.rank), "do not call the same"),
    (lambda rank: rank.sum(dtype=F8 if rank.rank else 7), "do not call the same"),
    (
        lambda rank: rank.comm.broadcast(rank.x, rank.y, 4, F8, rank.rank, 0),
        "do not call the same: rank 0: broadcast(4, 8, 0); rank 1: broadcast(4, 8, 1)",
    ),
    (lambda rank: rank.comm.send(rank.x, 4, F8, 1 - rank.rank, 0), "would hang"),
    (
        lambda rank: (
            rank.comm.recv(rank.y, 4, F8, 1 - rank.rank, 0),
            rank.comm.send(rank.x, 4, F8, 1 - rank.rank, 0),
        ),
        "would hang: rank 0: recv(4, 8) with 1; rank 1: recv(4, 8) with 0",
    ),
    (
        lambda rank: (
            rank.comm.recv(rank.y, 4, F8, 0, 0)
            if rank.rank
            else rank.comm.send(rank.x, 2, F8, 1, 0)
        ),
        "send(2, 8) with 1 meets recv(4, 8) with 0",
    ),
    (
        lambda rank: rank.sum() if rank.rank else rank.comm.send(rank.x, 4, F8, 1, 0),
        "would hang",
    ),
]


@pytest.mark.parametrize("program, message", TOGETHER)
def test_what_would_hang_is_an_error_of_all_ranks_and_shows_their_calls(library, program, message):
    for found in outcomes(library, program):
        assert isinstance(found, str) and message in found, found


def test_messages_that_group_allows_would_hang_if_they_were_nccls(library):
    """The program in nccl.py."""
    calls = [["send", 1], ["send", 2]], [["send", 2], ["recv", 0]], [["recv", 0], ["recv", 1]]

    def program(rank):
        for name, peer in calls[rank.rank]:
            getattr(rank.comm, name)(rank.x, 4, F8, peer, 0)

    for found in outcomes(library, program, size=3):
        assert "would hang: rank 0: send(4, 8) with 1; rank 1: send(4, 8) with 2" in found


def test_a_rank_that_is_gone_or_does_not_come_is_an_error_of_those_that_wait(library):
    found = outcomes(library, lambda rank: rank.sum() if rank.rank else "gone")
    assert found[0] == "gone" and "a rank is gone: rank 1: allReduce" in found[1]
    found = outcomes(library, lambda rank: rank.sum() if rank.rank else time.sleep(2))
    assert "has not come for 1.0 s: rank 0: nothing; rank 1: allReduce" in found[1]


def test_one_thread_at_a_time_is_in_a_communicator(library):
    refused, right = outcomes(library, two_threads)
    assert "another thread" in refused and right == [10.0, 12.0, 14.0, 16.0]


@pytest.mark.parametrize("place", ["source", "target"])
def test_nccl_waits_for_its_stream_alone(library, place):
    """The array is written on another stream, and no event lets the null stream wait for that."""
    from cupy.cuda import order

    found = []

    def program(rank):
        other = rank.cupy.cuda.Stream(non_blocking=True)
        with other:
            array = rank.cupy.zeros(4)
        with pytest.raises(order.Race, match="neither waits for the other"):
            rank.sum(**{place: array.data.ptr})
        found.append(rank.rank)

    outcomes(library, program)
    assert sorted(found) == [0, 1]


def test_two_ranks_on_one_gpu_are_refused_as_nccl_refuses_them(library):
    for found in outcomes(library, lambda rank: None, 3, gpus=(1, 2, 1)):
        assert "INVALID_USAGE: Duplicate GPU detected : rank " in found
        assert "both on CUDA device 0000:11:00.0" in found


def test_a_communicator_that_is_dropped_is_a_leak(library, monkeypatch):
    from cupy.cuda import _nccl_root

    monkeypatch.setattr(_nccl_root, "leaked", [])

    def program(rank):
        unique = library.get_unique_id()
        kept = library.NcclCommunicator(1, unique, 0)
        kept.destroy()
        library.NcclCommunicator(1, library.get_unique_id(), 0)

    outcomes(library, program, size=1)
    gc.collect()
    assert _nccl_root.leaked == ["rank 0 of 1"]


def test_an_abort_ends_a_call_in_another_thread(library):
    over = threading.Event()

    def program(rank):
        if rank.rank == 0:
            threading.Timer(0.2, rank.comm.abort).start()
            try:
                return rank.sum()
            finally:
                over.set()
        over.wait()  # it never takes part

    assert "aborted" in outcomes(library, program)[0]


def test_groups_are_paired(library):
    with pytest.raises(library.NcclError, match="groupEnd without groupStart"):
        library.groupEnd()
