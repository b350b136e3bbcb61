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
    """Return the sum of arrays that are repeated along the axes that they lack."""
    terms, output = op.terms
    total = sum(repeated(x, term, output) for x, term in zip(arrays, terms, strict=True))
    return np.broadcast_to(total, shape_of(output, spans))


def repeated(x: np.ndarray, term: str, output: str) -> np.ndarray:
    """Return x with the output's axes; an axis that it lacks has length 1."""
    x = ordered(x, term, common(output, term))
    return np.expand_dims(x, [i for i, letter in enumerate(output) if letter not in term])


def shape_of(term: str, spans: Spans) -> tuple[int, ...]:
    return tuple(spans[letter][1] - spans[letter][0] for letter in term)


def choice(op: Op, arrays, spans: Spans):
    """X[i] or X[i:j], along the letters that the output lacks as one axis; or the adjoint.

    A product with a matrix that has a 1 where a row of the output is a row of X.
    """
    (term,), output = op.terms
    x, y = (output, term) if op.kind.startswith("un") else (term, output)
    lost, new = only(x, y), only(y, x)
    rows = np.eye(prod(shape_of(lost, spans)), dtype=arrays[0].dtype)
    chosen = rows[op.options[0] if len(op.options) == 1 else slice(*op.options)]
    chosen = chosen.reshape(shape_of(new + lost, spans))
    return np.einsum(f"{term},{new}{lost}->{output}", *arrays, chosen)


def only(term: str, other: Container[str]) -> str:
    """Return the letters of a term that another one lacks."""
    return "".join(letter for letter in term if letter not in other)


def common(term: str, other: Container[str]) -> str:
    """Return the letters that both have, in the order of the first."""
    return "".join(letter for letter in term if letter in other)


def embedding(op: Op, arrays, spans: Spans):
    """The rows of W, or their gradient: a product with a 1 where a token is a row of this part."""
    (tokens, term), output = op.terms
    rows = only(only(term, output) + only(output, term), tokens)
    one_hot = np.equal.outer(arrays[0], np.arange(*spans[rows])).astype(arrays[1].dtype)
    return np.einsum(f"{tokens}{rows},{term}->{output}", one_hot, arrays[1], optimize=True)


COMPUTE = {
    "matmul": einsum,
    "multiply": einsum,
    "sum": einsum,
    "add": add,
    "repeat": add,
    "take": choice,
    "slice": choice,
    "untake": choice,
    "unslice": choice,
    "embedding": embedding,
    "embedding_backward": embedding,
}
