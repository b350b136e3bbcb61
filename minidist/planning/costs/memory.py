"""Bytes that each rank of a plan holds: parameters, gradients, optimizer state, activations.

ZeRO cuts them over the N ranks of dp x cp: zero.py has the table. keeps="minidist" adds the buffers
that our ZeRO has; the papers count none.
"""

from collections.abc import Iterable

from minidist.errors import WrongInput
from minidist.planning.costs.kept import CONVENTIONS, Kept
from minidist.planning.costs.stages import Parameters, check_split, layer_parameters, stages_of
from minidist.planning.costs.stash import Entry, in_flight_on, peak_of
from minidist.planning.costs.transformer_size import TransformerSize
from minidist.planning.costs.zero import BYTES, zero_elements
from minidist.planning.plans.plan import Plan, check_one_of


def memory(
    size: TransformerSize,
    plan: Plan,
    batch: int,
    rank: int = 0,
    keeps: str = "minidist",
    per_parameter: int = 16,
    points: Iterable[Entry] | None = None,
) -> dict[str, int]:
    """Return {"parameters", "gradients", "optimizer", "activations": bytes} of one rank.

    batch          examples of a step, over all ranks
    rank           0 to pp - 1, of the pipeline; on the other axes, the rank that holds most
    keeps          what a layer keeps for backward: "minidist" or "korthikanti" (see kept.py)
    per_parameter  bytes with Adam: 16, or 18 where mixed precision sums gradients in float32
    points         what it has in flight, as entries of `in_flight`; None: what the plan says

    Activations are the peak at the end of a forward pass. Not in here: what a layer needs only
    while it runs, buffers of messages, and the allocator's losses.
    """
    check_one_of("keeps", keeps, CONVENTIONS)
    if (plan.precision, per_parameter) not in BYTES:
        raise WrongInput(f"no count of {per_parameter} bytes per parameter for {plan.precision}")
    check_split(size, plan)
    b = micro_batch(plan, batch)
    kept = CONVENTIONS[keeps](size, plan, b)
    layers = layer_parameters(size, plan, rank)
    states = elements_of(layers, plan, buffers=keeps == "minidist")
    each = BYTES[plan.precision, per_parameter]
    kinds = "parameters", "gradients", "optimizer"
    held = {kind: n * width for kind, n, width in zip(kinds, states, each, strict=True)}
    return held | {"activations": activations(size, plan, rank, kept, points)}


def micro_batch(plan: Plan, batch: int) -> int:
    """Return the examples of the largest micro-batch."""
    parts = plan.dp * plan.micro_batches
    if batch < parts:
        raise WrongInput(
            f"{batch} examples do not fill {plan.micro_batches} micro-batches on each of "
            f"{plan.dp} data ranks; use {parts} or more"
        )
    return -(-batch // parts)


def elements_of(layers: list[Parameters], plan: Plan, buffers: bool) -> tuple[int, int, int]:
    """Return the parameters, gradients and optimizer's parameters that a rank holds of its layers.

    By the table in zero.py, with plan.zero as the stage:

    P  the parameters of all these layers, experts included
    s  the rank's share of them, each layer's rounded up: of its dense parameters over the ranks of
       dp x cp, or plan.shards of these; of its experts over the dp/ep x cp ranks that have copies
    b  with `buffers`, the parameters of the largest layer; else 0
    """
    copies = plan.sharing // plan.ep
    P = sum(layer.dense + layer.experts for layer in layers)
    s = sum(-(-layer.dense // plan.sharing) - (-layer.experts // copies) for layer in layers)
    largest = max(layer.dense + layer.experts for layer in layers) if buffers else 0
    return zero_elements(plan.zero, P, s, largest)


def activations(
    size: TransformerSize,
    plan: Plan,
    rank: int,
    kept: Kept,
    points: Iterable[Entry] | None = None,
) -> int:
    """Return the peak bytes of activations on a rank, over all that its program has in flight.

    A chunk keeps of each micro-batch what its blocks, embedding and head keep; between I and W it
    holds their deferred bytes more. `in_flight` has, by chunk, how many micro-batches a rank holds
    of either kind at once, and `peak_of` the largest sum of their bytes. A rank that has a block
    holds `kept.once` besides, for any number of micro-batches.
    """
    stages = stages_of(size, plan, rank)
    held, more = [], []  # of each chunk, per micro-batch
    for embedding, blocks, head in stages:
        held.append(blocks * kept.block)
        more.append(blocks * kept.deferred_block)
        if embedding:
            held[-1] += kept.embedding
            more[-1] += kept.deferred_end
        if head:
            held[-1] += kept.head
            more[-1] += kept.deferred_end
    if points is None:
        points = in_flight_on(rank, plan.schedule, plan.pp, plan.micro_batches, plan.chunks)
    return peak_of(points, held + more) + (kept.once if any(s.blocks for s in stages) else 0)
