"""The ops of backward, from the descriptions of forward: the adjoint of a term takes its place.

    forward    matmul  "bi,io->bo"      Y = X W
    backward   matmul  "bo,io->bi"      dX = dY W^T       the letters stay the same:
               matmul  "bi,bo->io"      dW = X^T dY       cut as forward was
    forward    add     "bo,o->bo"       Y = X + c
    backward   sum     "bo->o"          dc = sum of dY over b

The gradient of x is the value "d x". If several ops use x, each makes "d x of y", y its output, and
an "add" makes the sum.
"""

from minidist.errors import WrongInput
from minidist.planning.graphs.graph import Graph, Op, Value


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
    values[d(loss.name)] = Value(d(loss.name), loss.shape, loss.dtype, "input")
    live = below_loss(graph)
    wanted = {
        name: [(i, place) for i, place in uses(graph, name) if graph.ops[i].output in live]
        for name in values
        if has_gradient(values, name)
    }
    for i in reversed(range(len(graph.ops))):
        op = graph.ops[i]
        for place, name in reversed(list(enumerate(op.inputs))):
            if name not in wanted or op.output not in live:
                continue
            several = len(wanted[name]) > 1
            out = f"d {name} of {op.output}" if several else d(name)
            out += f" again ({place})" if several and name in op.inputs[:place] else ""
            values[out] = gradient_value(values[name], out)
            ops.append(adjoint(op, place, out))
            owners.append((i, place))
            if several and (i, place) == wanted[name][0]:
                parts = tuple(o.output for o in ops if o.output.startswith(f"d {name} of "))
                values[d(name)] = gradient_value(values[name], d(name))
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


def uses(graph: Graph, name: str) -> list[tuple[int, int]]:
    """Return (op, place among its inputs) of each use, in the order of forward."""
    return [
        (i, place)
        for i, op in enumerate(graph.ops)
        for place, used in enumerate(op.inputs)
        if used == name
    ]


def gradient_value(value: Value, name: str) -> Value:
    return Value(name, value.shape, value.dtype, "result", value.whole)


def adjoint(op: Op, place: int, out: str) -> Op:
    """Return the op that makes the gradient of the input at this place."""
    terms, output = op.terms
    own, dy = terms[place], d(op.output)
    others = [(n, t) for i, (n, t) in enumerate(zip(op.inputs, terms, strict=True)) if i != place]

    def made(kind, names, letters, whole=op.whole):
        return Op(kind, tuple(names), out, f"{','.join(letters)}->{own}", whole, op.options)

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
