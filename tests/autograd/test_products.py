"""Products of batches of slices and transposed matrices, where cuBLAS reads them in place."""

import numpy as np
import pytest

from minidist.autograd.products import batched_matmul
from tests.strategies import arrays, host

SUMS = {"float16": "float32", "float32": "float32", "float64": "float64"}
ROUNDING = {"float16": 1e-3, "float32": 1e-6, "float64": 1e-14}


def as_stored(how, x, place):
    """Return X[B, H, n, m] with its elements elsewhere, as a part or a view of a larger array."""
    B, H, n, m = x.shape
    match how:
        case "contiguous":
            return place(x)
        case "rows of a slice":
            larger = place(np.full((B, H, n + 2, m), np.nan, x.dtype))
            larger[..., 1 : n + 1, :] = place(x)
            return larger[..., 1 : n + 1, :]
        case "columns of a slice":
            larger = place(np.full((B, H, n, m + 3), np.nan, x.dtype))
            larger[..., 2 : m + 2] = place(x)
            return larger[..., 2 : m + 2]
        case "transposed":
            return place(np.ascontiguousarray(x.swapaxes(-1, -2))).swapaxes(-1, -2)
        case "heads beside each other":
            return place(np.ascontiguousarray(x.transpose(0, 2, 1, 3))).transpose(0, 2, 1, 3)
        case "every second column":
            larger = place(np.repeat(x, 2, axis=-1))
            return larger[..., ::2]


STORED = [
    "contiguous",
    "rows of a slice",
    "columns of a slice",
    "transposed",
    "heads beside each other",
    "every second column",
]


@pytest.mark.parametrize("dtype", SUMS)
@pytest.mark.parametrize("a_stored", STORED)
@pytest.mark.parametrize("b_stored", STORED)
def test_operands_may_be_stored_anyhow(a_stored, b_stored, dtype, place):
    a, b = arrays(2, 3, 4, 5).astype(dtype), arrays(2, 3, 5, 6, seed=1).astype(dtype)
    want = a.astype("float64") @ b.astype("float64")
    y = batched_matmul(as_stored(a_stored, a, place), as_stored(b_stored, b, place))
    assert y.dtype == SUMS[dtype]
    np.testing.assert_allclose(host(y), want, rtol=0, atol=10 * ROUNDING[SUMS[dtype]])


@pytest.mark.parametrize("dtype", SUMS)
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("add", [False, True])
def test_the_result_may_be_stored_anyhow_and_be_a_sum(add, stored, dtype, place):
    a, b = arrays(2, 3, 4, 5).astype(dtype), arrays(2, 3, 5, 6, seed=1).astype(dtype)
    before = arrays(2, 3, 4, 6, seed=2).astype("float16")
    want = a.astype("float64") @ b.astype("float64") + add * before
    for out_dtype in {dtype, SUMS[dtype]}:
        out = as_stored(stored, before.astype(out_dtype), place)
        assert batched_matmul(place(a), place(b), out=out, add=add) is out
        np.testing.assert_allclose(host(out), want, rtol=0, atol=30 * ROUNDING[out_dtype])


def test_half_precision_is_summed_in_float32(place):
    ones = np.ones((1, 1, 1, 4096), "float16")
    y = batched_matmul(place(ones), place(ones.swapaxes(-1, -2)))
    assert (y.dtype, float(host(y)[0, 0, 0, 0])) == ("float32", 4096)  # 2048 + 1 is 2048 in float16
    product = batched_matmul(place(ones * 300), place(ones.swapaxes(-1, -2)))
    assert float(host(product)[0, 0, 0, 0]) == 300 * 4096  # above 65504
