"""What each kind of op computes, from whole arrays or from the parts that a rank has.

    compute(op, arrays, spans)      spans {letter: (begin, end)}: which part of each axis this is

A part of a matmul is a matmul of parts, and a part of a softmax over the rows a softmax. Only the
embedding has to know where its part of the rows begins: tokens are numbers of rows.
"""

from collections.abc import Container
from math import prod

import numpy as np

from minidist.autograd import Tensor, functions, losses
from minidist.autograd.functions import layer_norm
from minidist.errors import WrongInput
from minidist.planning.graph import Op

Spans = dict[str, tuple[int, int]]


def compute(op: Op, arrays: list[np.ndarray], spans: Spans) -> np.ndarray:
    """Return the output of an op, or the part of it that belongs to these spans."""
    kind = op.kind.removesuffix("_backward")
    if op.kind in COMPUTE:
        return COMPUTE[op.kind](op, arrays, spans)
    if kind not in FUNCTIONS:
        raise WrongInput(f"no way to compute a {op.kind} is known; add one to computation.py")
    return by_function(op, FUNCTIONS[kind], arrays, op.kind != kind)


def ordered(x: np.ndarray, term: str, order: str) -> np.ndarray:
    return x.transpose([term.index(letter) for letter in order])


def by_function(op: Op, function, arrays: list[np.ndarray], backward: bool) -> np.ndarray:
    """Apply a function of autograd, or its adjoint, with the whole letters as one last axis."""
    terms, output = op.terms
    term = terms[backward]  # of X
    rows = only(term, op.whole)
    order = rows + common(term, op.whole)
    shape = ordered(arrays[backward], term, order).shape
    merged = *shape[: len(rows)], prod(shape[len(rows) :])

    def flat(x, term):
        x = ordered(x, term, common(order, term))
        return x.reshape(merged) if op.whole and op.whole <= set(term) else x

    arrays = [flat(x, term) for x, term in zip(arrays, terms, strict=True)]
    grad, (x, *targets) = arrays[:backward], arrays[backward:]
    leaf = Tensor(x, requires_grad=backward)
    y = function(leaf, op, *targets)
    if not backward:
        return ordered(y.data.reshape(shape), order, output) if output else y.data
    y.backward(np.asarray(grad[0]))
    return ordered(np.asarray(leaf.grad).reshape(shape), order, output)


def normalize(x: Tensor, op: Op) -> Tensor:
    n = x.shape[-1]
    return layer_norm(x, Tensor(np.ones(n, x.dtype)), Tensor(np.zeros(n, x.dtype)), op.options[0])


def causal_softmax(x: Tensor, op: Op) -> Tensor:
    """The last axis has the T x T scores of queries and keys."""
    T = int(x.shape[-1] ** 0.5)
    hidden = np.where(np.tri(T, dtype=bool), 0, -np.inf).astype(x.dtype)
    scores = x.reshape(*x.shape[:-1], T, T) * op.options[0]
    return functions.softmax(scores + hidden).reshape(x.shape)


FUNCTIONS = {
    "relu": lambda x, op: functions.relu(x),
    "gelu_tanh": lambda x, op: functions.gelu(x),
    "gelu_erf": lambda x, op: functions.gelu(x, "erf"),
    "exp": lambda x, op: x.exp(),
    "log": lambda x, op: x.log(),
    "softmax": lambda x, op: functions.softmax(x),
    "log_softmax": lambda x, op: functions.log_softmax(x),
    "causal_softmax": causal_softmax,
    "normalize": normalize,
    "cross_entropy": lambda x, op, t: losses.cross_entropy(x, t, op.options[0]),
    "squared_error": lambda x, op, t: losses.squared_error(x, t, op.options[0]),
}


def einsum(op: Op, arrays, spans: Spans):
    """Return the sum of products; an axis of the output that no input has is of length 1."""
    terms, output = op.terms
    made = common(output, "".join(terms))
    y = np.einsum(f"{','.join(terms)}->{made}", *arrays, optimize=len(arrays) > 1)
    return y.reshape(shape_of(output, spans))


def add(op: Op, arrays, spans: Spans):
    terms, output = op.terms
    return sum(repeated(x, term, output) for x, term in zip(arrays, terms, strict=True))


def repeat(op: Op, arrays, spans: Spans):
    (term,), output = op.terms
    return np.broadcast_to(repeated(arrays[0], term, output), shape_of(output, spans))


def repeated(x: np.ndarray, term: str, output: str) -> np.ndarray:
    """Return x with the output's axes; an axis that it lacks has length 1."""
    x = ordered(x, term, common(output, term))
    return np.expand_dims(x, [i for i, letter in enumerate(output) if letter not in term])


def shape_of(term: str, spans: Spans) -> tuple[int, ...]:
    return tuple(spans[letter][1] - spans[letter][0] for letter in term)


def chosen(op: Op, arrays, spans: Spans):
    """X[i] or X[i:j], along the letters that the output lacks as one axis."""
    (term,), output = op.terms
    lost, new, kept = only(term, output), only(output, term), common(term, output)
    x = ordered(arrays[0], term, lost + kept)
    x = x.reshape(prod(shape_of(lost, spans)), *shape_of(kept, spans))
    return ordered(x[index_of(op)].reshape(shape_of(new + kept, spans)), new + kept, output)


def unchosen(op: Op, arrays, spans: Spans):
    """Zeros, and dY at [i] or [i:j]."""
    (term,), output = op.terms
    lost, new, kept = only(output, term), only(term, output), common(term, output)
    dx = np.zeros((prod(shape_of(lost, spans)), *shape_of(kept, spans)), arrays[0].dtype)
    index = index_of(op)
    dx[index] = ordered(arrays[0], term, new + kept).reshape(dx[index].shape)
    return ordered(dx.reshape(shape_of(lost + kept, spans)), lost + kept, output)


def index_of(op: Op) -> int | slice:
    return op.options[0] if len(op.options) == 1 else slice(*op.options)


def only(term: str, other: Container[str]) -> str:
    """Return the letters of a term that another one lacks."""
    return "".join(letter for letter in term if letter not in other)


def common(term: str, other: Container[str]) -> str:
    """Return the letters that both have, in the order of the first."""
    return "".join(letter for letter in term if letter in other)


def embedding(op: Op, arrays, spans: Spans):
    """The rows of W that this part has; where a token is of another part: zeros."""
    (tokens, weight), output = op.terms
    rows = only(weight, output)
    own, held = held_rows(arrays[0], spans[rows])
    y = ordered(arrays[1], weight, rows + only(weight, rows))
    if not len(y):
        return np.zeros(shape_of(output, spans), arrays[1].dtype)
    y = y[own] * held.reshape(*held.shape, *[1] * (len(weight) - 1))
    return ordered(y, tokens + only(weight, rows), output)


def embedding_backward(op: Op, arrays, spans: Spans):
    (tokens, grad), output = op.terms
    rows = only(output, grad)
    own, held = held_rows(arrays[0], spans[rows])
    columns = only(grad, tokens)
    dy = ordered(arrays[1], grad, tokens + columns)
    dw = np.zeros(shape_of(rows + columns, spans), dy.dtype)
    np.add.at(dw, own[held], dy[held])
    return ordered(dw, rows + columns, output)


def held_rows(tokens: np.ndarray, span: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Return each token's row in this part, and whether this part has it."""
    begin, end = span
    held = (tokens >= begin) & (tokens < end)
    return np.where(held, tokens - begin, 0), held


COMPUTE = {
    "matmul": einsum,
    "multiply": einsum,
    "sum": einsum,
    "add": add,
    "repeat": repeat,
    "take": chosen,
    "slice": chosen,
    "untake": unchosen,
    "unslice": unchosen,
    "embedding": embedding,
    "embedding_backward": embedding_backward,
}
