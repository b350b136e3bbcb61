"""Embeddings: a table of rows, one per token or position; the tokens of every vocabulary."""

from minidist.autograd import Tensor, functions
from minidist.backend import Array
from minidist.errors import WrongInput, check_sizes
from minidist.nn.dropout import Dropout
from minidist.nn.module import Module, draw
from minidist.pieces import Positions
from minidist.rng import Randomness

PAD, BEGIN, END = 0, 1, 2


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

    If the sequence is cut, x has the tokens at `randomness.positions`. Without `learned` positions
    Y = dropout(token[x]): the attention knows them in another way.

    >>> nn.TokenAndPosition(100, 8, context=16)(np.array([[3, 1, 4]])).shape
    (1, 3, 8)
    """

    def __init__(
        self, vocab, width, context, dropout=0.0, learned=True, *, name="embedding", **options
    ):
        check_sizes(vocab=vocab, context=context)
        self.context = context
        self.token = Embedding(vocab, width, name=f"{name}.token", **options)
        self.position = None
        if learned:
            self.position = Embedding(context, width, name=f"{name}.position", **options)
        self.dropout = Dropout(dropout, name=f"{name}.dropout")

    def forward(self, tokens: Array, randomness: Randomness | None = None) -> Tensor:
        positions = check_positions(tokens, self.context, randomness)
        x = self.token(tokens)
        if self.position is not None:
            x = x + position_rows(self.position.weight, positions)
        return self.dropout(x, randomness)


def position_rows(weight: Tensor, positions: Positions) -> Tensor:
    """Return the rows of weight[context, C] at these positions."""
    if positions.whole:
        return weight[: len(positions)]
    return functions.concatenate([weight[a:b] for a, b in positions.runs or [(0, 0)]])


def check_positions(tokens: Array, context: int, randomness: Randomness | None) -> Positions:
    """Return the positions of tokens' columns; ValueError unless the context has room."""
    if len(tokens.shape) != 2:
        raise WrongInput(f"tokens are [B, T], a row per example, not {list(tokens.shape)}")
    T = tokens.shape[1]
    if T > context:
        raise WrongInput(f"{T} tokens do not fit a context of {context}; use at most {context}")
    if randomness is None or randomness.positions is None:
        return Positions(((0, T),), T)
    positions = randomness.positions
    if len(positions) != T or positions.length > context:
        raise WrongInput(
            f"tokens have {T} columns, at {len(positions)} positions of a sequence of "
            f"{positions.length}, in a context of {context}; cut the tokens as "
            "tokens[:, positions.indices]"
        )
    return positions
