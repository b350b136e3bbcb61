"""Split matrices: every rank holds a part of the matrices, and gets the whole batch."""

from collections.abc import Callable
from functools import partial

import numpy as np

from minidist import nn
from minidist.autograd import Tensor
from minidist.comm import Group
from minidist.planning.costs import strategies as costs
from minidist.rng import generator
from minidist.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelHead,
    unsplit,
    vocab_parallel,
)
from minidist.tensor_parallel.parallel_grouped_queries import ParallelGroupedQueryAttention
from minidist.tensor_parallel.parallel_transformer import Parts, split_attention
from minidist.tensor_parallel.sequence_parallel import all_reduce_partial, sequence_parallel
from minidist.tensor_parallel.vocab_parallel import split_tables
from minidist.verify.strategies.cases import (
    INPUT,
    Case,
    as_input,
    collect,
    heads_of,
    of_kind,
    padded,
    random_weights,
    translator_case,
)
from minidist.verify.strategies.job import Arrays, Job, OnLoss
from minidist.verify.strategies.record import LINEAR, TRANSFORMER, TRANSFORMERS, Costs, Strategy

Loss = Callable[..., Tensor]


def by_layers(group: Group, case: Case, layer: Callable) -> tuple[nn.Module, Loss]:
    """Return an MLP whose layers are all split into such layers, and its loss."""
    whole = [of_kind(nn.Linear, linear) for linear in case.model.layers]
    return nn.Sequential([layer(linear, group=group) for linear in whole]), case.loss


by_columns = partial(by_layers, layer=partial(ColumnParallelLinear, gather_output=True))
by_rows = partial(by_layers, layer=partial(RowParallelLinear, scatter_input=True))


def by_heads(group: Group, case: Case) -> tuple[nn.Module, Loss]:
    """Return a Transformer, or a Seq2Seq, whose attention heads are split, and its loss."""
    for block in case.model.layers[1:-1]:
        split_attention(block, group, Parts())
    return case.model.flatten(), case.loss


def by_vocabulary(group: Group, case: Case) -> tuple[nn.Module, Loss]:
    """Return a model whose embedding and logits are split by vocabulary, and its loss."""
    embedding, *blocks, head = case.model.layers
    split_tables(embedding, group)
    whole, tied_to = of_kind(nn.Head, head), None
    if whole.tied:
        tied_to = of_kind(nn.TokenAndPosition, embedding).token.weight
    split = VocabParallelHead(whole, group, tied_to)
    return nn.Sequential([embedding, *blocks, split]), _split_loss(group, case)


def by_sequence(group: Group, case: Case) -> tuple[nn.Module, Loss]:
    """Return a Transformer, its matrices and, between them, the sequence split; and its loss."""
    loss = _split_loss(group, case)
    return sequence_parallel(of_kind(nn.Transformer, case.model), group), loss


def no_partial_sums(model: nn.Module, group: Group) -> None:
    """The split leaves every gradient whole."""


class Matrices(Job):
    """A split model on the whole batch.

    split   (group, case) -> (model, loss)
    finish  (model, group) -> None: sums the gradients that the split leaves partial
    """

    def __init__(
        self,
        group: Group,
        case: Case,
        split: Callable[[Group, Case], tuple[nn.Module, Loss]],
        finish: Callable[[nn.Module, Group], None] = no_partial_sums,
    ):
        model, self.loss = split(group, case)
        super().__init__(group, case, model)
        self.finish, self.x = finish, as_input(case.inputs)
        found = {a.holders for a in model.modules(ParallelGroupedQueryAttention)}
        self.groups += [group for group in found if group is not None]

    def backward(self, on_loss: OnLoss) -> None:
        y = self.model(self.x, self.case.randomness(np.arange(len(self.case.inputs))))
        on_loss(self.loss(y, self.case.targets)).backward()
        self.finish(self.model, self.group)

    def result(self) -> Arrays:
        found = whole_gradients(self.model, self.group)
        if isinstance(self.x, Tensor) and self.x.grad is not None:
            found[INPUT] = self.x.grad
        return found


def _split_loss(group: Group, case: Case) -> Loss:
    assert isinstance(case.model, nn.Transformer | nn.Seq2Seq)
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
    """A tied Transformer with dropout, an untied one, a Llama; vocabulary and targets are padded.

    Of the Llama, 4 ranks have 2 heads of keys and values.
    """
    tokens, nexts = generator(0, "tensor cases").integers(0, 11, (2, 5, 12))
    kv_heads = 3 if ranks == 3 else 2
    models = {
        f"Transformer, {'tied' if tied else 'untied'}": nn.Transformer(
            11, 24, 12, 2, 12, 2, "float64", 0.2, tied
        )
        for tied in (True, False)
    } | {"Llama": nn.Llama(11, 24, 12, kv_heads, 2, 12, 2, "float64", hidden=24)}
    return [
        Case(name, random_weights(model), tokens, padded(nexts)) for name, model in models.items()
    ]


def transformers_cases(ranks: int) -> list[Case]:
    """The cases of transformer_cases, and a Seq2Seq of two vocabularies, 13 and 11, both padded."""
    return [*transformer_cases(ranks), translator_case(width=24, heads=12)]


def mlp_example(ranks: int) -> Case:
    """Return an MLP whose widths 4 ranks can split, for the table of costs."""
    random = generator(0, "strategy table")
    labels, images = random.integers(0, 2, 8), random.standard_normal((8, 16))
    model = nn.MLP([16, *[256, 64] * 3, 256, 16], activation="gelu", dtype="float64")
    return Case("example", model, images, labels)


def narrowest(axis: int, part: str, case: Case, ranks: int) -> tuple[int, str]:
    """Return the fewest rows (axis 0) or columns (axis 1) of a matrix."""
    return min(shape[axis] for shape in costs.shapes_of(of_kind(nn.Sequential, case.model))), part


def heads_limit(case: Case, ranks: int) -> tuple[int, str]:
    return heads_of(case.model), "heads"


_costs = partial(Costs, cuts="matrices")
_record = partial(
    Strategy,
    family="matrices",
    paper="Shoeybi et al. 2019, section 3",
    cases=transformers_cases,
    models=TRANSFORMERS,
)
STRATEGIES = [
    _record(
        name="column",
        idea="a weight cut by columns (Megatron's f)",
        term="张量并行, 矩阵按列切分",
        files=("tensor_parallel/column_parallel.py",),
        lesson="11_column_and_row",
        start=partial(Matrices, split=by_columns),
        cases=mlp_cases,
        models=LINEAR,
        costs=_costs(
            bytes=costs.column_bytes, limit=partial(narrowest, 1, "columns"), example=mlp_example
        ),
        tests=("tensor_parallel/test_column_parallel.py",),
    ),
    _record(
        name="row",
        idea="a weight cut by rows (Megatron's g)",
        term="张量并行, 矩阵按行切分",
        files=("tensor_parallel/row_parallel.py",),
        lesson="11_column_and_row",
        start=partial(Matrices, split=by_rows),
        cases=mlp_cases,
        models=LINEAR,
        costs=_costs(
            bytes=costs.row_bytes, limit=partial(narrowest, 0, "rows"), example=mlp_example
        ),
        tests=("tensor_parallel/test_row_parallel.py",),
    ),
    _record(
        name="attention",
        idea="heads over ranks",
        term="注意力头切分",
        files=("tensor_parallel/parallel_attention.py",),
        lesson="12_parallel_transformer",
        start=partial(Matrices, split=by_heads),
        costs=_costs(limit=heads_limit),
        tests=("tensor_parallel/test_parallel_transformer.py",),
    ),
    _record(
        name="vocab",
        idea="embedding, logits and cross-entropy over ranks",
        term="字典切分",
        files=("tensor_parallel/vocab_parallel.py",),
        lesson="12_parallel_transformer",
        start=partial(Matrices, split=by_vocabulary),
        costs=_costs(limit=lambda case, ranks: (case.model.vocab, "tokens")),
        tests=("tensor_parallel/test_vocab_parallel.py",),
    ),
    _record(
        name="sequence",
        idea="the sequence split between the matrices",
        term="序列并行",
        paper="Korthikanti et al. 2022, section 4.2.2",
        family="sequence",
        files=("tensor_parallel/sequence_parallel.py",),
        lesson="13_sequence_parallel",
        start=partial(Matrices, split=by_sequence, finish=all_reduce_partial),
        cases=transformer_cases,
        models=TRANSFORMER,
        costs=_costs(
            limit=lambda case, ranks: (min(heads_of(case.model), case.inputs.shape[1]), "heads")
        ),
        tests=("tensor_parallel/test_parallel_transformer.py",),
    ),
]
