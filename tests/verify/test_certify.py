"""What a reader has written is certified, and what is wrong in it is named."""

import inspect
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
from minidist.pipeline_parallel import Pipeline, read
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


def trained_majority(model, group):
    for p in model.parameters():
        if p.requires_grad:
            p.grad = np.sign(group.all_reduce(np.sign(p.grad)))


def worker(group, model, inputs, targets):
    mine = np.array_split(np.arange(len(inputs)), group.size)[group.rank]
    model.loss(model(inputs[mine]), targets[mine], reduction_size=len(inputs)).backward()
    right(model, group)
    return {name: p.grad for name, p in model.named_parameters().items()}


def mlp():
    return nn.MLP([6, 9, 5, 3], "gelu", dtype="float64"), arrays(7, 6), np.arange(7) % 3


def details(found):
    assert not found.ok
    return "; ".join(row["detail"] for row in found.evidence)


def test_a_sum_is_exact_on_the_packages_cases():
    found = certify(right)
    assert found.ok and found.promise == "exact" and len(found.evidence) == 3 * 5
    assert str(found).splitlines()[0] == "right: exact, ok"
    assert {row["ranks"] for row in found.evidence} == {4, 3, 2}


def test_a_mistake_is_named_with_parameter_rank_and_cause():
    for wrong, words in {
        averaged: "got/want = 0.25; ratio 0.25 = 1 / number of",
        forgetful: "the all_reduce is missing",
    }.items():
        found = certify(wrong, *mlp())
        assert "layers.0.weight differs on rank 0" in details(found) and words in str(found)
        with pytest.raises(AssertionError, match="FAILED"):
            found.check()


A_TEST = """
from tests.verify.test_certify import certify, averaged, mlp

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
    row = {"ok": False, "case": "MLP", "detail": "w differs on rank 3; " + "why " * 99}
    assert len(repr(Certificate("mine", "exact", [row]))) < 241


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


def test_what_is_kept_from_the_batch_before_is_found():
    last = {}

    def remembers(model, group):
        right(model, group)
        for p in model.parameters():
            p.grad, last[p.name, group.rank] = last.get((p.name, group.rank), p.grad), p.grad

    said = details(certify(remembers, *mlp()))
    assert said.startswith("only in the second of two batches: layers.0.weight differs on rank 0")


def test_weights_that_change_are_found_in_a_reduce_and_in_what_trains():
    def moves(model, group):
        right(model, group)
        model.parameters()[1].data[...] += 1e-3

    words = "only an optimizer may change the weights, not layers.0.bias"
    assert details(certify(moves, *mlp())) == words

    class Steps(Zero):
        def backward(self, batch):
            loss = super().backward(batch)
            self.parameters()[0].data[...] += 1e-3
            return loss

    assert "change the weights, not " in details(certify(partial(Steps, stage=1), *mlp()))


def hypercube(model, group):
    """Right on 4 ranks, and only there."""
    for p in model.parameters():
        for bit in (1, 2):
            sent = group.isend(p.grad, group.rank ^ bit)
            other = group.recv(group.rank ^ bit)
            sent.wait()
            p.grad = p.grad + other


def test_without_a_model_fewer_ranks_are_tried_too():
    with pytest.raises(RankFailed, match="rank"):
        certify(hypercube)
    assert certify(hypercube, size=4).ok and certify(hypercube, *mlp()).ok


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


def test_a_replay_and_an_identity_are_of_what_is_trained():
    cnn = nn.CNN(1, 3, (2,), dtype="float64"), arrays(6, 1, 4, 4), np.arange(6) % 3
    assert certify(trained_majority, *cnn, replay=majority_on_one_device).ok

    def signs(parts, found):
        return majority_on_one_device(parts), found[0]

    assert certify(trained_majority, *cnn, identity=signs).ok


def doubled(outputs, targets, reduction_size=None):
    loss = nn.squared_error(outputs, targets, reduction_size=reduction_size)
    return loss + loss


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


class Late(Zero):
    """Leaves the last example out."""

    def backward(self, batch):
        return super().backward(batch.rows(np.arange(len(batch) - 1)))


class Absent(Pipeline):
    def parameters(self):
        return super().parameters()[1:]


class Empty:
    groups = ()

    def __init__(self, model, group):
        self.backward = self.parameters = lambda *batch: []


def test_a_class_with_backward():
    assert certify(partial(Zero, stage=3), *mlp(), size=3).ok
    assert not certify(partial(Late, stage=3), *mlp(), size=3).ok
    cnn, x = nn.CNN(1, 3, (2,), dtype="float64"), arrays(4, 1, 4, 4)  # it holds no statistics
    assert certify(partial(Zero, stage=1), cnn, x, np.arange(4) % 3, size=1).ok
    absent = certify(partial(Absent, schedule="gpipe", micro_batches=2), *mlp(), size=2)
    assert "no rank has 54 elements of layers.0.weight" in details(absent)
    (row,) = certify(Empty, *mlp()).evidence
    assert row["detail"].startswith("no rank has 54 elements of layers.0.weight, 9 elements of ")
    assert row["error"] == np.inf and "largest error" not in row["detail"]


def test_a_pipeline_holds_every_element_on_some_rank_and_says_what_it_refuses():
    found = certify(partial(Pipeline, schedule="1f1b", micro_batches=3))
    assert found.ok and len(found.evidence) == 12 and len(found.left_out) == 3
    assert str(found).startswith("Pipeline: exact, ok on 12 of 15 cases\n")
    assert "left out: MLP, 7 examples, 4 ranks: cannot cut 3 layers into 4 stages" in str(found)
    with pytest.raises(ValueError, match="cannot cut 3 layers into 4 stages"):
        certify(partial(Pipeline, schedule="1f1b", micro_batches=3), *mlp())


def test_a_function_that_makes_a_trainer():
    def on_mesh(model, group):
        return Hybrid(model, Mesh(group, dp=2, pp=1, cp=1, tp=group.size // 2))

    tokens = np.arange(24).reshape(4, 6) % 11
    model = nn.Transformer(11, 8, 2, 2, 6, dtype="float64")
    assert certify(on_mesh, model, tokens, (tokens + 1) % 11, trainer=True).ok
    with pytest.raises(ValueError, match="train it by DataParallel, Zero or Pipeline"):
        certify(on_mesh, model, tokens, arrays(4, 6, 11), trainer=True, size=2, loss=doubled)


def test_a_strategy_of_the_package_on_its_cases_or_the_readers():
    assert certify("naive", size=2).ok
    found = certify("gpipe", *mlp(), size=3, micro_batches=2)
    assert found.ok and len(found.evidence) == 1
    text = "rank 0  F0 F1 B0 B1 \n rank 1  F0 F1 I0 I1 W0 W1"
    assert certify("pipeline", *mlp(), size=2, programs=read(text)).ok
    assert certify(partial(Pipeline, schedule=read(text)), *mlp(), size=2).ok


def test_a_worker_returns_its_gradients():
    def tensors(group, model, inputs, targets):
        found = worker(group, model, inputs, targets)
        return {name: Tensor(g) for name, g in found.items()} | {"layers.0.bias": None}

    def scaled_by_three(outputs, targets, reduction_size=None):
        return 3 * nn.cross_entropy(outputs, targets, reduction_size)

    assert certify(worker, *mlp()).ok and certify(worker, *mlp(), loss=scaled_by_three).ok
    late = certify(lambda group, model, x, y: worker(group, model, x[:-1], y[:-1]), *mlp())
    assert not late.ok
    assert str(certify(worker, size=4)).startswith("worker: exact, ok on 2 of 5 cases\n")
    model, inputs, targets = mlp()
    assert not certify(tensors, model, inputs, targets).ok
    model.named_parameters()["layers.0.bias"].requires_grad = False
    assert certify(tensors, model, inputs, targets).ok


def test_a_parameter_frozen_by_hand_is_cast_with_the_others():
    model, inputs, targets = nn.MLP([6, 9, 5, 3], "gelu"), arrays(7, 6), np.arange(7) % 3
    model.named_parameters()["layers.0.bias"].requires_grad = False
    assert certify(partial(Zero, stage=1), model, inputs, targets).ok
    assert model.astype("float64").named_parameters()["layers.0.bias"].home is None


CHANGED = [  # on one rank
    (lambda g: {}, "layers.0.weight is missing on rank 2"),
    (lambda g: g | {"layers.1.bias": np.zeros(3)}, "layers.1.bias is [3], not [5], on rank 2"),
    (lambda g: g | {"layers.1.bias": np.full(5, np.nan)}, "layers.1.bias is not finite on rank 2"),
    (lambda g: g | {"layers.1.bias": None}, "layers.1.bias differs on rank 2"),
    (lambda g: g | {"layer.1.bias": np.zeros(5)}, "layer.1.bias is unexpected on rank 2"),
    (lambda g: g | {"layers.2.bias": -g["layers.2.bias"]}, "layers.2.bias differs on rank 2"),
    (lambda g: g | {"(input)": np.zeros((7, 6))}, "(input) is missing on rank 0"),
    (
        lambda g: g | {"layers.0.weight": g["layers.0.weight"] + 1j},
        "layers.0.weight is complex128, not real, on rank 2",
    ),
    (lambda g: g | {"layers.0.weight": 1.0}, "layers.0.weight is [], not [6, 9], on rank 2"),
]


def test_what_is_wrong_on_one_rank_only_is_named_with_that_rank():
    def changed(change, group, model, inputs, targets):
        gradients = worker(group, model, inputs, targets)
        return change(gradients) if group.rank == 2 else gradients

    for change, words in CHANGED:
        assert words in details(certify(partial(changed, change), *mlp()))


def test_what_is_returned_and_not_left_is_named():
    def returns(model, group):
        return {name: group.all_reduce(p.grad) for name, p in model.named_parameters().items()}

    def never_runs(model, group):
        yield

    def weights(group, model, inputs, targets):
        worker(group, model, inputs, targets)
        return model.named_parameters()

    for reduce, kind in ((returns, "dict"), (never_runs, "generator")):
        words = f"it returned a {kind}; it has to leave the sums in p.grad"
        assert words in details(certify(reduce, *mlp()))
    assert "it returned" not in details(certify(lambda model, group: [None], *mlp()))
    assert "these are the weights, not their gradients" in details(certify(weights, *mlp()))


def test_what_a_reduce_raises_is_never_a_case_left_out():
    def on_what_is_there(model, group):
        for p in model.parameters():
            group.all_reduce(p.grad, op="som")

    def on_one_rank(model, group):
        raise IndexError(f"rank {group.rank}") if group.rank == 2 else StopIteration

    with pytest.raises(RankFailed, match="som"):
        certify(on_what_is_there)
    with pytest.raises(RankFailed):
        certify(on_one_rank, *mlp())


def test_ranks_that_wait_are_a_deadlock_and_one_that_loops_is_ended_and_named():
    def waits(model, group):
        group.recv((group.rank + 1) % group.size)

    def rank_1_loops(model, group):
        while group.rank == 1:
            pass
        right(model, group)

    with pytest.raises(Deadlock):
        certify(waits, *mlp())
    assert inspect.signature(verify.certify).parameters["timeout"].default == 60
    with pytest.raises(CommTimeout, match=r"give a longer timeout=(.|\n)*rank 1: computes"):
        verify.certify(rank_1_loops, *mlp(), size=2, timeout=2)


MODEL, X, Y = mlp()


def with_a_frozen_bias():
    return mlp()[0].freeze("layers.1.bias"), X, Y


def plain(model, group):
    for p in model.parameters():
        p.grad = group.all_reduce(p.grad)


def replaying(replay):
    return certify(majority, MODEL, X, Y, replay=replay)


def identical(identity):
    return certify(right, MODEL, X, Y, identity=identity)


def one_side_of_one_name(parts, found):
    kept = dict(parts[0]) | {"layers.0.weight": found[0]["layers.0.weight"]}
    return kept, kept | {"layers.0.bias": parts[0]["layers.0.bias"]}


REFUSED = [
    (lambda: certify(lambda model: None), "this one takes 1 argument"),
    (lambda: certify(3), "a name or a function, not 3"),
    (lambda: certify("nave"), "unknown strategy 'nave'"),
    (lambda: certify("naive", replay=majority_on_one_device), "promise of reduce"),
    (
        lambda: certify(worker, MODEL, X, Y, replay=len),
        r"a promise of reduce\(model, group\): write a worker as one, for after each",
    ),
    (lambda: certify(right, MODEL), "needs inputs"),
    (
        lambda: certify(right, MODEL, X, Y, chunks=2),
        "no option 'chunks'; give your own options by functools.partial",
    ),
    (
        lambda: certify(right, MODEL, X, Y, reply=1),
        r"certify has no option 'reply'; did you mean replay=\?",
    ),
    (
        lambda: certify("gpipe", MODEL, X, Y, microbatches=2),
        r"gpipe has no option 'microbatches'; it has .*; did you mean micro_batches\?",
    ),
    (lambda: certify(right, replay=len, identity=len), "replay, or else identity"),
    (lambda: certify(right, loss=nn.squared_error), "are of a model; give it"),
    (lambda: certify(lambda g, m, x, y: None, *mlp()), r"returns is \{name: array\}, not NoneT"),
    (lambda: certify(right, MODEL, X[:, :4], Y), "needs 6 columns"),
    (lambda: certify(right, MODEL, X, Y[:5]), "7 inputs and 5 targets"),
    (lambda: certify(right, MODEL, X, Y * 1.0), "must be integers"),
    (lambda: certify(right, MODEL, X, Y + 5), "7 is outside the 3 classes"),
    (lambda: certify(right, MODEL, X[:0], Y[:0]), "none of 0 targets counts"),
    (
        lambda: certify(right, MODEL, X, Y, timeout="5"),
        "a timeout is a number of seconds above 0, or None, not '5'",
    ),
    (lambda: certify(right, nn.MLP, X, Y), "minidist, not the class MLP"),
    (lambda: certify(right, [6, 3], X, Y), "minidist, not list"),
    (lambda: replaying(lambda parts: None), "is {name: array}, not NoneT"),
    (
        lambda: replaying(lambda parts: {n: parts[0][n] for n in list(parts[0])[1:]}),
        "the replay lacks layers.0.weight",
    ),
    (
        lambda: replaying(lambda parts: parts[0] | {"z": X}),
        r"the replay's z\[7, 6\] is no trained parameter's",
    ),
    (
        lambda: replaying(lambda parts: dict.fromkeys(parts[0], 1.0)),
        r"the replay's layers.0.weight\[\] is no trained parameter's",
    ),
    (lambda: identical(lambda parts, found: parts[0]), "returns two sides, not dict"),
    (lambda: identical(lambda parts, found: (parts[0], parts[0])), "holds whatever the ranks have"),
    (lambda: identical(one_side_of_one_name), "holds whatever the ranks have"),
    (
        lambda: certify(plain, *with_a_frozen_bias()),
        "layers.1.bias is not trained, and its p.grad is None; skip it by `if p.requires_grad`",
    ),
]


def test_wrong_input_is_a_value_error_of_one_line():
    for call, message in REFUSED:
        with pytest.raises(ValueError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)
