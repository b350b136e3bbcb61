"""Data parallelism: every rank holds the model, or a shard of it, and some of the examples."""

from dataclasses import replace
from functools import partial

from minidist import nn
from minidist.comm import Group
from minidist.data_parallel.replicated import BucketedDataParallel, DataParallel
from minidist.data_parallel.zero import Zero
from minidist.planning.costs import strategies as costs
from minidist.rng import generator
from minidist.verify.strategies.cases import (
    Case,
    cnn_example,
    dual_case,
    random_weights,
    small_cases,
    transformer_example,
    translator_case,
)
from minidist.verify.strategies.record import ANY, LAYERS, Costs, record


def replica_cases(ranks: int) -> list[Case]:
    """The small cases, a Seq2Seq, and two that are trained together."""
    return [*small_cases(ranks), translator_case(), dual_case()]


def zero_cases(ranks: int, stage: int) -> list[Case]:
    """The cases of replicas, and two micro-batches; in stage 3 the Transformer is not tied.

    From stage 2 on no nn.Dual: it is no composition of layers.
    """
    cases = [*small_cases(ranks), translator_case()] if stage > 1 else replica_cases(ranks)
    if stage == 3:
        free = nn.Transformer(11, 8, 2, 2, 5, seed=2, dtype="float64", dropout=0.2)
        cases[1] = replace(cases[1], model=free)
    two = replace(cases[0], name="MLP, 2 micro-batches", options={"micro_batches": 2})
    return [*cases, two]


def hierarchical_cases(ranks: int) -> list[Case]:
    """Every stage, and every number of ranks that can share one of two copies or more."""
    found = []
    for k in [k for k in range(1, ranks) if ranks % k == 0] or [1]:
        for stage in (1, 2, 3):
            *cases, two = zero_cases(ranks, stage)
            for case in (cases[stage % 2], two):
                options = case.options | {"stage": stage, "shards": k}
                name = f"{case.name}, stage {stage}, copies of {k}"
                found.append(replace(case, name=name, options=options))
    return found


def hierarchical_example(ranks: int) -> Case:
    """Return the example on two hosts, if the ranks make up two."""
    shards = ranks if ranks % 2 else ranks // 2
    return transformer_example(ranks, stage=3, shards=shards)


def bucketed(
    model: nn.Module, group: Group, cap: int = 300, micro_batches: int = 1
) -> BucketedDataParallel:
    """Return the Trainer with buckets so small that every case fills several."""
    return BucketedDataParallel(model, group, cap=cap, micro_batches=micro_batches)


def batch_norm_cases(ranks: int) -> list[Case]:
    """A CNN on 7 images and on 3, and norms of rows of numbers between linear layers."""
    random = generator(0, "batch norm cases")
    images, labels = 1 + random.standard_normal((7, 2, 4, 4)), random.integers(0, 3, 7)
    cnn = random_weights(nn.CNN(2, 3, (4, 6), seed=1, dtype="float64"))
    of_rows = nn.Sequential(
        [
            nn.Linear(6, 5, activation="gelu", name="first", dtype="float64"),
            nn.BatchNorm(5, dtype="float64"),
            nn.Linear(5, 3, name="second", dtype="float64"),
        ]
    )
    rows = random.standard_normal((5, 6))
    return [
        Case("CNN, 7 images", cnn, images, labels),
        Case("rows, 5 examples", random_weights(of_rows), rows, labels[:5]),
        Case("CNN, 3 images", cnn, images[:3], labels[:3]),
    ]


SUMS = Costs(bytes=costs.data_parallel_bytes)


STRATEGIES = [
    record("naive", make=DataParallel, cases=replica_cases, costs=SUMS),
    record(
        "bucketed",
        make=bucketed,
        cases=replica_cases,
        costs=replace(SUMS, example=partial(transformer_example, cap=1 << 20)),
    ),
    *(
        record(
            f"zero_{stage}",
            make=partial(Zero, stage=stage),
            cases=partial(zero_cases, stage=stage),
            costs=Costs(bytes=partial(costs.zero_bytes, stage=stage)),
            models=LAYERS if stage > 1 else ANY,
        )
        for stage in (1, 2, 3)
    ),
    record(
        "hierarchical_zero",
        make=partial(Zero, block=None),
        cases=hierarchical_cases,
        # Its gain is on links of two speeds, which the comparison does not have.
        costs=Costs(bytes=costs.zero_bytes, example=hierarchical_example, compared=False),
        models=LAYERS,
    ),
    record(
        "sync_batch_norm",
        make=DataParallel,
        cases=batch_norm_cases,
        costs=Costs(example=cnn_example),
    ),
]
