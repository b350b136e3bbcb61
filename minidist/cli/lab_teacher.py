"""What `minidist lab` does with all submissions of a class: similar, grade-all, report."""

import argparse
import json
import secrets
from dataclasses import replace
from pathlib import Path

from minidist.cli.arguments import add_option, number, whole
from minidist.course import report_page, similarity
from minidist.course.grade_all import Job, Result, grade_all, load, place, save
from minidist.course.lab import MUTANTS, find
from minidist.course.sandbox.limits import Limits
from minidist.course.sandbox.untrusted import plain
from minidist.course.submissions import check_no_link, handed_in, label, submissions
from minidist.errors import WrongInput, plural
from minidist.mistakes.register import source

ROWS = 50  # of the table of similar submissions
SHARE = number("a share", 1, "1 is all of a submission")
JOBS = whole(256, "each is a process that has processes of its own")


def add_arguments(name: str, action: argparse.ArgumentParser) -> None:
    """Add the arguments of one of these actions."""
    words = "the lab (default: the one that the first lab.txt names)"
    add_option(action, "--lab", words, metavar="NAME")
    if name == "similar":
        words = "a submission, folder or .zip, or a folder that has one for each student"
        add_option(action, "folders", words, Path, "FOLDER", nargs="+")
        words = "the least part of the smaller one's code, from 0 to 1, that two have in common"
        add_option(action, "--above", words, SHARE, "SHARE", default=0.4)
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
    words = "a file with the class, a name per line as in lab.txt: others are not graded"
    add_option(action, "--students", words, Path, "FILE")
    add_option(action, "--jobs", "submissions that are graded at once", JOBS, "JOBS", default=2)
    words = "grade all again, with the same seed, and show whose points have changed"
    action.add_argument("--regrade", action="store_true", help=words)


def grade_class(given: argparse.Namespace) -> int:
    """Grade every submission; print a line for each, and a table at the end."""
    paths, folder, earlier = _class(given)
    newest = list(earlier.values())[-1:]
    lab = find(given.lab or (newest[0].lab if newest else _lab_name([given.folder, *paths])))
    drawn = newest[0].seed if newest else secrets.randbits(32)
    patience = 60 + 3 * given.seconds * len(lab.tasks)
    seed = drawn if given.seed is None else given.seed
    job = Job(lab, seed, folder, patience, Limits(given.seconds), _students(given.students))
    before = {r.name: r.sum for r in earlier.values() if r.points and r.lab == lab.name}
    if given.regrade:
        for path, result in earlier.items():  # if this is interrupted, their seed is still known
            save(replace(result, key=""), place(folder, path))
    if newest and seed != newest[0].seed:
        print(f"the results are of seed {newest[0].seed}: all are graded again, with {seed}")
    file = given.csv or folder / "points.csv"
    done: list[Result] = []

    def show(result: Result) -> None:
        done.append(result)
        words = f"{result.sum} points"
        if before.get(result.name, result.sum) != result.sum:
            words = f"{before[result.name]} -> {words}"
        print(f"{len(done)} of {len(paths)}  {result.name}: {result.why or words}", flush=True)

    _make(folder)
    _write(file, report_page.as_csv(lab, []))  # it shall not fail after hours
    grade_all(paths, job, given.jobs, show)
    done.sort(key=lambda result: result.name)
    _write(file, report_page.as_csv(lab, done))
    print(f"\n{report_page.summary(lab, done)}\n\n{file}; page: minidist lab report {given.folder}")
    return 0


def _students(file: Path | None) -> frozenset[str] | None:
    if file is None:
        return None
    names = read_text(file).lower().splitlines()
    return frozenset(name.strip() for name in names if name.strip())


def read_text(file: Path) -> str:
    """Read a teacher's file. ValueError: why it cannot be read."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise WrongInput(f"cannot read {file}: {why}") from None


def report(given: argparse.Namespace) -> int:
    """Write the page of the results that there are."""
    _, folder, earlier = _class(given)
    results = list(earlier.values())
    if not results:
        raise WrongInput(f"{folder} has no results; first: minidist lab grade-all {given.folder}")
    lab = find(given.lab or results[-1].lab)
    results = sorted((r for r in results if r.lab == lab.name), key=lambda result: result.name)
    _write(file := given.output or folder / "report.html", report_page.page(lab, results))
    print(file)
    return 0


def _class(given: argparse.Namespace) -> tuple[list[Path], Path, dict[Path, Result]]:
    """Return the submissions, the folder of results, and those that it has, the newest last."""
    if not (paths := submissions(given.folder)):
        raise WrongInput(f"{given.folder} has no submissions: a folder or .zip for each student")
    folder = given.results or given.folder.resolve().with_name(
        f"{given.folder.resolve().name}.results"
    )
    files = {path: file for path in paths if (file := place(folder, path)).is_file()}
    in_time = sorted(files, key=lambda path: files[path].stat().st_mtime_ns)
    return paths, folder, {path: found for path in in_time if (found := load(files[path]))}


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WrongInput(f"cannot make the folder {folder}: {error.strerror}") from None


def _write(file: Path, text: str) -> None:
    _make(file.parent)
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise WrongInput(f"cannot write {file}: {error.strerror}") from None


def similar(given: argparse.Namespace) -> int:
    folders = [path for folder in given.folders for path in _submissions(folder)]
    if (name := given.lab or _lab_name(folders)) == MUTANTS:
        raise WrongInput(
            "the lab of mutants is not compared: everybody's tests are like each other"
        )
    lab = find(name)
    reader, found, remarks = similarity.Reader(lab), [], []
    unique = len({folder.name for folder in folders}) == len(folders)
    for folder in folders:
        name = folder.name if unique else str(folder)
        try:
            check_no_link(folder)
            files, unusable = handed_in(folder, lab.files)
        except (OSError, ValueError) as error:
            remarks.append(plain(f"{name}: {error}"))
            continue
        remarks += [plain(f"{name}/minidist/{path}: {why}") for path, why in unusable.items()]
        found.append(reader.read(plain(name), files))
    if len(found) < 2:
        raise WrongInput(f"{plural(len(found), 'submission')} of lab {lab.name}; a pair needs two")
    reference = reader.read("the package", {path: source(path) for path in lab.files})
    pairs = similarity.pairs(found, reference, given.above)
    if given.json:
        print(json.dumps({"lab": lab.name, "pairs": pairs, "not read": remarks}, indent=1))
    else:
        _print_pairs(pairs, len(found), given.above)
        for remark in remarks:
            print(f"not read: {remark}")
    return 0


def _submissions(folder: Path) -> list[Path]:
    """Return a class's submissions; what has none or one in it is a submission itself."""
    if not folder.exists():
        raise WrongInput(f"there is no folder {folder}")
    return inner if len(inner := submissions(folder)) > 1 else [folder]


def _lab_name(folders: list[Path]) -> str:
    if name := next(filter(None, (label(folder)[0] for folder in folders)), ""):
        return name
    raise WrongInput("no lab.txt names the lab of these folders; pass the name: --lab NAME")


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
