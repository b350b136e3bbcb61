"""Convolutions cut by their channels: columns and rows, with an image in place of each number.

Dryden et al., Channel and Filter Parallelism for Large-Scale CNN Training (SC 2019), split filters,
which are the output channels, and input channels; Krizhevsky, One weird trick for parallelizing
convolutional neural networks (2014), does so with the matrices of a CNN only. Letters: N ranks, r
this one; X[B, C, H, W], F filters, windows of K x K.

    X -> f -> Y_r[B, F/N, H, W] = X * W_r[F/N, C, K, K] -> norm_r -> relu -> Z_r[B, F/N, H, W]
         g(sum over r of Z_r * V_r[C, F/N, K, K]) + b  -> norm -> + X

A residual block is Megatron's MLP (Shoeybi et al. 2019, section 3): one all_reduce forward (g, of
the output) and one backward (f, of dX). The batch norm between the convolutions needs none: the
rank that has a channel has its pixels of all examples. The norm after g, the skip connection, stem
and head are the same on every rank, and so are their gradients. They are not split: in a block that
doubles the channels, the skip's 1 x 1 convolution is 1/28 of the multiply-adds.
"""

from minidist import nn
from minidist.autograd import Tensor
from minidist.autograd.convolution import convolution
from minidist.comm import Group
from minidist.errors import WrongInput
from minidist.nn.cnn import ConvBlock
from minidist.nn.linear import ACTIVATIONS
from minidist.parallel import check_same_weights
from minidist.parallel.collective_functions import copy_to, reduce_from
from minidist.rng import Randomness
from minidist.tensor_parallel.column_parallel import own_run
from minidist.tensor_parallel.whole import SPLIT


class FilterParallelConv2d(nn.Module):
    """Y[B, F/N, H', W'] = activation(f(X[B, C, H, W]) * W[F/N, C, K, K] + b[F/N]).

    conv  the whole layer, the same on every rank; the rank's filters are copied
    """

    def __init__(self, conv: nn.Conv2d, group: Group):
        self.group, self.activation = group, conv.activation
        self.stride, self.padding = conv.stride, conv.padding
        full = len(conv.weight)
        filters = nn.Shard(0, own_run(full, group, "output channels"), full)
        self.weight = conv.weight.part(filters, SPLIT)
        self.bias = None if conv.bias is None else conv.bias.part(filters, SPLIT)

    def forward(self, x: Tensor, randomness: Randomness | None = None) -> Tensor:
        x = copy_to(x, self.group)
        y = convolution(x, self.weight, self.bias, self.stride, self.padding)
        return ACTIVATIONS[self.activation](y)


class ChannelParallelConv2d(nn.Module):
    """Y[B, F, H', W'] = activation(g(X[B, C/N, H, W] * W[F, C/N, K, K]) + b[F]).

    conv  the whole layer, the same on every rank; the rank's input channels are copied
    """

    def __init__(self, conv: nn.Conv2d, group: Group):
        self.group, self.activation = group, conv.activation
        self.stride, self.padding = conv.stride, conv.padding
        full = conv.weight.shape[1]
        channels = nn.Shard(1, own_run(full, group, "input channels"), full)
        self.weight, self.bias = conv.weight.part(channels, SPLIT), conv.bias

    def forward(self, x: Tensor, randomness: Randomness | None = None) -> Tensor:
        y = convolution(x, self.weight, None, self.stride, self.padding)
        y = reduce_from(y, self.group)
        return ACTIVATIONS[self.activation](
            y if self.bias is None else y + self.bias.reshape(-1, 1, 1)
        )


def keep_own_channels(norm: nn.BatchNorm, group: Group) -> nn.BatchNorm:
    """Keep in a norm this rank's channels, in place: X[B, C/N, H, W]; return it."""
    full = norm.gain.size
    channels = nn.Shard(0, own_run(full, group, "channels"), full)
    for name in ("gain", "bias", "running_mean", "running_var"):
        setattr(norm, name, getattr(norm, name).part(channels, SPLIT))
    return norm


def channel_parallel(model: nn.CNN, group: Group, check_weights: bool = True) -> nn.CNN:
    """Split both convolutions of every block over the ranks, in place; return the model.

    model  a single-device CNN, the same on every rank: images[B, C, H, W] -> logits, on every rank
    check_weights
           whether the ranks first compare their weights (see check_same_weights)
    """
    if not isinstance(model, nn.CNN):
        raise WrongInput(f"cannot split the channels of {type(model).__name__}; use an nn.CNN")
    if check_weights:
        check_same_weights(model, group)
    blocks = [block for block in model.layers if isinstance(block, ConvBlock)]
    for block in blocks:  # an error leaves the model as it was
        own_run(len(block.first.conv.weight), group, "output channels")
    for block in blocks:
        block.first.conv = FilterParallelConv2d(block.first.conv, group)
        block.first.norm = keep_own_channels(block.first.norm, group)
        block.second.conv = ChannelParallelConv2d(block.second.conv, group)
    model.flatten()
    return model
