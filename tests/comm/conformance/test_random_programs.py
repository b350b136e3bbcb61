"""Random programs of a few operations with one random defect: the verdict must be right."""

import os
import signal

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from minidist.errors import CollectiveMismatch, CommError, Deadlock, RankDied, RankFailed

OPERATIONS = ["all_reduce", "broadcast", "ring", "barrier", "pass_on"]
DEFECTS = ["leave", "raise", "shape", "other", "tag"]


def play(group, program, defect):
    """Carry out a program; the `culprit` does step `at` in its own way, or leaves."""
    at, culprit, kind = defect
    for step, operation in enumerate(program):
        wrong = step == at and group.rank == culprit
        x = np.arange(4.0) + step
        if wrong and kind == "leave":
            return
        if wrong and kind == "raise":
            raise ZeroDivisionError("defect")
        if wrong and kind == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if wrong and kind == "shape":
            x = np.arange(5.0)
        if wrong and kind == "other":
            group.all_gather(x, label="other")
        elif operation == "all_reduce":
            group.all_reduce(x, label=str(step))
        elif operation == "ring":
            group.all_reduce(x, algorithm="ring")
        elif operation == "broadcast":
            group.broadcast(x, root=step % group.size)
        elif operation == "barrier":
            group.barrier()
        else:
            group.send(x, to=(group.rank + 1) % group.size, tag=step)
            group.recv((group.rank - 1) % group.size, tag=step + (wrong and kind == "tag"))


def verdict(program, at, kind):
    """Say what the error must be; None if the defect does no harm."""
    collective = program[at] != "pass_on"
    if kind in ("raise", "die"):
        return {"raise": RankFailed, "die": RankDied}[kind]
    if kind == "leave":
        return Deadlock  # the others need it in this very step, whatever it is
    if kind == "tag":
        return None if collective else Deadlock
    if kind == "shape" and program[at] in ("broadcast", "barrier", "pass_on"):
        return None
    return CollectiveMismatch if collective else None


@settings(max_examples=8, phases=[Phase.generate])  # small as they are: each takes long
@given(
    program=st.lists(st.sampled_from(OPERATIONS), min_size=1, max_size=5),
    size=st.integers(2, 4),
    data=st.data(),
)
def test_the_verdict_on_random_programs_with_one_defect_is_right(ranks, program, size, data):
    kind = data.draw(st.sampled_from([*DEFECTS, *(["die"] * ranks.outlives_rank)]))
    at = data.draw(st.integers(0, len(program) - 1))
    culprit = data.draw(st.integers(0, size - 1))
    if kind == "other" and program[at] == "pass_on":
        return  # then what follows decides; the enumerated tests have such cases
    want = verdict(program, at, kind)
    if want is None:
        ranks(size).run(play, program, (at, culprit, kind), timeout=8)
        return
    with pytest.raises(CommError) as caught:
        ranks(size).run(play, program, (at, culprit, kind), timeout=8)
    assert caught.type is want, (caught.type, want)
