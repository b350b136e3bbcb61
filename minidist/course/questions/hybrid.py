"""What the hybrid lab asks, and what the answers must be.

Places on the mesh, one device's gradients cut into the ranks' parts, one norm, the whole state.
"""

from collections.abc import Iterator
from itertools import pairwise, product
from math import prod, sqrt

import numpy as np

from minidist import nn
from minidist.course.question import Answer, Question, counted
from minidist.course.questions.ranks import by_rank, joined, ranks_differ
from minidist.pipeline_parallel import programs
from minidist.pipeline_parallel.holders import holders
from minidist.pipeline_parallel.partition import cut_of
from minidist.rng import Randomness
from minidist.tools.strategies.cases import random_weights

F8 = 8  # bytes of a float64
SHAPE = ("dp", "pp", "tp")


# 6.1, 6.2: the mesh.


def several_axes(rng) -> Iterator[dict[str, int]]:
    a, b, c, d = (int(n) for n in rng.permutation([1, 2, 3, 4]))
    yield {"dp": a, "pp": b, "tp": c}
    yield {"rows": c, "columns": d}
    yield {"only": int(rng.integers(1, 6))}
    yield {"w": 2, "x": int(rng.integers(1, 4)), "y": 1, "z": int(rng.integers(2, 4))}


def coordinates(rng) -> Iterator[Question]:
    for axes in several_axes(rng):
        places = list(product(*(range(size) for size in axes.values())))
        own = dict(zip(axes, places[int(rng.integers(len(places)))], strict=True))
        yield Question(
            f"{shown(axes)}, seen from {own}",
            "coordinates",
            {"axes": axes, "own": own},
            lambda answer, axes=axes, own=own, places=places: judge_places(
                answer, axes, own, places
            ),
        )


def shown(axes: dict[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in axes.items())


def judge_places(answer: Answer, axes: dict, own: dict, places: list[tuple]) -> str | None:
    for rank, place in enumerate(places):
        got = tuple(answer["coordinates"][rank].tolist())
        if got != place:
            back = sorted(map(tuple, answer["coordinates"].tolist())) == places
            why = ": the last axis is the fastest" if back else ""
            return f"rank {rank} is at {got}, not {place}{why}"
        if not answer["order"][rank]:
            return f"the coordinates of rank {rank} are not in the order of the axes"
        if answer["ranks"][rank] != rank:
            return f"at {place} there is rank {answer['ranks'][rank]}, not {rank}"
    beside = [{**own, name: c} for name, size in axes.items() for c in range(size)]
    for at, got in zip(beside, answer["beside"].tolist(), strict=True):
        want = places.index(tuple(at.values()))
        if got != want:
            return f"at {at}, of which one axis is named, there is rank {got}, not {want}"
    if not answer["refused"].all():
        what = ["an axis that does not exist", *(f"{n}={c}" for n in axes for c in (-1, axes[n]))]
        return f"{what[int(np.argmin(answer['refused']))]}: a ValueError is due"
    return None


def meshes(rng) -> Iterator[Question]:
    for axes in several_axes(rng):
        if (N := prod(axes.values())) <= 12:
            yield one_mesh(axes, N)
    yield one_mesh({"dp": 2, "pp": 2, "tp": 3}, 12)
    for axes, N in (({"dp": 2, "tp": 2}, 3), ({"dp": 4, "tp": 0}, 2), ({"dp": 1, "tp": 1}, 2)):
        yield no_mesh(axes, N)


def no_mesh(axes: dict[str, int], N: int) -> Question:
    def judge(answer: Answer) -> str | None:
        if all("refused" in found for found in by_rank(answer, N)):
            return None
        return "the sizes do not multiply to the number of ranks: a ValueError is due"

    return Question(f"{shown(axes)} of {N} ranks", "mesh", {"N": N, "axes": axes}, judge)


def one_mesh(axes: dict[str, int], N: int) -> Question:
    places = list(product(*(range(size) for size in axes.values())))

    def judge(answer: Answer) -> str | None:
        for r, found in enumerate(by_rank(answer, N)):
            if "refused" in found:
                return f"{shown(axes)} makes {N} ranks, and is refused"
            if (got := tuple(found["coordinates"].tolist())) != places[r]:
                return f"rank {r} is at {got}, not {places[r]}"
            for i, name in enumerate(axes):
                line = [(*places[r][:i], c, *places[r][i + 1 :]) for c in range(axes[name])]
                want = [places.index(place) for place in line]
                got = found[f"members of {name}"].tolist()
                if got != want:
                    why = ": in another order" if sorted(got) == want else ""
                    return f"on rank {r} the ranks of {name} are {got}, not {want}{why}"
                if found[f"number in {name}"] != places[r][i]:
                    return f"rank {r} is number {found[f'number in {name}']} in {name}"
        return None

    return Question(f"{shown(axes)}", "mesh", {"N": N, "axes": axes}, judge)


# Models, and which part of them a rank has.


def drawn(rng, depth: int, tied: bool, dropout: float = 0.0) -> tuple[dict, nn.Transformer]:
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
    return config, random_weights(model, int(rng.integers(1 << 30)))


def part(name: str, whole: np.ndarray, N: int, r: int) -> np.ndarray:
    """Return rank r's part of a Transformer's array, split over N ranks; vocabularies are padded.

    By the layout of `drawn`: as many heads as columns, [3, H, 1] in QKV.
    """
    axis = {"attention.output.weight": 0, "contract.weight": 0, "token.weight": 0}
    axis |= {"qkv.bias": 0, "expand.bias": 0}
    axis |= {"qkv.weight": 1, "expand.weight": 1, "linear.weight": 1}
    along = next((a for end, a in axis.items() if name.endswith(end)), None)
    if along is None:
        return whole
    if ".qkv." in name:
        blocks = np.split(whole, 3, axis=along)
        return np.concatenate([np.array_split(b, N, axis=along)[r] for b in blocks], axis=along)
    room = [(0, 0)] * whole.ndim
    room[along] = (0, -whole.shape[along] % N)
    return np.split(np.pad(whole, room), N, axis=along)[r]


def stages_of(model: nn.Transformer, shape: tuple, options: dict) -> list[list[str]]:
    """Return the names of the parameters that each rank of the axis pp holds."""
    placement = placed(shape[1], options)
    found = holders(model, cut_of(len(model.layers), 1 + max(map(max, placement))))
    return [[n for n, at in found.items() if set(at) & set(own)] for own in placement]


def placed(pp: int, options: dict) -> list[list[int]]:
    """Return the virtual stages that each rank of the axis pp holds."""
    schedule, chunks = options.get("schedule", "1f1b"), options.get("chunks", 1)
    return programs(schedule, pp, 4 * pp, chunks).placement


def spread(whole: dict, model: nn.Transformer, shape: tuple, options: dict) -> list[dict]:
    """Return every rank's parts of the arrays of a model."""
    names = stages_of(model, shape, options)
    return [
        {name: part(name, whole[name], shape[2], t) for name in names[p]}
        for _, p, t in product(*map(range, shape))
    ]


def prefixed(parts: list[dict]) -> list[dict]:
    return [{f"d {name}": x for name, x in mine.items()} for mine in parts]


def given_parts(model, config: dict, shape: tuple, options: dict) -> dict:
    """Return what a probe needs to make each rank's part of a model."""
    pp, chunks = shape[1], options.get("chunks", 1)
    placement = placed(pp, options)
    cut = cut_of(len(model.layers), pp * chunks)
    found = {
        n: [r for r, own in enumerate(placement) if set(own) & set(at)]
        for n, at in holders(model, cut).items()
    }
    return {
        "shape": shape,
        "config": config,
        "state": model.state(),
        "layers": [[i for k in own for i in cut[k]] for own in placement],
        "shared": {name: ranks for name, ranks in found.items() if len(ranks) > 1},
        "split_sequence": options.get("split_sequence", False),
    }


def on(shape: tuple) -> str:
    return " x ".join(map(str, shape)) + " (dp x pp x tp)"


# 6.3: parameters that two stages share.


def tied(rng) -> Iterator[Question]:
    for stages, is_tied in ((1, True), (2, True), (3, False), (4, True)):
        yield held(rng, stages, is_tied)
    for N, options, m, batches in (
        (1, {}, 2, 1),
        (2, {}, 3, 1),
        (2, {}, 2, 2),
        (3, {"schedule": "gpipe"}, 2, 2),
        (2, {"schedule": "zb_v"}, 3, 1),
        (2, {"schedule": "interleaved", "chunks": 2}, 2, 1),
    ):
        yield through_a_pipeline(rng, N, options, m, batches)


def held(rng, stages: int, is_tied: bool) -> Question:
    config, model = drawn(rng, int(rng.integers(3, 5)), is_tied)
    ends = np.sort(rng.permutation(np.arange(1, len(model.layers)))[: stages - 1])
    ends = [0, *map(int, ends), len(model.layers)]
    cut = list(pairwise(ends))
    place = {"embedding": 0, "head": len(model.layers) - 1}
    place |= {f"blocks.{i}": 1 + i for i in range(len(model.layers) - 2)}
    want = {}
    for name in model.named_parameters():
        layers = [at for start, at in place.items() if name.startswith(f"{start}.")]
        layers += [len(model.layers) - 1] if is_tied and "token" in name else []
        want[name] = sorted({k for k, (a, b) in enumerate(cut) for i in layers if a <= i < b})

    def judge(answer: Answer) -> str | None:
        if (got := answer["names"].tolist()) != list(want):
            return f"the names are {got[:3]} ..., {len(got)}; not {list(want)[:3]}, {len(want)}"
        for name, stages in want.items():
            if answer[name].tolist() != stages:
                return f"{name} is held by the stages {answer[name].tolist()}, not {stages}"
        return None

    about = f"holders, {'tied' if is_tied else 'untied'}, layers {cut}"
    return Question(about, "held", {"config": config, "cut": cut}, judge)


def through_a_pipeline(rng, N: int, options: dict, m: int, batches: int) -> Question:
    config, model = drawn(rng, 2 if N * options.get("chunks", 1) < 4 else 3, True)
    B, T = int(rng.integers(1, 4)), int(rng.integers(2, 7))
    tokens, targets = rng.integers(0, config["vocab"], (2, B, T))
    nn.cross_entropy(model(tokens), targets).backward()
    d = {name: batches * p.grad for name, p in model.named_parameters().items()}
    want = prefixed(spread(d, model, (1, N, 1), options))
    name = "d embedding.token.weight"
    copies = sum(name in mine for mine in want)
    due = batches * 2 * (copies - 1) * F8 * d["embedding.token.weight"].size

    def judge(answer: Answer) -> str | None:
        found = by_rank(answer, N)
        moved = sum(int(mine.pop("bytes")) for mine in found)
        said = None
        if moved != due:
            said = f"{moved} bytes are sent for the tied embedding, not {due} = 2(k - 1) S, k ranks"
        if copies > 1 and batches > 1 and name in found[0]:
            again = d["embedding.token.weight"]
            if np.abs(found[0][name]).sum() > np.abs(again).sum() * (1 + 1e-9):
                said = "what the first batch has left may have been summed again by the second"
        return joined(ranks_differ(found, want), said)

    given = {
        "N": N,
        "config": config,
        "state": model.state(),
        "tokens": tokens,
        "targets": targets,
        "m": m,
        "batches": batches,
        "options": options,
    }
    about = f"tied, {counted(N, 'stage')}, {options.get('schedule', '1f1b')}, "
    about += f"{counted(batches, 'batch')} of {B}"
    return Question(about, "pipeline", given, judge)


# 6.4, 6.5: the gradient of the whole batch.

SHAPES = [
    ((1, 1, 1), {"micro_batches": 1}),
    ((3, 1, 1), {"micro_batches": 2, "schedule": "gpipe"}),
    ((2, 2, 1), {"micro_batches": 3}),
    ((1, 1, 2), {"micro_batches": 2, "split_sequence": True}),
    ((2, 1, 2), {"micro_batches": 1}),
    ((2, 2, 2), {"micro_batches": 2, "split_sequence": True, "schedule": "zb_h1"}),
]


def sums(rng) -> Iterator[Question]:
    for shape, options in SHAPES:
        config, model = drawn(rng, 2, True)
        names, empty = stages_of(model, shape, options), int(rng.integers(shape[0])) + 1
        split, grads = options.get("split_sequence"), {}
        for d, p, t in product(*map(range, shape)):
            grads[d, p, t] = {}
            for name in names[p]:
                like = part(name, model.named_parameters()[name].data, shape[2], t)
                alike = t and not split and is_repeated(name)
                drawn_one = grads[d, p, 0][name] if alike else rng.standard_normal(like.shape)
                grads[d, p, t][name] = None if d == empty else drawn_one
        want = []
        for _, p, t in grads:
            together = {}
            for name in names[p]:
                ts = range(shape[2]) if split and is_repeated(name) else [t]
                terms = [grads[d, p, u][name] for d in range(shape[0]) for u in ts]
                together[name] = sum(g for g in terms if g is not None)
            want.append(together)
        given = given_parts(model, config, shape, options) | {"grads": list(grads.values())}
        about = f"{on(shape)}, {flags(options)}" + f", rank {empty} of dp has nothing" * (
            empty < shape[0]
        )
        judge = judge_sums(prefixed(want), shape, bool(split), list(grads.values()))
        yield Question(about, "sums", given, judge)


def flags(options: dict) -> str:
    return f"{options.get('schedule', '1f1b')}" + (
        ", sequence split" if options.get("split_sequence") else ""
    )


def is_repeated(name: str) -> bool:
    """Return whether every rank of tp holds all of this parameter of a Transformer."""
    whole = np.zeros((6, 6) if name.endswith("weight") else 6)
    return part(name, whole, 2, 0) is whole


def judge_sums(want: list[dict], shape: tuple, split: bool, grads: list[dict]):
    dp, _, tp = shape
    causes = {1 / dp: "an average over dp; the loss divides by the whole batch already"}
    causes |= {tp: "every rank of tp has all of this already, and tp adds it up"}
    size = sum(x.size for mine in want for x in mine.values())
    repeated = sum(x.size for mine in want for n, x in mine.items() if is_repeated(n[2:]))
    due = {
        "dp": 2 * (dp - 1) * F8 * size // dp,
        "pp": 0,
        "tp": 2 * (tp - 1) * F8 * repeated // tp if split else 0,
    }

    def judge(answer: Answer) -> str | None:
        found, said = by_rank(answer, len(want)), None
        for axis, bytes_due in due.items():
            moved = sum(int(mine.pop(f"bytes {axis}")) for mine in found)
            if moved != bytes_due:
                said = f"{moved} bytes are sent on {axis} by all ranks together, not {bytes_due}"
        wrong = ranks_differ(found, want, causes)
        for r, mine in enumerate(found) if wrong else ():
            for name, own in grads[r].items():
                if own is None or np.array_equal(own, want[r][f"d {name}"]):
                    continue
                if np.array_equal(mine.get(f"d {name}"), own):
                    return joined(f"{name} on rank {r} has not been summed over any rank", said)
        return joined(wrong, said)

    return judge


def deals(rng) -> Iterator[Question]:
    for shape, m in (((1, 1, 1), 2), ((2, 1, 1), 3), ((1, 2, 1), 1), ((3, 1, 2), 2)):
        B, T = int(rng.integers(2, 8)), int(rng.integers(1, 4))
        tokens, targets = rng.integers(0, 6, (2, B, T))
        examples = rng.permutation(40)[:B] if m > 1 else None
        losses = [0.0 if p < shape[1] - 1 else rng.standard_normal() for p in range(shape[1])]
        losses = [[loss * (1 + d) for loss in losses] for d in range(shape[0])]  # alike on tp
        every = [losses[d][p] for d, p, _ in product(*map(range, shape))]
        given = {"shape": shape, "m": m, "losses": every, "tokens": tokens, "targets": targets}
        given["examples"] = examples
        want = []
        for d, _, _ in product(*map(range, shape)):
            mine = np.array_split(np.arange(B), shape[0])[d]
            seen = {"loss": sum(map(sum, losses)), "count": m}
            for i, rows in enumerate(np.array_split(mine, m)):
                seen[f"tokens of {i}"], seen[f"targets of {i}"] = tokens[rows], targets[rows]
                seen[f"examples of {i}"] = rows if examples is None else examples[rows]
                seen[f"total of {i}"], seen[f"seed and step of {i}"] = targets.size, [7, 3]
            want.append({k: np.asarray(v) for k, v in seen.items()})

        def judge(answer, want=want):
            return ranks_differ(by_rank(answer, len(want)), want)

        about = f"what the pipeline is given, {on(shape)}, {counted(B, 'example')}, "
        about += counted(m, "micro-batch")
        yield Question(about, "dealt", given | {"old": False}, judge)

    def judge(answer):
        if all(found["refused"] for found in by_rank(answer, 2)):
            return None
        return "a batch on top of a gradient that is there is to be a ValueError"

    given = {"shape": (2, 1, 1), "m": 1, "losses": [1.0, 2.0], "old": True, "examples": None}
    given |= {"tokens": tokens, "targets": targets}
    yield Question("a gradient is there", "dealt", given, judge)


def backward(rng) -> Iterator[Question]:
    yield from deals(rng)
    for shape, options in SHAPES:
        config, model = drawn(rng, 2, True, dropout=0.3)
        B, T = int(rng.integers(1, 7)), 2 * int(rng.integers(1, 4))
        tokens, targets = rng.integers(0, config["vocab"], (2, B, T))
        seed, step, examples = int(rng.integers(99)), int(rng.integers(9)), rng.permutation(50)[:B]
        loss = nn.cross_entropy(model(tokens, Randomness(seed, step, examples)), targets)
        loss.backward()
        d = {name: p.grad for name, p in model.named_parameters().items()}
        want = prefixed(spread(d, model, shape, options))
        given = {"shape": shape, "config": config, "state": model.state(), "options": options}
        given |= {"tokens": tokens, "targets": targets, "seed": seed, "step": step}
        given["examples"] = examples
        about = f"{on(shape)}, {counted(B, 'example')}, {flags(options)}"
        yield Question(about, "backward", given, judge_backward(want, shape, loss.item()))


def judge_backward(want: list[dict], shape: tuple, loss: float):
    dp, pp, tp = shape
    n = prod(shape)
    most = 2 * (dp - 1) * F8 * sum(x.size for mine in want for x in mine.values()) // dp
    most += 2 * (dp - 1) * F8 * pp * tp  # the loss
    ratios = {dp: "divide by the targets of the whole batch, not of a share"}

    def judge(answer: Answer) -> str | None:
        found, said = by_rank(answer, n), None
        moved = sum(int(mine.pop("bytes dp")) for mine in found)
        if moved > most:
            said = f"{moved} bytes are sent on dp, not {most}: gradients once, and the loss"
        for r, mine in enumerate(found):
            got = float(mine.pop("loss"))
            if abs(got - loss) > 1e-9 * abs(loss):
                why = ": the loss is on the last stage only" if got == 0 else ""
                why = why or (": a share's only" if abs(got) < abs(loss) else "")
                said = f"the loss on rank {r} is {got:.9g}, not {loss:.9g}{why}"
            if not mine.pop("refused"):
                said = "a second batch on top of summed gradients is to be a ValueError"
        return joined(ranks_differ(found, want, ratios), said)

    return judge


# 6.6: one norm.


def clipping(rng) -> Iterator[Question]:
    for factor in (0.3, 2.0):
        yield clipped(rng, factor)
    yield clipped(rng, 0.5, missing=True)
    for shape, options, is_tied, factor in (
        ((1, 1, 1), {}, True, 0.5),
        ((2, 1, 1), {}, True, 0.4),
        ((1, 2, 1), {}, True, 0.7),
        ((1, 1, 2), {}, True, 0.3),
        ((1, 3, 2), {}, True, 1.5),
        ((2, 2, 2), {}, False, 0.6),
    ):
        yield clipped_on_mesh(rng, shape, options, is_tied, factor)


def clipped(rng, factor: float, missing: bool = False) -> Question:
    sizes = [int(n) for n in rng.integers(1, 6, 3)]
    model = nn.MLP(sizes, dtype="float64")
    grads = {n: rng.standard_normal(p.shape) for n, p in model.named_parameters().items()}
    if missing:
        grads["layers.0.bias"] = None
    norm = sqrt(sum(float((g * g).sum()) for g in grads.values() if g is not None))
    scale = min(1.0, factor)
    want = {f"d {n}": scale * g for n, g in grads.items() if g is not None}
    want["norm"] = np.array(norm)

    def judge(answer: Answer) -> str | None:
        found = dict(answer)
        if missing and not np.any(found.get("d layers.0.bias", 0)):
            found.pop("d layers.0.bias", None)  # None or zeros
        raised = {factor: "gradients shorter than max_norm are not made longer"}
        return ranks_differ([found], [want], raised if factor > 1 else None)

    given = {"sizes": sizes, "grads": grads, "max_norm": factor * norm}
    about = f"one device, max_norm {factor} times the norm" + (", one gradient None" * missing)
    return Question(about, "clip", given, judge)


def clipped_on_mesh(rng, shape: tuple, options: dict, is_tied: bool, factor: float) -> Question:
    config, model = drawn(rng, 2, is_tied)
    d = {n: rng.standard_normal(p.shape) for n, p in model.named_parameters().items()}
    squares = {n: float((g * g).sum()) for n, g in d.items()}
    norm, tp = sqrt(sum(squares.values())), shape[2]
    parts = spread(d, model, shape, options)
    scaled = [{n: min(1, factor) * x for n, x in mine.items()} for mine in parts]
    want = [{"norm": np.array(norm), **mine} for mine in prefixed(scaled)]
    copies = {n: sum(n in own for own in stages_of(model, shape, options)) for n in d}
    times = {n: copies[n] * (tp if is_repeated(n) else 1) for n, g in d.items()}
    wrong = {
        "what is held more than once counts as often": sum(
            times[n] * s for n, s in squares.items()
        ),
        "a tied parameter counts once per stage": sum(copies[n] * s for n, s in squares.items()),
        "what every rank of tp has alike counts on each": sum(
            times[n] / copies[n] * s for n, s in squares.items()
        ),
        "replicas on dp are added up": shape[0] * sum(squares.values()),
    }

    def judge(answer: Answer) -> str | None:
        found, said = by_rank(answer, prod(shape)), None
        for r, mine in enumerate(found):
            if tp > 1 and not mine["refused"]:
                said = "without sum_squares, parts of larger parameters are to be a ValueError"
            mine.pop("refused")
            got, own = float(mine["norm"]), sum(float((x * x).sum()) for x in parts[r].values())
            for what, total in {**wrong, "a rank's own part alone": own}.items():
                if abs(got - norm) > 1e-9 * norm and abs(got - sqrt(total)) < 1e-9 * norm:
                    return f"the norm on rank {r} is {got:.9g}, not {norm:.9g}: {what}"
        return joined(ranks_differ(found, want), said)

    given = given_parts(model, config, shape, options)
    given |= {"parts": parts, "max_norm": factor * norm}
    about = f"{on(shape)}, {'tied' if is_tied else 'untied'}, max_norm {factor} times the norm"
    return Question(about, "clip_on_mesh", given, judge)


# 6.7: the whole state.


def wholes(rng) -> Iterator[Question]:
    for shape, options, is_tied in (
        ((1, 1, 1), {}, True),
        ((1, 2, 1), {}, True),
        ((1, 1, 3), {}, False),
        ((1, 2, 2), {"schedule": "interleaved", "chunks": 2}, True),
        ((2, 2, 2), {}, False),
    ):
        config, model = drawn(rng, 2, is_tied)
        state = model.state()
        d = {n: rng.standard_normal(x.shape) for n, x in state.items()}
        given = given_parts(model, config, shape, options)
        given["parts"] = spread(d, model, shape, options)
        about = f"{on(shape)}, {'tied' if is_tied else 'untied'}"
        yield Question(about, "whole", given, judge_whole(state, d, shape))


def judge_whole(state: dict, d: dict, shape: tuple):
    want = {f"state {n}": x for n, x in state.items()} | {f"whole {n}": x for n, x in d.items()}

    def judge(answer: Answer) -> str | None:
        found = by_rank(answer, prod(shape))
        for r, mine in enumerate(found):
            for order in ("order", "order of parts"):
                if (got := mine.pop(order).tolist()) != list(state):
                    missing = sorted(set(state) - set(got))
                    why = f"{missing[0]} is missing" if missing else "not the model's order"
                    return f"the names on rank {r}: {why}"
            for name, x in want.items():
                got = mine.get(name)
                if got is not None and got.shape == x.shape and not np.array_equal(got, x):
                    mixed = np.array_equal(np.sort(got, axis=None), np.sort(x, axis=None))
                    why = ": all its numbers are there, in other places" if mixed else ""
                    return f"{name} on rank {r} is another array{why}"
        return ranks_differ(found, [want] * len(found))

    return judge


QUESTIONS = {
    "6.1": coordinates,
    "6.2": meshes,
    "6.3": tied,
    "6.4": sums,
    "6.5": backward,
    "6.6": clipping,
    "6.7": wholes,
}
