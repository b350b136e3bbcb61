"""What the splits lab asks, and what the answers must be.

One device's outputs and gradients, cut into the ranks' parts, and the bytes of the closed forms.

Letters: N ranks, r one of them, S the bytes of an activation.
"""

from collections.abc import Callable, Iterator

import numpy as np

from minidist import Tensor, nn
from minidist.course.question import Answer, Question, counted
from minidist.course.questions.ranks import by_rank, joined, ranks_differ
from minidist.planning.costs.tensor_parallel import repeated, sequence_bytes
from minidist.rng import Randomness
from minidist.tools.strategies.cases import Case, random_weights

F8 = 8  # bytes of a float64


def parts(x: np.ndarray, N: int, axis: int = -1) -> list[np.ndarray]:
    """Cut x into N parts, as equal as can be, the larger first."""
    return np.array_split(x, N, axis)


def sent(mine: list[dict], forward: int, backward: int, why: dict | None = None) -> str | None:
    """Compare the bytes of all ranks together, and say what other sums would mean."""
    for way, want in (("forward", forward), ("backward", backward)):
        if f"bytes {way}" not in mine[0]:
            continue
        got = sum(int(found[f"bytes {way}"]) for found in mine)
        if got != want:
            cause = f": {why[way, got]}" if why and (way, got) in why else ""
            return f"{got} bytes are sent {way} by all ranks together, not {want}{cause}"
    return None


def values(mine: list[dict]) -> list[dict]:
    beside = ("bytes", "overwritten")
    return [{k: v for k, v in found.items() if not k.startswith(beside)} for found in mine]


def overwritten(mine: list[dict]) -> str | None:
    """Return which rank's function has written into an array that it was only given."""
    ways = "forward: X", "backward: dY"
    for r, found in enumerate(mine):
        for name, changed in zip(ways, found.get("overwritten", ()), strict=False):
            if changed:
                return f"{name} on rank {r} was written into; others may use it: make a new array"
    return None


def judged(
    want: list[dict],
    forward: int,
    backward: int,
    causes: dict | None = None,
    why: dict | None = None,
    extra: Callable = lambda mine: None,
) -> Callable:
    """Return a judge: what each rank has, and what all have sent."""

    def judge(answer: Answer) -> str | None:
        mine = by_rank(answer, len(want))
        wrong = ranks_differ(values(mine), want, causes)
        said = joined(wrong, sent(mine, forward, backward, why))
        return extra(mine) or said or overwritten(mine)

    return judge


def total(sums: list[np.ndarray]) -> np.ndarray:
    return np.sum(sums, axis=0)


# 5.1, 5.2: conjugate pairs. Per function: what each rank has at first, the layout of dY, and Y, dX.


def pairs(rng, names: list[str]) -> Iterator[Question]:
    for name in names:
        first = int(rng.integers(0, 2))
        for at, N in enumerate((1, 2, int(rng.integers(3, 5)))):
            yield one_pair(rng, name, N, (first + at) % 2)


def one_pair(rng, name: str, N: int, axis: int) -> Question:
    B, C = (  # which do not divide; with fewer than N some parts are empty
        N * int(n) + int(rng.integers(1, max(2, N))) for n in rng.integers(0, 3, 2)
    )
    draw = rng.standard_normal
    whole = [draw((B, C)) for _ in range(N)]  # something of its own on every rank
    same, other = [draw((B, C))] * N, [draw((B, C))] * N
    n = F8 * B * C
    summed, reduced = total(whole), 2 * (N - 1) * n
    axes, causes = (axis,), {}
    if name == "copy_to":
        axes, x, grad = (), same, whole
        y, dx, way = same, [summed] * N, (0, reduced)
        causes = {1 / N: "average in place of a sum"}
    elif name == "reduce_from":
        axes, x, grad = (), whole, same
        y, dx, way = [summed] * N, same, (reduced, 0)
        causes = {N: "dY is the same on all ranks already, and adding it up counts it N times"}
    elif name == "scatter":
        x, y = same, parts(same[0], N, axis)
        grad, dx = parts(other[0], N, axis), other
        way = (0, (N - 1) * n)
    elif name == "gather":
        x, y = parts(same[0], N, axis), same
        grad, dx = other, parts(other[0], N, axis)
        way = ((N - 1) * n, 0)
        causes = {N: "the ranks' dY are the same, and a part of one is all that is due"}
    elif name == "all_gather":
        x, y = parts(same[0], N, axis), same
        grad, dx = whole, parts(summed, N, axis)
        way = ((N - 1) * n, (N - 1) * n)
    elif name == "reduce_scatter":
        x, y = whole, parts(summed, N, axis)
        grad, dx = parts(other[0], N, axis), other
        way = ((N - 1) * n, (N - 1) * n)
    else:
        axes = (cut, joined) = (axis, 1 - axis)
        x, y = parts(same[0], N, joined), parts(same[0], N, cut)
        grad, dx = parts(other[0], N, cut), parts(other[0], N, joined)
        crossing = sum(own.size for own in x) - sum(
            parts(own, N, cut)[r].size for r, own in enumerate(x)
        )
        way = (F8 * crossing, F8 * crossing)
    why = {}
    for at, direction in enumerate(("forward", "backward")):
        if way[at] == (N - 1) * n:
            why[direction, reduced] = "an all_reduce, of which each rank needs only a part"
        elif way[at] == 0:
            why[direction, reduced] = "no communication is due there"
            why[direction, (N - 1) * n] = "no communication is due there"
        elif way[at] == reduced:
            why[direction, N * (N - 1) * n] = "N(N - 1) S, as of an all_gather: 2(N - 1) S will do"
    want = [{"Y": y[r], "dX": dx[r]} for r in range(N)]
    where = {1: " along axis {}", 2: " from axis {1} to {0}"}.get(len(axes), "").format(*axes)
    about = f"{name}{where}, {counted(N, 'rank')}, X[{B}, {C}]"
    given = {"name": name, "xs": x, "grads": grad, "axes": axes}
    return Question(about, "pair", given, judged(want, *way, causes, why))


def f_and_g(rng) -> Iterator[Question]:
    yield from pairs(rng, ["copy_to", "reduce_from"])


def other_pairs(rng) -> Iterator[Question]:
    yield from pairs(rng, ["scatter", "gather", "all_gather", "reduce_scatter", "all_to_all"])


# 5.3, 5.4: linear layers.


def drawn_linear(rng, C: int, F: int, activation: str, bias: bool = True) -> nn.Linear:
    layer = nn.Linear(C, F, bias, activation, dtype="float64")
    for p in layer.parameters():
        p.data[...] = rng.standard_normal(p.shape)
    return layer


def whole_layer(layer, x: np.ndarray, grad: np.ndarray) -> tuple[np.ndarray, np.ndarray, dict]:
    """Return Y, dX and the parameters' gradients."""
    x = Tensor(x, requires_grad=True)
    y = layer(x)
    y.backward(grad)
    return y.data, x.grad, {name: p.grad for name, p in layer.named_parameters().items()}


def refusal(kind: str, N: int, shape: tuple, what: str) -> Question:
    def judge(answer: Answer) -> str | None:
        if all(found["refused"] for found in by_rank(answer, N)):
            return None
        return "they do not split evenly: a ValueError is due"

    given = {"kind": kind, "N": N, "shape": shape}
    return Question(f"{what} over {N} ranks", "refused", given, judge)


def columns(rng) -> Iterator[Question]:
    for N, case in ((1, "whole"), (2, "split"), (3, "gathered"), (2, "chosen"), (4, "no bias")):
        C, F, B = int(rng.integers(2, 6)), N * int(rng.integers(2, 4)), int(rng.integers(1, 5))
        layer = drawn_linear(rng, C, F, "gelu", case != "no bias")
        x, grad = rng.standard_normal((B, C)), rng.standard_normal((B, F))
        y, dx, d = whole_layer(layer, x, grad)
        own = np.array(np.split(np.arange(F), N))
        options = {"gather_output": True} if case == "gathered" else {}
        if case == "chosen":
            own = np.sort(rng.permutation(F).reshape(N, -1), axis=1)
            options = {"columns": list(own)}
        whole = case == "gathered"
        want = []
        for r in range(N):
            mine = {f"part of {name}": own[r] for name in d}
            mine |= {"Y": y if whole else y[:, own[r]], "dX": dx}
            want.append(mine | {f"d {name}": g[..., own[r]] for name, g in d.items()})
        forward, backward = (N - 1) * F8 * B * F * whole, 2 * (N - 1) * F8 * B * C
        why = {("backward", 0): "dX is a partial sum on every rank: f adds it up"}
        given = {
            "kind": "columns",
            "state": layer.state(),
            "activation": "gelu",
            "xs": [x] * N,
            "grads": [grad if whole else grad[:, own[r]] for r in range(N)],
            "options": options,
        }
        about = f"{case}, {counted(N, 'rank')}, weight [{C}, {F}], X[{B}, {C}]"
        yield Question(about, "linear", given, judged(want, forward, backward, why=why))
    N = int(rng.integers(2, 5))
    F = N * int(rng.integers(2, 5)) + int(rng.integers(1, N))
    yield refusal("columns", N, (3, F), f"{F} columns")


def rows(rng) -> Iterator[Question]:
    for N, case in ((1, "whole"), (2, "split"), (3, "scattered"), (4, "no bias"), (3, "gelu")):
        C, F, B = N * int(rng.integers(2, 4)), int(rng.integers(2, 6)), int(rng.integers(1, 5))
        activation = "gelu" if case in ("gelu", "scattered") else "identity"
        layer = drawn_linear(rng, C, F, activation, case != "no bias")
        x, grad = rng.standard_normal((B, C)), rng.standard_normal((B, F))
        y, dx, d = whole_layer(layer, x, grad)
        whole = case == "scattered"
        xs, dxs = ([v] * N if whole else parts(v, N) for v in (x, dx))
        own = np.split(np.arange(C), N)
        bias = {"d linear.bias": d["linear.bias"]} if "linear.bias" in d else {}
        want = [
            {
                "part of linear.weight": own[r],
                "Y": y,
                "dX": dxs[r],
                "d linear.weight": d["linear.weight"][own[r]],
                **bias,
            }
            for r in range(N)
        ]
        state = layer.state()

        def bias_again(mine, y=y, state=state, N=N, activation=activation):
            if N > 1 and activation == "identity" and "linear.bias" in state:
                more = mine[0]["Y"] - y
                if np.allclose(more, (N - 1) * state["linear.bias"]):
                    return f"Y on rank 0 has the bias in it {N} times, not once: add it after g"
            return None

        forward, backward = 2 * (N - 1) * F8 * B * F, (N - 1) * F8 * B * C * whole
        given = {
            "kind": "rows",
            "state": state,
            "activation": activation,
            "xs": xs,
            "grads": [grad] * N,
            "options": {"scatter_input": True} if whole else {},
        }
        causes = {N: "dY is the same on all ranks; nothing is to be added up"} if N > 1 else {}
        judge = judged(want, forward, backward, causes, extra=bias_again)
        about = f"{case}, {counted(N, 'rank')}, weight [{C}, {F}], X[{B}, {C}]"
        yield Question(about, "linear", given, judge)
    N = int(rng.integers(2, 5))
    C = N * int(rng.integers(2, 5)) + int(rng.integers(1, N))
    yield refusal("rows", N, (C, 3), f"{C} rows")


# 5.5: attention.


def heads(rng) -> Iterator[Question]:
    for N, each, D in ((1, 2, 3), (2, 1, 2), (2, 3, 2), (3, 2, 3)):
        H, B, T = N * each, int(rng.integers(1, 4)), int(rng.integers(2, 5))
        C = H * D
        layer = nn.CausalSelfAttention(C, H, dtype="float64")
        for p in layer.parameters():
            p.data[...] = rng.standard_normal(p.shape)
        x, grad = rng.standard_normal((2, B, T, C))
        y, dx, d = whole_layer(layer, x, grad)
        want = []
        for r in range(N):
            runs = np.arange(r * each * D, (r + 1) * each * D)  # the rank's heads, in one block
            qkv = np.concatenate([block * C + runs for block in range(3)])
            want.append(
                {
                    "Y": y,
                    "dX": dx,
                    "d attention.qkv.weight": d["attention.qkv.weight"][:, qkv],
                    "d attention.qkv.bias": d["attention.qkv.bias"][qkv],
                    "d attention.output.weight": d["attention.output.weight"][runs],
                    "d attention.output.bias": d["attention.output.bias"],
                    "part of attention.qkv.weight": qkv,
                    "part of attention.qkv.bias": qkv,
                    "part of attention.output.weight": runs,
                }
            )

        def equal_run(mine, N=N, C=C):
            own = mine[0].get("part of attention.qkv.weight")
            if N > 1 and own is not None and np.array_equal(own, np.arange(3 * C // N)):
                return (
                    f"rank 0 holds columns 0 to {3 * C // N - 1} of QKV: an equal run, which is "
                    "not its heads; the columns are [3, H, D]"
                )
            return None

        way = 2 * (N - 1) * F8 * x.size
        given = {"N": N, "heads": H, "state": layer.state(), "x": x, "grad": grad}
        about = f"{counted(N, 'rank')}, {H} heads of width {D}, X[{B}, {T}, {C}]"
        yield Question(about, "attention", given, judged(want, way, way, extra=equal_run))
    N = int(rng.integers(2, 4))
    H = N * int(rng.integers(1, 3)) + 1
    yield refusal("heads", N, (N * H, H), f"{H} heads")


# 5.6: the vocabulary.


def vocabulary(rng) -> Iterator[Question]:
    for N in (1, 2, 3, 4):
        V = N * int(rng.integers(2, 4)) - int(rng.integers(1, max(2, N)))
        yield embedded(rng, N, V)
        yield product(rng, N, V, transposed=bool(N % 2))
        yield losses(rng, N, V)
    yield losses(rng, 4, 5)  # a rank that has nothing but padding
    yield losses(rng, 2, 4)  # none


def run_of(N: int, V: int, r: int) -> np.ndarray:
    each = -(-V // N)
    return np.arange(r * each, (r + 1) * each)


def embedded(rng, N: int, V: int) -> Question:
    C, B, T = int(rng.integers(1, 4)), int(rng.integers(1, 4)), int(rng.integers(1, 5))
    weight, grad = rng.standard_normal((V, C)), rng.standard_normal((B, T, C))
    tokens = rng.integers(0, V, (B, T))
    tokens[0, 0] = V - 1
    d = np.zeros((-(-V // N) * N, C))
    np.add.at(d, tokens, grad)
    name = "embedding.weight"
    want = [
        {"Y": weight[tokens], f"d {name}": d[own], f"part of {name}": own}
        for own in (run_of(N, V, r) for r in range(N))
    ]
    given = {"N": N, "weight": weight, "tokens": tokens, "grad": grad}
    about = f"embedding, {counted(N, 'rank')}, {counted(V, 'word')}, tokens [{B}, {T}]"
    return Question(about, "embedding", given, judged(want, 2 * (N - 1) * F8 * grad.size, 0))


def product(rng, N: int, V: int, transposed: bool) -> Question:
    B, T, C, each = *(int(n) for n in rng.integers(1, 4, 3)), -(-V // N)
    x = rng.standard_normal((B, T, C))
    weights = rng.standard_normal((N, each, C) if transposed else (N, C, each))
    grads = rng.standard_normal((N, B, T, each))
    matrices = [w.T if transposed else w for w in weights]
    dx = total([g @ w.T for g, w in zip(grads, matrices, strict=True)])
    want = []
    for w, g in zip(matrices, grads, strict=True):
        dw = np.einsum("btc,btv->cv", x, g)
        want.append({"Y": x @ w, "dX": dx, "d weight": dw.T if transposed else dw})
    given = {"x": x, "weights": list(weights), "grads": list(grads), "transposed": transposed}
    about = f"head, {counted(N, 'rank')}, X[{B}, {T}, {C}]" + (", transposed" if transposed else "")
    return Question(about, "head", given, judged(want, 0, 2 * (N - 1) * F8 * x.size))


def losses(rng, N: int, V: int) -> Question:
    B, T, each = int(rng.integers(1, 4)), int(rng.integers(1, 5)), -(-V // N)
    real = 3 * rng.standard_normal((B, T, V)) + 800 * rng.choice([-1, 0, 1], (B, T, 1))
    targets = rng.integers(nn.IGNORED, V, (B, T))
    n, grad = float(rng.integers(3, 40)), rng.uniform(0.5, 2)
    logits = Tensor(real, requires_grad=True)
    loss = nn.cross_entropy(logits, targets, reduction_size=n)
    loss.backward(np.array(grad))
    padding = [(0, 0), (0, 0), (0, each * N - V)]
    held = np.pad(real, padding, constant_values=900.0)  # more than any real one
    d = np.pad(logits.grad, padding)
    want = [
        {"Y": loss.data, "dX": own, "argmax": real.argmax(-1)} for own in np.split(d, N, axis=-1)
    ]
    way = 3 * 2 * (N - 1) * F8 * B * T

    def judge(answer: Answer) -> str | None:
        mine = by_rank(answer, N)
        ways = [dict(found) for found in mine]
        for found in ways:  # it is asked for after the bytes were read
            found.pop("argmax")
        return joined(ranks_differ(values(mine), want), sent(ways, way, 0)) or overwritten(mine)

    given = {
        "parts": np.split(held, N, axis=-1),
        "targets": targets,
        "vocab": V,
        "reduction_size": n,
        "grad": grad,
    }
    about = f"cross-entropy, {counted(N, 'rank')}, {counted(V, 'word')}, "
    about += f"{counted(each * N - V, 'column')} of padding, "
    about += f"logits from {real.min():.0f} to {real.max():.0f}"
    return Question(about, "cross_entropy", given, judge)


# 5.7: the sequence.


def sequence(rng) -> Iterator[Question]:
    for T, N in ((6, 3), (8, 4), (5, 1), (7, 2)):
        yield held_positions(T, N)
    for N in (1, 2, 3):
        yield gathered(rng, N)
        yield scattered_rows(rng, N)
        yield dropped(rng, N)
    for N, tied, depth in ((1, True, 1), (2, False, 2), (2, True, 1), (3, True, 1)):
        yield transformer(rng, N, tied, depth)


def held_positions(T: int, N: int) -> Question:
    def judge(answer: Answer) -> str | None:
        mine = by_rank(answer, N)
        if T % N:
            fine = all("refused" in found for found in mine)
            return None if fine else "they do not split evenly: a ValueError is due"
        return ranks_differ(mine, [{"positions": own} for own in np.split(np.arange(T), N)])

    about = f"{T} positions over {counted(N, 'rank')}"
    return Question(about, "positions", {"T": T, "N": N}, judge)


def gathered(rng, N: int) -> Question:
    B, T, C, F = int(rng.integers(1, 4)), N * int(rng.integers(1, 4)), *rng.integers(1, 5, 2)
    x, w, b = (rng.standard_normal(shape) for shape in ((B, T, C), (C, F), F))
    grads = rng.standard_normal((N, B, T, F))
    dx = np.split(total(grads) @ w.T, N, axis=1)
    want = [
        {
            "Y": x @ w + b,
            "dX": dx[r],
            "d weight": np.einsum("btc,btf->cf", x, grads[r]),
            "d bias": grads[r].sum((0, 1)),
        }
        for r in range(N)
    ]
    S = (N - 1) * F8 * x.size
    why = {
        ("backward", S): "all of X was kept; only the rank's own part is to be, and gathered again",
        ("backward", 3 * S): "an all_reduce of dX, of which each rank needs only its positions",
    }
    given = {"xs": np.split(x, N, axis=1), "weight": w, "bias": b, "grads": list(grads)}
    about = f"GatheredLinear, {counted(N, 'rank')}, X[{B}, {T}/{N}, {C}]"
    return Question(about, "gathered", given, judged(want, S, 2 * S, why=why))


def scattered_rows(rng, N: int) -> Question:
    B, T, C, F = (int(n) * k for n, k in zip(rng.integers(1, 4, 4), (1, N, N, 1), strict=True))
    layer = drawn_linear(rng, C, F, "identity")
    x, grad = rng.standard_normal((B, T, C)), rng.standard_normal((B, T, F))
    y, dx, d = whole_layer(layer, x, grad)
    own, grads, bias = np.split(np.arange(C), N), np.split(grad, N, axis=1), layer.bias.data
    want = [
        {
            "part of linear.weight": own[r],
            "Y": np.split(y, N, axis=1)[r],
            "dX": dx[..., own[r]],
            "d linear.weight": d["linear.weight"][own[r]],
            "d linear.bias": grads[r].sum((0, 1)),
        }
        for r in range(N)
    ]

    def bias_again(mine):
        more = mine[0]["Y"] - want[0]["Y"] if mine[0]["Y"].shape == want[0]["Y"].shape else 0
        if N > 1 and np.allclose(more, (N - 1) * bias):
            return f"Y on rank 0 has the bias in it {N} times, not once: add it after the sum"
        return None

    given = {
        "kind": "sequence rows",
        "state": layer.state(),
        "activation": "identity",
        "xs": [x[..., own[r]] for r in range(N)],
        "grads": grads,
        "options": {},
    }
    about = f"SequenceRowLinear, {counted(N, 'rank')}, X[{B}, {T}, {C}/{N}]"
    way = (N - 1) * F8 * y.size
    return Question(about, "linear", given, judged(want, way, way, extra=bias_again))


def dropped(rng, N: int) -> Question:
    B, T, C, seed = int(rng.integers(1, 4)), N * int(rng.integers(2, 5)), 6, int(rng.integers(99))
    x = rng.standard_normal((B, T, C))
    y = nn.Dropout(0.5)(Tensor(x), Randomness(seed, 0, np.arange(B))).data
    want = [{"Y": own} for own in np.split(y, N, axis=1)]
    given = {"xs": np.split(x, N, axis=1), "rate": 0.5, "seed": seed}
    about = f"SequenceDropout, {counted(N, 'rank')}, X[{B}, {T}/{N}, {C}]"
    return Question(about, "dropped", given, lambda answer: ranks_differ(by_rank(answer, N), want))


def transformer(rng, N: int, tied: bool, depth: int) -> Question:
    V, B, T, seed = 11, int(rng.integers(1, 4)), N * int(rng.integers(1, 4)), int(rng.integers(99))
    config = {"vocab": V, "width": 6, "heads": 6, "depth": depth, "context": 12}
    config |= {"dropout": 0.2, "tied": tied}
    model = random_weights(nn.Transformer(**config, dtype="float64"), seed)
    tokens, targets = rng.integers(0, V, (2, B, T))
    loss = nn.cross_entropy(model(tokens, Randomness(seed, 0, np.arange(B))), targets)
    loss.backward()
    d = {name: p.grad for name, p in model.named_parameters().items()}
    case = Case("", model, tokens, targets)
    bytes_due = sequence_bytes(case, N)
    gradients = sum(int(F8 * 2 * (N - 1) * d[name].size) for name in repeated(d))

    def judge(answer: Answer) -> str | None:
        mine, want = by_rank(answer, N), []
        moved = sum(int(found.pop("bytes")) for found in mine)
        for found in mine:
            own = {k.removeprefix("part of "): v for k, v in found.items() if k.startswith("part")}
            for name in own:
                found.pop(f"part of {name}")
            want.append({"loss": loss.data})
            for name, g in d.items():
                if name in own:
                    axis = (
                        1 if name.endswith(("qkv.weight", "expand.weight", "linear.weight")) else 0
                    )
                    room = [(0, 0)] * g.ndim
                    room[axis] = (0, max(0, 1 + int(own[name].max()) - g.shape[axis]))
                    g = np.pad(g, room).take(own[name], axis)
                want[-1][f"d {name}"] = g
        said = None
        if moved == bytes_due - gradients and gradients:
            said = "the gradients of what every rank holds have not been summed"
        elif moved != bytes_due:
            said = f"all ranks together send {moved} bytes, not {bytes_due}"
        return joined(ranks_differ(mine, want), said)

    given = {
        "N": N,
        "config": config,
        "state": model.state(),
        "tokens": tokens,
        "targets": targets,
        "seed": seed,
    }
    about = f"{'tied' if tied else 'untied'} Transformer, {counted(N, 'rank')}, "
    about += f"{counted(depth, 'block')}, tokens [{B}, {T}]"
    return Question(about, "transformer", given, judge)


QUESTIONS = {
    "5.1": f_and_g,
    "5.2": other_pairs,
    "5.3": columns,
    "5.4": rows,
    "5.5": heads,
    "5.6": vocabulary,
    "5.7": sequence,
}
