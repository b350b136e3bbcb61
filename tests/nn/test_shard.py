"""A shard is some rows or columns of a global array, and all shards are the array again."""

import copy
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist import nn
from tests.strategies import arrays, seeds


@st.composite
def cuts(draw):
    """Draw a whole array, an axis, and shards that deal its indices, and padding, in any order."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    axis = draw(st.integers(0, len(shape) - 1))
    full, ranks = shape[axis], draw(st.integers(1, 4))
    each = -(-full // ranks) + draw(st.integers(0, 1))
    order = draw(st.permutations(range(each * ranks)))
    shards = [
        nn.Shard(axis, np.array(order[r * each : (r + 1) * each]), full) for r in range(ranks)
    ]
    return arrays(*shape, seed=draw(seeds)), axis, shards


@given(cut=cuts())
def test_joining_all_parts_gives_the_whole_in_its_order(cut):
    whole, axis, shards = cut
    parts = np.concatenate([shard.of(whole) for shard in shards], axis)
    indices = np.concatenate([shard.indices for shard in shards])
    np.testing.assert_array_equal(shards[0].join(parts, indices), whole, strict=True)


@given(cut=cuts())
def test_a_part_has_its_elements_and_zeros_where_there_is_padding(cut):
    whole, axis, shards = cut
    for shard in shards:
        part = np.moveaxis(shard.of(whole), axis, 0)
        for row, index in zip(part, shard.indices, strict=True):
            want = np.moveaxis(whole, axis, 0)[index] if index < shard.full else 0
            np.testing.assert_array_equal(row, np.broadcast_to(want, row.shape))
        assert shard.whole_shape(shard.of(whole).shape) == whole.shape


def part_of(p, indices, axis=0):
    return p.part(nn.Shard(axis, np.array(indices), p.shape[axis]))


class Half(nn.Module):
    def __init__(self):
        self.weight = part_of(nn.Linear(4, 3, dtype="float64").weight, [1, 3])

    def forward(self, x, randomness=None):
        return x @ self.weight


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copied_model_knows_its_shards_and_stays_flat(copied):
    model = copied(nn.Sequential([Half()]))
    p = model.parameters()[0]
    assert (p.shard.axis, p.shard.indices.tolist(), p.shard.full) == (0, [1, 3], 4)
    assert np.shares_memory(p.data, p.home.vector) and p.data.shape == (2, 3)
