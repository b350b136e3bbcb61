"""Residual layers: a skip connection inside one layer (He et al. 2016)."""

from minidist.autograd import Tensor
from minidist.backend import Array
from minidist.errors import WrongInput, check_sizes
from minidist.nn.linear import Linear
from minidist.nn.module import Module, Sequential, as_layers
from minidist.rng import Randomness


class Residual(Module):
    """Y[..., C] = X[..., C] + f(X)  =>  dX = dY + (df/dX)^T dY,  f the composition of `layers`.

    He et al. 2016, equation 1; their block has a relu after the sum, this one has none.
    It is one layer: a pipeline cuts before or after it, and sends Y only.

    layers  a module, or a list of modules that follow each other

    >>> nn.Residual(nn.Linear(3, 3, dtype="float64"))(Tensor(np.ones((5, 3)))).shape
    (5, 3)
    """

    def __init__(self, layers: Module | list[Module]):
        self.inner = as_layers(layers)

    def forward(self, x: Tensor | Array, randomness: Randomness | None = None) -> Tensor:
        y = x
        for layer in self.inner:
            y = layer(y, randomness)
        if y.shape != x.shape:
            raise WrongInput(
                f"a residual layer adds f(X), {list(y.shape)}, to X, {list(x.shape)}; "
                "let f keep the shape"
            )
        return x + y


class ResidualMLP(Sequential):
    """x[B, C_in] -> logits[B, classes].  Layers: stem, `depth` residual layers, head.

    Each residual layer is X[B, C] + relu(X W_1 + b_1) W_2 + b_2, C the width. For the digits:
    ResidualMLP(64, 32, 4, 10).

    >>> len(nn.ResidualMLP(64, 32, depth=4, classes=10).layers)
    6
    """

    def __init__(self, inputs, width, depth, classes, seed=0, dtype="float32"):
        more = {"seed": seed, "dtype": dtype}
        check_sizes(least=0, depth=depth)
        stem = Linear(inputs, width, activation="relu", name="stem", **more)
        blocks = [
            Residual(
                [
                    Linear(width, width, activation="relu", name=f"blocks.{i}.first", **more),
                    Linear(width, width, name=f"blocks.{i}.second", **more),
                ]
            )
            for i in range(depth)
        ]
        super().__init__([stem, *blocks, Linear(width, classes, name="head", **more)])
