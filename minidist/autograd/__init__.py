"""Reverse-mode differentiation on arrays. It knows nothing about ranks.

Read `tensor.py`, `operators.py`, `functions.py`, `attention.py` with `products.py`,
`convolution.py`, `batch_norm.py`, `losses.py`, then `deferred.py`, `recomputation.py` and
`gradient_check.py`.
"""

from minidist.autograd import (
    attention,
    batch_norm,
    convolution,
    deferred,
    functions,
    losses,
    operators,
)
from minidist.autograd.gradient_check import gradcheck
from minidist.autograd.recomputation import recompute
from minidist.autograd.tensor import Function, Tensor, functions_below, no_grad

Tensor.ops = operators

__all__ = [
    "Function",
    "Tensor",
    "attention",
    "batch_norm",
    "convolution",
    "deferred",
    "functions",
    "functions_below",
    "gradcheck",
    "losses",
    "no_grad",
    "operators",
    "recompute",
]
