"""Each split layer alone, of any size: output, gradients and dX are the whole layer's. And what
no layer or model can be split by, with the numbers.
"""

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist import Mesh, Tensor, nn
from minidist.context_parallel import context_parallel
from minidist.errors import RankFailed, is_wrong_input
from minidist.hybrid import Hybrid
from minidist.parallel.collective_functions import gather
from minidist.rng import Randomness
from minidist.tensor_parallel import (
    ChannelParallelConv2d,
    ColumnParallelLinear,
    FilterParallelConv2d,
    ParallelPaddedAttention,
    ParallelTransformer,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
)
from minidist.tensor_parallel.channel_parallel import channel_parallel
from minidist.tensor_parallel.sequence_parallel import sequence_parallel
from minidist.tensor_parallel.spatial_parallel import Halos, spatial_parallel
from minidist.verify.strategies.cases import random_weights, translator_case
from tests.strategies import arrays, seeds
from tests.tensor_parallel.judges import check, config_of, judge_layers

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


@pytest.mark.parametrize("layer", [columns, rows, filters, channels, padded_heads, embedding, head])
@settings(max_examples=20)
@given(data=st.data(), size=st.integers(1, 4), seed=seeds)
def test_a_split_layer_leaves_the_whole_layers_output_and_gradients(
    cluster, layer, data, size, seed
):
    build, split, shape, options = layer(data.draw, size)
    judge = partial(judge_layers, **options)
    check(cluster(size, "thread").run(judge, build, split, arrays(*shape, seed=seed), seed))


def test_a_layer_whose_output_is_a_sum_adds_its_bias_once(cluster):
    def worker(group):
        row = random_weights(nn.Linear(12, 3, dtype="float64"), 1)
        conv = random_weights(nn.Conv2d(12, 3, 3, padding=1, dtype="float64"), 1)
        row, conv = RowParallelLinear(row, group), ChannelParallelConv2d(conv, group)
        zeros = Tensor(np.zeros((2, 12 // group.size, 4, 4)))
        times = [row(zeros[..., 0, 0]).data[0] / row.bias.data]
        return [*times, conv(zeros).data[0, :, 0, 0] / conv.bias.data]

    for size in 1, 3:
        for found in cluster(size, "thread").run(worker):
            for times in found:
                assert times == pytest.approx([1] * 3), f"the bias is added {times[0]:.0f} times"


def test_the_input_may_be_the_same_tensor_twice(cluster):
    """Each use of X adds to dX, each after an all_reduce of its own."""

    def build():
        return TwoUses(nn.Linear(3, 12, name="a", dtype="float64"))

    def split(model, group):
        model.layer = ColumnParallelLinear(model.layer, group, gather_output=True)
        return model

    class TwoUses(nn.Module):
        def __init__(self, layer):
            self.layer = layer

        def forward(self, x, randomness=None):
            return self.layer(x) * self.layer(x + x)

    check(cluster(3).run(judge_layers, build, split, arrays(4, 3), 0))


def test_columns_move_nothing_unless_the_output_is_gathered_or_the_input_needs_a_gradient(cluster):
    def worker(group):
        whole, found = nn.Linear(4, 6, dtype="float64"), []
        before = whole.weight.data.copy()
        for gather_output in (False, True):
            layer = ColumnParallelLinear(whole, group, gather_output=gather_output)
            layer(arrays(5, 4)).sum().backward()  # X is data: backward has nothing to add up
            found.append(group.ledger.total)
            layer.weight.data[...] = 9  # a copy
        return found, np.array_equal(whole.weight.data, before)

    assert cluster(3, "thread").run(worker) == [([0, 2 * 5 * 2 * 8], True)] * 3


def test_a_split_cnn_takes_the_state_of_one_device_and_evaluates_as_it_does(cluster):
    def worker(group):
        whole = nn.CNN(2, 3, (3, 6), seed=5, dtype="float64")
        x = Tensor(arrays(3, 2, 4, 4))
        whole(x)  # moves the running statistics
        split = channel_parallel(nn.CNN(2, 3, (3, 6), dtype="float64"), group)
        split.load_state(whole.state())
        return abs(split.eval()(x).data - whole.eval()(x).data).max()

    assert max(cluster(3, "thread").run(worker)) < 1e-12


def test_a_block_that_does_not_split_leaves_all_others_whole(cluster):
    def worker(group):
        model = nn.CNN(1, 3, (4, 5))
        with pytest.raises(ValueError, match="cannot split 5 output channels over 2 ranks"):
            channel_parallel(model, group)
        return all(type(block.first.conv) is nn.Conv2d for block in model.layers[1:-1])

    assert all(cluster(2, "thread").run(worker))


def loads(**other):
    """Return a worker whose model, of config_of(), loads the state of another one."""

    def worker(group):
        model = ParallelTransformer(nn.Transformer(**config_of()), group)
        model.load_state(nn.Transformer(**config_of(**other)).state() if other else model.state())

    return worker


def calls(split, positions, **more):
    """Return a worker that calls a split Transformer on so many positions."""

    def worker(group):
        model = split(nn.Transformer(**config_of(**more)), group)
        model(np.zeros((1, positions), int), Randomness(0, 0, [0]))

    return worker


def tp(split):
    return lambda group: split(nn.Siamese([4, 4]), Mesh(group, dp=1, pp=1, tp=2))


def image_rows(group):
    spatial_parallel(nn.CNN(1, 2, (4,)), group, 8)(arrays(1, 1, 5, 4, dtype="float32"))


two_sequences = translator_case(width=12, heads=6).model
cnn = nn.CNN(1, 2, (4, 6))
no_transformer = r"split the matrices of \w+; use an nn\.Transformer"
REFUSED = [
    (
        lambda g: ColumnParallelLinear(nn.Linear(4, 7), g),
        "cannot split 7 columns over 2 ranks",
    ),
    (
        lambda g: RowParallelLinear(nn.Linear(1, 4), g),
        "cannot split 1 rows over 2 ranks; use",
    ),
    (
        lambda g: RowParallelLinear(nn.Linear(6, 4), g)(Tensor(arrays(2, 6, dtype="float32"))),
        r"input \[2, 6\] needs 3 columns",
    ),
    (lambda g: FilterParallelConv2d(nn.Conv2d(4, 7, 3), g), "cannot split 7 output channels over"),
    (
        lambda g: ChannelParallelConv2d(nn.Conv2d(3, 4, 3), g),
        "cannot split 3 input channels over",
    ),
    (lambda g: channel_parallel(nn.MLP([2, 2]), g), r"channels of MLP; use an nn\.CNN"),
    (lambda g: channel_parallel(nn.CNN(1, 2, (4,), seed=g.rank), g), "parameters differ between"),
    (
        lambda g: ParallelPaddedAttention(nn.PaddedAttention(12, 3), g),
        "cannot split 3 heads over 2 ranks; use a multiple of 2",
    ),
    (
        lambda g: VocabParallelEmbedding(nn.Embedding(5, 3), g)(np.array([[5]])),
        "token 5 is outside",
    ),
    (lambda g: VocabParallelEmbedding(nn.Embedding(5, 3), g)(np.array([[-1]])), "negative"),
    (loads(vocab=20), r"embedding\.token\.weight is \[7, 12\] in the model, \[20, 12\]"),
    (loads(depth=2), r"'blocks\.1\.attention\.output\.bias' is missing in the model"),
    (loads(), r"in the model, .* in the state"),  # a part in place of the whole
    (
        calls(ParallelTransformer, 4, heads=3),
        "cannot split 3 heads over 2 ranks; use a multiple of 2",
    ),
    (
        calls(sequence_parallel, 5, heads=2),
        "a sequence of 5 positions over 2 ranks; use",
    ),
    (calls(ParallelTransformer, 13), "13 tokens do not fit a context of 12"),
    (calls(sequence_parallel, 14), "14 tokens do not fit a context of 12"),
    (
        lambda g: sequence_parallel(two_sequences, g),
        r"has two, of 4 and 5 positions; use ParallelTran",
    ),
    (lambda g: context_parallel(two_sequences, g), r"a source of 4 positions and a target; leave"),
    (tp(lambda model, mesh: ParallelTransformer(model, mesh.tp)), no_transformer),
    (tp(lambda model, mesh: sequence_parallel(model, mesh.tp)), no_transformer),
    (tp(lambda model, mesh: Hybrid(model, mesh)), no_transformer),
    (
        lambda g: spatial_parallel(nn.MLP([2, 2]), g, 8),
        "images of MLP; use an nn.CNN",
    ),
    (
        lambda g: spatial_parallel(cnn, g, 7),
        r"cannot cut images of 7 rows into squares of 2 x 2; use a mult",
    ),
    (lambda g: spatial_parallel(cnn, g, 2), "cannot split 2 rows of an image over 2 ranks: rank 1"),
    (lambda g: Halos((0, 1, 2, 3, 4), 3, 2, 1), "over 4 ranks: rank 1 would have none"),
    (image_rows, "has 4 rows of an image, not 5"),
]


def test_what_does_not_split_is_refused_with_the_numbers(cluster):
    for worker, message in REFUSED:
        with pytest.raises(RankFailed, match=message) as caught:
            cluster(2, "thread").run(worker)
        assert is_wrong_input(caught.value), message
