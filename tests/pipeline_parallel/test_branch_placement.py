"""Two branches on two ranks leave one device's gradient, and move the bytes of the formula."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist import nn, optim
from minidist.errors import RankFailed
from minidist.pipeline_parallel import branch_placement
from minidist.planning.costs.branch_placement import siamese_bytes
from minidist.tools.compare import compare
from minidist.tools.equivalence import check
from minidist.tools.strategies import Case, one_device
from minidist.tools.strategies.siamese import siamese_cases, siamese_worker
from tests.pipeline_parallel.branches import judge
from tests.strategies import arrays, seeds


def assert_equal_to_one_device(ranks, case, **options):
    comparison, moved = judge(ranks, case, **options)
    assert comparison.ok, comparison
    assert moved == siamese_bytes(case, ranks.size)


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
    assert_equal_to_one_device(cluster(size, "thread"), case, micro_batches=micro_batches)


@settings(max_examples=15)
@given(case=cases(), **splits)
def test_every_gradient_and_byte_on_processes(cluster, case, size, micro_batches):
    assert_equal_to_one_device(cluster(size, "process"), case, micro_batches=micro_batches)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("case", siamese_cases(2), ids=lambda case: case.name)
def test_the_cases_of_the_judge(cluster, case, size):
    assert_equal_to_one_device(cluster(size), case)


@pytest.mark.parametrize(
    "frozen",
    [
        ["branch.0.bias"],
        ["join.weight", "join.bias"],
        [f"branch.{i}.{kind}" for i in range(2) for kind in ("weight", "bias")],
    ],
    ids=["a bias", "the join", "the branch"],
)
def test_frozen_parameters_have_no_gradient_and_cost_no_bytes(cluster, frozen):
    case = siamese_cases(2)[0]
    case.model.freeze(*frozen)
    for size in (1, 2):
        assert_equal_to_one_device(cluster(size, "thread"), case)
    assert all(not one_device(case)[name].any() for name in frozen)


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
    assert sum(o.bytes for o in outcomes) == siamese_bytes(case, 2)


def test_bytes_by_operation_are_an_embedding_there_its_gradient_back_and_the_shared_weights(
    cluster,
):
    B, C, F, E = 7, 6, 9, 4
    shared = 8 * (C * F + F + F * E + E)

    def update(group, case):
        branch_placement.forward_backward(case.model, case.inputs, case.targets, group)
        branch_placement.all_reduce_shared(case.model, group)
        return dict(group.ledger.bytes)

    case = siamese_cases(2)[0]
    assert case.inputs.shape == (B, 2, C) and case.model.branch[0].weight.shape == (C, F)
    by_rank = cluster(2).run(update, case)
    assert [ledger["send"] for ledger in by_rank] == [8 * B * E, 8 * B * E]
    assert sum(ledger["all_reduce"] for ledger in by_rank) == 2 * shared
    assert all(ledger.keys() == {"send", "all_reduce"} for ledger in by_rank)
    assert siamese_bytes(case, 2) == 2 * 8 * B * E + 2 * shared
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

    case = siamese_cases(2)[0]
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


def train(group, case, steps, make):
    """Take some steps in uneven micro-batches; return the weights that this rank updates."""
    model = case.model
    own = branch_placement.own_parameters(model, group)
    optimizer = make(own)
    for _ in range(steps):
        for rows in (slice(0, 4), slice(4, 5), slice(5, 7)):
            branch_placement.forward_backward(
                model, case.inputs[rows], case.targets[rows], group, case.loss, case.targets.size
            )
        branch_placement.all_reduce_shared(model, group)
        optimizer.step()
        optimizer.zero_grad()
    return {p.name: p.data.copy() for p in own}


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: optim.SGD(parameters, 0.05, momentum=0.9, weight_decay=0.01),
        lambda parameters: optim.AdamW(parameters, 0.01, weight_decay=0.1),
    ],
    ids=["sgd", "adamw"],
)
def test_the_weights_after_some_steps_equal_one_devices(cluster, make):
    case = siamese_cases(2)[0]
    before = case.model.state()
    model = nn.Siamese([6, 9, 4], classes=3, activation="gelu", seed=1, dtype="float64")
    optimizer = make(model.parameters())
    for _ in range(5):
        case.loss(model(case.inputs), case.targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    want = model.state()
    assert min(np.abs(want[name] - w).max() for name, w in before.items()) > 1e-3
    joined, other = cluster(2).run(train, case, 5, make)
    assert joined.keys() == want.keys()
    assert [name for name in want if name not in other] == ["join.weight", "join.bias"]
    assert all(joined[name].tobytes() == w.tobytes() for name, w in other.items())
    for got in (joined, *cluster(1).run(train, case, 5, make)):
        comparison = compare([got], want)
        assert comparison.ok, comparison


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

    case = siamese_cases(2)[0]
    want = {name: grad for name, grad in one_device(case).items() if name != "(input)"}
    for got in cluster(4, "thread").run(worker, case):
        comparison = compare([want | got], want)
        assert comparison.ok, comparison


def test_more_than_two_ranks_are_an_error_that_says_why(cluster):
    message = "a pair has 2 branches, so 1 of 3 ranks would have nothing to run; use 1 or 2 ranks"
    with pytest.raises(RankFailed, match=message) as caught:
        cluster(3, "thread").run(siamese_worker, siamese_cases(2)[0])
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_model_without_branches_and_what_is_no_pair_are_errors(cluster):
    case = siamese_cases(2)[0]
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
