"""Channel: the messages of one collective call, or, where a library moves arrays, its transfers."""

from collections.abc import Callable
from itertools import pairwise

from minidist.backend import Array
from minidist.comm import collectives
from minidist.comm.fabric import Fabric, Transfers
from minidist.comm.ledger import Ledger
from minidist.comm.message import Key, Staged
from minidist.pieces import split_ends


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
        others = self._all_but(self.rank)
        received = self._transfer(self.library, {r: pieces[r] for r in others}, others)
        return [received[r] if r in received else pieces[r].copy() for r in range(self.size)]

    def from_root(self, pieces: list[Array | Staged] | None, root: int) -> Array:
        """Return this rank's one of root's pieces; the other ranks need not have any."""
        if self.library is None:
            return collectives.from_root(self, pieces, root)
        if pieces is None or self.rank != root:
            return self._transfer(self.library, {}, [root])[root]
        self._transfer(self.library, {r: pieces[r] for r in self._all_but(root)}, [])
        return pieces[root].copy()

    def to_root(self, x: Array, root: int) -> list[Array] | None:
        """Return every rank's x on root, in rank order, as fresh arrays; None elsewhere."""
        if self.library is None:
            return collectives.to_root(self, x, root)
        if self.rank != root:
            self._transfer(self.library, {root: x}, [])
            return None
        received = self._transfer(self.library, {}, self._all_but(root))
        return [received[r] if r in received else x.copy() for r in range(self.size)]

    def in_rank_order(self, x: Array, combine: Callable[..., Array]) -> None:
        """All-reduce the flat array x in place: rank r reduces chunk r of all, in rank order."""
        if self.library is None:
            collectives.in_rank_order(self, x, combine)
            return
        chunks = [x[start:stop] for start, stop in pairwise(split_ends(x.size, self.size))]
        mine = collectives.reduce_pieces(self.all_to_all(chunks), combine)
        for chunk, reduced in zip(chunks, self.all_to_all([mine] * self.size), strict=True):
            chunk[...] = reduced

    def _all_but(self, rank: int) -> list[int]:
        return [r for r in range(self.size) if r != rank]

    def _transfer(
        self, library: Transfers, outgoing: dict[int, Array | Staged], sources: list[int]
    ) -> dict[int, Array]:
        """Give each array to its rank; return, by rank, what each source gives to this one.

        All ranks of the group call this in the same place.
        """
        if self.ledger is not None:
            self.ledger.bytes[self.operation] += sum(x.nbytes for x in outgoing.values())
        return library.transfer(self.key, self.operation, outgoing, sources)
