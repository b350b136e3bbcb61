"""The feed-forward part of a block: one hidden layer, wider than its ends.

Vaswani et al., Attention Is All You Need (2017), section 3.3, with gelu in place of relu, or with a
gate (Shazeer, GLU Variants Improve Transformer, 2020).
"""

from minidist.autograd import Tensor
from minidist.errors import check_sizes
from minidist.nn.linear import GATED, Linear
from minidist.nn.module import Module
from minidist.rng import Randomness


class FeedForward(Module):
    """A module with an `expand` and a `contract`, which widen X to F and back.

    A strategy may replace them by layers that hold parts.
    """

    expand: Module
    contract: Module


def hidden_layer(
    width, hidden=None, activation="gelu", bias=True, *, name, seed=0, dtype="float32"
) -> tuple[Linear, Linear]:
    """Return (expand, contract), with F = `hidden`, by default 4C, between them.

    A gated activation has two columns for each of the F.
    """
    hidden, more = 4 * width if hidden is None else hidden, {"seed": seed, "dtype": dtype}
    check_sizes(width=width, hidden=hidden)
    columns = 2 * hidden if activation in GATED else hidden
    expand = Linear(width, columns, bias, activation, name=f"{name}.expand", **more)
    return expand, Linear(hidden, width, bias, name=f"{name}.contract", **more)


class Expert(FeedForward):
    """Y[R, C] = contract(activation(expand(X[R, C]))); arguments as of `hidden_layer`.

    >>> nn.Expert(8, dtype="float64")(Tensor(np.ones((5, 8)))).shape
    (5, 8)
    """

    def __init__(self, width, hidden=None, activation="gelu", bias=True, *, name="expert", **more):
        self.expand, self.contract = hidden_layer(
            width, hidden, activation, bias, name=name, **more
        )

    def forward(self, x: Tensor, randomness: Randomness | None = None) -> Tensor:
        return self.contract(self.expand(x))
