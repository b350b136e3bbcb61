"""The engine and its functions: adjoints, un-broadcasting, the order of backward, what waits."""

import weakref
from unittest import mock

import numpy as np
import pytest

from minidist.autograd import Function, Tensor, functions, losses, operators, tensor
from minidist.autograd.deferred import Deferred, Product, compute, sum_of
from minidist.autograd.losses import IGNORED
from minidist.course.inside import inside, task


def applied(name, options, arrays):
    """Return the result of a function of the lab."""
    room = next(m for m in (operators, functions, losses) if hasattr(m, name))
    return getattr(room, name)(**options)(*[Tensor(a, requires_grad=True) for a in arrays])


@inside
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


@inside
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


@inside
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


@inside
def below(leaves, nodes):
    """Return the numbers of the functions below the last one, as they are listed."""
    tensors, remaining = build(leaves, nodes, Recorder()), {}
    listed = [f.number for f in tensor.functions_below(tensors[-1])]
    tensor.functions_below(tensors[-1], remaining)
    edges = [remaining.get(t, 0) for t in tensors[: len(leaves)]]
    return {"listed": np.array(listed, int), "edges": np.array(edges, int)}


@inside
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


@inside
def product(a, b):
    """Return a product, by itself and into a buffer."""
    buffer = np.full((a.shape[1], b.shape[1]), 1e6)
    inside = Product(a, b)(out=buffer)
    same = np.shares_memory(inside, buffer)
    return {"the result": Product(a, b)(), "out": buffer, "with out=, the result is out": same}


@inside
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


@inside
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


def check_adjoints(rng, name, *inputs, **options):
    """Ask for a function's results and gradients, of several inputs."""
    calls = [{"arrays": [np.asarray(a, float) for a in arrays]} for arrays in inputs]
    for call in calls:
        shape = applied(name, options, call["arrays"]).shape
        call["grad"] = np.asarray(rng.standard_normal(shape))
    adjoints.check(name=name, options=options, calls=calls)


@task("1.1")
@pytest.mark.parametrize("group", ["Divide", "MatMul", "Max", "GetItem"])
def test_elementary_functions_have_their_adjoints(group, rng):
    n, k, m = rng.permutation([2, 3, 4]).tolist()
    if group == "Divide":
        divisor = rng.uniform(0.5, 2, (1, m)) * rng.choice([-1, 1], (1, m))
        check_adjoints(rng, group, *[[rng.standard_normal((n, m)), divisor + i] for i in (0, 3)])
    elif group == "MatMul":
        for batch in ((), (int(rng.integers(2, 4)),)):
            a, b = rng.standard_normal((*batch, n, k)), rng.standard_normal((k, m))
            check_adjoints(rng, group, [a, b], [a + 1, b])
    elif group == "Max":
        for axis in (None, 0, -1):
            x, keepdims = rng.integers(0, 3, (n, 4)), bool(rng.integers(2))  # with ties
            check_adjoints(rng, group, [x], [x[::-1]], axis=axis, keepdims=keepdims)
    else:
        for index in (rng.integers(0, k, 2 * k), int(rng.integers(k))):
            check_adjoints(rng, group, *rng.standard_normal((2, 1, k, 2)), index=index)


@task("1.2")
@pytest.mark.parametrize(
    "group, broadcast, shape",
    [
        ("axes in front", (3, 2), (3, 2)),
        ("axes in front", (3, 2), (2,)),
        ("axes in front", (3, 2), ()),
        ("axes of length 1", (3, 4, 2), (1, 4, 1)),
        ("axes of length 1", (1, 3), (1, 1)),
        ("both, and an empty axis", (4, 3, 2), (3, 1)),
        ("both, and an empty axis", (4, 1, 2), (1, 2)),
        ("both, and an empty axis", (0, 3), (1, 3)),
    ],
)
def test_a_gradient_is_summed_to_the_shape_before_broadcasting(group, broadcast, shape, rng):
    unbroadcast.check(rng.standard_normal(broadcast), list(shape))


# 1.3. A graph: leaves, then functions (kind, numbers of their inputs); the last one is the root.


def random_graph(rng, leaves, functions):
    """Draw functions that mostly use the newest values, and a root that needs them all."""
    nodes = []
    for n in range(functions):
        kind = str(rng.choice(["plus", "times", "sine", "plus", "times", "stop"]))
        recent = [max(0, leaves + n - 1 - int(rng.integers(0, 4))) for _ in range(2)]
        nodes.append([kind, recent[: 1 if kind in ("sine", "stop") else 2]])
    used = {i for _, inputs in nodes for i in inputs}
    for i in range(leaves + functions - 1):  # what nobody has used
        if i not in used:
            nodes.append(["plus", [i, leaves + len(nodes) - 1]])
    return nodes


# {name: (group, the shapes of the leaves, functions, the shape of the root)}
GRAPHS = {
    "a value that is used three times": (
        "small graphs",
        [3],
        [["sine", [0]], ["times", [1, 0]], ["plus", [1, 2]], ["times", [3, 1]]],
        3,
    ),
    "a short way and a long way": (
        "small graphs",
        [3],
        [["sine", [0]], ["sine", [1]], ["sine", [2]], ["times", [3, 1]], ["plus", [4, 0]]],
        3,
    ),
    "12 times the double": ("small graphs", [3], [["plus", [i, i]] for i in range(12)], 3),
    "a gradient that is None": (
        "None, thunks, broadcasting, leaves",
        [3, 3],
        [["sine", [0]], ["stop", [2]], ["times", [1, 3]]],
        3,
    ),
    "an input that was repeated": (
        "None, thunks, broadcasting, leaves",
        [3],
        [["sine", [0]], ["twice", [1]], ["times", [2, 2]]],
        (2, 3),
    ),
    "a root that is a leaf": ("None, thunks, broadcasting, leaves", [3], [], 3),
    "a root of one element": ("None, thunks, broadcasting, leaves", [1], [["sine", [0]]], None),
    "1500 functions deep": (
        "drawn and deep graphs",
        [2, 2],
        [["plus", [0, 1]]] + [["sine", [2 + i]] for i in range(1499)],
        2,
    ),
}


@task("1.3")
@pytest.mark.parametrize("group, graph", [(own[0], name) for name, own in GRAPHS.items()])
def test_an_engine_visits_each_function_once_after_all_that_use_it(group, graph, rng):
    _, shapes, nodes, shape = GRAPHS[graph]
    leaves = [rng.standard_normal(n) for n in shapes]
    grad = None if shape is None else rng.standard_normal(shape)
    engine.check(leaves, nodes, grad, bool(rng.integers(2)))


@task("1.3")
@pytest.mark.parametrize("group", ["drawn and deep graphs"])
def test_an_engine_runs_drawn_graphs(group, rng):
    for count in (1, 2, 3):
        nodes = random_graph(rng, count, int(rng.integers(5, 10)))
        leaves = [rng.standard_normal(2) for _ in range(count)]
        engine.check(leaves, nodes, rng.standard_normal(2), bool(rng.integers(2)))


@task("1.3")
def test_an_engine_lists_what_is_needed_earliest_first_and_refuses_the_rest(rng):
    nodes = [["plus", [0, 1]], ["sine", [0]], ["sine", [2]], ["times", [2, 4]], ["plus", [5, 0]]]
    last = int(rng.integers(2, 4))
    nodes = [*nodes, *[["sine", [4]]] * last, ["times", [6, 5 + last]]]
    below.check(list(rng.standard_normal((2, 2))), nodes)
    refusals.check(rng.standard_normal(int(rng.integers(2, 5))))


# 1.4 to 1.6: functions of rows.


def far_apart(rng, shape, large):
    """Draw rows; if large, one of them about 1000 above the others, and one as far below."""
    x = rng.standard_normal(shape)
    if large:
        x[0] += 1000
        x[-1] -= 1000
    return x


@task("1.4")
@pytest.mark.parametrize("group", ["Softmax", "LogSoftmax"])
def test_a_softmax_is_of_its_axis_and_of_large_rows(group, rng):
    for axis, large in ((-1, False), (0, False), (-1, True)):
        shape = tuple(rng.permutation([3, 4]).tolist())
        check_adjoints(rng, group, *[[far_apart(rng, shape, large)] for _ in range(2)], axis=axis)


@task("1.5")
@pytest.mark.parametrize(
    "group, shape", [("2 axes", (3, 4)), ("3 axes", (2, 2, 5)), ("2 axes", (4, 1))]
)
def test_a_layer_norm_is_of_rows(group, shape, rng):
    two = [[3 + 2 * rng.standard_normal(shape), *rng.standard_normal((2, shape[-1]))] for _ in "ab"]
    check_adjoints(rng, "LayerNorm", *two, eps=float(rng.uniform(0.01, 0.1)))


@task("1.6")
@pytest.mark.parametrize(
    "group, shape, large",
    [
        ("two axes", (4, 3), False),
        ("three axes, IGNORED", (2, 3, 5), False),
        ("rows near 1000, none", (3, 4), True),
        ("rows near 1000, none", (0, 3), False),
    ],
)
def test_a_cross_entropy_is_a_part_of_the_whole_batchs(group, shape, large, rng):
    targets = rng.integers(0, shape[-1], shape[:-1])
    if len(shape) == 3:
        targets[0, 1:] = IGNORED
    whole = float(targets.size + int(rng.integers(1, 9)))  # targets of the batch
    two = [[far_apart(rng, shape, large)] for _ in range(2)]
    check_adjoints(rng, "CrossEntropy", *two, targets=targets, reduction_size=whole)


# 1.7


def drawn_contribution(rng, leaf, kind, shape):
    """Draw what a pass adds to a leaf's gradient: the two factors of a product, or an array."""
    if kind != "product":
        return [leaf, kind, [rng.standard_normal(shape)]]
    N = int(rng.integers(1, 4))
    return [leaf, kind, [rng.standard_normal((N, n)) for n in shape]]


@task("1.7")
def test_products_wait_and_become_one(rng):
    N, I, J = rng.permutation([2, 3, 5]).tolist()
    product.check(rng.standard_normal((N, I)), rng.standard_normal((N, J)))
    rows = rng.integers(1, 4, int(rng.integers(2, 5)))
    one_product.check([[rng.standard_normal((n, I)), rng.standard_normal((n, J))] for n in rows])


@task("1.7")
@pytest.mark.parametrize(
    "group, together", [("delivered each by itself", False), ("delivered together", True)]
)
def test_what_waits_is_delivered_once_to_each_leaf(group, together, rng):
    kinds = [(0, "product"), (1, "thunk"), (2, "product"), (2, "product"), (1, "none")]
    for passes in (1, int(rng.integers(2, 5))):
        shapes = rng.integers(1, 4, (3, 2)).tolist()
        each = [
            [drawn_contribution(rng, i, kind, shapes[i]) for i, kind in kinds]
            for _ in range(passes)
        ]
        each[-1].append(drawn_contribution(rng, 2, "array", shapes[2]))
        later.check(shapes, each, together)
