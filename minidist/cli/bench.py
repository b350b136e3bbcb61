"""`minidist bench`: minidist against the libraries it is compared with."""

import argparse
import json

from minidist.cli.arguments import DEFAULT, RANKS, ROUNDS, add_json, whole
from minidist.tools.bench import checkpoint, comm, gpu, mpi, pipelines, steps

WORKLOADS = {
    "step": steps,
    "comm": comm,
    "pipeline": pipelines,
    "mpi": mpi,
    "gpu": gpu,
    "checkpoint": checkpoint,
}
SIZES = {  # of each field of gpu.Sizes: its bound, and what it is
    "width": (16_384, "of the MLP and the Transformer"),
    "depth": (1_000, "their layers, or blocks"),
    "heads": (16_384, "attention heads"),
    "context": (65_536, "tokens per example"),
    "batch": (65_536, "examples"),
    "vocab": (1_000_000, "different tokens"),
    "product": (65_536, "rows of each matrix of a product"),
    "megabytes": (100_000, "of an all_reduce"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command and add its arguments."""
    parser.description = (
        "step: time training steps on one BLAS thread, in float32, interleaved with PyTorch "
        "eager. comm: time all_reduce, messages and data parallelism, interleaved with MPICH, "
        "gloo and DDP. pipeline: time two pipelined ranks, interleaved with one process and with "
        "PyTorch's. mpi: time all_reduce and training steps under mpiexec, which it starts, "
        "interleaved with MPI's own Allreduce, with processes and with NuMPItron. gpu: time "
        "training steps and products on a GPU, interleaved with PyTorch, and all_reduce between "
        "ranks of one GPU. checkpoint: time a save and a load, interleaved with np.save and "
        "np.load of the same bytes, and what a save takes from a training step. Peers are "
        "development-time extras (pip install 'minidist[bench]'); where one is missing or fails, "
        "its rows say why. Each row is printed when it is measured. Numbers are medians of the "
        "rounds; ratio is ours over theirs, limit the largest ratio allowed."
    )
    parser.add_argument(
        "what",
        metavar="WORKLOAD",
        nargs="?",
        choices=WORKLOADS,
        help=f"{', '.join(WORKLOADS)} (default: step; with --transport, mpi)",
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
        help="measure the ranks of `mpiexec -n N minidist bench --transport mpi`, without peers",
    )
    for name, (most, meaning) in SIZES.items():
        usual = getattr(gpu.Sizes, name)
        words = f"gpu: {meaning} (default: {usual})"
        reader = whole(most, "the arrays have to fit on a GPU")
        parser.add_argument(f"--{name}", type=reader, metavar="N", help=words)
    add_json(parser)
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Print a row per measurement; keep the rows measured so far, whatever ends the run."""
    what, rows, more = given.what or ("mpi" if given.transport else "step"), [], {}
    if what != "mpi" and (given.ranks or given.transport):
        raise ValueError(f"{what} has ranks of its own; leave --ranks and --transport out")
    if given.ranks and given.transport:
        raise ValueError("mpiexec has started the ranks; leave --ranks out")
    if given.ranks:
        more["ranks"] = given.ranks
    if sizes := {name: n for name in SIZES if (n := getattr(given, name)) is not None}:
        if what != "gpu":
            raise ValueError(f"the sizes of {what} are fixed; leave --{next(iter(sizes))} out")
        more["sizes"] = gpu.Sizes(**sizes)
    suite = WORKLOADS[what]
    measure = mpi.measure_here if given.transport else suite.measure
    measured = measure(given.rounds, **more)
    if not given.json:
        print(suite.HEAD, flush=True)
    try:
        for row in measured:
            rows.append(row)
            if not given.json:
                print(suite.line(row), flush=True)
    finally:
        if given.json:
            print(json.dumps(rows, indent=2))
    return 0
