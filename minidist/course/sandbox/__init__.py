"""Run a student's code in separate processes, which return arrays and nothing else.

    grader       knows the answers; never imports the student's code
    supervisor   inside/__main__.py: starts the student's process, watches it, leaves nothing of it
    student      inside/student.py: reads what it needs, gives up its rights, answers questions

These defences confine the student's code:

- A separate process per task: `sys.exit`, `os._exit`, a crash, patched modules (numpy.testing,
  pytest, the probes, this sandbox's own) end or spoil one task. It sees questions and no answers.
- `minidist` is a copy with the tasks' bodies blanked. Of `course/` it has only this lab's probes,
  and no compiled files: there is no answer to import or to read in it.
- The kernel and the supervisor limit time, memory, processes, the size of each file and of all
  files together.
- The supervisor adopts orphans and kills until no descendant is left, on Linux also those that
  forked twice and left the session. Folders are removed whatever their rights and depth.
- Landlock (Linux 5.13): only the copy, the standard library, the dependencies and shared libraries
  can be read, only the scratch folder can be written to; no signal to the grader (6.12).
- seccomp (Linux on x86-64 and aarch64): no processes, programs, signals, sockets; no change of the
  rights of files or of the limits of other processes.
- Only if the grader is root: another user, whose processes are counted and killed separately; no
  network.
- The answer is read as numbers and texts of a known size. Only files that the lab names are taken
  from what is handed in, and no link that leads out of it.

A grade lists, in its line "defences", which of these the machine had. A laptop does not defend
against:

- Without Linux (on macOS) there is neither Landlock nor seccomp: the student's code can read, write
  and signal whatever the grading user can, including the reference, and can use the network. A
  student's process that leaves its session survives. Grade untrusted code on Linux.
- On Linux older than 5.13, or if Landlock is turned off, seccomp remains: files of the grading user
  can be read and written. If the grader is root, the student is another user, who can read what is
  open to all, and write to /tmp: close the folder of the reference (`chmod go-rwx`).
- If a container does not let root become another user, the student's code runs as root, under the
  other defences.
- The memory of all processes together is measured every 0.1 s; in between more can be taken.
- The student's code runs in one process with what measures it: it can falsify a ledger, a clock or
  a probe. A wrong number earns nothing, but a right one can come from a different algorithm. Where
  cheating matters, read the code.
- A grader that is killed (SIGKILL) leaves its folder, minidist-lab-*, among the temporary files,
  but no process.
- Names, sizes and times of files can be read everywhere: Landlock only refuses to open them.
- Times are the machine's: on a busy machine a slow right answer can look like an endless loop.
- A hole in Python, NumPy or the kernel.
"""

import contextlib
import json
import os
import pickle
import re
import select
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from minidist.course import overlay
from minidist.course.lab import Lab
from minidist.course.question import Answer, Question
from minidist.course.sandbox.environment import dependencies, open_to_all, variables
from minidist.course.sandbox.limits import USUAL, Limits, claim_user, most_processes
from minidist.course.sandbox.untrusted import contents, read, remove

INSIDE = Path(__file__).with_name("inside")
PROBES = "minidist.course.probes"


@dataclass(frozen=True)
class Heard:
    """The result: an answer per question, or why there is none; and what was printed."""

    answers: list[Answer | str]
    output: str


class Sandbox:
    """minidist with a student's files in it, ready to be asked.

    without  defences to leave out ("landlock", "seccomp", "user"), as on a machine without them

    Use it as a context: at its end the folder and all processes are removed.
    """

    def __init__(self, lab: Lab, limits: Limits = USUAL, without: tuple[str, ...] = ()):
        self.lab, self.limits, self.without, self.tree = lab, limits, without, None
        self.defences: list[str] = []

    def __enter__(self):
        self._folder = Path(tempfile.mkdtemp(prefix="minidist-lab-", dir=open_to_all()))
        self._user = self._claim = self._supervisor = None
        if os.geteuid() == 0 and "user" not in self.without:
            self._user, self._claim = claim_user()
            try:
                os.chown(self._folder, 0, self._user)
                self._folder.chmod(0o750)  # for this user and no other
            except OSError:  # a container that has root alone
                self._user = None
        return self

    def __exit__(self, *_):
        self._stop()
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
        wrong = {}
        for path in files:  # each among the starter's, so that none is blamed for another
            self.build({path: files[path]})
            wrong |= {path: why for path, why in self._imports([path]).items() if why}
        self.build({path: source for path, source in files.items() if path not in wrong})
        return wrong

    def ask(self, questions: list[Question]) -> Heard:
        """Ask the questions, in one process, one after the other."""
        return self._ask([(f"{PROBES}.{self.lab.name}", q.probe, q.given) for q in questions])

    def _ask(self, calls: list[tuple[str, str, dict]]) -> Heard:
        """Call each (module, function, keyword arguments) there, one after the other."""
        if self.tree is None:
            self.build({})
        work = Path(tempfile.mkdtemp(prefix="ask-", dir=self._folder))
        work.chmod(0o755)
        try:
            said = self._supervise(work, pickle.dumps(calls))
            answers, scratch = [], work / "scratch"
            for number in range(len(calls)):
                answer = read(scratch / str(number))
                answers.append(_none(number, scratch, said) if answer is None else answer)
            printed = _beginning(work / "output").replace(f"{self.tree}/", "")
            return Heard(answers, re.sub(r"\S*-packages/", "", printed))  # paths in warnings
        finally:
            remove(work)

    def build(self, files: dict[str, str], leave_out: tuple[str, ...] = ("course",)) -> None:
        """Build the minidist to ask from now on: the lab's, with these files in it."""
        self.tree = Path(tempfile.mkdtemp(prefix="tree-", dir=self._folder))
        self.tree.chmod(0o755)
        overlay.build(self.tree, self.lab.blanked() | files, leave_out)
        for compiled in sorted(self.tree.rglob("__pycache__")):
            shutil.rmtree(compiled)  # it has the bodies that were taken out
        inside = Path(*PROBES.split("."))
        probes = self.tree / inside
        probes.mkdir(parents=True)
        for name in ("__init__.py", "ranks.py"):
            shutil.copy(overlay.PACKAGE.parent / inside / name, probes)
        shutil.copy(self.lab.probes, probes / f"{self.lab.name}.py")
        for path in self.tree.rglob("*"):  # the reference may be closed, the copy may not
            path.chmod(0o755 if path.is_dir() else 0o644)

    def _imports(self, paths) -> dict[str, str]:
        """Import files, in one process; return {path: what was wrong, or ""}."""
        heard = self._ask([(PROBES, "load", {"name": module(path)}) for path in paths])
        said = [answer if isinstance(answer, str) else "" for answer in heard.answers]
        return dict(zip(paths, said, strict=True))

    def _supervise(self, work: Path, questions: bytes) -> str:
        """Have the supervisor run a process to its end; return how it ended."""
        scratch = work / "scratch"
        scratch.mkdir(mode=0o700)
        if self._user is not None:
            os.chown(scratch, self._user, self._user)
        order = {
            **vars(self.limits),
            "tree": str(self.tree),
            "files": self.lab.files,
            "scratch": str(scratch),
            "output": str(work / "output"),
            "questions": questions,
            "user": self._user,
            "without": self.without,
            "processes": most_processes(self.limits.processes, self._user),
            **dependencies(),
        }
        try:
            if self._supervisor is None:
                self._start()
            self._tell(order)
            said = json.loads(self._hear(self.limits.seconds + 30))
        except (OSError, ValueError):  # ValueError: its last line is cut off
            self._stop()
            return "the supervisor was ended"
        except BaseException:
            self._stop()
            raise
        if not said["defences"] and said["ended"].endswith("code 70"):
            raise RuntimeError(f"the sandbox failed:\n{_beginning(work / 'output')}")
        self.defences = said["defences"] or self.defences
        return said["ended"]

    def _start(self) -> None:
        problems = self._folder / "supervisor"
        with problems.open("wb") as file:
            self._supervisor = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", "-X", "utf8", str(INSIDE)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                start_new_session=True,  # Ctrl-C is the grader's, who then ends the supervisor
                cwd="/",
                env=variables(),
            )
        try:
            self._tell(dependencies())
            ready = self._hear(60)
        except OSError as error:
            ready = str(error)
        if ready != b"ready\n":
            raise RuntimeError(f"the sandbox does not start: {_beginning(problems) or ready}")

    def _hear(self, seconds: float) -> bytes:
        if not select.select([self._supervisor.stdout], [], [], seconds)[0]:
            raise OSError(f"no answer in {seconds:g} s")
        return self._supervisor.stdout.readline()

    def _tell(self, order: dict) -> None:
        self._supervisor.stdin.write(pickle.dumps(order))
        self._supervisor.stdin.flush()

    def _stop(self) -> None:
        """End the supervisor, which ends the rest."""
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is None:
            return
        supervisor.terminate()
        try:
            supervisor.wait(timeout=10)
        except subprocess.TimeoutExpired:
            supervisor.kill()
            supervisor.wait()
        for pipe in (supervisor.stdin, supervisor.stdout):
            with contextlib.suppress(OSError):
                pipe.close()


def module(path: str) -> str:
    """Return the name under which a file of the package is imported."""
    return f"minidist/{path}".removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _none(number: int, scratch: Path, ended: str) -> str:
    """Say why there is no answer."""
    if number == 0 or os.path.lexists(scratch / str(number - 1)):
        place = contents(scratch / "place", 2000) if ended.startswith("stopped after") else None
        said = (place or b"")[:2000].decode("utf-8", "replace").strip()
        return f"no answer: {ended}" + (f"; shortly before it was at\n{said}" if said else "")
    return "not asked any more"


def _beginning(path: Path) -> str:
    return (contents(path, 4000) or b"")[:4000].decode("utf-8", "replace")
