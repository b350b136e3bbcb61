"""Somebody else's gradients against one device's: which are wrong, by what factor, and likely why.

    print(against(model, gradients, inputs, targets))

Another program has run the same weights on the same batch, in float64. Where its gradients differ,
the model runs again with each difference that is known between such programs, and each array is
turned each way that is known; what then agrees, for every parameter or for one, is the cause. What
other programs compute is in variants.py, what PyTorch calls otherwise in interop/torch.py.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from minidist import nn
from minidist.errors import check_name
from minidist.interop.torch import as_numpy, from_torch, matches
from minidist.verify.causes.factors import loss_scale
from minidist.verify.causes.finding import Finding, Gradients
from minidist.verify.causes.gradients import UNKNOWN, reasons, rounded
from minidist.verify.compare import by_parameter, compare, in_one_line, is_real, largest
from minidist.verify.strategies.cases import Case, Division, given, one_device, trained
from minidist.verify.variants import ORDERS, VARIANTS, variants_of

ROUNDING = 1e-4  # errors up to here are those of float32
NEAR = 1e-6


@dataclass(frozen=True, repr=False)
class Against:
    """What `against` has found; it prints as a table, and is true if all gradients are right.

    rows   per wrong parameter: name, first rank on which it is, error as in compare.py, got / want
           (nan where want is 0), cause or ""
    cause  of all of them together, or None
    """

    parameters: int
    error: float
    rows: tuple[tuple[str, int, float, float, str], ...] = ()
    cause: str | None = None

    ok = property(lambda self: not self.rows)

    def __bool__(self) -> bool:
        return self.ok

    def __repr__(self) -> str:
        return in_one_line(str(self))

    def __str__(self) -> str:
        if self.ok:
            return f"ok: all {self.parameters} gradients, largest error {self.error:.1e}"
        head = f"{len(self.rows)} of {self.parameters} gradients differ"
        head += f": {self.cause}" if self.cause else ""
        first = sorted(self.rows, key=lambda row: row[4] == "")[: 3 if self.cause else 5]
        lines = [head, *map(_in_words, first)]
        if len(first) < len(self.rows):
            lines.append(f"  and {len(self.rows) - len(first)} more")
        if not self.cause and not all(row[4] for row in self.rows):
            lines.append(f"{UNKNOWN[:-1]}; {len(VARIANTS)} differences between programs)")
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
    names: Mapping[str, str] | None = None,
) -> Against:
    """Compare {name: gradient} with those that one device computes, in float64.

    gradients  arrays under our names and in our layout; or tensors of PyTorch, or arrays under its
               names, which are turned as interop does (names: see `interop.torch.matches`). None
               is zeros. A list of them, one for each rank, also finds what the ranks did wrong, if
               their shares of the batch are those of np.array_split
    loss       of outputs and targets, with reduction_size=; by default the model's

    ValueError where a name or a shape fits no parameter, and for a model with dropout.
    """
    case = given(model, inputs, targets, loss, {})
    if dropout := next((layer for layer in model.modules(nn.Dropout) if layer.rate), None):
        raise ValueError(
            f"{dropout.name} drops out at {dropout.rate}, and nobody else draws these masks: "
            "compare with dropout=0 in both programs"
        )
    ranks = [gradients] if isinstance(gradients, Mapping) else gradients
    if not isinstance(ranks, list | tuple) or not all(isinstance(g, Mapping) for g in ranks):
        raise ValueError(
            f"gradients are {{name: gradient}}, or a list of them, not {type(gradients).__name__}; "
            "of PyTorch: {name: p.grad for name, p in module.named_parameters()}"
        )
    want = gradients_of(case)
    got = [_by_our_names(case.model, one, names, want, r) for r, one in enumerate(ranks)]
    comparison = compare(got, want)
    if comparison.ok:
        return Against(len(want), comparison.error)
    attention = list(case.model.modules(nn.CausalSelfAttention))
    heads = {p.name: layer.heads for layer in attention for p in layer.qkv.parameters()}
    rows = []
    for name, one in by_parameter(got, want).items():
        if not one.ok:
            why = _cause_of_one(got[one.rank][name], want[name], heads.get(name))
            rows.append((name, one.rank, one.error, one.ratio, why))
    known = any(row[4] for row in rows)
    return Against(len(want), comparison.error, tuple(rows), _cause_of_all(case, got, want, known))


def gradients_of(case: Case) -> Gradients:
    """Return what one device computes for the parameters that are trained."""
    names = trained(case.model)
    return {name: grad for name, grad in one_device(case).items() if name in names}


def _by_our_names(
    model: nn.Module, gradients: Mapping, names: Mapping | None, want: Gradients, rank: int
) -> Gradients:
    """Return what is wanted, under our names and in our layout; ValueError where that cannot be."""
    ours, theirs = model.named_parameters(), {match.theirs for match in matches(model, names)}
    tensors = any(hasattr(g, "detach") for g in gradients.values())
    if names or tensors or len(gradients.keys() & ours) < max(1, len(gradients.keys() & theirs)):
        got = from_torch(model, gradients, names, trained=True)
    else:
        for name in gradients:
            check_name("parameter", name, ours)
        for name in [n for n in want if n not in gradients]:
            raise ValueError(f"the gradient of {name} is missing on rank {rank}")
        got = {
            name: np.zeros(w.shape) if (g := gradients[name]) is None else as_numpy(g)
            for name, w in want.items()
        }
    for name, w in want.items():
        if (shape := np.shape(got[name])) not in (w.shape, w.shape[::-1]):
            raise ValueError(f"the gradient of {name} is {list(shape)}, not {list(w.shape)}")
        if not is_real(got[name]):
            raise ValueError(f"the gradient of {name} is {got[name].dtype.name}, not real")
    return got


# One parameter.


def _cause_of_one(got: np.ndarray, want: np.ndarray, heads: int | None) -> str:
    """heads: of attention, where it is a parameter of its queries, keys and values."""
    if not np.isfinite(got).all():
        return f"{int((~np.isfinite(got)).sum())} elements are not finite"
    if want.any() and not got.any():
        return "it is 0: its use was cut off, or it was never added"
    if want.ndim == 2 and _same(got, want.T):
        return "transposed: [out, in], as PyTorch keeps it"
    if got.shape != want.shape:
        return f"it is {list(got.shape)}, not {list(want.shape)}"
    if heads:
        by_head = np.swapaxes(want.reshape(*want.shape[:-1], 3, heads, -1), -3, -2)
        if _same(got, by_head.reshape(want.shape)):
            return "its columns are [H, 3, D], as in Megatron-LM, not [3, H, D]"
        thirds = dict(zip("QKV", np.split(want, 3, axis=-1), strict=True))
        for columns in ORDERS:
            if _same(got, np.concatenate([thirds[letter] for letter in columns], axis=-1)):
                return f"its columns are {columns}, not QKV"
    if _same(got, 2 * want):
        return "twice: it was counted twice"
    return ""


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and largest(a - b) <= NEAR * largest(b)


# All of them.


def _cause_of_all(case: Case, got: list[Gradients], want: Gradients, known: bool) -> str | None:
    """known: whether a parameter has a cause of its own."""
    finding = Finding(got, want, case, Division(data=len(got)), promise="exact")
    if len(finding.names) < len(want) or not all(np.isfinite(g[n]).all() for g in got for n in g):
        return None
    if compare(got, got[0]).ok:  # on all ranks
        if compare(got, want, ROUNDING).ok:
            return "right but for rounding: it was computed in float32"
        others = ((words, gradients_of(other)) for words, other in variants_of(case))
        for words, other in chain([("", want)], others):
            factor = _factor(got[0], other)
            if factor is not None:
                times = "" if abs(factor - 1) <= NEAR else _times(factor, case)
                return " and ".join(filter(None, [words, times]))
    if known and len(got) == 1:
        return rounded(finding)
    words, *_ = reasons(finding)
    return None if words == UNKNOWN else words


def _factor(got: Gradients, want: Gradients) -> float | None:
    """Return k if got = k want for every parameter."""
    a, b = (np.concatenate([g[name].reshape(-1) for name in want]) for g in (got, want))
    k = float(a @ b / (b @ b)) if b.any() else 0.0
    return k if k and np.abs(a - k * b).max() <= NEAR * np.abs(k * b).max() else None


def _times(factor: float, case: Case) -> str:
    """Return in words what multiplies all gradients."""
    counted, size, scaled = case.total, abs(factor), loss_scale(factor)
    known = {
        counted: "the loss is a sum over the targets, not their mean",
        counted / len(case.inputs): "the loss is a mean over the examples, not over the targets",
        counted / case.targets.size: "the loss is a mean over all targets, padding too",
        1.0: "",
    }
    if not scaled and 2 <= (n := round(size)) <= counted:
        known.setdefault(n, f"{n} times: added up that often")
    if not scaled and 2 <= (n := round(1 / size)) <= counted:
        words = f"1/{n}: divided by {n} once too often, as a mean over {n} ranks or parts"
        known.setdefault(1 / n, words)
    near = [words for k, words in known.items() if abs(size / k - 1) <= NEAR]
    said = near[0] if near else scaled or f"all are {size:.6g} times as large"
    return " and ".join(filter(None, ["the sign is turned" if factor < 0 else "", said]))
