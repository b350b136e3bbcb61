"""NCCL's communicators, between processes and threads: a stand-in (CuPy: cuda/libs/nccl.pyx).

Every call is finished when it returns, or at `groupEnd`; so it waits for the other ranks, as a GPU
would. What NCCL does not check, and what then hangs or writes elsewhere, is an error here: see
_nccl_root.py, and

    addresses    are of living memory of the communicator's device, and all bytes are in it
    places       source and target are the same where NCCL works in place, or do not overlap
    streams      live, on the communicator's device
    threads      one at a time in a communicator
    lifetime     nothing is called after `destroy` or `abort`; a communicator that is dropped
                 without either is in `_nccl_root.leaked`
"""

import ctypes
import os
import socket
import threading
from multiprocessing import connection

import numpy as np

from . import _nccl_root as _root
from . import device, memory, stream

NCCL_SUM, NCCL_PROD, NCCL_MAX, NCCL_MIN = range(4)
NCCL_INT8, NCCL_UINT8, NCCL_INT32, NCCL_UINT32, NCCL_INT64, NCCL_UINT64 = range(6)
NCCL_FLOAT16, NCCL_FLOAT32, NCCL_FLOAT64 = range(6, 9)

available = True
_THREAD = threading.local()


class NcclError(RuntimeError):
    """A call of NCCL has failed (nccl.pyx: NcclError, which has no words of ours)."""

    def __init__(self, status: int, *why: str):
        self.status = status
        super().__init__(": ".join([_NAMES[status], *why]))

    def __reduce__(self):
        return type(self), (self.status, str(self).partition(": ")[2])


_NAMES = {
    _root.SYSTEM: "NCCL_ERROR_SYSTEM_ERROR",
    _root.INTERNAL: "NCCL_ERROR_INTERNAL_ERROR",
    _root.ARGUMENT: "NCCL_ERROR_INVALID_ARGUMENT",
    _root.USAGE: "NCCL_ERROR_INVALID_USAGE",
    _root.REMOTE: "NCCL_ERROR_REMOTE_ERROR",
}


def get_unique_id() -> bytes:
    return _root.Root().unique_id()


def groupStart() -> None:
    _THREAD.depth = getattr(_THREAD, "depth", 0) + 1
    _THREAD.pending = getattr(_THREAD, "pending", [])


def groupEnd() -> None:
    """Start what was called since `groupStart`, all of it together (NCCL: Group Calls)."""
    if not getattr(_THREAD, "depth", 0):
        raise NcclError(_root.USAGE, "groupEnd without groupStart")
    _THREAD.depth -= 1
    if not _THREAD.depth:
        pending, _THREAD.pending = _THREAD.pending, []
        _finish(pending)


def _finish(pending: list) -> None:
    """Hand in the calls of each communicator; write the results when all have come."""
    by_comm: dict[NcclCommunicator, list] = {}
    for comm, call, target in pending:
        by_comm.setdefault(comm, []).append((call, target))
    for comm, made in by_comm.items():
        comm._tell([call for call, _ in made])
    for comm, made in by_comm.items():
        for (_, target), result in zip(made, comm._hear(), strict=True):
            ctypes.memmove(target, result, len(result))


class NcclCommunicator:
    """One rank's end; made by all ranks at once, on a device each."""

    def __init__(self, ndev: int, commId: bytes, rank: int):
        if len(commId) != _root.ID_BYTES:
            raise ValueError(f"commId length {len(commId)} != {_root.ID_BYTES}.")
        if getattr(_THREAD, "depth", 0):
            raise NcclError(_root.USAGE, "the stand-in makes no communicator in a group")
        self._size, self._rank, self.device = ndev, rank, device.current()
        self.busy, self.ending = threading.Lock(), threading.Lock()
        host, port, _ = commId.split(b" ", 2)
        self.connection = connection.Client((host.decode(), int(port)))
        self._tell((ndev, rank, device.Device().pci_bus_id))
        self._hear()
        _root.living.add(self)

    def __del__(self):
        if getattr(self, "connection", None) is not None:
            _root.leaked.append(f"rank {self._rank} of {self._size}")
            self.destroy()

    def _tell(self, what: object) -> None:
        try:
            self.connection.send(what)
        except OSError:
            raise NcclError(_root.SYSTEM, "the thread where the ranks meet is gone") from None

    def _hear(self) -> list[bytes]:
        """Return the results; NcclError for a refusal, and after an `abort` meanwhile."""
        try:
            if not self.connection.poll(2 * _root.PATIENCE):
                raise NcclError(_root.REMOTE, f"no answer in {2 * _root.PATIENCE} s")
            answer = self.connection.recv()
        except (EOFError, OSError, TypeError, AttributeError):
            raise NcclError(_root.SYSTEM, "aborted, or the others are gone") from None
        if isinstance(answer, _root.Refused):
            raise NcclError(*answer.args)
        return answer

    def destroy(self) -> None:
        with self.ending:  # an abort in another thread may be at it
            if self.connection is not None:
                self.connection.close()
                self.connection = None
                _root.living.discard(self)

    def abort(self) -> None:
        """End what is under way, in whichever thread, and the communicator."""
        with self.ending:
            if self.connection is not None:
                with socket.socket(fileno=os.dup(self.connection.fileno())) as end:
                    end.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits
        self.destroy()

    # The calls. Counts are of elements of `datatype`.

    def allReduce(self, sendbuf, recvbuf, count, datatype, op, stream):
        self._call("allReduce", sendbuf, recvbuf, (count, datatype, op), stream)

    def reduce(self, sendbuf, recvbuf, count, datatype, op, root, stream):
        target = recvbuf if self._valid(root) == self._rank else None
        self._call("reduce", sendbuf, target, (count, datatype, op, root), stream)

    def broadcast(self, sendbuff, recvbuff, count, datatype, root, stream):
        source = sendbuff if self._valid(root) == self._rank else None
        self._call("broadcast", source, recvbuff, (count, datatype, root), stream)

    def reduceScatter(self, sendbuf, recvbuf, recvcount, datatype, op, stream):
        spec = recvcount, datatype, op
        self._call("reduceScatter", sendbuf, recvbuf, spec, stream, given=self._size)

    def allGather(self, sendbuf, recvbuf, count, datatype, stream):
        self._call("allGather", sendbuf, recvbuf, (count, datatype), stream, taken=self._size)

    def send(self, sendbuf, count, datatype, peer, stream):
        self._call("send", sendbuf, None, (count, datatype), stream, peer=self._valid(peer))

    def recv(self, recvbuf, count, datatype, peer, stream):
        self._call("recv", None, recvbuf, (count, datatype), stream, peer=self._valid(peer))

    def _valid(self, rank: int) -> int:
        if not 0 <= rank < self._size:
            raise NcclError(_root.ARGUMENT, f"rank {rank} of {self._size}")
        return rank

    def _call(self, name, source, target, spec, where, given=1, taken=1, peer=None):
        """Check the arguments; enqueue the call, or finish it if there is no group.

        source, target  addresses; None where this rank gives or gets nothing
        given, taken    how many times the count they have
        """
        if self.connection is None:
            raise NcclError(_root.ARGUMENT, f"{name} of a communicator that is destroyed")
        if not self.busy.acquire(blocking=False):
            raise NcclError(_root.USAGE, f"{name} while another thread is in this communicator")
        try:
            count, datatype, *more = spec
            if count <= 0 or not 0 <= datatype < len(_root.DTYPES):
                raise NcclError(_root.ARGUMENT, f"{name} of {count} elements of type {datatype}")
            if more and name not in ("broadcast",) and not 0 <= more[0] < len(_root.COMBINE):
                raise NcclError(_root.ARGUMENT, f"{name} by operation {more[0]}")
            nbytes = count * int(_root.DTYPES[datatype][1])
            places = (source, given * nbytes, False), (target, taken * nbytes, True)
            self._use(name, places, where)
            self._check_overlap(name, source, target, nbytes, given, taken)
            data = b"" if source is None else ctypes.string_at(source, nbytes * given)
            _root.calls.append(name)
            groupStart()
            _THREAD.pending.append((self, _root.Call(name, spec, data, peer), target or 0))
            groupEnd()
        finally:
            self.busy.release()

    def _use(self, name: str, places: tuple, where: int) -> None:
        """Let the stream use these places, (address, bytes, whether it writes); check both."""
        queue = stream.LIVE.get(where)
        if queue is None or queue.device_id not in (-1, self.device):
            raise NcclError(
                _root.ARGUMENT, f"{name} on {where:#x}, no stream of device {self.device}"
            )
        with device.Device(self.device), queue:
            for address, nbytes, writes in places:
                if address is None:
                    continue
                try:
                    holder = memory.at(address, nbytes)
                except LookupError as error:
                    raise NcclError(_root.ARGUMENT, f"{name}: {error}") from None
                part = (ctypes.c_char * nbytes).from_address(address)
                holder._use(np.frombuffer(part, np.uint8), writes)

    def _check_overlap(self, name, source, target, nbytes, given, taken) -> None:
        """Refuse places that overlap, but for NCCL's own: In-place Operations."""
        if source is not None and target is not None:
            piece = self._rank * nbytes
            in_place = source + piece * (given > 1) == target + piece * (taken > 1)
            apart = source + nbytes * given <= target or target + nbytes * taken <= source
            if not (in_place or apart):
                raise NcclError(_root.ARGUMENT, f"{name}: source and target overlap")
