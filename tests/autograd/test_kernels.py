"""Kernels on a GPU against their NumPy text, where a derivative alone does not say it.

The bound for one kernel, relative to the largest number of the result: 1e-14 in float64, 3e-6 in
float32, 2e-3 in float16, which is computed in float32 and rounded once. Dropout has the host's
bits.
"""

import numpy as np
import pytest

from minidist import Tensor, nn, optim
from minidist.autograd import functions
from minidist.autograd.kernels import layers, softmax
from minidist.backend import on_gpu, to_device, to_host
from minidist.rng import Randomness
from tests.strategies import arrays

pytestmark = pytest.mark.gpu
BOUND = {"float64": 1e-14, "float32": 3e-6, "float16": 2e-3}
DTYPES = pytest.mark.parametrize("dtype", list(BOUND))
WIDE = pytest.mark.parametrize("dtype", ["float64", "float32"])
SHAPES = [(1,), (7,), (0,), (3, 1), (2, 3, 4), (4, 0), (0, 5), (5, 300)]


def gpu(x):
    return to_device(x, "gpu")


def equal(got, want, bound=None):
    assert on_gpu(got)
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    largest = abs(want).max(initial=0)
    np.testing.assert_allclose(
        to_host(got), want, rtol=0, atol=(bound or BOUND[str(want.dtype)]) * largest
    )


def same(function, *arguments):
    """Check a function of host arrays against the same on the GPU; return both results."""
    want = function(*[x.copy() if isinstance(x, np.ndarray) else x for x in arguments])
    got = function(*[gpu(x) if isinstance(x, np.ndarray) else x for x in arguments])
    for g, w in zip(got, want, strict=True) if isinstance(want, tuple) else [(got, want)]:
        equal(g, w)
    return want


def run(function, *arrays, grad):
    """Return the result of a Function and the gradients of its inputs, on the arrays' device."""
    inputs = [Tensor(x, requires_grad=True) for x in arrays]
    y = function(*inputs)
    y.backward(grad)
    return y.data, *[x.grad for x in inputs]


@DTYPES
@pytest.mark.parametrize("shape", [s for s in SHAPES if s[-1] > 1])
@pytest.mark.parametrize("mean", [0, 100])
def test_layer_norm(shape, dtype, mean):
    x = (arrays(*shape, dtype="float64") + mean).astype(dtype)
    grad = arrays(*shape, seed=1, dtype=dtype)
    gain, bias = arrays(shape[-1], seed=2, dtype=dtype), arrays(shape[-1], seed=3, dtype=dtype)
    exact = [a.astype("float64") for a in (x, gain, bias)]
    want = run(functions.layer_norm, *exact, grad=grad.astype("float64"))
    got = run(functions.layer_norm, *map(gpu, (x, gain, bias)), grad=gpu(grad))
    for g, w in zip(got, want, strict=True):
        equal(g, w.astype(dtype), BOUND[dtype] * (1 + mean))


@WIDE
@pytest.mark.parametrize("shape", [(1, 1), (2, 3, 3), (2, 4, 9), (0, 5, 5), (2, 2, 200, 200)])
def test_softmax_of_the_keys_that_are_seen(shape, dtype):
    """Each function overwrites its first argument."""
    first, scores = shape[-1] - shape[-2], arrays(*shape, dtype=dtype) * 10
    mean, dp = arrays(*shape[:-1], 1, seed=1, dtype=dtype), arrays(*shape, seed=2, dtype=dtype)

    def overwritten(function):
        return lambda x, *others: (function(x, *others), x)

    log_z, p = same(overwritten(softmax.causal_softmax), scores, first)
    np.testing.assert_allclose(p.sum(-1), 1, rtol=1e-5)
    seen = np.arange(shape[-1]) <= first + np.arange(shape[-2])[:, None]
    assert (p[..., ~seen] == 0).all() and (p[..., seen] > 0).all()
    backward = overwritten(softmax.scores_backward)
    for p_as_kept in [p, p.astype("float16")][: 1 + (dtype == "float32")]:  # of float16, p is
        for others in [(p_as_kept, None, 0.7), (p_as_kept, mean)]:
            want, got = dp.copy(), gpu(dp)
            backward(want, *others)
            backward(got, *[gpu(x) if isinstance(x, np.ndarray) else x for x in others])
            equal(got, want)
    if first == 0:
        want, got = scores.copy(), gpu(scores)
        softmax.recompute_probabilities(want, log_z)
        softmax.recompute_probabilities(got, gpu(log_z))
        equal(got, want, BOUND[dtype] * 30)  # exp of a difference of numbers up to 30


RUNS = [0, 1, 2, 7, 130, 600]  # how often an index occurs


@DTYPES
@pytest.mark.parametrize("kind", ["uint8", "int64"])
def test_the_embeddings_gradient_is_the_sum_of_each_run_and_has_the_same_bits_each_time(
    dtype, kind
):
    """A row per length of a run; the sum in float64, rounded once, is the definition."""
    indices = np.repeat(np.arange(len(RUNS)), RUNS).astype(kind)
    indices = np.random.default_rng(0).permutation(indices)
    grad = arrays(len(indices), 2, dtype=dtype) + np.array(1, dtype)
    exact = np.zeros((len(RUNS) + 1, 2))
    np.add.at(exact, indices, grad.astype("float64"))
    found = []
    for _ in range(2):
        out = gpu(np.full(exact.shape, 9, dtype))
        assert layers.sum_into_rows(gpu(grad), gpu(indices), out) is out
        found.append(to_host(out))
    assert found[0].tobytes() == found[1].tobytes()
    rounding = {"float16": 2**-11, "float32": 2**-24, "float64": 1e-14}[dtype]
    np.testing.assert_allclose(found[0], exact, rtol=rounding * 1.001, atol=0)
    on_host = layers.sum_into_rows(grad, indices, np.empty(exact.shape, dtype))
    equal(gpu(found[0]), on_host)


@pytest.mark.parametrize("wrong", [-1, 4])
def test_an_index_on_the_gpu_that_is_outside_makes_nan_and_waits_for_nothing(wrong):
    w = Tensor(gpu(arrays(4, 2)), requires_grad=True)
    y = functions.embedding(gpu(np.array([3, wrong])), w)
    assert np.isnan(to_host(y.data)).tolist() == [[False, False], [True, True]]
    y.sum().backward()
    assert to_host(w.grad).tolist() == [[0, 0], [0, 0], [0, 0], [1, 1]]


@DTYPES
@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, np.float32(0.3), 0.999])
def test_dropout_has_the_hosts_bits(dtype, rate):
    x, randomness = arrays(3, 4, 6, dtype=dtype), Randomness(3, 4, np.array([5, 0, 2**40]))
    for window, whole in [(None, None), ((slice(2, 6), slice(0, 6)), (9, 6))]:
        want = layers.dropout(x, rate, "layer", randomness, window, whole)(x)
        got = layers.dropout(gpu(x), rate, "layer", randomness, window, whole)(gpu(x))
        assert to_host(got).tobytes() == want.tobytes()


@DTYPES
@pytest.mark.parametrize("max_norm", [0, 0.5, 7, np.inf])
@pytest.mark.parametrize("gradient", ["normal", "zero", "nan", "inf", "none"])
def test_clipping_on_the_gpu_is_clipping_on_the_host(dtype, max_norm, gradient):
    found = []
    for device in ("cpu", "gpu"):
        model = nn.MLP([3, 4, 2], dtype=dtype).to(device)
        for i, p in enumerate(model.parameters()):
            g = arrays(*p.shape, seed=i, dtype=dtype) * {"zero": 0}.get(gradient, 1)
            if i == 1 and gradient in ("nan", "inf"):
                g[0] = gradient
            if gradient != "none" or i != 1:
                p.grad = to_device(g.astype(dtype), device)
        with np.errstate(invalid="ignore"):
            norm = optim.SGD(model.parameters(), 0.1).clip_global_norm(max_norm)
        for p in model.parameters():
            assert p.grad is None or on_gpu(p.grad) == (device == "gpu")
        found.append([float(norm), *[to_host(s.flat.gradient) for s in model.layers]])
        assert device == "cpu" or all(p.grad is p.grad_buffer for p in model.parameters())
    for want, got in zip(*found, strict=True):
        np.testing.assert_allclose(got, want, rtol=BOUND[dtype] * 3, atol=BOUND[dtype])
