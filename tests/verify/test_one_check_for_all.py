"""What every strategy is asked passes one check: the same ValueError wherever it comes from."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from minidist import nn
from minidist.nn.datasets import Batch
from minidist.verify import equivalence
from minidist.verify.strategies import STRATEGIES, Case, one_device
from tests.strategies import arrays

every_strategy = pytest.mark.parametrize("name", equivalence.strategies())
IMAGES, LABELS = arrays(4, 6), np.arange(4) % 3
TOKENS = np.arange(16).reshape(4, 4) % 7


def mlp():
    return nn.MLP([6, 8, 8, 8, 4], dtype="float64")


def transformer(**more):
    return nn.Transformer(7, 8, 2, 2, 4, dtype="float64", **more)


class Own(nn.Module):
    def __init__(self):
        self.inner = nn.Linear(6, 4, dtype="float64")
        self.flatten()

    def forward(self, x, randomness=None):
        return self.inner(x)


KINDS = {  # how to make a model, its inputs, its targets
    "mlp": (mlp, IMAGES, LABELS),
    "transformer": (transformer, TOKENS, TOKENS),
    "cnn": (lambda: nn.CNN(1, 3, (4, 6), dtype="float64"), arrays(4, 1, 4, 4), LABELS),
    "experts": (lambda: transformer(experts=2), TOKENS, TOKENS),
    "siamese": (
        lambda: nn.Siamese([6, 5], classes=3, dtype="float64"),
        arrays(4, 2, 6),
        LABELS,
    ),
    "linear": (lambda: nn.Linear(6, 4, dtype="float64"), IMAGES, LABELS),
    "own": (Own, IMAGES, LABELS),
    "sequential": (
        lambda: nn.Sequential([nn.Linear(6, 4, dtype="float64")]),
        IMAGES,
        LABELS,
    ),
    "residual": (lambda: nn.ResidualMLP(6, 8, 2, 4, dtype="float64"), IMAGES, LABELS),
    "embedding": (lambda: nn.Embedding(7, 8, dtype="float64"), TOKENS, TOKENS),
}


def fitting(name):
    """Return (model, inputs, targets), the first that a strategy can split over two ranks."""
    includes = STRATEGIES[name].models.include
    return next((make(), x, y) for make, x, y in KINDS.values() if includes(make()))


@pytest.fixture
def gradients(cluster):
    """Return `equivalence.gradients` on two threads, which stay up."""
    return partial(equivalence.gradients, size=2, cluster=cluster(2, "thread"))


@every_strategy
@pytest.mark.parametrize("examples", [1, 3, 6])
def test_inputs_and_targets_that_do_not_agree_are_one_error(gradients, name, examples):
    model, inputs, targets = fitting(name)
    targets = np.resize(targets, (examples, *targets.shape[1:]))
    with pytest.raises(ValueError, match=f"^4 inputs and {examples} targets: they must agree$"):
        gradients(name, model, inputs, targets)


@every_strategy
def test_targets_of_another_shape_are_the_error_of_one_device(gradients, name):
    model, inputs, targets = fitting(name)
    targets = np.stack([targets, targets], axis=-1)
    with pytest.raises(ValueError) as alone:
        one_device(Case("given", model, inputs, targets))
    with pytest.raises(ValueError) as error:
        gradients(name, model, inputs, targets)
    assert str(error.value) == str(alone.value) and "need targets" in str(error.value)


def test_one_device_and_training_say_the_same():
    with pytest.raises(ValueError, match=r"^4 inputs and 6 targets: they must agree$"):
        one_device(Case("given", mlp(), IMAGES, np.arange(6) % 3))

    with pytest.raises(ValueError, match=r"^4 inputs and 6 targets: they must agree$"):
        Batch(TOKENS, np.resize(TOKENS, (6, 4)))


@every_strategy
def test_tokens_without_a_row_per_example_are_an_error_that_says_so(gradients, name):
    if STRATEGIES[name].models.include(transformer()):
        with pytest.raises(ValueError, match=r"tokens are \[B, T\], a row per example, not \[4\]"):
            gradients(name, transformer(), np.ones(4, int), np.ones(4, int))


@every_strategy
@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"experts"}))
def test_a_model_that_cannot_be_split_is_an_error_that_names_one_that_can(gradients, name, kind):
    """Whatever a strategy takes, it gives the gradient for; anything else is a ValueError."""
    make, inputs, targets = KINDS[kind]
    model = make()
    case = Case("given", model, inputs, targets)
    try:
        got = gradients(name, model, inputs, targets)
    except ValueError as error:
        words = ("use ", "needs an nn.", "layer", "call sync_batch_norm")
        assert any(word in str(error) for word in words), error
        assert "internal" not in str(error)
    else:
        want = one_device(case)
        for key, gradient in got.items():
            if ".running_" not in key:  # statistics: a server has none
                np.testing.assert_allclose(gradient, want[key], rtol=1e-9, atol=1e-12)


@every_strategy
@pytest.mark.parametrize("option", ["momentum", "stage", "schedule", "scheme"])
def test_an_unknown_option_is_an_error_that_names_the_known_ones(gradients, name, option):
    if name in ("hybrid", "muon", "eight_bits") and option == "schedule":
        return
    if (name, option) == ("hierarchical_zero", "stage"):
        return
    model, inputs, targets = fitting(name)
    with pytest.raises(ValueError, match=f"no option {option!r}; it has"):
        gradients(name, model, inputs, targets, **{option: 1})


@pytest.mark.parametrize("name", ["pipedream", "pipedream_2bw"])
def test_a_tied_embedding_that_is_frozen_cannot_come_apart(gradients, name):
    model = transformer(tied=True).freeze("embedding.token.weight")
    got = gradients(name, model, TOKENS, TOKENS)
    want = one_device(Case("given", model, TOKENS, TOKENS))
    for key, gradient in got.items():
        np.testing.assert_allclose(gradient, want[key], rtol=1e-9, atol=1e-12)


@every_strategy
@pytest.mark.parametrize("option", ["micro_batches", "minibatches"])
@pytest.mark.parametrize("count", [0, -3, 1.5])
def test_a_number_of_parts_below_one_is_the_same_error_in_every_strategy(
    gradients, name, option, count
):
    model, inputs, targets = fitting(name)
    with pytest.raises(ValueError) as error:
        gradients(name, model, inputs, targets, **{option: count})
    said = str(error.value)
    assert said == f"{option} is a whole number from 1, not {count!r}" or "no option" in said


def test_two_strategies_of_one_name_are_refused(monkeypatch):
    from minidist.verify.strategies import _records, pipeline_parallel

    again = [replace(STRATEGIES["siamese"], name="naive")]
    monkeypatch.setattr(pipeline_parallel, "STRATEGIES", again)
    with pytest.raises(ValueError, match="two strategies are named 'naive'; rename one of them"):
        _records()
