"""What the autograd lab asks. The right answer is what this package itself answers."""

import numpy as np

from minidist.autograd.losses import IGNORED
from minidist.course.labs.autograd import probes
from minidist.course.question import Question, Questions, Random, ask, ints
from minidist.errors import plural


def adjoints(rng: Random, group: str, about: str, name: str, *inputs: list, **options) -> Question:
    """Ask for a function's results and gradients, of several inputs."""
    calls: list[dict] = [{"arrays": [np.asarray(a, float) for a in arrays]} for arrays in inputs]
    for one in calls:
        shape = probes.applied(name, options, one["arrays"]).shape
        one["grad"] = np.asarray(rng.standard_normal(shape))
    given = {"name": name, "options": options, "calls": calls}
    return ask(f"{name}, {about}", probes.adjoints, group=group, **given)


def elementary(rng: Random) -> Questions:
    n, m = ints(rng, 1, 5, 2)
    divisor = rng.uniform(0.5, 2, (1, m)) * rng.choice([-1, 1], (1, m))
    pairs = [[rng.standard_normal((n, m)), divisor + i] for i in (0, 3)]
    yield adjoints(rng, "Divide", "B[1, m] repeated", "Divide", *pairs)
    for batch in ((), (int(rng.integers(2, 4)),)):
        n, k, m = rng.permutation([2, 3, 4]).tolist()
        a, b = rng.standard_normal((*batch, n, k)), rng.standard_normal((k, m))
        about = f"[{n}, {k}] by [{k}, {m}]" + (f", {batch[0]} of them by one" if batch else "")
        yield adjoints(rng, "MatMul", about, "MatMul", [a, b], [a + 1, b])
    for axis in (None, 0, -1):
        x = rng.integers(0, 3, (int(rng.integers(2, 5)), int(rng.integers(3, 5))))
        options = {"axis": axis, "keepdims": bool(rng.integers(2))}
        yield adjoints(rng, "Max", f"axis {axis}, with ties", "Max", [x], [x[::-1]], **options)
    rows = int(rng.integers(3, 6))
    for index in (rng.integers(0, rows, 2 * rows), int(rng.integers(rows))):
        about = f"index {np.asarray(index).tolist()} of {rows} rows"
        two = [[rng.standard_normal((rows, 2))] for _ in range(2)]
        yield adjoints(rng, "GetItem", about, "GetItem", *two, index=index)


def unbroadcasting(rng: Random) -> Questions:
    n, m, k = rng.permutation([2, 3, 4]).tolist()
    in_front, inside = "axes in front", "axes of length 1"
    cases = [
        (in_front, (n, m), (n, m)),
        (in_front, (n, m), (m,)),
        (in_front, (n, m), ()),
        (inside, (n, m, k), (1, m, 1)),
        (inside, (1, n), (1, 1)),
        ("both, and an empty axis", (n, m, k), (m, 1)),
        ("both, and an empty axis", (n, 1, k), (1, k)),
        ("both, and an empty axis", (0, m), (1, m)),
    ]
    for group, broadcast, shape in cases:
        about = f"from {list(broadcast)} to {list(shape)}"
        given = {"grad": rng.standard_normal(broadcast), "shape": list(shape)}
        yield ask(about, probes.unbroadcast, group=group, **given)


# 1.3. A graph: leaves, then functions (kind, numbers of their inputs); the last one is the root.


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


def some_graphs(rng: Random) -> list[tuple[str, str, list, list, np.ndarray | None]]:
    """Return (group, about, leaves, nodes, the gradient of the root)."""
    draw = rng.standard_normal
    leaf, small, special = draw(3), "small graphs", "None, thunks, broadcasting, leaves"
    diamond = [["sine", [0]], ["times", [1, 0]], ["plus", [1, 2]], ["times", [3, 1]]]
    late = [["sine", [0]], ["sine", [1]], ["sine", [2]], ["times", [3, 1]], ["plus", [4, 0]]]
    stopped = [["sine", [0]], ["stop", [2]], ["times", [1, 3]]]
    repeated = [["sine", [0]], ["twice", [1]], ["times", [2, 2]]]
    doubled = [["plus", [i, i]] for i in range(12)]
    deep = [["plus", [0, 1]]] + [["sine", [2 + i]] for i in range(1499)]
    found = [
        (small, "a value that is used three times", [leaf], diamond, draw(3)),
        (small, "a short way and a long way", [leaf], late, draw(3)),
        (small, "12 times the double", [leaf], doubled, draw(3)),
        (special, "a gradient that is None", [leaf, draw(3)], stopped, draw(3)),
        (special, "an input that was repeated", [leaf], repeated, draw((2, 3))),
        (special, "a root that is a leaf", [leaf], [], draw(3)),
        (special, "a root of one element, without grad", [draw(1)], [["sine", [0]]], None),
        ("drawn and deep graphs", "1500 functions deep", [draw(2), draw(2)], deep, draw(2)),
    ]
    for _ in range(3):
        leaves = [draw(2) for _ in range(int(rng.integers(1, 4)))]
        nodes = random_graph(rng, len(leaves), int(rng.integers(5, 10)))
        found.append(("drawn and deep graphs", "drawn", leaves, nodes, draw(2)))
    return found


def the_engine(rng: Random) -> Questions:
    for group, about, leaves, nodes, grad in some_graphs(rng):
        given = {"leaves": leaves, "nodes": nodes, "grad": grad, "deferring": bool(rng.integers(2))}
        about += f", {plural(len(nodes), 'function')}, deferring {given['deferring']}"
        yield ask(about, probes.engine, group=group, **given)
    nodes = [["plus", [0, 1]], ["sine", [0]], ["sine", [2]], ["times", [2, 4]], ["plus", [5, 0]]]
    last = int(rng.integers(2, 4))
    nodes = [*nodes, *[["sine", [4]]] * last, ["times", [6, 5 + last]]]
    given = {"leaves": list(rng.standard_normal((2, 2))), "nodes": nodes}
    about, group = "functions_below lists what is needed, earliest first", "what is listed, refused"
    yield ask(about, probes.below, group=group, **given)
    leaf = rng.standard_normal(int(rng.integers(2, 5)))
    yield ask("what must be refused", probes.refusals, group=group, leaf=leaf)


# 1.4 to 1.6: functions of rows.


def far_apart(rng: Random, shape: tuple[int, ...], large: bool) -> np.ndarray:
    """Draw rows; if large, one of them about 1000 above the others, and one as far below."""
    x = rng.standard_normal(shape)
    if large:
        x[0] += 1000
        x[-1] -= 1000
    return x


def softmax(rng: Random) -> Questions:
    for name in ("Softmax", "LogSoftmax"):
        for axis, large in ((-1, False), (0, False), (-1, True)):
            shape = tuple(rng.permutation([3, 4]).tolist())
            two = [[far_apart(rng, shape, large)] for _ in range(2)]
            about = f"axis {axis} of {list(shape)}{', rows near +-1000' if large else ''}"
            yield adjoints(rng, name, about, name, *two, axis=axis)


def layer_norm(rng: Random) -> Questions:
    for shape in ((3, 4), (2, 2, 5), (4, 1)):
        eps, C = float(rng.uniform(0.01, 0.1)), shape[-1]
        two = [[3 + 2 * rng.standard_normal(shape), *rng.standard_normal((2, C))] for _ in range(2)]
        group, about = f"{len(shape)} axes", f"X{list(shape)}, eps {eps:.3g}"
        yield adjoints(rng, group, about, "LayerNorm", *two, eps=eps)


def cross_entropy(rng: Random) -> Questions:
    for shape, large in (((4, 3), False), ((2, 3, 5), False), ((3, 4), True), ((0, 3), False)):
        targets = rng.integers(0, shape[-1], shape[:-1])
        group = "rows near 1000, none" if large or not shape[0] else "two axes"
        if len(shape) == 3:
            group, targets[0, 1:] = "three axes, IGNORED", IGNORED
        whole = targets.size + int(rng.integers(1, 9))  # of the batch that these are a part of
        two = [[far_apart(rng, shape, large)] for _ in range(2)]
        about = f"{group}, X{list(shape)} of a batch of {plural(whole, 'target')}"
        options = {"targets": targets, "reduction_size": float(whole)}
        yield adjoints(rng, group, about, "CrossEntropy", *two, **options)


# 1.7


def contribution(rng: Random, leaf: int, kind: str, shape: list[int]) -> list:
    """Draw what a pass adds to a leaf's gradient: the two factors of a product, or an array."""
    if kind != "product":
        return [leaf, kind, [rng.standard_normal(shape)]]
    N = int(rng.integers(1, 4))
    return [leaf, kind, [rng.standard_normal((N, n)) for n in shape]]


def deferred(rng: Random) -> Questions:
    N, I, J = rng.permutation([2, 3, 5]).tolist()
    pair = {"a": rng.standard_normal((N, I)), "b": rng.standard_normal((N, J))}
    yield ask(f"A[{N}, {I}], B[{N}, {J}]", probes.product, group="products", **pair)
    rows = ints(rng, 1, 4, int(rng.integers(2, 5)))
    pairs = [[rng.standard_normal((n, I)), rng.standard_normal((n, J))] for n in rows]
    about = f"the sum of products of {rows} rows"
    yield ask(about, probes.one_product, group="products", pairs=pairs)
    kinds = [(0, "product"), (1, "thunk"), (2, "product"), (2, "product"), (1, "none")]
    for passes in (1, int(rng.integers(2, 5))):
        for together, how in ((False, "each by itself"), (True, "together")):
            shapes = [ints(rng, 1, 4, 2) for _ in range(3)]
            each = [[contribution(rng, i, k, shapes[i]) for i, k in kinds] for _ in range(passes)]
            each[-1].append(contribution(rng, 2, "array", shapes[2]))
            about = f"{plural(passes, 'pass')}, delivered {how}"
            given = {"shapes": shapes, "passes": each, "together": together}
            yield ask(about, probes.later, group=f"delivered {how}", **given)


QUESTIONS = {
    "1.1": elementary,
    "1.2": unbroadcasting,
    "1.3": the_engine,
    "1.4": softmax,
    "1.5": layer_norm,
    "1.6": cross_entropy,
    "1.7": deferred,
}
