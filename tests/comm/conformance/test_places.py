"""Reductions and gathers have the same bits and bytes wherever the arrays are."""

import hashlib
import itertools
from functools import partial

import numpy as np
import pytest

from minidist.backend import to_host
from minidist.comm.local.shared_memory import SharedMemory
from minidist.pieces import split_ends
from minidist.planning.costs.collectives import all_reduce_bytes
from tests import causes
from tests.comm.conformance.inputs import DTYPES, KINDS, billed, mine, places, put, same, total

slow = pytest.mark.slow
sizes = pytest.mark.parametrize("size", [1, 3, *(pytest.param(n, marks=slow) for n in (2, 4))])


def reductions(group, n, dtype, op, in_rank_order):
    """Reduce an array in each place, in every way; return which were wrong, a hash of the bits that
    all ranks should have, and (way, bytes by the ledger, bytes by the formula) in turn.
    """
    N, r, wrong, bits, bills = group.size, group.rank, [], hashlib.sha256(), []
    values, want = mine(r, (n,), dtype=dtype), total(N, (n,), dtype=dtype, combine=KINDS[op])
    ends, last = split_ends(n, N), [0] * (N - 1) + [n]  # pieces that are not equal
    whole = want, all_reduce_bytes(None, n, want.itemsize, N)[r]
    piece, rest = want[ends[r] : ends[r + 1]], want[: last[r]]

    def check(way, call, want, nbytes):
        got, moved = billed(group, call)
        bills.append((way, moved, nbytes))
        if not same(got, want, in_rank_order or dtype == "float16"):
            wrong.append(way)
        if want is whole[0]:
            bits.update(got.tobytes())

    for two in places(group, np.stack([values] * 2)):
        x, other = two[1], put(group, values)  # x is a part of an array
        scatter = partial(group.reduce_scatter, x, op=op)
        check("all_reduce", partial(group.all_reduce, x, op), *whole)
        check("reduce_scatter", scatter, piece, want.nbytes - piece.nbytes)
        check("by sizes", partial(scatter, sizes=last), rest, want.nbytes - rest.nbytes)
        if to_host(x).tobytes() != values.tobytes():
            wrong.append("not untouched")
        check("in place", partial(group.all_reduce, x, op, out=x), *whole)
        check("in place, out", lambda x=x: x, want, 0)
        check("into another", partial(group.all_reduce, other, op, out=x), *whole)
        check("into another, out", lambda x=x: x, want, 0)
    return wrong, bits.hexdigest(), bills


@sizes
def test_reductions_have_the_same_bits_and_bytes_wherever_the_arrays_are(ranks, size):
    """16-bit floats are added in rank order on every machine: elsewhere many sums would differ."""
    edges = [SharedMemory.stage // 8 + more for more in ([-1, 0, 1] if size == 3 else [])]
    several = [*edges, 2 * size * SharedMemory.piece // 8 + 3]  # stages, pieces
    plain = [(n, "float64", "sum") for n in [0, 1, size + 1, 101, *several]]
    for case in [*plain, *itertools.product([101], DTYPES, KINDS if size == 3 else ["sum"])]:
        found = ranks(size).run(reductions, *case, ranks.in_rank_order)
        wrong, bits, bills = zip(*found, strict=True)
        assert list(wrong) == [[]] * size and len(set(bits)) == 1, case
        for calls in zip(*bills, strict=True):
            ways, moved, formula = zip(*calls, strict=True)
            assert moved == formula, causes.of_bytes_moved(moved, formula, ways[0])


@sizes
def test_a_gather_into_out_has_the_same_bits_and_bytes_wherever_out_is(ranks, size):
    def worker(group, n, dtype):
        ends, whole = split_ends(n, group.size), mine(9, (n,), dtype=dtype)
        part, wrong = slice(ends[group.rank], ends[group.rank + 1]), []
        for own in (False, True):  # x: apart, or its own part of out
            for out in places(group, np.zeros(n, dtype)):
                x = out[part] if own else out[part].copy()
                x[:] = put(group, whole[part])
                got, moved = billed(group, lambda x=x, out=out: group.all_gather(x, out=out))
                right = got.tobytes() == to_host(out).tobytes() == whole.tobytes()
                right = right and group.all_gather(x, out=out) is out
                if not right or moved != (group.size - 1) * x.nbytes:
                    wrong.append((own, moved))
        return wrong

    for n in [0, 1, size - 1, size + 1, 101, 100_003]:
        for dtype in ["float64"] if n > 200 else ["float64", "bool", "float16", "complex64"]:
            assert ranks(size).run(worker, n, dtype) == [[]] * size
