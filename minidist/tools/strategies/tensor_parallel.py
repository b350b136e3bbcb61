"""The matrix splits as workers: every rank holds a part of the matrices, and gets the whole batch.

Letters of the bills: N ranks, S = B T C itemsize, the bytes of one activation.
"""

from collections.abc import Callable
from functools import partial

import numpy as np

from minidist import nn
from minidist.autograd import Tensor
from minidist.comm import Group
from minidist.rng import Randomness, generator
from minidist.tensor_parallel import (
    ColumnParallelLinear,
    ParallelAttention,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
    unsplit,
    vocab_parallel,
)
from minidist.tensor_parallel.sequence_parallel import all_reduce_partial, sequence_parallel
from minidist.tools.strategies.cases import (
    INPUT,
    Case,
    Outcome,
    Split,
    as_input,
    bill,
    random_weights,
)
from minidist.tools.strategies.pipeline_parallel import names_of


def by_columns(group: Group, case: Case) -> tuple[nn.Module, Callable]:
    """Return an MLP whose layers are all split by columns, their outputs gathered; and its loss."""
    split = partial(ColumnParallelLinear, group=group, gather_output=True)
    return nn.Sequential([split(layer) for layer in case.model.layers]), case.loss


def by_rows(group: Group, case: Case) -> tuple[nn.Module, Callable]:
    """Return an MLP whose layers are all split by rows, their inputs scattered; and its loss."""
    split = partial(RowParallelLinear, group=group, scatter_input=True)
    return nn.Sequential([split(layer) for layer in case.model.layers]), case.loss


def by_heads(group: Group, case: Case) -> tuple[nn.Module, Callable]:
    """Return a Transformer whose attention heads are split, and its loss."""
    for block in case.model.layers[1:-1]:
        block.attention = ParallelAttention(block.attention, group)
    return case.model.flatten(), case.loss


def by_vocabulary(group: Group, case: Case) -> tuple[nn.Module, Callable]:
    """Return a Transformer whose vocabulary is split, embedding and logits, and its split loss."""
    embedding, *blocks, head = case.model.layers
    embedding.token = VocabParallelEmbedding(embedding.token, group)
    head = VocabParallelHead(head, group, embedding.token.weight if head.tied else None)
    return nn.Sequential([embedding, *blocks, head]), _split_loss(group, case)


def by_sequence(group: Group, case: Case) -> tuple[nn.Module, Callable]:
    """Return a Transformer split by matrices and, between them, by sequence; and its loss."""
    loss = _split_loss(group, case)
    return sequence_parallel(case.model, group), loss


SPLITS = {
    "column": by_columns,
    "row": by_rows,
    "attention": by_heads,
    "vocab": by_vocabulary,
    "sequence": by_sequence,
}


def tensor_worker(group: Group, case: Case, split: str) -> Outcome:
    """Run forward and backward of a split model; return whole gradients, put together from parts.

    Of those that only a split sequence leaves partial, the sums.
    """
    model, loss = SPLITS[split](group, case)
    x = as_input(case.inputs)
    randomness = Randomness(case.seed, 0, np.arange(len(case.inputs)))
    loss(model(x, randomness), case.targets).backward()
    if split == "sequence":
        all_reduce_partial(model, group)
    moved = bill(group)
    result = whole_gradients(model, group)
    if isinstance(x, Tensor):
        result[INPUT] = x.grad
    held = {name: (p.data, p.shard) for name, p in model.named_parameters().items()}
    return Outcome(result, moved.total(), held=held, operations=dict(moved))


def by_matrices(case: Case, ranks: int) -> Split:
    layers = names_of(case, [range(i, i + 1) for i in range(len(case.model.layers))])
    return Split(stages=layers, tensor=ranks, each="layer")


def _split_loss(group: Group, case: Case) -> Callable:
    return partial(vocab_parallel.cross_entropy, group=group, vocab=case.model.vocab)


def whole_gradients(model: nn.Module, group: Group) -> dict[str, np.ndarray]:
    """Return all gradients; of a split parameter, the parts of all ranks put together."""
    return {
        name: unsplit(np.zeros_like(p.data) if p.grad is None else p.grad, p, group)
        for name, p in model.named_parameters().items()
    }


def column_bytes(case: Case, ranks: int) -> int:
    """Return, per layer [C, F], an all_gather of Y forward and an all_reduce of dX backward."""
    shapes = [layer.weight.shape for layer in case.model.layers]
    return _bytes(case, ranks, sum(F + 2 * C for C, F in shapes))


def row_bytes(case: Case, ranks: int) -> int:
    """Return, per layer [C, F], an all_reduce of Y forward and an all_gather of dX backward."""
    shapes = [layer.weight.shape for layer in case.model.layers]
    return _bytes(case, ranks, sum(2 * F + C for C, F in shapes))


def attention_bytes(case: Case, ranks: int) -> int:
    """Return, per block, an all_reduce of S forward and one backward."""
    width = case.model.layers[-1].norm.gain.size
    return _bytes(case, ranks, 4 * width * (len(case.model.layers) - 2))


def vocab_bytes(case: Case, ranks: int) -> int:
    """Return two all_reduces of S, embedding and head, and three of B T in the loss."""
    return _bytes(case, ranks, 4 * case.model.layers[-1].norm.gain.size + 6)


def sequence_bytes(case: Case, ranks: int) -> int:
    """Return 10 (N - 1) S per block, 5 for embedding and head, the loss, and partial gradients.

    A block gathers and scatters twice forward and twice backward, 8, as the four all_reduces of a
    block do that is split by matrices alone; and gathers twice again for dW.
    """
    width, depth = case.model.layers[-1].norm.gain.size, len(case.model.layers) - 2
    named = case.model.named_parameters()
    partial_gradients = 2 * (ranks - 1) * 8 * sum(named[n].size for n in named if is_repeated(n))
    return _bytes(case, ranks, (10 * depth + 5) * width + 6) + partial_gradients


def is_repeated(name: str) -> bool:
    """Say whether every rank of the tensor axis holds all of this parameter of a Transformer."""
    repeated = ("output.bias", "contract.bias", "position.weight")
    return ".norm" in name or name.endswith(repeated)


def vocabulary(named: dict) -> list[str]:
    """Return the names of the parameters that are split, and padded, by the vocabulary."""
    return [name for name in ("embedding.token.weight", "head.linear.weight") if name in named]


def _bytes(case: Case, ranks: int, numbers: int) -> int:
    """Return (N - 1) times `numbers` float64 per example, or per position of each."""
    rows = case.inputs.size if case.inputs.dtype.kind in "iu" else len(case.inputs)
    return (ranks - 1) * rows * numbers * 8


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
    """A tied Transformer with dropout, and an untied one; the vocabulary of 11 is padded."""
    tokens, nexts = generator(0, "tensor cases").integers(0, 11, (2, 5, 12))
    return [
        Case(
            f"Transformer, {'tied' if tied else 'untied'}",
            random_weights(nn.Transformer(11, 24, 12, 2, 12, 2, "float64", 0.2, tied)),
            tokens,
            nexts,
        )
        for tied in (True, False)
    ]
