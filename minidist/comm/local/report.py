"""What a rank does with a worker, and what it reports back."""

import os
import pickle
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import numpy as np

from minidist.comm.local import by_value
from minidist.comm.local.logged_group import world
from minidist.comm.local.mailbox import Stopped
from minidist.comm.local.mailbox_fabric import MailboxFabric
from minidist.errors import WrongInput
from minidist.events import EventLog


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
    fabric: MailboxFabric, run: int, logged: bool, payload: bytes, loads: Callable[[bytes], Any]
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
    fabric.end()
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
            pickle.loads(by_value.dumps(report.error))
        return by_value.dumps(report)
    except Exception as error:
        if report.error is not None:
            text = f"{report.traceback}(the exception itself stays on the rank: {error})\n"
            return by_value.dumps(Report(traceback=text))
        why = WrongInput(f"the worker's {error}")
        return by_value.dumps(Report(error=why, traceback=str(why)))


def unpack(packed: bytes) -> Report:
    """Return the report; if its result cannot be restored here, a report of that failure."""
    try:
        return pickle.loads(packed)
    except Exception:
        text = traceback.format_exc()
        return Report(traceback=f"the result of the worker cannot be restored:\n{text}")
