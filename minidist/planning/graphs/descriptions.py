"""The index description of each function of autograd: what it is made of, letter by letter.

`DESCRIBE[Linear](record, function, x, w, b)` records ops with `record.op(kind, symbols, *views)`
and returns the view of the output. A symbol stands for an axis of the model's arrays, which may
become several letters: see axes.py.
"""

from collections.abc import Callable

import numpy as np

from minidist.autograd import attention, functions, losses, operators
from minidist.errors import WrongInput
from minidist.planning.graphs.axes import reshaped

SYMBOLS = "abcdeghijklmnpqrsuvwxyz"  # of axes in front, for example of the batch: all but f, o, t


def front(view, last: int = 1) -> str:
    """Return a symbol for each axis but the last ones."""
    return SYMBOLS[: len(view.dims) - last]


def all_of(view) -> str:
    return front(view, 0)


def linear(record, function, x, w, b=None):
    rows, weight = front(x), "ot" if function.transposed else "to"
    y = record.op("matmul", f"{rows}t,{weight}->{rows}o", x, w)
    return y if b is None else record.op("add", f"{rows}o,o->{rows}o", y, b)


def matmul(record, function, a, b):
    if len(a.dims) != len(b.dims) or a.shape[:-2] != b.shape[:-2]:
        raise WrongInput(f"a matmul of {list(a.shape)} and {list(b.shape)} repeats its batch axes")
    rows = front(a, 2)
    return record.op("matmul", f"{rows}ft,{rows}to->{rows}fo", a, b)


def layer_norm(record, function, x, gain, bias):
    rows = front(x)
    n = record.op("normalize", f"{rows}t->{rows}t", x, whole="t", options=(function.eps,))
    y = record.op("multiply", f"{rows}t,t->{rows}t", n, gain)
    return record.op("add", f"{rows}t,t->{rows}t", y, bias)


def embedding(record, function, weight):
    if not np.array_equal(function.indices, record.arrays["inputs"]):
        raise WrongInput("an embedding of other indices than the inputs cannot be traced")
    tokens = record.views["inputs"]
    rows = all_of(tokens)
    return record.op("embedding", f"{rows},ft->{rows}t", tokens, weight)


def causal_attention(record, function, qkv):
    q, k, v = (record.op("take", "fbhtd->bhtd", qkv, whole="f", options=(i,)) for i in range(3))
    scores = record.op("matmul", "bhtd,bhsd->bhts", q, k)
    scale = qkv.shape[-1] ** -0.5
    p = record.op("causal_softmax", "bhts->bhts", scores, whole="ts", options=(scale,))
    return record.op("matmul", "bhts,bhsd->bhtd", p, v)


def softmax(kind: str) -> Callable:
    def describe(record, function, x):
        term = all_of(x)
        return record.op(kind, f"{term}->{term}", x, whole=term[function.axis])

    return describe


def elementwise(kind: str) -> Callable:
    """A function of several arrays, of which shorter ones are repeated along axes in front."""

    def describe(record, function, *views):
        out = max((view.shape for view in views), key=len)
        term = SYMBOLS[: len(out)]
        terms = [term[len(out) - len(view.dims) :] for view in views]
        if any(view.shape != out[len(out) - len(view.shape) :] for view in views):
            shapes = " and ".join(str(list(view.shape)) for view in views)
            raise WrongInput(f"{kind} of {shapes} repeats an axis of length 1; drop this axis")
        return record.op(kind, f"{','.join(terms)}->{term}", *views)

    return describe


def sum_of(record, function, x):
    axis, term = function.axis, all_of(x)
    axes = range(len(term)) if axis is None else (axis,) if isinstance(axis, int) else axis
    gone = {term[axis] for axis in axes}
    if function.keepdims:
        raise WrongInput("a sum that keeps axes of length 1 cannot be traced; use keepdims=False")
    return record.op("sum", f"{term}->{''.join(c for c in term if c not in gone)}", x)


def get_item(record, function, x):
    """Describe X[i] and X[i:j], along the first axis."""
    index, term, n = function.index, all_of(x), x.shape[0]
    if isinstance(index, int):
        return record.op("take", f"{term}->{term[1:]}", x, whole="a", options=(index % n,))
    if not isinstance(index, slice) or index.step not in (None, 1):
        raise WrongInput(f"the index {index!r} cannot be traced; use X[i] or X[i:j]")
    start, stop, _ = index.indices(n)
    if (start, stop) == (0, n):
        return x
    return record.sliced(x, start, stop)


def reshape(record, function, x):
    return type(x)(x.value, reshaped(x.dims, function.result_shape))


def transpose(record, function, x):
    axes = function.axes or range(len(x.dims))[::-1]
    return type(x)(x.value, [x.dims[axis] for axis in axes])


def targets_of(record, function):
    """Return the view of the targets; ValueError if the loss has others."""
    if not np.array_equal(function.targets, record.arrays["targets"]):
        raise WrongInput(
            "a loss of other values than the targets cannot be traced; compute them before, and "
            "trace with these as the targets"
        )
    return record.views["targets"]


def cross_entropy(record, function, logits):
    rows, targets = front(logits), targets_of(record, function)
    options = (function.reduction_size,)
    return record.op(
        "cross_entropy", f"{rows}t,{rows}->", logits, targets, whole="t", options=options
    )


def squared_error(record, function, y):
    term, options = all_of(y), (function.reduction_size,)
    targets = targets_of(record, function)
    return record.op("squared_error", f"{term},{term}->", y, targets, options=options)


DESCRIBE = {
    functions.Linear: linear,
    functions.LayerNorm: layer_norm,
    functions.Embedding: embedding,
    functions.Relu: elementwise("relu"),
    functions.GeluTanh: elementwise("gelu_tanh"),
    functions.GeluErf: elementwise("gelu_erf"),
    functions.Softmax: softmax("softmax"),
    functions.LogSoftmax: softmax("log_softmax"),
    attention.CausalAttention: causal_attention,
    attention.BlockwiseAttention: causal_attention,
    operators.Add: elementwise("add"),
    operators.Multiply: elementwise("multiply"),
    operators.Exp: elementwise("exp"),
    operators.Log: elementwise("log"),
    operators.MatMul: matmul,
    operators.Sum: sum_of,
    operators.GetItem: get_item,
    operators.Reshape: reshape,
    operators.Transpose: transpose,
    losses.CrossEntropy: cross_entropy,
    losses.SquaredError: squared_error,
}


def describe(record, function, views):
    """Record what a function computes from these views; ValueError if no description is known."""
    if type(function) not in DESCRIBE:
        raise WrongInput(
            f"no index description of {type(function).__name__} is known; add one to "
            "planning/graphs/descriptions.py"
        )
    return DESCRIBE[type(function)](record, function, *views)
