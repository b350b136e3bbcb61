"""Muon against a plain reference, and on ranks that hold parts of matrices against one device."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist import Mesh, nn, optim
from minidist.data_parallel.zero import Zero
from minidist.errors import RankFailed
from minidist.hybrid import Hybrid
from minidist.nn.datasets import Batch
from minidist.nn.optim.muon import hidden_matrices, newton_schulz
from minidist.parallel.trainer import loss_of
from minidist.parallel.whole_matrices import WholeMatrices
from minidist.verify.compare import compare
from minidist.verify.strategies.cases import random_weights
from tests.strategies import arrays, seeds
from tests.test_optim import adam, assign, draw_gradients

SQUARE = {"lr": 0.02, "weight_decay": 0.1}
TOKENS = np.arange(40).reshape(8, 5) * 7 % 11


def transformer():
    return random_weights(nn.Transformer(11, 12, 6, 2, 5, 3, "float64"))


def plain_newton_schulz(x):
    """Work on the singular values alone: the iteration is a polynomial of each of them."""
    u, s, v = np.linalg.svd(x, full_matrices=False)
    s = s / np.sqrt((s**2).sum())
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u * s @ v


def plain_muon(p, gradients, lr, weight_decay, size, mu=0.95):
    m = 0
    for g in gradients:
        m = mu * m + g
        p = p - lr * weight_decay * p - lr * size * plain_newton_schulz(g + mu * m)
    return p


@given(seeds, st.sampled_from([(5, 5), (3, 8), (8, 3), (1, 6), (6, 1)]))
def test_newton_schulz_keeps_the_directions_and_makes_the_singular_values_about_one(seed, shape):
    x = arrays(*shape, seed=seed)
    got, (u, _, v) = newton_schulz(x), np.linalg.svd(x, full_matrices=False)
    inside = u.T @ got @ v.T
    assert abs(inside - np.diag(np.diag(inside))).max() < 1e-6
    np.testing.assert_allclose(got, plain_newton_schulz(x), atol=1e-6)
    big = np.linalg.svd(x / np.linalg.norm(x), compute_uv=False) > 0.01
    assert (abs(np.diag(inside)[big] - 0.9) < 0.35).all()


@pytest.mark.parametrize("scale", ["match_rms_adamw", "original"])
def test_muon_is_nesterov_momentum_made_orthogonal_and_adamw_for_the_rest(scale):
    model = transformer()
    before, gradients = model.state(), draw_gradients(model, 3, seed=4)
    optimizer = optim.Muon(model.parameters(), **SQUARE, scale=scale, times=2.0)
    for grads in gradients:
        assign(model, grads)
        optimizer.step()
    for name, got in model.state().items():
        own, (A, *B) = [g[name] for g in gradients], got.shape
        if not hidden_matrices(name, got.shape):
            want = adam(before[name], own, 0.02, (0.9, 0.999), 1e-8, 0.1, decoupled=True)
        else:
            several = 3 if "qkv" in name else 1  # queries, keys and values: a matrix each
            (B,) = B
            size = math.sqrt(max(1, B / several / A)), 0.2 * math.sqrt(max(A, B / several))
            size = 2 * size[scale == "match_rms_adamw"]
            pieces = zip(*(np.split(x, several, axis=1) for x in (before[name], *own)), strict=True)
            want = np.hstack([plain_muon(p, g, **SQUARE, size=size) for p, *g in pieces])
        np.testing.assert_allclose(got, want, rtol=1e-7, atol=1e-9, err_msg=name)


def test_a_step_on_a_gpu_is_a_step_on_the_host(device):
    model = transformer().to(device)
    optimizer = optim.Muon(model.parameters(), **SQUARE)
    for step in range(2):
        loss_of(model, Batch(TOKENS, TOKENS, step=step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert compare([model.state()], one_device()).ok


def worker(group, stage, owners, mesh=None, steps=2):
    """Return the weights after some steps, and the bytes that Muon has sent."""
    if mesh is None:
        trainer = Zero(transformer().flatten(group.empty), group, stage)
    else:
        trainer = Hybrid(transformer(), Mesh(group, **mesh), zero=stage)
    whole = WholeMatrices(apart := group.split(0), owners)
    optimizer = optim.Muon(trainer.parameters(), **SQUARE, whole=whole)
    for step in range(steps):
        trainer.backward(Batch(TOKENS, TOKENS, step=step))
        trainer.step(optimizer)
    return trainer.state(), apart.ledger.total


def one_device(steps=2):
    model = transformer()
    optimizer = optim.Muon(model.parameters(), **SQUARE)
    for step in range(steps):
        loss_of(model, Batch(TOKENS, TOKENS, step=step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state()


@pytest.mark.parametrize("stage, owners", [(1, "one"), (3, "every")])
def test_shards_of_zero_are_updated_as_whole_matrices(cluster, stage, owners):
    found = cluster(3, "thread").run(worker, stage, owners)
    assert compare([state for state, _ in found], one_device()).ok
    S = 8 * sum(w.size for n, w in one_device().items() if hidden_matrices(n, w.shape))
    sent = sum(bytes_sent for _, bytes_sent in found) / 2  # in a step
    assert 0 < sent < (2 * S if owners == "every" else 4 / 3 * S)  # where runs of shards end


@pytest.mark.slow
@pytest.mark.grid(10)
@pytest.mark.parametrize("owners", ["one", "every"])
@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize(
    "sizes",
    [
        (dp, pp, cp, tp)
        for dp in (1, 2, 3, 4, 8)
        for pp in (1, 2, 4)
        for cp in (1, 2)
        for tp in (1, 2, 3, 6)
        if 1 < dp * pp * cp * tp <= 8
    ],
)
def test_all_meshes_up_to_eight_ranks_have_the_weights_of_one_device(cluster, sizes, zero, owners):
    mesh, size = dict(zip(("dp", "pp", "cp", "tp"), sizes, strict=True)), math.prod(sizes)
    found = cluster(size, "thread").run(worker, zero, owners, mesh)
    assert compare([state for state, _ in found], one_device()).ok


def part_alone(group):
    trainer = Hybrid(transformer(), Mesh(group, dp=1, pp=1, tp=2))
    trainer.backward(Batch(TOKENS, TOKENS))
    trainer.step(optim.Muon(trainer.parameters(), lr=0.1))


def with_a_group_that_lacks_a_rank(group):
    zero = Zero(transformer().flatten(), group)
    whole = WholeMatrices(group.split(group.rank))
    zero.backward(Batch(TOKENS, TOKENS))
    zero.step(optim.Muon(zero.parameters(), lr=0.1, whole=whole))


@pytest.mark.parametrize(
    "step, message",
    [
        (part_alone, r"Muon needs all of blocks.0.*pass whole=.*WholeMatrices"),
        (with_a_group_that_lacks_a_rank, r"no rank has .* give WholeMatrices the group of all"),
    ],
)
def test_a_part_of_a_matrix_alone_is_refused(cluster, step, message):
    with pytest.raises(RankFailed, match=message):
        cluster(2, "thread").run(step)


def test_settings_are_checked():
    for wrong in {"scale": "adam"}, {"momentum": 1.0}, {"lr": -1.0}, {"times": float("nan")}:
        with pytest.raises(ValueError, match=next(iter(wrong))):
            optim.Muon(transformer().parameters(), **({"lr": 0.1} | wrong))
