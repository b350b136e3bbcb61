"""Tensors and the backward pass: leaves, recording, dtypes, copies, hooks, what is freed."""

import copy
import pickle
import threading
import weakref

import numpy as np
import pytest

from minidist import Tensor, nn, no_grad
from minidist.autograd import functions
from minidist.backend import to_device, to_host
from tests.strategies import arrays, leaf


def test_a_leaf_may_be_the_root_itself():
    x, grad = leaf(3), arrays(3, seed=1)
    x.backward(grad)
    np.testing.assert_array_equal(x.grad, grad)
    assert x.grad is not grad


def test_a_detached_tensor_shares_data_but_stops_gradients():
    x = leaf(3)
    y = x * 2
    assert y.detach().data is y.data
    (x * y.detach()).sum().backward()
    np.testing.assert_array_equal(x.grad, 2 * x.data)


def test_the_arrays_of_the_caller_are_never_written():
    data, grad = arrays(3), arrays(3, seed=1)
    kept = data.copy(), grad.copy()
    x = Tensor(data, requires_grad=True)
    for _ in range(2):
        (x + x).backward(grad)
    np.testing.assert_array_equal(data, kept[0])
    np.testing.assert_array_equal(grad, kept[1])
    assert not np.shares_memory(x.grad, grad)


def test_a_gradient_that_the_caller_assigned_is_added_to_but_not_written():
    x, assigned = leaf(3), np.ones(3)
    x.grad = assigned
    (x * 2).sum().backward()
    np.testing.assert_array_equal(x.grad, [3, 3, 3])
    np.testing.assert_array_equal(assigned, [1, 1, 1])


def test_nothing_is_remembered_under_no_grad():
    x = leaf(3)
    with no_grad():
        with no_grad():
            pass
        y = x * 2
    assert not y.requires_grad and y.creator is None
    assert (x * 2).requires_grad


def test_no_grad_holds_for_its_own_thread_only():
    x, seen = leaf(3), []
    thread = threading.Thread(target=lambda: seen.append((x * 2).requires_grad))
    with no_grad():
        thread.start()
        thread.join()
    assert seen == [True]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copied_tensor_is_a_leaf_without_hooks(copied):
    x = leaf(3)
    y = x * 2
    x.add_hook(lambda _: None)
    for original in (x, y):
        twin = copied(original)
        np.testing.assert_array_equal(twin.data, original.data)
        assert twin.requires_grad and twin.creator is None and twin.hooks == ()


@pytest.mark.gpu
def test_a_function_of_arrays_on_the_host_and_on_a_gpu_names_itself_and_the_remedy():
    t, x = Tensor(to_device(arrays(2, 3), "gpu"), requires_grad=True), arrays(2, 3, seed=1)
    message = r"{} of an array on the host, float64\[{}\], and one on a GPU; .*to_device"
    for use in (lambda: t * x, lambda: x * t, lambda: t * Tensor(x)):
        with pytest.raises(ValueError, match=message.format("Multiply", "2, 3")):
            use()
    with pytest.raises(ValueError, match=message.format("Add", "")):
        _ = t + Tensor(np.array(2.0))
    model = nn.MLP([3, 2], dtype="float64").to("gpu")
    with pytest.raises(ValueError, match=message.format("Linear", "2, 3")):
        model(x)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_numpy_scalar_is_a_number_on_any_device(dtype, place):
    x = arrays(2, 3, dtype=dtype)
    for scalar in (np.dtype(dtype).type(0.1), np.array(0.1, dtype), 0.1):
        t = Tensor(place(x), requires_grad=True)
        y = (scalar * t + scalar) / scalar - scalar
        y.backward(place(np.ones_like(x)))
        assert y.dtype == t.grad.dtype == dtype
        want = (scalar * x + scalar) / scalar - scalar
        np.testing.assert_allclose(to_host(y.data), want, rtol=np.finfo(dtype).eps * 8)
    with pytest.raises(ValueError, match=f"Multiply of {dtype} and int64"):
        _ = t * np.int64(2)


@pytest.mark.gpu
def test_a_gradient_of_the_host_is_refused_for_a_tensor_on_a_gpu_and_the_other_way_round():
    for there, here in [("gpu", "cpu"), ("cpu", "gpu")]:
        t = Tensor(to_device(arrays(2, 3), there), requires_grad=True)
        for root in (t * 2, t):
            with pytest.raises(ValueError, match=r"not on the same device.*to_device"):
                root.backward(to_device(np.ones((2, 3)), here))
        assert t.grad is None


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
