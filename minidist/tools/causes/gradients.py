"""From wrong gradients to their cause, where the numbers say one.

Given are what the ranks have, what one device has, and how the batch and the model are cut. Each
examination asks whether one known mistake would leave exactly these numbers, by computing on one
device what it would leave. The first that says yes has the word; if none does, no cause is named.
Nothing is computed where nothing is wrong.

Letters: N ranks, r one of them; M micro-batches; S stages; n targets of the whole batch, n_k of its
k-th part.
"""

from collections.abc import Callable
from itertools import product

import numpy as np

from minidist.tools.causes.counterfactuals import (
    BIASES,
    PERMUTATIONS,
    of_examples,
    with_biases_times,
    with_local_masks,
    with_overwritten_inputs,
    with_padding,
    with_permuted_heads,
    with_repeated_masks,
    without_tying,
)
from minidist.tools.causes.finding import Finding, Gradients, some
from minidist.tools.strategies.cases import INPUT


def cause(finding: Finding) -> str | None:
    """Return in words what leaves these gradients; None if no examination knows."""
    if weights := _weights(finding):
        return weights
    if not finding.wrong:
        return None
    for examine in EXAMINATIONS:
        if said := examine(finding):
            return said
    return None


def _weights(f: Finding) -> str | None:
    """The weights differ before there is a gradient."""
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
    for rank, g in enumerate(f.got):
        for name in f.names:
            if not np.isfinite(g[name]).all():
                return f"{name} is not finite on rank {rank}, and one device's is"
    return None


def _rounded(f: Finding) -> str | None:
    """The numbers are float32's, and right but for that."""
    for g in f.got:
        for name in f.wrong:
            rounded = g[name].astype(np.float32).astype(g[name].dtype)
            scale = np.abs(f.want[name]).max(initial=0.0)
            off = np.abs(g[name] - f.want[name]).max(initial=0.0)
            if not np.array_equal(rounded, g[name]) or off > 1e-5 * scale:
                return None
    return f"right, but for the rounding of float32: numbers lost digits on the way{f.where()}"


def _factor(f: Finding) -> str | None:
    """One factor in all that is wrong, or one per stage: a power of a number of this case."""
    ratios = {}
    for name in f.wrong:
        of_ranks = [_ratio(f, g[name], name) for g in f.got]
        if None in of_ranks or np.ptp(of_ranks) > 1e-6 * abs(of_ranks[0]):
            return None
        ratios[name] = of_ranks[0]
    first, *others = ratios.values()
    if all(abs(ratio - first) <= 1e-6 * abs(first) for ratio in others):
        said = _copies(f, first) or _as_power(f, first)
        return None if said is None else said + f.where()
    for (what, base), sign, own in product(f.sizes().items(), (-1, 1), (0, 1)):
        powers = {n: float(base) ** (sign * (f.split.behind(n) + own)) for n in ratios}
        if all(abs(ratios[n] / powers[n] - 1) <= 1e-6 for n in ratios):
            how, each = "divided" if sign < 0 else "multiplied", f.split.each
            exponent = f"{each}s behind it" + ", and its own" * own
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
            if abs(c / float(base) ** power - 1) <= 1e-6:
                of = {1: "", -1: "1 / ", 2: "the square of the ", -2: "1 / the square of the "}
                letter = letters.get(what, "N")
                return f"ratio {c:.4g} = {of[power]}number of {what}: {meaning.format(letter)}"
    return None


def _copies(f: Finding, c: float) -> str | None:
    """What several stages hold counts as often."""
    copies = {sum(n in stage for stage in f.split.stages) for n in f.wrong}
    if len(copies) == 1 and 1 < (count := copies.pop()) and abs(c / count - 1) <= 1e-6:
        return f"ratio {c:.4g} = number of stages that hold it: summed once more than it should be"
    return None


def _examples(f: Finding) -> str | None:
    """What each rank has is a sum of gradients of parts of the batch, each times some factor."""
    parts, total = f.split.parts(len(f.case.inputs)), f.case.targets.size
    if len(parts) < 2:
        return None
    found = {key: of_examples(f.case, rows) for key, rows in parts.items()}
    factors = [_decompose(f, g, found) for g in f.got]
    if any(row is None for row in factors):
        return None
    ones = dict.fromkeys(parts, 1.0)

    def are(*want: dict) -> bool:
        return all(
            all(abs(row[key] - should[key]) <= 1e-6 for key in parts)
            for row, should in zip(
                factors, want * (len(factors) if len(want) == 1 else 1), strict=True
            )
        )

    sizes = {key: total * len(rows) / len(f.case.inputs) for key, rows in parts.items()}
    ranks, count = len(f.got), f.split.data
    own = [{key: float(key[0] == r * count // ranks) for key in parts} for r in range(ranks)]
    if count > 1 and are(*own):
        but = ", though as many bytes moved: something else was summed" if f.billed else ""
        own = "equals the local gradient: the all_reduce is missing"
        return f"{own}{but}{f.where()}"
    for k in range(count):
        if count > 1 and are({key: count * float(key[0] == k) for key in parts}):
            return (
                f"equals {count} times the gradient of rank {k}'s examples: all had the same batch"
            )
    of_data = {k: sum(size for key, size in sizes.items() if key[0] == k) for k, _ in parts}
    for much, letter in ((len(of_data), "mean"), (1, "sum")):
        if count > 1 and are({key: total / (much * of_data[key[0]]) for key in parts}):
            return f"equals the {letter} of the ranks' means, as if their shares were even"
    for much, letter in ((len(parts), "mean"), (1, "sum")):
        if are({key: total / (much * sizes[key]) for key in parts}):
            return f"equals the {letter} of micro-batches' means: each divided by its own targets"
    for what, chosen in _choices(f, parts).items():
        for times, said in ((0.0, "without {}: skipped"), (2.0, "with {} counted twice")):
            if are(ones | dict.fromkeys(chosen, times)):
                return f"equals the gradient {said.format(what)}{f.where()}"
    return None


def _choices(f: Finding, parts: dict) -> dict[str, list[tuple[int, int]]]:
    """Return {its name: keys} of what may be left out: a share, a micro-batch."""
    found, M, several = {}, f.split.micro_batches, f.split.data > 1
    for k in range(f.split.data if several else 0):
        found[f"the examples of data-parallel rank {k}"] = [key for key in parts if key[0] == k]
    for i in range(M if M > 1 else 0):
        last = ", the last" if all(other <= i for _, other in parts) else ""
        whose = " of every rank" if several else ""
        found[f"micro-batch {i}{last}{whose}"] = [key for key in parts if key[1] == i]
    for k, i in parts if several and M > 1 else ():
        found[f"micro-batch {i} of rank {k}"] = [(k, i)]
    return {what: keys for what, keys in found.items() if keys}


def _decompose(f: Finding, g: Gradients, parts: dict) -> dict | None:
    """Return the factors with which the parts' gradients add up to g; None if they do not."""
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


def _parts_of_a_sum(f: Finding) -> str | None:
    """What the ranks have differs, and adds up to what they should have."""
    for name in f.wrong:
        different: list[np.ndarray] = []
        for g in f.got:
            if not any(f.near(g[name], seen, name) for seen in different):
                different.append(g[name])
        if len(different) < 2 or not f.near(sum(different), f.want[name], name):
            return None
    return f"the ranks' parts add up to it: an all_reduce is missing{f.where()}"


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
    """A weight's gradient needs the stage's input, its bias' and the input's do not."""
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
    for what, order in PERMUTATIONS.items() if f.split.tensor > 1 else ():
        again = with_permuted_heads(f.case, order, f.split.tensor)
        if again is not None and f.is_everywhere(again):
            return f"equal after permuting Q, K, V: their columns are cut {what}"
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


def _padding(f: Finding) -> str | None:
    N = f.split.tensor
    if N > 1 and (found := with_padding(f.case, N)) is not None and f.is_everywhere(found[1]):
        return f"equals the gradient with {found[0]} columns of padding in the softmax"
    return None


EXAMINATIONS: list[Callable[[Finding], str | None]] = [
    _not_finite,
    _nothing,
    _rounded,
    _factor,
    _overwritten,
    _one_use,
    _examples,
    _parts_of_a_sum,
    _bias,
    _permuted,
    _masks,
    _padding,
]


def right_from(finding: Finding) -> str | None:
    """Say from which parameter on all are right, if those before it all are wrong.

    Backward goes wrong just below it: what it hands back, or what is done with that.
    """
    names = [n for n in finding.names if n != INPUT]
    wrong = [n in finding.wrong for n in names]
    first_right = wrong.index(False) if False in wrong else 0
    if first_right and not any(wrong[first_right:]):
        return f"all from {names[first_right]} on are right"
    return None
