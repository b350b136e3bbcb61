"""No function of a lesson, nor of an exercise's solution, earns a task's full points.

Each one is put in the place of each function that a task blanks, with everything else as in the
package, its parameters filled by name or in order. So a lab asks for more than a lesson shows.
"""

import ast
import inspect
import pickle
import signal
from contextlib import suppress
from functools import cache
from importlib import import_module
from inspect import Parameter, unwrap
from operator import attrgetter
from types import FunctionType

import pytest

from minidist.comm.local.threads import ThreadRanks
from minidist.course.answers import check_form
from minidist.course.inside import ASK
from minidist.course.lab import labs
from minidist.course.sandbox.inside.values import decode
from minidist.verify.mistakes.overlay import PACKAGE
from minidist.verify.mistakes.register import module_of
from tests.course.in_process import calls

LESSONS = PACKAGE.parent / "lessons"
LABS = {lab.name: lab for lab in labs()}
NAMED = Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY
OTHER = "check_", "draw", "race", "timed", "train"  # judges, figures, whole runs
PASTED = ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef
LIMIT = 5  # seconds of one answer
pytestmark = pytest.mark.slow


def is_plain(node: ast.Assign) -> bool:
    """Return whether an assignment runs nothing of the lesson's: constants, sizes, `partial`."""
    calls = [inner.func for inner in ast.walk(node.value) if isinstance(inner, ast.Call)]
    return all(isinstance(call, ast.Name) and call.id in ("partial", "range") for call in calls)


@cache
def pasted() -> dict[str, object]:
    """Return {"03: by_hand": function} of all lessons and checks, without running a lesson."""
    found = {}
    for path in [*sorted(LESSONS.glob("[0-9]*.py")), *sorted((LESSONS / "checks").glob("*.py"))]:
        names: dict = {"__name__": path.stem}
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, PASTED) or (isinstance(node, ast.Assign) and is_plain(node)):
                with suppress(Exception):  # it may need what the lesson has computed
                    exec(compile(ast.Module([node], []), path.name, "exec"), names)
        where = f"{path.parent.name}/{path.stem}"
        for name, value in names.items():
            if name.startswith(OTHER):
                continue
            own = getattr(value, "__module__", None) == path.stem
            if inspect.isfunction(value) and own:
                found[f"{where}: {name}"] = value
            elif inspect.isclass(value) and own:
                inner = {n: f for n, f in vars(value).items() if inspect.isfunction(f)}
                found |= {f"{where}: {name}.{n}": f for n, f in inner.items()}
    return found


def ways(theirs, wanted: list[str]) -> list[list[str]]:
    """Return which of the wanted function's parameters a pasted one may get."""
    parameters = inspect.signature(theirs).parameters.values()
    needed = [p.name for p in parameters if p.kind in NAMED and p.default is Parameter.empty]
    possible = [p.name for p in parameters if p.kind in NAMED]
    found = [needed] if needed and set(needed) <= set(wanted) else []
    given = [name for name in wanted if name != "self"]
    found += [way for way in (wanted, given) if len(needed) <= len(way) <= len(possible)]
    return [way for n, way in enumerate(found) if way not in found[:n]]


class TooLong(BaseException):
    pass


def stopped(*_):
    raise TooLong


def swapped(function, theirs, way: list[str]):
    """Return the code that calls a pasted function in a function's place."""
    signature = inspect.signature(function)
    bare = [p.replace(annotation=Parameter.empty) for p in signature.parameters.values()]
    bare = [p if p.default is Parameter.empty else p.replace(default=None) for p in bare]
    head = str(signature.replace(parameters=bare, return_annotation=Parameter.empty))
    source = f"def {function.__name__}{head}:\n    return __pasted__({', '.join(way)})\n"
    names: dict = {}
    exec(source, names)
    return names[function.__name__].__code__


def solves(function, theirs, way: list[str], asked: list) -> bool:
    """Return whether all tests pass with a pasted function in a function's place."""
    own, code = function.__code__, swapped(function, theirs, way)

    def ask(inside, arguments, named):
        pickled = pickle.dumps((arguments, named))
        want = inside.package(*arguments, **named)
        function.__globals__["__pasted__"], function.__code__ = theirs, code
        before = signal.signal(signal.SIGALRM, stopped)
        signal.setitimer(signal.ITIMER_REAL, LIMIT)
        try:
            got = decode(inside.by_value(pickled))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            function.__code__ = own
            del function.__globals__["__pasted__"]
        if not inside.any_form:
            check_form(got, want)
        return got

    token = ASK.set(ask)
    try:
        for test in asked:
            test()
        return True
    except (Exception, TooLong):
        return False
    finally:
        ASK.reset(token)


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """See a failure of a rank, or a deadlock, 20 times as soon."""
    reports = ThreadRanks.reports
    monkeypatch.setattr(ThreadRanks, "reports", lambda ranks, t: reports(ranks, t and t / 20))


def packages(path: str, name: str) -> FunctionType:
    """Return a function of the package, of a property its getter."""
    found = unwrap(attrgetter(name)(import_module(module_of(path))))
    return getattr(found, "fget", found)


def solvers(lab, task, path: str, name: str) -> list[str]:
    """Return what passes all of a task's tests in the place of one of its functions."""
    function = packages(path, name)
    wanted, asked = list(inspect.signature(function).parameters), calls(lab, task.id)
    return [
        label
        for label, theirs in pasted().items()
        if any(solves(function, theirs, way, asked) for way in ways(theirs, wanted))
    ]


def test_gpipe_of_lesson_7_solves_its_half_of_the_task_and_nothing_solves_the_general_half():
    lab = LABS["pipelines"]
    lesson, general = (solvers(lab, lab.task("4.1"), *half) for half in lab.task("4.1").targets)
    assert "lessons/07_gpipe: fill_and_drain" in lesson and not general


@pytest.mark.timeout(1200)
@pytest.mark.grid(2)
@pytest.mark.parametrize("name", LABS)
def test_no_code_of_a_lesson_or_an_exercise_earns_full_points(name):
    """One function of each task that nothing solves is enough; the longest come first."""
    lab = LABS[name]
    for task in lab.tasks:
        found = {}
        by_length = sorted(task.targets, key=lambda t: len(inspect.getsource(packages(*t))))
        for path, target in reversed(by_length):
            if not (here := solvers(lab, task, path, target)):
                break
            found[target] = here
        else:
            pytest.fail(f"{task.id} asks for no more than lessons show: {found}")
