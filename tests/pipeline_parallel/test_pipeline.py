"""A pipeline where models, batches and callers are odd: unused, frozen, shared, refused."""

from dataclasses import replace

import numpy as np
import pytest

from minidist import Tensor, nn, run
from minidist.errors import CollectiveMismatch, RankFailed
from minidist.nn.datasets import Batch
from minidist.pipeline_parallel import Pipeline, add_communication, programs
from minidist.verify.compare import compare
from minidist.verify.strategies import Case, collect, one_device
from tests.pipeline_parallel.training import (
    assert_equals_one_device,
    everyones,
    mlp_case,
    transformer_case,
)
from tests.strategies import SYNCHRONOUS, arrays, assert_same_bits, chunks_of, fitting


class Deaf(nn.Module):
    """A layer whose output does not depend on its input."""

    def __init__(self, width):
        self.weight = nn.module.draw("deaf.weight", (1, width), 1.0, 0, "float64")

    def forward(self, x, randomness=None):
        return self.weight * Tensor(np.ones((len(x.data), 1)))


class Idle(nn.Linear):
    """A linear layer with a parameter that it does not use."""

    def __init__(self, width, name):
        super().__init__(width, width, name=name, dtype="float64")
        self.unused = nn.module.draw(f"{name}.unused", (2, 2), 1.0, 0, "float64")


@pytest.mark.parametrize("schedule", SYNCHRONOUS)
def test_unused_parameters_have_no_gradient_and_a_stage_that_ignores_its_input_sends_zeros(
    cluster, schedule
):
    linear = nn.Linear(3, 3, name="first", activation="relu", dtype="float64")
    for layers in (
        [linear, Idle(3, "a"), Idle(3, "b"), Idle(3, "c")],
        [linear, Idle(3, "a"), Deaf(3), Idle(3, "c")],
    ):
        case = Case("odd", nn.Sequential(layers), arrays(4, 3), np.array([0, 1, 2, 1]))
        m = fitting(schedule, 2, 2)
        options = {"schedule": schedule, "micro_batches": m, "chunks": chunks_of(schedule)}
        for recompute in (False, True):
            more = {"recompute": recompute, **options}
            assert_equals_one_device(cluster(2), case, 1, **more)


def test_several_batches_add_up_before_a_step_also_in_a_tied_weight(cluster):
    """Gradients of two batches, without zero_grad between: the sum of both, each summed once."""

    def worker(group, case):
        pipeline = Pipeline(case.model, group, "1f1b", 2)
        for rows in (slice(0, 3), slice(3, 6)):
            pipeline.backward(Batch(case.inputs[rows], case.targets[rows]))
        return pipeline.named_parameters()["embedding.token.weight"].grad.copy()

    case = transformer_case(1, 6, 3, tied=True, dropout=0.0)
    want = cluster(1).run(worker, case)[0]
    first, middle, last = cluster(3).run(lambda group, case: safely(worker, group, case), case)
    assert middle is None
    np.testing.assert_allclose(first, want, rtol=1e-9, atol=1e-12)
    np.testing.assert_array_equal(first, last)


def safely(worker, group, case):
    try:
        return worker(group, case)
    except KeyError:
        return None


def test_a_frozen_tied_weight_is_neither_summed_nor_sent(cluster):
    def worker(group, case):
        pipeline = Pipeline(case.model, group, "1f1b", 2)
        pipeline.backward(Batch(case.inputs, case.targets))
        return list(pipeline.shared)

    case = transformer_case(0, 4, 3, tied=True, dropout=0.0)
    assert cluster(2).run(worker, case) == [["embedding.token.weight"]] * 2
    case.model.freeze("embedding.token.weight")
    assert cluster(2).run(worker, case) == [[], []]


def test_the_input_may_be_a_tensor_whose_gradient_is_wanted(cluster):
    def worker(group):
        x, model = Tensor(arrays(5, 3), requires_grad=True), nn.MLP([3, 4, 2], dtype="float64")
        loss = Pipeline(model, group, "1f1b", 3).backward(Batch(x, np.array([0, 1, 1, 0, 1])))
        return loss, x.grad

    ((want_loss, want),) = cluster(1).run(worker)
    (loss, got), (again, nothing) = cluster(2).run(worker)
    assert loss == again and nothing is None and loss == pytest.approx(want_loss, rel=1e-12)
    np.testing.assert_allclose(got, want, rtol=1e-12)


@pytest.mark.parametrize("schedule, chunks", [("1f1b", 1), ("interleaved", 2), ("zb_v", 1)])
def test_the_bits_do_not_depend_on_who_is_faster(schedule, chunks):
    """Threads take turns in orders drawn from seeds."""

    def worker(group, case):
        pipeline = Pipeline(case.model, group, schedule, 4, chunks)
        loss = pipeline.backward(Batch(case.inputs, case.targets))
        return loss, {name: p.grad.copy() for name, p in pipeline.named_parameters().items()}

    case = mlp_case([3, 4, 5, 4, 3], 7, 0)
    want = run(worker, 2, case, transport="thread")
    for seed in range(8):
        found = run(worker, 2, case, transport="thread", interleaving=seed)
        for (loss, gradients), (wanted_loss, wanted) in zip(found, want, strict=True):
            assert loss == wanted_loss
            assert_same_bits(gradients, wanted)


def test_two_pipelines_on_the_halves_of_a_group_do_not_touch_each_other(cluster):
    def worker(group, cases):
        half = group.split(group.rank // 2)
        case = cases[group.rank // 2]
        pipeline = Pipeline(case.model, half, "zb_h1", 3)
        pipeline.backward(Batch(case.inputs, case.targets))
        return collect(pipeline.model)

    cases = [transformer_case(2, 5, seed, tied=True, dropout=0.0) for seed in (1, 2)]
    found = cluster(4).run(worker, cases)
    for case, parts in zip(cases, (found[:2], found[2:]), strict=True):
        verdict = compare(everyones(parts), one_device(case))
        assert verdict.ok, verdict


class Identity(nn.Module):
    """A layer that returns what it is given, not a copy of it."""

    def forward(self, x, randomness=None):
        return x


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_stage_that_returns_its_very_input_leaves_it_as_it_was(cluster, at):
    def worker(group, case):
        x = Tensor(case.inputs, requires_grad=True)
        Pipeline(case.model, group, "zb_h1", 1).run(
            [replace(part, inputs=x) for part in Batch(case.inputs, case.targets).micro_batches(1)]
        )
        return np.array_equal(x.data, case.inputs)

    layers = nn.MLP([3, 4, 3], "gelu", dtype="float64").layers
    layers.insert(at, Identity())
    case = Case("identity", nn.Sequential(layers), arrays(4, 3), np.array([0, 2, 1, 1]))
    assert_equals_one_device(cluster(3), case, 2, schedule="1f1b", micro_batches=2)
    assert cluster(3).run(worker, case) == [True] * 3


def test_where_the_examples_stand_in_the_data_set_is_passed_on_to_dropout(cluster):
    def worker(group, examples, step):
        model = nn.Transformer(5, 4, 2, 1, 3, dtype="float64", dropout=0.5)
        tokens = np.arange(12).reshape(4, 3) % 5
        pipeline = Pipeline(model, group, "gpipe", 2)
        return pipeline.backward(Batch(tokens, tokens, seed=1, step=step, examples=examples))

    def loss(size, *args):
        return cluster(size, "thread").run(worker, *args)[0]

    assert loss(1, None, 0) == pytest.approx(loss(2, np.arange(4), 0), rel=1e-12)
    assert loss(1, np.arange(4) + 7, 2) == pytest.approx(loss(2, np.arange(4) + 7, 2), rel=1e-12)
    assert abs(loss(1, None, 0) - loss(1, np.arange(4) + 7, 0)) > 1e-6
    assert abs(loss(1, None, 0) - loss(1, None, 1)) > 1e-6


def test_the_layers_of_other_ranks_are_not_kept(cluster):
    def worker(group):
        pipeline = Pipeline(nn.MLP([3, 4, 5, 2]), group, "1f1b", 2, cut=[range(2), range(2, 3)])
        return list(pipeline.named_parameters())

    first, last = cluster(2, "thread").run(worker)
    assert first == ["layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias"]
    assert last == ["layers.2.weight", "layers.2.bias"]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"schedule": "magic"}, "unknown schedule 'magic'"),
        ({"schedule": "gpipe", "micro_batches": 0}, "one or more micro-batches, not 0"),
        ({"schedule": "pipedream"}, "stage by stage; use PipeDream"),
        ({"schedule": "interleaved", "chunks": 2, "micro_batches": 3}, "use 4"),
        ({"schedule": "interleaved", "chunks": 2}, "cannot cut 3 layers into 4 stages; use at mo"),
        ({"cut": [range(1), range(2, 3)]}, "does not cut 3 layers into 2 contiguous stages"),
        ({"cut": [range(3)]}, "does not cut 3 layers into 2 contiguous stages"),
        ({"cut": [range(2, 3), range(2)]}, "in order"),
        ({"schedule": "1f1b", "chunks": 2}, "1f1b has at most 1 chunk per rank"),
        ({"weight_last": True}, "1f1b has no option 'weight_last'; it has weights_last"),
        ({"micro_batches": 10**12}, "2000000000000 forward passes, more than 1000000"),
    ],
)
def test_what_cannot_be_run_is_refused_with_a_reason(cluster, options, message):
    def worker(group):
        Pipeline(nn.MLP([3, 4, 5, 2]), group, **options)

    with pytest.raises(RankFailed, match=message) as caught:
        cluster(2, "thread").run(worker)
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_wrong_number_of_micro_batches_and_uneven_targets_are_refused(cluster):
    def worker(group, count):
        pipeline = Pipeline(nn.MLP([3, 4]), group, "gpipe", 4)
        pipeline.run(Batch(arrays(6, 3), np.zeros(6, int)).micro_batches(count))

    for count in (3, 5):
        with pytest.raises(RankFailed, match=f"the programs are for 4 micro-batches, not {count}"):
            cluster(1, "thread").run(worker, count)
    with pytest.raises(ValueError, match="1 micro-batch or more, not 0"):
        Batch(arrays(6, 3), np.zeros(6, int)).micro_batches(0)
    with pytest.raises(ValueError, match="6 inputs and 5 targets: they must agree"):
        Batch(arrays(6, 3), np.zeros(5, int)).micro_batches(2)


def test_the_total_of_a_micro_batch_is_what_counts_in_the_whole_batch():
    targets = np.array([[0, 1, 2], [2, -1, -1], [-1, -1, -1], [1, 0, -1]])
    assert [part.total for part in Batch(arrays(4, 3), targets).micro_batches(3)] == [6] * 3


@pytest.mark.parametrize(
    "batch, message",
    [
        (
            ([[1.0, 2.0, 3.0]], np.zeros(1, int)),
            "inputs are an array with a row per example, not l",
        ),
        ((np.zeros((1, 3)), [0]), "targets are an array with a row per example, not list"),
        ((np.array(1.0), np.zeros(1, int)), "inputs are an array with a row per example"),
        ((arrays(4, 3), np.zeros(4, int), 0, 0, [0, 1]), r"4 inputs and indices .* shape \[2\]"),
        (
            (arrays(4, 3), np.zeros(4, int), 0, 0, range(9)),
            r"4 inputs and indices .* shape \[9\]",
        ),
    ],
)
def test_a_batch_that_has_no_row_per_example_is_refused(batch, message):
    with pytest.raises(ValueError, match=message):
        Batch(*batch)


@pytest.mark.parametrize(
    "one, other",
    [
        ({}, {"cut": [range(2), range(2, 3)]}),
        ({}, {"schedule": "gpipe"}),
        ({}, {"micro_batches": 5}),
    ],
    ids=["cut", "schedule", "micro-batches"],
)
def test_ranks_that_do_not_cut_or_schedule_alike_are_told_so(cluster, one, other):
    """With costs that each rank measured for itself, a layer might belong to nobody."""

    def worker(group):
        options = other if group.rank else {"cut": [range(1), range(1, 3)], **one}
        Pipeline(nn.MLP([3, 4, 5, 2]), group, **{"schedule": "1f1b", "micro_batches": 4} | options)

    with pytest.raises(CollectiveMismatch, match=r"stages of \[1, 2\] layers"):
        cluster(2, "thread").run(worker)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_a_pipeline_can_be_used_again_after_an_exception_in_the_middle(cluster, schedule):
    def worker(group, fails):
        pipeline = Pipeline(nn.MLP([3, 4, 2], dtype="float64"), group, schedule, 4)
        (stage,) = pipeline.stages
        x, y = arrays(8, 3), np.array([0, 1, 1, 0, 0, 0, 1, 1])
        if fails:
            with pytest.raises(ValueError, match="target 9 is outside the 2 classes"):
                pipeline.backward(Batch(x, np.where(np.arange(8) == 4, 9, y)))
            stage.peak = 0
            for p in pipeline.parameters():
                p.grad = None
        loss = pipeline.backward(Batch(x, y))
        left = stage.received, stage.output_gradients, stage.inputs, stage.outputs, stage.deferred
        assert not any(left) and stage.peak == 1
        return loss, collect(pipeline.model)

    ((loss, got),) = cluster(1, "thread").run(worker, True)
    ((wanted_loss, want),) = cluster(1, "thread").run(worker, False)
    assert loss == wanted_loss
    assert_same_bits(got, want)


@pytest.mark.parametrize("user", [0, 1])
def test_a_tied_weight_that_only_one_of_its_stages_uses_gets_that_ones_gradient(cluster, user):
    layers = [Idle(3, "a"), Idle(3, "b")]
    layers[1 - user].unused = layers[user].weight
    case = Case("odd", nn.Sequential(layers), arrays(4, 3), np.array([0, 1, 2, 1]))
    assert_equals_one_device(cluster(2), case, 2, schedule="1f1b", micro_batches=2)


@pytest.mark.parametrize("safe", [False, True])
def test_a_pipeline_has_the_transfers_that_were_asked_for(cluster, safe):
    def worker(group):
        return Pipeline(nn.MLP([3, 4, 2]), group, "1f1b", 3, rendezvous_safe=safe).programs

    want = add_communication(programs("1f1b", 2, 3), rendezvous_safe=safe)
    assert cluster(2, "thread").run(worker) == [want] * 2


@pytest.mark.parametrize("recompute", [False, True])
def test_a_first_stage_of_tokens_alone_is_refused(cluster, recompute):
    def worker(group):
        case = transformer_case(2, 4, 0, False, 0.0)
        cut = [range(0), range(len(case.model.layers))]
        pipeline = Pipeline(case.model, group, micro_batches=2, cut=cut, recompute=recompute)
        pipeline.backward(Batch(case.inputs, case.targets))

    with pytest.raises(RankFailed, match="no gradient passes a stage of tokens alone; give it the"):
        cluster(2, "thread").run(worker)
