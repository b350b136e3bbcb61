"""Mistakes of split convolutions: each turns its certificate red, and its cause is named."""

from dataclasses import replace

import pytest

from minidist.course.register import find
from minidist.tools import equivalence, strategies
from minidist.tools.causes.finding import Finding
from minidist.tools.causes.gradients import cause
from minidist.tools.strategies import Split, one_device
from tests.planted import mistaken

OF_CHANNELS = ["channels_without_g", "filters_without_f"]
OF_ROWS = [
    "halo_gradients_not_sent_back",
    "halo_gradients_not_added",
    "halo_from_the_wrong_side",
    "rows_normalised_by_themselves",
    "head_summed_with_the_rest",
]


@pytest.mark.parametrize(
    "strategy, name",
    [("channel", name) for name in OF_CHANNELS] + [("spatial", name) for name in OF_ROWS],
)
def test_a_mistake_turns_the_certificate_red_and_is_named(cluster, monkeypatch, strategy, name):
    sound = strategies.STRATEGIES[strategy]
    for worker in (sound.worker, mistaken(name, sound.worker)):
        monkeypatch.setitem(strategies.STRATEGIES, strategy, replace(sound, worker=worker))
        row = equivalence.check(strategy, sound.cases(3)[0], 3, cluster(3))
        assert row["ok"] == (worker is sound.worker), row
    assert find(name).diagnosis in row["detail"]


@pytest.mark.parametrize("split", [Split(rows=2), Split(tensor=2)])
def test_gradients_that_are_wrong_in_another_way_have_no_cause(split):
    case = strategies.STRATEGIES["spatial"].cases(2)[0]
    want = one_device(case)
    got = {name: gradient + 0.01 * gradient**2 + 1 for name, gradient in want.items()}
    assert cause(Finding([got] * 2, want, case, split)) is None
    assert cause(Finding([want] * 2, want, case, split)) is None
