"""Trace a single-device model into a graph, from the functions that its loss was made by.

    graph = trace(nn.MLP([4, 8, 2]), x, targets)
    graph.ops[0]      Op("matmul", ("inputs", "layers.0.weight"), "matmul.0", "ac,cb->ab")

Fused functions are taken apart, so that each op has one rule: a bias is an op of its own, a norm is
`normalize`, times a gain, plus a bias; attention is scores, a softmax and a mixture. What no
function records cannot be traced: a constant, a frozen parameter. A reshape or a transpose is no
op: axes are cut into factors instead, and an array of the model is a view of a value, each of its
axes a list of the value's axes.

    Y[B, T, 3C]  reshaped to  [B, T, 3, H, D]        the axis 3C of Y is cut into 3, H and D;
    Y = X[B, T, C] W[C, 3C]                          it is a twin of W's columns: W[C, 3, H, D]
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from minidist import nn
from minidist.autograd import (
    Function,
    Tensor,
    attention,
    functions,
    functions_below,
    losses,
    operators,
)
from minidist.errors import WrongInput
from minidist.planning.graph import Graph, Op, Value


@dataclass(eq=False)
class Axis:
    """An axis of a value: how long it is, its parts once it is cut, its twins: cut alike."""

    size: int
    parts: list["Axis"] = field(default_factory=list)
    twins: dict["Axis", None] = field(default_factory=dict)

    def leaves(self) -> list["Axis"]:
        """Return the axes that this one has been cut into; an axis that is not cut: itself."""
        return leaves(self.parts) if self.parts else [self]

    def cut(self, first: int) -> None:
        """Cut this leaf and its twins into `first` and the rest; the first changes slowest."""
        self.parts = [Axis(first), Axis(self.size // first)]
        for twin in self.twins:
            if not twin.parts:
                twin.cut(first)
            match(self.parts, twin.parts)


def leaves(axes: list[Axis]) -> list[Axis]:
    return [leaf for axis in axes for leaf in axis.leaves()]


def match(left: list[Axis], right: list[Axis]) -> None:
    """Cut both until their leaves agree, and make these twins."""
    left, right = list(left), list(right)
    while left and right:
        a, b = left.pop(0), right.pop(0)
        if a.parts or b.parts:
            left[:0], right[:0] = a.leaves(), b.leaves()
        elif (
            a.size == b.size
            and bool(left) != bool(right)
            and all(axis.size == 1 for axis in left + right)
        ):
            one_more = b if left else a  # [C] and [C, 1]
            one_more.cut(one_more.size)
            left[:0], right[:0] = [a], [b]
        elif a.size == b.size:
            a.twins[b] = b.twins[a] = None
        else:
            cut_one(a, b)
            left[:0], right[:0] = [a], [b]


def cut_one(a: Axis, b: Axis) -> None:
    """Cut the longer leaf, by the length of the shorter."""
    long, short = (a, b) if a.size > b.size else (b, a)
    if long.size % short.size:
        raise WrongInput(
            f"an axis of {long.size} does not divide into parts of {short.size}; reshape such that "
            "each axis is cut into whole factors, or several are merged into one"
        )
    long.cut(short.size)


def reshaped(dims: list[list[Axis]], shape: tuple[int, ...]) -> list[list[Axis]]:
    """Return the axes of a view in another shape; axes are cut where the new shape cuts them."""
    old, new = [axis for dim in dims for axis in dim], [Axis(size) for size in shape]
    match(old, new)
    rest = iter(leaves(old))
    return [[next(rest) for _ in axis.leaves()] for axis in new]


LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
SYMBOLS = "abcdeghijklmnpqrsuvwxyz"  # of axes that descriptions do not name: all but f, o, t


@dataclass
class View:
    """An array of the model: the value it is of, and for each of its axes a list of the value's."""

    value: str
    dims: list[list[Axis]]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(int(np.prod([axis.size for axis in dim])) for dim in self.dims)


@dataclass
class Recorder:
    """What has been traced: values {name: (axes, dtype, kind)}, and ops of views.

    arrays, views  of the inputs and the targets
    """

    dtype: np.dtype
    arrays: dict
    views: dict = field(default_factory=dict)
    values: dict = field(default_factory=dict)
    ops: list = field(default_factory=list)
    counts: dict = field(default_factory=dict)

    def value(self, name: str, shape: tuple, kind: str, dtype: np.dtype | None = None) -> View:
        if 0 in shape:
            raise WrongInput(f"{name} has shape {list(shape)}: trace with at least one example")
        axes = [Axis(n) for n in shape]
        self.values[name] = axes, np.dtype(dtype or self.dtype), kind
        return View(name, [[axis] for axis in axes])

    def op(
        self, kind: str, symbols: str, *views: View, whole: str = "", options=(), new=()
    ) -> View:
        """Record an op: `symbols` has one letter for each axis of the views, as einsum's.

        As there, "..." stands for all other axes; a view with fewer of them lacks the first ones.

        new  the lengths of the output's first axes, of which no input has the letters
        """
        inputs, output = symbols.split("->")
        terms = inputs.split(",")
        counts = [
            len(view.dims) - len(term.replace("...", ""))
            for view, term in zip(views, terms, strict=True)
        ]
        others = SYMBOLS[: max(counts)]
        terms = [
            term.replace("...", others[len(others) - n :])
            for term, n in zip(terms, counts, strict=True)
        ]
        output = output.replace("...", others)
        dims: dict[str, list[Axis]] = {}
        for view, term in zip(views, terms, strict=True):
            for symbol, dim in zip(term, view.dims, strict=True):
                match(dims.setdefault(symbol, dim), dim)
        kept = output[len(new) :]
        out = self.result(kind, (*new, *View("", [dims[symbol] for symbol in kept]).shape))
        for symbol, dim in zip(kept, out.dims[len(new) :], strict=True):
            match(dims[symbol], dim)
        self.ops.append((kind, [*views, out], [*terms, output], whole, options))
        return out

    def result(self, kind: str, shape: tuple) -> View:
        n = self.counts[kind] = self.counts.get(kind, -1) + 1
        return self.value(f"{kind}.{n}", shape, "result")

    def graph(self) -> Graph:
        """Return the graph, now that all axes are cut as every op needs them."""
        values = {}
        for name, (axes, dtype, kind) in self.values.items():
            shape, whole = sizes_of(leaves(axes)), sizes_of(axes)
            values[name] = Value(name, shape, dtype, kind, None if shape == whole else whole)
        return Graph(values, [self.described(*op) for op in self.ops])

    def described(self, kind, views, terms, whole, options) -> Op:
        """Return the op of a record, with a letter for each axis that a symbol has become."""
        letters, fresh = {}, iter(LETTERS)
        for view, term in [(views[-1], terms[-1]), *zip(views, terms, strict=True)]:
            for symbol, dim in zip(term, view.dims, strict=True):
                if symbol not in letters:
                    letters[symbol] = [next(fresh) for _ in leaves(dim)]
        described = []
        for view, term in zip(views, terms, strict=True):
            axes, letter_of = leaves(self.values[view.value][0]), dict[Axis, str]()
            for symbol, dim in zip(term, view.dims, strict=True):
                letter_of |= dict(zip(leaves(dim), letters[symbol], strict=True))
                places = [axes.index(axis) for axis in leaves(dim)]
                if symbol in whole and places != sorted(places):
                    raise WrongInput(
                        f"{kind} needs an axis that a transpose and then a reshape made; "
                        "reshape first"
                    )
            described.append("".join(letter_of[axis] for axis in axes))
        *inputs, output = (view.value for view in views)
        cut = frozenset(letter for symbol in whole for letter in letters[symbol])
        indices = f"{','.join(described[:-1])}->{described[-1]}"
        return Op(kind, tuple(inputs), output, indices, cut, tuple(options))


def sizes_of(axes: list[Axis]) -> tuple[int, ...]:
    return tuple(axis.size for axis in axes)


# The index description of each function of autograd: `DESCRIBE[Linear](record, function, x, w, b)`
# records ops and returns the view of the output. A symbol stands for an axis of the model's arrays,
# which may become several letters.


def linear(record, function, x, w, b=None):
    y = record.op("matmul", f"...t,{'ot' if function.transposed else 'to'}->...o", x, w)
    return y if b is None else record.op("add", "...o,o->...o", y, b)


def matmul(record, function, a, b):
    if len(a.dims) != len(b.dims) or a.shape[:-2] != b.shape[:-2]:
        raise WrongInput(f"a matmul of {list(a.shape)} and {list(b.shape)} repeats its batch axes")
    return record.op("matmul", "...ft,...to->...fo", a, b)


def layer_norm(record, function, x, gain, bias):
    n = record.op("normalize", "...t->...t", x, whole="t", options=(function.eps,))
    y = record.op("multiply", "...t,t->...t", n, gain)
    return record.op("add", "...t,t->...t", y, bias)


def embedding(record, function, weight):
    if not np.array_equal(function.indices, record.arrays["inputs"]):
        raise WrongInput("an embedding of other indices than the inputs cannot be traced")
    return record.op("embedding", "...,ft->...t", record.views["inputs"], weight)


def causal_attention(record, function, qkv):
    q, k, v = (record.op("take", "fbhtd->bhtd", qkv, whole="f", options=(i,)) for i in range(3))
    scores = record.op("matmul", "bhtd,bhsd->bhts", q, k)
    scale = qkv.shape[-1] ** -0.5
    p = record.op("causal_softmax", "bhts->bhts", scores, whole="ts", options=(scale,))
    return record.op("matmul", "bhts,bhsd->bhtd", p, v)


def softmax(kind: str) -> Callable:
    def describe(record, function, x):
        term = SYMBOLS[: len(x.dims)]
        return record.op(kind, f"{term}->{term}", x, whole=term[function.axis])

    return describe


def elementwise(kind: str) -> Callable:
    """A function of several arrays, of which shorter ones are repeated along axes in front."""

    def describe(record, function, *views):
        longest = max((view.shape for view in views), key=len)
        if any(view.shape != longest[len(longest) - len(view.shape) :] for view in views):
            shapes = " and ".join(str(list(view.shape)) for view in views)
            raise WrongInput(f"{kind} of {shapes} repeats an axis of length 1; drop this axis")
        return record.op(kind, f"{','.join('...' for _ in views)}->...", *views)

    return describe


def sum_of(record, function, x):
    axis, term = function.axis, SYMBOLS[: len(x.dims)]
    axes = range(len(term)) if axis is None else (axis,) if isinstance(axis, int) else axis
    gone = {term[axis] for axis in axes}
    if function.keepdims:
        raise WrongInput("a sum that keeps axes of length 1 cannot be traced; use keepdims=False")
    return record.op("sum", f"{term}->{''.join(c for c in term if c not in gone)}", x)


def get_item(record, function, x):
    """Describe X[i] and X[i:j], along the first axis."""
    index, n = function.index, x.shape[0]
    if isinstance(index, int):
        return record.op("take", "f...->...", x, whole="f", options=(index % n,))
    if not isinstance(index, slice) or index.step not in (None, 1):
        raise WrongInput(f"the index {index!r} cannot be traced; use X[i] or X[i:j]")
    start, stop, _ = index.indices(n)
    if (start, stop) == (0, n):
        return x
    symbols, new = "f...->o...", (stop - start,)
    return record.op("slice", symbols, x, whole="fo", options=(start, stop), new=new)


def reshape(record, function, x):
    return View(x.value, reshaped(x.dims, function.result_shape))


def transpose(record, function, x):
    axes = function.axes or range(len(x.dims))[::-1]
    return View(x.value, [x.dims[axis] for axis in axes])


def loss_of(kind: str, symbols: str, whole: str = "") -> Callable:
    """A function of outputs and targets; ValueError if it has other targets."""

    def describe(record, function, outputs):
        if not np.array_equal(function.targets, record.arrays["targets"]):
            raise WrongInput(
                "a loss of other values than the targets cannot be traced; compute them before, "
                "and trace with these as the targets"
            )
        views, options = (outputs, record.views["targets"]), (function.reduction_size,)
        return record.op(kind, symbols, *views, whole=whole, options=options)

    return describe


DESCRIBE: dict[type[Function], Callable] = {
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
    losses.CrossEntropy: loss_of("cross_entropy", "...t,...->", whole="t"),
    losses.SquaredError: loss_of("squared_error", "...,...->"),
}


def trace(model: Callable, inputs, targets, loss: Callable = nn.cross_entropy) -> Graph:
    """Return the graph of loss(model(inputs), targets); its last op makes the loss.

    inputs, targets  arrays; in the graph they are the values "inputs" and "targets"
    ValueError for a function whose description is not known.
    """
    arrays = {"inputs": np.asarray(inputs), "targets": np.asarray(targets)}
    x: np.ndarray | Tensor = arrays["inputs"]
    x = Tensor(x, requires_grad=True) if x.dtype.kind == "f" else x
    root = loss(model(x), arrays["targets"])
    record = Recorder(root.dtype, arrays)
    for name, array in arrays.items():
        record.views[name] = record.value(name, array.shape, "input", array.dtype)
    views: dict[Tensor | Function, View] = {}
    if isinstance(x, Tensor):
        views[x] = record.views["inputs"]
    for function in functions_below(root):
        kind, sources = type(function), list[View]()
        for i, source in enumerate(function.inputs or ()):
            if source is None:
                raise WrongInput(
                    f"input {i} of {kind.__name__} needs no gradient, so that no function records "
                    "it; trace a model without constants and frozen parameters"
                )
            if isinstance(source, Tensor) and source not in views:
                name = source.name or f"parameter.{len(views)}"
                views[source] = record.value(name, source.shape, "parameter", source.dtype)
            sources.append(views[source])
        if kind not in DESCRIBE:
            raise WrongInput(
                f"no index description of {kind.__name__} is known; add one to "
                "DESCRIBE in planning/tracing.py"
            )
        views[function] = DESCRIBE[kind](record, function, *sources)
    return record.graph()
