"""Reverse-mode differentiation on arrays. It knows nothing about ranks.

`tensor.py` and `operators.py` are the engine. Then read `functions.py`, `attention.py` with
`products.py`, `convolution.py`, `batch_norm.py`, `losses.py`, `deferred.py`, `recomputation.py` and
`gradient_check.py`. At a first reading skip `checks.py` (what is refused), `recording.py`,
`number_format.py` with `eight_bits.py`, and kernels/ (functions for a GPU).
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
from minidist.autograd.recording import no_grad
from minidist.autograd.tensor import Function, Tensor, functions_below

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
