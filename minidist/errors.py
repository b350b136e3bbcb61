"""What can go wrong between ranks; and the check of options, which a caller can get wrong.

What a caller gets wrong at one rank is a ValueError.
"""

import inspect
from collections.abc import Callable, Iterable


class CommError(RuntimeError):
    """A failure of communication between ranks; the base of those below."""


class CollectiveMismatch(CommError):
    """Ranks of one group did not call the same collective with agreeing arguments."""


class Deadlock(CommError):
    """Ranks wait for messages that nobody will send."""


class CommTimeout(CommError):
    """A run was not done within its `timeout`; shows what each rank was waiting for."""


class RankFailed(CommError):
    """The worker raised on a rank: `.rank`, and the remote exception as `__cause__`."""

    def __init__(self, message: str, rank: int | None = None):
        super().__init__(message)
        self.rank = rank


class RankDied(CommError):
    """A rank's process ended without a report: `.rank`, `.exitcode` (negative: the signal)."""

    def __init__(self, message: str, rank: int | None = None, exitcode: int | None = None):
        super().__init__(message)
        self.rank, self.exitcode = rank, exitcode


def check_options(
    function: Callable,
    given: Iterable[str],
    what: str,
    also: Iterable[str] = (),
    without: Iterable[str] = (),
) -> None:
    """Raise a ValueError that names the options of `what` if one of those given is no option.

    The options are the keyword-only arguments of `function`, its arguments with a default, and the
    names in `also`, except the names in `without`. If `function` takes **options, any other name is
    accepted here.
    """
    arguments = inspect.signature(function).parameters.values()
    open_ended = any(a.kind is a.VAR_KEYWORD for a in arguments)
    known = [a.name for a in arguments if a.kind is a.KEYWORD_ONLY or a.default is not a.empty]
    known = [name for name in [*known, *also] if name not in without]
    for name in given:
        if name in without or not (open_ended or name in known):
            has = f"it has {', '.join(known)}" if known else "it has none"
            raise ValueError(f"{what} has no option {name!r}; {has}")
