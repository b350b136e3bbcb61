"""Injected faults: each must turn the comparison with one device red, in the shared weights."""

from dataclasses import replace

import numpy as np
import pytest

from minidist.errors import RankFailed
from minidist.pipeline_parallel import branch_placement
from minidist.planning.costs.branch_placement import siamese_bytes
from minidist.tools.strategies.siamese import siamese_cases, siamese_worker
from tests.pipeline_parallel.branches import judge


def shared_gradients_not_summed(group, case):
    """Every rank keeps what its own branch contributed."""
    total = group.all_reduce
    group.all_reduce = lambda x, label=None: x.copy() if label else total(x)
    return siamese_worker(group, case)


def shared_gradients_summed_twice(group, case):
    """The sum of both ranks is summed over both ranks once more."""
    total = group.all_reduce

    def twice(x, label=None):
        return total(total(x, label=label), label=label) if label else total(x)

    group.all_reduce = twice
    return siamese_worker(group, case)


def summed_in_every_micro_batch(group, case):
    """The sum of the first micro-batch is summed again together with the second."""
    once = branch_placement.forward_backward

    def with_sum(model, x, targets, group, *more):
        value = once(model, x, targets, group, *more)
        if len(x.data) == 4:  # the first half of seven
            branch_placement.all_reduce_shared(model, group)
        return value

    branch_placement.forward_backward = with_sum
    try:
        return siamese_worker(group, case, micro_batches=2)
    finally:
        branch_placement.forward_backward = once


def the_other_gradient_is_sent(group, case):
    """Rank 1 is given dH_0, which is -dH_1 in this join."""
    send = group.send
    group.send = lambda array, to: send(-array if group.rank == 0 else array, to)
    return siamese_worker(group, case)


def both_ranks_embed_the_same_half(group, case):
    """Rank 1 reads the half of rank 0."""
    same = np.stack([case.inputs[:, 0]] * 2, axis=1)
    return siamese_worker(group, replace(case, inputs=same) if group.rank else case)


def scaled_by_the_ranks(group, case):
    """The loss is divided by the ranks, as if each held its own examples."""

    def loss(logits, targets, reduction_size):
        return case.loss(logits, targets, reduction_size=reduction_size * group.size)

    return siamese_worker(group, replace(case, loss=loss))


FAULTS = [
    shared_gradients_not_summed,
    shared_gradients_summed_twice,
    the_other_gradient_is_sent,
    both_ranks_embed_the_same_half,
    scaled_by_the_ranks,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_an_injected_fault_is_found_in_the_shared_weights(cluster, fault):
    comparison, _ = judge(cluster(2), siamese_cases(2)[0], fault)
    assert not comparison.ok and comparison.error > 1e-3, comparison
    assert comparison.parameter.startswith("branch.")


def test_a_sum_is_not_summed_again_with_the_next_micro_batch(cluster):
    with pytest.raises(RankFailed, match=r"branch\.\d\.weight has a sum over the ranks \[0, 1\]"):
        judge(cluster(2), siamese_cases(2)[0], summed_in_every_micro_batch)


def test_summing_twice_shows_as_twice_the_gradient_and_in_the_bytes(cluster):
    case = siamese_cases(2)[0]
    comparison, moved = judge(cluster(2), case, shared_gradients_summed_twice)
    assert comparison.ratio == pytest.approx(2) and moved > siamese_bytes(case, 2)
    comparison, moved = judge(cluster(2), case, shared_gradients_not_summed)
    assert moved < siamese_bytes(case, 2)
