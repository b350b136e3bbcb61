"""Optimizers against a plain reference: one parameter at a time, one line per equation."""

import math
from functools import partial
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist import nn, optim
from tests.strategies import arrays, assert_same_bits, seeds


def draw_gradients(model, steps, seed):
    """Return, per step, an array per parameter name."""
    random = np.random.default_rng(seed)
    state = model.state()
    return [
        {name: random.standard_normal(p.shape) for name, p in state.items()} for _ in range(steps)
    ]


def assign(model, grads):
    for name, p in model.named_parameters().items():
        p.grad = None if grads[name] is None else grads[name].astype(p.dtype)


def train(model, optimizer, gradients):
    for grads in gradients:
        assign(model, grads)
        optimizer.step()
    return model.state()


def sgd(p, gradients, lr, momentum, weight_decay):
    m = 0
    for g in gradients:
        m = momentum * m + g + weight_decay * p
        p = p - lr * m
    return p


def adam(p, gradients, lr, betas, eps, weight_decay, decoupled):
    m = v = 0
    for t, g in enumerate(gradients, start=1):
        if decoupled:
            p = p - lr * weight_decay * p
        else:
            g = g + weight_decay * p
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g**2
        m_hat, v_hat = m / (1 - betas[0] ** t), v / (1 - betas[1] ** t)
        p = p - lr * m_hat / (np.sqrt(v_hat) + eps)
    return p


def adagrad(p, gradients, lr, eps):
    a = 0
    for g in gradients:
        a = a + g**2
        p = p - lr * g / (np.sqrt(a) + eps)
    return p


RULES = {  # the reference, and settings that it shares with the optimizer
    "SGD": (sgd, {"momentum": 0.9}),
    "Adagrad": (adagrad, {"eps": 1e-6}),
    "Adam": (partial(adam, decoupled=False), {"betas": (0.5, 0.7), "eps": 1e-6}),
    "AdamW": (partial(adam, decoupled=True), {"betas": (0.9, 0.999), "eps": 1e-8}),
}


@pytest.mark.parametrize("sizes", [[3, 4, 2], [200, 200]], ids=["small", "longer than a piece"])
@pytest.mark.parametrize("kind", RULES)
def test_an_optimizer_is_the_algorithm_of_its_paper(kind, sizes, device):
    assert optim.PIECE < 200 * 200
    rule, settings = RULES[kind]
    for seed, decay in enumerate([0.0] if kind == "Adagrad" else [0.0, 0.1]):
        settings = settings | {"lr": 0.1} | ({} if kind == "Adagrad" else {"weight_decay": decay})
        model = nn.MLP(sizes, dtype="float64").to(device)
        before, gradients = model.state(), draw_gradients(model, 3, seed)
        optimizer = getattr(optim, kind)(model.parameters(), **settings)
        for grads in gradients:
            for name, p in model.named_parameters().items():
                p.grad = p.xp.asarray(grads[name])
            optimizer.step()
        for name, found in model.state().items():
            want = rule(before[name], [g[name] for g in gradients], **settings)
            np.testing.assert_allclose(found, want, rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("kind", ["SGD", "Adagrad"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_step_at_some_positions_is_a_step_whose_other_gradients_are_zero(kind, dtype):
    models = [nn.MLP([5, 4], dtype=dtype) for _ in range(2)]
    dense, sparse = (getattr(optim, kind)(m.parameters(), 0.1) for m in models)
    random = np.random.default_rng(0)
    for _ in range(3):
        positions = np.sort(random.choice(24, 7, replace=False))
        gradient = np.zeros(24, dtype)
        gradient[positions] = random.standard_normal(7)
        for p, view in zip(
            models[0].parameters(), models[0].layers[0].flat.views(gradient), strict=True
        ):
            p.grad = view
        dense.step()
        sparse.step_at(positions, gradient[positions])
        np.testing.assert_array_equal(*[m.layers[0].flat.vector for m in models], strict=True)
    np.testing.assert_array_equal(dense.state, sparse.state)


def test_a_step_at_some_positions_is_refused_where_zero_gradients_matter():
    model = nn.MLP([2, 2])
    rules = [
        optim.SGD(model.parameters(), 0.1, momentum=0.9),
        optim.SGD(model.parameters(), 0.1, weight_decay=0.1),
        optim.AdamW(model.parameters(), 0.1),
    ]
    for rule in rules:
        with pytest.raises(ValueError, match="changes elements whose gradient is zero"):
            rule.step_at(np.arange(2), np.ones(2, "float32"))
    deep = optim.SGD(nn.MLP([2, 2, 2]).parameters(), 0.1)
    with pytest.raises(ValueError, match="needs one flat slice; this optimizer has 2"):
        deep.step_at(np.arange(2), np.ones(2, "float32"))


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW"])
def test_half_precision_is_updated_in_float32_and_rounded_once(kind):
    """In float16 Adam's 1e-8 is 0, and so is the square of a gradient of 1e-4: 0/0."""
    model = nn.MLP([3, 2], dtype="float16")
    wide = nn.MLP([3, 2], dtype="float32")
    wide.load_state(model.state())
    gradient = {name: 1e-4 * arrays(*p.shape) for name, p in model.state().items()}
    gradient["layers.0.bias"] = None
    rounded = {k: None if g is None else g.astype("float16") for k, g in gradient.items()}
    for m in (model, wide):
        train(m, getattr(optim, kind)(m.parameters(), lr=0.1), [rounded])
    for name, array in model.state().items():
        np.testing.assert_array_equal(array, wide.state()[name].astype("float16"), strict=True)


@given(seed=seeds, max_norm=st.sampled_from([0.1, 1.0, 100.0]))
def test_clipping_scales_the_whole_gradient_to_the_norm(seed, max_norm):
    model = nn.MLP([3, 4, 2], dtype="float64")
    optimizer = optim.SGD(model.parameters(), lr=1)
    (grads,) = draw_gradients(model, 1, seed)
    want = math.sqrt(sum((g**2).sum() for g in grads.values()))
    assign(model, grads)
    assert optimizer.clip_global_norm(max_norm) == pytest.approx(want, rel=1e-12)
    for name, p in model.named_parameters().items():
        np.testing.assert_allclose(p.grad, grads[name] * min(1, max_norm / want), rtol=1e-12)


@pytest.mark.parametrize("size", [1e10, 1e20, 1e30])
def test_a_gradient_whose_squares_are_beyond_its_dtype_is_clipped(size):
    """1e20 squared is infinite in float32, and a step along g / infinity would be none."""
    model = nn.MLP([1, 1])
    optimizer = optim.SGD(model.parameters(), lr=1)
    assign(
        model, {"layers.0.weight": np.array([[3 * size]]), "layers.0.bias": np.array([4 * size])}
    )
    assert optimizer.clip_global_norm(1) == pytest.approx(5 * size, rel=1e-6)
    np.testing.assert_allclose(model.layers[0].weight.grad, [[0.6]], rtol=1e-6)


@pytest.mark.parametrize("change", ["freeze", "flatten", "astype"])
def test_an_optimizer_made_before_the_vectors_changed_is_an_error_at_its_step(change):
    model = nn.MLP([2, 2])
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    getattr(model, change)(*["float64"] if change == "astype" else [])
    with pytest.raises(ValueError, match="was frozen, cast or flattened after its optimizer"):
        optimizer.step()


NONSENSE = {  # of a setting: the optimizers that have it, and what it cannot be
    "lr": ("SGD AdamW", (-0.1, math.nan, math.inf, "1", None)),
    "momentum": ("SGD", (1, -0.1, math.nan)),
    "weight_decay": ("SGD AdamW", (-5, math.inf)),
    "betas": ("AdamW", ((1.0, 0.9), (0.9, math.nan), (0.9,), 0.9)),
    "times": ("Muon", (0, math.nan, "1")),
    "eps": ("Adam Adagrad", (0, math.nan)),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_a_setting_that_is_nonsense_is_refused_at_once_and_between_steps(name):
    kinds, values = NONSENSE[name]
    for kind, value in product(kinds.split(), values):
        model, rule = nn.MLP([2, 2], dtype="float64"), getattr(optim, kind)
        with pytest.raises(ValueError, match=f"{name} must be .*, not"):
            rule(model.parameters(), **({"lr": 0.1} | {name: value}))
        optimizer = rule(model.parameters(), lr=0.1)
        optimizer.step()
        before = model.state()
        setattr(optimizer, name, value)
        with pytest.raises(ValueError, match=f"{name} must be .*, not"):
            optimizer.step()
        assert_same_bits(model.state(), before)


@pytest.mark.parametrize("kind", ["SGD", "Adagrad", "AdamW"])
def test_an_optimizer_over_nothing_steps_and_clips_nothing(kind):
    """A pipeline's stage may be all frozen; its rank runs the same code."""
    model = nn.MLP([2, 2]).freeze()
    for parameters in ([], model.parameters()):
        optimizer = getattr(optim, kind)(parameters, lr=0.1)
        assert optimizer.clip_global_norm(1.0) == 0
        assert optimizer.clip_global_norm(1.0, lambda own: own + 4.0) == 2.0
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.steps == 1


def test_a_graph_whose_weights_were_updated_is_not_run_backward():
    model = nn.MLP([3, 4, 2], dtype="float64")
    x, y = arrays(5, 3), np.zeros(5, int)
    for update in (
        lambda: optim.SGD(model.parameters(), lr=0.1).step(),
        lambda: model.load_state(model.state()),
    ):
        loss = nn.cross_entropy(model(x), y)
        update()
        with pytest.raises(
            ValueError, match=r"was updated after the forward pass .* run the forward"
        ):
            loss.backward()
        assert all(p.grad is None for p in model.parameters())
        nn.cross_entropy(model(x), y).backward()
        for p in model.parameters():
            p.grad = None


def test_the_norm_of_parts_of_parameters_is_no_global_norm():
    whole = nn.Linear(4, 6, dtype="float64")
    whole.weight = whole.weight.part(nn.Shard(1, np.arange(3), 6))
    whole.bias = None
    optimizer = optim.SGD(nn.Sequential([whole]).parameters(), lr=0.1)
    with pytest.raises(ValueError, match="pass sum_squares="):
        optimizer.clip_global_norm(1.0)
    assert optimizer.clip_global_norm(1.0, lambda own: 4.0) == 2.0


@pytest.mark.gpu
@pytest.mark.parametrize("there", ["cpu", "gpu"])
def test_a_model_that_moves_after_the_first_step_needs_a_new_optimizer(there):
    model = nn.MLP([2, 3]).to(there)
    late, early, stateless = (
        make(model.parameters(), 0.1) for make in [optim.Adam] * 2 + [optim.SGD]
    )
    early.step()
    stateless.step()
    before = model.to({"cpu": "gpu", "gpu": "cpu"}[there]).state()
    with pytest.raises(ValueError, match=r"moved to another device.*after model.to"):
        early.step()
    assert all((model.state()[name] == before[name]).all() for name in before)
    assert early.steps == 1
    for optimizer in (late, stateless):
        optimizer.step()


def test_groups_of_parameters_are_optimizers_of_their_own():
    """Weight decay for matrices alone: one optimizer refuses groups and says so; two have them."""
    model = nn.MLP([4, 3, 2], dtype="float64")
    groups = [[p for p in model.parameters() if p.ndim == axes] for axes in (2, 1)]
    dicts = [{"params": group} for group in groups]
    for wrong in (dicts, model.named_parameters(), [p.data for p in groups[0]], groups):
        with pytest.raises(ValueError, match=r"list of parameters, .* make one optimizer of each"):
            optim.AdamW(wrong, 1e-2)
    gradients = draw_gradients(model, 3, 0)
    decays = 0.5, 0.0
    made = [optim.AdamW(g, 1e-2, weight_decay=d) for g, d in zip(groups, decays, strict=True)]
    for grads in gradients:
        assign(model, grads)
        for optimizer in made:
            optimizer.step()
    for decay, axes in zip(decays, (2, 1), strict=True):
        alone = nn.MLP([4, 3, 2], dtype="float64")
        want = train(alone, optim.AdamW(alone.parameters(), 1e-2, weight_decay=decay), gradients)
        for name, p in model.named_parameters().items():
            if p.ndim == axes:
                np.testing.assert_array_equal(p.data, want[name])
