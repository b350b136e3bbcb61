"""Rows travel to the ranks of their experts, and their results come back.

Lepikhin et al., GShard (2020), section 3.3.2: an all_to_all each way. Theirs sends every expert's
whole capacity, full or not; here each rank sends the rows it has, so the numbers differ. Letters: N
ranks, r this one, E experts; rank r holds experts ends[r] to ends[r + 1] - 1; R rows on this rank.

    X[R, C], sorted by expert     counts  all_to_all, whole numbers: how many rows will come
      -> to the experts           rows    all_to_all -> sorted by rank, then by expert
      -> by expert -> experts -> by rank
      -> back                     rows    all_to_all -> Y[R, C], sorted as X was

Backward sends dY to the experts and dX back: two more. So a step sends each row four times, if its
expert is on another rank.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from minidist import nn
from minidist.autograd import Function, Tensor, functions
from minidist.backend import Array, array_module
from minidist.comm import Group
from minidist.nn.mixture_of_experts import run_each


class Exchange(Function):
    """Forward: `sent` rows to each rank, `received` from each;  backward: dX goes back.

    X[sum of sent, C] -> Y[sum of received, C], both sorted by rank.
    """

    def __init__(self, group: Group, sent: list[int], received: list[int]):
        self.group, self.sent, self.received = group, sent, received

    def forward(self, x: Array) -> Array:
        return all_to_all(x, self.sent, self.group)

    def backward(self, grad: Array) -> Array:
        return all_to_all(grad, self.received, self.group)


def all_to_all(x: Array, rows: list[int], group: Group) -> Array:
    """Give rows[r] rows of x to rank r, in order; return what the ranks gave, in rank order."""
    xp = array_module(x)
    pieces = xp.split(x, np.cumsum(rows)[:-1].tolist())
    return xp.concatenate(group.all_to_all(pieces, label="rows"))


@dataclass(frozen=True)
class Routes:
    """How the rows of one forward pass travel, as one rank sees it.

    sent, received  rows for each rank, and from each rank: [N]
    order           the received rows, sorted by rank, in the order of this rank's experts
    load            rows of each of this rank's experts: [E/N]
    """

    sent: list[int]
    received: list[int]
    order: np.ndarray
    load: np.ndarray


def routes(load: np.ndarray, coming: np.ndarray, ends: list[int]) -> Routes:
    """Return the routes, given the rows that this rank has for each expert, load[E].

    coming  [N, E/N], the rows that each rank has for each of this rank's experts
    """
    sent = [int(load[a:b].sum()) for a, b in pairwise(ends)]
    N, experts_here = coming.shape
    expert = np.repeat(np.tile(np.arange(experts_here), N), coming.reshape(-1))
    order = np.argsort(expert, kind="stable")
    return Routes(sent, coming.sum(axis=1).tolist(), order, coming.sum(axis=0))


@dataclass(frozen=True)
class Dispatch:
    """What MixtureOfExperts has in the place of `run_each`, where ranks hold different experts.

    ends     rank r holds experts ends[r] to ends[r + 1] - 1
    trained  whether any expert, on whatever rank, is not frozen
    """

    group: Group
    ends: list[int]
    trained: bool = True

    def __call__(self, experts: list[nn.Module], rows: Tensor, load: np.ndarray) -> Tensor:
        """Run X[R, C], sorted by expert, through all experts; `experts` are this rank's."""
        pieces = [load[a:b] for a, b in pairwise(self.ends)]
        coming = np.stack(self.group.all_to_all(pieces, label="counts"))
        way = routes(load, coming, self.ends)
        if self.trained and not rows.requires_grad:  # all ranks must exchange in backward, or none
            rows = Tensor(rows.data, requires_grad=True)
        rows = Exchange(self.group, way.sent, way.received)(rows)
        rows = run_each(experts, functions.embedding(way.order, rows), way.load)
        rows = functions.embedding(np.argsort(way.order), rows)
        return Exchange(self.group, way.received, way.sent)(rows)
