"""Convolutions cut by filters and by channels: output, gradients and statistics are the whole's."""

import copy
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist import Tensor, nn, optim
from minidist.autograd import functions
from minidist.errors import RankFailed
from minidist.planning.costs.collectives import all_reduce_bytes
from minidist.tensor_parallel import ChannelParallelConv2d, FilterParallelConv2d, sum_squares
from minidist.tensor_parallel.channel_parallel import channel_parallel, keep_own_channels
from minidist.tools.compare import compare
from minidist.tools.strategies.cases import collect, random_weights
from minidist.tools.strategies.tensor_parallel import whole_gradients
from tests.strategies import arrays, seeds
from tests.tensor_parallel.judges import check, judge_layers

sizes = pytest.mark.parametrize("size", [1, 2, 3, 4])
few = settings(max_examples=5)
CHANNELS = 1  # the axis


@sizes
def test_channels_add_their_bias_once(cluster, size):
    def worker(group):
        conv = random_weights(nn.Conv2d(12, 3, 3, padding=1, dtype="float64"), 1)
        layer = ChannelParallelConv2d(conv, group)
        zeros = Tensor(arrays(2, 12 // group.size, 4, 4) * 0)
        return layer(zeros).data[0, :, 0, 0] / layer.bias.data

    for times in cluster(size, "thread").run(worker):
        assert times == pytest.approx([1] * 3), f"the bias is added {times[0]:.0f} times, not once"


@st.composite
def windows(draw):
    """Draw (kernel, stride, padding, height, width) of a convolution that fits."""
    kernel, stride = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    padding = draw(st.integers(0, kernel))
    sides = st.integers(max(1, kernel - 2 * padding), 5)
    return kernel, stride, padding, draw(sides), draw(sides)


options = st.fixed_dictionaries(
    {"bias": st.booleans(), "activation": st.sampled_from(["identity", "relu", "gelu"])}
)


@sizes
@few
@given(window=windows(), each=st.integers(1, 2), options=options, B=st.integers(0, 3), seed=seeds)
def test_filters_leave_the_whole_layers_gradients(cluster, size, window, each, options, B, seed):
    *sizes, H, W = window
    build = partial(nn.Conv2d, 3, each * size, *sizes, dtype="float64", **options)
    judge = partial(judge_layers, split_output=True, axis=CHANNELS)
    x = arrays(B, 3, H, W, seed=seed)
    check(cluster(size, "thread").run(judge, build, FilterParallelConv2d, x, seed))


@sizes
@few
@given(window=windows(), each=st.integers(1, 2), options=options, B=st.integers(0, 3), seed=seeds)
def test_channels_leave_the_whole_layers_gradients(cluster, size, window, each, options, B, seed):
    *sizes, H, W = window
    build = partial(nn.Conv2d, each * size, 3, *sizes, dtype="float64", **options)
    judge = partial(judge_layers, split_input=True, axis=CHANNELS)
    x = arrays(B, each * size, H, W, seed=seed)
    check(cluster(size, "thread").run(judge, build, ChannelParallelConv2d, x, seed))


class Branch(nn.Module):
    """conv(relu(norm(conv(X)))): what a residual block adds to X."""

    def __init__(self, more):
        self.first = nn.Conv2d(3, 12, 3, padding=1, name="first", **more)
        self.norm = nn.BatchNorm(12, **more)
        self.second = nn.Conv2d(12, 4, 3, padding=1, name="second", **more)

    def forward(self, x, randomness=None):
        return self.second(functions.relu(self.norm(self.first(x))))


def split_branch(branch, group):
    branch.first = FilterParallelConv2d(branch.first, group)
    branch.norm = keep_own_channels(branch.norm, group)
    branch.second = ChannelParallelConv2d(branch.second, group)
    return branch


@sizes
def test_filters_a_norm_and_then_channels_are_a_branch_with_one_all_reduce_each_way(cluster, size):
    """A norm of one rank's channels has the statistics that one device has, and sends nothing."""
    build = partial(Branch, {"dtype": "float64"})
    check(cluster(size, "thread").run(judge_layers, build, split_branch, arrays(3, 3, 4, 5), 0))

    def bytes_sent(group):
        x = Tensor(arrays(3, 3, 4, 5), requires_grad=True)
        y = split_branch(build(), group)(x)
        forward = group.ledger.total
        y.backward(arrays(*y.shape))
        return forward, group.ledger.total - forward

    outputs, inputs = (all_reduce_bytes(None, 3 * C * 4 * 5, 8, size) for C in (4, 3))
    assert cluster(size, "thread").run(bytes_sent) == list(zip(outputs, inputs, strict=True))


@pytest.mark.parametrize("channels, size", [(7, 2), (2, 3), (9, 4)])
def test_channels_that_do_not_split_are_refused_with_the_numbers(cluster, channels, size):
    message = f"cannot split {channels} (in|out)put channels over {size} ranks; use a multiple of "
    for layer, sides in (
        (FilterParallelConv2d, (4, channels)),
        (ChannelParallelConv2d, (channels, 4)),
    ):
        with pytest.raises(RankFailed, match=message + str(size)) as caught:
            cluster(size, "thread").run(lambda g, a=layer, s=sides: a(nn.Conv2d(*s, 3), g))
        assert isinstance(caught.value.__cause__, ValueError)


def test_a_block_that_does_not_split_leaves_all_others_whole(cluster):
    def worker(group):
        model = nn.CNN(1, 3, (4, 5))
        with pytest.raises(ValueError, match="cannot split 5 output channels over 2 ranks"):
            channel_parallel(model, group)
        return all(type(block.first.conv) is nn.Conv2d for block in model.layers[1:-1])

    assert all(cluster(2, "thread").run(worker))


def test_only_a_cnn_of_the_same_weights_is_split(cluster):
    def other(group):
        channel_parallel(nn.MLP([2, 2]), group)

    def unequal(group):
        channel_parallel(nn.CNN(1, 2, (4,), seed=group.rank), group)

    with pytest.raises(RankFailed, match=r"channels of MLP; use an nn\.CNN"):
        cluster(2, "thread").run(other)
    with pytest.raises(RankFailed, match="parameters differ between ranks"):
        cluster(2, "thread").run(unequal)


def cnn(widths=(12, 24)):
    return random_weights(nn.CNN(2, 3, widths, seed=1, dtype="float64"))


def train(model, batches, squares=None):
    """Make a step per batch, with clipping and AdamW; return the norms."""
    optimizer, norms = optim.AdamW(model.parameters(), lr=1e-2), []
    for images, labels in batches:
        nn.cross_entropy(model(Tensor(images)), labels).backward()
        norms.append(optimizer.clip_global_norm(1.0, sum_squares=squares))
        optimizer.step()
        optimizer.zero_grad()
    return norms


@sizes
def test_three_steps_leave_the_weights_and_statistics_of_one_device(cluster, size):
    batches = [(images, [0, 1, 2, 1]) for images in arrays(3, 4, 2, 4, 4)]

    def worker(group):
        model = cnn()
        whole = copy.deepcopy(model)
        split = channel_parallel(model, group)
        norms = train(split, batches, partial(sum_squares, split, group))
        assert norms == pytest.approx(train(whole, batches))
        want, got = whole.state(), split.state()
        for name, p in split.named_parameters().items():
            want[name] = want[name] if p.shard is None else p.shard.of(want[name])
        return compare([got], want)

    check(cluster(size, "thread").run(worker))


def test_a_split_model_takes_the_state_of_one_device_and_evaluates_as_it_does(cluster):
    def worker(group):
        whole = nn.CNN(2, 3, (12, 24), seed=5, dtype="float64")
        x = Tensor(arrays(3, 2, 4, 4))
        whole(x)  # moves the running statistics
        split = channel_parallel(nn.CNN(2, 3, (12, 24), dtype="float64"), group)
        split.load_state(whole.state())
        return abs(split.eval()(x).data - whole.eval()(x).data).max()

    assert max(cluster(3, "thread").run(worker)) < 1e-12


@pytest.mark.parametrize(
    "size", [1, 2, 3, 4, *(pytest.param(n, marks=pytest.mark.slow) for n in (6, 12))]
)
def test_gradients_and_running_statistics_of_a_cnn_are_one_devices(cluster, size):
    x, dy = arrays(3, 2, 4, 6), arrays(3, 3, seed=1)

    def worker(group):
        model = cnn((12, 12, 24))
        whole, want_x, got_x = copy.deepcopy(model), Tensor(x, True), Tensor(x, True)
        whole(want_x).backward(dy)
        split = channel_parallel(model, group)
        split(got_x).backward(dy)
        want = collect(whole, want_x)
        return compare([whole_gradients(split, group) | {"(input)": got_x.grad}], want)

    check(cluster(size, "thread").run(worker))
