"""R: where it is put, what is complete at it, and what it gains."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given

from minidist import nn
from minidist.nn.datasets import Batch
from minidist.pipeline_parallel import Pipeline, add_communication, add_reductions, programs
from minidist.pipeline_parallel.actions import (
    Backward,
    BackwardWeight,
    Programs,
    Reduce,
    communicates,
    updates,
)
from minidist.pipeline_parallel.reduction import complete_at
from minidist.pipeline_parallel.stage import Stage
from minidist.pipeline_parallel.validation import validate
from minidist.planning import simulate
from tests.planted import planted
from tests.strategies import linear_extensions, schedules, with_or_without_communication


def sums_last(made):
    """Return the programs with every R at the end: what a sum after the program does."""
    return Programs(
        [sorted(program, key=lambda a: isinstance(a, Reduce)) for program in made], made.placement
    )


@given(
    drawn=with_or_without_communication(schedules() | linear_extensions()).filter(
        lambda drawn: not updates(drawn[0])
    )
)
def test_every_chunk_gets_one_right_after_its_last_gradient(drawn):
    bare, p, m = drawn
    made = add_reductions(bare)
    validate(made, p, m)
    assert add_reductions(made) == made
    for before, after in zip(bare, made, strict=True):
        assert [a for a in after if not isinstance(a, Reduce)] == before
        for at, action in enumerate(after):
            if isinstance(action, Reduce):
                last = after[at - 1]
                assert isinstance(last, Backward | BackwardWeight) and last.chunk == action.chunk
    if not communicates(made):
        validate(add_communication(made, rendezvous_safe=True), p, m)
    validate(sums_last(made), p, m)


def test_a_sum_before_the_last_gradient_is_refused_with_its_place():
    with planted("sum_before_the_last_gradient"):
        made = add_reductions(programs("interleaved", 2, 2, 2))
    with pytest.raises(ValueError, match=r"R\.1 comes before B1\.1, whose gradient it sums"):
        validate(made, 2, 2)


def test_an_update_sums_its_gradients_itself():
    with pytest.raises(ValueError, match="an update sums the gradients of a stage's replicas"):
        add_reductions(programs("pipedream", 2, 2))


@pytest.mark.parametrize("p", range(1, 5))
@pytest.mark.parametrize("chunks", range(1, 4))
def test_breadth_first_chunks_hide_all_sums_but_one(p, chunks):
    """Of a sum that takes S per stage, S / v is seen if S <= m TB: the chunk behind hides one."""
    for m in (p, 3 * p):
        made = add_reductions(programs("looped_bfs", p, m, chunks))
        alone = simulate(made).makespan
        for S in (1, m, 2 * m):
            beside, after = (simulate(x, reduce=S) for x in (made, sums_last(made)))
            assert beside.makespan == alone + Fraction(S, chunks)
            assert after.makespan == alone + S
            assert beside.busy == after.busy == [3 * m] * p
            assert beside.bubble == 1 - Fraction(3 * m) / beside.makespan


@pytest.mark.parametrize("schedule", ["layer_split", "gpipe", "1f1b", "zb_h1", "zb_h2"])
def test_with_one_chunk_per_rank_nothing_is_gained(schedule):
    made = add_reductions(programs(schedule, 3, 6))
    assert made == sums_last(made)


def test_a_layer_is_complete_when_all_stages_that_use_its_parameters_are():
    """The first and the last share a weight, on one rank; a weight of `other` is elsewhere, too."""
    first, inner, other, last = (nn.Linear(2, 2, name=name) for name in "abcd")
    last.weight = first.weight  # it is in the first layer's flat vector
    nn.Sequential([first, inner, other, last])
    early, late = Stage([first, inner], True, False), Stage([other, last], False, True)
    waits = "an all_reduce is missing, only in `other`: it has the gradient of one of its uses"
    ready, left = complete_at([late, early], {other.weight})
    assert ready == {late: [last], early: []} and left == [other, first, inner], waits
    ready, left = complete_at([early, late], {other.weight})
    assert ready == {early: [inner], late: []} and left == [first, other, last], waits


def test_where_there_are_no_copies_nothing_is_summed(cluster):
    """A program from elsewhere may have R: it trains on ranks that have one copy of each stage."""

    def worker(group):
        model = nn.MLP([3, 4, 4, 4, 2], dtype="float64")
        made = add_reductions(programs("interleaved", 2, 2, 2))
        pipeline = Pipeline(model, group, made)
        pipeline.backward(Batch(np.ones((4, 3)), np.array([0, 1, 0, 1])))
        return {name: p.grad for name, p in pipeline.named_parameters().items()}, group.ledger.total

    found = {}
    for gradients, _ in cluster(2, "thread").run(worker):
        found |= gradients
    want = nn.MLP([3, 4, 4, 4, 2], dtype="float64")
    nn.cross_entropy(want(np.ones((4, 3))), np.array([0, 1, 0, 1])).backward()
    for name, p in want.named_parameters().items():
        np.testing.assert_allclose(found[name], p.grad, 1e-12, 1e-15)
