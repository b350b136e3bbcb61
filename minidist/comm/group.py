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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from itertools import accumulate, pairwise

import numpy as np

from minidist.backend import Array, array_module, elements, on_device_of
from minidist.comm import collectives
from minidist.comm.arguments import (
    NUMERIC,
    check_out,
    check_part,
    check_place,
    joined_along,
    listed,
    numeric,
    numeric_dtype,
    one_per_rank,
    pieces_of,
    ufunc,
    valid_rank,
    whole_number,
    whole_number_64,
)
from minidist.comm.beside import Beside
from minidist.comm.collectives import ON_MESSAGES, gather_into, reduce_pieces
from minidist.comm.communicator import (
    Communicator,
    Key,
    Ledger,
    NewGroup,
    Staged,
    Transfers,
    staged,
)
from minidist.comm.diagnosis import Wait, call_site, signature_of
from minidist.comm.fabric import Fabric
from minidist.comm.hierarchical import TwoLevels, levels_of
from minidist.errors import WrongInput, check_name
from minidist.pieces import split_ends


def collective(operation: Callable) -> Callable:
    """Let one thread at a time call this method of Group, or any other one that is wrapped so.

    The ranks of a group match calls by their order, and two threads have no common order: a call of
    one thread on this rank could meet a call of the other thread on the next rank. The error must
    not be lost with the thread that gets it, so the rank fails.
    """

    @wraps(operation)
    def call(group: "Group", *args, **kwargs):
        if not group.in_collective.acquire(blocking=False):
            group.fabric.fail(
                WrongInput(
                    f"rank {group.fabric.rank} called {operation.__name__} at {call_site()} in "
                    f"thread {threading.current_thread().name!r} while another of its threads was "
                    "in a collective of the same group; give each thread a group of its own: "
                    "group.split(0), called before the threads start"
                )
            )
        try:
            return operation(group, *args, **kwargs)
        finally:
            group.in_collective.release()

    return call


class Group:
    """The ranks `members` of the world, numbered 0 to size - 1; `rank` is this one's number.

    Made by `run` and `Cluster`, and by `split`.

    Any thread may send and receive. A message has a tag; messages of one sender and one tag keep
    their order. The collectives are for one thread at a time: two threads that communicate at once
    need a group each, from `split(0)` before they start. A second thread in a collective is a
    ValueError, and fails the run even where that thread's exceptions are lost.

    device  "cpu", "gpu" or "gpu:N": where `empty` allocates, see `run`
    ledger  payload bytes that this rank has sent as a member of this very group, see Ledger
    log     None, or the EventLog of this rank
    fabric, communicator   what moves messages and arrays
    """

    def __init__(self, fabric: Fabric, new: NewGroup, communicator: Communicator):
        self.fabric, self.communicator, self.ledger = fabric, communicator, communicator.ledger
        self.members, self.splits = new.members, new.splits
        self.rank, self.size = self.members.index(fabric.rank), len(self.members)
        self.run, self.device, self.log = fabric.run, fabric.device, fabric.log
        self.in_collective = threading.Lock()
        self._collectives = self._splits = 0
        self._levels: TwoLevels | None = None
        self._requests: dict[tuple[int, int], deque[Request]] = {}

    def __repr__(self):
        return f"Group(rank={self.rank}, size={self.size})"

    def __deepcopy__(self, memo: dict | None = None) -> "Group":
        """A copy of what communicates has the same partners, in the same sequence of calls."""
        return self

    __copy__ = __deepcopy__

    def __reduce__(self):
        raise WrongInput(
            f"{self!r} is of this run, and cannot be pickled, nor what communicates through it; "
            "pickle state(), and make the rest anew on its ranks"
        )

    def send(self, array: Array, to: int, tag: int = 0) -> None:
        """Send a copy; returns at once, whether or not the receiver ever receives.

        Both ranks count the messages of each tag until the run ends, to name those that were never
        received: about 140 bytes per tag and rank. So use a few tags many times.
        """
        if type(array) is not np.ndarray or array.dtype.kind not in NUMERIC:
            array = numeric(array)  # a call that most arrays do not need
        self.fabric.send(self.members[self._valid(to, "to")], self._key(tag), array)
        if to != self.rank:
            self.ledger.bytes["send"] += array.nbytes

    def recv(self, source: int, tag: int = 0) -> Array:
        """Return the next array that `source` has sent, or will send, with this tag."""
        source, key = self._valid(source, "source"), self._key(tag)
        if (source, key.number) in self._requests:
            return self.irecv(source, tag).wait()  # requests come first
        return self.fabric.recv([self.members[source]], key, "recv")[1]

    def recv_any(self, sources: list[int] | None = None, tag: int = 0) -> tuple[int, Array]:
        """Return (source, array): the next array with this tag from any of these ranks.

        Where several have sent one, the first of them in `sources` (default: all ranks, in rank
        order) comes first. To be fair, give them in another order each time.
        """
        sources = listed(range(self.size) if sources is None else sources, "sources")
        if not sources:
            raise WrongInput("recv_any needs a source: the list of ranks is empty")
        sources, key = [self._valid(source, "source") for source in sources], self._key(tag)
        for source in sources:
            if (source, key.number) in self._requests:
                raise WrongInput(
                    f"the next message of rank {source} with tag {tag} belongs to a request of "
                    "irecv; wait for that first, or use another tag"
                )
        members = [self.members[source] for source in sources]
        member, array = self.fabric.recv(members, key, "recv_any")
        return self.members.index(member), array

    def isend(self, array: Array, to: int, tag: int = 0) -> "Request":
        """Send a copy; return a request that is complete, since a send never waits."""
        self.send(array, to, tag)
        return Request(deque(), lambda: None)

    def irecv(self, source: int, tag: int = 0) -> "Request":
        """Return a request; `.wait()` returns the array. Requests are served in order."""
        source, key = self._valid(source, "source"), self._key(tag)
        queue = self._requests.setdefault((source, key.number), deque())

        def complete() -> Array:
            _, array = self.fabric.recv([self.members[source]], key, "recv")
            if len(queue) == 1:
                del self._requests[source, key.number]
            return array

        return Request(queue, complete)

    def beside(self, work: Callable, name: str) -> Beside:
        """Return a queue; a second thread calls `work` with what is put there, see beside.py.

        The work communicates in a group of its own: `split(0)`.
        """
        return Beside(self, work, name)

    @contextmanager
    def waiting(self, operation: str, thread: threading.Thread) -> Iterator[None]:
        """Record that this thread waits for another thread of its rank, for the table of waits."""
        wait = Wait(operation, lambda: [self.fabric.rank], call_site(), thread.ident)
        with self.fabric.mailbox.waiting(wait):
            yield

    def empty(self, shape: int | tuple[int, ...], dtype: np.dtype | str = "float32") -> Array:
        """Return an uninitialised array where `all_reduce(x, out=x)` need not copy it.

        That is memory which all ranks of the machine see, also on GPUs, see device_memory.py.
        """
        elements(shape)  # refuses negative sides wherever the array is to be
        return self.fabric.empty(shape, numeric_dtype(dtype))

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
        if algorithm is not None:
            check_name("algorithm", algorithm, collectives.ALGORITHMS)
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
        x = numeric(x, whole_number(axis, "an axis"))
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
        x, place = numeric(x, whole_number(axis, "an axis")), f"root={self._valid(root, 'root')}"
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
        payload. Each rank of it keeps 64 bytes of shared memory until the run ends.
        """
        if color is not None:
            color = whole_number_64(color, "a color", "a whole number or None")
        key = self.rank if key is None else whole_number_64(key, "a key")
        wish = [color is not None, color or 0, key]
        channel = self._meet("split", payload=False)
        wishes = channel.all_to_all([np.array(wish, np.int64)] * self.size)
        wanted = [] if color is None else [1, color]
        chosen = [r for r in range(self.size) if wishes[r][:2].tolist() == wanted]
        chosen.sort(key=lambda r: (int(wishes[r][2]), r))
        return self._group_of(chosen, type(self))

    def _key(self, tag: int) -> Key:
        return Key(self.run, self.splits, "message", whole_number(tag, "a tag"))

    def _valid(self, rank: int, what: str) -> int:
        return valid_rank(rank, self.size, what)

    def channel(self, operation: str, payload: bool = True) -> "Channel":
        """Return a channel for the messages of one collective; every rank must call this alike.

        operation  its row in the ledger, and its name in a table of waits
        payload    whether the ledger counts what is sent
        """
        self._collectives += 1
        key = Key(self.run, self.splits, "collective", self._collectives)
        ledger = self.ledger if payload else None
        library = self.communicator.library if payload else None
        return Channel(self.fabric, self.members, key, operation, ledger, library)

    def _meet(
        self, name: str, *details, label: str | None = None, payload: bool = True
    ) -> "Channel":
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
        members = [self.members[r] for r in ranks]
        new = NewGroup(members, (*self.splits, self._splits), within_host)
        communicator = self.fabric.communicator(new, self.communicator)
        return None if communicator is None else kind(self.fabric, new, communicator)

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


class Request:
    """A transfer under way, in a queue with the earlier ones of the same source and tag."""

    def __init__(self, queue: "deque[Request]", complete: Callable[[], Array | None]):
        self._queue, self._complete, self._done, self._result = queue, complete, False, None
        queue.append(self)

    def wait(self) -> Array | None:
        """Return the array that was received (None for a send); the same one if called again."""
        while not self._done:
            oldest = self._queue[0]
            oldest._result, oldest._done = oldest._complete(), True
            self._queue.popleft()
        return self._result


class Channel:
    """The messages of one collective call: the `Messages` that collectives.py is written on.

    Messages between two ranks keep their order. Ranks are numbered as in the group; `members` has
    their numbers in the world.

    The four methods at the end are the algorithms of collectives.py, on messages, unless the
    group's communicator has a library. Then each rank lists all arrays that it sends and all ranks
    that it receives from, before anything moves. The library starts them together, so that no
    transfer waits for one that would start after it.

    ledger   counts payload; None for control traffic
    library  what moves the arrays instead of messages, or None
    """

    def __init__(
        self,
        fabric: Fabric,
        members: list[int],
        key: Key,
        operation: str,
        ledger: Ledger | None,
        library: Transfers | None = None,
    ):
        self.fabric, self.members, self.key = fabric, members, key
        self.operation, self.ledger = operation, ledger
        self.library = library
        self.rank, self.size = members.index(fabric.rank), len(members)

    def send(self, array: Array, to: int) -> None:
        """Send a copy; never wait."""
        if self.ledger is not None and to != self.rank:
            self.ledger.bytes[self.operation] += array.nbytes
        self.fabric.send(self.members[to], self.key, array)

    def recv(self, source: int) -> Array:
        """Return the next array from this rank, which is fresh."""
        return self.fabric.recv([self.members[source]], self.key, self.operation)[1]

    def all_to_all(self, pieces: list[Array | Staged]) -> list[Array]:
        """Give pieces[r] to rank r; return what each rank gave to this one, in rank order."""
        if self.library is None:
            return collectives.all_to_all(self, pieces)
        return self._transfer(self.library, dict(enumerate(pieces)), range(self.size))

    def from_root(self, pieces: list[Array | Staged] | None, root: int) -> Array:
        """Return this rank's one of root's pieces; the other ranks need not have any."""
        if self.library is None:
            return collectives.from_root(self, pieces, root)
        outgoing = dict(enumerate(pieces)) if pieces is not None and self.rank == root else {}
        return self._transfer(self.library, outgoing, [root])[0]

    def to_root(self, x: Array, root: int) -> list[Array] | None:
        """Return every rank's x on root, in rank order, as fresh arrays; None elsewhere."""
        if self.library is None:
            return collectives.to_root(self, x, root)
        sources = range(self.size) if self.rank == root else []
        received = self._transfer(self.library, {root: x}, sources)
        return received if self.rank == root else None

    def in_rank_order(self, x: Array, combine: Callable[..., Array]) -> None:
        """All-reduce the flat array x in place: rank r reduces chunk r of all, in rank order."""
        if self.library is None:
            collectives.in_rank_order(self, x, combine)
            return
        chunks = [x[start:stop] for start, stop in pairwise(split_ends(x.size, self.size))]
        mine = collectives.reduce_pieces(self.all_to_all(chunks), combine)
        for chunk, reduced in zip(chunks, self.all_to_all([mine] * self.size), strict=True):
            chunk[...] = reduced

    def _transfer(
        self, library: Transfers, outgoing: dict[int, Array | Staged], sources: Sequence[int]
    ) -> list[Array]:
        """Give each array to its rank; return what each source gives to this one, as fresh arrays.

        All ranks of the group call this in the same place.
        """
        mine = outgoing.pop(self.rank, None)
        if self.ledger is not None:
            self.ledger.bytes[self.operation] += sum(x.nbytes for x in outgoing.values())
        others = [source for source in sources if source != self.rank]
        received = library.transfer(self.key, self.operation, outgoing, others)
        if mine is not None:
            received[self.rank] = mine.copy()
        return [received[source] for source in sources]


def logged(operation: Callable) -> Callable:
    """Wrap a method of Group: each call becomes an event of the group's log."""

    @wraps(operation)
    def call(self: Group, *args, **kwargs):
        log = self.log
        assert log is not None
        start, before = log.clock.now(), self.ledger.total
        try:
            return operation(self, *args, **kwargs)
        finally:
            label = kwargs.get("label")
            name = operation.__name__ if label is None else f"{operation.__name__} {label}"
            log.add(name, start, "communication", self.ledger.total - before)

    return call


class LoggedGroup(Group):
    """The group of a worker of `run(..., log=...)`; `split` returns a LoggedGroup, too."""

    send, recv = logged(Group.send), logged(Group.recv)
    recv_any = logged(Group.recv_any)
    all_reduce, reduce_scatter = logged(Group.all_reduce), logged(Group.reduce_scatter)
    all_gather, all_to_all = logged(Group.all_gather), logged(Group.all_to_all)
    broadcast, reduce = logged(Group.broadcast), logged(Group.reduce)
    scatter, gather = logged(Group.scatter), logged(Group.gather)
    barrier = logged(Group.barrier)


def world(fabric: Fabric) -> Group:
    """Return the group of all ranks, which a run gives to its worker."""
    new = NewGroup([*range(fabric.size)], ())
    kind = Group if fabric.log is None else LoggedGroup
    communicator = fabric.communicator(new, None)
    assert communicator is not None  # all ranks are in this group
    return kind(fabric, new, communicator)
