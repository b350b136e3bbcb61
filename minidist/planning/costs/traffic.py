"""Bytes that a rank of a plan sends in a step, along each axis, and in how many operations.

With S bytes of a micro-batch's activation X[b, T/cp, C], and n ranks of the axis, a rank sends

    tp   8 (n - 1)/n S per block: an all_reduce twice each way (Narayanan et al. 2021, section 3.2);
         10 with the sequence split: an all_gather and a reduce_scatter twice each way, and two more
         gathers for dW. Embedding and head together half a block's; three small sums of the loss
    pp   S forward and S backward per boundary to another rank, S/tp if the sequence is split; a
         tied embedding's gradient, if embedding and head are on two ranks
    cp   2 (n - 1) S/tp forward and twice that backward per block: ring attention; K/H of it where
         H heads of queries read K of keys and values
    ep   4 (n - 1)/n k S per block: rows go to experts and back, and so do their gradients
    dp   over n = dp x cp ranks, (n - 1)/n P times 2 g in stage 0 of ZeRO, g + w in stage 1,
         m g + w in stage 2, m g + 2 m w in stage 3: w bytes a weight, g a gradient; experts over
         dp/ep x cp. If k ranks share a copy: that with n = k, and an all_reduce of P/k between
         the copies

Full recomputation repeats the forward part of tp, cp and ep. Experts' rows are taken as balanced,
and none as dropped. The loss itself, one number, is left out.
"""

from fractions import Fraction
from math import ceil

from minidist.planning.costs.memory import micro_batch, positions
from minidist.planning.costs.stages import (
    Parameters,
    check_split,
    layer_parameters,
    placement,
    stages_of,
)
from minidist.planning.costs.transformer_size import TransformerSize
from minidist.planning.costs.zero import BYTES, zero_passes
from minidist.planning.plans.plan import Plan

WHOLE = 8  # bytes of a whole number

Sent = dict[str, tuple[int, int]]


def traffic(size: TransformerSize, plan: Plan, batch: int) -> Sent:
    """Return {axis: (bytes that the busiest rank sends in a step, operations it takes part in)}.

    An operation is a collective; on pp and cp, a message. The busiest rank of one axis need not be
    that of another.
    """
    each = [sent(size, plan, batch, r) for r in range(plan.pp)]
    return {axis: max(of_rank[axis] for of_rank in each) for axis in each[0]}


def sent(size: TransformerSize, plan: Plan, batch: int, rank: int = 0) -> Sent:
    """Return {axis: (bytes, operations)} of rank 0 to pp - 1; ranks differ on pp only."""
    check_split(size, plan)
    rows = micro_batch(plan, batch) * positions(size, plan)
    by_axis = {
        "dp": over_data(size, plan, rank),
        "pp": over_pipeline(size, plan, rank, rows),
        "tp": over_tensor(size, plan, rank, rows),
        "cp": over_context(size, plan, rank, rows),
        "ep": over_experts(size, plan, rank, rows),
    }
    return {axis: (ceil(nbytes), number) for axis, (nbytes, number) in by_axis.items()}


def passes(size: TransformerSize, plan: Plan, rank: int) -> int:
    """Return how often a rank runs a block forward in a step, without recomputation."""
    return plan.micro_batches * sum(stage.blocks for stage in stages_of(size, plan, rank))


def forwards(plan: Plan) -> int:
    """Return how often a block runs forward per pass: twice if all of it is recomputed."""
    return 2 if plan.recompute == "full" else 1


def over_tensor(size: TransformerSize, plan: Plan, rank: int, rows: int) -> tuple[Fraction, int]:
    if plan.tp == 1:
        return Fraction(0), 0
    C, m, stages = size.width, plan.micro_batches, stages_of(size, plan, rank)
    blocks = passes(size, plan, rank)
    embeddings = sum(1 for stage in stages if stage.embedding)
    heads = sum(1 for stage in stages if stage.head)
    biases = 1
    if size.experts:
        biases = -(-size.experts // plan.ep) + (1 if size.shared else 0)
    if plan.sequence:  # two operations forward, three in backward
        sizes = operations = 2 * forwards(plan) + 3
        ends = at_ends = 2 * embeddings + 3 * heads
    else:  # an all_reduce each way, of twice the bytes
        sizes, operations = 2 * forwards(plan) + 2, forwards(plan) + 1
        ends, at_ends = 2 * embeddings + 2 * heads, embeddings + heads
    moved = (sizes * 2 * blocks + ends * m) * rows * C * plan.itemsize
    moved += heads * m * 6 * rows * 4
    count = operations * 2 * blocks + (at_ends + 3 * heads) * m
    if size.experts:  # an all_reduce of the gradients of the gates' weights
        moved += 2 * blocks * size.top_k * rows * plan.itemsize
        count += blocks
    if plan.sequence:  # gradients of norms, of biases of split rows, of positions and gates
        held = sum(stage.blocks for stage in stages)
        rows_of_C = 2 * size.norm + (0 if size.llama else 1 + biases)
        summed = held * (rows_of_C + size.experts) * C
        summed += embeddings * size.positions * C + heads * size.norm * C
        moved += 2 * summed * plan.itemsize
        count += held * (rows_of_C + (1 if size.experts else 0)) + heads * size.norm
        count += embeddings if size.positions else 0
    return Fraction(plan.tp - 1, plan.tp) * moved, count


def over_pipeline(size: TransformerSize, plan: Plan, rank: int, rows: int) -> tuple[Fraction, int]:
    """Return the bytes and the number of messages to other stages, and of a tied gradient.

    For each micro-batch, each of the rank's stages sends X to the next stage and dX to the one
    before, `message_bytes` each; a stage on the same rank needs no message. If a tied embedding and
    the head are on two ranks, each of these sends `tied_bytes`, in one more message.
    """
    p, m = plan.pp, plan.micro_batches
    if p == 1:
        return Fraction(0), 0
    placed = placement(plan.schedule, p, plan.chunks)
    rank_of = {k: r for r, held in enumerate(placed) for k in held}
    last = len(rank_of) - 1
    ways = [k + step for k in placed[rank] for step in (1, -1) if 0 <= k + step <= last]
    messages = m * sum(1 for k in ways if rank_of[k] != rank)
    moved = messages * message_bytes(size, plan, rows)
    if size.tied and rank_of[0] != rank_of[last] and rank in (rank_of[0], rank_of[last]):
        return moved + tied_bytes(size, plan), messages + 1
    return moved, messages


def message_bytes(size: TransformerSize, plan: Plan, rows: int) -> Fraction:
    """Return the bytes of one message between stages: X[b, T/cp, C], cut by the sequence."""
    return Fraction(rows * size.width * plan.itemsize, plan.tp if plan.sequence else 1)


def tied_bytes(size: TransformerSize, plan: Plan) -> int:
    """Return the bytes of the gradient of a tied weight [V/tp, C], with padding."""
    return BYTES[plan.precision, 16][1] * -(-size.vocab // plan.tp) * size.width


def over_context(size: TransformerSize, plan: Plan, rank: int, rows: int) -> tuple[Fraction, int]:
    """Return the bytes and messages of ring attention: a round is n - 1 messages of each rank.

    Of each block, keys and values, 2 S/tp bytes a message, make a round in each forward pass (see
    `forwards`) and one in backward, in which their gradients make another, with as many bytes. Of K
    heads of keys for H of queries, S is K/H of X, and tp splits it into K parts at most. With
    experts, the k choices of each of the `rows` make a round in each forward pass: WHOLE bytes
    each, on every rank of tp.
    """
    others, messages = plan.cp - 1, 2 + forwards(plan)
    parts = min(plan.tp, size.key_heads)
    each = Fraction((4 + 2 * forwards(plan)) * rows * size.key_width * plan.itemsize, parts)
    if size.experts:  # all choices, for the queues of experts
        each += WHOLE * size.top_k * rows * forwards(plan)
        messages += forwards(plan)
    return passes(size, plan, rank) * others * each, passes(size, plan, rank) * others * messages


def over_experts(size: TransformerSize, plan: Plan, rank: int, rows: int) -> tuple[Fraction, int]:
    if not size.experts or plan.ep == 1:
        return Fraction(0), 0
    blocks, away = passes(size, plan, rank), Fraction(plan.ep - 1, plan.ep)
    each = (2 + 2 * forwards(plan)) * size.top_k * rows * size.width * plan.itemsize
    counts = WHOLE * size.experts * forwards(plan)  # how many rows will come
    return blocks * away * (each + counts), blocks * (2 + 3 * forwards(plan))


def over_data(size: TransformerSize, plan: Plan, rank: int) -> tuple[Fraction, int]:
    """Return the bytes of gradients and gathered weights, and in how many operations they go.

    `shared_elements` travel in each of the scatters of `zero_passes`, at a gradient's width, and in
    each of its gathers, at a weight's. Without ZeRO, one all_reduce, scatter and gather in one
    operation, has gradients alone. What copies have in common is summed once, by `copied_elements`.
    """
    w, g, _ = BYTES[plan.precision, 16]
    scatters, gathers = zero_passes(plan.zero, plan.micro_batches)
    held = layer_parameters(size, plan, rank)
    elements, layers = shared_elements(plan, held)
    width = scatters * g + gathers * (w if plan.zero else g)
    between, sums = copied_elements(plan, held)
    moved = width * elements + g * between
    return moved, (scatters + gathers if plan.zero else 1) * layers + sums


def shared_elements(plan: Plan, layers: list[Parameters]) -> tuple[Fraction, int]:
    """Return how many elements of these layers a rank sends in a reduce_scatter or an all_gather.

    And in how many operations: one for each layer, and one more for its experts.
    """
    n, copies = plan.sharing, plan.sharing // plan.ep
    dense, experts = (sum(each) for each in zip(*layers, strict=True))
    with_experts = sum(1 for layer in layers if layer.experts) if copies > 1 else 0
    return (
        Fraction(n - 1, n) * dense + Fraction(copies - 1, copies) * experts,
        (len(layers) if n > 1 else 0) + with_experts,
    )


def copied_elements(plan: Plan, layers: list[Parameters]) -> tuple[Fraction, int]:
    """Return how many elements of its shards a rank sends in their sums over the other copies.

    And in how many all_reduces: one for each layer, if there are other copies.
    """
    h = plan.data // plan.sharing
    shard = Fraction(sum(layer.dense + layer.experts for layer in layers), plan.sharing)
    return 2 * Fraction(h - 1, h) * shard, len(layers) if h > 1 else 0
