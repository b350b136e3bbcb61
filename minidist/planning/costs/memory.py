"""Bytes that each rank of a plan holds: parameters, gradients, optimizer state, activations.

Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models (SC 2020),
section 3. P parameters of a rank, s of them its shard over the N ranks of dp x cp:

    zero    parameters    gradients    optimizer        bytes per parameter
    0       P             P            P                float32    4 +  4 +  8 = 16, Adam
    1       P             P            s                mixed      2 +  2 + 12 = 16, theirs
    2       P             s            s                mixed      2 +  4 + 12 = 18, Megatron-LM's,
    3       s             s            s                           which sums gradients in float32

keeps="minidist" adds the buffers that our ZeRO has (`zero_bytes_held`): the largest layer's
gradients in stages 2 and 3, and in stage 3 its parameters twice.
"""

from functools import lru_cache

from minidist.planning.costs.kept import CONVENTIONS, Kept
from minidist.planning.costs.stages import check_split, layer_parameters, stages_of
from minidist.planning.costs.stash import in_flight
from minidist.planning.costs.transformer_size import TransformerSize
from minidist.planning.plan import Plan, check_one_of

BYTES = {  # of parameters, gradients and optimizer state
    ("float32", 16): (4, 4, 8),
    ("mixed", 16): (2, 2, 12),
    ("mixed", 18): (2, 4, 12),
}


def memory(
    size: TransformerSize,
    plan: Plan,
    batch: int,
    rank: int = 0,
    keeps: str = "minidist",
    per_parameter: int = 16,
) -> dict[str, int]:
    """Return {"parameters", "gradients", "optimizer", "activations": bytes} of one rank.

    batch          examples of a step, over all ranks
    rank           0 to pp - 1, of the pipeline; on the other axes, the rank that holds most
    keeps          what a layer keeps for backward: "minidist" or "korthikanti" (see kept.py)
    per_parameter  bytes with Adam: 16, or 18 where mixed precision sums gradients in float32

    Activations are the peak at the end of a forward pass. Not in here: what a layer needs only
    while it runs, buffers of messages, and the allocator's losses.
    """
    check_one_of("keeps", keeps, CONVENTIONS)
    if (plan.precision, per_parameter) not in BYTES:
        raise ValueError(f"no count of {per_parameter} bytes per parameter for {plan.precision}")
    check_split(size, plan)
    b = micro_batch(plan, batch)
    kept = CONVENTIONS[keeps](size, plan, b)
    states = held_elements(size, plan, rank, buffers=keeps == "minidist")
    each = BYTES[plan.precision, per_parameter]
    kinds = "parameters", "gradients", "optimizer"
    held = {kind: n * width for kind, n, width in zip(kinds, states, each, strict=True)}
    return held | {"activations": activations(size, plan, rank, kept)}


def micro_batch(plan: Plan, batch: int) -> int:
    """Return the examples of the largest micro-batch."""
    parts = plan.dp * plan.micro_batches
    if batch < parts:
        raise ValueError(
            f"{batch} examples do not fill {plan.micro_batches} micro-batches on each of "
            f"{plan.dp} data ranks; use {parts} or more"
        )
    return -(-batch // parts)


@lru_cache(maxsize=4096)
def held_elements(
    size: TransformerSize, plan: Plan, rank: int, buffers: bool
) -> tuple[int, int, int]:
    """Return the parameters, gradients and optimizer's parameters that a rank holds."""
    layers, copies = layer_parameters(size, plan, rank), plan.data // plan.ep
    P = sum(layer.dense + layer.experts for layer in layers)
    s = sum(-(-layer.dense // plan.data) - (-layer.experts // copies) for layer in layers)
    largest = max(layer.dense + layer.experts for layer in layers) if buffers else 0
    return (
        s + 2 * largest if plan.zero == 3 else P,
        s + largest if plan.zero >= 2 else P,
        s if plan.zero >= 1 else P,
    )


def activations(size: TransformerSize, plan: Plan, rank: int, kept: Kept) -> int:
    """Return the peak bytes of activations on a rank, over all that its program has in flight."""
    stages = stages_of(size, plan, rank)
    held, more = [], []  # of each chunk, per micro-batch
    for embedding, blocks, head in stages:
        held.append(embedding * kept.embedding + blocks * kept.block + head * kept.head)
        more.append((embedding + head) * kept.deferred_end + blocks * kept.deferred_block)
    each = held + more
    points = in_flight(plan.schedule, plan.pp, plan.micro_batches, plan.chunks)[rank]
    peak = max(sum(n * nbytes for n, nbytes in zip(point, each, strict=True)) for point in points)
    return peak + (kept.once if any(s.blocks for s in stages) else 0)


def most_memory(
    size: TransformerSize,
    plan: Plan,
    batch: int,
    keeps: str = "minidist",
    per_parameter: int = 16,
) -> tuple[int, int]:
    """Return (bytes, rank) of the pipeline's rank that holds most."""
    each = [memory(size, plan, batch, r, keeps, per_parameter) for r in range(plan.pp)]
    totals = [sum(held.values()) for held in each]
    return max(totals), totals.index(max(totals))
