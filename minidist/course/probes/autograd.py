"""What the autograd lab asks of a student's code; it runs beside that code, and judges nothing."""

import weakref
from unittest import mock

import numpy as np

from minidist.autograd import Function, Tensor, functions, losses, operators, tensor
from minidist.autograd.deferred import Deferred, Product, compute, sum_of


def adjoints(name, options, calls):
    """Apply a function to several inputs, and only then go back through each.

    calls  [{"arrays": ..., "grad": ...}]: what it is applied to, and the gradient of the result

    Returns, of call c: "y c", "d0 c", "d1 c", ..., and "written c", whether an array of the caller
    has changed.
    """
    room = next(m for m in (operators, functions, losses) if hasattr(m, name))
    results = [
        getattr(room, name)(**options)(*[Tensor(a, requires_grad=True) for a in call["arrays"]])
        for call in calls
    ]
    answer = {}
    for c, (call, y) in enumerate(zip(calls, results, strict=True)):
        owned = [*call["arrays"], call["grad"]]
        before = [a.copy() for a in owned]
        answer[f"y {c}"] = y.data.copy()
        gradients = y.creator.backward(call["grad"])
        gradients = gradients if isinstance(gradients, tuple) else (gradients,)
        for i, d in enumerate(gradients):
            answer[f"d{i} {c}"] = d() if callable(d) else d
        same = all(np.array_equal(a, b) for a, b in zip(owned, before, strict=True))
        answer[f"written {c}"] = not same
    return answer


def unbroadcast(grad, shape):
    before = grad.copy()
    result = tensor.unbroadcast(grad, tuple(shape))
    return {"result": result, "written": not np.array_equal(grad, before)}


class Node(Function):
    """A function in a graph for testing an engine; it records when its backward is called."""

    def __init__(self, number, watch):
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


class Plus(Node):
    def value(self, a, b):
        return a + b

    def adjoint(self, grad, a, b):
        return grad, grad


class Times(Node):
    def value(self, a, b):
        return a * b

    def adjoint(self, grad, a, b):
        return lambda out=None: grad * b, grad * a


class Sine(Node):
    def value(self, a):
        return np.sin(a)

    def adjoint(self, grad, a):
        return grad * np.cos(a)


class Stop(Node):
    """Nothing comes back through it."""

    def value(self, a):
        return a.copy()

    def adjoint(self, grad, a):
        return None


class Twice(Node):
    """The input below itself, as two rows more: its gradient has the shape of the result."""

    def value(self, a):
        return np.stack([a, a])

    def adjoint(self, grad, a):
        return grad


class Watch:
    """Calls of backward, in their order; at each, how many functions kept an array."""

    def __init__(self):
        self.order, self.alive, self.deferring, self.kept = [], [], [], {}


KINDS = {"plus": Plus, "times": Times, "sine": Sine, "stop": Stop, "twice": Twice}


def build(leaves, nodes, watch):
    """Return tensors: leaves first, then what each of the nodes (kind, inputs) makes."""
    tensors = [Tensor(leaf, requires_grad=True) for leaf in leaves]
    for number, (kind, inputs) in enumerate(nodes):
        tensors.append(KINDS[kind](number, watch)(*[tensors[i] for i in inputs]))
    return tensors


def engine(leaves, nodes, grad, deferring=False):
    """Go back through a graph, of which the last node is the root.

    Returns, of leaf i: "d i", the sum of its contributions; "contributions i", and how many were
    announced before the first one: "announced i". "order": the nodes whose backward was called.
    """
    watch = Watch()
    tensors = build(leaves, nodes, watch)
    number_of = {id(t): i for i, t in enumerate(tensors[: len(leaves)])}
    sums, counts, announced = [0.0 * leaf for leaf in leaves], [0] * len(leaves), {}
    remaining = {}
    with mock.patch.object(tensor, "unbroadcast", lambda grad, shape: np.add.reduce(grad)):
        for leaf, contribution in tensor.propagate(tensors[-1], grad, remaining, deferring):
            announced = announced or {number_of[id(t)]: n for t, n in remaining.items()}
            i = number_of[id(leaf)]
            counts[i] += 1
            if contribution is not None:
                value = contribution() if callable(contribution) else contribution
                sums[i] = sums[i] + (np.add.reduce(value) if value.ndim > sums[i].ndim else value)
    answer = {f"d {i}": total for i, total in enumerate(sums)}
    answer |= {f"contributions {i}": n for i, n in enumerate(counts)}
    answer |= {f"announced {i}": announced.get(i, 0) for i in range(len(leaves))}
    answer |= {name: np.array(getattr(watch, name), int) for name in ("order", "alive")}
    return {**answer, "deferring": np.array(watch.deferring, bool)}


def below(leaves, nodes):
    """Return the numbers of the functions below the last one, as they are listed."""
    tensors, remaining = build(leaves, nodes, Watch()), {}
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

    fresh = Sine(0, Watch())(Tensor(leaf, requires_grad=True))
    used = Sine(0, Watch())(Tensor(leaf, requires_grad=True))
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
    return {"result": Product(a, b)(), "buffer": buffer, "is the buffer": same}


def one_product(pairs):
    """Return the factors of the sum of products."""
    total = sum_of([Product(a, b) for a, b in pairs])
    return {"is a product": isinstance(total, Product), "a": total.a, "b": total.b}


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
            what = {
                "product": lambda arrays=arrays: Product(*arrays),
                "array": lambda arrays=arrays: arrays[0],
                "thunk": lambda arrays=arrays: lambda out=None: arrays[0],
                "none": lambda: None,
            }[kind]()
            deliveries.append(Deferred(leaves[i], what, remaining))
    if together:
        compute(iter(deliveries))
    else:
        for delivery in reversed(deliveries):
            delivery()
    answer = {}
    for i, leaf in enumerate(leaves):
        answer |= {f"total {i}": leaf.total, f"total at the last hook {i}": leaf.at_last}
        answer |= {f"additions {i}": leaf.added, f"hooks {i}": leaf.called}
    return answer
