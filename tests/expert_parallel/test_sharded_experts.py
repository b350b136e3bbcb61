"""Experts over ranks: gradients, weights, norms and state are one device's."""

import copy
from functools import partial

import numpy as np
import pytest

from minidist import nn, optim
from minidist.data_parallel.naive import all_reduce_gradients
from minidist.errors import RankFailed
from minidist.expert_parallel import ExpertParallel, expert_parameters, keep_own_experts
from minidist.nn.datasets import shard
from minidist.rng import Randomness
from minidist.verify.compare import compare
from minidist.verify.strategies import Case, collect


def case_of(model, examples, seed):
    shape = (2, examples, model.context)
    tokens, targets = np.random.default_rng(seed).integers(0, model.vocab, shape)
    return Case("drawn", model, tokens, targets, seed=seed % 100)


def model_of(experts=4, top_k=2, capacity=0.75, **more):
    options = {"top_k": top_k, "capacity": capacity, "balance": 0.3, "seed": 3, "dtype": "float64"}
    return nn.Transformer(7, 8, 4, 2, 5, experts=experts, **options | more)


def trained(group, case, steps, recompute=False):
    """Return (weights, norms, loads of the last step) after some steps with clipping."""
    own = ExpertParallel(copy.deepcopy(case.model), group)
    _, norms, reports = trained_by(
        case, steps, own.model, own.sum_gradients, own.sum_squares, group
    )
    return own.state(), norms, reports


def trained_by(case, steps, model, sum_up, sum_squares, group=None):
    optimizer = optim.AdamW(model.parameters(), lr=0.05)
    rows, norms = np.arange(len(case.inputs)), []
    mine = rows if group is None else shard(rows, group.rank, group.size)
    for step in range(steps):
        logits = model(case.inputs[mine], Randomness(case.seed, step, mine, len(rows)))
        nn.cross_entropy(logits, case.targets[mine], case.targets.size).backward()
        sum_up()
        norms.append(optimizer.clip_global_norm(0.5, sum_squares))
        optimizer.step()
        optimizer.zero_grad()
    return model.state(), norms, [m.report for m in nn.mixtures(model)]


@pytest.mark.parametrize("size, experts, k, capacity", [(2, 4, 2, 0.75), (3, 5, 1, 0.5)])
def test_clipped_steps_end_in_the_weights_norms_and_loads_of_one_device(
    cluster, size, experts, k, capacity
):
    case = case_of(model_of(experts, k, capacity, dropout=0.2), 4, 1)
    want, norms, reports = trained_by(case, 3, copy.deepcopy(case.model), lambda: None, None)
    found = cluster(size, "thread").run(trained, case, 3)
    assert compare([weights for weights, _, _ in found], want).ok
    for _, own, _ in found:
        assert own == pytest.approx(norms, rel=1e-9)
    for i, whole in enumerate(reports):
        parts = [own[i] for _, _, own in found]
        np.testing.assert_array_equal(sum(p.load for p in parts), whole.load)
        np.testing.assert_array_equal(sum(p.dropped for p in parts), whole.dropped)
        assert sum(p.balance for p in parts) == pytest.approx(whole.balance)
    assert any(whole.dropped.any() for whole in reports)


@pytest.mark.parametrize("size, experts", [(2, 4), (3, 2)])
@pytest.mark.parametrize("kept", ["blocks.1.experts.1.contract.bias", "blocks.0.experts.0."])
def test_a_rank_whose_own_experts_are_frozen_sends_the_others_their_gradient(
    cluster, size, experts, kept
):
    """No other parameter is trained before the experts: only they need dY, which all ranks have."""
    model = model_of(experts)
    model.freeze(*(name for name in model.named_parameters() if not name.startswith(kept)))
    case = case_of(model, 5, seed=1)

    def worker(group):
        trainer = ExpertParallel(copy.deepcopy(model), group)
        trainer.backward(case.batch)
        return collect(trainer.model)

    nn.cross_entropy(model(case.inputs, Randomness(0, 0, np.arange(5), 5)), case.targets).backward()
    want = {name: g for name, g in collect(model).items() if name.startswith(kept)}
    found = {}
    for own in cluster(size, "thread").run(worker):
        found |= {name: g for name, g in own.items() if name in want}
    assert (comparison := compare([found], want)).ok, comparison


def loaded(group, state):
    """Return the state, what the rank holds, and what its model is told of other experts."""
    whole = model_of(5)
    first = whole.layers[1].mixture.experts[0].expand.weight
    model = ExpertParallel(whole, group)
    model.load_state(state)
    own = {p.name for p in expert_parameters(model.model)}
    return model.state(), own, first.placement.elsewhere


def test_state_is_one_device_s_and_each_expert_is_on_one_rank(cluster):
    want, size = model_of(5, seed=9).state(), 3
    found = cluster(size, "thread").run(loaded, want)
    for state, _, _ in found:
        assert list(state) == list(want)
        for name, array in want.items():
            np.testing.assert_array_equal(state[name], array)
    names = [name for _, held, _ in found for name in held]
    assert sorted(names) == sorted(name for name in want if ".experts." in name)
    assert [elsewhere is None for *_, elsewhere in found] == [True] + [False] * (size - 1)


def misused(group, how):
    model = ExpertParallel(model_of(), group)
    tokens = np.zeros((2, 5), int)
    batch = None if how == "no batch" else 4
    logits = model.model(tokens, Randomness(0, 0, [0, 1], batch))
    nn.cross_entropy(logits, tokens, reduction_size=20).backward()
    if how == "no sum_squares":
        optim.SGD(model.parameters(), lr=1).clip_global_norm(1.0)
    if how == "clipped parts":
        optim.SGD(model.parameters(), lr=1).clip_global_norm(1.0, model.sum_squares)
    model.sum_gradients()
    if how == "twice around a clip":
        optimizer = optim.SGD(model.parameters(), lr=1)
        optimizer.clip_global_norm(1e-3, model.sum_squares)
        optimizer.clip_global_norm(1e-6, model.sum_squares)  # of what is clipped already
        model.sum_gradients()
    if how == "twice":
        model.sum_gradients()
    all_reduce_gradients(model.model, group)


MISUSES = [
    ("no batch", r"balancing loss of .* is divided by all of it; pass Randomness\(.*batch=B\)"),
    ("no sum_squares", "hold different experts: pass sum_squares=trainer.sum_squares"),
    ("clipped parts", r"is not yet summed over the 2 ranks; call sum_gradients\(\)"),
    ("twice", "would be summed over them again"),
    ("twice around a clip", "would be summed over them again"),
    ("by the sum of replicas", "would be summed over them again"),
]
REFUSED = [
    *[(partial(misused, how=how), message) for how, message in MISUSES],
    (lambda g: ExpertParallel(model_of(0), g), "this Transformer has no experts"),
    (lambda g: ExpertParallel(model_of(seed=g.rank), g), "parameters differ between ranks"),
    (
        lambda g: ExpertParallel(model_of(), g).load_state(model_of(seed=g.rank).state()),
        "parameters differ between ranks",
    ),
    (lambda g: ExpertParallel(model_of(), g).load_state({"no": 1}), "state and model differ"),
    (lambda g: keep_own_experts(model_of(), g, "position"), "positions"),
]


def test_what_would_be_silently_wrong_is_refused(cluster):
    for worker, message in REFUSED:
        with pytest.raises(RankFailed, match=message):
            cluster(2, "thread").run(worker)
