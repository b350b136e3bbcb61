"""Trace a single-device model into a graph, from the functions that its loss was made by.

    graph = trace(nn.MLP([4, 8, 2]), x, targets)
    graph.ops[0]      Op("matmul", ("inputs", "layers.0.weight"), "matmul.0", "ac,cb->ab")

Fused functions are taken apart, so that each op has one rule: a bias is an op of its own, a norm is
`normalize`, times a gain, plus a bias; attention is scores, a softmax and a mixture. A reshape or a
transpose is no op: see axes.py. What no function records cannot be traced: a constant, a frozen
parameter.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from minidist import nn
from minidist.autograd import Function, Tensor, functions_below
from minidist.errors import WrongInput
from minidist.planning.graphs.axes import Axis, leaves, match
from minidist.planning.graphs.descriptions import describe
from minidist.planning.graphs.graph import Graph, Op, Value

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


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

    def op(self, kind: str, symbols: str, *views: View, whole: str = "", options=()) -> View:
        """Record an op: `symbols` has one letter for each axis of the views, as einsum's."""
        inputs, output = symbols.split("->")
        terms = inputs.split(",")
        dims: dict[str, list[Axis]] = {}
        for view, term in zip(views, terms, strict=True):
            for symbol, dim in zip(term, view.dims, strict=True):
                match(dims.setdefault(symbol, dim), dim)
        shape = View("", [dims.get(symbol, []) for symbol in output]).shape
        out = self.result(kind, shape)
        for symbol, dim in zip(output, out.dims, strict=True):
            match(dims[symbol], dim)
        self.ops.append((kind, [*views, out], [*terms, output], whole, options))
        return out

    def sliced(self, x: View, start: int, stop: int) -> View:
        """Record X[start:stop]; no other axis changes."""
        out = self.result("slice", (stop - start, *x.shape[1:]))
        for a, b in zip(x.dims[1:], out.dims[1:], strict=True):
            match(a, b)
        symbols = LETTERS[1 : len(x.dims)]
        terms = ["a" + symbols, "A" + symbols]
        self.ops.append(("slice", [x, out], terms, "aA", (start, stop)))
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
        found, ones = [], set()
        for view, term in zip(views, terms, strict=True):
            of: dict[Axis, str] = {}
            for symbol, dim in zip(term, view.dims, strict=True):
                of |= dict(zip(leaves(dim), letters[symbol], strict=True))
            for symbol, dim in zip(term, view.dims, strict=True):
                check_order(symbol in whole, dim, leaves(self.values[view.value][0]), kind)
            own = leaves(self.values[view.value][0])
            alone = {axis: next(fresh) for axis in own if axis not in of}  # of length 1
            ones |= {*alone.values()}
            found.append("".join((of | alone)[axis] for axis in own))
        names = tuple(view.value for view in views)
        cut = frozenset(letter for symbol in whole for letter in letters[symbol]) | ones
        indices = f"{','.join(found[:-1])}->{found[-1]}"
        return Op(kind, names[:-1], names[-1], indices, cut, tuple(options))


def check_order(whole: bool, dim: list[Axis], own: list[Axis], kind: str) -> None:
    """Raise ValueError if an axis that is computed as a whole is made of axes in another order."""
    places = [own.index(axis) for axis in leaves(dim)]
    if whole and places != sorted(places):
        raise WrongInput(
            f"{kind} needs an axis that a transpose and then a reshape made; reshape first"
        )


def sizes_of(axes: list[Axis]) -> tuple[int, ...]:
    return tuple(axis.size for axis in axes)


def trace(model: Callable, inputs, targets, loss: Callable = nn.cross_entropy) -> Graph:
    """Return the graph of loss(model(inputs), targets); its last op makes the loss.

    inputs, targets  arrays; in the graph they are the values "inputs" and "targets"
    ValueError for a function whose description is not known.
    """
    arrays = {"inputs": np.asarray(inputs), "targets": np.asarray(targets)}
    inputs = arrays["inputs"]
    given = Tensor(inputs, requires_grad=True) if inputs.dtype.kind == "f" else inputs
    root = loss(model(given), arrays["targets"])
    record = Recorder(root.dtype, arrays)
    for name, array in arrays.items():
        record.views[name] = record.value(name, array.shape, "input", array.dtype)
    found: dict[Tensor | Function, View] = {}
    if isinstance(given, Tensor):
        found[given] = record.views["inputs"]
    for function in functions_below(root):
        inputs = function.inputs or ()
        if missing := [i for i, source in enumerate(inputs) if source is None]:
            raise WrongInput(
                f"input {missing[0]} of {type(function).__name__} needs no "
                "gradient, so that no function records it; trace a model without constants and "
                "frozen parameters"
            )
        sources = [source for source in inputs if source is not None]
        for source in sources:
            if isinstance(source, Tensor) and source not in found:
                name = source.name or f"parameter.{len(found)}"
                found[source] = record.value(name, source.shape, "parameter", source.dtype)
        views = [found[source] for source in sources]
        found[function] = describe(record, function, views)
    return record.graph()
