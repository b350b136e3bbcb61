"""Linear, Embedding, LayerNorm, Dropout, attention: values, starts, splits and errors."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist import Tensor, nn, no_grad
from minidist.nn.embedding import TokenAndPosition
from minidist.rng import Randomness
from tests.strategies import arrays


def close(got, want):
    np.testing.assert_allclose(got.data, want, rtol=1e-12, atol=1e-14)


def test_linear_takes_tensors_and_arrays():
    layer, x = nn.Linear(3, 2, dtype="float64"), arrays(4, 3)
    layer.bias.data[:] = [1, -1]
    want = x @ layer.weight.data + [1, -1]
    close(layer(x), want)
    close(layer(Tensor(x)), want)


def test_linear_without_bias():
    layer, x = nn.Linear(3, 2, bias=False, dtype="float64"), arrays(4, 3)
    assert list(layer.named_parameters()) == ["linear.weight"]
    close(layer(x), x @ layer.weight.data)


@pytest.mark.parametrize(("activation", "gain"), [("identity", 1), ("relu", 2), ("gelu", 2)])
def test_linear_starts_with_the_variance_that_its_activation_asks_for(activation, gain):
    weight = nn.Linear(500, 200, activation=activation, dtype="float64").weight.data
    assert weight.var() * 500 == pytest.approx(gain, rel=0.03)
    assert abs(weight.mean()) < 4 * weight.std() / np.sqrt(weight.size)


def test_linear_applies_its_activation():
    layer, x = nn.Linear(3, 5, activation="relu", dtype="float64"), arrays(4, 3)
    close(layer(x), np.maximum(x @ layer.weight.data, 0))


def test_an_unknown_activation_lists_the_known_ones():
    message = "unknown activation 'tanh'; choose one of identity, relu, gelu"
    with pytest.raises(ValueError, match=message):
        nn.Linear(2, 2, activation="tanh")


def test_embedding_rows_start_small():
    weight = nn.Embedding(300, 200, dtype="float64").weight.data
    assert weight.std() == pytest.approx(0.02, rel=0.03)


def test_embedding_takes_arrays_and_tensors_of_integers():
    layer = nn.Embedding(4, 3)
    indices = np.array([[1, 3]])
    close(layer(indices), layer.weight.data[indices])
    close(layer(Tensor(indices)), layer.weight.data[indices])


def test_more_tokens_than_the_context_are_an_error():
    layer = TokenAndPosition(vocab=4, width=3, context=5)
    with pytest.raises(ValueError, match="6 tokens do not fit a context of 5"):
        layer(np.zeros((1, 6), int))


def test_layer_norm_starts_as_plain_normalisation():
    y = nn.LayerNorm(50, dtype="float64")(arrays(3, 50) * 7 + 2).data
    np.testing.assert_allclose(y.mean(axis=-1), 0, atol=1e-14)
    np.testing.assert_allclose(y.var(axis=-1), 1, rtol=1e-5)


def test_a_width_that_does_not_split_into_heads_is_an_error():
    message = "width 10 does not split into 4 heads; use a multiple of 4"
    with pytest.raises(ValueError, match=message):
        nn.CausalSelfAttention(10, 4)


def masks(examples, step=0, name="dropout", seed=0, rate=0.4, width=50):
    layer = nn.Dropout(rate, name=name)
    x = Tensor(np.ones((len(examples), width)))
    return layer(x, Randomness(seed, step, np.array(examples))).data


@given(order=st.permutations(range(6)), cut=st.integers(0, 6))
def test_dropout_is_the_same_on_any_split_of_the_batch(order, cut):
    whole = masks(range(6))
    parts = np.concatenate([masks(order[:cut]), masks(order[cut:])])
    np.testing.assert_array_equal(parts, whole[list(order)])


def test_dropout_differs_per_example_step_layer_and_seed():
    first = masks([3])
    others = [masks([4]), masks([3], step=1), masks([3], name="other"), masks([3], seed=1)]
    for other in others:
        assert not np.array_equal(first, other)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_dropout_keeps_about_one_minus_rate_and_the_mean(rate):
    y = masks(range(200), rate=rate, width=100)
    deviation = np.sqrt(rate * (1 - rate) / y.size)
    assert abs((y > 0).mean() - (1 - rate)) < 4 * deviation
    np.testing.assert_allclose(y[y > 0], 1 / (1 - rate), rtol=1e-15)


def test_dropout_in_training_needs_randomness():
    message = r"blocks\.0\.dropout_1 drops out at 0\.2: call model\(x, Randomness"
    with pytest.raises(ValueError, match=message):
        nn.Dropout(0.2, name="blocks.0.dropout_1")(Tensor(arrays(2, 3)))


def test_dropout_is_off_in_evaluation_and_at_rate_zero():
    x = Tensor(arrays(2, 3))
    assert nn.Dropout(0.0)(x) is x
    with no_grad():
        assert nn.Dropout(0.5)(x) is x


def test_dropout_needs_one_index_per_row():
    message = "Randomness has 2 example indices for a batch of 3; give one global index per row"
    with pytest.raises(ValueError, match=message):
        nn.Dropout(0.5)(Tensor(arrays(3, 4)), Randomness(0, 0, np.arange(2)))


@pytest.mark.parametrize("rate", [-0.1, 1, 1.5])
def test_a_dropout_rate_lies_between_zero_and_one(rate):
    with pytest.raises(ValueError, match=rf"a dropout rate lies in \[0, 1\), not {rate}"):
        nn.Dropout(rate)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: nn.MLP([3, 2], activation="foo"),
            "unknown activation 'foo'; choose one of identity, relu",
        ),
        (lambda: nn.MLP([3, 0, 2]), r"outputs is a whole number from 1 to \d+, not 0"),
        (lambda: nn.MLP([3, 2.5]), r"outputs is a whole number from 1 to \d+, not 2.5"),
        (lambda: nn.Transformer(5, 8, 0, 2, 4), r"heads is a whole number from 1 to \d+, not 0"),
        (lambda: nn.Transformer(5, 8, 2, -1, 4), r"depth is a whole number from 0 to \d+, not -1"),
        (lambda: nn.Transformer(5, 8, 2, 1, 0), r"context is a whole number from 1 to \d+, not 0"),
        (lambda: nn.Transformer(0, 8, 2, 1, 4), r"vocab is a whole number from 1 to \d+, not 0"),
        (lambda: nn.ResidualMLP(3, 4, -1, 2), r"depth is a whole number from 0 to \d+, not -1"),
        (lambda: nn.LayerNorm(10**20), r"width is a whole number from 1 to \d+, not 10{20}"),
        (lambda: nn.LayerNorm(0), r"width is a whole number from 1 to \d+, not 0"),
    ],
)
def test_sizes_that_no_layer_can_have_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()
