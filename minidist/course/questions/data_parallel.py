"""What the data-parallel lab asks, and what the answers must be.

Gradients are compared with one device's, on the whole batch.
"""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from minidist import nn
from minidist.comm.collectives import split_ends, split_sizes
from minidist.course.question import Answer, Question, counted
from minidist.course.questions.arrays import differ, first
from minidist.nn.flat_parameters import flat_slices
from minidist.rng import generator

Questions = Iterator[Question]
Random = np.random.Generator


def problem(rng: Random, counts: list[int]) -> dict:
    """Draw an MLP and a batch of sum(counts) examples."""
    sizes = [int(n) for n in rng.integers(2, 6, int(rng.integers(3, 5)))]
    n = sum(counts)
    return {
        "sizes": sizes,
        "seed": int(rng.integers(1000)),
        "x": rng.standard_normal((n, sizes[0])),
        "y": rng.integers(0, sizes[-1], n),
        "counts": counts,
    }


def build(given: dict) -> nn.MLP:
    model = nn.MLP(given["sizes"], "gelu", seed=given["seed"], dtype="float64")
    return model.freeze(*given["frozen"]) if given.get("frozen") else model


def one_device(given: dict, rows: slice = slice(None)) -> dict[str, np.ndarray]:
    """Return the gradient on the whole batch, or what these rows contribute to it."""
    model, n = build(given), len(given["x"])
    nn.cross_entropy(model(given["x"][rows]), given["y"][rows], reduction_size=n).backward()
    return {name: p.grad for name, p in model.named_parameters().items() if p.requires_grad}


def on_rank(r: int, name: str, answer: Answer, want, *others) -> str | None:
    """Compare rank r's array, named "<name> <rank>" in the answer, with the expected one."""
    key = f"{name} {r}"
    return differ(name, {name: answer[key]} if key in answer else {}, want, *others)


def summed(given: dict, answer: Answer) -> str | None:
    """Compare every rank's gradients with one device's."""
    counts, want = given["counts"], one_device(given)
    N, ends = len(counts), np.cumsum([0, *counts])
    own = [one_device(given, slice(*two)) for two in pairwise(ends)]
    scale = max(np.abs(w).max(initial=0.0) for w in want.values())
    for r in range(N):
        for name, w in want.items():
            causes = {"it is the mean over ranks; the loss is divided by n already": w / N}
            causes |= {f"it is rank {k}'s part alone": own[k][name] for k in range(N)}
            causes |= {f"rank {k}'s part is missing": w - own[k][name] for k in range(N)}
            if wrong := on_rank(r, name, answer, w, causes if N > 1 else {}, scale):
                return f"rank {r}, the gradient of {wrong}"
    return None


def billed(answer: Answer, want: int, N: int, formula: str) -> str | None:
    """Compare the bytes that all ranks sent together with a closed form."""
    moved = [int(answer[f"bytes {r}"]) for r in range(N)]
    if sum(moved) != want:
        return f"all ranks together sent {sum(moved)} bytes, not {want} = {formula}"
    return None


def uneven(rng: Random, size: int) -> list[int]:
    """Draw how many examples each rank has: all different from the mean where that can be."""
    counts = rng.integers(0, 4, size)
    counts[int(rng.integers(size))] += 2
    return [int(n) for n in counts]


# 3.1


def dealing(rng: Random) -> Questions:
    for size in (1, 3, 4):
        examples = rng.permutation(int(rng.integers(5, 12)))
        yield cut(examples[: int(rng.integers(1, 3))] if size == 4 else examples, size)
    for batch, size, micro_batches in ((4, 1, 1), (5, 2, 1), (3, 2, 3), (50, 3, 2)):
        examples = int(rng.integers(10, 20))
        yield dealt(examples, batch, int(rng.integers(1000)), size, micro_batches)


def cut(examples: np.ndarray, size: int) -> Question:
    def judge(answer):
        parts = [answer[f"part {r}"] for r in range(size)]
        lengths, want = [len(part) for part in parts], split_sizes(len(examples), size)
        if lengths != want:
            return f"the parts have {lengths} examples, not {want}: they differ by at most one"
        if not np.array_equal(np.concatenate(parts), examples):
            return "the parts, one after the other, are not the examples: neighbours stay together"
        return None

    about = f"{counted(len(examples), 'example')} for {counted(size, 'rank')}"
    return Question(about, "parts", {"examples": examples, "size": size}, judge)


def dealt(examples: int, batch: int, seed: int, size: int, micro_batches: int) -> Question:
    """Ask for two epochs. The order is the one of the seed: `size` and micro-batches do not count.

    Which permutation it is, is told by (seed, epoch): rng.generator(seed, f"epoch {number}").
    """
    batches = -(-examples // batch)
    full = [generator(seed, f"epoch {e}").permutation(examples) for e in range(2)]

    def judge(answer):
        for e in range(2):
            lengths = [answer[f"lengths {e} {r}"] for r in range(size)]
            for r, found in enumerate(lengths):
                if found.shape != (batches, micro_batches):
                    return (
                        f"rank {r} has {list(found.shape)} batches and micro-batches, not "
                        f"{[batches, micro_batches]}: the last batch has what is left"
                    )
            hands = [list(answer[f"cards {e} {r}"]) for r in range(size)]
            everyone = sorted(card for hand in hands for card in hand)
            if everyone != list(range(examples)):
                twice = {c for c in everyone if everyone.count(c) > 1}
                never = set(range(examples)) - set(everyone)
                return f"epoch {e}: over all ranks {len(twice)} come twice, {len(never)} never"
            for b in range(batches):
                want = full[e][b * batch : (b + 1) * batch]
                dealt = [c for r in range(size) for c in take(hands[r], lengths[r], b)]
                if dealt != want.tolist():
                    return (
                        f"epoch {e}, batch {b}: the ranks have {list(map(int, dealt))}, not "
                        f"{want.tolist()}, one after the other"
                    )
                for r in range(size):
                    if int(answer[f"totals {e} {r}"][b]) != len(want):
                        total = int(answer[f"totals {e} {r}"][b])
                        return f"rank {r}, batch {b}: total {total}, not {len(want)}, of all ranks"
                    own = split_sizes(len(want), size)[r]
                    if lengths[r][b].tolist() != split_sizes(own, micro_batches):
                        return f"rank {r}, batch {b}: micro-batches of {lengths[r][b].tolist()}"
        return None

    given = {"examples": examples, "batch": batch, "seed": seed, "size": size}
    about = f"{examples} examples in batches of {batch}, {counted(size, 'rank')}, "
    about += counted(micro_batches, "micro-batch")
    return Question(about, "dealt", {**given, "micro_batches": micro_batches, "epochs": 2}, judge)


def take(hand: list, lengths: np.ndarray, b: int) -> list:
    """Return the cards of batch b."""
    start = int(lengths[:b].sum())
    return hand[start : start + int(lengths[b].sum())]


# 3.2


def naive(rng: Random) -> Questions:
    for counts in ([3], uneven(rng, 2), uneven(rng, 4), [2, 0, 1]):
        yield all_reduced(problem(rng, counts))
    yield all_reduced({**problem(rng, uneven(rng, 3)), "frozen": ["layers.0.weight"]})


def all_reduced(given: dict) -> Question:
    given = {"frozen": [], **given}
    N, model = len(given["counts"]), build(given)
    S = sum(p.data.nbytes for p in model.parameters() if p.requires_grad)

    def judge(answer):
        for name in given["frozen"]:
            if any(f"{name} {r}" in answer for r in range(N)):
                return f"{name} is frozen, and got a gradient"
        weights = np.concatenate([p.data.reshape(-1) for p in model.parameters()])
        return (
            summed(given, answer)
            or billed(answer, 2 * (N - 1) * S, N, "2 (N - 1) S")
            or first(on_rank(r, "weights", answer, weights) for r in range(N))
        )

    about = f"shards of {given['counts']} examples" + ", a frozen weight" * bool(given["frozen"])
    return Question(about, "all_reduced", given, judge)


# 3.3


def plans(rng: Random) -> Questions:
    for most in (3, 6, 12):
        sizes = [int(n) for n in rng.integers(1, most, int(rng.integers(4, 9)))]
        yield plan(sizes, 8 * int(rng.integers(2, 12)))
    sizes = [int(n) for n in rng.integers(1, 5, 6)]
    yield plan(sizes, 8 * sum(sizes))  # all in one
    yield plan(sizes, 1)  # each by itself
    yield plan([2, 20, 1, 1, 2], 32)  # one that is larger than the cap
    yield plan([0, 3, 0, 2], 16)
    yield plan([], 16)


def plan(sizes: list[int], cap: int) -> Question:
    nbytes, room, fewest = [8 * n for n in sizes], 0, 0
    for n in reversed(nbytes):
        if not fewest or n > room:
            fewest, room = fewest + 1, cap
        room -= n

    def judge(answer):
        if answer["changed"]:
            return "the list of parameters is another one afterwards: leave it as it is"
        found = [answer[f"bucket {b}"].tolist() for b in range(len(answer) - 1)]
        if any(-1 in bucket for bucket in found):
            return "a bucket has something in it that is no parameter of the list"
        if sorted(i for bucket in found for i in bucket) != list(range(len(sizes))):
            return f"{found} has not every parameter once"
        for b, bucket in enumerate(found):
            total = sum(nbytes[i] for i in bucket)
            if not bucket or (total > cap and len(bucket) > 1):
                return f"bucket {b}, {bucket}, holds {total} bytes, {cap} is the most"
            if bucket != sorted(bucket):
                return f"bucket {b} is {bucket}; inside a bucket parameters keep their own order"
        if [i for bucket in reversed(found) for i in bucket] != list(range(len(sizes))):
            return f"{found}: the last parameters come first, for backward is done with them first"
        if len(found) != fewest:
            return f"{len(found)} buckets, not {fewest}: fill each before you begin another"
        return None

    return Question(f"{nbytes} bytes, cap {cap}", "buckets", {"sizes": sizes, "cap": cap}, judge)


# 3.4


def overlap(rng: Random) -> Questions:
    for count in (1, 4, 7):
        order = list(range(count))
        ends = sorted({0, count, *(int(e) for e in rng.integers(0, count, 3))})
        buckets = [order[a:b] for a, b in pairwise(ends)][::-1]
        yield launches(buckets, order[::-1])
        yield launches(buckets, [int(i) for i in rng.permutation(count)])
    buckets = [[4, 5], [2, 3], [0, 1]]
    yield launches(buckets, [0, 1, 4, 2, 5, 3])  # the last bucket is full first
    yield launches(buckets, [5, 4, 0, 1])  # parameters 2 and 3 get no gradient
    yield launches(buckets, [])
    for counts, micro_batches in (([3], 1), (uneven(rng, 3), 2), ([2, 0], 1)):
        given = problem(rng, counts)
        count = 2 * (len(given["sizes"]) - 1)
        ends = sorted({0, count, int(rng.integers(1, count))})
        buckets = [list(range(a, b)) for a, b in pairwise(ends)][::-1]
        moved = micro_batches > 1
        given |= {"micro_batches": micro_batches, "moved": moved, "buckets": buckets}
        yield overlapped(given)


def launches(buckets: list[list[int]], arrivals: list[int]) -> Question:
    def judge(answer):
        if answer["before the last backward"].size:
            return "a bucket was launched while `missing` is None: only the last backward reduces"
        here, everything = set(), list(range(len(buckets)))
        for k, i in enumerate(arrivals):
            here.add(i)
            due = 0
            while due < len(buckets) and here.issuperset(buckets[due]):
                due += 1
            got = answer[f"after {k}"].tolist()
            if more := [b for b in got if b not in everything]:
                return f"bucket {more[0]} is launched, and there are {everything} only"
            if got != everything[:due]:
                why = "a gradient of it is still missing" if len(got) > due else "it is its turn"
                if len(got) > due and here.issuperset(buckets[got[-1]]):
                    why = "every rank launches bucket 0 first, then 1, ..."
                return (
                    f"after the gradients {sorted(here)} the buckets {got} are launched, "
                    f"not {everything[:due]}: {why}"
                )
        got = answer["at the end"].tolist()
        if got != everything:
            return f"at the end the buckets {got} were launched, not each of {everything} once"
        return None

    about = f"buckets {buckets}, gradients come as {arrivals}"
    return Question(about, "launches", {"buckets": buckets, "arrivals": arrivals}, judge)


def overlapped(given: dict) -> Question:
    N, model = len(given["counts"]), build(given)
    parameters = model.parameters()
    S = sum(p.data.nbytes for p in parameters)
    pieces = sum(len(flat_slices([parameters[i] for i in b])) for b in given["buckets"])

    def judge(answer):
        if wrong := summed(given, answer) or billed(answer, 2 * (N - 1) * S, N, "2 (N - 1) S"):
            return wrong
        for r in range(N):
            got = int(answer[f"reductions {r}"])
            if got != pieces:
                return (
                    f"rank {r} called all_reduce {got} times, not {pieces}: once for each piece "
                    "of a flat vector"
                )
        return None

    about = f"shards of {given['counts']} examples in "
    about += f"{counted(given['micro_batches'], 'micro-batch')}, buckets {given['buckets']}"
    about += ", gradients outside of the flat vector" * given["moved"]
    return Question(about, "overlapped", given, judge)


# 3.5


def to_shards(rng: Random) -> Questions:
    for stage in (1, 2):
        for counts, micro_batches in (([2], 1), (uneven(rng, 2), 2), ([1, 3, 0], 3)):
            given = {**problem(rng, counts), "frozen": [], "shards": len(counts)}
            yield reduced({**given, "stage": stage, "micro_batches": micro_batches})
        given = {**problem(rng, [2, 0, 1, 1]), "frozen": ["layers.1.weight"], "shards": 2}
        yield reduced({**given, "stage": stage, "micro_batches": 2})


def reduced(given: dict) -> Question:
    N, shards = len(given["counts"]), given["shards"]
    stage, M = given["stage"], given["micro_batches"]
    flats = [layer.flat for layer in build(given).layers]
    names = [[p.name for p in flat.parameters] for flat in flats]

    def judge(answer):
        want = one_device(given)
        scale = max(np.abs(w).max(initial=0.0) for w in want.values())
        for k, layer in enumerate(names):
            flat = np.concatenate([want[name].reshape(-1) for name in layer])
            ends = split_ends(len(flat), shards)
            for r in range(N):
                own = flat[slice(*ends[r % shards : r % shards + 2])]
                causes = {"it is the mean; the loss is divided by n already": own / N}
                causes["it is the whole gradient, not this rank's part"] = flat
                if wrong := on_rank(r, f"layer {k}", answer, own, causes if N > 1 else {}, scale):
                    return f"rank {r}, the gradient of its shard of {wrong}"
        for r in range(N):
            if answer[f"still whole {r}"]:
                return f"rank {r} still has {answer[f'still whole {r}']} whole gradients (p.grad)"
        P, times = 8 * sum(flat.size for flat in flats), {1: 1, 2: M}[stage]
        formula = "(N - 1) P" if stage == 1 else "M (N - 1) P"
        total = N // shards * times * (shards - 1) * P
        return billed(answer, total, N, f"{formula} in reduce_scatter")

    about = f"stage {stage}, shards of {given['counts']} examples, {counted(M, 'micro-batch')}"
    about += f", {shards} shards, a frozen weight" * bool(given["frozen"])
    return Question(about, "reduced_to_shards", given, judge)


# 3.6


def updates(rng: Random) -> Questions:
    for stage, size in ((1, 1), (1, 3), (2, 2), (3, 4)):
        yield updated(rng, stage, size)


def updated(rng: Random, stage: int, size: int) -> Question:
    drawn = problem(rng, [1])
    given = {
        "sizes": drawn["sizes"],
        "seed": drawn["seed"],
        "stage": stage,
        "size": size,
        "lr": float(rng.uniform(0.05, 0.2)),
        "momentum": float(rng.uniform(0.5, 0.9)),
    }
    flats = [layer.flat for layer in build(given).layers]
    steps = [[rng.standard_normal(flat.size) for flat in flats] for _ in range(2)]
    norms = [float(np.sqrt(sum((g**2).sum() for g in step))) for step in steps]
    clip = min(norms) * float(rng.uniform(0.5, 0.8))
    given |= {"steps": steps, "clip": clip}

    def judge(answer):
        for r in range(size):
            if not answer[f"refused {r}"]:
                return f"rank {r}: a step before any gradient was reduced is a ValueError"
            if wrong := on_rank(r, "norms", answer, norms):
                return f"rank {r}, the gradient's length over all ranks: {wrong}"
        for k, flat in enumerate(flats):
            w, m = flat.vector.copy(), 0
            for step, norm in zip(steps, norms, strict=True):
                m = given["momentum"] * m + step[k] * clip / norm
                w = w - given["lr"] * m
            ends = split_ends(flat.size, size)
            for r in range(size):
                own = flat.vector.copy()
                own[slice(*ends[r : r + 2])] = w[slice(*ends[r : r + 2])]
                causes = {"the other ranks' parts are from before": own, "unchanged": flat.vector}
                got = [answer[f"{p.name} {r}"].reshape(-1) for p in flat.parameters]
                if wrong := differ("it", {"it": np.concatenate(got)}, w, causes):
                    return f"rank {r}, the flat vector of layer {k}: {wrong}"
        for r in range(size):
            if answer[f"left {r}"]:
                return f"rank {r} keeps the gradients of {answer[f'left {r}']} shards for later"
        P = 8 * sum(flat.size for flat in flats)
        want = (size - 1) * P * (len(steps) if stage < 3 else 0)
        formula = "(N - 1) P per step" if stage < 3 else "none: weights are gathered where used"
        return billed(answer, want, size, f"{formula}, in all_gather")

    about = f"stage {stage}, {counted(size, 'rank')}, two steps, clipped"
    return Question(about, "updated", given, judge)


# 3.7


def just_in_time(rng: Random) -> Questions:
    for size in (1, 2, int(rng.integers(3, 5))):
        yield gathered(rng, size, jump=False)
    yield gathered(rng, 2, jump=True)


def gathered(rng: Random, size: int, jump: bool) -> Question:
    drawn = problem(rng, [2])
    given = {name: drawn[name] for name in ("sizes", "seed", "x")} | {"size": size}
    given["sizes"] = [*given["sizes"], 3][:4] if jump else given["sizes"]
    model = build(given)
    flats, L = [layer.flat for layer in model.layers], len(model.layers)
    order = [[k, k - 1] for k in reversed(range(L))]  # as backward does
    again = list(range(L))
    if jump:  # 1 is coming when 0, whose place layer 2 has, is needed
        order, again = [[2, 1], [0, 1], [1, 2], [2, 3]], [2, 1, 0, 1, 2]
    given["order"] = order

    def judge(answer):
        P, sizes = 8 * sum(f.size for f in flats), [8 * f.size for f in flats]
        later = sum(sizes[k] for k in again)
        for r in range(size):
            if wrong := on_rank(r, "output", answer, model(given["x"]).data):
                return f"rank {r}, forward: {wrong}"
            for k, (layer, then) in enumerate(order):
                causes = {
                    f"layer {j}'s weights are in its place": flats[j].vector[: flats[layer].size]
                    for j in range(L)
                    if j != layer
                }
                got = {"they": answer[f"weights {k} {r}"]}
                if wrong := differ("they", got, flats[layer].vector, causes):
                    return f"rank {r}, after need({layer}, then={then}): {wrong}"
                coming = int(answer[f"coming {k} {r}"])
                due = then if 0 <= then < L else -1
                if coming != due:
                    named = ["no layer" if n < 0 else f"layer {n}" for n in (coming, due)]
                    said = f"{named[0]} is coming, not {named[1]}"
                    return f"rank {r}, after need({layer}, then={then}): {said}"
        moved = [int(answer[f"forward bytes {r}"]) for r in range(size)]
        if sum(moved) != (size - 1) * P:
            return (
                f"forward: {sum(moved)} bytes, not {(size - 1) * P} = (N - 1) P: each layer is "
                "gathered once, also where it came early"
            )
        return billed(answer, (size - 1) * (P + later), size, "(N - 1) bytes of what was gathered")

    about = f"{counted(size, 'rank')}, {L} layers, then need {order}"
    return Question(about, "gathered", given, judge)


QUESTIONS = {
    "3.1": dealing,
    "3.2": naive,
    "3.3": plans,
    "3.4": overlap,
    "3.5": to_shards,
    "3.6": updates,
    "3.7": just_in_time,
}
