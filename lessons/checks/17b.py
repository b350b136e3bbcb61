"""Lesson 17b's exercises: checks, worked solutions, hints, tempting wrong answers."""

import numpy as np

from minidist import Cluster, nn

SIZES = 5, 3, 2, 0  # rows of four ranks


def rows():
    return np.random.default_rng(2).standard_normal((sum(SIZES), 3)) + 2


def on_rank(group, attempt):
    """Return what the attempt returns, and the names of the collectives that it has called."""
    called = []

    def counted(name):
        operation = getattr(group, name)

        def call(*args, **more):
            called.append(name)
            return operation(*args, **more)

        return call

    for name in ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "gather"):
        setattr(group, name, counted(name))
    own = np.split(rows(), np.cumsum(SIZES)[:-1])[group.rank]
    return attempt(group, own), called


def check_1(attempt):
    with Cluster(4, "thread") as ranks, np.errstate(all="ignore"):
        found = ranks.run(on_rank, attempt)
    right = {"mean": rows().mean(axis=0), "variance": rows().var(axis=0)}
    for r, (answer, _) in enumerate(found):
        if not isinstance(answer, tuple | list | np.ndarray) or len(answer) != 2:
            return f"rank {r} returns {answer!r:.60}, not (mean, variance)"
        for got, (what, want) in zip(answer, right.items(), strict=True):
            if np.shape(got) != want.shape:
                return f"the {what} has the shape {np.shape(got)}, not {want.shape}"
            if not np.allclose(got, want, rtol=1e-9, atol=0):
                off = np.abs(np.asarray(got) / want - 1).max()
                return f"with {SIZES} rows on the ranks, the {what} of rank {r} is off by {off:.1%}"
    if found[0][1] != ["all_reduce"]:
        return f"it calls {', '.join(found[0][1]) or 'nothing'}; one all_reduce is enough"


def solution_1(group, x):
    sums = [np.full((1, x.shape[1]), len(x)), [x.sum(axis=0)], [(x * x).sum(axis=0)]]
    count, total, squares = group.all_reduce(np.concatenate(sums))
    mean = total / count
    return mean, squares / count - mean**2


hints_1 = (
    "Means of ranks cannot be added up without the number of rows of each. What can be added up?",
    "Three sums: the rows, the numbers, their squares. Put them into one array.",
    "The variance is the mean of the squares less the square of the mean.",
)


def mean_first(group, x):
    count = group.all_reduce(np.array(float(len(x))))
    mean = group.all_reduce(x.sum(axis=0)) / count
    return mean, group.all_reduce(((x - mean) ** 2).sum(axis=0)) / count


def mean_of_means(group, x):
    x = np.zeros((1, 3)) if len(x) == 0 else x
    both = np.stack([x.mean(axis=0), x.var(axis=0)])
    return tuple(group.all_reduce(both) / group.size)


def weighted_variances(group, x):
    sums = np.concatenate([[len(x)], x.sum(axis=0), x.var(axis=0) * len(x) if len(x) else [0] * 3])
    total = group.all_reduce(sums)
    return total[1:4] / total[0], total[4:] / total[0]


tempting_1 = [mean_first, mean_of_means, weighted_variances, lambda group, x: None]


def part_of(x):
    mean = x.mean(axis=0) if len(x) else np.zeros(x.shape[1], x.dtype)
    return len(x), mean, ((x - mean) ** 2).sum(axis=0)


def check_2(attempt):
    random = np.random.default_rng(3)
    for center, apart in ((0, 1), (4096, 0), (4096, 0.5)):
        x = random.normal(center, 0.05 + (center == 0), (12, 4))
        pieces = np.split(x, (5, 8, 8))  # one rank has no row
        pieces = [(piece + apart * r).astype("float32") for r, piece in enumerate(pieces)]
        want = np.concatenate(pieces).astype("float64").var(axis=0)
        with np.errstate(all="ignore"):
            found = attempt([part_of(piece) for piece in pieces])
        if np.shape(found) != want.shape:
            return f"the result {found!r:.40} has the shape {np.shape(found)}, not {want.shape}"
        if not np.allclose(found, want, rtol=0.01):
            got = np.asarray(found)
            return f"numbers near {center}: the variances are {got.round(4)}, not {want.round(4)}"


def solution_2(parts):
    count = sum(rows for rows, _, _ in parts)
    center = parts[0][1]  # any number near the mean
    shift = sum(rows * (mean - center) for rows, mean, _ in parts) / count
    apart = sum(rows * (mean - center - shift) ** 2 for rows, mean, _ in parts)
    return (sum(squares for _, _, squares in parts) + apart) / count


hints_2 = (
    "4096^2 is 16,777,216: how many digits after the point does float32 have there?",
    "A rank's numbers are apart from its own mean, and its mean is apart from the mean of all.",
    "The sum of (x - mean of all)^2 of a rank: its squares, plus rows times (its mean - mean)^2.",
)


def from_squares(parts):
    count = sum(rows for rows, _, _ in parts)
    mean = sum(np.float32(rows) * mean for rows, mean, _ in parts) / np.float32(count)
    square = sum(s + np.float32(rows) * m * m for rows, m, s in parts) / np.float32(count)
    return square - mean * mean


def without_distance(parts):
    return sum(squares for *_, squares in parts) / sum(rows for rows, *_ in parts)


def unweighted(parts):
    means = np.stack([mean for _, mean, _ in parts])
    within = sum(squares for *_, squares in parts) / sum(rows for rows, *_ in parts)
    return within + means.var(axis=0)


tempting_2 = [from_squares, without_distance, unweighted, lambda parts: np.nan]


def check_3(attempt):
    random = np.random.default_rng(4)
    linear, norm = nn.Linear(5, 3, dtype="float64"), nn.BatchNorm(3, eps=0.1, dtype="float64")
    for p in (linear.bias, norm.gain, norm.bias, norm.running_mean):
        p.data[...] = random.standard_normal(p.shape)
    norm.running_var.data[...] = random.random(3) + 0.5
    norm.eval()
    x = random.standard_normal((7, 5))
    parts = linear.weight, linear.bias, norm.running_mean, norm.running_var, norm.gain, norm.bias
    found = attempt(*[p.data.copy() for p in parts], norm.eps)
    if not isinstance(found, tuple | list) or [np.shape(a) for a in found] != [(5, 3), (3,)]:
        return f"the result {found!r:.60} is not (W[C, F], b[F])"
    off = abs(x @ found[0] + found[1] - norm(linear(x)).data).max()
    if not off < 1e-9:
        return f"the outputs are off by {off:.2g}"


def solution_3(weight, bias, mean, variance, gain, shift, eps):
    scale = gain / np.sqrt(variance + eps)
    return weight * scale, (bias - mean) * scale + shift


hints_3 = (
    "Which factor does the norm multiply a channel of the output by?",
    "The factor is gain / sqrt(variance + eps), one per column of the weight.",
    "What does not depend on X is the new bias: (bias - mean) times the factor, plus shift.",
)


def forgets_the_bias(weight, bias, mean, variance, gain, shift, eps):
    scale = gain / np.sqrt(variance + eps)
    return weight * scale, shift - mean * scale


def without_eps(weight, bias, mean, variance, gain, shift, eps):
    return solution_3(weight, bias, mean, variance, gain, shift, 0)


def by_variance(weight, bias, mean, variance, gain, shift, eps):
    scale = gain / (variance + eps)
    return weight * scale, (bias - mean) * scale + shift


tempting_3 = [forgets_the_bias, without_eps, by_variance, lambda *_: None]
