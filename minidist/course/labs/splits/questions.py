"""What the splits lab asks. The right answer is what the package itself answers.

Letters: N ranks, B examples, T positions, C and F widths, H heads of width D, V words.
"""

import numpy as np

from minidist import nn
from minidist.course.labs.splits import probes
from minidist.course.question import Question, Questions, Random, ask, ints, ranks
from minidist.errors import plural
from minidist.verify.strategies.cases import random_weights

# 5.1, 5.2: {function: (what the ranks have of X, and of dY, how many axes it takes)}

LAYOUTS = {
    "copy_to": ("same", "own", 0),
    "reduce_from": ("own", "same", 0),
    "scatter": ("same", "parts", 1),
    "gather": ("parts", "same", 1),
    "all_gather": ("parts", "own", 1),
    "reduce_scatter": ("own", "parts", 1),
    "all_to_all": ("parts", "parts", 2),
}


def held(rng: Random, layout: str, N: int, shape: tuple, axis: int) -> list[np.ndarray]:
    """Draw what each rank has: an array of its own, the same one, or a part of it."""
    if layout == "own":
        return list(rng.standard_normal((N, *shape)))
    whole = rng.standard_normal(shape)
    return np.array_split(whole, N, axis) if layout == "parts" else [whole] * N


def pairs(rng: Random, names: list[str]) -> Questions:
    for name in names:
        x_layout, grad_layout, count = LAYOUTS[name]
        first = int(rng.integers(0, 2))
        for at, N in enumerate((1, 2, int(rng.integers(3, 5)))):
            shape = tuple(  # which N does not divide; with fewer than N some parts are empty
                N * n + int(rng.integers(1, max(2, N))) for n in ints(rng, 0, 3, 2)
            )
            axes = ((first + at) % 2, (first + at + 1) % 2)[:count]
            xs = held(rng, x_layout, N, shape, axes[-1] if axes else 0)
            grads = held(rng, grad_layout, N, shape, axes[0] if axes else 0)
            about = f"{name}, axes {list(axes)}, {plural(N, 'rank')}, X{list(shape)}"
            yield ask(about, probes.pair, group=name, name=name, xs=xs, grads=grads, axes=axes)


def f_and_g(rng: Random) -> Questions:
    yield from pairs(rng, ["copy_to", "reduce_from"])


def other_pairs(rng: Random) -> Questions:
    yield from pairs(rng, ["scatter", "gather", "all_gather", "reduce_scatter", "all_to_all"])


# 5.3, 5.4, 5.7: linear layers, whose shape is [C, F].


def linear(rng: Random, group: str, kind: str, xs: list, grads: list, **given) -> Question:
    """Ask for a split layer there and back; xs: what it is given, grads: of what it returns."""
    C, F = given.pop("shape")
    state = {"linear.weight": rng.standard_normal((C, F)), "linear.bias": rng.standard_normal(F)}
    if group == "no bias":
        del state["linear.bias"]
    about = f"{kind}, {group}, {plural(len(xs), 'rank')}, weight [{C}, {F}], X{list(xs[0].shape)}"
    given = {"activation": "identity", "options": {}} | given
    return ask(
        about, probes.linear, group=group, kind=kind, state=state, xs=xs, grads=grads, **given
    )


def refused(rng: Random, group: str, kind: str) -> Question:
    """Ask for a layer whose columns, rows or heads do not split evenly."""
    N = int(rng.integers(2, 5))
    n = N * int(rng.integers(2, 5)) + int(rng.integers(1, N))
    shape = {"columns": (3, n), "rows": (n, 3), "heads": (N * n, n)}[kind]
    about = f"{n} {kind} over {N} ranks"
    return ask(about, probes.refusal, group=group, kind=kind, N=N, shape=shape)


def columns(rng: Random) -> Questions:
    for N, case in ((1, "split"), (2, "split"), (3, "gathered"), (2, "chosen"), (4, "no bias")):
        C, F, B = int(rng.integers(2, 6)), N * int(rng.integers(2, 4)), int(rng.integers(1, 5))
        x, grad = rng.standard_normal((B, C)), rng.standard_normal((B, F))
        own, options = np.split(np.arange(F), N), dict[str, object]()
        if case == "chosen":
            own = list(np.sort(rng.permutation(F).reshape(N, -1), axis=1))
            options = {"columns": own}
        grads = [grad[:, mine] for mine in own]
        if case == "gathered":
            grads, options = [grad] * N, {"gather_output": True}
        given: dict = {"shape": (C, F), "activation": "gelu", "options": options}
        yield linear(rng, case, "columns", [x] * N, grads, **given)
    yield refused(rng, "split", "columns")


def rows(rng: Random) -> Questions:
    for N, case in ((1, "split"), (2, "split"), (3, "scattered"), (4, "no bias"), (3, "gelu")):
        C, F, B = N * int(rng.integers(2, 4)), int(rng.integers(2, 6)), int(rng.integers(1, 5))
        x, grads = rng.standard_normal((B, C)), [rng.standard_normal((B, F))] * N
        xs, given = np.split(x, N, axis=-1), dict[str, object](shape=(C, F))
        if case == "scattered":
            xs, given = [x] * N, given | {"options": {"scatter_input": True}}
        if case in ("gelu", "scattered"):
            given |= {"activation": "gelu"}
        yield linear(rng, case, "rows", xs, grads, **given)
    yield refused(rng, "split", "rows")


def heads(rng: Random) -> Questions:
    for N, each, D in ((1, 2, 3), (2, 1, 2), (2, 3, 2), (3, 2, 3)):
        H, B, T = N * each, int(rng.integers(1, 4)), int(rng.integers(2, 5))
        layer = nn.CausalSelfAttention(H * D, H, dtype="float64")
        drawn = layer.named_parameters().items()
        x, grad = rng.standard_normal((2, B, T, H * D))
        about = f"{plural(N, 'rank')}, {H} heads of width {D}, X{list(x.shape)}"
        given: dict = {"state": {name: rng.standard_normal(p.shape) for name, p in drawn}}
        given |= {"N": N, "heads": H, "x": x, "grad": grad}
        yield ask(about, probes.attention, group=ranks(N), **given)
    yield refused(rng, "any number of ranks", "heads")


# 5.6: the vocabulary.


def vocabulary(rng: Random) -> Questions:
    for N in (1, 2, 3, 4):
        V = N * int(rng.integers(2, 4)) - int(rng.integers(1, max(2, N)))
        (B, T, C), each = ints(rng, 1, 5, 3), -(-V // N)
        tokens, about = rng.integers(0, V, (B, T)), f"{plural(N, 'rank')}, {plural(V, 'word')}, "
        tokens[0, 0] = V - 1
        weight, grad = rng.standard_normal((V, C)), rng.standard_normal((B, T, C))
        given: dict = {"N": N, "weight": weight, "tokens": tokens, "grad": grad}
        about += f"tokens [{B}, {T}]"
        yield ask(f"embedding, {about}", probes.embedding, group="the embedding", **given)
        given = {"x": rng.standard_normal((B, T, C)), "transposed": bool(N % 2)}
        shape = (N, each, C) if given["transposed"] else (N, C, each)
        given |= {"weights": list(rng.standard_normal(shape))}
        given |= {"grads": list(rng.standard_normal((N, B, T, each)))}
        yield ask(f"head, {about}, {shape[1:]}", probes.head, group="the head", **given)
        yield losses(rng, N, V)
    yield losses(rng, 4, 5)  # a rank that has nothing but padding
    yield losses(rng, 2, 4)  # none


def losses(rng: Random, N: int, V: int) -> Question:
    B, T, each = int(rng.integers(1, 4)), int(rng.integers(1, 5)), -(-V // N)
    real = 3 * rng.standard_normal((B, T, V)) + 800 * rng.choice([-1, 0, 1], (B, T, 1))
    padding = [(0, 0), (0, 0), (0, each * N - V)]
    logits = np.pad(real, padding, constant_values=900.0)  # more than any real one
    about = f"cross-entropy, {plural(N, 'rank')}, {plural(V, 'word')}, "
    about += f"{plural(each * N - V, 'column')} of padding, "
    about += f"logits from {real.min():.0f} to {real.max():.0f}"
    given: dict = {"parts": np.split(logits, N, axis=-1), "vocab": V, "grad": rng.uniform(0.5, 2)}
    given |= {"targets": rng.integers(nn.IGNORED, V, (B, T))}
    given |= {"reduction_size": float(rng.integers(3, 40))}
    return ask(about, probes.cross_entropy, group="the loss", **given)


# 5.7: the sequence.


def sequence(rng: Random) -> Questions:
    for T, N in ((6, 3), (8, 4), (5, 1), (7, 2)):
        about = f"{T} positions over {plural(N, 'rank')}"
        yield ask(about, probes.positions, group="positions and dropout", T=T, N=N)
    for N in (1, 2, 3):
        B, T, C, F = (n * k for n, k in zip(ints(rng, 1, 4, 4), (1, N, N, 1), strict=True))
        x, grad = rng.standard_normal((B, T, C)), rng.standard_normal((B, T, F))
        xs, about = np.split(x, N, axis=1), f"{plural(N, 'rank')}, X[{B}, {T}/{N}, {C}]"
        given: dict = {"weight": rng.standard_normal((C, F)), "bias": rng.standard_normal(F)}
        given |= {"xs": xs, "grads": list(rng.standard_normal((N, B, T, F)))}
        yield ask(f"GatheredLinear, {about}", probes.gathered, group="GatheredLinear", **given)
        split, grads = np.split(x, N, axis=-1), np.split(grad, N, axis=1)
        yield linear(rng, "rows of a sequence", "sequence rows", split, grads, shape=(C, F))
        given = {"xs": xs, "rate": 0.5, "seed": int(rng.integers(99))}
        yield ask(
            f"SequenceDropout, {about}", probes.dropped, group="positions and dropout", **given
        )
    for N, tied, depth in ((1, True, 1), (2, False, 2), (2, True, 1), (3, True, 1)):
        yield transformer(rng, N, tied, depth)


def transformer(rng: Random, N: int, tied: bool, depth: int) -> Question:
    V, B, T, seed = 11, int(rng.integers(1, 4)), N * int(rng.integers(1, 4)), int(rng.integers(99))
    config: dict = {"vocab": V, "width": 6, "heads": 6, "depth": depth, "context": 12}
    config |= {"dropout": 0.2, "tied": tied}
    model = random_weights(nn.Transformer(**config, dtype="float64"), seed)
    tokens, targets = rng.integers(0, V, (2, B, T))
    about = f"{'tied' if tied else 'untied'}, {plural(N, 'rank')}, {plural(depth, 'block')}"
    given: dict = {"N": N, "config": config, "state": model.state(), "seed": seed}
    given |= {"tokens": tokens, "targets": targets}
    return ask(f"{about}, tokens [{B}, {T}]", probes.transformer, group="a Transformer", **given)


QUESTIONS = {
    "5.1": f_and_g,
    "5.2": other_pairs,
    "5.3": columns,
    "5.4": rows,
    "5.5": heads,
    "5.6": vocabulary,
    "5.7": sequence,
}
