"""A position travels once to each rank that has experts of it, and comes back as one sum.

DeepSeek-AI, DeepSeek-V3 (2024), section 3.2.2: a position crosses the network once to each host
that holds some of its k experts, not k times; inside the host it goes on by NVLink. Here a rank
stands for a host (`Dispatch` sends a position k times). If the choice is limited to M groups
(nn/router.py, `choose`), and a rank holds a group, these are at most M.
Letters: N ranks, E experts, R rows on this rank, each a position and one of its experts; U: rows
that share a position and a rank count once.

    counts, places    all_to_all, whole numbers: how many come, and which position each row is of
    X[U, C], g[R, 1]  all_to_all
      -> one row per expert -> experts -> Y[n] = sum of g_r Y_r over the rows here of position n
    Y[U, C]           all_to_all, back; a position adds up the sums of its ranks

The gate's weights g travel too, since the sum is where the experts are; backward sends dg back. So
a step sends 4 U C + 3 R numbers, if these are of other ranks; `Dispatch` sends 4 R C.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from minidist import nn
from minidist.autograd import Function, Tensor, functions
from minidist.autograd.kernels.layers import rows_of, sum_into_rows
from minidist.backend import Array, array_module, on_device_of
from minidist.comm import Group
from minidist.expert_parallel.dispatch import Exchange, routes
from minidist.nn.mixture_of_experts import Combine, run_each


class SumInto(Function):
    """Y[n] = sum of X_u over the rows u of position n  =>  dX_u = dY[n].  X[U, C], Y[n, C]."""

    def __init__(self, position: np.ndarray, positions: int):
        self.position, self.positions = position, positions

    def forward(self, x: Array) -> Array:
        self.position = on_device_of(self.position, x)
        y = array_module(x).empty((self.positions, x.shape[1]), x.dtype)
        return sum_into_rows(x, self.position, y)

    def backward(self, grad: Array) -> Array:
        return rows_of(grad, self.position)


def travellers(
    position: np.ndarray, load: np.ndarray, ends: list[int]
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return for each rank the positions that travel there, and which of them each row is of.

    position[R] of the rows, sorted by expert; load[E]; rank r holds experts ends[r] to ends[r + 1]
    """
    stops = np.concatenate([[0], np.cumsum(load)])[ends]
    pairs = [np.unique(position[a:b], return_inverse=True) for a, b in pairwise(stops)]
    return [who for who, _ in pairs], [places for _, places in pairs]


@dataclass(frozen=True)
class OncePerRank:
    """What MixtureOfExperts has as `run_positions`; fields as of Dispatch."""

    group: Group
    ends: list[int]
    trained: bool = True

    def __call__(
        self, experts: list[nn.Module], x: Tensor, g: Tensor, position: np.ndarray, load: np.ndarray
    ) -> Tensor:
        """X[positions, C] -> Y[positions, C]: see `MixtureOfExperts.run_rows`."""
        who, places = travellers(position, load, self.ends)
        sent, leaving = [len(positions) for positions in who], np.concatenate(who)
        loads = [load[a:b] for a, b in pairwise(self.ends)]
        counts = [np.append(rows, n) for rows, n in zip(loads, sent, strict=True)]
        coming = np.stack(self.group.all_to_all(counts, label="counts"))  # [N, E/N + 1]
        theirs = self.group.all_to_all(places, label="places")
        received = coming[:, -1].tolist()  # positions, from each rank
        firsts = np.cumsum([0, *received[:-1]])
        way = routes(load, coming[:, :-1], self.ends)
        place = np.concatenate([a + rows for a, rows in zip(firsts, theirs, strict=True)])
        row = place[way.order]
        if self.trained and not x.requires_grad:  # all ranks must exchange in backward, or none
            x = Tensor(x.data, requires_grad=True)
        here = Exchange(self.group, sent, received)(functions.embedding(leaving, x))
        gates = Exchange(self.group, way.sent, way.received)(g)
        y = run_each(experts, functions.embedding(row, here), way.load)
        y = Combine(row, sum(received))(y, functions.embedding(way.order, gates))
        return SumInto(leaving, len(x.data))(Exchange(self.group, received, sent)(y))
