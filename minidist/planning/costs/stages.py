"""The layers of each rank of a planned pipeline, and how many passes it has in flight.

cut="layers", 4 blocks in 3 stages     [embedding, b] [b, b] [b, head]
cut="blocks", 4 blocks in 2 stages     [embedding, b, b] [b, b, head]

In flight: one entry of a rank with v chunks is a point of its program, after a forward pass:

    (held_0, ..., held_v-1, waiting_0, ..., waiting_v-1)

held     micro-batches whose activations a chunk holds
waiting  how many of these are between I and W, the halves of their backward

    1F1B, rank 0 of 4:  F0 F1 F2 F3 B0 F4 B1 ...      4 held from F3 on: ((4, 0),)

Letters: p ranks, m micro-batches, v chunks. Where forward passes do not run ahead of backward, the
entries are the same for all m from 2 p. Where they do, they grow by the same number with each
micro-batch (gpipe, looped_bfs).
"""

from collections.abc import Iterable
from functools import lru_cache
from itertools import groupby
from operator import ge, mul
from typing import NamedTuple

from minidist.errors import WrongInput
from minidist.pipeline_parallel.actions import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    equal_lengths,
    looped,
)
from minidist.pipeline_parallel.schedules import actions_of_rank
from minidist.pipeline_parallel.zero_bubble import v_shaped
from minidist.planning.costs.transformer_size import TransformerSize
from minidist.planning.plans.plan import V_SHAPED, Plan

GROWING = "gpipe", "looped_bfs"  # whose forward passes run ahead of backward
Entry = tuple[int, ...]


def check_split(size: TransformerSize, plan: Plan) -> None:
    """Raise ValueError for a plan whose tp or ep does not cut the model into equal parts."""
    if size.heads % plan.tp:
        raise WrongInput(f"tp={plan.tp} does not divide {size.heads} heads; use a divisor of them")
    if plan.ep > 1 and not size.experts:
        raise WrongInput(f"ep={plan.ep} needs experts, and the model has 0; use ep=1")
    if size.experts % plan.ep:
        raise WrongInput(
            f"ep={plan.ep} does not divide {size.experts} experts; use a divisor of them"
        )


class StageLayers(NamedTuple):
    """The layers of one virtual stage."""

    embedding: bool
    blocks: int
    head: bool


@lru_cache(maxsize=4096)
def cut_of(layers: int, stages: int, cut: str) -> tuple[StageLayers, ...]:
    """Return the virtual stages of a model of this many blocks, in order."""
    if cut == "blocks":
        if layers % stages:
            raise WrongInput(
                f'{layers} blocks do not make {stages} equal stages; use cut="layers", or stages '
                f"that divide {layers}"
            )
        lengths = [layers // stages] * stages
    else:
        lengths = equal_lengths(layers + 2, stages)
        lengths[0] -= 1
        lengths[-1] -= 1
    return tuple(StageLayers(k == 0, n, k == stages - 1) for k, n in enumerate(lengths))


def stages_of(size: TransformerSize, plan: Plan, rank: int) -> list[StageLayers]:
    """Return the virtual stages, one per chunk, of a rank of the pipeline."""
    if not 0 <= rank < plan.pp:
        raise WrongInput(f"rank {rank} is not in a pipeline of {plan.pp}; use 0 to {plan.pp - 1}")
    stages = cut_of(size.layers, plan.pp * plan.chunks, plan.cut)
    numbers = placement(plan.schedule, plan.pp, plan.chunks)[rank]
    return [stages[k] for k in numbers]


class Parameters(NamedTuple):
    """Of one layer on one rank: dense ones, the same on all ranks of dp x cp, and experts'."""

    dense: int
    experts: int = 0


def layer_parameters(size: TransformerSize, plan: Plan, rank: int) -> list[Parameters]:
    """Return the parameters of each layer on a rank of the pipeline; on tp, of the fullest rank.

    A matrix [C, n C] and the bias of its split columns are cut over tp; every rank of tp has the
    norms, the biases of split rows, the positions and the gate. The vocabulary is padded, so that
    tp cuts it evenly. A tied head on the embedding's own rank has no weight of its own.
    """
    stages = stages_of(size, plan, rank)
    shared = size.tied and any(stage.embedding for stage in stages)
    return [layer for stage in stages for layer in stage_parameters(size, plan, stage, shared)]


def stage_parameters(
    size: TransformerSize, plan: Plan, stage: StageLayers, shared: bool
) -> list[Parameters]:
    """Return the parameters of each layer of a stage, in order.

    embedding  ceil(V/tp) rows of C tokens, and T rows of C positions if they are learned
    blocks     `block_parameters` each
    head       a norm, 2 C or C, and ceil(V/tp) C, but not if shared: it has the embedding's tokens
    """
    C, (embedding, blocks, head) = size.width, stage
    tokens = -(-size.vocab // plan.tp) * C
    layers = [block_parameters(size, plan)] * blocks
    if embedding:
        layers.insert(0, Parameters(tokens + size.positions * C))
    if head:
        layers.append(Parameters(size.norm * C + (0 if shared else tokens)))
    return layers


def block_parameters(size: TransformerSize, plan: Plan) -> Parameters:
    """Return the parameters of a block, on the rank that has most.

    Dense, it has the model's `attention_parameters` and `expert_parameters`, cut over tp. With
    experts, a rank of ep has up to ceil(E/ep) of them, cut over tp. The whole gate, C E, and the
    shared experts, cut over tp, are dense.
    """
    attention, expert = size.attention_parameters(plan.tp), size.expert_parameters(plan.tp)
    if not size.experts:
        return Parameters(attention + expert)
    experts, shared = -(-size.experts // plan.ep), size.expert_parameters(plan.tp, size.shared)
    return Parameters(attention + size.width * size.experts + shared, experts * expert)


def in_flight(schedule: str, p: int, m: int, v: int) -> tuple[tuple[Entry, ...], ...]:
    """Return each rank's entries that no other entry of the rank exceeds in all numbers."""
    return tuple(in_flight_on(r, schedule, p, m, v) for r in range(p))


@lru_cache(maxsize=100_000)
def in_flight_on(r: int, schedule: str, p: int, m: int, v: int) -> tuple[Entry, ...]:
    """Return the entries of rank r."""
    if m > (most := bounded(schedule, p, m)):
        return in_flight_on(r, schedule, p, most, v)
    if schedule not in GROWING or m <= 2:
        return entries(actions_of_rank(schedule, p, m, v, r), v)
    first, second = (in_flight_on(r, schedule, p, n, v) for n in (1, 2))
    return tuple(
        tuple(a + (m - 1) * (b - a) for a, b in zip(x, y, strict=True))
        for x, y in zip(first, second, strict=True)
    )


def bounded(schedule: str, p: int, m: int) -> int:
    """Return a number of micro-batches, m or fewer, that has the same entries."""
    return m if schedule in GROWING else min(m, 2 * p)


@lru_cache(maxsize=1024)
def placement(schedule: str, p: int, v: int) -> list[list[int]]:
    """Return the virtual stages of each rank, for any m."""
    return v_shaped(p) if schedule in V_SHAPED else looped(p, v)


def entries(program: list[Action], v: int) -> tuple[Entry, ...]:
    """Return the entries of one rank's program with v chunks, sorted.

    Of forward passes in a row only the last one counts: it holds more than those before.
    """
    now, points, grown = [0] * (2 * v), set(), False
    for action in program:
        kind, c = type(action), action.chunk
        if grown and kind is not Forward:
            points.add(tuple(now))
        grown = kind is Forward
        if grown:
            now[c] += 1
        elif kind is Backward:
            now[c] -= 1
        elif kind is BackwardInput:
            now[v + c] += 1
        elif kind is BackwardWeight:
            now[c] -= 1
            now[v + c] -= 1
    return tuple(sorted(largest(points)))


def peak_of(points: Iterable[Entry], each: list[int]) -> int:
    """Return the most bytes at any of these points, for the bytes of each number of an entry."""
    return max(sum(map(mul, point, each)) for point in points)


def largest(points: set[Entry]) -> list[Entry]:
    """Return the entries that no other one exceeds; only one with a larger sum can do so."""
    kept: list[Entry] = []
    for total, group in groupby(sorted(points, key=sum, reverse=True), key=sum):
        above = [e for e in kept if sum(e) > total]
        kept += [e for e in group if not any(all(map(ge, other, e)) for other in above)]
    return kept
