"""Two branches on two ranks leave one device's gradient; what they send, by operation."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist import Tensor, nn, run
from minidist.events import EventLog
from minidist.pipeline_parallel import branch_placement
from minidist.verify.compare import compare
from minidist.verify.equivalence import check
from minidist.verify.strategies import Case, one_device
from minidist.verify.strategies.cases import listed
from tests.strategies import arrays, seeds


@st.composite
def cases(draw):
    sizes = draw(st.lists(st.integers(1, 6), min_size=2, max_size=4))
    classes, B, seed = draw(st.integers(1, 4)), draw(st.integers(1, 9)), draw(seeds)
    activation = draw(st.sampled_from(["relu", "gelu"]))
    model = nn.Siamese(sizes, classes, activation, seed=draw(st.integers(0, 99)), dtype="float64")
    pairs = arrays(B, 2, sizes[0], seed=seed)
    if draw(st.booleans()):
        targets = np.random.default_rng(seed).integers(0, classes, B)
        return Case("drawn", model, pairs, targets)
    return Case("drawn", model, pairs, arrays(B, classes, seed=seed + 1), nn.squared_error)


splits = {"size": st.integers(1, 2), "micro_batches": st.integers(1, 3)}


@settings(max_examples=25)
@given(case=cases(), **splits)
def test_every_gradient_and_byte_on_threads(cluster, case, size, micro_batches):
    """Micro-batches are uneven, or empty where there are more of them than pairs."""
    row = check("siamese", case, size, cluster(size, "thread"), micro_batches=micro_batches)
    assert row["ok"], row["detail"]


def test_bytes_by_operation_are_an_embedding_there_its_gradient_back_and_the_shared_weights(
    cluster,
):
    B, C, F, E = 7, 6, 9, 4
    shared = 8 * (C * F + F + F * E + E)

    def update(group, case):
        branch_placement.forward_backward(case.model, case.inputs, case.targets, group)
        branch_placement.all_reduce_shared(case.model, group)
        return dict(group.ledger.bytes)

    case = listed("siamese", 2)[0]
    assert case.inputs.shape == (B, 2, C) and case.model.branch[0].weight.shape == (C, F)
    by_rank = cluster(2).run(update, case)
    assert [ledger["send"] for ledger in by_rank] == [8 * B * E, 8 * B * E]
    assert sum(ledger["all_reduce"] for ledger in by_rank) == 2 * shared
    assert all(ledger.keys() == {"send", "all_reduce"} for ledger in by_rank)
    (alone,) = cluster(1).run(update, case)
    assert not any(alone.values())


def test_ranks_differ_before_the_sum_and_agree_bit_for_bit_after_and_the_join_stays_on_rank_0(
    cluster,
):
    def worker(group, case):
        model = case.model
        value = branch_placement.forward_backward(model, case.inputs, case.targets, group)
        before = [p.grad.copy() for p in branch_placement.shared_parameters(model)]
        branch_placement.all_reduce_shared(model, group)
        after = [p.grad for p in branch_placement.shared_parameters(model)]
        join = [p.grad is not None for p in model.join.parameters()]
        return before, after, join, None if value is None else value.item()

    case = listed("siamese", 2)[0]
    (before_0, after_0, join_0, loss), (before_1, after_1, join_1, nothing) = cluster(2).run(
        worker, case
    )
    for one, other in zip(before_0, before_1, strict=True):
        assert not np.array_equal(one, other)
    for one, other in zip(after_0, after_1, strict=True):
        assert one.tobytes() == other.tobytes()
    assert join_0 == [True, True] and join_1 == [False, False]
    assert loss == pytest.approx(nn.cross_entropy(case.model(case.inputs), case.targets).item())
    assert nothing is None


def test_pairs_of_ranks_share_a_batch_as_the_error_for_more_than_two_ranks_says(cluster):
    def worker(group, case):
        pair, across = group.split(group.rank // 2), group.split(group.rank % 2)
        rows = np.array_split(np.arange(7), 2)[group.rank // 2]
        model = case.model
        branch_placement.forward_backward(
            model, case.inputs[rows], case.targets[rows], pair, reduction_size=7
        )
        branch_placement.all_reduce_shared(model, pair)
        own = branch_placement.own_parameters(model, pair)
        return {p.name: across.all_reduce(p.grad, label=p.name) for p in own}

    case = listed("siamese", 2)[0]
    want = {name: grad for name, grad in one_device(case).items() if name != "(input)"}
    for got in cluster(4, "thread").run(worker, case):
        comparison = compare([want | got], want)
        assert comparison.ok, comparison


def names_and_calls(group, case):
    calls, embed = [], case.model.embed

    def counted(x, randomness):
        calls.append(x.data)
        return embed(x, randomness)

    case.model.embed = counted
    x = Tensor(case.inputs, requires_grad=True)
    branch_placement.forward_backward(case.model, x, case.targets, group, case.loss)
    return calls


def test_each_rank_runs_one_branch_and_waits_for_nothing_before_it():
    case, log = listed("siamese", 2)[0], EventLog()
    calls = run(names_and_calls, 2, case, log=log)
    for rank in (0, 1):
        (half,) = calls[rank]
        np.testing.assert_array_equal(half, case.inputs[:, rank])
    names = [[e.name for e in log.events if e.rank == rank] for rank in (0, 1)]
    # The gradient is sent before rank 0 goes backward through its own branch.
    assert names[0] == ["forward branch 0", "recv", "join", "send", "backward branch 0"]
    assert names[1] == ["forward branch 1", "send", "recv", "backward branch 1"]
