"""Convolution against sums written out, and against PyTorch; what it refuses and what it keeps."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from minidist import Tensor
from minidist.autograd import convolution as module
from minidist.autograd.convolution import convolution
from tests.strategies import arrays, host, leaf, seeds


def by_sums(x, w, b, stride, padding):
    """Y[b, f, p, q] = sum_cij W[f, c, i, j] X[b, c, s p + i, s q + j] + b[f]."""
    x = np.pad(x, ((0, 0), (0, 0), (padding[0],) * 2, (padding[1],) * 2))
    rows = range(0, x.shape[2] - w.shape[2] + 1, stride)
    columns = range(0, x.shape[3] - w.shape[3] + 1, stride)
    y = np.empty((len(x), len(w), len(rows), len(columns)))
    for (p, i), (q, j) in itertools.product(enumerate(rows), enumerate(columns)):
        window = x[:, :, i : i + w.shape[2], j : j + w.shape[3]]
        y[:, :, p, q] = np.einsum("bcij,fcij->bf", window, w) + b
    return y


@st.composite
def problems(draw):
    stride, padding = draw(st.integers(1, 3)), (draw(st.integers(0, 2)), draw(st.integers(0, 2)))
    kernel = [draw(st.integers(1, 4)) for _ in range(2)]
    sides = [draw(st.integers(max(1, k - 2 * p), 7)) for k, p in zip(kernel, padding, strict=True)]
    B, C, F = draw(st.integers(0, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    x, w = arrays(B, C, *sides, seed=draw(seeds)), arrays(F, C, *kernel, seed=1)
    return x, w, arrays(F, seed=2), stride, padding


@given(problem=problems(), block=st.sampled_from([1, 600, module.BLOCK]))
def test_every_output_is_the_sum_over_its_window_in_blocks_of_any_size(problem, block):
    x, w, b, stride, padding = problem
    before, module.BLOCK = module.BLOCK, block
    try:
        inputs = [Tensor(a, requires_grad=True) for a in (x, w, b)]
        got = convolution(*inputs, stride=stride, padding=padding)
        grad = arrays(*got.shape, seed=3)
        got.backward(grad)
    finally:
        module.BLOCK = before
    np.testing.assert_allclose(got.data, by_sums(*problem), rtol=1e-12, atol=1e-12)
    # The convolution is linear in X and in W: <dX, X> = <dY, Y - b> = <dW, W>.
    want = ((got.data - b[:, None, None]) * grad).sum()
    scale = 1e-12 * (1 + np.abs(grad).sum() * np.abs(w).sum())
    assert abs((inputs[0].grad * x).sum() - want) <= scale
    assert abs((inputs[1].grad * w).sum() - want) <= scale
    np.testing.assert_allclose(inputs[2].grad, grad.sum(axis=(0, 2, 3)), rtol=1e-12, atol=1e-12)


def test_it_runs_on_every_device(place):
    x, w, b = arrays(3, 2, 5, 4), arrays(4, 2, 3, 2, seed=1), arrays(4, seed=2)
    inputs = [Tensor(place(a), requires_grad=True) for a in (x, w, b)]
    y = convolution(*inputs, stride=2, padding=(1, 0))
    y.backward(place(np.ones(y.shape)))
    np.testing.assert_allclose(host(y), by_sums(x, w, b, 2, (1, 0)), rtol=1e-12)
    np.testing.assert_allclose(host(inputs[2].grad), np.full(4, 3 * y.data[0, 0].size))


def test_it_keeps_the_image_and_not_the_columns():
    x, w = leaf(8, 4, 6, 6), leaf(4, 4, 3, 3, seed=1)
    y = convolution(x, w, padding=1)
    kept = [a for a in vars(y.creator).values() if isinstance(a, np.ndarray)]
    assert {id(a) for a in kept} == {id(x.data), id(w.data)}


def test_sums_of_half_precision_are_made_in_single_precision(monkeypatch):
    """In float16, 4096 + 1 is 4096."""
    monkeypatch.setattr(module, "BLOCK", 1)  # one example at a time

    def ones(*shape):
        return Tensor(np.ones(shape, "float16"), requires_grad=True)

    large = np.array([4096, 1, -4096], "float16")
    x, w, b = ones(3, 1, 1, 1), ones(1, 1, 1, 1), ones(1)
    convolution(x, w, b).backward(large.reshape(3, 1, 1, 1))
    assert (w.grad.item(), b.grad.item()) == (1, 1)
    x, w = ones(1, 1, 1, 5), Tensor(large.reshape(1, 1, 1, 3))
    convolution(x, w).backward(np.ones((1, 1, 1, 3), "float16"))
    assert x.grad[0, 0, 0, 2] == 1
