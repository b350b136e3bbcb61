"""Gradients of which some are wrong, and what is asked of them: where, and how far off."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from minidist.tools.compare import BOUND, largest, scale
from minidist.tools.strategies.cases import INPUT, Case, Split

Gradients = dict[str, np.ndarray]


@dataclass(frozen=True)
class Finding:
    """Gradients of which some are wrong.

    got    per rank, by name;  want: one device's
    case   the model and the batch;  split: how they are cut
    held   per rank, {name: (the weights that it has, those that it should have)}
    billed whether as many bytes moved as should have
    """

    got: list[Gradients]
    want: Gradients
    case: Case
    split: Split
    held: tuple[dict, ...] = ()
    billed: bool = False

    @cached_property
    def names(self) -> list[str]:
        """What every rank has, in one device's order, in shapes that agree."""
        return [
            name
            for name, w in self.want.items()
            if all(name in g and g[name].shape == w.shape for g in self.got)
        ]

    @cached_property
    def wrong(self) -> list[str]:
        """Those names whose gradient is beyond the bound on some rank."""
        return [
            n for n in self.names if any(not self.near(g[n], self.want[n], n) for g in self.got)
        ]

    @cached_property
    def most(self) -> float:
        return max(map(largest, self.want.values()), default=0.0)

    def near(self, a: np.ndarray, b: np.ndarray, name: str) -> bool:
        """Say whether two gradients of this name agree within the bound."""
        allowed = BOUND * scale(self.want[name], self.most)
        return bool(np.isfinite(a).all() and np.abs(a - b).max(initial=0.0) <= allowed)

    def is_on(self, rank: int, gradients: Gradients) -> bool:
        """Say whether rank has these gradients, where something is wrong and elsewhere."""
        return all(self.near(self.got[rank][n], gradients[n], n) for n in self.names)

    def is_everywhere(self, gradients: Gradients) -> bool:
        return all(self.is_on(rank, gradients) for rank in range(len(self.got)))

    def sizes(self) -> dict[str, int]:
        """Return the numbers of this case that a factor may be, each with what it counts."""
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
        """Say which parameters are wrong, if not all are."""
        wrong = [n for n in self.wrong if n != INPUT]
        if len(wrong) == len([n for n in self.names if n != INPUT]):
            return ""
        for kind, is_one in KINDS.items():
            if wrong and all(is_one(n) for n in wrong):
                return f", only in {kind} ({some(wrong)})"
        return f", only in {some(wrong or self.wrong)}"


KINDS = {"norms": lambda n: ".norm" in n, "biases": lambda n: n.endswith("bias")}


def some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
