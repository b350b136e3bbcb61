"""What every strategy is asked passes one check: the same ValueError wherever it comes from."""

from functools import partial

import numpy as np
import pytest

from minidist import nn
from minidist.nn.datasets import Batch
from minidist.verify import equivalence
from minidist.verify.strategies import STRATEGIES, Case, one_device
from tests.grids import some
from tests.strategies import arrays

IMAGES, LABELS = arrays(4, 6), np.arange(4) % 3
TOKENS = np.arange(16).reshape(4, 4) % 7


def transformer(**more):
    return nn.Transformer(7, 8, 2, 2, 4, dtype="float64", **more)


class Own(nn.Module):
    def __init__(self):
        self.inner = nn.Linear(6, 4, dtype="float64")
        self.flatten()

    def forward(self, x, randomness=None):
        return self.inner(x)


FLOATS = {"dtype": "float64"}
GIVEN = [  # a model, its inputs, its targets
    (nn.MLP([6, 8, 8, 8, 4], **FLOATS), IMAGES, LABELS),
    (transformer(), TOKENS, TOKENS),
    (nn.CNN(1, 3, (4, 6), **FLOATS), arrays(4, 1, 4, 4), LABELS),
    (nn.Siamese([6, 5], classes=3, **FLOATS), arrays(4, 2, 6), LABELS),
    (transformer(experts=2), TOKENS, TOKENS),
    (nn.Linear(6, 4, **FLOATS), IMAGES, LABELS),
    (Own(), IMAGES, LABELS),
    (nn.Sequential([nn.Linear(6, 4, **FLOATS)]), IMAGES, LABELS),
    (nn.ResidualMLP(6, 8, 2, 4, **FLOATS), IMAGES, LABELS),
    (nn.Embedding(7, 8, **FLOATS), TOKENS, TOKENS),
]


@pytest.fixture
def gradients(cluster):
    """Return `equivalence.gradients` on two threads, which stay up."""
    return partial(equivalence.gradients, size=2, cluster=cluster(2, "thread"))


@pytest.mark.parametrize("name", equivalence.strategies())
def test_wrong_input_is_one_error_in_every_strategy(gradients, name):
    model, inputs, targets = next(
        given for given in GIVEN if STRATEGIES[name].models.include(given[0])
    )
    ask = partial(gradients, name, model)
    six = np.resize(targets, (6, *targets.shape[1:]))
    with pytest.raises(ValueError, match=r"^4 inputs and 6 targets: they must agree$"):
        ask(inputs, six)
    doubled = np.stack([targets, targets], axis=-1)
    with pytest.raises(ValueError, match="need targets") as alone:
        one_device(Case("given", model, inputs, doubled))
    with pytest.raises(ValueError) as error:
        ask(inputs, doubled)
    assert str(error.value) == str(alone.value)
    if STRATEGIES[name].models.include(transformer()):
        with pytest.raises(ValueError, match=r"tokens are \[B, T\], a row per example, not \[4\]"):
            gradients(name, transformer(), np.ones(4, int), np.ones(4, int))
    with pytest.raises(ValueError, match="no option 'scheme'; it has"):
        ask(inputs, targets, scheme=1)
    for option in ("micro_batches", "minibatches"):
        words = f"^{option} is a whole number from 1, not 1.5$|no option '{option}'"
        with pytest.raises(ValueError, match=words):
            ask(inputs, targets, **{option: 1.5})


def test_one_device_and_training_say_the_same():
    with pytest.raises(ValueError, match=r"^4 inputs and 6 targets: they must agree$"):
        one_device(Case("given", GIVEN[0][0], IMAGES, np.arange(6) % 3))
    with pytest.raises(ValueError, match=r"^4 inputs and 6 targets: they must agree$"):
        Batch(TOKENS, np.resize(TOKENS, (6, 4)))


@pytest.mark.parametrize("count", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_model_that_cannot_be_split_is_an_error_that_names_one_that_can(gradients, count):
    """Whatever a strategy takes, it gives the gradient for; anything else is a ValueError."""
    frozen = transformer(tied=True).freeze("embedding.token.weight")  # it cannot come apart
    given = [*GIVEN, (frozen, TOKENS, TOKENS)]
    for name, (model, inputs, targets) in some(
        [(name, each) for name in equivalence.strategies() for each in given], count, "models"
    ):
        try:
            got = gradients(name, model, inputs, targets)
        except ValueError as error:
            words = ("use ", "needs an nn.", "layer", "call sync_batch_norm")
            assert any(word in str(error) for word in words), error
            assert "internal" not in str(error)
        else:
            want = one_device(Case("given", model, inputs, targets))
            for key, gradient in got.items():
                if ".running_" not in key:  # statistics: a server has none
                    np.testing.assert_allclose(gradient, want[key], rtol=1e-9, atol=1e-12)
