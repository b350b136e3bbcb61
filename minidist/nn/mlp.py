"""Linear layers that follow each other: the feed-forward part of a block, an MLP, a residual MLP.

Vaswani et al., Attention Is All You Need (2017), section 3.3, with gelu in place of relu, or with a
gate (Shazeer, GLU Variants Improve Transformer, 2020). Residual layers: He et al. 2016.
"""

from minidist.autograd import Tensor
from minidist.backend import Array
from minidist.errors import WrongInput, check_sizes
from minidist.nn.linear import GATED, Linear, check_activation
from minidist.nn.module import Module, Sequential, as_layers
from minidist.rng import Randomness


class MLP(Sequential):
    """x[B, C0] -> logits[B, Cn]: linear layers, the activation after all but the last.

    >>> model = nn.MLP([64, 32, 10], "gelu", dtype="float64")
    >>> model(np.zeros((5, 64))).shape, [len(layer.parameters()) for layer in model.layers]
    ((5, 10), [2, 2])
    """

    def __init__(self, sizes, activation="relu", seed=0, dtype="float32"):
        options = {"name": "layers", "seed": seed, "dtype": dtype}
        super().__init__(linear_layers(sizes, activation, "identity", **options))


def linear_layers(sizes, activation, last, *, name, seed=0, dtype="float32") -> list[Linear]:
    """Return linear layers between these sizes, named `name`.0, `name`.1, and so on.

    `last` is the activation after the last one.
    """
    if len(sizes) < 2:
        raise WrongInput(f"an MLP needs an input and an output size, got {list(sizes)}")
    check_activation(activation)  # also where no layer is to have it
    kinds = [activation] * (len(sizes) - 2) + [last]
    return [
        Linear(c_in, c_out, activation=kind, name=f"{name}.{i}", seed=seed, dtype=dtype)
        for i, (c_in, c_out, kind) in enumerate(zip(sizes, sizes[1:], kinds, strict=False))
    ]


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
    hidden, options = 4 * width if hidden is None else hidden, {"seed": seed, "dtype": dtype}
    check_sizes(width=width, hidden=hidden)
    columns = 2 * hidden if activation in GATED else hidden
    expand = Linear(width, columns, bias, activation, name=f"{name}.expand", **options)
    return expand, Linear(hidden, width, bias, name=f"{name}.contract", **options)


class Expert(FeedForward):
    """Y[R, C] = contract(activation(expand(X[R, C]))); arguments as of `hidden_layer`.

    >>> nn.Expert(8, dtype="float64")(Tensor(np.ones((5, 8)))).shape
    (5, 8)
    """

    def __init__(
        self, width, hidden=None, activation="gelu", bias=True, *, name="expert", **options
    ):
        self.expand, self.contract = hidden_layer(
            width, hidden, activation, bias, name=name, **options
        )

    def forward(self, x: Tensor, randomness: Randomness | None = None) -> Tensor:
        return self.contract(self.expand(x))


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
        options = {"seed": seed, "dtype": dtype}
        check_sizes(least=0, depth=depth)
        stem = Linear(inputs, width, activation="relu", name="stem", **options)
        blocks = [
            Residual(
                [
                    Linear(width, width, activation="relu", name=f"blocks.{i}.first", **options),
                    Linear(width, width, name=f"blocks.{i}.second", **options),
                ]
            )
            for i in range(depth)
        ]
        super().__init__([stem, *blocks, Linear(width, classes, name="head", **options)])
