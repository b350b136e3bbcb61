"""How batches are dealt to ranks and micro-batches."""

import itertools

import numpy as np
import pytest

from minidist import datasets
from minidist.nn.datasets import Sampler, batch


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


GRID = list(itertools.product([1, 5, 8], [1, 3, 8, 20], [1, 2, 3, 9], [1, 2, 5]))


@pytest.mark.parametrize(("examples", "batch", "size", "micro_batches"), GRID)
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


@pytest.mark.parametrize("name", ["examples", "batch", "size", "micro_batches"])
def test_a_sampler_deals_one_or_more_of_everything(name):
    options = {"examples": 3, "batch": 2} | {name: 0}
    with pytest.raises(ValueError, match=rf"{name}=0.*must be 1 or more"):
        Sampler(**options)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_sampler_needs_a_rank_of_its_size(rank):
    with pytest.raises(ValueError, match=f"rank {rank} is no rank of 2; use 0 to 1"):
        Sampler(3, 2, rank=rank, size=2)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("size", "micro_batches"), [(1, 1), (3, 2)])
def test_a_sampler_goes_on_after_every_batch(size, micro_batches, shuffle):
    for rank in range(size):
        sampler = Sampler(11, 4, 5, rank, size, micro_batches, shuffle)
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


def test_going_on_draws_no_epoch_that_is_over(monkeypatch):
    drawn, draw = [], batch.generator
    monkeypatch.setattr(batch, "generator", lambda *key: drawn.append(key) or draw(*key))
    next(Sampler(11, 4, 5).after(3 * 10**9 + 2))
    assert drawn == [(5, f"epoch {10**9}")]


def test_a_sampler_cannot_go_on_before_the_first_batch():
    with pytest.raises(ValueError, match="cannot go on after -1 examples; use 0 or more"):
        Sampler(3, 2).after(-1)


def test_without_shuffling_every_epoch_has_the_order_given():
    shares = itertools.islice(Sampler(5, 2, shuffle=False), 6)
    assert [share.examples.tolist() for share in shares] == 2 * [[0, 1], [2, 3], [4]]
