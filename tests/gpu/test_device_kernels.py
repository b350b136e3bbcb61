"""Kernels written in C: what a GPU and the stand-in both do, and what only the stand-in refuses.

x, n, u      float32[2, 3], int64[2, 3] with negative numbers, uint64[2, 3] near the largest
"""

import numpy as np
import pytest

from minidist.backend import device_module, to_device, to_host

pytestmark = pytest.mark.gpu

X = np.array([[0.5, -2, 3], [4, 0, -6]], "float32")
N = np.array([[-7, 7, 3], [2**40, 0, -1]])
U = np.array([[2**64 - 1, 1, 5], [2**63, 0, 7]], "uint64")


@pytest.fixture
def cp():
    return device_module("gpu")


def gpu(x):
    return to_device(x, "gpu")


TEXTS = [  # C, inputs, dtype of y, what NumPy makes of it
    ("y = n / 2", "int64 n", N.dtype, lambda: np.trunc(N / 2).astype("int64")),
    ("y = n % 4", "int64 n", N.dtype, lambda: np.fmod(N, 4)),
    ("y = u * 3 + 1", "uint64 u", U.dtype, lambda: U * np.uint64(3) + np.uint64(1)),
    ("y = u >> 2 ^ u", "uint64 u", U.dtype, lambda: (U >> np.uint64(2)) ^ U),
    ("y = n + u", "int64 n, uint64 u", U.dtype, lambda: N.astype("uint64") + U),
    ("y = n > 2 && x < 1 || !n", "int64 n, T x", "bool", lambda: (N > 2) & (X < 1) | (N == 0)),
    ("y = x < 0 ? -x : x + i", "T x", X.dtype,
        lambda: np.where(X < 0, -X, X + np.arange(6).reshape(2, 3))),
    ("if (x > 0) y = x; else y = T(0.5) * x", "T x", X.dtype, lambda: np.where(X > 0, X, X / 2)),
    ("T s = 0; for (int k = 0; k < i; k++) s += x; y = s", "T x", X.dtype,
        lambda: X * np.arange(6).reshape(2, 3)),
    ("int k = 0; long long m = n; while (m > 1) { m /= 2; k++; } y = k", "int64 n", N.dtype,
        lambda: np.floor(np.log2(np.maximum(N, 1))).astype("int64")),
    ("int d = 5; y = d++ * 100 + d", "T x", "int64", lambda: np.full((2, 3), 506)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "inputs", "dtype", "want"), TEXTS, ids=[text for text, *_ in TEXTS]
)
def test_a_text_computes_what_c_does(text, inputs, dtype, want, cp):
    arrays = {"x": X, "n": N, "u": U}
    given = [gpu(arrays[part.split()[1]]) for part in inputs.split(", ")]
    y = cp.empty((2, 3), dtype)
    cp.ElementwiseKernel(inputs, f"{np.dtype(dtype).name} y", text, "tested")(*given, y)
    np.testing.assert_array_equal(to_host(y), want())


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


@pytest.mark.parametrize("case", REFUSED)
def test_cupy_refuses(case):
    call, error = REFUSED[case]
    with pytest.raises(error):
        call()


MISTAKES = {  # where a GPU computes something else, or slowly
    "double in float32": (lambda: elementwise("T x", "y = x * 0.5", X), TypeError),
    "an input is written": (lambda: elementwise("T x", "x = 1; y = x", X), TypeError),
    "an element is written": (lambda: elementwise("raw T z, T x", "z[i] = x", X, X), TypeError),
    "an index of what is not raw": (lambda: elementwise("T x", "y = x[i]", X), TypeError),
    "an index outside": (lambda: elementwise("T x, raw T z", "y = z[i + 1]", X, X), IndexError),
    "a misspelt name": (lambda: elementwise("T x", "y = z", X), NameError),
    "a missing semicolon": (lambda: elementwise("T x", "y = x y = x", X), SyntaxError),
    "exp of an integer": (lambda: elementwise("T x", "y = exp(2)", X), TypeError),
    "an unknown function": (lambda: elementwise("T x", "y = cosh(x)", X), KeyError),
    "digits lost in braces": (
        lambda: device_module("gpu").ReductionKernel(
            "T x", "T y", "One{double(x)}", "a", "y = a.v", "One{0}", "k", "One",
            preamble="struct One { T v; };",
        )(gpu(X)),
        TypeError,
    ),
    "a field called a": (
        lambda: device_module("gpu").ReductionKernel(
            "T x", "T y", "One{x}", "a.a > b.a ? a : b", "y = a.a", "One{0}", "k", "One"
        ),
        SyntaxError,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MISTAKES)
def test_the_stand_in_refuses_mistakes(case, cp):
    if not hasattr(cp, "_counters"):
        pytest.skip("a GPU does not refuse this")
    call, error = MISTAKES[case]
    with pytest.raises(error):
        call()


def test_the_stand_in_refuses_an_output_that_other_threads_read(cp):
    if not hasattr(cp, "_counters"):
        pytest.skip("a GPU does not refuse this")
    x = gpu(np.arange(6.0))
    for inputs, arguments in [("raw T x", (x, x)), ("T x", (x[:-1], x[1:]))]:
        with pytest.raises(ValueError, match="overlaps an output"):
            cp.ElementwiseKernel(inputs, "T y", "y = 1", "tested")(*arguments)
