"""Meshes: data x pipeline x context x tensor, experts within data."""

from dataclasses import replace

import numpy as np

from minidist import nn, optim
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
    padded,
    random_weights,
    transformer_example,
    translator_case,
)
from minidist.tools.strategies.pipeline_parallel import names_of
from minidist.tools.strategies.record import TRANSFORMERS, Costs, Strategy


def hybrid_worker(
    group: Group,
    case: Case,
    dp: int = 1,
    pp: int = 1,
    cp: int = 1,
    tp: int | None = None,
    schedule: str | list = "1f1b",
    micro_batches: int | None = None,
    **options,
) -> Outcome:
    """Run one batch on the mesh, and one step of an optimizer that changes nothing.

    By default all ranks are on the tensor axis.
    """
    tp = group.size // (dp * pp * cp) if tp is None else tp
    mesh = Mesh(group, dp=dp, pp=pp, cp=cp, tp=tp)
    hybrid = Hybrid(case.model, mesh, schedule, micro_batches, **options)
    hybrid.backward(case.inputs, case.targets, case.seed)
    moved = bytes_sent(*hybrid.groups)
    found = {name: np.zeros(shape) for name, shape in hybrid.shapes.items()} | hybrid.gradients()
    moved.subtract(bytes_sent(*hybrid.groups))
    hybrid.step(optim.SGD(hybrid.parameters(), lr=0.0))
    moved.update(bytes_sent(*hybrid.groups))
    return Outcome(found, moved.total(), operations=dict(moved))


def by_mesh(case: Case, ranks: int) -> Split:
    s = costs.split_of(ranks, **case.options)
    cut, _, _ = layout(case.model, s.order)
    held = s.positions(case.inputs.shape[1], s.cp) if s.cp > 1 else ()
    return Split(s.dp, s.m, names_of(case, cut), s.tp, positions=tuple(held))


MESHES = {  # ranks: (dp, pp, cp, ep), what else is asked for
    1: [((1, 1, 1, 1), {}), ((1, 1, 1, 1), {"experts": 3, "zero": 1})],
    2: [
        ((2, 1, 1, 1), {"schedule": "gpipe"}),
        ((1, 2, 1, 1), {}),
        ((1, 1, 1, 1), {"split_sequence": True}),
        ((1, 1, 2, 1), {}),
        ((2, 1, 1, 2), {"experts": 4}),
        ((2, 1, 1, 1), {"zero": 1}),
        ((2, 1, 1, 1), {"schedule": "looped_bfs", "chunks": 2}),
    ],
    3: [
        ((3, 1, 1, 1), {}),
        ((1, 3, 1, 1), {"schedule": "zb_h1"}),
        ((1, 1, 3, 1), {"experts": 3}),
        ((3, 1, 1, 3), {"experts": 6}),
    ],
    4: [
        ((2, 2, 1, 1), {"zero": 1}),
        ((2, 2, 1, 1), {"schedule": "interleaved", "chunks": 2, "zero": 1}),
        ((1, 2, 1, 1), {"schedule": "gpipe", "split_sequence": True}),
        ((1, 2, 1, 1), {"schedule": "zb_v"}),
        ((1, 1, 1, 1), {}),
        ((1, 1, 2, 1), {"attention": "ulysses"}),
        ((2, 1, 2, 2), {"experts": 3, "zero": 1}),
        ((2, 1, 1, 2), {"experts": 4}),
    ],
    8: [
        ((2, 2, 1, 1), {}),
        ((2, 2, 1, 1), {"schedule": "interleaved", "split_sequence": True, "chunks": 2}),
        ((2, 1, 2, 2), {"experts": 3}),
        ((2, 2, 2, 2), {"experts": 4, "schedule": "zb_h1"}),
        ((4, 1, 2, 2), {"experts": 4, "zero": 1}),
    ],
}

SHOWN = {"experts": "{} experts", "zero": "ZeRO {}", "chunks": "{} chunks"}
SHOWN["split_sequence"] = "sequence"


TRANSLATED = {  # ranks: (dp, pp), options for a Seq2Seq
    1: ((1, 1), {"zero": 1}),
    2: ((1, 2), {"schedule": "gpipe"}),
    3: ((1, 1), {}),
    4: ((1, 2), {"schedule": "zb_h1"}),
    8: ((2, 2), {"zero": 1}),
}


def hybrid_cases(ranks: int) -> list[Case]:
    """Several meshes of this many ranks, and schedules, on padded Transformers; and a Seq2Seq."""
    tokens, nexts = generator(0, "hybrid cases").integers(0, 11, (2, 7, 8))
    cases = []
    for (dp, pp, cp, ep), more in MESHES.get(ranks, []):
        options = {"dp": dp, "pp": pp, "cp": cp, "ep": ep} | more
        experts = options.pop("experts", 0)
        words = words_of(ranks, dp, pp, cp, ep, more)
        model = nn.Transformer(
            *(11, 16, 8, 3, 8, 2, "float64", 0.2),
            tied=True,
            experts=experts,
            capacity=0.8,
            balance=0.5,
        )
        cases.append(Case(words, random_weights(model), tokens, padded(nexts), options=options))
    for (dp, pp), more in [TRANSLATED[ranks]] if ranks in TRANSLATED else []:
        case = translator_case(depth=2, width=24, heads=12)
        name = f"Seq2Seq, {words_of(ranks, dp, pp, 1, 1, more)}"
        cases.append(replace(case, name=name, options={"dp": dp, "pp": pp} | more))
    return cases


def words_of(ranks: int, dp: int, pp: int, cp: int, ep: int, more: dict) -> str:
    """Return how a case is called: the axes of its mesh, and what else is asked for."""
    axes = {"dp": dp, "pp": pp, "cp": cp, "tp": ranks // (dp * pp * cp)}
    words = [" x ".join(f"{size} {name}" for name, size in axes.items() if size > 1)]
    words += [f"{ep} ep"] * (ep > 1)
    words += [v if isinstance(v, str) else SHOWN[k].format(v) for k, v in more.items()]
    return ", ".join(filter(None, words)) or "one rank"


def hybrid_example(ranks: int) -> Case:
    """Return the example with two stages, if there are two ranks; other ranks split matrices."""
    return transformer_example(ranks, pp=min(2, ranks), micro_batches=8)


def hybrid_step(group: Group, case: Case, watch: Watch) -> None:
    """One step with AdamW, watched."""
    own = {"schedule", "micro_batches", "ep", "zero", "attention", "positions"}
    options = {name: value for name, value in case.options.items() if name in own}
    s = costs.split_of(group.size, **case.options)
    hybrid = Hybrid(case.model, Mesh(group, dp=s.dp, pp=s.pp, cp=s.cp, tp=s.tp), **options)
    pipe = hybrid.pipeline
    watch.stages(pipe.stages, pipe.model)
    hybrid.backward(case.inputs, case.targets)
    optimizer = adamw(hybrid.parameters())
    hybrid.step(optimizer)
    watch.sends(*hybrid.groups)
    watch.holds([p.home for p in hybrid.named_parameters().values()], optimizer)


STRATEGIES = [
    Strategy(
        name="hybrid",
        idea="data x pipeline x context x tensor on a mesh, experts within data",
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
        models=TRANSFORMERS,
        tests=(
            "test_hybrid.py",
            "test_hybrid_sums.py",
            "pipeline_parallel/test_reduction.py",
            "data_parallel/test_copies.py",
        ),
    )
]
