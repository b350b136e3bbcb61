"""A decoder-only Transformer with its norms before the sub-layers.

Vaswani et al. 2017; Radford et al. 2019, section 2.3. With experts, the feed-forward part of a
block is a mixture of them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from minidist.autograd import Tensor, functions
from minidist.errors import check_options, check_sizes
from minidist.nn.attention import CausalSelfAttention
from minidist.nn.dropout import Dropout
from minidist.nn.embedding import TokenAndPosition
from minidist.nn.linear import Linear
from minidist.nn.mixture_of_experts import MixtureOfExperts
from minidist.nn.mlp import FeedForward, hidden_layer
from minidist.nn.module import Module, Sequential
from minidist.nn.norms import LayerNorm
from minidist.rng import Randomness


@dataclass(frozen=True)
class Style:
    """What the blocks of a Transformer are made of; by default the parts of GPT-2.

    norm        (width, name=, dtype=) -> a norm
    attention   (width, heads, name=, seed=, dtype=) -> attention
    hidden      F, the width inside the feed-forward part; None: 4C
    activation  of the feed-forward part: see Linear
    bias        whether its linear layers have one
    positions   whether the embedding has a learned row for each position
    """

    norm: Callable = LayerNorm
    attention: Callable = CausalSelfAttention
    hidden: int | None = None
    activation: str = "gelu"
    bias: bool = True
    positions: bool = True


GPT2 = Style()
OF_BLOCK = "activation", "bias", "name", "seed", "dtype"  # what a block gives to its mixture


class Block(FeedForward):
    """X[B, T, C] -> X + attention(norm(X)), then X + contract(gelu(expand(norm(X)))).

    F = 4C is the feed-forward width; each branch ends in a dropout. The gelu is the tanh form.
    Another `style` has other parts in the same places.

    >>> nn.Block(8, heads=2, dtype="float64")(Tensor(np.ones((5, 3, 8)))).shape
    (5, 3, 8)
    """

    def __init__(
        self, width, heads, dropout=0.0, style=GPT2, *, name="block", seed=0, dtype="float32"
    ):
        options = {"seed": seed, "dtype": dtype}
        self.norm_1 = style.norm(width, name=f"{name}.norm_1", dtype=dtype)
        self.attention = style.attention(width, heads, name=f"{name}.attention", **options)
        self.dropout_1 = Dropout(dropout, name=f"{name}.dropout_1")
        self.norm_2 = style.norm(width, name=f"{name}.norm_2", dtype=dtype)
        hidden = style.hidden, style.activation, style.bias
        self.expand, self.contract = hidden_layer(width, *hidden, name=name, **options)
        self.dropout_2 = Dropout(dropout, name=f"{name}.dropout_2")

    def forward(self, x: Tensor, randomness: Randomness | None = None) -> Tensor:
        x = x + self.dropout_1(self.attention(self.norm_1(x), randomness), randomness)
        return x + self.dropout_2(self.contract(self.expand(self.norm_2(x))), randomness)


class ExpertBlock(Module):
    """X[B, T, C] -> X + attention(norm(X)), then X + mixture(norm(X)): see MixtureOfExperts.

    A position whose choices are all dropped passes by the mixture.
    """

    def __init__(
        self,
        width,
        heads,
        experts,
        dropout=0.0,
        style=GPT2,
        *,
        name="block",
        seed=0,
        dtype="float32",
        **mixture,
    ):
        options = {"seed": seed, "dtype": dtype}
        self.norm_1 = style.norm(width, name=f"{name}.norm_1", dtype=dtype)
        self.attention = style.attention(width, heads, name=f"{name}.attention", **options)
        self.dropout_1 = Dropout(dropout, name=f"{name}.dropout_1")
        self.norm_2 = style.norm(width, name=f"{name}.norm_2", dtype=dtype)
        mixture = {"expert_width": style.hidden} | mixture
        mixture |= {"activation": style.activation, "bias": style.bias}
        self.mixture = MixtureOfExperts(width, experts, name=name, **options, **mixture)
        self.dropout_2 = Dropout(dropout, name=f"{name}.dropout_2")

    def forward(self, x: Tensor, randomness: Randomness | None = None) -> Tensor:
        x = x + self.dropout_1(self.attention(self.norm_1(x), randomness), randomness)
        return x + self.dropout_2(self.mixture(self.norm_2(x), randomness), randomness)


class Head(Module):
    """X[B, T, C] -> logits[B, T, V] = norm(X) W[C, V].

    Tied: W = E^T, the embedding E[V, C] itself (Press and Wolf 2017).

    >>> nn.Head(8, vocab=100, dtype="float64")(Tensor(np.ones((5, 3, 8)))).shape
    (5, 3, 100)
    """

    def __init__(
        self, width, vocab, tied_to=None, style=GPT2, *, name="head", seed=0, dtype="float32"
    ):
        self.norm = style.norm(width, name=f"{name}.norm", dtype=dtype)
        self.tied = tied_to is not None
        if self.tied:
            self.weight = tied_to
        else:
            self.linear = Linear(
                width, vocab, bias=False, name=f"{name}.linear", seed=seed, dtype=dtype
            )

    def forward(self, x: Tensor, randomness: Randomness | None = None) -> Tensor:
        x = self.norm(x)
        return functions.linear(x, self.weight, transposed=True) if self.tied else self.linear(x)


class Transformer(Sequential):
    """tokens[B, T] -> logits[B, T, V], T <= context.  Layers: embedding, `depth` blocks, head.

    dropout  rate on the embedding and on both branches of each block; training then takes
             `model(tokens, randomness)`
    tied     the head's weight is the token embedding: one parameter with two uses, which both
             contribute to its gradient
    experts  of each block, or 0 for a dense feed-forward part
    style    what the blocks are made of: nn.Llama has another one
    mixture  top_k, capacity, balance, and other options of MixtureOfExperts

    >>> model = nn.Transformer(vocab=100, width=8, heads=2, depth=1, context=16)
    >>> model(np.array([[3, 1, 4]])).shape, list(model.named_parameters())[4]
    ((1, 3, 100), 'blocks.0.attention.qkv.weight')
    """

    def __init__(
        self,
        vocab,
        width,
        heads,
        depth,
        context,
        seed=0,
        dtype="float32",
        dropout=0.0,
        tied=False,
        experts=0,
        style=GPT2,
        **mixture,
    ):
        check_options(MixtureOfExperts, mixture, "a mixture of experts", without=OF_BLOCK)
        options = {"seed": seed, "dtype": dtype}
        check_sizes(least=0, depth=depth, experts=experts)
        self.vocab, self.context, self.experts = vocab, context, experts
        embedding = TokenAndPosition(
            vocab, width, context, dropout, style.positions, name="embedding", **options
        )
        options["style"] = style
        make = Block
        if experts:
            make = partial(ExpertBlock, experts=experts, **mixture)
        blocks = [
            make(width, heads, dropout=dropout, name=f"blocks.{i}", **options) for i in range(depth)
        ]
        head = Head(width, vocab, embedding.token.weight if tied else None, name="head", **options)
        super().__init__([embedding, *blocks, head])
