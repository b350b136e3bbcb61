"""The verdict on an exercise of a lesson: solved, not solved yet, or what is wrong.

def check(attempt):
    if attempt(3) != 9:
        return f"3 squared is not {attempt(3)}"

exercise.judge(1, check, square, tempting=[double])     # exercise 1: not solved yet
"""

from collections.abc import Callable
from typing import Any

from minidist.errors import CommError, RankFailed


def verdict(check: Callable[[Any], str | None], attempt: Any) -> str:
    """Return "solved", "not solved yet" or "wrong: ...".

    check    attempt -> what is wrong with it, or None. A ValueError or a CommError, such as a
             Deadlock, also means wrong. It may run the attempt here or on ranks.
    attempt  not solved yet if it raises NotImplementedError
    """
    try:
        fault = check(attempt)
    except (NotImplementedError, ValueError, CommError) as error:
        fault = error.__cause__ if isinstance(error, RankFailed) else error
        if isinstance(fault, NotImplementedError):
            return "not solved yet"
        if isinstance(fault, CommError):
            return f"wrong: {type(fault).__name__}: {fault}"
        if not isinstance(fault, ValueError):
            return f"wrong: on rank {error.rank} it raises {fault!r}"
    return "solved" if fault is None else f"wrong: {fault}"


def judge(number: int, check: Callable, attempt: Any, tempting: list[Callable]) -> None:
    """Print the verdict on an attempt, and on tempting wrong answers, which must be refused."""
    print(f"exercise {number}:", verdict(check, attempt))
    for answer in tempting:
        refused = verdict(check, answer)
        name = answer.__name__.replace("<lambda>", "a tempting answer")
        print(f"  {name}: {refused}")
        assert refused.startswith("wrong"), f"the check lets {name} pass"
