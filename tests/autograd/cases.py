"""One recipe per Function of the autograd package: how to call it on shapes that are drawn.

A recipe draws shapes and options, and returns a callable on tensors with the arrays to call it on.
Near a kink (relu, max) differences say nothing, so those arrays keep away from one.
"""

import numpy as np
from hypothesis import strategies as st

from minidist.autograd import (
    attention,
    batch_norm,
    convolution,
    functions,
    losses,
    operators,
    recompute,
)
from minidist.autograd.eight_bits import EightBits, LinearInEightBits
from minidist.autograd.number_format import NumberFormat
from minidist.autograd.recomputation import Recompute
from minidist.backend import Format
from minidist.rng import Randomness
from tests.strategies import broadcastable, seeds, shapes

CASES = {}


def case(function):
    """Register a recipe(draw, normal) for a Function; normal(*shape) returns normal numbers."""
    return lambda recipe: CASES.setdefault(function, recipe)


def positive(x):
    """Map numbers to [0.5, ...), smoothly enough for logarithms, powers and divisors."""
    return np.abs(x) + 0.5


def away_from_zero(x):
    return x + np.sign(x) * 0.1


def two_broadcasting(draw, normal):
    shape = draw(shapes())
    return [normal(*draw(broadcastable(shape))) for _ in range(2)]


for _function, _call in {
    operators.Add: lambda a, b: a + b,
    operators.Subtract: lambda a, b: a - b,
    operators.Multiply: lambda a, b: a * b,
    Recompute: lambda a, b: recompute(lambda a, b: a * b + a, a, b),
}.items():
    case(_function)(lambda draw, normal, call=_call: (call, two_broadcasting(draw, normal)))


@case(operators.Divide)
def _(draw, normal):
    a, b = two_broadcasting(draw, normal)
    return lambda a, b: a / b, [a, positive(b)]


@case(operators.Power)
def _(draw, normal):
    n = draw(st.sampled_from([0, 1, 2, 3, -1, 0.5, -1.5]))
    return lambda a: a**n, [positive(normal(*draw(shapes())))]


@case(operators.MatMul)
def _(draw, normal):
    rows, inner, columns = (draw(st.integers(1, 4)) for _ in range(3))
    batch = draw(shapes(max_axes=2))
    left, right = draw(broadcastable(batch)), draw(broadcastable(batch))
    return lambda a, b: a @ b, [normal(*left, rows, inner), normal(*right, inner, columns)]


def draw_axis(draw, x):
    """Draw None, one axis from either end, or two axes."""
    one = st.integers(-x.ndim, x.ndim - 1)
    two = st.permutations(range(x.ndim)).map(lambda order: tuple(order[:2]))
    return draw(st.one_of(st.none(), one, two))


def drawn_reduction(draw, normal, name):
    x = normal(*draw(shapes(min_axes=1)))
    if name == "max":
        x = np.argsort(np.argsort(x, axis=None)).reshape(x.shape) / 4  # no two elements are close
    axis, keepdims = draw_axis(draw, x), draw(st.booleans())
    return lambda x: getattr(x, name)(axis, keepdims), [x]


for _function in operators.Sum, operators.Mean, operators.Max:
    _name = _function.__name__.lower()
    case(_function)(lambda draw, normal, name=_name: drawn_reduction(draw, normal, name))


@case(operators.Reshape)
def _(draw, normal):
    x = normal(*draw(shapes(min_axes=1)))
    new = draw(st.sampled_from([(-1,), (x.size, 1), (1, *x.shape), x.shape[::-1]]))
    return lambda x: x.reshape(new) * 1.5, [x]


@case(operators.Transpose)
def _(draw, normal):
    x = normal(*draw(shapes(min_axes=1)))
    order = draw(st.permutations(range(x.ndim)))
    axes = [axis - draw(st.sampled_from([0, x.ndim])) for axis in order]  # from either end
    return lambda x: x.transpose(axes) * 1.5, [x]


@case(operators.GetItem)
def _(draw, normal):
    rows, columns = draw(st.integers(2, 4)), draw(st.integers(2, 4))
    index = draw(
        st.sampled_from(
            [
                1,
                -1,
                ...,
                (slice(None), 0),
                slice(None, None, 2),
                (slice(1, None), None, slice(None, None, -1)),
                [0, 1, 1, 0, 1],  # repeats add up
                (np.array([[1, 1], [0, 1]]), slice(None)),
                (np.array([0, 0, 1]), np.array([1, 1, 0])),
                (slice(None), [1, 1]),
                np.arange(rows) % 2 == 0,
            ]
        )
    )
    return lambda x: x[index], [normal(rows, columns)]


@case(operators.Concatenate)
def _(draw, normal):
    shape = list(draw(shapes(min_axes=1)))
    axis = draw(st.integers(-len(shape), len(shape) - 1))
    pieces = []
    for _ in range(draw(st.integers(1, 3))):
        shape[axis] = draw(st.integers(0, 3))
        pieces.append(normal(*shape))
    return lambda *xs: functions.concatenate(xs, axis), pieces


@case(functions.Linear)
def _(draw, normal):
    inputs, outputs = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    bias, transposed = draw(st.booleans()), draw(st.booleans())
    x = normal(*draw(shapes(max_axes=2, min_side=0)), inputs)
    w = normal(outputs, inputs) if transposed else normal(inputs, outputs)

    def linear(x, w, b=None):
        return functions.linear(x, w, b, transposed)

    return linear, [x, w, normal(outputs)] if bias else [x, w]


@case(LinearInEightBits)
def _(draw, normal):
    """With numbers of 53 bits nothing is lost, and the strips and scales are the function's own."""
    linear, inputs = CASES[functions.Linear](draw, normal)
    exact = Format(53, 2.0**-900, 448.0)
    how = EightBits(draw(st.sampled_from([1, 2, None])), exact, exact)

    def with_scales(x, w, *b):
        w.format = NumberFormat(product=how)
        return linear(x, w, *b)

    return with_scales, inputs


@case(functions.LayerNorm)
def _(draw, normal):
    width = draw(st.integers(2, 5))
    x = normal(*draw(shapes(max_axes=2)), width)
    return lambda x, g, b: functions.layer_norm(x, g, b, eps=1e-2), [
        x,
        normal(width),
        normal(width),
    ]


@case(functions.Embedding)
def _(draw, normal):
    rows, width = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    shape = draw(shapes(max_axes=2, min_side=0))
    indices = np.random.default_rng(rows).integers(0, rows, shape)
    return lambda w: functions.embedding(indices, w), [normal(rows, width)]


@case(functions.Dropout)
def _(draw, normal):
    x = normal(*draw(shapes(min_axes=1)))
    randomness = Randomness(draw(seeds), step=0, examples=np.arange(len(x)))
    rate = draw(st.sampled_from([0.0, 0.2, 0.9, np.float64(0.5)]))
    return lambda x: functions.dropout(x, rate, "dropout", randomness), [x]


@case(losses.SquaredError)
def _(draw, normal):
    y = normal(*draw(shapes(min_axes=1)))
    targets, n = normal(*y.shape), draw(st.sampled_from([None, 3, 0.5]))
    return lambda y: losses.squared_error(y, targets.astype(y.dtype), n), [y]


@case(losses.ScaleGradient)
def _(draw, normal):
    """By -2 and by -1/2: together by 1, as differences have it."""
    return lambda x: losses.scaled(losses.scaled(x, -2), -0.5), [normal(*draw(shapes()))]


@case(attention.BlockwiseAttention)
def _(draw, normal):
    B, H, D = (draw(st.integers(1, 3)) for _ in "BHD")
    T = draw(st.sampled_from([1, 2, attention.BLOCK + 1]))
    return lambda x: attention.BlockwiseAttention()(x), [normal(3, B, H, T, D)]


@case(attention.PaddedAttention)
def _(draw, normal):
    B, H, T, S, D = (draw(st.integers(1, 3)) for _ in "BHTSD")
    held = np.array(draw(st.lists(st.booleans(), min_size=B * S, max_size=B * S))).reshape(B, S)
    inputs = [normal(B, H, T, D), normal(2, B, H, S, D)]
    return lambda q, kv: attention.padded_attention(q, kv, held), inputs


@case(convolution.Convolution)
def _(draw, normal):
    B, C, F = (draw(st.integers(1, 3)) for _ in "BCF")
    stride, padding = draw(st.integers(1, 3)), (draw(st.integers(0, 2)), draw(st.integers(0, 2)))
    kernel = [draw(st.integers(1, 3)) for _ in range(2)]
    sides = [draw(st.integers(max(1, k - 2 * p), 6)) for k, p in zip(kernel, padding, strict=True)]
    inputs = [normal(B, C, *sides), normal(F, C, *kernel), normal(F)]
    inputs = inputs[: draw(st.sampled_from([2, 3]))]
    return lambda *a: convolution.convolution(*a, stride=stride, padding=padding), inputs


@case(batch_norm.BatchNorm)
def _(draw, normal):
    C, rest = draw(st.integers(1, 3)), draw(shapes(max_axes=2))
    x = normal(draw(st.integers(2, 4)), C, *rest)
    fixed = (normal(C), positive(normal(C))) if draw(st.booleans()) else None

    def apply(x, gain, bias):
        to = x.xp.asarray
        ready = fixed and tuple(to(a.astype(x.dtype)) for a in fixed)
        return batch_norm.BatchNorm(1e-2, ready)(x, gain, bias)

    return apply, [x, normal(C), normal(C)]


@case(losses.CrossEntropy)
def _(draw, normal):
    shape, classes = draw(shapes(max_axes=2)), draw(st.integers(1, 4))
    targets = np.random.default_rng(classes).integers(0, classes, shape)
    n = draw(st.sampled_from([None, 7]))
    return lambda x: losses.cross_entropy(x, targets, n), [normal(*shape, classes)]


@case(functions.RMSNorm)
def _(draw, normal):
    width = draw(st.integers(1, 5))
    x = normal(*draw(shapes(max_axes=2)), width)
    return lambda x, g: functions.rms_norm(x, g, eps=1e-2), [x, normal(width)]


def same(x):
    return x


for _function, _call, _prepare in [
    (operators.Exp, lambda x: x.exp(), same),
    (operators.Log, lambda x: x.log(), positive),
    (functions.Relu, functions.relu, away_from_zero),
    (functions.GeluTanh, functions.gelu, lambda x: 2 * x),
    (functions.GeluErf, lambda x: functions.gelu(x, "erf"), lambda x: 2 * x),
]:
    case(_function)(
        lambda draw, normal, call=_call, prepare=_prepare: (
            call,
            [prepare(normal(*draw(shapes(min_axes=1))))],
        )
    )

for _function, _call in {
    functions.Softmax: functions.softmax,
    functions.LogSoftmax: functions.log_softmax,
}.items():

    @case(_function)
    def _(draw, normal, call=_call):
        x = normal(*draw(shapes(min_axes=1)))
        axis = draw(st.integers(-x.ndim, x.ndim - 1))
        return lambda x: call(x, axis), [x]


@case(attention.CausalAttention)
def _(draw, normal):
    B, H, T, D = (draw(st.integers(1, 3)) for _ in "BHTD")
    return attention.causal_attention, [normal(3, B, H, T, D)]


@case(attention.RepeatedHeads)
def _(draw, normal):
    G, B, K, T, D = (draw(st.integers(1, 3)) for _ in "GBKTD")
    return lambda x: attention.RepeatedHeads()(x), [normal(G + 2, B, K, T, D)]


@case(functions.SwiGLU)
def _(draw, normal):
    return functions.swiglu, [normal(*draw(shapes(max_axes=2)), 2 * draw(st.integers(1, 3))) * 2]
