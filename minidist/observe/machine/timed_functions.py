"""The functions whose seconds are measured one by one, and their sizes.

The size of a product is its multiply-adds, of any other function its numbers. Letters: C width, H
heads, T positions of what is timed; `rows` rows of C numbers.
"""

from collections.abc import Callable
from functools import partial

import numpy as np

from minidist import nn
from minidist.attention_scores import computed_scores
from minidist.autograd import Tensor, functions
from minidist.autograd.attention import causal_attention
from minidist.autograd.convolution import convolution
from minidist.comm import Group
from minidist.context_parallel.ring_attention import RingAttention
from minidist.nn.mixture_of_experts import Balance, Combine
from minidist.pieces import Positions

C, H, T = 64, 8, 32


def tensor(*shape: int, dtype: str = "float64") -> Tensor:
    return Tensor(np.full(shape, 0.5, dtype), requires_grad=True)


def _linear(rows: int, F: int, dtype: str) -> tuple[int, Callable]:
    x, w, b = tensor(rows, C, dtype=dtype), tensor(C, F, dtype=dtype), tensor(F, dtype=dtype)
    return rows * C * F, lambda: functions.linear(x, w, b)


def _norm(rows: int, dtype: str) -> tuple[int, Callable]:
    x, g, b = tensor(rows, C, dtype=dtype), tensor(C, dtype=dtype), tensor(C, dtype=dtype)
    return rows * C, lambda: functions.layer_norm(x, g, b)


def _attention(rows: int, dtype: str) -> tuple[int, Callable]:
    B, D = rows // T, C // H
    qkv = tensor(B, T, 3, H, D, dtype=dtype).transpose(2, 0, 3, 1, 4).detach()
    qkv = Tensor(qkv.data, requires_grad=True)
    return 2 * B * H * computed_scores(T) * D, lambda: causal_attention(qkv)


def _loss(rows: int, dtype: str) -> tuple[int, Callable]:
    logits, targets = tensor(rows, 2 * C, dtype=dtype), np.zeros(rows, int)
    return rows * 2 * C, lambda: nn.cross_entropy(logits, targets)


def _embedding(rows: int, dtype: str) -> tuple[int, Callable]:
    w, tokens = tensor(2 * C, C, dtype=dtype), np.arange(rows) % (2 * C)
    return rows * C, lambda: functions.embedding(tokens, w)


def _convolution(rows: int, dtype: str) -> tuple[int, Callable]:
    images, own = rows // 8, 16
    x, w = tensor(images, own, 8, 8, dtype=dtype), tensor(own, own, 3, 3, dtype=dtype)
    return windowed(images * 64 * own * own * 9, own), lambda: convolution(x, w, padding=1)


def windowed(work: int, filters: int) -> int:
    """Return the size of a convolution: its multiply-adds, and 16 for each number of its columns.

    A column's number is copied once, and meets every filter (see autograd/convolution.py).
    """
    return work + 16 * work // filters


def _batch_norm(rows: int, dtype: str) -> tuple[int, Callable]:
    norm, x = nn.BatchNorm(16, dtype=dtype), tensor(rows // 8, 16, 8, 8, dtype=dtype)
    return x.size, lambda: norm(x)


def _ring(rows: int, dtype: str, group: Group) -> tuple[int, Callable]:
    """One tile of ring attention: the queries and the keys of one run of positions."""
    t, D = max(1, rows // 16), C // H
    qkv, held = tensor(3, 16, H, t, D, dtype=dtype), [Positions(((0, t),), t)]
    return 2 * 16 * H * D * t * t, lambda: RingAttention(group, held)(qkv)


def _decision(rows: int, dtype: str) -> tuple[int, Callable]:
    """What a mixture decides about its rows: who goes where, in what order, and the balance."""
    E, mixture = 4, nn.MixtureOfExperts(C, 4, dtype=dtype)
    p = tensor(rows // T, T, E, dtype=dtype)

    def decide():
        routing, weights = mixture.decide(p.data, None)
        routing.order()
        return Balance(weights)(p)

    return p.size, decide


def _combine(rows: int, dtype: str) -> tuple[int, Callable]:
    x, g, token = tensor(rows, C, dtype=dtype), tensor(rows, 1, dtype=dtype), np.arange(rows)
    return rows * C, lambda: Combine(token, rows)(x, g)


def _of_numbers(apply: Callable) -> Callable:
    def make(rows: int, dtype: str) -> tuple[int, Callable]:
        x = tensor(rows, 4 * C, dtype=dtype)
        return rows * 4 * C, lambda: apply(x)

    return make


def functions_timed(rows: tuple[int, ...], alone: Group) -> list[tuple[str, str, int, Callable]]:
    """Return (kind, dtype, size, function to call) of all that is timed; alone: a group of one."""
    makers: dict[str, Callable[[int, str], tuple[int, Callable]]] = {
        "LayerNorm": _norm,
        "CausalAttention": _attention,
        "CrossEntropy": _loss,
        "Embedding": _embedding,
        "GeluTanh": _of_numbers(functions.gelu),
        "Relu": _of_numbers(functions.relu),
        "Add": _of_numbers(lambda x: x + x),
        "Reshape": _of_numbers(lambda x: x.reshape(-1)),
        "Convolution": _convolution,
        "RingAttention": partial(_ring, group=alone),
        "Balance": _decision,
        "Combine": _combine,
        "BatchNorm": _batch_norm,
    }
    found = []
    for n in rows:
        found += [("Linear", d, *_linear(n, 4 * C, d)) for d in ("float64", "float16")]
        for kind, make in makers.items():
            half = kind in ("LayerNorm", "CausalAttention", "CrossEntropy", "GeluTanh", "Add")
            for dtype in ("float64", "float16") if half else ("float64",):
                found.append((kind, dtype, *make(n, dtype)))
    return found
