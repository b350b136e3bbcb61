"""Attention to another sequence, its heads over ranks: one device's outputs and gradients."""

import numpy as np
import pytest

from minidist import nn
from minidist.errors import RankFailed
from minidist.tensor_parallel import ParallelPaddedAttention
from minidist.tensor_parallel.parallel_padded_attention import columns_in_blocks
from tests.strategies import arrays
from tests.tensor_parallel.judges import check, judge_layers

HELD = np.array([[True, True, False], [True, False, False], [False] * 3, [True] * 3])


class Reads(nn.Module):
    """X[B, 3 + T, C]: the positions from the third on attend to those before; or all three do."""

    def __init__(self, heads, itself):
        self.itself = itself
        self.attention = nn.PaddedAttention(2 * heads, heads, dtype="float64")

    def forward(self, x, randomness=None):
        memory, x = x[:, :3], x[:, 3:]
        return self.attention(memory if self.itself else x, memory, HELD)


def split(model, group):
    model.attention = ParallelPaddedAttention(model.attention, group)
    return model.flatten()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("itself", [False, True])
def test_it_leaves_what_one_device_does(cluster, itself, size):
    x = arrays(4, 5, 24)
    check(cluster(size, "thread").run(judge_layers, lambda: Reads(12, itself), split, x, 0))


def test_a_rank_takes_its_heads_out_of_every_block():
    linear, own = nn.Linear(6, 12), np.array([1])
    assert columns_in_blocks(linear, 3, own).tolist() == [2, 3, 8, 9]
    assert columns_in_blocks(nn.Linear(6, 6), 3, own).tolist() == [2, 3]


def test_heads_that_do_not_split_are_refused(cluster):
    def worker(group):
        ParallelPaddedAttention(nn.PaddedAttention(12, 3), group)

    with pytest.raises(RankFailed, match="cannot split 3 heads over 2 ranks; use a multiple of 2"):
        cluster(2, "thread").run(worker)
