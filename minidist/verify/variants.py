"""A model as other programs compute it: {in words: change(model) -> whether it has any of that}."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import permutations
from types import MethodType
from typing import get_args

import numpy as np

from minidist import nn
from minidist.autograd import Tensor, functions
from minidist.autograd.attention import RepeatedHeads, padded_attention
from minidist.nn.attention import attend_to_all
from minidist.verify.interop.torch import Norm
from minidist.verify.strategies.cases import Case

Attention = nn.CausalSelfAttention | nn.GroupedQueryAttention
Change = Callable[[nn.Module], bool]
Columns = Callable[[Tensor], Tensor]
ORDERS = ["".join(order) for order in permutations("QKV")][1:]  # of the thirds of QKV's columns
METHODS = "forward", "heads_of"
EPS = [float(f"1e-{digits}") for digits in range(3, 13)]


def variants_of(case: Case) -> Iterator[tuple[str, Case]]:
    """Yield (in words, the case with its model so changed); then so with what is usual, too."""
    norms = (norm for kind in get_args(Norm) for norm in case.model.modules(kind))
    eps = next((norm.eps for norm in norms), 1e-5)
    single = [(name, [change]) for name, change in (MODELS | _eps(eps)).items()]
    pairs = [
        (f"{name} and {usual}", [*changes, change])
        for usual, change in USUAL.items()
        for name, changes in single
        if name != usual
    ]
    for name, changes in [*single, *pairs]:
        model = copy.deepcopy(case.model)
        changed = [change(model) for change in changes]
        if all(changed):
            yield name, replace(case, model=model)


def _all(kind, name: str, value, only: Callable[..., bool] = lambda layer: True) -> Change:
    """Return a change: set an attribute, or a method, of all modules of a kind."""

    def change(model: nn.Module) -> bool:
        layers = [layer for layer in model.modules(kind) if only(layer)]
        for layer in layers:
            setattr(layer, name, MethodType(value, layer) if name in METHODS else value)
        return bool(layers)

    return change


def _eps(ours: float) -> dict[str, Change]:
    text = {eps: f"{eps:.6g}".replace("e-0", "e-") for eps in (*EPS, ours)}
    return {
        f"the norms have eps {text[eps]}, not {text[ours]}": _all(Norm, "eps", eps)
        for eps in EPS
        if eps != ours
    }


# Of a block: its activation, its gate, its norms.


def _activated(f: Columns, *activations: str) -> Change:
    """Return a change: f comes after linear layers that have one of these activations."""

    def forward(layer: nn.Linear, x, randomness=None):
        return f(functions.linear(x, layer.weight, layer.bias))

    return _all(nn.Linear, "forward", forward, lambda layer: layer.activation in activations)


def _gated(f: Columns, first: int = 0) -> Change:
    """Return a change: a gate f(A) B of the halves of the columns; first: which one A is."""

    def gate(y: Tensor) -> Tensor:
        F = y.shape[-1] // 2
        halves = y[..., :F], y[..., F:]
        return f(halves[first]) * halves[1 - first]

    return _activated(gate, "swiglu")


def _same(y: Tensor) -> Tensor:
    return y


def _silu(y: Tensor) -> Tensor:
    return functions.swiglu(functions.concatenate([y, 0 * y + 1], axis=-1))


def _with_mean(norm: nn.RMSNorm, x, randomness=None):
    return functions.layer_norm(x, norm.gain, Tensor(np.zeros_like(norm.gain.data)), norm.eps)


def _post_norm(block: nn.Block, x, randomness=None):
    x = block.norm_1(x + block.attention(x, randomness))
    return block.norm_2(x + block.contract(block.expand(x)))


# Of QKV[G + 2, B, K, T, D], as our attention has it: G is 1 where each query has its own keys.


def _every_position(qkv: Tensor, randomness=None) -> Tensor:
    qkv = RepeatedHeads()(qkv) if qkv.shape[0] > 3 else qkv
    return padded_attention(qkv[0], qkv[1:], np.ones((qkv.shape[1], qkv.shape[3]), bool))


def _without_scale(qkv: Tensor, randomness=None) -> Tensor:
    scale = np.ones((len(qkv.data), 1, 1, 1, 1), qkv.dtype)
    scale[:-2] = qkv.shape[-1] ** 0.5
    return attend_to_all(qkv * scale)


def _in_order(columns: str, qkv: Tensor, randomness=None) -> Tensor:
    return attend_to_all(qkv[[columns.index(letter) for letter in "QKV"]])


def _by_head(qkv: Tensor, randomness=None) -> Tensor:
    _, B, H, T, D = qkv.shape
    columns = qkv.transpose(1, 3, 0, 2, 4).reshape(B, T, H, 3, D)
    return attend_to_all(columns.transpose(3, 0, 2, 1, 4))


def _in_turn(qkv: Tensor, randomness=None) -> Tensor:
    """Query h = k G + g reads keys h % K: it is put where queries of these keys are."""
    blocks, B, K, T, D = qkv.shape
    G = blocks - 2
    heads = qkv[:-2].transpose(1, 2, 0, 3, 4).reshape(B, G, K, T, D)
    mixed = attend_to_all(functions.concatenate([heads.transpose(1, 0, 2, 3, 4), qkv[-2:]]))
    return mixed.reshape(B, K, G, T, D).transpose(0, 2, 1, 3, 4).reshape(B, K * G, T, D)


# Of a Llama's queries, keys and values, before the first two are turned by their positions.


def _read(change: Columns) -> Change:
    """Return a change of QKV[G + 2, B, K, T, D], as it is read from the columns."""

    def heads_of(layer: nn.GroupedQueryAttention, q, kv):
        return change(nn.GroupedQueryAttention.heads_of(layer, q, kv))

    return _all(nn.GroupedQueryAttention, "heads_of", heads_of)


def _neighbours(qkv: Tensor) -> Tensor:
    """Turning columns i and i + D/2 of these is turning columns 2 i and 2 i + 1 of QKV."""
    order = np.arange(qkv.shape[-1]).reshape(-1, 2).T.reshape(-1)
    return functions.concatenate([qkv[:-1][..., order], qkv[-1:]])


def _values_first(qkv: Tensor) -> Tensor:
    return functions.concatenate([qkv[:-2], qkv[-1:], qkv[-2:-1]])


def _unturned(layer: nn.GroupedQueryAttention, x, randomness=None):
    mixed = layer.attend(layer.heads_of(*layer.project(x)), randomness).transpose(0, 2, 1, 3)
    return layer.output(mixed.reshape(*x.shape[:2], -1))


ERF = 'the gelu is the erf form (PyTorch\'s default; approximate="tanh" is ours)'
RMS_EPS = "RMSNorm has PyTorch's default eps (2.2e-16 in float64, 1.2e-7 in float32)"
_erf = partial(functions.gelu, form="erf")
_grouped, _one_product = (
    partial(_all, kind, "attend") for kind in (nn.GroupedQueryAttention, nn.CausalSelfAttention)
)
_theta = partial(_all, nn.GroupedQueryAttention, "theta")
USUAL = {ERF: _activated(_erf, "gelu"), RMS_EPS: _all(nn.RMSNorm, "eps", float(np.finfo("f8").eps))}
MODELS: dict[str, Change] = {
    **USUAL,
    "the attention has no causal mask": _all(Attention, "attend", _every_position),
    "the scores are not divided by sqrt(D)": _all(Attention, "attend", _without_scale),
    "QKV's columns are read as [H, 3, D], as in Megatron-LM, not [3, H, D]": _one_product(_by_head),
    **{f"QKV's columns are read as {o}": _one_product(partial(_in_order, o)) for o in ORDERS},
    "query h reads keys h % K (repeat), not h // G (repeat_interleave)": _grouped(_in_turn),
    "keys and values are exchanged": _read(_values_first),
    "there are no rotary positions": _all(nn.GroupedQueryAttention, "forward", _unturned),
    "rotary positions turn neighbours, not the halves of a head": _read(_neighbours),
    **{f"theta is {theta:.0f}": _theta(theta) for theta in (1e4, 5e5, 1e6)},
    "the activation is missing": _activated(_same, "gelu", "relu"),
    "the activation is a relu, not a gelu": _activated(functions.relu, "gelu"),
    "the activation is a silu, not a gelu": _activated(_silu, "gelu"),
    "the gate is a gelu, not a silu": _gated(_erf),
    "the gate is a gelu in its tanh form, not a silu": _gated(functions.gelu),
    "the gate is a relu, not a silu": _gated(functions.relu),
    "the gate has no activation": _gated(_same),
    "gate and up are exchanged": _gated(_silu, first=1),
    "the norms subtract the mean (layer norm), not RMSNorm": _all(
        nn.RMSNorm, "forward", _with_mean
    ),
    "the norms come after the sub-layers (post-norm)": _all(nn.Block, "forward", _post_norm),
    "the batch norms used their running statistics (eval mode)": _all(
        nn.BatchNorm, "training", False
    ),
}
VARIANTS = MODELS | _eps(1e-5)
