"""An encoder-decoder Transformer: it reads a source, and predicts a target word by word.

Vaswani et al., Attention Is All You Need, 2017, section 3; norms before the sub-layers, as in
transformer.py. Letters: S source positions, T target positions, C width, U and V vocabularies.

    tokens[B, S + T]    source, padding | BEGIN, target, padding
    X[B, S + T, C]      the source      | the target         one array, so that ranks send one
                        encoder blocks    decoder blocks
    logits[B, T, V]                       head

A padded source position is a row of zeros in X, from the embedding on. So X itself shows every
layer, on any rank, what is padding. No query attends to a row of zeros, and every layer keeps it
zero. The target needs no such mask: its padding comes last, where no earlier position attends to
it, and the loss ignores it (`losses.IGNORED`).

A pipeline that cuts between two layers sends all of X[B, S + T, C], itemsize B (S + T) C bytes a
boundary each way, although an encoder block changes only the source's part and a decoder block
only the target's. Only the last decoder block passes on the target's part alone, X[B, T, C].

Teacher forcing: in training the decoder reads the right words, not the words that it predicts.
`decoding.py` writes with a trained model.
"""

from minidist.autograd import Tensor, functions
from minidist.backend import Array, beside
from minidist.nn.attention import CausalSelfAttention, PaddedAttention
from minidist.nn.dropout import Dropout
from minidist.nn.embedding import TokenAndPosition
from minidist.nn.layer_norm import LayerNorm
from minidist.nn.linear import Linear
from minidist.nn.module import Module, Sequential, check_sizes
from minidist.nn.transformer import Block, Head
from minidist.rng import Randomness
from minidist.tokens import PAD


class SourceAndTarget(Module):
    """tokens[B, S + T] -> X[B, S + T, C], each part with the table and the positions of its own."""

    def __init__(self, vocabs, width, lengths, dropout=0.0, *, name="embedding", **more):
        self.split = lengths[0]
        self.source, self.target = (
            TokenAndPosition(vocab, width, length, dropout, name=f"{name}.{part}", **more)
            for part, vocab, length in zip(("source", "target"), vocabs, lengths, strict=True)
        )

    def forward(self, tokens: Array, randomness: Randomness | None = None) -> Tensor:
        source, target = tokens[:, : self.split], tokens[:, self.split :]
        x = self.source(source, randomness)
        x = x * beside((source != PAD)[..., None].astype(x.dtype), x.data)
        return functions.concatenate([x, self.target(target, randomness)], axis=1)


class EncoderBlock(Module):
    """X[B, S + T, C]: the source attends to itself, in both directions; the target is kept."""

    feed_forwards = Block.feed_forwards

    def __init__(self, width, heads, split, dropout=0.0, *, name, **more):
        self.split = split
        self.norm_1 = LayerNorm(width, name=f"{name}.norm_1", dtype=more["dtype"])
        self.attention = PaddedAttention(width, heads, name=f"{name}.attention", **more)
        self.dropout_1 = Dropout(dropout, name=f"{name}.dropout_1")
        self.norm_2 = LayerNorm(width, name=f"{name}.norm_2", dtype=more["dtype"])
        self.expand = Linear(width, 4 * width, activation="gelu", name=f"{name}.expand", **more)
        self.contract = Linear(4 * width, width, name=f"{name}.contract", **more)
        self.dropout_2 = Dropout(dropout, name=f"{name}.dropout_2")

    def forward(self, x: Tensor, randomness: Randomness | None = None) -> Tensor:
        x, target = x[:, : self.split], x[:, self.split :]
        held, h = held_in(x), self.norm_1(x)
        mask = held[..., None].astype(x.dtype)
        x = x + mask * self.dropout_1(self.attention(h, h, held), randomness)
        x = x + mask * self.dropout_2(self.contract(self.expand(self.norm_2(x))), randomness)
        return functions.concatenate([x, target], axis=1)


class DecoderBlock(Module):
    """X[B, S + T, C]: the target attends to its earlier positions, then to the source.

    last  pass on the target's part alone, X[B, T, C]
    """

    feed_forwards = Block.feed_forwards

    def __init__(self, width, heads, split, dropout=0.0, last=False, *, name, **more):
        self.split, self.last = split, last
        self.norm_1 = LayerNorm(width, name=f"{name}.norm_1", dtype=more["dtype"])
        self.attention = CausalSelfAttention(width, heads, name=f"{name}.attention", **more)
        self.dropout_1 = Dropout(dropout, name=f"{name}.dropout_1")
        self.norm_2 = LayerNorm(width, name=f"{name}.norm_2", dtype=more["dtype"])
        self.norm_source = LayerNorm(width, name=f"{name}.norm_source", dtype=more["dtype"])
        self.cross = PaddedAttention(width, heads, name=f"{name}.cross", **more)
        self.dropout_2 = Dropout(dropout, name=f"{name}.dropout_2")
        self.norm_3 = LayerNorm(width, name=f"{name}.norm_3", dtype=more["dtype"])
        self.expand = Linear(width, 4 * width, activation="gelu", name=f"{name}.expand", **more)
        self.contract = Linear(4 * width, width, name=f"{name}.contract", **more)
        self.dropout_3 = Dropout(dropout, name=f"{name}.dropout_3")

    def forward(self, x: Tensor, randomness: Randomness | None = None) -> Tensor:
        source, x = x[:, : self.split], x[:, self.split :]
        x = x + self.dropout_1(self.attention(self.norm_1(x), randomness), randomness)
        read = self.cross(self.norm_2(x), self.norm_source(source), held_in(source))
        x = x + self.dropout_2(read, randomness)
        x = x + self.dropout_3(self.contract(self.expand(self.norm_3(x))), randomness)
        return x if self.last else functions.concatenate([source, x], axis=1)


def held_in(source: Tensor) -> Array:
    """Return held[B, S]: False where a row of X[B, S, C] is all zeros, which is padding."""
    return (source.data != 0).any(axis=-1)


class Seq2Seq(Sequential):
    """tokens[B, S + t] -> logits[B, t, V], t <= T.  Layers: embedding, encoder, decoder, head.

    tokens: the source's words, padded with PAD to S columns, then BEGIN and the target's words.
    ValueError if there is no column of the target.

    source_vocab, target_vocab    U and V, with PAD, BEGIN and END
    depth                         blocks of the encoder, and of the decoder
    source_length, target_length  S and T
    dropout                       rate on the embeddings and on each branch of each block
    name                          prefix of the parameters' names, for a model of two Seq2Seqs
    """

    def __init__(
        self,
        source_vocab,
        target_vocab,
        width,
        heads,
        depth,
        source_length,
        target_length,
        seed=0,
        dtype="float32",
        dropout=0.0,
        name="",
    ):
        check_sizes(depth=depth)
        at = f"{name}." if name else ""
        self.source_vocab, self.vocab = source_vocab, target_vocab
        self.source_length, self.target_length = source_length, target_length
        more = {"seed": seed, "dtype": dtype}
        vocabs, lengths = (source_vocab, target_vocab), (source_length, target_length)
        block = {"width": width, "heads": heads, "split": source_length, "dropout": dropout, **more}
        layers = [SourceAndTarget(vocabs, width, lengths, dropout, name=f"{at}embedding", **more)]
        layers += [EncoderBlock(name=f"{at}encoder.{i}", **block) for i in range(depth)]
        layers += [
            DecoderBlock(name=f"{at}decoder.{i}", last=i == depth - 1, **block)
            for i in range(depth)
        ]
        super().__init__([*layers, Head(width, target_vocab, name=f"{at}head", **more)])

    def forward(self, tokens: Array, randomness: Randomness | None = None) -> Tensor:
        if len(tokens.shape) != 2 or tokens.shape[1] <= self.source_length:
            raise ValueError(
                f"tokens are [B, S + t]: {self.source_length} columns of the source, then at least "
                f"one of the target; not {list(tokens.shape)}"
            )
        return super().forward(tokens, randomness)
