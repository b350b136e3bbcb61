"""Programs as a value: valid ones run on real ranks; others are refused before a rank starts."""

from unittest import mock

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from minidist import nn
from minidist.errors import CollectiveMismatch
from minidist.nn.datasets import Batch
from minidist.pipeline_parallel import Pipeline, add_communication, programs, validate
from minidist.pipeline_parallel.actions import Forward, Programs, micro_batches_of
from minidist.pipeline_parallel.schedules import order_of
from minidist.verify import equivalence
from minidist.verify.strategies import Case
from minidist.verify.strategies.pipeline_parallel import drawn
from tests.pipeline_parallel.training import (
    assert_equals_one_device,
    mlp_case,
    transformer_case,
)
from tests.strategies import assert_same_bits, linear_extensions, seeds


def stages_of(made):
    return 1 + max(k for own in made.placement for k in own)


def assert_any_order_is_right(cluster, programs_, p, seed, data):
    """Run programs that were drawn; draw the model, and how transfers are added."""
    stages = stages_of(programs_)
    event(f"{stages} stages on {p} ranks")
    if data.draw(st.booleans()):
        case = mlp_case([5, *[4] * stages, 3], data.draw(st.integers(1, 5)), seed)
    else:
        case = transformer_case(max(0, stages - 2), 4, seed, tied=True, dropout=0.2)
    communicate = data.draw(st.sampled_from(["by itself", "rendezvous", "given"]))
    options = {"recompute": data.draw(st.booleans()), "rendezvous_safe": communicate[0] == "r"}
    made = add_communication(programs_) if communicate == "given" else programs_
    assert_equals_one_device(cluster(p), case, 1, schedule=made, **options)


@settings(max_examples=10)
@given(drawn=linear_extensions(max_p=3, max_m=3), seed=seeds, data=st.data())
def test_any_order_and_placement_leaves_what_one_device_does(cluster, drawn, seed, data):
    assert_any_order_is_right(cluster, *drawn[:2], seed, data)


@pytest.mark.slow
@settings(max_examples=100)
@given(drawn=linear_extensions(max_p=4, max_m=6), seed=seeds, data=st.data())
def test_many_orders_and_placements_do(cluster, drawn, seed, data):
    assert_any_order_is_right(cluster, *drawn[:2], seed, data)


def weights_of(group, case, options):
    pipeline = Pipeline(case.model, group, **options)
    loss = pipeline.backward(Batch(case.inputs, case.targets))
    return loss, {name: p.grad for name, p in pipeline.named_parameters().items()}


@pytest.mark.parametrize("schedule, chunks", [("1f1b", 1), ("interleaved", 2), ("zb_v", 2)])
def test_the_programs_of_a_schedule_are_the_schedule_bit_for_bit(cluster, schedule, chunks):
    case = mlp_case([5, 4, 4, 4, 3], 6, 0)
    numbers = {"micro_batches": 4, "chunks": chunks}
    made = programs(schedule, 2, 4, chunks)
    by_name = cluster(2).run(weights_of, case, {"schedule": schedule, **numbers})
    for options in ({"schedule": made}, {"schedule": made, **numbers}):
        for got, want in zip(cluster(2).run(weights_of, case, options), by_name, strict=True):
            assert got[0] == want[0]
            assert_same_bits(got[1], want[1])


def wrong(made, change):
    made = Programs(made, made.placement)
    change(made)
    return made


ONE = programs("1f1b", 2, 3)


@pytest.mark.parametrize(
    "made, options, message",
    [
        (wrong(ONE, lambda x: x[1].pop()), {}, r"rank 1, action 4: F2 is the last .*\nrank 0"),
        (wrong(ONE, lambda x: x[0].reverse()), {}, r"rank 0, action 0: B2 must come after F .*\^"),
        (programs("1f1b", 3, 3), {}, "there are 3 programs for 2 ranks"),
        (ONE, {"micro_batches": 4}, "these programs are of 3 micro-batches, not 4; leave the numb"),
        (ONE, {"chunks": 2}, r"these programs have \[1, 1\] chunks, not 2; leave chunks out"),
        (ONE, {"weights_last": True}, "programs have no option 'weights_last'; a name has"),
        (Programs([[Forward(0)], []], [[0], []]), {}, r"rank 0, action 0: F0 is the last"),
        (
            Programs([[], []], [[0], []]),
            {},
            r"rank 1 holds the stages \[\]; a rank has one or more",
        ),
        (Programs([[], []], [[0], [-1]]), {}, r"rank 1 holds the stages \[-1\]; .* from 0"),
        (
            Programs([[], []], [[0], [10**9]]),
            {},
            "the programs of 2 ranks have no micro-batch",
        ),
        (programs("pipedream", 2, 3), {}, "a program updates the weights itself, .* use PipeDream"),
        (
            Programs([[a] for a in programs("gpipe", 1, 2)[0][:2]], [[0], [0]]),
            {},
            "F0 is the last of its micro-batch",
        ),
        (
            Programs([[*programs("gpipe", 1, 1)[0]], [Forward(1), ONE[1][3]]], [[0], [0]]),
            {},
            "2 ranks hold stage 0; replicas are PipeDream's, or the dp of Hybrid",
        ),
        (17, {}, "a schedule is a name or a list of programs, not 17"),
    ],
)
def test_what_cannot_be_run_is_refused_before_a_rank_starts(made, options, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        order_of(made, 2, **options)
    if options or made == 17:
        return
    case = mlp_case([5, 4, 4, 3], 6, 0)
    arguments = case.model, case.inputs, case.targets
    with mock.patch.object(equivalence, "Cluster", side_effect=AssertionError("a rank started")):
        with pytest.raises(ValueError, match=f"(?s){message}"):
            equivalence.gradients("pipeline", *arguments, 2, programs=made)


def one_pipeline(group, orders):
    model = nn.MLP([4, 4, 3], dtype="float64")
    Pipeline(model, group, orders[group.rank])


def test_ranks_with_different_programs_are_told(cluster):
    other = wrong(ONE, lambda x: x[0].sort(key=lambda a: a.sign, reverse=True))
    validate(other, 2, 3)
    with pytest.raises(CollectiveMismatch, match=r"programs [0-9a-f]{8}, 3 micro-batches"):
        cluster(2, "thread").run(one_pipeline, [ONE, other])


def test_a_hybrid_runs_programs_too(cluster):
    model = nn.Transformer(7, 4, 2, 3, 3, dtype="float64", tied=True)
    tokens, nexts = np.random.default_rng(0).integers(0, 7, (2, 6, 3))
    made = drawn(5, 2)
    options = {"dp": 2, "pp": 2, "schedule": made}
    case = Case("programs", model, tokens, nexts, options=options)
    row = equivalence.check("hybrid", case, 4, cluster(4, "thread"))
    assert row["ok"], row["detail"]


def test_a_drawn_order_is_valid_always_the_same_and_no_schedule():
    for ranks in (1, 2, 3, 4, 8):
        for layers in (ranks, 2 * ranks + 1, 40):
            made = drawn(layers, ranks)
            validate(made, ranks, micro_batches_of(made))
            again = drawn(layers, ranks)
            assert (made, made.placement) == (again, again.placement)
            assert ranks <= stages_of(made) <= layers
            assert ranks == 1 or made != drawn(layers, ranks, seed=1)
