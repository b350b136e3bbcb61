"""Embeddings: a table of rows, one per token or position."""

from minidist.autograd import Tensor, functions
from minidist.backend import Array
from minidist.nn.dropout import Dropout
from minidist.nn.module import Module, check_sizes, draw
from minidist.rng import Randomness


class Embedding(Module):
    """Y[..., C] = W[indices[...]],  W[V, C] normal with standard deviation 0.02.

    The standard deviation is from Radford et al. 2018, section 4.1.

    >>> nn.Embedding(100, 8)(np.array([[3, 1, 4]])).shape
    (1, 3, 8)
    """

    def __init__(self, rows: int, width: int, *, name="embedding", seed=0, dtype="float32"):
        check_sizes(rows=rows, width=width)
        self.weight = draw(f"{name}.weight", (rows, width), 0.02, seed, dtype)

    def forward(self, indices: Array, randomness: Randomness | None = None) -> Tensor:
        return functions.embedding(indices, self.weight)


class TokenAndPosition(Module):
    """Y[B, T, C] = dropout(token[x[B, T]] + position[0:T]), any T up to the context.

    If the sequence is cut, x has the tokens at `randomness.positions`.

    >>> nn.TokenAndPosition(100, 8, context=16)(np.array([[3, 1, 4]])).shape
    (1, 3, 8)
    """

    def __init__(
        self, vocab, width, context, dropout=0.0, *, name="embedding", seed=0, dtype="float32"
    ):
        check_sizes(vocab=vocab, context=context)
        self.token = Embedding(vocab, width, name=f"{name}.token", seed=seed, dtype=dtype)
        self.position = Embedding(context, width, name=f"{name}.position", seed=seed, dtype=dtype)
        self.dropout = Dropout(dropout, name=f"{name}.dropout")

    def forward(self, tokens: Array, randomness: Randomness | None = None) -> Tensor:
        rows = position_rows(self.position.weight, tokens, randomness)
        return self.dropout(self.token(tokens) + rows, randomness)


def position_rows(weight: Tensor, tokens: Array, randomness: Randomness | None) -> Tensor:
    """Return the rows of weight[context, C] that belong to the columns of tokens[B, T]."""
    T, context = positions_of(tokens, len(weight)), len(weight)
    if randomness is None or randomness.positions is None:
        return weight[:T]
    held = randomness.positions
    if len(held) != T or held.length > context:
        raise ValueError(
            f"tokens have {T} columns, at {len(held)} positions of a sequence of {held.length}, in "
            f"a context of {context}; cut the tokens as tokens[:, positions.indices]"
        )
    return functions.concatenate([weight[a:b] for a, b in held.runs or [(0, 0)]])


def positions_of(tokens: Array, context: int) -> int:
    """Return T of tokens[B, T], which must fit the context."""
    if len(tokens.shape) != 2:
        raise ValueError(f"tokens are [B, T], a row per example, not {list(tokens.shape)}")
    if tokens.shape[1] > context:
        raise ValueError(
            f"{tokens.shape[1]} tokens do not fit a context of {context}; use at most {context}"
        )
    return tokens.shape[1]
