"""Names, order, state, copies, freezing, dtypes, devices."""

import copy
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist import nn, optim
from minidist.backend import on_gpu
from minidist.rng import Randomness, generator
from tests.strategies import assert_same_bits, gradients, mlps, transformers

models = st.one_of(mlps().map(lambda drawn: drawn[0]), transformers())


def pickled(model):
    return pickle.loads(pickle.dumps(model))


def small_transformer(**options):
    return nn.Transformer(vocab=5, width=4, heads=2, depth=2, context=3, **options)


def backward(model):
    """Leave some gradient in every parameter that is used."""
    if isinstance(model, nn.Transformer):
        tokens = np.arange(2 * model.context).reshape(2, -1) % model.vocab
        nn.cross_entropy(model(tokens, Randomness(0, 0, np.arange(2))), tokens).backward()
    else:
        width = model.layers[0].weight.shape[0]
        model(np.ones((2, width), model.layers[0].weight.dtype)).sum().backward()


def test_parameters_are_named_in_the_order_of_the_layers():
    block = ["norm_1.gain", "norm_1.bias", "attention.qkv.weight", "attention.qkv.bias"]
    block += ["attention.output.weight", "attention.output.bias", "norm_2.gain", "norm_2.bias"]
    block += ["expand.weight", "expand.bias", "contract.weight", "contract.bias"]
    names = ["embedding.token.weight", "embedding.position.weight"]
    names += [f"blocks.{i}.{name}" for i in range(2) for name in block]
    names += ["head.norm.gain", "head.norm.bias", "head.linear.weight"]
    model = small_transformer()
    assert list(model.named_parameters()) == names
    assert [p.name for p in model.parameters()] == names


def test_a_parameter_is_drawn_by_seed_and_name():
    layer = nn.Linear(3, 4, name="some.layer", seed=7, dtype="float64")
    want = generator(7, "some.layer.weight").standard_normal((3, 4)) * (1 / np.sqrt(3))
    np.testing.assert_array_equal(layer.weight.data, want)
    np.testing.assert_array_equal(layer.bias.data, np.zeros(4))


def test_two_layers_of_one_shape_start_with_different_weights():
    model = nn.MLP([4, 4, 4, 4])
    first, second, third = (layer.weight.data for layer in model.layers)
    assert not np.array_equal(first, second) and not np.array_equal(second / np.sqrt(2), third)
    state = small_transformer().state()
    for name, array in state.items():
        twin = name.replace("blocks.0", "blocks.1")
        if name != twin and array.std() > 0:
            assert not np.array_equal(array, state[twin]), name


@given(model=models)
def test_state_goes_round_and_is_a_copy(model):
    state = model.state()
    kept = copy.deepcopy(state)
    for p in model.parameters():
        p.data += 1
    assert_same_bits(state, kept)
    model.load_state(state)
    assert_same_bits(model.state(), kept)
    for p in model.parameters():
        assert np.shares_memory(p.data, p.home.vector)


def test_a_state_that_does_not_fit_changes_nothing():
    model = nn.MLP([2, 3])
    before, good = model.state(), {k: v + 1 for k, v in model.state().items()}
    with pytest.raises(ValueError, match=r"'layers\.0\.bias' is missing in the state"):
        model.load_state({"layers.0.weight": good["layers.0.weight"]})
    with pytest.raises(ValueError, match="'more' is missing in the model"):
        model.load_state(good | {"more": np.ones(1)})
    message = r"layers\.0\.bias is \[3\] in the model, \[2\] in the state"
    with pytest.raises(ValueError, match=message):
        model.load_state(good | {"layers.0.bias": np.ones(2)})
    assert_same_bits(model.state(), before)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
@given(model=models)
def test_a_copy_has_views_of_its_own_vectors_and_no_gradients(copied, model):
    backward(model)
    twin = copied(model)
    assert_same_bits(twin.state(), model.state())
    originals = model.named_parameters()
    for name, p in twin.named_parameters().items():
        assert p.grad is None and p.hooks == () and p.requires_grad
        assert np.shares_memory(p.data, p.home.vector)
        assert np.shares_memory(p.grad_buffer, p.home.gradient)
        assert not np.shares_memory(p.data, originals[name].data)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_copy_keeps_what_was_frozen_in_one_layer_only(copied):
    """The embedding's vector still has a place for the tied weight that the head froze."""
    model = small_transformer(tied=True)
    model.layers[-1].freeze("embedding.token.weight")
    model.load_state({name: array + 1 for name, array in model.state().items()})
    twin = copied(model)
    assert_same_bits(twin.state(), model.state())
    frozen = twin.named_parameters()["embedding.token.weight"]
    assert not frozen.requires_grad and frozen.home is None


def test_frozen_parameters_do_not_move_under_weight_decay():
    model = small_transformer()
    model.freeze("blocks.0.expand.weight", "head.norm.gain")
    before = model.state()
    optimizer = optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    backward(model)
    optimizer.step()
    after = model.state()
    for name, p in model.named_parameters().items():
        frozen = name in ("blocks.0.expand.weight", "head.norm.gain")
        assert p.requires_grad is not frozen and (p.grad is None) is frozen
        assert np.array_equal(after[name], before[name]) is frozen, name


def test_a_state_is_loaded_where_the_model_is(device):
    model = small_transformer(tied=True, dtype="float32").to(device)
    state = {name: array.astype("float64") + 1 for name, array in model.state().items()}
    model.load_state(state)
    assert all(on_gpu(p.data) is (device == "gpu") for p in model.parameters())
    assert_same_bits(model.state(), {k: v.astype("float32") for k, v in state.items()})


def test_to_moves_parameters_and_gradients_and_back(device):
    model = small_transformer(tied=True, dtype="float64").freeze("head.norm.bias")
    backward(model)
    state, grads = model.state(), gradients(model)
    assert model.to(device) is model
    for p in model.parameters():
        assert on_gpu(p.data) is (device == "gpu")
    assert_same_bits(gradients(model), grads)
    model.freeze("head.norm.gain").astype("float32").astype("float64")
    assert on_gpu(model.parameters()[0].data) is (device == "gpu")
    model.to("cpu")
    assert_same_bits(
        model.state(), {k: v.astype("float32").astype("float64") for k, v in state.items()}
    )
