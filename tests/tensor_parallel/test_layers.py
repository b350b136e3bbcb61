"""Each split layer alone, of any size: output, gradients and dX are the whole layer's."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist import nn
from minidist.parallel.collective_functions import gather
from minidist.tensor_parallel import (
    ChannelParallelConv2d,
    ColumnParallelLinear,
    FilterParallelConv2d,
    ParallelPaddedAttention,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
)
from tests.strategies import arrays, seeds
from tests.tensor_parallel.judges import check, judge_layers

DOUBLE = {"dtype": "float64"}
activations = st.fixed_dictionaries(
    {"bias": st.booleans(), "activation": st.sampled_from(["identity", "relu", "gelu"])}
)
few, batches = st.integers(1, 3), st.lists(st.integers(0, 4), min_size=1, max_size=2)


def columns(draw, size):
    gathered, C, more = draw(st.booleans()), draw(few), draw(activations)
    build = partial(nn.Linear, C, draw(few) * size, **more, **DOUBLE)
    split = partial(ColumnParallelLinear, gather_output=gathered)
    return build, split, [*draw(batches), C], {"split_output": not gathered}


def rows(draw, size):
    scattered, C, more = draw(st.booleans()), draw(few) * size, draw(activations)
    build = partial(nn.Linear, C, draw(few), **more, **DOUBLE)
    split = partial(RowParallelLinear, scatter_input=scattered)
    return build, split, [*draw(batches), C], {"split_input": not scattered}


def window(draw):
    """Draw (kernel, stride, padding) and (height, width) of a convolution that fits."""
    kernel, stride = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    padding = draw(st.integers(0, kernel))
    sides = st.integers(max(1, kernel - 2 * padding), 5)
    return (kernel, stride, padding), (draw(sides), draw(sides))


def filters(draw, size):
    (how, sides), B, more = window(draw), draw(st.integers(0, 3)), draw(activations)
    build = partial(nn.Conv2d, 3, draw(few) * size, *how, **more, **DOUBLE)
    return build, FilterParallelConv2d, [B, 3, *sides], {"split_output": True, "axis": 1}


def channels(draw, size):
    (how, sides), B, more = window(draw), draw(st.integers(0, 3)), draw(activations)
    C = draw(few) * size
    build = partial(nn.Conv2d, C, 3, *how, **more, **DOUBLE)
    return build, ChannelParallelConv2d, [B, C, *sides], {"split_input": True, "axis": 1}


class Reads(nn.Module):
    """X[B, 3 + T, C]: the positions from the third on attend to those before; or all three do."""

    def __init__(self, heads, itself, held):
        self.itself, self.held = itself, held
        self.attention = nn.PaddedAttention(2 * heads, heads, **DOUBLE)

    def forward(self, x, randomness=None):
        memory, x = x[:, :3], x[:, 3:]
        return self.attention(memory if self.itself else x, memory, self.held)


def padded_heads(draw, size):
    """As few as one head per rank; some examples are padding alone, or there are none."""
    heads, B = draw(few) * size, draw(st.integers(0, 4))
    held = np.array([[1, 1, 0], [1, 0, 0], [0, 0, 0], [1, 1, 1]], bool)[:B]

    def split(model, group):
        model.attention = ParallelPaddedAttention(model.attention, group)
        return model.flatten()

    return partial(Reads, heads, draw(st.booleans()), held), split, [B, 5, 2 * heads], {}


class Looks(nn.Module):
    """Y[B, T, C] = X + the rows of an embedding at the tokens."""

    def __init__(self, vocab, tokens):
        self.tokens, self.embedding = tokens, nn.Embedding(vocab, 3, **DOUBLE)

    def forward(self, x, randomness=None):
        return x + self.embedding(self.tokens)


def embedding(draw, size):
    """The vocabulary is any number: some ranks have padding, or nothing else."""
    vocab, B = draw(st.integers(1, 9)), draw(st.integers(0, 3))

    def split(model, group):
        model.embedding = VocabParallelEmbedding(model.embedding, group)
        return model

    tokens = np.random.default_rng(vocab).integers(0, vocab, (B, 5))
    return partial(Looks, vocab, tokens), split, [B, 5, 3], {}


def head(draw, size):
    """The logits are joined without their padding."""
    vocab, tied, B = draw(st.integers(1, 9)), draw(st.booleans()), draw(st.integers(0, 3))

    def build():
        weight = nn.Embedding(vocab, 3, **DOUBLE).weight if tied else None
        return nn.Head(3, vocab, weight, **DOUBLE)

    class Joined(nn.Module):
        def __init__(self, head, group):
            table = None
            if tied:
                table = nn.Embedding(vocab, 3, **DOUBLE)
                table.weight = head.weight
                table = VocabParallelEmbedding(table, group).weight
            self.head, self.group = VocabParallelHead(head, group, table), group

        def forward(self, x, randomness=None):
            return gather(self.head(x), self.group)[..., :vocab]

    return build, Joined, [B, 4, 3], {}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("layer", [columns, rows, filters, channels, padded_heads, embedding, head])
@settings(max_examples=8)
@given(data=st.data(), seed=seeds)
def test_a_split_layer_leaves_the_whole_layers_output_and_gradients(
    cluster, layer, size, data, seed
):
    build, split, shape, options = layer(data.draw, size)
    judge = partial(judge_layers, **options)
    check(cluster(size, "thread").run(judge, build, split, arrays(*shape, seed=seed), seed))
