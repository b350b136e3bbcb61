"""What the hybrid lab asks. The right answer is what the package itself answers.

A mesh's shape is (ranks of dp, of pp, of tp).
"""

from itertools import pairwise, product
from math import prod, sqrt

import numpy as np

from minidist import nn
from minidist.course.probes import hybrid as probes
from minidist.course.question import Answer, Question, Questions, Random
from minidist.course.questions.arrays import ask, by_rank, like_the_package
from minidist.errors import plural
from minidist.pipeline_parallel import programs
from minidist.pipeline_parallel.holders import holders
from minidist.pipeline_parallel.partition import cut_of
from minidist.verify.strategies.cases import random_weights

Shape = tuple[int, int, int]


def drawn(rng: Random, depth: int, tied: bool, dropout: float = 0.0) -> tuple[dict, nn.Transformer]:
    config = {
        "vocab": int(rng.choice([5, 7, 11])),  # over two or three ranks there is padding
        "width": 6,
        "heads": 6,
        "depth": depth,
        "context": 6,
        "dropout": dropout,
        "tied": tied,
    }
    model = nn.Transformer(**config, dtype="float64")
    random_weights(model, int(rng.integers(1 << 30)))
    return config, model


def model_given(model: nn.Transformer, config: dict, shape: Shape, options: dict) -> dict:
    """Return what a probe needs to make each rank's part of a model."""
    pp, schedule, chunks = shape[1], options.get("schedule", "1f1b"), options.get("chunks", 1)
    placement = programs(schedule, pp, 4 * pp, chunks).placement
    cut = cut_of(len(model.layers), 1 + max(map(max, placement)))
    ranks = {
        name: [r for r, own in enumerate(placement) if set(own) & set(stages)]
        for name, stages in holders(model, cut).items()
    }
    return {
        "shape": shape,
        "config": config,
        "state": model.state(),
        "layers": [[i for k in own for i in cut[k]] for own in placement],
        "shared": {name: own for name, own in ranks.items() if len(own) > 1},
        "split_sequence": options.get("split_sequence", False),
    }


# 6.1, 6.2: the mesh.


def several_axes(rng: Random) -> list[dict[str, int]]:
    a, b, c, d = (int(n) for n in rng.permutation([1, 2, 3, 4]))
    return [
        {"dp": a, "pp": b, "tp": c},
        {"rows": c, "columns": d},
        {"only": int(rng.integers(1, 6))},
        {"w": 2, "x": int(rng.integers(1, 4)), "y": 1, "z": int(rng.integers(2, 4))},
    ]


def shown(axes: dict[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in axes.items())


def coordinates(rng: Random) -> Questions:
    for axes in several_axes(rng):
        own = {name: int(rng.integers(size)) for name, size in axes.items()}
        yield ask(f"{shown(axes)}, seen from {own}", probes.coordinates, axes=axes, own=own)


def meshes(rng: Random) -> Questions:
    for axes in [*several_axes(rng), {"dp": 2, "pp": 2, "tp": 3}]:
        if (N := prod(axes.values())) <= 12:
            yield ask(shown(axes), probes.mesh, N=N, axes=axes)
    for axes, N in (({"dp": 2, "tp": 2}, 3), ({"dp": 4, "tp": 0}, 2), ({"dp": 1, "tp": 1}, 2)):
        yield ask(f"{shown(axes)} of {N} ranks", probes.mesh, N=N, axes=axes)


def on(shape: Shape) -> str:
    return " x ".join(map(str, shape)) + " (dp x pp x tp)"


def flags(options: dict) -> str:
    sequence = ", sequence split" if options.get("split_sequence") else ""
    return options.get("schedule", "1f1b") + sequence


# 6.3: parameters that two stages share.


def tied(rng: Random) -> Questions:
    for stages, is_tied in ((1, True), (2, True), (3, False), (4, True)):
        config, model = drawn(rng, int(rng.integers(3, 5)), is_tied)
        ends = np.sort(rng.permutation(np.arange(1, len(model.layers)))[: stages - 1])
        cut = list(pairwise([0, *map(int, ends), len(model.layers)]))
        about = f"holders, {'tied' if is_tied else 'untied'}, layers {cut}"
        yield ask(about, probes.held, config=config, cut=cut)
    for N, options, m, batches in (
        (1, {}, 2, 1),
        (2, {}, 3, 1),
        (2, {}, 2, 2),
        (3, {"schedule": "gpipe"}, 2, 2),
        (2, {"schedule": "zb_v"}, 3, 1),
        (2, {"schedule": "interleaved", "chunks": 2}, 2, 1),
    ):
        yield through_a_pipeline(rng, N, options, m, batches)


def through_a_pipeline(rng: Random, N: int, options: dict, m: int, batches: int) -> Question:
    config, model = drawn(rng, 2 if N * options.get("chunks", 1) < 4 else 3, True)
    B, T = int(rng.integers(1, 4)), int(rng.integers(2, 7))
    tokens, targets = rng.integers(0, config["vocab"], (2, B, T))
    about = f"tied, {plural(N, 'stage')}, {flags(options)}, {plural(batches, 'batch')} of {B}"
    given: dict = {"N": N, "config": config, "state": model.state(), "options": options}
    given |= {"tokens": tokens, "targets": targets, "m": m, "batches": batches}
    return ask(about, probes.pipeline, **given)


# 6.4, 6.5: the gradient of the whole batch.

SHAPES: list[tuple[Shape, dict]] = [
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
        given = model_given(model, config, shape, options)
        alike = not options.get("split_sequence")
        grads = to_be_summed(rng, model, shape, alike, empty)
        about = f"{on(shape)}, {flags(options)}"
        about += f", rank {empty} of dp has nothing" if empty < shape[0] else ""
        yield ask(about, probes.sums, **given, grads=grads)


def to_be_summed(
    rng: Random, model: nn.Transformer, shape: Shape, alike: bool, empty: int
) -> list[dict[str, np.ndarray | None]]:
    """Draw the whole gradients that every rank has its part of; alike: on tp they are the same."""
    shapes = {name: p.shape for name, p in model.named_parameters().items()}
    found: list[dict[str, np.ndarray | None]] = []
    for d, _, t in product(*map(range, shape)):
        if t and alike:
            found.append(found[-1])
            continue
        found.append({n: None if d == empty else rng.standard_normal(shapes[n]) for n in shapes})
    return found


def deals(rng: Random) -> Questions:
    for shape, m in (((1, 1, 1), 2), ((2, 1, 1), 3), ((1, 2, 1), 1), ((3, 1, 2), 2)):
        B, T = int(rng.integers(2, 8)), int(rng.integers(1, 4))
        tokens, targets = rng.integers(0, 6, (2, B, T))
        losses = rng.standard_normal(shape[0])  # on the last stage; alike on tp
        every = [losses[d] if p == shape[1] - 1 else 0.0 for d, p, _ in product(*map(range, shape))]
        given: dict = {"shape": shape, "m": m, "losses": every}
        given |= {"tokens": tokens, "targets": targets}
        given["examples"] = rng.permutation(40)[:B] if m > 1 else None
        about = f"what the pipeline is given, {on(shape)}, {plural(B, 'example')}, "
        yield ask(about + plural(m, "micro-batch"), probes.dealt, **given, old=False)
    given = {"shape": (2, 1, 1), "m": 1, "losses": [1.0, 2.0], "examples": None}
    given |= {"tokens": tokens, "targets": targets}
    yield ask("a gradient is there", probes.dealt, **given, old=True)


def backward(rng: Random) -> Questions:
    yield from deals(rng)
    for shape, options in SHAPES:
        config, model = drawn(rng, 2, True, dropout=0.3)
        B, T = int(rng.integers(1, 7)), 2 * int(rng.integers(1, 4))
        tokens, targets = rng.integers(0, config["vocab"], (2, B, T))
        given: dict = {"shape": shape, "config": config, "state": model.state()}
        given |= {
            "options": options,
            "tokens": tokens,
            "targets": targets,
            "examples": rng.permutation(50)[:B],
        }
        given |= {"seed": int(rng.integers(99)), "step": int(rng.integers(9))}
        about = f"{on(shape)}, {plural(B, 'example')}, {flags(options)}"
        yield ask(about, probes.backward, sent_once, **given)


def sent_once(answer: Answer, want: Answer) -> str | None:
    """Judge a batch: the package's gradients, with no more bytes on dp than the package sends."""
    if wrong := like_the_package(answer, want, free=("sent on dp",)):
        return wrong
    moved, most = (sum(map(int, by_rank(numbers, "sent on dp"))) for numbers in (answer, want))
    if moved > most:
        return f"{moved} bytes are sent on dp, not {most}: gradients once, and the loss"
    return None


# 6.6: one norm.


def clipping(rng: Random) -> Questions:
    for factor, missing in ((0.3, False), (2.0, False), (0.5, True)):
        yield clipped(rng, factor, missing)
    for shape, is_tied, factor in (
        ((1, 1, 1), True, 0.5),
        ((2, 1, 1), True, 0.4),
        ((1, 2, 1), True, 0.7),
        ((1, 1, 2), True, 0.3),
        ((1, 3, 2), True, 1.5),
        ((2, 2, 2), False, 0.6),
    ):
        config, model = drawn(rng, 2, is_tied)
        grads = {n: rng.standard_normal(p.shape) for n, p in model.named_parameters().items()}
        given = model_given(model, config, shape, {})
        given |= {"grads": grads, "max_norm": factor * norm_of(grads)}
        about = f"{on(shape)}, {'tied' if is_tied else 'untied'}, max_norm {factor} times the norm"
        yield ask(about, probes.clip_on_mesh, **given)


def clipped(rng: Random, factor: float, missing: bool) -> Question:
    sizes = [int(n) for n in rng.integers(1, 6, 3)]
    model = nn.MLP(sizes, dtype="float64")
    grads = {n: rng.standard_normal(p.shape) for n, p in model.named_parameters().items()}
    if missing:
        del grads["layers.0.bias"]
    about = f"one device, max_norm {factor} times the norm"
    about += ", one gradient None" if missing else ""
    return ask(about, probes.clip, sizes=sizes, grads=grads, max_norm=factor * norm_of(grads))


def norm_of(grads: dict[str, np.ndarray]) -> float:
    return sqrt(sum(float((g * g).sum()) for g in grads.values()))


# 6.7: the whole state.


def wholes(rng: Random) -> Questions:
    for shape, options, is_tied in (
        ((1, 1, 1), {}, True),
        ((1, 2, 1), {}, True),
        ((1, 1, 3), {}, False),
        ((1, 2, 2), {"schedule": "interleaved", "chunks": 2}, True),
        ((2, 2, 2), {}, False),
    ):
        config, model = drawn(rng, 2, is_tied)
        given = model_given(model, config, shape, options)
        given["arrays"] = {n: rng.standard_normal(x.shape) for n, x in model.state().items()}
        yield ask(f"{on(shape)}, {'tied' if is_tied else 'untied'}", probes.whole, **given)


QUESTIONS = {
    "6.1": coordinates,
    "6.2": meshes,
    "6.3": tied,
    "6.4": sums,
    "6.5": backward,
    "6.6": clipping,
    "6.7": wholes,
}
