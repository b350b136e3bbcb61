"""Training that survives the death of ranks: it goes on with those that are left.

    4 ranks, dp=4 ... rank 2 dies ... 3 ranks, dp=3, from the last checkpoint ...

The global batches stay the same, so only the order of sums differs from a run that nobody left. On
one machine a dead rank could be started again; here its place stays empty, as after the loss of a
computer. Ranks are processes of this machine: MPI ends all of its processes when one dies.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np

from minidist.checkpoint import Keep, Saved, manifest, set_aside
from minidist.comm import run
from minidist.errors import RankDied
from minidist.training.kinds import Data
from minidist.training.loop import train
from minidist.training.settings import Settings


def with_fewer(settings: Settings, ranks: int) -> Settings:
    """Return the same run on the largest mesh of at most so many ranks that it fits.

    Of meshes of one size, the one that cuts the model as before: first dp shrinks, then pp, cp, tp.
    """
    axes = settings.tp, settings.cp, settings.pp, settings.dp
    found = {}  # {what counts first in a comparison, then what counts second, ...: settings}
    for tp, cp, pp, dp in product(*(range(1, size + 1) for size in axes)):
        if tp * cp * pp * dp > ranks:
            continue
        for ep in range(1, settings.ep + 1):
            try:
                fitting = replace(settings, dp=dp, pp=pp, cp=cp, tp=tp, ep=ep)
            except ValueError:  # this mesh does not fit
                continue
            found[fitting.ranks, tp, cp, pp, dp, ep] = fitting
    return found[max(found)]


def in_words(settings: Settings) -> str:
    sizes = {axis: getattr(settings, axis) for axis in ("dp", "pp", "cp", "tp", "ep")}
    return ", ".join(f"{axis}={n}" for axis, n in sizes.items() if n > 1 or axis == "dp")


def train_elastic(
    data: Data,
    settings: Settings,
    keep: Keep,
    say: Callable[[str], None] = print,
    log: str | None = None,
    **where,
) -> tuple[list[float], dict[str, np.ndarray], Settings]:
    """Train until it is done; return losses, weights, and on which mesh it ended.

    say    is told of each death: where the run goes on, and on which mesh
    log    see train
    where device and timeout, see run

    RankDied is raised if the last rank dies.
    """
    if keep.step is not None:  # after a death a run goes on from what this one saves
        Saved.newest(keep.folder, keep.step).check()
        set_aside(keep.folder, keep.step)
        keep = replace(keep, step=None)
    while True:
        try:
            losses, state = run(train, settings.ranks, data, settings, keep, log, **where)[0]
            return losses, state, settings
        except RankDied as death:
            if settings.ranks == 1:
                raise
            settings = with_fewer(settings, settings.ranks - 1)
            keep = replace(keep, resume=bool(manifest.whole_ones(Path(keep.folder))))
            step = 0
            if keep.resume:
                saved = Saved.newest(keep.folder)
                saved.check()
                step = saved.step
            say(f"{death}; goes on after step {step} with {in_words(settings)}")
