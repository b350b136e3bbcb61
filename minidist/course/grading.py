"""Run the tests of a lab for a student: what pytest is told, and what it is asked.

The tests run here, trusted; what they mark `inside` is called by `ask`, in a sandbox. The seed is
the grader's, so that numbers are hidden.
"""

import os
from dataclasses import dataclass, field
from inspect import signature
from itertools import takewhile
from typing import Any
from unittest import mock
from zlib import crc32

import numpy as np

from minidist.course.answers import check_form
from minidist.course.inside import ASK, VARIANTS, Inside
from minidist.course.lab import Lab, Task
from minidist.course.sandbox import LABS, Sandbox
from minidist.course.sandbox.untrusted import NoAnswer, plain
from minidist.errors import WrongInput

try:
    import pytest
except ImportError:
    raise WrongInput("labs are graded by pytest: pip install 'minidist[test]'") from None

ALONE = """--noconftest --capture=no --import-mode=importlib -p no:terminal -p no:cacheprovider
-p no:warnings -p no:faulthandler -p no:threadexception -p no:unraisableexception -p no:logging
-p no:doctest -c""".split()
NO_PLUGINS = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "", "PYTEST_PLUGINS": ""}


class Unanswered(AssertionError):
    """The student's code gave no answer; the text says why."""


@dataclass
class Case:
    """One test with its parameters.

    group    the test without them, or its parameter `group`: it earns points if all cases pass
    given    its parameters, and what the last call `inside` was given
    scored   whether it records a score for the leaderboard
    wrong    what is wrong, or ""
    answers  what the calls `inside` returned, each a value or a NoAnswer
    """

    task: Task
    group: str
    given: dict[str, Any]
    scored: bool = False
    wrong: str = ""
    answers: list[Any] = field(default_factory=list)
    score: float | None = None
    seconds: float = 0.0

    @property
    def about(self) -> str:
        """What was asked, in words: of what was given, all that is short."""
        words = [f"{name} {each}" for name, each in self.given.items() if is_short(each)]
        return ", ".join(words) or self.group


class Grading:
    """A plugin of pytest that runs the tests of some tasks, and keeps what becomes of each.

    refused  {a task's id: why its tests get no answer}
    printed  {a task's id: what the student's code printed}
    """

    def __init__(self, lab: Lab, tasks: list[Task], seed: int, sandbox: Sandbox):
        self.lab, self.tasks, self.seed, self.sandbox = lab, tasks, seed, sandbox
        self.refused: dict[str, str] = {}
        self.printed: dict[str, str] = {}
        self.cases: dict[str, Case] = {}
        self.now: Case | None = None
        self.error: BaseException | None = None  # no answer's: it ends all

    def pytest_configure(self, config) -> None:
        config.addinivalue_line("markers", "task(id): a task of a lab that this test grades")

    def pytest_collection_modifyitems(self, items: list) -> None:
        """Choose the tests of the tasks, one task after the other."""
        marked = [(mark.args[0], item) for item in items for mark in item.iter_markers("task")]
        chosen = [(task, item) for task in self.tasks for id, item in marked if id == task.id]
        items[:] = [item for _, item in chosen]
        for task, item in chosen:
            parameters = dict(item.callspec.params) if hasattr(item, "callspec") else {}
            group = item.originalname.removeprefix("test_").replace("_", " ")
            group = parameters.pop("group", group)
            scored = "record_property" in item.fixturenames
            item.user_properties.append(("task", task.id))
            self.cases[item.nodeid] = Case(task, group, parameters, scored)

    def pytest_runtest_setup(self, item) -> None:
        """Begin a process with each task."""
        before, self.now = self.now, self.cases[item.nodeid]
        if before and before.task.id != self.now.task.id:
            self.printed[before.task.id] = self.sandbox.end()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        """Keep what a test raised, and the score that it recorded; report it in our words."""
        made, case = (yield), self.cases[item.nodeid]
        if call.excinfo is not None:
            if not isinstance(call.excinfo.value, Exception):
                self.error = call.excinfo.value  # a signal's
            case.wrong = case.wrong or in_words(call.excinfo.value)
            made.longrepr = plain(f"{case.about}: {case.wrong}", lines=True)
        case.score = dict(item.user_properties).get("score", case.score)
        case.seconds += call.duration
        if self.error:
            item.session.shouldstop = "an error that is no student's"
        return made

    def pytest_keyboard_interrupt(self, excinfo) -> None:
        if type(excinfo.value) is KeyboardInterrupt:  # an end that pytest has made is another class
            self.error = excinfo.value

    def ask(self, function: Inside, arguments: tuple, named: dict) -> Any:
        """Have the student's code called; raise what is not of the form of the package's value."""
        assert self.now
        self.now.given |= signature(function.function).bind(*arguments, **named).arguments
        task, want = self.now.task, None
        judged = task.variant is not None or not function.any_form
        module = f"{LABS}.{self.lab.name}.{self.lab.tests.stem}"
        if task.id in self.refused:
            raise Unanswered(self.refused[task.id])
        try:
            answer = self.sandbox.answer(module, function.function.__name__, arguments, named)
            self.now.answers.append(answer)
            if judged and not isinstance(answer, NoAnswer):
                want = function.package(*arguments, **named)
        except BaseException as error:
            self.error = error
            raise
        if isinstance(answer, NoAnswer):
            raise Unanswered(answer)
        if judged:
            check_form(answer, want, exactly=task.variant is not None)
        return answer

    @pytest.fixture
    def rng(self, request) -> np.random.Generator:
        """Return the generator of a test's numbers."""
        return random(self.seed, request.node.name)


def random(seed: int, name: str) -> np.random.Generator:
    """Return the generator of the numbers of a test with this name."""
    return np.random.default_rng([seed, crc32(name.encode())])


def run(grading: Grading, *options: str) -> list[Case]:
    """Have pytest run the tests, with these options; return what became of each."""
    tests, sandbox = grading.lab.tests, grading.sandbox
    before = ASK.set(grading.ask), VARIANTS.set(grading.lab.variants)
    sandbox.end()
    try:
        with mock.patch.dict(os.environ, NO_PLUGINS):
            arguments = [*ALONE, os.devnull, f"--rootdir={tests.parent}", str(tests), *options]
            status = pytest.main(arguments, plugins=[grading])
    finally:
        ASK.reset(before[0])
        VARIANTS.reset(before[1])
        last = sandbox.end()
    if grading.now:
        grading.printed[grading.now.task.id] = last
    if grading.error:
        raise grading.error
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError(f"pytest ended with {status!r} on {tests}")
    return list(grading.cases.values())


def in_words(error: BaseException) -> str:
    """Return the message of a test's error: its own words, or that an answer has another form."""
    if not isinstance(error, AssertionError):
        why = f"{type(error).__name__}: {error}"
        return f"the answer has not the form that was asked for ({why})"
    lines = [line for line in str(error).splitlines() if line.strip()]
    own = list(takewhile(lambda line: not line.startswith("assert "), lines))
    return "\n".join(own or lines) or "it is wrong"


def is_short(value: Any) -> bool:
    """Return whether a value is a few words in a line, and no array."""
    arrays = isinstance(value, np.ndarray) or "array(" in (shown := str(value))
    return not arrays and len(shown) <= 60
