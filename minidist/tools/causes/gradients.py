"""From wrong gradients to their cause, if the numbers show one.

Input: the gradients of the ranks and of one device, and how batch and model are cut. Each
examination checks whether one known mistake gives exactly these numbers: it computes on one device
what the mistake would give. The first examination that matches names the cause; if none does, no
cause is named. Nothing is computed if nothing is wrong.
"""

from collections.abc import Callable
from itertools import product

import numpy as np

from minidist.tools.causes import context, convolutions
from minidist.tools.causes.counterfactuals import (
    BIASES,
    BLOCKS,
    PERMUTATIONS,
    STATISTICS,
    with_biases_times,
    with_local_masks,
    with_overwritten_inputs,
    with_padding,
    with_permuted_heads,
    with_repeated_masks,
    with_statistics,
    without_tying,
)
from minidist.tools.causes.examples import examples
from minidist.tools.causes.experts import mixture
from minidist.tools.causes.factors import factor
from minidist.tools.causes.finding import Finding, some
from minidist.tools.strategies.cases import INPUT


def cause(finding: Finding) -> str | None:
    """Return in words what causes these gradients; None if no examination knows."""
    if weights := _weights(finding):
        return weights
    if not finding.wrong:
        return None
    for examine in EXAMINATIONS:
        if said := examine(finding):
            return said
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


def _rounded(f: Finding) -> str | None:
    """The numbers are rounded to float32, and otherwise right."""
    for g in f.got:
        for name in f.wrong:
            rounded = g[name].astype(np.float32).astype(g[name].dtype)
            scale = np.abs(f.want[name]).max(initial=0.0)
            off = np.abs(g[name] - f.want[name]).max(initial=0.0)
            if not np.array_equal(rounded, g[name]) or off > 1e-5 * scale:
                return None
    return f"right, except for rounding to float32: numbers lost digits on the way{f.where()}"


def _parts_of_a_sum(f: Finding) -> str | None:
    """The ranks have different parts, which add up to the right gradient; no rank has it."""
    for name in f.wrong:
        different: list[np.ndarray] = []
        for g in f.got:
            if not any(f.near(g[name], seen, name) for seen in different):
                different.append(g[name])
        if len(different) < 2 or not f.near(sum(different), f.want[name], name):
            return None
    if any(all(f.near(g[n], f.want[n], n) for n in f.wrong) for g in f.got):
        return None
    return f"the ranks' parts add up to the gradient: an all_reduce is missing{f.where()}"


def _one_use(f: Finding) -> str | None:
    """A tied weight has the gradient of one of its two uses."""
    uses = without_tying(f.case)
    if uses is None or f.wrong != [uses.name]:
        return None
    found = []
    for g in f.got:
        has = [use for use, w in uses.gradients.items() if f.near(g[uses.name], w, uses.name)]
        if not has:
            return None
        found.append(has[0])
    by_rank = ", ".join(f"rank {r} {use}'s" for r, use in enumerate(found))
    return f"{uses.name} is tied, and has the gradient of one of its uses ({by_rank}): not summed"


def _overwritten(f: Finding) -> str | None:
    """Only the weight's gradient needs the stage's input; the bias's and the input's do not."""
    firsts = [stage[0] for stage in f.split.stages[1:] if stage]
    if not f.wrong or not set(f.wrong) <= set(firsts):
        return None
    again = with_overwritten_inputs(f.case, firsts, f.split)
    if not f.is_everywhere(again):
        return None
    return (
        f"differs only in the first weight of stages > 0 ({some(f.wrong)}): "
        "the input that a stage keeps was overwritten by a later micro-batch's"
    )


def _bias(f: Finding) -> str | None:
    N = f.split.tensor
    for which in BIASES if N > 1 else ():
        for times in (N, 0):
            again = with_biases_times(f.case, times, which)
            if again is not None and f.is_everywhere(again):
                how = f"added {N} times, once per rank" if times else "not added at all"
                return f"equals the gradient of a model whose biases are {how}"
    return None


def _permuted(f: Finding) -> str | None:
    cuts = product(BLOCKS.items(), PERMUTATIONS.items()) if f.split.tensor > 1 else ()
    for (weight, (names, k)), (how, order) in cuts:
        again = with_permuted_heads(f.case, weight, order, f.split.tensor)
        if again is not None and f.is_everywhere(again):
            return f"equal after permuting {names}: their columns are cut {how.format(k=k)}"
    return None


def _masks(f: Finding) -> str | None:
    parts = f.split.parts(len(f.case.inputs))
    if len(parts) > 1:
        for what, by in (("rank", 0), ("micro-batch", 1)):
            groups: dict = {}
            for key, rows in parts.items():
                groups.setdefault(key[: 1 + by], []).append(rows)
            if f.is_everywhere(
                with_local_masks(f.case, [np.concatenate(g) for g in groups.values()])
            ):
                return f"equals the gradient with masks for examples 0, 1, ... of each {what}"
    if f.split.tensor > 1:
        again = with_repeated_masks(f.case, f.split.tensor)
        if again is not None and f.is_everywhere(again):
            return "equals the gradient with the first positions' dropout mask on every rank"
    return None


def _statistics(f: Finding) -> str | None:
    """Batch norm has other statistics; those of the running ones may be wrong alone."""
    if f.split.data == len(f.got) > 1 == f.split.micro_batches:
        for what, sums in STATISTICS.items():
            again = with_statistics(f.case, len(f.got), sums)
            if again is not None and f.is_on(0, again):
                return f"equals the gradient with {what}"
    if all(name.endswith("running_var") for name in f.wrong):
        return "only the running variance is wrong: corrected by another count / (count - 1)"
    return None


def _padding(f: Finding) -> str | None:
    N = f.split.tensor
    if N > 1 and (found := with_padding(f.case, N)) is not None and f.is_everywhere(found[1]):
        return f"equals the gradient with {found[0]} columns of padding in the softmax"
    return None


def _context(f: Finding) -> str | None:
    for what, compute in context.explanations(f.case, f.split.positions).items():
        if f.is_everywhere(compute()):
            return f"equals the gradient of {what}"
    return None


def _convolutions(f: Finding) -> str | None:
    known = convolutions.explanations(f.case, f.split.rows, f.split.tensor)
    for what, compute in known.items():
        if all(f.is_on(rank, gradients) for rank, gradients in enumerate(compute())):
            return f"equals the gradient with {what}"
    return None


EXAMINATIONS: list[Callable[[Finding], str | None]] = [
    _not_finite,
    _nothing,
    _rounded,
    mixture,
    factor,
    _statistics,
    _overwritten,
    _one_use,
    examples,
    _parts_of_a_sum,
    _bias,
    _permuted,
    _masks,
    _padding,
    _context,
    _convolutions,
]


def right_from(finding: Finding) -> str | None:
    """Say from which parameter on all gradients are right, if all before it are wrong.

    The mistake is then just below it: in the gradient that it passes back, or in how that is used.
    """
    names = [n for n in finding.names if n != INPUT]
    wrong = [n in finding.wrong for n in names]
    first_right = wrong.index(False) if False in wrong else 0
    if first_right and not any(wrong[first_right:]):
        return f"all from {names[first_right]} on are right"
    return None
