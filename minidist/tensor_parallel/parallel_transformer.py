"""A Transformer split by matrices: the same blocks, with their linear layers replaced.

Shoeybi et al., Megatron-LM (2019), section 3. Letters: N ranks of the group.

    X[B, T, C] -> norm -> f -> QKV columns | heads | output rows -> g -> dropout -> + X
                  norm -> f -> expand columns | gelu | contract rows -> g -> dropout -> + X

Per block two all_reduces forward (g) and two backward (f; figure 4): 8 (N - 1)/N B T C itemsize
from each rank (Narayanan et al., Megatron-LM 2021, section 3.2). Every rank repeats norms, dropouts
and sums, and keeps X.

An nn.Seq2Seq is split in the same way, an attention and a feed-forward part at a time. Its blocks
attend to other positions through two products, each with an f: with S source and T target
positions an encoder block has two all_reduces of S forward and three backward; a decoder block
three of T each way and, backward, one more of S, for the gradient of the source. Rows of zeros
show the padding; every rank has them, because the embedding sets them after its sum over ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from minidist import nn
from minidist.autograd import Tensor
from minidist.backend import Array
from minidist.comm import Group
from minidist.errors import WrongInput
from minidist.nn.embedding import check_positions, position_rows
from minidist.nn.seq2seq import DecoderBlock, EncoderBlock
from minidist.parallel import check_same_weights, share_scales
from minidist.parallel.collective_functions import reduce_from
from minidist.rng import Randomness
from minidist.tensor_parallel.column_parallel import ColumnParallelLinear
from minidist.tensor_parallel.parallel_attention import (
    ParallelAttention,
    ParallelGroupedQueryAttention,
    ParallelPaddedAttention,
    holders_of,
    split_products,
)
from minidist.tensor_parallel.parallel_experts import split_mixture
from minidist.tensor_parallel.row_parallel import RowParallelLinear
from minidist.tensor_parallel.vocab_parallel import split_head, split_product, split_tables

M = TypeVar("M", bound=nn.Module)
BLOCKS = nn.Block, nn.ExpertBlock, EncoderBlock, DecoderBlock


def all_positions(T: int, group: Group) -> slice:
    return slice(0, T)


def repeated(dropout: nn.Dropout, group: Group) -> nn.Dropout:
    """Every rank draws the same mask."""
    return dropout


@dataclass(frozen=True)
class Parts:
    """What a split Transformer is made of; see sequence_parallel.py for the other set.

    columns, rows  linear layer, group -> the first and the last layer of a split part
    dropout        Dropout, group -> the dropout between split parts
    positions      T, group -> the positions that a rank holds between split parts
    leave          partial sum, group -> the embedding's output
    product        x, weight, group, transposed -> logits[B, T, V/N], in the head
    products       x, group, weights -> f(x) W of each weight: queries; keys and values
    holders        see ParallelGroupedQueryAttention
    """

    columns: Callable = ColumnParallelLinear
    rows: Callable = RowParallelLinear
    dropout: Callable = repeated
    positions: Callable = all_positions
    leave: Callable = reduce_from
    product: Callable = split_product
    products: Callable = split_products
    holders: Group | None = None


class ParallelEmbedding(nn.Module):
    """X[B, T, C] = dropout(token[x] + position[0:T]), the token's rows split over ranks.

    embedding  its table is split already (split_tables)
    """

    def __init__(self, embedding: nn.TokenAndPosition, group: Group, parts: Parts):
        self.group, self.positions = group, parts.positions
        self.token, self.position = embedding.token, embedding.position
        self.context = embedding.context
        self.dropout = parts.dropout(embedding.dropout, group)

    def forward(self, tokens: Array, randomness: Randomness | None = None) -> Tensor:
        positions = check_positions(tokens, self.context, randomness)
        x = self.token(tokens)
        if self.position is not None:
            here = self.positions(len(positions), self.group)
            x = x + position_rows(self.position.weight, positions)[here]
        return self.dropout(x, randomness)


class ParallelTransformer(nn.Sequential):
    """tokens[B, T] -> logits[B, T, V/N]; its loss is vocab_parallel.cross_entropy.

    model  a single-device Transformer or Seq2Seq, the same on every rank. Its layers are taken
           over: do not use it afterwards. `load_state` takes a single-device state.
    check_weights
           whether the ranks first compare their weights (see check_same_weights)
    """

    def __init__(
        self,
        model: nn.Transformer | nn.Seq2Seq,
        group: Group,
        parts: Parts | None = None,
        check_weights: bool = True,
    ):
        check_transformer(model)
        if check_weights:
            check_same_weights(model, group)
        share_scales(model.parameters(), group)
        parts = Parts() if parts is None else parts
        self.holders = None
        if isinstance(model, nn.Llama):
            self.holders = holders_of(group, model.kv_heads)
            parts = replace(parts, holders=self.holders)
        embedding, *blocks, head = model.layers
        self.vocab = model.vocab
        embedding = split_embedding(embedding, group, parts)
        for block in blocks:
            split_attention(block, group, parts)
            assert isinstance(block, BLOCKS)
            if isinstance(block, nn.ExpertBlock):
                split_mixture(block.mixture, group)
            else:
                block.expand = parts.columns(block.expand, group)
                block.contract = parts.rows(block.contract, group)
            for name, dropout in members(block, nn.Dropout):
                setattr(block, name, parts.dropout(dropout, group))
        split = split_head(head, embedding, group, parts.product)
        super().__init__([embedding, *blocks, split])


def check_transformer(model: nn.Module) -> None:
    if not isinstance(model, nn.Transformer | nn.Seq2Seq):
        raise WrongInput(
            f"cannot split the matrices of {type(model).__name__}; use an nn.Transformer or an "
            "nn.Seq2Seq"
        )


ATTENTION: dict[type[nn.Module], Callable] = {
    nn.CausalSelfAttention: lambda a, group, p: ParallelAttention(a, group, p.columns, p.rows),
    nn.PaddedAttention: lambda a, group, p: ParallelPaddedAttention(a, group, p.columns, p.rows),
    nn.GroupedQueryAttention: lambda a, group, p: ParallelGroupedQueryAttention(
        a, group, p.rows, p.products, p.holders
    ),
}


def split_embedding(embedding: nn.Module, group: Group, parts: Parts) -> nn.Module:
    """Split the tables of an embedding, or of both embeddings of a source and a target."""
    split_tables(embedding, group, parts.leave)
    if isinstance(embedding, nn.TokenAndPosition):
        return ParallelEmbedding(embedding, group, parts)
    for name, part in members(embedding, nn.TokenAndPosition):
        setattr(embedding, name, ParallelEmbedding(part, group, parts))
    return embedding


def split_attention(block: nn.Module, group: Group, parts: Parts) -> None:
    """Split the heads of each attention of a block."""
    for kind, split in ATTENTION.items():
        for name, attention in members(block, kind):
            setattr(block, name, split(attention, group, parts))


def members(module: nn.Module, kind: type[M]) -> list[tuple[str, M]]:
    """Return the attributes of a module that are of one kind: [(name, module)]."""
    return [(name, part) for name, part in vars(module).items() if isinstance(part, kind)]
