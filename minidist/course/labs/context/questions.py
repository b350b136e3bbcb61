"""What the lab of context and experts asks. The right answer is what the package itself answers.

Letters: N ranks, B examples, T positions, H heads of width D, E experts, k choices, C the width.
"""

from functools import partial

import numpy as np

from minidist.context_parallel import plain, zigzag
from minidist.course.answers import like_the_package
from minidist.course.labs.context import probes
from minidist.course.question import Questions, Random, ask, ints, ranks
from minidist.errors import plural

Runs = list[tuple[int, int]]


def dealt(rng: Random, T: int, N: int) -> list[Runs]:
    """Deal pieces of T positions to N ranks by chance; one rank or more has none."""
    ends = [0, *sorted(ints(rng, 0, T + 1, 2 * N - 1)), T]
    owner = rng.choice(rng.permutation(N)[1:], 2 * N)
    return [[(ends[i], ends[i + 1]) for i in np.flatnonzero(owner == r)] for r in range(N)]


def cuts(rng: Random, more: int) -> list[tuple[str, int, list[Runs]]]:
    """Return (what it is, T, the runs of each rank) of several cuts."""
    N, T = int(rng.integers(3, 6)), int(rng.integers(7, 10 + more))
    made = [plain(T, 1), plain(T, 2), zigzag(N + 1, N), zigzag(T, 3)]
    found = [(held[0].length, [list(own.runs) for own in held]) for held in made]
    found += [(T, dealt(rng, T, N))]
    return [(f"{T} positions on {plural(len(x), 'rank')}, runs {x}", T, x) for T, x in found]


def ring(rng: Random) -> Questions:
    for size in (1, 800):
        parts = ints(rng, 1, 5, int(rng.integers(2, 5)))
        scores = size * rng.standard_normal((2, 3, sum(parts)))
        v = rng.standard_normal((sum(parts), 2))
        about = f"{plural(len(parts), 'set')} of keys, scores of about {size}"
        yield ask(about, probes.merge, group="join", scores=scores, parts=parts, v=v)
    for about, T, held in [*cuts(rng, 9), ("140 positions on 1 rank", 140, [[(0, 140)]])]:
        B, H, D = ints(rng, 1, 4, 3)
        qkv, grad = rng.standard_normal((3, B, H, T, D)), rng.standard_normal((B, H, T, D))
        given = {"held": held, "qkv": qkv, "grad": grad}
        yield ask(about, probes.attention, group="forward", backward=False, **given)
        yield ask(about, probes.attention, group="backward", backward=True, **given)


def cut_lengths(rng: Random) -> Questions:
    for name in ("plain", "zigzag"):
        N, several = int(rng.integers(3, 7)), int(rng.integers(2, 5))
        lengths = [(2 * N * several, N), (2 * N * several + int(rng.integers(1, N)), N)]
        lengths += [(N, N), (N + 1, N), (7, 1), (int(rng.integers(9, 30)), 4), (N - 1, N)]
        for T, n in lengths:
            about = f"{name}, {plural(T, 'position')}, {plural(n, 'rank')}"
            yield ask(about, probes.cut, group=name, name=name, T=T, N=n)


def dispatch(rng: Random) -> Questions:
    no_more = partial(like_the_package, at_most=("bytes",))
    for N in (1, 2, int(rng.integers(3, 6))):
        rows = rng.integers(0, 4, (N, N))
        xs = [rng.standard_normal((n, 3)) for n in rows.sum(axis=1)]
        grads = [rng.standard_normal((n, 3)) for n in rows.sum(axis=0)]
        about = f"{plural(N, 'rank')}, rows {rows.tolist()}"
        yield ask(about, probes.exchange, no_more, "exchange", rows=rows, xs=xs, grads=grads)
    N = int(rng.integers(3, 6))
    kinds = [("experts learn", n) for n in (1, 2, N)]
    for kind, size in [*kinds, ("experts learn, rows do not", N), ("nothing learns", N)]:
        E, C, learns = size + 2, int(rng.integers(1, 5)), kind == "experts learn"
        inner, loads = ints(rng, 0, E + 1, size - 1), rng.integers(0, 4, (size, E))
        if size > 2:  # a rank without experts, and one without rows
            inner[-1], loads[rng.integers(size)] = inner[0], 0
        ends = [0, *sorted(inner), E]
        xs, grads = ([rng.standard_normal((n, C)) for n in loads.sum(axis=1)] for _ in range(2))
        given = {"ends": ends, "loads": loads, "seed": int(rng.integers(99)), "xs": xs}
        given |= {"grads": grads, "trained": kind != "nothing learns", "wanted": learns}
        about = f"{kind}, {plural(size, 'rank')}, ends {ends}, rows for experts {loads.tolist()}"
        group = ranks(size) if learns else "rows without a gradient"
        yield ask(about, probes.dispatch, no_more, group, **given)


def drops(rng: Random) -> Questions:
    def choices(B: int, T: int, E: int, k: int) -> np.ndarray:
        return np.argsort(rng.random((B, T, E)) + 0.1 * np.arange(E), axis=-1)[..., :k]

    for k, capacity in ((1, 2), (2, 3), (3, 1), (2, None)):
        (B, T), E = ints(rng, 3, 7, 2), int(rng.integers(4, 6))
        about = f"{B} examples of {T} positions, {E} experts, {k} chosen, capacity {capacity}"
        given = {"chosen": choices(B, T, E, k), "experts": E, "capacity": capacity}
        yield ask(about, probes.queues, group="queues", **given)
    for about, T, held in cuts(rng, 4):
        (B, k), E = ints(rng, 2, 4, 2), int(rng.integers(3, 6))
        given = {"held": held, "chosen": choices(B, T, E, k), "experts": E, "capacity": 0.8}
        about += f", {B} examples, {k} of {E} experts"
        yield ask(about, probes.routed, group=ranks(len(held)), **given)


QUESTIONS = {"7.1": ring, "7.2": cut_lengths, "7.3": dispatch, "7.4": drops}
