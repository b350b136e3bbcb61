"""Mistakes and faults on real ranks: each must turn the comparison with one device, the replay, or
the versions red.

A fault is a context around what a rank does: a mistake of the register, or what the register cannot
hold: programs, which are data, and a group whose messages are not what they should be.
"""

from contextlib import contextmanager, nullcontext
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

from minidist import nn
from minidist.pipeline_parallel import add_communication, pipeline, programs, validate
from minidist.pipeline_parallel.actions import BackwardWeight, Programs
from minidist.tools.strategies import Case
from minidist.tools.strategies.pipeline_parallel import pipeline_bytes
from minidist.tools.strategies.pipeline_parallel import pipeline_worker as judged_worker
from tests.pipeline_parallel import test_pipedream, training
from tests.planted import planted
from tests.strategies import arrays


def within(fault, group):
    """Return a context: of a fault, of a mistake by its name, or of nothing."""
    if isinstance(fault, str):
        return planted(fault)
    return fault(group) if fault else nullcontext()


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
        with within(fault, group):
            return training.pipeline_worker(group, *args)

    training.assert_equals_one_device(ranks, case, **options)
    with mock.patch.object(training, "pipeline_worker", worker):
        verdicts = {what: off for what, _, off in training.judge(ranks, case, **options)}
    assert verdicts["gradients of step 0"].error > 1e-3
    assert "differs on rank" in str(verdicts["gradients of step 0"])


@contextmanager
def two_tags_swapped(group):
    """A rank takes the first micro-batch for the second one and the other way round."""
    recv, swapped = group.recv, {0: 1 << 16, 1 << 16: 0}
    group.recv = lambda source, tag=0: recv(source, swapped.get(tag, tag))
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


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
@pytest.mark.parametrize(
    "fault",
    [
        "receive_buffer_reused",
        "gradients_of_another_micro_batch",
        "missing_one_over_m",
        "doubled_one_over_m",
        two_tags_swapped,
        with_programs(the_last_micro_batch_skipped),
        with_programs(an_empty_schedule),
    ],
    ids=lambda fault: getattr(fault, "__name__", fault),
)
def test_a_fault_is_found(cluster, fault, schedule):
    assert_found(cluster(3), fault, mlp_case(), schedule=schedule, micro_batches=3)


@pytest.mark.parametrize("schedule", ["zb_h1", "zb_h2", "zb_v"])
def test_a_weight_half_that_is_forgotten_is_found(cluster, schedule):
    fault = with_programs(a_weight_half_forgotten)
    assert_found(cluster(2), fault, mlp_case(), schedule=schedule, micro_batches=3)


def test_validate_finds_the_faults_of_programs_before_they_run():
    made = programs("zb_h1", 3, 4)
    for change in (the_last_micro_batch_skipped, an_empty_schedule, a_weight_half_forgotten):
        with pytest.raises(ValueError, match=r"rank \d, action \d+: "):
            validate(Programs([change(program) for program in made], made.placement), 3, 4)


@pytest.mark.parametrize("name", ["untied_embedding", "tied_embedding_summed_twice"])
def test_a_tied_embedding_that_is_summed_twice_or_not_at_all_is_found(cluster, name):
    assert_found(cluster(3), name, tied_case(), schedule="1f1b", micro_batches=3)


@pytest.mark.parametrize("p", [1, 2])
def test_dropout_masks_drawn_by_place_in_the_micro_batch_are_found(cluster, p):
    name, case = "masks_by_place_in_the_micro_batch", tied_case(dropout=0.3)
    assert_found(cluster(p), name, case, schedule="gpipe", micro_batches=3)


# Faults of versions. The replay and the formula each see what the other one cannot.


def pipedream_found(ranks, fault, scheme="weight_stashing"):
    """Return (are the versions the formula's, is the replay equal to the bit) under a fault."""
    sound = test_pipedream.train

    def worker(group, *args):
        with within(fault, group):
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


@pytest.mark.parametrize(
    "fault, as_told, replayed",
    [
        (None, True, True),
        ("unstashed_weights", False, False),
        ("older_version", False, True),
        ("version_of_another_number", True, False),
        ("gradients_applied_again", True, False),
    ],
)
def test_a_mistake_of_versions_is_found(cluster, fault, as_told, replayed):
    assert pipedream_found(cluster(3), fault) == (as_told, replayed)


# Faults that only the ledger, or only the values, show.


def judged(ranks, fault, schedule="1f1b"):
    """Return (are the gradients right, are the bytes the formula's)."""

    def worker(group, case):
        with within(fault, group):
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
        (None, (True, True)),
        (everything_sent_twice, (True, False)),
        (rounded_on_the_way, (False, False)),
        (two_tags_swapped, (False, True)),
    ],
)
def test_bytes_and_values_each_show_their_own_faults(cluster, fault, want):
    assert judged(cluster(2), fault) == want
