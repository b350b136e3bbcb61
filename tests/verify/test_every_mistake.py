"""Every mistake that a certificate can see turns it red, and the row says what the register says.

Every day these are some, which the commit chooses. The other mistakes are seen by tests of what
they change; `minidist mutants` runs the tests that find each.
"""

import pytest

from minidist.course import mutants
from minidist.verify import equivalence
from minidist.verify.mistakes.register import NUMBERS, find
from tests.grids import some
from tests.planted import planted

REFUSED = {  # before numbers are compared, by a strategy, in these words
    "newer_version_recorded": ("downpour", "no run can leave these logs"),
    "loads_of_one_rank": ("expert", find("loads_of_one_rank").diagnosis),
}
OTHERS = """
copies_not_summed dualpipe_v_chunks_in_a_loop experts_summed_over_the_wrong_ranks lost_tag
looped_bfs_backward_in_forwards_order one_turn_for_every_p vocabularies_swapped""".split()
SEEN = [
    name for name in mutants.names() if name not in (*REFUSED, *OTHERS) and not find(name).killed_by
]


def first_red_row(cluster, name, strategies):
    for strategy in strategies:
        entry = equivalence.find(strategy)
        size = max(ranks for ranks in entry.ranks if ranks <= 3)
        for case in entry.cases(size):
            with planted(name):  # ranks are threads of this process
                ranks = cluster(size, "thread")
                row = equivalence.check(strategy, case, size, ranks, rerun=False)
            if not row["ok"]:
                return row
    raise AssertionError(f"none of {strategies} sees {name}")


def assert_seen(cluster, name):
    """Ask the strategies of the mistake's family, the likeliest first."""
    strategies = [
        test.partition("[")[2].rstrip("]") for test in mutants.tests_of(mutants.load(name))
    ]
    row, words = first_red_row(cluster, name, strategies), find(name).diagnosis
    assert words.startswith(NUMBERS) or words in row["detail"], row["detail"]


def test_a_mistake_turns_the_certificate_red_and_sums_show_their_cause(cluster):
    for name in some(SEEN, 8, "mistakes"):
        assert_seen(cluster, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", SEEN)
def test_every_mistake_turns_a_certificate_red(cluster, name):
    assert_seen(cluster, name)


def test_what_cannot_be_is_refused_before_numbers_are_compared(cluster):
    for name, (strategy, words) in REFUSED.items():
        with pytest.raises(ValueError, match=words):
            first_red_row(cluster, name, [strategy])
