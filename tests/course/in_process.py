"""Labs' tests without a sandbox: the package with mistakes planted, in milliseconds."""

import pickle
from contextlib import nullcontext
from importlib import import_module

from minidist.course import grading
from minidist.course.grading import Case, random
from minidist.course.lab import Lab
from minidist.course.sandbox.inside.values import decode
from minidist.course.sandbox.untrusted import NoAnswer
from minidist.verify.mistakes.register import Mistake, planted


class Collected(grading.Grading):
    """Keeps the tests of a task, ready to be called, and runs none."""

    def pytest_collection_modifyitems(self, items: list) -> None:
        super().pytest_collection_modifyitems(items)
        self.tests = [called_by(item, self) for item in items]

    def pytest_runtest_protocol(self, item):
        return True  # it is done: no test runs


def called_by(item, grading: grading.Grading):
    """Return a function that calls a test with its parameters and fixtures."""
    given = dict(item.callspec.params) if hasattr(item, "callspec") else {}

    def test():
        drawn = {"rng": random(grading.seed, item.name), "record_property": lambda *_: None}
        fixtures = {name: drawn[name] for name in item.fixturenames if name in drawn}
        item.function(**given, **fixtures)

    return test


def calls(lab: Lab, id: str) -> list:
    """Return the tests of a task, as functions without arguments."""
    collected = Collected(lab, [lab.task(id)], 0, Planted())
    grading.run(collected)
    return collected.tests


class Planted:
    """Answers calls as a student would whose files are the package's with mistakes in them."""

    def __init__(self, *mistakes: Mistake):
        self.mistakes = mistakes

    def answer(self, module, name, arguments, named):
        function = getattr(import_module(module), name)
        try:
            with planted(*self.mistakes) if self.mistakes else nullcontext():
                return decode(function.by_value(pickle.dumps((arguments, named))))
        except Exception as error:
            cause = error.__cause__ if type(error).__name__ == "RankFailed" else error
            return NoAnswer(f"{type(cause or error).__name__}: {cause or error}")

    def end(self) -> str:
        return ""


def cases(lab: Lab, id: str, *mistakes: Mistake, seed: int = 0) -> list[Case]:
    return grading.run(grading.Grading(lab, [lab.task(id)], seed, Planted(*mistakes)))
