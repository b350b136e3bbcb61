"""What one batch on four ranks does not show, and promises that promise nothing."""

import inspect
from functools import partial

import numpy as np
import pytest

from minidist import nn, verify
from minidist.data_parallel.zero import Zero
from minidist.errors import CommTimeout, RankFailed
from minidist.pipeline_parallel import Pipeline, read
from tests.strategies import arrays
from tests.verify.test_yours import certify, majority, majority_on_one_device, mlp, right, worker


def details(found):
    assert not found.ok
    return "; ".join(row["detail"] for row in found.evidence)


class Remembers:
    """A reduce that keeps the last sum: adds it to the next one, or gives it in its place."""

    def __init__(self, adds):
        self.adds, self.last = adds, {}

    def __call__(self, model, group):
        right(model, group)
        for name, p in model.named_parameters().items():
            now, before = p.grad, self.last.get(name, 0)
            p.grad = now + before if self.adds else before if name in self.last else now
            self.last[name] = now


@pytest.mark.parametrize("adds", [True, False])
def test_what_is_kept_from_the_batch_before_is_found(adds):
    said = details(certify(Remembers(adds), *mlp()))
    assert said.startswith("only in the second of two batches: layers.0.weight differs on rank 0")


def test_a_replay_that_remembers_what_the_strategy_does_is_kept():
    class Feedback:
        """Send the sign, and add what it left out to the next gradient: Seide et al. 2014."""

        def __init__(self):
            self.left = {}

        def sent(self, name, grad):
            whole = grad + self.left.get(name, 0)
            self.left[name] = whole - np.sign(whole)
            return np.sign(whole)

        def __call__(self, model, group):
            for name, p in model.named_parameters().items():
                p.grad = group.all_reduce(self.sent(name, p.grad))

    of_ranks = [Feedback() for _ in range(4)]

    def replay(parts):
        pairs = list(zip(of_ranks, parts, strict=True))
        return {name: sum(rank.sent(name, p[name]) for rank, p in pairs) for name in parts[0]}

    assert certify(Feedback(), *mlp(), replay=replay).ok
    assert "only in the second of two" in details(
        certify(Feedback(), *mlp(), replay=majority_without_the_last_sign)
    )


def majority_without_the_last_sign(parts):
    return {name: sum(np.sign(part[name]) for part in parts) for name in parts[0]}


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
    assert {row["ranks"] for row in certify(right).evidence} == {4, 3, 2}


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda g: g + 1j, "layers.0.weight is complex128, not real, on rank 0"),
        (lambda g: g.astype(str), "layers.0.weight is str.*, not real, on rank 0"),
        (lambda g: 1.0, r"layers.0.weight is \[\], not \[6, 9\], on rank 0"),
    ],
)
def test_what_is_no_real_number_is_no_gradient(change, words):
    def other(group, model, inputs, targets):
        gradients = worker(group, model, inputs, targets)
        return {name: change(g) for name, g in gradients.items()}

    with pytest.raises(AssertionError, match=words):
        certify(other, *mlp()).check()


def no_sides(parts, found):
    return parts[0], parts[0]


def one_side_of_one_name(parts, found):
    kept = dict(parts[0]) | {"layers.0.weight": found[0]["layers.0.weight"]}
    return kept, kept | {"layers.0.bias": parts[0]["layers.0.bias"]}


@pytest.mark.parametrize("identity", [no_sides, one_side_of_one_name])
def test_an_identity_that_holds_whatever_the_ranks_have_is_refused(identity):
    with pytest.raises(ValueError, match="holds whatever the ranks have"):
        certify(right, *mlp(), identity=identity)


def cnn():
    return nn.CNN(1, 3, (2,), dtype="float64"), arrays(6, 1, 4, 4), np.arange(6) % 3


def trained_majority(model, group):
    for p in model.parameters():
        if p.requires_grad:
            p.grad = np.sign(group.all_reduce(np.sign(p.grad)))


def test_a_replay_and_an_identity_are_of_what_is_trained():
    assert certify(trained_majority, *cnn(), replay=majority_on_one_device).ok

    def summed(parts, found):
        return {n: sum(np.sign(part[n]) for part in parts) for n in parts[0]}, found[0]

    def signs(model, group):
        for p in model.parameters():
            if p.requires_grad:
                p.grad = group.all_reduce(np.sign(p.grad))

    assert certify(signs, *cnn(), identity=summed).ok


@pytest.mark.parametrize("on_frozen", [majority, right])
def test_a_frozen_parameter_without_a_gradient_is_named_with_the_remedy(on_frozen):
    def plain(model, group):
        for p in model.parameters():
            p.grad = group.all_reduce(np.sign(p.grad) if on_frozen is majority else p.grad)

    model, inputs, targets = mlp()
    model.freeze("layers.1.bias")
    words = "layers.1.bias is not trained, and its p.grad is None; skip it by `if p.requires_grad`"
    with pytest.raises(ValueError, match=words) as caught:
        certify(plain, model, inputs, targets)
    assert str(caught.value).count("\n") == 0
    assert certify(trained_majority, model, inputs, targets, replay=majority_on_one_device).ok


def test_a_parameter_frozen_by_hand_is_cast_with_the_others():
    model, inputs, targets = nn.MLP([6, 9, 5, 3], "gelu"), arrays(7, 6), np.arange(7) % 3
    model.named_parameters()["layers.0.bias"].requires_grad = False
    assert certify(partial(Zero, stage=1), model, inputs, targets).ok
    assert model.astype("float64").named_parameters()["layers.0.bias"].home is None


def test_a_run_ends_by_itself_and_says_which_rank_computes():
    assert inspect.signature(verify.certify).parameters["timeout"].default == 60

    def rank_2_sleeps(model, group):
        while group.rank == 2:
            pass
        right(model, group)

    with pytest.raises(CommTimeout, match=r"give a longer timeout=(.|\n)*rank 2: computes"):
        verify.certify(rank_2_sleeps, *mlp(), timeout=3)


def returns(model, group):
    return {name: group.all_reduce(p.grad) for name, p in model.named_parameters().items()}


def never_runs(model, group):
    yield


@pytest.mark.parametrize("reduce, kind", [(returns, "dict"), (never_runs, "generator")])
def test_what_is_returned_and_not_left_is_named(reduce, kind):
    words = f"it returned a {kind}; it has to leave the sums in p.grad"
    assert words in details(certify(reduce, *mlp()))
    assert "it returned" not in details(certify(lambda model, group: [None], *mlp()))


def test_weights_that_are_returned_as_gradients_are_named():
    def weights(group, model, inputs, targets):
        worker(group, model, inputs, targets)
        return model.named_parameters()

    assert "these are the weights, not their gradients" in details(certify(weights, *mlp()))


def test_elements_that_no_rank_has_are_not_an_error_of_zero():
    class Empty:
        groups = ()

        def __init__(self, model, group):
            self.backward = self.parameters = lambda *batch: []

    (row,) = certify(Empty, *mlp()).evidence
    assert row["detail"].startswith("no rank has 54 elements of layers.0.weight, 9 elements of ")
    assert row["error"] == np.inf and "largest error" not in row["detail"]


def test_a_head_says_how_many_cases_were_left_out():
    head, *_ = str(certify(worker, size=4)).splitlines()
    assert head == "worker: exact, ok on 2 of 5 cases"


def test_an_order_of_ones_own_is_certified_on_a_model_of_ones_own():
    text = "rank 0  F0 F1 B0 B1 \n rank 1  F0 F1 I0 I1 W0 W1"
    assert certify("pipeline", *mlp(), size=2, programs=read(text)).ok
    assert certify(partial(Pipeline, schedule=read(text)), *mlp(), size=2).ok
