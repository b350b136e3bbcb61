"""A schedule that a reader writes in Python: as text, and whatever goes wrong has its line."""

import pytest

from minidist.observe.pages.schedules import answer
from minidist.observe.pages.written import text_of
from minidist.pipeline_parallel import programs, read
from minidist.pipeline_parallel.text import Unreadable, as_text

GPIPE = """
def program(rank, p, m):
    yield from map(Forward, range(m))
    yield from map(Backward, reversed(range(m)))
"""
ONE_F_ONE_B = """
def program(rank, p, m):
    ahead = min(p - 1 - rank, m)
    for i in range(ahead):
        yield f"F{i}"
    for i in range(ahead, m):
        yield f"F{i}"
        yield f"B{i - ahead}"
    for i in range(m - ahead, m):
        yield f"B{i}"
"""


def test_a_program_that_yields_or_returns_its_actions_is_the_schedule_that_it_says():
    for name, source in ("gpipe", GPIPE), ("1f1b", ONE_F_ONE_B):
        for p, m in (1, 1), (2, 3), (4, 8):
            assert read(text_of(source, p, m)) == programs(name, p, m)
            assert answer(python=source, p=p, m=m)["text"] == as_text(programs(name, p, m))
    for body in ("['F0', Backward(0)]", "'F0 B0'", "iter(('F0', 'B0'))"):
        source = f"program = lambda rank, p, m: {body}"
        assert read(text_of(source, 2, 1)) == programs("gpipe", 2, 1)


def test_a_placement_may_be_written_too():
    source = """
def placement(p):
    return ((r, 2 * p - 1 - r) for r in range(p))

def program(rank, p, m):
    return "F0 F0.1 B0.1 B0"
"""
    found = read(text_of(source, 3, 1))
    assert found.placement == [[0, 5], [1, 4], [2, 3]]
    assert answer(python=source, p=3, m=1)["certificate"]["ok"]


BAD = {
    "def program(rank, p, m):\n  yield 'F0'\n  yield X": (3, "NameError: name 'X' is not defined"),
    "x = 1\ndef program(": (2, "SyntaxError: '(' was never closed"),
    "\n\nprogram = 5": (1, "there is no program"),
    "\ndef program(r, p, m):\n  yield 'F0'\n  yield 'X3'": (4, "gives 'X3', which is no action"),
    "def program(r, p, m):\n  return ['F0', 7]": (1, "gives 7, which is no action"),
    "def program(r, p, m):\n  yield 'F' * 10**6": (2, "FFFF"),
    "def program(r, p):\n  yield 'F0'": (1, "takes 2 positional arguments but 3 were given"),
    "def program(r, p, m):\n  return 5": (1, "'int' object is not iterable"),
    "def program(r, p, m):\n  while True:\n    yield 'F0'": (3, "more than 20,000 actions"),
    "from itertools import repeat\ndef program(r, p, m):\n  return repeat('F0')": (2, "20,000"),
    "def program(r, p, m):\n  return program(r, p, m)": (2, "RecursionError"),
    "def program(r, p, m):\n  yield 'F0'\n  raise KeyboardInterrupt": (3, "KeyboardInterrupt"),
    "def program(r, p, m):\n  yield next(iter([]))": (2, "line 2: StopIteration"),
    "def program(r, p, m):\n  raise GeneratorExit": (2, "GeneratorExit"),
    "class E(Exception):\n  def __str__(self): raise SystemExit\nraise E": (3, "E"),
    "raise MemoryError('x' * 10**6)": (1, "MemoryError: xxx"),
    "(" * 10_000: (1, ""),
    "x = '\ud800'": (1, ""),
    "def placement(p):\n  return [[0]]\nprogram = list": (1, "placement(2) is [[0]]; return"),
    "\ndef placement(p):\n  return 1 / 0\nprogram = list": (3, "ZeroDivisionError"),
}


def test_whatever_goes_wrong_is_a_value_error_with_its_line():
    for source, (line, words) in BAD.items():
        with pytest.raises(Unreadable) as error:
            text_of(source, 2, 1)
        assert error.value.line == line and words in str(error.value)
        assert str(error.value).startswith(f"line {line}: ") and len(str(error.value)) < 400
        found = answer(python=source, p=2, m=1)
        assert found["fault"]["message"] == str(error.value).partition("\n")[0]
        assert found["fault"]["line"] == line and found["grid"] == []
