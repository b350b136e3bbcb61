"""What the data-parallel lab asks. The right answer is what the package itself answers.

Only a plan of buckets is judged by its own rules.
"""

from functools import partial
from itertools import pairwise

import numpy as np

from minidist.course.probes import data_parallel as probes
from minidist.course.question import Answer, Question, Questions, Random
from minidist.course.questions.arrays import ask
from minidist.errors import plural


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


def uneven(rng: Random, size: int) -> list[int]:
    """Draw how many examples each rank has: all different from the mean where that can be."""
    counts = rng.integers(0, 4, size)
    counts[int(rng.integers(size))] += 2
    return [int(n) for n in counts]


# 3.1


def dealing(rng: Random) -> Questions:
    for size in (1, 3, 4):
        examples = rng.permutation(int(rng.integers(5, 12)))
        if size == 4:
            examples = examples[: int(rng.integers(1, 3))]
        about = f"{plural(len(examples), 'example')} for {plural(size, 'rank')}"
        yield ask(about, probes.parts, examples=examples, size=size)
    for batch, size, micro_batches in ((4, 1, 1), (5, 2, 1), (3, 2, 3), (50, 3, 2)):
        n, seed = int(rng.integers(10, 20)), int(rng.integers(1000))
        about = f"{n} examples in batches of {batch}, {plural(size, 'rank')}, "
        about += plural(micro_batches, "micro-batch")
        given = {"examples": n, "batch": batch, "seed": seed, "size": size}
        yield ask(about, probes.dealt, **given, micro_batches=micro_batches, epochs=2)


# 3.2


def naive(rng: Random) -> Questions:
    for counts in ([3], uneven(rng, 2), uneven(rng, 4), [2, 0, 1]):
        about = f"shards of {counts} examples"
        yield ask(about, probes.all_reduced, **problem(rng, counts), frozen=[])
    counts = uneven(rng, 3)
    about = f"shards of {counts} examples, a frozen weight"
    yield ask(about, probes.all_reduced, **problem(rng, counts), frozen=["layers.0.weight"])


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
    nbytes = [8 * n for n in sizes]
    judge = partial(fewest_buckets, nbytes=nbytes, cap=cap)
    return ask(f"{nbytes} bytes, cap {cap}", probes.buckets, judge, sizes=sizes, cap=cap)


def fewest_buckets(answer: Answer, want: Answer, nbytes: list[int], cap: int) -> str | None:
    """Judge a plan: the last parameters first, and as few buckets as the package makes."""
    if answer["changed"]:
        return "the list of parameters is another one afterwards: leave it as it is"
    found = [answer[f"bucket {b}"].tolist() for b in range(len(answer) - 1)]
    if any(-1 in bucket for bucket in found):
        return "a bucket has something in it that is no parameter of the list"
    if sorted(i for bucket in found for i in bucket) != list(range(len(nbytes))):
        return f"{found} has not every parameter once"
    for b, bucket in enumerate(found):
        total = sum(nbytes[i] for i in bucket)
        if not bucket or (total > cap and len(bucket) > 1):
            return f"bucket {b}, {bucket}, holds {total} bytes, {cap} is the most"
        if bucket != sorted(bucket):
            return f"bucket {b} is {bucket}; inside a bucket parameters keep their own order"
    if [i for bucket in reversed(found) for i in bucket] != list(range(len(nbytes))):
        return f"{found}: the last parameters come first, for backward is done with them first"
    if len(found) != (fewest := len(want) - 1):
        return f"{len(found)} buckets, not {fewest}: fill each before you begin another"
    return None


# 3.4


def overlap(rng: Random) -> Questions:
    for count in (1, 4, 7):
        order = list(range(count))
        ends = sorted({0, count, *(int(e) for e in rng.integers(0, count, 3))})
        yield launches(runs(ends), order[::-1])
        yield launches(runs(ends), [int(i) for i in rng.permutation(count)])
    buckets = [[4, 5], [2, 3], [0, 1]]
    yield launches(buckets, [0, 1, 4, 2, 5, 3])  # the last bucket is full first
    yield launches(buckets, [5, 4, 0, 1])  # parameters 2 and 3 get no gradient
    yield launches(buckets, [])
    for counts, micro_batches in (([3], 1), (uneven(rng, 3), 2), ([2, 0], 1)):
        yield overlapped(rng, problem(rng, counts), micro_batches)


def runs(ends: list[int]) -> list[list[int]]:
    """Return buckets of neighbours, the last ones first."""
    return [list(range(a, b)) for a, b in pairwise(ends)][::-1]


def launches(buckets: list[list[int]], arrivals: list[int]) -> Question:
    about = f"buckets {buckets}, gradients come as {arrivals}"
    return ask(about, probes.launches, buckets=buckets, arrivals=arrivals)


def overlapped(rng: Random, given: dict, micro_batches: int) -> Question:
    count = 2 * (len(given["sizes"]) - 1)
    buckets = runs(sorted({0, count, int(rng.integers(1, count))}))
    moved = micro_batches > 1
    about = f"shards of {given['counts']} examples in "
    about += f"{plural(micro_batches, 'micro-batch')}, buckets {buckets}"
    about += ", gradients outside of the flat vector" if moved else ""
    given = given | {"micro_batches": micro_batches, "moved": moved, "buckets": buckets}
    return ask(about, probes.overlapped, **given)


# 3.5


def to_shards(rng: Random) -> Questions:
    for stage in (1, 2):
        for counts, micro_batches in (([2], 1), (uneven(rng, 2), 2), ([1, 3, 0], 3)):
            yield reduced(problem(rng, counts), stage, micro_batches, len(counts))
        yield reduced(problem(rng, [2, 0, 1, 1]), stage, 2, 2, ["layers.1.weight"])


def reduced(
    given: dict, stage: int, micro_batches: int, shards: int, frozen: list[str] | None = None
) -> Question:
    about = f"stage {stage}, shards of {given['counts']} examples, "
    about += f"{plural(micro_batches, 'micro-batch')}, {plural(shards, 'shard')}"
    about += ", a frozen weight" if frozen else ""
    given = given | {"frozen": frozen or [], "shards": shards}
    return ask(about, probes.reduced_to_shards, **given, stage=stage, micro_batches=micro_batches)


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
    layers = probes.build(drawn["sizes"], drawn["seed"]).layers
    steps = [[rng.standard_normal(layer.flat.size) for layer in layers] for _ in range(2)]
    norms = [float(np.sqrt(sum((g**2).sum() for g in step))) for step in steps]
    given |= {"steps": steps, "clip": min(norms) * float(rng.uniform(0.5, 0.8))}
    about = f"stage {stage}, {plural(size, 'rank')}, two steps, clipped"
    return ask(about, probes.updated, **given)


# 3.7


def just_in_time(rng: Random) -> Questions:
    for size in (1, 2, int(rng.integers(3, 5))):
        yield gathered(rng, size, jump=False)
    yield gathered(rng, 2, jump=True)


def gathered(rng: Random, size: int, jump: bool) -> Question:
    drawn = problem(rng, [2])
    sizes = drawn["sizes"]
    if jump:  # 1 is coming when 0, whose place layer 2 has, is needed
        sizes, order = [*sizes, 3][:4], [[2, 1], [0, 1], [1, 2], [2, 3]]
    else:  # as backward does
        order = [[k, k - 1] for k in reversed(range(len(sizes) - 1))]
    about = f"{plural(size, 'rank')}, {len(sizes) - 1} layers, then need {order}"
    given = {"seed": drawn["seed"], "x": drawn["x"], "size": size, "order": order}
    return ask(about, probes.gathered, sizes=sizes, **given)


QUESTIONS = {
    "3.1": dealing,
    "3.2": naive,
    "3.3": plans,
    "3.4": overlap,
    "3.5": to_shards,
    "3.6": updates,
    "3.7": just_in_time,
}
