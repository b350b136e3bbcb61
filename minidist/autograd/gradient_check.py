"""Compare a backward pass with central differences.

For one random direction v per input and one random weighting u of the output, the vector-Jacobian
product must satisfy <vjp(u), v> = d/de <u, f(x + e v)> at e = 0. One number per input checks every
element at once, with probability one.
"""

from collections.abc import Callable

import numpy as np

from minidist.autograd.tensor import Tensor
from minidist.backend import Array, array_module, to_device, to_host
from minidist.errors import WrongInput


def gradcheck(
    function: Callable[..., Tensor],
    *arrays: Array,
    seed: int = 0,
    step: float = 1e-6,
    bound: float = 1e-6,
) -> float:
    """Compare every input's gradient with central differences; return the largest error.

    Raise AssertionError if an error is above the bound.

    function  maps tensors to one tensor, of any shape, smooth near the inputs
    arrays    float64 arrays on the host or on a GPU
    bound     upper bound of |vjp - difference| / max(1, |difference|)
    """
    random = np.random.default_rng(seed)
    device = "cpu" if array_module(*arrays) is np else "gpu"

    def like(x):
        return to_device(random.standard_normal(x.shape), device)

    for i, x in enumerate(arrays):
        if x.dtype != np.float64:
            raise WrongInput(f"input {i} is {x.dtype}; differences need float64")
    inputs = [Tensor(x, requires_grad=True) for x in arrays]
    outputs = function(*inputs)
    weights = like(outputs)
    outputs.backward(weights)
    worst = 0.0
    for i, x in enumerate(inputs):
        direction = like(x)
        above, below = (
            weighted(function, weights, [*arrays[:i], arrays[i] + d * direction, *arrays[i + 1 :]])
            for d in (step, -step)
        )
        product = 0.0 if x.grad is None else float(to_host((x.grad * direction).sum()))
        difference = (above - below) / (2 * step)
        error = abs(product - difference) / max(1.0, abs(difference))
        worst = max(worst, error)
        assert error <= bound, (
            f"input {i} of shape {list(x.shape)}: backward says {product:.9g}, "
            f"central differences say {difference:.9g}, error {error:.2g} is above {bound:.2g}"
        )
    return worst


def weighted(function: Callable[..., Tensor], weights: Array, arrays: list[Array]) -> float:
    """Return <u, f(x)>."""
    return float((function(*map(Tensor, arrays)).data * weights).sum())
