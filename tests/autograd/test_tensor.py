"""Leaves and their gradients, recording, dtypes, copies."""

import copy
import pickle
import threading

import numpy as np
import pytest

from minidist import Tensor, nn, no_grad
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
