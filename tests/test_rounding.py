"""Formats of 16 and 8 bits: every number of a format, and what is between two of them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist import nn, optim
from minidist.backend import BFLOAT16, E4M3, E5M2, FLOAT16, rounded, to_host
from minidist.nn.optim import StochasticRounding
from minidist.rng import draws_for
from tests.strategies import arrays, assert_same_bits, seeds

EIGHT = {"float8_e4m3fn": (E4M3, 7), "float8_e5m2": (E5M2, 15)}  # the bias of the exponent


def numbers(name):
    """Return all numbers from 0 on of a format of 8 bits, by Micikevicius et al. 2022, table 1."""
    form, bias = EIGHT[name]
    below, found = form.bits - 1, []  # bits after the first one
    for code in range(128):
        exponent, fraction = code >> below, code & (2**below - 1)
        lead = 1 if exponent else 0
        value = (lead + fraction / 2**below) * 2.0 ** (max(exponent, 1) - bias)
        if value <= form.largest:  # what is above is inf or no number
            found.append(value)
    return np.array(found)


@pytest.mark.parametrize("name", EIGHT)
def test_every_number_of_a_format_stays_and_a_tie_goes_to_the_even_one(name):
    own, form = numbers(name), EIGHT[name][0]
    assert len(own) == {"float8_e4m3fn": 127, "float8_e5m2": 124}[name]
    assert own[1] == form.smallest and own[-1] == form.largest
    for sign in (1, -1):
        np.testing.assert_array_equal(rounded(sign * own, form), sign * own)
    between = (own[1:] + own[:-1]) / 2
    even = np.where(np.arange(len(between)) % 2, own[1:], own[:-1])
    np.testing.assert_array_equal(rounded(between, form), even)
    np.testing.assert_array_equal(rounded(np.nextafter(between, 0), form), own[:-1])
    np.testing.assert_array_equal(rounded(np.nextafter(between, 1e9), form), own[1:])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("form", [E4M3, E5M2, FLOAT16, BFLOAT16])
def test_too_large_numbers_become_the_largest_and_what_is_not_finite_stays(form, dtype):
    x = np.array([1.001 * form.largest, -3.395e38, np.inf, -np.inf, np.nan], dtype)
    want = np.array([form.largest, -form.largest, np.inf, -np.inf, np.nan], dtype)
    for found in rounded(x, form), rounded(x[2:], form, np.zeros(3)):
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, want[-len(found) :])


def test_float16_is_numpys_to_the_bit():
    every = np.arange(2**16, dtype="uint16").view("float16").astype("float32")
    every = every[np.isfinite(every)]
    drawn = np.random.default_rng(0).standard_normal(10_000).astype("float32")
    for x in every, drawn, drawn * np.float32(2.0**-24), drawn * np.float32(2.0**13):
        np.testing.assert_array_equal(rounded(x, FLOAT16), x.astype("float16").astype("float32"))


@given(seed=seeds, form=st.sampled_from([E4M3, E5M2, FLOAT16, BFLOAT16]))
def test_at_random_a_number_goes_to_a_neighbour_and_is_right_in_the_mean(seed, form):
    x = arrays(5, seed=seed, dtype="float32") * np.float32(2.0 ** (seed % 12 - 6))
    draws = (np.arange(1000) + 0.5)[:, None] / 1000  # as even as can be
    found = rounded(np.broadcast_to(x, (1000, 5)), form, np.broadcast_to(draws, (1000, 5)))
    nearest = rounded(x, form)
    spacing = np.maximum(abs(nearest) * 2.0 ** (1 - form.bits), form.smallest)
    assert (abs(found - x) < spacing).all()
    assert (rounded(found, form) == found).all()
    np.testing.assert_allclose(found.mean(axis=0, dtype="float64"), x, atol=1e-3 * spacing.max())
    assert (rounded(nearest, form, np.full(5, 0.0)) == nearest).all()


# An optimizer that rounds at random.


def moved(rounding, steps=400, rate=2.0**-14):
    """Return the mean of weights of 1 in float16, after steps of 1/16 of their distance."""
    model = nn.MLP([64, 64]).astype("float16")
    weight = model.parameters()[0]
    weight.data[...] = 1
    optimizer = optim.SGD([weight], rate)
    optimizer.rounding = rounding
    for _ in range(steps):
        weight.grad = np.full(weight.shape, -1, "float16")
        optimizer.step()
        optimizer.zero_grad()
    return float(weight.data.astype("float64").mean())


def test_small_updates_are_lost_to_nearest_and_right_in_the_mean_at_random():
    assert moved(None) == 1
    found = moved(StochasticRounding(1))
    assert abs(found - (1 + 400 * 2.0**-14)) < 4e-4, f"the mean weight is {found:.5f}: lost"


@given(seed=seeds, parts=st.integers(2, 4), axis=st.integers(0, 1))
def test_a_rank_that_has_some_rows_or_columns_rounds_them_as_one_device_does(seed, parts, axis):
    """Each rank's part of the weights, of its gradient and of Adam's moments; three steps."""
    g = arrays(12, 12, seed=seed, dtype="float16")

    def steps(model, of):
        optimizer = optim.AdamW(model.parameters(), 1e-3)
        optimizer.rounding = StochasticRounding(seed)
        for _ in range(3):
            model.parameters()[0].grad = of(g)
            optimizer.step()
            optimizer.zero_grad()
        state = optimizer.state[0]
        assert {str(array.dtype) for array in state} == {"float16"}
        return np.stack([model.parameters()[0].data, *(m.reshape(of(g).shape) for m in state)])

    def model():
        return nn.Sequential([nn.Linear(12, 12, False, name="a", seed=3)]).astype("float16")

    want = steps(model(), lambda g: g)
    for own in np.array_split(np.random.default_rng(seed).permutation(12), parts):
        cut, part = nn.Shard(axis, own, 12), model()
        part.layers[0].weight = part.layers[0].weight.part(cut)
        np.testing.assert_array_equal(steps(part.flatten(), cut.of), want.take(own, axis=axis + 1))


def test_stochastic_rounding_is_for_16_bits_and_for_all_elements():
    optimizer = optim.SGD(nn.MLP([2, 2]).parameters(), 0.1)
    optimizer.rounding = StochasticRounding()
    with pytest.raises(ValueError, match="for weights of 16 bits, not float32"):
        optimizer.step()
    optimizer = optim.SGD(nn.MLP([2, 2]).astype("float16").parameters(), 0.1)
    optimizer.rounding = StochasticRounding()
    with pytest.raises(ValueError, match="step_at rounds to nearest"):
        optimizer.step_at(np.array([0]), np.array([1.0], "float16"))


def test_a_device_rounds_and_draws_the_same_bits(place, device):
    x, every = arrays(1000, dtype="float32"), np.arange(1000, dtype="uint64")
    draws = draws_for(3, 4, "w", every)
    theirs = draws_for(3, 4, "w", place(every))
    np.testing.assert_array_equal(to_host(theirs), draws)
    for form in BFLOAT16, E4M3:
        np.testing.assert_array_equal(to_host(rounded(place(x), form)), rounded(x, form))
        found = to_host(rounded(place(x), form, theirs))
        np.testing.assert_array_equal(found, rounded(x, form, draws))
    want, found = (nn.MLP([5, 4], seed=1).astype("float16") for _ in range(2))
    found.to(device)
    for model, put in (want, np.asarray), (found, place):
        optimizer = optim.SGD(model.parameters(), 2.0**-12, momentum=0.5)
        optimizer.rounding = StochasticRounding(2)
        for p in model.parameters():
            p.grad = put(np.ones(p.shape, "float16"))
        optimizer.step()
    assert_same_bits(found.state(), want.state())
