"""Pipelines: every rank holds some of the layers, and gets the whole batch."""

from dataclasses import replace
from functools import partial
from math import ceil

import numpy as np

from minidist import nn
from minidist.comm import Group
from minidist.pipeline_parallel import Pipeline
from minidist.pipeline_parallel.actions import Programs
from minidist.pipeline_parallel.micro_batch import MicroBatch, micro_batches
from minidist.pipeline_parallel.schedules import programs
from minidist.planning.costs import pipeline_parallel as costs
from minidist.planning.costs.cost import Cost
from minidist.replicas import from_holders
from minidist.rng import generator
from minidist.tools.costs.watch import Watch, adamw
from minidist.tools.strategies.cases import (
    INPUT,
    Case,
    Outcome,
    Split,
    as_input,
    bytes_sent,
    collect,
    padded,
    translator_case,
)
from minidist.tools.strategies.record import LAYERS, Costs, Strategy


def chosen(
    case: Case, ranks: int, most_chunks: int = 1, micro_batches=None, chunks=None, **_
) -> tuple[int, int]:
    """Return (micro-batches, chunks per rank), given or by default.

    The default is 2 micro-batches per rank, and as many chunks as the layers allow, up to a limit.
    """
    m = 2 * ranks if micro_batches is None else micro_batches
    fit = min(most_chunks, max(1, len(case.model.layers) // ranks))
    return m, fit if chunks is None else chunks


def order_of(case: Case, ranks: int, schedule: str, most_chunks: int) -> tuple[Programs, int]:
    """Return the programs of a case on these ranks, and the number of its micro-batches."""
    m, chunks = chosen(case, ranks, most_chunks, **case.options)
    return programs(schedule, ranks, m, chunks), m


def pipeline_worker(
    group: Group,
    case: Case,
    schedule: str,
    most_chunks: int = 1,
    micro_batches=None,
    chunks=None,
    **options,
) -> Outcome:
    """Run one batch through a synchronous pipeline."""
    m, chunks = chosen(case, group.size, most_chunks, micro_batches, chunks)
    return run_batch(
        group, case, Pipeline(case.model, group, schedule, m, chunks, case.loss, **options)
    )


def run_batch(group: Group, case: Case, pipeline: Pipeline) -> Outcome:
    """Run the case's batch; return all gradients and the bytes sent for them."""
    batch = cut_with_leaves(case, pipeline.m)
    pipeline.run(batch)
    groups = [group, *(g for g in pipeline.shared.values() if g is not None)]
    moved = bytes_sent(*groups)
    mine = collect(pipeline.model) | input_gradient(batch)
    return Outcome(everyones(group, mine, case), moved.total(), operations=dict(moved))


def cut_with_leaves(case: Case, m: int) -> list[MicroBatch]:
    """Return micro-batches whose floating inputs are leaves, so that their gradients are kept."""
    cut = micro_batches(case.inputs, case.targets, m, case.seed)
    return [replace(part, inputs=as_input(part.inputs)) for part in cut]


def input_gradient(batch: list[MicroBatch]) -> dict[str, np.ndarray]:
    """Return the inputs' gradient, which the first stage computed, if they are floats."""
    rows = [getattr(part.inputs, "grad", None) for part in batch]
    return {} if any(row is None for row in rows) else {INPUT: np.concatenate(rows)}


def everyones(group: Group, mine: dict[str, np.ndarray], case: Case) -> dict[str, np.ndarray]:
    """Return all gradients of a case, the input's too, or all weights, on every rank."""
    names = [*case.model.named_parameters(), *([INPUT] if case.inputs.dtype.kind == "f" else [])]
    return from_holders(mine, names, group)


def by_layers(case: Case, ranks: int, schedule: str, most_chunks: int) -> Split:
    order, m = order_of(case, ranks, schedule, most_chunks)
    cut, _, _ = costs.layout(case.model, order)
    return Split(micro_batches=m, stages=names_of(case, cut))


def names_of(case: Case, cut: list[range]) -> tuple[list[str], ...]:
    """Return the names of the parameters that each stage holds."""
    layers = case.model.layers
    return tuple([n for i in part for n in layers[i].named_parameters()] for part in cut)


def pipeline_bytes(case: Case, ranks: int, schedule: str, most_chunks: int = 1) -> int:
    return costs.pipeline_bytes(case, order_of(case, ranks, schedule, most_chunks)[0])


def pipeline_cases(ranks: int, most_chunks: int) -> list[Case]:
    """An MLP of uneven stages on uneven micro-batches, a padded Transformer, one example, Seq2Seq.

    Every stage has a layer; the Seq2Seq has two blocks for each of its depth.
    """
    random = generator(0, "pipeline cases")
    stages = ranks * most_chunks
    widths = [6, *(5 + i % 3 for i in range(stages)), 3]
    mlp = nn.MLP(widths, activation="gelu", seed=1, dtype="float64")
    transformer = nn.Transformer(
        11, 8, 2, max(1, stages - 1), 5, seed=2, dtype="float64", dropout=0.2, tied=True
    )
    images, labels = random.standard_normal((9, 6)), random.integers(0, 3, 9)
    tokens, nexts = random.integers(0, 11, (2, 7, 5))
    return [
        Case("MLP, 9 examples", mlp, images, labels),
        Case("Transformer, 7 examples, padded", transformer, tokens, padded(nexts)),
        Case("MLP, 1 example", mlp, images[:1], labels[:1]),
        translator_case(depth=max(1, ceil((stages - 2) / 2))),
    ]


def pipeline_step(group: Group, case: Case, watch: Watch, schedule: str, most_chunks: int) -> None:
    m, chunks = chosen(case, group.size, most_chunks, **case.options)
    pipe = Pipeline(case.model, group, schedule, m, chunks, case.loss)
    step_with_adamw(group, case, watch, pipe)


def step_with_adamw(group: Group, case: Case, watch: Watch, pipe: Pipeline) -> None:
    """Take one step, watched."""
    watch.stages(pipe.stages, pipe.model)
    pipe.backward(case.inputs, case.targets)
    watch.sends(group, *pipe.shared.values())
    optimizer = adamw(pipe.parameters())
    optimizer.step()
    watch.holds([p.home for p in pipe.parameters()], optimizer)


def pipeline_costs(case: Case, ranks: int, schedule: str, most_chunks: int) -> list[Cost]:
    return costs.pipeline_costs(case, *order_of(case, ranks, schedule, most_chunks))


def pipeline_useful_share(case: Case, ranks: int, schedule: str, most_chunks: int) -> float:
    order, m = order_of(case, ranks, schedule, most_chunks)
    return costs.pipeline_useful_share(case, order, m, ranks)


def pipeline_limit(case: Case, ranks: int, most_chunks: int) -> tuple[int, str]:
    return costs.layers_limit(case, chosen(case, ranks, most_chunks)[1])


def _pipeline(
    schedule: str,
    idea: str,
    term: str,
    paper: str,
    file: str,
    lesson: str,
    most_chunks: int = 1,
    family: str = "pipeline",
    tests: str = "schedules looped_bfs executor pipeline equivalence memory",
    bound: bool = False,
) -> Strategy:
    """most_chunks: the most chunks per rank, if the model has enough layers."""
    known = {"schedule": schedule, "most_chunks": most_chunks}
    return Strategy(
        name=schedule,
        idea=idea,
        term=term,
        paper=paper,
        family=family,
        files=tuple(f"pipeline_parallel/{name}.py" for name in file.split()),
        lesson=lesson,
        worker=partial(pipeline_worker, **known),
        promise="exact",
        cases=partial(pipeline_cases, most_chunks=most_chunks),
        models=LAYERS,
        costs=Costs(
            partial(pipeline_bytes, **known),
            partial(pipeline_costs, **known),
            partial(pipeline_step, **known),
            partial(pipeline_limit, most_chunks=most_chunks),
            "layers",
            partial(pipeline_useful_share, **known),
            bound=bound,
        ),
        split=partial(by_layers, **known),
        tests=tuple(f"pipeline_parallel/test_{name}.py" for name in tests.split()),
    )


ZERO_BUBBLE = {
    "family": "zero bubble",
    "tests": "zero_bubble interleaved_zb dualpipe_v validation",
}
STRATEGIES = [
    _pipeline(
        "layer_split",
        "layers on ranks, one micro-batch at a time",
        "模型并行, 按层切分",
        "Dean et al. 2012, section 3",
        "layer_split",
        "06_layer_split",
    ),
    _pipeline(
        "gpipe",
        "micro-batches, fill and drain",
        "流水并行, 微批次",
        "Huang et al. 2019, sections 2.2, 2.3",
        "gpipe",
        "07_gpipe",
    ),
    _pipeline(
        "1f1b",
        "one forward, one backward: the same bubble in less memory",
        "一前一后调度",
        "Narayanan et al. 2021 (PipeDream-2BW), section 3.2",
        "one_f_one_b",
        "08_one_f_one_b",
    ),
    _pipeline(
        "interleaved",
        "several small stages per rank",
        "交错流水",
        "Narayanan et al. 2021 (Megatron-LM), section 2.2.2",
        "interleaved",
        "10_interleaved_and_zero_bubble",
        most_chunks=2,
    ),
    _pipeline(
        "looped_bfs",
        "all micro-batches pass a chunk before the next one begins",
        "广度优先流水",
        "Lamy-Poirier 2023",
        "looped_bfs",
        "10_interleaved_and_zero_bubble",
        most_chunks=2,
    ),
    _pipeline(
        "zb_h1",
        "backward in two halves, in the memory of 1F1B",
        "零气泡流水, 流水线气泡",
        "Qi et al. 2024, section 2.1",
        "zero_bubble",
        "10_interleaved_and_zero_bubble",
        **ZERO_BUBBLE,
        bound=True,
    ),
    _pipeline(
        "zb_h2",
        "no bubble, twice the memory",
        "零气泡流水",
        "Qi et al. 2024, section 2.2",
        "zero_bubble",
        "10_interleaved_and_zero_bubble",
        **ZERO_BUBBLE,
        bound=True,
    ),
    _pipeline(
        "zb_auto",
        "the best zero-bubble order that a search finds for given times and memory",
        "自动搜索调度, 零气泡流水",
        "Qi et al. 2024, section 3.1",
        "zb_auto timed_order",
        "10_interleaved_and_zero_bubble",
        family="zero bubble",
        tests="zb_auto",
        bound=True,
    ),
    _pipeline(
        "interleaved_zb",
        "several small stages per rank, backward in two halves",
        "交错流水, 零气泡",
        "Qi et al. 2024, section 2.1, over chunks, as in PyTorch",
        "interleaved_zb",
        "10_interleaved_and_zero_bubble",
        most_chunks=2,
        **ZERO_BUBBLE,
        bound=True,
    ),
    _pipeline(
        "zb_v",
        "no bubble, the memory of 1F1B, two chunks laid out as a V",
        "零气泡流水",
        "Qi et al. 2024, arXiv 2401.10241, section 6",
        "zero_bubble",
        "10_interleaved_and_zero_bubble",
        most_chunks=2,
        **ZERO_BUBBLE,
    ),
    _pipeline(
        "dualpipe_v",
        "forward of one micro-batch during backward of another, two chunks laid out as a V",
        "双向流水, 前向与反向重叠",
        "DeepSeek-AI 2024, section 3.2.1; Qi et al. 2025 (cut in half)",
        "dualpipe_v",
        "10_interleaved_and_zero_bubble",
        most_chunks=2,
        **ZERO_BUBBLE,
    ),
    *(
        _pipeline(
            name,
            f"{share} the memory of 1F1B, two chunks laid out as a V",
            "可控显存流水",
            "Qi et al. 2024 (controllable memory), sections 2, 3",
            "controllable_memory",
            "10_interleaved_and_zero_bubble",
            most_chunks=2,
            family="controllable memory",
            tests="controllable_memory validation",
        )
        for name, share in (("v_half", "on many ranks half"), ("v_min", "on many ranks a third of"))
    ),
]
