"""Run a student's code in separate processes, which return arrays and nothing else.

    grader       knows the answers; never imports the student's code
    supervisor   inside/__main__.py: starts the student's process, watches it, leaves nothing of it
    student      inside/student.py: becomes another user, gets its limits, answers calls

What is protected is the machine (time, memory, processes, files, network), the hidden seed and the
verdict:

- A separate process per task: `sys.exit`, `os._exit`, a crash, patched modules (numpy.testing,
  pytest, the lab's tests, this sandbox's own) end or spoil one task. It gets calls, no answers.
- The kernel and the supervisor limit time, memory, processes, the size of each file and of all
  files together. Linux on x86-64 and arm64 refuses memory that belongs to no process: files of
  memory, System V's segments and queues, a namespace of one's own with a file system of memory.
- The supervisor adopts orphans and kills until no descendant is left, on Linux also those that
  forked twice and left the session. Folders are removed whatever their rights and depth.
- The answer is read as numbers and texts of a known size. Only files that the lab names are taken
  from what is handed in, and no link that leads out of it.
- bubblewrap, where it works: the supervisor and all below it see the system read-only, the
  dependencies, a copy of minidist and their scratch folder; no other process and no network.
- Only if the grader is root: another user, whose processes are counted and killed separately, and
  whose files in the folders that are open to all are removed; no network.

A grade says in its line "defences" which of the last two the machine had, and what is therefore
not prevented. Where students are not trusted, install bubblewrap or be root. Never prevented:

- The copy of minidist lacks the bodies of the tasks, but the reference is public. The student's
  code can also falsify a ledger, a clock, or what the lab's tests run inside. A wrong number earns
  nothing, but a right one can come from elsewhere. Where cheating matters, read the code.
- The memory of all processes together is measured every 0.1 s; in between more can be taken.
- Files that are removed while they are open count for no limit of all files together: 30 of 64 MB
  were kept. They are on the disk, or in memory where the temporary files are. Pipes hold 64 MB.
- Without bubblewrap: files in other folders that all users can write to. In /dev/shm, which is
  memory, 32 of 64 MB were kept until the end.
- A grader that is killed (SIGKILL) leaves its folder, minidist-lab-*, among the temporary files,
  but no process.
- Times are the machine's: on a busy machine a slow right answer can look like an endless loop.
- A hole in Python, NumPy or the kernel.
"""

import os
import pickle
import re
import shutil
import socket
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from minidist.course.blank import part_inside
from minidist.course.lab import Lab
from minidist.course.sandbox.limits import (
    USUAL,
    Limits,
    claim_user,
    most_processes,
    open_to_all,
)
from minidist.course.sandbox.supervisor import Supervisor
from minidist.course.sandbox.untrusted import (
    NoAnswer,
    beginning,
    contents,
    read,
    remove,
    remove_files_of,
)
from minidist.verify.mistakes import overlay
from minidist.verify.mistakes.register import module_of

LABS = "minidist.course.labs"  # and there NAME.test_NAME
ANSWERS = "course", "verify/mistakes"  # folders that a student's minidist does not have
IN_FOLDERS = r"\S*-packages/|/proc/self/fd/\d+/"  # where a dependency is imported from


class Heard(NamedTuple):
    """The answers to some calls, or why there are none; and what was printed."""

    answers: list[Any]
    output: str


class Sandbox:
    """minidist with a student's files in it, ready to be asked.

    lab       whose tasks are to be written; None: minidist is whole, and all calls are `call`s
    files     what else an error names as the student's own
    defences  what the machine has of them, and what is not prevented

    Use it as a context: at its end the folder and all processes are removed.
    """

    def __init__(self, lab: Lab | None, limits: Limits = USUAL, files: tuple[str, ...] = ()):
        self.lab, self.limits = lab, limits
        self.files = [*files, *(lab.files if lab else [])]
        self.tree: Path | None = None
        self.defences = ""
        self._work: Path | None = None  # of the process that answers
        self._number, self._left, self._ended = 0, 0.0, ""

    def __enter__(self):
        self._folder = Path(tempfile.mkdtemp(prefix="minidist-lab-", dir=open_to_all()))
        self._asked = self._folder / "asked"
        self._asked.mkdir(mode=0o755)
        self._user: int | None = None
        self._claim: socket.socket | None = None
        self._supervisor: Supervisor | None = None
        if os.geteuid() == 0:
            self._user, self._claim = claim_user()
            try:
                os.chown(self._folder, 0, self._user)
                self._folder.chmod(0o750)  # for this user and no other
            except OSError:  # a container that has root alone
                self._user = None
        return self

    def __exit__(self, *_):
        self.stop()
        self.end()
        if self._user is not None:
            remove_files_of(self._user)
        if self._claim is not None:
            self._claim.close()
        remove(self._folder)

    def put(self, files: dict[str, str]) -> dict[str, str]:
        """Put a student's files in place; return {path: why} of those that cannot be imported.

        The starter's version replaces these, so that one bad file does not spoil the tasks of the
        others.
        """
        self.build(files)
        if not files or not any(self._imports(files).values()):
            return {}
        wrong: dict[str, str] = {}
        for path in files:  # each among the starter's, so that none is blamed for another
            self.build({path: files[path]})
            wrong |= {path: why for path, why in self._imports([path]).items() if why}
        self.build({path: source for path, source in files.items() if path not in wrong})
        return wrong

    def call(self, calls: list[tuple[str, str, dict]]) -> Heard:
        """Call each (module, function, keyword arguments) in a new process, one after the other."""
        self.end()
        if self.tree is None:
            self.build({})
        try:
            answers = [self.answer(module, name, (), named) for module, name, named in calls]
        finally:
            output = self.end()
        return Heard(answers, output)

    def answer(self, module: str, name: str, arguments: tuple, named: dict) -> Any:
        """Call a function in the process that there is, or in a new one; see `end`.

        Returns a value, or the NoAnswer that says why there is none.
        """
        if self._work is None:
            self._begin()
        assert self._work
        if self._ended:
            began = self._number > 0
            return NoAnswer("not asked any more" if began else f"no answer: {self._ended}")
        number, self._number = self._number, self._number + 1
        file = self._work / "calls" / str(number)
        file.write_bytes(pickle.dumps((module, name, arguments, named, self._left)))
        file.chmod(0o644)
        begin = time.monotonic()
        self._ended = self._ordered({"number": number, "seconds": self._left}, self._left + 30)
        self._left = max(0.0, self._left - (time.monotonic() - begin))
        if not self._ended:
            return read(self._work / "scratch" / str(number))
        stopped = self._ended.startswith("stopped after")
        place = contents(self._work / "scratch" / "place", 2000) if stopped else None
        where = (place or b"")[:2000].decode("utf-8", "replace").strip()
        more = f"; shortly before it was at\n{where}" if where else ""
        return NoAnswer(f"no answer: {self._ended}{more}")

    def end(self) -> str:
        """End the process that answers; return what was printed. The next call begins another."""
        if self._work is None:
            return ""
        work, self._work = self._work, None
        try:
            if self._supervisor is not None:
                self._ordered({}, 30)
            printed = beginning(work / "output").replace(f"{self.tree}/", "")
            return re.sub(IN_FOLDERS, "", printed)  # paths in warnings
        finally:
            remove(work)

    def build(self, files: dict[str, str], leave_out: tuple[str, ...] = ANSWERS) -> None:
        """Build the minidist to ask from now on: the lab's, with these files in it."""
        self.tree = tree = Path(tempfile.mkdtemp(prefix="tree-", dir=self._folder))
        tree.chmod(0o755)
        overlay.build(tree, (self.lab.blanked() if self.lab else {}) | files, leave_out)
        if self.lab is not None:
            self._hide(tree, self.lab)
        for path in tree.rglob("*"):  # the reference may be closed, the copy may not
            path.chmod(0o755 if path.is_dir() else 0o644)

    def _hide(self, tree: Path, lab: Lab) -> None:
        """Take out what tells the bodies of the tasks; put in what the lab's tests run inside."""
        for compiled in sorted(tree.rglob("__pycache__")):
            shutil.rmtree(compiled)
        inside = Path(*LABS.split("."))
        (tree / inside / lab.name).mkdir(parents=True)
        for name in ("__init__.py", "ranks.py"):
            shutil.copy(overlay.PACKAGE.parent / inside / name, tree / inside)
        (tree / inside / lab.name / lab.tests.name).write_text(part_inside(lab.tests))
        for path in tree.rglob("*"):
            os.utime(path, (0, 0))  # no time tells which files are not the reference's

    def _imports(self, paths) -> dict[str, str]:
        """Import files, in one process; return {path: what was wrong, or ""}."""
        heard = self.call([(LABS, "load", {"name": module_of(path)}) for path in paths])
        found = [answer if isinstance(answer, NoAnswer) else "" for answer in heard.answers]
        return dict(zip(paths, found, strict=True))

    def _begin(self) -> None:
        """Have the supervisor begin a process."""
        if self.tree is None:
            self.build({})
        work = self._work = Path(tempfile.mkdtemp(dir=self._asked))
        work.chmod(0o755)
        (work / "calls").mkdir(mode=0o755)
        scratch = work / "scratch"
        scratch.mkdir(mode=0o700)
        if self._user is not None:
            os.chown(scratch, self._user, self._user)
        self._number, self._left = 0, self.limits.seconds
        order = {
            **vars(self.limits),
            "tree": str(self.tree),
            "files": self.files,
            "calls": str(work / "calls"),
            "scratch": str(scratch),
            "output": str(work / "output"),
            "user": self._user,
            "processes": most_processes(self.limits.processes, self._user),
        }
        if self._supervisor is None:
            self._supervisor = Supervisor(self._folder, self._user)
            self.defences = self._supervisor.defences
        self._ended = self._ordered(order, 30)

    def _ordered(self, order: dict, seconds: float) -> str:
        """Have the supervisor carry out an order; return how the process ended, if it has."""
        try:
            if self._supervisor is None:
                return "the supervisor was ended"
            result = self._supervisor.ask(order, seconds)
        except (OSError, ValueError):  # ValueError: its last line is cut off
            self.stop()
            return "the supervisor was ended"
        except BaseException:
            self.stop()
            raise
        if not result["began"] and result["ended"].endswith("code 70"):
            assert self._work
            raise RuntimeError(f"the sandbox failed:\n{beginning(self._work / 'output')}")
        return result["ended"]

    def stop(self) -> None:
        """End what runs there, also from another thread; the next call starts anew."""
        if self._supervisor is not None:
            self._supervisor.stop()
        self._supervisor = None
