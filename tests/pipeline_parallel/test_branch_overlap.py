"""The two branches really run at once, one per rank."""

import numpy as np
import pytest

from minidist import Tensor, run
from minidist.autograd import Function
from minidist.events import EventLog
from minidist.pipeline_parallel import branch_placement
from minidist.verify.strategies.cases import listed
from tests.pipeline_parallel.branches import judge, siamese_worker


class Meeting(Function):
    """The identity; both ranks must be in its forward, and in its backward, at the same time."""

    def __init__(self, group):
        self.group = group

    def forward(self, x):
        self.group.barrier()
        return x.copy()

    def backward(self, grad):
        self.group.barrier()
        return grad


@pytest.mark.parametrize("transport", ["thread", "process"])
def test_both_branches_are_in_forward_at_once_and_in_backward_at_once(cluster, transport):
    """A barrier inside the branch: were one branch to wait for the other, nothing would move."""

    def worker(group, case):
        meetings, embed = group.split(0), case.model.embed
        case.model.embed = lambda x, randomness: Meeting(meetings)(embed(x, randomness))
        return siamese_worker(group, case)

    comparison, _ = judge(cluster(2, transport), listed("siamese", 2)[0], worker)
    assert comparison.ok, comparison


def names_and_calls(group, case):
    calls, embed = [], case.model.embed

    def counted(x, randomness):
        calls.append(x.data)
        return embed(x, randomness)

    case.model.embed = counted
    x = Tensor(case.inputs, requires_grad=True)
    branch_placement.forward_backward(case.model, x, case.targets, group, case.loss)
    return calls


def test_each_rank_runs_one_branch_and_waits_for_nothing_before_it():
    case, log = listed("siamese", 2)[0], EventLog()
    calls = run(names_and_calls, 2, case, log=log)
    for rank in (0, 1):
        (half,) = calls[rank]
        np.testing.assert_array_equal(half, case.inputs[:, rank])
    names = [[e.name for e in log.events if e.rank == rank] for rank in (0, 1)]
    # The gradient is sent before rank 0 goes backward through its own branch.
    assert names[0] == ["forward branch 0", "recv", "join", "send", "backward branch 0"]
    assert names[1] == ["forward branch 1", "send", "recv", "backward branch 1"]


def test_one_rank_runs_both_branches_and_sends_nothing():
    case, log = listed("siamese", 2)[0], EventLog()
    (calls,) = run(names_and_calls, 1, case, log=log, transport="thread")
    assert len(calls) == 2
    order = ["forward branch 0", "forward branch 1", "join", "backward branch 0"]
    assert [e.name for e in log.events] == [*order, "backward branch 1"]
