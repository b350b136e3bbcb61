"""What the autograd lab asks of a student's code; it runs beside that code, and judges nothing."""

import weakref
from unittest import mock

import numpy as np

from minidist.autograd import Function, Tensor, functions, losses, operators, tensor
from minidist.autograd.deferred import Deferred, Product, compute, sum_of


def applied(name, options, arrays):
    """Return the result of a function of the lab."""
    room = next(m for m in (operators, functions, losses) if hasattr(m, name))
    return getattr(room, name)(**options)(*[Tensor(a, requires_grad=True) for a in arrays])


def adjoints(name, options, calls):
    """Apply a function to several inputs, and only then go back through each.

    calls  [{"arrays": ..., "grad": ...}]: what it is applied to, and the gradient of the result

    Returns, of each call: Y, dX of each input, and whether an array of the caller was written to.
    """
    results = [applied(name, options, call["arrays"]) for call in calls]
    answer = {}
    for c, (call, y) in enumerate(zip(calls, results, strict=True)):
        owned = [*call["arrays"], call["grad"]]
        before = [a.copy() for a in owned]
        answer[f"Y of call {c}"] = y.data.copy()
        gradients = y.creator.backward(call["grad"])
        gradients = gradients if isinstance(gradients, tuple) else (gradients,)
        for i, (d, x) in enumerate(zip(gradients, call["arrays"], strict=True)):
            d = np.asarray(d() if callable(d) else d)
            answer[f"dX of input {i} of call {c}"] = summed_down(d, x.shape)
        same = all(np.array_equal(a, b) for a, b in zip(owned, before, strict=True))
        answer[f"the caller's arrays of call {c} were written to"] = not same
    return answer


def summed_down(grad, shape):
    """Sum over the axes along which one element was copied: what `unbroadcast`, a task, does."""
    if grad.ndim < len(shape) or np.broadcast_shapes(grad.shape, shape) != grad.shape:
        return grad
    home = np.broadcast_to(np.arange(np.prod(shape, dtype=int)).reshape(shape), grad.shape)
    sums = np.bincount(home.reshape(-1), grad.reshape(-1), int(np.prod(shape)))
    return sums.reshape(shape)


def unbroadcast(grad, shape):
    before = grad.copy()
    result = tensor.unbroadcast(grad, tuple(shape))
    same = np.array_equal(grad, before)
    return {"the result": result, "the gradient that came in was written to": not same}


# {kind of function: (its value, the gradients of its inputs)}
KINDS = {
    "plus": (lambda a, b: a + b, lambda grad, a, b: (grad, grad)),
    "times": (lambda a, b: a * b, lambda grad, a, b: (lambda out=None: grad * b, grad * a)),
    "sine": (np.sin, lambda grad, a: grad * np.cos(a)),
    "stop": (np.copy, lambda grad, a: None),  # nothing comes back through it
    "twice": (lambda a: np.stack([a, a]), lambda grad, a: grad),  # as if broadcast
}


class Node(Function):
    """A function in a graph for testing an engine; it records when its backward is called."""

    def __init__(self, kind, number, watch):
        self.value, self.adjoint = KINDS[kind]
        self.number, self.watch = number, watch

    def forward(self, *arrays):
        self.kept = [a.copy() for a in arrays]
        self.watch.kept[self.number] = weakref.ref(self.kept[0])
        return self.value(*self.kept)

    def backward(self, grad):
        self.watch.order.append(self.number)
        self.watch.deferring.append(self.deferring)
        self.watch.alive.append(sum(kept() is not None for kept in self.watch.kept.values()))
        return self.adjoint(grad, *self.kept)


class Recorder:
    """Calls of backward, in their order; at each, how many functions kept an array."""

    def __init__(self):
        self.order, self.alive, self.deferring, self.kept = [], [], [], {}

    def facts(self, leaves, nodes):
        """Return what is true of any right order."""
        place = {n: k for k, n in enumerate(self.order)}
        users = [(i - leaves, n) for n in place for i in nodes[n][1] if i >= leaves]
        early = [f"{i} before {n}" for i, n in users if place.get(i, len(nodes)) < place[n]]
        most = [len(nodes) - k for k in range(len(self.order))]
        return {
            "the calls of backward of each function": np.bincount(self.order, minlength=len(nodes)),
            "functions before one that uses their result": np.array(early[:3], str),
            "calls at which too many functions keep arrays": sum(np.array(self.alive) > most),
            "deferring": np.array(self.deferring, bool),
        }


def build(leaves, nodes, watch):
    """Return tensors: leaves first, then what each of the nodes (kind, inputs) makes."""
    tensors = [Tensor(leaf, requires_grad=True) for leaf in leaves]
    for number, (kind, inputs) in enumerate(nodes):
        tensors.append(Node(kind, number, watch)(*[tensors[i] for i in inputs]))
    return tensors


def engine(leaves, nodes, grad, deferring=False):
    """Go back through a graph, of which the last node is the root.

    Returns, of each leaf: its gradient, the sum of its contributions, their number, and how many
    `remaining` announced before the first one; and the facts about the calls of backward.
    """
    watch = Recorder()
    tensors = build(leaves, nodes, watch)
    number_of = {id(t): i for i, t in enumerate(tensors[: len(leaves)])}
    sums, counts, announced = [0.0 * leaf for leaf in leaves], [0] * len(leaves), {}
    remaining = {}
    with mock.patch.object(tensor, "unbroadcast", summed_down):
        for leaf, contribution in tensor.propagate(tensors[-1], grad, remaining, deferring):
            announced = announced or {number_of[id(t)]: n for t, n in remaining.items()}
            i = number_of[id(leaf)]
            counts[i] += 1
            if contribution is not None:
                value = contribution() if callable(contribution) else contribution
                sums[i] = sums[i] + summed_down(value, sums[i].shape)
    answer = watch.facts(len(leaves), nodes)
    answer |= {f"the gradient of leaf {i}": total for i, total in enumerate(sums)}
    answer |= {f"contributions to leaf {i}": n for i, n in enumerate(counts)}
    return answer | {f"`remaining` of leaf {i}": announced.get(i, 0) for i in range(len(leaves))}


def below(leaves, nodes):
    """Return the numbers of the functions below the last one, as they are listed."""
    tensors, remaining = build(leaves, nodes, Recorder()), {}
    listed = [f.number for f in tensor.functions_below(tensors[-1])]
    tensor.functions_below(tensors[-1], remaining)
    edges = [remaining.get(t, 0) for t in tensors[: len(leaves)]]
    return {"listed": np.array(listed, int), "edges": np.array(edges, int)}


def refusals(leaf):
    """Return the name of the error that each wrong call raises, or "none"."""

    def error_of(*arguments):
        try:
            list(tensor.propagate(*arguments, {}))
        except Exception as error:
            return np.array(type(error).__name__)
        return np.array("none")

    fresh = Node("sine", 0, Recorder())(Tensor(leaf, requires_grad=True))
    used = Node("sine", 0, Recorder())(Tensor(leaf, requires_grad=True))
    list(tensor.propagate(used, leaf, {}))
    return {
        "no gradient needed": error_of(Tensor(leaf), leaf),
        "no grad for many elements": error_of(fresh, None),
        "a grad of another shape": error_of(fresh, leaf[:-1]),
        "a grad of another dtype": error_of(fresh, leaf.astype(np.float32)),
        "a second backward": error_of(used, leaf),
    }


class Leaf:
    """The part of a leaf that `Deferred` needs: it adds up contributions, and counts them."""

    def __init__(self, zero):
        self.total, self.added, self.called, self.at_last = zero, 0, 0, zero
        self.shape, self.hooks = zero.shape, (self.hook,)

    def accumulate(self, contribution):
        self.total = self.total + (contribution() if callable(contribution) else contribution)
        self.added += 1

    def hook(self, leaf):
        self.called, self.at_last = self.called + 1, self.total


def product(a, b):
    """Return a product, by itself and into a buffer."""
    buffer = np.full((a.shape[1], b.shape[1]), 1e6)
    inside = Product(a, b)(out=buffer)
    same = np.shares_memory(inside, buffer)
    return {"the result": Product(a, b)(), "out": buffer, "with out=, the result is out": same}


def one_product(pairs):
    """Return the sum of products, if it is one product of longer factors."""
    total = sum_of([Product(a, b) for a, b in pairs])
    if not isinstance(total, Product):
        return {"one Product": False}
    rows = [len(total.a), len(total.b)]
    return {"one Product": True, "the rows of A and B": rows, "A^T B": total.a.T @ total.b}


def contribution(kind, arrays):
    match kind:
        case "product":
            return Product(*arrays)
        case "array":
            return arrays[0]
        case "thunk":
            return lambda out=None: arrays[0]
    return None


def later(shapes, passes, together):
    """Deliver what several passes of backward have deferred.

    shapes    of the leaves
    passes    [[(leaf, kind, arrays)]]; kind "product", "array", "thunk" or "none"
    together  by `compute`, or each by itself, last one first
    """
    leaves = [Leaf(np.zeros(shape)) for shape in shapes]
    deliveries = []
    for contributions in passes:
        remaining = {}
        for i, _, _ in contributions:
            remaining[leaves[i]] = remaining.get(leaves[i], 0) + 1
        for i, kind, arrays in contributions:
            deliveries.append(Deferred(leaves[i], contribution(kind, arrays), remaining))
    if together:
        compute(iter(deliveries))
    else:
        for delivery in reversed(deliveries):
            delivery()
    answer = {}
    for i, leaf in enumerate(leaves):
        answer |= {
            f"the gradient of leaf {i}": leaf.total,
            f"the gradient of leaf {i} at its last hook": leaf.at_last,
            f"the calls of the hooks of leaf {i}": leaf.called,
        }
    answer["the additions to leaf 0, of products"] = leaves[0].added
    return answer
