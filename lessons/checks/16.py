"""Lesson 16's exercises: checks, worked solutions, hints, tempting wrong answers."""

import numpy as np

from minidist import Cluster, Mesh, nn
from minidist.hybrid import Hybrid
from minidist.nn.datasets import Batch

AXES = "dp", "pp", "tp"


def array_of(found):
    """Return an answer as an array; lists of different lengths become their text."""
    try:
        return np.asarray(found)
    except ValueError:
        return np.array(repr(found))


def ranks(N, worker, *arguments):
    with Cluster(N, "thread") as cluster:
        return cluster.run(worker, *arguments)


def check_1(attempt):
    for mesh in ((8, 1, 1), (4, 2, 1), (2, 2, 2), (3, 2, 4), (1, 1, 8)):
        grid, sizes = np.arange(np.prod(mesh)).reshape(mesh), dict(zip(AXES, mesh, strict=True))
        for rank in range(grid.size):
            at = [int(i) for i in np.unravel_index(rank, mesh)]
            for i, axis in enumerate(AXES):
                right = grid[(*at[:i], slice(None), *at[i + 1 :])].tolist()
                found = array_of(attempt(rank, axis, dict(sizes)))
                where = f"{axis} of rank {rank} of {' x '.join(map(str, mesh))}"
                if found.ndim != 1:
                    return f"{where}: {found} is not a list of ranks"
                if found.tolist() != right:
                    return f"{where} is {right}, not {found.tolist()!s:.60}"


def solution_1(rank, axis, sizes):
    names = list(sizes)
    stride = 1
    for name in names[names.index(axis) + 1 :]:
        stride *= sizes[name]
    first = rank - rank // stride % sizes[axis] * stride
    return [first + i * stride for i in range(sizes[axis])]


hints_1 = (
    "How far apart are the numbers of two neighbours on tp, on pp, on dp?",
    "An axis has a stride, the product of the sizes after it; your place is rank // stride % size.",
    "Subtract place x stride from your number, and add 0, 1, ..., size - 1 strides.",
)


def slowest_first(rank, axis, sizes):
    """Numbers the grid with dp fastest."""
    stride = {"dp": 1, "pp": sizes["dp"], "tp": sizes["dp"] * sizes["pp"]}[axis]
    return [rank + (i - rank // stride % sizes[axis]) * stride for i in range(sizes[axis])]


def neighbours(rank, axis, sizes):
    first = rank // sizes[axis] * sizes[axis]
    return list(range(first, first + sizes[axis]))


tempting_1 = [slowest_first, neighbours]

TOKENS, TARGETS = np.random.default_rng(1).integers(0, 11, (2, 8, 4))


def small():
    return nn.Transformer(11, 8, 2, 2, 4, 0, "float64", tied=True)


def squares_on(group, attempt, sizes):
    mesh = Mesh(group, **dict(zip(AXES, sizes, strict=True)))
    hybrid = Hybrid(small(), mesh, "1f1b", 2, check_weights=False)
    hybrid.backward(Batch(TOKENS, TARGETS))
    found = array_of(attempt(hybrid, mesh))
    if found.size != 1 or found.dtype.kind not in "fiu":
        raise ValueError(f"the result is {found!r:.60}, not a number")
    return float(found.reshape(()))


def check_2(attempt):
    model = small()
    nn.cross_entropy(model(TOKENS), TARGETS).backward()
    right = sum((p.grad**2).sum() for p in model.parameters())
    for sizes in ((2, 2, 2), (4, 1, 2), (2, 4, 1)):
        for rank, found in enumerate(ranks(8, squares_on, attempt, sizes)):
            if not abs(found / right - 1) < 1e-9:
                mesh = " x ".join(map(str, sizes))
                return f"rank {rank} of {mesh} has {found / right:.3f} of the right sum"


def solution_2(hybrid, mesh):
    own = 0.0
    for name, p in hybrid.named_parameters().items():
        stages = hybrid.pipeline.shared.get(name)
        if (p.shard is not None or mesh.tp.rank == 0) and (stages is None or stages.rank == 0):
            own += (p.grad**2).sum()
    return mesh.pp.all_reduce(mesh.tp.all_reduce(np.array(own))).item()


hints_2 = (
    "Which ranks have different parameters: those of d, of p, of t? Sum over these axes only.",
    "What all ranks of t have may count on one of them; a tied parameter on one of its two stages.",
    "Go through hybrid.named_parameters(), add what counts here, then all_reduce over tp and pp.",
)


def own_squares(hybrid, mesh):
    return sum((p.grad**2).sum() for p in hybrid.parameters())


def all_ranks(hybrid, mesh):
    return mesh.group.all_reduce(np.array(own_squares(hybrid, mesh))).item()


def model_ranks(hybrid, mesh):
    return mesh.pp.all_reduce(mesh.tp.all_reduce(np.array(own_squares(hybrid, mesh)))).item()


tempting_2 = [own_squares, all_ranks, model_ranks]


def try_move(group, attempt):
    mesh = Mesh(group, dp=1, pp=2, tp=4)
    x = np.arange(2.0 * 8 * 3).reshape(2, 8, 3)
    found = attempt(x.copy() if mesh.pp.rank == 0 else None, mesh)
    right = found is None if mesh.pp.rank == 0 else np.array_equal(found, x)
    return right, mesh.pp.ledger.total / x.nbytes, mesh.tp.ledger.total / x.nbytes


def check_3(attempt):
    for rank, (right, over_p, _) in enumerate(ranks(8, try_move, attempt)):
        if not right:
            return f"rank {rank} of 1 x 2 x 4 does not return {'None' if rank < 4 else 'x'}"
        if over_p > 1 / 4:
            return f"rank {rank} sends {over_p:g} S over p, not 1/4"


def solution_3(x, mesh):
    if mesh.pp.rank == 0:
        mesh.pp.send(np.split(x, mesh.tp.size, axis=1)[mesh.tp.rank].copy(), 1)
        return None
    return mesh.tp.all_gather(mesh.pp.recv(0), 1)


hints_3 = (
    "Every rank of stage 0 has all of X. Which part of it should this rank send?",
    "Cut along T by mesh.tp.rank; the ranks of stage 1 then have the parts of one X.",
    "mesh.pp.send(part, 1) on stage 0; mesh.tp.all_gather(mesh.pp.recv(0), 1) on stage 1.",
)


def everyone_sends_all(x, mesh):
    return mesh.pp.send(x, 1) if mesh.pp.rank == 0 else mesh.pp.recv(0)


def one_sends_all(x, mesh):
    if mesh.pp.rank == 0:
        return mesh.pp.send(x, 1) if mesh.tp.rank == 0 else None
    return mesh.tp.broadcast(mesh.pp.recv(0) if mesh.tp.rank == 0 else None)


tempting_3 = [everyone_sends_all, one_sends_all]
