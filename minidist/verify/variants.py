"""A model as other programs compute it: {in words: change(model) -> whether it has any of that}."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import permutations

import numpy as np

from minidist import nn
from minidist.autograd import Tensor, functions
from minidist.autograd.attention import padded_attention
from minidist.interop.torch import Norm
from minidist.nn.attention import attend_to_all
from minidist.verify.strategies.cases import Case

Change = Callable[[nn.Module], bool]
ORDERS = ["".join(order) for order in permutations("QKV")][1:]  # of the thirds of QKV's columns


def variants_of(case: Case) -> Iterator[tuple[str, Case]]:
    """Yield (in words, the case with its model so changed); then so with PyTorch's gelu, too."""
    alone = [(words, [change]) for words, change in VARIANTS.items()]
    pairs = [(f"{words} and {ERF}", [*one, VARIANTS[ERF]]) for words, one in alone]
    for words, changes in [*alone, *pairs]:
        model = copy.deepcopy(case.model)
        there = [change(model) for change in changes]
        if all(there):
            yield words, replace(case, model=model)


def _all(kind, name: str, value, only: Callable[..., bool] = lambda layer: True) -> Change:
    """Return a change: set an attribute of all modules of a kind."""

    def change(model: nn.Module) -> bool:
        found = [layer for layer in model.modules(kind) if only(layer)]
        for layer in found:
            setattr(layer, name, value)
        return bool(found)

    return change


def _linear(name: str, value, activations: tuple[str, ...] = ("gelu",)) -> Change:
    return _all(nn.Linear, name, value, lambda layer: layer.activation in activations)


class ErfLinear(nn.Linear):
    def forward(self, x, randomness=None):
        return functions.gelu(functions.linear(x, self.weight, self.bias), "erf")


class SiluLinear(nn.Linear):
    """Y s, s = e^Y / (e^Y + 1), of a product Y."""

    def forward(self, x, randomness=None):
        y = functions.linear(x, self.weight, self.bias)
        pair = functions.concatenate([y, 0 * y]).reshape(2, *y.shape)
        return y * functions.softmax(pair, axis=0)[0]


class PostNormBlock(nn.Block):
    def forward(self, x, randomness=None):
        x = self.norm_1(x + self.attention(x, randomness))
        return self.norm_2(x + self.contract(self.expand(x)))


# Of QKV[3, B, H, T, D], as our model has it.


def _every_position(qkv: Tensor, randomness=None) -> Tensor:
    return padded_attention(qkv[0], qkv[1:], np.ones((qkv.shape[1], qkv.shape[3]), bool))


def _in_order(columns: str, qkv: Tensor, randomness=None) -> Tensor:
    return attend_to_all(qkv[[columns.index(letter) for letter in "QKV"]])


def _by_head(qkv: Tensor, randomness=None) -> Tensor:
    _, B, H, T, D = qkv.shape
    columns = qkv.transpose(1, 3, 0, 2, 4).reshape(B, T, H, 3, D)
    return attend_to_all(columns.transpose(3, 0, 2, 1, 4))


def _without_scale(qkv: Tensor, randomness=None) -> Tensor:
    scale = np.array([qkv.shape[-1] ** 0.5, 1, 1], qkv.dtype)
    return attend_to_all(qkv * scale.reshape(3, 1, 1, 1, 1))


_attend = partial(_all, nn.CausalSelfAttention, "attend")
ERF = 'the gelu is the erf form (PyTorch\'s default; approximate="tanh" is ours)'
VARIANTS: dict[str, Change] = {
    ERF: _linear("__class__", ErfLinear),
    "the attention has no causal mask": _attend(_every_position),
    "the scores are not divided by sqrt(D)": _attend(_without_scale),
    "QKV's columns are read as [H, 3, D], as in Megatron-LM, not [3, H, D]": _attend(_by_head),
    **{f"QKV's columns are read as {o}": _attend(partial(_in_order, o)) for o in ORDERS},
    "the activation is missing": _linear("activation", "identity", ("gelu", "relu")),
    "the activation is a relu, not a gelu": _linear("activation", "relu"),
    "the activation is a silu, not a gelu": _linear("__class__", SiluLinear),
    "the norms come after the sub-layers (post-norm)": _all(nn.Block, "__class__", PostNormBlock),
    "the norms have eps 1e-6, not 1e-5": _all(Norm, "eps", 1e-6),
    "the norms have eps 1e-12, not 1e-5": _all(Norm, "eps", 1e-12),
    "the batch norms used their running statistics (eval mode)": _all(
        nn.BatchNorm, "training", False
    ),
}
