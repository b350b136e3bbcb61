"""Lesson 18's exercises: checks, worked solutions, hints, tempting wrong answers."""

import numpy as np

from minidist import Cluster


def check_1(attempt):
    for dtype in ("float16", "float32"):
        for number in (0.1, 1.5, 3e-3, 700.0):
            w = np.dtype(dtype).type(number)
            update = attempt(w)
            if not isinstance(update, int | float | np.number):
                return f"the result is {update!r:.60}, not a number"
            for factor, moves in ((0.99, False), (1.01, True)):
                if (w.dtype.type(float(w) + factor * float(update)) != w) != moves:
                    words = "does not move" if moves else "moves"
                    return f"{dtype} {w} {words} by {factor} of your {float(update):.3g}"


def solution_1(w):
    return float(np.spacing(w)) / 2


hints_1 = (
    "np.spacing(w) is the distance from w to the next number of w's dtype.",
    "A sum is rounded to the nearest number. From where on is that the next one?",
    "From half of the spacing on.",
)


def machine_epsilon(w):
    return float(np.finfo(w.dtype).eps)


def relative(w):
    return float(w) * float(np.finfo(w.dtype).eps) / 2


def whole_spacing(w):
    return float(np.spacing(w))


tempting_1 = [machine_epsilon, relative, whole_spacing, lambda w: None]


def on_rank(group, attempt, pattern):
    answer = attempt(group, pattern[group.rank])
    return answer if answer is None else bool(answer)


def check_2(attempt):
    with Cluster(3, "thread") as ranks:
        for pattern in ((True, True, True), (True, False, True), (False, True, True), (False,) * 3):
            found = ranks.run(on_rank, attempt, pattern)
            if found != [not all(pattern)] * 3:
                return f"ranks whose gradients are finite: {pattern}; they skip: {found}"


def solution_2(group, finite):
    return bool(group.all_reduce(np.array(not finite, "uint8"), op="max"))


hints_2 = (
    "On whole copies, every rank looks at the same sum. Who has an infinite shard in ZeRO?",
    "One rank that has to skip is enough for all.",
    'all_reduce the byte "not finite" with op="max".',
)


def own(group, finite):
    return not finite


def rank_0_decides(group, finite):
    return not group.broadcast(np.array(finite))


def all_must_be_infinite(group, finite):
    return group.all_reduce(np.array(not finite, "uint8"), op="min")


tempting_2 = [own, rank_0_decides, all_must_be_infinite, lambda group, finite: None]


def check_3(attempt):
    random = np.random.default_rng(0)
    for n, block, size in ((12, 4, 1), (10, 4, 1e-6), (7, 3, 5e4), (6, 6, 300)):
        x = (random.standard_normal(n) * size).astype("float32")
        x[: block if n > block else 0] = 0
        blocks = [x[i : i + block] for i in range(0, n, block)]
        with np.errstate(all="ignore"):
            found = attempt(x.copy(), block)
        if found is None or np.shape(found) != (len(blocks),):
            return f"{n} elements in blocks of {block}: {found!r:.60} is no {len(blocks)} scales"
        for part, scale in zip(blocks, np.asarray(found, "float64"), strict=True):
            most = abs(part).max()
            if not (scale > 0 and np.isfinite(scale) and np.frexp(scale)[0] == 0.5):
                return f"{scale} is no power of two: it would round every element"
            if most == 0 and scale != 1:
                return f"a block of zeros has the scale {scale:g}, not 1"
            if scale * most > 448:
                return f"{scale:g} times the largest element, {most:.3g}, is above 448"
            if most and 2 * scale * most <= 448:
                return f"the largest element is {most:.3g}; twice {scale:g} would not be too large"

    return lost_by(attempt)


def lost_by(attempt):
    """Count what becomes 0 in e4m3 of 4,096 numbers, one of which is a million."""
    x = np.random.default_rng(1).standard_normal(4096).astype("float32")
    x[1000] = 1e6
    scaled = x.reshape(-1, 32) * np.asarray(attempt(x.copy(), 32)).reshape(-1, 1)
    lost = int(np.sum(abs(scaled) <= 2.0**-10))
    return None if lost == 31 else f"of 4,096 numbers, one of them 1,000,000, {lost} become 0"


def solution_3(x, block):
    most = np.array([abs(x[i : i + block]).max() for i in range(0, len(x), block)], "float64")
    return np.where(most > 0, 2.0 ** np.floor(np.log2(448 / np.where(most > 0, most, 448))), 1.0)


hints_3 = (
    "The limit of a block is 448 / (its largest size). Which power of two is just below?",
    "2 ** floor(log2(448 / largest)).",
    "x[i : i + block] for i in range(0, len(x), block) are the blocks, also a shorter last one.",
)


def one_for_all(x, block):
    scale = 2.0 ** np.floor(np.log2(448 / abs(x).max()))
    return np.full(-(-len(x) // block), scale)


def not_a_power(x, block):
    most = [abs(x[i : i + block]).max() for i in range(0, len(x), block)]
    return np.array([448 / m if m else 1 for m in most])


def without_signs(x, block):
    most = [x[i : i + block].max() for i in range(0, len(x), block)]
    return np.array([2.0 ** np.floor(np.log2(448 / m)) if m > 0 else 1 for m in most])


tempting_3 = [one_for_all, not_a_power, without_signs, lambda x, block: None]
