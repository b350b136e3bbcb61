"""What ranks have copies of is summed and updated alike, whole or in shards."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from minidist import nn, optim
from minidist.data_parallel.zero import Copies, ShardedCopies
from minidist.nn.flat_parameters import FlatSlice, flat_slices
from minidist.parallel import squares
from tests.strategies import arrays, seeds

KINDS = [Copies, ShardedCopies]


def two_steps(group, kind, sizes, pair_of, seed):
    """Sum gradients over all ranks or, of some parameters, over every other one; update; return
    what this rank has of them, of their norm, and of the weights.

    pair_of  whether each parameter is summed over the ranks of this rank's parity only
    """
    model = nn.MLP(sizes, activation="relu", dtype="float64")
    parity = group.split(group.rank % 2)
    runs, named = [], model.named_parameters()
    for layer in model.layers:
        for over, few in ((group, False), (parity, True)):
            chosen = [p for p in layer.parameters() if (hash_of(p.name) in pair_of) == few]
            runs += [(run, over) for run in flat_slices(chosen)]
    copies = kind(runs, model.parameters)
    optimizer, rows = optim.AdamW(copies.parameters(), 0.01, weight_decay=0.1), []
    for step in range(2):
        for i, p in enumerate(named.values()):
            p.grad = arrays(*p.shape, seed=seed + 100 * step + 10 * i + group.rank)
        for layer in model.layers:
            layer.flat.collect_gradients()
            copies.sum_gradients([layer.flat])
        counted = group.all_reduce(np.array(squares(copies.counted_here(list(named.values())))))
        rows.append(({n: g.copy() for n, g in copies.gradients().items()}, float(counted)))
        copies.step(optimizer)
        optimizer.zero_grad()
        assert all(p.grad is None for p in named.values())
    moments = sum(array.size for arrays in optimizer.state for array in arrays)
    return rows, model.state(), moments


def hash_of(name):
    """Return which of four kinds a parameter of an MLP is: its layer's parity, weight or bias."""
    _, layer, what = name.split(".")
    return 2 * (int(layer) % 2) + (what == "bias")


@given(
    size=st.integers(1, 4),
    sizes=st.lists(st.integers(1, 5), min_size=2, max_size=4),
    pair_of=st.sets(st.integers(0, 3)),
    seed=seeds,
)
def test_shards_leave_what_copies_leave(cluster, size, sizes, pair_of, seed):
    def found(kind):
        return cluster(size, "thread").run(two_steps, kind, sizes, pair_of, seed)

    whole, cut = map(found, KINDS)
    for rank, ((rows, state, moments), (of_shards, weights, less)) in enumerate(
        zip(whole, cut, strict=True)
    ):
        assert less <= moments
        for step, ((want, norm), (got, same)) in enumerate(zip(rows, of_shards, strict=True)):
            assert abs(norm - same) <= 1e-12 * norm
            assert want.keys() == got.keys() == state.keys()
            for i, name in enumerate(state):
                np.testing.assert_allclose(got[name], want[name], 1e-12, 1e-12)
                over = range(rank % 2, size, 2) if hash_of(name) in pair_of else range(size)
                terms = [
                    arrays(*want[name].shape, seed=seed + 100 * step + 10 * i + r) for r in over
                ]
                np.testing.assert_allclose(want[name], sum(terms), 1e-12, 1e-12)
        for name, array in state.items():
            np.testing.assert_allclose(weights[name], array, 1e-9, 1e-12)
    for step in range(2):
        norms = [rows[step][1] for rows, _, _ in whole]
        want = sum(
            (array**2).sum()
            for rank, (rows, _, _) in enumerate(whole)
            for name, array in rows[step][0].items()
            if rank == 0 or (rank == 1 and hash_of(name) in pair_of)
        )
        np.testing.assert_allclose(norms, want, 1e-12)


def test_a_slice_knows_the_parameters_that_begin_in_it():
    weight, bias = (flat := nn.Linear(3, 2).flatten().flat).parameters
    assert FlatSlice(flat, 0, 8).parts == {weight: slice(0, 6), bias: slice(6, 8)}
    assert FlatSlice(flat, 6, 8).parts == {bias: slice(0, 2)}
    assert FlatSlice(flat, 0, 6).parts == {weight: slice(0, 6)}
