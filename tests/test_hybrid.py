"""Data x pipeline x tensor on a mesh: gradients, clipping and weights equal one device's."""

import copy
from itertools import product

import numpy as np
import pytest

from minidist import Mesh, nn, optim
from minidist.hybrid import Hybrid
from minidist.rng import Randomness, generator
from minidist.tools.compare import compare

SCHEDULES = [
    {"schedule": "1f1b"},
    {"schedule": "gpipe", "split_sequence": True},
    {"schedule": "zb_h1", "weights_last": True},
]
MESHES = [
    (dp, pp, tp)
    for dp, pp, tp in product(range(1, 9), repeat=3)
    if dp * pp * tp <= 8 and pp <= 5 and tp in (1, 2, 3, 4)
]
SMALL = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (1, 2, 2), (2, 1, 2), (1, 3, 1)]


def three_steps(group, mesh, options, tied):
    """Train three steps on the mesh and on one device; return what differs on this rank."""
    dp, pp, tp = mesh
    tokens = generator(0, "hybrid").integers(0, 11, (3, 2, 5, 12))
    model = nn.Transformer(11, 24, 12, 3, 12, 3, "float64", dropout=0.2, tied=tied)
    hybrid = Hybrid(copy.deepcopy(model), Mesh(group, dp=dp, pp=pp, tp=tp), **options)
    ours = optim.AdamW(hybrid.parameters(), lr=1e-2, weight_decay=0.1)
    theirs = optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    rows = []
    for step, (inputs, targets) in enumerate(tokens):
        loss = hybrid.backward(inputs, targets, seed=7, step=step)
        want = nn.cross_entropy(model(inputs, Randomness(7, step, np.arange(5))), targets)
        want.backward()
        got = hybrid.whole({name: p.grad for name, p in hybrid.named_parameters().items()})
        comparison = compare([got], {n: p.grad for n, p in model.named_parameters().items()})
        norms = ours.clip_global_norm(0.1, hybrid.sum_squares), theirs.clip_global_norm(0.1)
        rows.append((comparison, loss - want.item(), norms[0] / norms[1] - 1))
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    return rows, compare([hybrid.state()], model.state())


def check(ranks, mesh, options, tied):
    for rows, weights in ranks.run(three_steps, mesh, options, tied):
        for comparison, loss, norm in rows:
            assert comparison.ok, str(comparison)
            assert abs(loss) < 1e-12 and abs(norm) < 1e-12
        assert weights.ok, str(weights)


@pytest.mark.parametrize("options", SCHEDULES, ids=lambda o: o["schedule"])
@pytest.mark.parametrize("mesh", SMALL, ids=str)
def test_a_mesh_leaves_the_gradients_and_weights_of_one_device(cluster, mesh, options):
    check(cluster(int(np.prod(mesh))), mesh, options, tied=mesh[1] > 1)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("options", SCHEDULES, ids=lambda o: o["schedule"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_mesh_of_up_to_eight_ranks(cluster, mesh, options, tied):
    check(cluster(int(np.prod(mesh))), mesh, options, tied)
