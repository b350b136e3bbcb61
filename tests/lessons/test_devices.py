"""Ranks that sleep, as devices, and what their logs say."""

import numpy as np

from lessons.support.devices import Device, idle, length, quiet
from minidist import Tensor
from minidist.events import Event, EventLog


def log_of(*spans):
    return EventLog([Event(r, "F0", start, end) for r, start, end in spans])


def test_length_and_idle_are_read_off_compute_events():
    log = log_of((0, 1.0, 2.0), (1, 2.0, 5.0))
    assert length(log) == 4.0 and idle(log) == 0.5


def test_quiet_stops_at_the_first_run_that_is_short_enough_and_returns_the_shortest():
    spans = iter([5.0, 2.0, 3.0, 1.05, 1.0])

    def run(log):
        log.events += log_of((0, 0.0, next(spans))).events

    assert length(quiet(run, seconds=1.0)) == 1.05 and next(spans) == 1.0
    spans = iter([5.0, 2.0, 3.0])
    assert length(quiet(run, seconds=1.0, most=3)) == 2.0


def test_a_device_is_its_linear_layer():
    device = Device("layers.0", 3, 0.0, 0.0, dtype="float64")
    x = Tensor(np.arange(6.0).reshape(2, 3), requires_grad=True)
    y = device(x)
    y.backward(np.ones((2, 3)))
    assert np.array_equal(y.data, device.linear(Tensor(x.data)).data)
    assert np.array_equal(x.grad, np.ones((2, 3)) @ device.linear.weight.data.T)
