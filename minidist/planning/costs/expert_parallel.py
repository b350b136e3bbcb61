"""What experts over ranks move and hold, given which expert each row goes to.

The weights decide it: `drawn` runs the model on one device, and returns the load of each expert.
Letters: N ranks, r one of them; E experts, rank r holds a run of them.
"""

import copy
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np

from minidist.autograd import no_grad
from minidist.nn import MixtureOfExperts, mixtures
from minidist.nn.router import Routing, one_hot
from minidist.pieces import split_ends, split_sizes
from minidist.planning.costs.cost import (
    ITEMSIZE,
    Cost,
    Workload,
    cost_of,
    loads_bytes,
    positions_of,
)
from minidist.planning.costs.gradients import Needs, needed, needed_at
from minidist.planning.costs.kept import Parts
from minidist.planning.costs.layers import transformer_layers, width_of
from minidist.planning.costs.transformer_size import TransformerSize
from minidist.planning.costs.zero import zero_elements
from minidist.rng import Randomness


def drawn(case: Workload, N: int) -> np.ndarray:
    """Return the rows that rank r's examples have for each expert, in each block: [N, blocks, E].

    Drops are decided per example, so that one device finds what the ranks will find.
    """
    return np.array([[made.load for made in blocks] for blocks in routed(case, N)])


def routed(case: Workload, N: int) -> list[list[Routing]]:
    """Return the routing of each rank's examples, in each block: [N][blocks]."""
    model, B, found = copy.deepcopy(case.model), len(case.inputs), []
    with no_grad():
        for share in np.array_split(np.arange(B), N):
            model(case.inputs[share], Randomness(case.seed, 0, share, B))
            reports = [mixture.report for mixture in mixtures(model)]
            found.append([report.routing for report in reports if report is not None])
    return found


def positions_arriving(case: Workload, dp: int, ep: int) -> np.ndarray:
    """Return how many positions of each rank have experts on each of ep: [dp, ep, blocks]."""
    ends, found = split_ends(case.model.experts, ep), []
    for blocks in routed(case, dp):
        homes = [one_hot(np.searchsorted(ends, made.chosen, "right") - 1, ep) for made in blocks]
        there = [home * made.kept[..., None] for home, made in zip(homes, blocks, strict=True)]
        found.append([ranks.any(axis=2).sum(axis=(0, 1)) for ranks in there])
    return np.array(found).swapaxes(1, 2)


def arriving(rows: np.ndarray) -> np.ndarray:
    """Return the rows that go from rank r to rank s, in each block: [N, N, blocks]."""
    N, _, E = rows.shape
    own = [rows[..., a:b].sum(axis=-1) for a, b in pairwise(split_ends(E, N))]
    return np.stack(own, axis=1)


def expert_bytes(case: Workload, N: int) -> int:
    """Return 4 C bytes-per-number per row whose expert is on another rank, and what is summed.

    Each such row goes there and back, and so does its gradient (see `journeys`). Besides, per block
    and micro-batch, every rank tells the others how many rows will come, 8 bytes per expert; and an
    all_reduce sums the gradients of all parameters but experts, and loads (`loads_bytes`).
    """
    rows, experts = drawn(case, N), expert_numbers(case)
    m, way = case.options.get("micro_batches", 1), case.options.get("dispatch", "rows")
    named = case.model.named_parameters().items()
    others = [p for name, p in named if p.requires_grad and name not in experts]
    summed = 2 * (N - 1) * sum(p.data.nbytes for p in others) + loads_bytes(case.model, N)
    return exchanged_bytes(case, rows, N, m, needed(case.model), way) + summed


def exchanged_bytes(
    case: Workload,
    rows: np.ndarray | None,
    ep: int,
    m: int,
    needs: list[Needs],
    dispatch: str = "rows",
) -> int:
    """Return what travels to experts and back, given the rows [dp, blocks, E] for each expert.

    Where positions travel, once to each rank, a row still sends its place, a whole number, and its
    gate's weight there, whose gradient comes back if it has one.

    m  micro-batches, in each of which ranks say how many rows, and positions, will come
    """
    if rows is None or ep == 1:
        return 0
    dp, blocks, E = rows.shape
    groups = [slice(at, at + ep) for at in range(0, dp, ep)]
    away = np.sum([away_from_home(rows[own]) for own in groups], axis=0)
    told, times, more = E, np.array(journeys(case, needs)), 0
    if dispatch == "positions":
        gated = [gate_learns(mixture, met) for mixture, met in gates_of(case, needs)]
        more, told = int(away @ (2 + np.array(gated))) * ITEMSIZE, E + ep
        times += np.where(times == 2, gated, 0)  # dY, for the gate alone
        arrived = positions_arriving(case, dp, ep)
        away = sum(arrived[own].sum(axis=(0, 1)) - arrived[own].trace() for own in groups)
    counts = 8 * m * blocks * (ep - 1) * told * (dp // ep)
    return int(away @ times) * width_of(case.model) * ITEMSIZE + more + counts


def away_from_home(rows: np.ndarray) -> np.ndarray:
    """Return how many rows have their expert on another rank, per block."""
    travelling = arriving(rows)
    return travelling.sum(axis=(0, 1)) - travelling.trace()


def journeys(case: Workload, layers: list[Needs]) -> list[int]:
    """Return per block how often its rows pass to experts or back: 4 times, or forward alone.

    Backward is run where the rows need a gradient, and also where any expert is trained: all ranks
    exchange rows then, or none (expert_parallel/dispatch.py).
    """
    found = []
    for mixture, met in gates_of(case, layers):
        trained = any(p.requires_grad for e in mixture.experts for p in e.parameters())
        found.append(4 if trained or needed_at(met, "expand.weight") else 2)
    return found


def gates_of(case: Workload, layers: list[Needs]) -> Iterator[tuple[MixtureOfExperts, Needs]]:
    return zip(mixtures(case.model), layers[1:-1], strict=True)


def gate_learns(mixture: MixtureOfExperts, met: Needs) -> bool:
    """Return whether the gate's weights g need a gradient."""
    return bool(mixture.gate.weight.requires_grad) or needed_at(met, "gate.weight")


def expert_numbers(case: Workload) -> set[str]:
    """Return the names of the experts' parameters."""
    every = [expert for mixture in mixtures(case.model) for expert in mixture.experts]
    return {name for expert in every for name in expert.named_parameters()}


def expert_costs(case: Workload, N: int) -> list[Cost]:
    return expert_mesh_costs(case, N, N)


def expert_mesh_costs(
    case: Workload, dp: int, ep: int, tp: int | None = None, zero: int = 0
) -> list[Cost]:
    """Return what each rank holds and computes: its examples, and the rows for its experts.

    For one stage, one micro-batch and whole sequences; all tp ranks of one dp rank are alike.
    tp=None: matrices and embedding are whole. An untied Transformer without dropout. Beside what
    the layers keep of examples (`block_keeps`), a row keeps its gate's weight and the expert's
    output, 1 + C, where its results are added up: where it came from or, if positions travel, on
    its expert's rank; and there the input C, and 1/tp of gelu's input and factor and of contract's
    input, 3 F.
    """
    size, T, n = TransformerSize.of(case.model), positions_of(case), tp or 1
    C, F, expert = size.width, size.hidden, size.expert_parameters(n)
    layers = transformer_layers(size, T, Parts(n, n, tp), routed=True)
    dense, kept = [layer.parameters for layer in layers], sum(x.activations for x in layers)
    experts = [expert * (b - a) for a, b in pairwise(split_ends(size.experts, ep))]
    rows, once, costs = drawn(case, dp), case.options.get("dispatch") == "positions", []
    for d, share in enumerate(np.array_split(np.arange(len(case.inputs)), dp)):
        group, r = divmod(d, ep)
        travelling = arriving(rows[group * ep : (group + 1) * ep])
        left, came = int(travelling[r].sum()), int(travelling[:, r].sum())
        P, s = sum(dense) + size.layers * experts[r], sum(split_sizes(own, dp)[d] for own in dense)
        s += size.layers * split_sizes(experts[r], dp // ep)[group]
        held = zero_elements(zero, P, s, max(*dense, dense[1] + experts[r]))
        summed = came if once else left  # rows whose results are added up on this rank
        flight = len(share) * kept + ITEMSIZE * (summed * (C + 1) + came * (C + 3 * F // n))
        cost = cost_of(layers, len(share), T, (*held[:2], 2 * held[2]), flight)
        costs += [replace(cost, work=cost.work + came * 2 * C * F // n)] * n
    return costs


def expert_limit(case: Workload, ranks: int) -> tuple[int, str]:
    return min(case.model.experts, len(case.inputs)), "experts"
