"""The seconds of products and of what travels beside them, by hand."""

import math
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist.planning import Machine, Plan, TransformerSize, seconds, traffic
from minidist.planning.plans.block import (
    Product,
    Times,
    block_products,
    block_times,
    hidden,
    rate_of,
    travel,
    waiting,
)
from minidist.planning.plans.estimate import WHOLE, Step, TimedPipeline, simulated


def slow_machine(**more):
    return Machine(8, 2, **({"flops": 1.0, "memory": 1.0, "link": 2.0, "network": 1.0} | more))


def test_a_product_takes_the_slower_of_its_two_rates():
    one = Product(2, 3, 4)  # 48 operations; 6 + 12 + 8 numbers
    assert one.seconds(slow_machine(flops=4.0, memory_bandwidth=52.0), 2) == 12
    assert one.seconds(slow_machine(flops=48.0, memory_bandwidth=2.0), 2) == 26


def test_backward_is_twice_forward_and_what_runs_again():
    size = TransformerSize(1, 8, 2, 4, 5)
    weights, scores = (sum(x.flops for x in each) for each in block_products(size, Plan(), 1))
    assert (weights, scores) == (2 * 4 * 12 * 8 * 8, 2 * 2 * 4 * 4 * 8)
    for recompute, again in (("none", 0), ("selective", scores), ("full", weights + scores)):
        found = block_times(size, Plan(recompute=recompute), slow_machine(), 1)["products"]
        assert found.forward == weights + scores and found.weights == weights
        assert found.inputs == weights + 2 * scores + again


def test_what_is_no_product_moves_its_numbers():
    """T = 4, C = 8 of 2 bytes at 2 bytes a second: norms and residual sums, gelu, 2 heads' scores.

    Forward reads and writes a norm and a gelu, backward reads two arrays and writes one; the sum of
    a residual is three arrays both times.
    """
    size, slow = TransformerSize(1, 8, 2, 4, 5), slow_machine(memory_bandwidth=2.0)
    X, scores = 4 * 8, 2 * 4 * 4

    def times(rows, hidden, scores, again=0):
        forward = (2 * 2 + 2 * 3) * rows + 2 * hidden + 2 * scores
        backward = (2 * 3 + 2 * 3) * rows + 3 * hidden + 3 * scores
        return Times(forward, backward + again * forward)

    def found(given=size, **plan):
        return block_times(given, Plan(**plan), slow, 1)["element-wise"]

    assert found() == times(X, 4 * X, scores)
    assert found(recompute="full") == times(X, 4 * X, scores, again=1)
    assert found(tp=2) == times(X, 2 * X, scores / 2)
    assert found(tp=2, sequence=True) == times(X / 2, 2 * X, scores / 2)
    assert found(cp=2) == times(X / 2, 2 * X, scores / 2)
    long = TransformerSize(1, 8, 2, 256, 5)
    assert found(long) == times(64 * X, 4 * 64 * X, 0), "long rows of scores stay in tiles"


def test_a_product_has_the_share_of_its_smallest_dimension():
    by_shape = slow_machine(flops=2.0, efficiency=((4, 0.25), (8, 0.5)))
    for rows, share in ((1, 0.25), (4, 0.25), (6, 0.375), (8, 0.5), (100, 0.5)):
        one = Product(rows, 100, 100)
        assert one.seconds(by_shape, 2) == one.flops / (2 * share)
    assert Product(5, 6, 7).seconds(slow_machine(efficiency=0.5), 2) == 2 * 420


def test_ring_attention_has_the_queries_of_its_positions_and_all_keys():
    _, (scores, mixture) = block_products(TransformerSize(1, 8, 2, 4, 5), Plan(cp=2), 1)
    assert scores == mixture == Product(2, 4, 4, 2)


def test_the_first_or_the_last_piece_has_nothing_to_hide_behind():
    assert (hidden(8, 4, 4), hidden(4, 8, 4), hidden(8, 0, 4)) == (9, 9, 8)


def test_an_axis_is_inside_a_node_if_the_inner_axes_leave_room():
    assert rate_of("dp", Plan(dp=2), slow_machine()) == 2
    assert rate_of("dp", Plan(dp=2, tp=2), slow_machine()) == 1


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


def test_a_message_between_stages_is_cut_by_the_sequence():
    """3 examples of 4 positions and width 8, in 2 bytes; half of it on each of 2 ranks."""
    size, plan = replace(SIZE, tied=False), Plan(pp=2, tp=2, micro_batches=2, sequence=True)
    for one, nbytes in ((replace(plan, sequence=False), 3 * 4 * 8 * 2), (plan, 3 * 4 * 8)):
        step = Step(size, one, machine(4), 6)
        assert step.delay() == nbytes
        assert step.links()["pp"] == 2 * 2 * nbytes / 2 == traffic(size, one, 6)["pp"][0]


@pytest.mark.parametrize("schedule, chunks", [("1f1b", 1), ("zb_v", 2), ("looped_bfs", 3)])
@pytest.mark.parametrize("tied", [False, True])
def test_links_between_stages_are_in_use_for_all_that_is_sent(schedule, chunks, tied):
    size = TransformerSize(4, 8, 2, 4, 50, tied)
    for p, tp in ((1, 1), (2, 1), (2, 2), (3, 1)):
        if p * chunks <= 6 and (p > 1 or chunks == 1):
            plan = Plan(pp=p, tp=tp, micro_batches=p, schedule=schedule, chunks=chunks)
            found = seconds(size, plan, machine(p * tp), p)
            assert found.communication["pp"] == traffic(size, plan, p)["pp"][0]


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


ORDERS = [("gpipe", 1), ("1f1b", 1), ("zb_h1", 1), ("zb_h2", 1), ("interleaved", 2)]
ORDERS += [("looped_bfs", 2), ("interleaved_zb", 2), ("zb_v", 2), ("v_half", 2), ("dualpipe_v", 2)]


@st.composite
def pipelines(draw):
    """Draw stages as a plan has them: equal, but for one more block each and a head at the end."""
    schedule, v = draw(st.sampled_from(ORDERS))
    p, whole = draw(st.integers(1, 3)), st.integers(1, 6)
    block = [Fraction(draw(whole)) for _ in range(3)]
    blocks = draw(st.integers(1, 3))
    longer = draw(st.integers(0, p * v - 1))
    head = Fraction(draw(st.integers(0, 6)), 2)
    stages = [blocks + (k >= p * v - longer) for k in range(p * v)]
    times = [tuple(n * t + head * (k == p * v - 1) for k, n in enumerate(stages)) for t in block]
    reduce = tuple(Fraction(n) for n in stages)
    return TimedPipeline(schedule, p, v, *times, Fraction(draw(st.integers(0, 2)), 2), reduce)


@settings(max_examples=20)
@given(pipelines(), st.integers(1, 3), st.integers(0, 2))
def test_a_long_batch_takes_what_its_simulation_says(pipeline, more, rest):
    p = pipeline.p
    m = (WHOLE + more) * p
    m += rest % p if pipeline.schedule not in ("interleaved", "interleaved_zb") else 0
    assert pipeline.makespan(m) == simulated(pipeline, m)
