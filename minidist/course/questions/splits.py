"""What the splits lab asks. The right answer is what the package itself answers.

Letters: N ranks, B examples, T positions, C and F widths, H heads of width D, V words.
"""

import numpy as np

from minidist import nn
from minidist.course.probes import splits as probes
from minidist.course.question import Question, Questions, Random
from minidist.course.questions.arrays import ask
from minidist.errors import plural
from minidist.verify.strategies.cases import random_weights


def parts(x: np.ndarray, N: int, axis: int = -1) -> list[np.ndarray]:
    """Cut x into N parts, as equal as can be, the larger first."""
    return np.array_split(x, N, axis)


def ints(rng: Random, low: int, high: int, count: int) -> list[int]:
    return [int(n) for n in rng.integers(low, high, count)]


# 5.1, 5.2: conjugate pairs.

# {function: (what the ranks have of X, and of dY)}: arrays of their own, the same one, or its parts
LAYOUTS = {
    "copy_to": ("same", "own"),
    "reduce_from": ("own", "same"),
    "scatter": ("same", "parts"),
    "gather": ("parts", "same"),
    "all_gather": ("parts", "own"),
    "reduce_scatter": ("own", "parts"),
    "all_to_all": ("parts", "parts"),
}


def pairs(rng: Random, names: list[str]) -> Questions:
    for name in names:
        first = int(rng.integers(0, 2))
        for at, N in enumerate((1, 2, int(rng.integers(3, 5)))):
            yield one_pair(rng, name, N, (first + at) % 2)


def one_pair(rng: Random, name: str, N: int, axis: int) -> Question:
    B, C = (  # which do not divide; with fewer than N some parts are empty
        N * n + int(rng.integers(1, max(2, N))) for n in ints(rng, 0, 3, 2)
    )
    axes: tuple[int, ...] = (axis,)
    along = f" along axis {axis}"
    if name in ("copy_to", "reduce_from"):
        axes, along = (), ""
    elif name == "all_to_all":
        axes, along = (axis, 1 - axis), f" from axis {1 - axis} to {axis}"
    xs, grads = (
        held(rng, layout, N, (B, C), at)
        for layout, at in zip(LAYOUTS[name], (axes[-1:], axes[:1]), strict=True)
    )
    about = f"{name}{along}, {plural(N, 'rank')}, X[{B}, {C}]"
    return ask(about, probes.pair, name=name, xs=xs, grads=grads, axes=axes)


def held(
    rng: Random, layout: str, N: int, shape: tuple[int, int], axis: tuple[int, ...]
) -> list[np.ndarray]:
    """Draw what each rank has."""
    if layout == "own":
        return [rng.standard_normal(shape) for _ in range(N)]
    whole = rng.standard_normal(shape)
    return parts(whole, N, *axis) if layout == "parts" else [whole] * N


def f_and_g(rng: Random) -> Questions:
    yield from pairs(rng, ["copy_to", "reduce_from"])


def other_pairs(rng: Random) -> Questions:
    yield from pairs(rng, ["scatter", "gather", "all_gather", "reduce_scatter", "all_to_all"])


# 5.3, 5.4: linear layers.


def linear_state(rng: Random, C: int, F: int, bias: bool) -> dict[str, np.ndarray]:
    state = {"linear.weight": rng.standard_normal((C, F))}
    return state | {"linear.bias": rng.standard_normal(F)} if bias else state


def refusal(kind: str, N: int, shape: tuple, what: str) -> Question:
    return ask(f"{what} over {N} ranks", probes.refusal, kind=kind, N=N, shape=shape)


def columns(rng: Random) -> Questions:
    for N, case in ((1, "whole"), (2, "split"), (3, "gathered"), (2, "chosen"), (4, "no bias")):
        C, F, B = int(rng.integers(2, 6)), N * int(rng.integers(2, 4)), int(rng.integers(1, 5))
        own, options = np.split(np.arange(F), N), dict[str, object]()
        if case == "gathered":
            options = {"gather_output": True}
        elif case == "chosen":
            own = list(np.sort(rng.permutation(F).reshape(N, -1), axis=1))
            options = {"columns": own}
        grad = rng.standard_normal((B, F))
        yield ask(
            f"{case}, {plural(N, 'rank')}, weight [{C}, {F}], X[{B}, {C}]",
            probes.linear,
            kind="columns",
            state=linear_state(rng, C, F, case != "no bias"),
            activation="gelu",
            xs=[rng.standard_normal((B, C))] * N,
            grads=[grad if case == "gathered" else grad[:, mine] for mine in own],
            options=options,
        )
    N = int(rng.integers(2, 5))
    F = N * int(rng.integers(2, 5)) + int(rng.integers(1, N))
    yield refusal("columns", N, (3, F), f"{F} columns")


def rows(rng: Random) -> Questions:
    for N, case in ((1, "whole"), (2, "split"), (3, "scattered"), (4, "no bias"), (3, "gelu")):
        C, F, B = N * int(rng.integers(2, 4)), int(rng.integers(2, 6)), int(rng.integers(1, 5))
        x = rng.standard_normal((B, C))
        yield ask(
            f"{case}, {plural(N, 'rank')}, weight [{C}, {F}], X[{B}, {C}]",
            probes.linear,
            kind="rows",
            state=linear_state(rng, C, F, case != "no bias"),
            activation="gelu" if case in ("gelu", "scattered") else "identity",
            xs=[x] * N if case == "scattered" else parts(x, N),
            grads=[rng.standard_normal((B, F))] * N,
            options={"scatter_input": True} if case == "scattered" else {},
        )
    N = int(rng.integers(2, 5))
    C = N * int(rng.integers(2, 5)) + int(rng.integers(1, N))
    yield refusal("rows", N, (C, 3), f"{C} rows")


# 5.5: attention.


def heads(rng: Random) -> Questions:
    for N, each, D in ((1, 2, 3), (2, 1, 2), (2, 3, 2), (3, 2, 3)):
        H, B, T = N * each, int(rng.integers(1, 4)), int(rng.integers(2, 5))
        layer = nn.CausalSelfAttention(H * D, H, dtype="float64")
        drawn = layer.named_parameters().items()
        state = {name: rng.standard_normal(p.shape) for name, p in drawn}
        x, grad = rng.standard_normal((2, B, T, H * D))
        about = f"{plural(N, 'rank')}, {H} heads of width {D}, X[{B}, {T}, {H * D}]"
        yield ask(about, probes.attention, N=N, heads=H, state=state, x=x, grad=grad)
    N = int(rng.integers(2, 4))
    H = N * int(rng.integers(1, 3)) + 1
    yield refusal("heads", N, (N * H, H), f"{H} heads")


# 5.6: the vocabulary.


def vocabulary(rng: Random) -> Questions:
    for N in (1, 2, 3, 4):
        V = N * int(rng.integers(2, 4)) - int(rng.integers(1, max(2, N)))
        yield embedded(rng, N, V)
        yield product(rng, N, V, transposed=bool(N % 2))
        yield losses(rng, N, V)
    yield losses(rng, 4, 5)  # a rank that has nothing but padding
    yield losses(rng, 2, 4)  # none


def embedded(rng: Random, N: int, V: int) -> Question:
    C, B, T = int(rng.integers(1, 4)), int(rng.integers(1, 4)), int(rng.integers(1, 5))
    tokens = rng.integers(0, V, (B, T))
    tokens[0, 0] = V - 1
    about = f"embedding, {plural(N, 'rank')}, {plural(V, 'word')}, tokens [{B}, {T}]"
    weight, grad = rng.standard_normal((V, C)), rng.standard_normal((B, T, C))
    return ask(about, probes.embedding, N=N, weight=weight, tokens=tokens, grad=grad)


def product(rng: Random, N: int, V: int, transposed: bool) -> Question:
    (B, T, C), each = ints(rng, 1, 4, 3), -(-V // N)
    return ask(
        f"head, {plural(N, 'rank')}, X[{B}, {T}, {C}]" + (", transposed" if transposed else ""),
        probes.head,
        x=rng.standard_normal((B, T, C)),
        weights=list(rng.standard_normal((N, each, C) if transposed else (N, C, each))),
        grads=list(rng.standard_normal((N, B, T, each))),
        transposed=transposed,
    )


def losses(rng: Random, N: int, V: int) -> Question:
    B, T, each = int(rng.integers(1, 4)), int(rng.integers(1, 5)), -(-V // N)
    real = 3 * rng.standard_normal((B, T, V)) + 800 * rng.choice([-1, 0, 1], (B, T, 1))
    padding = [(0, 0), (0, 0), (0, each * N - V)]
    logits = np.pad(real, padding, constant_values=900.0)  # more than any real one
    about = f"cross-entropy, {plural(N, 'rank')}, {plural(V, 'word')}, "
    about += f"{plural(each * N - V, 'column')} of padding, "
    about += f"logits from {real.min():.0f} to {real.max():.0f}"
    return ask(
        about,
        probes.cross_entropy,
        parts=np.split(logits, N, axis=-1),
        targets=rng.integers(nn.IGNORED, V, (B, T)),
        vocab=V,
        reduction_size=float(rng.integers(3, 40)),
        grad=rng.uniform(0.5, 2),
    )


# 5.7: the sequence.


def sequence(rng: Random) -> Questions:
    for T, N in ((6, 3), (8, 4), (5, 1), (7, 2)):
        yield ask(f"{T} positions over {plural(N, 'rank')}", probes.positions, T=T, N=N)
    for N in (1, 2, 3):
        yield gathered(rng, N)
        yield scattered_rows(rng, N)
        yield dropped(rng, N)
    for N, tied, depth in ((1, True, 1), (2, False, 2), (2, True, 1), (3, True, 1)):
        yield transformer(rng, N, tied, depth)


def gathered(rng: Random, N: int) -> Question:
    B, T, C, F = int(rng.integers(1, 4)), N * int(rng.integers(1, 4)), *ints(rng, 1, 5, 2)
    return ask(
        f"GatheredLinear, {plural(N, 'rank')}, X[{B}, {T}/{N}, {C}]",
        probes.gathered,
        xs=np.split(rng.standard_normal((B, T, C)), N, axis=1),
        weight=rng.standard_normal((C, F)),
        bias=rng.standard_normal(F),
        grads=list(rng.standard_normal((N, B, T, F))),
    )


def scattered_rows(rng: Random, N: int) -> Question:
    B, T, C, F = (n * k for n, k in zip(ints(rng, 1, 4, 4), (1, N, N, 1), strict=True))
    return ask(
        f"SequenceRowLinear, {plural(N, 'rank')}, X[{B}, {T}, {C}/{N}]",
        probes.linear,
        kind="sequence rows",
        state=linear_state(rng, C, F, bias=True),
        activation="identity",
        xs=np.split(rng.standard_normal((B, T, C)), N, axis=-1),
        grads=np.split(rng.standard_normal((B, T, F)), N, axis=1),
        options={},
    )


def dropped(rng: Random, N: int) -> Question:
    B, T, C, seed = int(rng.integers(1, 4)), N * int(rng.integers(2, 5)), 6, int(rng.integers(99))
    about = f"SequenceDropout, {plural(N, 'rank')}, X[{B}, {T}/{N}, {C}]"
    xs = np.split(rng.standard_normal((B, T, C)), N, axis=1)
    return ask(about, probes.dropped, xs=xs, rate=0.5, seed=seed)


def transformer(rng: Random, N: int, tied: bool, depth: int) -> Question:
    V, B, T, seed = 11, int(rng.integers(1, 4)), N * int(rng.integers(1, 4)), int(rng.integers(99))
    config: dict = {"vocab": V, "width": 6, "heads": 6, "depth": depth, "context": 12}
    config |= {"dropout": 0.2, "tied": tied}
    model = random_weights(nn.Transformer(**config, dtype="float64"), seed)
    tokens, targets = rng.integers(0, V, (2, B, T))
    about = f"{'tied' if tied else 'untied'} Transformer, {plural(N, 'rank')}, "
    about += f"{plural(depth, 'block')}, tokens [{B}, {T}]"
    given = {"N": N, "config": config, "state": model.state(), "seed": seed}
    return ask(about, probes.transformer, **given, tokens=tokens, targets=targets)


QUESTIONS = {
    "5.1": f_and_g,
    "5.2": other_pairs,
    "5.3": columns,
    "5.4": rows,
    "5.5": heads,
    "5.6": vocabulary,
    "5.7": sequence,
}
