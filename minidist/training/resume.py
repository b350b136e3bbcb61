"""What a run goes on from, in words, before its ranks start."""

from minidist.checkpoint import Keep, manifest
from minidist.checkpoint.run_checkpoints import (
    DESCRIPTION,
    changes,
    settings_in,
    steps_done_and_next,
)
from minidist.training.kinds import Data
from minidist.training.loop import warm_up_and_decay
from minidist.training.settings import DEFAULTS, Settings
from minidist.training.setup import description


def first_step_and_remarks(
    keep: Keep | None, data: Data, settings: Settings
) -> tuple[int, list[str]]:
    """Return the step that a run begins with, and in words what it goes on from, if it does."""
    run = description(data, settings)
    saved = keep and keep.saved(run, DEFAULTS)
    if not saved:
        return 0, []
    grows = changes(saved.about[DESCRIPTION], run)
    _, first = steps_done_and_next(saved, grows)
    saved.check()
    remarks = [f"goes on after step {saved.step}, from {saved.path}"]
    newer = [str(n) for n in manifest.whole_ones(saved.path.parent) if n > saved.step]
    if newer:
        remarks.append(f"newer ones ({', '.join(newer)}) are renamed to aside-*")
    remarks += grows
    before = settings_in(saved, DEFAULTS)
    if first >= settings.steps:
        remarks.append(f"no update is left of --steps {settings.steps}")
    elif not grows and before["steps"] != settings.steps:
        last = before["lr"] * warm_up_and_decay(first - 1, before["steps"])
        rate = settings.lr * warm_up_and_decay(first, settings.steps)
        by = f"--steps {settings.steps}, not {before['steps']}"
        remarks.append(f"{by}: the learning rate goes on with {rate:.1e}, after {last:.1e}")
    return first, remarks
