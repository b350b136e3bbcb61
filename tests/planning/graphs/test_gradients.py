"""The ops of backward that a graph's descriptions give are the model's gradients."""

import numpy as np
import pytest
from hypothesis import given, settings

from minidist import Tensor, nn
from minidist.planning.computation import compute
from minidist.planning.graph import d, with_gradients
from minidist.planning.tracing import trace
from tests.strategies import arrays, seeds, transformers


def one_device(model, inputs, targets, loss):
    """Return the loss and the gradients of all parameters and of the inputs, by value name."""
    model.zero_grad()
    x = Tensor(inputs, requires_grad=True) if inputs.dtype.kind == "f" else inputs
    result = loss(model(x), targets)
    result.backward()
    found = {d(name): p.grad for name, p in model.named_parameters().items()}
    found["loss"] = np.asarray(result.data)
    return found | ({d("inputs"): x.grad} if isinstance(x, Tensor) else {})


def given_arrays(model, inputs, targets):
    parameters = {name: p.data for name, p in model.named_parameters().items()}
    return {"inputs": inputs, "targets": targets, **parameters}


def evaluate(graph, values):
    """Return all values, on one device, given parameters and inputs in the graph's shapes."""
    values = dict(values)
    for op in graph.ops:
        spans = {letter: (0, n) for letter, n in graph.lengths(op).items()}
        values[op.output] = compute(op, [values[name] for name in op.inputs], spans)
    return values


def assert_traced(model, inputs, targets, loss=nn.cross_entropy):
    graph = trace(model, inputs, targets, loss)
    both, _ = with_gradients(graph)
    given = {
        name: x.reshape(graph.values[name].shape)
        for name, x in given_arrays(model, inputs, targets).items()
        if name in graph.values
    }
    loss_name = graph.ops[-1].output
    found = evaluate(both, {**given, d(loss_name): np.ones(())})
    want = one_device(model, inputs, targets, loss)
    np.testing.assert_allclose(found[loss_name], want.pop("loss"), rtol=1e-12)
    for name, x in want.items():
        if name in found:
            np.testing.assert_allclose(found[name].reshape(x.shape), x, rtol=1e-9, atol=1e-12)
        else:
            assert not x.any(), name


@settings(max_examples=30, deadline=None)
@given(drawn=transformers(dropout=(0.0,), experts=(0,)), seed=seeds)
def test_a_traced_transformer_has_the_loss_and_the_gradients_of_the_model(drawn, seed):
    model = drawn[0] if isinstance(drawn, tuple) else drawn
    tokens = np.random.default_rng(seed).integers(0, model.vocab, (2, min(3, model.context)))
    assert_traced(model, tokens, tokens[:, ::-1].copy())


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_a_traced_mlp_has_the_loss_and_the_gradients_of_the_model(activation):
    model = nn.MLP([4, 6, 5, 3], activation, dtype="float64")
    assert_traced(model, arrays(5, 4), arrays(5, 3, seed=1), nn.squared_error)


def test_operators_that_move_and_pick_elements_have_their_adjoints():
    def model(x):
        y = (x[1:] * x[:-1].exp()).transpose(0, 2, 1)[1]
        z = x[0].reshape(3, 2, 2).transpose(1, 0, 2)
        return (y @ y.T).sum(axis=0) + z.sum(1).reshape(4)

    x = Tensor(arrays(4, 3, 4), requires_grad=True)
    graph = trace(model, x.data, arrays(4, seed=1), nn.squared_error)
    found = evaluate(
        with_gradients(graph)[0],
        {
            "inputs": x.data.reshape(graph.values["inputs"].shape),
            "targets": arrays(4, seed=1).reshape(graph.values["targets"].shape),
            d(graph.ops[-1].output): np.ones(()),
        },
    )
    nn.squared_error(model(x), arrays(4, seed=1)).backward()
    np.testing.assert_allclose(found["d inputs"].reshape(x.shape), x.grad, rtol=1e-9)
