"""Recomputing leaves the same bits as remembering, and keeps nothing but the inputs."""

import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist import Tensor, nn
from minidist.autograd import recompute
from minidist.autograd.recomputation import kept, kept_bytes
from minidist.rng import Randomness
from tests.strategies import (
    arrays,
    assert_same_bits,
    functions_below,
    gradients,
    host,
    leaf,
    seeds,
    transformers,
)


def plain(function, *inputs):
    return function(*inputs)


@given(seed=seeds, rate=st.sampled_from([0.0, 0.3]))
def test_a_block_with_dropout_gets_the_same_bits(seed, rate):
    block = nn.Block(4, heads=2, dropout=rate, dtype="float64").flatten()
    randomness = Randomness(seed, step=1, examples=np.arange(3))
    results = []
    for call in (plain, recompute):
        x = leaf(3, 2, 4, seed=seed)
        y = call(block, x, randomness)
        y.backward(arrays(3, 2, 4, seed=seed + 1))
        results.append({"y": y.data, "x": x.grad} | gradients(block))
        for p in block.parameters():
            p.grad = None
    assert_same_bits(*results)


@given(model=transformers(), seed=seeds, deferred=st.booleans())
def test_a_model_with_every_layer_recomputed_gets_the_same_bits(model, seed, deferred):
    """Also its first layer, whose input is integers, and also when thunks run later."""
    tokens = np.random.default_rng(seed).integers(0, model.vocab, (2, model.context))
    randomness = Randomness(seed, step=0, examples=np.arange(2))
    results = []
    for call in (plain, recompute):
        x = tokens
        for layer in model.layers:
            x = call(layer, x, randomness)
        loss, thunks = nn.cross_entropy(x, tokens), []
        loss.backward(deferred=thunks if deferred else None)
        for thunk in thunks:
            thunk()
        results.append({"loss": loss.data} | gradients(model))
        for p in model.parameters():
            p.grad = None
    assert_same_bits(*results)


def test_a_closure_names_its_parameters(place):
    w, x = Tensor(place(arrays(4)), requires_grad=True), Tensor(place(arrays(3, 4, seed=1)))
    recompute(lambda x: (x * w).exp(), x, parameters=[w]).backward(place(np.ones((3, 4))))
    want = (np.exp(host(x) * host(w)) * host(x)).sum(axis=0)
    np.testing.assert_allclose(host(w.grad), want, rtol=1e-12)


def test_a_parameter_that_was_not_named_is_an_error():
    w = leaf(4)
    w.name = "scale"
    y = recompute(lambda x: x * w, leaf(3, 4), parameters=[])
    with pytest.raises(ValueError, match="used the parameter 'scale' without being told"):
        y.backward(np.ones((3, 4)))


def test_an_input_or_parameter_given_twice_counts_once():
    x, w = leaf(3), leaf(3, seed=1)
    recompute(lambda a, b: a * b * w, x, x, parameters=[w, w]).backward(np.ones(3))
    np.testing.assert_allclose(x.grad, 2 * x.data * w.data, rtol=1e-12)
    np.testing.assert_allclose(w.grad, x.data**2, rtol=1e-12)


def test_nothing_but_the_inputs_is_kept():
    x, between = leaf(3), []

    def segment(x):
        hidden = x.exp()
        between.append(weakref.ref(hidden.data))
        return hidden * hidden

    remembered = segment(x)
    y = recompute(segment, x)
    assert [ref() is None for ref in between] == [False, True]
    (function,) = functions_below(y)
    kept = [value for value in vars(function).values() if isinstance(value, np.ndarray)]
    assert not kept and function.inputs == [x]
    del remembered


def test_what_graphs_keep_is_listed_once_and_without_parameters(place, device):
    model, x = nn.MLP([3, 4, 2], activation="relu").to(device), place(np.ones((5, 3), np.float32))
    shapes = [(name, array.shape) for name, array in kept(model(x), model(x))]
    assert shapes == [("Linear.x", (5, 3)), ("Relu.y", (5, 4)), ("Relu.y", (5, 4))]


def test_a_view_counts_as_the_memory_that_it_holds(place, device):
    hidden = nn.MLP([4, 4], dtype="float32").to(device)(place(np.ones((6, 4), np.float32)))
    part = hidden[:2]
    assert kept_bytes(part * part) == 4 * (6 * 4 + 6 * 4), "the input, and all of hidden"
