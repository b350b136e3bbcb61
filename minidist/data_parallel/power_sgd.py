"""PowerSGD: a gradient's matrix is sent as two thin ones.

Vogels, Karimireddy, Jaggi, PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization (NeurIPS 2019), algorithm 1, with the error feedback of its algorithm 2
(compression.py).

Letters: M_k = g + e of rank k, reshaped to [n, m] if it has more axes; M their sum; r the rank of
the approximation; P[n, r], Q[m, r].

    P   = sum_k M_k Q          all_reduce, then Gram and Schmidt: P^T P = 1
    Q'  = sum_k M_k^T P        all_reduce
    M  ~= P Q'^T = P P^T M     the part of M in the span of P; a rank's own part is P (M_k^T P)^T

One such round is a step of power iteration. The span of Q' is the next step's (warm start), so it
turns towards M's largest singular vectors from step to step. All sums are linear: an all_reduce
adds them up on the way, and its bytes do not grow with N as an all_gather's do. (The paper has
means where we have sums: our loss is already divided by the whole batch.)

A step begins with an orthonormal basis of Q'. Only the span counts, and the products M Q' of the
paper's Q' would be as small or as large as a gradient's square, which 16 bits do not hold. If
M has a rank below r, columns of the basis are missing. They are drawn, by name and step, like all
columns of the first Q: a column of 0 would give P a column of 0, and Q' too, in all later steps.

If r is at least the rank of M, P spans all of M, and P P^T M = M up to rounding. Vectors are sent
as they are. Bytes of all ranks: 2 (N - 1) itemsize times r (n + m) for a matrix, n for a vector.
"""

from numbers import Integral

import numpy as np

from minidist.backend import Array, array_module, on_device_of
from minidist.comm import Group
from minidist.data_parallel.compression import Sent, on_grid
from minidist.errors import check_number
from minidist.nn import Parameter
from minidist.rng import generator


class PowerSGD:
    """Compress a matrix to rank r; an argument of `ErrorFeedback`.

    rank  r; a matrix of fewer rows or columns gets as many as these. None: no matrix gets fewer
    seed  of the columns that are drawn
    q     {name: Q'[m, r] of the step before}
    """

    def __init__(self, rank: int | None, seed: int = 0):
        if rank is not None:
            allowed = "the rank of an approximation is 1 or more"
            check_number(allowed, rank, lambda n: n >= 1, Integral)
        self.rank, self.seed = rank, seed
        self.q: dict[str, Array] = {}

    def __call__(self, v: Array, p: Parameter, group: Group, step: int) -> Sent:
        if v.ndim < 2:
            return Sent(group.all_reduce(v.astype(p.dtype), label=p.name), v, v)
        matrix = v.reshape(len(v), -1)
        q = self.begin(self.q.get(p.name), matrix, p, step)
        left = group.all_reduce((matrix @ q).astype(p.dtype), label=f"{p.name}: P")
        left = orthogonalize(left.astype("float64"))
        part = (matrix.T @ left).astype(p.dtype)
        right = self.q[p.name] = group.all_reduce(part, label=f"{p.name}: Q")
        total = (left @ right.T).astype(p.dtype).reshape(p.shape)
        return Sent(total, *on_grid(v, (left @ part.T).reshape(p.shape)))

    def begin(self, last: Array | None, matrix: Array, p: Parameter, step: int) -> Array:
        """Return Q[m, r], the same on every rank: a basis of the last one, completed by drawing.

        last  None in the first step; normal numbers, of about unit length, take its place
        """
        xp, most = array_module(matrix), min(matrix.shape)
        shape = matrix.shape[1], most if self.rank is None else min(self.rank, most)
        q = xp.zeros(shape) if last is None else orthogonalize(last.astype("float64"))
        missing = ~q.any(axis=0)
        if missing.any():
            drawn = generator(self.seed, f"PowerSGD {p.name} {step}").standard_normal(shape)
            q = xp.where(missing, on_device_of(drawn / len(drawn) ** 0.5, matrix), q)
        return q.astype(p.dtype)


def orthogonalize(p: Array) -> Array:
    """Return an orthonormal basis of the columns of P[n, r], float64: Gram and Schmidt, twice each.

    A column in the span of those before it becomes 0.
    """
    xp, p = array_module(p), p.copy()
    tiny = 1e3 * np.finfo("float64").eps
    for j in range(p.shape[1]):
        column, before = p[:, j], p[:, :j]
        length = xp.sqrt((column * column).sum())
        if j:
            for _ in range(2):
                column -= before @ (before.T @ column)
        rest = xp.sqrt((column * column).sum())
        new = rest > tiny * length  # else rounding left it, in a direction that is not orthogonal
        column *= xp.where(new, 1.0, 0.0) / xp.where(new, rest, 1.0)
    return p
