"""The backward pass: hooks, deferred parameter gradients, what it frees and what it refuses."""

import weakref

import numpy as np
import pytest

from minidist import Tensor
from minidist.autograd import functions
from tests.strategies import arrays, leaf


def test_a_hook_is_called_once_when_all_contributions_are_in():
    x, seen = leaf(3), []
    x.add_hook(lambda tensor: seen.append((tensor, tensor.grad.copy())))
    (x * x + x.exp() + x).sum().backward()
    ((tensor, grad),) = seen
    assert tensor is x
    np.testing.assert_array_equal(grad, x.grad)


def test_a_hook_on_a_deferred_parameter_waits_for_its_last_thunk():
    w, x, calls, thunks = leaf(2, 2), Tensor(arrays(3, 2)), [], []
    w.add_hook(lambda tensor: calls.append(tensor.grad.copy()))
    hidden = functions.linear(x, w)
    functions.linear(hidden, w).sum().backward(deferred=thunks)
    assert len(thunks) == 2
    thunks[0]()
    assert not calls
    thunks[1]()
    np.testing.assert_array_equal(calls, [w.grad])


def test_gradients_of_inputs_are_complete_before_any_thunk_has_run():
    x, w, b, thunks = leaf(3, 2), leaf(2, 4), leaf(4), []
    functions.linear(x, w, b).sum().backward(deferred=thunks)
    assert (len(thunks), w.grad, b.grad) == (2, None, None)
    np.testing.assert_allclose(x.grad, np.ones((3, 4)) @ w.data.T)
    for thunk in thunks:
        thunk()
    np.testing.assert_allclose(w.grad, x.data.T @ np.ones((3, 4)))
    np.testing.assert_allclose(b.grad, [3, 3, 3, 3])


def test_backward_frees_the_graph_as_it_goes():
    first, last, alive = leaf(3), leaf(3), []
    early = first.exp()
    late = (early * last).exp()
    kept = [weakref.ref(early.data), weakref.ref(late.data)]
    loss = late.sum()
    del early, late
    last.add_hook(lambda _: alive.append([ref() is not None for ref in kept]))
    first.add_hook(lambda _: alive.append([ref() is not None for ref in kept]))
    loss.backward()
    assert alive == [[True, False], [False, False]]


def test_a_value_that_no_backward_needs_does_not_live_on():
    x = leaf(3)
    between = x * 2
    kept = weakref.ref(between.data)
    y = between + 1
    del between
    assert kept() is None
    y.sum().backward()
    np.testing.assert_array_equal(x.grad, [2, 2, 2])


def test_a_second_backward_over_a_freed_graph_is_a_clear_error():
    loss = (leaf(3) * 2).sum()
    loss.backward()
    with pytest.raises(ValueError, match=r"freed this graph; add losses up and call backward once"):
        loss.backward()


def test_a_graph_that_is_freed_in_part_leaves_all_gradients_alone():
    x, w = leaf(3), leaf(3)
    shared = x * 2
    first, second = shared.sum(), (w * 3 + shared).sum()
    first.backward()
    with pytest.raises(ValueError, match="freed this graph"):
        second.backward()
    assert w.grad is None


def test_ten_thousand_operations_deep_is_no_recursion():
    x = leaf(2)
    y = x
    for _ in range(10_000):
        y = y + 1
    y.backward(np.ones(2))
    np.testing.assert_array_equal(x.grad, [1, 1])


def test_a_deep_graph_may_be_dropped_without_a_backward():
    y = leaf(2) + 1
    first = weakref.ref(y.creator)
    for _ in range(10_000):
        y = y + 1
    del y
    assert first() is None
