"""Run a student's code in a process of its own, which returns arrays and nothing else."""

import io
import pickle
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from minidist.course import overlay
from minidist.course.lab import Lab
from minidist.course.question import Answer, Question

INSIDE = Path(__file__).with_name("inside.py")


@dataclass(frozen=True)
class Heard:
    """What came back: an answer per question, or why there is none; and what was printed."""

    answers: list[Answer | str]
    output: str


class Sandbox:
    """minidist with a student's files in it, ready to be asked.

    A context: at its end the folder and all processes are gone.
    """

    def __init__(self, lab: Lab, files: dict[str, str], seconds: float = 30.0):
        self.lab, self.files, self.seconds = lab, files, seconds

    def __enter__(self):
        self._folder = tempfile.TemporaryDirectory(prefix="minidist-lab-")
        self.tree = Path(self._folder.name)
        overlay.build(self.tree, self.lab.blanked() | self.files, leave_out=("course",))
        (self.tree / "probes.py").write_text(self.lab.probes.read_text())
        return self

    def __exit__(self, *_):
        self._folder.cleanup()

    def ask(self, questions: list[Question]) -> Heard:
        """Put the questions, in one process, one after the other."""
        request = pickle.dumps([(q.probe, q.given) for q in questions])
        with tempfile.TemporaryDirectory() as scratch:
            try:
                done = subprocess.run(
                    [sys.executable, INSIDE, self.tree, scratch],
                    input=request,
                    capture_output=True,
                    timeout=self.seconds,
                )
                output = (done.stdout + done.stderr).decode(errors="replace")
            except subprocess.TimeoutExpired:
                output = f"stopped after {self.seconds} s"
            answers = [_answer(Path(scratch) / f"{i}.npz") for i in range(len(questions))]
        return Heard(answers, output)


def _answer(path: Path) -> Answer | str:
    if not path.exists():
        return "no answer: the process ended before"
    with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as found:
        answer = dict(found)
    return str(answer["(error)"]) if "(error)" in answer else answer
