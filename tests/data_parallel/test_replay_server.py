"""The replay of servers' logs by itself: staleness of choice, and logs that no run can leave."""

from functools import partial

import numpy as np
import pytest

from minidist import nn, optim
from minidist.data_parallel.parameter_server import Push, ServerPlan
from minidist.nn.datasets import digits
from minidist.rng import generator
from minidist.verify.strategies.parameter_server import replay_server
from tests.data_parallel.serving import OPTIMIZERS, backward_on, mlp, mlp_data
from tests.strategies import assert_same_bits

DOWNPOUR = ServerPlan(staleness=None)


def in_turns(workers, count):
    """Return the log of workers that take turns: every gradient is workers - 1 updates stale."""
    return [[Push(b % workers, (b,), (max(0, b - workers + 1),))] for b in range(count)]


def dealt(workers, count):
    return {w: list(range(w, count, workers)) for w in range(workers)}


def test_without_staleness_the_replay_is_one_device():
    inputs, targets = mlp_data(6)
    backward, model = backward_on(inputs, targets), mlp()
    got = replay_server(
        model, DOWNPOUR, [in_turns(1, 6)], dealt(1, 6), backward, OPTIMIZERS["adamw"]
    )
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    for batch in range(6):
        backward(model, batch)
        optimizer.step(), optimizer.zero_grad()
    assert_same_bits(got, model.state())


@pytest.mark.parametrize(
    ("logs", "given", "message"),
    [
        (
            [in_turns(2, 4)],
            {0: [0, 2], 1: [1, 3, 5]},
            r"given \[1, 3, 5\], .* logged \[1, 3\]",
        ),
        ([in_turns(2, 4), in_turns(2, 3)], dealt(2, 4), r"given \[1, 3\], a server logged \[1\]"),
        ([in_turns(1, 3) + in_turns(1, 3)[2:]], dealt(1, 3), r"logged \[0, 1, 2, 2\]"),
        ([[[Push(0, (0,), (1,))]]], dealt(1, 1), "an update needs a version made after it"),
    ],
)
def test_logs_that_no_run_can_leave_are_refused(logs, given, message):
    with pytest.raises(ValueError, match=message):
        replay_server(mlp(), DOWNPOUR, logs, given, backward_on(*mlp_data(6)), OPTIMIZERS["sgd"])


def loss_on_the_digits(workers, lr, updates=240):
    images, labels = digits("float64")
    rows = np.resize(generator(0, "order").permutation(len(images)), (updates, 32))
    model = nn.MLP([64, 32, 10], dtype="float64")
    backward = backward_on(images[rows], labels[rows])
    rule, logs = partial(optim.SGD, lr=lr), [in_turns(workers, updates)]
    model.load_state(replay_server(model, DOWNPOUR, logs, dealt(workers, updates), backward, rule))
    return float(nn.cross_entropy(model(images), labels))


def test_a_small_rate_forgives_staleness_and_a_large_one_does_not():
    """240 updates of 32 digits, from a first loss of 2.3."""
    fresh, stale = loss_on_the_digits(1, 0.05), loss_on_the_digits(8, 0.05)
    assert stale < 1.1 * fresh < 1
    fresh, stale = loss_on_the_digits(1, 0.3), loss_on_the_digits(8, 0.3)
    assert fresh < 0.2 and stale > 1.5
