"""Gradients, some of them wrong, and questions about them: which ones, and by how much."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from minidist.tools.compare import BOUND, largest, scale
from minidist.tools.strategies.cases import INPUT, Case, Split

Gradients = dict[str, np.ndarray]


@dataclass(frozen=True)
class Finding:
    """Gradients, some of them wrong.

    got    per rank, by name;  want: one device's
    case   the model and the batch;  split: how they are cut
    held   per rank, {name: (the weights that it has, the weights that it should have)}
    right_bytes whether the expected number of bytes moved
    """

    got: list[Gradients]
    want: Gradients
    case: Case
    split: Split
    held: tuple[dict, ...] = ()
    right_bytes: bool = False

    @cached_property
    def names(self) -> list[str]:
        """The names that every rank has with the right shape, in one device's order."""
        return [
            name
            for name, w in self.want.items()
            if all(name in g and g[name].shape == w.shape for g in self.got)
        ]

    @cached_property
    def wrong(self) -> list[str]:
        """The names whose gradient is beyond the bound on some rank."""
        return [
            n for n in self.names if any(not self.near(g[n], self.want[n], n) for g in self.got)
        ]

    @cached_property
    def most(self) -> float:
        return max(map(largest, self.want.values()), default=0.0)

    def near(self, a: np.ndarray, b: np.ndarray, name: str) -> bool:
        """Return whether two gradients of this name agree within the bound."""
        allowed = BOUND * scale(self.want[name], self.most)
        return bool(np.isfinite(a).all() and np.abs(a - b).max(initial=0.0) <= allowed)

    def is_on(self, rank: int, gradients: Gradients) -> bool:
        """Return whether this rank has exactly these gradients, the wrong and the right ones."""
        return all(self.near(self.got[rank][n], gradients[n], n) for n in self.names)

    def is_everywhere(self, gradients: Gradients) -> bool:
        return all(self.is_on(rank, gradients) for rank in range(len(self.got)))

    def sizes(self) -> dict[str, int]:
        """Return {what it counts: number}: the numbers of this case that a factor may be."""
        counts = {
            "ranks": len(self.got),
            "data-parallel ranks": self.split.data,
            "tensor-parallel ranks": self.split.tensor,
            "stages": 0 if self.split.tensor > 1 else len(self.split.stages),
            "micro-batches": self.split.micro_batches,
        }
        found: dict[int, str] = {}
        for what, count in counts.items():
            if count > 1:
                known = found.get(count)
                again = known == "ranks" and what.endswith("ranks")  # the more exact one
                found[count] = f"{known} or {what}" if known and not again else what
        return {what: count for count, what in found.items()}

    def where(self) -> str:
        """Return which parameters are wrong, if not all are."""
        wrong = [n for n in self.wrong if n != INPUT]
        if len(wrong) == len([n for n in self.names if n != INPUT]):
            return ""
        for kind, is_one in KINDS.items():
            if wrong and all(is_one(n) for n in wrong):
                return f", only in {kind} ({some(wrong)})"
        return f", only in {some(wrong or self.wrong)}"


KINDS = {
    "norms": lambda n: ".norm" in n,
    "biases": lambda n: n.endswith("bias"),
    "gates": lambda n: ".gate." in n,
}


def some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
