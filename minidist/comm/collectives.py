"""Collectives as algorithms, on send and recv alone. Start with `ring`.

`channel.send(array, to)` copies and never waits; `channel.recv(source)` returns a fresh array.

Letters: N ranks, r this rank, S bytes in the array, cut into N chunks whose sizes differ by at most
one element, the larger first (some are empty where there are fewer elements than ranks); alpha
seconds per message, beta seconds per byte.

    all_reduce          steps             bytes that one rank sends     good for
    ring                2 (N - 1)         2 (N - 1) / N S               large arrays, any N
    tree                2 ceil(log2 N)    up to ceil(log2 N) S          small arrays, any N
    halving_doubling    2 log2 N          2 (N - 1) / N S               N a power of two
    hierarchical        see hierarchical.py: inside hosts, then between them

So a ring takes 2 (N - 1) alpha + 2 (N - 1)/N S beta seconds. No algorithm has a smaller second term
(Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations");
the others have a smaller first one (Thakur, Rabenseifner, Gropp 2005, "Optimization of collective
communication operations in MPICH").

The order in which a chunk is added up is fixed, and each chunk is finished at one place, so results
have the same bits on every rank and in every run. Where N does not divide the elements the bytes
differ a little from rank to rank; planning/costs/ has them exactly.
"""

from collections.abc import Callable
from itertools import pairwise

from minidist.backend import Array
from minidist.comm.communicator import Messages, Staged, staged
from minidist.errors import WrongInput
from minidist.pieces import split_ends


def ring(channel: Messages, x: Array, combine: Callable[..., Array]) -> None:
    """All-reduce the flat array x in place around a ring (Patarasuk and Yuan 2009).

    reduce-scatter: chunk c starts at rank c and goes round, each rank adding its own to what comes
    in, until rank c - 1 has it whole;  all-gather: the whole chunks go round once more.

        N = 3, chunk: {ranks in its sum}   rank 0      rank 1      rank 2
        step 0 sends                       0: {0}      1: {1}      2: {2}
        step 1 sends                       2: {2, 0}   0: {0, 1}   1: {1, 2}
        has whole                          1           2           0
    """
    N, r = channel.size, channel.rank
    ends = split_ends(x.size, N)

    def chunk(c):
        return x[ends[c % N] : ends[c % N + 1]]

    for step in range(N - 1):
        channel.send(chunk(r - step), to=(r + 1) % N)
        mine = chunk(r - step - 1)
        combine(channel.recv((r - 1) % N), mine, out=mine)
    for step in range(N - 1):
        channel.send(chunk(r - step + 1), to=(r + 1) % N)
        chunk(r - step)[...] = channel.recv((r - 1) % N)


def tree(channel: Messages, x: Array, combine: Callable[..., Array]) -> None:
    """All-reduce the flat array x in place: up a binomial tree to rank 0, and down again.

        N = 6, up:   1 -> 0, 3 -> 2, 5 -> 4;   then 2 -> 0;   then 4 -> 0.   Down: reversed.

    At distance d = 1, 2, 4, ... rank r sends its sum to r - d and is done, or adds rank r + d's.
    """
    N, r, distance = channel.size, channel.rank, 1
    while distance < N and not r & distance:
        if r + distance < N:
            combine(x, channel.recv(r + distance), out=x)
        distance *= 2
    if r:
        channel.send(x, to=r - distance)
        x[...] = channel.recv(r - distance)
    while distance > 1:
        distance //= 2
        if r + distance < N:
            channel.send(x, to=r + distance)


def halving_doubling(channel: Messages, x: Array, combine: Callable[..., Array]) -> None:
    """All-reduce the flat array x in place (Rabenseifner; Thakur et al. 2005, section 4.5).

    halving: with the rank at distance N/2 exchange halves of the array, with that at N/4 halves of
    the half, and so on, until each rank has one chunk whole;  doubling: the steps in reverse.
    """
    N, r = channel.size, channel.rank
    if N & (N - 1):
        raise WrongInput(
            f"halving_doubling needs a power of two, not {N} ranks; use 'ring' or 'tree', or None"
        )
    ends, low, high, distance, halves = split_ends(x.size, N), 0, N, N // 2, []

    def chunks(bounds):
        return x[ends[bounds[0]] : ends[bounds[1]]]

    while distance:
        middle = (low + high) // 2
        lower, upper = (low, middle), (middle, high)
        keep, give = (upper, lower) if r & distance else (lower, upper)
        channel.send(chunks(give), to=r ^ distance)
        received, mine = channel.recv(r ^ distance), chunks(keep)
        first, second = (received, mine) if r & distance else (mine, received)
        combine(first, second, out=mine)  # the lower rank's first, wherever it is done
        halves.append((distance, keep, give))
        (low, high), distance = keep, distance // 2
    for distance, keep, give in reversed(halves):
        channel.send(chunks(keep), to=r ^ distance)
        chunks(give)[...] = channel.recv(r ^ distance)


ON_MESSAGES = {"ring": ring, "tree": tree, "halving_doubling": halving_doubling}
ALGORITHMS = [*ON_MESSAGES, "hierarchical"]


def in_rank_order(channel: Messages, x: Array, combine: Callable[..., Array]) -> None:
    """All-reduce the flat array x in place: rank r reduces chunk r of all ranks, in rank order.

    Same bits and bytes as all_reduce in shared memory, which it replaces where there is none.
    """
    ends = split_ends(x.size, channel.size)
    chunks = [x[start:stop] for start, stop in pairwise(ends)]
    chunks[channel.rank][...] = reduce_pieces(all_to_all(channel, chunks), combine)
    gather_into(channel, x, ends)


def gather_into(channel: Messages, x: Array, ends: list[int]) -> None:
    """Fill the flat array x on every rank: elements [ends[r], ends[r + 1]) from rank r."""
    N, r = channel.size, channel.rank
    mine = staged(x[ends[r] : ends[r + 1]])
    for step in range(1, N):
        channel.send(mine, to=(r + step) % N)
    for source in [(r - step) % N for step in range(1, N)]:
        x[ends[source] : ends[source + 1]] = channel.recv(source)


def all_to_all(channel: Messages, pieces: list[Array | Staged]) -> list[Array]:
    """Give pieces[r] to rank r; return what each rank gave to this one, in rank order.

    In step s to r + s and from r - s, so that not all ranks write to the same one at once.
    """
    N, r = channel.size, channel.rank
    for step in range(1, N):
        channel.send(pieces[(r + step) % N], to=(r + step) % N)
    received = {(r - step) % N: channel.recv((r - step) % N) for step in range(1, N)}
    return [pieces[r].copy() if rank == r else received[rank] for rank in range(N)]


def from_root(channel: Messages, pieces: list[Array | Staged] | None, root: int) -> Array:
    """Return this rank's one of root's pieces; the other ranks need not have any."""
    if channel.rank != root:
        return channel.recv(root)
    assert pieces is not None
    for r in range(channel.size):
        if r != root:
            channel.send(pieces[r], to=r)
    return pieces[root].copy()


def to_root(channel: Messages, x: Array, root: int) -> list[Array] | None:
    """Return every rank's x on root, in rank order, as fresh arrays; None elsewhere."""
    if channel.rank != root:
        channel.send(x, to=root)
        return None
    return [x.copy() if r == root else channel.recv(r) for r in range(channel.size)]


def reduce_pieces(pieces: list[Array], combine: Callable[..., Array]) -> Array:
    """Reduce in rank order, into the first piece, which must be fresh."""
    total, *others = pieces
    for piece in others:
        combine(total, piece, out=total)
    return total
