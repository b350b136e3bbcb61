"""The causes of wrong sums and bytes: numbers to words, or None where nothing is wrong."""

from itertools import pairwise, product

import numpy as np

from minidist.pieces import split_ends

NEAR = 1e-9


def of_sums(inputs, found):
    """Return which ranks' arrays are in the wrong sums, and how many times.

    inputs  what each rank gave;  found: what each one got. Elements are compared chunk by chunk,
            as the algorithms cut them: into as many chunks as there are ranks.
    """
    N, want = len(inputs), np.sum(inputs, axis=0).reshape(-1)
    for rank, got in enumerate(found):
        ends = split_ends(want.size, N)
        for begin, stop in pairwise(ends):
            chunk = slice(begin, stop)
            if not np.allclose(got.reshape(-1)[chunk], want[chunk], NEAR, NEAR):
                parts = np.stack([x.reshape(-1)[chunk] for x in inputs])
                where = f"rank {rank}, elements {begin} to {stop - 1}"
                return f"{where}: {terms_of(parts, got.reshape(-1)[chunk])}"
    return None


def terms_of(parts, got):
    if len(parts) < 7:
        for times in product((0, 1, 2), repeat=len(parts)):
            if np.allclose(np.tensordot(times, parts, 1), got, NEAR, NEAR):
                missing = [r for r, n in enumerate(times) if n == 0]
                twice = [r for r, n in enumerate(times) if n == 2]
                words = [f"without rank{listed(missing)}"] if missing else []
                words += [f"with rank{listed(twice)} twice"] if twice else []
                return "the sum is one " + " and ".join(words)
    return "no sum of the ranks' arrays"


def listed(ranks):
    return ("s " if len(ranks) > 1 else " ") + ", ".join(map(str, ranks))


def of_bytes_held(found, want, whole):
    """Return what takes more memory than it should: {what: bytes} on a rank; `whole`: unsplit."""
    for what, n in found.items():
        if n != want[what]:
            message = f"{what}: {n} bytes, not {want[what]}"
            return message + ("; as much as if it were not split" if n == whole[what] else "")
    return None


def of_bytes_moved(found, want, operation):
    """Return which rank's bytes of an operation are wrong."""
    for rank, (n, formula) in enumerate(zip(found, want, strict=True)):
        if n != formula:
            return f"{operation}: by the ledger rank {rank} sent {n} bytes, not {formula}"
    return None
