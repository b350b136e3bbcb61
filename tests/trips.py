"""What a reader opens to follow one value: the functions that a trip calls, counted by trace.

    python -m tests.trips train          a table: lines of the functions that ran, of each file
    python -m tests.trips --json         {trip: {file: lines}} of all trips

Lines are those of functions that were called, whole, with their docstrings; imports are left out.
"""

import ast
import contextlib
import importlib
import io
import json
import sys
import threading
from collections import defaultdict
from pathlib import Path

import numpy as np

import minidist
from minidist import nn
from minidist.cli import main as command_line
from minidist.nn.datasets import Batch
from minidist.pipeline_parallel import Pipeline
from minidist.verify import certify

PACKAGE = Path(minidist.__file__).parent
X, Y = np.random.default_rng(0).standard_normal((8, 6)), np.arange(8) % 3


def mlp():
    return nn.MLP([6, 9, 5, 3], dtype="float64")


def gradient():
    model = mlp()
    with Traced():
        model.loss(model(X), Y).backward()


def pipeline():
    """A Pipeline is made, and takes one batch in the order 1F1B; of this, rank 0's part."""

    def worker(group):
        from tests.trips import Traced  # ranks get the worker by value

        model = mlp()
        with Traced() if group.rank == 0 else contextlib.nullcontext():
            Pipeline(model, group, "1f1b", 4).backward(Batch(X, Y))

    minidist.run(worker, 2, transport="thread")


def train():
    """Two steps of the command on four ranks, and its certificate."""
    command = "train --pp 2 --tp 2 --steps 2 --sample 0 --transport thread".split()
    with Traced(), contextlib.redirect_stdout(io.StringIO()):
        with contextlib.redirect_stderr(io.StringIO()):
            assert command_line(command) == 0


def sums(model, group):
    for p in model.parameters():
        if p.requires_grad:
            p.grad = group.all_reduce(np.zeros_like(p.data) if p.grad is None else p.grad)


def certificate():
    with Traced():
        assert certify(sums, size=2, transport="thread")


TRIPS = {"gradient": gradient, "pipeline": pipeline, "train": train, "certificate": certificate}


RAN = defaultdict(set)  # {file: (name, first line) of its functions that were called}


class Traced:
    """Notes the functions of the package that are called in the block, also in new threads."""

    def note(self, frame, event, arg):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(PACKAGE)):
            RAN[code.co_filename].add((code.co_name, code.co_firstlineno))

    def __enter__(self):
        threading.setprofile(self.note)
        sys.setprofile(self.note)

    def __exit__(self, *_):
        sys.setprofile(None)
        threading.setprofile(None)


def lines_of(trip):
    """Return {file: lines of its functions that a trip calls}, without files in which none is."""
    RAN.clear()
    TRIPS[trip]()
    counted = {}
    for file, called in RAN.items():
        lines = set()
        for node in ast.walk(ast.parse(Path(file).read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                if called & {(node.name, first), (node.name, node.lineno)}:
                    lines |= set(range(first, node.end_lineno + 1))
        if lines:
            counted[Path(file).relative_to(PACKAGE).as_posix()] = len(lines)
    return counted


def main(trip):
    if trip == "--json":
        print(json.dumps({name: lines_of(name) for name in TRIPS}))
        return
    counted = lines_of(trip)
    for file, lines in sorted(counted.items(), key=lambda row: -row[1]):
        print(f"{lines:6,}  {file}")
    print(f"{sum(counted.values()):6,} lines in {len(counted)} files")


if __name__ == "__main__":
    importlib.import_module("tests.trips").main(*sys.argv[1:])
