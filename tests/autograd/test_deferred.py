"""Gradients put off in several passes: computed together they are what they are one by one."""

from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist import nn
from minidist.autograd import deferred, recompute
from minidist.autograd.deferred import Product, sum_of
from minidist.rng import Randomness
from tests.strategies import arrays, gradients, mlps, seeds, transformers


def put_off(model, parts, loss=nn.cross_entropy, recomputed=False):
    """Run forward and the input half of backward for every part; return what waits, in order."""
    waiting = []
    for number, (x, targets) in enumerate(parts):
        randomness = Randomness(1, 0, np.arange(len(x)) + 10 * number)
        y = recompute(model, x, randomness) if recomputed else model(x, randomness)
        loss(y, targets, reduction_size=17).backward(deferred=waiting)
    return waiting


def one_by_one(waiting):
    for d in waiting:
        d()


def products_in(work):
    """Return how many products are computed while `work()` runs."""
    with mock.patch.object(Product, "__call__", autospec=True, side_effect=Product.__call__) as f:
        work()
    return f.call_count


def assert_close(got, want):
    assert got.keys() == want.keys()
    largest = max(np.abs(w).max(initial=0) for w in want.values() if w is not None)
    for name, w in want.items():
        assert (got[name] is None) == (w is None), name
        if w is not None:
            np.testing.assert_allclose(
                got[name], w, rtol=1e-9, atol=1e-12 * largest, err_msg=name, strict=True
            )


@given(drawn=mlps(), sizes=st.lists(st.integers(0, 5), min_size=1, max_size=4), seed=seeds)
def test_merged_products_are_equal_to_separate_ones_and_to_no_delay(drawn, sizes, seed):
    """Also with empty micro-batches among them."""
    model, widths = drawn
    parts = [
        (arrays(n, widths[0], seed=seed + i), np.arange(n) % widths[-1])
        for i, n in enumerate(sizes)
    ]
    found = []
    for way in (deferred.compute, one_by_one, None):
        if way is None:
            for x, targets in parts:
                nn.cross_entropy(model(x), targets, reduction_size=17).backward()
        else:
            way(put_off(model, parts))
        found.append(gradients(model))
        for p in model.parameters():
            p.grad = None
    assert_close(found[0], found[2])
    for name, want in found[2].items():
        np.testing.assert_array_equal(found[1][name], want, err_msg=name)


@given(model=transformers(), count=st.integers(1, 3), seed=seeds, recomputed=st.booleans())
def test_a_transformer_whose_embedding_has_no_product_and_may_be_tied(
    model, count, seed, recomputed
):
    random = np.random.default_rng(seed)
    parts = list(random.integers(0, model.vocab, (count, 2, 2, model.context)))
    found = []
    for way in (deferred.compute, one_by_one):
        way(put_off(model, parts, recomputed=recomputed))
        found.append(gradients(model))
        for p in model.parameters():
            p.grad = None
    assert_close(*found)


def three_passes(model, rows=(2, 3, 1)):
    return [(arrays(n, 4, seed=n), np.arange(n) % 3) for n in rows]


def test_there_is_one_product_per_weight_however_many_passes():
    model = nn.MLP([4, 5, 6, 3], dtype="float64")
    waiting = put_off(model, three_passes(model))
    assert products_in(lambda: deferred.compute(waiting)) == 3
    waiting = put_off(model, three_passes(model))
    assert products_in(lambda: one_by_one(waiting)) == 9


def test_they_add_to_what_is_there_and_land_in_the_flat_vector():
    model = nn.MLP([4, 5, 3], dtype="float64")
    deferred.compute(put_off(model, three_passes(model)))
    once = gradients(model)
    deferred.compute(put_off(model, three_passes(model)))
    assert_close(gradients(model), {name: 2 * grad for name, grad in once.items()})
    for layer in model.layers:
        for p in layer.parameters():
            assert p.grad is p.grad_buffer and np.shares_memory(p.grad, layer.flat.gradient)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_product_is_written_where_it_should_be(dtype, place):
    a, b = (place(arrays(5, n, seed=n, dtype=dtype)) for n in (3, 4))
    product, out = Product(a, b), place(np.empty((3, 4), dtype))
    assert product(out=out) is out and product().dtype == dtype
    np.testing.assert_array_equal(np.asarray(out.tolist()), np.asarray(product().tolist()))
    both = sum_of([product, Product(a[:2], b[:2])])
    assert both.a.shape == (7, 3)
