"""Values of the operators against NumPy; their gradients are held to differences elsewhere."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist import Tensor
from minidist.autograd import functions
from tests.strategies import arrays, broadcastable, host, seeds, shapes


def equal(got, want):
    np.testing.assert_array_equal(host(got), want)


@given(data=st.data(), shape=shapes(), seed=seeds)
def test_elementwise_operators_are_those_of_numpy_with_broadcasting(data, shape, seed):
    a = arrays(*data.draw(broadcastable(shape)), seed=seed)
    b = arrays(*data.draw(broadcastable(shape)), seed=seed + 1)
    equal(Tensor(a) + Tensor(b), a + b)
    equal(Tensor(a) - Tensor(b), a - b)
    equal(Tensor(a) * Tensor(b), a * b)
    equal(Tensor(a) / Tensor(b), a / b)


def test_numbers_and_arrays_may_stand_on_either_side(place):
    x, a = arrays(3, 3), arrays(3, 3, seed=1)
    t, b = Tensor(place(x)), place(a)
    equal(2 + t, 2 + x)
    equal(2 - t, 2 - x)
    equal(2 * t, 2 * x)
    equal(2 / t, 2 / x)
    equal(-t, -x)
    for got, want in [(b + t, a + x), (b - t, a - x), (b * t, a * x), (b / t, a / x)]:
        equal(got, want)
    np.testing.assert_allclose(host(b @ t), a @ x, rtol=1e-12)


def test_matmul_broadcasts_its_batch_axes(place):
    a, b = arrays(2, 1, 3, 4), arrays(5, 4, 2, seed=1)
    got = Tensor(place(a)) @ Tensor(place(b))
    np.testing.assert_allclose(host(got), np.einsum("imjk,mkl->imjl", a.repeat(5, 1), b))


def test_reshape_and_transpose_take_numbers_or_one_tuple(place):
    x = arrays(2, 3, 4)
    t = Tensor(place(x))
    equal(t.reshape(6, 4), x.reshape(6, 4))
    equal(t.reshape((6, -1)), x.reshape(6, 4))
    equal(t.reshape(-1), x.reshape(-1))
    equal(t.transpose(2, 0, 1), x.transpose(2, 0, 1))
    equal(t.transpose((0, -1, 1)), x.transpose(0, 2, 1))
    equal(t.T, x.T)


def test_concatenate(place):
    a, b = arrays(2, 1), arrays(2, 3, seed=1)
    got = functions.concatenate([Tensor(place(a)), Tensor(place(b))], axis=1)
    equal(got, np.concatenate([a, b], axis=1))


@pytest.mark.parametrize(
    ("index", "outside"),
    [
        (np.array([0, 3]), 3),
        (np.array([[-4, 0]]), -4),
        ([0, 3], 3),
        ((slice(None), np.array([0, 4])), 4),
        ((Ellipsis, np.array([5, 0])), 5),
        ((0, Ellipsis, np.array([5])), 5),
        ((None, np.array([0, 2]), slice(None), np.array([0, -6])), -6),
        ((np.ones((3, 4), bool), np.array([5])), 5),
        ((np.array([2]), np.array([-5]), Ellipsis), -5),
    ],
)
def test_an_array_of_indices_that_are_outside_is_an_error_on_any_device(index, outside, place):
    t = Tensor(place(arrays(3, 4, 5)))
    parts = index if isinstance(index, tuple) else (index,)
    on_device = tuple(place(p) if isinstance(p, np.ndarray) else p for p in parts)
    for there in (index, on_device):
        with pytest.raises(IndexError, match=f"index {outside} is out"):
            _ = t[there]


def test_an_array_of_indices_gives_the_elements_of_numpy_on_any_device(place):
    x = arrays(3, 4, 5)
    masks = np.arange(12).reshape(3, 4) % 2 == 0
    for index in [
        np.array([-3, 2, 0]),
        (slice(1), np.array([[3], [-4]])),
        (Ellipsis, np.array([4, -5])),
        (np.array([0, 1]), None, np.array([3, 0])),
        masks,
        (masks, np.array([0])),
        np.array([], int),
    ]:
        parts = index if isinstance(index, tuple) else (index,)
        on_device = tuple(place(p) if isinstance(p, np.ndarray) else p for p in parts)
        t = Tensor(place(x), requires_grad=True)
        y = t[on_device]
        equal(y, x[index])
        y.sum().backward()
        want = np.zeros_like(x)
        np.add.at(want, index, 1)
        equal(t.grad, want)
