"""`minidist verify`: every strategy on real ranks against one device and against its formulas."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from minidist.cli.arguments import add_device, add_json, add_option, add_transport, check_several
from minidist.comm import nccl
from minidist.comm.mpi import library as mpi
from minidist.errors import WrongInput
from minidist.pipeline_parallel import read
from minidist.verify import equivalence
from minidist.verify.compare import BOUND

EXAMPLES = (
    "minidist verify",
    "minidist verify --strategy zero_3 --strategy hybrid --json",
    "minidist verify --program order.txt",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command and add its arguments."""
    parser.description = (
        "Run strategies on real ranks in float64 and compare every parameter's gradient with one "
        "device's, and the bytes moved with their closed form. Exit status 1 if any differs."
    )
    names = equivalence.strategies()
    words = f"only this one; may be repeated: {', '.join(names)}"
    add_option(parser, "--strategy", words, metavar="NAME", choices=names, action="append")
    words = "a pipeline's order of your own, instead of strategies: a text (or PyTorch's CSV) as "
    words += "pipeline_parallel.write writes it, on as many ranks as it has programs"
    add_option(parser, "--program", words, metavar="FILE")
    add_json(parser)
    add_transport(parser)
    add_device(parser)
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Print a row per case; return 1 if one fails."""
    sizes, transport, limit = _room(given)
    rows = []
    for row in _rows(given, sizes, transport):
        rows.append(row)
        if not given.json:
            print(_line(row), flush=True)
    if given.json:
        print(json.dumps(rows, indent=2))
    else:
        print("\n".join([_summary(rows), *_left_out(given, sizes, limit)]))
    return 0 if all(row["ok"] for row in rows) else 1


def _room(given: argparse.Namespace) -> tuple[list[int], str, str]:
    """Return the numbers of ranks for which there is room, the transport, and what limits them."""
    sizes, device = list(equivalence.SIZES), given.device
    if given.transport == "mpi":
        check_several(mpi.processes())
        sizes = [n for n in sizes if n <= mpi.processes()]
        return sizes, "mpi-subset", "mpiexec -n {}"
    if given.transport == "nccl":
        nccl.check_device(device, "nccl")
        sizes = [n for n in sizes if n <= nccl.room(device)]
        return sizes, "nccl", f"NCCL has one rank per GPU, here {nccl.room(device)}"
    return sizes, given.transport, ""


def _rows(given: argparse.Namespace, sizes: list[int], transport: str) -> Iterator[dict]:
    if given.program is None:
        return equivalence.verify(given.strategy, sizes, transport, given.device)
    if given.strategy:
        raise WrongInput("--program certifies this program alone; leave --strategy out")
    programs, most = read(Path(given.program)), max(sizes, default=0)
    if len(programs) > most and transport in ("mpi-subset", "nccl"):
        raise WrongInput(f"{given.program} is for {len(programs)} ranks; here are at most {most}")
    return equivalence.verify_program(programs, transport, given.device)


def _left_out(given: argparse.Namespace, sizes: list[int], limit: str) -> list[str]:
    """Return in words how many cases there are on more ranks than there is room for."""
    if given.program is not None:
        return []
    cases = {n: equivalence.number_of_cases(given.strategy, n) for n in equivalence.SIZES}
    larger = [n for n, count in cases.items() if count and n not in sizes]
    if not larger:
        return []
    count, most = sum(cases[n] for n in larger), max(larger)
    return [f"{count} cases on {min(larger)} ranks or more are left out: {limit.format(most)}"]


def _line(row: dict) -> str:
    mark = "ok  " if row["ok"] else "FAIL"
    ranks = "1 rank " if row["ranks"] == 1 else f"{row['ranks']} ranks"
    return (
        f"{mark} {row['strategy']:<16} {ranks}  {row['case']:<32} "
        f"{row['promise']:<16} {row['bytes']:>9,} bytes "
        f"{'' if row['bytes_formula'] is None else '= formula  '}{row['detail']}"
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
