"""Planted copies share most, whatever their disguise, and what everybody has does not count."""

import random
from pathlib import Path

import pytest

from minidist.course.class_report import ALIKE
from minidist.course.lab import find
from minidist.course.similarity import MOST, K, W, fingerprints, shared
from minidist.verify.mistakes.register import mistakes, mistakes_in
from tests.course.disguise import DISGUISES, all_at_once, commented
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


def disguised(files, disguise, seed=0):
    return {path: disguise(source, random.Random(seed)) for path, source in files.items()}


def operators(rng, length):
    """Return a statement of so many symbols that no other has: x = +-~x ..., in random order."""
    return "x = " + "".join(rng.choice("+-~") for _ in range(length - 3)) + "x"


@pytest.mark.parametrize("disguise", DISGUISES, ids=lambda disguise: disguise.__name__)
def test_every_planted_copy_ranks_above_every_other_pair(disguise):
    copies = {f"{name} copied": disguised(INDEPENDENT[name], disguise) for name in INDEPENDENT}
    _, pairs = shared(INDEPENDENT | NEAR_THE_PACKAGE | copies, LAB)
    shares = list(pairs.values())
    assert {*list(pairs)[:3]} == {(name, f"{name} copied") for name in INDEPENDENT}
    assert shares[2] > ALIKE > 2 * shares[3]


def test_a_copy_of_the_package_is_named_and_is_no_pair_of_two_students():
    copies = {"a": disguised(reference(LAB), all_at_once, 1), "b": reference(LAB)}
    like, pairs = shared(copies | INDEPENDENT, LAB)
    assert like["b"] == 1 and like["a"] > 0.3 > 0.2 > max(like[name] for name in INDEPENDENT)
    assert pairs["a", "b"] < ALIKE


@pytest.mark.slow
@pytest.mark.parametrize("name", INDEPENDENT)
def test_independent_solutions_and_their_disguised_copies_are_right(tmp_path, name):
    assert graded(tmp_path / "own", LAB, INDEPENDENT[name]).points == 100
    copy = disguised(INDEPENDENT[name], all_at_once)
    assert graded(tmp_path / "copy", LAB, copy).points == 100


def test_comments_docstrings_and_the_starter_do_not_matter_at_all():
    given = starter(LAB)
    own, other = (
        fingerprints(files, given)
        for files in (INDEPENDENT["ana"], disguised(INDEPENDENT["ana"], commented))
    )
    assert own == other and not shared({"a": given, "b": given}, LAB)[1]["a", "b"]


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


def test_a_shared_run_of_thirteen_symbols_is_always_found_and_one_of_nine_never():
    rng, others = random.Random(0), {"pass": "x = x.x.x.x.x.x", "del x": "x = x[x[x[x[x]]]]"}
    for length, found in ((W + K - 1, True), (K - 1, False)):
        for _ in range(100):
            both, prints = operators(rng, length), []
            for separator, other in others.items():
                body = f"\n    {separator}\n    ".join([other, both, other])
                prints.append(fingerprints({PATH: f"def mine(x):\n    {body}\n"}, starter(LAB)))
            assert bool(prints[0] & prints[1]) == found, both


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
    assert fingerprints({PATH: "(" * (1 << 19)}, starter(LAB)) == set() or True
