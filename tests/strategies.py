"""What hypothesis draws: shapes, arrays, splits, models."""

import numpy as np
from hypothesis import strategies as st

from minidist import nn

seeds = st.integers(0, 2**32 - 1)


def arrays(*shape, seed=0, dtype="float64"):
    """Return normal numbers from a seed: values that no two elements share."""
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


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
