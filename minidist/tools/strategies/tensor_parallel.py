"""Split matrices: every rank holds a part of the matrices, and gets the whole batch."""

from collections.abc import Callable
from functools import partial

import numpy as np

from minidist import nn
from minidist.autograd import Tensor
from minidist.comm import Group
from minidist.planning.costs import tensor_parallel as costs
from minidist.rng import Randomness, generator
from minidist.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelHead,
    unsplit,
    vocab_parallel,
)
from minidist.tensor_parallel.parallel_transformer import Parts, split_attention
from minidist.tensor_parallel.sequence_parallel import all_reduce_partial, sequence_parallel
from minidist.tensor_parallel.vocab_parallel import split_tables
from minidist.tools.costs.watch import Watch, watched_step
from minidist.tools.strategies.cases import (
    INPUT,
    Case,
    Outcome,
    Split,
    as_input,
    bytes_sent,
    collect,
    padded,
    random_weights,
    transformer_example,
    translator_case,
)
from minidist.tools.strategies.pipeline_parallel import names_of
from minidist.tools.strategies.record import (
    LINEAR,
    TRANSFORMER,
    TRANSFORMERS,
    Costs,
    Models,
    Strategy,
)


def by_columns(group: Group, case: Case) -> tuple[nn.Module, Callable]:
    """Return an MLP whose layers are all split by columns, their outputs gathered; and its loss."""
    split = partial(ColumnParallelLinear, group=group, gather_output=True)
    return nn.Sequential([split(layer) for layer in case.model.layers]), case.loss


def by_rows(group: Group, case: Case) -> tuple[nn.Module, Callable]:
    """Return an MLP whose layers are all split by rows, their inputs scattered; and its loss."""
    split = partial(RowParallelLinear, group=group, scatter_input=True)
    return nn.Sequential([split(layer) for layer in case.model.layers]), case.loss


def by_heads(group: Group, case: Case) -> tuple[nn.Module, Callable]:
    """Return a Transformer, or a Seq2Seq, whose attention heads are split, and its loss."""
    for block in case.model.layers[1:-1]:
        split_attention(block, group, Parts())
    return case.model.flatten(), case.loss


def by_vocabulary(group: Group, case: Case) -> tuple[nn.Module, Callable]:
    """Return a model whose embedding and logits are split by vocabulary, and its loss."""
    embedding, *blocks, head = case.model.layers
    split_tables(embedding, group)
    head = VocabParallelHead(head, group, embedding.token.weight if head.tied else None)
    return nn.Sequential([embedding, *blocks, head]), _split_loss(group, case)


def by_sequence(group: Group, case: Case) -> tuple[nn.Module, Callable]:
    """Return a Transformer, its matrices and, between them, the sequence split; and its loss."""
    loss = _split_loss(group, case)
    return sequence_parallel(case.model, group), loss


def no_partial_sums(model: nn.Module, group: Group) -> None:
    """The split leaves every gradient whole."""


def tensor_worker(
    group: Group, case: Case, split: Callable, finish: Callable = no_partial_sums
) -> Outcome:
    """Run forward and backward of a split model; return whole gradients, put together from parts.

    split   (group, case) -> (model, loss)
    finish  (model, group) -> None: sums the gradients that the split leaves partial
    """
    model, loss = split(group, case)
    x = as_input(case.inputs)
    randomness = Randomness(case.seed, 0, np.arange(len(case.inputs)))
    loss(model(x, randomness), case.targets).backward()
    finish(model, group)
    moved = bytes_sent(group)
    result = whole_gradients(model, group)
    if isinstance(x, Tensor):
        result[INPUT] = x.grad
    named = model.named_parameters().items()  # forward moves what is frozen: running statistics
    held = {name: (p.data, p.shard) for name, p in named if p.requires_grad}
    return Outcome(result, moved.total(), held=held, operations=dict(moved))


def by_matrices(case: Case, ranks: int) -> Split:
    layers = names_of(case, [range(i, i + 1) for i in range(len(case.model.layers))])
    return Split(stages=layers, tensor=ranks, each="layer")


def _split_loss(group: Group, case: Case) -> Callable:
    return partial(vocab_parallel.cross_entropy, group=group, vocab=case.model.vocab)


def whole_gradients(model: nn.Module, group: Group) -> dict[str, np.ndarray]:
    """Return all gradients; of a split parameter, the parts of all ranks put together."""
    named = model.named_parameters()
    return {name: unsplit(array, named[name], group) for name, array in collect(model).items()}


def mlp_cases(ranks: int) -> list[Case]:
    """Seven examples, and one, of an MLP whose widths 1 to 4 ranks can split."""
    random = generator(0, "tensor cases")
    mlp = random_weights(nn.MLP([12, 24, 12], activation="gelu", seed=1, dtype="float64"))
    images, labels = random.standard_normal((7, 12)), random.integers(0, 12, 7)
    return [
        Case("MLP, 7 examples", mlp, images, labels),
        Case("MLP, 1 example", mlp, images[:1], labels[:1]),
    ]


def transformer_cases(ranks: int) -> list[Case]:
    """A tied Transformer with dropout, and an untied one; vocabulary and targets are padded."""
    tokens, nexts = generator(0, "tensor cases").integers(0, 11, (2, 5, 12))
    return [
        Case(
            f"Transformer, {'tied' if tied else 'untied'}",
            random_weights(nn.Transformer(11, 24, 12, 2, 12, 2, "float64", 0.2, tied)),
            tokens,
            padded(nexts),
        )
        for tied in (True, False)
    ]


def transformers_cases(ranks: int) -> list[Case]:
    """The same, and a Seq2Seq of two vocabularies, 13 and 11, both padded."""
    return [*transformer_cases(ranks), translator_case(width=24, heads=12)]


def mlp_example(ranks: int) -> Case:
    """Return an MLP whose widths 4 ranks can split, for the table of costs."""
    random = generator(0, "strategy table")
    labels, images = random.integers(0, 2, 8), random.standard_normal((8, 16))
    model = nn.MLP([16, *[256, 64] * 3, 256, 16], activation="gelu", dtype="float64")
    return Case("example", model, images, labels)


def tensor_step(
    group: Group, case: Case, watch: Watch, split: Callable, finish: Callable = no_partial_sums
) -> None:
    """One step with AdamW, watched."""
    model, loss = split(group, case)

    def forward():
        return loss(model(as_input(case.inputs)), case.targets)

    watched_step(watch, group, model, forward, partial(finish, model, group))


def _record(
    name: str,
    idea: str,
    term: str,
    paper: str,
    file: str,
    lesson: str,
    split: Callable,
    formulas: tuple[Callable, Callable, Callable],
    cases: Callable = transformer_cases,
    models: Models = TRANSFORMER,
    finish: Callable = no_partial_sums,
    family: str = "matrices",
    tests: str = "parallel_transformer",
) -> Strategy:
    """formulas: bytes sent, what each rank holds, the most ranks."""
    nbytes, of_ranks, limit = formulas
    step = partial(tensor_step, split=split, finish=finish)
    example = mlp_example if models is LINEAR else transformer_example
    return Strategy(
        name=name,
        idea=idea,
        term=term,
        paper=paper,
        family=family,
        files=(f"tensor_parallel/{file}.py",),
        lesson=lesson,
        worker=partial(tensor_worker, split=split, finish=finish),
        promise="exact",
        cases=cases,
        costs=Costs(nbytes, of_ranks, step, limit, "matrices", example=example),
        split=by_matrices,
        models=models,
        tests=tuple(f"tensor_parallel/test_{name}.py" for name in tests.split()),
    )


SHOEYBI = "Shoeybi et al. 2019, section 3"
STRATEGIES = [
    _record(
        "column",
        "a weight cut by columns (Megatron's f)",
        "张量并行, 矩阵按列切分",
        SHOEYBI,
        "column_parallel",
        "11_column_and_row",
        by_columns,
        (costs.column_bytes, costs.column_costs, costs.column_limit),
        mlp_cases,
        LINEAR,
        tests="column_parallel",
    ),
    _record(
        "row",
        "a weight cut by rows (Megatron's g)",
        "张量并行, 矩阵按行切分",
        SHOEYBI,
        "row_parallel",
        "11_column_and_row",
        by_rows,
        (costs.row_bytes, costs.row_costs, costs.row_limit),
        mlp_cases,
        LINEAR,
        tests="row_parallel",
    ),
    _record(
        "attention",
        "heads over ranks",
        "注意力头切分",
        SHOEYBI,
        "parallel_attention",
        "12_parallel_transformer",
        by_heads,
        (costs.attention_bytes, costs.attention_costs, costs.attention_limit),
        transformers_cases,
        TRANSFORMERS,
        tests="parallel_transformer parallel_padded_attention",
    ),
    _record(
        "vocab",
        "embedding, logits and cross-entropy over ranks",
        "字典切分",
        SHOEYBI,
        "vocab_parallel",
        "12_parallel_transformer",
        by_vocabulary,
        (costs.vocab_bytes, costs.vocab_costs, costs.vocab_limit),
        transformers_cases,
        TRANSFORMERS,
        tests="vocab_parallel",
    ),
    _record(
        "sequence",
        "the sequence split between the matrices",
        "序列并行",
        "Korthikanti et al. 2022, section 4.2.2",
        "sequence_parallel",
        "13_sequence_parallel",
        by_sequence,
        (costs.sequence_bytes, costs.sequence_costs, costs.sequence_limit),
        finish=all_reduce_partial,
        family="sequence",
    ),
]
