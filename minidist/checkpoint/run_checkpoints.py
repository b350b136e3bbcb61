"""The checkpoints of a training run: what it saves after a step, and what it goes on from.

    run = RunCheckpoints(keep, group, holder, optimizer, description, fresh)  # loads, or begins
    for step in run.steps(steps):             # those that are left; saves every `keep.every` steps
        ...                                   # forward, backward
        run.before_update()
        ...
        run.losses.append(loss)

The batches and the dropout masks of a step follow from the seed and the step, so a run that goes on
needs nothing else to do what it would have done: on the same mesh bit for bit.

A second thread copies, writes and tells the other ranks. The weights do not change before the next
update, so a step waits only for a copy that is not done by then:

    this thread      save | forward, backward          | wait_for_copy, update | ...
    second thread         | copy the parts             | write, fsync, rename, manifest

A run may go on with a larger model (`Grown`):

    a new character      its rows are drawn by the parameter's name and the character; old
                         characters' rows keep every bit
    a new block          the arrays that write to the residual stream are 0, so that it adds
                         nothing: the loss is the same before and after (function-preserving:
                         Chen, Goodfellow, Shlens 2016, Net2Net, whose deeper net begins with
                         layers that are the identity)
    the optimizer        has zeros for what is new
"""

import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from minidist.checkpoint import manifest, writing
from minidist.checkpoint.parts import Holder, Part, about, parts_of, restore
from minidist.checkpoint.reading import Saved, advised
from minidist.checkpoint.writing import set_aside, whole_parts
from minidist.comm import Group
from minidist.errors import WrongInput, check_writable, plural
from minidist.nn import Slice
from minidist.parallel.mixed_precision import AnyOptimizer
from minidist.rng import generator


class Background:
    """One rank's thread that saves; every rank of the group makes one, and calls the same."""

    def __init__(self, group: Group):
        self.group = group.split(0)  # the second thread's
        self.beside = self.group.beside(self._write, "checkpoint")
        self.copied = threading.Event()
        self.copied.set()
        self.copies: list[np.ndarray] = []

    def save(self, folder: str | Path, parts: list[Part], step: int, about: dict) -> None:
        """Begin to save; wait for the save before. Call wait_for_copy before the parts change."""
        self.wait()
        self.copied.clear()
        self.beside.put(Path(folder), parts, step, about)
        self.beside.end()

    def wait_for_copy(self) -> None:
        """Wait until the parts may change; raise what has gone wrong so far."""
        if not self.copied.is_set():
            self.copied.wait()
        if self.beside.thread is not None and not self.beside.thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Wait until the checkpoint is whole; raise what has gone wrong."""
        self.beside.wait("the checkpoint")

    def _write(self, folder: Path, parts: list[Part], step: int, about: dict) -> None:
        try:
            copies = self._copy(writing.own_parts(folder, parts, step, about, self.group))
        finally:
            self.copied.set()
        writing.write_checkpoint(folder, copies, step, about, self.group)

    def _copy(self, parts: list[Part]) -> list[Part]:
        arrays = [part.on_host() for part in parts]
        if [(a.shape, a.dtype) for a in arrays] != [(c.shape, c.dtype) for c in self.copies]:
            self.copies = [np.empty_like(array) for array in arrays]
        for copy, array in zip(self.copies, arrays, strict=True):
            np.copyto(copy, array)
        return [replace(p, values=copy) for p, copy in zip(parts, self.copies, strict=True)]


DESCRIPTION = "told"  # the key of a run's description in every manifest that is saved
VOCABULARY = {"embedding.token.weight": 0, "head.linear.weight": 1}  # and its axis
WRITES = tuple(f"{part}.{kind}" for part in (".output", ".contract") for kind in ("weight", "bias"))


def changes(before: Mapping, now: Mapping) -> list[str]:
    """Describe how a run grows, given its descriptions before and now; [] if it stays as it is.

    ValueError if it would have to shrink, or to change what does not grow.
    """
    growth = []
    blocks = now["settings"]["depth"] - before["settings"]["depth"]
    if blocks < 0:
        raise WrongInput("a model of fewer blocks is another model; use another folder")
    if blocks:
        growth.append(plural(blocks, "new block"))
    old, data = before["data"], now["data"]
    if old == data:
        return growth
    if "characters" not in old or "characters" not in data:
        raise WrongInput(
            f"the checkpoint is of a run on {old['source']}, not on {data['source']}; give it the "
            "same, or another folder"
        )
    if lost := sorted(set(old["characters"]) - set(data["characters"])):
        raise WrongInput(
            f"the character {lost[0]!r} of {old['source']} is none of the new ones; use "
            "Text.including(characters)"
        )
    new = len(data["characters"]) - len(old["characters"])
    return [*growth, f"{data['source']}, {plural(new, 'new character')}"]


class Grown:
    """A checkpoint as a larger model sees it: it has all arrays, in the larger shapes.

    now     the description of the larger run
    fresh   the larger model's weights as they are drawn, by name
    shapes  of the arrays of the checkpoint, by name
    """

    def __init__(self, saved: Saved, now: Mapping, fresh: Mapping[str, np.ndarray]):
        before = saved.about[DESCRIPTION]
        self.saved, self.fresh, self.seed = saved, fresh, now["settings"]["seed"]
        self.path, self.about, self.shapes = saved.path, saved.about, saved.shapes
        old, new = (run["data"].get("characters", "") for run in (before, now))
        self.before, self.characters = old, new
        self.old = np.array([new.index(c) for c in old], np.int64)  # where the old rows go

    def part(self, cut: Slice) -> np.ndarray:
        """Return the elements of a slice: a vector."""
        return cut.of(self.whole(cut.name))

    def whole(self, name: str) -> np.ndarray:
        """Return a global array in the larger model's shape."""
        state, _, parameter = name.rpartition("/")
        drawn = self.fresh[parameter]
        if name not in self.saved.shapes:  # of a new block
            return np.zeros_like(drawn) if state or parameter.endswith(WRITES) else drawn
        old = self.saved.whole(name)
        if parameter not in VOCABULARY or self.before == self.characters:
            return old
        new = np.zeros(drawn.shape, old.dtype)
        axis = VOCABULARY[parameter]
        rows = np.moveaxis(new, axis, 0)  # a view
        rows[self.old] = np.moveaxis(old, axis, 0)
        if not state:
            for i in set(range(len(rows))) - set(self.old.tolist()):
                random = generator(self.seed, f"{parameter} {self.characters[i]}")
                rows[i] = random.standard_normal(rows[i].shape) * drawn.std()
        return new


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
        checkpoints = manifest.whole_ones(Path(self.folder))
        if checkpoints and not self.resume:
            raise WrongInput(
                f"{self.folder} has a checkpoint of step {max(checkpoints)}; go on from it with "
                "--resume, or use another folder"
            )
        check_writable(self.folder, f"to the folder {self.folder}", folder=True)

    def saved(self, description: dict, defaults: Mapping) -> Saved | None:
        """Return the checkpoint that the run goes on from, None if it begins.

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
    """Raise ValueError if a setting, or the data, differs from the run that was saved."""
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
    """Return the manifest's entry of a run, which goes on from it."""
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
    fresh        () -> the whole model's weights as they are drawn, if the model grows
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
        optimizer: AnyOptimizer,
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
                source = Grown(saved, description, fresh()) if grows else saved
                restore(source, holder, optimizer)
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
