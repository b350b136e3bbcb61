"""NCCL, between ranks with a GPU each: what they call is compared on the host; GPUs move arrays.

    minidist.run(worker, 4, transport="nccl", device="gpu")    4 processes, on 4 GPUs of a machine
    minidist.run(worker, 8, transport="mpi-nccl", device="gpu")    what mpiexec has started

A kernel of NCCL that one rank does not start never ends on the others. So the ranks first meet on
the host, as they do without NCCL. When all have come, and agree, they start the kernel on the
current stream, and do not wait for it. All must choose the same path for an array. So the choice
depends on what they compare (dtype, shape, operation) and not on where the array is: an array on
the host is copied to the GPU, and its result back. The communicator on which the ranks meet does
what NCCL cannot reduce, and 16-bit floats, as under MPI.

NCCL does not report how many bytes a reduction moves: see Ledger. It adds in an order of its own,
which gives the same bits on every rank. Kernels of two groups may run at once, as with buckets;
then a GPU needs room for both (NCCL's user guide, "Using multiple NCCL communicators").

NCCL does not move the messages of `Group.send`. Its send is a kernel, too: it ends when the
receiver runs its recv, and a communicator runs one kernel after the other. So this program, which
`Group` allows, would never end: the first kernel of each rank waits for the second one of another.

    rank 0   send to 1, send to 2        rank 1   send to 2, recv from 0
    rank 2   recv from 0, recv from 1

A communicator for each ordered pair would break the circle, but there are N (N - 1) pairs, and
their kernels must all fit on a GPU at once. So messages pass through the host. In a collective all
ranks have met, and each knows all that it sends and receives: `transfer` starts that as one group,
in which nothing waits for its turn.

Sources: NCCL's user guide; CuPy's `cupy_backends/cuda/libs/nccl.pyx`, whose methods take addresses,
counts and the numbers of types, operations and streams. CuPy's wheels do not contain NCCL.
"""

import pickle
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial, wraps
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np

from minidist.backend import Array, device_module, gpus, on_device_of, on_gpu, to_device
from minidist.comm.communicator import Communicator, Key, NewGroup, Staged, all_reduce_bytes
from minidist.comm.diagnosis import Signature
from minidist.comm.fabric import Connect, Fabric
from minidist.errors import WrongInput

REDUCTIONS = {  # by kind of dtype: what NCCL does as NumPy does it
    "i": ("sum", "prod", "max", "min"),
    "u": ("sum", "prod", "max", "min"),
    "f": ("sum", "prod"),  # its maximum ignores NaN, as fmax of C does
    "c": ("sum",),  # by parts
}
REMEDY = "use transport='process', whose ranks may share a GPU and its memory (CUDA IPC)"


@cache
def load() -> ModuleType:
    """Return cupy.cuda.nccl; ValueError, with the remedy, if the library is missing."""
    device_module("gpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CuPy warns where we raise
        from cupy.cuda import nccl
    if not nccl.available:
        raise WrongInput(
            "transport='nccl' needs the NCCL library: pip install nvidia-nccl-cu12; "
            "or use transport='process'"
        )
    return nccl


def check_device(device: str, transport: str) -> None:
    """Raise ValueError, with the remedy, unless arrays are on GPUs, and there is NCCL."""
    if device == "cpu":
        raise WrongInput(
            f"transport {transport!r} moves arrays from GPU to GPU; give device 'gpu', or use "
            "transport 'process'"
        )
    load()


def room(device: str) -> int:
    """Return how many ranks of this machine can have a GPU each on "gpu" or "gpu:N"."""
    return gpus() if device == "gpu" else 1


def check_ranks(size: int, device: str) -> None:
    """Raise ValueError, with the remedy, unless `size` ranks of this machine have a GPU each."""
    check_device(device, "nccl")
    if size > (count := room(device)):
        raise WrongInput(
            f"NCCL has one rank per GPU, and {size} ranks would share {count} GPU"
            f"{'s' if count > 1 else ''}: use no more ranks than that, or {REMEDY}"
        )


def address_of(gpu: Any) -> int:
    """Return the address of a GPU on the PCI bus; NCCL tells GPUs apart by it, too.

    0000:3B:00.0 is 0x3b000.
    """
    return int(re.sub("[:.]", "", gpu.pci_bus_id), 16)


def check_gpus(addresses: list[int], hosts: list[int]) -> None:
    """Raise ValueError if two ranks have the same GPU of the same host."""
    first: dict[tuple[int, int], int] = {}
    for rank, where in enumerate(zip(hosts, addresses, strict=True)):
        if (other := first.setdefault(where, rank)) != rank:
            raise WrongInput(
                f"ranks {other} and {rank} are on one GPU, {where[1]:#x} on the PCI bus of host "
                f"{where[0]}, and NCCL has one rank per GPU: give each rank another one, or "
                f"{REMEDY}"
            )


@cache
def types() -> dict[str, tuple[int, int]]:
    """Return {name of a dtype: (how many of NCCL's type are one element, that type)}.

    NCCL has no truth values, and no integers of 16 bits. Floats of 16 bits it has: their sums
    depend so much on NCCL's order that they are done in rank order, without it.
    """
    nccl = load()
    named = "int8 uint8 int32 uint32 int64 uint64 float32 float64".split()
    single = {name: (1, getattr(nccl, f"NCCL_{name.upper()}")) for name in named}
    return single | {"complex64": (2, nccl.NCCL_FLOAT32), "complex128": (2, nccl.NCCL_FLOAT64)}


def reduction(dtype: np.dtype, op: str) -> tuple[int, int, int] | None:
    """Return how many of NCCL's type are one element, that type, and NCCL's operation.

    None where NCCL does not do what NumPy does.
    """
    if dtype.name not in types() or op not in REDUCTIONS[dtype.kind]:
        return None
    return *types()[dtype.name], getattr(load(), f"NCCL_{op.upper()}")


@contextmanager
def grouped() -> Iterator[None]:
    """Let NCCL start together all that this thread calls in the context (NCCL: "Group Calls")."""
    load().groupStart()
    try:
        yield
    finally:
        load().groupEnd()


def join(fabric: Fabric, members: list[int], splits: tuple[int, ...]) -> Any:
    """Return NCCL's communicator of these ranks, all of which call this.

    The first of them makes a unique id, which the others get in a message. (`commSplit`, which
    needs none, is not in CuPy 13.)
    """
    nccl, key = load(), Key(fabric.run, splits, "nccl", 0)
    first, *others = members
    if fabric.rank == first:
        unique = nccl.get_unique_id()  # bytes, or, in CuPy 13, a tuple of numbers
        for rank in others:
            fabric.send(rank, key, np.frombuffer(pickle.dumps(unique), np.uint8))
    else:
        unique = pickle.loads(fabric.recv([first], key, "the start of NCCL")[1])
    return nccl.NcclCommunicator(len(members), unique, members.index(fabric.rank))


def on_its_gpu(operation: Callable) -> Callable:
    """Let this method use the rank's GPU."""

    @wraps(operation)
    def call(self: "NcclCommunicator", *args):
        with self.gpu:  # a thread that the worker has started would use GPU 0
            return operation(self, *args)

    return call


class NcclCommunicator:
    """A Communicator (see communicator.py) of NCCL's collectives, over another one.

    below  the communicator on which the ranks meet
    gpu    the rank's, a cupy.cuda.Device
    comm   NCCL's; the first collective that needs it makes it, which takes time and memory
    """

    def __init__(self, fabric: Fabric, new: NewGroup, below: Communicator, gpu: Any):
        self.fabric, self.members, self.splits = fabric, new.members, new.splits
        self.below, self.gpu = below, gpu
        self.me, self.size = self.members.index(fabric.rank), len(self.members)
        self.ledger = below.ledger
        self.comm: Any = None

    @property
    def library(self) -> "NcclCommunicator | None":
        return self if self.size > 1 else None

    def meet(self, call: Signature) -> None:
        self.below.meet(call)

    def exchange(self, number: int) -> list[int]:
        return self.below.exchange(number)

    def _join(self) -> None:
        """Make NCCL's communicator if the group needs it for the first time."""
        if self.comm is None:
            self.comm = join(self.fabric, self.members, self.splits)
            self.fabric.opened[self.splits] = self.comm

    # Moving arrays. All ranks must come to the same decisions here. What may fail is done before
    # they meet: when the others start a kernel, the memory for its result is there.

    @on_its_gpu
    def all_reduce(self, call: Signature, x: Array, op: str, out: Array | None) -> Array | None:
        native = reduction(x.dtype, op)
        if native is None or self.size == 1:
            return self.below.all_reduce(call, x, op, out)
        parts, *kinds = native
        in_place = out is not None and on_gpu(out) and out.flags.c_contiguous
        result: Array = out if in_place else device_module("gpu").empty(x.shape, x.dtype)
        if in_place and out is not x:  # x may be a part of out, so it is copied before NCCL writes
            result[...] = to_device(x, "gpu")
        source = result if in_place else _on_gpu(x)
        self.below.meet(call)
        self._join()
        self._start("allReduce", [source, result], x.size * parts, *kinds)
        self.fabric.note_order(x.dtype, self.size)
        nbytes = all_reduce_bytes(x.size, x.itemsize, self.me, self.size)
        self.ledger.add_unseen("all_reduce", nbytes)
        return result if in_place else on_device_of(result, x)

    @on_its_gpu
    def reduce_scatter(self, call: Signature, x: Array, ends: list[int], op: str) -> Array | None:
        native = reduction(x.dtype, op)
        if native is None or self.size == 1:
            return self.below.reduce_scatter(call, x, ends, op)
        parts, *kinds = native
        source, mine = _on_gpu(x), ends[self.me + 1] - ends[self.me]
        result = device_module("gpu").empty((mine, *x.shape[1:]), x.dtype)
        self.below.meet(call)
        self._join()
        pieces = [source[start:stop] for start, stop in pairwise(ends)]
        if len({len(piece) for piece in pieces}) == 1:
            self._start("reduceScatter", [source, result], result.size * parts, *kinds)
        else:
            with grouped():
                for root, piece in enumerate(pieces):
                    target = result if root == self.me else None
                    self._start("reduce", [piece, target], piece.size * parts, *kinds, root)
        self.fabric.note_order(x.dtype, self.size)
        self.ledger.add_unseen("reduce_scatter", x.nbytes - result.nbytes)
        return on_device_of(result, x)

    @on_its_gpu
    def gather_into(self, call: Signature, out: Array, ends: list[int]) -> Array | None:
        if self.size == 1:
            return self.below.gather_into(call, out, ends)
        result = _on_gpu(out)
        self.below.meet(call)
        self._join()
        pieces = [result[start:stop] for start, stop in pairwise(ends)]
        mine, kind = pieces[self.me], load().NCCL_UINT8  # bytes, whatever the dtype
        if len({len(piece) for piece in pieces}) == 1:
            self._start("allGather", [mine, result], mine.nbytes, kind)
        else:
            with grouped():
                for root, piece in enumerate(pieces):
                    self._start("broadcast", [piece, piece], piece.nbytes, kind, root)
        self.ledger.add_unseen("all_gather", (self.size - 1) * mine.nbytes)
        if result is not out:
            out[...] = on_device_of(result, out)
        return out

    @on_its_gpu
    def transfer(
        self, key: Key, operation: str, outgoing: dict[int, Array | Staged], sources: list[int]
    ) -> dict[int, Array]:
        """Send a header for each array; start all sends and receives of arrays on GPUs at once.

        An array on the host is a message, which follows its header.
        """
        self._join()
        on_gpus, received = {}, {}
        for to, x in outgoing.items():
            x = x.array if isinstance(x, Staged) else x
            header = pickle.dumps((on_gpu(x), x.shape, x.dtype))
            self.fabric.send(self.members[to], key, np.frombuffer(header, np.uint8))
            if on_gpu(x):
                on_gpus[to] = _on_gpu(x)
            else:
                self.fabric.send(self.members[to], key, x)
        for source in sources:
            message = partial(self.fabric.recv, [self.members[source]], key, operation)
            by_nccl, *kind = pickle.loads(message()[1])
            received[source] = device_module("gpu").empty(*kind) if by_nccl else message()[1]
        with grouped():
            for method, arrays in (("send", on_gpus), ("recv", received)):
                for rank, x in arrays.items():
                    if on_gpu(x):
                        self._start(method, [x], x.nbytes, load().NCCL_UINT8, rank)
        return received

    def _start(self, operation: str, places: list[Array | None], count: int, *more: int) -> None:
        """Start an operation on the current stream, unless there is nothing to move.

        places  what it reads and what it writes; None for a result that this rank does not get
        """
        if count:
            addresses = [0 if x is None else x.data.ptr for x in places]
            stream = device_module("gpu").cuda.get_current_stream().ptr
            getattr(self.comm, operation)(*addresses, count, *more, stream)


def connect(
    below: Connect,
    fabric: Fabric,
    new: NewGroup,
    parent: Communicator | None,
) -> NcclCommunicator | None:
    """Return a communicator of NCCL over the one that `below` makes.

    ValueError, on all ranks, if two of them have the same GPU.
    """
    if parent is None:
        under = below(fabric, new, None)
        assert under is not None  # all ranks are in the first group
        gpu = device_module("gpu").cuda.Device()  # the one that this thread uses
        check_gpus(under.exchange(address_of(gpu)), fabric.hosts)
    else:
        assert isinstance(parent, NcclCommunicator)
        under = below(fabric, new, parent.below)
        gpu = parent.gpu  # this may be a thread of the worker's, which uses GPU 0
    return None if under is None else NcclCommunicator(fabric, new, under, gpu)


def _on_gpu(x: Array) -> Array:
    """Return x as a contiguous array on the GPU: x itself if it is one."""
    return device_module("gpu").ascontiguousarray(to_device(x, "gpu"))
