"""A multi-layer perceptron."""

from minidist.errors import WrongInput
from minidist.nn.linear import Linear, check_activation
from minidist.nn.module import Sequential


class MLP(Sequential):
    """x[B, C0] -> logits[B, Cn]: linear layers, the activation after all but the last.

    >>> model = nn.MLP([64, 32, 10], "gelu", dtype="float64")
    >>> model(np.zeros((5, 64))).shape, [len(layer.parameters()) for layer in model.layers]
    ((5, 10), [2, 2])
    """

    def __init__(self, sizes, activation="relu", seed=0, dtype="float32"):
        more = {"name": "layers", "seed": seed, "dtype": dtype}
        super().__init__(linear_layers(sizes, activation, "identity", **more))


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
