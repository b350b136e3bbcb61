"""`minidist plan`: find a plan by machine. `--profile` measures a model here, plans and runs it.

`--measure` predicts and measures a step of every strategy on this machine. `--model` searches the
best plan for a published model on a machine whose rates are given.
"""

import argparse
import json
import re
from collections.abc import Callable
from dataclasses import asdict, replace

from minidist.cli.arguments import (
    DEFAULT,
    ROUNDS,
    add_json,
    add_timeout,
    add_transport,
    at_most,
    number,
    short,
    whole,
)

MOST = whole(1_048_576, "the search looks at every divisor of it")
UNITS = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
UNITS |= {f"{name}i": 1024**i for i, name in enumerate("KMGT", 1)}
MOST_AMOUNT, NO_MACHINE = 1e24, "no machine has more"
RATES = {  # of the machine of --model: default, unit, what it is
    "memory": ("80GB", "B", "bytes that a rank can hold"),
    "flops": ("312T", "", "operations per second of a rank's products"),
    "link": ("300GB", "B", "bytes per second that a rank sends inside its node"),
    "network": ("25GB", "B", "bytes per second that a rank sends to other nodes"),
    "memory-bandwidth": ("2TB", "B", "bytes per second to a rank's own memory"),
    "latency": ("0.000005", "", "seconds of a message"),
}
MOST_PROFILED = 2048  # positions
LISTED = {  # how it is read, default, what it is
    "top": (whole(100, "each is simulated"), 3, "best plans to simulate"),
    "others": (whole(10_000, "each is a line"), 10, "others to print"),
}
SIZES = {  # of the model of --profile: default, bound
    "layers": (6, 1000),
    "width": (64, 2048),
    "sequence": (64, 1_048_576),
    "vocab": (512, 100_000),
}
USED = {  # of the options without a default: those that each way uses
    "profile": (*SIZES, "bandwidth"),
    "measure": (),
    "model": ("sequence", "batch", "schedules"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command and add its arguments."""
    parser.description = (
        "--profile: measure the layers of a small Transformer on ranks of this machine, let "
        "PipeDream's planner give them to stages with replicas, run the plan on as many ranks, "
        "and certify that its weights are, bit for bit, a replay's. --measure: predict the seconds "
        "of a step of every strategy on 1, 2 and 4 ranks from this machine's rates, and measure "
        "them; on an idle machine this takes some minutes. --model: search the plan with the "
        "fastest step among all meshes, schedules and options that fit a machine with these rates; "
        "the others say why they are worse."
    )
    ways = parser.add_mutually_exclusive_group(required=True)
    ways.add_argument("--profile", action="store_true", help="profile, plan, run and certify")
    ways.add_argument("--measure", action="store_true", help="predicted and measured seconds")
    ways.add_argument("--model", metavar="NAME", help="search a plan for it: 124m to 175b, 1008b")
    parser.add_argument("--per-node", type=MOST, default=8, help="ranks of a node" + DEFAULT)
    parser.add_argument("--batch", type=MOST, help="examples of a step (default: one per rank)")
    for name, (usual, unit, meaning) in RATES.items():
        parser.add_argument(f"--{name}", type=amount(unit), default=usual, help=meaning + DEFAULT)
    for name, (how, usual, meaning) in LISTED.items():
        parser.add_argument(f"--{name}", type=how, default=usual, help=meaning + DEFAULT)
    parser.add_argument(
        "--schedules",
        metavar="NAME,NAME",
        help="that --model tries (default: all; 1f1b and interleaved on more than 4,096 ranks)",
    )
    parser.add_argument(
        "--rounds", type=ROUNDS, default=3, help="how often --measure measures" + DEFAULT
    )
    parser.add_argument("--ranks", type=MOST, default=2, help="of the plan" + DEFAULT)
    for name, (usual, most) in SIZES.items():
        reader = whole(most, "the arrays of its layers have to fit in memory")
        words = f"of the Transformer (--profile: {usual})"
        parser.add_argument(f"--{name}", type=reader, metavar="N", help=words)
    parser.add_argument(
        "--bandwidth",
        type=number("a number of bytes per second", MOST_AMOUNT, NO_MACHINE, above=True),
        metavar="BYTES",
        help="per second, for which --profile plans (default: measured)",
    )
    parser.add_argument(
        "--cost",
        choices=["paper", "released"],
        default="paper",
        help="what PipeDream's planner counts, see planning/pipedream.py" + DEFAULT,
    )
    add_transport(parser)
    add_timeout(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def amount(unit: str) -> Callable[[str], float]:
    """Return a reader of numbers such as 80GB, 312T or 64GiB."""

    def read(text: str) -> float:
        found = re.fullmatch(rf"(\d+(?:\.\d+)?)([kMGTP]?|[KMGT]i)(?:{unit})?", text, re.ASCII)
        if found is None:
            raise argparse.ArgumentTypeError(
                f"{short(text)} is not an amount; write one as 80G{unit}"
            )
        if (result := float(found[1]) * UNITS[found[2]]) > MOST_AMOUNT:
            raise argparse.ArgumentTypeError(
                f"{short(text)} is too large; {at_most(MOST_AMOUNT, NO_MACHINE)}"
            )
        return result

    return read


def run(given: argparse.Namespace) -> int:
    """Do what was asked for; return 1 if the run of a plan is not certified."""
    way = "model" if given.model is not None else "measure" if given.measure else "profile"
    for name in (*SIZES, "bandwidth", "batch", "schedules"):
        if getattr(given, name) is not None and name not in USED[way]:
            raise ValueError(f"--{way} does not use --{name}; leave it out")
    return {"profile": profiled, "measure": measured, "model": searched}[way](given)


def measured(given: argparse.Namespace) -> int:
    """Print predicted and measured seconds, row by row."""
    from minidist.tools import machine

    rows = []
    if not given.json:
        print(machine.HEAD, flush=True)
    for row in machine.measure(rounds=given.rounds):
        rows.append(row)
        if not given.json:
            print(machine.line(row), flush=True)
    print(json.dumps(rows, indent=2) if given.json else machine.summary(rows))
    return 0


def profiled(given: argparse.Namespace) -> int:
    """Print what was measured, and the plan; return 1 if the run of the plan is not certified."""
    from minidist.tools import profile

    sizes = {name: getattr(given, name) or usual for name, (usual, _) in SIZES.items()}
    if sizes["sequence"] > MOST_PROFILED:
        raise ValueError(
            f"--profile has a score of each pair of {sizes['sequence']} positions in memory; use "
            f"--sequence {MOST_PROFILED} or less"
        )
    if not given.json:
        print(f"measuring a Transformer on {given.ranks} ranks", flush=True)  # takes a while
    found = profile.measure(
        *profile.example(**sizes),
        given.ranks,
        given.bandwidth,
        given.cost,
        given.transport,
        given.timeout,
    )
    print(json.dumps([found.row()], indent=2) if given.json else profile.text(found))
    return 0 if found.certificate["ok"] else 1


def searched(given: argparse.Namespace) -> int:
    """Print the best plans, some of the others, and why they are worse."""
    from minidist.planning import Machine, search
    from minidist.planning.models import size_of
    from minidist.planning.plan_space import tried
    from minidist.planning.why import line, seconds_of

    size, batch = size_of(given.model), given.batch or given.ranks
    size = replace(size, sequence=given.sequence or size.sequence)
    rates = {name: getattr(given, name) for name in (r.replace("-", "_") for r in RATES)}
    machine = Machine(given.ranks, given.per_node, **rates)
    schedules = tried(given.ranks, given.schedules and given.schedules.split(","))
    if not given.json:
        print(
            f"{given.model}: {size.parameters / 1e9:.1f} billion parameters, {batch} examples of "
            f"{size.sequence} tokens, {given.ranks} ranks, {given.per_node} in a node\n",
            flush=True,  # the search may take a minute
        )
    found = search(size, machine, batch, given.top, schedules=schedules)
    if given.json:
        print(json.dumps([asdict(e) | {"fits": e.fits, "held": e.held} for e in found], indent=2))
        return 0
    fit = [e for e in found if e.fits]
    for one in fit[: given.top + given.others]:
        print(line(one))
    if len(found) > len(fit):
        print("\ndoes not fit:")
    for one in [e for e in found if not e.fits][: given.others]:
        print(line(one))
    best = found[0]
    print(
        f"\n{len(fit)} listed plans fit, {len(found) - len(fit)} do not. The best: "
        f"{seconds_of(best.compute)} of products, {best.bubble:.1%} of the step is waiting\n"
        f"Schedules tried: {', '.join(schedules)}; --schedules names others"
    )
    return 0
