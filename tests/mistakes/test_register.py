"""The register: every mistake applies, is complete, and stays where it is when names change."""

import ast
import builtins
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from minidist import nn
from minidist.course.lab import labs
from minidist.tensor_parallel.parallel_attention import columns_of_heads
from minidist.verify.mistakes.edits import NAMES, Edit, functions
from minidist.verify.mistakes.register import Mistake, find, mistakes, mistakes_in, source
from tests.grids import some
from tests.planted import module_of, planted

EVERY = list(mistakes().values())
RIGHT = list(mistakes_in(Path(__file__).parents[1] / "course" / "right_ways.toml").values())
PATHS = sorted({edit.path for mistake in EVERY + RIGHT for edit in mistake.edits})


def renamed(text, names, call="local_{0}"):
    """Return a syntax tree in which the local names of some functions are others."""
    tree = ast.parse(text)
    for function in (functions(tree)[name] for name in names):
        nodes = [
            node for node in ast.walk(function) if type(node) in NAMES and node is not function
        ]
        fields = [NAMES[type(node)] for node in nodes]
        new = {}
        for node, field in zip(nodes, fields, strict=True):
            name = getattr(node, field)
            if name not in ("self", None) and not isinstance(getattr(node, "ctx", None), ast.Load):
                new.setdefault(name, call.format(len(new), name))
        for node, field in zip(nodes, fields, strict=True):
            setattr(node, field, new.get(getattr(node, field), getattr(node, field)))
    return tree


def numbered(text, names):
    """Return some functions of a source, whatever their local names are."""
    found = functions(renamed(text, names))
    return "\n".join(ast.unparse(found[name]) for name in names)


def unknown(text, path, names):
    """Return what some functions use that neither they nor their module have."""
    known = vars(import_module(module_of(path))).keys() | vars(builtins).keys()
    used, bound = set(), set()
    for function in (functions(ast.parse(text))[name] for name in names):
        for node in ast.walk(function):
            is_used = isinstance(getattr(node, "ctx", None), ast.Load)
            name = getattr(node, NAMES.get(type(node), ""), None)
            (used if is_used else bound).add(name)
            if isinstance(node, ast.alias):
                bound.add(node.asname or node.name)
    return used - bound - known - {None}


def check_edits(path):
    """Each applies, whatever local names are called; what it leaves differs from all others."""
    text, met = source(path), {}
    here = [m for m in EVERY + RIGHT if any(edit.path == path for edit in m.edits)]
    targets = {edit.name for m in here for edit in m.edits if edit.path == path}
    other = ast.unparse(renamed(text, targets, "other_{1}"))
    assert other != ast.unparse(ast.parse(text))
    for mistake in here:
        wrong, again = text, other
        edits = [edit for edit in mistake.edits if edit.path == path]
        for edit in edits:
            wrong, again = edit.apply(wrong), edit.apply(again)
        names = sorted({edit.name for edit in edits})
        assert not unknown(wrong, path, names), mistake.name
        right, wrong, again = (numbered(each, names) for each in (text, wrong, again))
        assert again == wrong != right, mistake.name
        assert met.setdefault((*names, wrong), mistake.name) == mistake.name


def test_every_mistake_applies_to_the_package():
    for mistake in EVERY + RIGHT:
        assert mistake.files() or not mistake.edits, mistake.name


@pytest.mark.parametrize("count", [10, pytest.param(None, marks=pytest.mark.slow)])
def test_every_edit_applies_whatever_local_names_are_called_and_none_is_there_twice(count):
    for path in some(PATHS, count or len(PATHS), "edits"):
        check_edits(path)


def test_every_task_of_a_lab_has_a_mistake_and_every_mistake_of_a_task_its_words():
    tasks = {task.id for lab in labs() for task in lab.tasks}
    assert tasks == {mistake.task for mistake in EVERY if mistake.task}
    for mistake in EVERY:
        assert mistake.edits and (mistake.says or not mistake.task), mistake.name
    said = [(mistake.task, mistake.says) for mistake in EVERY if mistake.task]
    assert len(set(said)) == len(said)


REFUSED = {
    "[a": "wrong.toml is not valid TOML",
    '[a]\nfunction = "b.py:c"': "wrong.toml: a: an edit has function, by",
    '[a]\nfunction = "b.py:c"\nby = "0"\nwhy = "0"': "wrong.toml: a: .*argument 'why'",
    '[again]\nfunction = "b.py:c"\nby = "0"': "wrong.toml: again is in another file",
}


def test_what_is_wrong_in_a_file_or_not_there_is_refused(tmp_path):
    for number, (text, message) in enumerate(REFUSED.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "first.toml").write_text('[again]\nfunction = "b.py:c"\nby = "0"')
        (folder / "wrong.toml").write_text(text)
        with pytest.raises(ValueError, match=message):
            mistakes(folder)
    with pytest.raises(ValueError, match="there is no mistake 'nothing'"):
        find("nothing")
    with pytest.raises(ValueError, match=r"mistake m: minidist has no nowhere\.py"):
        Mistake("m", (Edit("nowhere.py:f", "pass"),)).files()
    with pytest.raises(ValueError, match=r"mistake m: rng\.py has no function f"):
        Mistake("m", (Edit("rng.py:f", "pass"),)).files()


def test_the_equal_runs_of_lesson_12_are_the_mistake_of_the_register():
    lesson = Path(__file__).parents[2] / "lessons" / "12_parallel_transformer.py"
    shown = functions(ast.parse(lesson.read_text(encoding="utf-8")))["equal_runs"]
    names = {"np": np}
    exec(compile(ast.Module([shown], []), lesson.name, "exec"), names)
    attention = nn.CausalSelfAttention(16, 4)
    with planted("qkv_in_equal_runs"):
        for size, rank in ((2, 0), (2, 1), (4, 2)):
            heads = np.array_split(np.arange(4), size)[rank]
            want = columns_of_heads(attention.qkv, 4, heads)
            np.testing.assert_array_equal(names["equal_runs"](16, 4, rank, size), want)
    heads = np.arange(2)
    assert not np.array_equal(
        names["equal_runs"](16, 4, 0, 2), columns_of_heads(attention.qkv, 4, heads)
    )
