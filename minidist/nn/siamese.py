"""A siamese network: two branches that share their weights, and a join that compares them.

Bromley et al. 1993: two identical sub-networks, joined at their outputs. Koch et al. 2015, section
3: the join weights the distances between the two embeddings, element by element. Koch et al. take
|H_0 - H_1| and a sigmoid. We take squares, which are smooth where two embeddings are equal; with
two classes, a softmax of the logits is a sigmoid of their difference.
"""

from minidist.autograd import Tensor
from minidist.backend import Array
from minidist.errors import WrongInput
from minidist.nn.linear import Linear
from minidist.nn.mlp import linear_layers
from minidist.nn.module import Module
from minidist.rng import Randomness


class Siamese(Module):
    """x[B, 2, C0] -> logits[B, classes] = (H_0 - H_1)^2 W + b,  H_i[B, E] = branch(x[:, i]).

    The branch is an MLP with the given sizes, the last of them E, and an activation after every
    layer (the difference would cancel a bias at the end). Both halves of a pair use the same
    parameters, and both contribute to their gradients; the order within a pair does not matter.

    branch  its layers, in order
    join    Linear(E, classes)

    >>> nn.Siamese([64, 16, 8], dtype="float64")(np.ones((5, 2, 64))).shape
    (5, 2)
    """

    def __init__(self, sizes, classes=2, activation="relu", seed=0, dtype="float32"):
        options = {"seed": seed, "dtype": dtype}
        self.branch = linear_layers(sizes, activation, activation, name="branch", **options)
        self.join = Linear(sizes[-1], classes, name="join", **options)
        self.flatten()

    def embed(self, x: Tensor | Array, randomness: Randomness | None = None) -> Tensor:
        """Run one branch: x[B, C0] -> H[B, E]."""
        for layer in self.branch:
            x = layer(x, randomness)
        return x

    def compare(self, h0: Tensor, h1: Tensor) -> Tensor:
        """Run the join: H_0[B, E], H_1[B, E] -> logits[B, classes]."""
        return self.join((h0 - h1) ** 2)

    def forward(self, x: Tensor | Array, randomness: Randomness | None = None) -> Tensor:
        check_pairs(x)
        return self.compare(self.embed(x[:, 0], randomness), self.embed(x[:, 1], randomness))


def check_pairs(x: Tensor | Array) -> None:
    if x.ndim < 3 or x.shape[1] != 2:
        raise WrongInput(f"pairs have the shape [B, 2, ...], not {list(x.shape)}")
