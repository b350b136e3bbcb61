"""A schedule that a reader writes in Python, as the text of its programs; never run in the server.

    def program(rank, p, m):
        yield from (f"F{i}" for i in range(m))         rank 0     F0 F1 B0 B1
        yield from map(Backward, range(m))      ->     rank 1     F0 F1 B0 B1

It yields or returns actions, as text or as objects of actions.py, which need no import; a function
placement(p) may return the stages of each rank. `text_of` runs it in this process: a browser's, or
a sandbox's, which `Written` keeps warm.
"""

import inspect
import re
import reprlib
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from traceback import format_exception_only, walk_tb

from minidist.pipeline_parallel import actions
from minidist.pipeline_parallel.text import Unreadable, read_action

FILE = "<written>"
MOST_ACTIONS = 20_000  # of all ranks together: they are simulated and drawn in a second
NAMES = {kind.__name__: kind for kind in (*actions.COMPUTE, actions.Reduce)}


def text_of(source: str, p: int, m: int) -> str:
    """Return the text form of a reader's program for p ranks and m micro-batches.

    Unreadable, a ValueError with the line, for whatever goes wrong in it, SystemExit included.
    """
    names: dict = {**NAMES, "__name__": "__main__"}
    try:
        exec(compile(source, FILE, "exec"), names)
        return "\n".join(_lines(names, p, m)) + "\n"
    except Unreadable:
        raise
    except BaseException as error:
        error = error.__cause__ if isinstance(error.__cause__, StopIteration) else error  # PEP 479
        lines = [n for at, n in walk_tb(error.__traceback__) if at.f_code.co_filename == FILE]
        if isinstance(error, SyntaxError) and error.filename == FILE:
            lines.append(error.lineno or 1)
        line, message = (lines or [1])[-1], type(error).__name__
        with suppress(BaseException):  # an exception of the reader's own has any __str__
            message = format_exception_only(error)[-1].strip()[:300]
        raise Unreadable(f"line {line}: {message}", line) from None


def _lines(names: dict, p: int, m: int) -> Iterator[str]:
    """Yield the placement, if there is one, and a line per rank."""
    program, left = names.get("program"), MOST_ACTIONS
    if not callable(program):
        raise Unreadable("line 1: there is no program; begin with def program(rank, p, m):", 1)
    if placement := names.get("placement"):
        of_ranks = [[int(k) for k in stages] for stages in placement(p)]
        if len(of_ranks) != p or not all(
            0 <= k < MOST_ACTIONS for stages in of_ranks for k in stages
        ):
            reason = f"placement({p}) is {reprlib.repr(of_ranks)}; return a list of stages per rank"
            raise _fault(placement, None, reason)
        yield "placement  " + " | ".join(" ".join(map(str, stages)) for stages in of_ranks)
    for rank in range(p):
        row = list(_words(program, rank, p, m, left))
        left -= len(row)
        yield f"rank {rank}".ljust(10) + " " + " ".join(row)


def _words(program: Callable, rank: int, p: int, m: int, left: int) -> Iterator[str]:
    """Yield the actions of a rank as words; at most `left` of them."""
    call, made = f"program({rank}, {p}, {m})", program(rank, p, m)
    items = made.split() if isinstance(made, str) else [None] if made is None else made
    for number, item in enumerate(items):
        word = str(item) if isinstance(item, actions.Action) else item
        reason = f"{reprlib.repr(word)}, which is no action; write F3 B3 I3 W3 F3.1"
        if number == left:
            reason = f"more than {MOST_ACTIONS:,} actions; does a loop not end?"
        elif isinstance(word, str) and read_action(word):
            yield word
            continue
        raise _fault(program, made, f"{call} gives {reason}")


def _fault(function: Callable, made: object, reason: str) -> Unreadable:
    """Return an error at the line where a generator is, or where its function begins."""
    frame = made.gi_frame if inspect.isgenerator(made) else None
    first = getattr(getattr(function, "__code__", None), "co_firstlineno", 1)
    line = frame.f_lineno if frame else first
    return Unreadable(f"line {line}: {reason}", line)


PLACE = re.compile(rf"; shortly before.*?{FILE}, line (\d{{1,6}}).*", re.S)


def attempt(source: str, p: int, m: int) -> dict[str, str]:
    """Return, inside the sandbox, a program's text form, or a fault and its line."""
    try:
        return {"text": text_of(source, p, m)}
    except Unreadable as error:
        return {"fault": str(error), "line": str(error.line or "")}


class Written:
    """A sandbox that runs one program at a time; of the programs that wait, the newest alone."""

    def __init__(self, seconds: float = 5.0):
        from minidist.course.sandbox import Sandbox  # which is not in the sandbox
        from minidist.course.sandbox.limits import Limits

        limits = Limits(seconds, memory=512 << 20, processes=8)
        self.sandbox = Sandbox(None, limits, files=(FILE,)).__enter__()
        self._thread = ThreadPoolExecutor(1)  # bubblewrap ends with the thread that starts it
        self._newest: Future = self._thread.submit(self.sandbox.call, [])  # it gets warm

    def text_of(self, source: str, p: int, m: int) -> str:
        """Return the text form that the sandbox made. Unreadable: why there is none."""
        self._newest.cancel()  # one that runs goes on
        question = {"source": source, "p": p, "m": m}
        mine = self._thread.submit(self.sandbox.call, [(__name__, "attempt", question)])
        self._newest = mine
        try:
            (attempted,) = mine.result().answers
        except CancelledError:
            raise Unreadable("a newer program came before this one was run") from None
        if isinstance(attempted, str):  # the program was ended
            line = at[1] if (at := PLACE.search(attempted)) else ""
            attempted = {"fault": PLACE.sub("; does a loop not end?", attempted), "line": line}
        if not isinstance(attempted, dict):
            attempted = {"fault": "the answer is not what the sandbox writes"}
        if "text" not in attempted:
            line = str(attempted.get("line", ""))[:6]
            raise Unreadable(str(attempted.get("fault")), int(line) if line.isdecimal() else None)
        return str(attempted["text"])

    def close(self) -> None:
        """End the program that runs, and remove the sandbox."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self.sandbox.stop()
        self._thread.shutdown()
        self.sandbox.__exit__()
