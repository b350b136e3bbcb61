"""`minidist verify`: every strategy on real ranks against one device and against its formulas."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from minidist.cli.arguments import add_device, add_json, add_transport, check_several
from minidist.comm import mpi, nccl
from minidist.pipeline_parallel import read
from minidist.tools import equivalence
from minidist.tools.compare import BOUND


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command and add its arguments."""
    parser.description = (
        "Run strategies on real ranks in float64 and compare every parameter's gradient with one "
        "device's, and the bytes moved with their closed form. Exit status 1 if any differs."
    )
    names = equivalence.strategies()
    parser.add_argument(
        "--strategy",
        action="append",
        choices=names,
        metavar="NAME",
        help=f"only this one; may be repeated: {', '.join(names)}",
    )
    parser.add_argument(
        "--program",
        metavar="FILE",
        help="a pipeline's order of your own, instead of strategies: a text (or PyTorch's CSV) as "
        "pipeline_parallel.write writes it, on as many ranks as it has programs",
    )
    add_json(parser)
    add_transport(parser)
    add_device(parser)
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Print a row per case; return 1 if one fails."""
    rows, sizes, transport = [], equivalence.SIZES, given.transport
    if transport == "mpi":
        check_several(mpi.processes())
        sizes, transport = [n for n in sizes if n <= mpi.processes()], "mpi-subset"
    if transport == "nccl":
        nccl.check_device(given.device, "nccl")
        sizes = [n for n in sizes if n <= nccl.room(given.device)]
    for row in _rows(given, sizes, transport):
        rows.append(row)
        if not given.json:
            print(_line(row), flush=True)
    print(json.dumps(rows, indent=2) if given.json else _summary(rows))
    left_out = [n for n in equivalence.SIZES if n not in sizes and given.program is None]
    larger = {n: equivalence.number_of_cases(given.strategy, n) for n in left_out}
    larger = {n: cases for n, cases in larger.items() if cases}
    if larger and not given.json:
        cases = f"{sum(larger.values())} cases on {min(larger)} ranks or more"
        here = (
            f"mpiexec -n {max(larger)}"
            if given.transport == "mpi"
            else f"NCCL has one rank per GPU, here {nccl.room(given.device)}"
        )
        print(f"{cases} are left out: {here}")
    return 0 if all(row["ok"] for row in rows) else 1


def _rows(given: argparse.Namespace, sizes: list[int], transport: str) -> Iterator[dict]:
    if given.program is None:
        return equivalence.verify(given.strategy, sizes, transport, given.device)
    if given.strategy:
        raise ValueError("--program certifies this program alone; leave --strategy out")
    programs = read(Path(given.program))
    if len(programs) > (most := max(sizes, default=0)) and transport in ("mpi-subset", "nccl"):
        raise ValueError(f"{given.program} is for {len(programs)} ranks; here are at most {most}")
    return equivalence.verify_program(programs, transport, given.device)


def _line(row: dict) -> str:
    mark = "ok  " if row["ok"] else "FAIL"
    ranks = f"{row['ranks']} rank{'s' if row['ranks'] > 1 else ' '}"
    return (
        f"{mark} {row['strategy']:<16} {ranks}  {row['case']:<32} "
        f"{row['promise']:<16} {row['bytes']:>9,} bytes "
        f"(formula {row['bytes_formula']:,})  {row['detail']}"
    )


def _summary(rows: list[dict]) -> str:
    failed = [row["strategy"] for row in rows if not row["ok"]]
    if failed:
        return f"{len(failed)} of {len(rows)} rows FAILED: {', '.join(dict.fromkeys(failed))}"
    largest = max(row["error"] for row in rows)
    summary = f"{len(rows)} rows, all ok; largest error {largest:.1e}, allowed {BOUND:.0e}"
    reordered = sum(row["promise"].endswith(equivalence.REORDERED) for row in rows)
    if not reordered:
        return summary
    return (
        f"{summary}\n{reordered} rows are equal up to the order of sums: the library adds floats "
        "in an order of its own, and the last bits of the replay, in rank order, may differ"
    )
