"""A communicator of NCCL: what ranks call is compared on the host, and arrays go from GPU to GPU.

A kernel of NCCL that one rank does not start never ends on the others. So the ranks first meet on
the host, as they do without NCCL. When all have come, and agree, they start the kernel on the
current stream, and do not wait for it. All must choose the same path for an array. So the choice
depends on what they compare (dtype, shape, operation) and not on where the array is: an array on
the host is copied to the GPU, and its result back. The communicator on which the ranks meet does
what NCCL cannot reduce.

Nobody sees how many bytes NCCL moves for a reduction: see ledger.py. It adds in an order of its
own, which gives the same bits on every rank. Where another order has other bits, `Fabric.reordered`
says so. 16-bit floats are reduced without it, in rank order, as under MPI. Kernels of two groups
may run at once, as with buckets; then a GPU needs room for both (NCCL's user guide, "Using multiple
NCCL communicators concurrently").

NCCL does not move the messages of `Group.send`. Its send is a kernel, too: it ends when the
receiver runs its recv, and a communicator runs one kernel after the other. So this program, which
`Group` allows, would never end: the first kernel of each rank waits for the second one of another.

    rank 0   send to 1, send to 2        rank 1   send to 2, recv from 0
    rank 2   recv from 0, recv from 1

A communicator for each ordered pair would break the circle, but there are N (N - 1) pairs, and
their kernels must all fit on a GPU at once. So messages pass through the host, which costs a copy
from one GPU and a copy to the other. In a collective all ranks have met, and each knows all that
it sends and receives: `transfer` starts that as one group, in which nothing waits for its turn.
"""

import pickle
from collections.abc import Callable
from functools import partial, wraps
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from minidist.backend import Array, device_module, on_device_of, on_gpu, to_device
from minidist.comm.diagnosis import Signature
from minidist.comm.fabric import Communicator, Connect, NewGroup, order_shows
from minidist.comm.ledger import BY_FORMULA
from minidist.comm.message import Key, Staged
from minidist.comm.nccl import library as nccl
from minidist.pieces import split_sizes

if TYPE_CHECKING:
    from minidist.comm.local.mailbox_fabric import MailboxFabric


def on_its_gpu(operation: Callable) -> Callable:
    """Let this method use the rank's GPU: a thread that the worker has started would use GPU 0."""

    @wraps(operation)
    def call(self: "NcclCommunicator", *args):
        with self.gpu:
            return operation(self, *args)

    return call


class NcclCommunicator:
    """A Communicator (see fabric.py) of NCCL's collectives, over another one.

    below  the communicator on which the ranks meet
    gpu    the rank's, a cupy.cuda.Device
    comm   NCCL's; the first collective that needs it makes it, which takes time and memory
    """

    def __init__(self, fabric: "MailboxFabric", new: NewGroup, below: Communicator, gpu: Any):
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

    def _meet(self, call: Signature) -> None:
        """Meet; join NCCL's communicator."""
        self.below.meet(call)
        self._join()

    def _join(self) -> None:
        """Make NCCL's communicator if the group needs it for the first time."""
        if self.comm is None:
            self.comm = nccl.join(self.fabric, self.members, self.splits)
            self.fabric.opened[self.splits] = self.comm

    # Moving arrays. All ranks must come to the same decisions here. What may fail is done before
    # they meet: when the others start a kernel, the memory for its result is there.

    @on_its_gpu
    def all_reduce(self, call: Signature, x: Array, op: str, out: Array | None) -> Array | None:
        found = nccl.reduction(x.dtype, op)
        if found is None or self.size == 1:
            return self.below.all_reduce(call, x, op, out)
        parts, *kinds = found
        in_place = out is not None and on_gpu(out) and out.flags.c_contiguous
        result: Array = out if in_place else device_module("gpu").empty(x.shape, x.dtype)
        if in_place and out is not x:  # x may be a part of out, so it is copied before NCCL writes
            result[...] = to_device(x, "gpu")
        source = result if in_place else _on_gpu(x)
        self._meet(call)
        self._start("allReduce", [source, result], x.size * parts, *kinds)
        self.fabric.reordered |= order_shows(x.dtype, self.size)
        own = split_sizes(x.size, self.size)[self.me]
        self._count("all_reduce", (x.size - own + (self.size - 1) * own) * x.itemsize)
        return result if in_place else on_device_of(result, x)

    @on_its_gpu
    def reduce_scatter(self, call: Signature, x: Array, ends: list[int], op: str) -> Array | None:
        found = nccl.reduction(x.dtype, op)
        if found is None or self.size == 1:
            return self.below.reduce_scatter(call, x, ends, op)
        parts, *kinds = found
        source, mine = _on_gpu(x), ends[self.me + 1] - ends[self.me]
        result = device_module("gpu").empty((mine, *x.shape[1:]), x.dtype)
        self._meet(call)
        pieces = [source[start:stop] for start, stop in pairwise(ends)]
        if len({len(piece) for piece in pieces}) == 1:
            self._start("reduceScatter", [source, result], result.size * parts, *kinds)
        else:
            with nccl.grouped():
                for root, piece in enumerate(pieces):
                    target = result if root == self.me else None
                    self._start("reduce", [piece, target], piece.size * parts, *kinds, root)
        self.fabric.reordered |= order_shows(x.dtype, self.size)
        self._count("reduce_scatter", x.nbytes - result.nbytes)
        return on_device_of(result, x)

    @on_its_gpu
    def gather_into(self, call: Signature, out: Array, ends: list[int]) -> Array | None:
        if self.size == 1:
            return self.below.gather_into(call, out, ends)
        whole = _on_gpu(out)
        self._meet(call)
        pieces = [whole[start:stop] for start, stop in pairwise(ends)]
        mine, kind = pieces[self.me], nccl.load().NCCL_UINT8  # bytes, whatever the dtype
        if len({len(piece) for piece in pieces}) == 1:
            self._start("allGather", [mine, whole], mine.nbytes, kind)
        else:
            with nccl.grouped():
                for root, piece in enumerate(pieces):
                    self._start("broadcast", [piece, piece], piece.nbytes, kind, root)
        self._count("all_gather", (self.size - 1) * mine.nbytes)
        if whole is not out:
            out[...] = on_device_of(whole, out)
        return out

    @on_its_gpu
    def transfer(
        self, key: Key, operation: str, outgoing: dict[int, Array | Staged], sources: list[int]
    ) -> dict[int, Array]:
        """Send a header for each array; start all sends and receives of arrays on GPUs at once.

        An array on the host is a message, which follows its header.
        """
        self._join()
        given, found = {}, {}
        for to, x in outgoing.items():
            x = x.array if isinstance(x, Staged) else x
            header = pickle.dumps((on_gpu(x), x.shape, x.dtype))
            self.fabric.send(self.members[to], key, np.frombuffer(header, np.uint8))
            if on_gpu(x):
                given[to] = _on_gpu(x)
            else:
                self.fabric.send(self.members[to], key, x)
        for source in sources:
            message = partial(self.fabric.recv, [self.members[source]], key, operation)
            by_nccl, *kind = pickle.loads(message()[1])
            found[source] = device_module("gpu").empty(*kind) if by_nccl else message()[1]
        with nccl.grouped():
            for method, arrays in (("send", given), ("recv", found)):
                for rank, x in arrays.items():
                    if on_gpu(x):
                        self._start(method, [x], x.nbytes, nccl.load().NCCL_UINT8, rank)
        return found

    def _start(self, operation: str, places: list[Array | None], count: int, *more: int) -> None:
        """Start an operation on the current stream, unless there is nothing to move.

        places  what it reads and what it writes; None for a result that this rank does not get
        """
        if count:
            addresses = [0 if x is None else x.data.ptr for x in places]
            stream = device_module("gpu").cuda.get_current_stream().ptr
            getattr(self.comm, operation)(*addresses, count, *more, stream)

    def _count(self, operation: str, nbytes: int) -> None:
        """Add to the ledger bytes that are computed, not counted."""
        self.ledger.bytes[operation + BY_FORMULA] += nbytes


def connect(
    below: "Connect[MailboxFabric]",
    fabric: "MailboxFabric",
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
        nccl.check_gpus(under.exchange(nccl.address_of(gpu)), fabric.hosts)
    else:
        assert isinstance(parent, NcclCommunicator)
        under = below(fabric, new, parent.below)
        gpu = parent.gpu  # this may be a thread of the worker's, which uses GPU 0
    return None if under is None else NcclCommunicator(fabric, new, under, gpu)


def _on_gpu(x: Array) -> Array:
    """Return x as a contiguous array on the GPU: x itself if it is one."""
    return device_module("gpu").ascontiguousarray(to_device(x, "gpu"))
