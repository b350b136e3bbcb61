"""The checkpoints of a training run: what it saves after a step, and what it goes on from.

    run = RunCheckpoints(keep, group, holder, optimizer, description, fresh)  # loads, or begins
    for step in run.steps(steps):             # those that are left; saves every `keep.every` steps
        ...                                   # forward, backward
        run.before_update()
        ...
        run.losses.append(loss)

The batches and the dropout masks of a step follow from the seed and the step, so a run that goes on
needs nothing else to do what it would have done: on the same mesh bit for bit.
"""

import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from minidist.checkpoint import manifest
from minidist.checkpoint.background import Background
from minidist.checkpoint.grow import DESCRIPTION, Grown, changes
from minidist.checkpoint.parts import Holder, KeptOptimizer, about, parts_of, restore
from minidist.checkpoint.reading import Saved, advised
from minidist.checkpoint.writing import set_aside, whole_parts
from minidist.comm import Group
from minidist.errors import WrongInput, check_writable

LOSSES = "losses"
MAY_CHANGE = {"steps", "lr", "depth"}  # depth may grow


@dataclass(frozen=True)
class Keep:
    """Where a run saves, after how many steps, and whether it goes on from what is there.

    step  of another checkpoint than the newest, to go on from: newer ones are set aside
    name  of the run; rank 0's name is taken
    """

    folder: str
    every: int = 100
    resume: bool = False
    step: int | None = None
    name: str = field(default_factory=partial(secrets.token_hex, 4))

    def __post_init__(self):
        manifest.place(self.folder)
        if self.step is not None and not self.resume:
            raise WrongInput(f"a run goes on from step {self.step} only with resume=True")

    def check(self) -> None:
        """Raise ValueError if a run cannot save here.

        That is: if the folder has a checkpoint from which the run does not go on, or if nothing can
        be written there.
        """
        whole = manifest.whole_ones(Path(self.folder))
        if whole and not self.resume:
            raise WrongInput(
                f"{self.folder} has a checkpoint of step {max(whole)}; go on from it with "
                "--resume, or use another folder"
            )
        check_writable(self.folder, f"to the folder {self.folder}", folder=True)

    def saved(self, description: dict, defaults: Mapping) -> Saved | None:
        """Return what the run goes on from, None if it begins.

        defaults  for settings that are newer than the program that saved

        ValueError as from `check`, or if the checkpoint is of a run with another description.
        """
        self.check()
        if not self.resume:
            return None
        saved = Saved.newest(self.folder, self.step)
        check_description(saved, description, defaults)
        return saved

    def run(self, saved: Saved | None) -> list[str]:
        """Return the names of a run that goes on from what was saved, see manifest.py."""
        if saved is None:
            return [self.name]
        *before, last = saved.run
        return [*before, *([] if last == self.name else [f"{last}@{saved.step}"]), self.name]


def description_in(saved: Saved) -> dict | None:
    """Return the description of the run that was saved; None if another program saved."""
    return saved.about.get(DESCRIPTION)


def settings_in(saved: Saved, defaults: Mapping) -> dict:
    """Return the settings of the run that was saved, with defaults for those it did not know."""
    before = saved.about[DESCRIPTION]["settings"]
    if unknown := sorted(set(before) - set(defaults)):
        raise WrongInput(
            f"{saved.path} has the setting {unknown[0]!r}, which this minidist does not know; use "
            "the minidist that wrote it"
        )
    return {**defaults, **before}


def check_description(saved: Saved, description: Mapping, defaults: Mapping) -> None:
    """Raise ValueError if a setting, or the data, is not that of the run that was saved."""
    before = description_in(saved)
    if before is None:
        raise WrongInput(f"{saved.path} is not from `minidist train`; use checkpoint.load")
    changes(before, description)  # first: other data has other defaults, too
    settings = settings_in(saved, defaults)
    for name, now in sorted(description["settings"].items()):
        if (was := settings[name]) != now and name not in MAY_CHANGE:
            raise WrongInput(
                f"{saved.path} is of a run with {name} = {was}, not {now}; give it the same, or "
                "another folder"
            )


def about_run(description: dict, began: int, optimizer: dict | None, run: list[str]) -> dict:
    """Return what a manifest says of a run, which goes on from it."""
    return {DESCRIPTION: description, "began": began, "optimizer": optimizer, "run": run}


def steps_done_and_next(saved: Saved, grows: list[str]) -> tuple[int, int]:
    """Return the steps that were done before a run that goes on begins, and its next step.

    grows  see `changes`; a run that grows begins with its first step
    """
    began = saved.step if grows else saved.about["began"]
    return began, saved.step - began


class RunCheckpoints:
    """One rank's view of the checkpoints of a run.

    keep         None: it saves nothing
    holder       the model, or what split it; the optimizer has its parameters
    description  of the run, JSON: "settings" and "data"; all ranks have one description
    fresh        () -> the whole model's weights as they are drawn, if the model grows (grow.py)
    defaults     of settings, see Keep.saved
    first        the step to begin with
    losses       of the steps so far; the loop appends to it
    began        steps that were done before; a run that grows begins with the first step again
    """

    def __init__(
        self,
        keep: Keep | None,
        group: Group,
        holder: Holder,
        optimizer: KeptOptimizer,
        description: dict,
        fresh: Callable[[], dict[str, np.ndarray]],
        defaults: Mapping,
    ):
        self.keep, self.description = keep, description
        self.holder, self.optimizer = holder, optimizer
        self.background = None if keep is None else Background(group)
        self.began, self.first = 0, 0
        self.losses: list[float] = []
        saved = None if keep is None else keep.saved(description, defaults)
        self.run = [] if keep is None else keep.run(saved)
        if keep is not None and saved is not None:
            grows = changes(saved.about[DESCRIPTION], description)
            self.began, self.first = steps_done_and_next(saved, grows)
            with advised(saved.path):
                given = Grown(saved, description, fresh()) if grows else saved
                restore(given, holder, optimizer)
                self.losses = saved.whole(LOSSES).tolist()[: self.first]
            group.barrier(label="resumed")  # before anybody saves, and removes what others read
            if keep.step is not None and group.rank == 0:  # it saves first, too
                set_aside(keep.folder, keep.step)

    def steps(self, number: int) -> Iterator[int]:
        """Yield the steps that are left of a number; save between them, and wait for the end."""
        for step in range(self.first, number):
            yield step
            self.after(step + 1, number)
        self.end()

    def before_update(self) -> None:
        """Wait until what is being saved may change; raise what has gone wrong."""
        if self.background is not None:
            self.background.wait_for_copy()

    def after(self, done: int, steps: int) -> None:
        """Begin to save what there is after `done` of `steps` steps, if it is time to."""
        if self.keep is None or self.background is None:
            return
        if done % self.keep.every and done != steps:
            return
        parts = parts_of(self.holder, self.optimizer)
        parts += whole_parts({LOSSES: np.array(self.losses)})
        of_run = about_run(self.description, self.began, about(self.optimizer), self.run)
        self.background.save(self.keep.folder, parts, self.began + done, of_run)

    def end(self) -> None:
        """Wait for the last checkpoint; raise what has gone wrong."""
        if self.background is not None:
            self.background.wait()
