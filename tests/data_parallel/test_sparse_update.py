"""Sparse updates: only touched rows travel, and the weights have the bits of dense pushes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist import nn
from minidist.data_parallel.parameter_server import Blocks, ServerPlan, add_up
from minidist.errors import RankFailed
from minidist.nn.flat_parameters import FlatParameters
from tests.data_parallel.serving import run_and_replay, session
from tests.strategies import assert_same_bits, seeds

shapes = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3), min_size=1, max_size=4)


@given(shapes=shapes, seed=seeds, bounds=st.tuples(st.floats(0, 1), st.floats(0, 1)))
def test_what_is_unpacked_is_the_gradient_and_no_block_of_zeros_travels(shapes, seed, bounds):
    random = np.random.default_rng(seed)
    flat = FlatParameters([nn.Parameter(np.zeros(s), str(i)) for i, s in enumerate(shapes)])
    start, stop = sorted(round(bound * flat.size) for bound in bounds)
    blocks = Blocks(flat, start, stop)
    gradient = np.where(random.random(stop - start) < 0.2, random.standard_normal(stop - start), 0)
    numbers, elements = blocks.pack(gradient)
    positions, restored = blocks.positions(numbers), np.zeros(stop - start)
    restored[positions] = elements
    np.testing.assert_array_equal(restored, gradient)
    assert blocks.sizes.sum() == stop - start and len(set(positions)) == len(positions)
    for n in numbers:
        assert gradient[blocks.ends[n] : blocks.ends[n + 1]].any()


@given(seed=seeds, parts=st.integers(1, 4))
def test_sparse_sums_have_the_bits_of_dense_ones(seed, parts):
    random = np.random.default_rng(seed)
    dense = random.standard_normal((parts, 9)) * (random.random((parts, 9)) < 0.5)
    positions, total = add_up([(np.flatnonzero(g), g[g != 0]) for g in dense])
    want = dense[0].copy()
    for g in dense[1:]:
        want += g
    assert positions.tolist() == np.flatnonzero((dense != 0).any(axis=0)).tolist()
    np.testing.assert_array_equal(total, want[positions])


VOCAB, WIDTH, CLASSES, TOKENS = 40, 4, 3, 6


def bag_of_words():
    return nn.Sequential(
        [
            nn.Embedding(VOCAB, WIDTH, name="tokens", dtype="float64"),
            nn.Linear(WIDTH, CLASSES, name="head", dtype="float64"),
        ]
    )


def sentences(count):
    random = np.random.default_rng(1)
    tokens = random.integers(0, VOCAB, (count, 2, TOKENS))
    return tokens, random.integers(0, CLASSES, (count, 2, TOKENS))


@pytest.mark.parametrize("rule, servers", [("sgd", 1), ("adagrad", 3)])
def test_synchronous_sparse_pushes_have_the_bits_of_dense_ones(cluster, rule, servers):
    results = [
        cluster(servers + 2).run(
            session, ServerPlan(servers, sparse=sparse), rule, bag_of_words(), sentences(9), 9
        )
        for sparse in (False, True)
    ]
    dense, sparse = results
    for mine in sparse:
        assert_same_bits(mine["weights"], dense[0]["weights"])
    assert sum(mine["bytes"] for mine in sparse) < sum(mine["bytes"] for mine in dense)


def test_stale_sparse_pushes_are_replayed_to_the_bit(cluster):
    plan = ServerPlan(2, 1, sparse=True)
    naps = {2: 0.001, 4: 0.003}
    found, _, want = run_and_replay(
        cluster(5), plan, "adagrad", bag_of_words(), sentences(15), 15, naps=naps
    )
    for mine in found:
        assert_same_bits(mine["weights"], want)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "plan",
    [
        ServerPlan(2, sparse=sparse, **how)
        for sparse in (False, True)
        for how in ({}, {"staleness": 1}, {"staleness": 1, "quorum": 2})
    ],
    ids=str,
)
def test_servers_on_a_gpu_are_replayed_there_to_the_bit(cluster, plan):
    found, _, want = run_and_replay(
        cluster(5, "thread", "gpu"),
        plan,
        "adagrad",
        bag_of_words().to("gpu"),
        sentences(9),
        9,
        device="gpu",
    )
    for mine in found:
        assert_same_bits(mine["weights"], want)


def test_a_push_moves_the_rows_that_its_batch_touched_and_nothing_else(cluster):
    tokens, targets = sentences(7)
    plan = ServerPlan(staleness=None, sparse=True)
    found = cluster(2).run(session, plan, "sgd", bag_of_words(), (tokens, targets), 7)
    head = WIDTH * CLASSES + CLASSES
    pushed = sum(
        8 * (len(rows) * WIDTH + head) + 8 * (len(rows) + WIDTH + 1)  # elements; block numbers
        for rows in map(np.unique, tokens)
    )
    assert found[1]["bytes"] == pushed + 16 * (7 + 7 + 1) + 16 * 7  # requests; gradients in them
    assert found[0]["bytes"] == 7 * 8 * (VOCAB * WIDTH + head + 1)


def test_a_rule_for_which_a_zero_gradient_is_not_nothing_is_refused(cluster):
    with pytest.raises(RankFailed, match="cannot update some alone; use Adagrad") as caught:
        cluster(2).run(session, ServerPlan(sparse=True), "adamw", bag_of_words(), sentences(2), 2)
    assert isinstance(caught.value.__cause__, ValueError)
