"""The checkpoints of a training run: what it saves after a step, and what it goes on from.

    run = Training(keep, group, holder, optimizer, told)      # loads, if it goes on
    for step in range(run.first, steps):
        ...                                                   # forward, backward
        run.before_update()
        ...
        run.after(step + 1, steps)                            # saves after every `keep.every` steps
    run.end()

The batches and the dropout masks of a step follow from the seed and the step, so a run that goes on
needs nothing else to do what it would have done: on the same mesh bit for bit.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from minidist.checkpoint import manifest
from minidist.checkpoint.background import Background
from minidist.checkpoint.grow import Grown, changes
from minidist.checkpoint.parts import Holder, about, parts_of, restore
from minidist.checkpoint.reading import Saved, advised
from minidist.checkpoint.writing import set_aside, whole_parts
from minidist.comm import Group
from minidist.optim import Optimizer

LOSSES = "losses"
MAY_CHANGE = {"steps", "lr", "depth"}  # depth may grow


@dataclass(frozen=True)
class Keep:
    """Where a run saves, after how many steps, and whether it goes on from what is there.

    step  of another checkpoint than the newest, to go on from: newer ones are set aside
    """

    folder: str
    every: int = 100
    resume: bool = False
    step: int | None = None

    def __post_init__(self):
        manifest.place(self.folder)
        if self.step is not None and not self.resume:
            raise ValueError(f"a run goes on from step {self.step} only with resume=True")

    def saved(self, told: dict) -> Saved | None:
        """Return what the run goes on from, None if it begins.

        ValueError if the folder has a checkpoint and the run does not go on from it, or if it is of
        a run that was told something else.
        """
        whole = manifest.whole_ones(Path(self.folder))
        if whole and not self.resume:
            raise ValueError(
                f"{self.folder} has a checkpoint of step {max(whole)}; go on from it with "
                "--resume, or use another folder"
            )
        if not self.resume:
            return None
        saved = Saved.newest(self.folder, self.step)
        check_told(saved, told)
        return saved


def check_told(saved: Saved, told: Mapping) -> None:
    """Raise ValueError if a setting, or the data, is not that of the run that was saved."""
    before = saved.about.get("told")
    if before is None:
        raise ValueError(f"{saved.path} is not from `minidist train`; use checkpoint.load")
    changes(before, told)  # first: other data has other defaults, too
    for name in sorted(set(told["settings"]) | set(before["settings"])):
        was, now = (each["settings"].get(name) for each in (before, told))
        if was != now and name not in MAY_CHANGE:
            raise ValueError(
                f"{saved.path} is of a run with {name} = {was}, not {now}; give it the same, or "
                "another folder"
            )


def place(saved: Saved, grows: list[str]) -> tuple[int, int]:
    """Return the steps that were done before a run that goes on begins, and its next step.

    grows  see `changes`; a run that grows begins with its first step
    """
    began = saved.step if grows else saved.about["began"]
    return began, saved.step - began


class Training:
    """One rank's view of the checkpoints of a run.

    keep    None: it saves nothing
    holder  the model, or what split it; the optimizer has its parameters
    told    what the run was told, JSON: "settings" and "data"; the same on every rank

    fresh   () -> the whole model's weights as they are drawn, for a model that grows (grow.py)

    first   the step to begin with;  losses: of the steps before it
    began   steps that were done before; a run that grows begins with the first step again
    """

    def __init__(
        self,
        keep: Keep | None,
        group: Group,
        holder: Holder,
        optimizer: Optimizer,
        told: dict,
        fresh: Callable[[], dict[str, np.ndarray]],
    ):
        self.keep, self.told = keep, told
        self.holder, self.optimizer = holder, optimizer
        self.background = None if keep is None else Background(group)
        self.began, self.first, self.losses = 0, 0, []
        saved = None if keep is None else keep.saved(told)
        if saved is not None:
            grows = changes(saved.about["told"], told)
            self.began, self.first = place(saved, grows)
            with advised(saved.path):
                restore(Grown(saved, told, fresh()) if grows else saved, holder, optimizer)
                self.losses = saved.whole(LOSSES).tolist()[: self.first]
            group.barrier(label="resumed")  # before anybody saves, and removes what others read
            if keep.step is not None and group.rank == 0:  # it saves first, too
                set_aside(keep.folder, keep.step)

    def before_update(self) -> None:
        """Wait until what is being saved may change."""
        if self.background is not None:
            self.background.wait_for_copy()

    def after(self, done: int, steps: int) -> None:
        """Begin to save what there is after `done` of `steps` steps, if it is time to."""
        if self.background is None or (done % self.keep.every and done != steps):
            return
        parts = parts_of(self.holder, self.optimizer)
        parts += whole_parts({LOSSES: np.array(self.losses)})
        told = {"told": self.told, "began": self.began, "optimizer": about(self.optimizer)}
        self.background.save(self.keep.folder, parts, self.began + done, told)

    def end(self) -> None:
        """Wait for the last checkpoint; raise what has gone wrong."""
        if self.background is not None:
            self.background.wait()
