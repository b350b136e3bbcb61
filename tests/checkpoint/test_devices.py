"""Checkpoints of a model on a GPU: its arrays are brought to the host, and back."""

from dataclasses import replace

import pytest

from minidist import checkpoint
from minidist.checkpoint import Keep
from minidist.training.loop import train
from tests.checkpoint.test_training import SMALL, TEXT, interrupt
from tests.strategies import assert_same_bits

pytestmark = pytest.mark.gpu

WAYS = [{}, {"pp": 2, "zero": 1}, {"precision": "float16"}]


@pytest.mark.parametrize("changes", WAYS, ids=str)
def test_a_run_on_a_gpu_goes_on_bit_for_bit(cluster, tmp_path, monkeypatch, changes):
    settings = replace(SMALL, depth=1, **changes)
    want = cluster(settings.ranks, "thread", "gpu").run(train, TEXT, settings)[0]
    found = interrupt(cluster, tmp_path, monkeypatch, settings, device="gpu")
    assert found[0] == want[0]
    assert_same_bits(found[1], want[1])


def test_what_a_gpu_has_saved_is_loaded_on_the_host_and_there_again(cluster, tmp_path):
    settings = replace(SMALL, depth=1, steps=2)
    keep, states = Keep(str(tmp_path)), []
    for device, steps in ("gpu", 2), ("cpu", 2), ("gpu", 3):
        told = replace(settings, steps=steps)
        states.append(cluster(1, "thread", device).run(train, TEXT, told, keep)[0][1])
        keep = replace(keep, resume=True)
    assert_same_bits(states[1], states[0])
    assert checkpoint.load(tmp_path)[1] == 3
