"""`minidist plan`: find a plan by machine, for a published model or for sizes that are given.

`--published` compares predictions with published runs. `--profile` measures a model here, plans and
runs it.
"""

import argparse
import json
import re
from collections.abc import Callable
from dataclasses import asdict, replace

from minidist.cli.arguments import (
    add_flag,
    add_json,
    add_option,
    add_timeout,
    add_transport,
    at_most,
    number,
    short,
    whole,
)
from minidist.errors import WrongInput

MOST = whole(1_048_576, "the search looks at every divisor of it")
UNITS = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
UNITS |= {f"{name}i": 1024**i for i, name in enumerate("KMGT", 1)}
MOST_AMOUNT, NO_MACHINE = 1e24, "no machine has more"
SHARE = number("a share of --flops", 1, "products do not beat the peak", above=True)
DIMENSION = whole(1_048_576, "no matrix is larger")
RATES = {  # of the machine of --model: default, unit, what it is
    "memory": ("80GB", "B", "bytes that a rank can hold"),
    "flops": ("312T", "", "operations per second of a rank's products"),
    "link": ("300GB", "B", "bytes per second that a rank sends inside its node"),
    "network": ("25GB", "B", "bytes per second that a rank sends to other nodes"),
    "memory-bandwidth": ("2TB", "B", "bytes per second to a rank's own memory"),
    "latency": ("0.000005", "", "seconds of a message"),
}
GIVEN = (
    ("layers", "width", "heads"),
    {"sequence": 2048, "vocab": 50257},
)  # of a model, with defaults
MOST_PROFILED = 2048  # positions
LISTED = {  # how it is read, default, what it is
    "top": (whole(100, "each is simulated"), 3, "best plans to simulate"),
    "others": (whole(1000, "each is simulated", 0), 10, "other meshes, each by its best plan"),
}
SIZES = {  # of a Transformer: default and bound of what --profile measures, bound of a plan's
    "layers": (6, 1000, 10_000),
    "width": (64, 2048, 1_048_576),
    "heads": (None, 0, 1_048_576),
    "sequence": (64, MOST_PROFILED, 1_048_576),
    "vocab": (512, 100_000, 1_048_576),
}
USED = {  # of the options without a default: those that each way uses
    "profile": ("layers", "width", "sequence", "vocab", "bandwidth"),
    "published": ("efficiency",),
    "model": (*SIZES, "batch", "schedules", "efficiency", "plot"),
}


EXAMPLES = (
    "minidist plan --model 175b --ranks 1024",
    "minidist plan --layers 40 --width 5120 --heads 40 --ranks 64 --batch 512 --plot plans.png",
    "minidist plan --published",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command and add its arguments."""
    parser.description = (
        "Search the plan with the fastest step among all meshes, schedules and options that fit a "
        "machine with these rates; the others say why they are worse. --published: predicted and "
        "published seconds of known runs. --profile: measure the layers of a small Transformer on "
        "ranks of this machine, let PipeDream's planner give them to stages with replicas, run "
        "the plan, and certify that its weights are, bit for bit, a replay's."
    )
    ways = parser.add_mutually_exclusive_group()
    add_option(ways, "--model", "search a plan for it: 124m to 1008b", metavar="NAME")
    add_flag(ways, "--published", "published runs, and what is predicted for them")
    add_flag(ways, "--profile", "profile, plan, run and certify")
    sizes = parser.add_argument_group("a Transformer of any size", "for a search, or for --profile")
    for name, (small, _, most) in SIZES.items():
        reader = whole(most, "a plan for more is of no use")
        defaults = {"default": GIVEN[1].get(name), "--profile": small}
        words = ", ".join(f"{way}: {n}" for way, n in defaults.items() if n)
        add_option(sizes, f"--{name}", f"of the model{f' ({words})' if words else ''}", reader, "N")
    add_option(sizes, "--batch", "examples of a step (default: one per rank)", MOST)
    machine = parser.add_argument_group("a machine")
    add_option(machine, "--ranks", "in all", MOST, default=2)
    add_option(machine, "--per-node", "ranks of a node", MOST, default=8)
    for name, (usual, unit, meaning) in RATES.items():
        add_option(machine, f"--{name}", meaning, amount(unit, usual), default=usual)
    words = "share of --flops that products come to, or by their smallest dimension: "
    words += "64:0.2,512:0.6 (default: 0.58, what published runs ask for; see --published)"
    add_option(machine, "--efficiency", words, shares, "SHARE")
    shown = parser.add_argument_group("a search")
    for name, (how, number_of, meaning) in LISTED.items():
        add_option(shown, f"--{name}", meaning, how, default=number_of)
    words = "to try (default: all; 1f1b and interleaved on more than 4,096 ranks)"
    add_option(shown, "--schedules", words, metavar="NAME,NAME")
    add_option(shown, "--plot", "draw seconds and bytes of the listed plans", metavar="FILE")
    profile = parser.add_argument_group("--profile")
    rate = number("a number of bytes per second", MOST_AMOUNT, NO_MACHINE, above=True)
    words = "per second, for which --profile plans (default: measured)"
    add_option(profile, "--bandwidth", words, rate, "BYTES")
    words = "what PipeDream's planner counts, see planning/pipedream.py"
    add_option(profile, "--cost", words, choices=["paper", "released"], default="paper")
    add_transport(profile)
    add_timeout(profile)
    add_json(parser)
    parser.set_defaults(run=run)


def amount(unit: str, usual: str) -> Callable[[str], float]:
    """Return a reader of numbers such as 80GB, 312T or 64GiB; a few of a unit are a slip."""
    end = usual.lstrip("0123456789.")

    def read(text: str) -> float:
        found = re.fullmatch(rf"(\d+(?:\.\d+)?)([kMGTP]?|[KMGT]i)(?:{unit})?", text, re.ASCII)
        if found is None:
            raise argparse.ArgumentTypeError(
                f"{short(text)} is not an amount; write one as 80G{unit}"
            )
        if end and not found[2] and float(found[1]) < 1e6:
            raise argparse.ArgumentTypeError(f"{short(text)} is too small; write {found[1]}{end}")
        if (result := float(found[1]) * UNITS[found[2]]) > MOST_AMOUNT:
            raise argparse.ArgumentTypeError(
                f"{short(text)} is too large; {at_most(MOST_AMOUNT, NO_MACHINE)}"
            )
        return result

    return read


def shares(text: str) -> float | tuple[tuple[int, float], ...]:
    """Read 0.58, or 64:0.2,512:0.6."""
    if ":" not in text:
        return SHARE(text)
    pairs = (part.partition(":") for part in text.split(","))
    return tuple((DIMENSION(dimension), SHARE(share)) for dimension, _, share in pairs)


def run(given: argparse.Namespace) -> int:
    """Do what was asked for; return 1 if the run of a plan is not certified."""
    ways = {"published": published, "profile": profiled}
    way = next((name for name in ways if getattr(given, name)), "model")
    for name in dict.fromkeys(sum(USED.values(), ())):
        if getattr(given, name) is not None and name not in USED[way]:
            raise WrongInput(f"--{way} does not use --{name}; leave it out")
    return ways.get(way, searched)(given)


def published(given: argparse.Namespace) -> int:
    """Print published runs: measured and predicted seconds of a step, and MFU."""
    from minidist.planning.plans.plan import EFFICIENCY
    from minidist.planning.plans.published import HEAD, deepseek_text, line, rows, summary

    found = rows(given.efficiency or EFFICIENCY)
    if given.json:
        print(json.dumps(found, indent=2))
    else:
        print("\n".join([HEAD, *map(line, found), summary(found), "", deepseek_text()]))
    return 0


def profiled(given: argparse.Namespace) -> int:
    """Print what was measured, and the plan; return 1 if the run of the plan is not certified."""
    from minidist.observe import profile

    sizes = {name: getattr(given, name) or usual for name, (usual, *_) in SIZES.items() if usual}
    for name, n in sizes.items():
        if n > (most := SIZES[name][1]):
            raise WrongInput(f"--profile has its arrays in memory; use --{name} {most} or less")
    if not given.json:
        print(f"measuring a Transformer on {given.ranks} ranks", flush=True)  # takes a while
    model, inputs, targets = profile.example(**sizes)
    found = profile.profile_and_run(
        model,
        inputs,
        targets,
        given.ranks,
        given.bandwidth,
        given.cost,
        given.transport,
        given.timeout,
    )
    print(json.dumps([found.row()], indent=2) if given.json else profile.text(found))
    return 0 if found.certificate["ok"] else 1


def size_given(given: argparse.Namespace):
    """Return (the model in words, its size): of a name with what was given in its place; or all."""
    from minidist.planning import TransformerSize
    from minidist.planning.plans.published import size_of

    needed, usual = GIVEN
    own = {name: n for name in SIZES if (n := getattr(given, name)) is not None}
    if given.model is not None:
        changed = ", ".join(f"{name} {n}" for name, n in own.items())
        title = " with ".join(filter(None, [given.model, changed]))
        return title, replace(size_of(given.model), **own)
    if missing := [f"--{name}" for name in needed if name not in own]:
        raise WrongInput(f"give --model NAME, or the sizes of a model: {', '.join(missing)}")
    return "a Transformer", TransformerSize(**(usual | own))


def searched(given: argparse.Namespace) -> int:
    """Print the best plans, some of the others, and why they are worse."""
    from minidist.observe.style import plan_figure
    from minidist.observe.timeline import FIGURES, check_path
    from minidist.planning import Machine, search
    from minidist.planning.plans import why
    from minidist.planning.plans.plan import EFFICIENCY
    from minidist.planning.plans.published import RUNS
    from minidist.planning.plans.search import tried

    ending = given.plot and check_path(given.plot, "a plot", FIGURES)
    (name, size), batch = size_given(given), given.batch or given.ranks
    rates = {name: getattr(given, name) for name in (r.replace("-", "_") for r in RATES)}
    share = given.efficiency or EFFICIENCY
    machine = Machine(given.ranks, given.per_node, **rates, efficiency=share)
    schedules = tried(given.ranks, given.schedules and given.schedules.split(","))
    title = (
        f"{name}: {size.parameters / 1e9:.1f} billion parameters, "
        f"{batch} examples of {size.sequence} tokens, {given.ranks} ranks, "
        f"{given.per_node} in a node"
    )
    if not given.json:
        by = " (by smallest dimension)" if isinstance(share, tuple) else ""
        print(f"{title}\nproducts at {share}{by} of {given.flops / 1e12:g} TFLOP/s\n")
        print(
            f"{'step':>10} {'holds':>9} {'MFU':>5}  plan: why it is worse", flush=True
        )  # the search takes some seconds
    found = search(size, machine, batch, given.top, schedules=schedules, others=given.others)
    if given.json:
        more = ({"fits": e.fits, "held": e.held, "mfu": e.mfu} for e in found)
        print(json.dumps([asdict(e) | own for e, own in zip(found, more, strict=True)], indent=2))
        return 0
    fit, misfits = [e for e in found if e.fits], [e for e in found if not e.fits]
    for one in fit:
        print(f"{why.line(one)}\n{'':28}{why.where(one)}")
        if one is fit[0] and one.plan.zero not in {run.plan.zero for run in RUNS}:
            print(f"{'':28}no published run with ZeRO {one.plan.zero}; see --published")
    if few := misfits[: given.others]:
        print("\ndoes not fit:", *map(why.line, few), sep="\n")
    print(
        f"\n{len(fit)} listed plans fit, {len(misfits)} do not\n{why.LEGEND}\n"
        f"Schedules tried: {', '.join(schedules)}; --schedules names others\n{why.NOT_TRIED}"
    )
    if given.plot:
        drawn = plan_figure(fit, title)
        drawn.savefig(given.plot, metadata=FIGURES[ending])
    return 0
