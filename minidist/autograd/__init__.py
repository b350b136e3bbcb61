"""Reverse-mode differentiation on arrays. It knows no ranks.

Read `tensor.py`, `operators.py`, `functions.py`, `attention.py`, `losses.py`, then `recompute.py`
and `gradcheck.py`.
"""

from minidist.autograd import attention, functions, losses, operators
from minidist.autograd.gradcheck import gradcheck
from minidist.autograd.recompute import recompute
from minidist.autograd.tensor import Function, Tensor, functions_below, no_grad

__all__ = [
    "Function",
    "Tensor",
    "attention",
    "functions",
    "functions_below",
    "gradcheck",
    "losses",
    "no_grad",
    "operators",
    "recompute",
]
