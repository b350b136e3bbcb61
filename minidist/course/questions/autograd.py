"""What the autograd lab asks, and what the answers must be.

Gradients are compared with complex steps (`arrays.vjp`), which do not use adjoints.
"""

from collections.abc import Callable, Iterator

import numpy as np

from minidist.autograd.losses import IGNORED
from minidist.course.question import Answer, Question, counted, expect
from minidist.course.questions.arrays import Causes, differ, first, summed_down, vjp

Questions = Iterator[Question]
Random = np.random.Generator


def adjoints(
    about: str,
    function: str,
    options: dict,
    calls: list[dict],
    value: Callable,
    gradients: Callable | None = None,
    causes: Callable[..., list[Causes]] | None = None,
) -> Question:
    """Ask for a function's results and gradients.

    value      arrays -> the result; complex steps of it give the gradient, unless there are
    gradients  (*arrays, grad) -> [gradient per array]
    causes     (*arrays, grad) -> [{cause: the gradient that it would give} per array]
    """

    def judge(answer: Answer) -> str | None:
        for c, call in enumerate(calls):
            arrays, grad = call["arrays"], call["grad"]
            if wrong := differ(f"y {c}", answer, value(*arrays)):
                return f"forward: {wrong}"
            want = gradients(*arrays, grad) if gradients else vjp(value, arrays, grad)
            known = causes(*arrays, grad) if causes else [{}] * len(arrays)
            scale = max(np.abs(w).max(initial=0.0) for w in want)
            for i, (w, array) in enumerate(zip(want, arrays, strict=True)):
                got = answer.get(f"d{i} {c}", np.zeros(0))
                if got.ndim >= array.ndim and np.broadcast_shapes(got.shape, w.shape) == got.shape:
                    got = summed_down(got, w.shape)  # the engine would
                if wrong := differ(f"d{i}", {f"d{i}": got}, w, known[i], scale):
                    return f"gradient of input {i} of {shapes(arrays)}: {wrong}"
            if answer[f"written {c}"]:
                return "an input, or the gradient that came in, was written to; it is the caller's"
        return None

    given = {"name": function, "options": options, "calls": calls}
    return Question(f"{function}, {about}", "adjoints", given, judge)


def shapes(arrays: list[np.ndarray]) -> str:
    return " and ".join(str(list(a.shape)) for a in arrays)


def call(rng: Random, value: Callable, *arrays: np.ndarray) -> dict:
    """Return arrays, and a gradient for what `value` makes of them."""
    arrays = [np.asarray(a, float) for a in arrays]
    return {"arrays": arrays, "grad": np.asarray(rng.standard_normal(np.shape(value(*arrays))))}


# 1.1


def elementary(rng: Random) -> Questions:
    def divide(a, b):
        return a / b

    def pair():
        n, m = rng.integers(1, 5, 2)
        b = rng.uniform(0.5, 2, (1, m)) * rng.choice([-1, 1], (1, m))
        return call(rng, divide, rng.standard_normal((n, m)), b)

    def forgotten_sign(a, b, grad):
        return [{}, {"its sign is missing": summed_down(grad * a / b**2, b.shape)}]

    yield adjoints(
        "B[1, m] repeated", "Divide", {}, [pair(), pair()], divide, causes=forgotten_sign
    )

    def product(a, b):
        return a @ b

    for batch in ((), (int(rng.integers(2, 4)),)):
        n, k, m = (int(i) for i in rng.permutation([2, 3, 4]))
        a, b = rng.standard_normal((*batch, n, k)), rng.standard_normal((k, m))
        yield adjoints(
            f"[{n}, {k}] by [{k}, {m}]" + (f", {batch[0]} of them by one" if batch else ""),
            "MatMul",
            {},
            [call(rng, product, a, b), call(rng, product, a + 1, b)],
            product,
        )

    for axis in (None, 0, -1):
        x = rng.integers(0, 3, (int(rng.integers(2, 5)), int(rng.integers(3, 5)))).astype(float)
        keep = bool(rng.integers(2))

        def largest(a, axis=axis, keep=keep):
            return a.max(axis=axis, keepdims=keep)

        def whole(a, grad, axis=axis):
            grad = np.reshape(grad, np.shape(a.max(axis=axis, keepdims=True)))
            return grad * (a == a.max(axis=axis, keepdims=True))

        def shared(a, grad, axis=axis, whole=whole):
            return [
                whole(a, grad) / (a == a.max(axis=axis, keepdims=True)).sum(axis, keepdims=True)
            ]

        def unshared(a, grad, whole=whole):
            return [{"ties get the whole gradient each; they share it": whole(a, grad)}]

        yield adjoints(
            f"axis {axis}, with ties",
            "Max",
            {"axis": axis, "keepdims": keep},
            [call(rng, largest, x), call(rng, largest, x[::-1].copy())],
            largest,
            shared,
            unshared,
        )

    rows = int(rng.integers(3, 6))
    for index in (rng.integers(0, rows, 2 * rows), int(rng.integers(rows))):

        def pick(a, index=index):
            return a[index]

        def overwritten(a, grad, index=index):
            result = np.zeros(a.shape)
            result[index] = grad
            return [{"an element that is taken twice gets the sum, not the last one": result}]

        yield adjoints(
            f"index {np.asarray(index).tolist()} of {rows} rows",
            "GetItem",
            {"index": index},
            [call(rng, pick, rng.standard_normal((rows, 2))) for _ in range(2)],
            pick,
            causes=overwritten if isinstance(index, np.ndarray) else None,
        )


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
        grad = rng.standard_normal(broadcast)
        want = summed_down(grad, shape)

        def judge(answer, want=want, grad=grad, shape=shape):
            if answer["written"]:
                return "the gradient that came in was written to; it is the caller's"
            mean = want * want.size / max(grad.size, 1)
            causes = {"it is the mean over the repeats, not their sum": mean}
            return differ("the result", answer | {"the result": answer["result"]}, want, causes)

        given = {"grad": grad, "shape": list(shape)}
        about = f"from {list(broadcast)} to {list(shape)}"
        yield Question(about, "unbroadcast", given, judge)


# 1.3

VALUES = {
    "plus": lambda a, b: a + b,
    "times": lambda a, b: a * b,
    "sine": np.sin,
    "stop": lambda a: a.real.astype(a.dtype),
    "twice": lambda a: np.stack([a, a]),
}


def graph(about: str, leaves: list, nodes: list, grad: np.ndarray | None, deferring=False):
    """Ask for the gradients of a graph: (kind, numbers of inputs), leaves first, root last."""
    given = {"leaves": leaves, "nodes": nodes, "grad": grad, "deferring": deferring}
    grad = np.ones(1) if grad is None else grad

    def value(*arrays):
        values = list(arrays)
        for kind, inputs in nodes:
            values.append(VALUES[kind](*[values[i] for i in inputs]))
        return values[-1]

    _, reached = reach(len(leaves), nodes)
    called = {n for n in range(len(nodes)) if len(leaves) + n in reached}
    edges = edges_into(leaves, nodes)
    users = {n: [u for u in called if len(leaves) + n in nodes[u][1]] for n in called}

    def judge(answer: Answer) -> str | None:
        order, alive = answer["order"].tolist(), answer["alive"].tolist()
        if len(order) != len(called):
            return (
                f"backward was called {len(order)} times for {len(called)} functions that the "
                "gradient reaches; each is called once, when the sum of what comes in is complete"
            )
        if (answer["deferring"] != deferring).any():
            return f"`deferring` was not {deferring} when backward was called"
        place = {n: k for k, n in enumerate(order)}
        for n, after in users.items():
            if any(u not in place or place[u] > place.get(n, -1) for u in after):
                return f"function {n} came before function {after[0]}, which uses its result"
        verdicts = [differ(f"d {i}", answer, w) for i, w in enumerate(vjp(value, leaves, grad))]
        for i, n in enumerate(edges):
            for what in ("contributions", "announced"):
                got = int(answer[f"{what} {i}"])
                if got != n:
                    word = "yielded" if what == "contributions" else "announced in `remaining`"
                    verdicts.append(f"leaf {i} is used {n} times, but {got} are {word}")
        if wrong := first(verdicts):
            return wrong
        for k, number in enumerate(alive):
            if number > len(nodes) - k:
                return (
                    f"in call {k} of backward {number} of {len(nodes)} functions keep arrays, not "
                    f"{len(nodes) - k}: one that has been passed lets go of everything"
                )
        return None

    return Question(about, "engine", given, judge)


def edges_into(leaves: list, nodes: list) -> list[int]:
    """Return how many contributions each leaf gets."""
    if not nodes:
        return [0] * (len(leaves) - 1) + [1]
    below, _ = reach(len(leaves), nodes)
    return [sum(nodes[n][1].count(i) for n in below) for i in range(len(leaves))]


def listed(rng: Random) -> Question:
    """Ask for the functions below a root, among others that it does not need."""
    leaves = [rng.standard_normal(2) for _ in range(2)]
    nodes = [["plus", [0, 1]], ["sine", [0]], ["sine", [2]], ["times", [2, 4]], ["plus", [5, 0]]]
    last = int(rng.integers(2, 4))
    nodes = [*nodes, *[["sine", [4]]] * last, ["times", [6, 5 + last]]]
    below, _ = reach(len(leaves), nodes)
    want = {"listed": sorted(below), "edges": edges_into(leaves, nodes)}

    def judge(answer):
        return expect(answer, want)

    about = "functions_below lists what is needed, earliest first"
    return Question(about, "below", {"leaves": leaves, "nodes": nodes}, judge)


def reach(leaves: int, nodes: list) -> tuple[set[int], set[int]]:
    """Return the functions below the root, and the values that the root's gradient reaches."""
    below, reached = {len(nodes) - 1} if nodes else set(), {leaves + len(nodes) - 1}
    for n in reversed(range(len(nodes))):
        kind, inputs = nodes[n]
        if n in below:
            below.update(i - leaves for i in inputs if i >= leaves)
        if leaves + n in reached and kind != "stop":
            reached.update(inputs)
    return below, reached


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
    def drawn(*shape):
        return rng.standard_normal(shape)

    leaf = drawn(3)
    diamond = [["sine", [0]], ["times", [1, 0]], ["plus", [1, 2]], ["times", [3, 1]]]
    yield graph("a value that is used three times", [leaf], diamond, drawn(3))
    late = [["sine", [0]], ["sine", [1]], ["sine", [2]], ["times", [3, 1]], ["plus", [4, 0]]]
    yield graph("a short way and a long way", [leaf], late, drawn(3))
    for _ in range(3):
        leaves = [drawn(2) for _ in range(int(rng.integers(1, 4)))]
        nodes = random_graph(rng, len(leaves), int(rng.integers(5, 10)))
        defers = bool(rng.integers(2))
        about = f"{len(nodes)} functions, drawn" + ", deferring" * defers
        yield graph(about, leaves, nodes, drawn(2), defers)
    stopped = [["sine", [0]], ["stop", [2]], ["times", [1, 3]]]
    yield graph("a gradient that is None", [leaf, drawn(3)], stopped, drawn(3))
    repeated = [["sine", [0]], ["twice", [1]], ["times", [2, 2]]]
    yield graph("an input that was repeated", [leaf], repeated, drawn(2, 3))
    yield graph("a root that is a leaf", [leaf], [], drawn(3))
    yield graph("a root of one element, without grad", [drawn(1)], [["sine", [0]]], None)
    yield listed(rng)
    doubled = [["plus", [i, i]] for i in range(12)]
    yield graph("12 times the double", [leaf], doubled, drawn(3))
    yield deep(rng, 1500)

    def judge(answer):
        return first(
            f"{what}: {answer[what]} was raised, not ValueError"
            for what in answer
            if str(answer[what]) != "ValueError"
        )

    yield Question(
        "what must be refused", "refusals", {"leaf": drawn(int(rng.integers(2, 5)))}, judge
    )


def deep(rng: Random, functions: int) -> Question:
    """Ask for a graph so deep that recursion fails; its gradient is a product of cosines."""
    leaves, grad = [rng.standard_normal(2) for _ in range(2)], rng.standard_normal(2)
    nodes = [["plus", [0, 1]]] + [["sine", [2 + i]] for i in range(functions - 1)]
    x, want = leaves[0] + leaves[1], grad
    for _ in range(functions - 1):
        x, want = np.sin(x), want * np.cos(x)

    def judge(answer):
        return first(differ(f"d {i}", answer, want) for i in range(2))

    given = {"leaves": leaves, "nodes": nodes, "grad": grad}
    return Question(f"{functions} functions deep", "engine", given, judge)


# 1.4


def softmax_of(x, axis=-1):
    e = np.exp(x - x.real.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


def log_softmax_of(x, axis=-1):
    shifted = x - x.real.max(axis=axis, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=axis, keepdims=True))


def far_apart(rng: Random, rows: int, columns: int) -> np.ndarray:
    """Draw rows, one of them about 1000 above the others, and one as far below."""
    x = rng.standard_normal((rows, columns))
    x[0] += 1000
    x[-1] -= 1000
    return x


def softmax(rng: Random) -> Questions:
    def diagonal(x, grad, axis=-1):
        y = softmax_of(x, axis)
        return [
            {
                "<dY, Y> is missing": y * grad,
                "<dY, Y> is summed over another axis": y
                * (grad - (grad * y).sum(0 if axis else -1, keepdims=True)),
            }
        ]

    def unweighted(x, grad, axis=-1):
        return [{"exp(Y), which is the softmax, is missing": grad - grad.sum(axis, keepdims=True)}]

    for name, value, causes in (
        ("Softmax", softmax_of, diagonal),
        ("LogSoftmax", log_softmax_of, unweighted),
    ):
        for axis, large in ((-1, False), (0, False), (-1, True)):
            n, m = (int(i) for i in rng.permutation([3, 4]))
            xs = [far_apart(rng, n, m) if large else rng.standard_normal((n, m)) for _ in range(2)]

            def along(x, axis=axis, value=value):
                return value(x, axis)

            yield adjoints(
                f"axis {axis} of [{n}, {m}]" + (", a row near 1000, one near -1000" * large),
                name,
                {"axis": axis},
                [call(rng, along, x) for x in xs],
                along,
                causes=lambda x, grad, axis=axis, causes=causes: causes(x, grad, axis),
            )


# 1.5


def layer_norm(rng: Random) -> Questions:
    def forgotten(eps):
        def causes(x, gain, bias, grad):
            centred = x - x.mean(-1, keepdims=True)
            r = 1 / np.sqrt((centred**2).mean(-1, keepdims=True) + eps)
            n, d = centred * r, grad * gain
            mean, along = d.mean(-1, keepdims=True), n * (d * n).mean(-1, keepdims=True)
            without_gain = grad - grad.mean(-1, keepdims=True)
            without_gain = without_gain - n * (grad * n).mean(-1, keepdims=True)
            return [
                {
                    "mean d is missing: the mean depends on X, too": r * (d - along),
                    "n mean(d n) is missing: r depends on X, too": r * (d - mean),
                    "mean and r were taken for constants": r * d,
                    "d = dY g: the gain is missing": r * without_gain,
                },
                {"dg = sum dY n, with the normalised n": summed_down(grad * x, gain.shape)},
                {},
            ]

        return causes

    for shape in ((3, 4), (2, 2, 5), (4, 1)):
        eps = float(rng.uniform(0.01, 0.1))
        C = shape[-1]

        def norm(x, gain, bias, eps=eps):
            centred = x - x.mean(-1, keepdims=True)
            return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) * gain + bias

        calls = [
            call(rng, norm, 3 + 2 * rng.standard_normal(shape), *rng.standard_normal((2, C)))
            for _ in range(2)
        ]
        about = f"X{list(shape)}, eps {eps:.3g}"
        yield adjoints(about, "LayerNorm", {"eps": eps}, calls, norm, causes=forgotten(eps))


# 1.6


def cross_entropy(rng: Random) -> Questions:
    for shape, large in (((4, 3), False), ((2, 3, 5), False), ((3, 4), True), ((0, 3), False)):
        V, rows = shape[-1], int(np.prod(shape[:-1]))
        targets = rng.integers(0, V, shape[:-1])
        if len(shape) == 3:
            targets[0, 1:] = IGNORED
        counts = (targets != IGNORED)[..., None]
        whole = rows + int(rng.integers(1, 9))  # of the batch that these are a part of

        def loss(x, targets=targets, whole=whole, counts=counts):
            picked = np.take_along_axis(log_softmax_of(x), targets[..., None], -1)[counts]
            return -picked.sum() / whole if picked.size else np.zeros((), x.dtype)

        def causes(x, grad, targets=targets, whole=whole, rows=rows, counts=counts):
            p = softmax_of(x) * grad
            onehot = np.eye(x.shape[-1])[targets] * grad
            everywhere = {"IGNORED targets have a gradient": (p - onehot * counts) / whole}
            everywhere["IGNORED targets are taken for the last class"] = (p - onehot) / whole
            p, onehot = p * counts, onehot * counts
            return [
                {
                    "it is not divided by `reduction_size`": p - onehot,
                    f"divided by {rows} rows at hand, not by `reduction_size`": (p - onehot)
                    / max(rows, 1),
                    "onehot is missing": p / whole,
                    "the incoming dL is missing": (p - onehot) / grad / whole,
                }
                | ({} if counts.all() else everywhere)
            ]

        x = [far_apart(rng, *shape) if large else rng.standard_normal(shape) for _ in range(2)]
        yield adjoints(
            f"X{list(shape)} of a batch of {counted(whole, 'target')}"
            + ", rows near +-1000" * large
            + ", 2 IGNORED" * (len(shape) == 3),
            "CrossEntropy",
            {"targets": targets, "reduction_size": float(whole)},
            [call(rng, loss, logits) for logits in x],
            loss,
            None if rows else lambda x, grad: [np.zeros(x.shape)],
            causes if rows else None,
        )


# 1.7


def one_later_product(rng: Random) -> Question:
    N, I, J = (int(i) for i in rng.permutation([2, 3, 5]))
    a, b = rng.standard_normal((N, I)), rng.standard_normal((N, J))

    def judge(answer):
        want = a.T @ b
        swapped = {"it is B^T A; a weight's rows are the columns of its input": b.T @ a}
        if not answer["is the buffer"]:
            return "called with out=, it returns another array than out"
        return differ("result", answer, want, swapped) or differ("buffer", answer, want)

    return Question(f"A[{N}, {I}], B[{N}, {J}]", "product", {"a": a, "b": b}, judge)


def factors(rng: Random) -> Question:
    I, J = (int(i) for i in rng.integers(1, 5, 2))
    rows = [int(n) for n in rng.integers(1, 4, int(rng.integers(2, 5)))]
    pairs = [[rng.standard_normal((n, I)), rng.standard_normal((n, J))] for n in rows]

    def judge(answer):
        if not answer["is a product"]:
            return "the sum of products is one Product, of longer factors"
        for name in ("a", "b"):
            if len(answer[name]) != sum(rows):
                return f"{name} has {len(answer[name])} rows, not {sum(rows)}: those of all factors"
        got = {"A^T B": answer["a"].T @ answer["b"]}
        return differ("A^T B", got, sum(a.T @ b for a, b in pairs))

    return Question(f"the sum of products of {rows} rows", "one_product", {"pairs": pairs}, judge)


def put_off(rng: Random, passes: int, together: bool) -> Question:
    """Ask for the gradients of a weight, a bias, and a weight that two layers share."""
    shapes = [tuple(int(n) for n in rng.integers(1, 4, 2)) for _ in range(3)]

    def contribution(i, kind):
        I, J = shapes[i]
        N = int(rng.integers(1, 4))
        pair = [rng.standard_normal((N, I)), rng.standard_normal((N, J))]
        return [i, kind, pair if kind == "product" else [rng.standard_normal(shapes[i])]]

    kinds = [(0, "product"), (1, "thunk"), (2, "product"), (2, "product"), (1, "none")]
    given = [[contribution(i, kind) for i, kind in kinds] for _ in range(passes)]
    given[-1].append(contribution(2, "array"))
    all_of = [[c for one in given for c in one if c[0] == i] for i in range(3)]
    totals = [
        sum((c[2][0].T @ c[2][1] if c[1] == "product" else c[2][0]) * (c[1] != "none") for c in own)
        for own in all_of
    ]

    def judge(answer):
        for i, want in enumerate(totals):
            hooks = int(answer[f"hooks {i}"])
            if wrong := differ(f"total {i}", answer, want):
                return wrong
            if hooks != passes:
                return (
                    f"leaf {i}: its hooks were called {hooks} times in {passes} passes; once in "
                    "each, when `remaining` comes to 0"
                )
            if wrong := differ(f"total at the last hook {i}", answer, want):
                return f"{wrong}: the hook came before the last contribution"
        products = 1 if together else passes
        added = int(answer["additions 0"])
        if added != products:
            return f"leaf 0: {added} products were added, not {products}" + (
                ": those of all passes are one" if together else ""
            )
        return None

    given = {"shapes": [list(s) for s in shapes], "passes": given, "together": together}
    how = "together" if together else "each by itself"
    return Question(f"{counted(passes, 'pass')}, delivered {how}", "later", given, judge)


def deferred(rng: Random) -> Questions:
    yield one_later_product(rng)
    yield factors(rng)
    for passes in (1, int(rng.integers(2, 5))):
        yield put_off(rng, passes, together=False)
        yield put_off(rng, passes, together=True)


QUESTIONS = {
    "1.1": elementary,
    "1.2": unbroadcasting,
    "1.3": the_engine,
    "1.4": softmax,
    "1.5": layer_norm,
    "1.6": cross_entropy,
    "1.7": deferred,
}
