"""The right numbers at wrong places: of all of the gradient, or of what some ranks have added."""

from itertools import chain, combinations

import numpy as np

from minidist.verify.causes.example_counts import listed
from minidist.verify.causes.examples import counting, of_examples
from minidist.verify.causes.finding import Finding, some
from minidist.verify.compare import BOUND


def elsewhere(f: Finding) -> str | None:
    """Return which parameters are exchanged or transposed, or what is at other places."""
    moved = [_moved(f, name) for name in f.trained if name in f.wrong]
    if moved and all(moved):
        return some([words for words in moved if words])
    shares = {k: f.flat(of_examples(f.case, rows)) for (k, _), rows in counting(f).items()}
    found = [_displaced(f, r, shares) for r, off in enumerate(f.astray) if off.any()]
    return found[0] if found and all(found) else None


def _moved(f: Finding, name: str) -> str | None:
    """All ranks that are wrong have another parameter's gradient under this name."""
    w = f.want[name]
    wrong = [g[name] for g in f.got if not f.near(g[name], w, name)]
    for other, x in f.want.items():
        if other != name and x.shape == w.shape and all(f.near(g, x, name) for g in wrong):
            return f"{name} has the gradient of {other}"
    square = w.ndim == 2 and w.shape == w.T.shape
    transposed = square and all(f.near(g, w.T, name) for g in wrong)
    return f"{name} is transposed" if transposed else None


def _displaced(f: Finding, rank: int, shares: dict[int, np.ndarray]) -> str | None:
    """Which ranks' parts are at other places on this rank, where the other parts are right?"""
    got, want = f.flat(f.got[rank]), f.flat(f.want)
    tiny = f.most * (1e-12 if f.bound == BOUND else 5e-6)
    if (by := _shifts(got, want, tiny, len(f.got) - 1)) is not None:
        values, counts = np.unique(by, return_counts=True)
        most = values[counts.argmax()]
        how = f", most of them {abs(most)} elements {'later' if most > 0 else 'earlier'}"
        return f"the right numbers at other places{how if 2 * counts.max() > by.size else ''}"
    for right in chain.from_iterable(combinations(shares, n) for n in range(1, len(shares))):
        rest = sum(shares[k] for k in right)
        if _shifts(got - rest, want - rest, tiny, 0) is not None:
            others = listed("rank", [k for k in shares if k not in right])
            return f"on rank {rank} the parts of {others} are added at other places than the rest"
    return None


def _shifts(a: np.ndarray, b: np.ndarray, tiny: float, lost: int) -> np.ndarray | None:
    """Return by how much elements of b are moved in a; None if a has others.

    lost  how many of b may be missing, where a vector was padded
    """
    here, there = (np.flatnonzero((np.abs(a - b) > tiny) & (np.abs(x) > tiny)) for x in (a, b))
    if not 4 * max(1, lost) < len(there) - lost <= len(here) <= len(there):
        return None
    here, there = here[a[here].argsort()], there[b[there].argsort()]
    at = np.arange(len(there))  # also where values are equal
    if len(here) < len(there):
        at = np.searchsorted(b[there], a[here] - tiny).clip(max=len(there) - 1)
    found = (np.abs(b[there[at]] - a[here]) <= tiny).all() and len(np.unique(at)) == len(here)
    return here - there[at] if found else None
