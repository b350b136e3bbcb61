"""The feed-forward part of a block: one hidden layer, four times as wide as its ends.

Vaswani et al., Attention Is All You Need (2017), section 3.3, with gelu in place of relu.
"""

from minidist.autograd import Tensor
from minidist.nn.linear import Linear
from minidist.nn.module import Module
from minidist.rng import Randomness


class FeedForward(Module):
    """A module with an `expand` and a `contract`, which widen X to F and back.

    A strategy may replace them by layers that hold parts.
    """

    expand: Module
    contract: Module

    @property
    def feed_forwards(self) -> "list[FeedForward]":
        """Return the parts of a block that have expand and contract."""
        return [self]


class Expert(FeedForward):
    """Y[R, C] = contract(gelu(expand(X[R, C])));  F = 4C is the width between them.

    >>> nn.Expert(8, dtype="float64")(Tensor(np.ones((5, 8)))).shape
    (5, 8)
    """

    def __init__(self, width: int, *, name="expert", seed=0, dtype="float32"):
        more = {"seed": seed, "dtype": dtype}
        self.expand = Linear(width, 4 * width, activation="gelu", name=f"{name}.expand", **more)
        self.contract = Linear(4 * width, width, name=f"{name}.contract", **more)

    def forward(self, x: Tensor, randomness: Randomness | None = None) -> Tensor:
        return self.contract(self.expand(x))
