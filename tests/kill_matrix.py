"""Which tests find which mistake of the register: what a test is worth.

    python -m tests.kill_matrix DIR              go on where DIR's files end; Python 3.12 or newer
    python -m tests.kill_matrix DIR --table      what is in DIR, a row per mistake
    python -m tests.kill_matrix DIR --random 200 changes drawn at random, in place of the register

First each test file runs once, and notes which of the package's functions each of its tests calls.
Then each mistake is planted in a process of its own, in which the tests run that call what it
changes, the quickest first, on ranks that are threads of that process or get its code by fork.
A test function that has failed once is not asked again. DIR has a JSON file per test file and per
mistake, so that a run that was stopped goes on.
"""

import argparse
import contextlib
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from tests.test_architecture import ROOT

PACKAGE = str(ROOT / "minidist") + os.sep
SECONDS = float(os.environ.get("KILL_SECONDS", 60))  # of the tests of one mistake
Plant = Callable[[], AbstractContextManager[None]]
TOOL = 4  # of sys.monitoring: the first that is for anybody


def function_of(item) -> str:
    return item.nodeid.split("[")[0]


class Called:
    """Notes the package's functions that are called in this process, in any thread."""

    def __init__(self):
        self.names: set[str] = set()
        sys.monitoring.use_tool_id(TOOL, "kill matrix")
        sys.monitoring.register_callback(TOOL, sys.monitoring.events.PY_START, self.note)
        sys.monitoring.set_events(TOOL, sys.monitoring.events.PY_START)

    def note(self, code, offset):
        if code.co_filename.startswith(PACKAGE):
            self.names.add(f"{code.co_filename.removeprefix(PACKAGE)}:{code.co_qualname}")
        return sys.monitoring.DISABLE  # until the next test

    def anew(self):
        self.names.clear()
        sys.monitoring.restart_events()


def cpu() -> float:
    t = os.times()
    return t.user + t.system + t.children_user + t.children_system


def of_the_register() -> dict[str, tuple[set[str], Plant]]:
    """Return {name of a mistake: (the functions that it changes, what plants it)}."""
    from minidist.verify.mistakes.register import mistakes, planted

    return {
        name: ({edit.function.split("(")[0] for edit in mistake.edits}, partial(planted, mistake))
        for name, mistake in mistakes().items()
    }


def at_random(count: int, seed: int) -> dict[str, tuple[set[str], Plant]]:
    from tests.random_mutants import draw

    return {name: ({m.function_of_file}, m.planted) for name, m in draw(count, seed).items()}


class KillMatrix:
    """A plugin of pytest: in place of running the tests once, it runs them as said above."""

    def __init__(self, folder: Path, jobs: int, names: list[str], first: bool, wrong):
        self.folder, self.jobs, self.names, self.first = folder, jobs, names, first
        self.wrong: Callable[[], dict[str, tuple[set[str], Plant]]] = wrong

    def pytest_runtestloop(self, session):
        if session.testsfailed:
            raise session.Interrupted("the tests cannot be collected")
        self.items = session.items
        files = defaultdict(list)
        for item in self.items:
            files[item.path.relative_to(ROOT / "tests").as_posix()].append(item)
        (self.folder / "seen").mkdir(parents=True, exist_ok=True)
        (self.folder / "kills").mkdir(exist_ok=True)
        self.in_processes(
            {
                self.folder / "seen" / f"{name.replace('/', '-')}.json": (self.see, items)
                for name, items in files.items()
            }
        )
        seen = {}
        for path in (self.folder / "seen").glob("*.json"):
            seen |= json.loads(path.read_text())
        by_function = defaultdict(list)
        for test, (_, _, called) in seen.items():
            for name in called:
                by_function[name].append(test)
        work = {}
        for name, (functions, plant) in self.wrong().items():
            tests = {test for function in functions for test in by_function[function]}
            if not self.names or name in self.names:
                quickest = sorted(tests, key=lambda test: seen[test][0])
                work[self.folder / "kills" / f"{name}.json"] = (self.kill, plant, quickest)
        self.in_processes(work)
        return True

    def in_processes(self, work: dict):
        """Call each function with its arguments in a child that writes its result to the path."""
        running: dict[int, tuple[Path, float]] = {}
        waiting = [(path, *call) for path, call in work.items() if not path.exists()]
        print(f"{len(waiting)} of {len(work)} left", file=sys.__stderr__, flush=True)
        while waiting or running:
            while waiting and len(running) < self.jobs:
                path, function, *arguments = waiting.pop(0)
                if (child := os.fork()) == 0:
                    self.child(path, function, *arguments)
                running[child] = (path, time.monotonic())
            child, status = os.wait()
            if child in running:
                path, begin = running.pop(child)
                how = "" if path.exists() else f", without a result: {status}"
                line = f"{time.monotonic() - begin:6.1f} s  {path.stem}{how}"
                print(line, file=sys.__stderr__, flush=True)

    def child(self, path: Path, function, *arguments):
        try:
            result = function(*arguments)
            part = path.with_suffix(f".{os.getpid()}")
            part.write_text(json.dumps(result))
            part.rename(path)
        except BaseException as error:
            print(f"{path.stem}: {error!r}", file=sys.__stderr__, flush=True)
        finally:
            os._exit(0)

    def see(self, items) -> dict[str, tuple[float, int, list[str]]]:
        """Run these tests; return of each function its CPU seconds, its cases and what it calls."""
        called, seen = Called(), {}
        for item, following in zip(items, [*items[1:], None], strict=True):
            called.anew()
            begin = cpu()
            self.run(item, following)
            seconds, cases, names = seen.get(function_of(item), (0, 0, []))
            names = sorted({*names, *called.names})
            seen[function_of(item)] = (round(seconds + cpu() - begin, 3), cases + 1, names)
        return seen

    def kill(self, plant: Plant, quickest: list[str]) -> dict:
        """Plant a mistake; return which of these tests fail, which pass, and which were not run."""
        items = defaultdict(list)
        for item in self.items:
            items[function_of(item)].append(item)
        result: dict = {"killed": {}, "passed": [], "not run": []}
        begin = time.monotonic()
        with plant():
            for test in quickest:
                if time.monotonic() - begin > SECONDS:
                    result["not run"].append(test)
                    continue
                for item in items[test]:
                    if failed := self.run(item, None):
                        result["killed"][test] = failed
                        break
                else:
                    result["passed"].append(test)
                if self.first and result["killed"]:
                    break
        result["seconds"] = round(time.monotonic() - begin, 1)
        return result

    def run(self, item, following) -> str:
        """Run one test; return the first line of how it failed, or "" if it has not."""
        from _pytest.runner import runtestprotocol

        with contextlib.suppress(AttributeError):
            del item._request  # it has run in another child, or as another case
        if hasattr(item, "_initrequest"):
            item._initrequest()
        reports = runtestprotocol(item, log=False, nextitem=following)
        failed = [report for report in reports if report.failed]
        return (str(failed[0].longrepr).splitlines() or ["?"])[-1][:200] if failed else ""


def table(folder: Path) -> str:
    kills = {p.stem: json.loads(p.read_text()) for p in sorted((folder / "kills").glob("*.json"))}
    lines = ["| mistake | test files that find it | one of them |", "| --- | --- | --- |"]
    for name, result in kills.items():
        files = sorted({test.split("::")[0].removeprefix("tests/") for test in result["killed"]})
        first = next(iter(result["killed"]), "none").removeprefix("tests/")
        lines.append(f"| {name} | {len(files)} | `{first}` |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--first", action="store_true", help="one test that finds it is enough")
    parser.add_argument("--name", action="append", default=[], help="only this mistake; repeatable")
    parser.add_argument("--random", type=int, help="so many mutants of tests/random_mutants.py")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tests", nargs="+", default=["tests"])
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        print(table(options.folder))
        return 0
    import pytest

    wrong = partial(at_random, options.random, options.seed) if options.random else of_the_register
    plugin = KillMatrix(options.folder.absolute(), options.jobs, options.name, options.first, wrong)
    quiet = "-q -p no:xdist -p no:cacheprovider -p no:terminalreporter_ --timeout 60".split()
    return pytest.main([*quiet, *options.tests], plugins=[plugin])


if __name__ == "__main__":
    sys.exit(main())
