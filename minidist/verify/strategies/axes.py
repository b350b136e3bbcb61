"""Trainers that take a batch in one pass: examples, positions, experts or matrices over ranks."""

from dataclasses import replace
from functools import partial

from minidist import nn
from minidist.comm import Group
from minidist.context_parallel import ContextParallel
from minidist.data_parallel.replicated import BucketedDataParallel, DataParallel
from minidist.data_parallel.zero import Zero
from minidist.expert_parallel import ExpertParallel
from minidist.planning.costs import strategies as costs
from minidist.tensor_parallel import SpatialParallel, TensorParallel
from minidist.tensor_parallel.spatial_parallel import ROWS
from minidist.verify.strategies.cases import Case, listed, transformer_example
from minidist.verify.strategies.job import AtWork
from minidist.verify.strategies.record import record


def bucketed(
    model: nn.Module, group: Group, cap: int = 300, micro_batches: int = 1
) -> BucketedDataParallel:
    """Return the Trainer with buckets so small that every case fills several."""
    return BucketedDataParallel(model, group, cap=cap, micro_batches=micro_batches)


def rows_of_images(group: Group, case: Case) -> AtWork:
    """Start a CNN on this rank's rows of all images."""
    return AtWork(group, case, SpatialParallel, height=case.inputs.shape[ROWS])


def hierarchical_cases(ranks: int) -> list[Case]:
    """Every stage, and every number of ranks that can share one of two copies or more."""
    several = []
    for k in [k for k in range(1, ranks) if ranks % k == 0] or [1]:
        for stage in (1, 2, 3):
            *cases, two = listed(f"zero_{stage}", ranks)
            for case in (cases[stage % 2], two):
                options = case.options | {"stage": stage, "shards": k}
                name = f"{case.name}, stage {stage}, copies of {k}"
                several.append(replace(case, name=name, options=options))
    return several


def usp_cases(ranks: int) -> list[Case]:
    """Context cases with two neighbours that exchange heads; of 3 ranks three."""
    U = {1: 1, 3: 3}.get(ranks, 2)
    return [replace(c, options=c.options | {"ulysses": U}) for c in listed("context", ranks)]


STRATEGIES = [
    record("naive", make=DataParallel, bytes=costs.data_parallel_bytes),
    record("bucketed", make=bucketed, bytes=costs.data_parallel_bytes),
    *(
        record(
            f"zero_{stage}",
            make=partial(Zero, stage=stage),
            bytes=partial(costs.zero_bytes, stage=stage),
        )
        for stage in (1, 2, 3)
    ),
    record(
        "hierarchical_zero",
        make=partial(Zero, block=None),
        cases=hierarchical_cases,
        bytes=costs.zero_bytes,
        example=lambda ranks: transformer_example(  # on two hosts, if the ranks make up two
            ranks, stage=3, shards=ranks if ranks % 2 else ranks // 2
        ),
    ),
    record("sync_batch_norm", make=DataParallel),
    record("column", make=partial(TensorParallel, split="column"), bytes=costs.column_bytes),
    record("row", make=partial(TensorParallel, split="row"), bytes=costs.row_bytes),
    *(
        record(split, make=partial(TensorParallel, split=split))
        for split in ("attention", "vocab", "sequence", "channel")
    ),
    record("spatial", start=rows_of_images),
    record("ring_attention", make=partial(ContextParallel, attention="ring")),
    record("gathered_attention", make=partial(ContextParallel, attention="gathered")),
    record("ulysses", make=partial(ContextParallel, attention="ulysses")),
    record(
        "usp",
        make=partial(ContextParallel, attention="ring"),
        cases=usp_cases,
        example=lambda ranks: transformer_example(ranks, ulysses=1 if ranks % 2 else 2),
    ),
    record("expert", make=ExpertParallel),
]
