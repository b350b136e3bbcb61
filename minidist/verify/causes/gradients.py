"""From wrong gradients to their cause, if the numbers show one.

Input: the gradients of the ranks and of one device, and how batch and model are cut. Each
examination checks whether the wrong gradients are sums or multiples of right ones. The first that
matches names the cause; if none does, no cause is named. Nothing is computed if nothing is wrong.
"""

from collections.abc import Callable

import numpy as np

from minidist.verify.causes.example_counts import weights
from minidist.verify.causes.examples import alone, examples, partial_sums
from minidist.verify.causes.factors import factor
from minidist.verify.causes.finding import Finding, Gradients
from minidist.verify.causes.places import elsewhere
from minidist.verify.compare import BOUND, SINGLE
from minidist.verify.strategies.cases import INPUT

DIGITS = {"bfloat16": 8, "float16": 11, "float32": 24}  # binary ones of the mantissa
UNKNOWN = (
    "no known cause fits (tried: factors, rounding, sums of examples and of ranks, other places)"
)


def cause(finding: Finding) -> str | None:
    """Return in words what causes these gradients; None if no examination knows."""
    if weights := _weights(finding):
        return weights
    if not finding.wrong:
        return None
    for examine in EXAMINATIONS[: -1 if finding.promise else None]:
        if message := examine(finding):
            return message
    return None


def _weights(f: Finding) -> str | None:
    """The weights are wrong before any gradient is computed."""
    for rank, held in enumerate(f.held):
        for name, (found, slice_of_it) in held.items():
            if not np.array_equal(found, slice_of_it):
                other = next(
                    (r for r in range(rank) if np.array_equal(f.held[r][name][0], found)), None
                )
                also = "" if other is None else f"; it holds the same numbers as rank {other}"
                return f"rank {rank}'s weights in {name} are not its part of the global ones{also}"
    return None


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
            how = f"rounding to {kind}: numbers lost digits on the way"
            return f"right, except for {how}{f.where()}"
    return None


def _weights_instead(f: Finding) -> str | None:
    weights = f.case.model.named_parameters()
    if all(n in weights and np.array_equal(g[n], weights[n].data) for g in f.got for n in f.wrong):
        return f"these are the weights, not their gradients{f.where()}"
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


EXAMINATIONS: list[Callable[[Finding], str | None]] = [
    _not_finite,
    _nothing,
    rounded,
    _weights_instead,
    factor,
    examples,
    _parts_of_a_sum,
]


def right_from(finding: Finding) -> str | None:
    """Return from which parameter on all gradients are right, if all before it are wrong.

    The mistake is then just below it: in the gradient that it passes back, or in how that is used.
    """
    names = [n for n in finding.names if n != INPUT]
    wrong = [n in finding.wrong for n in names]
    first_right = wrong.index(False) if False in wrong else 0
    if first_right and not any(wrong[first_right:]):
        return f"all from {names[first_right]} on are right"
    return None


def reasons(f: Finding) -> list[str]:
    """Return why a reader's function breaks its promise, and from where on it is right."""
    if not f.wrong and (f.promise == "exact" or len(f.names) < len(f.want)):
        return []  # a gradient is missing, or unexpected, and the others are right
    asked = (ask(f) for ask in ASKED[f.promise] if f.trained or ask is cause)
    words = next(filter(None, asked), UNKNOWN)
    place = right_from(f) if f.promise == "exact" and "only in" not in words else None
    return [words, place] if place else [words]


def _replayed(f: Finding) -> str | None:
    """A replay's numbers differ by rounding, or in one value."""
    want = f.flat(f.want)
    off = np.stack([f.flat(g) for g in f.got]) - want
    if np.abs(off).max(initial=0.0) <= 1e-12 * f.most:
        return "right but for rounding, not bit for bit: the sum was taken in another order"
    wrong = off != 0
    promised, less = np.broadcast_to(want, off.shape)[wrong], off[wrong]
    if wrong.sum() > 1 and np.ptp(promised) == np.ptp(less) == 0:
        there = promised[0] + less[0]
        count = f"{wrong.sum()} of {wrong.size} elements differ"
        return f"{count}: {promised[0]:g} is promised, {there:g} is there"
    return None


ASKED: dict[str, list[Callable[[Finding], str | None]]] = {  # of a reader's function, by promise
    "exact": [cause, partial_sums, weights, alone, _parts_of_a_sum, elsewhere],
    "replay": [_replayed, factor, elsewhere],
    "identity": [weights, factor, elsewhere],
}
