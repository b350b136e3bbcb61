"""A worker on a rank: how it gets there, what the rank does with it, what it reports back.

A function travels by value, also one of a script or a notebook. cloudpickle does it. From version
3.1.3 on it forgets the file of such a function, which tracebacks and the call sites of Deadlock and
CollectiveMismatch show; here a function keeps it. What cannot be sent is named: `worker's lock`,
`args[0]['log'].file`, `result[2]`.
"""

import inspect
import io
import os
import pickle
import sys
import traceback
from collections import ChainMap
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any, ClassVar, NamedTuple, NoReturn, TypeVar

import cloudpickle
import numpy as np

from minidist.comm.fabric import Fabric, Stopped
from minidist.comm.group import world
from minidist.errors import WrongInput
from minidist.events import EventLog

T = TypeVar("T")


def dumps(value: Any) -> bytes:
    """Return `value` as bytes, for pickle.loads in a process that has the same packages.

    ValueError, which names the part of it that cannot be sent.
    """
    try:
        return _dumps(value)
    except MemoryError:
        raise
    except Exception as error:
        path, part, reason = _obstacle("", value, error, [value])
        name = f"{path.lstrip('.') or 'this'}, of type {type(part).__name__},"
        raise WrongInput(
            f"{name} cannot be sent to another process: {reason}; send what it is made from, and "
            "make it there"
        ) from error


def _dumps(value: Any) -> bytes:
    with io.BytesIO() as file:
        _Pickler(file).dump(value)
        return file.getvalue()


def copied(value: T) -> T:
    """Return the value as another process gets it: closures of functions are copied, too."""
    return pickle.loads(dumps(value))


def _obstacle(path: str, value: Any, error: Exception, above: list) -> tuple[str, Any, Exception]:
    """Return where in `value`, which is at `path`, the innermost part is that cannot be sent."""
    for place, part in _parts(path, value):
        if len(above) < 20 and not any(part is outer for outer in above):
            try:
                _dumps(part)
            except Exception as reason:
                return _obstacle(place, part, reason, [*above, part])
    return path, value, error


def _parts(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what pickle takes `value` apart into, and what to call it."""
    match value:
        case FunctionType():
            used = inspect.getclosurevars(value)
            arguments = inspect.signature(value).parameters
            names = {name: argument.default for name, argument in arguments.items()}
            names.update({**used.globals, **used.nonlocals})
            yield from ((f"{path}'s {name}", part) for name, part in names.items())
        case dict():
            yield from ((f"{path}[{key!r}]", part) for key, part in value.items())
        case tuple() if hasattr(value, "_fields"):
            yield from ((f"{path}.{name}", getattr(value, name)) for name in value._fields)
        case list() | tuple() | set():
            yield from ((f"{path}[{i}]", part) for i, part in enumerate(value))
        case _:
            with suppress(Exception):  # it cannot be taken apart, and says why
                _, arguments, *state = value.__reduce_ex__(5)
                for part in (*arguments, *state):
                    fields = part if isinstance(part, dict) else {}
                    yield from ((f"{path}.{name}", one) for name, one in fields.items())
                    yield path, part


def _of_code(code: CodeType) -> tuple:
    make, arguments = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return _written_in, (code.co_filename, make, arguments)


def _written_in(file: str, make: Callable[..., CodeType], arguments: tuple) -> CodeType:
    return make(*arguments).replace(co_filename=file)


class _Pickler(cloudpickle.Pickler):
    dispatch_table: ClassVar = ChainMap({CodeType: _of_code}, cloudpickle.Pickler.dispatch_table)


class Order(NamedTuple):
    """What every rank is to do: worker(group, *args), where NumPy warns as in the caller."""

    worker: Callable
    args: tuple
    errstate: Any  # of np.geterr


@dataclass
class Report:
    """How a run ended on one rank: a result, an exception, or (`exitcode`) a dead process.

    unreceived  {(source, to, tag): messages sent minus received, as this rank counts them}
    """

    result: Any = None
    error: BaseException | None = None
    traceback: str = ""
    exitcode: int | None = None
    unreceived: dict = field(default_factory=dict)
    log: EventLog | None = None

    failed = property(lambda self: bool(self.traceback))
    died = property(lambda self: self.exitcode is not None)


def execute(
    fabric: Fabric, run: int, logged: bool, payload: bytes, loads: Callable[[bytes], Any]
) -> Report | None:
    """Unpack an Order, call worker(group, *args); None if the run was stopped.

    If the mailbox was closed with an error, that error is reported, even if the worker ignores it,
    or fails with another one because of it.
    """
    process, report = os.getpid(), None
    try:
        fabric.begin(run, logged)
        group = world(fabric)
        worker, args, errstate = loads(payload)
        with np.errstate(**errstate):
            result = worker(group, *args)
        fabric.mailbox.check_open(run)
        log = fabric.log and fabric.log.in_seconds()
        report = Report(result, unreceived=fabric.unreceived(), log=log)
    except BaseException as error:
        cause = fabric.mailbox.closed or error
        if cause is error or not isinstance(cause, Stopped):  # else nobody waits for a report
            report = Report(error=cause, traceback="".join(traceback.format_exception(cause)))
    if os.getpid() != process:
        _leave(report)
    fabric.mailbox.end(run)
    _flush()
    return report


def _leave(report: Report | None) -> NoReturn:
    """End a child that the worker forked and that returned from it: only its parent reports."""
    error = None if report is None else report.error
    match error:
        case None:
            status = 0
        case SystemExit(code=int() | None as code):
            status = code or 0
        case _:
            print("".join(traceback.format_exception(error)), file=sys.stderr)
            status = 1
    _flush()
    os._exit(status)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # the worker may have closed it
            stream.flush()


def pack(report: Report) -> bytes:
    """Serialise a report; if its result or exception cannot be, one that says why."""
    try:
        if report.error is not None:
            pickle.loads(dumps(report.error))
        return dumps(report)
    except Exception as error:
        if report.error is not None:
            text = f"{report.traceback}(the exception itself stays on the rank: {error})\n"
            return dumps(Report(traceback=text))
        why = WrongInput(f"the worker's {error}")
        return dumps(Report(error=why, traceback=str(why)))


def unpack(packed: bytes) -> Report:
    """Return the report; if its result cannot be restored here, a report of that failure."""
    try:
        return pickle.loads(packed)
    except Exception:
        text = traceback.format_exc()
        return Report(traceback=f"the result of the worker cannot be restored:\n{text}")
