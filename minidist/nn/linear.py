"""A linear layer, with an activation after it if one is named.

Y = f(X W + b): Rumelhart, Hinton and Williams (Nature, 1986), equations 1 and 2, for a whole batch.
Its adjoint is Linear in autograd/functions.py.
"""

import math

from minidist.autograd import Tensor, functions
from minidist.errors import check_name, check_sizes
from minidist.nn.module import Module, constant, draw
from minidist.rng import Randomness

ACTIVATIONS = {
    "identity": lambda x: x,
    "relu": functions.relu,
    "gelu": functions.gelu,
    "swiglu": functions.swiglu,
}
GAINS = {"identity": 1.0, "relu": math.sqrt(2), "gelu": math.sqrt(2), "swiglu": 1.0}
GATED = {"swiglu"}  # whose columns are [2, F]: they give F outputs


def check_activation(name: str) -> None:
    check_name("activation", name, ACTIVATIONS)


class Linear(Module):
    """Y[..., C_out] = activation(X[..., C_in] W[C_in, C_out] + b[C_out]).

    The weight is normal with variance gain^2 / C_in (He et al. 2015, equation 10: gain^2 = 2 before
    a relu), the bias 0. `name` is the global name of the layer: two layers of one shape are drawn
    differently because their names differ. PyTorch keeps W as [C_out, C_in]:
    verify/interop/torch.py.

    activation  "identity"; "relu"; "gelu": X/2 (1 + tanh(sqrt(2/pi) (X + 0.044715 X^3))), the form
                of Hendrycks and Gimpel 2016 that GPT-2 uses; "swiglu": of C_out = 2F columns, gates
                first, F outputs: see functions.SwiGLU

    >>> nn.Linear(3, 2, activation="gelu", dtype="float64")(np.ones((5, 3))).shape
    (5, 2)
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        bias=True,
        activation="identity",
        *,
        name="linear",
        seed=0,
        dtype="float32",
    ):
        check_activation(activation)
        check_sizes(inputs=inputs, outputs=outputs)
        self.activation = activation
        scale = GAINS[activation] / math.sqrt(inputs)
        self.weight = draw(f"{name}.weight", (inputs, outputs), scale, seed, dtype)
        self.bias = constant(f"{name}.bias", (outputs,), 0, dtype) if bias else None

    def forward(self, x: Tensor, randomness: Randomness | None = None) -> Tensor:
        return ACTIVATIONS[self.activation](functions.linear(x, self.weight, self.bias))
