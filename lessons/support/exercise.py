"""The verdict on an exercise of a lesson: solved, not solved yet, or what is wrong.

    exercise.judge("14.1", join)     # exercise 14.1: not solved yet
    exercise.hint("14.1")

`checks/14.py` has, for its exercise 1,

    check_1(attempt)     -> what is wrong with it, or None; any error also means wrong
    solution_1           a worked solution
    hints_1              three hints, each of which says more
    tempting_1           wrong answers that the check must refuse, in words
"""

import inspect
import linecache
import re
import runpy
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any

from minidist.errors import CommError, RankFailed

Frame = tuple[str, int]  # file, line
CHECKS = Path(__file__).parents[1] / "checks"
PARTS = "check", "solution", "hints", "tempting"
FRAME = re.compile(r'^ +File "(.+)", line (\d+), in ', re.MULTILINE)  # of a traceback's text


def verdict(check: Callable[[Any], str | None], attempt: Any) -> str:
    """Return "solved", "not solved yet" or "wrong: ...".

    check    attempt -> what is wrong with it, or None. Any error also means wrong, and the line of
             the attempt that raised it is shown. It may run the attempt here or on ranks.
    attempt  a function, a class or a value; not solved yet if it raises NotImplementedError
    """
    return _judged(check, attempt)[0]


@dataclass(frozen=True)
class Exercise:
    """An exercise of `checks/`: see the first lines of this file."""

    check: Callable[[Any], str | None]
    solution: Any
    hints: tuple[str, ...]
    tempting: list


def exercise_of(name: str) -> Exercise:
    """Return the exercise "14.1". ValueError if there is none."""
    lesson, _, number = name.partition(".")
    path = CHECKS / f"{lesson}.py"
    found = runpy.run_path(str(path)) if path.exists() else {}
    if f"check_{number}" not in found:
        numbers = [each.removeprefix("check_") for each in found if each.startswith("check_")]
        raise ValueError(f"no exercise {name}; lesson {lesson} has {', '.join(numbers) or 'none'}")
    return Exercise(*(found[f"{part}_{number}"] for part in PARTS))


def number_of(lesson: Path) -> str:
    """Return "10b" of lessons/10b_zero_bubble.py."""
    return lesson.stem.partition("_")[0]


def judge(name: str, attempt: Any) -> None:
    """Print the verdict on an answer to the exercise `name`."""
    print(f"exercise {name}:", verdict(exercise_of(name).check, attempt))


def hint(name: str, number: int = 1) -> None:
    """Print a hint to the exercise `name`. ValueError if it has no hint of this number."""
    hints = exercise_of(name).hints
    if not 1 <= number <= len(hints):
        raise ValueError(f"exercise {name} has hints 1 to {len(hints)}, not {number}")
    print(f"exercise {name}, hint {number} of {len(hints)}: {hints[number - 1]}")


def refuse(given: Exercise | str) -> None:
    """Require that the check of an exercise solves its solution and refuses tempting answers.

    A tempting answer is refused in words: the check's, or those of an error that is raised on
    purpose. AssertionError if the check ends by an accident, such as an IndexError.
    """
    each = exercise_of(given) if isinstance(given, str) else given
    found = verdict(each.check, each.solution)
    assert found == "solved", f"the worked solution is {found}"
    for answer in each.tempting:
        refused, accident = _judged(each.check, answer)
        name = getattr(answer, "__name__", repr(answer)[:60])
        assert refused.startswith("wrong"), f"the check lets {name} pass: {refused}"
        assert not accident, f"the check has no words for {name}: {refused}"


def _judged(check: Callable, attempt: Any) -> tuple[str, bool]:
    """Return the verdict, and whether an error is the reason that nobody raised on purpose."""
    try:
        fault = check(attempt)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # exit() in an answer does not end the lesson
        fault = error.__cause__ or error if isinstance(error, RankFailed) else error
        if isinstance(fault, NotImplementedError):
            return "not solved yet", False
        if isinstance(fault, CommError):
            return f"wrong: {type(fault).__name__}: {fault}", False
        frames = _frames(error)
        on_purpose = isinstance(fault, ValueError) and _source(frames[-1]).startswith("raise ")
        return f"wrong: {_in_words(fault, error, attempt, frames, on_purpose)}", not on_purpose
    return "solved" if fault is None else f"wrong: {fault}", False


def _in_words(fault, error, attempt: Any, frames: list[Frame], on_purpose: bool) -> str:
    """Return what was raised, and the line of the attempt that it came from.

    frames  from the check's on; the last one of the attempt is shown
    """
    raised = "".join(traceback.format_exception_only(fault)).strip()
    rank = f"on rank {error.rank} " if isinstance(error, RankFailed) and not on_purpose else ""
    codes = list(_codes(attempt))
    own = [(frame, code) for frame in frames for code in codes if _is_in(frame, code)]
    if on_purpose and not own:
        return str(fault)
    if not codes:
        return f"{rank}the check of your answer {attempt!r:.60} raises {raised}"
    kind = "class" if inspect.isclass(attempt) else "function"
    if not own:
        return f"{rank}the check raises {raised}: it cannot use what your {kind} makes"
    frame, code = own[-1]
    where = f"in its line {frame[1] - code.co_firstlineno + 1}: `{_source(frame)}`"
    return f"{fault}, {where}" if on_purpose else f"{rank}your {kind} raises {raised}, {where}"


def _frames(error: BaseException) -> list[Frame]:
    """Return the frames of an error, outermost first; of a rank's error they are in its text."""
    if isinstance(error, RankFailed):
        return [(file, int(line)) for file, line in FRAME.findall(str(error))] or [("", 0)]
    return [(each.filename, each.lineno or 0) for each in traceback.extract_tb(error.__traceback__)]


def _source(frame: Frame) -> str:
    return linecache.getline(*frame).strip()


def _is_in(frame: Frame, code: CodeType) -> bool:
    """Return whether a frame is in these lines: also in a function inside of a function."""
    return frame[0] == code.co_filename and code.co_firstlineno <= frame[1] <= _last_line(code)


def _last_line(code: CodeType) -> int:
    inside = [_last_line(each) for each in code.co_consts if isinstance(each, CodeType)]
    return max([code.co_firstlineno, *inside, *(line for *_, line in code.co_lines() if line)])


def _codes(attempt: Any) -> Iterator[CodeType]:
    """Yield the code of a function, of a partial's function, or of the methods of a class."""
    while isinstance(attempt, partial):
        attempt = attempt.func
    attempt = inspect.unwrap(getattr(attempt, "__func__", attempt))
    if hasattr(attempt, "__code__"):
        yield attempt.__code__
        return
    known = attempt if inspect.isclass(attempt) else type(attempt)
    for each in known.__mro__:
        if each.__module__ == known.__module__:  # what it inherits from the library is not its own
            for member in vars(each).values():
                member = getattr(member, "fget", None) or getattr(member, "__func__", member)
                if hasattr(member, "__code__"):
                    yield member.__code__
