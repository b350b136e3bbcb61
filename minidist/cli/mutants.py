"""`minidist mutants`: the tests against wrong implementations, and what they say of each."""

import argparse
import json
import shutil
import sys
import textwrap
import threading

from tqdm import tqdm

from minidist.cli.arguments import add_json, add_option
from minidist.cli.lab import ended_by_signals
from minidist.course import mutants, mutation_testing

EXAMPLES = (
    "minidist mutants",
    "minidist mutants --name place_from_the_rank",
    "minidist mutants --show place_from_the_rank",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command and add its arguments."""
    parser.description = (
        "Run the repository's property tests against each mutant, a small wrong change of the "
        "reference, until one fails; print which, and what it says of the cause. Exit status 1 if "
        "a mutant survives. Needs a checkout, with tests."
    )
    add_json(parser)
    add_option(parser, "--name", "only this one; may be repeated", metavar="NAME", action="append")
    add_option(parser, "--show", "print this one in words and as a patch", metavar="NAME")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Print a row per mutant; return 1 if a mutant survives."""
    if given.show is not None:
        mutant = mutants.load(given.show)
        print(f"{mutant.title}\nseen     {mutant.seen}\nsymptom  {mutant.symptom}\n")
        print(mutant.diff(), end="")
        return 0
    chosen = [mutants.load(name) for name in dict.fromkeys(given.name or mutants.names())]
    rows = _judged(chosen, printed=not given.json)
    alive = [row["name"] for row in rows if row["killed_by"] is None]
    verdict = f"{', '.join(alive)} SURVIVED" if alive else "all killed"
    print(json.dumps(rows, indent=2) if given.json else f"mutants: {len(rows)}, {verdict}")
    return 1 if alive else 0


@ended_by_signals()
def _judged(chosen: list[mutants.Mutant], printed: bool) -> list[dict]:
    """Return a row per mutant, by name; print each, if asked to, when it is done."""
    rows, width = [], max(len(mutant.name) for mutant in chosen)
    tqdm.set_lock(threading.RLock())  # tqdm's own would be a semaphore of the whole machine
    bar = tqdm(
        total=len(chosen),
        unit="mutant",
        disable=None,
        leave=False,
        mininterval=0,  # draw each count: two may end at almost one moment
        miniters=1,
    )
    with bar:
        for row in mutation_testing.judge(chosen):
            rows.append(row)
            bar.update()
            if printed:
                with bar.external_write_mode(sys.stdout):
                    print(_text(row, width), flush=True)
    return sorted(rows, key=lambda row: row["name"])


def _text(row: dict, width: int) -> str:
    """Return name and killer, and below them the diagnosis."""
    screen = min(max(shutil.get_terminal_size((100, 24)).columns, 60), 120)
    killer = row["killed_by"] or "SURVIVED"
    more = [
        wrapped
        for line in (row["diagnosis"] or "").splitlines()
        for wrapped in textwrap.wrap(line, screen - 4, subsequent_indent="  ")
    ]
    return "\n    ".join([f"{row['name']:<{width}}  {killer}", *more])
