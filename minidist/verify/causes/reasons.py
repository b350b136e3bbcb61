"""From wrong gradients to their cause, if the numbers show one.

Each examination checks whether the wrong gradients are sums or multiples of right ones, or the
right numbers at other places. The first that matches names the cause; if none does, there is none.
"""

from collections.abc import Callable
from itertools import chain, combinations
from math import log2

import numpy as np

from minidist.verify.causes.examples import (
    alone,
    counts,
    of_examples,
    partial_sums,
    shares,
    shares_of,
)
from minidist.verify.causes.finding import Finding, Gradients, numbered, some
from minidist.verify.compare import BOUND, SINGLE
from minidist.verify.strategies.cases import INPUT

DIGITS = {"bfloat16": 8, "float16": 11, "float32": 24}  # binary ones of the mantissa
UNKNOWN = (
    "no known cause fits (tried: factors, rounding, sums of examples and of ranks, other places)"
)


def reasons(f: Finding) -> list[str]:
    """Return why gradients are not what was promised, and from where on they are right."""
    exact = f.promise in ("", "exact")
    if not f.wrong and (exact or len(f.names) < len(f.want)):
        return []  # a gradient is missing, or unexpected, and the others are right
    causes = (ask(f) for ask in ASKED[f.promise] if f.trained or ask in OF_ALL)
    cause = next(filter(None, causes), UNKNOWN)
    place = _right_from(f) if exact and "only in" not in cause else None
    return [cause, place] if place else [cause]


def _right_from(f: Finding) -> str | None:
    """Return from which parameter on all gradients are right, if all before it are wrong.

    The mistake is then just below it: in the gradient that it passes back, or in how that is used.
    """
    names = [n for n in f.names if n != INPUT]
    wrong = [n in f.wrong for n in names]
    first_right = wrong.index(False) if False in wrong else 0
    if first_right and not any(wrong[first_right:]):
        return f"all from {names[first_right]} on are right"
    return None


# What can be seen of any numbers.


def _nothing(f: Finding) -> str | None:
    if not any(f.got[r][n].any() for r in range(len(f.got)) for n in f.names):
        return "every gradient is zero: nothing was computed"
    return None


def _not_finite(f: Finding) -> str | None:
    for name, w in f.want.items():
        if not np.isfinite(w).all():
            return f"{name} is not finite on one device either"
    for rank, g in enumerate(f.got):
        for name in f.names:
            if not np.isfinite(g[name]).all():
                return f"{name} is not finite on rank {rank}, but is on one device"
    return None


def rounded(f: Finding) -> str | None:
    """The numbers have a smaller type's digits, and are otherwise right."""
    pairs = [(g[n], f.want[n]) for g in f.got for n in f.wrong]
    off = max(np.abs(g - w).max(initial=0) / (np.abs(w).max(initial=0) or 1) for g, w in pairs)
    for kind, digits in DIGITS.items():
        allowed = min(1 / 16, max(1e-5, 2.0 ** (6 - digits)))
        if off <= allowed and all(_has(digits, g) for g, _ in pairs):
            return (
                f"right, except for rounding to {kind}: numbers lost digits on the way{f.where()}"
            )
    return None


def _has(digits: int, x: np.ndarray) -> bool:
    """Return whether all numbers have at most that many binary digits."""
    mantissa = np.ldexp(np.frexp(x.astype(np.float64))[0], digits)
    return bool((mantissa == np.round(mantissa)).all())


def bound_of(got: list[Gradients]) -> float:
    """Return up to where errors are rounding, by the digits that these gradients have."""
    arrays = [array for g in got for array in g.values()]
    single = all(x.dtype.itemsize < 8 or _has(DIGITS["float32"], x) for x in arrays)
    return SINGLE if single else BOUND


def _weights_instead(f: Finding) -> str | None:
    weights = f.case.model.named_parameters()
    if all(n in weights and np.array_equal(g[n], weights[n].data) for g in f.got for n in f.wrong):
        return f"these are the weights, not their gradients{f.where()}"
    return None


def _replayed(f: Finding) -> str | None:
    """A replay's numbers differ by rounding, or in one value."""
    want = f.flat(f.want)
    off = np.stack([f.flat(g) for g in f.got]) - want
    if np.abs(off).max(initial=0.0) <= 1e-12 * f.most:
        return "right but for rounding, not bit for bit: the sum was taken in another order"
    wrong = off != 0
    promised, less = np.broadcast_to(want, off.shape)[wrong], off[wrong]
    if wrong.sum() > 1 and np.ptp(promised) == np.ptp(less) == 0:
        count = f"{wrong.sum()} of {wrong.size} elements differ"
        return f"{count}: {promised[0]:g} is promised, {promised[0] + less[0]:g} is there"
    return None


# All wrong gradients are one device's times one factor: which number is it?


def factor(f: Finding) -> str | None:
    """The factor is a power of the number of ranks, or it is what padding changes."""
    each = [_ratio(f, g[name], name) for name in f.wrong for g in f.got]
    ratios = [c for c in each if c is not None]
    if len(ratios) < len(each) or np.ptp(ratios) > 2 * f.exact * abs(c := ratios[0]):
        return None
    message = _as_power(f, c) or _padding(f, c)
    message = _of_a_reader(f, c, message) if f.promise else message
    return None if message is None else message + f.where()


def _ratio(f: Finding, g: np.ndarray, name: str) -> float | None:
    """Return c where g = c want, in all elements."""
    w = f.want[name]
    if not (w * w).sum() > 0:
        return None
    c = float((g * w).sum() / (w * w).sum())
    return c if c and f.near(g / c, w, name) else None


def _as_power(f: Finding, c: float) -> str | None:
    for power, (number, meaning) in POWERS.items():
        if f.ranks > 1 and abs(c / float(f.ranks) ** power - 1) <= f.exact:
            kind = "data-parallel ranks" if f.promise else "ranks"
            return f"ratio {c:.4g} = {number}number of {kind}: {meaning}"
    return None


POWERS = {
    1: ("", "a missing 1/N"),
    -1: ("1 / ", "1/N applied twice"),
    2: ("the square of the ", "a missing 1/N^2"),
    -2: ("1 / the square of the ", "1/N^2"),
}


def _padding(f: Finding, c: float) -> str | None:
    """The divisor counts the targets that are IGNORED, too."""
    count, every = f.case.total, f.case.targets.size
    if count < every and abs(c * every / count - 1) <= f.exact:
        return f"ratio {c:.4g} = {count} targets that count / all {every}: padding was counted"
    return None


def _of_a_reader(f: Finding, c: float, cause: str | None) -> str | None:
    """Add what else a reader's function may have done."""
    integer = 1 < c <= f.case.total and abs(c / max(1, round(c)) - 1) <= f.exact
    if sum(np.count_nonzero(f.want[n]) for n in f.wrong) < 8:
        return cause  # a few numbers are easily multiples
    if integer and (uses := f.uses()):
        return f"ratio {c:.4g}, in a weight that {uses} have: summed again for each of them"
    if integer:
        again = (
            f"{cause}, or a sum summed again" if cause else f"ratio {c:.4g}: added {c:.4g} times"
        )
        return f"{again}, or {c:.4g} micro-batches that were not averaged"
    if cause is None and (scale := loss_scale(c, f.exact)):
        return f"ratio {c:.4g} = {scale}"
    default = "the sign is wrong" if c < 0 else "scaled after the sum (clipped?)"
    return cause or f"ratio {c:.4g}: {default}"


def loss_scale(c: float, exact: float) -> str:
    """Return in words a power of two from 2^8, or below 2^-8, as a loss scale is; or ""."""
    power = round(log2(abs(c)))
    if abs(power) < 8 or abs(abs(c) / 2.0**power - 1) > exact:
        return ""
    how = "not divided out" if power > 0 else "divided out once too often"
    return f"2^{power}: a loss scale that was {how}?"


def _parts_of_a_sum(f: Finding) -> str | None:
    """Wrong ranks have different parts, which add up to the right gradient."""
    for name in f.wrong:
        different: list[np.ndarray] = []
        for g in f.got:
            if f.promise and f.near(g[name], f.want[name], name):
                continue  # the rank does not hold it
            if not any(f.near(g[name], seen, name) for seen in different):
                different.append(g[name])
        if len(different) < 2 or not f.near(np.sum(different, axis=0), f.want[name], name):
            return None
    if not f.promise and any(all(f.near(g[n], f.want[n], n) for n in f.wrong) for g in f.got):
        return None
    of_uses = f.uses() and " (or the sum over its uses: several layers have it)"
    return f"the ranks' parts add up to the gradient: an all_reduce is missing{f.where()}{of_uses}"


# The right numbers at wrong places: of all of the gradient, or of what some ranks have added.


def elsewhere(f: Finding) -> str | None:
    """Return which parameters are exchanged or transposed, or what is at other places."""
    moved = [_moved(f, name) for name in f.trained if name in f.wrong]
    if moved and all(moved):
        return some([*filter(None, moved)])
    parts = {k: f.flat(of_examples(f.case, rows)) for k, rows in shares_of(f).items()}
    displaced = [_displaced(f, r, parts) for r, off in enumerate(f.astray) if off.any()]
    return displaced[0] if displaced and all(displaced) else None


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


def _displaced(f: Finding, rank: int, parts: dict[int, np.ndarray]) -> str | None:
    """Which ranks' parts are at other places on this rank, where the other parts are right?"""
    got, want = f.flat(f.got[rank]), f.flat(f.want)
    tiny = f.most * (1e-12 if f.bound == BOUND else 5e-6)
    if (by := _shifts(got, want, tiny, len(f.got) - 1)) is not None:
        values, times = np.unique(by, return_counts=True)
        most = values[times.argmax()]
        how = f", most of them {abs(most)} elements {'later' if most > 0 else 'earlier'}"
        return f"the right numbers at other places{how if 2 * times.max() > by.size else ''}"
    for right in chain.from_iterable(combinations(parts, n) for n in range(1, len(parts))):
        rest = sum(parts[k] for k in right)
        if _shifts(got - rest, want - rest, tiny, 0) is not None:
            others = numbered("rank", [k for k in parts if k not in right])
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
    fits = (np.abs(b[there[at]] - a[here]) <= tiny).all() and len(np.unique(at)) == len(here)
    return here - there[at] if fits else None


Ask = Callable[[Finding], str | None]
OF_ALL: list[Ask] = [_not_finite, _nothing, rounded, _weights_instead, factor, _parts_of_a_sum]
ASKED: dict[str, list[Ask]] = {  # by promise
    "": [*OF_ALL[:-1], shares, _parts_of_a_sum],
    "exact": [*OF_ALL[:-1], shares, partial_sums, counts, alone, _parts_of_a_sum, elsewhere],
    "replay": [_replayed, factor, elsewhere],
    "identity": [counts, factor, elsewhere],
}
