"""Gradients, some of them wrong, and questions about them: which ones, and by how much."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from minidist.verify.compare import BOUND, is_real, largest, scale
from minidist.verify.strategies.cases import INPUT, Case

Gradients = dict[str, np.ndarray]


@dataclass(frozen=True)
class Finding:
    """Gradients, some of them wrong.

    got      per rank, by name;  want: one device's
    ranks    to which the examples of the case may be dealt out
    promise  of a reader's function: "exact", "replay", "identity" (then `got` is one side).
             "" for a strategy of the package, which may cut more than the examples
    bound    of errors, as in compare.py; or float32's, if the gradients have its digits
    """

    got: list[Gradients]
    want: Gradients
    case: Case
    ranks: int
    promise: str = ""
    bound: float = BOUND

    @cached_property
    def names(self) -> list[str]:
        """The names that every rank has, real and in the right shape, in one device's order."""
        return [
            name
            for name, w in self.want.items()
            if all(name in g and is_real(g[name]) and g[name].shape == w.shape for g in self.got)
        ]

    @cached_property
    def wrong(self) -> list[str]:
        """The names whose gradient is beyond the bound on some rank."""
        return [
            n for n in self.names if any(not self.near(g[n], self.want[n], n) for g in self.got)
        ]

    @cached_property
    def trained(self) -> list[str]:
        """The names that have a gradient: neither the input nor running statistics."""
        named = self.case.model.named_parameters()
        return [n for n in self.names if n in named and named[n].requires_grad]

    def flat(self, gradients: Gradients) -> np.ndarray:
        """Return the gradients of all that is trained as one vector."""
        return np.concatenate([gradients[n].reshape(-1) for n in self.trained] or [np.zeros(0)])

    @cached_property
    def allowed(self) -> np.ndarray:
        """The bound of each element of `flat`."""
        bars = {n: scale(self.want[n], self.most) or 1.0 for n in self.trained}
        return self.bound * self.flat(
            {n: np.full(self.want[n].shape, bar) for n, bar in bars.items()}
        )

    @cached_property
    def astray(self) -> list[np.ndarray]:
        """Which elements of `flat` are beyond the bound, per rank."""
        want = self.flat(self.want)
        return [~(np.abs(self.flat(g) - want) <= self.allowed) for g in self.got]

    @cached_property
    def most(self) -> float:
        return max(map(largest, self.want.values()), default=0.0)

    @property
    def exact(self) -> float:
        """The relative error up to which a fitted factor counts as a number of this case."""
        return max(1e-6, self.bound)

    def near(self, a: np.ndarray, b: np.ndarray, name: str) -> bool:
        """Return whether two gradients of this name agree within the bound."""
        allowed = self.bound * scale(self.want[name], self.most)
        return bool(np.isfinite(a).all() and np.abs(a - b).max(initial=0.0) <= allowed)

    def sum_of(self, parts: list[Gradients]) -> Gradients:
        """Return the sum of the gradients of parts of the batch."""
        return {name: np.sum([part[name] for part in parts], axis=0) for name in self.trained}

    def all_are(self, gradients: Gradients) -> bool:
        """Return whether all ranks have these, in all that is trained."""
        return all(
            self.near(g[name], gradients[name], name) for g in self.got for name in self.trained
        )

    def uses(self) -> str:
        """Return in how many layers all wrong parameters are, if in more than one."""
        layers = [layer.named_parameters() for layer in getattr(self.case.model, "layers", [])]
        counts = {sum(n in names for names in layers) for n in self.wrong}
        return f"{counts.pop()} layers" if len(counts) == 1 and max(counts) > 1 else ""

    def where(self) -> str:
        """Return which parameters are wrong, if not all are."""
        wrong = [n for n in self.wrong if n != INPUT]
        if len(wrong) == len([n for n in self.names if n != INPUT]):
            return ""
        for kind, part in KINDS.items():
            if wrong and all(part in n for n in wrong):
                return f", only in {kind} ({some(wrong)})"
        return f", only in {some(wrong or self.wrong)}"


# What the names of parameters have in common.
KINDS = {
    "norms": ".norm",
    "loads of experts": "choice_bias",
    "biases": "bias",
    "gates": ".gate.",
    "experts": ".experts.",
}


def some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def numbered(noun: str, numbers: list[int]) -> str:
    return f"{noun}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
