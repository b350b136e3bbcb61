"""What products of eight bits move: see minidist/autograd/eight_bits.py."""

from minidist.planning.costs.cost import ITEMSIZE, Workload
from minidist.planning.costs.hybrid import hybrid_bytes, split_of


def eight_bit_bytes(case: Workload, N: int) -> int:
    """Return the bytes of a mesh's axes; strips and blocks are whole on a rank and send none.

    With a scale per array each of the three products of a matrix has two, of which each is the
    largest over the n ranks of a stage: 12 (n - 1) numbers, per micro-batch.
    """
    s = split_of(N, **case.options)
    products = [p.product for p in case.model.parameters() if p.product is not None]
    shared = sum(how.block is None for how in products)
    return hybrid_bytes(case, N) + 12 * (s.dp * s.cp * s.tp - 1) * shared * s.m * ITEMSIZE
