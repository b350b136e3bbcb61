"""Compare the gradients of ranks with one device's, parameter by parameter.

The bound: max|got - want| <= 1e-9 max(max|want|, 1e-3 g), where g is the largest gradient of the
whole model. Rounding errors in float64 are far below the bound, all known mistakes far above.
"""

from dataclasses import dataclass

import numpy as np

BOUND = 1e-9


@dataclass(frozen=True)
class Comparison:
    """How far the gradients on all ranks are from one device's.

    difference  largest |got - want| of all
    error       largest |got - want| / max(max|want|, 1e-3 g), which is compared with the bound
    parameter   the first one, in global order, beyond the bound; if none is, the one with the
                largest error
    rank        the first rank on which it is
    ratio       got / want at that parameter's largest difference: 0.25 or 4 hint at the cause
    """

    difference: float
    error: float
    parameter: str
    rank: int
    ratio: float
    bound: float = BOUND

    ok = property(lambda self: bool(self.error <= self.bound))

    def __str__(self):
        if self.ok:
            return f"largest error {self.error:.1e}"
        return (
            f"{self.parameter} differs on rank {self.rank}: largest error {self.error:.1e} "
            f"(bound {self.bound:.0e}), got/want = {self.ratio:.6g}"
        )


def compare(got: list[dict], want: dict[str, np.ndarray], bound: float = BOUND) -> Comparison:
    """Compare the gradients of every rank with one device's, parameter by parameter.

    A gradient that is missing, has another shape, is not finite, or is unexpected has error inf.
    """
    if not got or not want:
        raise ValueError(f"nothing to compare: {len(got)} ranks, {len(want)} parameters")
    most = max(largest(w) for w in want.values())
    rows, difference = [], 0.0
    for name in dict.fromkeys([*want, *(name for gradients in got for name in gradients)]):
        for rank, gradients in enumerate(got):
            off, ratio = _difference(gradients.get(name), want.get(name))
            bar = scale(want[name], most) if name in want else 1.0
            difference = max(difference, off)
            rows.append((off / (bar or 1.0), name, rank, ratio))
    failing = [row for row in rows if not row[0] <= bound]
    _, name, rank, ratio = failing[0] if failing else max(rows)
    return Comparison(difference, max(row[0] for row in rows), name, rank, ratio, bound)


def scale(want: np.ndarray, most: float) -> float:
    """Return what an error is divided by: max(max|want|, 1e-3 of the most in the model)."""
    return max(largest(want), 1e-3 * most)


def largest(w: np.ndarray) -> float:
    """Return the largest absolute value among the finite elements, or 0."""
    return float(np.abs(w, where=np.isfinite(w), out=np.zeros(w.shape)).max(initial=0.0))


def _difference(g: np.ndarray | None, w: np.ndarray | None) -> tuple[float, float]:
    """Return the largest |g - w| and the ratio g / w there (nan where w is 0)."""
    if g is None or w is None or g.shape != w.shape:
        return np.inf, np.nan
    g, w = g.astype(np.float64), w.astype(np.float64)
    off = np.abs(
        np.subtract(g, w, where=np.isfinite(g) & np.isfinite(w), out=np.full(w.shape, np.inf))
    )
    if not off.size:
        return 0.0, np.nan
    worst = np.unravel_index(off.argmax(), off.shape)
    compared = np.isfinite(off[worst]) and w[worst] != 0
    return float(off[worst]), float(g[worst] / w[worst]) if compared else np.nan
