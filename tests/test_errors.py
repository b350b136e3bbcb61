"""What a caller can get wrong anywhere; and which ValueError says that a caller did."""

import concurrent.futures
import contextlib
from functools import partial

import numpy as np
import pytest

import minidist
from minidist import Tensor, run
from minidist.comm.cluster import raise_first_failure
from minidist.comm.local.worker import Report
from minidist.errors import RankFailed, WrongInput, check_options, is_wrong_input
from minidist.nn.datasets import text
from minidist.pipeline_parallel import programs


def trained(model, rate=0.1, *, steps):
    pass


def anything(model, **options):
    pass


def test_an_option_that_is_none_is_named_beside_those_there_are():
    for function, options in ((trained, "rate, steps"), (len, "none")):
        words = f"^a run has no option 'model'; it has {options}$"
        with pytest.raises(ValueError, match=words):
            check_options(function, {"model": 1}, "a run")
    assert check_options(trained, ["rate", "steps"], "a run") is None
    assert check_options(trained, ["seed"], "a run", also=["seed"]) is None
    assert check_options(anything, ["seed"], "a run") is None


def caught(function, *arguments, **options) -> Exception:
    with pytest.raises(Exception) as found:
        function(*arguments, **options)
    return found.value


@contextlib.contextmanager
def around():
    try:
        yield
    finally:
        np.ones(3)


def inside(function):
    with around(), contextlib.suppress(KeyError):
        try:
            function()
        except ValueError as error:
            raise error


def in_a_thread(function):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(function).result()


WRONG = [
    (partial(programs, "magic", 2, 2), True),
    (partial(text, "/nowhere"), True),  # raised from an OSError
    (partial(check_options, trained, ["x"], "a run"), True),
    (lambda: Tensor(np.ones(3)) + Tensor(np.ones(4)), False),  # NumPy's, from C code
    (partial(np.random.default_rng, -1), False),  # likewise, with frames of its own
    (partial(np.stack, [np.ones(3), np.ones(4)]), False),  # NumPy's, by a `raise` of NumPy's
    (partial(getattr, minidist, "magic"), False),  # an AttributeError of minidist
]


@pytest.mark.parametrize("through", [lambda f: f(), inside, in_a_thread])
def test_wrong_input_is_a_value_error_that_minidist_itself_raises(through):
    for function, wrong in WRONG:
        assert is_wrong_input(caught(through, function)) == wrong


@pytest.mark.parametrize("transport", ["process", "thread"])
def test_a_rank_says_whether_its_error_was_wrong_input(transport):
    for wrong, worker in [
        (True, lambda group: programs("magic", 2, 2)),
        (False, lambda group: np.ones(3) + np.ones(4)),
    ]:
        error = caught(run, worker, 2, transport=transport)
        assert isinstance(error, RankFailed) and isinstance(error.__cause__, ValueError)
        assert is_wrong_input(error) == wrong


def test_our_bug_in_one_rank_is_not_hidden_by_wrong_input_in_another():
    erred = Report(error=WrongInput("theirs"), traceback="where")
    broken = Report(error=ValueError("ours"), traceback="where")
    for reports, rank in (({0: erred, 1: broken}, 1), ({0: broken, 1: erred}, 0)):
        error = caught(raise_first_failure, reports)
        assert error.rank == rank and not is_wrong_input(error)
