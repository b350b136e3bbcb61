"""Group: a set of ranks that talk to each other. Every strategy is written against this contract.

Letters: N ranks in the group, S bytes in an array. Results are fresh arrays, or land in `out`.
Collectives are called by all ranks of the group in the same order; before any data moves the ranks
compare what they call. By default all_reduce works in shared memory: each rank reduces one slice,
in rank order, and gives it to everyone, which moves 2(N-1)S bytes in all, as a ring does, and gives
the same bits on every rank and in every run.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from operator import index

import numpy as np

from minidist.backend import (
    Array,
    array_module,
    beside,
    device_module,
    on_gpu,
    to_device,
    to_host,
)
from minidist.comm.board import Board
from minidist.comm.channel import Channel, Request
from minidist.comm.collectives import ALGORITHMS, all_to_all, split_ends, split_sizes
from minidist.comm.diagnosis import Signature, Wait, call_site, signature_of
from minidist.comm.shared_memory import (
    NOWHERE,
    gather_where_it_lies,
    reduce_through_stages,
    reduce_where_it_lies,
    scatter_sum_where_it_lies,
)

REDUCTIONS = {"sum": "add", "max": "maximum", "min": "minimum", "prod": "multiply"}


class Ledger:
    """Payload bytes that other ranks take from this one, per operation.

    Control traffic does not count, nor what a rank takes from itself.
    """

    def __init__(self):
        self.bytes: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return sum(self.bytes.values())

    def __repr__(self):
        return f"Ledger({dict(self.bytes)})"


class Group:
    """The ranks `members` of the world, numbered 0 to size - 1; `rank` is this one's number.

    Made by `run` and `Cluster`, and by `split`.

    device  "cpu" or "gpu": where `empty` allocates
    ledger  what others have taken from this rank as a member of this very group
    log     None, or the EventLog of this rank
    """

    def __init__(self, endpoint, members: list[int], context: tuple, board: Board):
        self.endpoint, self.members, self.context = endpoint, members, context
        self.board, self.device, self.log = board, endpoint.device, endpoint.log
        self.mailbox = endpoint.mailbox
        self.ledger = Ledger()
        self.rank, self.size = members.index(endpoint.rank), len(members)
        self._collectives = self._splits = 0
        self._requests: dict[tuple[int, int], deque[Request]] = {}

    def __repr__(self):
        return f"Group(rank={self.rank}, size={self.size})"

    # Messages between two ranks.

    def send(self, array: Array, to: int, tag: int = 0) -> None:
        """Send a copy; returns at once, whether or not the receiver ever receives."""
        self._post("send", _checked(array), self._valid(to, "to"), ("message", _tag(tag)))

    def recv(self, source: int, tag: int = 0) -> Array:
        """Return the next array that `source` has sent, or will send, with this tag."""
        where = self._valid(source, "source"), _tag(tag)
        if self._requests.get(where):  # they come first
            return self.irecv(*where).wait()
        return self._receive(*where)

    def recv_any(self, sources: list[int] | None = None, tag: int = 0) -> tuple[int, Array]:
        """Return (source, array): the next array with this tag from any of these ranks.

        Where several have sent one, it is that of the first of them in `sources` (default: all
        ranks, in rank order); a caller that is to be fair gives them in another order each time.
        """
        sources = list(range(self.size) if sources is None else sources)
        if not sources:
            raise ValueError("recv_any needs a source: the list of ranks is empty")
        for source in sources:
            if self._requests.get((self._valid(source, "source"), _tag(tag))):
                raise ValueError(
                    f"the next message of rank {source} with tag {tag} belongs to a request of "
                    "irecv; wait for that first, or use another tag"
                )
        where, places = (*self.context, ("message", _tag(tag))), [self.members[r] for r in sources]
        source, message = self.mailbox.take_any(places, where, "recv_any")
        return self.members.index(source), _on_its_device(message)

    def isend(self, array: Array, to: int, tag: int = 0) -> Request:
        """Send a copy; return a request that is complete, since a send never waits."""
        self.send(array, to, tag)
        return Request(deque(), lambda: None)

    def irecv(self, source: int, tag: int = 0) -> Request:
        """Return a request; `.wait()` returns the array. Requests are served in order."""
        where = self._valid(source, "source"), _tag(tag)
        queue = self._requests.setdefault(where, deque())
        return Request(queue, lambda: self._receive(*where))

    # Collectives.

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
        algorithm  None: in shared memory and rank order; "ring", "tree" or "halving_doubling": on
                   messages, see collectives.py; each gives the same bits everywhere and always
        out        an array for the result; x itself for a reduction in place
        """
        x = _checked(x)
        if out is not None and (out.shape != x.shape or out.dtype != x.dtype):
            raise ValueError(
                f"out is {out.dtype}{list(out.shape)}, x is {x.dtype}{list(x.shape)}: "
                "they must agree"
            )
        if algorithm is not None and algorithm not in ALGORITHMS:
            raise ValueError(
                f"algorithm {algorithm!r}: choose one of {', '.join(ALGORITHMS)}, None"
            )
        details = [op, x.dtype, x.shape, *([] if algorithm is None else [algorithm])]
        signature = signature_of("all_reduce", tuple(details), label)
        if algorithm is None:
            result = self._reduce_in_shared_memory(signature, x, _ufunc(op), out)
        else:
            result, combine = x.copy(), _ufunc(op, array_module(x))
            self.board.meet(signature)
            ALGORITHMS[algorithm](Channel(self, "all_reduce"), result.reshape(-1), combine)
        if out is None or out is result:
            return result
        out[...] = beside(result, out)
        return out

    def reduce_scatter(
        self, x: Array, sizes: list[int] | None = None, op: str = "sum", label: str | None = None
    ) -> Array:
        """Return this rank's piece, along axis 0, of the reduction of every rank's x.

        Bytes from each rank: S less its own piece.

        sizes  rows per rank (default: as equal as can be, the larger first)
        """
        x = _checked(x, axis=0)
        sizes = split_sizes(len(x), self.size) if sizes is None else [int(n) for n in sizes]
        if len(sizes) != self.size or sum(sizes) != len(x) or min(sizes) < 0:
            raise ValueError(f"sizes {sizes} do not cut {len(x)} rows into {self.size} pieces")
        combine = _ufunc(op, array_module(x))
        details = (op, x.dtype, x.shape, tuple(sizes))
        memory, ends = self.endpoint.memory, [0, *np.cumsum(sizes).tolist()]
        place = memory.offset_of(x) if self.size > 1 else None
        places = self._meet_at("reduce_scatter", details, label, place)
        if NOWHERE not in places and x.ndim == 1:
            result, begin = np.empty(sizes[self.rank], x.dtype), ends[self.rank]
            self.ledger.bytes["reduce_scatter"] += x.nbytes - result.nbytes
            scatter_sum_where_it_lies(memory, self.board, places, x.size, begin, combine, result)
            return result
        pieces = [x[start:stop] for start, stop in pairwise(ends)]
        return _reduce(all_to_all(Channel(self, "reduce_scatter"), pieces), combine)

    def all_gather(
        self, x: Array, axis: int = 0, label: str | None = None, out: Array | None = None
    ) -> Array:
        """Return every rank's x, concatenated along `axis`, where alone they may differ.

        Bytes from each rank: (N-1)S.

        out  a 1-D array for the result, of which each x is a part: as equal as can be, the larger
             first. If it is from `empty` on all ranks, nothing is copied twice. x may lie in it.
        """
        x = _checked(x, axis=axis)
        if out is not None:
            return self._gather_into(out, x, label)
        channel = self._meet(
            "all_gather", x.dtype, _without(x.shape, axis), axis % x.ndim, label=label
        )
        return array_module(x).concatenate(all_to_all(channel, [x] * self.size), axis=axis)

    def all_to_all(self, arrays: list[Array], label: str | None = None) -> list[Array]:
        """Give arrays[r] to rank r; return what each rank gave to this one, in rank order.

        Shapes may differ, dtypes may not.
        """
        if len(arrays) != self.size:
            raise ValueError(f"all_to_all needs one array per rank: {self.size}, got {len(arrays)}")
        arrays = [_checked(x) for x in arrays]
        if len(dtypes := {str(x.dtype): None for x in arrays}) > 1:
            raise ValueError(f"all_to_all needs one dtype, got {', '.join(dtypes)}")
        return all_to_all(self._meet("all_to_all", arrays[0].dtype, label=label), arrays)

    def broadcast(self, x: Array | None = None, root: int = 0, label: str | None = None) -> Array:
        """Return root's x on all ranks; only root's x counts. Bytes: (N-1)S from root."""
        x = _checked(x) if self.rank == self._valid(root, "root") else None
        channel = self._meet("broadcast", f"root={root}", label=label)
        return self._from_root(channel, [x] * self.size, root)

    def scatter(
        self, pieces: list[Array] | None = None, root: int = 0, label: str | None = None
    ) -> Array:
        """Return pieces[r] of root's list on rank r; shapes may differ."""
        if self.rank == self._valid(root, "root"):
            if pieces is None or len(pieces) != self.size:
                raise ValueError(f"scatter needs one piece per rank on the root: {self.size}")
            pieces = [_checked(x) for x in pieces]
        return self._from_root(self._meet("scatter", f"root={root}", label=label), pieces, root)

    def gather(
        self, x: Array, root: int = 0, axis: int = 0, label: str | None = None
    ) -> Array | None:
        """Return every rank's x, concatenated along `axis`, on root; None elsewhere.

        Bytes: S from each rank but root.
        """
        x, place = _checked(x, axis=axis), f"root={self._valid(root, 'root')}"
        channel = self._meet(
            "gather", place, x.dtype, _without(x.shape, axis), axis % x.ndim, label=label
        )
        pieces = self._to_root(channel, x, root)
        return None if pieces is None else array_module(x).concatenate(pieces, axis=axis)

    def reduce(
        self, x: Array, root: int = 0, op: str = "sum", label: str | None = None
    ) -> Array | None:
        """Return the reduction of every rank's x, in rank order, on root; None elsewhere.

        Bytes: S from each rank but root.
        """
        x, place = _checked(x), f"root={self._valid(root, 'root')}"
        combine = _ufunc(op, array_module(x))
        channel = self._meet("reduce", place, op, x.dtype, x.shape, label=label)
        pieces = self._to_root(channel, x, root)
        return None if pieces is None else _reduce(pieces, combine)

    def barrier(self, label: str | None = None) -> None:
        """Return when every rank has come here, with the same label. No payload."""
        self._meet("barrier", label=label)

    def split(self, color: int | None, key: int | None = None) -> "Group | None":
        """Return the group of the ranks that gave the same color, or None for color None.

        Its ranks are ordered by (key, rank here); the default key is this rank's number. No
        payload.
        """
        if color is not None and not isinstance(color, int | np.integer):
            raise ValueError(f"a color is a whole number or None, not {color!r}")
        endpoint = self.endpoint
        block = None if color is None else endpoint.new_block()
        place = 0 if block is None else endpoint.memory.offset_of(block)
        wish = [color is not None, color or 0, self.rank if key is None else key, place]
        channel = self._meet("split", payload=False)
        wishes = all_to_all(channel, [np.array(wish, np.int64)] * self.size)
        self._splits += 1
        if color is None:
            return None
        chosen = [r for r in range(self.size) if wishes[r][0] and wishes[r][1] == color]
        chosen.sort(key=lambda r: (int(wishes[r][2]), r))
        members, blocks = [self.members[r] for r in chosen], [int(wishes[r][3]) for r in chosen]
        board = Board(endpoint.memory, blocks, members, endpoint)
        return type(self)(endpoint, members, (*self.context, self._splits, int(color)), board)

    @contextmanager
    def waiting(self, operation: str) -> Iterator[None]:
        """Let it be known that this thread waits for another one of its rank, not for nothing."""
        wait = Wait(operation, lambda: [self.endpoint.rank], call_site())
        with self.endpoint.mailbox.shown(wait):
            yield

    def empty(self, shape, dtype="float32") -> Array:
        """Return an uninitialised array where `all_reduce(x, out=x)` need not copy it.

        On the CPU that is memory which all ranks see; on a GPU it is an ordinary array.
        """
        if self.device == "gpu":
            return device_module("gpu").empty(shape, dtype)
        return self.endpoint.memory.empty(shape, dtype)

    # What they are made of.

    def _valid(self, rank: int, what: str) -> int:
        if not 0 <= rank < self.size:
            raise ValueError(
                f"{what}={rank} is no rank of a group of {self.size}; use 0 to {self.size - 1}"
            )
        return rank

    def _meet(self, name: str, *details, label=None, payload=True) -> Channel:
        """Wait for all ranks, compare what they call; return a channel for this call alone."""
        self.board.meet(signature_of(name, details, label))
        return Channel(self, name, payload)

    def _reduce_in_shared_memory(self, signature: Signature, x, combine, out):
        """Reduce x where it lies if on all ranks `out` is in shared memory, else through stages."""
        if self.size == 1:
            return x if out is x else x.copy()
        memory, board = self.endpoint.memory, self.board
        place = memory.offset_of(out) or NOWHERE
        if place != NOWHERE and out is not x:
            out[...] = to_host(x)
            x = out
        places = board.meet(signature, place)
        own = split_sizes(x.size, self.size)[self.rank]
        moved = x.size - own + (self.size - 1) * own  # what others reduce; N - 1 times my slice
        self.ledger.bytes["all_reduce"] += moved * x.itemsize
        if NOWHERE not in places:
            reduce_where_it_lies(memory, board, places, x.size, x.dtype, combine)
            return out
        direct = out is x and x.flags.c_contiguous and not on_gpu(x)
        result = x if direct else np.empty(x.shape, x.dtype)
        flat = np.ascontiguousarray(to_host(x)).reshape(-1)
        reduce_through_stages(memory, board, signature, flat, combine, result.reshape(-1))
        return beside(result, x)

    def _receive(self, source: int, tag: int) -> Array:
        return self._take("recv", source, ("message", tag))

    def _gather_into(self, out, x, label):
        """Let every rank write its part of `out` into everyone's, if all lie in shared memory."""
        ends, memory = split_ends(out.size, self.size), self.endpoint.memory
        begin, stop = ends[self.rank], ends[self.rank + 1]
        if out.ndim != 1 or x.shape != (stop - begin,) or x.dtype != out.dtype:
            raise ValueError(
                f"x is {x.dtype}{list(x.shape)}; rank {self.rank}'s part of out, "
                f"{out.dtype}{list(out.shape)}, is 1-D and has {stop - begin} elements"
            )
        out[begin:stop] = x  # at once, for x may be another part of out
        place = memory.offset_of(out) if self.size > 1 else None
        places = self._meet_at("all_gather", (x.dtype, out.shape, "out"), label, place)
        if NOWHERE not in places:
            self.ledger.bytes["all_gather"] += (self.size - 1) * x.nbytes
            gather_where_it_lies(memory, self.board, places, out, begin, stop)
            return out
        channel, others = (
            Channel(self, "all_gather"),
            [r for r in range(self.size) if r != self.rank],
        )
        for r in others:
            channel.send(out[begin:stop], to=r)
        for r in others:
            out[ends[r] : ends[r + 1]] = channel.recv(r)
        return out

    def _meet_at(self, name: str, details, label, place: int | None) -> list[int]:
        """Meet, and return where in shared memory each rank's array lies, or NOWHERE."""
        return self.board.meet(signature_of(name, details, label), place or NOWHERE)

    def _post(self, operation, array, to: int, key, payload=True) -> None:
        if payload and to != self.rank:
            self.ledger.bytes[operation] += array.nbytes
        message = (to_host(array), True) if on_gpu(array) else (array, False)
        self.endpoint.post(self.members[to], (*self.context, key), message)

    def _take(self, operation, source: int, key):
        where = (*self.context, key)
        return _on_its_device(self.mailbox.take(self.members[source], where, operation))

    def _from_root(self, channel: Channel, pieces, root):
        """Return this rank's of root's pieces, one per rank."""
        if self.rank != root:
            return channel.recv(root)
        for r in range(self.size):
            if r != root:
                channel.send(pieces[r], to=r)
        return pieces[root].copy()

    def _to_root(self, channel: Channel, x, root):
        """Return every rank's x on root, in rank order; None elsewhere."""
        if self.rank != root:
            channel.send(x, to=root)
            return None
        return [x.copy() if r == root else channel.recv(r) for r in range(self.size)]


def _on_its_device(message: tuple) -> Array:
    """Return the array of a message where the sender had it: on the host, or on a GPU."""
    array, was_on_gpu = message
    return to_device(array, "gpu") if was_on_gpu else array


def _checked(x, axis: int | None = None):
    """Return x as a numeric array, with the axis that is asked for."""
    if type(x) is not np.ndarray:
        arraylike = hasattr(x, "dtype") and hasattr(x, "nbytes")
        if not arraylike and not isinstance(x, int | float | complex | list):
            raise ValueError(
                f"only arrays travel between ranks, not {type(x).__name__}; "
                "pass a tensor's .data or .grad"
            )
        x = x if on_gpu(x) else np.asarray(x)  # and no subclass
    if x.dtype.kind not in "biufc":
        raise ValueError(f"arrays of {x.dtype} do not travel between ranks; use numbers")
    if axis is not None and not -x.ndim <= axis < x.ndim:
        raise ValueError(f"axis {axis} does not exist in an array of shape {list(x.shape)}")
    return x


def _tag(tag: int) -> int:
    try:
        return index(tag)
    except TypeError:
        raise ValueError(f"a tag is a whole number, not {tag!r}") from None


def _without(shape, axis):
    return shape[: axis % len(shape)] + shape[axis % len(shape) + 1 :]


def _ufunc(op: str, xp=np):
    if op not in REDUCTIONS:
        raise ValueError(f"unknown reduction {op!r}; choose one of {', '.join(REDUCTIONS)}")
    return getattr(xp, REDUCTIONS[op])


def _reduce(pieces: list, combine: Callable) -> Array:
    """Reduce in rank order, into the first piece (fresh)."""
    total, *others = pieces
    for piece in others:
        combine(total, piece, out=total)
    return total
