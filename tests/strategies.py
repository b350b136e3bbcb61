"""What hypothesis draws: shapes, arrays, splits, models; and how tests look into a graph."""

from contextlib import contextmanager
from unittest import mock

import numpy as np
from hypothesis import strategies as st

from minidist import Tensor, nn
from minidist.autograd import Function
from minidist.backend import to_host

seeds = st.integers(0, 2**32 - 1)


def arrays(*shape, seed=0, dtype="float64"):
    """Return normal numbers from a seed: values that no two elements share."""
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def leaf(*shape, seed=0, dtype="float64"):
    """Return a tensor of such numbers that requires a gradient."""
    return Tensor(arrays(*shape, seed=seed, dtype=dtype), requires_grad=True)


def shapes(min_axes=0, max_axes=3, max_side=4, min_side=1):
    return st.lists(st.integers(min_side, max_side), min_size=min_axes, max_size=max_axes).map(
        tuple
    )


@st.composite
def broadcastable(draw, shape):
    """Draw a shape that broadcasts to `shape`: some axes have length 1, some leading ones are
    missing.
    """
    narrowed = [draw(st.sampled_from([n, 1])) for n in shape]
    return tuple(narrowed[draw(st.integers(0, len(shape))) :])


@st.composite
def mlps(draw):
    """Draw a nonlinear MLP in float64, and its input width."""
    sizes = draw(st.lists(st.integers(1, 7), min_size=2, max_size=4))
    activation = draw(st.sampled_from(["relu", "gelu"]))
    return nn.MLP(sizes, activation, seed=draw(st.integers(0, 99)), dtype="float64"), sizes


@st.composite
def transformers(draw, dropout=(0.0, 0.3)):
    """Draw a small Transformer in float64."""
    heads = draw(st.integers(1, 3))
    return nn.Transformer(
        vocab=draw(st.integers(2, 9)),
        width=heads * draw(st.integers(1, 3)),
        heads=heads,
        depth=draw(st.integers(1, 2)),
        context=draw(st.integers(1, 5)),
        seed=draw(st.integers(0, 99)),
        dtype="float64",
        dropout=draw(st.sampled_from(dropout)),
        tied=draw(st.booleans()),
    )


def host(x):
    """Return the array of a tensor, or an array of any device, as a NumPy array."""
    return to_host(x.data if isinstance(x, Tensor) else x)


def gradients(model):
    """Return copies of a model's gradients by name; None where there is none."""
    named = model.named_parameters().items()
    return {name: None if p.grad is None else host(p.grad).copy() for name, p in named}


def assert_same_bits(got, want):
    """Compare two dictionaries of arrays, or None, without any tolerance."""
    assert got.keys() == want.keys()
    for name in want:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name, strict=True)


def functions_below(tensor):
    """Return the set of functions that a tensor was made by, directly or not."""
    found, stack = set(), [tensor]
    while stack:
        source = stack.pop()
        function = source.creator if isinstance(source, Tensor) else source
        if function is not None and function not in found:
            found.add(function)
            stack.extend(function.inputs)
    return found


@contextmanager
def watch_dtypes():
    """Collect the dtypes of all results of functions, and of all their gradients, in a set."""
    found, call = set(), Function.__call__

    def watched_call(function, *inputs):
        result, backward = call(function, *inputs), function.backward
        found.add(result.dtype)

        def watched_backward(grad):
            gradients = backward(grad)
            for g in gradients if isinstance(gradients, tuple) else (gradients,):
                if g is not None:
                    found.add((g() if callable(g) else g).dtype)
            return gradients

        function.backward = watched_backward
        return result

    with mock.patch.object(Function, "__call__", watched_call):
        yield found
