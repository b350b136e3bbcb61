"""The products of a call: which are recorded, and what is computed when they are replayed."""

import numpy as np
import pytest

from minidist import nn
from minidist.autograd.products import batched_matmul
from minidist.observe.bench.steps import transformer_step
from minidist.observe.step_parts import (
    PAGE,
    products_of,
    stand_ins,
    step_parts,
)
from minidist.pieces import WHOLE
from minidist.pipeline_parallel.partition import counted_costs


def backward_of(model, inputs, targets):
    return lambda: nn.cross_entropy(model(inputs), targets).backward()


@pytest.mark.parametrize(("T", "depth"), [(6, 1), (WHOLE, 2)])
def test_the_products_of_a_transformer_are_those_that_are_counted(T, depth):
    """Each weight has three products, attention two and then four, the head three."""
    model = nn.Transformer(vocab=11, width=8, heads=2, depth=depth, context=T)
    inputs, targets = np.random.default_rng(0).integers(0, 11, (2, 3, T))
    found = products_of(backward_of(model, inputs, targets))
    assert len(found) == (4 * 3 + 2 + 4) * depth + 3
    C, V, B = 8, 11, 3
    by_hand = 3 * B * T * (depth * (12 * C * C + 2 * T * C) + C * V)
    assert sum(product.multiply_adds for product in found) == by_hand
    assert by_hand == 3 * sum(counted_costs(model, inputs))


def test_stand_ins_have_the_layout_and_share_the_memory_of_the_arrays():
    whole = np.random.default_rng(0).standard_normal((2, 3, 40, 12)).astype(np.float32)
    a, b = whole[:, :, 3:18, 2:7], whole.swapaxes(-1, -2)[:, :, :5, ::2]  # overlaps, transposed
    once = np.broadcast_to(np.ones((4, 5), np.float32), (2, 3, 4, 5))
    y = np.empty((2, 3, 15, 20), np.float32)

    def call():
        batched_matmul(a, b, out=y)
        batched_matmul(once, a.swapaxes(-1, -2))

    found = products_of(call)
    (a2, b2, y2), (once2, at2, other) = stand_ins(found)
    for x, twin in ((a, a2), (b, b2), (y, y2), (once, once2), (a.swapaxes(-1, -2), at2)):
        assert (x.shape, x.strides, x.dtype) == (twin.shape, twin.strides, twin.dtype)
        assert (x.ctypes.data - twin.ctypes.data) % PAGE == 0
    assert b2.ctypes.data - a2.ctypes.data == b.ctypes.data - a.ctypes.data
    assert np.shares_memory(a2, b2) and np.shares_memory(a2, at2)
    assert not np.shares_memory(a2, y2) and not np.shares_memory(y2, once2)
    assert not np.shares_memory(whole, a2)
    assert other.shape == (2, 3, 4, 15)


def test_a_step_has_four_parts_of_which_products_functions_and_python_take_time():
    small = {"vocab": 7, "width": 8, "heads": 2, "depth": 1, "context": 2, "batch": 1}
    parts = step_parts(
        transformer_step(**small | {"width": 64, "context": 64, "batch": 8}),
        transformer_step(**small),
        rounds=3,
    )
    assert list(parts) == ["products", "element-wise", "copies", "Python"]
    assert all(seconds >= 0 for seconds in parts.values())
    assert min(parts["products"], parts["element-wise"], parts["Python"]) > 0
