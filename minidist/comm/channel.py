"""The messages of one collective call, and a transfer under way: what `Group` hands out."""

from collections import deque
from collections.abc import Callable

from minidist.backend import Array
from minidist.comm.fabric import Communicator, Fabric
from minidist.comm.ledger import Ledger
from minidist.comm.message import Key, Staged


class Channel:
    """The messages of one collective call: what algorithms are written in, see collectives.py.

    Messages between two ranks keep their order. Ranks are numbered as in the group; `members` has
    their numbers in the world.

    ledger   counts payload; None for control traffic
    library  the group's communicator if it can `transfer`, see transfers.py; else None
    """

    def __init__(
        self,
        fabric: Fabric,
        members: list[int],
        key: Key,
        operation: str,
        ledger: Ledger | None,
        library: Communicator | None = None,
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

    def transfer(self, outgoing: dict[int, Array | Staged], sources: list[int]) -> dict[int, Array]:
        """Give each array to its rank; return, by rank, what each source gives to this one.

        Only where there is a library. All ranks of the group call this in the same place.
        """
        if self.ledger is not None:
            self.ledger.bytes[self.operation] += sum(x.nbytes for x in outgoing.values())
        return self.library.transfer(self.key, self.operation, outgoing, sources)


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
