"""What can go wrong between ranks, and what a caller can get wrong: that is a WrongInput."""

from collections.abc import Callable, Collection, Iterable
from numbers import Integral, Real

MOST = 2**31 - 1  # the largest size of a layer


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


class WrongInput(ValueError):
    """A caller erred: the message says what is wrong, with the numbers, and the remedy.

    NumPy raises ValueError, too, for operands of ours that do not fit: that is a bug of ours, and
    its traceback is needed. So all that this package raises on purpose is of this class.
    """


def is_wrong_input(error: BaseException | None) -> bool:
    """Return whether a caller erred, here or on a rank, and not the code."""
    return isinstance(error.__cause__ if isinstance(error, RankFailed) else error, WrongInput)


def plural(number: int, what: str) -> str:
    """Return a number of things in correct English: "1 rank", "2 ranks", "3 batches"."""
    if number == 1:
        return f"1 {what}"
    return f"{number} {what}es" if what.endswith(("s", "ch")) else f"{number} {what}s"


def check_number(words: str, value, allows: Callable, kind: type = Real) -> None:
    """Raise ValueError unless the value is a number that `allows` accepts; `words` say which.

    kind  Integral for a whole number, of Python or NumPy. True and "1" are no numbers
    """
    if not isinstance(value, kind) or isinstance(value, bool) or not allows(value):
        raise WrongInput(f"{words}, not {value!r}")


def check_sizes(least: int = 1, **sizes: int) -> None:
    """Raise ValueError unless these are whole numbers from `least` that an array may have."""
    for name, size in sizes.items():
        words = f"{name} is a whole number from {least} to {MOST}"
        check_number(words, size, lambda n: least <= n <= MOST, Integral)


def check_name(what: str, name, names: Collection) -> None:
    """Raise ValueError, which says the nearest name and all, unless `name` is one of `names`."""
    if name not in names:
        raise WrongInput(unknown(what, name, names))


def unknown(what: str, name, names: Collection) -> str:
    """Format the error for a name that is none of `names`."""
    near = nearest(name, names)
    mean = f"did you mean {near}? Choose" if near else "choose"
    return f"unknown {what} {name!r}; {mean} one of {', '.join(map(str, names))}"


def nearest(name, names: Collection) -> str | None:
    """Return the name that was probably meant."""
    from difflib import get_close_matches  # here: `minidist --help` is faster without it

    return next(iter(get_close_matches(str(name).lower(), map(str, names), 1)), None)


def check_options(
    function: Callable,
    given: Iterable[str],
    what: str,
    also: Iterable[str] = (),
    without: Iterable[str] = (),
) -> None:
    """Raise a ValueError that names the options of `what` if one of those given is no option.

    The options are those of `function` and the names in `also`, except the names in `without`. If
    `function` takes **options, any other name is accepted here.
    """
    names, open_ended = options_of(function)
    known = [name for name in [*names, *also] if name not in without]
    for name in given:
        if name in without or not (open_ended or name in known):
            has = f"it has {', '.join(known)}" if known else "it has none"
            mean = f"; did you mean {near}?" if (near := nearest(name, known)) else ""
            raise WrongInput(f"{what} has no option {name!r}; {has}{mean}")


def options_of(function: Callable) -> tuple[list[str], bool]:
    """Return the arguments that are keyword-only or have a default; and if it takes **options."""
    import inspect

    arguments = inspect.signature(function).parameters.values()
    known = [a.name for a in arguments if a.kind is a.KEYWORD_ONLY or a.default is not a.empty]
    return known, any(a.kind is a.VAR_KEYWORD for a in arguments)


def check_writable(path, what: str, folder: bool = False) -> None:
    """Raise ValueError if a file cannot be written, or files in a folder: before the work is done.

    It tries to make a file beside the one of this path, or in the folder.

    folder  whether the path is that of a folder, which is made if it is missing
    """
    import os  # here: `minidist --help` is faster without these
    from pathlib import Path
    from tempfile import TemporaryFile

    path = Path(path)
    try:
        above = path.absolute().parents
        there = next(p for p in (path, *above) if p.exists()) if folder else path.parent
        if not folder and not there.is_dir():
            raise WrongInput(f"cannot write {what}: there is no folder {str(there)!r}")
        if not folder and (path.is_dir() or (path.exists() and not os.access(path, os.W_OK))):
            raise WrongInput(f"cannot write {what}; use a file in a folder of yours")
        TemporaryFile(dir=there).close()
    except OSError as error:
        words = f"cannot write {what}: {error.strerror}; use a folder of yours"
        raise WrongInput(words) from error
