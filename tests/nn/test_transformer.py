"""The Transformer: composition, causality, tying, dropout, dtypes of a whole step."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist import Tensor, nn, no_grad, optim
from minidist.backend import to_host
from minidist.rng import Randomness
from tests.strategies import (
    arrays,
    assert_same_bits,
    gradients,
    seeds,
    transformers,
    watch_dtypes,
)

plain_transformers = transformers(dropout=(0.0,))


def draw_tokens(model, batch, seed=0):
    return np.random.default_rng(seed).integers(0, model.vocab, (batch, model.context))


@given(model=plain_transformers, seed=seeds)
def test_layers_composed_by_hand_are_the_model(model, seed):
    tokens = draw_tokens(model, 2, seed)
    x = tokens
    for layer in model.layers:
        x = layer(x)
    np.testing.assert_array_equal(model(tokens).data, x.data)
    assert x.shape == (2, model.context, model.vocab)


def test_a_block_adds_attention_and_then_a_perceptron_to_its_input():
    block, x = nn.Block(4, heads=2, dtype="float64"), Tensor(arrays(2, 3, 4))
    x1 = x.data + block.attention(block.norm_1(x)).data
    hidden = block.expand(block.norm_2(Tensor(x1)))
    np.testing.assert_allclose(block(x).data, x1 + block.contract(hidden).data, rtol=1e-12)
    assert (block.expand.activation, hidden.shape) == ("gelu", (2, 3, 16))


@given(model=plain_transformers, seed=seeds, data=st.data())
def test_changing_a_token_leaves_all_earlier_logits_alone(model, seed, data):
    position = data.draw(st.integers(0, model.context - 1))
    tokens = draw_tokens(model, 2, seed)
    changed = tokens.copy()
    changed[:, position:] = (changed[:, position:] + 1) % model.vocab
    before, after = model(tokens).data[:, :position], model(changed).data[:, :position]
    np.testing.assert_array_equal(after, before)


def test_changing_a_token_changes_all_later_logits():
    model = nn.Transformer(5, 4, 2, 1, context=4, dtype="float64")
    tokens = draw_tokens(model, 1)
    changed = tokens.copy()
    changed[:, 1] = (changed[:, 1] + 1) % 5
    differs = (model(changed).data != model(tokens).data).any(axis=-1)
    np.testing.assert_array_equal(differs, [[False, True, True, True]])


def test_a_shorter_sequence_gives_the_first_logits_of_a_longer_one():
    model = nn.Transformer(5, 4, 2, 1, context=6, dtype="float64")
    tokens = draw_tokens(model, 2)
    np.testing.assert_allclose(model(tokens[:, :4]).data, model(tokens).data[:, :4], rtol=1e-9)


def test_more_tokens_than_the_context_are_an_error():
    with pytest.raises(ValueError, match="4 tokens do not fit a context of 3"):
        nn.Transformer(5, 4, 2, 1, context=3)(np.zeros((1, 4), int))


def test_a_token_outside_the_vocabulary_is_an_error():
    with pytest.raises(ValueError, match="token 5 is outside a vocabulary of 5"):
        nn.Transformer(5, 4, 2, 1, context=3)(np.array([[5]]))


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


def test_a_tied_weight_appears_once():
    model = nn.Transformer(5, 4, 2, 1, 3, tied=True)
    assert list(model.named_parameters()).count("embedding.token.weight") == 1
    assert "head.linear.weight" not in model.named_parameters()
    assert model.layers[-1].weight is model.layers[0].token.weight
    assert model.layers[-1].flat.parameters == model.layers[-1].norm.parameters()


def dropping(seed=0):
    return nn.Transformer(5, 4, 2, 2, 3, seed=seed, dtype="float64", dropout=0.5)


def test_each_example_gets_its_own_logits_on_any_split():
    model = dropping()
    tokens, examples = draw_tokens(model, 4), np.array([7, 3, 11, 0])
    whole = model(tokens, Randomness(1, 2, examples)).data
    for rows in (slice(0, 1), slice(1, 4), [3, 0]):
        part = model(tokens[rows], Randomness(1, 2, examples[rows])).data
        np.testing.assert_allclose(part, whole[rows], rtol=1e-9)


def test_every_dropout_layer_has_a_mask_of_its_own():
    model = dropping()
    layers = [model.layers[0].dropout]
    layers += [d for block in model.layers[1:-1] for d in (block.dropout_1, block.dropout_2)]
    randomness = Randomness(0, 0, np.arange(4))
    masks = {layer(Tensor(np.ones((4, 30))), randomness).data.tobytes() for layer in layers}
    assert len(masks) == len(layers) == 5


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


@given(model=transformers(), seed=seeds)
def test_deferred_gradients_have_the_same_bits(model, seed):
    tokens, randomness = draw_tokens(model, 2, seed), Randomness(0, 0, np.arange(2))
    results = []
    for thunks in (None, []):
        for p in model.parameters():
            p.grad = None
        nn.cross_entropy(model(tokens, randomness), tokens).backward(deferred=thunks)
        for thunk in thunks or []:
            thunk()
        results.append(gradients(model))
    assert_same_bits(*results)


def test_the_gradient_of_the_hidden_state_is_complete_before_any_thunk_has_run():
    model, grads = nn.Transformer(5, 4, 2, 2, 3, dtype="float64"), []
    for thunks in (None, []):
        hidden = Tensor(arrays(2, 3, 4), requires_grad=True)
        x = hidden
        for layer in model.layers[1:]:
            x = layer(x)
        x.sum().backward(deferred=thunks)
        grads.append(hidden.grad)
    np.testing.assert_array_equal(*grads)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("tied, experts", [(False, 0), (True, 0), (True, 2)])
def test_a_training_step_keeps_its_dtype(dtype, tied, experts, device):
    model = nn.Transformer(5, 4, 2, 2, 3, 0, dtype, 0.2, tied, experts).to(device)
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    tokens = draw_tokens(model, 4)
    before = model.state()
    with watch_dtypes() as dtypes:
        nn.cross_entropy(model(tokens, Randomness(0, 0, np.arange(4))), tokens).backward()
    assert dtypes == {np.dtype(dtype)}
    optimizer.step()
    for p in model.parameters():
        assert p.dtype == p.grad.dtype == p.home.vector.dtype == dtype
        assert bool(abs(p.data).max() < 10), p.name
        assert (to_host(p.data) != before[p.name]).any(), p.name


def test_half_and_single_precision_are_near_double_precision():
    model = nn.Transformer(5, 4, 2, 2, 3, dtype="float64")
    tokens = draw_tokens(model, 4)
    want = model(tokens).data
    for dtype, bound in [("float32", 1e-5), ("float16", 1e-2)]:
        assert abs(model.astype(dtype)(tokens).data - want).max() < bound
