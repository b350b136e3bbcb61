"""The Transformer: its formula, tying, dropout, dtypes of a whole step."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist import nn, no_grad
from minidist.rng import Randomness
from tests.nn.formulas import transformer
from tests.strategies import (
    arrays,
    gradients,
    seeds,
    transformers,
)


def draw_tokens(model, batch, seed=0):
    return np.random.default_rng(seed).integers(0, model.vocab, (batch, model.context))


@given(model=transformers(experts=(0,)), data=st.data(), seed=seeds)
def test_the_model_against_its_formula(model, data, seed):
    """Blocks, heads, causality, dropout by example and name; any number of positions."""
    for p in model.parameters():
        p.data += arrays(*p.shape, seed=len(p.name))  # biases and gains, too
    tokens = draw_tokens(model, 2, seed)[:, : data.draw(st.integers(1, model.context))]
    randomness = Randomness(seed, 2, np.array([7, 3]))
    got = model(tokens, randomness).data
    np.testing.assert_allclose(got, transformer(model, tokens, randomness), rtol=1e-8, atol=1e-9)


@given(model=transformers((0.0,), (0,)).filter(lambda model: model.layers[-1].tied), seed=seeds)
def test_a_tied_weight_has_the_sum_of_the_gradients_of_its_two_uses(model, seed):
    shape = model.layers[0].token.weight.shape
    blocks = len(model.layers) - 2
    heads = model.layers[1].attention.heads
    untied = nn.Transformer(model.vocab, shape[1], heads, blocks, model.context, dtype="float64")
    weight = model.state()["embedding.token.weight"]
    untied.load_state(model.state() | {"head.linear.weight": weight.T})
    tokens = draw_tokens(model, 2, seed)
    for m in (model, untied):
        nn.cross_entropy(m(tokens), tokens).backward()
    got, want = gradients(model), gradients(untied)
    want["embedding.token.weight"] += want.pop("head.linear.weight").T
    assert got.keys() == want.keys()
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-9, atol=1e-12, err_msg=name)


def dropping(seed=0):
    return nn.Transformer(5, 4, 2, 2, 3, seed=seed, dtype="float64", dropout=0.5)


def test_training_with_dropout_needs_randomness_and_evaluation_does_not():
    model = dropping()
    tokens = draw_tokens(model, 2)
    with pytest.raises(ValueError, match=r"embedding\.dropout drops out at 0\.5"):
        model(tokens)
    with no_grad():
        evaluated = model(tokens).data
    without = nn.Transformer(5, 4, 2, 2, 3, dtype="float64")
    np.testing.assert_array_equal(evaluated, without(tokens).data)
    assert not np.allclose(model(tokens, Randomness(0, 0, np.arange(2))).data, evaluated)
