"""`minidist strategies`: every strategy, its paper, its file and its lesson."""

import argparse
import json

from minidist.cli.arguments import add_flag, add_json
from minidist.verify.strategies import STRATEGIES, Strategy

EXAMPLES = (
    "minidist strategies",
    "minidist strategies --json",
    "minidist strategies --families",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command and add its arguments."""
    parser.description = "List the strategies, in the order of the lessons."
    add_flag(parser, "--markdown", "print the table of verify/strategies/README.md")
    add_flag(parser, "--families", "print the table of README.md: a row per family")
    add_json(parser)
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Print a row per strategy."""
    if given.json:
        print(json.dumps([fields(record) for record in STRATEGIES.values()], indent=2))
    elif given.families:
        print(families())
    else:
        print(markdown() if given.markdown else text())
    return 0


def fields(record: Strategy) -> dict[str, str | list[str]]:
    """Return what can be told of a strategy in words."""
    names = ("name", "idea", "term", "family", "paper", "lesson", "promise")
    files = [f"minidist/{path}" for path in record.files]
    return {name: getattr(record, name) for name in names} | {"files": files}


def text() -> str:
    rows = [
        (r.name, r.promise, f"minidist/{r.files[0]}", r.lesson, r.paper)
        for r in STRATEGIES.values()
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def markdown() -> str:
    """Return the table of verify/strategies/README.md: a row per strategy."""
    lines = ["| strategy | | paper | file | lesson |", "| --- | --- | --- | --- | --- |"]
    for r in STRATEGIES.values():
        files = ", ".join(f"[`{path}`](../../{path})" for path in r.files)
        lesson = f"[{number_of(r.lesson)}](../../../lessons/{r.lesson}.py)"
        lines.append(f"| `{r.name}` | {r.idea} ({r.term}) | {r.paper} | {files} | {lesson} |")
    return "\n".join(lines)


def families() -> str:
    """Return the README's table: a row per family of strategies, with its promises and lessons."""
    lines = ["| family | strategies | promise | lesson |", "| --- | --- | --- | --- |"]
    for family in dict.fromkeys(record.family for record in STRATEGIES.values()):
        records = [record for record in STRATEGIES.values() if record.family == family]
        names = ", ".join(f"`{record.name}`" for record in records)
        promises = ", ".join(dict.fromkeys(record.promise for record in records))
        lessons = dict.fromkeys(record.lesson for record in records)
        links = ", ".join(f"[{number_of(name)}](lessons/{name}.py)" for name in lessons)
        lines.append(f"| {family} | {names} | {promises} | {links} |")
    return "\n".join(lines)


def number_of(lesson: str) -> str:
    """Return "10b" of "10b_zero_bubble"."""
    return lesson.partition("_")[0]
