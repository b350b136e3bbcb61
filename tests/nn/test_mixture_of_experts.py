"""A mixture of experts: its routing as a value, its gradients, and what no split may change."""

import copy

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist import Tensor, nn
from minidist.nn.router import route, rows_of_capacity
from minidist.pieces import Positions
from minidist.rng import Randomness
from tests.nn.differences import assert_gradients_are_differences
from tests.strategies import arrays, gradients, leaf, seeds


@st.composite
def choices(draw, most=6):
    """Draw chosen[B, T, k], distinct along the last axis, and the number of experts."""
    E, B, T = draw(st.integers(1, 5)), draw(st.integers(0, 3)), draw(st.integers(0, most))
    k, random = draw(st.integers(1, E)), np.random.default_rng(draw(seeds))
    return np.argsort(random.random((B, T, E)), axis=-1)[..., :k], E


def queues(chosen, experts, capacity):
    """Return `kept` by a loop: the definition."""
    kept = np.zeros(chosen.shape, bool)
    for b, example in enumerate(chosen):
        length = [0] * experts
        for t, choice in enumerate(example):
            for j, e in enumerate(choice):
                kept[b, t, j] = length[e] < capacity
                length[e] += 1
    return kept


@given(choices(), st.integers(0, 4))
def test_an_expert_keeps_the_first_choices_in_its_queue_of_each_example(drawn, capacity):
    chosen, E = drawn
    routing = route(chosen, E, capacity)
    np.testing.assert_array_equal(routing.kept, queues(chosen, E, capacity))
    assert (route(chosen, E).kept).all()


@pytest.mark.parametrize(
    ("factor", "k", "T", "E", "rows"),
    [
        (1.25, 2, 16, 8, 5),
        (1.1, 1, 20, 2, 11),
        (1.0, 1, 7, 3, 3),
        (0.1, 1, 4, 4, 1),
        (0.07, 1, 100, 1, 7),  # in floats, 7.000000000000001
        (2, 2, 0, 4, 0),
    ],
)
def test_the_capacity_is_rounded_up_and_exact(factor, k, T, E, rows):
    assert rows_of_capacity(factor, k, T, E) == rows
    assert rows_of_capacity(None, k, T, E) is None


def mixture(width=3, experts=4, **options):
    return nn.MixtureOfExperts(width, experts, seed=1, dtype="float64", **options)


def dense(layer, x):
    """Return the sum over all experts of P_e expert_e(X), by a loop."""
    p = layer.gate(x).data
    p = np.exp(p) / np.exp(p).sum(-1, keepdims=True)
    rows = x.reshape(-1, x.shape[-1])
    return sum(
        p[..., e, None] * expert(rows).data.reshape(x.shape)
        for e, expert in enumerate(layer.experts)
    )


@given(seeds, st.integers(1, 5))
def test_with_all_experts_and_no_capacity_it_is_the_dense_mixture(seed, experts):
    layer, x = mixture(experts=experts, top_k=experts, capacity=None), leaf(2, 5, 3, seed=seed)
    np.testing.assert_allclose(layer(x).data, dense(layer, x), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_gates_are_the_softmax_over_the_k_largest_logits_or_for_one_its_own_share(k):
    layer, x = mixture(top_k=k, capacity=None), Tensor(arrays(1, 6, 3))
    logits, y = layer.gate(x).data[0], layer(x).data[0]
    for t in range(6):
        best = np.argsort(-logits[t])[:k]
        share = np.exp(logits[t, best])
        share /= share.sum() if k > 1 else np.exp(logits[t]).sum()
        rows = [layer.experts[e](Tensor(x.data[0, t : t + 1])).data[0] for e in best]
        np.testing.assert_allclose(y[t], share @ rows, rtol=1e-10)


def test_a_dropped_position_passes_by_the_mixture_in_a_block():
    model = nn.Transformer(5, 4, 2, 1, 6, dtype="float64", experts=2, top_k=1, capacity=0.1)
    block, tokens = model.layers[1], np.array([[1, 1, 1, 1, 1, 1]])
    x = model.layers[0](tokens)
    x1 = x.data + block.attention(block.norm_1(x)).data
    passed = (block(x).data == x1).all(axis=-1)
    report = block.mixture.report
    assert passed.sum() == report.dropped.sum() == 6 - report.load.sum() >= 4


def explicit(model, tokens, targets):
    """Return the cross-entropy plus the balancing losses of all blocks, computed by P and f."""
    x, total = model.layers[0](tokens), 0
    for block in model.layers[1:-1]:
        x1 = x + block.attention(block.norm_1(x))
        layer, inner = block.mixture, block.norm_2(x1)
        logits = layer.gate(inner)
        p = logits.exp() / logits.exp().sum(axis=-1, keepdims=True)
        chosen = np.argsort(-p.data, axis=-1, kind="stable")[..., : layer.top_k]
        B, T, E = p.shape
        f = (chosen[..., None] == np.arange(E)).sum(axis=(1, 2)) / (T * layer.top_k)
        total = total + (p.mean(axis=1) * f).sum() * (layer.balance * E / B)
        x = block(x)
    return nn.cross_entropy(model.layers[-1](x), targets), total


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("capacity", [None, 0.75])
def test_gradients_are_those_of_the_cross_entropy_plus_the_balancing_loss(k, capacity):
    options = {"top_k": k, "capacity": capacity, "balance": 0.5}
    model = nn.Transformer(7, 4, 2, 2, 5, 3, "float64", experts=3, **options)
    tokens, targets = np.random.default_rng(0).integers(0, 7, (2, 3, 5))

    silent = copy.deepcopy(model)
    nn.cross_entropy(model(tokens), targets).backward()
    got = gradients(model)
    value = sum(block.mixture.report.balance for block in model.layers[1:-1])

    for block in silent.layers[1:-1]:  # its balancing loss is the explicit one alone
        block.mixture.decide = without_gradient(block.mixture.decide)
    assert value == pytest.approx(explicit(silent, tokens, targets)[1].item(), rel=1e-12)

    def both():
        cross_entropy, balance = explicit(silent, tokens, targets)
        return cross_entropy + balance

    assert_gradients_are_differences(silent, both)
    silent.zero_grad()
    both().backward()
    for name, p in silent.named_parameters().items():
        np.testing.assert_allclose(got[name], p.grad, rtol=1e-9, atol=1e-12, err_msg=name)


def without_gradient(decide):
    def decided(p, randomness):
        routing, weights = decide(p, randomness)
        return routing, 0 * weights

    return decided


HALVES = [Positions(((0, 1), (4, 5)), 5), Positions(((1, 4),), 5)]


def test_a_cut_sequence_routes_as_the_whole_one_if_its_choices_are_gathered():
    whole, x = mixture(capacity=0.5, balance=0.4), arrays(2, 5, 3)
    parts, chosen = copy.deepcopy(whole), {}

    def gather(mine, randomness):
        found = np.zeros((2, 5, 2), np.int64)
        for held in HALVES:
            found[:, held.indices] = chosen[held]
        np.testing.assert_array_equal(found[:, randomness.positions.indices], mine)
        return found

    want = whole(Tensor(x))
    want.backward(arrays(2, 5, 3, seed=1))
    whole_choices = np.argsort(-whole.gate(Tensor(x)).data, axis=-1)[..., :2]
    chosen.update({held: whole_choices[:, held.indices] for held in HALVES})
    parts.gather_choices, balance = gather, 0.0
    for held in HALVES:
        own = parts(Tensor(x[:, held.indices]), Randomness(0, 0, [0, 1], positions=held))
        np.testing.assert_allclose(own.data, want.data[:, held.indices], rtol=1e-12)
        own.backward(arrays(2, 5, 3, seed=1)[:, held.indices])
        balance += parts.report.balance
    assert balance == pytest.approx(whole.report.balance)
    for name, g in gradients(parts).items():
        np.testing.assert_allclose(g, gradients(whole)[name], rtol=1e-9, atol=1e-12, err_msg=name)


def test_no_examples_no_positions_and_an_expert_without_rows():
    layer = mixture(top_k=1, experts=3)
    for shape in ((0, 4, 3), (2, 0, 3)):
        assert layer(leaf(*shape)).shape == shape
    layer.gate.weight.data[:, 2] = -100.0 * np.sign(arrays(3))
    x = Tensor(np.tile(np.sign(arrays(3)), (1, 4, 1)))
    y = layer(x)
    assert layer.report.load[2] == 0 < layer.report.load.sum()
    y.backward(np.ones(y.shape))
    assert not layer.experts[2].expand.weight.grad.any()
