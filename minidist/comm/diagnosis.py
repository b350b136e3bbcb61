"""Why nothing moves: what ranks call, what they wait for, and when that can never end.

A *signature* is what the ranks of a group must agree on in a collective call. A *wait* is a thread
that needs other ranks. A *snapshot* is all that one rank waits for, with its message counters. The
caller takes one of every rank from time to time. Two in a row are a deadlock if they are equal,
every rank that has not finished waits, and every message that was sent has arrived. One round of
snapshots is not enough: it shows the ranks at different moments, between which a message may have
been sent and received. Two equal rounds of counters are (Mattern 1987, "Algorithms for distributed
termination detection": the four-counter method). A rank that computes or sleeps does not wait,
however long it takes.
"""

import contextlib
import hashlib
import os
import sys
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import lru_cache

from minidist.errors import CollectiveMismatch, WrongInput

SILENCE = 30.0  # seconds after which a run says that a rank does not answer


class Signature:
    """What the ranks of a group must agree on in a collective call: its text, and 64 bits of it."""

    def __init__(self, name: str, details: tuple, label: str | None):
        shown = [*map(str, details), *([] if label is None else [f"label={label!r}"])]
        self.text = f"{name}({', '.join(shown)})"
        digest = hashlib.blake2b(self.text.encode(), digest_size=8).digest()
        self.fingerprint = int.from_bytes(digest, "little")


def signature_of(name: str, details: tuple = (), label: str | None = None) -> Signature:
    """Return the signature of a call."""
    if label is not None and not isinstance(label, str):
        raise WrongInput(f"a label is a string or None, not {label!r}")
    return _signature(name, details, label)


_signature = lru_cache(maxsize=4096)(Signature)  # equal ones are made once


def mismatch(members: list[int], calls: list[str]) -> CollectiveMismatch:
    """Return the error that shows what each rank of a group called, and where."""
    rows = [f"  rank {rank}: {call}" for rank, call in zip(members, calls, strict=True)]
    head = f"ranks {members} of one group did not call the same collective:"
    return CollectiveMismatch("\n".join([head, *rows]))


def call_site() -> str:
    """Return file:line of the caller of a group: the first frame outside this package around it."""
    frame, here = sys._getframe(), os.path.join(os.path.dirname(__file__), "")
    in_group = False  # what a group calls is no caller, also a communicator of another package
    while frame.f_back is not None:
        file = frame.f_code.co_filename
        in_group = in_group or file == here + "group.py"
        if in_group and not file.startswith(here) and file != contextlib.__file__:
            break
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


@dataclass
class Wait:
    """A thread that waits: in which operation, for which ranks (none: it is about to continue).

    helper   the thread of this rank that it waits for, if it is one
    meeting  the name of the meeting it has come to, if this rank cannot know who else has come
    """

    operation: str
    sources: Callable[[], list[int]]
    site: str
    helper: int | None = None
    meeting: tuple | None = None
    thread: str = field(default_factory=lambda: threading.current_thread().name)
    since: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class Row:
    """A wait at one moment; `seconds` it had lasted by then, which equality ignores.

    Two are equal only if they are the same wait: a loop that waits again has a later `since`.
    """

    thread: str
    operation: str
    sources: tuple[int, ...]
    site: str
    since: float
    seconds: float = field(compare=False)
    meeting: tuple | None = None

    def __str__(self):
        ranks = ", ".join(map(str, self.sources))
        who = f"rank{'s' if len(self.sources) > 1 else ''} {ranks}" if ranks else "nobody any more"
        is_worker = self.thread == "MainThread" or self.thread.startswith("rank ")
        thread = "" if is_worker else f" ({self.thread})"
        return (
            f"waits in {self.operation}{thread} for {who} since {self.seconds:.1f} s at {self.site}"
        )


@dataclass(frozen=True)
class Snapshot:
    """What one rank waits for. posted, arrived: messages that it ever sent, and ever got."""

    rows: tuple[Row, ...]
    computes: bool
    posted: int
    arrived: int

    def blocked(self) -> bool:
        return not self.computes and bool(self.rows) and all(row.sources for row in self.rows)

    def lines(self) -> list[str]:
        rows = [str(row) for row in self.rows]
        return ["computes", *rows] if self.computes or not rows else rows


Snapshots = dict[int, Snapshot | None]  # by rank; None for one that does not answer


def snapshot(
    waits: dict[int, Wait],
    worker: int | None,
    older: Collection[threading.Thread] | None,
    posted: int,
    arrived: int,
) -> Snapshot:
    """Take a snapshot of a rank from {thread: wait} and the thread that runs its worker.

    older: the threads that the process had before the run; all others are the rank's, too. None:
    the process has other ranks' threads as well. Daemon threads count only where they wait or are
    waited for.
    """
    waits, now = dict(waits), time.monotonic()  # threads come and go
    others = []
    if older is not None:
        new = [thread for thread in threading.enumerate() if thread not in older]
        others = [thread.ident for thread in new if not thread.daemon]
    helpers = [w.helper for w in waits.values() if w.helper is not None]
    rows = tuple(
        Row(w.thread, w.operation, tuple(w.sources()), w.site, w.since, now - w.since, w.meeting)
        for w in waits.values()
    )
    computes = any(thread not in waits for thread in {worker, *others, *helpers})
    return Snapshot(rows, computes, posted, arrived)


def without_arrived(snapshots: Snapshots) -> Snapshots:
    """Return the snapshots, in which no rank waits for one that has come to the same meeting.

    Where a rank cannot know who has come, as with MPI, it says that it waits for all others.
    """
    came: dict[tuple, set[int]] = {}
    for rank, one in snapshots.items():
        if one:
            for row in one.rows:
                if row.meeting is not None:
                    came.setdefault(row.meeting, set()).add(rank)

    def corrected(row: Row) -> Row:
        if row.meeting is None:
            return row
        sources = [rank for rank in row.sources if rank not in came[row.meeting]]
        return replace(row, sources=tuple(sources))

    return {
        rank: one and replace(one, rows=tuple(map(corrected, one.rows)))
        for rank, one in snapshots.items()
    }


def is_deadlock(before: Snapshots, now: Snapshots, finished: set[int]) -> bool:
    """Compare two snapshots of every rank; `finished` ranks have returned from the worker."""
    known = {rank: one for rank, one in now.items() if one is not None}
    if len(known) < len(now):
        return False
    unfinished = set(now) - finished
    in_flight = sum(one.posted - one.arrived for one in known.values())
    blocked = bool(unfinished) and all(known[rank].blocked() for rank in unfinished)
    return blocked and in_flight == 0 and before == now


class Silence:
    """Name the ranks that do not answer while all others wait, for SILENCE seconds.

    Such a rank may be stopped (SIGSTOP), or compute without letting its second thread run. It may
    continue, so this is no error; each run reports it once.
    """

    def __init__(self):
        self.state: Snapshots | None = None
        self.since, self.reported = 0.0, False

    def overdue(self, now: Snapshots, finished: set[int], time: float) -> set[int]:
        """Record a snapshot of every rank; return the ranks to name now, or none."""
        state = {rank: one for rank, one in now.items() if rank not in finished}
        if state != self.state:
            self.state, self.since = state, time
        silent = {rank for rank, one in state.items() if one is None}
        others_wait = all(one.blocked() for one in state.values() if one is not None)
        if self.reported or not others_wait or time - self.since < SILENCE:
            return set()
        self.reported = bool(silent)
        return silent

    def in_words(self, pids: dict[int, int]) -> str:
        """Return the message for the user about these ranks, {rank: its process}."""
        names = " and ".join(f"rank {rank} (process {pid})" for rank, pid in pids.items())
        processes = " ".join(map(str, pids.values()))
        return (
            f"minidist: no answer from {names} for {SILENCE:g} s, while all others wait. The run "
            f"goes on. If a process above is stopped, `kill -CONT {processes}` lets it continue. "
            "run(..., timeout=SECONDS) would end such a run."
        )


def table(snapshots: Snapshots, finished: set[int]) -> str:
    """Return a line per rank and thread: what it waits for, from whom, since when, and where."""
    rows = []
    for rank, one in sorted(snapshots.items()):
        lines = ["does not answer"] if one is None else one.lines()
        if rank in finished:
            lines = ["has finished"]
        rows += [f"  rank {rank}: {line}" for line in lines]
    return "\n".join(rows)


def lost_messages(counts: list[dict[tuple, int]]) -> str:
    """Add up the ranks' {(source, to, tag): sent minus received}; name what was never received."""
    left: dict[tuple, int] = {}
    for count in counts:
        for where, n in count.items():
            left[where] = left.get(where, 0) + n
    return "; ".join(
        f"{n} from rank {source} to rank {to} with tag {tag}"
        for (source, to, tag), n in sorted(left.items())
        if n
    )
