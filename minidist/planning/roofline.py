"""The seconds of a Transformer's matrix products on one rank: the slower of two rates each.

Williams, Waterman, Patterson, Roofline: An Insightful Visual Performance Model for Multicore
Architectures (2009). A product Y[R, F] = X[R, C] W[C, F] of R rows does 2 R C F operations and
moves R C + C F + R F numbers, so that it takes at least

    max(2 R C F / flops, itemsize (R C + C F + R F) / memory bandwidth)

    e.g. R = 2048, C = F = 12288 at 312 TFLOP/s and 2 TB/s:  2.0 ms and 0.2 ms, so 2.0 ms

Backward has two products of the same three matrices, dX = dY W^T and dW = X^T dY, which take as
long each. Attention's products have no weights: both adjoints are part of dX's half. What is not a
product (norms, gelu, softmax, the optimizer) counts as no time.
"""

from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from minidist.planning.costs.transformer_size import TransformerSize
from minidist.planning.plan import Machine, Plan


class Product(NamedTuple):
    """`count` products of [rows, inner] with [inner, columns], done by one operation."""

    rows: int
    inner: int
    columns: int
    count: int = 1

    @property
    def flops(self) -> int:
        return 2 * self.count * self.rows * self.inner * self.columns

    def seconds(self, machine: Machine, itemsize: int) -> float:
        r, c, f = self.rows, self.inner, self.columns
        moved = itemsize * self.count * (r * c + c * f + r * f)
        return machine.overhead + max(self.flops / machine.flops, moved / machine.memory_bandwidth)


@dataclass(frozen=True)
class Times:
    """Seconds of forward, and of the two halves of backward, of one micro-batch."""

    forward: float = 0
    inputs: float = 0
    weights: float = 0

    def __add__(self, other: "Times") -> "Times":
        return Times(
            self.forward + other.forward, self.inputs + other.inputs, self.weights + other.weights
        )

    def __mul__(self, n: float) -> "Times":
        return Times(n * self.forward, n * self.inputs, n * self.weights)

    @property
    def total(self) -> float:
        return self.forward + self.inputs + self.weights


def block_products(size: TransformerSize, plan: Plan, b: int) -> tuple[list, list]:
    """Return one block's products with weights, and attention's two, for b examples on one rank.

    Heads and columns that tp does not divide, and positions that cp does not, are rounded up. Rows
    are assumed to be spread evenly over experts: a rank has E/ep of them.
    """
    C, tp = size.width, plan.tp
    held = ceil(size.sequence / plan.cp)
    rows, heads, D = b * held, ceil(size.heads / tp), size.width // size.heads
    weights = [Product(rows, C, 3 * heads * D), Product(rows, heads * D, C)]
    F, own, n = ceil(4 * C / tp), rows, 1
    if size.experts:
        n = ceil(size.experts / plan.ep)
        own = ceil(rows * size.top_k / n)
        weights.append(Product(rows, C, size.experts))
    weights += [Product(own, C, F, n), Product(own, F, C, n)]
    attention = [
        Product(held, D, size.sequence, b * heads),
        Product(held, size.sequence, D, b * heads),
    ]
    return weights, attention


def head_product(size: TransformerSize, plan: Plan, b: int) -> Product:
    """Return the product that gives the logits, [B T/cp, V/tp]."""
    return Product(b * ceil(size.sequence / plan.cp), size.width, ceil(size.vocab / plan.tp))


def attention_seconds(size: TransformerSize, plan: Plan, machine: Machine, b: int) -> float:
    """Return the seconds of attention's two products of one block, forward."""
    return sum(p.seconds(machine, plan.itemsize) for p in block_products(size, plan, b)[1])


def block_times(size: TransformerSize, plan: Plan, machine: Machine, b: int) -> Times:
    """Return the seconds of one block's products.

    Before its backward, "selective" computes attention's products again, "full" all of them.
    """
    weights, attention = (
        sum(p.seconds(machine, plan.itemsize) for p in products)
        for products in block_products(size, plan, b)
    )
    again = {"none": 0, "selective": attention, "full": weights + attention}[plan.recompute]
    return Times(weights + attention, weights + 2 * attention + again, weights)


def head_times(size: TransformerSize, plan: Plan, machine: Machine, b: int) -> Times:
    one = head_product(size, plan, b).seconds(machine, plan.itemsize)
    return Times(one, one, one)
