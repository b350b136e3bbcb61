"""`minidist plan`: find a plan by machine, for a published model or for sizes that are given.

`--published` compares predictions with published runs. `--profile` measures a model here, plans and
runs it.
"""

import argparse
import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

from minidist.cli.options import (
    JSON,
    TIMEOUT,
    TRANSPORT,
    Command,
    at_most,
    flag,
    number,
    option,
    short,
    whole,
)
from minidist.errors import WrongInput

UNITS = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
UNITS |= {f"{name}i": 1024**i for i, name in enumerate("KMGT", 1)}
MOST_AMOUNT, NO_MACHINE = 1e24, "no machine has more"
SHARE = number("a share of --flops", 1, "products do not beat the peak", above=True)
DIMENSION = whole(1_048_576, "no matrix is larger")
RANKS = whole(1_048_576, "the search looks at every divisor of it")
EACH = "each is simulated"
USUAL = {"sequence": 2048, "vocab": 50257}  # of a model whose sizes are given
PROFILED = {  # sizes of what --profile measures: usual and most
    "layers": (6, 1000),
    "width": (64, 2048),
    "sequence": (64, 2048),
    "vocab": (512, 100_000),
}
SIZES = "layers", "width", "heads", "sequence", "vocab"
RATES = "memory", "flops", "link", "network", "memory_bandwidth", "latency"
USED = {  # of the options without a default: those that each way uses
    "profile": ("layers", "width", "sequence", "vocab", "bandwidth"),
    "published": ("efficiency",),
    "model": (*SIZES, "batch", "schedules", "efficiency", "plot"),
}


def amount(unit: str, usual: str) -> Callable[[str], float]:
    """Return a reader of numbers such as 80GB, 312T or 64GiB; a few of a unit are a slip."""
    end = usual.lstrip("0123456789.")

    def read(text: str) -> float:
        parts = re.fullmatch(rf"(\d+(?:\.\d+)?)([kMGTP]?|[KMGT]i)(?:{unit})?", text, re.ASCII)
        if parts is None:
            raise argparse.ArgumentTypeError(
                f"{short(text)} is not an amount; write one as 80G{unit}"
            )
        if end and not parts[2] and float(parts[1]) < 1e6:
            raise argparse.ArgumentTypeError(f"{short(text)} is too small; write {parts[1]}{end}")
        if (result := float(parts[1]) * UNITS[parts[2]]) > MOST_AMOUNT:
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


def size(name: str) -> Any:
    """Return the option of a size of a Transformer."""
    defaults = {"default": USUAL.get(name), "--profile": PROFILED.get(name, (None,))[0]}
    words = ", ".join(f"{way}: {n}" for way, n in defaults.items() if n)
    most = 10_000 if name == "layers" else 1_048_576
    read = whole(most, "a plan for more is of no use")
    return option(f"of the model{f' ({words})' if words else ''}", read, "N")


def rate(usual: str, unit: str, meaning: str) -> Any:
    """Return the option of a rate of the machine."""
    return option(meaning, amount(unit, usual), default=usual)


@dataclass
class PlanCommand(Command):
    """Search the plan with the fastest step among all meshes, schedules and options that fit a
    machine with these rates; the others say why they are worse. --published: predicted and
    published seconds of known runs. --profile: measure the layers of a small Transformer on
    ranks of this machine, let PipeDream's planner give them to stages with replicas, run
    the plan, and certify that its weights are, bit for bit, a replay's."""

    EXAMPLES = (
        "minidist plan --model 175b --ranks 1024",
        "minidist plan --layers 40 --width 5120 --heads 40 --ranks 64 --batch 512 --plot plans.png",
        "minidist plan --published",
    )
    GROUPS: ClassVar = {
        "|": "model published profile",
        "a Transformer of any size: for a search, or for --profile": " ".join([*SIZES, "batch"]),
        "a machine": " ".join(["ranks per_node", *RATES, "efficiency"]),
        "a search": "top others schedules plot",
        "--profile": "bandwidth cost transport timeout",
        "": "json",
    }
    model: str | None = option("search a plan for it: 124m to 1008b", metavar="NAME")
    published: bool = flag("published runs, and what is predicted for them")
    profile: bool = flag("profile, plan, run and certify")
    layers: int | None = size("layers")
    width: int | None = size("width")
    heads: int | None = size("heads")
    sequence: int | None = size("sequence")
    vocab: int | None = size("vocab")
    batch: int | None = option("examples of a step (default: one per rank)", RANKS)
    ranks: int = option("in all", RANKS, default=2)
    per_node: int = option("ranks of a node", RANKS, default=8)
    memory: float = rate("80GB", "B", "bytes that a rank can hold")
    flops: float = rate("312T", "", "operations per second of a rank's products")
    link: float = rate("300GB", "B", "bytes per second that a rank sends inside its node")
    network: float = rate("25GB", "B", "bytes per second that a rank sends to other nodes")
    memory_bandwidth: float = rate("2TB", "B", "bytes per second to a rank's own memory")
    latency: float = rate("0.000005", "", "seconds of a message")
    efficiency: Any = option(
        "share of --flops that products come to, or by their smallest dimension: 64:0.2,512:0.6 "
        "(default: 0.58, what published runs ask for; see --published)",
        shares,
        "SHARE",
    )
    top: int = option("best plans to simulate", whole(100, EACH), default=3)
    others: int = option("other meshes, each by its best plan", whole(1000, EACH, 0), default=10)
    schedules: str | None = option(
        "to try (default: all; 1f1b and interleaved on more than 4,096 ranks)", metavar="NAME,NAME"
    )
    plot: str | None = option("draw seconds and bytes of the listed plans", metavar="FILE")
    bandwidth: float | None = option(
        "per second, for which --profile plans (default: measured)",
        number("a number of bytes per second", MOST_AMOUNT, NO_MACHINE, above=True),
        "BYTES",
    )
    cost: str = option(
        "what PipeDream's planner counts, see planning/pipedream.py",
        choices=["paper", "released"],
        default="paper",
    )
    transport: str = option(*TRANSPORT)
    timeout: float | None = option(*TIMEOUT)
    json: bool = flag(JSON)

    def run(self) -> int:
        """Search, profile or compare; return 1 if the run of a plan is not certified."""
        way = "profile" if self.profile else "published" if self.published else "model"
        unused = [name for name in dict.fromkeys(sum(USED.values(), ())) if name not in USED[way]]
        self.refuse(unused, f"--{way} does not use {{}}; leave it out")
        if self.profile:
            return self.run_profile()
        return self.run_published() if self.published else self.run_search()

    def run_published(self) -> int:
        """Print published runs: measured and predicted seconds of a step, and MFU."""
        from minidist.planning.plans.plan import EFFICIENCY
        from minidist.planning.plans.published import HEAD, deepseek_text, line, rows, summary

        runs = rows(self.efficiency or EFFICIENCY)
        if self.json:
            print(json.dumps(runs, indent=2))
        else:
            print("\n".join([HEAD, *map(line, runs), summary(runs), "", deepseek_text()]))
        return 0

    def run_profile(self) -> int:
        """Print the profile and the plan; return 1 if the run of the plan is not certified."""
        from minidist.observe import profile

        sizes = {name: getattr(self, name) or usual for name, (usual, _) in PROFILED.items()}
        for name, n in sizes.items():
            if n > (most := PROFILED[name][1]):
                raise WrongInput(f"--profile has its arrays in memory; use --{name} {most} or less")
        if not self.json:
            print(f"measuring a Transformer on {self.ranks} ranks", flush=True)  # takes a while
        model, inputs, targets = profile.example(**sizes)
        plan = profile.profile_and_run(
            model,
            inputs,
            targets,
            self.ranks,
            self.bandwidth,
            self.cost,
            self.transport,
            self.timeout,
        )
        print(json.dumps([plan.row()], indent=2) if self.json else profile.text(plan))
        return 0 if plan.certificate["ok"] else 1

    def model_size(self):
        """Return (the model in words, its size): of a name, but for the sizes given; or all."""
        from minidist.planning import TransformerSize
        from minidist.planning.plans.published import size_of

        sizes = {name: self.asked[name] for name in SIZES if name in self.asked}
        if self.model is not None:
            changed = ", ".join(f"{name} {n}" for name, n in sizes.items())
            title = " with ".join(filter(None, [self.model, changed]))
            return title, replace(size_of(self.model), **sizes)
        if missing := [f"--{name}" for name in ("layers", "width", "heads") if name not in sizes]:
            raise WrongInput(f"give --model NAME, or the sizes of a model: {', '.join(missing)}")
        return "a Transformer", TransformerSize(**(USUAL | sizes))

    def run_search(self) -> int:
        """Print the best plans, some of the others, and why they are worse."""
        from minidist.observe.style import plan_figure
        from minidist.observe.timeline import FIGURES, check_path
        from minidist.planning import Machine, search
        from minidist.planning.plans import why
        from minidist.planning.plans.plan import EFFICIENCY
        from minidist.planning.plans.published import RUNS
        from minidist.planning.plans.search import tried

        ending = check_path(self.plot, "a plot", FIGURES) if self.plot else ""
        (name, size), batch = self.model_size(), self.batch or self.ranks
        share = self.efficiency or EFFICIENCY
        rates = {name: getattr(self, name) for name in RATES}
        machine = Machine(self.ranks, self.per_node, **rates, efficiency=share)
        schedules = tried(self.ranks, self.schedules and self.schedules.split(","))
        title = (
            f"{name}: {size.parameters / 1e9:.1f} billion parameters, "
            f"{batch} examples of {size.sequence} tokens, {self.ranks} ranks, "
            f"{self.per_node} in a node"
        )
        if not self.json:
            by = " (by smallest dimension)" if isinstance(share, tuple) else ""
            print(f"{title}\nproducts at {share}{by} of {self.flops / 1e12:g} TFLOP/s\n")
            head = f"{'step':>10} {'holds':>9} {'MFU':>5}  plan: why it is worse"
            print(head, flush=True)  # the search takes some seconds
        plans = search(size, machine, batch, self.top, schedules=schedules, others=self.others)
        if self.json:
            rows = [asdict(e) | {"fits": e.fits, "held": e.held, "mfu": e.mfu} for e in plans]
            print(json.dumps(rows, indent=2))
            return 0
        fit, misfits = [e for e in plans if e.fits], [e for e in plans if not e.fits]
        for estimate in fit:
            print(f"{why.line(estimate)}\n{'':28}{why.where(estimate)}")
            zero = estimate.plan.zero
            if estimate is fit[0] and zero not in {run.plan.zero for run in RUNS}:
                print(f"{'':28}no published run with ZeRO {zero}; see --published")
        if few := misfits[: self.others]:
            print("\ndoes not fit:", *map(why.line, few), sep="\n")
        print(
            f"\n{len(fit)} listed plans fit, {len(misfits)} do not\n{why.LEGEND}\n"
            f"Schedules tried: {', '.join(schedules)}; --schedules names others\n{why.NOT_TRIED}"
        )
        if self.plot:
            plan_figure(fit, title).savefig(self.plot, metadata=FIGURES[ending])
        return 0
