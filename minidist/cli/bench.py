"""`minidist bench`: minidist against the libraries it is compared with."""

import argparse
import json
from types import ModuleType

from minidist.bench import checkpoint, comm, gpu, mpi, pipelines, steps
from minidist.bench.steps import GPU_SIZES
from minidist.bench.table import head, line
from minidist.cli.arguments import DEFAULT, RANKS, ROUNDS, add_json, whole
from minidist.errors import WrongInput

SUITES: dict[str, ModuleType] = {
    "step": steps,
    "comm": comm,
    "pipeline": pipelines,
    "mpi": mpi,
    "gpu": gpu,
    "checkpoint": checkpoint,
}


EXAMPLES = (
    "minidist bench",
    "minidist bench pipeline --rounds 9",
    "mpiexec -n 2 minidist bench --transport mpi",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command and add its arguments."""
    first_lines = ((suite.__doc__ or "").partition("\n")[0] for suite in SUITES.values())
    suites = " ".join(map("{}: {}".format, SUITES, first_lines))
    parser.description = (
        f"{suites} Contestants take turns. Peers are development-time extras (pip install "
        "'minidist[bench]'); where one is missing or fails, its rows say why. Numbers are medians "
        "of the rounds; ratio is ours over theirs, limit the largest ratio allowed."
    )
    parser.add_argument(
        "what",
        metavar="WORKLOAD",
        nargs="?",
        choices=SUITES,
        help=f"{', '.join(SUITES)} (default: step; with --transport, mpi)",
    )
    parser.add_argument(
        "--rounds", type=ROUNDS, default=5, help="how often each is measured" + DEFAULT
    )
    parser.add_argument(
        "--ranks", type=RANKS, choices=(2, 4), help="how many ranks mpi starts (default: 2)"
    )
    parser.add_argument(
        "--transport",
        choices=["mpi"],
        default="",
        help="measure the ranks of `mpiexec -n N minidist bench --transport mpi`, without peers",
    )
    for name, (usual, most, meaning) in GPU_SIZES.items():
        reader = whole(most, "the arrays have to fit on a GPU")
        words = f"gpu: {meaning} (default: {usual})"
        parser.add_argument(f"--{name}", type=reader, metavar="N", help=words)
    add_json(parser)
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Print a row per measurement; keep the rows measured so far, whatever ends the run."""
    what = given.what or ("mpi" if given.transport else "step")
    suite, options = SUITES[what], _options(what, given)
    measured = (mpi.rows_here if given.transport else suite.rows)(given.rounds, **options)
    rows: list[dict] = []
    if not given.json:
        print(head(suite.TITLE), flush=True)
    try:
        for row in measured:
            rows.append(row)
            if not given.json:
                print(line(row), flush=True)
    finally:
        if given.json:
            print(json.dumps(rows, indent=2))
    return 0


def _options(what: str, given: argparse.Namespace) -> dict[str, int | dict[str, int]]:
    """Return what this suite takes beside its rounds; ValueError for what only another takes."""
    if what != "mpi" and (given.ranks or given.transport):
        raise WrongInput(f"{what} has ranks of its own; leave --ranks and --transport out")
    if given.ranks and given.transport:
        raise WrongInput("mpiexec has started the ranks; leave --ranks out")
    if given.ranks:
        return {"ranks": given.ranks}
    sizes = {name: n for name in GPU_SIZES if (n := getattr(given, name)) is not None}
    if sizes and what != "gpu":
        raise WrongInput(f"the sizes of {what} are fixed; leave --{next(iter(sizes))} out")
    return {"sizes": sizes} if sizes else {}
