"""A pipeline where models, batches and callers are odd: unused, frozen, shared, refused."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist import Tensor, nn, run
from minidist.nn.datasets import Batch
from minidist.pipeline_parallel import Pipeline, add_communication, validate
from minidist.pipeline_parallel.actions import micro_batches_of
from minidist.verify import equivalence
from minidist.verify.strategies import Case, collect
from minidist.verify.strategies.pipeline_parallel import drawn
from tests.pipeline_parallel.training import (
    assert_equals_one_device,
    mlp_case,
    transformer_case,
)
from tests.strategies import (
    arrays,
    assert_same_bits,
    chunks_of,
    fitting,
    linear_extensions,
    seeds,
)


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


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_zb", "zb_v", "zb_auto"])
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
            assert_equals_one_device(cluster(2), case, 1, recompute=recompute, **options)


def test_a_frozen_tied_weight_is_neither_summed_nor_sent(cluster):
    def worker(group, case):
        pipeline = Pipeline(case.model, group, "1f1b", 2)
        pipeline.backward(Batch(case.inputs, case.targets))
        return list(pipeline.shared)

    case = transformer_case(0, 4, 3, tied=True, dropout=0.0)
    assert cluster(2).run(worker, case) == [["embedding.token.weight"]] * 2
    case.model.freeze("embedding.token.weight")
    assert cluster(2).run(worker, case) == [[], []]


@pytest.mark.parametrize("schedule, chunks", [("1f1b", 1), ("zb_v", 1)])
def test_the_bits_do_not_depend_on_who_is_faster(schedule, chunks):
    """Threads take turns in orders drawn from seeds."""

    def worker(group, case):
        pipeline = Pipeline(case.model, group, schedule, 4, chunks)
        loss = pipeline.backward(Batch(case.inputs, case.targets))
        return loss, {name: p.grad.copy() for name, p in pipeline.named_parameters().items()}

    case = mlp_case([3, 4, 5, 4, 3], 7, 0)
    want = run(worker, 2, case, transport="thread")
    for seed in range(4):
        found = run(worker, 2, case, transport="thread", interleaving=seed)
        for (loss, gradients), (wanted_loss, wanted) in zip(found, want, strict=True):
            assert loss == wanted_loss
            assert_same_bits(gradients, wanted)


class Identity(nn.Module):
    """A layer that returns what it is given, not a copy of it."""

    def forward(self, x, randomness=None):
        return x


@pytest.mark.parametrize("at", [0, 2])
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


def test_a_tied_weight_that_only_one_of_its_stages_uses_gets_that_ones_gradient(cluster):
    for user in (0, 1):
        layers = [Idle(3, "a"), Idle(3, "b")]
        layers[1 - user].unused = layers[user].weight
        case = Case("odd", nn.Sequential(layers), arrays(4, 3), np.array([0, 1, 2, 1]))
        assert_equals_one_device(cluster(2), case, 2, schedule="1f1b", micro_batches=2)


def stages_of(made):
    return 1 + max(k for own in made.placement for k in own)


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


@settings(max_examples=10)
@given(made=linear_extensions(max_p=3, max_m=3), seed=seeds, data=st.data())
def test_any_order_and_placement_leaves_what_one_device_does(cluster, made, seed, data):
    """Drawn are also the model, and how transfers are added."""
    made, p, _ = made
    stages = stages_of(made)
    if data.draw(st.booleans()):
        case = mlp_case([5, *[4] * stages, 3], data.draw(st.integers(1, 5)), seed)
    else:
        case = transformer_case(max(0, stages - 2), 4, seed, tied=True, dropout=0.2)
    communicate = data.draw(st.sampled_from(["by itself", "rendezvous", "given"]))
    options = {"recompute": data.draw(st.booleans()), "rendezvous_safe": communicate[0] == "r"}
    made = add_communication(made) if communicate == "given" else made
    assert_equals_one_device(cluster(p), case, 1, schedule=made, **options)
