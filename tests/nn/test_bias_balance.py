"""Experts of today: a bias that balances them, groups, shared and fine-grained ones."""

import copy

import numpy as np
import pytest

from minidist import Tensor, nn, no_grad, optim
from minidist.nn.router import choose
from minidist.parallel.trainer import update
from minidist.rng import Randomness
from tests.nn.differences import assert_gradients_are_differences
from tests.strategies import arrays, gradients, leaf

OPTIONS = {"experts": 8, "top_k": 4, "capacity": None, "expert_width": 5, "shared": 2}
OPTIONS |= {"bias_rate": 0.1, "groups": 4, "most_groups": 2}


def mixture(width=3, experts=4, **options):
    return nn.MixtureOfExperts(width, experts, seed=1, dtype="float64", **options)


def biased(*bias, **options):
    layer = mixture(experts=len(bias), capacity=None, bias_rate=0.25, **options)
    layer.bias.bias.data[:] = bias
    return layer


def test_the_bias_decides_who_is_chosen_and_nothing_else():
    x = Tensor(arrays(2, 6, 3))
    layer = biased(0, 9, 0, 9)
    plain = copy.deepcopy(layer)
    plain.bias, plain.experts = None, [plain.experts[1], plain.experts[3]]
    plain.gate.weight.data = plain.gate.weight.data[:, [1, 3]]
    y, want = layer(x), plain(x)  # weights of the two chosen: the softmax over their logits
    assert layer.report.load.tolist() == [0, 12, 0, 12]
    np.testing.assert_allclose(y.data, want.data, rtol=1e-12)
    for each in (y, want):
        each.backward(arrays(2, 6, 3, seed=1))
    np.testing.assert_allclose(
        layer.experts[3].expand.weight.grad, plain.experts[1].expand.weight.grad, rtol=1e-9
    )
    assert layer.bias.bias.grad is None


def test_the_bias_of_crowded_experts_falls_and_that_of_idle_ones_rises():
    balance = nn.BiasBalance(4, 0.25)
    balance.count(np.array([[[0, 1], [0, 2], [0, 1]]]))  # loads 3 2 1 0, mean 1.5
    balance.move()
    assert balance.bias.data.tolist() == [-0.25, -0.25, 0.25, 0.25]


def test_a_load_is_counted_in_backward_in_training_and_where_the_gate_trains():
    layer, x, ones = biased(0, 0, 0), leaf(2, 5, 3), np.ones((2, 5, 3))
    for count in (1, 2):
        layer(x)
        with no_grad():
            layer(x)
        layer.eval()(x).backward(ones)
        layer.train()(x).backward(ones)
        assert layer.bias.load.sum() == count * 2 * 5 * 2
    assert not copy.deepcopy(layer).bias.load.any()  # a copy has no gradient
    nn.move_biases(layer)
    assert not layer.bias.load.any() and layer.bias.bias.data.any()
    layer.gate.weight.requires_grad = False
    layer(x).backward(ones)
    assert not layer.bias.load.any()


def test_a_load_whose_gradient_is_dropped_before_the_bias_moves_is_an_error():
    layer = biased(0, 0, 0).flatten()
    layer(leaf(2, 5, 3)).backward(np.ones((2, 5, 3)))
    layer.zero_grad()
    with pytest.raises(ValueError, match="call move_biases before zero_grad"):
        nn.move_biases(layer)
    nn.move_biases(layer, moved=False)
    nn.move_biases(layer)
    assert not layer.bias.bias.data.any()


def test_a_skipped_step_moves_no_bias_and_its_loads_are_forgotten():
    class Skips(optim.SGD):
        def step(self):
            pass

    layer = biased(0, 0, 0).flatten()
    for rule, moves in ((Skips, False), (optim.SGD, True)):
        layer(leaf(2, 5, 3)).backward(arrays(2, 5, 3))
        update(rule(layer.parameters(), lr=0.1), layer)
        assert layer.bias.bias.data.any() == moves and not layer.bias.load.any()


def test_a_bias_stays_in_float64_whatever_the_models_dtype():
    model = nn.Transformer(5, 4, 2, 1, 3, experts=3, bias_rate=1e-3).astype("float16")
    (bias,) = (b.bias for b in model.modules(nn.BiasBalance))
    assert bias.dtype == "float64" and model.layers[1].mixture.gate.weight.dtype == "float16"
    model(np.zeros((1, 3), int))


@pytest.mark.parametrize("k, most_groups, best", [(2, 1, [0, 1]), (2, 2, [4, 0]), (4, 2, 0)])
def test_a_position_chooses_from_the_groups_whose_best_experts_have_the_largest_sum(
    k, most_groups, best
):
    scores = np.array([[[5.0, 4, 0, 1, 6, 1, 3, 3]]])  # sums of the best two: 9, 1, 7, 6
    chosen = choose(scores, k, 4, most_groups)[0, 0].tolist()
    assert chosen == (best or [4, 0, 1, 5])


def test_no_expert_of_another_group_is_chosen_whatever_the_bias():
    scores = np.array([[[-3.0, -4, -9, -9, -8, -9]]])
    assert choose(scores, 2, 3, 1).tolist() == [[[0, 1]]]


def test_shared_experts_are_added_for_every_position_and_have_no_gate():
    x, layer = Tensor(arrays(2, 6, 3)), mixture(shared=2, expert_width=5)
    y, shared = layer(x).data, layer.shared
    assert shared.expand.weight.shape == (3, 10) and layer.experts[0].expand.weight.shape == (3, 5)
    layer.shared = None
    np.testing.assert_allclose(y, layer(x).data + shared(x).data, rtol=1e-12)


def test_gradients_of_todays_experts_are_differences():
    model = nn.Transformer(7, 4, 2, 1, 5, 3, "float64", balance=0.0, **OPTIONS)
    for layer in nn.mixtures(model):
        layer.bias.bias.data[:] = arrays(8) / 10
    tokens, targets = np.random.default_rng(0).integers(0, 7, (2, 3, 5))

    def loss():
        return nn.cross_entropy(model(tokens, Randomness(0, 0, np.arange(3))), targets)

    loss().backward()
    assert gradients(model)["blocks.0.shared.expand.weight"].any()
    assert_gradients_are_differences(model, loss)
