"""Which layers each rank of a planned pipeline holds, and how many parameters they have.

cut="layers", 4 blocks in 3 stages     [embedding, b] [b, b] [b, head]
cut="blocks", 4 blocks in 2 stages     [embedding, b, b] [b, b, head]
"""

from functools import lru_cache
from typing import NamedTuple

from minidist.errors import WrongInput
from minidist.pipeline_parallel.actions import equal_lengths
from minidist.planning.costs.stash import placement
from minidist.planning.costs.transformer_size import TransformerSize
from minidist.planning.plans.plan import Plan


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
    own = placement(plan.schedule, plan.pp, plan.chunks)[rank]
    return [stages[k] for k in own]


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
    own, shared = -(-size.experts // plan.ep), size.expert_parameters(plan.tp, size.shared)
    return Parameters(attention + size.width * size.experts + shared, own * expert)
