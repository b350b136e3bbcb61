"""R: where it is put, what is complete at it, and what it gains."""

from fractions import Fraction

import pytest
from hypothesis import given

from minidist import nn
from minidist.pipeline_parallel import add_communication, add_reductions, programs
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
