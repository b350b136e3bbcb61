"""Messages between two ranks of a group: the half of `Group` that any thread may call."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial

import numpy as np

from minidist.backend import Array, elements
from minidist.comm.arguments import NUMERIC, listed, numeric, numeric_dtype, valid_rank, whole
from minidist.comm.diagnosis import Wait, call_site
from minidist.comm.fabric import Fabric
from minidist.comm.ledger import Ledger
from minidist.comm.local.beside import Beside
from minidist.comm.message import Key
from minidist.errors import WrongInput


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


class PointToPoint:
    """The ranks `members` of the world, numbered 0 to size - 1; `rank` is this one's number.

    A message has a tag. Messages of one sender and one tag keep their order.
    """

    def __init__(self, fabric: Fabric, members: list[int], splits: tuple[int, ...], ledger: Ledger):
        self.fabric, self.members, self.splits, self.ledger = fabric, members, splits, ledger
        self.rank, self.size = members.index(fabric.rank), len(members)
        # What was checked once is remembered: by type, too, since 1.0 == 1 but is no rank.
        key_of = partial(Key, fabric.run, splits, "message")
        self._remembered = lru_cache(1024, typed=True)(partial(address_of, members, key_of))
        self._requests: dict[tuple[int, int], deque[Request]] = {}

    def __repr__(self):
        return f"Group(rank={self.rank}, size={self.size})"

    def __deepcopy__(self, memo: dict | None = None) -> "PointToPoint":
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
        member, key = self._address("to", to, tag)
        self.fabric.send(member, key, array)
        if to != self.rank:
            self.ledger.bytes["send"] += array.nbytes

    def recv(self, source: int, tag: int = 0) -> Array:
        """Return the next array that `source` has sent, or will send, with this tag."""
        member, key = self._address("source", source, tag)
        if self._requests and (self._valid(source, "source"), key.number) in self._requests:
            return self.irecv(source, tag).wait()  # requests come first
        return self.fabric.recv([member], key, "recv")[1]

    def recv_any(self, sources: list[int] | None = None, tag: int = 0) -> tuple[int, Array]:
        """Return (source, array): the next array with this tag from any of these ranks.

        Where several have sent one, the first of them in `sources` (default: all ranks, in rank
        order) comes first. To be fair, give them in another order each time.
        """
        sources = listed(range(self.size) if sources is None else sources, "sources")
        if not sources:
            raise WrongInput("recv_any needs a source: the list of ranks is empty")
        for source in sources:
            if self._requests.get((self._valid(source, "source"), whole(tag, "a tag"))):
                raise WrongInput(
                    f"the next message of rank {source} with tag {tag} belongs to a request of "
                    "irecv; wait for that first, or use another tag"
                )
        members = [self.members[source] for source in sources]
        _, key = self._address("source", sources[0], tag)
        member, array = self.fabric.recv(members, key, "recv_any")
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

    def beside(self, work: Callable, name: str) -> Beside:
        """Return a queue; a second thread calls `work` with what is put there, see local/beside.py.

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

    def _address(self, what: str, rank: int, tag: int) -> tuple[int, Key]:
        """Return a rank's number in the world, and the key of its messages with this tag."""
        try:
            return self._remembered(what, rank, tag)
        except TypeError:  # not hashable; an array of no dimensions may be a whole number, though
            return self._remembered(what, whole(rank, what), whole(tag, "a tag"))

    def _valid(self, rank: int, what: str) -> int:
        return valid_rank(rank, self.size, what)

    def _receive(self, source: int, tag: int) -> Array:
        member, key = self._address("source", source, tag)
        return self.fabric.recv([member], key, "recv")[1]


def address_of(
    members: list[int], key_of: Callable[[int], Key], what: str, rank: int, tag: int
) -> tuple[int, Key]:
    """Return what PointToPoint._address does."""
    return members[valid_rank(rank, len(members), what)], key_of(whole(tag, "a tag"))
