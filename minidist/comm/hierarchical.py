"""All-reduce on two levels: inside each host, then between hosts (Mikami et al. 2018).

This is the 2D-torus all_reduce of arXiv 1811.05233, with hosts as rows. Letters: S bytes in the
array, h hosts. All ranks together send 2 (h - 1) S bytes between hosts, however many ranks a host
has; the rest stays in the memory of each host.

                      host a: 3 ranks    host b: 2 ranks    k = 2
                      a0    a1    a2     b0    b1           arrays
    reduce_scatter    A.0   A.1   -      B.0   B.1          inside: slice 0 of A = a0 + a1 + a2
    all_reduce        *.0   *.1   -      *.0   *.1          between a0, b0: A.0 + B.0
    all_gather        *     *     *      *     *            inside
"""

from typing import NamedTuple, Protocol

from minidist.backend import Array
from minidist.comm.communicator import Ledger
from minidist.pieces import split_sizes


class Reduces(Protocol):
    """What is needed of a Group."""

    rank: int
    size: int
    ledger: Ledger

    def all_reduce(self, x: Array, op: str, *, out: Array) -> Array: ...

    def reduce_scatter(self, x: Array, sizes: list[int], op: str) -> Array: ...

    def all_gather(self, x: Array, *, out: Array, sizes: list[int]) -> Array: ...


def hierarchical(inside: Reduces, between: Reduces | None, k: int, x: Array, op: str) -> None:
    """All-reduce the flat array x in place, on two levels.

    inside   the group of this host's ranks
    between  the group of the ranks that have this rank's slice; None if this rank has none
    k        no host has fewer ranks; the first k of each host have a slice of x each
    """
    sizes = split_sizes(x.size, k) + [0] * (inside.size - k)
    start = sum(sizes[: inside.rank])
    mine = x[start : start + sizes[inside.rank]]
    mine[...] = inside.reduce_scatter(x, sizes, op)
    if between is not None:
        between.all_reduce(mine, op, out=mine)
    inside.all_gather(mine, out=x, sizes=sizes)


def places_on(hosts: list[int]) -> tuple[list[int], int]:
    """Return each rank's place among the ranks of its host, and how many places every host has.

    Of ranks on hosts [0, 0, 1, 0, 1] the places are [0, 1, 0, 2, 1]; both hosts have 2.
    """
    places = [hosts[:rank].count(host) for rank, host in enumerate(hosts)]
    return places, min(map(hosts.count, hosts))


def levels_of(hosts: list[int], me: int) -> tuple[list[int], list[int], int]:
    """Return the ranks of `inside` and of `between` on this rank, and k."""
    places, k = places_on(hosts)
    inside = [r for r, host in enumerate(hosts) if host == hosts[me]]
    between = [r for r, place in enumerate(places) if place == places[me] < k]
    return inside, between, k


class TwoLevels(NamedTuple):
    """The arguments of `hierarchical` that stay from one call to the next."""

    inside: Reduces
    between: Reduces | None
    k: int

    def all_reduce(self, x: Array, op: str, ledger: Ledger) -> None:
        """Reduce the flat array x; the ledger gets a row for the bytes on each level."""
        hierarchical(self.inside, self.between, self.k, x, op)
        rows = dict(self.inside.ledger.as_one("all_reduce inside hosts"))
        if self.between is not None:
            rows.update(self.between.ledger.as_one("all_reduce between hosts"))
        for row, nbytes in rows.items():
            ledger.bytes[row] = nbytes
