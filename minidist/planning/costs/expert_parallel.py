"""What experts over ranks move and hold, given which expert each row goes to.

The weights decide it: `drawn` runs the model on one device, and returns the load of each expert.
Letters: N ranks, r one of them; E experts, rank r holds a run of them.
"""

import copy
from dataclasses import replace
from itertools import pairwise

import numpy as np

from minidist.autograd import no_grad
from minidist.nn import mixtures
from minidist.pieces import split_ends, split_sizes
from minidist.planning.costs.cost import ITEMSIZE, Cost, Workload, cost_of, positions_of
from minidist.planning.costs.gradients import Needs, needed, needed_at
from minidist.planning.costs.kept import Parts
from minidist.planning.costs.layers import transformer_layers, width_of
from minidist.planning.costs.transformer_size import TransformerSize
from minidist.rng import Randomness


def drawn(case: Workload, N: int) -> np.ndarray:
    """Return the rows that rank r's examples have for each expert, in each block: [N, blocks, E].

    Drops are decided per example, so that one device finds what the ranks will find.
    """
    model, B = copy.deepcopy(case.model), len(case.inputs)
    found = []
    with no_grad():
        for share in np.array_split(np.arange(B), N):
            model(case.inputs[share], Randomness(case.seed, 0, share, B))
            reports = [mixture.report for mixture in mixtures(model)]
            found.append([report.load for report in reports if report is not None])
    return np.array(found)


def arriving(rows: np.ndarray) -> np.ndarray:
    """Return the rows that go from rank r to rank s, in each block: [N, N, blocks]."""
    N, _, E = rows.shape
    own = [rows[..., a:b].sum(axis=-1) for a, b in pairwise(split_ends(E, N))]
    return np.stack(own, axis=1)


def expert_bytes(case: Workload, N: int) -> int:
    """Return 4 C bytes-per-number per row whose expert is on another rank, and what is summed.

    Each such row goes there and back, and so does its gradient (see `journeys`). Besides, per block
    and micro-batch, every rank tells the others how many rows will come, 8 bytes per expert; and an
    all_reduce sums the gradients of all parameters but experts.
    """
    rows, experts = drawn(case, N), expert_numbers(case)
    m = case.options.get("micro_batches", 1)
    named = case.model.named_parameters().items()
    others = [p for name, p in named if p.requires_grad and name not in experts]
    summed = 2 * (N - 1) * sum(p.data.nbytes for p in others)
    return exchanged_bytes(case, rows, N, m, needed(case.model)) + summed


def exchanged_bytes(
    case: Workload, rows: np.ndarray | None, ep: int, m: int, needs: list[Needs]
) -> int:
    """Return what travels to experts and back, given the rows [dp, blocks, E] for each expert.

    m  micro-batches, in each of which ranks say how many rows will come
    """
    if rows is None or ep == 1:
        return 0
    dp, blocks, E = rows.shape
    away = np.sum([away_from_home(rows[at : at + ep]) for at in range(0, dp, ep)], axis=0)
    counts = 8 * m * blocks * (ep - 1) * E * (dp // ep)
    return int(away @ journeys(case, needs)) * width_of(case.model) * ITEMSIZE + counts


def away_from_home(rows: np.ndarray) -> np.ndarray:
    """Return how many rows have their expert on another rank, per block."""
    travelling = arriving(rows)
    return travelling.sum(axis=(0, 1)) - travelling.trace()


def journeys(case: Workload, layers: list[Needs], spread: bool = True) -> list[int]:
    """Return per block how often its rows pass to experts or back: 4 times, or forward alone.

    Backward is run where the rows need a gradient, and also where any expert is trained, if experts
    are spread over ranks: all ranks exchange rows then, or none (expert_parallel/dispatch.py).
    """
    found = []
    for mixture, met in zip(mixtures(case.model), layers[1:-1], strict=True):
        trained = spread and any(p.requires_grad for e in mixture.experts for p in e.parameters())
        found.append(4 if trained or needed_at(met, "expand.weight") else 2)
    return found


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
    the layers keep of examples (`block_keeps`), a row keeps where it came from and the expert's
    output, 1 + C; and on its expert's rank the input C, and 1/tp of gelu's input and factor and of
    contract's input, 12 C.
    """
    size, T, n = TransformerSize.of(case.model), positions_of(case), tp or 1
    C, expert = size.width, size.expert_parameters(n)
    layers = transformer_layers(size, T, Parts(n, n, tp), routed=True)
    dense, kept = [layer.parameters for layer in layers], sum(x.activations for x in layers)
    experts = [expert * (b - a) for a, b in pairwise(split_ends(size.experts, ep))]
    rows, costs = drawn(case, dp), []
    for d, share in enumerate(np.array_split(np.arange(len(case.inputs)), dp)):
        group, r = divmod(d, ep)
        travelling = arriving(rows[group * ep : (group + 1) * ep])
        left, came = int(travelling[r].sum()), int(travelling[:, r].sum())
        P = state = sum(dense) + size.layers * experts[r]
        if zero:
            state = sum(split_sizes(own, dp)[d] for own in dense)
            state += size.layers * split_sizes(experts[r], dp // ep)[group]
        flight = len(share) * kept + ITEMSIZE * (left * (C + 1) + came * (C + 12 * C // n))
        cost = cost_of(layers, len(share), T, (P, P, 2 * state), flight)
        costs += [replace(cost, work=cost.work + came * 8 * C * C // n)] * n
    return costs


def expert_limit(case: Workload, ranks: int) -> tuple[int, str]:
    return min(case.model.experts, len(case.inputs)), "experts"
