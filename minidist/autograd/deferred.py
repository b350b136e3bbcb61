"""Parameter gradients that are computed later, several batches' gradients as one product.

Another stage waits for dX, so backward computes it at once. dW may wait
(`Tensor.backward(deferred=list)`), and several passes' deferred products can be computed as one:

    dW = sum_i X_i^T dY_i = [X_1; X_2; ...]^T [dY_1; dY_2; ...]

One product of long factors is faster than the sum of many short ones, because the weight, the
largest array here, is written only once.
"""

from collections.abc import Callable, Iterable
from typing import Protocol

from minidist.backend import Array, array_module, matmul

Gradient = Array | Callable[..., Array] | None  # a thunk f(out=None) computes it later


class Leaf(Protocol):
    """Where a contribution is added; a Tensor. Its hooks are called with it when all are in."""

    hooks: tuple[Callable, ...]

    def accumulate(self, contribution: Gradient) -> None: ...


class Product:
    """The gradient A^T B[I, J] of a weight, computed when it is called; A[N, I], B[N, J]."""

    def __init__(self, a: Array, b: Array):
        self.a, self.b = a, b

    def __call__(self, out: Array | None = None) -> Array:
        return matmul(self.a.T, self.b, out=out)


def sum_of(products: list[Product]) -> Product:
    """Return the sum of products as one product."""
    xp = array_module(products[0].a)
    return Product(xp.concatenate([q.a for q in products]), xp.concatenate([q.b for q in products]))


def deliver(leaf: Leaf, contribution: Gradient, remaining: dict) -> None:
    """Add a contribution to `leaf.grad`; call the leaf's hooks if none is `remaining` for it."""
    if contribution is not None:
        leaf.accumulate(contribution)
    left = remaining[leaf] = remaining[leaf] - 1
    if left == 0:
        for hook in leaf.hooks:
            hook(leaf)


class Deferred:
    """A contribution to a leaf's gradient that is not computed yet; call it once to deliver it."""

    __slots__ = ("contribution", "leaf", "remaining")

    def __init__(self, leaf: Leaf, contribution: Gradient, remaining: dict):
        self.leaf, self.contribution, self.remaining = leaf, contribution, remaining

    def __call__(self) -> None:
        contribution, self.contribution = self.contribution, None
        deliver(self.leaf, contribution, self.remaining)


def compute(deferred: Iterable[Deferred]) -> None:
    """Call them all; compute what several passes deferred for one weight as one product."""
    deferred = list(deferred)
    waiting: dict[Leaf, dict[Deferred, Product]] = {}
    for d in deferred:
        if isinstance(d.contribution, Product):
            waiting.setdefault(d.leaf, {})[d] = d.contribution
    for product_of in waiting.values():
        first, *others = product_of
        if others:
            first.contribution = sum_of(list(product_of.values()))
            for d in others:
                d.contribution = None
    for d in deferred:
        d()
