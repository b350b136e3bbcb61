"""Embeddings: a table of rows, one per token or position."""

from minidist.autograd import Tensor, functions
from minidist.backend import Array
from minidist.nn.dropout import Dropout
from minidist.nn.module import Module, draw
from minidist.rng import Randomness


class Embedding(Module):
    """Y[..., C] = W[indices[...]],  W[V, C] normal with standard deviation 0.02.

    The deviation is that of Radford et al. 2018, section 4.1.
    """

    def __init__(self, rows: int, width: int, *, name="embedding", seed=0, dtype="float32"):
        self.weight = draw(f"{name}.weight", (rows, width), 0.02, seed, dtype)

    def forward(self, indices: Array, randomness: Randomness | None = None) -> Tensor:
        return functions.embedding(indices, self.weight)


class TokenAndPosition(Module):
    """Y[B, T, C] = dropout(token[x[B, T]] + position[0:T]), any T up to the context."""

    def __init__(
        self, vocab, width, context, dropout=0.0, *, name="embedding", seed=0, dtype="float32"
    ):
        self.token = Embedding(vocab, width, name=f"{name}.token", seed=seed, dtype=dtype)
        self.position = Embedding(context, width, name=f"{name}.position", seed=seed, dtype=dtype)
        self.dropout = Dropout(dropout, name=f"{name}.dropout")

    def forward(self, tokens: Array, randomness: Randomness | None = None) -> Tensor:
        T, context = tokens.shape[1], len(self.position.weight)
        if T > context:
            raise ValueError(f"{T} tokens do not fit a context of {context}")
        return self.dropout(self.token(tokens) + self.position.weight[:T], randomness)
