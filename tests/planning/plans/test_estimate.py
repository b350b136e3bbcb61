"""The seconds of what travels, by hand: products that take no time, links of one byte a second."""

import math
from dataclasses import replace

import pytest

from minidist.planning import Machine, Plan, TransformerSize, seconds, traffic
from minidist.planning.plans.block import Times, travel, waiting
from minidist.planning.plans.estimate import Step

SIZE = TransformerSize(
    1, 8, 2, 4, 5
)  # C = 8: a block of 872, 9 C at the embedding, 2 C at the head
P = 872 + 72 + 16


def machine(ranks, per_node=1, link=1.0, network=1.0, latency=0.0):
    return Machine(ranks, per_node, math.inf, 1e9, link, network, latency)


@pytest.mark.parametrize("zero, pieces", [(0, 2), (1, 1 + 1), (2, 3 + 1), (3, 3 + 2 * 3)])
def test_gradients_are_summed_and_weights_gathered_as_the_stage_of_zero_does(zero, pieces):
    """Of 2 ranks, a piece is half of P numbers of 2 bytes; 3 micro-batches, nothing to hide behind.

    0: scattered and gathered. 1: scattered, new weights after the update. 2: scattered 3 times, new
    weights. 3: scattered 3 times, gathered twice each.
    """
    assert SIZE.parameters == P
    plan = Plan(2, micro_batches=3, zero=zero)
    found = seconds(SIZE, plan, machine(2), 6)
    assert found.seconds == found.communication["dp"] == pieces * P
    assert traffic(SIZE, plan, 6)["dp"][0] == pieces * P
    after = Step(SIZE, plan, machine(2), 6).after
    assert after == (P if zero in (1, 2) else 0), "new weights are gathered after the update"


@pytest.mark.parametrize("zero, passes", [(1, 1 + 1), (2, 3 + 1), (3, 3 + 2 * 3)])
def test_only_the_sum_between_copies_takes_the_network(zero, passes):
    """4 ranks in 2 nodes: a pass is half of P numbers of 2 bytes, inside of a node.

    Between the copies, at a byte in 100 seconds, an all_reduce of P/2 numbers: twice half of them.
    """
    plan, two = Plan(4, micro_batches=3, zero=zero, shards=2), machine(4, 2, network=0.01)
    found = seconds(SIZE, plan, two, 12)
    assert found.communication["dp"] == pytest.approx(passes * P + 100 * P)
    assert found.seconds == pytest.approx(passes * P + 100 * P)
    assert traffic(SIZE, plan, 12)["dp"][0] == passes * P + P
    alone = seconds(SIZE, replace(plan, shards=None), two, 12)
    assert alone.communication["dp"] == pytest.approx(passes * 1.5 * 100 * P)


@pytest.mark.parametrize("zero", [2, 3])
def test_a_pipeline_scatters_and_gathers_in_every_micro_batch(zero):
    size, two = replace(SIZE, layers=2, tied=False), machine(4)
    found = {m: seconds(size, Plan(2, 2, micro_batches=m, zero=zero), two, 2 * m) for m in (1, 3)}
    assert found[3].communication["dp"] > 1.5 * found[1].communication["dp"]
    with pytest.raises(ValueError, match="and zb_h1 computes it later; use zero=1, or gpipe"):
        seconds(size, Plan(2, 2, micro_batches=3, zero=zero, schedule="zb_h1"), two, 6)


def test_a_message_between_stages_is_cut_by_the_sequence():
    """3 examples of 4 positions and width 8, in 2 bytes; half of it on each of 2 ranks."""
    size, plan = replace(SIZE, tied=False), Plan(pp=2, tp=2, micro_batches=2, sequence=True)
    for one, nbytes in ((replace(plan, sequence=False), 3 * 4 * 8 * 2), (plan, 3 * 4 * 8)):
        step = Step(size, one, machine(4), 6)
        assert step.delay() == nbytes
        assert step.links()["pp"] == 2 * 2 * nbytes / 2 == traffic(size, one, 6)["pp"][0]


SCHEDULES = ("1f1b", 1), ("zb_v", 2), ("interleaved", 2), ("looped_bfs", 3)


@pytest.mark.parametrize("schedule, chunks", SCHEDULES)
@pytest.mark.parametrize("tied", [False, True])
def test_links_between_stages_are_in_use_for_all_that_is_sent(schedule, chunks, tied):
    size = TransformerSize(4, 8, 2, 4, 50, tied)
    for p, tp in ((1, 1), (2, 1), (2, 2), (3, 1)):
        if p * chunks <= 6 and (p > 1 or chunks == 1):
            plan = Plan(pp=p, tp=tp, micro_batches=p, schedule=schedule, chunks=chunks)
            found = seconds(size, plan, machine(p * tp), p)
            assert found.communication["pp"] == traffic(size, plan, p)["pp"][0]


def test_a_tied_gradient_is_summed_after_the_pipeline():
    """Of a vocabulary of 5 on 2 ranks, 3 rows of 8 numbers of 2 bytes."""
    plan = Plan(pp=2, tp=2, micro_batches=2)
    both = [seconds(replace(SIZE, tied=tied), plan, machine(4), 2) for tied in (False, True)]
    assert both[1].seconds - both[0].seconds == 3 * 8 * 2


def test_attention_hides_all_but_one_part_of_what_travels_over_cp():
    """4 ranks: 3 of 4 parts of 8 seconds. Forward has 1 of 3 parts of the messages, backward 2."""

    def ring(cp, recompute="none"):
        return waiting(Plan(cp=4, recompute=recompute), 8.0, 0.0, 0.0, cp)["context"]

    assert ring(24.0) == Times(8 - 6, 16 - 2 * 6, 0)
    assert ring(36.0, "selective") == Times(6, 24 - 18)
    assert ring(36.0, "full") == Times(3, 27 - 3 * 6)
    assert ring(9.0) == Times(0, 0, 0)


def test_gradients_over_dp_and_cp_travel_at_the_slower_rate_in_rounds_of_all_ranks():
    """cp is inside of the nodes of 2, dp is not; 4 ranks meet in 2 rounds."""
    slow, fast = 2.0, 8.0
    for link, network in ((fast, slow), (slow, fast)):
        one = machine(4, 2, link, network, latency=3.0)
        assert travel("dp", Plan(2, cp=2), one, 12, 5) == 12 / slow + 5 * 2 * 3
    assert travel("dp", Plan(4), machine(4, 2, fast, slow), 12, 5) == 12 / slow
