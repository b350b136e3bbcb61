"""An encoder-decoder Transformer: it reads a source, and predicts a target word by word.

Vaswani et al., Attention Is All You Need, 2017, section 3; norms before the sub-layers, as in
transformer.py. Letters: S source positions, T target positions, C width, U and V vocabularies.

    tokens[B, S + T]    source, padding | BEGIN, target, padding
    X[B, S + T, C + 1]  the source      | the target         one array, so that ranks send one
                        encoder blocks    decoder blocks
    logits[B, T, V]                       head

The last column of X is 1 where the source has a word, and 0 elsewhere. The embedding makes it from
the tokens, and the blocks pass it on. So X itself shows every layer, on any rank, what is padding,
whatever dropout does to the other columns. No query attends to a padded position, so what X has
there reaches no logit and gets no gradient. The target needs no such mask: its padding comes last,
where no earlier position attends to it, and the loss ignores it (`losses.IGNORED`).

A pipeline that cuts between two layers sends all of X, itemsize B (S + T) (C + 1) bytes a boundary
each way, although an encoder block changes only the source's part and a decoder block only the
target's. Only the last decoder block passes on the target's part alone, X[B, T, C].

Teacher forcing: in training the decoder reads the right words, not the words that it predicts.
`generate.py` writes with a trained model.
"""

from minidist.autograd import Tensor, functions
from minidist.backend import Array, on_device_of
from minidist.errors import WrongInput, check_sizes
from minidist.nn.attention import CausalSelfAttention, PaddedAttention
from minidist.nn.dropout import Dropout
from minidist.nn.embedding import PAD, TokenAndPosition
from minidist.nn.mlp import FeedForward, hidden_layer
from minidist.nn.module import Module, Sequential
from minidist.nn.norms import LayerNorm
from minidist.nn.transformer import Head
from minidist.rng import Randomness


def joined(source: Tensor, held: Array, target: Tensor) -> Tensor:
    """Return X[B, S + t, C + 1] of source[B, S, C], held[B, S] and target[B, t, C].

    held  whether a position of the source has a word; the last column of X says it
    """
    xp, x = source.xp, functions.concatenate([source, target], axis=1)
    column = xp.zeros((*x.shape[:2], 1), x.dtype)
    column[:, : source.shape[1], 0] = on_device_of(held, x.data)
    return functions.concatenate([x, Tensor(column)], axis=2)


def parted(x: Tensor, split: int) -> tuple[Tensor, Array, Tensor]:
    """Return the source, held and the target of X, with S = split, as `joined` takes them."""
    C = x.shape[2] - 1
    return x[:, :split, :C], x.data[:, :split, C] != 0, x[:, split:, :C]


class SourceAndTarget(Module):
    """tokens[B, S + T] -> X[B, S + T, C + 1], each part with its own table and positions."""

    def __init__(self, vocabs, width, lengths, dropout=0.0, *, name="embedding", **options):
        self.split = lengths[0]
        self.source, self.target = (
            TokenAndPosition(vocab, width, length, dropout, name=f"{name}.{part}", **options)
            for part, vocab, length in zip(("source", "target"), vocabs, lengths, strict=True)
        )

    def forward(self, tokens: Array, randomness: Randomness | None = None) -> Tensor:
        if randomness is not None and randomness.documents is not None:
            raise WrongInput(
                "a translator's window is one source and its target; pass no documents, "
                "or use an nn.Transformer"
            )
        source, target = tokens[:, : self.split], tokens[:, self.split :]
        x, y = self.source(source, randomness), self.target(target, randomness)
        return joined(x, source != PAD, y)


class EncoderBlock(FeedForward):
    """X[B, S + T, C + 1]: the source attends to itself, both ways; all else is kept."""

    def __init__(self, width, heads, split, dropout=0.0, *, name, **options):
        check_sizes(split=split)
        self.split = split
        self.norm_1 = LayerNorm(width, name=f"{name}.norm_1", dtype=options["dtype"])
        self.attention = PaddedAttention(width, heads, name=f"{name}.attention", **options)
        self.dropout_1 = Dropout(dropout, name=f"{name}.dropout_1")
        self.norm_2 = LayerNorm(width, name=f"{name}.norm_2", dtype=options["dtype"])
        self.expand, self.contract = hidden_layer(width, name=name, **options)
        self.dropout_2 = Dropout(dropout, name=f"{name}.dropout_2")

    def forward(self, x: Tensor, randomness: Randomness | None = None) -> Tensor:
        x, held, target = parted(x, self.split)
        h = self.norm_1(x)
        x = x + self.dropout_1(self.attention(h, h, held), randomness)
        x = x + self.dropout_2(self.contract(self.expand(self.norm_2(x))), randomness)
        return joined(x, held, target)


class DecoderBlock(FeedForward):
    """X[B, S + T, C + 1]: the target attends to its earlier positions, then to the source.

    last  pass on the target's part alone, X[B, T, C]
    """

    def __init__(self, width, heads, split, dropout=0.0, last=False, *, name, **options):
        check_sizes(split=split)
        self.split, self.last = split, last
        self.norm_1 = LayerNorm(width, name=f"{name}.norm_1", dtype=options["dtype"])
        self.attention = CausalSelfAttention(width, heads, name=f"{name}.attention", **options)
        self.dropout_1 = Dropout(dropout, name=f"{name}.dropout_1")
        self.norm_2 = LayerNorm(width, name=f"{name}.norm_2", dtype=options["dtype"])
        self.norm_source = LayerNorm(width, name=f"{name}.norm_source", dtype=options["dtype"])
        self.cross = PaddedAttention(width, heads, name=f"{name}.cross", **options)
        self.dropout_2 = Dropout(dropout, name=f"{name}.dropout_2")
        self.norm_3 = LayerNorm(width, name=f"{name}.norm_3", dtype=options["dtype"])
        self.expand, self.contract = hidden_layer(width, name=name, **options)
        self.dropout_3 = Dropout(dropout, name=f"{name}.dropout_3")

    def forward(self, x: Tensor, randomness: Randomness | None = None) -> Tensor:
        source, held, target = parted(x, self.split)
        target = self.write(target, self.keys_and_values(source), held, randomness)
        return target if self.last else joined(source, held, target)

    def keys_and_values(self, source: Tensor) -> Tensor:
        """Return KV[2, B, H, S, D] of source[B, S, C], which no word of the target changes."""
        return self.cross.keys_and_values(self.norm_source(source))

    def write(
        self, x: Tensor, kv: Tensor, held: Array, randomness: Randomness | None = None
    ) -> Tensor:
        """Return the target's part alone, X[B, T, C] -> X[B, T, C]."""
        x = x + self.dropout_1(self.attention(self.norm_1(x), randomness), randomness)
        x = x + self.dropout_2(self.cross.read(self.norm_2(x), kv, held), randomness)
        return x + self.dropout_3(self.contract(self.expand(self.norm_3(x))), randomness)


class Seq2Seq(Sequential):
    """tokens[B, S + t] -> logits[B, t, V], t <= T.  Layers: embedding, encoder, decoder, head.

    tokens: the source's words, padded with PAD to S columns, then BEGIN and the target's words.
    ValueError if there is no column of the target.

    source_vocab, target_vocab    U and V, with PAD, BEGIN and END
    depth                         blocks of the encoder, and of the decoder
    source_length, target_length  S and T
    dropout                       rate on the embeddings and on each branch of each block
    name                          prefix of the parameters' names, for a model of two Seq2Seqs

    >>> model = nn.Seq2Seq(50, 60, 8, 2, 1, source_length=4, target_length=3)
    >>> model(np.array([[5, 7, 9, 0, 1, 8, 6]])).shape  # 5 7 9 and padding, then BEGIN 8 6
    (1, 3, 60)
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
        options = {"seed": seed, "dtype": dtype}
        vocabs, lengths = (source_vocab, target_vocab), (source_length, target_length)
        block = options | {"width": width, "heads": heads, "split": source_length}
        block["dropout"] = dropout
        embedding = SourceAndTarget(
            vocabs, width, lengths, dropout, name=f"{at}embedding", **options
        )
        encoder = [EncoderBlock(name=f"{at}encoder.{i}", **block) for i in range(depth)]
        decoder = [
            DecoderBlock(name=f"{at}decoder.{i}", last=i == depth - 1, **block)
            for i in range(depth)
        ]
        head = Head(width, target_vocab, name=f"{at}head", **options)
        super().__init__([embedding, *encoder, *decoder, head])

    @property
    def embedding(self) -> SourceAndTarget:
        return self.layers[0]  # type: ignore[return-value]  # the first layer is always one

    def forward(self, tokens: Array, randomness: Randomness | None = None) -> Tensor:
        if len(tokens.shape) != 2 or tokens.shape[1] <= self.source_length:
            raise WrongInput(
                f"tokens are [B, S + t]: {self.source_length} columns of the source, then at least "
                f"one of the target; not {list(tokens.shape)}"
            )
        return super().forward(tokens, randomness)
