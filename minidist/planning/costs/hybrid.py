"""What a mesh of data, pipeline, context, tensor and expert ranks moves, holds and waits for."""

from dataclasses import replace
from itertools import product
from math import ceil
from typing import NamedTuple

import numpy as np

from minidist.context_parallel.cuts import Cut, zigzag
from minidist.pieces import split_sizes
from minidist.pipeline_parallel.actions import Programs, micro_batches_of
from minidist.pipeline_parallel.schedules import order_of
from minidist.planning.costs import context_parallel as context
from minidist.planning.costs import tensor_parallel as tensor
from minidist.planning.costs.cost import ITEMSIZE, Cost, Workload, loads_bytes, positions_of
from minidist.planning.costs.expert_parallel import (
    drawn,
    exchanged_bytes,
    expert_mesh_costs,
    expert_numbers,
    gate_learns,
    gates_of,
)
from minidist.planning.costs.gradients import needed
from minidist.planning.costs.kept import Parts
from minidist.planning.costs.layers import (
    Layer,
    heads_of,
    holders_of_heads,
    transformer_layers,
    width_of,
)
from minidist.planning.costs.pipeline_parallel import (
    boundary_bytes,
    layout,
    pipeline_costs,
    pipeline_useful_share,
    stages_of,
)
from minidist.planning.costs.transformer_size import TransformerSize
from minidist.planning.costs.zero import zero_elements, zero_passes


class MeshSplit(NamedTuple):
    """How a case is split on a mesh: the ranks of each axis, and what else its options say."""

    order: Programs
    m: int
    tp: int
    dp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    dispatch: str = "rows"
    split_sequence: bool = False
    zero: int = 0
    attention: str = "ring"
    positions: Cut = zigzag
    ulysses: int = 1
    shards: int | None = None


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
          parts. With experts, also 2 (tp - 1) times a number of each row, the gradient of its
          gate's weight
    pp    2 S per boundary from each of tp ranks (S/tp if the sequence is split), and a Seq2Seq's
          column that says what is padding; a tied embedding
    cp    the attention of every block, and the choices of experts, k whole numbers per position
    ep    every row whose expert is on another rank, there and back, forward and backward; and E
          whole numbers per block, micro-batch and pair of ranks: how many rows will come
    data  what ranks of dp x cp have copies of, by `shared_bytes`; and the loads of experts, where a
          bias balances them
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
        "ep": tp * exchanged_bytes(case, rows, s.ep, s.m * s.cp, needs, s.dispatch),
        "data": shared_bytes(s, dense, sum(held[n] for n in experts))
        + tp * loads_bytes(case.model, data),
        "loss": 2 * ITEMSIZE * tp * ((s.pp - 1) * data + (data - 1) * s.pp),
    }


def shared_bytes(s: MeshSplit, dense: int, experts: int) -> int:
    """Return the bytes in which ranks of dp x cp sum gradients and get weights, by ZeRO's stage.

    dense, experts  bytes of one copy; an all_reduce of S bytes over N ranks is 2 (N - 1) S: the
                    scatter and the gather of `zero_passes`. With `shards`, k ranks share a copy,
                    and there is one all_reduce between the copies
    """
    data, passes = s.dp * s.cp, sum(zero_passes(s.zero, s.m))
    k = s.shards or data
    between = 2 * (data // k - 1) * dense
    return passes * (data // k * (k - 1) * dense + (data // s.ep - 1) * experts) + between


def over_tensor(case: Workload, s: MeshSplit, rows, starts: list[int]) -> int:
    """Return the bytes over tp.

    rows    [dp, blocks, E] for each expert, or None
    starts  the first layers of the stages behind the first one
    """
    if s.split_sequence:
        return tensor.sequence_bytes(case, s.tp, starts, s.dp, s.m)
    summed = tensor.reduced(case, starts)
    fed = tensor.summed_bytes(case, s.tp, summed.feed_forward)
    if rows is not None:  # the gradients of the gates' weights, one of each row
        gates = gates_of(case, needed(case.model, starts))
        learn = [gate_learns(mixture, met) for mixture, met in gates]
        fed += 2 * (s.tp - 1) * ITEMSIZE * int(rows.sum(axis=(0, 2)) @ np.array(learn))
    whole = tensor.summed_bytes(case, s.tp, summed.attention + summed.vocabulary)
    copied = s.dp * s.cp * s.m * tensor.copied_bytes(case, s.tp)
    return whole + fed + tensor.loss_bytes(case, s.tp) + copied


def held_bytes(case: Workload, tp: int) -> dict[str, int]:
    """Return the bytes of each trained parameter that tp ranks hold together, with padding."""
    named, C = case.model.named_parameters(), width_of(case.model)
    whole = set(tensor.repeated(named))
    held = {n: ITEMSIZE * p.size * (tp if n in whole else 1) for n, p in named.items()}
    held |= {n: ITEMSIZE * C * tp * ceil(named[n].size // C / tp) for n in tensor.vocabulary(named)}
    holders = holders_of_heads(case.model, tp)
    held |= {n: size * holders for n, size in held.items() if "key_value" in n}
    return {n: size if named[n].requires_grad else 0 for n, size in held.items()}


def attention_bytes(case: Workload, s: MeshSplit) -> list[tuple[int, int]]:
    """Return the bytes that one block's attention sends from each rank of cp, for all examples."""
    sizes = [len(own) for own in s.positions(case.inputs.shape[1], s.cp)]
    return context.attention_bytes(case, sizes, s.attention, s.ulysses, s.tp)


def hybrid_costs(case: Workload, N: int) -> list[Cost]:
    """Every rank has a part of the matrices of its stage's layers, examples and positions.

    With ZeRO, what its stage cuts of a layer is cut over the ranks of dp x cp. ValueError for
    experts on several stages, in several micro-batches, or with a cut sequence.
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
            k = s.shards or s.dp * s.cp
            share = sum(split_sizes(n, k)[(d * s.cp + c) % k] for n in held)
            weights, gradients, state = zero_elements(s.zero, sum(held), share, max(held))
            cut = {"parameters": weights, "gradients": gradients, "optimizer state": 2 * state}
            cost = replace(cost, held=cost.held | {kind: ITEMSIZE * n for kind, n in cut.items()})
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
        keeps = context.keeps_of(s.attention, s.ulysses)
        T, attention = len(held[c]), keeps(size.width, size.heads, held, size.key_width)[c]
    return transformer_layers(size, T, Parts(s.tp, s.tp, s.tp), attention)
