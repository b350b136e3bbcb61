"""Every Function against central differences, and what all of them promise."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minidist import Tensor
from minidist.autograd import Function, gradcheck, losses
from tests.autograd.cases import CASES
from tests.strategies import functions_below, host, seeds

with_fixtures = settings(
    max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def concrete_functions(base=Function):
    for kind in base.__subclasses__():
        if kind.__module__.startswith("minidist.autograd.") and "forward" in vars(kind):
            yield kind
        yield from concrete_functions(kind)


def test_every_function_of_the_package_has_a_case():
    assert set(CASES) == set(concrete_functions())


def draw_case(function, data, seed, dtype="float64"):
    random = np.random.default_rng(seed)
    f, inputs = CASES[function](data.draw, lambda *shape: random.standard_normal(shape))
    return f, [np.asarray(x, dtype) for x in inputs]


each_function = pytest.mark.parametrize("function", CASES, ids=lambda kind: kind.__name__)


@each_function
@with_fixtures
@given(data=st.data(), seed=seeds)
def test_backward_agrees_with_central_differences(function, place, data, seed):
    f, inputs = draw_case(function, data, seed)
    inputs = [place(x) for x in inputs]
    outputs = f(*[Tensor(x, requires_grad=True) for x in inputs])
    assert function in {type(made) for made in functions_below(outputs)}
    gradcheck(f, *inputs, seed=seed)


@each_function
@settings(with_fixtures, max_examples=3)
@given(data=st.data(), seed=seeds)
def test_values_and_gradients_keep_the_dtype_of_the_input(function, place, data, seed):
    for dtype in ("float16", "float32", "float64"):
        f, inputs = draw_case(function, data, seed, dtype)
        inputs = [Tensor(place(x), requires_grad=True) for x in inputs]
        outputs = f(*inputs)
        outputs.backward(place(np.ones(outputs.shape, outputs.dtype)))
        is_loss = function in (losses.CrossEntropy, losses.SquaredError)
        assert outputs.dtype == (np.promote_types(dtype, "float32") if is_loss else dtype)
        for x in inputs:
            assert (x.grad.dtype, x.grad.shape) == (dtype, x.shape)


@each_function
@settings(max_examples=3)
@given(data=st.data(), seed=seeds)
def test_neither_inputs_nor_the_gradient_are_written(function, data, seed):
    f, inputs = draw_case(function, data, seed)
    before = [x.copy() for x in inputs]
    for x in inputs:
        x.flags.writeable = False  # to write is now an error
    outputs = f(*[Tensor(x, requires_grad=True) for x in inputs])
    grad = np.ones(outputs.shape)
    grad.flags.writeable = False
    outputs.backward(grad)
    for x, old in zip([*inputs, grad], [*before, np.ones(outputs.shape)], strict=True):
        np.testing.assert_array_equal(x, old, strict=True)


def test_gradcheck_sees_a_wrong_gradient():
    class Wrong(Function):
        def forward(self, a):
            return a * a

        def backward(self, grad):
            return grad

    with pytest.raises(AssertionError, match=r"input 0 of shape \[3\]: backward says"):
        gradcheck(lambda a: Wrong()(a), np.arange(3.0))


def test_max_shares_its_gradient_among_ties(place):
    x = Tensor(place(np.array([1.0, 3.0, 3.0])), requires_grad=True)
    x.max().backward()
    np.testing.assert_array_equal(host(x.grad), [0, 0.5, 0.5])
