"""Saving in a second thread: what is saved is what there was when the save began."""

import errno
import os
import threading

import numpy as np
import pytest

from minidist import checkpoint
from minidist.checkpoint import manifest, writing
from minidist.checkpoint.run_checkpoints import Background
from minidist.errors import RankFailed
from tests.strategies import assert_same_bits


@pytest.fixture(autouse=True)
def gate(monkeypatch):
    """What a second thread may wait for; a worker finds it by the name of the class."""
    monkeypatch.setattr(Background, "gate", threading.Event(), raising=False)


def test_updates_that_wait_for_the_copy_do_not_change_what_is_saved(cluster, tmp_path, monkeypatch):
    finish = writing.write_checkpoint

    def held(*arguments):
        assert Background.gate.wait(20)
        finish(*arguments)

    monkeypatch.setattr(writing, "write_checkpoint", held)

    def worker(group):
        array, saver = np.full(1 << 16, 1.0), Background(group)
        for step in (1, 2):
            saver.save(tmp_path, writing.whole_parts({"a": array}), step, {})
            saver.wait_for_copy()
            array += 1
            if step == 1:
                first = any(tmp_path.iterdir())  # nothing is written yet
                group.barrier()  # the other rank has looked, too
                Background.gate.set()
        saver.wait()
        return first, checkpoint.load(tmp_path)

    for early, (found, step) in cluster(2, "thread").run(worker):
        assert not early and step == 2
        assert_same_bits(found, {"a": np.full(1 << 16, 2.0)})
    whole = checkpoint.Saved(tmp_path / "step-00000001").whole("a")
    np.testing.assert_array_equal(whole, np.full(1 << 16, 1.0))


def test_an_error_of_the_second_thread_ends_the_run(cluster, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(manifest, "encode", full)

    def worker(group):
        saver = Background(group)
        saver.save(tmp_path, writing.whole_parts({"a": np.ones(3)}), 1, {})
        saver.wait()

    with pytest.raises(
        RankFailed, match="No space left on device; those before it, if any, are whole"
    ):
        cluster(2, "thread").run(worker)
