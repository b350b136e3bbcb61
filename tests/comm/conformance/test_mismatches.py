"""Ranks that do not call the same collective: who called what, and where, before data moves."""

import os
import re

import numpy as np

from minidist.errors import CollectiveMismatch
from tests.comm.conformance.wrong_programs import fails

HERE = os.path.basename(__file__)


MISMATCHES = {
    "all_reduce shape": lambda g, odd: g.all_reduce(np.ones(3 + odd)),
    "all_reduce dtype": lambda g, odd: g.all_reduce(np.ones(3, "f4" if odd else "f8")),
    "all_reduce op": lambda g, odd: g.all_reduce(np.ones(3), op="max" if odd else "sum"),
    "all_reduce label": lambda g, odd: g.all_reduce(np.ones(3), label=None if odd else "a"),
    "all_reduce algorithm": lambda g, odd: g.all_reduce(
        np.ones(3), algorithm="tree" if odd else "ring"
    ),
    "another collective": lambda g, odd: (g.all_gather if odd else g.all_reduce)(np.ones(3)),
    "broadcast root": lambda g, odd: g.broadcast(np.ones(2), root=int(odd)),
    "scatter root": lambda g, odd: g.scatter([np.ones(1)] * 2, root=int(odd)),
    "gather root": lambda g, odd: g.gather(np.ones(2), root=int(odd)),
    "gather shape": lambda g, odd: g.gather(np.ones((2, 2 + odd))),
    "gather dtype": lambda g, odd: g.gather(np.ones(2, "f4" if odd else "f8")),
    "reduce root": lambda g, odd: g.reduce(np.ones(2), root=int(odd)),
    "reduce shape": lambda g, odd: g.reduce(np.ones(2 + odd)),
    "reduce op": lambda g, odd: g.reduce(np.ones(2), op="max" if odd else "sum"),
    "reduce_scatter shape": lambda g, odd: g.reduce_scatter(g.empty(2 + odd)),
    "reduce_scatter sizes": lambda g, odd: g.reduce_scatter(g.empty(3), [2 - odd, 1 + odd]),
    "reduce_scatter op": lambda g, odd: g.reduce_scatter(g.empty(2), op="max" if odd else "sum"),
    "all_gather axis": lambda g, odd: g.all_gather(np.ones((2, 2)), axis=int(odd)),
    "all_gather shape": lambda g, odd: g.all_gather(np.ones((2, 2 + odd))),
    "all_gather out": lambda g, odd: g.all_gather(
        g.empty(1), out=None if odd else g.empty(2), label="w"
    ),
    "all_gather out's shape": lambda g, odd: g.all_gather(g.empty(2), out=g.empty(4 + odd)),
    "all_gather out's label": lambda g, odd: g.all_gather(
        g.empty(2), out=g.empty(4), label=f"layer {int(odd)}"
    ),
    "all_to_all dtype": lambda g, odd: g.all_to_all([np.ones(1, "f4" if odd else "f8")] * 2),
    "barrier label": lambda g, odd: g.barrier() if odd else g.split(0),
    "long labels": lambda g, odd: g.all_reduce(np.ones(2), label="ä" * 600 + str(odd)),
}


def test_every_argument_that_must_agree_is_compared_and_shown_with_who_and_where(ranks):
    """Each rank catches its own error, and both go on; so one run tries them all."""

    def worker(group):
        found = {}
        for name, call in MISMATCHES.items():
            try:
                call(group, group.rank == 1)
            except CollectiveMismatch as error:
                found[name] = str(error)
        return found

    first, second = ranks(2).run(worker)
    assert first == second and first.keys() == MISMATCHES.keys()
    for name, message in first.items():
        head, *rows = message.splitlines()
        assert head == "ranks [0, 1] of one group did not call the same collective:"
        assert len({row[8:] for row in rows}) == 2, name
        for rank, row in enumerate(rows):
            call = rf"  rank {rank}: (?s:\w+\(.*) at {HERE}:\d+$"
            assert re.match(call, row), (name, row)


def test_a_mismatch_in_a_group_of_three_stops_the_run_and_names_who_differs(ranks):
    def worker(group):
        group.all_reduce(np.ones(2))
        group.broadcast(np.ones(2), root=int(group.rank == 2))

    row = rf"rank 2: broadcast\(root=1\) at {HERE}:"
    fails(ranks(3), worker, CollectiveMismatch, row)


def test_equal_calls_in_other_words_do_match(ranks):
    def worker(group):
        odd = group.rank == 1
        group.all_gather(np.ones((2, 3)), axis=-1 if odd else 1)
        group.reduce_scatter(np.ones(3), [np.int64(2), np.int64(1)] if odd else [2, 1])
        return "well"

    assert ranks(2).run(worker) == ["well"] * 2
