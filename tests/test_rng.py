"""Random numbers depend on names and indices only."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.rng import Randomness, generator, hash_uniform
from tests.strategies import seeds

words = st.integers(0, 2**64 - 1)


def split_mix(key, counter):
    """Return SplitMix64's output for a state, with Python's integers."""
    mask = 2**64 - 1
    z = (counter * 0x9E3779B97F4A7C15 + key) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def test_the_reference_is_split_mix_64():
    """The first outputs of the published generator from state 1234567."""
    outputs = [split_mix(1234567, n) for n in (1, 2, 3)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@given(key=words, counters=st.lists(words, min_size=1))
def test_hash_uniform_is_split_mix_64_scaled_to_one(key, counters):
    got = hash_uniform(key, np.array(counters, np.uint64))
    assert got.tolist() == [(split_mix(key, c) >> 11) / 2**53 for c in counters]
    assert (0 <= got).all() and (got < 1).all()


def test_the_numbers_stay_the_same_over_releases():
    """Weights and masks of this version, so that a change of either shows."""
    keep = Randomness(seed=1, step=2, examples=np.array([3])).keep("dropout", 0.5, (1, 16))
    assert "".join(map(str, keep[0].astype(int))) == "0011111111101000"
    assert generator(0, "layers.0.weight").integers(1000, size=4).tolist() == [493, 214, 798, 56]


@given(seed=seeds, examples=st.lists(st.integers(0, 10**6), max_size=6), data=st.data())
def test_a_mask_does_not_depend_on_who_holds_which_rows(seed, examples, data):
    cut = data.draw(st.integers(0, len(examples)))

    def keep(rows):
        return Randomness(seed, 0, np.array(rows, int)).keep("name", 0.5, (len(rows), 2, 3))

    parts = np.concatenate([keep(examples[:cut]), keep(examples[cut:])])
    np.testing.assert_array_equal(parts, keep(examples))


@given(seed=seeds, data=st.data())
def test_a_rank_with_a_window_of_each_example_has_that_window_of_the_mask(seed, data):
    T, C = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
    window = (slice(data.draw(st.integers(0, T)), T), slice(0, data.draw(st.integers(0, C))))
    randomness = Randomness(seed, 4, np.array([8, 1]))
    whole = randomness.keep("name", 0.5, (2, T, C))
    part_shape = whole[:, *window].shape
    part = randomness.keep("name", 0.5, part_shape, window=window, full_shape=(T, C))
    np.testing.assert_array_equal(part, whole[:, *window])


def test_masks_differ_by_seed_step_name_and_example():
    def keep(seed=0, step=0, example=0, name="name"):
        return Randomness(seed, step, np.array([example])).keep(name, 0.5, (1, 64)).tobytes()

    assert len({keep(), keep(seed=1), keep(step=1), keep(example=1), keep(name="other")}) == 5


@pytest.mark.parametrize("examples", [[0.5, 1.0], [1, -1], [True, False]])
def test_indices_of_examples_are_whole_numbers_from_zero(examples):
    """A mask drawn for example 0 and for example 0.5 would be the same one."""
    with pytest.raises(ValueError, match="indices of examples must be integers"):
        Randomness(0, 0, np.array(examples))


def test_a_document_ends_where_its_number_changes():
    numbers = np.array([[4, 4, 1, 4], [0, 0, 0, 0]])
    of = Randomness(0, 0, np.arange(2), documents=numbers)
    assert of.document_runs(4) == [[(0, 2), (2, 3), (3, 4)], [(0, 4)]]
    assert Randomness(0, 0, np.arange(2)).document_runs(4) is None
    with pytest.raises(ValueError, match=r"documents \[2, 4\] for sequences of 5 positions; give"):
        of.document_runs(5)
