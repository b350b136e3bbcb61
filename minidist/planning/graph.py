"""A graph of values and of ops, each with an index description of what it computes.

    Op("matmul", ("x", "W"), "y", "bi,io->bo")            Y[b, o] = sum_i X[b, i] W[i, o]
    Op("softmax", ("s",), "p", "bt->bt", frozenset("t"))  P[b, :] = softmax of S[b, :]

`trace` in tracing.py makes one of a model; computation.py computes what it says. A description has
a term for each input and one for the output, with a letter for each axis, as einsum's. Letters
belong to one op. They say how the op can be computed in parts:

    a letter of the output      part r makes part r of the output: the parts are concatenated
    a letter of inputs only     part r makes a sum of its terms: the parts are partial sums
    a whole letter              cannot be cut: the op needs all of this axis at once

A part has what the letter cuts, and all of the values without that letter. A matmul is bilinear,
the sum in it is linear: so are "sum", "take", "slice", "scale" and "embedding" (in its weight). An
"add" of partial sums is right only if all its inputs are partial sums.

    kind             output
    matmul           einsum of the description
    add, multiply    elementwise; an input that lacks a letter is repeated along it
    sum              a sum over letters that the output lacks;  scale  the same times options[0]
    take, slice      X[..., i, ...] with i = options[0];  X[..., i:j, ...] with options (i, j)
    embedding        Y[b, t, c] = W[tokens[b, t], c], of tokens and W: the rows of W are summed over
    relu, gelu_tanh, gelu_erf, exp, log      elementwise
    softmax, log_softmax                     over the whole letter
    causal_softmax   of options[0] S[..., t, s] over s <= t
    normalize        (X - mean) / sqrt(var + options[0]) over the whole letter
    cross_entropy, squared_error             of outputs and targets, divided by options[0]

The ops of backward come from the descriptions of forward: the adjoint of a term takes its place.

    forward    matmul  "bi,io->bo"      Y = X W
    backward   matmul  "bo,io->bi"      dX = dY W^T       the letters stay the same:
               matmul  "bi,bo->io"      dW = X^T dY       cut as forward was
    forward    add     "bo,o->bo"       Y = X + c
    backward   sum     "bo->o"          dc = sum of dY over b

The gradient of x is the value "d x". If several ops use x, each makes "d x of y", y its output, and
an "add" makes the sum.
"""

from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

from minidist.errors import WrongInput

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Value:
    """An array: its name, shape and dtype.

    kind   "parameter", "input" or "result"
    whole  the shape that the model gives it, if some of its axes are cut into factors here: the
           columns [3C] of a weight are [3, H, D] where heads are made of them
    """

    name: str
    shape: tuple[int, ...]
    dtype: "str | np.dtype"
    kind: str
    whole: tuple[int, ...] | None = None

    @property
    def is_float(self) -> bool:
        return str(self.dtype).startswith("float")

    @property
    def itemsize(self) -> int:
        import numpy as np  # planners that need no sizes in bytes load faster without it

        return np.dtype(self.dtype).itemsize

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.itemsize


@dataclass(frozen=True)
class Op:
    """A computation; `inputs` and `output` are names of values; see the head of this file.

    whole    letters that cannot be cut
    options  numbers that the kind needs
    """

    kind: str
    inputs: tuple[str, ...]
    output: str
    indices: str
    whole: frozenset[str] = frozenset()
    options: tuple = ()

    @property
    def terms(self) -> tuple[list[str], str]:
        """Return the letters of each input, and the letters of the output."""
        inputs, output = self.indices.split("->")
        return inputs.split(","), output

    @property
    def operands(self) -> list[tuple[str, str]]:
        """Return (value, its letters) of each input and, last, of the output."""
        inputs, output = self.terms
        return list(zip((*self.inputs, self.output), (*inputs, output), strict=True))

    @property
    def letters(self) -> str:
        """Return every letter once: of the output first."""
        inputs, output = self.terms
        return "".join(dict.fromkeys(output + "".join(inputs)))


@dataclass(frozen=True)
class Graph:
    """Values by name, and ops in an order in which each comes after those that it needs.

    ValueError if an op needs what no earlier op makes, a value is made twice or is
    empty, or a letter has two lengths.
    """

    values: dict[str, Value]
    ops: list[Op]

    def __post_init__(self):
        if empty := [value for value in self.values.values() if min(value.shape, default=1) < 1]:
            raise WrongInput(
                f"{empty[0].name} has shape {list(empty[0].shape)}; every axis has a length from 1"
            )
        known = {name for name, value in self.values.items() if value.kind != "result"}
        for op in self.ops:
            if missing := [name for name in op.inputs if name not in known]:
                raise WrongInput(f"{op.output} needs {missing[0]}, which no earlier op makes")
            if op.output in known or op.output not in self.values:
                why = "is known before" if op.output in known else "is not among the values"
                raise WrongInput(
                    f"an op makes {op.output}, which {why}; give each op its own value"
                )
            self.lengths(op)
            known.add(op.output)

    def lengths(self, op: Op) -> dict[str, int]:
        """Return the length of every letter of an op."""
        if len(op.terms[0]) != len(op.inputs):
            raise WrongInput(f"{op.indices} does not describe {len(op.inputs)} inputs")
        lengths: dict[str, int] = {}
        for name, term in op.operands:
            shape = self.values[name].shape
            if len(term) != len(shape) or len(set(term)) != len(term):
                raise WrongInput(f"{op.indices}: {term!r} does not describe {name}{list(shape)}")
            for letter, n in zip(term, shape, strict=True):
                if lengths.setdefault(letter, n) != n:
                    raise WrongInput(f"{op.indices}: {letter!r} is {lengths[letter]} and {n} long")
        return lengths


def d(name: str) -> str:
    return f"d {name}"


def with_gradients(graph: Graph) -> tuple[Graph, list[tuple[int, int] | None]]:
    """Return forward and backward in one graph, and what each op is the adjoint of.

    The gradients are of all parameters and of inputs that are floats, not of the targets. The
    gradient of the loss is an input; give it 1. The list has an entry for each op of the graph:
    (number of the forward op, place of its input); None for a forward op and a sum over uses.
    """
    check_loss(graph)
    values, ops = dict(graph.values), list(graph.ops)
    owners: list[tuple[int, int] | None] = [None] * len(ops)
    loss = values[ops[-1].output]
    values[d(loss.name)] = replace(loss, name=d(loss.name), kind="input")
    live = below_loss(graph)
    uses: dict[str, list[tuple[int, int]]] = {}  # (op, place among its inputs), in order of forward
    for i, op in enumerate(graph.ops):
        for place, name in enumerate(op.inputs):
            if op.output in live and has_gradient(values, name):
                uses.setdefault(name, []).append((i, place))
    for i in reversed(range(len(graph.ops))):
        op = graph.ops[i]
        for place, name in reversed(list(enumerate(op.inputs))):
            if (i, place) not in uses.get(name, ()):
                continue
            several = len(uses[name]) > 1
            out = f"d {name} of {op.output}" if several else d(name)
            out += f" again ({place})" if several and name in op.inputs[:place] else ""
            values[out] = replace(values[name], name=out, kind="result")
            ops.append(adjoint(op, place, out))
            owners.append((i, place))
            if several and (i, place) == uses[name][0]:
                parts = tuple(o.output for o in ops if o.output.startswith(f"d {name} of "))
                values[d(name)] = replace(values[out], name=d(name))
                term = "abcdefghijklmnop"[: len(values[name].shape)]
                ops.append(Op("add", parts, d(name), f"{','.join([term] * len(parts))}->{term}"))
                owners.append(None)
    return Graph(values, ops), owners


def check_loss(graph: Graph) -> None:
    """Raise ValueError if a graph has no last op, which makes the loss."""
    if not graph.ops:
        raise WrongInput("a graph without ops has no loss; give it one op or more")


def below_loss(graph: Graph) -> set[str]:
    """Return the values that the loss depends on, and the loss; others have no gradient."""
    live = {graph.ops[-1].output}
    for op in reversed(graph.ops):
        if op.output in live:
            live.update(op.inputs)
    return live


def has_gradient(values: dict[str, Value], name: str) -> bool:
    return values[name].is_float and name != "targets" and not name.startswith("d ")


def adjoint(op: Op, place: int, out: str) -> Op:
    """Return the op that makes the gradient of the input at this place."""
    terms, output = op.terms
    target, dy = terms[place], d(op.output)
    others = [(n, t) for i, (n, t) in enumerate(zip(op.inputs, terms, strict=True)) if i != place]

    def made(kind, names, letters, whole=op.whole):
        return Op(kind, tuple(names), out, f"{','.join(letters)}->{target}", whole, op.options)

    if op.kind in ("matmul", "multiply"):
        ((other, term),) = others
        return made("matmul", [dy, other], [output, term])
    if op.kind == "add":
        return made("sum", [dy], [output])
    if op.kind == "sum":
        return made("repeat", [dy], [output])
    if op.kind in ("take", "slice"):
        return made(f"un{op.kind}", [dy], [output])
    if op.kind == "embedding":
        return made("embedding_backward", [others[0][0], dy], [others[0][1], output])
    return made(f"{op.kind}_backward", [dy, *op.inputs], [output, *terms])
