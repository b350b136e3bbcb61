"""Graphs of ops: traced from models, with the model's gradients; any planner plans an odd one."""

import numpy as np
import pytest
from hypothesis import given, settings

from minidist import Tensor, nn
from minidist.planning import Machine, flexflow, tofu
from minidist.planning.computation import compute
from minidist.planning.flexflow import Simulator, data_parallel
from minidist.planning.graph import Graph, Op, Value, d, with_gradients
from minidist.planning.gspmd import Replicated, Split, propagate
from minidist.planning.tracing import trace
from tests.strategies import arrays, seeds, transformers

PRODUCT = ("matmul", ("x", "W"), "y", "bi,io->bo")
ODD = {
    "one op": [PRODUCT],
    "an unused output": [PRODUCT, ("exp", ("x",), "r", "bi->bi"), ("sum", ("y",), "l", "bo->")],
    "a loss of something else": [PRODUCT, ("sum", ("x",), "l", "bi->")],
    "a diamond": [
        PRODUCT,
        ("relu", ("y",), "a", "bo->bo"),
        ("exp", ("y",), "c", "bo->bo"),
        ("add", ("a", "c"), "s", "bo,bo->bo"),
        ("sum", ("s",), "l", "bo->"),
    ],
    "a repeated input": [PRODUCT, ("multiply", ("y", "y"), "s", "bo,bo->bo")],
    "no parameters": [("sum", ("x",), "l", "bi->")],
}


def graph_of(ops, dtype="float64", **lengths):
    """Return a graph of these ops: x and z are inputs, parameters have capitals."""
    values = {}
    for _, inputs, output, indices, *_ in ops:
        before, after = indices.split("->")
        for name, letters in zip((*inputs, output), (*before.split(","), after), strict=True):
            kind = "input" if name in "xz" else "parameter" if name.isupper() else "result"
            shape = tuple(lengths[letter] for letter in letters)
            values.setdefault(name, Value(name, shape, np.dtype(dtype), kind))
    return Graph(values, [Op(*op) for op in ops])


def layers(B, widths, dtype="float64", loss=False):
    """Return relu(x V) W ...: linear layers without biases; and what makes a loss of the last."""
    ops, at, letters = [], "x", "iopq"
    for k in range(len(widths) - 1):
        i, o = letters[k : k + 2]
        if k:
            ops.append(("relu", (at,), f"h{k - 1}", f"b{i}->b{i}"))
            at = f"h{k - 1}"
        ops.append(("matmul", (at, "VWU"[k]), f"y{k}", f"b{i},{i}{o}->b{o}"))
        at = f"y{k}"
    if loss:
        ops.append(("loss", (at,), "loss", f"b{o}->", frozenset(o)))
    return graph_of(ops, dtype, b=B, **dict(zip(letters, widths, strict=False)))


@pytest.mark.parametrize("name", ODD)
def test_every_planner_plans_an_odd_graph(name):
    for b, i, o in ((4, 6, 2), (1, 1, 1), (7, 3, 5), (10**9, 10**9, 10**9)):
        graph = graph_of(ODD[name], b=b, i=i, o=o)
        layout = propagate(graph, {"d": {"x": Split(0)}})
        assert layout.results[graph.ops[-1].output] == (Replicated(),)
        for ranks in (1, 2, 7):
            together = [tofu(graph, ranks, steps)[1] for steps in (1, 3)]
            assert together[0] >= together[1] >= 0 and (ranks > 1 or together == [0, 0])
            machine = Machine(ranks, 2, flops=1e9, memory=1e30, link=1e8, network=1e7)
            parallel = Simulator(graph, machine)(data_parallel(graph, ranks)).seconds
            assert 0 < flexflow(graph, machine, budget=10)[1] <= parallel


def test_what_the_loss_does_not_need_has_no_gradient():
    """Neither the value r, nor what it alone is made of."""
    ops = [("exp", ("x",), "r", "bi->bi"), PRODUCT, ("sum", ("y",), "l", "bo->")]
    whole, _ = with_gradients(graph_of(ops, b=4, i=6, o=2))
    without, _ = with_gradients(graph_of(ops[1:], b=4, i=6, o=2))
    assert [op for op in whole.ops if op.kind != "exp"] == without.ops
    unrelated, _ = with_gradients(graph_of(ODD["a loss of something else"], b=4, i=6, o=2))
    assert "d x" in unrelated.values and "d W" not in unrelated.values


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
    """Return all values, on one device, given parameters and inputs in any shapes."""
    values = {n: x.reshape(graph.values[n].shape) for n, x in values.items() if n in graph.values}
    for op in graph.ops:
        spans = {letter: (0, n) for letter, n in graph.lengths(op).items()}
        values[op.output] = compute(op, [values[name] for name in op.inputs], spans)
    return values


def assert_traced(model, inputs, targets, loss=nn.cross_entropy):
    graph = trace(model, inputs, targets, loss)
    both, _ = with_gradients(graph)
    loss_name = graph.ops[-1].output
    given = given_arrays(model, inputs, targets) | {d(loss_name): np.ones(())}
    found = evaluate(both, given)
    want = one_device(model, inputs, targets, loss)
    np.testing.assert_allclose(found[loss_name], want.pop("loss"), rtol=1e-12)
    for name, x in want.items():
        if name in found:
            np.testing.assert_allclose(found[name].reshape(x.shape), x, rtol=1e-9, atol=1e-12)
        else:
            assert not x.any(), name


@settings(max_examples=15, deadline=None)
@given(drawn=transformers(dropout=(0.0,), experts=(0,)), seed=seeds)
def test_a_traced_transformer_has_the_loss_and_the_gradients_of_the_model(drawn, seed):
    model = drawn[0] if isinstance(drawn, tuple) else drawn
    tokens = np.random.default_rng(seed).integers(0, model.vocab, (2, min(3, model.context)))
    assert_traced(model, tokens, tokens[:, ::-1].copy())


def test_operators_that_move_and_pick_elements_have_their_adjoints():
    class Moves(nn.Module):
        def forward(self, x, randomness=None):
            y = (x[1:] * x[:-1].exp()).transpose(0, 2, 1)[1]
            z = x[0].reshape(3, 2, 2).transpose(1, 0, 2)
            return (y @ y.T).sum(axis=0) + z.sum(1).reshape(4)

    assert_traced(Moves(), arrays(4, 3, 4), arrays(4, seed=1), nn.squared_error)
    for activation in ("relu", "gelu"):
        model = nn.MLP([4, 6, 5, 3], activation, dtype="float64")
        assert_traced(model, arrays(5, 4), arrays(5, 3, seed=1), nn.squared_error)


def test_a_linear_layer_is_a_product_and_a_bias_that_are_two_ops():
    graph = trace(nn.MLP((4, 8, 2), dtype="float64"), np.ones((6, 4)), np.zeros(6, int))
    assert [(op.kind, op.indices) for op in graph.ops] == [
        ("matmul", "ac,cb->ab"),
        ("add", "ab,b->ab"),
        ("relu", "ab->ab"),
        ("matmul", "ac,cb->ab"),
        ("add", "ab,b->ab"),
        ("cross_entropy", "ab,a->"),
    ]


def test_heads_are_axes_of_the_weights_and_a_tied_weight_is_one_value_of_two_ops():
    model = nn.Transformer(11, 8, 2, 1, 5, dtype="float64", tied=True)
    graph = trace(model, np.arange(6).reshape(2, 3), np.arange(6).reshape(2, 3))
    values = graph.values
    assert values["blocks.0.attention.qkv.weight"].shape == (8, 3, 2, 4)
    assert values["blocks.0.attention.qkv.weight"].whole == (8, 24)
    assert values["blocks.0.attention.output.weight"].shape == (2, 4, 8)
    assert not {op.kind for op in graph.ops} & {"reshape", "transpose"}
    users = [op.kind for op in graph.ops if "embedding.token.weight" in op.inputs]
    assert users == ["embedding", "matmul"]


def test_a_reshape_cuts_axes_into_whole_factors():
    def reshaped_to(*shape):
        loss = nn.squared_error
        return trace(lambda x: (x * x).reshape(*shape), np.ones((3, 8)), np.ones(shape), loss)

    assert reshaped_to(6, 4).values["multiply.0"].shape == (3, 2, 4)
    assert reshaped_to(24).values["targets"].shape == (3, 8)
