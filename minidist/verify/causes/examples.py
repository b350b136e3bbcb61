"""Wrong gradients that are sums over parts of the batch: which parts, with which factors?

A part is one data-parallel rank's share of one micro-batch: its key is (k, i).
"""

import copy

import numpy as np

from minidist.nn import BatchNorm, counted
from minidist.verify.causes.finding import Finding, Gradients
from minidist.verify.strategies.cases import INPUT, Case, collect

Key = tuple[int, int]
Factors = dict[Key, float]


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
    if len(found) < len(f.got) or _are(found, dict.fromkeys(parts, 1.0)):
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


def _are(found: list[Factors], *want: Factors) -> bool:
    """Return whether the ranks have these factors: the same for all, or one for each."""
    want = want * len(found) if len(want) == 1 else want
    return all(
        abs(factors[key] - should[key]) <= 1e-6
        for factors, should in zip(found, want, strict=True)
        for key in factors
    )


def _local(f: Finding, found: list[Factors], parts: dict) -> str | None:
    ranks, count = len(f.got), f.split.data
    own = [{key: float(key[0] == r * count // ranks) for key in parts} for r in range(ranks)]
    if count < 2 or not _are(found, *own):
        return None
    but = ", though as many bytes moved: something else was summed" if f.right_bytes else ""
    return f"equals the local gradient: the all_reduce is missing{but}{f.where()}"


def _same_batch(f: Finding, found: list[Factors], parts: dict) -> str | None:
    count = f.split.data
    for k in range(count):
        if count > 1 and _are(found, {key: count * float(key[0] == k) for key in parts}):
            return (
                f"equals {count} times the gradient of rank {k}'s examples: all had the same batch"
            )
    return None


def _means(f: Finding, found: list[Factors], parts: dict) -> str | None:
    """Means over parts of different sizes, added up or averaged as if the sizes were equal."""
    of_ranks = {
        key: np.concatenate([rows for other, rows in parts.items() if other[0] == key[0]])
        for key in parts
    }
    known = [("micro-batches'", parts, len(parts))]
    if f.split.data > 1:
        known.insert(0, ("the ranks'", of_ranks, len({k for k, _ in parts})))
    for whose, shares, much in known:
        means = {key: f.case.total / counted(f.case.targets[x]) for key, x in shares.items()}
        weights = {
            "mean of {} means": dict.fromkeys(parts, 1 / much),
            "sum of {} means": dict.fromkeys(parts, 1.0),
            "sum of {} means, weighted by examples": {
                key: len(rows) / len(f.case.inputs) for key, rows in shares.items()
            },
        }
        for what, weight in weights.items():
            if _are(found, {key: mean * weight[key] for key, mean in means.items()}):
                message = what.format(whose)
                return f"equals the {message}: each divided by its own number of targets"
    return None


def _left_out(f: Finding, found: list[Factors], parts: dict) -> str | None:
    for what, chosen in _choices(f, parts).items():
        for times, message in ((0.0, "without {}: skipped"), (2.0, "with {} counted twice")):
            if _are(found, dict.fromkeys(parts, 1.0) | dict.fromkeys(chosen, times)):
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
    scale = {n: np.abs(f.want[n]).max(initial=0.0) or 1.0 for n in names}

    def flat(gradients):
        return np.concatenate([(gradients[n] / scale[n]).reshape(-1) for n in names])

    columns = np.stack([flat(part) for part in parts.values()], axis=1)
    factors, _, rank, _ = np.linalg.lstsq(columns, flat(g), rcond=1e-12)
    if rank < len(parts) or len(columns) <= len(parts):
        return None
    close = np.abs(columns @ factors - flat(g)).max() <= 1e-8
    return dict(zip(parts, factors.tolist(), strict=True)) if close else None
