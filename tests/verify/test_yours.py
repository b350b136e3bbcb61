"""What a reader has written is certified, and what is wrong in it is named."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from minidist import Mesh, Tensor, nn, verify
from minidist.data_parallel.replicated import DataParallel
from minidist.data_parallel.zero import Zero
from minidist.errors import CommTimeout, Deadlock, RankFailed
from minidist.hybrid import Hybrid
from minidist.pipeline_parallel import Pipeline
from minidist.verify.equivalence import Certificate
from tests.strategies import arrays

ROOT = Path(__file__).parents[2]
certify = partial(verify.certify, transport="thread")


def right(model, group):
    for p in model.parameters():
        p.grad = group.all_reduce(np.zeros(p.shape) if p.grad is None else p.grad)


def averaged(model, group):
    right(model, group)
    for p in model.parameters():
        p.grad = p.grad / group.size


def forgetful(model, group):
    for p in model.parameters()[1:]:
        p.grad = group.all_reduce(np.zeros(p.shape) if p.grad is None else p.grad)


def majority(model, group):
    """signSGD with majority vote: Bernstein et al. 2018, algorithm 3."""
    for p in model.parameters():
        p.grad = np.sign(group.all_reduce(np.sign(np.zeros(p.shape) if p.grad is None else p.grad)))


def majority_on_one_device(parts):
    return {name: np.sign(sum(np.sign(part[name]) for part in parts)) for name in parts[0]}


def worker(group, model, inputs, targets):
    mine = np.array_split(np.arange(len(inputs)), group.size)[group.rank]
    nn.cross_entropy(model(inputs[mine]), targets[mine], reduction_size=len(inputs)).backward()
    right(model, group)
    return {name: p.grad for name, p in model.named_parameters().items()}


def mlp():
    return nn.MLP([6, 9, 5, 3], "gelu", dtype="float64"), arrays(7, 6), np.arange(7) % 3


def test_a_sum_is_exact_on_the_packages_cases():
    found = certify(right)
    assert found.ok and found.promise == "exact" and len(found.evidence) == 3 * 5
    assert str(found).splitlines()[0] == "right: exact, ok"


@pytest.mark.parametrize(
    "wrong, words",
    [
        (averaged, "got/want = 0.25; ratio 0.25 = 1 / number of"),
        (forgetful, "the all_reduce is missing"),
    ],
)
def test_a_mistake_is_named_with_parameter_rank_and_cause(wrong, words):
    found = certify(wrong, *mlp())
    assert not found.ok
    assert "layers.0.weight differs on rank 0" in str(found) and words in str(found)
    with pytest.raises(AssertionError, match="FAILED"):
        found.check()


A_TEST = """
from tests.verify.test_yours import certify, averaged, mlp

def test_ok():
    assert certify(averaged, *mlp()).ok

def test_itself():
    assert certify(averaged, *mlp())
"""


def test_a_failing_assertion_shows_strategy_case_parameter_rank_ratio_and_cause(tmp_path):
    (tmp_path / "test_averaged.py").write_text(A_TEST)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", os.devnull]
    run = subprocess.run(
        [*command, "--rootdir", tmp_path, tmp_path],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
    )
    words = (
        "averaged: exact, FAILED; MLP, 7 examples: layers.0.weight differs on rank 0: largest "
        "error 7.5e-01 (bound 1e-09), got/want = 0.25; ratio 0.25 = 1 / number of data-parallel"
    )
    assert f"where False = {words}" in run.stdout and f"assert {words}" in run.stdout, run.stdout


def test_the_repr_is_cut_at_its_end():
    row = {"ok": False, "case": "MLP", "detail": "w differs on rank 3; " + "why " * 99}
    found = repr(Certificate("mine", "exact", [row | {"ok": True, "case": "other"}, row]))
    assert (
        found.startswith("mine: exact, FAILED; MLP: w differs on rank 3; why") and len(found) < 241
    )


def test_signs_by_majority_are_what_a_replay_says_bit_for_bit():
    found = certify(majority, replay=majority_on_one_device)
    assert found.ok and found.promise == "replayed bitwise"
    assert not certify(majority, *mlp()).ok  # they are no gradient
    one_more = certify(majority, *mlp(), replay=lambda parts: majority_on_one_device(parts[1:]))
    assert not one_more.ok


class ErrorFeedback:
    """Scaled signs; what they leave out is added to the next batch (Karimireddy et al. 2019)."""

    def __init__(self):
        self.error = {}

    def sent(self, key, gradient):
        wanted = gradient + self.error.get(key, 0.0)
        sign = np.abs(wanted).mean() * np.sign(wanted)
        self.error[key] = wanted - sign
        return sign


class Reduce(ErrorFeedback):
    def __call__(self, model, group):
        for p in model.parameters():
            g = np.zeros(p.shape) if p.grad is None else p.grad
            p.grad = sum(group.all_gather(self.sent(p.name, g)[None]))


class Replay(ErrorFeedback):
    def __call__(self, parts):
        return {n: sum(self.sent((n, r), one[n]) for r, one in enumerate(parts)) for n in parts[0]}


def test_a_replay_remembers_within_a_case_and_nothing_from_case_to_case():
    remembers = Replay()
    for replay in (remembers, lambda parts: remembers(parts)):  # an object, and a closure
        found = certify(Reduce(), replay=replay)
        assert found.ok and len(found.evidence) == 3 * 5
    assert not remembers.error
    forgets = certify(Reduce(), *mlp(), replay=lambda parts: Replay()(parts))
    assert "only in the second of two batches" in str(forgets)


def doubled(outputs, targets, reduction_size=None):
    loss = nn.squared_error(outputs, targets, reduction_size=reduction_size)
    return loss + loss


def scaled_by_three(outputs, targets, reduction_size=None):
    return 3 * nn.cross_entropy(outputs, targets, reduction_size)


TRAINERS = {
    "DataParallel": DataParallel,
    **{f"Zero {stage}": partial(Zero, stage=stage) for stage in (1, 2, 3)},
    "Pipeline": partial(Pipeline, schedule="1f1b", micro_batches=3),
}


@pytest.mark.parametrize("name", TRAINERS)
def test_every_trainer_takes_the_loss_that_is_asked_for(name):
    model, x, targets = nn.MLP([6, 9, 3], "gelu", dtype="float64"), arrays(7, 6), arrays(7, 3)
    assert certify(TRAINERS[name], model, x, targets, loss=doubled, size=2).ok
    model.loss = doubled
    assert certify(TRAINERS[name], model, x, targets, size=2).ok


def test_a_worker_takes_the_loss_of_its_model():
    def worker(group, model, inputs, targets):
        mine = np.array_split(np.arange(len(inputs)), group.size)[group.rank]
        model.loss(model(inputs[mine]), targets[mine], reduction_size=len(inputs)).backward()
        right(model, group)
        return {name: p.grad for name, p in model.named_parameters().items()}

    model, x, y = mlp()
    assert certify(worker, model, x, y, loss=scaled_by_three).ok


def test_a_mesh_refuses_another_loss_than_the_one_that_it_cuts():
    def on_mesh(model, group):
        return Hybrid(model, Mesh(group, dp=2, pp=1, cp=1, tp=1))

    tokens = np.arange(24).reshape(4, 6) % 11
    case = nn.Transformer(11, 8, 2, 1, 6, dtype="float64"), tokens, arrays(4, 6, 11)
    with pytest.raises(ValueError, match="train it by DataParallel, Zero or Pipeline"):
        certify(on_mesh, *case, trainer=True, size=2, loss=doubled)


def halves(model, group):
    """Send half of every gradient; leave that in p.grad."""
    for p in model.parameters():
        p.grad = group.all_reduce(p.grad / 2)


def test_an_identity_holds_or_does_not():
    def both(parts, found):
        kept = {name: sum(part[name] for part in parts) / 2 for name in parts[0]}
        there = {name: sum(part[name] for part in parts) for name in parts[0]}
        return {name: found[0][name] + kept[name] for name in kept}, there

    assert certify(halves, *mlp(), identity=both).ok
    assert not certify(right, *mlp(), identity=both).ok


def test_a_worker_returns_its_gradients():
    assert certify(worker, *mlp()).ok
    late = certify(lambda group, model, x, y: worker(group, model, x[:-1], y[:-1]), *mlp())
    assert not late.ok


def other_on(rank, change):
    """Return a worker whose gradients are changed on one rank."""

    def changed(group, model, inputs, targets):
        gradients = worker(group, model, inputs, targets)
        return change(gradients) if group.rank == rank else gradients

    return changed


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize(
    "change, words",
    [
        (lambda g: {}, "layers.0.weight is missing on rank"),
        (lambda g: g | {"layers.1.bias": np.zeros(3)}, r"layers.1.bias is [3], not [5], on rank"),
        (
            lambda g: g | {"layers.1.bias": np.full(5, np.nan)},
            "layers.1.bias is not finite on rank",
        ),
        (lambda g: g | {"layers.1.bias": None}, "layers.1.bias differs on rank"),
        (lambda g: g | {"layer.1.bias": np.zeros(5)}, "layer.1.bias is unexpected on rank"),
        (lambda g: g | {"layers.2.bias": -g["layers.2.bias"]}, "layers.2.bias differs on rank"),
    ],
)
def test_what_is_wrong_on_one_rank_only_is_named_with_that_rank(rank, change, words):
    found = certify(other_on(rank, change), *mlp())
    assert not found.ok and f"{words} {rank}" in str(found)


def test_an_input_gradient_that_one_rank_alone_returns_is_missing_on_the_others():
    found = certify(other_on(2, lambda g: g | {"(input)": np.zeros((7, 6))}), *mlp())
    assert not found.ok and "(input) is missing on rank 0" in str(found)


def test_a_worker_may_return_tensors_and_none_for_what_is_frozen():
    def tensors(group, model, inputs, targets):
        found = worker(group, model, inputs, targets)
        return {name: Tensor(g) for name, g in found.items()} | {"layers.0.bias": None}

    model, inputs, targets = mlp()
    assert not certify(tensors, model, inputs, targets).ok
    model.named_parameters()["layers.0.bias"].requires_grad = False
    assert certify(tensors, model, inputs, targets).ok
    assert certify(partial(Zero, stage=1), model, inputs, targets).ok


def test_statistics_that_a_trainer_does_not_hold_are_not_asked_of_it():
    cnn, x = nn.CNN(1, 3, (2,), dtype="float64"), arrays(4, 1, 4, 4)
    assert certify(partial(Zero, stage=1), cnn, x, np.arange(4) % 3, size=1).ok


def test_what_a_reduce_raises_is_never_a_case_left_out():
    def on_what_is_there(model, group):
        for p in model.parameters():
            group.all_reduce(p.grad, op="som")

    with pytest.raises(RankFailed, match="som"):
        certify(on_what_is_there)

    def on_one_rank(model, group):
        raise IndexError(f"rank {group.rank}") if group.rank == 2 else StopIteration

    with pytest.raises(RankFailed):
        certify(on_one_rank, *mlp())


def test_ranks_that_wait_are_a_deadlock_and_one_that_loops_is_ended():
    def waits(model, group):
        group.recv((group.rank + 1) % group.size)

    with pytest.raises(Deadlock):
        certify(waits, *mlp())

    def loops(model, group):
        while group:
            pass

    with pytest.raises(CommTimeout):
        verify.certify(loops, *mlp(), size=2, timeout=0.5)


class Late(Zero):
    """Leaves the last example out."""

    def backward(self, batch):
        return super().backward(batch.rows(np.arange(len(batch) - 1)))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_class_with_backward(stage):
    assert certify(partial(Zero, stage=stage), *mlp(), size=3).ok
    assert not certify(partial(Late, stage=stage), *mlp(), size=3).ok


def test_a_pipeline_holds_every_element_on_some_rank_and_says_what_it_refuses():
    found = certify(partial(Pipeline, schedule="1f1b", micro_batches=3))
    assert found.ok and len(found.evidence) == 12 and len(found.left_out) == 3
    assert str(found).startswith("Pipeline: exact, ok on 12 of 15 cases\n")
    assert "left out: MLP, 7 examples, 4 ranks: cannot cut 3 layers into 4 stages" in str(found)
    with pytest.raises(ValueError, match="cannot cut 3 layers into 4 stages"):
        certify(partial(Pipeline, schedule="1f1b", micro_batches=3), *mlp())


class Absent(Pipeline):
    def parameters(self):
        return super().parameters()[1:]


def test_elements_that_no_rank_has_are_counted():
    found = certify(partial(Absent, schedule="gpipe", micro_batches=2), *mlp(), size=2)
    assert "no rank has 54 elements of layers.0.weight" in str(found) and not found.ok


def test_a_function_that_makes_a_trainer():
    def on_mesh(model, group):
        return Hybrid(model, Mesh(group, dp=2, pp=1, cp=1, tp=2))

    tokens = np.arange(24).reshape(4, 6) % 11
    model = nn.Transformer(11, 8, 2, 2, 6, dtype="float64")
    assert certify(on_mesh, model, tokens, (tokens + 1) % 11, trainer=True).ok


def test_a_strategy_of_the_package_on_its_cases_or_the_readers():
    assert certify("naive", size=2).ok
    found = certify("gpipe", *mlp(), size=3, micro_batches=2)
    assert found.ok and len(found.evidence) == 1


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: certify(lambda model: None), "this one takes 1 argument"),
        (lambda: certify(3), "a name or a function, not 3"),
        (lambda: certify("nave"), "unknown strategy 'nave'"),
        (lambda: certify("naive", replay=majority_on_one_device), "promise of reduce"),
        (lambda: certify(worker, replay=majority_on_one_device), "promise of reduce"),
        (lambda: certify(right, mlp()[0]), "needs inputs"),
        (
            lambda: certify(right, *mlp(), chunks=2),
            "no option 'chunks'; give your own options by functools.partial",
        ),
        (lambda: certify(right, replay=len, identity=len), "replay, or else identity"),
        (lambda: certify(right, loss=nn.squared_error), "are of a model; give it"),
        (
            lambda: certify(lambda g, m, x, y: None, *mlp()),
            r"returns is \{name: array\}, not NoneT",
        ),
    ],
)
def test_what_is_no_strategy(call, words):
    with pytest.raises(ValueError, match=words):
        call()
