"""A shard is some rows or columns of a global array, and all shards are the array again."""

import copy
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist import nn, optim
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


@given(cut=cuts())
def test_a_part_is_a_copy(cut):
    whole, _, shards = cut
    before = whole.copy()
    for shard in shards:
        shard.of(whole)[...] = np.nan
    np.testing.assert_array_equal(whole, before)


@pytest.mark.parametrize("shape", [(3, 2), (5, 2), (2, 4)])
def test_an_array_that_is_not_the_whole_is_refused_with_the_numbers(shape):
    with pytest.raises(ValueError, match=rf"a part of 4 along axis 0, .* \[{shape[0]}, "):
        nn.Shard(0, np.array([0, 1]), 4).of(np.zeros(shape))


def part_of(p, indices, axis=0):
    return p.part(nn.Shard(axis, np.array(indices), p.shape[axis]))


def test_a_part_keeps_the_name_and_the_dtype_and_forgets_the_gradient():
    whole = nn.Linear(4, 3, name="here", dtype="float16").weight
    whole.grad = np.ones(whole.shape, "float16")
    part = part_of(whole, [1, 3])
    assert (part.name, part.dtype, part.grad, part.requires_grad) == (
        "here.weight",
        np.float16,
        None,
        True,
    )
    np.testing.assert_array_equal(part.data, whole.data[[1, 3]])


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


def test_flattening_casting_and_freezing_keep_the_shard():
    model = nn.Sequential([Half()]).astype("float32")
    model.freeze()
    assert model.parameters()[0].shard.indices.tolist() == [1, 3]
    model.load_state({"linear.weight": arrays(4, 3)})
    want = arrays(4, 3)[[1, 3]].astype("float32")
    np.testing.assert_array_equal(model.parameters()[0].data, want)


def test_the_optimizer_updates_a_part_as_it_updates_the_whole():
    whole, half = nn.Sequential([nn.Linear(4, 3, False, dtype="float64")]), nn.Sequential([Half()])
    ours, theirs = (optim.AdamW(m.parameters(), lr=0.1) for m in (half, whole))
    for step in range(3):
        grad = arrays(4, 3, seed=step)
        whole.parameters()[0].grad, half.parameters()[0].grad = grad, grad[[1, 3]]
        ours.step()
        theirs.step()
    np.testing.assert_array_equal(half.parameters()[0].data, whole.parameters()[0].data[[1, 3]])
