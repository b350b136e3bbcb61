"""Pipelines: every rank holds some of the layers, and gets the whole batch."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import ceil

import numpy as np

from minidist import nn
from minidist.autograd import Tensor
from minidist.comm import Group
from minidist.datasets import Batch
from minidist.pipeline_parallel import Pipeline
from minidist.pipeline_parallel.actions import Programs
from minidist.pipeline_parallel.schedules import programs
from minidist.pipeline_parallel.stage import Stage
from minidist.planning.costs import strategies as costs
from minidist.replicas import from_holders
from minidist.rng import generator
from minidist.verify.strategies.cases import (
    INPUT,
    Case,
    as_input,
    collect,
    of_kind,
    padded,
    random_weights,
    translator_case,
)
from minidist.verify.strategies.job import Arrays, Job, OnLoss
from minidist.verify.strategies.record import LAYERS, Costs, Strategy

Order = Callable[[Case, int], Programs]


class Stages(Job):
    """Some of the layers, in a pipeline."""

    def __init__(self, group: Group, case: Case, pipe: Pipeline):
        super().__init__(group, case, pipe.model)
        self.pipe, self.batch = pipe, cut_with_leaves(case, pipe.m)
        self.groups += [g for g in pipe.shared.values() if g is not None]

    def stages(self) -> list[Stage]:
        return self.pipe.stages

    def backward(self, on_loss: OnLoss) -> None:
        self.pipe.run(self.batch)

    def result(self) -> Arrays:
        return everyones(self.group, collect(self.model) | input_gradient(self.batch), self.case)


def named_pipeline(
    group: Group,
    case: Case,
    schedule: str,
    most_chunks: int = 1,
    micro_batches=None,
    chunks=None,
    **options,
) -> Stages:
    """Start a pipeline under a schedule that has a name."""
    m, chunks = chosen(case, group.size, most_chunks, micro_batches, chunks)
    model = of_kind(nn.Sequential, case.model)
    pipe = Pipeline(model, group, schedule, m, chunks, case.loss, **options)
    return Stages(group, case, pipe)


def chosen(
    case: Case, ranks: int, most_chunks: int = 1, micro_batches=None, chunks=None, **_
) -> tuple[int, int]:
    """Return (micro-batches, chunks per rank), given or by default.

    The default is 2 micro-batches per rank, and as many chunks as the layers allow, up to a limit.
    """
    m = 2 * ranks if micro_batches is None else micro_batches
    fit = min(most_chunks, max(1, len(case.model.layers) // ranks))
    return m, fit if chunks is None else chunks


def named_order(case: Case, ranks: int, schedule: str, most_chunks: int) -> Programs:
    """Return the programs of a case on these ranks."""
    return programs(schedule, ranks, *chosen(case, ranks, most_chunks, **case.options))


def cut_with_leaves(case: Case, m: int) -> list[Batch]:
    """Return micro-batches whose floating inputs are leaves, so that their gradients are kept."""
    batch = Batch(case.inputs, case.targets, case.seed, documents=case.documents)
    return [replace(part, inputs=as_input(part.inputs)) for part in batch.micro_batches(m)]


def input_gradient(batch: list[Batch]) -> dict[str, np.ndarray]:
    """Return the inputs' gradient, which the first stage computed, if they are floats."""
    rows = [x.inputs.grad for x in batch if isinstance(x.inputs, Tensor)]
    found = [row for row in rows if row is not None]
    return {INPUT: np.concatenate(found)} if found and len(found) == len(batch) else {}


def everyones(group: Group, mine: dict[str, np.ndarray], case: Case) -> dict[str, np.ndarray]:
    """Return all gradients of a case, the input's too, or all weights, on every rank."""
    names = [*case.model.named_parameters(), *([INPUT] if case.inputs.dtype.kind == "f" else [])]
    return from_holders(mine, names, group)


def pipeline_cases(ranks: int, most_chunks: int) -> list[Case]:
    """An MLP with uneven stages and micro-batches, one example, a Transformer, a Llama, a Seq2Seq.

    Every stage has a layer; the Seq2Seq has two blocks for each of its depth.
    """
    random = generator(0, "pipeline cases")
    stages = ranks * most_chunks
    widths = [6, *(5 + i % 3 for i in range(stages)), 3]
    mlp = nn.MLP(widths, activation="gelu", seed=1, dtype="float64")
    transformer = nn.Transformer(11, 8, 2, max(1, stages - 1), 5, 2, "float64", 0.2, True)
    llama = nn.Llama(11, 8, 4, 2, max(1, stages - 2), 5, 2, "float64", tied=True)
    images, labels = random.standard_normal((9, 6)), random.integers(0, 3, 9)
    tokens, nexts = random.integers(0, 11, (2, 7, 5))
    return [
        Case("MLP, 9 examples", mlp, images, labels),
        Case("Transformer, 7 examples, padded", transformer, tokens, padded(nexts)),
        Case("Llama, 3 examples", random_weights(llama), tokens[:3], nexts[:3]),
        Case("MLP, 1 example", mlp, images[:1], labels[:1]),
        translator_case(depth=max(1, ceil((stages - 2) / 2))),
    ]


def layers_limit(case: Case, chunks: int = 1) -> tuple[int, str]:
    """Return the most ranks that have `chunks` stages of one layer each."""
    layers = len(of_kind(nn.Sequential, case.model).layers)
    return layers // chunks, "layers" if chunks == 1 else f"layers, {chunks} on each"


def pipeline_costs(order: Order, **more) -> Costs:
    """Return the closed forms, which follow from the order; `more`: further fields of Costs."""

    return Costs(
        bytes=lambda case, ranks: costs.pipeline_bytes(case, order(case, ranks)),
        limit=lambda case, ranks: layers_limit(case, len(order(case, ranks).placement[0])),
        cuts="layers",
        programs=order,
        **more,
    )


def _pipeline(
    *,
    schedule: str,
    tests: str,
    files: str = "",
    lesson: str = "10b_zero_bubble",
    most_chunks: int = 1,
    **fields,
) -> Strategy:
    """Return a record.

    files        below pipeline_parallel/; by default the one that is called like the schedule
    most_chunks  the most chunks per rank, if the model has enough layers
    fields       of the record, further ones
    """
    order = partial(named_order, schedule=schedule, most_chunks=most_chunks)
    return Strategy(
        name=schedule,
        files=tuple(f"pipeline_parallel/{name}.py" for name in (files or schedule).split()),
        lesson=lesson,
        start=partial(named_pipeline, schedule=schedule, most_chunks=most_chunks),
        cases=partial(pipeline_cases, most_chunks=most_chunks),
        models=LAYERS,
        costs=pipeline_costs(order),
        tests=tuple(f"pipeline_parallel/test_{name}.py" for name in tests.split()),
        **fields,
    )


_order = partial(
    _pipeline, family="pipeline", tests="schedules looped_bfs executor pipeline equivalence memory"
)
_zero_bubble = partial(
    _pipeline, family="zero bubble", tests="zero_bubble interleaved_zb dualpipe_v validation"
)
_controllable = partial(
    _pipeline,
    term="可控显存流水",
    paper="Qi et al. 2024 (controllable memory), sections 2, 3",
    family="controllable memory",
    files="controllable_memory",
    most_chunks=2,
    tests="controllable_memory validation",
)
STRATEGIES = [
    _order(
        schedule="layer_split",
        idea="layers on ranks, one micro-batch at a time",
        term="模型并行, 按层切分",
        paper="Dean et al. 2012, section 3",
        lesson="06_layer_split",
    ),
    _order(
        schedule="gpipe",
        idea="micro-batches, fill and drain",
        term="流水并行, 微批次",
        paper="Huang et al. 2019, sections 2.2, 2.3",
        lesson="07_gpipe",
    ),
    _order(
        schedule="1f1b",
        idea="one forward, one backward: the same bubble in less memory",
        term="一前一后调度",
        paper="Narayanan et al. 2021 (PipeDream-2BW), section 3.2",
        files="one_f_one_b",
        lesson="08_one_f_one_b",
    ),
    _order(
        schedule="interleaved",
        idea="several small stages per rank",
        term="交错流水",
        paper="Narayanan et al. 2021 (Megatron-LM), section 2.2.2",
        lesson="10_interleaved",
        most_chunks=2,
    ),
    _order(
        schedule="looped_bfs",
        idea="all micro-batches pass a chunk before the next one begins",
        term="广度优先流水",
        paper="Lamy-Poirier 2023",
        lesson="10_interleaved",
        most_chunks=2,
    ),
    _zero_bubble(
        schedule="zb_h1",
        idea="backward in two halves, in the memory of 1F1B",
        term="零气泡流水, 流水线气泡",
        paper="Qi et al. 2024, section 2.1",
        files="zero_bubble",
    ),
    _zero_bubble(
        schedule="zb_h2",
        idea="no bubble, twice the memory",
        term="零气泡流水",
        paper="Qi et al. 2024, section 2.2",
        files="zero_bubble",
    ),
    _zero_bubble(
        schedule="zb_auto",
        idea="the best zero-bubble order that a search finds for given times and memory",
        term="自动搜索调度, 零气泡流水",
        paper="Qi et al. 2024, section 3.1",
        files="zb_auto",
        tests="zb_auto",
    ),
    _zero_bubble(
        schedule="interleaved_zb",
        idea="several small stages per rank, backward in two halves",
        term="交错流水, 零气泡",
        paper="Qi et al. 2024, section 2.1, over chunks, as in PyTorch",
        most_chunks=2,
    ),
    _zero_bubble(
        schedule="zb_v",
        idea="no bubble, the memory of 1F1B, two chunks laid out as a V",
        term="零气泡流水",
        paper="Qi et al. 2024, arXiv 2401.10241, section 6",
        files="zero_bubble",
        most_chunks=2,
    ),
    _zero_bubble(
        schedule="dualpipe_v",
        idea="forward of one micro-batch during backward of another, two chunks laid out as a V",
        term="双向流水, 前向与反向重叠",
        paper="DeepSeek-AI 2024, section 3.2.1; Qi et al. 2025 (cut in half)",
        most_chunks=2,
    ),
    _controllable(
        schedule="v_half",
        idea="on many ranks half the memory of 1F1B, two chunks laid out as a V",
    ),
    _controllable(
        schedule="v_min",
        idea="on many ranks a third of the memory of 1F1B, two chunks laid out as a V",
    ),
]
