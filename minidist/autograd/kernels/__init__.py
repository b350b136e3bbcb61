"""Functions with two texts: NumPy for arrays on the host, C for arrays on a GPU, in few launches.

The NumPy text is the definition. It is beside the C text, or in the Function that uses it. The C
text computes the same in another order: a GPU sums in a tree, rounds a b + c once, and in float32
takes numbers below 1e-38 for 0. Both compute in float32 or float64: half precision is widened.
Read `launch.py`, then any of the others.
"""

from minidist.autograd.kernels.launch import Elementwise, Reduction
from minidist.autograd.kernels.layers import (
    dropout,
    first_of,
    gelu,
    gelu_backward,
    gelu_erf,
    gelu_erf_backward,
    layer_norm,
    layer_norm_backward,
    relu,
    relu_backward,
    rows_of,
    sum_into_rows,
)
from minidist.autograd.kernels.softmax import (
    causal_softmax,
    cross_entropy,
    cross_entropy_backward,
    mean_columns,
    padded_softmax,
    recompute_probabilities,
    scores_backward,
    sum_columns,
    sum_rows,
    sum_rows_of_product,
)

__all__ = [
    "Elementwise",
    "Reduction",
    "causal_softmax",
    "cross_entropy",
    "cross_entropy_backward",
    "dropout",
    "first_of",
    "gelu",
    "gelu_backward",
    "gelu_erf",
    "gelu_erf_backward",
    "layer_norm",
    "layer_norm_backward",
    "mean_columns",
    "padded_softmax",
    "recompute_probabilities",
    "relu",
    "relu_backward",
    "rows_of",
    "scores_backward",
    "sum_columns",
    "sum_into_rows",
    "sum_rows",
    "sum_rows_of_product",
]
