"""Group: ranks that communicate. Every strategy is written against this contract.

Letters: N ranks in the group, S bytes in an array. Results are fresh arrays, or land in `out`.
Collectives are called by all ranks of the group in the same order, by one thread of a rank at a
time; before any data moves the ranks compare what they call. By default all_reduce works in shared
memory: each rank reduces one slice, in rank order, and gives it to everyone, which moves 2(N-1)S
bytes in all, as a ring does, and gives the same bits on every rank and in every run. With MPI or
NCCL it calls the library's, which gives the same bits on every rank, but in an order of its own;
16-bit floats are reduced in rank order there, too.

Errors: ValueError for an argument that no group could take; CollectiveMismatch, on all ranks, if
their calls differ; Deadlock where no rank can ever continue (see diagnosis.py).
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import accumulate, pairwise

import numpy as np

from minidist.backend import Array, array_module, beside, elements
from minidist.comm.arguments import (
    check_algorithm,
    check_out,
    check_place,
    listed,
    numeric,
    numeric_dtype,
    pieces_of,
    ufunc,
    whole,
    whole_64,
)
from minidist.comm.beside import Beside
from minidist.comm.channel import Channel, Request
from minidist.comm.collectives import (
    ON_MESSAGES,
    gather_into,
    hierarchical,
    places_on,
    reduce_pieces,
)
from minidist.comm.diagnosis import Wait, call_site, signature_of
from minidist.comm.fabric import Communicator, Fabric
from minidist.comm.message import Key, staged
from minidist.comm.one_thread import collective
from minidist.comm.transfers import all_to_all, from_root, in_rank_order, to_root


class Group:
    """The ranks `members` of the world, numbered 0 to size - 1; `rank` is this one's number.

    Made by `run` and `Cluster`, and by `split`.

    Any thread may send and receive. The collectives are for one thread at a time: two threads that
    communicate at once need a group each, from `split(0)` before they start. A second thread in a
    collective is a ValueError, and fails the run even where that thread's exceptions are lost.

    device  "cpu", "gpu" or "gpu:N": where `empty` allocates, see `run`
    ledger  payload bytes that this rank has sent as a member of this very group, see ledger.py
    log     None, or the EventLog of this rank
    fabric, communicator   what moves messages and arrays, see fabric.py
    """

    def __init__(
        self,
        fabric: Fabric,
        members: list[int],
        splits: tuple[int, ...],
        communicator: Communicator,
    ):
        self.fabric, self.members, self.splits = fabric, members, splits
        self.communicator, self.ledger = communicator, communicator.ledger
        self.run, self.device, self.log = fabric.run, fabric.device, fabric.log
        self.rank, self.size = members.index(fabric.rank), len(members)
        self.in_collective = threading.Lock()
        self._collectives = self._splits = 0
        self._levels: tuple[Group, Group | None, int] | None = None
        # Of the tag: to find a Key takes a quarter of the time that it takes to make one.
        self._key = lru_cache(1024)(partial(Key, self.run, splits, "message"))
        self._requests: dict[tuple[int, int], deque[Request]] = {}

    def __repr__(self):
        return f"Group(rank={self.rank}, size={self.size})"

    # Messages between two ranks.

    def send(self, array: Array, to: int, tag: int = 0) -> None:
        """Send a copy; returns at once, whether or not the receiver ever receives.

        Both ranks count the messages of each tag until the run ends, to name those that were never
        received: about 140 bytes per tag and rank. So use a few tags many times.
        """
        array, to, tag = numeric(array), self._valid(to, "to"), whole(tag, "a tag")
        if to != self.rank:
            self.ledger.bytes["send"] += array.nbytes
        self.fabric.send(self.members[to], self._key(tag), array)

    def recv(self, source: int, tag: int = 0) -> Array:
        """Return the next array that `source` has sent, or will send, with this tag."""
        source, tag = self._valid(source, "source"), whole(tag, "a tag")
        if self._requests.get((source, tag)):  # requests come first
            return self.irecv(source, tag).wait()
        return self._receive(source, tag)

    def recv_any(self, sources: list[int] | None = None, tag: int = 0) -> tuple[int, Array]:
        """Return (source, array): the next array with this tag from any of these ranks.

        Where several have sent one, the first of them in `sources` (default: all ranks, in rank
        order) comes first. To be fair, give them in another order each time.
        """
        sources = listed(range(self.size) if sources is None else sources, "sources")
        if not sources:
            raise ValueError("recv_any needs a source: the list of ranks is empty")
        for source in sources:
            if self._requests.get((self._valid(source, "source"), whole(tag, "a tag"))):
                raise ValueError(
                    f"the next message of rank {source} with tag {tag} belongs to a request of "
                    "irecv; wait for that first, or use another tag"
                )
        members = [self.members[source] for source in sources]
        member, array = self.fabric.recv(members, self._key(whole(tag, "a tag")), "recv_any")
        return self.members.index(member), array

    def isend(self, array: Array, to: int, tag: int = 0) -> Request:
        """Send a copy; return a request that is complete, since a send never waits."""
        self.send(array, to, tag)
        return Request(deque(), lambda: None)

    def irecv(self, source: int, tag: int = 0) -> Request:
        """Return a request; `.wait()` returns the array. Requests are served in order."""
        where = self._valid(source, "source"), whole(tag, "a tag")
        queue = self._requests.setdefault(where, deque())

        def complete() -> Array:
            array = self._receive(*where)
            if len(queue) == 1:
                del self._requests[where]
            return array

        return Request(queue, complete)

    # Collectives.

    @collective
    def all_reduce(
        self,
        x: Array,
        op: str = "sum",
        label: str | None = None,
        algorithm: str | None = None,
        out: Array | None = None,
    ) -> Array:
        """Return the reduction of every rank's x, same shape and dtype on all ranks.

        Bytes: 2(N-1)S from all ranks together; from each, S less its slice, and N-1 times its
        slice: 2(N-1)/N S where N divides the elements. Arrays from `empty` that all ranks reduce in
        place are never copied; others pass through a little shared memory, part by part.

        op         "sum", "max", "min" or "prod"
        label      a name that must agree between ranks, so that two equal shapes in swapped order
                   are an error
        algorithm  None: in rank order, or by MPI or NCCL (not 16-bit floats); "ring", "tree" or
                   "halving_doubling": on messages; "hierarchical": inside each host, then between
                   hosts. See collectives.py. Each gives the same bits on every rank and, where no
                   library chooses the order, in every run
        out        an array for the result; x itself for a reduction in place
        """
        x = numeric(x)
        check_algorithm(algorithm)
        combine = ufunc(op, array_module(x))
        if out is not None:
            check_out(out, x)
        details = [op, x.dtype, x.shape, *([] if algorithm is None else [algorithm])]
        signature = signature_of("all_reduce", tuple(details), label)
        if algorithm is None:
            result = self.communicator.all_reduce(signature, x, op, out)
        else:
            result = self.communicator.meet(signature)
        if algorithm == "hierarchical":
            result = self._reduce_on_two_levels(x, op, out)
        elif result is None:
            result, reduce_all = x.copy(), ON_MESSAGES.get(algorithm, in_rank_order)
            reduce_all(self.channel("all_reduce"), result.reshape(-1), combine)
        if out is None or out is result:
            return result
        out[...] = beside(result, out)
        return out

    @collective
    def reduce_scatter(
        self, x: Array, sizes: list[int] | None = None, op: str = "sum", label: str | None = None
    ) -> Array:
        """Return this rank's piece, along axis 0, of the reduction of every rank's x.

        Bytes from each rank: S less its own piece.

        sizes  rows per rank (default: as equal as can be, the larger first)
        """
        x = numeric(x, axis=0)
        sizes = pieces_of(len(x), self.size, sizes)
        combine = ufunc(op, array_module(x))
        signature = signature_of("reduce_scatter", (op, x.dtype, x.shape, tuple(sizes)), label)
        ends = [0, *accumulate(sizes)]
        result = self.communicator.reduce_scatter(signature, x, ends, op)
        if result is None:
            pieces = [x[start:stop] for start, stop in pairwise(ends)]
            result = reduce_pieces(all_to_all(self.channel("reduce_scatter"), pieces), combine)
        return result

    @collective
    def all_gather(
        self,
        x: Array,
        axis: int = 0,
        label: str | None = None,
        out: Array | None = None,
        sizes: list[int] | None = None,
    ) -> Array:
        """Return every rank's x, concatenated along `axis`, the only one in which they may differ.

        Bytes from each rank: (N-1)S.

        out    a 1-D array for the result, of which each x is a part. If it is from `empty` on all
               ranks, nothing is copied twice. x may be in it.
        sizes  elements of `out` per rank (default: as equal as can be, the larger first)
        """
        x = numeric(x, whole(axis, "an axis"))
        if out is not None:
            check_place(out)
            return self._gather_into(out, x, pieces_of(out.size, self.size, sizes), label)
        if sizes is not None:
            raise ValueError("sizes say how the ranks fill out; give out, or no sizes")
        channel = self._meet(
            "all_gather", x.dtype, _without(x.shape, axis), axis % x.ndim, label=label
        )
        return array_module(x).concatenate(all_to_all(channel, [staged(x)] * self.size), axis=axis)

    @collective
    def all_to_all(self, arrays: list[Array], label: str | None = None) -> list[Array]:
        """Give arrays[r] to rank r; return what each rank gave to this one, in rank order.

        Shapes may differ, dtypes may not.
        """
        arrays = [numeric(x) for x in listed(arrays, "arrays")]
        if len(arrays) != self.size:
            raise ValueError(f"all_to_all needs one array per rank: {self.size}, got {len(arrays)}")
        if len(dtypes := {str(x.dtype): None for x in arrays}) > 1:
            raise ValueError(f"all_to_all needs one dtype, got {', '.join(dtypes)}")
        return all_to_all(self._meet("all_to_all", arrays[0].dtype, label=label), arrays)

    @collective
    def broadcast(self, x: Array | None = None, root: int = 0, label: str | None = None) -> Array:
        """Return root's x on all ranks; only root's x counts. Bytes: (N-1)S from root."""
        x = numeric(x) if self.rank == self._valid(root, "root") else None
        channel = self._meet("broadcast", f"root={root}", label=label)
        return from_root(channel, [staged(x)] * self.size, root)

    @collective
    def scatter(
        self, pieces: list[Array] | None = None, root: int = 0, label: str | None = None
    ) -> Array:
        """Return pieces[r] of root's list on rank r; shapes may differ."""
        if self.rank == self._valid(root, "root"):
            pieces = [numeric(x) for x in listed([] if pieces is None else pieces, "pieces")]
            if len(pieces) != self.size:
                raise ValueError(f"scatter needs one piece per rank on the root: {self.size}")
        return from_root(self._meet("scatter", f"root={root}", label=label), pieces, root)

    @collective
    def gather(
        self, x: Array, root: int = 0, axis: int = 0, label: str | None = None
    ) -> Array | None:
        """Return every rank's x, concatenated along `axis`, on root; None elsewhere.

        Bytes: S from each rank but root.
        """
        x, place = numeric(x, whole(axis, "an axis")), f"root={self._valid(root, 'root')}"
        channel = self._meet(
            "gather", place, x.dtype, _without(x.shape, axis), axis % x.ndim, label=label
        )
        pieces = to_root(channel, x, root)
        return None if pieces is None else array_module(x).concatenate(pieces, axis=axis)

    @collective
    def reduce(
        self, x: Array, root: int = 0, op: str = "sum", label: str | None = None
    ) -> Array | None:
        """Return the reduction of every rank's x, in rank order, on root; None elsewhere.

        Bytes: S from each rank but root.
        """
        x, place = numeric(x), f"root={self._valid(root, 'root')}"
        combine = ufunc(op, array_module(x))
        channel = self._meet("reduce", place, op, x.dtype, x.shape, label=label)
        pieces = to_root(channel, x, root)
        return None if pieces is None else reduce_pieces(pieces, combine)

    @collective
    def barrier(self, label: str | None = None) -> None:
        """Return when every rank has called this, with the same label. No payload."""
        self.communicator.meet(signature_of("barrier", (), label))

    @collective
    def split(self, color: int | None, key: int | None = None) -> "Group | None":
        """Return the group of the ranks that gave the same color, or None for color None.

        Its ranks are ordered by (key, rank here); the default key is this rank's number. No
        payload. Each rank of it keeps 1 KB of shared memory until the run ends.
        """
        if color is not None:
            color = whole_64(color, "a color", "a whole number or None")
        key = self.rank if key is None else whole_64(key, "a key")
        wish = [color is not None, color or 0, key]
        channel = self._meet("split", payload=False)
        wishes = all_to_all(channel, [np.array(wish, np.int64)] * self.size)
        wanted = [] if color is None else [1, color]
        chosen = [r for r in range(self.size) if wishes[r][:2].tolist() == wanted]
        chosen.sort(key=lambda r: (int(wishes[r][2]), r))
        return self._group_of(chosen, type(self))

    def beside(self, work: Callable, name: str) -> Beside:
        """Return a queue; a second thread calls `work` with what is put there, see beside.py.

        The work communicates in a group of its own: `split(0)`.
        """
        return Beside(self, work, name)

    @contextmanager
    def waiting(self, operation: str, thread: threading.Thread) -> Iterator[None]:
        """Record that this thread waits for another thread of its rank, for the table of waits."""
        wait = Wait(operation, lambda: [self.fabric.rank], call_site(), thread.ident)
        with self.fabric.waiting(wait):
            yield

    def empty(self, shape: int | tuple[int, ...], dtype: np.dtype | str = "float32") -> Array:
        """Return an uninitialised array where `all_reduce(x, out=x)` need not copy it.

        That is memory which all ranks of the machine see, also on GPUs, see device_memory.py.
        """
        elements(shape)  # refuses negative sides wherever the array is to be
        return self.fabric.empty(shape, numeric_dtype(dtype))

    # Parts of the above.

    def channel(self, operation: str, payload: bool = True) -> Channel:
        """Return a channel for the messages of one collective; every rank must call this alike.

        operation  its row in the ledger, and its name in a table of waits
        payload    whether the ledger counts what is sent
        """
        self._collectives += 1
        key = Key(self.run, self.splits, "collective", self._collectives)
        ledger = self.ledger if payload else None
        library = self.communicator if payload and self.communicator.transfers else None
        return Channel(self.fabric, self.members, key, operation, ledger, library)

    def _valid(self, rank: int, what: str) -> int:
        rank = whole(rank, what)
        if not 0 <= rank < self.size:
            raise ValueError(
                f"{what}={rank} is no rank of a group of {self.size}; use 0 to {self.size - 1}"
            )
        return rank

    def _meet(self, name: str, *details, label: str | None = None, payload: bool = True) -> Channel:
        """Wait for all ranks, compare what they call; return a channel for this call alone."""
        self.communicator.meet(signature_of(name, details, label))
        return self.channel(name, payload)

    def _group_of(
        self, ranks: list[int], kind: "type[Group]", within_host: bool = False
    ) -> "Group | None":
        """Return the group of these ranks, in their order; None for a rank whose list is empty.

        All ranks call this; the ranks of one new group give the same list.
        """
        self._splits += 1
        members, splits = [self.members[r] for r in ranks], (*self.splits, self._splits)
        communicator = self.fabric.communicator(members, splits, self.communicator, within_host)
        return communicator and kind(self.fabric, members, splits, communicator)

    def _reduce_on_two_levels(self, x: Array, op: str, out: Array | None) -> Array:
        """Reduce by `hierarchical`, in groups that the first call makes.

        The ledger gets a row for the bytes inside hosts, and one for those between hosts.
        """
        if self._levels is None:
            hosts = [self.fabric.hosts[member] for member in self.members]
            places, k = places_on(hosts)
            neighbours = [r for r in range(self.size) if hosts[r] == hosts[self.rank]]
            peers = [r for r in range(self.size) if places[r] == places[self.rank] < k]
            inside = self._group_of(neighbours, Group, within_host=True)
            self._levels = inside, self._group_of(peers, Group), k
        inside, between, k = self._levels
        result = out if self.fabric.in_place(out) else self.empty(x.shape, x.dtype)
        if result is not x:
            result[...] = beside(x, result)
        hierarchical(inside, between, k, result.reshape(-1), op)
        for where, group in (("inside", inside), ("between", between)):
            moved = {} if group is None else group.ledger.as_one(f"all_reduce {where} hosts")
            for row, nbytes in moved.items():
                self.ledger.bytes[row] = nbytes
        return beside(result, x)

    def _gather_into(self, out: Array, x: Array, sizes: list[int], label: str | None) -> Array:
        """Fill the 1-D `out` on every rank with everyone's x."""
        ends = [0, *accumulate(sizes)]
        begin, stop = ends[self.rank], ends[self.rank + 1]
        if out.ndim != 1 or x.shape != (stop - begin,) or x.dtype != out.dtype:
            raise ValueError(
                f"x is {x.dtype}{list(x.shape)}; rank {self.rank}'s part of out, "
                f"{out.dtype}{list(out.shape)}, is 1-D and has {stop - begin} elements"
            )
        # Before the ranks meet, for x may be another rank's part of out.
        out[begin:stop] = beside(x, out)
        signature = signature_of("all_gather", (x.dtype, out.shape, "out", tuple(sizes)), label)
        if self.communicator.gather_into(signature, out, ends) is None:
            gather_into(self.channel("all_gather"), out, ends)
        return out

    def _receive(self, source: int, tag: int) -> Array:
        return self.fabric.recv([self.members[source]], self._key(tag), "recv")[1]


def _without(shape: tuple, axis: int) -> tuple:
    """Return the dims but one: those in which concatenated arrays must agree."""
    return shape[: axis % len(shape)] + shape[axis % len(shape) + 1 :]
