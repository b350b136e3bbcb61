"""The training loop of the command line: what it certifies, and what it refuses to begin."""

import threading
from collections import defaultdict
from itertools import product

import numpy as np
import pytest

from minidist import optim
from minidist.data_parallel.replicated import DataParallel
from minidist.errors import RankFailed
from minidist.nn.datasets import Batch, Text
from minidist.training.kinds import model_of
from minidist.training.loop import train
from minidist.training.settings import Settings
from minidist.verify.certificate import certify
from minidist.verify.compare import compare
from tests.strategies import SYNCHRONOUS, fitting, gradients

MESHES = [mesh for mesh in product(range(1, 9), repeat=3) if np.prod(mesh) <= 8]
FEW = [("1f1b", (2, 1, 2), 0), ("zb_v", (1, 2, 1), 1), ("interleaved", (1, 2, 1), 0)]
ALL = list(product(SYNCHRONOUS, MESHES, (0, 1)))
GRID = pytest.mark.slow, pytest.mark.grid(40)
FIVE = Text(np.random.default_rng(0).integers(0, 5, 400), "abcde", "five characters")


def certificate(schedule: str, mesh: tuple[int, int, int], tied: int) -> dict:
    """Certify a model with as many layers, heads and micro-batches as the mesh needs."""
    dp, pp, tp = mesh
    settings = Settings(
        context=3,
        width=2 * tp,
        heads=tp,
        depth=max(1, 2 * pp - 2),
        dropout=0.1,
        tied=bool(tied),
        dp=dp,
        pp=pp,
        tp=tp,
        schedule=schedule,
        micro_batches=fitting(schedule, pp, pp),
    )
    text = Text(np.arange(80) * 7 % 5, "abcde", "a text of five characters")
    return certify(model_of(text, settings), text, settings, "thread")


@pytest.mark.parametrize(
    "schedule, mesh, tied",
    [*FEW, *(pytest.param(*case, marks=GRID) for case in ALL if case not in FEW)],
    ids=str,
)
def test_every_synchronous_schedule_is_certified_on_every_mesh(schedule, mesh, tied):
    row = certificate(schedule, mesh, tied)
    assert row["ok"], row["detail"]


def test_training_on_a_mesh_clips_by_the_norm_that_one_rank_has(cluster, monkeypatch):
    norms, clip = defaultdict(list), optim.Optimizer.clip_global_norm

    def noted(self, max_norm, sum_squares=None):
        norms[threading.get_ident()].append(clip(self, max_norm, sum_squares))

    def norms_on(dp, pp, tp):
        norms.clear()
        settings = Settings(
            steps=3, batch=6, context=8, width=16, dp=dp, pp=pp, tp=tp, micro_batches=3
        )
        cluster(dp * pp * tp, "thread").run(train, FIVE, settings)
        return list(norms.values())

    monkeypatch.setattr(optim.Optimizer, "clip_global_norm", noted)
    (want,) = norms_on(1, 1, 1)
    found = norms_on(2, 2, 1)
    assert len(found) == 4 and len(want) == 3
    np.testing.assert_allclose(found, [want] * len(found), rtol=1e-4)


def padded_gradients(group, targets):
    """Return the loss and the gradients of a Transformer on 5 examples, by the ranks' sum."""
    model = model_of(FIVE, Settings(context=4, width=8, depth=1)).astype("float64")
    tokens = np.random.default_rng(0).integers(0, 5, (5, 4))
    loss = DataParallel(model, group).backward(Batch(tokens, targets))
    return {"loss": np.array(loss), **gradients(model)}


def test_padding_is_not_learned_and_counts_on_no_rank(cluster):
    """The last of 4 ranks has one target, the third none."""
    targets = np.random.default_rng(1).integers(0, 5, (5, 4))
    targets[0, 2], targets[3], targets[4, 1:] = -1, -1, -1
    (want,) = cluster(1, "thread").run(padded_gradients, targets)
    for size in (2, 4):
        comparison = compare(cluster(size, "thread").run(padded_gradients, targets), want)
        assert comparison.ok, comparison
    with pytest.raises(RankFailed, match="must be positive, not 0: it is the number of targets"):
        cluster(2, "thread").run(padded_gradients, np.full((5, 4), -1))


def test_micro_batches_are_those_of_a_data_parallel_ranks_share():
    dp, most = 2, 3
    Settings(batch=5, dp=dp, pp=2, micro_batches=most)
    message = f"each of {dp} data-parallel ranks at most {most}, too few for {most + 1} micro"
    with pytest.raises(ValueError, match=message):
        Settings(batch=5, dp=dp, pp=2, micro_batches=most + 1)
