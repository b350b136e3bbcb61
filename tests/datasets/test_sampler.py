"""How batches are dealt to ranks and micro-batches."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist import datasets
from minidist.nn.datasets import Sampler


def test_shards_are_neighbours_of_nearly_equal_size_larger_first():
    parts = [datasets.shard(np.arange(7), rank, 3).tolist() for rank in range(3)]
    assert parts == [[0, 1, 2], [3, 4], [5, 6]]
    assert [len(datasets.shard(np.arange(2), rank, 4)) for rank in range(4)] == [1, 1, 0, 0]


def deal(examples, batch, size=1, micro_batches=1, seed=0, epoch=0):
    """Return one epoch as [batch][rank] -> Share."""
    ranks = [
        Sampler(examples, batch, seed, rank, size, micro_batches).epoch(epoch)
        for rank in range(size)
    ]
    return list(zip(*ranks, strict=True))


@given(
    examples=st.integers(1, 9),
    batch=st.integers(1, 20),
    size=st.integers(1, 9),
    micro_batches=st.integers(1, 5),
)
def test_every_example_comes_exactly_once_per_epoch(examples, batch, size, micro_batches):
    batches = deal(examples, batch, size, micro_batches)
    whole = deal(examples, batch)
    assert len(batches) == len(whole) == len(Sampler(examples, batch))
    dealt = []
    for shares, (alone,) in zip(batches, whole, strict=True):
        assert {share.total for share in shares} == {len(alone.examples)}
        assert {len(share.micro_batches) for share in shares} == {micro_batches}
        together = np.concatenate([share.examples for share in shares])
        np.testing.assert_array_equal(together, alone.examples)  # the same union for any size
        dealt.extend(together)
    assert sorted(dealt) == list(range(examples))


def order(**options):
    return [share.examples.tolist() for (share,) in deal(50, 8, **options)]


def test_an_epoch_is_a_shuffle_of_its_own_and_the_same_for_the_same_seed():
    assert order() == order()
    assert order() != order(epoch=1)
    assert order() != order(seed=1)
    assert order()[0] != list(range(8))


def test_iteration_goes_on_from_epoch_to_epoch():
    sampler = Sampler(50, 8)
    shares = itertools.islice(sampler, 2 * len(sampler))
    assert [share.examples.tolist() for share in shares] == order() + order(epoch=1)


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_sampler_goes_on_after_every_batch(shuffle):
    for rank in range(3):
        sampler = Sampler(11, 4, 5, rank, 3, 2, shuffle)
        whole = list(itertools.islice(sampler, 10))  # three epochs and a batch
        for first in range(len(whole)):
            rest = itertools.islice(sampler.after(first), len(whole) - first)
            for share, expected in zip(rest, whole[first:], strict=True):
                assert share.total == expected.total
                cards = map(np.ndarray.tolist, share.micro_batches)
                assert list(cards) == [part.tolist() for part in expected.micro_batches]


@pytest.mark.parametrize(("batch", "size"), [(3, 1), (4, 2), (7, 3)])
def test_other_ranks_with_other_batches_go_on_after_any_example(batch, size):
    whole = itertools.islice(Sampler(11, 4, 5), 9)  # three epochs
    order = np.concatenate([share.examples for share in whole])
    for done in range(23):
        ranks = [Sampler(11, batch, 5, r, size).after_examples(done) for r in range(size)]
        dealt: list = []
        while len(dealt) < len(order) - done:
            dealt += np.concatenate([next(rank).examples for rank in ranks]).tolist()
        assert dealt == order[done:].tolist()


def test_without_shuffling_every_epoch_has_the_order_given():
    shares = itertools.islice(Sampler(5, 2, shuffle=False), 6)
    assert [share.examples.tolist() for share in shares] == 2 * [[0, 1], [2, 3], [4]]


def test_what_cannot_be_dealt_is_refused():
    for call, message in [
        (lambda: Sampler(3, 0), "batch=0.*must be 1 or more"),
        (lambda: Sampler(3, 2, rank=2, size=2), "rank 2 is no rank of 2; use 0 to 1"),
        (lambda: Sampler(3, 2).after(-1), "cannot go on after -1 examples; use 0 or more"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
