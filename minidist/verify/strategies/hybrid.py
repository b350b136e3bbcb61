"""Meshes: data x pipeline x context x tensor, experts within data."""

from dataclasses import replace
from functools import partial
from math import prod

import numpy as np

from minidist import nn
from minidist.comm import Group, Mesh
from minidist.data_parallel.zero import ShardedLayers
from minidist.hybrid import Hybrid
from minidist.pipeline_parallel.actions import Programs
from minidist.pipeline_parallel.schedules import order_of
from minidist.pipeline_parallel.stage import Stage
from minidist.rng import generator
from minidist.verify.strategies.cases import (
    Case,
    heads_of,
    padded,
    random_weights,
    shares,
    transformer_example,
    translator_case,
)
from minidist.verify.strategies.context_parallel import documents
from minidist.verify.strategies.expert_parallel import todays_experts
from minidist.verify.strategies.job import Arrays, Job, OnLoss, Rule, no_change
from minidist.verify.strategies.record import TRANSFORMERS, Costs, Strategy


class OnMesh(Job):
    """This rank's part of a model on a mesh; by default all ranks are on the tensor axis."""

    rule: Rule = staticmethod(no_change)

    def __init__(
        self,
        group: Group,
        case: Case,
        dp: int = 1,
        pp: int = 1,
        cp: int = 1,
        tp: int | None = None,
        schedule: str | list = "1f1b",
        micro_batches: int | None = None,
        **options,
    ):
        tp = group.size // (dp * pp * cp) if tp is None else tp
        mesh = Mesh(group, dp=dp, pp=pp, cp=cp, tp=tp)
        assert isinstance(case.model, nn.Transformer | nn.Seq2Seq)
        self.hybrid = Hybrid(case.model, mesh, schedule, micro_batches, **options)
        super().__init__(group, case, self.hybrid.pipeline.model)
        self.groups = self.hybrid.groups

    def stages(self) -> list[Stage]:
        return self.hybrid.pipeline.stages

    def backward(self, on_loss: OnLoss) -> None:
        self.hybrid.backward(self.case.batch)

    def result(self) -> Arrays:
        shapes = self.hybrid.shapes.items()
        loads = self.hybrid.whole(shares(self.hybrid.pipeline.model))
        return {name: np.zeros(shape) for name, shape in shapes} | self.hybrid.gradients() | loads

    def step(self) -> None:
        self.hybrid.step(self.optimizer)

    def parameters(self) -> list[nn.Parameter]:
        return self.hybrid.parameters()

    def kept(self) -> dict:
        every = [*self.hybrid.named_parameters().values(), *self.parameters()]
        kept = super().kept() | {"homes": [p.home for p in every if p.home]}
        if isinstance(self.hybrid.copies, ShardedLayers):
            buffers = self.hybrid.copies.buffers
            kept |= {"gradients": buffers[:1], "parameters": buffers[1:]}
        return kept


MESHES: dict[int, list[dict]] = {  # ranks: what is asked for; the other ranks split matrices
    1: [{}, {"experts": 3, "zero": 1}],
    2: [
        {"dp": 2, "schedule": "gpipe"},
        {"pp": 2},
        {"split_sequence": True},
        {"cp": 2},
        {"dp": 2, "ep": 2, "experts": 4},
        {"dp": 2, "zero": 1},
        {"dp": 2, "zero": 3, "micro_batches": 3},
        {"dp": 2, "schedule": "looped_bfs", "chunks": 2},
    ],
    3: [
        {"dp": 3},
        {"pp": 3, "schedule": "zb_h1"},
        {"cp": 3, "experts": 3},
        {"dp": 3, "ep": 3, "experts": 6},
    ],
    4: [
        {"dp": 2, "pp": 2, "zero": 1},
        {"dp": 2, "pp": 2, "schedule": "interleaved", "chunks": 2, "zero": 1},
        {"dp": 2, "pp": 2, "zero": 2},
        {"dp": 2, "pp": 2, "schedule": "interleaved", "chunks": 2, "zero": 3},
        {"dp": 4, "zero": 3, "shards": 2},
        {"pp": 2, "schedule": "gpipe", "split_sequence": True},
        {"pp": 2, "schedule": "zb_v"},
        {},
        {"cp": 2, "attention": "ulysses"},
        {"cp": 4, "ulysses": 2, "documents": True},
        {"pp": 2, "cp": 2, "attention": "gathered", "documents": True},
        {"dp": 2, "cp": 2, "ep": 2, "experts": 3, "zero": 1},
        {"dp": 2, "cp": 2, "ep": 2, "experts": 3, "zero": 3},
        {"dp": 2, "ep": 2, "experts": 4},
    ],
    8: [
        {"dp": 2, "pp": 2},
        {"dp": 2, "pp": 2, "schedule": "interleaved", "split_sequence": True, "chunks": 2},
        {"dp": 2, "cp": 2, "ep": 2, "experts": 3},
        {"dp": 2, "pp": 2, "cp": 2, "ep": 2, "experts": 4, "schedule": "zb_h1"},
        {"dp": 4, "cp": 2, "ep": 2, "experts": 4, "zero": 1},
        {"dp": 2, "pp": 2, "zero": 3},
        {"dp": 2, "cp": 4, "zero": 2, "shards": 4},
        {"cp": 4, "ulysses": 2, "attention": "gathered", "documents": True},
    ],
}
TRANSLATED: dict[int, dict] = {  # ranks: what is asked for a Seq2Seq
    1: {"zero": 1},
    2: {"pp": 2, "schedule": "gpipe"},
    3: {},
    4: {"pp": 2, "schedule": "zb_h1"},
    8: {"dp": 2, "pp": 2, "zero": 1},
}
TODAYS: dict[int, dict] = {  # ranks: what is asked for today's experts
    2: {},
    3: {},
    4: {"dp": 2, "ep": 2, "zero": 1},
    8: {"dp": 2, "cp": 2, "ep": 2, "dispatch": "positions"},
}
LLAMAS: dict[int, list[dict]] = {  # ranks: what is asked for a Llama of 2 heads of keys and values
    2: [{"cp": 2}],
    4: [
        {},
        {"pp": 2, "split_sequence": True},
        {"pp": 2, "schedule": "zb_h1", "zero": 1},
        {"dp": 2, "zero": 3},
    ],
    8: [
        {"dp": 2, "micro_batches": 2, "zero": 1},
        {"pp": 2, "split_sequence": True},
        {"cp": 2, "attention": "gathered"},
    ],
}
SHOWN = {
    "ep": "{} ep",
    "micro_batches": "{} micro-batches",
    "experts": "{} experts",
    "zero": "ZeRO {}",
    "shards": "copies of {}",
    "chunks": "{} chunks",
}
SHOWN |= {"split_sequence": "sequence", "ulysses": "{} ulysses", "documents": "documents"}


def hybrid_cases(ranks: int) -> list[Case]:
    """Several meshes of this many ranks, and schedules, on padded Transformers; and a Seq2Seq."""
    tokens, nexts = generator(0, "hybrid cases").integers(0, 11, (2, 7, 8))
    cases = []
    for asked in MESHES.get(ranks, []):
        options = dict(asked)
        numbers = documents(*tokens.shape) if options.pop("documents", False) else None
        model = nn.Transformer(
            *(11, 16, 8, 3, 8, 2, "float64", 0.2),
            tied=asked.get("zero", 0) < 2,
            experts=options.pop("experts", 0),
            capacity=0.8,
            balance=0.5,
        )
        name = words_of(ranks, asked)
        case = Case(name, random_weights(model), tokens, padded(nexts), options=options)
        cases.append(replace(case, documents=numbers))
    if ranks in TODAYS:
        name = f"today's experts, {words_of(ranks, TODAYS[ranks])}"
        cases.append(Case(name, todays_experts(24, 12), tokens, nexts, options=TODAYS[ranks]))
    for options in LLAMAS.get(ranks, []):
        llama = nn.Llama(11, 16, 8, 2, 2, 8, 2, "float64", hidden=24, tied=options.get("zero") == 1)
        case = Case(f"Llama, {words_of(ranks, options)}", llama, tokens, padded(nexts))
        cases.append(replace(case, model=random_weights(llama), options=options))
    if ranks in TRANSLATED:
        options = TRANSLATED[ranks]
        case = translator_case(depth=2, width=24, heads=12)
        name = f"Seq2Seq, {words_of(ranks, options)}"
        cases.append(replace(case, name=name, options=options))
    return cases


def words_of(ranks: int, options: dict) -> str:
    """Return how a case is called: the axes of its mesh, and what else is asked for."""
    axes = {axis: options.get(axis, 1) for axis in ("dp", "pp", "cp")}
    axes["tp"] = ranks // prod(axes.values())
    words = [" x ".join(f"{size} {name}" for name, size in axes.items() if size > 1)]
    for key, value in options.items():
        if key not in axes:
            words.append(value if isinstance(value, str) else SHOWN[key].format(value))
    return ", ".join(filter(None, words)) or "one rank"


def hybrid_example(ranks: int) -> Case:
    """Return the example with two stages, if there are two ranks; other ranks split matrices."""
    return transformer_example(ranks, pp=min(2, ranks), micro_batches=8)


def programs_of(case: Case, ranks: int) -> Programs:
    """Return the programs of one of its pipelines."""
    schedule, pp = case.options.get("schedule", "1f1b"), case.options.get("pp", 1)
    return order_of(schedule, pp, case.options.get("micro_batches"), case.options.get("chunks"))


mesh_costs = partial(
    Costs,
    limit=lambda case, ranks: (
        case.inputs.size * len(case.model.layers) * heads_of(case.model),
        "examples x positions x layers x heads",
    ),
    cuts="layers and matrices",
    programs=programs_of,
)
mesh_record = partial(Strategy, ranks=(1, 2, 3, 4, 8), models=TRANSFORMERS)
STRATEGIES = [
    mesh_record(
        name="hybrid",
        idea="data x pipeline x context x tensor on a mesh, experts within data",
        term="混合并行, 数据模型并行",
        paper="Narayanan et al. 2021 (Megatron-LM), section 3",
        family="hybrid",
        files=("hybrid.py", "comm/mesh.py"),
        lesson="16_hybrid",
        start=OnMesh,
        cases=hybrid_cases,
        costs=mesh_costs(example=hybrid_example),
        tests=(
            "hybrid/test_hybrid.py",
            "hybrid/test_sums.py",
            "pipeline_parallel/test_reduction.py",
            "data_parallel/test_copies.py",
        ),
    )
]
