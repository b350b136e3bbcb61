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
from itertools import accumulate, pairwise

import numpy as np

from minidist.backend import Array, array_module, on_device_of
from minidist.comm.arguments import (
    check_algorithm,
    check_out,
    check_part,
    check_place,
    collective,
    joined_along,
    listed,
    numeric,
    one_per_rank,
    pieces_of,
    ufunc,
    whole,
    whole_64,
)
from minidist.comm.channel import Channel
from minidist.comm.collectives import ON_MESSAGES, gather_into, reduce_pieces
from minidist.comm.diagnosis import signature_of
from minidist.comm.fabric import Communicator, Fabric, NewGroup
from minidist.comm.hierarchical import TwoLevels, levels_of
from minidist.comm.message import Key, staged
from minidist.comm.point_to_point import PointToPoint
from minidist.errors import WrongInput


class Group(PointToPoint):
    """The ranks `members` of the world, numbered 0 to size - 1; `rank` is this one's number.

    Made by `run` and `Cluster`, and by `split`.

    Any thread may send and receive: `send recv recv_any isend irecv` are in point_to_point.py. The
    collectives are for one thread at a time: two threads that communicate at once need a group
    each, from `split(0)` before they start. A second thread in a collective is a ValueError, and
    fails the run even where that thread's exceptions are lost.

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
        super().__init__(fabric, members, splits, communicator.ledger)
        self.communicator = communicator
        self.run, self.device, self.log = fabric.run, fabric.device, fabric.log
        self.in_collective = threading.Lock()
        self._collectives = self._splits = 0
        self._levels: TwoLevels | None = None

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
        if algorithm is None:
            signature = signature_of("all_reduce", (op, x.dtype, x.shape), label)
            result = self.communicator.all_reduce(signature, x, op, out)
            if result is None:
                result = x.copy()
                self.channel("all_reduce").in_rank_order(result.reshape(-1), combine)
        else:
            channel = self._meet("all_reduce", op, x.dtype, x.shape, algorithm, label=label)
            if algorithm == "hierarchical":
                result = self._reduce_on_two_levels(x, op, out)
            else:
                result = x.copy()
                ON_MESSAGES[algorithm](channel, result.reshape(-1), combine)
        if out is None or out is result:
            return result
        out[...] = on_device_of(result, out)
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
        combine, ends = ufunc(op, array_module(x)), [0, *accumulate(sizes)]
        signature = signature_of("reduce_scatter", (op, x.dtype, x.shape, tuple(sizes)), label)
        result = self.communicator.reduce_scatter(signature, x, ends, op)
        if result is None:
            pieces = [x[start:stop] for start, stop in pairwise(ends)]
            result = reduce_pieces(self.channel("reduce_scatter").all_to_all(pieces), combine)
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

        out    a 1-D array for the result; each x is a part of it. If it is from `empty` on all
               ranks, nothing is copied twice. x may be in it.
        sizes  elements of `out` per rank (default: as equal as can be, the larger first)
        """
        x = numeric(x, whole(axis, "an axis"))
        if out is not None:
            check_place(out)
            return self._gather_into(out, x, pieces_of(out.size, self.size, sizes), label)
        if sizes is not None:
            raise WrongInput("sizes say how the ranks fill out; give out, or no sizes")
        channel = self._meet("all_gather", *joined_along(axis, x), label=label)
        return array_module(x).concatenate(channel.all_to_all([staged(x)] * self.size), axis=axis)

    @collective
    def all_to_all(self, arrays: list[Array], label: str | None = None) -> list[Array]:
        """Give arrays[r] to rank r; return what each rank gave to this one, in rank order.

        Shapes may differ, dtypes may not.
        """
        arrays = one_per_rank(arrays, self.size)
        return self._meet("all_to_all", arrays[0].dtype, label=label).all_to_all(arrays)

    @collective
    def broadcast(self, x: Array | None = None, root: int = 0, label: str | None = None) -> Array:
        """Return root's x on all ranks; only root's x counts. Bytes: (N-1)S from root."""
        x = numeric(x) if self.rank == self._valid(root, "root") else None
        channel = self._meet("broadcast", f"root={root}", label=label)
        return channel.from_root([staged(x)] * self.size, root)

    @collective
    def scatter(
        self, pieces: list[Array] | None = None, root: int = 0, label: str | None = None
    ) -> Array:
        """Return pieces[r] of root's list on rank r; shapes may differ."""
        if self.rank == self._valid(root, "root"):
            pieces = [numeric(x) for x in listed([] if pieces is None else pieces, "pieces")]
            if len(pieces) != self.size:
                raise WrongInput(f"scatter needs one piece per rank on the root: {self.size}")
        return self._meet("scatter", f"root={root}", label=label).from_root(pieces, root)

    @collective
    def gather(
        self, x: Array, root: int = 0, axis: int = 0, label: str | None = None
    ) -> Array | None:
        """Return every rank's x, concatenated along `axis`, on root; None elsewhere.

        Bytes: S from each rank but root.
        """
        x, place = numeric(x, whole(axis, "an axis")), f"root={self._valid(root, 'root')}"
        channel = self._meet("gather", place, *joined_along(axis, x), label=label)
        pieces = channel.to_root(x, root)
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
        pieces = channel.to_root(x, root)
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
        wishes = channel.all_to_all([np.array(wish, np.int64)] * self.size)
        wanted = [] if color is None else [1, color]
        chosen = [r for r in range(self.size) if wishes[r][:2].tolist() == wanted]
        chosen.sort(key=lambda r: (int(wishes[r][2]), r))
        return self._group_of(chosen, type(self))

    def channel(self, operation: str, payload: bool = True) -> Channel:
        """Return a channel for the messages of one collective; every rank must call this alike.

        operation  its row in the ledger, and its name in a table of waits
        payload    whether the ledger counts what is sent
        """
        self._collectives += 1
        key = Key(self.run, self.splits, "collective", self._collectives)
        ledger = self.ledger if payload else None
        library = self.communicator.library if payload else None
        return Channel(self.fabric, self.members, key, operation, ledger, library)

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
        new = NewGroup(members, splits, within_host)
        communicator = self.fabric.communicator(new, self.communicator)
        return None if communicator is None else kind(self.fabric, members, splits, communicator)

    def _reduce_on_two_levels(self, x: Array, op: str, out: Array | None) -> Array:
        """Reduce by `hierarchical`, in groups that the first call makes."""
        if self._levels is None:
            hosts = [self.fabric.hosts[member] for member in self.members]
            neighbours, peers, k = levels_of(hosts, self.rank)
            inside = self._group_of(neighbours, Group, within_host=True)
            assert inside is not None  # this rank is one of the neighbours
            self._levels = TwoLevels(inside, self._group_of(peers, Group), k)
        in_place = out is not None and self.fabric.in_place(out)
        result: Array = out if in_place else self.empty(x.shape, x.dtype)
        if result is not x:
            result[...] = on_device_of(x, result)
        self._levels.all_reduce(result.reshape(-1), op, self.ledger)
        return on_device_of(result, x)

    def _gather_into(self, out: Array, x: Array, sizes: list[int], label: str | None) -> Array:
        """Fill the 1-D `out` on every rank with everyone's x."""
        ends = [0, *accumulate(sizes)]
        begin, stop = ends[self.rank], ends[self.rank + 1]
        check_part(x, out, stop - begin, self.rank)
        # Before the ranks meet, for x may be another rank's part of out.
        out[begin:stop] = on_device_of(x, out)
        signature = signature_of("all_gather", (x.dtype, out.shape, "out", tuple(sizes)), label)
        if self.communicator.gather_into(signature, out, ends) is None:
            gather_into(self.channel("all_gather"), out, ends)
        return out
