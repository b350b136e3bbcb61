"""`minidist verify`: strategies against one device and formulas. `strategies`: their list."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from minidist.cli.options import DEVICE, JSON, TRANSPORT, Command, check_several, flag, option
from minidist.comm import nccl
from minidist.comm.mpi import library as mpi
from minidist.errors import WrongInput
from minidist.pipeline_parallel import read
from minidist.verify import equivalence
from minidist.verify.compare import BOUND
from minidist.verify.strategies import STRATEGIES, Strategy


@dataclass
class VerifyCommand(Command):
    """Run strategies on real ranks in float64 and compare every parameter's gradient with one
    device's, and the bytes moved with their closed form. Exit status 1 if any differs."""

    EXAMPLES = (
        "minidist verify",
        "minidist verify --strategy zero_3 --strategy hybrid --json",
        "minidist verify --program order.txt",
    )
    strategy: list[str] | None = option(
        f"only this one; may be repeated: {', '.join(equivalence.strategies())}",
        metavar="NAME",
        choices=equivalence.strategies(),
        action="append",
    )
    program: str | None = option(
        "a pipeline's order of your own, instead of strategies: a text (or PyTorch's CSV) as "
        "pipeline_parallel.write writes it, on as many ranks as it has programs",
        metavar="FILE",
    )
    json: bool = flag(JSON)
    transport: str = option(*TRANSPORT)
    device: str = option(DEVICE, default="cpu")

    def run(self) -> int:
        """Print a row per case; return 1 if one fails."""
        sizes, transport, limit = self.room()
        rows = []
        for row in self.rows(sizes, transport):
            rows.append(row)
            if not self.json:
                print(line(row), flush=True)
        if self.json:
            print(json.dumps(rows, indent=2))
        else:
            print("\n".join([summary(rows), *self.left_out(sizes, limit)]))
        return 0 if all(row["ok"] for row in rows) else 1

    def room(self) -> tuple[list[int], str, str]:
        """Return the possible numbers of ranks, the transport, and the reason of their limit."""
        if self.transport == "mpi":
            check_several(most := mpi.processes())
            transport, limit = "mpi-subset", "mpiexec -n {}"
        elif self.transport == "nccl":
            nccl.check_device(self.device, "nccl")
            most, transport = nccl.room(self.device), "nccl"
            limit = f"NCCL has one rank per GPU, here {most}"
        else:
            return list(equivalence.SIZES), self.transport, ""
        return [n for n in equivalence.SIZES if n <= most], transport, limit

    def rows(self, sizes: list[int], transport: str) -> Iterator[dict]:
        if self.program is None:
            return equivalence.verify(self.strategy, sizes, transport, self.device)
        if self.strategy:
            raise WrongInput("--program certifies this program alone; leave --strategy out")
        programs, most = read(Path(self.program)), max(sizes, default=0)
        if len(programs) > most and transport in ("mpi-subset", "nccl"):
            raise WrongInput(
                f"{self.program} is for {len(programs)} ranks; here are at most {most}"
            )
        return equivalence.verify_program(programs, transport, self.device)

    def left_out(self, sizes: list[int], limit: str) -> list[str]:
        """Return in words how many cases there are on more ranks than there is room for."""
        if self.program is not None:
            return []
        cases = {n: equivalence.number_of_cases(self.strategy, n) for n in equivalence.SIZES}
        larger = {n: count for n, count in cases.items() if count and n not in sizes}
        if not larger:
            return []
        ranks = f"{sum(larger.values())} cases on {min(larger)} ranks or more"
        return [f"{ranks} are left out: {limit.format(max(larger))}"]


def line(row: dict) -> str:
    mark = "ok  " if row["ok"] else "FAIL"
    ranks = "1 rank " if row["ranks"] == 1 else f"{row['ranks']} ranks"
    return (
        f"{mark} {row['strategy']:<16} {ranks}  {row['case']:<32} "
        f"{row['promise']:<16} {row['bytes']:>9,} bytes "
        f"{'' if row['bytes_formula'] is None else '= formula  '}{row['detail']}"
    )


def summary(rows: list[dict]) -> str:
    failed = [row["strategy"] for row in rows if not row["ok"]]
    if failed:
        return f"{len(failed)} of {len(rows)} rows FAILED: {', '.join(dict.fromkeys(failed))}"
    largest = max(row["error"] for row in rows)
    message = f"{len(rows)} rows, all ok; largest error {largest:.1e}, allowed {BOUND:.0e}"
    reordered = sum(row["promise"].endswith(equivalence.REORDERED) for row in rows)
    if not reordered:
        return message
    return (
        f"{message}\n{reordered} rows are equal up to the order of sums: the library adds floats "
        "in an order of its own, and the last bits of the replay, in rank order, may differ"
    )


@dataclass
class StrategiesCommand(Command):
    """List the strategies, in the order of the lessons."""

    EXAMPLES = (
        "minidist strategies",
        "minidist strategies --json",
        "minidist strategies --families",
    )
    markdown: bool = flag("print the table of verify/strategies/README.md")
    families: bool = flag("print the table of README.md: a row per family")
    json: bool = flag(JSON)

    def run(self) -> int:
        """Print a row per strategy."""
        if self.json:
            print(json.dumps([record_as_json(record) for record in STRATEGIES.values()], indent=2))
        elif self.families:
            print(families())
        else:
            print(markdown() if self.markdown else table())
        return 0


def record_as_json(record: Strategy) -> dict[str, str | list[str]]:
    names = ("name", "idea", "term", "family", "paper", "lesson", "promise")
    files = [f"minidist/{path}" for path in record.files]
    return {name: getattr(record, name) for name in names} | {"files": files}


def table() -> str:
    rows = [
        (r.name, r.promise, f"minidist/{r.files[0]}", r.lesson, r.paper)
        for r in STRATEGIES.values()
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


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
