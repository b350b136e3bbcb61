"""Which expert each position goes to, and which choices are dropped: whole numbers, on the host.

Letters: E experts, k choices per position, R rows: the choices that are kept. `choose` has the
choice, `route` the drops. With E = 4, k = 1, and a capacity of 1, for one example:

    position          0  1  2  3
    chosen expert     2  0  2  3        expert 1 has no row
    place in queue    0  0  1  0        place 1 is beyond the capacity: position 2 is dropped

Queues are decided for each example alone (GShard's groups, Lepikhin et al. 2020, section 2.2, of
one sequence). So a rank or a micro-batch decides what one device would, whoever else is there.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from numbers import Integral

import numpy as np

from minidist.errors import WrongInput, check_number


@dataclass(frozen=True)
class Routing:
    """Which expert each position goes to.

    experts  their number, E
    chosen   [B, T, k], the experts of each position, best first
    kept     [B, T, k], whether a choice is within the expert's capacity
    counted  [B, T], whether a position counts in the balance of experts
    """

    experts: int
    chosen: np.ndarray
    kept: np.ndarray
    counted: np.ndarray

    @property
    def counts(self) -> np.ndarray:
        """How many choices of each example fall on each expert, dropped ones too: [B, E]."""
        choices = one_hot(self.chosen, self.experts) * self.counted[..., None, None]
        return choices.sum(axis=(1, 2))

    @property
    def load(self) -> np.ndarray:
        """The rows that each expert computes: [E]."""
        return np.bincount(self.chosen[self.kept], minlength=self.experts)

    def order(self) -> np.ndarray:
        """Return the flat indices in [B T k] of the choices that are kept, by expert: [R]."""
        kept = np.flatnonzero(self.kept)
        return kept[np.argsort(self.chosen.reshape(-1)[kept], kind="stable")]

    def at(self, positions: np.ndarray) -> "Routing":
        """Return the part of a rank that holds these positions of each sequence."""
        parts = (array[:, positions] for array in (self.chosen, self.kept, self.counted))
        return Routing(self.experts, *parts)


def choose(scores: np.ndarray, k: int, groups: int = 1, most_groups: int = 1) -> np.ndarray:
    """Return the experts of each position, best first, by scores[B, T, E]: chosen[B, T, k].

    DeepSeek-AI, DeepSeek-V3 (2024), section 2.1.2, node-limited routing: the experts are `groups`
    equal runs, and a position chooses from the best `most_groups` of them. A run is as good as the
    sum of its k / most_groups best experts. Where a run is on one host, a position's rows go to at
    most so many hosts.
    """
    if most_groups < groups:
        B, T, E = scores.shape
        of_groups = scores.reshape(B, T, groups, E // groups)
        best = np.sort(of_groups)[..., -max(1, k // most_groups) :].sum(axis=-1)
        taken = np.argsort(-best, axis=-1, kind="stable")[..., :most_groups]
        open_to = one_hot(taken, groups).max(axis=-2)[..., None] > 0
        scores = np.where(open_to, of_groups, -np.inf).reshape(scores.shape)
    return np.argsort(-scores, axis=-1, kind="stable")[..., :k]


def check_groups(experts: int, k: int, groups: int, most_groups: int) -> None:
    """Raise ValueError unless k experts can be chosen from most_groups of these equal runs."""
    check_number("groups is a whole number from 1", groups, lambda n: n >= 1, Integral)
    words = f"most_groups is a whole number from 1 to groups={groups}"
    check_number(words, most_groups, lambda n: 1 <= n <= groups, Integral)
    if experts % groups:
        raise WrongInput(f"{groups} groups do not divide {experts} experts; use a divisor")
    if k > (there := most_groups * experts // groups):
        raise WrongInput(
            f"cannot choose {k} experts from {most_groups} of {groups} groups, which have {there}; "
            f"use top_k={there}, or a larger most_groups"
        )


def route(
    chosen: np.ndarray,
    experts: int,
    capacity: int | None = None,
    counted: np.ndarray | None = None,
) -> Routing:
    """Return the routing of chosen[B, T, k], given how many rows of an example an expert takes.

    counted  [B, T], see Routing; None: all positions count

    An expert's queue is in the order of positions. So only earlier positions decide what is
    dropped, and the model stays causal. (In GShard's order, algorithm 1, all first choices come
    before all second ones: there a later token may drop an earlier one's second choice.)
    """
    counted = np.ones(chosen.shape[:2], bool) if counted is None else counted
    if capacity is None:
        return Routing(experts, chosen, np.ones(chosen.shape, bool), counted)
    B, T, k = chosen.shape
    queue = chosen.reshape(B, T * k, 1)
    length = np.cumsum(one_hot(queue[..., 0], experts), axis=1)  # with this choice in it
    place = np.take_along_axis(length, queue, axis=2) - 1
    return Routing(experts, chosen, place.reshape(B, T, k) < capacity, counted)


def one_hot(indices: np.ndarray, size: int) -> np.ndarray:
    return (indices[..., None] == np.arange(size)).astype(np.int64)


def rows_of_capacity(factor: float | None, k: int, positions: int, experts: int) -> int | None:
    """Return ceil(k T / E factor), exactly: the factor is the decimal number that is printed."""
    return None if factor is None else math.ceil(Fraction(str(factor)) * k * positions / experts)
