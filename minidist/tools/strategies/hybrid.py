"""Meshes as workers: data x pipeline x tensor."""

from minidist import nn
from minidist.comm import Group, Mesh
from minidist.hybrid import Hybrid
from minidist.pipeline_parallel.actions import Programs
from minidist.pipeline_parallel.schedules import programs
from minidist.rng import generator
from minidist.tools.strategies.cases import Case, Outcome, Split, bill, collect, random_weights
from minidist.tools.strategies.pipeline_parallel import layout, names_of
from minidist.tools.strategies.tensor_parallel import is_repeated, vocabulary


def hybrid_worker(
    group: Group,
    case: Case,
    dp: int = 1,
    pp: int = 1,
    tp: int | None = None,
    schedule: str = "1f1b",
    micro_batches: int = 4,
    **options,
) -> Outcome:
    """Run one batch on the mesh; by default all ranks are on the tensor axis."""
    mesh = Mesh(group, dp=dp, pp=pp, tp=group.size // (dp * pp) if tp is None else tp)
    hybrid = Hybrid(case.model, mesh, schedule, micro_batches, **options)
    hybrid.backward(case.inputs, case.targets, case.seed)
    groups = [mesh.dp, mesh.pp, mesh.tp, *hybrid.pipeline.shared.values()]
    moved = bill(*(g for g in groups if g is not None))
    return Outcome(
        hybrid.whole(collect(hybrid.pipeline.model)), moved.total(), operations=dict(moved)
    )


def by_mesh(case: Case, ranks: int) -> Split:
    dp, tp, programs = _mesh(ranks, **case.options)
    cut, _, _ = layout(case.model, programs)
    return Split(dp, case.options.get("micro_batches", 4), names_of(case, cut), tp)


def _mesh(
    ranks: int, dp=1, pp=1, tp=None, schedule="1f1b", micro_batches=4, chunks=1, **_
) -> tuple[int, int, Programs]:
    """Return (dp, tp, the programs of each pipeline), for options of `hybrid_worker`."""
    return dp, ranks // (dp * pp), programs(schedule, pp, micro_batches, chunks)


def hybrid_bytes(case: Case, ranks: int) -> int:
    """Return what the axes move, each by its own formula, with S = B T C itemsize of the batch.

    tp  8 (N - 1) S per block (10 with the sequence split), 4 (5) for embedding and head, and three
        all_reduces of B T in the loss; the gradients of what is repeated, if the sequence is split
    pp  2 S per boundary from each of tp ranks (S/tp if the sequence is split); a tied embedding
    dp  an all_reduce of all parameters that a rank holds, on each of pp x tp ranks
    and the loss, a number, over pp and over dp.
    """
    dp, tp, programs = _mesh(ranks, **case.options)
    pp, split = len(programs), case.options.get("split_sequence", False)
    _, crossed, copies = layout(case.model, programs)
    named, depth = case.model.named_parameters(), len(case.model.layers) - 2
    width = case.model.layers[-1].norm.gain.size
    S = 8 * case.inputs.size * width
    held = {name: 8 * p.size * (tp if is_repeated(name) else 1) for name, p in named.items()}
    for name in vocabulary(named):
        held[name] = 8 * width * tp * -(-case.model.vocab // tp)  # with padding
    held = {name: size * named[name].requires_grad for name, size in held.items()}
    repeated = sum(held[name] // tp for name in named if is_repeated(name))
    over_tp = (tp - 1) * ((10 * depth + 5 if split else 8 * depth + 4) * S + 48 * case.inputs.size)
    over_tp += 2 * (tp - 1) * repeated * dp if split else 0
    over_pp = len(crossed) * 2 * S * (1 if split else tp)
    over_pp += dp * sum(2 * (copies[name] - 1) * held[name] for name in named)
    over_dp = 2 * (dp - 1) * sum(held[name] * copies[name] for name in named)
    loss = 16 * ((pp - 1) * dp * tp + (dp - 1) * pp * tp)
    return over_tp + over_pp + over_dp + loss


def hybrid_cases(ranks: int) -> list[Case]:
    """A handful of meshes with so many ranks, and schedules, on a Transformer of five layers."""
    tokens, nexts = generator(0, "hybrid cases").integers(0, 11, (2, 7, 8))
    meshes = {
        1: [(1, 1, "1f1b", {})],
        2: [(2, 1, "gpipe", {}), (1, 2, "1f1b", {}), (1, 1, "1f1b", {"split_sequence": True})],
        3: [(3, 1, "1f1b", {}), (1, 3, "zb_h1", {})],
        4: [
            (2, 2, "1f1b", {}),
            (1, 2, "gpipe", {"split_sequence": True}),
            (1, 2, "zb_v", {}),
            (1, 1, "1f1b", {}),
        ],
        8: [(2, 2, "1f1b", {}), (2, 2, "interleaved", {"split_sequence": True, "chunks": 2})],
    }
    return [
        Case(
            f"{dp} x {pp} x {ranks // (dp * pp)}, {schedule}" + (", sequence" if more else ""),
            random_weights(nn.Transformer(11, 16, 8, 3, 8, 2, "float64", 0.2, tied=True)),
            tokens,
            nexts,
            options={"dp": dp, "pp": pp, "schedule": schedule, **more},
        )
        for dp, pp, schedule, more in meshes.get(ranks, [])
    ]
