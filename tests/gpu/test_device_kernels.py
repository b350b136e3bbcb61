"""Kernels written in C: what a GPU and the stand-in both do, and what only the stand-in refuses."""

import numpy as np
import pytest

from minidist.backend import device_module, to_device, to_host

pytestmark = pytest.mark.gpu

X = np.array([[0.5, -2, 3], [4, 0, -6]], "float32")


@pytest.fixture
def cp():
    return device_module("gpu")


def gpu(x):
    return to_device(x, "gpu")


def test_inputs_broadcast_and_raw_ones_are_indexed(cp):
    text = "y = x + column + table[i % 3]"
    kernel = cp.ElementwiseKernel("T x, T column, raw T table", "T y", text, "tested")
    got = kernel(gpu(X), gpu(X[:, :1]), gpu(X[1]))
    np.testing.assert_array_equal(to_host(got), X + X[:, :1] + X[1])
    assert kernel(gpu(X[:0]), gpu(X[:1, :1]), gpu(X[1])).shape == (0, 3)
    count = cp.ElementwiseKernel("raw T x", "int64 y", "y = i", "tested")
    assert to_host(count(gpu(X), size=4)).tolist() == [0, 1, 2, 3]


def test_outputs_may_be_read_and_be_inputs_too(cp):
    y = gpu(X)
    cp.ElementwiseKernel("T x, T a", "T y", "y = y * a + x", "tested")(y, 2, y)
    np.testing.assert_array_equal(to_host(y), X * 3)


@pytest.mark.parametrize("axis", [None, 0, 1, (0, 1)])
@pytest.mark.parametrize("keepdims", [False, True])
def test_a_reduction_has_numpys_shapes_and_may_have_two_outputs(axis, keepdims, cp):
    where = {"axis": axis, "keepdims": keepdims}
    one = cp.ReductionKernel("T x, T y", "T s", "x * y", "a + b", "s = a + 1", "0", "tested")
    np.testing.assert_array_equal(to_host(one(gpu(X), 2, **where)), (2 * X).sum(**where) + 1)
    preamble = "struct Two { T low, high; };"
    two = cp.ReductionKernel(
        "T x", "T low, T high", "Two{x, x}",
        "Two{a.low < b.low ? a.low : b.low, a.high > b.high ? a.high : b.high}",
        "low = a.low, high = a.high", "Two{99, -99}", "tested", "Two", preamble=preamble,
    )  # fmt: skip
    want = X.min(**where), X.max(**where)
    found = [cp.empty(np.shape(w), "float32") for w in want]
    two(gpu(X), *found, **where)
    np.testing.assert_array_equal([to_host(f) for f in found], want)
    assert to_host(one(gpu(X[:0]), 2, axis=0)).tolist() == [1, 1, 1]


def elementwise(inputs, text, *arguments):
    kernel = device_module("gpu").ElementwiseKernel(inputs, "T y", text, "tested")
    return kernel(*[gpu(x) if isinstance(x, np.ndarray) else x for x in arguments])


REFUSED = {  # both by CuPy and by the stand-in
    "another dtype": (lambda: elementwise("T x, T z", "y = x", X, X.astype("float64")), TypeError),
    "a dtype that is named": (lambda: elementwise("T x, int64 z", "y = x", X, X), TypeError),
    "too few arguments": (lambda: elementwise("T x, T z", "y = x", X), TypeError),
    "an output of another shape": (lambda: elementwise("T x", "y = x", X, X[0]), ValueError),
    "no array that is not raw": (lambda: elementwise("raw T x", "y = x[i]", X), ValueError),
    "i as a name": (lambda: elementwise("T i", "y = i", X), ValueError),
    "an array of the host": (
        lambda: device_module("gpu").ElementwiseKernel("T x", "T y", "y = x", "tested")(X),
        TypeError,
    ),
}


def test_cupy_refuses():
    for call, error in REFUSED.values():
        with pytest.raises(error):
            call()


MISTAKES = {  # where a GPU computes something else, or slowly
    "double in float32": (lambda: elementwise("T x", "y = x * 0.5", X), SyntaxError),
    "an input is written": (lambda: elementwise("T x", "x = 1; y = x", X), SyntaxError),
    "an element is written": (lambda: elementwise("raw T z, T x", "z[i] = x", X, X), SyntaxError),
    "an index outside": (lambda: elementwise("T x, raw T z", "y = z[i + 1]", X, X), IndexError),
    "digits lost in braces": (
        lambda: device_module("gpu").ReductionKernel(
            "T x", "T y", "One{double(x)}", "a", "y = a.v", "One{0}", "k", "One",
            preamble="struct One { T v; };",
        )(gpu(X)),
        SyntaxError,
    ),
}  # fmt: skip


def test_the_stand_in_refuses_mistakes(cp):
    if not hasattr(cp, "_counters"):
        pytest.skip("a GPU does not refuse this")
    for call, error in MISTAKES.values():
        with pytest.raises(error):
            call()
    x = gpu(np.arange(6.0))
    for inputs, arguments in [("raw T x", (x, x)), ("T x", (x[:-1], x[1:]))]:
        with pytest.raises(ValueError, match="overlaps an output"):
            cp.ElementwiseKernel(inputs, "T y", "y = 1", "tested")(*arguments)
