"""What a mesh of data, pipeline, context, tensor and expert ranks moves, holds and waits for."""

from dataclasses import replace
from itertools import product
from math import ceil
from typing import NamedTuple

from minidist.context_parallel.cuts import Cut, zigzag
from minidist.pieces import split_sizes
from minidist.pipeline_parallel.placement import Programs, micro_batches_of
from minidist.pipeline_parallel.schedules import order_of
from minidist.planning.costs import context_parallel as context
from minidist.planning.costs import tensor_parallel as tensor
from minidist.planning.costs.attention import ring_bytes, ulysses_bytes
from minidist.planning.costs.cost import ITEMSIZE, Cost, Workload, positions_of
from minidist.planning.costs.expert_parallel import (
    drawn,
    exchanged_bytes,
    expert_mesh_costs,
    expert_numbers,
    journeys,
)
from minidist.planning.costs.gradients import needed
from minidist.planning.costs.kept import Parts
from minidist.planning.costs.layers import Layer, heads_of, transformer_layers, width_of
from minidist.planning.costs.pipeline_parallel import (
    boundary_bytes,
    layout,
    pipeline_costs,
    pipeline_useful_share,
    stages_of,
)
from minidist.planning.costs.transformer_size import TransformerSize

OVER_CONTEXT = {  # by name of the attention: bytes of a layer, and what a rank keeps of it
    "ring": (ring_bytes, context.ring_keeps),
    "ulysses": (ulysses_bytes, context.ulysses_keeps),
}


class MeshSplit(NamedTuple):
    """How a case is split on a mesh: the ranks of each axis, and what else its options say."""

    order: Programs
    m: int
    tp: int
    dp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    split_sequence: bool = False
    zero: int = 0
    attention: str = "ring"
    positions: Cut = zigzag


def split_of(
    N: int,
    schedule: str | list = "1f1b",
    micro_batches: int | None = None,
    chunks: int | None = None,
    **options,
) -> MeshSplit:
    """Return how the options of a case split it on N ranks; what no other axis has, tp has."""
    axes = {name: options[name] for name in MeshSplit._fields[3:] if name in options}
    dp, pp, cp = (axes.get(axis, 1) for axis in ("dp", "pp", "cp"))
    order = order_of(schedule, pp, micro_batches, chunks)
    return MeshSplit(order, micro_batches_of(order), N // (dp * pp * cp), **axes)


def hybrid_bytes(case: Workload, N: int) -> int:
    """Return the bytes that all axes move."""
    return sum(bytes_by_axis(case, N).values())


def bytes_by_axis(case: Workload, N: int) -> dict[str, int]:
    """Return the bytes that all ranks send, each axis by its formula, with S = B T C itemsize.

    Written here for a Transformer; `tensor_parallel.reduced` has the rows of a Seq2Seq.

    tp    8 (tp - 1) S per block, 4 for embedding and head (`passages` with the sequence split), and
          three all_reduces of B T in the loss; if the sequence is split, the gradients of repeated
          parts. With experts, 4 S of a block are 4 times the rows that they get
    pp    2 S per boundary from each of tp ranks (S/tp if the sequence is split), and a Seq2Seq's
          column that says what is padding; a tied embedding
    cp    the attention of every block, and the choices of experts, k whole numbers per position
    ep    every row whose expert is on another rank, there and back, forward and backward; and E
          whole numbers per block, micro-batch and pair of ranks: how many rows will come
    data  an all_reduce of what ranks of dp x cp have copies of: the same with ZeRO stage 1
    loss  a number, over pp and over dp x cp
    """
    s, model = split_of(N, **case.options), case.model
    tp, data = s.tp, s.dp * s.cp
    rows = drawn(case, s.dp) if getattr(model, "experts", 0) else None
    cut, crossed, copies = layout(model, s.order)
    starts = [part.start for part in cut[1:]]
    needs = needed(model, starts)
    held, choices = held_bytes(case, tp), tp * context.choices_bytes(case, s.cp)
    experts = expert_numbers(case)
    sizes = boundary_bytes(case) if crossed else []
    over_pp = 2 * sum(sizes[cut[k][-1]] for k in crossed) * (1 if s.split_sequence else tp)
    over_pp += data * sum(2 * (copies[name] - 1) * held[name] for name in held)
    dense = sum(held[name] * copies[name] for name in held if name not in experts)
    return {
        "tp": over_tensor(case, s, rows, starts),
        "pp": over_pp,
        "cp": context.blocks_bytes(attention_bytes(case, s), needs) + choices,
        "ep": tp * exchanged_bytes(case, rows, s.ep, s.m * s.cp, needs),
        "data": 2 * (data - 1) * dense + 2 * (data // s.ep - 1) * sum(held[n] for n in experts),
        "loss": 2 * ITEMSIZE * tp * ((s.pp - 1) * data + (data - 1) * s.pp),
    }


def over_tensor(case: Workload, s: MeshSplit, rows, starts: list[int]) -> int:
    """Return the bytes over tp.

    rows    [dp, blocks, E] for each expert, or None
    starts  the first layers of the stages behind the first one
    """
    if s.split_sequence:
        return tensor.sequence_bytes(case, s.tp, starts, s.dp)
    summed = tensor.reduced(case, starts)
    fed = tensor.summed_bytes(case, s.tp, summed.feed_forward)
    if rows is not None:
        times = journeys(case, needed(case.model, starts), spread=s.ep > 1)
        numbers = int(rows.sum(axis=(0, 2)) @ times) * width_of(case.model)
        fed = (s.tp - 1) * ITEMSIZE * numbers
    whole = tensor.summed_bytes(case, s.tp, summed.attention + summed.vocabulary)
    return whole + fed + tensor.loss_bytes(case, s.tp)


def held_bytes(case: Workload, tp: int) -> dict[str, int]:
    """Return the bytes of each trained parameter that tp ranks hold together, with padding."""
    named, C = case.model.named_parameters(), width_of(case.model)
    whole = set(tensor.repeated(named))
    held = {n: ITEMSIZE * p.size * (tp if n in whole else 1) for n, p in named.items()}
    held |= {n: ITEMSIZE * C * tp * ceil(named[n].size // C / tp) for n in tensor.vocabulary(named)}
    return {n: size if named[n].requires_grad else 0 for n, size in held.items()}


def attention_bytes(case: Workload, s: MeshSplit) -> list[tuple[int, int]]:
    """Return the bytes that one block's attention sends from each rank of cp, for all examples."""
    sizes = [len(own) for own in s.positions(case.inputs.shape[1], s.cp)]
    layer, _ = OVER_CONTEXT[s.attention]
    return layer(sizes, ITEMSIZE * len(case.inputs) * width_of(case.model))


def hybrid_costs(case: Workload, N: int) -> list[Cost]:
    """Every rank has a part of the matrices of its stage's layers, examples and positions.

    With ZeRO, a layer's optimizer state is cut over the ranks of dp x cp. ValueError for experts on
    several stages, in several micro-batches, or with a cut sequence.
    """
    s, result = split_of(N, **case.options), []
    if getattr(case.model, "experts", 0) and s.pp == s.m == s.cp == 1:
        return expert_mesh_costs(case, s.dp, s.ep, s.tp, s.zero)
    for d, p, c, _ in product(*map(range, (s.dp, s.pp, s.cp, s.tp))):
        own = layers_of(case, s, c)
        cost = pipeline_costs(case, s.order, s.m, own, s.dp)[p]
        stages = stages_of(own, s.order)
        held = [layer.parameters for k in s.order.placement[p] for layer in stages[k]]
        if s.zero:
            data, r = s.dp * s.cp, d * s.cp + c
            state = 2 * ITEMSIZE * sum(split_sizes(n, data)[r] for n in held)
            cost = replace(cost, held=cost.held | {"optimizer state": state})
        held_here = len(s.positions(positions_of(case), s.cp)[c])
        result.append(replace(cost, positions=held_here))
    return result


def hybrid_useful_share(case: Workload, N: int) -> float:
    s = split_of(N, **case.options)
    every = [layers_of(case, s, c) for c in range(s.cp)]
    busiest = max(every, key=lambda layers: sum(layer.work for layer in layers))
    return pipeline_useful_share(case, s.order, s.m, N, busiest, s.dp)


def hybrid_limit(case: Workload, ranks: int) -> tuple[int, str]:
    number = case.inputs.size * len(case.model.layers) * heads_of(case.model)
    return number, "examples x positions x layers x heads"


def layers_of(case: Workload, s: MeshSplit, c: int) -> list[Layer]:
    """Return the layers of a rank at coordinate c of cp: parts of the matrices, some positions."""
    size, T, attention = TransformerSize.of(case.model), positions_of(case), None
    if s.cp > 1:
        held = s.positions(T, s.cp)
        keeps = OVER_CONTEXT[s.attention][1]
        T, attention = len(held[c]), keeps(size.width, size.heads, held)[c]
    return transformer_layers(size, T, Parts(s.tp, s.tp, s.tp), attention)
