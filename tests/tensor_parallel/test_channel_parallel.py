"""Convolutions cut by filters and by channels: output, gradients and statistics are the whole's."""

import pytest

from minidist import Tensor, nn
from minidist.errors import RankFailed
from minidist.tensor_parallel import ChannelParallelConv2d, FilterParallelConv2d
from minidist.tensor_parallel.channel_parallel import channel_parallel
from minidist.verify.strategies.cases import random_weights
from tests.strategies import arrays

sizes = pytest.mark.parametrize("size", [1, 2, 3, 4])


@sizes
def test_channels_add_their_bias_once(cluster, size):
    def worker(group):
        conv = random_weights(nn.Conv2d(12, 3, 3, padding=1, dtype="float64"), 1)
        layer = ChannelParallelConv2d(conv, group)
        zeros = Tensor(arrays(2, 12 // group.size, 4, 4) * 0)
        return layer(zeros).data[0, :, 0, 0] / layer.bias.data

    for times in cluster(size, "thread").run(worker):
        assert times == pytest.approx([1] * 3), f"the bias is added {times[0]:.0f} times, not once"


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


def test_a_split_model_takes_the_state_of_one_device_and_evaluates_as_it_does(cluster):
    def worker(group):
        whole = nn.CNN(2, 3, (12, 24), seed=5, dtype="float64")
        x = Tensor(arrays(3, 2, 4, 4))
        whole(x)  # moves the running statistics
        split = channel_parallel(nn.CNN(2, 3, (12, 24), dtype="float64"), group)
        split.load_state(whole.state())
        return abs(split.eval()(x).data - whole.eval()(x).data).max()

    assert max(cluster(3, "thread").run(worker)) < 1e-12
