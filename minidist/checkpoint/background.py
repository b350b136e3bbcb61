"""Save while training goes on: a second thread copies, writes and tells the other ranks.

    this thread      save | forward, backward          | wait_for_copy, update | ...
    second thread         | copy the parts             | write, fsync, rename, manifest

The weights do not change before the next update, so a step waits only for a copy that is not done
by then. The copies' memory is kept for the next save.
"""

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np

from minidist.checkpoint import writing
from minidist.checkpoint.parts import Part
from minidist.comm import Group


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
            own = self._copy(writing.own_parts(folder, parts, step, about, self.group))
        finally:
            self.copied.set()
        writing.write_checkpoint(folder, own, step, about, self.group)

    def _copy(self, parts: list[Part]) -> list[Part]:
        arrays = [part.on_host() for part in parts]
        if [(a.shape, a.dtype) for a in arrays] != [(c.shape, c.dtype) for c in self.copies]:
            self.copies = [np.empty_like(array) for array in arrays]
        for copy, array in zip(self.copies, arrays, strict=True):
            np.copyto(copy, array)
        return [replace(p, values=copy) for p, copy in zip(parts, self.copies, strict=True)]
