"""What the autograd lab asks. The right answer is what this package itself answers.

Only the engine has more than one right answer: any order in which a function comes after all that
use its result.
"""

from functools import partial

import numpy as np

from minidist.autograd.losses import IGNORED
from minidist.course.probes import autograd as probes
from minidist.course.question import Answer, Question, Questions, Random
from minidist.course.questions.arrays import ask, like_the_package
from minidist.errors import plural


def adjoints(rng: Random, about: str, name: str, *inputs: list, **options) -> Question:
    """Ask for a function's results and gradients, of several inputs."""
    calls: list[dict] = [{"arrays": [np.asarray(a, float) for a in arrays]} for arrays in inputs]
    for one in calls:
        shape = probes.applied(name, options, one["arrays"]).shape
        one["grad"] = np.asarray(rng.standard_normal(shape))
    return ask(f"{name}, {about}", probes.adjoints, name=name, options=options, calls=calls)


# 1.1


def dividend_and_divisor(rng: Random) -> list[np.ndarray]:
    n, m = rng.integers(1, 5, 2)
    divisor = rng.uniform(0.5, 2, (1, m)) * rng.choice([-1, 1], (1, m))
    return [rng.standard_normal((n, m)), divisor]


def elementary(rng: Random) -> Questions:
    pairs = [dividend_and_divisor(rng) for _ in range(2)]
    yield adjoints(rng, "B[1, m] repeated", "Divide", *pairs)
    for batch in ((), (int(rng.integers(2, 4)),)):
        n, k, m = (int(i) for i in rng.permutation([2, 3, 4]))
        a, b = rng.standard_normal((*batch, n, k)), rng.standard_normal((k, m))
        about = f"[{n}, {k}] by [{k}, {m}]" + (f", {batch[0]} of them by one" if batch else "")
        yield adjoints(rng, about, "MatMul", [a, b], [a + 1, b])
    for axis in (None, 0, -1):
        x = rng.integers(0, 3, (int(rng.integers(2, 5)), int(rng.integers(3, 5))))
        keep = bool(rng.integers(2))
        about = f"axis {axis}, with ties"
        yield adjoints(rng, about, "Max", [x], [x[::-1]], axis=axis, keepdims=keep)
    rows = int(rng.integers(3, 6))
    for index in (rng.integers(0, rows, 2 * rows), int(rng.integers(rows))):
        about = f"index {np.asarray(index).tolist()} of {rows} rows"
        two = [[rng.standard_normal((rows, 2))] for _ in range(2)]
        yield adjoints(rng, about, "GetItem", *two, index=index)


# 1.2


def unbroadcasting(rng: Random) -> Questions:
    n, m, k = (int(i) for i in rng.permutation([2, 3, 4]))
    cases = [
        ((n, m), (n, m)),
        ((n, m), (m,)),
        ((n, m, k), (1, m, 1)),
        ((n, m, k), (m, 1)),
        ((n, 1, k), (1, k)),
        ((n, m), ()),
        ((0, m), (1, m)),
        ((1, n), (1, 1)),
    ]
    for broadcast, shape in cases:
        about = f"from {list(broadcast)} to {list(shape)}"
        yield ask(about, probes.unbroadcast, grad=rng.standard_normal(broadcast), shape=list(shape))


# 1.3


def graph(about: str, leaves: list, nodes: list, grad: np.ndarray | None, deferring=False):
    """Ask for the gradients of a graph: (kind, numbers of inputs), leaves first, root last."""
    judge = partial(in_a_right_order, leaves=len(leaves), nodes=nodes)
    given = {"leaves": leaves, "nodes": nodes, "grad": grad, "deferring": deferring}
    return ask(about, probes.engine, judge, **given)


def in_a_right_order(answer: Answer, want: Answer, leaves: int, nodes: list) -> str | None:
    """Judge an engine: a function comes after all that use its result, and then keeps nothing."""
    order, called = answer["order"].tolist(), want["order"].tolist()
    if len(order) != len(called):
        return (
            f"backward was called {len(order)} times for {len(called)} functions that the "
            "gradient reaches; each is called once, when the sum of what comes in is complete"
        )
    place = {n: k for k, n in enumerate(order)}
    for user in called:
        for n in (i - leaves for i in nodes[user][1] if i >= leaves):
            if n in called and place.get(user, len(order)) > place.get(n, -1):
                return f"function {n} came before function {user}, which uses its result"
    for k, number in enumerate(answer["alive"].tolist()):
        if number > len(nodes) - k:
            return (
                f"in call {k} of backward {number} of {len(nodes)} functions keep arrays, not "
                f"{len(nodes) - k}: one that has been passed lets go of everything"
            )
    return like_the_package(answer, want, free=("order", "alive"))


def listed(rng: Random) -> Question:
    """Ask for the functions below a root, among others that it does not need."""
    leaves = [rng.standard_normal(2) for _ in range(2)]
    nodes = [["plus", [0, 1]], ["sine", [0]], ["sine", [2]], ["times", [2, 4]], ["plus", [5, 0]]]
    last = int(rng.integers(2, 4))
    nodes = [*nodes, *[["sine", [4]]] * last, ["times", [6, 5 + last]]]
    about = "functions_below lists what is needed, earliest first"
    return ask(about, probes.below, leaves=leaves, nodes=nodes)


def random_graph(rng: Random, leaves: int, functions: int) -> list:
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


def the_engine(rng: Random) -> Questions:
    draw = rng.standard_normal
    leaf = draw(3)
    diamond = [["sine", [0]], ["times", [1, 0]], ["plus", [1, 2]], ["times", [3, 1]]]
    yield graph("a value that is used three times", [leaf], diamond, draw(3))
    late = [["sine", [0]], ["sine", [1]], ["sine", [2]], ["times", [3, 1]], ["plus", [4, 0]]]
    yield graph("a short way and a long way", [leaf], late, draw(3))
    for _ in range(3):
        leaves = [draw(2) for _ in range(int(rng.integers(1, 4)))]
        nodes = random_graph(rng, len(leaves), int(rng.integers(5, 10)))
        defers = bool(rng.integers(2))
        about = f"{len(nodes)} functions, drawn" + (", deferring" if defers else "")
        yield graph(about, leaves, nodes, draw(2), defers)
    stopped = [["sine", [0]], ["stop", [2]], ["times", [1, 3]]]
    yield graph("a gradient that is None", [leaf, draw(3)], stopped, draw(3))
    repeated = [["sine", [0]], ["twice", [1]], ["times", [2, 2]]]
    yield graph("an input that was repeated", [leaf], repeated, draw((2, 3)))
    yield graph("a root that is a leaf", [leaf], [], draw(3))
    yield graph("a root of one element, without grad", [draw(1)], [["sine", [0]]], None)
    yield listed(rng)
    doubled = [["plus", [i, i]] for i in range(12)]
    yield graph("12 times the double", [leaf], doubled, draw(3))
    deep = [["plus", [0, 1]]] + [["sine", [2 + i]] for i in range(1499)]
    yield graph("1500 functions deep", [draw(2), draw(2)], deep, draw(2))
    yield ask("what must be refused", probes.refusals, leaf=draw(int(rng.integers(2, 5))))


# 1.4


def far_apart(rng: Random, rows: int, columns: int) -> np.ndarray:
    """Draw rows, one of them about 1000 above the others, and one as far below."""
    x = rng.standard_normal((rows, columns))
    x[0] += 1000
    x[-1] -= 1000
    return x


def softmax(rng: Random) -> Questions:
    for name in ("Softmax", "LogSoftmax"):
        for axis, large in ((-1, False), (0, False), (-1, True)):
            n, m = (int(i) for i in rng.permutation([3, 4]))
            xs = [far_apart(rng, n, m) if large else rng.standard_normal((n, m)) for _ in range(2)]
            about = f"axis {axis} of [{n}, {m}]" + (
                ", a row near 1000, one near -1000" if large else ""
            )
            yield adjoints(rng, about, name, *([x] for x in xs), axis=axis)


# 1.5


def layer_norm(rng: Random) -> Questions:
    for shape in ((3, 4), (2, 2, 5), (4, 1)):
        eps, C = float(rng.uniform(0.01, 0.1)), shape[-1]
        two = [[3 + 2 * rng.standard_normal(shape), *rng.standard_normal((2, C))] for _ in range(2)]
        yield adjoints(rng, f"X{list(shape)}, eps {eps:.3g}", "LayerNorm", *two, eps=eps)


# 1.6


def cross_entropy(rng: Random) -> Questions:
    for shape, large in (((4, 3), False), ((2, 3, 5), False), ((3, 4), True), ((0, 3), False)):
        targets = rng.integers(0, shape[-1], shape[:-1])
        if len(shape) == 3:
            targets[0, 1:] = IGNORED
        whole = targets.size + int(rng.integers(1, 9))  # of the batch that these are a part of
        x = [far_apart(rng, *shape) if large else rng.standard_normal(shape) for _ in range(2)]
        about = f"X{list(shape)} of a batch of {plural(whole, 'target')}"
        about += ", rows near +-1000" if large else ""
        about += ", 2 IGNORED" if len(shape) == 3 else ""
        options = {"targets": targets, "reduction_size": float(whole)}
        yield adjoints(rng, about, "CrossEntropy", *([logits] for logits in x), **options)


# 1.7


def deferred_in_passes(rng: Random, passes: int, together: bool) -> Question:
    """Ask for the gradients of a weight, a bias, and a weight that two layers share."""
    shapes = [[int(n) for n in rng.integers(1, 4, 2)] for _ in range(3)]
    kinds = [(0, "product"), (1, "thunk"), (2, "product"), (2, "product"), (1, "none")]
    given = [[contribution(rng, i, kind, shapes[i]) for i, kind in kinds] for _ in range(passes)]
    given[-1].append(contribution(rng, 2, "array", shapes[2]))
    how = "together" if together else "each by itself"
    about = f"{plural(passes, 'pass')}, delivered {how}"
    return ask(about, probes.later, shapes=shapes, passes=given, together=together)


def contribution(rng: Random, leaf: int, kind: str, shape: list[int]) -> list:
    """Draw what a pass adds to a leaf's gradient: the two factors of a product, or an array."""
    if kind != "product":
        return [leaf, kind, [rng.standard_normal(shape)]]
    N = int(rng.integers(1, 4))
    return [leaf, kind, [rng.standard_normal((N, n)) for n in shape]]


def deferred(rng: Random) -> Questions:
    N, I, J = (int(i) for i in rng.permutation([2, 3, 5]))
    pair = {"a": rng.standard_normal((N, I)), "b": rng.standard_normal((N, J))}
    yield ask(f"A[{N}, {I}], B[{N}, {J}]", probes.product, **pair)
    rows = [int(n) for n in rng.integers(1, 4, int(rng.integers(2, 5)))]
    pairs = [[rng.standard_normal((n, I)), rng.standard_normal((n, J))] for n in rows]
    yield ask(f"the sum of products of {rows} rows", probes.one_product, pairs=pairs)
    for passes in (1, int(rng.integers(2, 5))):
        yield deferred_in_passes(rng, passes, together=False)
        yield deferred_in_passes(rng, passes, together=True)


QUESTIONS = {
    "1.1": elementary,
    "1.2": unbroadcasting,
    "1.3": the_engine,
    "1.4": softmax,
    "1.5": layer_norm,
    "1.6": cross_entropy,
    "1.7": deferred,
}
