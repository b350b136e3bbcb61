"""The stand-in for NCCL moves what NCCL moves, and what would hang or go astray is an error of it.

Ranks are threads here, with a simulated GPU each; `pytest --device strict`.
"""

import threading

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


ALONE = [  # what a rank is told by itself; the other rank does the same
    (lambda rank: rank.sum(count=5), "no array of device"),
    (lambda rank: rank.sum(rank.x, rank.x + 8, count=3), "overlap"),
    (lambda rank: rank.sum(dtype=9), "type 9"),
    (lambda rank: rank.comm.broadcast(rank.x, rank.y, 4, F8, 2, 0), "rank 2 of 2"),
    (lambda rank: rank.sum(stream=12345), "no stream of device"),
]
TOGETHER = [  # what all ranks are told
    (lambda rank: rank.sum(count=4 - rank.rank), "do not call the same"),
    (
        lambda rank: rank.comm.broadcast(rank.x, rank.y, 4, F8, rank.rank, 0),
        "do not call the same: rank 0: broadcast(4, 8, 0); rank 1: broadcast(4, 8, 1)",
    ),
    (lambda rank: rank.comm.send(rank.x, 4, F8, 1 - rank.rank, 0), "would hang"),
    (
        lambda rank: (
            rank.comm.recv(rank.y, 4, F8, 0, 0)
            if rank.rank
            else rank.comm.send(rank.x, 2, F8, 1, 0)
        ),
        "send(2, 8) with 1 meets recv(4, 8) with 0",
    ),
]


@pytest.mark.parametrize("program, message", [*ALONE, *TOGETHER])
def test_what_would_go_astray_or_hang_is_an_error_of_every_rank(library, program, message):
    for found in outcomes(library, program):
        assert isinstance(found, str) and message in found, found


def test_nccl_waits_for_its_stream_alone(library):
    """The array is written on another stream, and no event lets the null stream wait for that."""
    from cupy.cuda import order

    found = []

    def program(rank):
        other = rank.cupy.cuda.Stream(non_blocking=True)
        with other:
            array = rank.cupy.zeros(4)
        with pytest.raises(order.Race, match="neither waits for the other"):
            rank.sum(array.data.ptr)
        found.append(rank.rank)

    outcomes(library, program)
    assert sorted(found) == [0, 1]
