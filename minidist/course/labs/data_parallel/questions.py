"""What the data-parallel lab asks. The right answer is what the package itself answers."""

from itertools import pairwise

import numpy as np

from minidist.course.labs.data_parallel import probes
from minidist.course.question import Question, Questions, Random, ask, ints
from minidist.errors import plural


def problem(rng: Random, counts: list[int]) -> dict:
    """Draw an MLP and a batch of sum(counts) examples."""
    sizes, n = ints(rng, 2, 6, int(rng.integers(3, 5))), sum(counts)
    x, y = rng.standard_normal((n, sizes[0])), rng.integers(0, sizes[-1], n)
    return {"sizes": sizes, "seed": int(rng.integers(1000)), "x": x, "y": y, "counts": counts}


def uneven(rng: Random, size: int) -> list[int]:
    """Draw how many examples each rank has: all different from the mean where that can be."""
    counts = ints(rng, 0, 4, size)
    counts[int(rng.integers(size))] += 2
    return counts


def dealing(rng: Random) -> Questions:
    for size in (1, 3, 4):
        examples = rng.permutation(int(rng.integers(5, 12)))
        if size == 4:
            examples = examples[: int(rng.integers(1, 3))]
        about = f"{plural(len(examples), 'example')} for {plural(size, 'rank')}"
        yield ask(about, probes.parts, group="a shard", examples=examples, size=size)
    for batch, size, micro_batches in ((4, 1, 1), (5, 2, 1), (3, 2, 3), (50, 3, 2)):
        n, seed = int(rng.integers(10, 20)), int(rng.integers(1000))
        about = f"{n} examples in batches of {batch}, {plural(size, 'rank')}, "
        about += plural(micro_batches, "micro-batch")
        given = {"examples": n, "batch": batch, "seed": seed, "size": size}
        given |= {"micro_batches": micro_batches, "epochs": 2}
        yield ask(about, probes.dealt, group="an epoch", **given)


def naive(rng: Random) -> Questions:
    for group, counts, frozen in (
        ("examples on every rank", [3], []),
        ("examples on every rank", [1, 3], []),
        ("uneven and empty shards", uneven(rng, 2), []),
        ("uneven and empty shards", uneven(rng, 4), []),
        ("uneven and empty shards", [2, 0, 1], []),
        ("frozen parameters", uneven(rng, 3), ["layers.0.weight"]),
    ):
        about = f"shards of {counts} examples{', a frozen weight' if frozen else ''}"
        yield ask(about, probes.all_reduced, group=group, **problem(rng, counts), frozen=frozen)


def plans(rng: Random) -> Questions:
    several = "several parameters fit"
    drawn = [ints(rng, 1, most, int(rng.integers(4, 9))) for most in (3, 6, 12)]
    asked = [(several, sizes, 8 * int(rng.integers(2, 12))) for sizes in drawn]
    all_in_one = ints(rng, 1, 5, 6)
    asked += [(several, all_in_one, 8 * sum(all_in_one))]
    for sizes, cap in ((all_in_one, 1), ([2, 20, 1, 1, 2], 32), ([0, 3, 0, 2], 16), ([], 16)):
        asked.append(("too large, empty, or none", sizes, cap))
    for group, sizes, cap in asked:
        about = f"{[8 * n for n in sizes]} bytes, cap {cap}"
        yield ask(about, probes.buckets, group=group, sizes=sizes, cap=cap)


# 3.4


def overlap(rng: Random) -> Questions:
    for count in (1, 4, 7):
        ends = sorted({0, count, *ints(rng, 0, count, 3)})
        yield launches("that come in their order", runs(ends), list(range(count))[::-1])
        yield launches("that come in another order", runs(ends), rng.permutation(count).tolist())
    buckets = [[4, 5], [2, 3], [0, 1]]
    yield launches("that come in another order", buckets, [0, 1, 4, 2, 5, 3])
    yield launches("that do not all come", buckets, [5, 4, 0, 1])
    yield launches("that do not all come", buckets, [])
    for counts, micro_batches in (([3], 1), (uneven(rng, 3), 2), ([2, 0], 1)):
        yield overlapped(rng, problem(rng, counts), micro_batches)


def runs(ends: list[int]) -> list[list[int]]:
    """Return buckets of neighbours, the last ones first."""
    return [list(range(a, b)) for a, b in pairwise(ends)][::-1]


def launches(how: str, buckets: list[list[int]], arrivals: list[int]) -> Question:
    about = f"buckets {buckets}, gradients come as {arrivals}"
    return ask(about, probes.launches, group=f"gradients {how}", buckets=buckets, arrivals=arrivals)


def overlapped(rng: Random, given: dict, micro_batches: int) -> Question:
    count = 2 * (len(given["sizes"]) - 1)
    buckets, moved = runs(sorted({0, count, int(rng.integers(1, count))})), micro_batches > 1
    about = f"shards of {given['counts']} examples in {plural(micro_batches, 'micro-batch')}, "
    about += f"buckets {buckets}{', gradients outside of the flat vector' if moved else ''}"
    given = given | {"micro_batches": micro_batches, "moved": moved, "buckets": buckets}
    return ask(about, probes.overlapped, group="the sums", **given)


# 3.5 to 3.7: ZeRO


def to_shards(rng: Random) -> Questions:
    for stage in (1, 2):
        for counts, micro_batches, shards, frozen in (
            ([2], 1, 1, []),
            (uneven(rng, 2), 2, 2, []),
            ([1, 3, 0], 3, 3, []),
            ([2, 0, 1, 1], 2, 2, ["layers.1.weight"]),
        ):
            about = f"stage {stage}, shards of {counts} examples, "
            about += f"{plural(micro_batches, 'micro-batch')}, {plural(shards, 'shard')}"
            about += ", a frozen weight" if frozen else ""
            group = "several copies, frozen weights" if frozen else f"stage {stage}"
            given = problem(rng, counts) | {"stage": stage, "micro_batches": micro_batches}
            given |= {"frozen": frozen, "shards": shards}
            yield ask(about, probes.reduced_to_shards, group=group, **given)


def updates(rng: Random) -> Questions:
    for stage, size in ((1, 1), (1, 3), (2, 2), (3, 4)):
        model = {"sizes": ints(rng, 2, 6, int(rng.integers(3, 5))), "seed": int(rng.integers(1000))}
        lengths = [layer.flat.size for layer in probes.build(**model).layers]
        steps = [[rng.standard_normal(n) for n in lengths] for _ in range(2)]
        norms = [float(np.sqrt(sum((g**2).sum() for g in step))) for step in steps]
        lr, momentum, shorter = rng.uniform([0.05, 0.5, 0.5], [0.2, 0.9, 0.8]).tolist()
        given = model | {"stage": stage, "size": size, "lr": lr, "momentum": momentum}
        given |= {"steps": steps, "clip": min(norms) * shorter}
        about = f"stage {stage}, {plural(size, 'rank')}, two steps, clipped"
        yield ask(about, probes.updated, group="stage 3" if stage == 3 else "stages 1, 2", **given)


def just_in_time(rng: Random) -> Questions:
    for size, jump in ((1, False), (2, False), (int(rng.integers(3, 5)), False), (2, True)):
        drawn = problem(rng, [2])
        sizes, group = drawn["sizes"], "as forward and backward need them"
        order = [[k, k - 1] for k in reversed(range(len(sizes) - 1))]
        if jump:  # 1 is coming when 0, whose place layer 2 has, is needed
            group, order = "another layer is coming", [[2, 1], [0, 1], [1, 2], [2, 3]]
            sizes = [*sizes, 3][:4]
        about = f"{plural(size, 'rank')}, {len(sizes) - 1} layers, then need {order}"
        given = {"seed": drawn["seed"], "x": drawn["x"], "size": size, "order": order}
        yield ask(about, probes.gathered, group=group, sizes=sizes, **given)


QUESTIONS = {
    "3.1": dealing,
    "3.2": naive,
    "3.3": plans,
    "3.4": overlap,
    "3.5": to_shards,
    "3.6": updates,
    "3.7": just_in_time,
}
