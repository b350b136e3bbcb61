"""Injected faults, on real processes: each must turn the comparison with one device, the replay, or
the versions red. A fault is a context around what a rank does.
"""

from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

from minidist import nn
from minidist.pipeline_parallel import add_communication, pipeline, validate
from minidist.pipeline_parallel.actions import BackwardWeight, Programs
from minidist.pipeline_parallel.stage import Stage
from minidist.pipeline_parallel.weight_versions import VersionedStage, WeightVersions
from minidist.rng import Randomness
from minidist.tools.strategies import Case
from minidist.tools.strategies.pipeline_parallel import pipeline_bytes
from minidist.tools.strategies.pipeline_parallel import pipeline_worker as judged_worker
from tests.pipeline_parallel import test_pipedream, training
from tests.strategies import arrays


def mlp_case(examples=6):
    model = nn.MLP([4, 5, 6, 5, 4, 3], "gelu", seed=1, dtype="float64")
    return Case("MLP", model, arrays(examples, 4), np.arange(examples) % 3)


def tied_case(dropout=0.0):
    model = nn.Transformer(7, 4, 2, 2, 3, seed=2, dtype="float64", tied=True, dropout=dropout)
    tokens, targets = np.random.default_rng(0).integers(0, 7, (2, 6, 3))
    return Case("Transformer", model, tokens, targets)


def assert_found(ranks, fault, case, **options):
    """Run without the fault, and with it: the gradients must be right, and then far off."""

    def worker(group, *args):
        with fault(group):
            return training.pipeline_worker(group, *args)

    training.assert_equals_one_device(ranks, case, **options)
    with mock.patch.object(training, "pipeline_worker", worker):
        verdicts = {what: off for what, _, off in training.judge(ranks, case, **options)}
    assert verdicts["gradients of step 0"].error > 1e-3
    assert "differs on rank" in str(verdicts["gradients of step 0"])


# Faults of the executor and the stages.


@contextmanager
def a_receive_buffer_that_is_reused(group):
    """What was received last is overwritten by what is received next."""
    kept, recv = {}, group.recv

    def into_the_same_buffer(source, tag=0):
        fresh = recv(source, tag)
        buffer = kept.setdefault((source, fresh.shape), fresh)
        buffer[...] = fresh
        return buffer

    group.recv = into_the_same_buffer
    yield


@contextmanager
def two_tags_swapped(group):
    """A rank takes the first micro-batch for the second one and the other way round."""
    recv, swapped = group.recv, {0: 1 << 16, 1 << 16: 0}
    group.recv = lambda source, tag=0: recv(source, swapped.get(tag, tag))
    yield


@contextmanager
def gradients_of_another_micro_batch(group):
    """The stash that backward finds is that of the micro-batch before."""
    sound = Stage._backward

    def stale(stage, i, later):
        if i == 1 and 0 in stage.outputs:
            stage.outputs[0], stage.outputs[1] = stage.outputs[1], stage.outputs[0]
        return sound(stage, i, later)

    def forward(stage, i, run=Stage.forward):
        run(stage, i)
        if i == 1 and 0 in stage.outputs and not stage.last:
            stage.outputs[0].creator, stage.outputs[1].creator = (
                stage.outputs[1].creator,
                stage.outputs[0].creator,
            )

    with mock.patch.object(Stage, "_backward", stale), mock.patch.object(Stage, "forward", forward):
        yield


def with_programs(change):
    """Return a fault that changes the programs before their transfers are added."""

    @contextmanager
    def fault(group):
        def changed(bare, safe=False):
            programs = Programs([change(program) for program in bare], bare.placement)
            return add_communication(programs, safe)

        with mock.patch.object(pipeline, "add_communication", changed):
            yield

    fault.__name__ = change.__name__
    return fault


def the_last_micro_batch_skipped(program):
    last = max(a.micro_batch for a in program)
    return [a for a in program if a.micro_batch != last]


def an_empty_schedule(program):
    return []


def a_weight_half_forgotten(program):
    weights = [a for a in program if isinstance(a, BackwardWeight)]
    return [a for a in program if a not in weights[-1:]]


# Faults of the scale.


def with_totals(total_of, name):
    """Return a fault in which the loss of a micro-batch divides by something else."""

    @contextmanager
    def fault(group):
        sound = training.micro_batches_of

        def wrong(case, m, step):
            return [replace(part, total=total_of(part, m) or 1) for part in sound(case, m, step)]

        with mock.patch.object(training, "micro_batches_of", wrong):
            yield

    fault.__name__ = name
    return fault


one_over_m_missing = with_totals(lambda part, m: part.targets.size, "one_over_m_missing")
one_over_m_twice = with_totals(lambda part, m: part.total * m, "one_over_m_twice")


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
@pytest.mark.parametrize(
    "fault",
    [
        a_receive_buffer_that_is_reused,
        two_tags_swapped,
        gradients_of_another_micro_batch,
        with_programs(the_last_micro_batch_skipped),
        with_programs(an_empty_schedule),
        one_over_m_missing,
        one_over_m_twice,
    ],
    ids=lambda fault: fault.__name__,
)
def test_a_fault_is_found(cluster, fault, schedule):
    assert_found(cluster(3), fault, mlp_case(), schedule=schedule, micro_batches=3)


@pytest.mark.parametrize("schedule", ["zb_h1", "zb_h2", "zb_v"])
def test_a_weight_half_that_is_forgotten_is_found(cluster, schedule):
    fault = with_programs(a_weight_half_forgotten)
    assert_found(cluster(2), fault, mlp_case(), schedule=schedule, micro_batches=3)


def test_validate_finds_the_faults_of_programs_before_they_run():
    made = pipeline.programs("zb_h1", 3, 4)
    for change in (the_last_micro_batch_skipped, an_empty_schedule, a_weight_half_forgotten):
        with pytest.raises(ValueError, match=r"rank \d, action \d+: "):
            validate(Programs([change(program) for program in made], made.placement), 3, 4)


# Faults of what is shared: tied weights, and the random numbers.


def with_shared_sum(sum_of, name):
    @contextmanager
    def fault(group):
        split = group.split

        def splitting(color, key=None):
            shared = split(color, key)
            if shared is not None:
                total = shared.all_reduce
                shared.all_reduce = lambda x, label=None: sum_of(total, x, label)
            return shared

        group.split = splitting
        yield

    fault.__name__ = name
    return fault


not_summed = with_shared_sum(lambda total, x, label: x.copy(), "not_summed")
summed_twice = with_shared_sum(
    lambda total, x, label: total(total(x, label=label), label=label), "summed_twice"
)


@pytest.mark.parametrize("fault", [not_summed, summed_twice], ids=lambda fault: fault.__name__)
def test_a_tied_embedding_that_is_summed_twice_or_not_at_all_is_found(cluster, fault):
    assert_found(cluster(3), fault, tied_case(), schedule="1f1b", micro_batches=3)


@contextmanager
def masks_by_position_in_the_micro_batch(group):
    sound = training.micro_batches_of

    def wrong(case, m, step):
        return [
            replace(part, randomness=Randomness(case.seed, step, np.arange(len(part.inputs))))
            for part in sound(case, m, step)
        ]

    with mock.patch.object(training, "micro_batches_of", wrong):
        yield


@pytest.mark.parametrize("p", [1, 2])
def test_dropout_masks_drawn_by_position_in_the_micro_batch_are_found(cluster, p):
    fault, case = masks_by_position_in_the_micro_batch, tied_case(dropout=0.3)
    assert_found(cluster(p), fault, case, schedule="gpipe", micro_batches=3)


# Faults of versions. The replay and the formula each see what the other one cannot.


def pipedream_found(ranks, fault, scheme="weight_stashing"):
    """Return (are the versions the formula's, is the replay equal to the bit) under a fault."""
    sound = test_pipedream.train

    def worker(group, *args):
        with fault(group):
            return sound(group, *args)

    case = mlp_case(14)
    with mock.patch.object(test_pipedream, "train", worker):
        found, got, want = test_pipedream.run_and_replay(ranks, case, scheme, 14)
    as_told = all(
        version == test_pipedream.formula(scheme, b, ranks.size, s, max(1, ranks.size - 1))
        for s, mine in enumerate(found)
        for _, b, version in mine["used"]
    )
    return as_told, all(np.array_equal(got[name], want[name]) for name in want)


@contextmanager
def no_fault(group):
    yield


@contextmanager
def updates_in_place_under_graphs_in_flight(group):
    """The weights are not stashed: backward finds newer ones than forward used."""
    sound = WeightVersions.__init__

    def without_stash(self, parameters, optimizer, choose, stash=True):
        sound(self, parameters, optimizer, choose, False)

    with mock.patch.object(WeightVersions, "__init__", without_stash):
        yield


@contextmanager
def a_version_older_than_it_should_be(group):
    """Forward uses the weights of one update ago; what it says of them is true."""
    sound = WeightVersions.__init__

    def late(self, parameters, optimizer, choose, stash=True):
        sound(self, parameters, optimizer, lambda b, newest: max(0, newest - 1), stash)

    with mock.patch.object(WeightVersions, "__init__", late):
        yield


@contextmanager
def a_version_that_is_not_the_one_it_says(group):
    """Forward uses the weights of one update ago, under the newest one's number."""
    sound = WeightVersions._use

    def lying(self, letter, b, buffer):
        older = getattr(self, "older", buffer)
        sound(self, letter, b, buffer)
        if letter == "F":
            self.flat.bind(older.weights)
            self.older = buffer

    with mock.patch.object(WeightVersions, "_use", lying):
        yield


@contextmanager
def a_gradient_applied_twice(group):
    """An update does not clear the gradients that it has applied."""

    def update(self, i):
        zero, self.weights.optimizer.zero_grad = self.weights.optimizer.zero_grad, lambda: None
        self.weights.update()
        self.weights.optimizer.zero_grad = zero

    with mock.patch.object(VersionedStage, "update", update):
        yield


@pytest.mark.parametrize(
    "fault, as_told, replayed",
    [
        (no_fault, True, True),
        (updates_in_place_under_graphs_in_flight, False, False),
        (a_version_older_than_it_should_be, False, True),
        (a_version_that_is_not_the_one_it_says, True, False),
        (a_gradient_applied_twice, True, False),
    ],
)
def test_a_fault_of_versions_is_found(cluster, fault, as_told, replayed):
    assert pipedream_found(cluster(3), fault) == (as_told, replayed)


# Faults that only the ledger, or only the values, show.


def judged(ranks, fault, schedule="1f1b"):
    """Return (are the gradients right, are the bytes the formula's)."""

    def worker(group, case):
        with fault(group):
            return judged_worker(group, case, schedule, micro_batches=3)

    case = replace(mlp_case(), options={"micro_batches": 3})
    outcomes = ranks.run(worker, case)
    want = training.single_device(case, 1)[0][0][1]
    verdict = training.compare([o.gradients for o in outcomes], want)
    return verdict.ok, sum(o.bytes for o in outcomes) == pipeline_bytes(case, ranks.size, schedule)


@contextmanager
def everything_sent_twice(group):
    send, recv = group.send, group.recv
    group.send = lambda x, to, tag=0: (send(x, to, tag), send(x, to, tag))
    group.recv = lambda source, tag=0: (recv(source, tag), recv(source, tag))[0]
    yield


@contextmanager
def rounded_on_the_way(group):
    send, recv = group.send, group.recv
    group.send = lambda x, to, tag=0: send(x.astype("float32"), to, tag)
    group.recv = lambda source, tag=0: recv(source, tag).astype("float64")
    yield


@pytest.mark.parametrize(
    "fault, want",
    [
        (no_fault, (True, True)),
        (everything_sent_twice, (True, False)),
        (rounded_on_the_way, (False, False)),
        (two_tags_swapped, (False, True)),
    ],
)
def test_bytes_and_values_each_show_their_own_faults(cluster, fault, want):
    assert judged(cluster(2), fault) == want
