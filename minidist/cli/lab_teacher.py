"""What `minidist lab` does with all submissions of a class: similar, grade-all, report."""

import argparse
import contextlib
import json
import secrets
from pathlib import Path

from minidist.cli.arguments import add_option, number, whole
from minidist.course import grader, property_lab, report_page, similarity, starter
from minidist.course.grade_all import Job, Result, grade_all, load, place, submissions
from minidist.course.lab import Lab, find
from minidist.course.sandbox.limits import Limits
from minidist.course.sandbox.untrusted import holder
from minidist.errors import plural
from minidist.mistakes.register import source

ROWS = 50  # of the table of similar submissions
SHARE = number("a share", 1, "1 is all of a submission")
JOBS = whole(256, "each is a process that has processes of its own")


def add_arguments(name: str, action: argparse.ArgumentParser) -> None:
    """Add the arguments of one of these actions."""
    words = "the lab (default: the one that the first lab.txt names)"
    add_option(action, "--lab", words, metavar="NAME")
    if name == "similar":
        words = "a submission, or a folder that has one per subfolder"
        add_option(action, "folders", words, Path, "FOLDER", nargs="+")
        words = "the least share of a pair that is shown, from 0 to 1"
        add_option(action, "--above", words, SHARE, "SHARE", default=0.3)
        action.add_argument("--json", action="store_true", help="write JSON")
        return
    add_option(action, "folder", "has a folder or a .zip per submission", Path, "FOLDER")
    words = "the folder of the results (default: FOLDER.results)"
    add_option(action, "--results", words, Path, "DIR")
    if name == "report":
        words = "the page (default: report.html among the results)"
        add_option(action, "--output", words, Path, "FILE")
        return
    words = "the table of points (default: points.csv among the results)"
    add_option(action, "--csv", words, Path, "FILE")
    add_option(action, "--jobs", "submissions that are graded at once", JOBS, "JOBS", default=2)
    action.add_argument("--regrade", action="store_true", help="forget earlier results")


def grade_class(given: argparse.Namespace) -> int:
    """Grade every submission; print a line for each, and a table at the end."""
    paths, folder, earlier = _class(given)
    if given.regrade:
        for path in paths:
            place(folder, path).unlink(missing_ok=True)
    lab = _lab(given.lab or (earlier[-1].lab if earlier else _lab_name([given.folder, *paths])))
    drawn = earlier[-1].seed if earlier else secrets.randbits(32)
    patience = 60 + 3 * given.seconds * len(lab.tasks)
    seed = drawn if given.seed is None else given.seed
    job = Job(lab, seed, folder, patience, Limits(given.seconds))
    file = given.csv or folder / "points.csv"
    done: list[Result] = []

    def show(result: Result) -> None:
        done.append(result)
        words = result.why or f"{result.sum} points"
        print(f"{len(done)} of {len(paths)}  {result.name}: {words}", flush=True)

    _write(file, report_page.as_csv(lab, []))  # it shall not fail after hours
    grade_all(paths, job, given.jobs, show)
    done.sort(key=lambda result: result.name)
    _write(file, report_page.as_csv(lab, done))
    print(f"\n{report_page.summary(lab, done)}\n\n{file}; page: minidist lab report {given.folder}")
    return 0


def report(given: argparse.Namespace) -> int:
    """Write the page of the results that there are."""
    _, folder, results = _class(given)
    if not results:
        raise ValueError(f"{folder} has no results; first: minidist lab grade-all {given.folder}")
    lab = _lab(given.lab or results[-1].lab)
    results = sorted((r for r in results if r.lab == lab.name), key=lambda result: result.name)
    _write(file := given.output or folder / "report.html", report_page.page(lab, results))
    print(file)
    return 0


def _class(given: argparse.Namespace) -> tuple[list[Path], Path, list[Result]]:
    """Return the submissions, the folder of results, and those that it has, the newest last."""
    paths = submissions(given.folder)
    if not paths:
        raise ValueError(f"{given.folder} has no submission: no folder and no .zip")
    folder = given.results or given.folder.resolve().with_name(
        f"{given.folder.resolve().name}.results"
    )
    files = [file for path in paths if (file := place(folder, path)).is_file()]
    found = [load(file) for file in sorted(files, key=lambda file: file.stat().st_mtime_ns)]
    return paths, folder, [result for result in found if result]


def _lab(name: str) -> Lab:
    return property_lab.lab() if name == property_lab.NAME else find(name)


def _write(file: Path, text: str) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot write {file}: {error.strerror}") from None


def similar(given: argparse.Namespace) -> int:
    folders = _submissions(given.folders)
    if (name := given.lab or _lab_name(folders)) == property_lab.NAME:
        raise ValueError(
            "the lab of mutants is not compared: everybody's tests are like each other"
        )
    lab = find(name)
    reader, found, remarks = similarity.Reader(lab), [], []
    unique = len({folder.name for folder in folders}) == len(folders)
    for folder in folders:
        name = folder.name if unique else str(folder)
        try:
            files, unusable = grader.handed_in(folder, lab.files)
        except (OSError, ValueError) as error:
            remarks.append(_printable(f"{name}: {error}"))
            continue
        remarks += [_printable(f"{name}/minidist/{path}: {why}") for path, why in unusable.items()]
        found.append(reader.read(_printable(name), files))
    if len(found) < 2:
        raise ValueError(f"{plural(len(found), 'submission')} of lab {lab.name}; a pair needs two")
    reference = reader.read("the package", {path: source(path) for path in lab.files})
    pairs = similarity.pairs(found, reference, given.above)
    if given.json:
        print(json.dumps({"lab": lab.name, "pairs": pairs, "not read": remarks}, indent=1))
    else:
        _print_pairs(pairs, len(found), given.above)
        for remark in remarks:
            print(f"not read: {remark}")
    return 0


def _printable(text: str) -> str:
    return text if text.isprintable() else ascii(text)


def _submissions(folders: list[Path]) -> list[Path]:
    """Return the submissions: a folder is one, or has one per subfolder."""
    found: list[Path] = []
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"there is no folder {folder}")
        inner = sorted(path for path in folder.glob("*/") if path.name != "__MACOSX")
        one = (folder / "minidist").is_dir() or len(inner) < 2
        several = not one and any(holder(path, "minidist", Path.is_dir) for path in inner)
        found += inner if several else [folder]
    return found


def _lab_name(folders: list[Path]) -> str:
    for folder in folders:
        with contextlib.suppress(ValueError):
            return starter.lab_name(folder)
    raise ValueError("no lab.txt names the lab of these folders; pass the name: --lab NAME")


def _print_pairs(pairs: list[dict], submissions: int, above: float) -> None:
    print(
        f"{submissions} submissions; {plural(len(pairs), 'pair')} with a share of {above:g} or more"
    )
    rows = [("share", "run", "first", "second", "shared functions")] if pairs else []
    for pair in pairs[:ROWS]:
        first, second = (
            f"{name} {at}" for name, at in zip(pair["between"], pair["places"], strict=True)
        )
        functions = ", ".join(pair["functions"][:3])
        if len(pair["functions"]) > 3:
            functions += f" and {len(pair['functions']) - 3} more"
        rows.append((f"{pair['share']:.2f}", str(pair["run"]), first, second, functions))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(map(str.ljust, row, widths)).rstrip())
    if pairs:
        print("run: symbols of the longest shared run, which begins at the two places")
    if len(pairs) > ROWS:
        print(f"{len(pairs) - ROWS} more: raise --above, or take --json")
