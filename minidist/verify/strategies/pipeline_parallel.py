"""Pipelines and branches: every rank holds some of the layers, and gets the whole batch."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import ceil
from random import Random

from minidist import nn
from minidist.comm import Group
from minidist.pipeline_parallel import Pipeline, Siamese
from minidist.pipeline_parallel.actions import Programs, last_stage, looped
from minidist.pipeline_parallel.random_order import random_order, random_placement
from minidist.pipeline_parallel.schedules import order_of, programs
from minidist.planning.costs import strategies as costs
from minidist.verify.strategies.cases import (
    Case,
    data_of,
    mlp_of,
    padded,
    random_weights,
    transformer_example,
    translator_case,
)
from minidist.verify.strategies.record import Strategy, record

Order = Callable[[Case, int], Programs]


def named_pipeline(
    model: nn.Sequential,
    group: Group,
    schedule: str,
    most_chunks: int = 1,
    micro_batches: int | None = None,
    chunks: int | None = None,
    **options,
) -> Pipeline:
    """Return a pipeline under a schedule that has a name."""
    m, chunks = chosen(model, group.size, most_chunks, micro_batches, chunks)
    return Pipeline(model, group, schedule, m, chunks, **options)


def chosen(
    model: nn.Module, ranks: int, most_chunks: int = 1, micro_batches=None, chunks=None, **_
) -> tuple[int, int]:
    """Return (micro-batches, chunks per rank), given or by default.

    The default is 2 micro-batches per rank, and as many chunks as the layers allow, up to a limit.
    """
    m = 2 * ranks if micro_batches is None else micro_batches
    fit = min(most_chunks, max(1, len(model.layers) // ranks))
    return m, fit if chunks is None else chunks


def named_order(case: Case, ranks: int, schedule: str, most_chunks: int) -> Programs:
    """Return the programs of a case on these ranks."""
    return programs(schedule, ranks, *chosen(case.model, ranks, most_chunks, **case.options))


def pipeline_cases(ranks: int, most_chunks: int) -> list[Case]:
    """An MLP with uneven stages and micro-batches, one example, a Transformer, a Llama, a Seq2Seq.

    Every stage has a layer; the Seq2Seq has two blocks for each of its depth.
    """
    stages = ranks * most_chunks
    mlp = mlp_of(stages)
    transformer = nn.Transformer(11, 8, 2, max(1, stages - 1), 5, 2, "float64", 0.2, True)
    llama = nn.Llama(11, 8, 4, 2, max(1, stages - 2), 5, 2, "float64", tied=True)
    images, labels = data_of("stages.images.labels")
    tokens, nexts = data_of("stages.tokens")
    return [
        Case("MLP, 9 examples", mlp, images, labels),
        Case("Transformer, 7 examples, padded", transformer, tokens, padded(nexts)),
        Case("Llama, 3 examples", random_weights(llama), tokens[:3], nexts[:3]),
        Case("MLP, 1 example", mlp, images[:1], labels[:1]),
        translator_case(depth=max(1, ceil((stages - 2) / 2))),
    ]


def drawn(layers: int, ranks: int, seed: int = 0) -> Programs:
    """Return an order and a placement that are in no paper, always the same of these numbers."""
    random = Random(f"{layers} layers, {ranks} ranks, {seed}")
    stages = max(ranks, min(layers, 2 * ranks))
    return random_order(random, random_placement(random, ranks, stages), 2 * ranks)


def programs_of(case: Case, ranks: int) -> Programs:
    """Return the programs of a case: the ones given, or else drawn ones."""
    programs = case.options.get("programs")
    return order_of(drawn(len(case.model.layers), ranks) if programs is None else programs, ranks)


def own_pipeline(
    model: nn.Sequential,
    group: Group,
    programs: list | None = None,
    cut: list[range] | None = None,
    recompute: bool = False,
    rendezvous_safe: bool = False,
) -> Pipeline:
    """Return a pipeline in the order of the programs, by default of drawn ones."""
    order = drawn(len(model.layers), group.size) if programs is None else programs
    return Pipeline(
        model, group, order, cut=cut, recompute=recompute, rendezvous_safe=rendezvous_safe
    )


def program_cases(ranks: int) -> list[Case]:
    """The cases of every pipeline; each gets an order of its own."""
    return [
        replace(case, options={"programs": drawn(len(case.model.layers), ranks, seed)})
        for seed, case in enumerate(pipeline_cases(ranks, most_chunks=2))
    ]


def cases_of(programs: Programs) -> list[Case]:
    """Return the cases of every pipeline with as many stages as these programs have."""
    cases = pipeline_cases(1 + last_stage(programs.placement), most_chunks=1)
    return [replace(case, options={"programs": programs}) for case in cases]


def program_example(ranks: int) -> Case:
    """Return the example in a drawn order, with one stage per rank."""
    order = random_order(Random(f"example, {ranks}"), looped(ranks, 1), 2 * ranks)
    return transformer_example(ranks, programs=order)


def pipeline_bytes(order: Order, case: Case, ranks: int) -> int:
    return costs.pipeline_bytes(case, order(case, ranks))


def scheduled(schedule: str, most_chunks: int) -> Strategy:
    """Return the record of a schedule with so many chunks per rank, if the model has the layers."""
    order = partial(named_order, schedule=schedule, most_chunks=most_chunks)
    return record(
        schedule,
        make=partial(named_pipeline, schedule=schedule, most_chunks=most_chunks),
        cases=partial(pipeline_cases, most_chunks=most_chunks),
        bytes=partial(pipeline_bytes, order),
        programs=order,
    )


ONE_CHUNK = "layer_split", "gpipe", "1f1b", "zb_h1", "zb_h2", "zb_auto"
TWO_CHUNKS = "interleaved", "looped_bfs", "interleaved_zb", "zb_v", "dualpipe_v", "v_half", "v_min"
STRATEGIES = [
    *(scheduled(name, 1) for name in ONE_CHUNK),
    *(scheduled(name, 2) for name in TWO_CHUNKS),
    record(
        "pipeline",
        make=own_pipeline,
        cases=program_cases,
        check_case=programs_of,
        bytes=partial(pipeline_bytes, programs_of),
        programs=programs_of,
        example=program_example,
    ),
    record("siamese", make=Siamese),
]
