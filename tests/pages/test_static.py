"""What the pages' files say of each other."""

import re
import subprocess
import sys

from minidist.observe.pages.build import STATIC


def test_every_colour_that_a_page_uses_is_defined():
    """A style sheet does not say that a variable is missing: what has its colour is not seen."""
    texts = {path.name: path.read_text("utf-8") for path in STATIC.iterdir()}
    pages = {name: text + texts["page.css"] for name, text in texts.items()}
    for name, text in pages.items():
        defined = set(re.findall(r"(--[a-z][\w-]*)\s*:", text))
        used = set(re.findall(r"""(?:var\(\s*|["'`])(--[a-z][\w-]*)""", text))
        prefixes = {each for each in used if each.endswith("-")}  # `--of-${kind}`
        assert used - prefixes <= defined, f"{name}: {used - prefixes - defined}"
        assert all(any(each.startswith(prefix) for each in defined) for prefix in prefixes), name


WITHOUT_NUMPY = """
import json, sys
sys.modules["numpy"] = None
from minidist.observe.pages.answers import answer_json
small = {"dp": 2, "pp": 1, "tp": 1, "batch": 8, "layers": 2, "width": 64, "heads": 2}
python = "def program(rank, p, m):\\n  yield 'F0'\\n  yield Backward(0)"
for page, questions in {
    "calculator": [{}, {"ask": "search", **small}, {"experts": 8, "ep": 4, "cp": 2, "zero": 0}],
    "schedules": [{"p": 4, "m": 8}, {"puzzles": "yes"}, {"schedule": "zb_auto"},
                  {"python": python, "m": 1}],
    "attention": [{"cut": "zigzag", "ranks": 4, "pieces": 16, "length": 16384, "bytes": 8192}],
}.items():
    for question in questions:
        answer = json.loads(answer_json(json.dumps({"page": page, **question})))
        assert "error" not in answer and not answer.get("fault"), answer
"""


def test_what_a_browser_answers_needs_no_numpy():
    """As Pyodide has it: the standard library alone."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_NUMPY], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
