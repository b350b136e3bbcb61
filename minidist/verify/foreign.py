"""Somebody else's gradients against one device's: which are wrong, by what factor, and likely why.

    print(against(model, gradients, inputs, targets))

Another program has run the same weights on the same batch, in float64. Where its gradients differ,
the model runs again with each difference that is known between such programs, and each array is
turned each way that is known; what then agrees, for every parameter or for one, is the cause. What
PyTorch does otherwise is in interop/torch.py.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from minidist import nn
from minidist.autograd import Tensor, functions
from minidist.autograd.attention import padded_attention
from minidist.interop.torch import Norm, as_numpy, from_torch
from minidist.verify.causes.finding import Finding
from minidist.verify.causes.gradients import cause
from minidist.verify.compare import BOUND, compare, in_one_line, largest, scale
from minidist.verify.strategies.cases import Case, Division, given, one_device, trained

Gradients = dict[str, np.ndarray]
ROUNDING = 1e-4  # errors up to here are those of float32
NEAR = 1e-6
MOST_ROWS = 3  # that are printed where all have one cause


@dataclass(frozen=True, repr=False)
class Against:
    """What `against` has found; it prints as a table, and is true if all gradients are right.

    rows   per wrong parameter: name, first rank on which it is, error as in compare.py, got / want,
           cause or ""
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
        shown = self.rows[:MOST_ROWS] if self.cause else self.rows
        lines = [
            f"  {name:<32} rank {rank}  error {error:.1e}  got/want {ratio:.6g}  {cause}".rstrip()
            for name, rank, error, ratio, cause in shown
        ]
        if len(shown) < len(self.rows):
            lines.append(f"  and {len(self.rows) - len(shown)} more")
        return "\n".join([head, *lines])


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
    if dropout := next((layer for layer in model.modules(nn.Dropout) if layer.rate), None):
        raise ValueError(
            f"{dropout.name} drops out at {dropout.rate}, and nobody else draws these masks: "
            "compare with dropout=0 in both programs"
        )
    case = given(model, inputs, targets, loss, {})
    want = gradients_of(case)
    ranks = [gradients] if isinstance(gradients, Mapping) else gradients
    got = [_by_our_names(case.model, one, names, want) for one in ranks]
    comparison = compare(got, want)
    if comparison.ok:
        return Against(len(want), comparison.error)
    most, turned = max(map(largest, want.values())), _turned(case.model)
    rows = []
    for name, w in want.items():
        one = compare([{name: g[name]} for g in got], {name: w})
        error = one.difference / (scale(w, most) or 1.0)
        if not error <= BOUND:
            why = _cause_of_one(got[one.rank][name], w, turned.get(name))
            rows.append((name, one.rank, error, one.ratio, why))
    return Against(len(want), comparison.error, tuple(rows), _cause_of_all(case, got, want))


def gradients_of(case: Case) -> Gradients:
    """Return what one device computes for the parameters that are trained."""
    names = trained(case.model)
    return {name: grad for name, grad in one_device(case).items() if name in names}


def _by_our_names(model: nn.Module, gradients: Mapping, names, want: Gradients) -> Gradients:
    tensors = any(hasattr(g, "detach") for g in gradients.values())
    if names or tensors or not gradients.keys() >= want.keys():
        return from_torch(model, gradients, names, trained=True)
    got = {n: np.zeros(w.shape) if gradients[n] is None else gradients[n] for n, w in want.items()}
    for name, w in want.items():
        if (shape := np.shape(got[name])) not in (w.shape, w.shape[::-1]):
            raise ValueError(f"the gradient of {name} is {list(shape)}, not {list(w.shape)}")
    return {name: as_numpy(g) for name, g in got.items()}


# One parameter.

Turn = Callable[[np.ndarray], np.ndarray]


def _turned(model: nn.Module) -> dict[str, tuple[str, Turn]]:
    """Return {name of a QKV's parameter: (the order of its columns elsewhere, how to get it)}."""
    words = "its columns are [H, 3, D], as in Megatron-LM, not [3, H, D]"
    return {
        p.name: (words, partial(_by_head, heads=layer.heads))
        for layer in model.modules(nn.CausalSelfAttention)
        for p in layer.qkv.parameters()
    }


def _by_head(w: np.ndarray, heads: int) -> np.ndarray:
    """Return columns [H, 3, D] of columns [3, H, D]."""
    return np.swapaxes(w.reshape(*w.shape[:-1], 3, heads, -1), -3, -2).reshape(w.shape)


def _cause_of_one(got: np.ndarray, want: np.ndarray, turned: tuple[str, Turn] | None) -> str:
    if not np.isfinite(got).all():
        return f"{int((~np.isfinite(got)).sum())} elements are not finite"
    if want.any() and not got.any():
        return "it is 0: its use was cut off, or it was never added"
    if want.ndim == 2 and _same(got, want.T):
        return "transposed: [out, in], as PyTorch keeps it"
    if got.shape != want.shape:
        return f"it is {list(got.shape)}, not {list(want.shape)}"
    if turned and _same(got, turned[1](want)):
        return turned[0]
    if _same(got, 2 * want):
        return "twice: it was counted twice"
    return ""


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and largest(a - b) <= NEAR * largest(b)


# All of them.


def _cause_of_all(case: Case, got: list[Gradients], want: Gradients) -> str | None:
    every = [g[name] for g in got for name, w in want.items() if g[name].shape == w.shape]
    if len(every) < len(got) * len(want) or not all(np.isfinite(g).all() for g in every):
        return None
    if compare(got, got[0]).ok:  # on all ranks
        if compare(got, want, ROUNDING).ok:
            return "right but for rounding: it was computed in float32"
        for words, other in [("", want), *_variants(case)]:
            factor = _factor(got[0], other)
            if factor is not None:
                times = "" if abs(factor - 1) <= NEAR else _times(factor, case)
                return " and ".join(filter(None, [words, times]))
    return cause(Finding(got, want, case, Division(data=len(got)))) if len(got) > 1 else None


def _factor(got: Gradients, want: Gradients) -> float | None:
    """Return k if got = k want for every parameter."""
    a, b = (np.concatenate([g[name].reshape(-1) for name in want]) for g in (got, want))
    k = float(a @ b / (b @ b)) if b.any() else 0.0
    return k if k and np.abs(a - k * b).max() <= NEAR * np.abs(k * b).max() else None


def _times(factor: float, case: Case) -> str:
    """Return in words what multiplies all gradients."""
    examples, counted = len(case.inputs), case.total
    known = {
        counted: "the loss is a sum over the targets, not their mean",
        counted / examples: "the loss is a mean over the examples, not over the targets",
        counted / case.targets.size: "the loss is a mean over all targets, padding too",
        -1.0: "the sign is turned",
    }
    for k, words in known.items():
        if abs(factor / k - 1) <= NEAR:
            return words
    if abs(factor - round(factor)) <= NEAR:
        return f"{round(factor)} times: added up that often"
    if abs(1 / factor - round(1 / factor)) <= NEAR:
        n = round(1 / factor)
        return f"1/{n}: divided by {n} once too often, as a mean over {n} ranks or parts"
    return f"all are {factor:.6g} times as large"


def _variants(case: Case) -> Iterator[tuple[str, Gradients]]:
    """Yield (in words, the gradients) of the model as other programs compute it."""
    for words, change in VARIANTS.items():
        model = copy.deepcopy(case.model)
        if change(model):
            yield words, gradients_of(Case(words, model, case.inputs, case.targets, case.loss))


class ErfLinear(nn.Linear):
    """A Linear whose gelu is X Phi(X), Phi the normal distribution: PyTorch's default."""

    def forward(self, x, randomness=None):
        return functions.gelu(functions.linear(x, self.weight, self.bias), "erf")


def _erf(model: nn.Module) -> bool:
    found = [layer for layer in model.modules(nn.Linear) if layer.activation == "gelu"]
    for layer in found:
        layer.__class__ = ErfLinear
    return bool(found)


def _without_activation(model: nn.Module) -> bool:
    found = [layer for layer in model.modules(nn.Linear) if layer.activation != "identity"]
    for layer in found:
        layer.activation = "identity"
    return bool(found)


def _every_position(qkv: Tensor, randomness=None) -> Tensor:
    held = np.ones((qkv.shape[1], qkv.shape[3]), bool)
    return padded_attention(qkv[0], qkv[1:], held)


def _unmasked(model: nn.Module) -> bool:
    found = list(model.modules(nn.CausalSelfAttention))
    for layer in found:
        layer.attend = _every_position
    return bool(found)


def _eps(eps: float) -> Callable[[nn.Module], bool]:
    def change(model: nn.Module) -> bool:
        found: list[Norm] = [*model.modules(nn.LayerNorm), *model.modules(nn.BatchNorm)]
        for norm in found:
            norm.eps = eps
        return bool(found)

    return change


def _evaluated(model: nn.Module) -> bool:
    model.eval()
    return any(True for _ in model.modules(nn.BatchNorm))


VARIANTS: dict[str, Callable[[nn.Module], bool]] = {
    'the gelu is the erf form (PyTorch\'s default; approximate="tanh" is ours)': _erf,
    "the attention has no causal mask": _unmasked,
    "the activation is missing": _without_activation,
    "the norms have eps 1e-6, not 1e-5": _eps(1e-6),
    "the norms have eps 1e-12, not 1e-5": _eps(1e-12),
    "the batch norms used their running statistics (eval mode)": _evaluated,
}
