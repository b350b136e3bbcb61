"""`minidist lab`: hand out a lab, test it, grade it, export it."""

import argparse
import contextlib
import signal
import sys
from pathlib import Path


def add_lab(commands, formatter, from_zero, seconds) -> None:
    """Add the command's arguments; `from_zero` and `seconds` read a number from a word."""
    lab = commands.add_parser(
        "lab",
        help="labs: hand out, test, grade",
        description="Labs in which parts of minidist are to be written. "
        "`list` them, make a `new` one, `test` it while you write, `grade` what was handed in.",
    )
    lab.set_defaults(command=lambda given: lab.print_help() or 2)
    actions = lab.add_subparsers(title="actions", metavar="ACTION")

    def add(name, command, help, description):
        parser = actions.add_parser(
            name, help=help, description=description, formatter_class=formatter
        )
        parser.set_defaults(command=command)
        return parser

    add("list", _list, "the labs, their tasks and points", "List the labs and their tasks.")

    new = add("new", _new, "write a starter", "Write what a student begins with into a new folder.")
    export = add(
        "export",
        _export,
        "write release, instructor's folder and autograder",
        "Write release/ for students, instructor/ with the solution and a hidden seed, and "
        "autograder.zip for Gradescope into a new folder.",
    )
    for parser in (new, export):
        parser.add_argument("lab", metavar="LAB", help="its name, as `minidist lab list` has it")
        parser.add_argument("folder", metavar="DIR", type=Path, help="a new or empty folder")
    export.add_argument(
        "--seed", type=from_zero, default=argparse.SUPPRESS, help="the hidden one (default: random)"
    )

    test = add(
        "test",
        _test,
        "test a folder with the public questions",
        "Ask the public questions; exit status 1 if an answer is wrong.",
    )
    grade = add(
        "grade",
        _grade,
        "grade a folder with hidden questions",
        "Ask the same questions with hidden numbers, and give points. The exit status is 0 "
        "however few they are, and 2 if there was nothing to grade.",
    )
    for parser in (test, grade):
        parser.add_argument("folder", metavar="DIR", type=Path, help="what was handed in")
        parser.add_argument(
            "--lab",
            metavar="NAME",
            default=argparse.SUPPRESS,
            help="the lab (default: what lab.txt in the folder says)",
        )
        parser.add_argument("--seconds", type=seconds, default=20.0, help="time limit of each task")
    grade.add_argument(
        "--seed", type=from_zero, default=argparse.SUPPRESS, help="(default: random, and printed)"
    )
    grade.add_argument("--format", choices=("text", "junit", "gradescope"), default="text")
    grade.add_argument(
        "--output", metavar="FILE", default="-", help="where the report goes; - is the terminal"
    )


def _list(given) -> int:
    from minidist.course import property_lab
    from minidist.course.lab import labs

    last = property_lab.lab()
    for lab in [*labs(), last]:
        print(f"{lab.number}  {lab.name:<14} {lab.points:>3} points  {lab.title}")
        for task in lab.tasks if lab is not last else []:
            print(f"       {task.id}  {task.points:>3}  {task.title}")
    print(f"       one task per mutant, {len(last.tasks)} of them")
    return 0


def _new(given) -> int:
    from minidist.course import property_lab, starter
    from minidist.course.lab import find

    if given.lab == property_lab.NAME:
        paths = property_lab.write(given.folder)
    else:
        paths = starter.write(find(given.lab), given.folder)
    for path in paths:
        print(given.folder / path)
    print(f"\nread {given.folder / 'README.md'}, then: minidist lab test {given.folder}")
    return 0


def _export(given) -> int:
    from minidist.course import property_lab
    from minidist.course.export import export
    from minidist.course.lab import find

    if given.lab == property_lab.NAME:
        raise ValueError("the lab of mutants is not exported: hand out `minidist lab new mutants`")
    for path in export(find(given.lab), given.folder, getattr(given, "seed", None)):
        print(path)
    return 0


def _test(given) -> int:
    from minidist.course import report

    done = _graded(given, seed=0)
    print(report.text(done, foot=False), end="")
    return 0 if done.points == done.lab.points else 1


def _grade(given) -> int:
    from minidist.course import report

    write = {"text": report.text, "junit": report.junit, "gradescope": report.gradescope}
    output = None if given.output == "-" else Path(given.output)
    if output is not None and not output.parent.is_dir():
        raise ValueError(f"cannot write {output}: there is no folder {output.parent}")
    if output is not None and output.is_dir():
        raise ValueError(f"cannot write {output}: it is a folder")
    refused = None
    try:
        said = write[given.format](_graded(given, getattr(given, "seed", None)))
    except ValueError as error:
        if given.format != "gradescope":
            raise
        said, refused = report.gradescope_refusal(str(error)), error
    if output is None:
        sys.stdout.write(said + "\n" * (not said.endswith("\n")))
    else:
        try:
            output.write_text(said, encoding="utf-8")
        except OSError as error:
            print(said)  # it took its time
            raise ValueError(f"cannot write {output}: {error.strerror}") from None
    if refused:
        raise refused
    return 0


@contextlib.contextmanager
def _told_to_end():
    """Let SIGTERM and SIGHUP end the command as an exception does, which tidies up."""
    kinds = [signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
    before = {kind: signal.signal(kind, lambda kind, _: sys.exit(128 + kind)) for kind in kinds}
    try:
        yield
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


@_told_to_end()
def _graded(given, seed):
    from minidist.course import grader, property_lab
    from minidist.course.lab import find
    from minidist.course.sandbox.limits import Limits
    from minidist.course.starter import NAME, lab_name

    limits = Limits(given.seconds)
    if name := getattr(given, "lab", None):
        with contextlib.suppress(ValueError):  # it has no lab.txt
            if (other := lab_name(given.folder)) != name:
                said = f"its {NAME} says {other[:40]!r}, the questions are those of {name!r}"
                print(f"minidist: {given.folder}: {said}", file=sys.stderr)
    else:
        name = lab_name(given.folder)
    if name == property_lab.NAME:
        return property_lab.grade(given.folder, property_lab.lab(), seed, limits)
    return grader.grade(given.folder, find(name), seed, limits)
