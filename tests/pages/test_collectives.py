"""The collectives page: what it shows is what the algorithms that train do."""

import json
from itertools import pairwise
from math import ceil, log2

import numpy as np
import pytest

from minidist.comm import collectives as on
from minidist.observe.pages import answers
from minidist.observe.pages import collectives as page
from minidist.planning.costs.collectives import all_reduce_bytes

RANKS = range(2, 9)


@pytest.fixture(scope="module")
def recorded():
    """{(algorithm, ranks): its record}, of all that is not refused."""
    found = {N: page.answer(N)["algorithms"] for N in RANKS}
    return {(a, N): each for N in RANKS for a, each in found[N].items() if "error" not in each}


def test_every_algorithm_of_the_package_is_recorded_on_every_number_of_ranks_it_takes(recorded):
    refused = {("halving_doubling", N) for N in (3, 5, 6, 7)}
    assert set(recorded) == {(a, N) for a in on.ALGORITHMS for N in RANKS} - refused


def test_the_recorded_bytes_of_every_rank_are_the_closed_form(recorded):
    for (algorithm, N), found in recorded.items():
        closed = all_reduce_bytes(algorithm, page.ELEMENTS, 1, N, hosts_of(N))
        assert found["steps"][-1]["sent"] == found["closed"] == closed, (algorithm, N)


def test_at_the_end_every_slice_of_every_rank_holds_every_rank_once(recorded):
    for (algorithm, N), found in recorded.items():
        whole = [[2**N - 1] * len(found["slices"])] * N
        assert found["steps"][0]["holds"] == [[1 << r] * len(found["slices"]) for r in range(N)]
        assert found["steps"][-1]["holds"] == whole, (algorithm, N)


def test_a_slice_changes_when_a_message_brings_it_or_on_two_levels_when_the_last_of_them_came(
    recorded,
):
    for (algorithm, _), found in recorded.items():
        came = set()
        for before, step in pairwise(found["steps"]):
            if algorithm != "hierarchical":  # whose all_to_all adds up at its end
                came.clear()
            came |= {(to, at) for _, to, a, b in step["messages"] for at in range(a, b)}
            changed = np.argwhere(np.array(before["holds"]) != step["holds"])
            assert {tuple(place) for place in changed.tolist()} <= came


def test_steps_and_time_are_those_that_the_head_of_collectives_py_says(recorded):
    for (algorithm, N), found in recorded.items():
        steps = len(found["steps"]) - 1
        share = sum(longest(found, step) for step in found["steps"]) / page.ELEMENTS
        if algorithm in ("ring", "halving_doubling"):
            assert steps == (2 * (N - 1) if algorithm == "ring" else 2 * log2(N))
            assert share == pytest.approx(2 * (N - 1) / N)
        elif algorithm == "tree":
            assert steps == share == 2 * ceil(log2(N))


def longest(found, step):
    return max((sum(found["slices"][a:b]) for _, _, a, b in step["messages"]), default=0)


def hosts_of(N):
    hosts = page.answer(N)["hosts"]
    assert 0 <= hosts.count(0) - hosts.count(1) <= 1
    return hosts


def test_a_wrong_ring_is_seen_as_it_is(monkeypatch):
    """Not one drawn by the page: the page shows what the package's function does."""

    def short(channel, x, combine):
        on.tree(channel, x, combine if channel.rank else lambda *given, out: None)

    monkeypatch.setitem(on.ON_MESSAGES, "ring", short)
    steps = page.answer(4)["algorithms"]["ring"]["steps"]
    assert steps[-1]["holds"] == [[0b0001]] * 4


def test_what_cannot_be_is_said_in_the_words_of_the_package():
    assert "power of two, not 6 ranks" in page.answer(6)["algorithms"]["halving_doubling"]["error"]
    asked = {"page": "collectives", "ranks": 9}
    assert answers.answer(asked) == {"error": "this page has 2 to 8 ranks, not 9"}


def test_the_table_of_the_site_has_every_question_and_is_small():
    table = answers.recorded("collectives")
    assert set(table) == {f'{{"ranks":{N}}}' for N in RANKS}
    assert json.loads(json.dumps(table)) == table
    assert len(json.dumps(table)) < 200_000
