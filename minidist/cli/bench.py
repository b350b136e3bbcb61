"""`minidist bench`: minidist against the libraries it is compared with."""

import json
from dataclasses import dataclass
from types import ModuleType

from minidist.cli.options import JSON, RANKS, Command, argument, flag, option, whole
from minidist.errors import WrongInput
from minidist.observe.bench import checkpoint, comm, gpu, mpi, pipelines, steps
from minidist.observe.bench.steps import GPU_SIZES
from minidist.observe.bench.table import head, line

SUITES: dict[str, ModuleType] = {
    "step": steps,
    "comm": comm,
    "pipeline": pipelines,
    "mpi": mpi,
    "gpu": gpu,
    "checkpoint": checkpoint,
}
FIRST_LINES = ((suite.__doc__ or "").partition("\n")[0] for suite in SUITES.values())
ROUNDS = whole(1000, "each repeats all that is measured, and a median needs no more")


def size(name: str):
    """Return the option of a size of the GPU's workloads."""
    usual, most, meaning = GPU_SIZES[name]
    words = f"gpu: {meaning} (default: {usual})"
    return option(words, whole(most, "the arrays have to fit on a GPU"), "N")


@dataclass
class BenchCommand(Command):
    __doc__ = (
        f"{' '.join(map('{}: {}'.format, SUITES, FIRST_LINES))} Contestants take turns. Peers are "
        "development-time extras (pip install 'minidist[bench]'); where one is missing or fails, "
        "its rows say why. Numbers are medians of the rounds; ratio is ours over theirs, limit the "
        "largest ratio allowed."
    )
    EXAMPLES = (
        "minidist bench",
        "minidist bench pipeline --rounds 9",
        "mpiexec -n 2 minidist bench --transport mpi",
    )
    what: str | None = argument(
        f"{', '.join(SUITES)} (default: step; with --transport, mpi)",
        "WORKLOAD",
        nargs="?",
        choices=SUITES,
    )
    rounds: int = option("how often each is measured", ROUNDS, default=5)
    ranks: int | None = option("how many ranks mpi starts (default: 2)", RANKS, choices=(2, 4))
    transport: str = option(
        "measure the ranks of `mpiexec -n N minidist bench --transport mpi`, without peers",
        choices=["mpi"],
        default="",
    )
    width: int | None = size("width")
    depth: int | None = size("depth")
    heads: int | None = size("heads")
    context: int | None = size("context")
    batch: int | None = size("batch")
    vocab: int | None = size("vocab")
    product: int | None = size("product")
    megabytes: int | None = size("megabytes")
    json: bool = flag(JSON)

    def run(self) -> int:
        """Print a row per measurement; keep the rows measured so far, whatever ends the run."""
        name = self.what or ("mpi" if self.transport else "step")
        suite, options = SUITES[name], self.options_of(name)
        measured = (mpi.rows_here if self.transport else suite.rows)(self.rounds, **options)
        rows: list[dict] = []
        if not self.json:
            print(head(suite.TITLE), flush=True)
        try:
            for row in measured:
                rows.append(row)
                if not self.json:
                    print(line(row), flush=True)
        finally:
            if self.json:
                print(json.dumps(rows, indent=2))
        return 0

    def options_of(self, suite: str) -> dict[str, int | dict[str, int]]:
        """Return the options of this suite; ValueError for those of another."""
        if suite != "mpi" and (self.ranks or self.transport):
            raise WrongInput(f"{suite} has ranks of its own; leave --ranks and --transport out")
        if self.ranks and self.transport:
            raise WrongInput("mpiexec has started the ranks; leave --ranks out")
        if self.ranks:
            return {"ranks": self.ranks}
        if suite != "gpu":
            self.refuse(GPU_SIZES, f"the sizes of {suite} are fixed; leave {{}} out")
        sizes = {name: self.asked[name] for name in GPU_SIZES if name in self.asked}
        return {"sizes": sizes} if sizes else {}
