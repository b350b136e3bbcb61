"""What a tensor refuses: whatever would lose a gradient, or give a wrong number, without a word."""

from types import FunctionType
from weakref import WeakKeyDictionary

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist import Tensor, nn
from minidist.autograd import (
    Function,
    attention,
    convolution,
    functions,
    gradcheck,
    losses,
)
from minidist.backend import float_dtype
from minidist.errors import is_wrong_input
from minidist.nn.mixture_of_experts import Combine
from minidist.rng import Randomness
from tests.autograd.test_gradient_check import draw_case, each_function
from tests.strategies import arrays, leaf, seeds, shapes

X, ROW, QKV = arrays(4, 6), arrays(6), arrays(3, 1, 2, 4, 3)
HELD = np.array([[True, True, False]])
CALLS = {  # public functions, with numbers for every argument that takes some
    attention.causal_attention: {"qkv": QKV},
    attention.padded_attention: {"q": QKV[0], "kv": arrays(2, 1, 2, 3, 3), "held": HELD},
    convolution.convolution: {
        "x": arrays(1, 2, 5, 5), "weight": arrays(3, 2, 3, 3), "bias": arrays(3),
        "stride": 1, "padding": 0,
    },
    attention.document_attention: {"qkv": QKV, "documents": [[(0, 1), (1, 4)]]},
    functions.concatenate: {"tensors": [Tensor(X), Tensor(X)], "axis": 0},
    functions.dropout: {
        "x": X, "rate": 0.5, "name": "x", "randomness": Randomness(0, 0, np.arange(4)),
    },
    functions.embedding: {"indices": np.array([0, 1]), "weight": X},
    functions.gelu: {"x": X, "form": "tanh"},
    functions.layer_norm: {"x": X, "gain": ROW, "bias": ROW, "eps": 1e-5},
    functions.linear: {"x": X, "weight": Tensor(X.T), "bias": arrays(4), "transposed": False},
    functions.log_softmax: {"x": X, "axis": -1},
    functions.relu: {"x": X},
    functions.rms_norm: {"x": X, "gain": ROW, "eps": 1e-5},
    functions.softmax: {"x": X, "axis": -1},
    functions.swiglu: {"x": X},
    losses.cross_entropy: {"logits": X, "targets": np.zeros(4, int), "reduction_size": 4.0},
    losses.scaled: {"loss": Tensor(X).sum(), "scale": 2.0},
    losses.squared_error: {"outputs": X, "targets": X, "reduction_size": 4.0},
}  # fmt: skip
DIFFERENTIABLE = "bias gain kv logits loss outputs q qkv tensors weight x".split()
NOT_OF_TENSORS = {"counted", "values_of", "reduction_size_or", "blocks", "flat"}
NOT_OF_TENSORS |= {"blocks_of", "empty_gradient", "empty_output", "for_cublas", "repeat"}
NOT_OF_TENSORS |= {"transposed"}


def test_every_public_function_of_tensors_is_tried():
    modules = {function.__module__: function.__globals__ for function in CALLS}
    public = {
        value
        for module, names in modules.items()
        for name, value in names.items()
        if isinstance(value, FunctionType) and value.__module__ == module and name[0] != "_"
    }
    assert {f.__name__ for f in public - set(CALLS)} == NOT_OF_TENSORS


@pytest.mark.parametrize(
    ("function", "name"),
    [(f, n) for f, options in CALLS.items() for n, x in options.items() if not isinstance(x, str)],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_a_tensor_gets_its_gradient_or_is_refused_in_every_place(function, name):
    """It is not taken as a constant without a word; what has a gradient is not refused."""
    value = CALLS[function][name]
    value = value[0] if name == "tensors" else value
    value = value.data if isinstance(value, Tensor) else value
    numbers = value if isinstance(value, np.ndarray | float | int) else 1.0
    x = Tensor(np.asarray(numbers, "float64"), requires_grad=True)
    try:
        y = function(**CALLS[function] | {name: [x, x] if name == "tensors" else x})
    except (ValueError, TypeError, AttributeError):
        assert name not in DIFFERENTIABLE
        return
    y.sum().backward()
    assert x.grad is not None


@each_function
@settings(max_examples=5)
@given(data=st.data(), seed=seeds)
def test_whole_numbers_are_computed_as_floats_are_or_refused(function, data, seed):
    """A softmax that is rounded to whole numbers would be 0."""
    f, inputs = draw_case(function, data, seed)
    inputs = [np.rint(x) for x in inputs]
    with np.errstate(all="ignore"):
        want = f(*map(Tensor, inputs)).data
        try:
            got = f(*[Tensor(x.astype(int)) for x in inputs]).data
        except ValueError:
            return
    np.testing.assert_allclose(got, want)


@given(data=st.data(), shape=shapes(max_axes=3), keepdims=st.booleans())
def test_reductions_take_the_axes_of_numpy_and_refuse_others_in_their_own_words(
    data, shape, keepdims
):
    """A single number has none; its sum over axis 0 was computed, and had no gradient."""
    one = st.integers(-len(shape) - 1, len(shape)) | st.just(0.5)
    axis = data.draw(one | st.tuples(one, one) | st.just(()))
    for name in ("sum", "mean", "max"):
        x = Tensor(np.ones(shape), requires_grad=True)
        try:
            want = np.asarray(getattr(x.data, name)(axis=axis, keepdims=keepdims))
        except (ValueError, TypeError):
            with pytest.raises(ValueError, match="axes are whole numbers") as error:
                getattr(x, name)(axis, keepdims)
            assert is_wrong_input(error.value)
        else:
            if shape == () and axis != ():  # NumPy adds a single number up over axis 0
                continue
            y = getattr(x, name)(axis, keepdims)
            np.testing.assert_array_equal(y.data, want, strict=True)
            y.backward(np.ones(want.shape))
            assert x.grad.shape == shape


T = Tensor(np.arange(1.0, 4.0), requires_grad=True)
LOST = {  # what NumPy and Python would do with a tensor
    "truth": lambda: bool(T),
    "truth of zero": lambda: not Tensor(np.zeros(1)),
    "condition": lambda: 1 if T else 2,
    "==": lambda: T == T.data,
    "array ==": lambda: T.data == T,
    "!=": lambda: T != 1.0,
    "<": lambda: T < 1.0,
    "array <=": lambda: T.data <= T,
    "in": lambda: 1.0 in T,
    "in a list": lambda: T.detach() in [T],
    "asarray": lambda: np.asarray(T),
    "array of a dtype": lambda: np.array(T, "float32"),
    "sum": lambda: np.sum(T),
    "stack": lambda: np.stack([T, T]),
    "concatenate": lambda: np.concatenate([T, T]),
    "where": lambda: np.where([True, False, True], T, 0),
    "r_": lambda: np.r_[T, T],
    "written into an array": lambda: np.zeros(3).__setitem__(slice(None), T),
    "an index": lambda: Tensor(np.ones(3))[T],
    "a list of tensors": lambda: Tensor([T, T]),
    "added to a list": lambda: T * [T, T, T],
    "a tensor of a tensor": lambda: Tensor(T),
    "a gradient": lambda: (T * 1.0).backward(T),
    "objects": lambda: Tensor(np.array([None, 1.0])),
    "text": lambda: Tensor("1.0"),
    "complex": lambda: Tensor([1j]),
    "number ** tensor": lambda: 2 ** T,
    "array ** tensor": lambda: T.data ** T,
    "tensor ** tensor": lambda: T ** T,
    "tensor ** array": lambda: T ** np.array([2.0]),
}  # fmt: skip


@pytest.mark.parametrize("lost", LOST.values(), ids=LOST)
def test_what_would_lose_a_gradient_is_refused(lost):
    with pytest.raises(ValueError) as error:
        lost()
    assert is_wrong_input(error.value)


@pytest.mark.parametrize("way", ["targets", "both"])
def test_squared_error_gives_its_targets_a_gradient(way):
    a, b = arrays(2, 4, 3)
    a, b = Tensor(a, requires_grad=way == "both"), Tensor(b, requires_grad=True)
    nn.squared_error(a * 2.0, b * 3.0, 5).backward()
    np.testing.assert_allclose(b.grad, -3 * 2 * (2 * a.data - 3 * b.data) / 5)
    if way == "both":
        np.testing.assert_allclose(a.grad, 2 * 2 * (2 * a.data - 3 * b.data) / 5)


def entropy(*targets):
    return losses.cross_entropy(Tensor(arrays(2, 3)), np.array(targets))


def embedded(*indices):
    return functions.embedding(np.array([indices]), Tensor(arrays(4, 2)))


def padded(q, kv, held):
    return attention.padded_attention(leaf(*q), leaf(*kv), np.ones(held, bool))


def convolved(**options):
    return convolution.convolution(leaf(1, 1, 9, 9), leaf(1, 1, 3, 3), **options)


def dropped(rate):
    return functions.dropout(leaf(1, 3), rate, "x", Randomness(0, 0, [0]))


def squared(size):
    return losses.squared_error(leaf(3), arrays(3), size)


class Twice(Function):
    def forward(self, x):
        return 2 * x

    def backward(self, grad):
        return 2 * grad, grad


REFUSED = [
    (lambda: leaf(3, dtype="float32") + leaf(3), r"Add of float32 and float64; use \.astype"),
    (lambda: leaf(3, dtype="float32") * arrays(3), "Multiply of float32 and float64"),
    (lambda: leaf(3) ** leaf(3), r"is a number; for a tensor b write a \*\* b as exp"),
    (lambda: leaf(2, 3) @ leaf(2, 3), r"cannot multiply \[2, 3\] by \[2, 3\]"),
    (lambda: leaf(3) @ leaf(3, 2), r"cannot multiply \[3\] by \[3, 2\]"),
    (lambda: functions.linear(leaf(2, 3), leaf(4, 5)), r"input \[2, 3\] needs 4 columns"),
    (lambda: functions.gelu(leaf(3), "exact"), "gelu form 'exact': choose 'tanh' or 'erf'"),
    (lambda: embedded(0, -1), "token index -1 is negative"),
    (lambda: embedded(0, 4), "token 4 is outside a vocabulary of 4"),
    (lambda: embedded(0.0, 1.0), "token indices must be integers, not float64"),
    (lambda: embedded(True, False), "token indices must be integers, not bool"),
    *[(lambda r=r: dropped(r), r"a dropout rate lies in \[0, 1\)") for r in (1.0, -0.1, True)],
    *[(lambda r=r: nn.Dropout(r), r"a dropout rate lies in \[0, 1\)") for r in (np.nan, "0.5")],
    (lambda: entropy(0, 3), "target 3 is outside the 3 classes of the logits"),
    (lambda: entropy(0, -2), "target index -2 is negative; what does not count is IGNORED = -1"),
    (lambda: entropy(0.0, 1.0), "target indices must be integers, not float64"),
    (lambda: entropy(0, 1, 2), r"logits \[2, 3\] need targets \[2\], got \[3\]"),
    (lambda: losses.squared_error(leaf(3, 2), arrays(3)), r"float64\[3, 2\], targets float64\[3\]"),
    (lambda: losses.squared_error(leaf(3), arrays(3, dtype="float32")), "they must agree"),
    *[(lambda n=n: squared(n), "_size must be positive, not") for n in (0, -3, np.nan, np.inf)],
    (lambda: attention.causal_attention(leaf(2, 1, 2, 4, 5)), r"takes \[G \+ 2, B, K, T, D\], got"),
    (lambda: padded((2, 3, 4), (2, 2, 1, 3, 4), (2, 3)), r"takes \[B, H, T, D\] and .*, got \[2,"),
    (lambda: padded((2, 1, 3, 4), (2, 2, 1, 3, 5), (2, 3)), r"and \[2, 2, 1, 3, 5\]"),
    (lambda: padded((2, 1, 3, 4), (2, 2, 1, 3, 4), (2, 4)), r"need held \[2, 3\], got \[2, 4\]"),
    (
        lambda: convolution.convolution(leaf(1, 3, 4, 4), leaf(1, 2, 1, 1)),
        r"takes images \[B, 2, H, W\], not \[1, 3, 4, 4\]",
    ),
    (
        lambda: convolution.convolution(leaf(1, 2, 4, 2), leaf(1, 2, 3, 3)),
        "a window of 3 x 3 does not fit into images of 4 x 2 with zeros around them",
    ),
    *[(lambda s=s: convolved(stride=s), "stride is a whole number from 1") for s in (0, 1.5, True)],
    *[
        (lambda p=p: convolved(padding=p), "padding is a whole number from 0")
        for p in (-1, (0, 1.5))
    ],
    (lambda: nn.Conv2d(1, 1, 3, stride=0), "stride is a whole number from 1"),
    (lambda: (leaf(3) * 2).add_hook(print), "hooks belong to leaves"),
    (lambda: (leaf(2, 3) * 2).backward(), r"needs grad= of shape \(2, 3\)"),
    (lambda: leaf(2).backward(np.ones(3)), r"grad is float64\[3\], the tensor is float64\[2\]"),
    (
        lambda: leaf(2).backward(np.ones(2, "float32")),
        r"grad is float32\[2\], the tensor is float64",
    ),
    (lambda: Twice()(leaf(3)).backward(np.ones(3)), r"Twice.backward must .*: 1, not 2"),
    (
        lambda: Tensor(arrays(1)).sum().backward(),
        "does not depend on anything that requires a grad",
    ),
    (lambda: Tensor(np.arange(3), requires_grad=True), "only floats have gradients, not int64"),
    (lambda: gradcheck(lambda a: a, np.ones(2, "float32")), "differences need float64"),
]


def test_what_is_wrong_is_refused_in_words_that_name_it():
    for call, message in REFUSED:
        with pytest.raises(ValueError, match=message) as error:
            call()
        assert is_wrong_input(error.value)


HALF = 5000
ONES, ONE = np.ones((HALF, 3)), np.ones((1, 1))


def one_row(dtype):
    return Tensor(np.ones((1, HALF), dtype))


SUMS = {  # of 5000 ones: [forward's sum of a tensor, or a function with a gradient that is one]
    "max": (lambda x: x.max(0), ONES),
    "mean": (lambda x: x.mean(0), ONES),
    "sum": (lambda x: x.sum(0), ONES),
    "index": (lambda x: x[np.zeros(HALF, int)], np.ones((2, 3))),
    "embedding": (lambda x: functions.embedding(np.zeros(HALF, int), x), np.ones((2, 3))),
    "repeated": (lambda x: x + Tensor(ONES.astype(x.dtype)), np.ones(3)),
    "product": (lambda x: Tensor(ONES.astype(x.dtype)) @ x, np.ones((3, 2))),
    "linear": (lambda x: functions.linear(Tensor(ONES.astype(x.dtype)), x), np.ones((3, 2))),
    "softmax": (lambda x: functions.softmax(x, 0), ONES),
    "layer norm": (
        lambda x: functions.layer_norm(Tensor(ONES.astype(x.dtype)), x, x), np.ones(3)
    ),
    "gates of a mixture": (lambda x: Combine(np.zeros(1, int), 1)(one_row(x.dtype), x), ONE),
    "squared error": (lambda x: nn.squared_error(x, np.zeros_like(x.data)), ONES),
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("f", "ones"), SUMS.values(), ids=SUMS)
def test_every_sum_of_half_precision_is_rounded_once(f, ones, dtype):
    """Added up one by one, 2048 + 1 is 2048 in float16, and 256 + 1 is 256 in bfloat16."""
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    results = []
    for kind in (dtype, "float64"):
        x = Tensor(ones.astype(float_dtype(kind)), requires_grad=True)
        y = f(x)
        y.backward(np.ones(y.shape, y.dtype))
        results.append([y.data.astype("float64"), x.grad.astype("float64")])
    for got, want in zip(*results, strict=True):
        np.testing.assert_allclose(got, want, rtol=2**-8, atol=2**-12)


def test_a_tensor_is_the_key_of_a_dictionary_a_weak_one_too():
    keys = WeakKeyDictionary({T: 1, Tensor(T.data): 2})
    assert keys[T] == 1 and T in keys and len(keys) == 1  # the other one is gone
    assert {T: 1}[T] == 1 and T == T and not T != T
