"""What the lessons share: verdicts on exercises, and logs of ranks that sleep."""

import numpy as np
import pytest

import minidist
from minidist import Tensor
from minidist.events import Event, EventLog
from minidist.tools import exercise
from minidist.tools.devices import Device, idle, length, quiet


def stub(*_):
    raise NotImplementedError


def refuses(*_):
    raise ValueError("2 of 3")


def double(x):
    return 2 * x


def finds(attempt):
    got = attempt(4)
    return None if got == 8 else f"8, not {got}"


def finds_on_ranks(attempt):
    return finds(lambda x: minidist.run(on_rank, 2, attempt, x)[1])


def on_rank(group, attempt, x):
    return attempt(x)


@pytest.mark.parametrize("ask", [finds, finds_on_ranks])
@pytest.mark.parametrize(
    ("attempt", "verdict"),
    [
        (stub, "not solved yet"),
        (double, "solved"),
        (abs, "wrong: 8, not 4"),
        (refuses, "wrong: 2 of 3"),
    ],
)
def test_a_verdict_tells_a_stub_a_right_answer_and_a_wrong_one(ask, attempt, verdict):
    assert exercise.verdict(ask, attempt) == verdict


def test_another_error_is_shown_not_judged():
    with pytest.raises(ZeroDivisionError):
        exercise.verdict(finds, lambda x: x // 0)


def test_a_check_prints_its_verdicts_and_may_not_accept_a_tempting_answer(capsys):
    exercise.check(3, finds, stub, abs)
    assert capsys.readouterr().out.splitlines() == [
        "exercise 3: not solved yet",
        "  a tempting answer is wrong: 8, not 4",
    ]
    with pytest.raises(AssertionError, match="exercise 3 is too weak"):
        exercise.check(3, finds, stub, double)


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
