"""How often does each example count in the gradients that the ranks have?

Each example's own gradient is computed on one device; least squares then find the sum of them that
a rank's wrong elements are. Where examples depend on each other, as in a batch norm, their
gradients do not add up to the whole one, and the answer is None.
"""

import numpy as np

from minidist.nn import counted
from minidist.verify.causes.examples import counting, of_examples
from minidist.verify.causes.finding import Finding
from minidist.verify.compare import BOUND

Rows = tuple[int, ...]  # examples
MOST = 10_000_000  # elements of all examples' gradients
CLOSE = 10.0  # residuals, in multiples of the bound


def weights(f: Finding) -> str | None:
    """Return which examples count too little or too often, on which ranks, in which elements."""
    shares, off = list(counting(f).values()), [r for r, bad in enumerate(f.astray) if bad.any()]
    single = [np.array([i]) for rows in shares for i in rows if counted(f.case.targets[i])]
    for cut in (single, shares):
        if not off or len(cut) < 2 or len(cut) * f.allowed.size > MOST:
            continue
        columns = np.stack([f.flat(of_examples(f.case, rows)) for rows in cut], axis=1)
        if (np.abs(columns.sum(1) - f.flat(f.want)) > CLOSE * f.allowed).any():
            continue
        found = {r: w for r in off if (w := _fit(f, r, columns)) is not None}
        if len(found) == len(off):
            return _in_words(f, found, [tuple(rows.tolist()) for rows in cut], columns)
    return None


def _fit(f: Finding, rank: int, columns: np.ndarray) -> np.ndarray | None:
    """Return the weights that give this rank's wrong elements; None if there are none.

    They have to be ten times nearer than weights of 1 are: noise has a fit, too, and no cause.
    """
    off = f.astray[rank]
    A = columns[off] / f.allowed[off, None]
    b = f.flat(f.got[rank])[off] / f.allowed[off]
    if len(A) < 2 * A.shape[1] or not np.isfinite(b).all():
        return None
    w, _, independent, _ = np.linalg.lstsq(A, b, rcond=1e-12)
    off_by, off_without = (np.abs(A @ x - b).max() for x in (w, np.ones_like(w)))
    fits = independent == A.shape[1] and off_by <= min(CLOSE, off_without / 10)
    return w.round(6 if f.bound == BOUND else 3) + 0.0 if fits else None


def _in_words(f: Finding, found: dict, parts: list[Rows], columns: np.ndarray) -> str:
    """found: {rank with wrong elements: weights of the parts}."""
    groups: dict[bytes, list[int]] = {}
    for rank, w in found.items():
        groups.setdefault(w.tobytes(), []).append(rank)
    where = [_where(f, ranks, columns @ found[ranks[0]]) for ranks in groups.values()]
    V = _shares(f, found, parts)
    if len(set(where)) == 1 and (known := _among_ranks(V)):
        return known + where[0]
    messages = []
    for ranks, place in zip(groups.values(), where, strict=True):
        there = "" if len(ranks) == len(f.got) else f"on {listed('rank', ranks)} "
        messages.append(f"{there}the sum {_counts(found[ranks[0]], parts)}{place}")
    if len(groups) == 1 and len(parts) > V.shape[1] and (V[0] % 1).any() and np.ptp(V[0]):
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


def _counts(w: np.ndarray, parts: list[Rows]) -> str:
    """Return "counts examples 0, 1 twice, example 5 not at all"."""
    examples: dict[float, list[int]] = {}
    for rows, weight in zip(parts, w.tolist(), strict=True):
        examples.setdefault(weight, []).extend(rows)
    words = {c: {0.0: "not at all", 2.0: "twice"}.get(c, f"{c:.4g} times") for c in examples}
    if len(examples) == 1:
        return f"counts every example {words[w[0]]}" if w[0] else "is zero"
    counts = [f"{listed('example', e)} {words[c]}" for c, e in examples.items() if c != 1]
    return f"counts {', '.join(counts)}"


def listed(what: str, numbers: list[int]) -> str:
    return f"{what}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _shares(f: Finding, found: dict, parts: list[Rows]) -> np.ndarray:
    """Return V[r, k], how often rank r counts rank k's examples; no columns where those differ."""
    of = {i: k for (k, _), rows in counting(f).items() for i in rows}
    owners = np.array([of[rows[0]] for rows in parts])
    W = np.array([found.get(r, np.ones(len(parts))) for r in range(len(f.got))])
    V = np.stack([W[:, owners == k][:, 0] for k in np.unique(owners)], axis=1)
    same = np.array_equal(V[:, np.unique(owners, return_inverse=True)[1]], W)
    return V if same else np.zeros((len(f.got), 0))


def _among_ranks(V: np.ndarray) -> str | None:
    """Return the name of a collective that is missing, or another than all_reduce."""
    N, own = len(V), np.eye(len(V))
    if V.shape != own.shape:
        return None
    for k in range(N):
        if (V == own[k]).all():
            return f"every rank has only the gradient of rank {k}'s examples: broadcast, not summed"
    alike = (V[:, None] == V).all(axis=2)
    if not np.array_equal(V, alike) or alike.all():
        return None
    sets = dict.fromkeys(str(set(np.flatnonzero(row).tolist())) for row in alike)
    if len(sets) == N:
        return "every rank has only its own examples' gradient: an all_reduce is missing"
    return f"ranks {' and '.join(sets)} are summed among themselves, never across"
