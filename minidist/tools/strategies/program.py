"""Any program, yours too: programs without a name, run on real ranks and certified."""

from dataclasses import replace
from random import Random

from minidist.comm import Group
from minidist.pipeline_parallel import Pipeline
from minidist.pipeline_parallel.actions import Programs, last_stage, looped, micro_batches_of
from minidist.pipeline_parallel.random_order import random_order, random_placement
from minidist.pipeline_parallel.schedules import order_of
from minidist.planning.costs import pipeline_parallel as costs
from minidist.planning.costs.cost import Cost
from minidist.tools.costs.watch import Watch
from minidist.tools.strategies.cases import Case, Outcome, Split, transformer_example
from minidist.tools.strategies.pipeline_parallel import (
    names_of,
    pipeline_cases,
    run_batch,
    step_with_adamw,
)
from minidist.tools.strategies.record import LAYERS, Costs, Strategy


def drawn(layers: int, ranks: int, seed: int = 0) -> Programs:
    """Return an order and a placement that are in no paper, always the same of these numbers."""
    random = Random(f"{layers} layers, {ranks} ranks, {seed}")
    stages = max(ranks, min(layers, 2 * ranks))
    return random_order(random, random_placement(random, ranks, stages), 2 * ranks)


def programs_of(case: Case, ranks: int) -> Programs:
    """Return the programs of a case: the ones given, or else drawn ones."""
    given = case.options.get("programs")
    return order_of(drawn(len(case.model.layers), ranks) if given is None else given, ranks)


def program_worker(
    group: Group,
    case: Case,
    programs: list | None = None,
    cut: list[range] | None = None,
    recompute: bool = False,
    rendezvous_safe: bool = False,
) -> Outcome:
    """Run one batch in the order of the programs."""
    given = drawn(len(case.model.layers), group.size) if programs is None else programs
    options = {"cut": cut, "recompute": recompute, "rendezvous_safe": rendezvous_safe}
    return run_batch(group, case, Pipeline(case.model, group, given, loss=case.loss, **options))


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


def by_layers(case: Case, ranks: int) -> Split:
    order = programs_of(case, ranks)
    cut, _, _ = costs.layout(case.model, order)
    return Split(micro_batches=micro_batches_of(order), stages=names_of(case, cut))


def program_bytes(case: Case, ranks: int) -> int:
    return costs.pipeline_bytes(case, programs_of(case, ranks))


def program_costs(case: Case, ranks: int) -> list[Cost]:
    order = programs_of(case, ranks)
    return costs.pipeline_costs(case, order, micro_batches_of(order))


def program_step(group: Group, case: Case, watch: Watch) -> None:
    order = programs_of(case, group.size)
    step_with_adamw(group, case, watch, Pipeline(case.model, group, order, loss=case.loss))


def program_useful_share(case: Case, ranks: int) -> float:
    order = programs_of(case, ranks)
    return costs.pipeline_useful_share(case, order, micro_batches_of(order), ranks)


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
            "pipeline_parallel/torch_csv.py",
            "pipeline_parallel/random_order.py",
        ),
        lesson="10_interleaved_and_zero_bubble",
        worker=program_worker,
        promise="exact",
        cases=program_cases,
        models=LAYERS,
        costs=Costs(
            program_bytes,
            program_costs,
            program_step,
            lambda case, ranks: costs.layers_limit(case, 1),
            "layers",
            program_useful_share,
            program_example,
            compared=False,  # nobody chooses an order that is drawn at random
            bound=True,
        ),
        split=by_layers,
        tests=tuple(
            f"pipeline_parallel/test_{name}.py"
            for name in ("text", "pytorch", "own_programs", "validation")
        ),
        check_case=programs_of,
    )
]
