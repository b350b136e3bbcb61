"""What the hybrid lab asks. The right answer is what the package itself answers.

A mesh's shape is (ranks of dp, of pp, of tp).
"""

from functools import partial
from itertools import pairwise, product
from math import prod, sqrt

import numpy as np

from minidist import nn
from minidist.course.answers import like_the_package
from minidist.course.labs.hybrid import probes
from minidist.course.question import Questions, Random, ask, ints
from minidist.errors import plural
from minidist.pipeline_parallel import programs
from minidist.pipeline_parallel.holders import cut_of, holders
from minidist.verify.strategies.cases import random_weights

Shape = tuple[int, int, int]
Options = dict[str, object]


def drawn(rng: Random, depth: int, tied: bool, dropout: float = 0.0) -> tuple[dict, nn.Transformer]:
    config: dict = {"width": 6, "heads": 6, "depth": depth, "context": 6, "dropout": dropout}
    vocab = int(rng.choice([5, 7, 11]))  # over two or three ranks there is padding
    config |= {"vocab": vocab, "tied": tied}
    model = nn.Transformer(**config, dtype="float64")
    random_weights(model, int(rng.integers(1 << 30)))
    return config, model


def batch(rng: Random, config: dict, B: int, T: int) -> dict:
    tokens, targets = rng.integers(0, config["vocab"], (2, B, T))
    return {"tokens": tokens, "targets": targets}


def gradients(rng: Random, model: nn.Module) -> dict[str, np.ndarray]:
    return {n: rng.standard_normal(p.shape) for n, p in model.named_parameters().items()}


def on_mesh(model: nn.Transformer, config: dict, shape: Shape, options: dict) -> dict:
    """Return what a probe needs to make each rank's part of a model."""
    pp, schedule, chunks = shape[1], options.get("schedule", "1f1b"), options.get("chunks", 1)
    placement = programs(schedule, pp, 4 * pp, chunks).placement
    cut = cut_of(len(model.layers), 1 + max(map(max, placement)))
    at = {
        name: [r for r, own in enumerate(placement) if set(own) & set(stages)]
        for name, stages in holders(model, cut).items()
    }
    return {
        "shape": shape,
        "config": config,
        "state": model.state(),
        "layers": [[i for k in own for i in cut[k]] for own in placement],
        "shared": {name: own for name, own in at.items() if len(own) > 1},
        "split_sequence": options.get("split_sequence", False),
    }


def shown(shape: Shape, **options) -> str:
    words = [f"{name} {value}" for name, value in options.items()]
    return ", ".join([" x ".join(map(str, shape)) + " (dp x pp x tp)", *words])


def axes_of(shape: Shape) -> str:
    """Return the group of a question: how many axes really split."""
    return "one axis" if sorted(shape)[1] == 1 else "several axes"


# 6.1, 6.2: the mesh.


def several_axes(rng: Random) -> list[dict[str, int]]:
    a, b, c, d = rng.permutation([1, 2, 3, 4]).tolist()
    return [
        {"dp": a, "pp": b, "tp": c},
        {"rows": c, "columns": d},
        {"only": int(rng.integers(1, 6))},
        {"w": 2, "x": int(rng.integers(1, 4)), "y": 1, "z": int(rng.integers(2, 4))},
    ]


def coordinates(rng: Random) -> Questions:
    for axes in several_axes(rng):
        own = {name: int(rng.integers(size)) for name, size in axes.items()}
        yield ask(f"{axes}, seen from {own}", probes.coordinates, axes=axes, own=own)


def meshes(rng: Random) -> Questions:
    for axes in [*several_axes(rng), {"dp": 2, "pp": 2, "tp": 3}]:
        if (N := prod(axes.values())) <= 12:
            yield ask(f"{axes}", probes.mesh, N=N, axes=axes)
    for axes, N in (({"dp": 2, "tp": 2}, 3), ({"dp": 4, "tp": 0}, 2), ({"dp": 1, "tp": 1}, 2)):
        yield ask(f"{axes} of {N} ranks", probes.mesh, N=N, axes=axes)


# 6.3: parameters that two stages share.


def tied(rng: Random) -> Questions:
    for stages, is_tied in ((1, True), (2, True), (3, False), (4, True)):
        config, model = drawn(rng, int(rng.integers(3, 5)), is_tied)
        ends = np.sort(rng.permutation(np.arange(1, len(model.layers)))[: stages - 1])
        cut = list(pairwise([0, *ends.tolist(), len(model.layers)]))
        about = f"holders, {'tied' if is_tied else 'untied'}, layers {cut}"
        yield ask(about, probes.held, group="holders", config=config, cut=cut)
    cases: list[tuple[int, Options, int, int]] = [
        (1, {}, 2, 1),
        (2, {}, 3, 1),
        (2, {}, 2, 2),
        (3, {"schedule": "gpipe"}, 2, 2),
        (2, {"schedule": "zb_v"}, 3, 1),
        (2, {"schedule": "interleaved", "chunks": 2}, 2, 1),
    ]
    for N, options, m, batches in cases:
        config, model = drawn(rng, 3 if "chunks" in options else 2, True)
        given = {"N": N, "config": config, "state": model.state(), "options": options}
        given |= batch(rng, config, int(rng.integers(1, 4)), int(rng.integers(2, 7)))
        about = f"tied, {plural(N, 'stage')}, {options}, {plural(batches, 'batch')}"
        group = "a batch" if batches == 1 else "a batch on top of another one"
        yield ask(about, probes.pipeline, group=group, **given, m=m, batches=batches)


# 6.4, 6.5: the gradient of the whole batch.

SHAPES: list[tuple[Shape, Options]] = [
    ((1, 1, 1), {"micro_batches": 1}),
    ((3, 1, 1), {"micro_batches": 2, "schedule": "gpipe"}),
    ((2, 2, 1), {"micro_batches": 3}),
    ((1, 1, 2), {"micro_batches": 2, "split_sequence": True}),
    ((2, 1, 2), {"micro_batches": 1}),
    ((2, 2, 2), {"micro_batches": 2, "split_sequence": True, "schedule": "zb_h1"}),
]


def sums(rng: Random) -> Questions:
    for shape, options in SHAPES:
        config, model = drawn(rng, 2, True)
        empty = int(rng.integers(shape[0])) + 1  # on dp, if there is one of this number
        grads: list[dict] = []
        for d, _, t in product(*map(range, shape)):
            alike = t and "split_sequence" not in options  # on tp they are the same
            grads.append(grads[-1] if alike else gradients(rng, model))
            if d == empty:
                grads[-1] = dict.fromkeys(grads[-1])
        missing = f", rank {empty} of dp has none" if empty < shape[0] else ""
        given = on_mesh(model, config, shape, options)
        about = f"{shown(shape, **options)}{missing}"
        yield ask(about, probes.sums, group=axes_of(shape), **given, grads=grads)


def backward(rng: Random) -> Questions:
    judge = partial(like_the_package, at_most=("bytes on dp",))
    for shape, options in SHAPES:
        config, model = drawn(rng, 2, True, dropout=0.3)
        B, seed, step = int(rng.integers(1, 7)), *ints(rng, 0, 99, 2)
        given: dict = {"shape": shape, "config": config, "options": options, "seed": seed}
        given |= {"state": model.state(), "step": step}
        given |= batch(rng, config, B, 2 * int(rng.integers(1, 4)))
        given |= {"examples": None if shape == (2, 1, 2) else rng.permutation(50)[:B]}
        about = f"{plural(B, 'example')}, {shown(shape, **options)}"
        yield ask(about, probes.backward, judge, axes_of(shape), **given)


# 6.6, 6.7: one norm, the whole state.


def norm_of(grads: dict[str, np.ndarray]) -> float:
    return sqrt(sum(float((g * g).sum()) for g in grads.values()))


def clipping(rng: Random) -> Questions:
    for factor, missing in ((0.3, False), (2.0, False), (0.5, True)):
        sizes = ints(rng, 1, 6, 3)
        grads = gradients(rng, nn.MLP(sizes, dtype="float64"))
        if missing:
            del grads["layers.0.bias"]
        about = f"one device, max_norm {factor} times the norm{', one is None' if missing else ''}"
        given = {"sizes": sizes, "grads": grads, "max_norm": factor * norm_of(grads)}
        yield ask(about, probes.clip, group="one device", **given)
    cases = [((1, 1, 1), True, 0.5), ((2, 1, 1), True, 0.4), ((1, 2, 1), True, 0.7)]
    cases += [((1, 1, 2), True, 0.3), ((1, 3, 2), True, 1.5), ((2, 2, 2), False, 0.6)]
    for shape, is_tied, factor in cases:
        config, model = drawn(rng, 2, is_tied)
        grads = gradients(rng, model)
        given = on_mesh(model, config, shape, {})
        given |= {"grads": grads, "max_norm": factor * norm_of(grads)}
        about = f"{shown(shape, tied=is_tied)}, max_norm {factor} times the norm"
        yield ask(about, probes.clip_on_mesh, group=axes_of(shape), **given)


def wholes(rng: Random) -> Questions:
    cases: list[tuple[Shape, bool, Options]] = [
        ((1, 1, 1), True, {}),
        ((1, 2, 1), True, {}),
        ((1, 1, 3), False, {}),
        ((1, 2, 2), True, {"schedule": "interleaved", "chunks": 2}),
        ((2, 2, 2), False, {}),
    ]
    for shape, is_tied, options in cases:
        config, model = drawn(rng, 2, is_tied)
        given = on_mesh(model, config, shape, options)
        given |= {"arrays": {n: rng.standard_normal(x.shape) for n, x in model.state().items()}}
        about = shown(shape, tied=is_tied, **options)
        yield ask(about, probes.whole, group=axes_of(shape), **given)


QUESTIONS = {
    "6.1": coordinates,
    "6.2": meshes,
    "6.3": tied,
    "6.4": sums,
    "6.5": backward,
    "6.6": clipping,
    "6.7": wholes,
}
