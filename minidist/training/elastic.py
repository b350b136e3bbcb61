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
from minidist.checkpoint.writing import check_run
from minidist.comm import run
from minidist.errors import RankDied
from minidist.training.kinds import Data
from minidist.training.loop import train
from minidist.training.settings import Settings


def with_fewer(settings: Settings, ranks: int) -> Settings:
    """Return this run on the largest mesh of at most `ranks` ranks that it fits.

    No axis gets larger, and ep, which is part of dp, does not either. A mesh fits if
    `Settings.fits`. Of meshes of one size it is the one with the largest tp; if several have that,
    with the largest cp, then pp, then dp, then ep: it cuts the model most like before.
    """
    meshes = {}  # {what counts first in a comparison, then what counts second, ...: settings}
    axes = settings.tp, settings.cp, settings.pp, settings.dp, settings.ep
    for tp, cp, pp, dp, ep in product(*(range(1, size + 1) for size in axes)):
        smaller = replace(settings, dp=dp, pp=pp, cp=cp, tp=tp, ep=ep)
        if smaller.ranks <= ranks and smaller.fits:
            meshes[smaller.ranks, tp, cp, pp, dp, ep] = smaller
    return meshes[max(meshes)]


def go_on(settings: Settings, keep: Keep, ranks: int) -> tuple[Settings, Keep, int]:
    """Return how at most `ranks` ranks go on after a death: settings, Keep, the steps done.

    The run resumes from the newest checkpoint that counts, whatever else is in the folder: the
    steps done are its own, all later ones are done again. Without one it begins, at step 0.
    ValueError, which names the file, if the newest one that counts is damaged (Saved.check).
    """
    settings = with_fewer(settings, ranks)
    if not manifest.whole_ones(Path(keep.folder)):
        return settings, replace(keep, resume=False), 0
    saved = Saved.newest(keep.folder)
    saved.check()
    return settings, replace(keep, resume=True), saved.step


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
    where device, timeout and transport, see run

    RankDied is raised if the last rank dies.
    """
    if keep.step is not None:  # after a death a run goes on from what this one saves
        Saved.newest(keep.folder, keep.step).check()
        set_aside(keep.folder, keep.step)
        keep = replace(keep, step=None)
    names = keep.run(Saved.newest(keep.folder) if keep.resume else None)
    while True:
        try:
            losses, state = run(train, settings.ranks, data, settings, keep, log, **where)[0]
            return losses, state, settings
        except RankDied as death:
            if settings.ranks == 1:
                raise
            settings, keep, step = go_on(settings, keep, settings.ranks - 1)
            if keep.resume:
                check_run(Saved.newest(keep.folder).path, names)
            say(f"{death}; goes on after step {step} with {in_words(settings)}")
