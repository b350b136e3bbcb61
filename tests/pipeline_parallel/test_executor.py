"""The executor on real ranks, with stages that count: each parameter gets each micro-batch once."""

import numpy as np
import pytest
from hypothesis import given

from minidist.errors import CommError
from minidist.events import EventLog
from minidist.pipeline_parallel import add_communication, programs
from minidist.pipeline_parallel.actions import (
    BackwardWeight,
    Forward,
    RecvActivation,
    SendActivation,
    Transfer,
    Update,
    last_stage,
)
from minidist.pipeline_parallel.executor import execute, steps
from tests.strategies import every_program, linear_extensions


class CountingStage:
    """A stage whose activation of micro-batch i says "i, once": a one-hot array of m counts.

    Its parameter's gradient adds up what backward brings. What an update applies is added up too.
    """

    def __init__(self, first, last, m):
        self.first, self.last, self.m = first, last, m
        self.received, self.output_gradients = {}, {}
        self.outputs, self.given, self.deferred = {}, {}, {}
        self.gradient, self.applied = np.zeros(m, int), np.zeros(m, int)

    def one(self, i):
        return np.eye(self.m, dtype=int)[i]

    def forward(self, i):
        x = self.one(i) if self.first else self.received.pop(i)
        assert np.array_equal(x, self.one(i)) and i not in self.outputs
        self.outputs[i] = x

    def output(self, i):
        return self.outputs[i]

    def backward_input(self, i):
        dy = (
            self.outputs.pop(i) if self.last else self.output_gradients.pop(i) * self.outputs.pop(i)
        )
        self.given[i] = self.deferred[i] = dy

    def input_gradient(self, i):
        return self.given.pop(i)

    def backward_weights(self, micro_batches):
        for i in micro_batches:
            self.gradient += self.deferred.pop(i)

    def backward(self, i):
        self.backward_input(i)
        self.backward_weights([i])

    def update(self, i):
        self.applied += self.gradient
        self.gradient[:] = 0


def count(group, made, m):
    """Execute this rank's program of each; return what its parameters have at the end."""
    found = []
    for programs_of_all in made:
        own, last = programs_of_all.placement[group.rank], last_stage(programs_of_all.placement)
        stages = [CountingStage(k == 0, k == last, m) for k in own]
        execute(programs_of_all[group.rank], group, stages)
        for stage in stages:
            assert not (stage.outputs or stage.deferred or stage.received or stage.output_gradients)
        found.append([stage.gradient + stage.applied for stage in stages])
    return found


def assert_every_parameter_gets_every_micro_batch_once(ranks, made, m):
    found = ranks.run(count, made, m)
    for number, programs_of_all in enumerate(made):
        totals = {}
        for own, stages in zip(
            programs_of_all.placement, (mine[number] for mine in found), strict=True
        ):
            for k, total in zip(own, stages, strict=True):
                totals[k] = totals.get(k, 0) + total
        for k, total in totals.items():
            assert np.array_equal(total, np.ones(m, int)), (number, k, total)


@pytest.mark.parametrize(
    "p, ms",
    [
        *((p, (1, 4)) for p in range(1, 4)),
        *(pytest.param(p, (1, 2, 3, 7, 12), marks=pytest.mark.slow) for p in range(1, 7)),
    ],
)
def test_every_parameter_ends_with_every_micro_batch_once(cluster, p, ms):
    for m in ms:
        made = []
        for _, bare, _, _ in every_program([p], [m]):
            made += [add_communication(bare, rendezvous_safe=safe) for safe in (False, True)]
        assert_every_parameter_gets_every_micro_batch_once(cluster(p, "thread"), made, m)


@given(drawn=linear_extensions())
def test_programs_of_no_textbook_do_too(cluster, drawn):
    made, p, m = drawn
    full = add_communication(made)
    assert_every_parameter_gets_every_micro_batch_once(cluster(p, "thread"), [full], m)


def test_weight_halves_in_a_row_are_done_at_once_but_only_of_one_chunk():
    f, w = Forward, BackwardWeight
    program = [f(0), f(1), w(0), w(1), f(2), w(2), w(0, 1), w(1, 1), Update(2), Update(3)]
    runs = [" ".join(map(str, run)) for _, run in steps(program)]
    assert runs == ["F0", "F1", "W0 W1", "F2", "W2", "W0.1 W1.1", "U2", "U3"]
    assert all(run[0] is action for action, run in steps(program))


@pytest.mark.parametrize("transport", ["process"])
def test_the_log_has_an_event_per_action_named_like_it(cluster, transport):
    log, made = EventLog(), add_communication(programs("zb_h1", 2, 3))
    cluster(2, transport).run(count, [made], 3, log=log)
    for r in range(2):
        names = [e.name for e in log.events if e.rank == r and e.category == "compute"]
        compute = [a for a in made[r] if not isinstance(a, Transfer)]
        assert names == [" ".join(map(str, run)) for _, run in steps(compute)]
        moved = [e for e in log.events if e.rank == r and e.category == "communication"]
        assert len(moved) == 6 and sum(e.bytes for e in moved) == 3 * 3 * 8


# Faults in programs: a set that is not whole, or an error, never a hang.


def faulty(change, schedule="1f1b", p=3, m=4):
    made = add_communication(programs(schedule, p, m))
    change(made)
    return made


@pytest.mark.parametrize(
    "change, error",
    [
        (lambda made: made[0].remove(SendActivation(1, peer=1)), "waits in recv"),
        (lambda made: made[1].remove(RecvActivation(2, peer=0)), "KeyError: 2"),
        (lambda made: made[2].insert(0, RecvActivation(9, peer=1)), "waits in recv"),
    ],
    ids=["no send", "no receive", "a receive too many"],
)
def test_a_transfer_that_has_no_other_end_is_an_error_and_no_hang(cluster, change, error):
    with pytest.raises(CommError, match=error):
        cluster(3, "thread").run(count, [faulty(change)], 4, timeout=20)
