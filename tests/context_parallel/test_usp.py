"""Ring x Ulysses: heads between neighbours, keys and values between groups of them."""

import numpy as np

from minidist.context_parallel import axes_of, plain, zigzag
from minidist.context_parallel.cuts import union


def members(group, U):
    return [g.all_gather(np.array([group.rank]), label="who").tolist() for g in axes_of(group, U)]


def test_neighbours_exchange_heads_and_every_uth_rank_is_in_a_ring(cluster):
    found = cluster(6, "thread").run(members, 2)
    assert [heads for heads, _ in found] == [[0, 1], [0, 1], [2, 3], [2, 3], [4, 5], [4, 5]]
    assert [ring for _, ring in found] == [[0, 2, 4], [1, 3, 5]] * 3


def test_groups_of_neighbours_hold_the_zigzag_of_the_groups():
    """So every rank of a ring has as much to compute as with one rank in a group's place."""
    held, groups = zigzag(48, 8), zigzag(48, 4)
    assert [union(held[r : r + 2]) for r in range(0, 8, 2)] == [union([own]) for own in groups]
    assert union(plain(13, 4)) == plain(13, 1)[0]
