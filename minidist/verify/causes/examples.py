"""Wrong gradients that are sums over parts of the batch: which parts, with which factors?

A part is one data-parallel rank's share of one micro-batch: its key is (k, i).
"""

import copy
from itertools import combinations

import numpy as np

from minidist.nn import BatchNorm, counted
from minidist.verify.causes.finding import Finding, Gradients
from minidist.verify.compare import scale
from minidist.verify.strategies.cases import INPUT, Case, collect

Key = tuple[int, int]
Factors = dict[Key, float]
RANKS = 8  # whose sums, of any of them, are looked for


def of_examples(case: Case, rows: np.ndarray, numbers: np.ndarray | None = None) -> Gradients:
    """Return what these examples contribute to the whole batch's gradient.

    numbers  under which the model draws their masks; by default their places in the batch
    """
    model, x = copy.deepcopy(case.model), case.part(rows)
    outputs = model(x, case.randomness(rows if numbers is None else numbers))
    case.loss(outputs, case.targets[rows], reduction_size=case.total).backward()
    found = collect(model, x)
    if INPUT in found:
        whole = np.zeros(case.inputs.shape, found[INPUT].dtype)
        whole[rows] = found[INPUT]
        found[INPUT] = whole
    return found


def examples(f: Finding) -> str | None:
    """Each rank has a sum of gradients of parts of the batch, each times some factor."""
    parts = counting(f)
    if len(parts) < 2:
        return None
    gradients = {key: of_examples(f.case, rows) for key, rows in parts.items()}
    found = [known for g in f.got if (known := _decompose(f, g, gradients)) is not None]
    if len(found) < len(f.got) or _are(f, found, dict.fromkeys(parts, 1.0)):
        return None  # the second: what a part computes depends on the others, as with experts
    for explain in (_local, _same_batch, _means, *([] if f.promise else [_left_out])):
        if message := explain(f, found, parts):
            return message
    return None


def alone(f: Finding) -> str | None:
    """Each share of the batch gave what it gives as a batch of its own."""
    norms = "batch norms used its own examples' statistics, not the batch's"
    whose = norms if list(f.case.model.modules(BatchNorm)) else "examples were a batch of their own"
    masks = "masks of dropout were drawn by its own numbers of examples, from 0"
    for words, numbers in ((whose, lambda rows: rows), (masks, lambda rows: np.arange(len(rows)))):
        parts = [of_examples(f.case, rows, numbers(rows)) for rows in counting(f).values()]
        whole = {name: np.sum([part[name] for part in parts], axis=0) for name in f.trained}
        if any(not f.near(whole[n], f.want[n], n) for n in f.trained) and all(
            f.near(g[n], whole[n], n) for g in f.got for n in f.trained
        ):
            return f"each rank's {words}"
    return None


def counting(f: Finding) -> dict[Key, np.ndarray]:
    """Return the parts of the batch in which any target counts."""
    parts = f.split.parts(len(f.case.inputs))
    return {key: rows for key, rows in parts.items() if counted(f.case.targets[rows])}


def _are(f: Finding, found: list[Factors], *want: Factors) -> bool:
    """Return whether the ranks have these factors: the same for all, or one for each."""
    want = want * len(found) if len(want) == 1 else want
    return all(
        abs(factors[key] - should[key]) <= f.exact * max(1.0, should[key])
        for factors, should in zip(found, want, strict=True)
        for key in factors
    )


def _local(f: Finding, found: list[Factors], parts: dict) -> str | None:
    ranks, count = len(f.got), f.split.data
    own = [r * count // ranks for r in range(ranks)]
    for words, times in own_scales(f, parts).items():
        factors = [{key: times[key] * (key[0] == k) for key in parts} for k in own]
        if count > 1 and _are(f, found, *factors):
            but = ", though as many bytes moved: something else was summed" if f.right_bytes else ""
            return f"equals {words}: the all_reduce is missing{but}{f.where()}"
    return None


def own_scales(f: Finding, parts: dict[Key, np.ndarray]) -> dict[str, Factors]:
    """Return {in words: with which factor a rank that sums nothing has its own parts}."""
    N, means = f.split.data, _means_over(f, _shares_of_ranks(parts))
    return {
        "the local gradient": dict.fromkeys(parts, 1.0),
        "each rank's own mean": means,
        f"each rank's own mean, over {N}": {key: mean / N for key, mean in means.items()},
        f"{N} times the local gradient": dict.fromkeys(parts, float(N)),
    }


def _means_over(f: Finding, shares: dict[Key, np.ndarray]) -> Factors:
    """Return what multiplies each part where the loss is a mean over the targets of its share."""
    return {key: f.case.total / counted(f.case.targets[rows]) for key, rows in shares.items()}


def _shares_of_ranks(parts: dict[Key, np.ndarray]) -> dict[Key, np.ndarray]:
    return {
        key: np.concatenate([rows for other, rows in parts.items() if other[0] == key[0]])
        for key in parts
    }


def partial_sums(f: Finding) -> str | None:
    """One rank has the sum; elsewhere each wrong element is a sum over some ranks, or their means.

    So a reduce leaves its other ranks: gloo's, for one, with what has passed by.
    """
    parts, off = counting(f), [r for r, bad in enumerate(f.astray) if bad.any()]
    if len(off) + 1 != len(f.got) or not 1 < len(parts) <= RANKS:
        return None
    shares = {key: f.flat(of_examples(f.case, rows)) for key, rows in parts.items()}
    for times in own_scales(f, parts).values():
        scaled = {key[0]: times[key] * share for key, share in shares.items()}
        subsets = [chosen for n in range(len(scaled) + 1) for chosen in combinations(scaled, n)]
        own = all(_are_sums(f, r, scaled, [(r,)]) for r in off)
        whole = any(_are_sums(f, r, scaled, subsets[-1:]) for r in off)
        if own or (not whole and all(_are_sums(f, r, scaled, subsets) for r in off)):
            (root,) = set(range(len(f.got))) - set(off)
            others = "their own" if own else "sums over some ranks, by element"
            reduce = f"only rank {root} has the sum, the others {others}: reduce, not all_reduce"
            return reduce + f.where()
    return None


def _are_sums(f: Finding, rank: int, shares: dict, subsets: list[tuple[int, ...]]) -> bool:
    """Return whether each wrong element of a rank is the sum of the shares of one of the sets."""
    got, unknown = f.flat(f.got[rank]), f.astray[rank].copy()
    for chosen in subsets:
        unknown &= np.abs(got - sum(shares.get(k, 0.0) for k in chosen)) > f.allowed
    return not unknown.any()


def _same_batch(f: Finding, found: list[Factors], parts: dict) -> str | None:
    count = f.split.data
    for k in range(count):
        if count > 1 and _are(f, found, {key: count * float(key[0] == k) for key in parts}):
            return (
                f"equals {count} times the gradient of rank {k}'s examples: all had the same batch"
            )
    return None


def _means(f: Finding, found: list[Factors], parts: dict) -> str | None:
    """Means over parts of different sizes, added up or averaged as if the sizes were equal."""
    known = [("micro-batches'", parts, len(parts))]
    if f.split.data > 1:
        known.insert(0, ("the ranks'", _shares_of_ranks(parts), len({k for k, _ in parts})))
    for whose, shares, much in known:
        means = _means_over(f, shares)
        weights = {
            "mean of {} means": dict.fromkeys(parts, 1 / much),
            "sum of {} means": dict.fromkeys(parts, 1.0),
            "sum of {} means, weighted by examples": {
                key: len(rows) / len(f.case.inputs) for key, rows in shares.items()
            },
        }
        for what, weight in weights.items():
            if _are(f, found, {key: mean * weight[key] for key, mean in means.items()}):
                message = what.format(whose)
                return f"equals the {message}: each divided by its own number of targets"
    return None


def _left_out(f: Finding, found: list[Factors], parts: dict) -> str | None:
    for what, chosen in _choices(f, parts).items():
        for times, message in ((0.0, "without {}: skipped"), (2.0, "with {} counted twice")):
            if _are(f, found, dict.fromkeys(parts, 1.0) | dict.fromkeys(chosen, times)):
                return f"equals the gradient {message.format(what)}{f.where()}"
    return None


def _choices(f: Finding, parts: dict) -> dict[str, list[Key]]:
    """Return {name: keys} of what may be left out: a share, a micro-batch."""
    found, M, several = {}, f.split.micro_batches, f.split.data > 1
    if several:
        for k in range(f.split.data):
            found[f"the examples of data-parallel rank {k}"] = [key for key in parts if key[0] == k]
    if M > 1:
        whose = " of every rank" if several else ""
        for i in range(M):
            last = ", the last" if all(other <= i for _, other in parts) else ""
            found[f"micro-batch {i}{last}{whose}"] = [key for key in parts if key[1] == i]
    if several and M > 1:
        found |= {f"micro-batch {i} of rank {k}": [(k, i)] for k, i in parts}
    return {what: keys for what, keys in found.items() if keys}


def _decompose(f: Finding, g: Gradients, parts: dict) -> Factors | None:
    """Return the factors with which the parts' gradients add up to g; None if there are none."""
    names = [n for n in f.wrong if n in g]
    size = {n: scale(f.want[n], f.most) or 1.0 for n in names}

    def flat(gradients):
        return np.concatenate([(gradients[n] / size[n]).reshape(-1) for n in names])

    columns = np.stack([flat(part) for part in parts.values()], axis=1)
    factors, _, rank, _ = np.linalg.lstsq(columns, flat(g), rcond=1e-12)
    if rank < len(parts) or len(columns) <= len(parts):
        return None
    close = np.abs(columns @ factors - flat(g)).max() <= 10 * f.bound
    return dict(zip(parts, factors.tolist(), strict=True)) if close else None
