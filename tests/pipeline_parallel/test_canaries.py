"""Faults that only the ledger, or only the values, show: each must turn its half of a row red.

A fault is a context around what a rank does: a group whose messages are not what they should be,
which the register of mistakes cannot hold.
"""

from contextlib import contextmanager, nullcontext
from dataclasses import replace

import numpy as np
import pytest

from minidist import nn
from minidist.verify.equivalence import worker_of
from minidist.verify.strategies import STRATEGIES, Case
from tests.pipeline_parallel import training
from tests.strategies import arrays


def within(fault, group):
    """Return a context: of a fault, or of nothing."""
    return fault(group) if fault else nullcontext()


def mlp_case(examples=6):
    model = nn.MLP([4, 5, 6, 5, 4, 3], "gelu", seed=1, dtype="float64")
    return Case("MLP", model, arrays(examples, 4), np.arange(examples) % 3)


@contextmanager
def two_tags_swapped(group):
    """A rank takes the first micro-batch for the second one and the other way round."""
    recv, swapped = group.recv, {0: 1 << 16, 1 << 16: 0}
    group.recv = lambda source, tag=0: recv(source, swapped.get(tag, tag))
    yield


def judged(ranks, fault, schedule="1f1b"):
    """Return (are the gradients right, are the bytes the formula's)."""

    def worker(group, case):
        with within(fault, group):
            return worker_of(STRATEGIES[schedule])(group, case, micro_batches=3)

    case = replace(mlp_case(), options={"micro_batches": 3})
    outcomes = ranks.run(worker, case)
    want = training.single_device(case, 1)[0][0][1]
    verdict = training.compare([o.gradients for o in outcomes], want)
    return verdict.ok, sum(o.bytes for o in outcomes) == STRATEGIES[schedule].costs.bytes(
        case, ranks.size
    )


@contextmanager
def everything_sent_twice(group):
    send, recv = group.send, group.recv
    group.send = lambda x, to, tag=0: (send(x, to, tag), send(x, to, tag))
    group.recv = lambda source, tag=0: (recv(source, tag), recv(source, tag))[0]
    yield


@contextmanager
def rounded_on_the_way(group):
    send, recv = group.send, group.recv
    group.send = lambda x, to, tag=0: send(x.astype("float32"), to, tag)
    group.recv = lambda source, tag=0: recv(source, tag).astype("float64")
    yield


@pytest.mark.parametrize(
    "fault, want",
    [
        (None, (True, True)),
        (everything_sent_twice, (True, False)),
        (rounded_on_the_way, (False, False)),
        (two_tags_swapped, (False, True)),
    ],
)
def test_bytes_and_values_each_show_their_own_faults(cluster, fault, want):
    assert judged(cluster(2), fault) == want
