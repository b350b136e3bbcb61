"""`minidist lab similar`: planted copies come first, and what everybody has does not count."""

import json
import os
import random
import re
import zipfile
from pathlib import Path

import pytest

from minidist.cli import main
from minidist.course.lab import find
from minidist.course.similarity import MOST, K, Reader, W, pairs
from minidist.verify.mistakes.register import mistakes, mistakes_in
from tests.course.disguise import DISGUISES, all_at_once, commented, renamed, reordered
from tests.course.students import changed, graded, reference, starter

LAB = find("collectives")
PATH = "comm/collectives.py"
HERE = Path(__file__).parent
INDEPENDENT = {
    name: changed(LAB, student.edits)
    for name, student in mistakes_in(HERE / "independent.toml").items()
}
READER = Reader(LAB)
REFERENCE = READER.read("the package", reference(LAB))


def disguised(files, disguise, seed=0):
    return {path: disguise(source, random.Random(seed)) for path, source in files.items()}


def compared(students, lab=LAB, above=0.0):
    """Return {frozenset of two names: share} and the pairs."""
    reader = READER if lab is LAB else Reader(lab)
    package = REFERENCE if lab is LAB else reader.read("the package", reference(lab))
    found = [reader.read(name, files) for name, files in students.items()]
    rows = pairs(found, package, above)
    return {frozenset(row["between"]): row["share"] for row in rows}, rows


def near_the_reference(lab):
    """Return students who have the reference but for a mistake, or another right way."""
    ways = {**mistakes_in(HERE / "right_ways.toml"), **mistakes()}
    own = {name: way for name, way in ways.items() if way.task.startswith(f"{lab.number}.")}
    return {name: changed(lab, way.edits) for name, way in own.items()}


@pytest.mark.parametrize("disguise", DISGUISES, ids=lambda disguise: disguise.__name__)
def test_every_planted_copy_ranks_above_every_other_pair(disguise):
    students = INDEPENDENT | near_the_reference(LAB)
    copies = {f"{name} copied": disguised(INDEPENDENT[name], disguise) for name in INDEPENDENT}
    shares, rows = compared(students | copies)
    planted = {frozenset({name, f"{name} copied"}) for name in INDEPENDENT}
    between = [frozenset(row["between"]) for row in rows if "the package" not in row["between"]]
    assert set(between[:3]) == planted
    assert min(shares[pair] for pair in planted) > 0.6
    assert max(shares[pair] for pair in between[3:]) < 0.3


@pytest.mark.parametrize("name", ["one_message_for_all", "tree_by_a_path"])
def test_a_copy_of_one_task_ranks_above_all_that_have_the_reference_for_it(name):
    lab = find("data_parallel") if name == "one_message_for_all" else LAB
    students = near_the_reference(lab)
    shares, _ = compared(students | {"copy": disguised(students[name], all_at_once)}, lab)
    planted = shares.pop(frozenset({name, "copy"}))
    others = [share for pair, share in shares.items() if "the package" not in pair]
    assert planted > 0.7 and planted > 2 * max(others, default=0)


def test_independent_right_solutions_share_next_to_nothing():
    shares, _ = compared(INDEPENDENT)
    assert max(shares.values()) < 0.2, "also with the reference"


@pytest.mark.slow
@pytest.mark.parametrize("name", INDEPENDENT)
def test_independent_solutions_and_their_disguised_copies_are_right(tmp_path, name):
    assert graded(tmp_path / "own", LAB, INDEPENDENT[name]).points == 100
    copy = disguised(INDEPENDENT[name], all_at_once)
    assert graded(tmp_path / "copy", LAB, copy).points == 100


def test_names_order_and_comments_do_not_matter_at_all():
    for disguise in (renamed, reordered, commented):
        shares, _ = compared(
            {"a": INDEPENDENT["ana"], "b": disguised(INDEPENDENT["ana"], disguise)}
        )
        assert shares[frozenset("ab")] == 1, disguise


def test_a_docstring_where_there_was_none_does_not_matter():
    nested = INDEPENDENT["cleo"][PATH]
    documented = nested.replace("def cut(i):\n", 'def cut(i):\n        """Return a slice."""\n')
    found = [READER.read("", {PATH: source}) for source in (nested, documented)]
    assert nested != documented and found[0].prints == found[1].prints


def test_own_attributes_cut_texts_and_closing_commas_do_not_matter():
    mine = """
class Mailbox:
    def __init__(self, channel):
        self.letters = {channel.rank: "one text", channel.size: (1, 2)}

    def fetch(self, sender):
        return self.letters.pop(sender, self.fetch(sender.rank))
"""
    theirs = mine.replace("letters", "queue_of_mine").replace("fetch", "take_out")
    theirs = theirs.replace('"one text"', '("one " "text")').replace("(1, 2)}", "(1, 2),}")
    found = [READER.read("", {PATH: source}).grams for source in (mine, theirs)]
    hashes = [[gram for gram, _ in grams] for grams in found]
    assert hashes[0] == hashes[1] and len(hashes[0]) > 20


def test_one_statement_in_common_is_no_copy():
    rng = random.Random(0)
    files = {PATH: starter(LAB)[PATH] + f"\ndef mine(x):\n    {operators(rng, 10)}\n"}
    shares, _ = compared({"a": files, "b": files})
    assert len(READER.read("a", files).prints) < 4 and 0 < shares[frozenset("ab")] < 0.5


def test_a_copied_reference_is_named_as_the_packages_and_is_no_pair_of_two_students():
    students = {"a": disguised(reference(LAB), all_at_once, 1), "b": reference(LAB)}
    _, rows = compared(students, above=0.5)
    assert [row["between"] for row in rows] == [["b", "the package"], ["a", "the package"]]
    assert rows[0]["share"] == 1 and rows[0]["functions"][0].startswith("2.")


def test_what_everybody_was_given_does_not_count():
    assert compared({"a": starter(LAB), "b": starter(LAB)}) == ({}, [])
    a, b = starter(LAB), starter(LAB)
    for files, text in ((a, "x = [y.p + 1 for y in q if z < 2]"), (b, "while a.b: c -= d[3:f]")):
        files[PATH] += f"\ndef mine():\n    {text}\n    return {text[0]}\n"
    assert not [row for row in compared({"a": a, "b": b})[1] if row["share"]]


def operators(rng, length):
    """Return a statement of so many symbols that no other has: x = +-~x ..., in random order."""
    return "x = " + "".join(rng.choice("+-~") for _ in range(length - 3)) + "x"


def test_what_the_whole_class_writes_weighs_next_to_nothing():
    rng = random.Random(0)
    everybody = [operators(rng, 20) for _ in range(9)]

    def student(own):
        lines = "".join(f"    {line}\n    pass\n" for line in [*everybody, *own])
        return {PATH: f"{starter(LAB)[PATH]}\ndef mine(x):\n{lines}"}

    rare = [operators(rng, 20) for _ in range(3)]
    alone = {str(n): student([operators(rng, 20) for _ in range(3)]) for n in range(20)}
    shares, _ = compared(alone | {"a": student(rare), "b": student(rare)})
    assert shares.pop(frozenset("ab")) == 1 and max(shares.values()) < 0.2
    two = {name: alone[name] for name in ("18", "19")}
    assert compared(two)[0][frozenset(two)] > 0.4, "two are no class"


def test_a_shared_run_of_thirteen_symbols_is_always_found_and_one_of_nine_never():
    rng = random.Random(0)
    for length, found in ((W + K - 1, True), (K - 1, False)):
        for _ in range(200):
            shared = operators(rng, length)
            students = {}
            for name in "ab":
                before, after = ([operators(rng, 20) for _ in range(3)] for _ in range(2))
                lines = [f"{name} != {name}", *before, "[]", shared, *after]
                separator = {"a": "pass", "b": "del x"}[name]
                body = f"\n    {separator}\n    ".join(lines)
                students[name] = {PATH: f"def mine(x):\n    {body}\n"}
            one, two = (READER.read(name, files) for name, files in students.items())
            assert bool(one.prints.keys() & two.prints.keys()) == found, shared


def test_a_pair_says_which_functions_and_where_the_longest_run_begins():
    a, b = INDEPENDENT["cleo"], starter(LAB)
    taken = a[PATH].partition("    def halve(low, high):\n")[2].partition("\n\n")[0]
    b[PATH] = f"# one line more\n{b[PATH]}\ndef other(n, rank):\n{taken}\n"
    [row] = [row for row in compared({"a": a, "b": b})[1] if row["between"] == ["a", "b"]]
    assert row["share"] == 1 and row["functions"] == ["2.5 halving_doubling"]
    lines = []
    for files, place in zip((a, b), row["places"], strict=True):
        path, _, number = place.partition(":")
        lines.append(files[path].splitlines()[int(number) - 1].strip())
    assert lines[0] == lines[1] and lines[0] in taken and row["run"] > W + K


@pytest.fixture
def handed_in(tmp_path):
    """Return a folder of submissions: a pair, of which one is a .zip, and strangers."""
    copy = disguised(INDEPENDENT["ana"], all_at_once)
    with zipfile.ZipFile(tmp_path / "zoe.zip", "w") as archive:
        archive.writestr(f"mine/minidist/{PATH}", copy[PATH])
    for name, files in INDEPENDENT.items():
        target = tmp_path / name / "minidist" / PATH
        target.parent.mkdir(parents=True)
        target.write_text(files[PATH], encoding="utf-8")
    (tmp_path / "ana" / "lab.txt").write_text("collectives\n", encoding="utf-8")
    return tmp_path


def lab_similar(capsys, *words):
    status = main(["lab", "similar", *map(str, words)])
    out, err = capsys.readouterr()
    return status, out, err


def test_the_command_writes_a_table_or_json(handed_in, capsys):
    status, out, _ = lab_similar(capsys, handed_in)
    header, _, row, *_ = out.splitlines()
    assert status == 0 and header.startswith("4 submissions; 1 pair ")
    assert re.fullmatch(r"0\.\d\d +\d+ +ana \S+:\d+ +zoe\.zip \S+:\d+ +2\.\d .*", row)
    folders = sorted(handed_in.iterdir())
    status, out, _ = lab_similar(capsys, *folders, "--json", "--above", "0")
    found = json.loads(out)
    shares = [pair["share"] for pair in found["pairs"]]
    assert status == 0 and found["lab"] == "collectives" and found["not read"] == []
    assert len(shares) == 10 and shares == sorted(shares, reverse=True)
    assert found["pairs"][0]["between"] == ["ana", "zoe.zip"]
    assert lab_similar(capsys, handed_in, "--above", "1")[1].startswith("4 submissions; 0 pairs")


def test_what_cannot_be_read_is_named_and_stops_nothing(handed_in, capsys):
    marker = handed_in.parent / "it ran"
    files = {
        "text": b"\xff\xfe",
        "huge": b"x = 1\n" * (1 << 18),
        "cut": INDEPENDENT["ana"][PATH].encode() + b'\nx = """',
        "deep": b"(" * (1 << 19) + b"[" * (1 << 18),
        "runs": f"open({str(marker)!r}, 'w')\n".encode(),
    }
    for name, content in files.items():
        target = handed_in / name / "minidist" / PATH
        target.parent.mkdir(parents=True)
        target.write_bytes(content)
    for name in ("pipe", "link", "folder", "loop"):
        target = handed_in / name / "minidist" / PATH
        target.parent.mkdir(parents=True)
    os.mkfifo(handed_in / "pipe" / "minidist" / PATH)
    (handed_in / "link" / "minidist" / PATH).symlink_to(handed_in / "ana" / "minidist" / PATH)
    (handed_in / "loop" / "minidist" / PATH).symlink_to(handed_in / "loop" / "minidist" / PATH)
    (handed_in / "folder" / "minidist" / PATH).mkdir()
    with zipfile.ZipFile(handed_in / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"minidist/{PATH}", b"#" * (1 << 27))
    (handed_in / "half.zip").write_bytes(b"PK\3\4 and no more")
    (handed_in / "nothing").mkdir()
    (handed_in / "linked").symlink_to(handed_in / "ana")
    (handed_in / "\x1b[31mred").mkdir()
    status, out, _ = lab_similar(capsys, handed_in, "--json")
    found = json.loads(out)
    unread = {remark.split("/")[0].split(":")[0] for remark in found["not read"]}
    assert status == 0 and not marker.exists()
    assert unread == {"text", "huge", "pipe", "link", "loop", "folder", "nothing"} | {
        "bomb.zip",
        "half.zip",
        r"\x1b[31mred",
        "linked",
    }
    assert {"ana", "cut"} in [set(pair["between"]) for pair in found["pairs"]], "up to the error"
    assert "\x1b" not in lab_similar(capsys, handed_in)[1]


def test_a_long_file_is_read_to_a_bound():
    source = "".join(f"def f{k}(): return a[{k}] + b.c{k} * d\n" for k in range(MOST))
    assert len(READER.read("long", {PATH: source}).grams) < MOST


def test_wrong_words_are_answered_with_what_to_do(handed_in, tmp_path, capsys):
    one = handed_in / "ana"
    for words, message in {
        (one,): "1 submission of lab collectives; a pair needs two",
        (handed_in / "ben", handed_in / "cleo"): "pass the name: --lab NAME",
        (handed_in / "nowhere",): "there is no folder",
        (handed_in, "--lab", "mutants"): "is not compared",
    }.items():
        status, _, err = lab_similar(capsys, *words)
        assert status == 2 and message in err
