"""A traced graph computes what the model computes, op by op, in the axes that it was cut into."""

import numpy as np
import pytest

from minidist import nn
from minidist.planning.graph import Graph, Op, Value
from minidist.planning.tracing import trace


def described(graph):
    return [(op.kind, op.indices) for op in graph.ops]


def mlp(sizes=(4, 8, 2)):
    return trace(nn.MLP(sizes, dtype="float64"), np.ones((6, sizes[0])), np.zeros(6, int))


def block_graph(heads=2, T=3, **options):
    model = nn.Transformer(11, 8, heads, 1, 5, dtype="float64", **options)
    tokens = np.arange(2 * T).reshape(2, T)
    return trace(model, tokens, tokens)


def test_a_linear_layer_is_a_product_and_a_bias_that_are_two_ops():
    assert described(mlp()) == [
        ("matmul", "ac,cb->ab"),
        ("add", "ab,b->ab"),
        ("relu", "ab->ab"),
        ("matmul", "ac,cb->ab"),
        ("add", "ab,b->ab"),
        ("cross_entropy", "ab,a->"),
    ]


def test_heads_are_axes_of_the_weights_that_make_them_and_of_the_weight_that_takes_them():
    values = block_graph(heads=2).values
    assert values["blocks.0.attention.qkv.weight"].shape == (8, 3, 2, 4)
    assert values["blocks.0.attention.qkv.weight"].whole == (8, 24)
    assert values["blocks.0.attention.qkv.bias"].shape == (3, 2, 4)
    assert values["blocks.0.attention.output.weight"].shape == (2, 4, 8)
    assert values["blocks.0.expand.weight"].shape == (8, 32)
    assert not {op.kind for op in block_graph().ops} & {"reshape", "transpose"}


def test_a_tied_weight_is_one_value_of_two_ops():
    graph = block_graph(tied=True)
    users = [op for op in graph.ops if "embedding.token.weight" in op.inputs]
    assert [op.kind for op in users] == ["embedding", "matmul"]


def test_what_no_function_records_is_named():
    model = nn.MLP([4, 2], dtype="float64")
    model.freeze("layers.0.bias")
    with pytest.raises(ValueError, match=r"input 2 of Linear needs no gradient.*frozen"):
        trace(model, np.ones((6, 4)), np.zeros(6, int))
    with pytest.raises(ValueError, match="no index description of Power is known"):
        trace(lambda x: x**3, np.ones((6, 4)), np.zeros(6, int))


def test_a_loss_of_other_targets_or_an_embedding_of_other_indices_is_refused():
    """The graph would have the targets as they were given, and so another loss."""
    for loss in (nn.cross_entropy, nn.squared_error):
        classes = loss is nn.cross_entropy
        targets = np.zeros(6, int) if classes else np.ones((6, 2))
        with pytest.raises(ValueError, match="a loss of other values than the targets"):
            trace(
                nn.MLP([4, 2], dtype="float64"),
                np.ones((6, 4)),
                targets,
                lambda y, t, loss=loss: loss(y, 1 - t),
            )
    embedding = nn.Embedding(5, 2, dtype="float64")
    with pytest.raises(ValueError, match="an embedding of other indices than the inputs"):
        trace(lambda x: embedding(4 - x), np.arange(3), np.ones((3, 2)), nn.squared_error)


def test_a_reshape_cuts_axes_into_whole_factors_or_is_refused():
    def reshaped_to(*shape):
        loss = nn.squared_error
        return trace(lambda x: (x * x).reshape(*shape), np.ones((3, 8)), np.ones(shape), loss)

    assert reshaped_to(6, 4).values["multiply.0"].shape == (3, 2, 4)
    assert reshaped_to(24).values["targets"].shape == (3, 8)
    with pytest.raises(ValueError, match="an axis of 3 does not divide into parts of 2"):
        reshaped_to(2, 12)


@pytest.mark.parametrize(
    "indices, words",
    [("ab->ba", "'ba' does not describe y"), ("ab,b->a", "1 inputs"), ("aa->a", "'aa'")],
)
def test_a_description_that_does_not_fit_its_values_is_refused(indices, words):
    values = {
        "x": Value("x", (2, 3), "float64", "input"),
        "y": Value("y", (2,), "float64", "result"),
    }
    with pytest.raises(ValueError, match=words):
        Graph(values, [Op("sum", ("x",), "y", indices)])
