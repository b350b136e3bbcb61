"""Two branches on two ranks leave one device's gradient; what they send, by operation."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist import nn
from minidist.errors import RankFailed
from minidist.nn.datasets import Batch
from minidist.pipeline_parallel import Siamese, branch_placement
from minidist.verify.compare import compare
from minidist.verify.equivalence import check
from minidist.verify.strategies import Case, one_device
from minidist.verify.strategies.cases import listed
from tests.pipeline_parallel.branches import judge, siamese_worker
from tests.strategies import arrays, assert_same_bits, seeds


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


@settings(max_examples=60)
@given(case=cases(), **splits)
def test_every_gradient_and_byte_on_threads(cluster, case, size, micro_batches):
    """Micro-batches are uneven, or empty where there are more of them than pairs."""
    row = check("siamese", case, size, cluster(size, "thread"), micro_batches=micro_batches)
    assert row["ok"], row["detail"]


def test_small_integers_give_exactly_the_same_bits(cluster):
    model, random = nn.Siamese([4, 8, 4], 2, "relu", dtype="float64"), np.random.default_rng(0)
    for p in model.parameters():
        p.data[...] = random.integers(-2, 3, p.shape)
    pairs = random.integers(-2, 3, (8, 2, 4)).astype("float64")
    targets = random.integers(-2, 3, (8, 2)).astype("float64")
    case = Case("whole", model, pairs, targets, nn.squared_error)
    comparison, _ = judge(cluster(2), case)
    assert comparison.difference == 0


def test_in_float32_the_difference_is_float32_rounding(cluster):
    model = nn.Siamese([6, 16, 8], activation="gelu")
    case = Case("float32", model, arrays(9, 2, 6, dtype="float32"), np.arange(9) % 2)
    whole = replace(case, model=nn.Siamese([6, 16, 8], activation="gelu").astype("float64"))
    want = one_device(replace(whole, inputs=case.inputs.astype("float64")))
    outcomes = cluster(2, "thread").run(siamese_worker, case)
    assert {g.dtype for o in outcomes for g in o.gradients.values()} == {np.dtype("float32")}
    comparison = compare([o.gradients for o in outcomes], want, 1e-5)
    assert comparison.ok and comparison.error > 1e-9, comparison


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


def test_the_gradient_is_multiplied_by_the_loss_scale_and_the_loss_is_not(cluster):
    def worker(group, case, scale):
        trainer = Siamese(case.model, group)
        loss = trainer.backward(Batch(case.inputs, case.targets, loss_scale=scale))
        return loss, {p.name: p.grad for p in trainer.parameters()}

    case, two = listed("siamese", 2)[0], cluster(2, "thread")
    for (loss, plain), (same, scaled) in zip(
        two.run(worker, case, 1.0), two.run(worker, case, 4.0), strict=True
    ):
        assert loss == same
        assert_same_bits(scaled, {name: 4 * grad for name, grad in plain.items()})


def test_more_than_two_ranks_are_an_error_that_says_why(cluster):
    message = "a pair has 2 branches, so 1 of 3 ranks would have nothing to run; use 1 or 2 ranks"
    with pytest.raises(RankFailed, match=message) as caught:
        cluster(3, "thread").run(siamese_worker, listed("siamese", 2)[0])
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_model_without_branches_and_what_is_no_pair_are_errors(cluster):
    case = listed("siamese", 2)[0]
    mlp = replace(case, model=nn.MLP([6, 3], dtype="float64"))
    with pytest.raises(ValueError, match=r"siamese cannot split MLP; use an nn\.Siamese"):
        check("siamese", mlp, 1, transport="thread")
    with pytest.raises(RankFailed, match=r"pairs have the shape \[B, 2, \.\.\.\], not \[7, 6\]"):
        cluster(2, "thread").run(siamese_worker, replace(case, inputs=case.inputs[:, 0]))


@pytest.mark.parametrize("call", ["forward_backward", "own_parameters"])
def test_a_model_without_two_branches_is_refused(cluster, call):
    def worker(group):
        more = (np.zeros((1, 2, 4)), np.zeros(1, int)) if call == "forward_backward" else ()
        with pytest.raises(ValueError, match=r"MLP has no two branches; use an nn\.Siamese"):
            getattr(branch_placement, call)(nn.MLP([4, 4]), *more, group)
        return "refused"

    assert cluster(1, "thread").run(worker) == ["refused"]
