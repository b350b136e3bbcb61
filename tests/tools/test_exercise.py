"""What a lesson says of an attempt at its exercise."""

import pytest

from minidist import Cluster
from minidist.tools import exercise


def square(x):
    return x * x


def double(x):
    return 2 * x


def open_stub(x):
    raise NotImplementedError


def check(attempt):
    return None if attempt(3) == 9 else f"3 squared is not {attempt(3)}"


def test_a_verdict_is_one_of_three():
    verdicts = [exercise.verdict(check, attempt) for attempt in (square, open_stub, double)]
    assert verdicts == ["solved", "not solved yet", "wrong: 3 squared is not 6"]


def refuses(x):
    raise ValueError(f"{x} of 4")


def test_a_value_error_says_what_is_wrong_here_and_on_ranks_and_another_error_is_shown():
    with Cluster(2, transport="thread") as cluster:
        here = exercise.verdict(check, refuses)
        there = exercise.verdict(lambda attempt: cluster.run(lambda group: attempt(3)), refuses)
    assert here == there == "wrong: 3 of 4"
    with pytest.raises(ZeroDivisionError):
        exercise.verdict(check, lambda x: x // 0)


def test_a_stub_on_ranks_is_not_solved_yet_and_another_error_is_wrong():
    with Cluster(2, transport="thread") as cluster:

        def on_ranks(attempt):
            found = cluster.run(lambda group: attempt(group.rank))
            return None if found == [0, 1] else f"ranks return {found}"

        assert exercise.verdict(on_ranks, open_stub) == "not solved yet"
        assert exercise.verdict(on_ranks, lambda rank: [][rank]).startswith("wrong: on rank ")
        assert exercise.verdict(on_ranks, square) == "solved"

        def waits(attempt):
            cluster.run(lambda group: group.recv(1 - group.rank))

        assert exercise.verdict(waits, square).startswith("wrong: Deadlock: every rank waits")


def test_tempting_answers_are_shown_and_must_be_refused(capsys):
    exercise.judge(2, check, open_stub, tempting=[double])
    shown = "exercise 2: not solved yet\n  double: wrong: 3 squared is not 6\n"
    assert capsys.readouterr().out == shown
    with pytest.raises(AssertionError, match="lets square pass"):
        exercise.judge(2, check, open_stub, tempting=[square])
