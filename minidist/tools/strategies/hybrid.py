"""Meshes: data x pipeline x tensor."""

from minidist import nn
from minidist.comm import Group, Mesh
from minidist.hybrid import Hybrid
from minidist.planning.costs import hybrid as costs
from minidist.planning.costs.pipeline_parallel import layout
from minidist.rng import generator
from minidist.tools.costs.watch import Watch, adamw
from minidist.tools.strategies.cases import (
    Case,
    Outcome,
    Split,
    bytes_sent,
    collect,
    random_weights,
    transformer_example,
)
from minidist.tools.strategies.pipeline_parallel import names_of
from minidist.tools.strategies.record import TRANSFORMER, Costs, Strategy


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
    moved = bytes_sent(*(g for g in groups if g is not None))
    return Outcome(
        hybrid.whole(collect(hybrid.pipeline.model)), moved.total(), operations=dict(moved)
    )


def by_mesh(case: Case, ranks: int) -> Split:
    dp, tp, m, programs = costs.mesh_of(ranks, **case.options)
    cut, _, _ = layout(case.model, programs)
    return Split(dp, m, names_of(case, cut), tp)


def hybrid_cases(ranks: int) -> list[Case]:
    """Several meshes of this many ranks, and schedules, on a Transformer of five layers."""
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


def hybrid_example(ranks: int) -> Case:
    """Return the example with two stages, if there are two ranks; other ranks split matrices."""
    return transformer_example(ranks, pp=min(2, ranks), micro_batches=8)


def hybrid_step(group: Group, case: Case, watch: Watch) -> None:
    """One step with AdamW, watched."""
    dp, tp, m, order = costs.mesh_of(group.size, **case.options)
    mesh = Mesh(group, dp=dp, pp=len(order), tp=tp)
    hybrid = Hybrid(case.model, mesh, case.options.get("schedule", "1f1b"), m)
    pipe = hybrid.pipeline
    watch.stages(pipe.stages, pipe.model)
    hybrid.backward(case.inputs, case.targets)
    watch.sends(mesh.dp, mesh.pp, mesh.tp, *pipe.shared.values())
    optimizer = adamw(hybrid.parameters())
    optimizer.step()
    watch.holds([p.home for p in hybrid.parameters()], optimizer)


STRATEGIES = [
    Strategy(
        name="hybrid",
        idea="data x pipeline x tensor on a mesh",
        term="混合并行, 数据模型并行",
        paper="Narayanan et al. 2021 (Megatron-LM), section 3",
        family="hybrid",
        files=("hybrid.py", "comm/mesh.py"),
        lesson="16_hybrid",
        worker=hybrid_worker,
        promise="exact",
        cases=hybrid_cases,
        costs=Costs(
            costs.hybrid_bytes,
            costs.hybrid_costs,
            hybrid_step,
            costs.hybrid_limit,
            "layers and matrices",
            costs.hybrid_useful_share,
            hybrid_example,
        ),
        ranks=(1, 2, 3, 4, 8),
        split=by_mesh,
        models=TRANSFORMER,
        tests=("test_hybrid.py",),
    )
]
