"""Planted copies share most, whatever their disguise, and what everybody has does not count."""

import ast
import random
from pathlib import Path

import pytest

from minidist.course.class_report import ALIKE
from minidist.course.lab import find
from minidist.course.similarity import MOST, fingerprints, shared
from minidist.verify.mistakes.register import mistakes, mistakes_in
from tests.course.students import changed, graded, reference, starter

LAB = find("collectives")
PATH = "comm/collectives.py"
HERE = Path(__file__).parent
INDEPENDENT = {
    name: changed(LAB, student.edits)
    for name, student in mistakes_in(HERE / "independent.toml").items()
}
WAYS = {**mistakes_in(HERE / "right_ways.toml"), **mistakes()}
NEAR_THE_PACKAGE = {
    name: changed(LAB, way.edits) for name, way in WAYS.items() if way.task.startswith("2.")
}
pytestmark = pytest.mark.slow


def disguised(files, seed=0):
    """Give locals other names, methods another order; add comments and statements of no use."""
    rng, made = random.Random(seed), {}
    for path, source in files.items():
        tree = ast.parse(source)
        blocks = [tree.body, *(node.body for node in tree.body if isinstance(node, ast.ClassDef))]
        for function in (node for block in blocks for node in block if is_function(node)):
            names = {n.id for n in ast.walk(function) if is_written(n)}
            names |= {n.arg for n in ast.walk(function) if isinstance(n, ast.arg)} - {"self"}
            others = {name: f"v{rng.randrange(10**6)}" for name in sorted(names)}
            for node in ast.walk(function):
                for field in {"id", "arg"} & set(node._fields):
                    if not isinstance(node, ast.keyword):
                        setattr(node, field, others.get(getattr(node, field), getattr(node, field)))
            idle = f"t{rng.randrange(10**6)} = len(str({rng.randrange(10**6)}))"
            at = 0 if ast.get_docstring(function) is None else 1
            function.body[:at] = ast.parse(f"'In my words: {rng.random()}.'\n{idle}").body
        functions = [node for node in tree.body if is_function(node)]
        first = tree.body.index(functions[0])
        rest = [node for node in tree.body[first:] if node not in functions]
        tree.body[first:] = rng.sample(functions, len(functions)) + rest
        lines = ast.unparse(ast.fix_missing_locations(tree)).splitlines()
        made[path] = "\n".join(f"{line}  # {rng.random()}" for line in lines)
    return made


def is_function(node):
    return isinstance(node, ast.FunctionDef)


def is_written(node):
    return isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)


def operators(rng, length):
    """Return a statement of so many symbols that no other has: x = +-~x ..., in random order."""
    return "x = " + "".join(rng.choice("+-~") for _ in range(length - 3)) + "x"


def test_every_planted_copy_ranks_above_every_other_pair_and_is_right(tmp_path):
    copies = {f"{name} copied": disguised(INDEPENDENT[name]) for name in INDEPENDENT}
    _, pairs = shared(INDEPENDENT | NEAR_THE_PACKAGE | copies, LAB)
    shares = list(pairs.values())
    assert {*list(pairs)[:3]} == {(name, f"{name} copied") for name in INDEPENDENT}
    assert shares[2] > ALIKE > 2 * shares[3]
    assert graded(tmp_path, LAB, copies["ana copied"]).points == 100


def test_a_copy_of_the_package_is_named_and_is_no_pair_of_two_students():
    copies = {"a": disguised(reference(LAB), 1), "b": reference(LAB), "c": starter(LAB)}
    like, pairs = shared(copies | INDEPENDENT, LAB)
    assert like["b"] == 1 and like["a"] > 0.3 > 0.2 > max(like[name] for name in INDEPENDENT)
    assert pairs["a", "b"] < ALIKE and like["c"] == 0


def test_what_the_whole_class_writes_weighs_next_to_nothing():
    rng = random.Random(0)
    everybody = [operators(rng, 20) for _ in range(9)]

    def student(own):
        lines = "".join(f"    {line}\n    pass\n" for line in [*everybody, *own])
        return {PATH: f"{starter(LAB)[PATH]}\ndef mine(x):\n{lines}"}

    rare = [operators(rng, 20) for _ in range(3)]
    alone = {str(n): student([operators(rng, 20) for _ in range(3)]) for n in range(20)}
    _, pairs = shared(alone | {"a": student(rare), "b": student(rare)}, LAB)
    assert pairs.pop(("a", "b")) > 0.9 and max(pairs.values()) < 0.2


def test_a_file_is_read_up_to_its_error_and_to_a_bound_and_never_run(tmp_path):
    cut = f"open({str(tmp_path / 'ran')!r}, 'w')\n" + INDEPENDENT["ana"][PATH] + '\nx = """'
    whole, begun = (
        fingerprints({PATH: text}, starter(LAB)) for text in (INDEPENDENT["ana"][PATH], cut)
    )
    assert len(whole & begun) > 0.9 * len(whole) and not (tmp_path / "ran").exists()
    long = "".join(
        f"def f{k}(): return a[{k}] + b.c{k} * {'d +' * (k % 7)} d\n" for k in range(MOST)
    )
    assert len(fingerprints({PATH: long}, starter(LAB))) < MOST
