"""Mistakes of two branches: each must turn the comparison with one device red."""

import pytest

from minidist.errors import RankFailed
from minidist.planning.costs.branch_placement import siamese_bytes
from minidist.tools.strategies.siamese import siamese_cases, siamese_worker
from tests.pipeline_parallel.branches import judge
from tests.planted import mistaken


def judged(ranks, name, **options):
    return judge(ranks, siamese_cases(2)[0], mistaken(name, siamese_worker), **options)


@pytest.mark.parametrize(
    "name",
    [
        "branches_not_summed",
        "branches_summed_twice",
        "other_branch_is_sent",
        "same_half_on_both_ranks",
        "branches_divided_by_the_ranks",
    ],
)
def test_a_mistake_is_found_in_the_shared_weights(cluster, name):
    comparison, _ = judged(cluster(2), name)
    assert not comparison.ok and comparison.error > 1e-3, comparison
    assert comparison.parameter.startswith("branch.")


def test_a_sum_is_not_summed_again_with_the_next_micro_batch(cluster):
    with pytest.raises(RankFailed, match=r"branch\.\d\.weight has a sum over the ranks \[0, 1\]"):
        judged(cluster(2), "branches_summed_per_micro_batch", micro_batches=2)


def test_summing_twice_shows_as_twice_the_gradient_and_in_the_bytes(cluster):
    want = siamese_bytes(siamese_cases(2)[0], 2)
    comparison, moved = judged(cluster(2), "branches_summed_twice")
    assert comparison.ratio == pytest.approx(2) and moved > want
    comparison, moved = judged(cluster(2), "branches_not_summed")
    assert moved < want
