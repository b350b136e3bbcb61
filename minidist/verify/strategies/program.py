"""Any program, yours too: programs without a name, run on real ranks and certified."""

from dataclasses import replace
from random import Random

from minidist import nn
from minidist.comm import Group
from minidist.pipeline_parallel import Pipeline
from minidist.pipeline_parallel.actions import Programs, last_stage, looped
from minidist.pipeline_parallel.random_order import random_order, random_placement
from minidist.pipeline_parallel.schedules import order_of
from minidist.verify.strategies.cases import Case, of_kind, transformer_example
from minidist.verify.strategies.pipeline_parallel import (
    Stages,
    pipeline_cases,
    pipeline_costs,
)
from minidist.verify.strategies.record import LAYERS, Strategy


def drawn(layers: int, ranks: int, seed: int = 0) -> Programs:
    """Return an order and a placement that are in no paper, always the same of these numbers."""
    random = Random(f"{layers} layers, {ranks} ranks, {seed}")
    stages = max(ranks, min(layers, 2 * ranks))
    return random_order(random, random_placement(random, ranks, stages), 2 * ranks)


def programs_of(case: Case, ranks: int) -> Programs:
    """Return the programs of a case: the ones given, or else drawn ones."""
    given = case.options.get("programs")
    return order_of(drawn(len(case.model.layers), ranks) if given is None else given, ranks)


def own_pipeline(
    group: Group,
    case: Case,
    programs: list | None = None,
    cut: list[range] | None = None,
    recompute: bool = False,
    rendezvous_safe: bool = False,
) -> Stages:
    """Start a pipeline in the order of the programs."""
    order = drawn(len(case.model.layers), group.size) if programs is None else programs
    pipe = Pipeline(
        of_kind(nn.Sequential, case.model),
        group,
        order,
        loss=case.loss,
        cut=cut,
        recompute=recompute,
        rendezvous_safe=rendezvous_safe,
    )
    return Stages(group, case, pipe)


def program_cases(ranks: int) -> list[Case]:
    """The cases of every pipeline; each gets an order of its own."""
    found = pipeline_cases(ranks, most_chunks=2)
    return [
        replace(case, options={"programs": drawn(len(case.model.layers), ranks, seed)})
        for seed, case in enumerate(found)
    ]


def cases_of(programs: Programs) -> list[Case]:
    """Return the cases of every pipeline with as many stages as these programs have."""
    found = pipeline_cases(1 + last_stage(programs.placement), most_chunks=1)
    return [replace(case, options={"programs": programs}) for case in found]


def program_example(ranks: int) -> Case:
    """Return the example in a drawn order, with one stage per rank."""
    order = random_order(Random(f"example, {ranks}"), looped(ranks, 1), 2 * ranks)
    return transformer_example(ranks, programs=order)


STRATEGIES = [
    Strategy(
        name="pipeline",
        idea="any program, yours too; here orders that are drawn at random",
        term="任意流水调度",
        paper="none: the order is yours",
        family="own programs",
        files=(
            "pipeline_parallel/pipeline.py",
            "pipeline_parallel/text.py",
            "pipeline_parallel/random_order.py",
        ),
        lesson="10b_zero_bubble",
        start=own_pipeline,
        cases=program_cases,
        models=LAYERS,
        costs=pipeline_costs(
            programs_of,
            example=program_example,
            compared=False,  # nobody chooses an order that is drawn at random
        ),
        tests=tuple(
            f"pipeline_parallel/test_{name}.py"
            for name in ("text", "pytorch", "own_programs", "validation")
        ),
        check_case=programs_of,
    )
]
