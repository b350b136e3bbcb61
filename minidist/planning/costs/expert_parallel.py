"""What experts over ranks move and hold, given which expert each row goes to.

The weights decide it: `drawn` runs the model on one device, and returns the load of each expert.
Letters: N ranks, r one of them; E experts, rank r holds a run of them.
"""

import copy
from itertools import pairwise

import numpy as np

from minidist.autograd import no_grad
from minidist.autograd.attention import computed_scores, kept_scores
from minidist.comm.collectives import split_ends, split_sizes
from minidist.nn import mixtures
from minidist.planning.costs.cost import ITEMSIZE, Cost, Workload, positions_of
from minidist.planning.costs.gradients import Needs, needed, needed_at
from minidist.planning.costs.layers import heads_of, width_of
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
            found.append([mixture.report.load for mixture in mixtures(model)])
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
    away = away_from_home(rows) @ journeys(case, needed(case.model))
    _, blocks, E = rows.shape
    counts = case.options.get("micro_batches", 1) * blocks * (N - 1) * E * 8
    named = case.model.named_parameters().items()
    others = [p for name, p in named if p.requires_grad and name not in experts]
    summed = 2 * (N - 1) * sum(p.data.nbytes for p in others)
    return int(away) * width_of(case.model) * ITEMSIZE + counts + summed


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
    tp=None: matrices and embedding are whole. An untied Transformer without dropout; in numbers, of
    which a rank has 1/tp where they are in brackets:

        per example     a block: 4 X + 2 T, its gate's shares T E, the weights of its balancing loss
                        E, gates T (k + 1) if k > 1, [4 X + scores] (see layers.py); head and loss:
                        2 X + T, [T V]; the embedding, if it is split: X + T
        per row         where it came from, the expert's output C, and its gate 1; on its expert's
                        rank the input C, [4 C, gelu's input and factor 8 C]
    """
    model, T, n = case.model, positions_of(case), tp or 1
    C, V, L, E = width_of(model), model.vocab, len(model.layers) - 2, model.experts
    k, X, S = model.layers[1].mixture.top_k, T * C, heads_of(model) * kept_scores(T)
    gates, looked_up = T * (k + 1) if k > 1 else 0, 0 if tp is None else X + T
    example = looked_up + 2 * X + T + T * V // n
    example += L * (4 * X + 2 * T + T * E + E + gates + (4 * X + S) // n)
    work = X * V // n + L * (T * C * E + (4 * T * C * C + 2 * computed_scores(T) * C) // n)
    block, expert = (4 * C * C + 3 * C) // n + 5 * C + C * E, (8 * C * C + 4 * C) // n + C
    layers = [V * C // n + T * C, *[block] * L, 2 * C + V * C // n]
    own = [expert * (b - a) for a, b in pairwise(split_ends(E, ep))]
    rows, costs = drawn(case, dp), []
    for d, share in enumerate(np.array_split(np.arange(len(case.inputs)), dp)):
        group, r = divmod(d, ep)
        travelling = arriving(rows[group * ep : (group + 1) * ep])
        left, came = int(travelling[r].sum()), int(travelling[:, r].sum())
        P = state = sum(layers) + L * own[r]
        if zero:
            state = sum(split_sizes(size, dp)[d] for size in layers)
            state += L * split_sizes(own[r], dp // ep)[group]
        held = {"parameters": P, "gradients": P, "optimizer state": 2 * state}
        held["activations"] = len(share) * example + left * (C + 1) + came * (C + 12 * C // n)
        nbytes = {what: ITEMSIZE * size for what, size in held.items()}
        done = len(share) * work + came * 8 * C * C // n
        costs += [Cost(len(share), T, L + 2, 0, nbytes, done)] * n
    return costs


def expert_limit(case: Workload, ranks: int) -> tuple[int, str]:
    return min(case.model.experts, len(case.inputs)), "experts"
