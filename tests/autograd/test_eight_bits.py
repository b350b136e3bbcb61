"""Products of eight-bit numbers: whose scale is whose, and what is lost."""

import numpy as np
import pytest

from minidist import Tensor
from minidist.autograd import functions
from minidist.autograd.eight_bits import EightBits
from minidist.autograd.number_format import NumberFormat
from minidist.backend import E4M3, E5M2, rounded, widen
from tests.strategies import arrays


def gradients(x, w, dy, how, transposed=False):
    """Return Y, dX and dW of a product with a weight."""
    x, w = (Tensor(array, requires_grad=True) for array in (x, w))
    w.format = NumberFormat(product=how)
    y = functions.linear(x, w, transposed=transposed)
    y.backward(dy)
    return y.data, x.grad, w.grad


def scaled(x, form, rows, columns):
    """Return X in a format of eight bits, each block of rows x columns with a scale; by loops."""
    found = np.empty_like(x)
    for i in range(0, x.shape[0], rows):
        for j in range(0, x.shape[1], columns):
            block = x[i : i + rows, j : j + columns]
            scale = np.abs(block).max() / form.largest
            found[i : i + rows, j : j + columns] = rounded(block / scale, form) * scale
    return found


@pytest.mark.parametrize("form", [E4M3, E5M2])
def test_forward_and_backward_are_products_of_blocks_that_were_rounded_one_by_one(form):
    """X[10, 7] and dY in strips of 4, the last one shorter; W[7, 9] in blocks of 4 x 4."""
    x, w, dy = arrays(10, 7, seed=1), arrays(7, 9, seed=2), arrays(10, 9, seed=3)
    y, dx, dw = gradients(x, w, dy, EightBits(4, gradient=form))
    weight = scaled(w, E4M3, 4, 4)
    np.testing.assert_allclose(y, scaled(x, E4M3, 1, 4) @ weight, rtol=1e-12)
    np.testing.assert_allclose(dx, scaled(dy, form, 1, 4) @ weight.T, rtol=1e-12)
    want = scaled(x, E4M3, 4, 1).T @ scaled(dy, form, 4, 1)
    np.testing.assert_allclose(dw, want, rtol=1e-12, atol=1e-12)
    for found, exact in zip((y, dx, dw), (x @ w, dy @ w.T, x.T @ dy), strict=True):
        assert 0 < abs(found - exact).max() < 0.2 * abs(exact).max()


def test_each_block_of_a_weight_has_its_own_scale():
    w = np.kron(2.0 ** np.array([[0, 12], [-12, 3]]), np.ones((4, 4)))
    one = np.eye(8)
    found = gradients(one, w, one, EightBits(4))
    for y, exact in zip(found, (w, w.T, one), strict=True):
        wrong = abs(y - exact).max(initial=0) / abs(exact).max()
        assert wrong < 1e-12, f"{wrong:.3g} of the largest: it is the scale of another block"


@pytest.mark.parametrize("block", [4, None])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_whole_numbers_up_to_7_lose_nothing(block, dtype):
    """7 becomes the largest number: 448 = 64 x 7, 57344 = 8192 x 7. So no number is rounded."""
    x, w, dy = (np.random.default_rng(i).integers(-7, 8, (8, 8)).astype(dtype) for i in range(3))
    for array in x, w, dy:
        np.fill_diagonal(array, 7)
        np.fill_diagonal(array[::-1], 7)  # in every strip and block of 4 there is a 7
    wide = widen(x), widen(w), widen(dy)
    want = gradients(*wide, None)
    for found, exact in zip(gradients(x, w, dy, EightBits(block)), want, strict=True):
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, exact)
