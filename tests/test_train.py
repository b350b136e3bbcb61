"""The training loop of the command line: what it certifies, and what it refuses to begin."""

from itertools import product

import numpy as np
import pytest

from minidist.datasets import Text
from minidist.pipeline_parallel import SCHEDULES, programs
from minidist.pipeline_parallel.programs import updates
from minidist.train import Settings, certify

SYNCHRONOUS = [name for name in SCHEDULES if not updates(programs(name, 2, 2))]
MESHES = [mesh for mesh in product(range(1, 9), repeat=3) if np.prod(mesh) <= 8]
SMALL = [(1, 2, 1), (2, 1, 2)]
FEW = [(schedule, mesh, tied) for schedule, mesh in product(SYNCHRONOUS, SMALL) for tied in (0, 1)]
ALL = list(product(SYNCHRONOUS, MESHES, (0, 1)))


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
        micro_batches=pp,
    )
    text = Text(np.arange(80) * 7 % 5, "abcde", "a text of five characters")
    return certify(settings.model(text.vocab), text, settings, "thread")


@pytest.mark.parametrize(
    "schedule, mesh, tied",
    [*FEW, *(pytest.param(*case, marks=pytest.mark.slow) for case in ALL if case not in FEW)],
    ids=str,
)
def test_every_synchronous_schedule_is_certified_on_every_mesh(schedule, mesh, tied):
    row = certificate(schedule, mesh, tied)
    assert row["ok"], row["detail"]
