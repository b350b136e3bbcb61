"""Compare the gradients of ranks with one device's, parameter by parameter.

The bound: max|got - want| <= 1e-9 max(max|want|, 1e-3 g), where g is the largest gradient of the
whole model. Rounding errors in float64 are far below the bound, all known mistakes far above.
"""

import textwrap
from dataclasses import dataclass, replace

import numpy as np

from minidist.errors import WrongInput

BOUND = 1e-9
SINGLE = 1e-4  # errors up to here are those of float32
ROUNDING = 1e-12  # of a gradient's scale: a number up to here may be 0


@dataclass(frozen=True)
class Comparison:
    """How far the gradients on all ranks are from one device's.

    difference  largest |got - want| of all
    error       largest |got - want| / max(max|want|, 1e-3 g), which is compared with the bound
    parameter   the first one, in global order, that is missing, or else beyond the bound; if none
                is, the one with the largest error
    rank        the first rank on which it is
    ratio       got / want at that parameter's largest difference: 0.25 or 4 hint at the cause;
                nan where want is 0 but for rounding
    fault       in words, where nothing can be subtracted: "is missing"; or ""
    """

    difference: float
    error: float
    parameter: str
    rank: int
    ratio: float
    fault: str = ""
    bound: float = BOUND

    ok = property(lambda self: bool(self.error <= self.bound))

    def __str__(self):
        if self.ok:
            return f"largest error {self.error:.1e}"
        if self.fault:
            return f"{self.parameter} {self.fault} on rank {self.rank}"
        return (
            f"{self.parameter} differs on rank {self.rank}: largest error {self.error:.1e} "
            f"(bound {self.bound:.0e})"
            + ("" if np.isnan(self.ratio) else f", got/want = {self.ratio:.6g}")
        )


def compare(got: list[dict], want: dict[str, np.ndarray], bound: float = BOUND) -> Comparison:
    """Compare the gradients of every rank with one device's, parameter by parameter.

    A gradient that is missing, unexpected, not finite, not real or of another shape has error inf.
    """
    each = by_parameter(got, want, bound).values()
    wrong = sorted((c for c in each if not c.ok), key=lambda c: c.fault != "is missing")
    one = wrong[0] if wrong else max(each, key=lambda c: c.error)
    largest_of = {name: max(getattr(c, name) for c in each) for name in ("difference", "error")}
    return replace(one, **largest_of)


def by_parameter(got: list[dict], want: dict, bound: float = BOUND) -> dict[str, Comparison]:
    """Return the comparison of each parameter: the first rank that is wrong, the largest error."""
    if not got or not want:
        raise WrongInput(f"nothing to compare: {len(got)} ranks, {len(want)} parameters")
    most = max(largest(w) for w in want.values())
    comparisons = {}
    for name in dict.fromkeys([*want, *(name for gradients in got for name in gradients)]):
        w = want.get(name)
        bar = (1.0 if w is None else scale(w, most)) or 1.0
        ranks = [(*_difference(g.get(name), w, ROUNDING * bar), r) for r, g in enumerate(got)]
        ranks.sort(key=lambda of_rank: of_rank[2] != "is missing")
        difference = max(of_rank[0] for of_rank in ranks)
        _, ratio, fault, rank = next((x for x in ranks if not x[0] / bar <= bound), max(ranks))
        error = difference / bar
        comparisons[name] = Comparison(difference, error, name, rank, ratio, fault, bound)
    return comparisons


def scale(want: np.ndarray, most: float) -> float:
    """Return the divisor of an error: max(max|want|, 1e-3 of the most in the model)."""
    return max(largest(want), 1e-3 * most)


def largest(w: np.ndarray) -> float:
    """Return the largest absolute value among the finite elements, or 0."""
    return float(np.abs(w, where=np.isfinite(w), out=np.zeros(w.shape)).max(initial=0.0))


def is_real(g: np.ndarray) -> bool:
    return g.dtype.kind in "fiub"


def _difference(
    g: np.ndarray | None, w: np.ndarray | None, tiny: float
) -> tuple[float, float, str]:
    """Return the largest |g - w|, the ratio g / w there (nan where |w| <= tiny), and the fault."""
    if w is None:
        return (0.0, np.nan, "") if g is None else (np.inf, np.nan, "is unexpected")
    if g is None:
        return np.inf, np.nan, "is missing"
    if g.shape != w.shape:
        return np.inf, np.nan, f"is {list(g.shape)}, not {list(w.shape)},"
    if not is_real(g):
        return np.inf, np.nan, f"is {g.dtype.name}, not real,"
    g, w = g.astype(np.float64), w.astype(np.float64)
    finite = np.isfinite(g) & np.isfinite(w)
    off = np.abs(np.subtract(g, w, where=finite, out=np.full(w.shape, np.inf)))
    if not off.size:
        return 0.0, np.nan, ""
    worst = np.unravel_index(off.argmax(), off.shape)
    ratio = float(g[worst] / w[worst]) if finite[worst] and abs(w[worst]) > tiny else np.nan
    return float(off[worst]), ratio, "" if finite.all() else "is not finite"


def in_one_line(words: str) -> str:
    """Return a repr's words, cut at the end where pytest would cut out their middle."""
    return textwrap.shorten(words, 240, placeholder=" ...")
