"""A communicator of MPI: it compares what the ranks call, and then calls MPI's own collectives.

An MPI collective that one rank does not enter never returns on the others, and MPI can neither end
it nor say who is missing. So the ranks first meet: they start a non-blocking reduction of what they
call, and poll it until it is done or the run ends. When all have come, and agree, they enter the
collective itself.

MPI moves the bytes unseen. The ledger therefore gets what the closed forms say, in rows whose names
say so. MPI also adds in an order of its own, which gives the same bits on every rank. Where another
order has other bits, `Fabric.reordered` says so. 16-bit floats are reduced by messages, in rank
order: they round so coarsely that no bound for another order is worth promising.
"""

import math
import threading
import time
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from minidist.backend import Array, is_half, on_device_of, to_host
from minidist.comm.communicator import Ledger, NewGroup, all_reduce_bytes
from minidist.comm.diagnosis import Signature, Wait, call_site, mismatch, signature_of
from minidist.comm.fabric import Fabric
from minidist.comm.mpi.library import load

if TYPE_CHECKING:
    from mpi4py import MPI


SPINS = 300  # how often a rank checks for the others, and yields its core, before it pauses
LONGEST_PAUSE = 0.001  # seconds
ALL_BITS = (1 << 64) - 1
MOMENT = 0.2  # seconds in which ranks that have met come to know of it
MOST = 1 << 31  # elements: an MPI may count them in 32 bits
# Transfers that a failed run has left under way. MPI cannot end all of them, and may still write
# to their memory, so both are kept until the process ends.
ABANDONED: list[Any] = []


class Pause:
    """Pauses between two checks: a tenth of the time since the last event.

    So a short wait ends soon after its event, and a long one leaves the core to others.
    """

    def __init__(self):
        self.begin = time.monotonic()

    def __call__(self, longest: float = LONGEST_PAUSE) -> None:
        time.sleep(min((time.monotonic() - self.begin) / 10, longest))


class Polling:
    """How threads of this rank wait; see `Pace` in fabric.py.

    stopped_everywhere  set when no rank starts anything more in the present run
    """

    def __init__(self):
        self.stopped_everywhere = threading.Event()

    def offer(self) -> None:
        """No other rank has to go first."""

    def wait_until(self, condition: Callable[[], bool]) -> bool:
        pause = Pause()
        while not condition():
            pause()
        return True


class MpiCommunicator:
    """A Communicator (see communicator.py) of MPI's collectives.

    To meet, a rank gives its fingerprint and the complement of it. Their maxima over all ranks are
    complements of each other only where the fingerprints are equal.

    mine, maxima  what this rank gives, and the maxima: two 8-byte words each
    meetings      how often the group has met: part of the name of a meeting in a Wait
    """

    library = None

    def __init__(self, fabric: Fabric, new: NewGroup, comm: "MPI.Comm", polling: Polling):
        self.fabric, self.mailbox = fabric, fabric.mailbox
        self.run, self.members, self.splits, self.comm = fabric.run, new.members, new.splits, comm
        self.me, self.size = comm.rank, comm.size
        self.polling, self.stopped_everywhere = polling, polling.stopped_everywhere
        self.meetings, self.ledger, self.MPI = 0, Ledger(), load()
        self.mine, self.maxima = (memoryview(bytearray(16)).cast("Q") for _ in range(2))
        uint64 = self.MPI.UINT64_T
        self.spec = [self.mine, 2, uint64], [self.maxima, 2, uint64], self.MPI.MAX

    # Meeting.

    def meet(self, call: Signature) -> None:
        self.mailbox.enter(self.run)
        if self.size == 1:
            return
        with self.mailbox.lock:  # who has started a meeting has done so before the run was stopped
            self.mailbox.check_open(self.run)
            self.meetings += 1
            self.mine[0], self.mine[1] = call.fingerprint, call.fingerprint ^ ALL_BITS
            request = self.comm.Iallreduce(*self.spec)
        self._wait(request, call.text)
        if self.maxima[0] ^ self.maxima[1] != ALL_BITS:  # the fingerprints differ
            text = f"{call.text} at {call_site()}"
            raise mismatch(self.members, self.comm.allgather(text))

    def exchange(self, number: int) -> list[int]:
        self.meet(signature_of("split"))
        return self.comm.allgather(number)

    def _wait(self, request: "MPI.Request", operation: str) -> None:
        """Return when every rank of the group has started this request; raise if one never will.

        A rank whose run has been stopped still waits until all ranks have been, and a moment
        longer: if all had started, all come to know of it, and all enter the collective.
        """
        if request.Test() or self.mailbox.spin(request.Test):
            return
        came, give_up = False, math.inf

        def over() -> bool:
            nonlocal came, give_up
            came = request.Test()
            if not came and self.stopped_everywhere.is_set():
                give_up = min(give_up, time.monotonic() + MOMENT)
            return came or time.monotonic() > give_up

        missing = [rank for rank in self.members if rank != self.members[self.me]]
        wait = Wait(operation, lambda: missing, call_site(), meeting=(self.splits, self.meetings))
        with self.mailbox.waiting(wait):
            self.polling.wait_until(over)
        if not came:
            ABANDONED.append((request, self.spec))
            self.mailbox.check_open(self.run)

    # Moving arrays. All ranks must come to the same decisions here.

    def all_reduce(self, call: Signature, x: Array, op: str, out: Array | None) -> Array | None:
        reduction = self._reduction(x.dtype, x.size, op)
        in_place = isinstance(out, np.ndarray) and out.flags.c_contiguous and reduction is not None
        result: Array = out if in_place else np.empty(x.shape, x.dtype)
        self.meet(call)
        if reduction is None:
            return None
        if result is not x:
            result[...] = to_host(x)
        if self.size > 1:
            self.comm.Allreduce(self.MPI.IN_PLACE, result, reduction)
            self.fabric.note_order(x.dtype, self.size)
            nbytes = all_reduce_bytes(x.size, x.itemsize, self.me, self.size)
            self.ledger.add_unseen("all_reduce", nbytes)
        return result if in_place else on_device_of(result, x)

    def reduce_scatter(self, call: Signature, x: Array, ends: list[int], op: str) -> Array | None:
        reduction = self._reduction(x.dtype, x.size, op)
        rows = [stop - start for start, stop in pairwise(ends)]
        result = np.empty((rows[self.me], *x.shape[1:]), x.dtype)
        source = None if reduction is None else np.ascontiguousarray(to_host(x))
        self.meet(call)
        if reduction is None:
            return None
        counts = [n * (x.size // max(1, len(x))) for n in rows]
        self.comm.Reduce_scatter(source, result, counts, reduction)
        self.fabric.note_order(x.dtype, self.size)
        self.ledger.add_unseen("reduce_scatter", x.nbytes - result.nbytes)
        return on_device_of(result, x)

    def gather_into(self, call: Signature, out: Array, ends: list[int]) -> Array | None:
        possible = out.size < MOST and out.dtype.isnative
        result = np.ascontiguousarray(to_host(out)) if possible else None
        self.meet(call)
        if not possible:
            return None
        counts = [stop - start for start, stop in pairwise(ends)]
        self.comm.Allgatherv(self.MPI.IN_PLACE, [result, counts])
        nbytes = (self.size - 1) * counts[self.me] * out.itemsize
        self.ledger.add_unseen("all_gather", nbytes)
        if result is not out:
            out[...] = on_device_of(result, out)
        return out

    def _reduction(self, dtype: np.dtype, count: int, op: str) -> "MPI.Op | None":
        """Return MPI's reduction, or None where it has none that does what NumPy does.

        The maximum of floats does not: where one of two arguments is NaN, the one that MPI keeps
        depends on their order, and so could differ between ranks. MPI does not add truth values,
        nor numbers in another byte order than the machine's. 16-bit floats: see the top.
        """
        possible = count < MOST and dtype.isnative and not is_half(dtype)
        return _reduction(dtype.kind, op) if possible else None


@cache
def _reduction(kind: str, op: str) -> "MPI.Op | None":
    MPI = load()
    reductions = {"sum": MPI.SUM, "prod": MPI.PROD}
    if kind in "iu":
        reductions |= {"max": MPI.MAX, "min": MPI.MIN}
    return reductions.get(op) if kind != "b" else None
