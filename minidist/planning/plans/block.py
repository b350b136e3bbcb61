"""One block of one micro-batch on one rank: seconds of its products, and of what travels.

A product takes the slower of two rates (Williams, Waterman, Patterson, Roofline: An Insightful
Visual Performance Model for Multicore Architectures, 2009): Y[R, F] = X[R, C] W[C, F] does 2 R C F
operations and moves R C + C F + R F numbers, so that it takes at least

    max(2 R C F / (efficiency flops), itemsize (R C + C F + R F) / memory bandwidth)

    e.g. R = 2048, C = F = 12288 at 312 TFLOP/s and 2 TB/s:  2.0 ms and 0.2 ms, so 2.0 ms

Backward has two products of the same three matrices, dX = dY W^T and dW = X^T dY, which take as
long each. Attention's products have no weights: both adjoints are part of dX's half. What is not a
product moves numbers: norms, sums of residuals, gelu, softmax, each of which reads and writes all
of its own once, and the optimizer. Collectives over tp, ep and cp are between products.
"""

from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from math import ceil, log2, prod
from typing import NamedTuple

from minidist.pieces import in_one_piece
from minidist.planning.costs import traffic
from minidist.planning.costs.memory import positions
from minidist.planning.costs.transformer_size import TransformerSize
from minidist.planning.plans.plan import Machine, Plan


@dataclass(frozen=True)
class Product:
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
        rate = machine.flops * machine.efficiency_of(min(r, c, f))
        return machine.overhead + max(self.flops / rate, moved / machine.memory_bandwidth)


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
    held = positions(size, plan)
    rows, heads, D = b * held, ceil(size.heads / tp), size.width // size.heads
    columns = heads + 2 * ceil(size.key_heads / tp)  # of queries; of keys and values
    weights = [Product(rows, C, columns * D), Product(rows, heads * D, C)]
    F, per_expert, n = ceil(size.hidden / tp), rows, 1
    if size.experts:
        n = ceil(size.experts / plan.ep)
        per_expert = ceil(rows * size.top_k / n)
        weights.append(Product(rows, C, size.experts))
    if size.shared:
        all_shared = ceil(size.shared * size.hidden / tp)
        weights += [Product(rows, C, all_shared), Product(rows, all_shared, C)]
    weights += [Product(per_expert, C, 2 * F if size.llama else F, n), Product(per_expert, F, C, n)]
    attention = [
        Product(held, D, size.sequence, b * heads),
        Product(held, size.sequence, D, b * heads),
    ]
    return weights, attention


def element_wise(
    size: TransformerSize, plan: Plan, machine: Machine, b: int
) -> tuple[float, float]:
    """Return the seconds of what is no product in a block: forward, and backward.

    Forward reads and writes a norm's and a gelu's numbers, and a residual sum's three times; a
    backward of two arguments reads both. Scores of short rows are written, and read by the next
    product; longer ones stay in tiles.
    """
    rows, C, tp = b * positions(size, plan), size.width, plan.tp
    unsplit, split = rows * C / (tp if plan.sequence else 1), rows * size.hidden / tp
    scores = rows * ceil(size.heads / tp) * (size.sequence if in_one_piece(size.sequence) else 0)
    forward = (2 * 2 + 2 * 3) * unsplit + 2 * split + 2 * scores
    backward = (2 * 3 + 2 * 3) * unsplit + 3 * split + 3 * scores
    rate = machine.memory_bandwidth / plan.itemsize
    return forward / rate, backward / rate


def block_times(size: TransformerSize, plan: Plan, machine: Machine, b: int) -> dict[str, Times]:
    """Return the seconds of one block's products, and of what is no product in it.

    Before its backward, "selective" computes attention's products again, "full" all of it.
    """
    weights, attention = (
        sum(p.seconds(machine, plan.itemsize) for p in products)
        for products in block_products(size, plan, b)
    )
    again = {"none": 0, "selective": attention, "full": weights + attention}[plan.recompute]
    forward, backward = element_wise(size, plan, machine, b)
    return {
        "products": Times(weights + attention, weights + 2 * attention + again, weights),
        "element-wise": Times(forward, backward + (forward if plan.recompute == "full" else 0)),
    }


def head_times(size: TransformerSize, plan: Plan, machine: Machine, b: int) -> Times:
    """Return the seconds of the product that gives the logits, [B T/cp, V/tp]."""
    logits = Product(b * positions(size, plan), size.width, ceil(size.vocab / plan.tp))
    one = logits.seconds(machine, plan.itemsize)
    return Times(one, one, one)


INNER_TO_OUTER = "tp", "cp", "pp", "dp"


def rate_of(axis: str, plan: Plan, machine: Machine) -> float:
    """Return the bytes per second at which a rank sends along an axis.

    A group of n ranks that are k apart is within a run of k n ranks; k is the product of the axes
    inside of this one. It is in one node if such runs divide the node: then it has `link`, else
    `network`. The ranks of ep are neighbours on dp.
    """
    order = INNER_TO_OUTER
    inner = prod(getattr(plan, a) for a in order[: order.index("dp" if axis == "ep" else axis)])
    inside = machine.per_node % (inner * getattr(plan, axis)) == 0
    return machine.link if inside else machine.network


def travel(
    axis: str, plan: Plan, machine: Machine, nbytes: Fraction | float, operations: int
) -> float:
    """Return the seconds that these bytes and operations take along an axis.

    That is bytes / rate, and latency for each round of each operation: ceil(log2 n) rounds of a
    collective of n ranks, 1 of a message on pp or cp. Gradients are summed over the dp x cp ranks
    together, at the slower of both axes' rates.
    """
    ranks, rate = getattr(plan, axis), rate_of(axis, plan, machine)
    if axis == "dp" and plan.cp > 1:
        ranks, rate = plan.data, min(rate, rate_of("cp", plan, machine))
    rounds = 1 if axis in ("pp", "cp") else ceil(log2(ranks))
    return float(nbytes) / rate + operations * rounds * machine.latency


def hidden(work: float, sent: float, pieces: int) -> float:
    """Return the time of work in equal pieces whose results, or inputs, travel beside it.

    The first piece, or the last message, has nothing to hide behind.
    """
    return max(work + sent / pieces, sent + work / pieces) if sent else work


class Block(NamedTuple):
    """One block of one micro-batch, and the head's products.

    spent  seconds of the block's products, of what is no product, and of waiting for an axis
    whole  all of these together
    links  by axis, the seconds that its collectives over tp, ep and cp take
    """

    spent: dict[str, Times]
    whole: Times
    head: Times
    links: dict[str, float]


@lru_cache(100_000)
def block_of(size: TransformerSize, plan: Plan, machine: Machine, b: int) -> Block:
    """Return the times of b examples; what embedding and head send is spread over the blocks."""
    rows, runs = b * positions(size, plan), plan.micro_batches * size.layers
    alone = replace(plan, pp=1, schedule="1f1b", chunks=1, cut="layers")
    ways = {"tp": traffic.over_tensor, "ep": traffic.over_experts, "cp": traffic.over_context}
    links = {
        axis: travel(axis, plan, machine, nbytes, number) / runs
        for axis, (nbytes, number) in ((a, way(size, alone, 0, rows)) for a, way in ways.items())
    }
    spent = block_times(size, plan, machine, b)
    _, attention = block_products(size, plan, b)
    hides = sum(p.seconds(machine, plan.itemsize) for p in attention)
    spent |= waiting(plan, hides, **links)
    return Block(spent, sum(spent.values(), Times()), head_times(size, plan, machine, b), links)


def waiting(plan: Plan, attention: float, tp: float, ep: float, cp: float) -> dict[str, Times]:
    """Return the times that a block waits for its collectives; attention hides the ring of cp.

    Of tp, backward has as much as forward; half more if a split sequence is gathered again. Of cp,
    it has twice as much: keys and values again, and their gradients.
    """
    forwards, attends = traffic.forwards(plan), 2 if plan.recompute == "none" else 3
    one = tp / ((1.5 if plan.sequence else 1) + forwards)
    two, ring = ep / (1 + forwards), cp / (2 + forwards)
    hides = attention * (1 - 1 / plan.cp)
    return {
        "tensor": Times(one, tp - one),
        "experts": Times(two, ep - two),
        "context": Times(max(0, ring - hides), max(0, cp - ring - attends * hides)),
    }
