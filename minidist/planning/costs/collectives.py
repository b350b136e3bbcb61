"""What one all_reduce moves, by algorithm.  N ranks, n elements of `itemsize` bytes."""

from math import log2

from minidist.comm.hierarchical import places_on
from minidist.errors import WrongInput
from minidist.pieces import split_ends, split_sizes


def all_reduce_bytes(
    algorithm: str | None, n: int, itemsize: int, N: int, hosts: list[int] | None = None
) -> list[int]:
    """Return the payload bytes that each rank sends in one all_reduce of n elements.

    None: what the others reduce of this rank's array, n - s_r, and N - 1 times its slice s_r.
    "ring": every chunk but number r + 1, and then every chunk but number r + 2. "tree": n from each
    rank but 0 on the way up; n to each child on the way down. "halving_doubling" (N a power of
    two): at each distance the half it gives, then the one it keeps. Where N divides n, all these
    but the tree give 2 (N - 1) / N n. "hierarchical": both levels of `level_bytes` together.

    hosts  for "hierarchical": the number of each rank's host (default: all ranks are on one)
    """
    sizes = split_sizes(n, N)
    if algorithm is None:
        elements = _in_rank_order(n, N)
    elif algorithm == "ring":
        elements = [2 * n - sizes[(r + 1) % N] - sizes[(r + 2) % N] for r in range(N)]
        elements = elements if N > 1 else [0]
    elif algorithm == "tree":
        elements = [n * (_children(r, N) + (1 if r else 0)) for r in range(N)]
    elif algorithm == "halving_doubling":
        elements = [_halving_doubling(n, N, r) for r in range(N)]
    elif algorithm == "hierarchical":
        elements = [sum(levels) for levels in level_bytes(n, 1, hosts or [0] * N)]
    else:
        raise WrongInput(f"no closed form for the algorithm {algorithm!r}")
    return [itemsize * count for count in elements]


def level_bytes(n: int, itemsize: int, hosts: list[int]) -> list[tuple[int, int]]:
    """Return the bytes (inside its host, to other hosts) that each rank sends in "hierarchical".

    inside   what the others reduce of this rank's array, n - s_r, and its slice s_r to each rank
             of its host; the first k ranks of a host have a slice, the others have s_r = 0
    between  an all_reduce, in rank order, of s_r elements over h hosts: 2 (h - 1) n from all ranks
    """
    places, k = places_on(hosts)
    sizes, levels = split_sizes(n, k), []
    for r, (host, place) in enumerate(zip(hosts, places, strict=True)):
        s = sizes[place] if place < k else 0
        inside = n - s + (hosts.count(host) - 1) * s
        between = _in_rank_order(s, len(set(hosts)))[places[:r].count(place)] if s else 0
        levels.append((itemsize * inside, itemsize * between))
    return levels


def _in_rank_order(n: int, N: int) -> list[int]:
    return [n - s + (N - 1) * s for s in split_sizes(n, N)]


def _children(r: int, N: int) -> int:
    """Return how many ranks hang below r in the binomial tree.

    They are r + 1, r + 2, r + 4, ... up to r's own lowest bit; numbers from N on do not exist.
    """
    distances = [1 << bit for bit in range(N.bit_length())]
    lowest = r & -r if r else N
    return sum(d < lowest and r + d < N for d in distances)


def _halving_doubling(n: int, N: int, r: int) -> int:
    ends, low, high, total = split_ends(n, N), 0, N, 0
    for bit in reversed(range(round(log2(N)))):
        middle = (low + high) // 2
        total += ends[high] - ends[low]  # one half down, the other half up
        low, high = (middle, high) if r & (1 << bit) else (low, middle)
    return total
