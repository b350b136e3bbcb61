"""Reverse-mode differentiation on arrays. It knows no ranks.

Read `tensor.py`, `operators.py`, `functions.py`, `softmax.py`, then `recompute.py` and
`gradcheck.py`.
"""

from minidist.autograd import functions, operators, softmax
from minidist.autograd.gradcheck import gradcheck
from minidist.autograd.recompute import recompute
from minidist.autograd.tensor import Function, Tensor, functions_below, no_grad

__all__ = [
    "Function",
    "Tensor",
    "functions",
    "functions_below",
    "gradcheck",
    "no_grad",
    "operators",
    "recompute",
    "softmax",
]
