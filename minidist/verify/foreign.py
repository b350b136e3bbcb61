"""Somebody else's gradients against one device's: which are wrong, by what factor, and likely why.

    print(against(model, gradients, inputs, targets))

Another program has run the same weights on the same batch, in float64. Where its gradients differ,
the model runs again with each difference that is known between such programs, and each array is
turned each way that is known; what then agrees, for every parameter or for one, is the cause. What
other programs compute is in variants.py, what PyTorch calls otherwise in interop/torch.py. Of fewer
digits than float64 has, the same is asked within the rounding of these digits (compare.py).
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from minidist import nn
from minidist.errors import WrongInput, check_name
from minidist.verify.causes.examples import of_examples, shares_of
from minidist.verify.causes.finding import Finding, Gradients, numbered, some
from minidist.verify.causes.reasons import UNKNOWN, bound_of, loss_scale, reasons, rounded
from minidist.verify.compare import (
    BOUND,
    SINGLE,
    by_parameter,
    compare,
    in_one_line,
    is_real,
    largest,
)
from minidist.verify.interop.torch import Names, as_numpy, from_torch, matches
from minidist.verify.strategies.cases import Case, one_device, readers_case, trained
from minidist.verify.variants import ORDERS, variants_of

NEAR = 1e-6  # up to here weights are the same


@dataclass(frozen=True, repr=False)
class Against:
    """What `against` has found; it prints as a table, and is true if all gradients are right.

    rows   per wrong parameter: name, first rank on which it is, error as in compare.py, got / want
           (nan where want is 0), cause or ""
    cause  of all of them together, or None
    weights  of which ranks differ, in words; or ""
    """

    parameters: int
    error: float
    rows: tuple[tuple[str, int, float, float, str], ...] = ()
    cause: str | None = None
    weights: str = ""

    ok = property(lambda self: not self.rows and not self.weights)

    def __bool__(self) -> bool:
        return self.ok

    def __repr__(self) -> str:
        return in_one_line(str(self))

    def __str__(self) -> str:
        if not self.rows:
            head = "the gradients are right" if self.weights else "ok"
            right = f"{head}: all {self.parameters} gradients, largest error {self.error:.1e}"
            return "\n".join(filter(None, [self.weights, right]))
        head = f"{len(self.rows)} of {self.parameters} gradients differ"
        head += f": {self.cause}" if self.cause else ""
        first = sorted(self.rows, key=lambda row: row[4] == "")[: 3 if self.cause else 5]
        lines = [*filter(None, [self.weights]), head, *map(_in_words, first)]
        if len(first) < len(self.rows):
            lines.append(f"  and {len(self.rows) - len(first)} more")
        if not self.cause and not all(row[4] for row in self.rows):
            lines.append(f"{UNKNOWN[:-1]}; known differences between programs)")
        return "\n".join(lines)


def _in_words(row: tuple) -> str:
    name, rank, error, ratio, cause = row
    of = "" if np.isnan(ratio) else f"  got/want {ratio:.6g}"
    return f"  {name:<32} rank {rank}  error {error:.1e}{of}  {cause}".rstrip()


def against(
    model: nn.Module,
    gradients: Mapping | Sequence[Mapping],
    inputs: np.ndarray,
    targets: np.ndarray,
    *,
    loss: Callable | None = None,
    names: Names | None = None,
    weights: Mapping | Sequence[Mapping] | None = None,
) -> Against:
    """Compare {name: gradient} with those that one device computes, in float64.

    gradients  arrays under our names and in our layout; or tensors of PyTorch, or arrays under its
               names, which are turned as interop does (names: see `interop.torch.matches`). None
               is zeros. A list of them, one for each rank, or {rank: them}, also finds what the
               ranks did wrong, if their shares of the batch are those of np.array_split
    loss       of outputs and targets, with reduction_size=; by default the model's
    weights    {name: weight} of each rank, before the step, frozen ones too: are they the model's?
               `interop.torch.of_ranks(module)` collects gradients= and weights= under torchrun

    ValueError where a name or a shape fits no parameter, and for a model with dropout.
    """
    case = readers_case(model, inputs, targets, loss, {})
    if dropout := next((layer for layer in model.modules(nn.Dropout) if layer.rate), None):
        raise WrongInput(
            f"{dropout.name} drops out at {dropout.rate}, and nobody else draws these masks: "
            "compare with dropout=0 in both programs"
        )
    ranks, want = of_ranks("gradient", gradients), gradients_of(case)
    got = [by_our_names(case.model, one, names, want, r) for r, one in enumerate(ranks)]
    states = [] if weights is None else weights_of(case.model, weights, names)
    if states and len(states) != len(got):
        raise WrongInput(f"there are weights of {len(states)} ranks, and gradients of {len(got)}")
    others = other_weights(case.model, states)
    comparison = compare(got, want)
    if comparison.ok:
        return Against(len(want), comparison.error, weights=others)
    finding = Finding(got, want, case, len(got), "exact", bound_of(got))
    rows = _wrong_parameters(finding)
    cause = _cause_of_all(finding, any(row[4] for row in rows))
    if others and explained(finding, states):
        cause = "the sum of what each rank computes from its own weights"
    return Against(len(want), comparison.error, rows, cause, others)


def gradients_of(case: Case) -> Gradients:
    """Return the gradients that one device computes for the parameters that are trained."""
    names = trained(case.model)
    return {name: grad for name, grad in one_device(case).items() if name in names}


def _wrong_parameters(f: Finding) -> tuple[tuple[str, int, float, float, str], ...]:
    """Return the rows of what is beyond rounding; of all that differs, if nothing is."""
    attention = list(f.case.model.modules(nn.CausalSelfAttention))
    heads = {p.name: layer.heads for layer in attention for p in layer.qkv.parameters()}
    each = by_parameter(f.got, f.want, f.bound if f.wrong else BOUND)
    return tuple(
        (name, one.rank, one.error, one.ratio, _cause_of_one(f, name, one.rank, heads))
        for name, one in each.items()
        if not one.ok
    )


# What the ranks have, by our names: gradients, and weights, which may differ.


def of_ranks(what: str, arrays) -> list[Mapping]:
    """Return a mapping for each rank, of a list or of {rank: mapping}; ValueError otherwise."""
    ranks = [arrays] if isinstance(arrays, Mapping) else arrays
    if isinstance(arrays, Mapping) and arrays and set(arrays) == set(range(len(arrays))):
        ranks = [arrays[rank] for rank in range(len(arrays))]
    if not isinstance(ranks, list | tuple) or not all(isinstance(one, Mapping) for one in ranks):
        raise WrongInput(
            f"{what}s are {{name: {what}}}, or a list of them, not {type(arrays).__name__}; "
            "of PyTorch: {name: p.grad for name, p in module.named_parameters()}"
        )
    return list(ranks)


def by_our_names(
    model: nn.Module,
    arrays: Mapping,
    names: Names | None,
    want: Gradients,
    rank: int,
    what: str = "gradient",
) -> Gradients:
    """Return the arrays in `want` under our names, in our layout; ValueError where that fails."""
    ours, theirs = model.named_parameters(), {match.theirs for match in matches(model, names)}
    tensors = any(hasattr(g, "detach") for g in arrays.values())
    if names or tensors or len(arrays.keys() & ours) < max(1, len(arrays.keys() & theirs)):
        got = from_torch(model, arrays, names, only=want)
    else:
        for name in arrays:
            check_name("parameter", name, ours)
        for name in [n for n in want if n not in arrays]:
            raise WrongInput(f"the {what} of {name} is missing on rank {rank}")
        got = {
            name: np.zeros(w.shape) if (g := arrays[name]) is None else as_numpy(g)
            for name, w in want.items()
        }
    for name, w in want.items():
        allowed = {w.shape} if what == "weight" else {w.shape, w.shape[::-1]}
        if (shape := np.shape(got[name])) not in allowed:
            raise WrongInput(f"the {what} of {name} is {list(shape)}, not {list(w.shape)}")
        if not is_real(got[name]):
            raise WrongInput(f"the {what} of {name} is {got[name].dtype.name}, not real")
    return got


def weights_of(
    model: nn.Module, weights: Mapping | Sequence[Mapping], names: Names | None
) -> list[Gradients]:
    """Return the weights of each rank by our names; not running statistics, which have moved."""
    norms = list(model.modules(nn.BatchNorm))
    moved = {p.name for norm in norms for p in (norm.running_mean, norm.running_var)}
    want = {n: p.data for n, p in model.named_parameters().items() if n not in moved}
    ranks = enumerate(of_ranks("weight", weights))
    return [by_our_names(model, one, names, want, r, "weight") for r, one in ranks]


def other_weights(model: nn.Module, states: list[Gradients]) -> str:
    """Return in words which ranks have other weights than rank 0, or rank 0 than the model."""
    named, ranks_of = model.named_parameters(), dict[tuple[str, ...], list[int]]()
    for rank, state in enumerate(states):
        other = [n for n, w in state.items() if not np.allclose(w, named[n].data, NEAR, NEAR**2)]
        if other:
            ranks_of.setdefault(tuple(other), []).append(rank)
    lines = []
    for names, ranks in ranks_of.items():
        where = f"all {len(names)} parameters" if len(names) == len(states[0]) else some([*names])
        if 0 in ranks:
            return (
                f"rank 0 has other weights than the model, in {where}: give it rank 0's "
                "(interop.torch.load), and `weights` from before the step"
            )
        has = f"{numbered('rank', ranks)} {'has' if len(ranks) == 1 else 'have'} other weights"
        frozen = not any(named[n].requires_grad for n in names)
        why = " (frozen: what has no gradient is broadcast, too)" if frozen else ""
        lines.append(f"{has} than rank 0, in {where}: not broadcast from rank 0{why}")
    return "\n".join(lines)


def explained(f: Finding, states: list[Gradients]) -> bool:
    """Return whether all have the sum of what each rank's examples give with the rank's weights."""
    parts = []
    for rank, rows in shares_of(f).items():
        model = copy.deepcopy(f.case.model)
        model.load_state(model.state() | states[rank])
        parts.append(of_examples(replace(f.case, model=model), rows))
    return f.all_are(f.sum_of(parts))


# One parameter.


def _cause_of_one(f: Finding, name: str, rank: int, of_heads: Mapping[str, int]) -> str:
    """of_heads: {parameter of queries, keys and values: heads}."""
    got, want, heads = f.got[rank][name], f.want[name], of_heads.get(name)

    def is_now(other: np.ndarray) -> bool:
        return got.shape == other.shape and largest(got - other) <= f.exact * largest(other)

    if not np.isfinite(got).all():
        return f"{int((~np.isfinite(got)).sum())} elements are not finite"
    if want.any() and not got.any():
        return "it is 0: its use was cut off, or it was never added"
    turned = {"transposed: [out, in], as PyTorch keeps it": want.T} if want.ndim == 2 else {}
    if heads:
        by_head = np.swapaxes(want.reshape(*want.shape[:-1], 3, heads, -1), -3, -2)
        megatron = "its columns are [H, 3, D], as in Megatron-LM, not [3, H, D]"
        turned[megatron] = by_head.reshape(want.shape)
        thirds = dict(zip("QKV", np.split(want, 3, axis=-1), strict=True))
        for columns in ORDERS:
            in_order = np.concatenate([thirds[letter] for letter in columns], axis=-1)
            turned[f"its columns are {columns}, not QKV"] = in_order
    if not want.shape[-1] % 2:
        halves = "its halves are exchanged, as keys and values, or gate and up"
        turned[halves] = np.roll(want, want.shape[-1] // 2, axis=-1)
    turned["twice: it was counted twice"] = 2 * want
    if cause := next((cause for cause, array in turned.items() if is_now(array)), ""):
        return cause
    return "" if got.shape == want.shape else f"it is {list(got.shape)}, not {list(want.shape)}"


# All of them.


def _cause_of_all(f: Finding, known: bool) -> str | None:
    """known: whether a parameter has a cause of its own."""
    if len(f.names) < len(f.want) or not all(np.isfinite(g[n]).all() for g in f.got for n in g):
        return None
    if compare(f.got, f.got[0], f.bound).ok and (variant := _of_program(f)):  # on all ranks
        return variant
    if compare(f.got, f.want, SINGLE).ok:
        if f.bound == SINGLE:
            return "right but for rounding: it was computed in float32"
        return f"right within {SINGLE:.0e}: a part is in float32, or a constant, as an eps, differs"
    if known and len(f.got) == 1:
        return rounded(f)
    reason, *_ = reasons(f)
    return None if reason == UNKNOWN else reason


def _of_program(f: Finding) -> str:
    """Return in words which variant of the model, with which factor, gives these gradients; or "".

    It is the nearest one, and ten times nearer than the model itself.
    """
    fits = [(*_fitted(f.got[0], f.want), "")]
    if fits[0][0] > BOUND:
        others = variants_of(f.case)
        fits += [(*_fitted(f.got[0], gradients_of(other)), variant) for variant, other in others]
    error, factor, variant = min(fits, key=lambda fit: fit[0] * (10 if fit[2] else 1))
    if error > f.exact:
        return ""
    times = "" if abs(factor - 1) <= f.exact else _times(factor, f)
    return " and ".join(filter(None, [variant, times]))


def _fitted(got: Gradients, want: Gradients) -> tuple[float, float]:
    """Return the largest error of got = k want, of the largest element, and k."""
    a, b = (np.concatenate([g[name].reshape(-1) for name in want]) for g in (got, want))
    k = float(a @ b / (b @ b)) if b.any() else 0.0
    return (float(np.abs(a - k * b).max() / np.abs(k * b).max()) if k else np.inf), k


def _times(factor: float, f: Finding) -> str:
    """Return in words what multiplies all gradients."""
    case, size, scaled = f.case, abs(factor), loss_scale(factor, f.exact)
    counted = case.total
    causes = {
        counted: "the loss is a sum over the targets, not their mean",
        counted / len(case.inputs): "the loss is a mean over the examples, not over the targets",
        counted / case.targets.size: "the loss is a mean over all targets, padding too",
        1.0: "",
    }
    if not scaled and 2 <= (n := round(size)) <= counted:
        causes.setdefault(n, f"{n} times: added up that often")
    if not scaled and 2 <= (n := round(1 / size)) <= counted:
        mean = f"1/{n}: divided by {n} once too often, as a mean over {n} ranks or parts"
        causes.setdefault(1 / n, mean)
    fits = [cause for k, cause in causes.items() if abs(size / k - 1) <= f.exact]
    cause = fits[0] if fits else scaled or f"all are {size:.6g} times as large"
    return " and ".join(filter(None, ["the sign is turned" if factor < 0 else "", cause]))
