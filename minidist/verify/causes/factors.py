"""Gradients that are one device's times a factor, or one factor per stage: which number is it?

Letters: N ranks, m micro-batches, S stages.
"""

from itertools import product
from math import log2

import numpy as np

from minidist.verify.causes.finding import Finding


def factor(f: Finding) -> str | None:
    """All wrong gradients have one factor, or one per stage: a power of a number of this case."""
    ratios: dict[str, float] = {}
    for name in f.wrong:
        of_ranks = [c for g in f.got if (c := _ratio(f, g[name], name)) is not None]
        if len(of_ranks) < len(f.got) or np.ptp(of_ranks) > f.exact * abs(of_ranks[0]):
            return None
        ratios[name] = of_ranks[0]
    first, *others = ratios.values()
    if all(abs(ratio - first) <= f.exact * abs(first) for ratio in others):
        message = _copies(f, first) or _as_power(f, first) or _padding(f, first)
        message = _in_all(f, first, message) if f.promise else message
        return None if message is None else message + f.where()
    for (what, base), sign, own in product(f.sizes().items(), (-1, 1), (0, 1)):
        powers = {n: float(base) ** (sign * (f.split.behind(n) + own)) for n in ratios}
        if all(abs(ratios[n] / powers[n] - 1) <= f.exact for n in ratios):
            how, each = "divided" if sign < 0 else "multiplied", f.split.each
            exponent = f"{each}s behind it" + (", and its own" if own else "")
            ratio = f"ratio {float(base) ** sign:.4g}^({exponent})"
            return f"{ratio}: {how} by the {base} {what} at every {each}"
    return None


def _ratio(f: Finding, g: np.ndarray, name: str) -> float | None:
    """Return c where g = c want, in all elements."""
    w = f.want[name]
    if not (w * w).sum() > 0:
        return None
    c = float((g * w).sum() / (w * w).sum())
    return c if c and f.near(g / c, w, name) else None


def _as_power(f: Finding, c: float) -> str | None:
    meanings = {1: "a missing 1/{}", -1: "1/{} applied twice", 2: "a missing 1/{}^2", -2: "1/{}^2"}
    letters = {"micro-batches": "m", "stages": "S"}
    for power, meaning in meanings.items():
        for what, base in f.sizes().items():
            if abs(c / float(base) ** power - 1) <= f.exact:
                of = {1: "", -1: "1 / ", 2: "the square of the ", -2: "1 / the square of the "}
                letter = letters.get(what, "N")
                return f"ratio {c:.4g} = {of[power]}number of {what}: {meaning.format(letter)}"
    return None


def _padding(f: Finding, c: float) -> str | None:
    """The divisor counts the targets that are IGNORED, too."""
    count, every = f.case.total, f.case.targets.size
    if count < every and abs(c * every / count - 1) <= f.exact:
        return f"ratio {c:.4g} = {count} targets that count / all {every}: padding was counted"
    return None


def _copies(f: Finding, c: float) -> str | None:
    """A parameter held by several stages is counted once for each of them."""
    copies = {sum(n in stage for stage in f.split.stages) for n in f.wrong}
    if len(copies) == 1 and 1 < (count := copies.pop()) and abs(c / count - 1) <= f.exact:
        return f"ratio {c:.4g} = number of stages that hold it: summed once more than it should be"
    return None


def _in_all(f: Finding, c: float, known: str | None) -> str | None:
    """Add what else a reader's function may have done."""
    whole = 1 < c <= f.case.total and abs(c / max(1, round(c)) - 1) <= f.exact
    if sum(np.count_nonzero(f.want[n]) for n in f.wrong) < 8:
        return known  # a few numbers are easily multiples
    if whole and (uses := f.uses()):
        return f"ratio {c:.4g}, in a weight that {uses} have: summed again for each of them"
    if whole:
        again = (
            f"{known}, or a sum summed again" if known else f"ratio {c:.4g}: added {c:.4g} times"
        )
        return f"{again}, or {c:.4g} micro-batches that were not averaged"
    if known is None and (words := loss_scale(c, f.exact)):
        return f"ratio {c:.4g} = {words}"
    why = "the sign is wrong" if c < 0 else "scaled after the sum (clipped?)"
    return known or f"ratio {c:.4g}: {why}"


def loss_scale(c: float, exact: float) -> str:
    """Return in words a power of two from 2^8, or below 2^-8, as a loss scale is; or ""."""
    power = round(log2(abs(c)))
    if abs(power) < 8 or abs(abs(c) / 2.0**power - 1) > exact:
        return ""
    how = "not divided out" if power > 0 else "divided out once too often"
    return f"2^{power}: a loss scale that was {how}?"
