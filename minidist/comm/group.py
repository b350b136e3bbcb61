"""Group: a set of ranks that talk to each other. Every strategy is written against this contract.

Letters: N ranks in the group, S bytes in an array. Results are fresh arrays, or land in `out`.
Collectives are called by all ranks of the group in the same order. By default each rank reduces one
slice of the array, in rank order, from everyone's messages (a reduce-scatter), and hands it to all
(an all-gather): 2(N-1)S bytes in all, as in a ring, and the same bits on every rank and in every
run.
"""

from collections import Counter, deque

import numpy as np

from minidist.backend import array_module, as_array, empty, on_gpu, to_device, to_host
from minidist.errors import CollectiveMismatch

REDUCTIONS = {"sum": "add", "max": "maximum", "min": "minimum", "prod": "multiply"}


def split_sizes(n: int, parts: int) -> list[int]:
    """Cut n things into `parts` sizes that differ by at most one, the larger ones first; parts may
    be empty.
    """
    return [n // parts + (part < n % parts) for part in range(parts)]


class Ledger:
    """Payload bytes that other ranks take from this one, per operation; no control traffic, nothing
    to itself.
    """

    def __init__(self):
        self.bytes: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return sum(self.bytes.values())

    def __repr__(self):
        return f"Ledger({dict(self.bytes)})"


class Group:
    """The ranks `members` of a transport, numbered 0 to size - 1; `rank` is this one's number.

    Made by `run` and `Cluster`, and by `split`. ledger: what this rank has sent as a member of this
    very group.
    """

    def __init__(self, transport, members: list[int], context: tuple):
        self.transport, self.members, self.context = transport, members, context
        self.rank, self.size = members.index(transport.rank), len(members)
        self.device = transport.device
        self.ledger = Ledger()
        self._collectives = self._splits = 0
        self._requests: dict[tuple[int, int], deque[Request]] = {}

    def __repr__(self):
        return f"Group(rank={self.rank}, size={self.size})"

    # Messages between two ranks.

    def send(self, array, to: int, tag: int = 0) -> None:
        """Send a copy; returns at once, whether or not the receiver ever receives."""
        self._post("send", _checked(array), self._valid(to, "to"), ("message", tag))

    def recv(self, source: int, tag: int = 0):
        """Return the next array that `source` has sent, or will send, with this tag."""
        return self.irecv(source, tag).wait()

    def isend(self, array, to: int, tag: int = 0) -> "Request":
        """Send a copy; return a request that is complete, since a send never waits."""
        self.send(array, to, tag)
        return Request(deque(), lambda: None)

    def irecv(self, source: int, tag: int = 0) -> "Request":
        """Return a request whose `.wait()` returns the array; requests get messages in the
        order they were made.
        """
        self._valid(source, "source")
        return Request(
            self._requests.setdefault((source, tag), deque()),
            lambda: self._take("recv", source, ("message", tag), f"tag={tag}"),
        )

    # Collectives.

    def all_reduce(self, x, op="sum", label=None, algorithm=None, out=None):
        """Return the reduction of every rank's x, same shape and dtype on all ranks.

        Bytes: 2(N-1)S from all ranks together; from each, S less its slice, and N-1 times its
        slice: 2(N-1)/N S where N divides the elements.

        op         "sum", "max", "min" or "prod"
        label      a name that must agree between ranks: two equal shapes in swapped order are then
                   an error
        algorithm  None: in rank order, the same bits everywhere and always
        out        an array for the result, x itself for a reduction in place
        """
        if algorithm is not None:
            raise ValueError(
                f"unknown algorithm {algorithm!r}; there is None, which reduces in rank order"
            )
        x = _checked(x)
        _check_out(out, x)
        call = self._call("all_reduce", op, x.dtype, x.shape, label=label)
        flat = x.reshape(-1)
        pieces = _cut(flat, split_sizes(x.size, self.size))
        mine = _reduce(self._exchange(call, pieces), op)
        result = (
            array_module(x).concatenate(self._exchange(call, [mine] * self.size)).reshape(x.shape)
        )
        if out is None:
            return result
        out[...] = result
        return out

    def reduce_scatter(self, x, sizes: list[int] | None = None, op="sum", label=None):
        """Return this rank's piece, along axis 0, of the reduction of every rank's x.

        sizes: rows per rank (default: as equal as can be, larger first). S minus the own piece in
        bytes per rank.
        """
        x = _checked(x, axis=0)
        sizes = split_sizes(len(x), self.size) if sizes is None else list(sizes)
        if len(sizes) != self.size or sum(sizes) != len(x) or min(sizes) < 0:
            raise ValueError(f"sizes {sizes} do not cut {len(x)} rows into {self.size} pieces")
        call = self._call("reduce_scatter", op, x.dtype, x.shape, tuple(sizes), label=label)
        return _reduce(self._exchange(call, _cut(x, sizes)), op)

    def all_gather(self, x, axis: int = 0, label=None):
        """Return every rank's x, concatenated along `axis`, where alone they may differ: (N-1) S
        bytes per rank.
        """
        x = _checked(x, axis=axis)
        call = self._call("all_gather", x.dtype, _without(x.shape, axis), axis, label=label)
        return array_module(x).concatenate(self._exchange(call, [x] * self.size), axis=axis)

    def all_to_all(self, arrays: list, label=None) -> list:
        """Give arrays[r] to rank r; return what each rank gave to this one. Shapes may differ,
        dtypes may not.
        """
        if len(arrays) != self.size:
            raise ValueError(f"all_to_all needs one array per rank: {self.size}, got {len(arrays)}")
        arrays = [_checked(x) for x in arrays]
        if len({x.dtype for x in arrays}) > 1:
            raise ValueError(
                f"all_to_all needs one dtype, got {', '.join(str(x.dtype) for x in arrays)}"
            )
        return self._exchange(self._call("all_to_all", arrays[0].dtype, label=label), arrays)

    def broadcast(self, x=None, root: int = 0, label=None):
        """Return root's x on all ranks: (N-1) S bytes from root. Only root's x counts."""
        call = self._call("broadcast", self._valid(root, "root"), label=label)
        if self.rank == root:
            x = _checked(x)
            self._spread(call, dict.fromkeys(range(self.size), x))
            return x.copy()
        return self._collect(call, [root])[root]

    def scatter(self, pieces: list | None = None, root: int = 0, label=None):
        """Return pieces[r] of root's list on rank r; shapes may differ."""
        call = self._call("scatter", self._valid(root, "root"), label=label)
        if self.rank == root:
            if pieces is None or len(pieces) != self.size:
                raise ValueError(f"scatter needs one piece per rank on the root: {self.size}")
            pieces = [_checked(x) for x in pieces]
            self._spread(call, dict(enumerate(pieces)))
            return pieces[root].copy()
        return self._collect(call, [root])[root]

    def gather(self, x, root: int = 0, axis: int = 0, label=None):
        """Return every rank's x, concatenated along `axis`, on root; None elsewhere: S bytes from
        each other rank.
        """
        x = _checked(x, axis=axis)
        call = self._call(
            "gather", self._valid(root, "root"), x.dtype, _without(x.shape, axis), axis, label=label
        )
        pieces = self._to_root(call, x, root)
        return pieces and array_module(x).concatenate(pieces, axis=axis)

    def reduce(self, x, root: int = 0, op="sum", label=None):
        """Return the reduction of every rank's x, in rank order, on root; None elsewhere: S bytes
        from each other rank.
        """
        x = _checked(x)
        call = self._call("reduce", self._valid(root, "root"), op, x.dtype, x.shape, label=label)
        pieces = self._to_root(call, x, root)
        return None if pieces is None else _reduce(pieces, op)

    def barrier(self) -> None:
        """Return when every rank has come here. No payload."""
        nothing = np.empty(0, np.uint8)
        self._exchange(self._call("barrier"), [nothing] * self.size, payload=False)

    def split(self, color: int | None, key: int | None = None) -> "Group | None":
        """Return the group of the ranks that gave the same color, ordered by (key, rank); None for
        color None.

        key: default this rank's number. No payload.
        """
        wish = np.array(
            [color is not None, color or 0, self.rank if key is None else key], np.int64
        )
        wishes = self._exchange(self._call("split"), [wish] * self.size, payload=False)
        self._splits += 1
        if color is None:
            return None
        chosen = [r for r in range(self.size) if wishes[r][0] and wishes[r][1] == color]
        chosen.sort(key=lambda r: (int(wishes[r][2]), r))
        context = (*self.context, self._splits, int(color))
        return Group(self.transport, [self.members[r] for r in chosen], context)

    def empty(self, shape, dtype="float32"):
        """Return an uninitialised array on this rank's device, where the transport communicates at
        the least cost.
        """
        return to_device(empty(shape, dtype), self.device)

    # What they are made of.

    def _valid(self, rank: int, what: str) -> int:
        if not 0 <= rank < self.size:
            raise ValueError(
                f"{what}={rank} is no rank of a group of {self.size}; use 0 to {self.size - 1}"
            )
        return rank

    def _call(self, name: str, *details, label=None) -> tuple:
        """Name this collective call: its number in the group, and what every rank must agree on."""
        for op in details:
            if isinstance(op, str) and op not in REDUCTIONS:
                raise ValueError(f"unknown reduction {op!r}; choose one of {', '.join(REDUCTIONS)}")
        self._collectives += 1
        label = [f"label={label!r}"] if label is not None else []
        return name, self._collectives, f"{name}({', '.join([*map(str, details), *label])})"

    def _post(self, operation, array, to: int, key, note=None, payload=True) -> None:
        if payload and to != self.rank:
            self.ledger.bytes[operation] += array.nbytes
        host = to_host(array)
        self.transport.post(self.members[to], (*self.context, key), (note, host, on_gpu(array)))

    def _take(self, operation, source: int, key, detail="", expected=None):
        described = f"{operation}({detail})" if detail else operation
        note, array, was_on_gpu = self.transport.take(
            self.members[source], (*self.context, key), described
        )
        if note != expected:
            raise CollectiveMismatch(
                f"collective number {key[1]} of the group {self.members}: rank "
                f"{self.members[self.rank]} called "
                f"{expected}, rank {self.members[source]} called {note}; all must call the same"
            )
        return to_device(array, "gpu") if was_on_gpu else array

    def _spread(self, call, pieces: dict, payload=True) -> None:
        """Send pieces[r] to rank r, starting with the next rank, so that not all write to the same
        one at once.
        """
        name, number, signature = call
        for step in range(1, self.size):
            to = (self.rank + step) % self.size
            if to in pieces:
                self._post(name, pieces[to], to, ("collective", number), signature, payload)

    def _collect(self, call, sources) -> dict:
        name, number, signature = call
        return {
            r: self._take(name, r, ("collective", number), expected=signature)
            for r in sources
            if r != self.rank
        }

    def _exchange(self, call, pieces: list, payload=True) -> list:
        """Give pieces[r] to every rank r; return what each gave to this one."""
        self._spread(call, dict(enumerate(pieces)), payload)
        received = self._collect(call, range(self.size))
        return [received[r] if r != self.rank else pieces[r].copy() for r in range(self.size)]

    def _to_root(self, call, x, root):
        """Return every rank's x on root, None elsewhere."""
        if self.rank != root:
            self._spread(call, {root: x})
            return None
        received = self._collect(call, range(self.size))
        return [received[r] if r != root else x.copy() for r in range(self.size)]


class Request:
    """A transfer under way, in a queue with the earlier ones of the same source and tag."""

    def __init__(self, queue: deque, complete):
        self._queue, self._complete, self._done, self._result = queue, complete, False, None
        queue.append(self)

    def wait(self):
        """Return the array that was received (None for a send); the same one if called again."""
        while not self._done:
            oldest = self._queue[0]
            oldest._result, oldest._done = oldest._complete(), True
            self._queue.popleft()
        return self._result


def _checked(x, axis: int | None = None):
    """Return x as a numeric array, with the axis that is asked for."""
    if not hasattr(x, "dtype") or not hasattr(x, "nbytes"):
        if not isinstance(x, int | float | complex | list):
            raise ValueError(
                f"only arrays travel between ranks, not {type(x).__name__}; pass a tensor's .data "
                "or .grad"
            )
    x = as_array(x)
    if x.dtype.kind not in "biufc":
        raise ValueError(
            f"arrays of {x.dtype} do not travel between ranks; use numbers or booleans"
        )
    if axis is not None and not -x.ndim <= axis < x.ndim:
        raise ValueError(f"axis {axis} does not exist in an array of shape {list(x.shape)}")
    return x


def _check_out(out, x):
    if out is not None and (out.shape != x.shape or out.dtype != x.dtype):
        raise ValueError(
            f"out is {out.dtype}{list(out.shape)}, x is {x.dtype}{list(x.shape)}: they must agree"
        )


def _without(shape, axis):
    return shape[: axis % len(shape)] + shape[axis % len(shape) + 1 :]


def _cut(x, sizes: list[int]) -> list:
    """Cut x along axis 0 into pieces of the given numbers of rows."""
    ends = np.cumsum(sizes)
    return [x[end - size : end] for end, size in zip(ends.tolist(), sizes, strict=True)]


def _reduce(pieces: list, op: str):
    """Reduce in rank order, into the first piece (fresh)."""
    total, *others = pieces
    combine = getattr(array_module(total), REDUCTIONS[op])
    for piece in others:
        combine(total, piece, out=total)
    return total
