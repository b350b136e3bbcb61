"""What the failures lab asks. The right answer is what the package itself answers."""

from functools import partial
from itertools import pairwise
from math import prod

import numpy as np

from minidist.course.answers import like_the_package
from minidist.course.labs.failures import probes
from minidist.course.question import Questions, Random, ask, ints
from minidist.errors import plural


def crashes(rng: Random) -> Questions:
    for group, N in (("a rank stops", 1), ("a rank stops", 3), ("the power fails", 1)):
        sizes = ints(rng, 1, 9, int(rng.integers(2, 5)))  # of two arrays, one rank writes none
        arrays = {f"w{i}": rng.standard_normal(size) for i, size in enumerate(sizes)}
        about = f"{plural(N, 'rank')}, {plural(len(sizes), 'array')}, {group}"
        power = group == "the power fails"
        yield ask(about, probes.crashes, group=group, N=N, arrays=arrays, power=power)


# 9.2. A slice is (axis, indices along it, start, stop); without an axis, of the whole array.

Cut = tuple[int | None, list[int] | None, int, int]


def runs(rng: Random, size: int, N: int) -> list[Cut]:
    """Cut all elements at random: a rank may have none."""
    ends = [0, *np.sort(rng.integers(0, size + 1, N - 1)).tolist(), size]
    return [(None, None, start, stop) for start, stop in pairwise(ends)]


def shards(rng: Random, shape: list[int], axis: int, N: int, rounds: int = 1) -> list[Cut]:
    """Deal the indices of an axis in rounds of N runs, as attention's columns; padding included."""
    width = -(-shape[axis] // (N * rounds))
    dealt = np.arange(N * rounds * width).reshape(rounds, N, width)
    size = prod(shape) // shape[axis] * rounds * width
    return [(axis, dealt[:, r].reshape(-1).tolist(), 0, size) for r in range(N)]


def halves(cuts: list[Cut]) -> list[Cut]:
    """Cut each slice into two runs, as ZeRO does with the parts of a split matrix."""
    found = [((a, i, 0, stop // 2), (a, i, stop // 2, stop)) for a, i, _, stop in cuts]
    return [cut for pair in found for cut in pair]


def resharding(rng: Random) -> Questions:
    shape = ints(rng, 5, 9, 2)
    N, M = (int(n) for n in rng.permutation([2, 3, 5])[:2])
    rows, columns = (partial(shards, rng, shape, axis) for axis in (0, 1))
    flat = partial(runs, rng, prod(shape))
    zero, mixed, copies = "runs of elements", "rows and columns", "copies and gaps"
    cases = [(zero, flat(a), flat(b)) for a, b in ((N, M), (M, N), (1, N), (N, 1), (4, 4))]
    cases += [
        (mixed, rows(N), columns(M)),
        (mixed, columns(N, 3), columns(M)),
        (mixed, halves(columns(N)), halves(rows(M, 2))),
        (mixed, columns(N), flat(M)),
        (copies, flat(N) + columns(M), rows(3)),
        (copies, 2 * rows(N), flat(M)),
        (copies, halves(rows(N))[1:], flat(M)),
    ]
    for group, saved, wanted in cases:
        about = f"{shape}: {plural(len(saved), 'slice')} read by {plural(len(wanted), 'rank')}"
        given = {"shape": shape, "saved": saved, "wanted": wanted}
        yield ask(about, probes.reshard, group=group, **given)


def sampling(rng: Random) -> Questions:
    judge = partial(like_the_package, at_most=("epochs drawn",))
    for group, method in (("the same batches", "after"), ("other batches", "after_examples")):
        for N, shuffle in ((1, True), (2, True), (3, True), (5, False)):
            batch = int(rng.integers(3, 8))
            examples = batch * int(rng.integers(2, 5)) + int(rng.integers(1, batch))  # one is short
            unit = examples if method == "after_examples" else -(-examples // batch)
            done = unit * int(rng.integers(2, 30)) + int(rng.integers(1, unit))
            given = {"examples": examples, "batch": batch, "size": N, "shuffle": shuffle}
            given |= {"seed": int(rng.integers(99)), "micro_batches": int(rng.integers(1, 4))}
            about = f"{method}({done}), {examples} examples, {batch} a batch, {plural(N, 'rank')}"
            more = {"method": method, "done": done, "batches": 2 * -(-examples // batch) + 1}
            yield ask(about, probes.dealt, judge, group, **given, **more)


def elastic(rng: Random) -> Questions:
    meshes: list[dict[str, int]] = [
        {"dp": int(rng.integers(3, 7))},
        {"dp": 2, "pp": 2, "tp": 2},
        {"tp": 4, "dp": 2},
        {"pp": 3, "cp": 2, "depth": 3},
        {"dp": 4, "ep": 4, "experts": 4},
        {"dp": 6, "tp": 2, "batch": 12, "micro_batches": 2},
    ]
    for mesh in meshes:
        settings = {"batch": 24, "micro_batches": 3} | mesh
        size = prod(mesh.get(axis, 1) for axis in ("dp", "pp", "cp", "tp"))
        for ranks in sorted({1, size - 1, int(rng.integers(2, size))}):
            about = f"{mesh}, {plural(ranks, 'rank')} left"
            yield ask(about, probes.fewer, group="the mesh", settings=settings, ranks=ranks)
    for kinds in ("", "whole", "damaged", "damaged whole", "whole begun", "whole damaged"):
        first, *more = ints(rng, 3, 9, 3)
        steps = np.cumsum([first + 1, *more]).tolist()  # done before each death
        there = {first - 1 + i: kind for i, kind in enumerate(kinds.split())}
        later = {steps[1] - 1: "whole"}
        deaths = [(2, steps[0], there), (1, steps[1], {}), (1, steps[2], later)]
        given = {"settings": {"dp": 4, "tp": 2, "batch": 24}, "deaths": deaths}
        about = f"three deaths, checkpoints {there} at first, {later} before the last"
        yield ask(about, probes.lives, group="the steps", **given)


QUESTIONS = {"9.1": crashes, "9.2": resharding, "9.3": sampling, "9.4": elastic}
