"""Ranks of a host share a copy; copies are summed once a step, whatever the micro-batches."""

from itertools import product

import numpy as np
import pytest

from minidist import nn, optim
from minidist.data_parallel.hierarchical_zero import two_levels
from minidist.data_parallel.zero import Zero
from minidist.errors import RankFailed
from minidist.pieces import split_sizes
from minidist.planning.costs.zero import zero_passes
from minidist.verify import equivalence
from tests.strategies import arrays

SIZES = [7, 9, 2, 5]


def sent(group, stage, shards, micro_batches):
    """Return the bytes that this rank sends in a step, inside its copy and between copies."""
    model = nn.MLP(SIZES, "gelu", dtype="float64")
    zero = Zero(model, group, stage, shards)
    optimizer = optim.SGD(zero.parameters(), 0.1)
    for i in range(micro_batches):
        loss = nn.cross_entropy(model(arrays(2, SIZES[0])), np.zeros(2, int), 2)
        zero.accumulate(loss, last=i == micro_batches - 1)
    zero.step(optimizer)
    inside = [part.ledger.total for part in zero.groups if part is not zero.between]
    return sum(inside), zero.between.ledger.total


@pytest.mark.parametrize("stage, shards, m", list(product((1, 2, 3), (1, 2, 4), (1, 3))))
def test_only_one_all_reduce_of_shards_leaves_a_host(cluster, stage, shards, m):
    """With N/k = h copies, of all ranks: h (k - 1) S per pass inside, 2 (h - 1) S between."""
    found = cluster(4, "thread").run(sent, stage, shards, m)
    S, h = nn.MLP(SIZES, dtype="float64").flatten(), 4 // shards
    nbytes = sum(layer.flat.vector.nbytes for layer in S.layers)
    passes = sum(zero_passes(stage, m))
    assert sum(inside for inside, _ in found) == passes * h * (shards - 1) * nbytes
    assert sum(between for _, between in found) == 2 * (h - 1) * nbytes
    for r, (_, between) in enumerate(found):
        own = [split_sizes(layer.flat.size, shards)[r % shards] for layer in S.layers]
        pieces = [split_sizes(n, h)[r // shards] for n in own]
        assert between == 8 * sum(n - s + (h - 1) * s for n, s in zip(own, pieces, strict=True))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_copies_that_are_summed_are_not_summed_again(cluster, stage):
    def worker(group, stage):
        model = nn.MLP(SIZES, "gelu", dtype="float64")
        zero = Zero(model, group, stage, shards=1)
        for _ in range(2):
            zero.accumulate(nn.cross_entropy(model(arrays(2, SIZES[0])), np.zeros(2, int), 2))

    with pytest.raises(RankFailed, match=r"reduced already|would be summed over them again"):
        cluster(2, "thread").run(worker, stage)


@pytest.mark.parametrize("shards", [0, 3, 8, 1.5])
def test_copies_that_do_not_make_up_the_ranks_are_refused_with_the_numbers(cluster, shards):
    message = f"groups of {shards} shards do not make up 4 ranks; use a divisor of 4"
    with pytest.raises(RankFailed, match=message) as caught:
        cluster(4, "thread").run(two_levels, shards)
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.slow
@pytest.mark.parametrize("size", range(1, 9))
def test_every_copy_of_up_to_eight_ranks_has_one_devices_gradient(cluster, size):
    cases = equivalence.find("hierarchical_zero").cases(size)
    for case in cases:
        row = equivalence.check("hierarchical_zero", case, size, cluster(size, "thread"))
        assert row["ok"], row["detail"]
