"""Which examples are in the sums that the ranks have, and how often?

Each share's gradient, or each example's, is computed on one device; least squares then find the sum
of them that a rank's wrong elements are. Where examples depend on each other, as in a batch norm,
their gradients do not add up to the whole one, and the answer is None.
"""

import copy
from itertools import combinations

import numpy as np

from minidist.nn import BatchNorm, counted
from minidist.parallel import norms_that_train
from minidist.verify.causes.finding import Finding, Gradients, numbered
from minidist.verify.compare import BOUND
from minidist.verify.strategies.cases import INPUT, Case, as_input, collect

Shares = dict[int, np.ndarray]  # {rank: its examples}
MOST = 10_000_000  # elements of all examples' gradients
RANKS = 8  # whose sums, of any of them, are looked for
CLOSE = 10.0  # residuals, in multiples of the bound


def of_examples(case: Case, rows: np.ndarray, numbers: np.ndarray | None = None) -> Gradients:
    """Return the part of the whole batch's gradient that these examples contribute.

    numbers  under which the model draws their masks; by default their places in the batch
    """
    model, x = copy.deepcopy(case.model), as_input(case.inputs[rows])
    outputs = model(x, case.batch.rows(rows if numbers is None else numbers))
    case.loss(outputs, case.targets[rows], reduction_size=case.total).backward()
    gradients = collect(model, x)
    if INPUT in gradients:
        of_input = np.zeros(case.inputs.shape, gradients[INPUT].dtype)
        of_input[rows] = gradients[INPUT]
        gradients[INPUT] = of_input
    return gradients


def shares_of(f: Finding, ranks: int | None = None) -> Shares:
    """Return {rank: its examples} where any target counts; of some ranks, by default of all."""
    parts = enumerate(np.array_split(np.arange(len(f.case.inputs)), ranks or f.ranks))
    return {k: rows for k, rows in parts if len(rows) and counted(f.case.targets[rows])}


def shares(f: Finding) -> str | None:
    """Each rank has the gradients of some ranks' shares of the batch, each times some factor.

    How many ranks have different examples is not known of a strategy of the package: all, or a part
    of them, where the others cut something else.
    """
    divisors = [n for n in range(f.ranks, 1, -1) if f.ranks % n == 0]
    for count in divisors[: 1 if f.promise else None]:
        parts = shares_of(f, count)
        if (W := _weights(f, [*parts.values()])) is None:
            continue
        alone = np.array([[k == r * count // len(f.got) for k in parts] for r in range(len(f.got))])
        for scaled, times in scales_alone(f, parts, count).items():
            if len(f.got) > 1 and _near(f, W, alone * times):
                return f"equals {scaled}: the all_reduce is missing{f.where()}"
        for column, k in enumerate(parts):
            if _near(f, W, count * np.eye(len(parts))[column]):
                return (
                    f"equals {count} times the gradient of rank {k}'s examples: "
                    "all had the same batch"
                )
        targets = _means(f, parts)
        examples = np.array([len(rows) for rows in parts.values()]) / len(f.case.inputs)
        for sum_of, weight in {
            "mean of the ranks' means": 1 / len(parts),
            "sum of the ranks' means": 1.0,
            "sum of the ranks' means, weighted by examples": examples,
        }.items():
            if _near(f, W, targets * weight):
                return f"equals the {sum_of}: each divided by its own number of targets"
    return None


def _near(f: Finding, W: np.ndarray, want: np.ndarray) -> bool:
    return bool((np.abs(W - want) <= f.exact * np.maximum(1.0, want)).all())


def _means(f: Finding, parts: Shares) -> np.ndarray:
    """Return the factor of each part where the loss is a mean over the part's own targets."""
    return f.case.total / np.array([counted(f.case.targets[rows]) for rows in parts.values()])


def scales_alone(f: Finding, parts: Shares, count: int) -> dict[str, np.ndarray]:
    """Return {in words: with which factors ranks that sum nothing have their own parts}."""
    means = _means(f, parts)
    return {
        "the local gradient": np.ones(len(parts)),
        "each rank's own mean": means,
        f"each rank's own mean, over {count}": means / count,
        f"{count} times the local gradient": np.full(len(parts), float(count)),
    }


def partial_sums(f: Finding) -> str | None:
    """One rank has the sum; elsewhere each wrong element is a sum over some ranks, or their means.

    So a reduce leaves its other ranks: gloo's, for one, with what has passed by.
    """
    parts, off = shares_of(f), [r for r, bad in enumerate(f.astray) if bad.any()]
    if len(off) + 1 != len(f.got) or not 1 < len(parts) <= RANKS:
        return None
    contributions = [f.flat(of_examples(f.case, rows)) for rows in parts.values()]
    for times in scales_alone(f, parts, f.ranks).values():
        scaled = {k: c * g for k, c, g in zip(parts, times, contributions, strict=True)}
        subsets = [chosen for n in range(len(scaled) + 1) for chosen in combinations(scaled, n)]
        summed_none = all(_are_sums(f, r, scaled, [(r,)]) for r in off)
        summed_all = any(_are_sums(f, r, scaled, subsets[-1:]) for r in off)
        if summed_none or (not summed_all and all(_are_sums(f, r, scaled, subsets) for r in off)):
            (root,) = set(range(len(f.got))) - set(off)
            others = "their own" if summed_none else "sums over some ranks, by element"
            reduce = f"only rank {root} has the sum, the others {others}: reduce, not all_reduce"
            return reduce + f.where()
    return None


def _are_sums(f: Finding, rank: int, parts: dict, subsets: list[tuple[int, ...]]) -> bool:
    """Return whether each wrong element of a rank is the sum of the parts of one of the sets."""
    got, unknown = f.flat(f.got[rank]), f.astray[rank].copy()
    for chosen in subsets:
        unknown &= np.abs(got - sum(parts.get(k, 0.0) for k in chosen)) > f.allowed
    return not unknown.any()


def alone(f: Finding) -> str | None:
    """Each share of the batch gave what it gives as a batch of its own."""
    norms = "batch norms used its own examples' statistics, not the batch's"
    whose = norms if list(f.case.model.modules(BatchNorm)) else "examples were a batch of their own"
    masks = "masks of dropout were drawn by its own numbers of examples, from 0"
    for cause, numbers in ((whose, lambda rows: rows), (masks, lambda rows: np.arange(len(rows)))):
        parts = [of_examples(f.case, rows, numbers(rows)) for rows in shares_of(f).values()]
        total = f.sum_of(parts)
        if any(not f.near(total[n], f.want[n], n) for n in f.trained) and f.all_are(total):
            return f"each rank's {cause}"
    return None


def counts(f: Finding) -> str | None:
    """Some examples count too little or too often, on some ranks, in some elements."""
    parts = shares_of(f)
    single = [np.array([i]) for rows in parts.values() for i in rows if counted(f.case.targets[i])]
    for cut in (single, [*parts.values()]):
        if (W := _weights(f, cut)) is not None:
            return _in_words(f, W, cut, parts)
    return None


def _weights(f: Finding, cut: list[np.ndarray]) -> np.ndarray | None:
    """Return W[rank, part]: how often each part of the batch counts in a rank's wrong elements.

    None where no sum fits. A fit has to be ten times nearer than weights of 1 are: noise has a fit,
    too, and no cause.
    """
    off = [r for r, bad in enumerate(f.astray) if bad.any()]
    if (
        norms_that_train(f.case.model)
        or not off
        or len(cut) < 2
        or len(cut) * f.allowed.size > MOST
    ):
        return None
    columns = np.stack([f.flat(of_examples(f.case, rows)) for rows in cut], axis=1)
    if (np.abs(columns.sum(1) - f.flat(f.want)) > CLOSE * f.allowed).any():
        return None
    W = np.ones((len(f.got), len(cut)))
    for rank in off:
        bad = f.astray[rank]
        A = columns[bad] / f.allowed[bad, None]
        b = f.flat(f.got[rank])[bad] / f.allowed[bad]
        if len(A) < 2 * len(cut) or not np.isfinite(b).all():
            return None
        w, _, independent, _ = np.linalg.lstsq(A, b, rcond=1e-12)
        off_by, off_without = (np.abs(A @ x - b).max() for x in (w, np.ones_like(w)))
        if independent < len(cut) or off_by > min(CLOSE, off_without / 10):
            return None
        W[rank] = w.round(6 if f.bound == BOUND else 3) + 0.0
    return W


def _in_words(f: Finding, W: np.ndarray, cut: list[np.ndarray], parts: Shares) -> str:
    columns = np.stack([f.flat(of_examples(f.case, rows)) for rows in cut], axis=1)
    groups: dict[bytes, list[int]] = {}
    for rank, bad in enumerate(f.astray):
        if bad.any():
            groups.setdefault(W[rank].tobytes(), []).append(rank)
    where = [_where(f, ranks, columns @ W[ranks[0]]) for ranks in groups.values()]
    V = _of_shares(W, cut, parts)
    if len(set(where)) == 1 and (cause := _among_ranks(V)):
        return cause + where[0]
    messages = []
    for ranks, place in zip(groups.values(), where, strict=True):
        which = "" if len(ranks) == len(f.got) else f"on {numbered('rank', ranks)} "
        messages.append(f"{which}the sum {_counted(W[ranks[0]], cut)}{place}")
    if len(groups) == 1 and len(cut) > V.shape[1] and (V[0] % 1).any() and np.ptp(V[0]):
        messages.append("as if each rank had scaled its share before the sum (clipped it?)")
    return "; ".join(messages)


def _where(f: Finding, ranks: list[int], fitted: np.ndarray) -> str:
    """Return in which elements the ranks have this sum, if not in all that it would change."""
    off = np.any([f.astray[r] for r in ranks], axis=0)
    changed = np.abs(fitted - f.flat(f.want)) > CLOSE * f.allowed
    in_wrong = f.flat({n: np.full(f.want[n].shape, n in f.wrong) for n in f.trained})
    if not (changed & in_wrong & ~off).any():
        return f.where()
    first, *_, last = np.flatnonzero(off)
    return f", in elements {first} to {last} of all {off.size}"


def _counted(w: np.ndarray, cut: list[np.ndarray]) -> str:
    """Return "counts examples 0, 1 twice, example 5 not at all"."""
    examples: dict[float, list[int]] = {}
    for rows, weight in zip(cut, w.tolist(), strict=True):
        examples.setdefault(weight, []).extend(rows.tolist())
    times = {c: {0.0: "not at all", 2.0: "twice"}.get(c, f"{c:.4g} times") for c in examples}
    if len(examples) == 1:
        return f"counts every example {times[w[0]]}" if w[0] else "is zero"
    several = [f"{numbered('example', e)} {times[c]}" for c, e in examples.items() if c != 1]
    return f"counts {', '.join(several)}"


def _of_shares(W: np.ndarray, cut: list[np.ndarray], parts: Shares) -> np.ndarray:
    """Return V[r, k], how often rank r counts rank k's examples; no columns where those differ."""
    owner = {i: column for column, rows in enumerate(parts.values()) for i in rows}
    owners = np.array([owner[rows[0]] for rows in cut])
    V = np.stack([W[:, owners == k][:, 0] for k in range(len(parts))], axis=1)
    return V if np.array_equal(V[:, owners], W) else np.zeros((len(W), 0))


def _among_ranks(V: np.ndarray) -> str | None:
    """Return the name of a collective that is missing, or another than all_reduce."""
    N, alone = len(V), np.eye(len(V))
    if V.shape != alone.shape:
        return None
    for k in range(N):
        if (V == alone[k]).all():
            return f"every rank has only the gradient of rank {k}'s examples: broadcast, not summed"
    alike = (V[:, None] == V).all(axis=2)
    if not np.array_equal(V, alike) or alike.all():
        return None
    sets = dict.fromkeys(str(set(np.flatnonzero(row).tolist())) for row in alike)
    if len(sets) == N:
        return "every rank has only its own examples' gradient: an all_reduce is missing"
    return f"ranks {' and '.join(sets)} are summed among themselves, never across"
