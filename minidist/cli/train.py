"""`minidist train`: train a small model on several ranks, then certify its gradients.

`minidist translate`: use a model that it has saved.
"""

import argparse
import sys
import time
from dataclasses import Field, dataclass, fields
from typing import Any, ClassVar

import numpy as np

from minidist import nn
from minidist.backend import check_device
from minidist.checkpoint import Keep, Saved, manifest
from minidist.checkpoint.run_checkpoints import (
    DESCRIPTION,
    changes,
    description_in,
    settings_in,
    steps_done_and_next,
)
from minidist.checkpoint.writing import MOST_STEPS
from minidist.cli.options import (
    DEVICE,
    RANKS,
    STEPS,
    TIMEOUT,
    TRANSPORT,
    Command,
    argument,
    check_several,
    flag,
    option,
    option_of,
    reader,
    whole,
)
from minidist.comm import run as run_on_ranks
from minidist.comm.mpi import library as mpi
from minidist.errors import WrongInput, plural
from minidist.observe.style import save_loss_curve
from minidist.observe.timeline import FIGURES, check_path
from minidist.pipeline_parallel.schedules import SCHEDULES
from minidist.training.elastic import train_elastic
from minidist.training.kinds import KINDS, MODELS, Data, kind_of, load, model_of
from minidist.training.loop import train, warm_up_and_decay
from minidist.training.presets import PRESETS, chosen
from minidist.training.servers import plan_in_words, traffic_in_words, train_with_servers
from minidist.training.settings import DEFAULTS, OF_MESHES, OF_SERVERS, Settings, mesh_in_words
from minidist.training.setup import description
from minidist.training.translation import translate
from minidist.verify.certificate import certify, replayed
from minidist.verify.compare import BOUND

CHOICES: dict[str, list] = {  # of settings
    "model": [*MODELS],
    "optimizer": ["adamw", "muon"],
    "zero": [0, 1, 2, 3],
    "schedule": [name for name, schedule in SCHEDULES.items() if not schedule.asynchronous],
    "precision": ["float32", "float16", "bfloat16", "bfloat16-stochastic", "float8"],
}


NOT_WITH_SERVERS = {  # options that a ServerPlan does not know: why they have no meaning there
    "dp": "the workers share every batch; use --ranks",
    "schedule": "no worker has a pipeline",
    "micro_batches": "no worker has a pipeline",
    "elastic": "the weights of a server that dies are gone",
    "resume": "resume without servers, which read the same checkpoints",
    "resume_from": "resume without servers, which read the same checkpoints",
    "every": "a checkpoint is made at the end, when the weights are together again",
}
NEED_A_FOLDER = {  # options that need a folder of checkpoints, and for what
    "resume": "where the checkpoints are",
    "resume_from": "where the checkpoints are",
    "every": "where the checkpoints will be",
    "elastic": "to go on from",
}


def option_of_setting(setting: Field) -> dict[str, Any]:
    """Return the keywords of argparse for a setting: None is the default of the data."""
    name, default, help = setting.name, setting.default, setting.metadata["description"]
    how: dict[str, Any] = {"metavar": setting.metadata["metavar"] or None, "default": None}
    if isinstance(default, bool):
        action = argparse.BooleanOptionalAction if default else "store_true"
        return {"action": action, "default": None, "help": help}
    if bound := setting.metadata["bound"]:
        how["type"] = reader(bound)
    if name in CHOICES:
        how["choices"] = CHOICES[name]
        help += f": {', '.join(CHOICES[name])}" if isinstance(default, str) else ""
    if name != "dp":
        others = [
            f"; {kind}: {each.defaults[name]}"
            for kind, each in KINDS.items()
            if name in each.defaults
        ]
        if default is not None:
            help += f" (default: {default}{''.join(others)})"
    return how | {"help": help}


@dataclass
class TrainCommand(Command):
    """Train a small character Transformer on real text, a convolutional network on images of
    digits, or a translator of numbers in words, with several worker processes that sum their
    gradients; then show that, on the trained weights, these gradients equal one device's."""

    EXAMPLES = (
        "minidist train",
        "minidist train --pp 2 --tp 2 --micro-batches 8",
        "minidist train --data numbers --strategy tensor --checkpoint run --plot loss.png",
    )
    GROUPS: ClassVar = {
        "data": "data text direction by batch context shuffle",
        "model": "model width heads kv_heads depth dropout tied experts reconstruction precision",
        "updates": "steps lr optimizer seed",
        "mesh": " ".join(["ranks strategy", *OF_MESHES]),
        "what is shown": "sample log plot",
        "saving": "checkpoint every resume resume_from elastic",
        "parameter servers": " ".join([*OF_SERVERS, "replay"]),
        "machine": "timeout transport device",
    }
    data: str = option(
        "what to learn"
        + "".join(
            f"; {name} takes none of {', '.join(map(option_of, kind.refused))}"
            for name, kind in KINDS.items()
        ),
        choices=KINDS,
        default="text",
    )
    ranks: int | None = option(
        "how many (default: dp x pp x cp x tp; without these 4, or all processes of MPI)", RANKS
    )
    strategy: str | None = option(
        "what the ranks split, in place of the options for each axis: "
        + "; ".join(f"{name}: {preset.splits}" for name, preset in PRESETS.items()),
        metavar="NAME",
        choices=PRESETS,
    )
    sample: int | None = option(
        "characters to sample at the end (default: 300), or numbers to show (default: 10)",
        whole(10_000, "each is a pass of the model", least=0),
        "N",
    )
    log: str | None = option(
        "write a row per step as CSV: loss, learning rate, seconds, and bytes that rank 0 sent "
        "(with servers, the first worker); a run that goes on keeps the rows before its step",
        metavar="FILE",
    )
    plot: str | None = option("draw loss and learning rate: .png, .pdf or .svg", metavar="FILE")
    checkpoint: str | None = option(
        "save weights, optimizer and step there: the last two checkpoints are kept",
        metavar="FOLDER",
    )
    every: int | None = option(f"save every N updates (default: {Keep.every})", STEPS, "N")
    resume: bool = flag("go on from the newest checkpoint, on this mesh or another")
    resume_from: int | None = option(
        "go on from the checkpoint of this step; newer ones are renamed, not removed",
        whole(MOST_STEPS, "the number of a step has 63 bits", least=0),
        "STEP",
    )
    elastic: bool = flag(
        "when a rank dies, go on from the last checkpoint with the ranks that are left"
    )
    replay: bool = flag(
        "then repeat the run on one rank, from the servers' logs, and compare every bit"
    )
    timeout: float | None = option(*TIMEOUT)
    transport: str = option(*TRANSPORT)
    device: str = option(DEVICE, default="cpu")

    @classmethod
    def options(cls) -> dict[str, dict[str, Any]]:
        """Return its own options, those of the kinds of data, and the settings."""
        of_data = {name: dict(how) for kind in KINDS.values() for name, how in kind.options.items()}
        of_settings = {each.name: option_of_setting(each) for each in fields(Settings)}
        return super().options() | of_data | of_settings

    @classmethod
    def add_to(cls, parser: argparse.ArgumentParser) -> None:
        super().add_to(parser)
        parser.usage = "minidist train [options]"

    @np.errstate(all="ignore")  # the error of a loss or a weight that is not finite follows
    def run(self) -> int:
        """Train, show what the model does, certify; return 1 if it is not one device's gradient."""
        check_device(self.device)
        settings = self.settings(self.ranks_without_options())
        keep, data = self.keep(), self.read_data(settings)
        if self.plot is not None:
            check_path(self.plot, "a plot", FIGURES)
        start = (0, []) if keep is None else first_step_and_remarks(keep, data, settings)
        first, remarks = start
        if remarks:
            print("; ".join(remarks))
        model = model_of(data, settings)
        state, settings = self.train(settings, data, model, keep, first)
        model.load_state(state)
        print(kind_of(data).outcome(model, data, self.sample, settings.seed), end="")
        return self.certify(model, data, settings)

    def ranks_without_options(self) -> int:
        """Return the number of ranks if no option says it: 4, or all processes of MPI."""
        if self.transport != "mpi":
            return 4
        processes = mpi.processes()
        if not (self.ranks or self.asked.get("dp")):
            check_several(processes)
        return processes

    def settings(self, default: int) -> Settings:
        """Return the settings, by name, by strategy or by default.

        default  ranks, if no number is given
        """
        asked = self.asked
        if self.strategy is not None:
            asked = asked | chosen(self.strategy, self.ranks or default, asked)
        if not asked.get("servers"):
            alone = "{} says how servers are used; add --servers 1"
            self.refuse([*OF_SERVERS[1:], "replay"], alone)
        else:
            for name, why in NOT_WITH_SERVERS.items():
                conflict = f"do not go together: {why}; leave one of them out"
                self.refuse([name], f"--servers and {{}} {conflict}")
        values = {each.name: asked[each.name] for each in fields(Settings) if each.name in asked}
        dp = data_parallel_ranks(self.ranks, values, default)
        return Settings(**KINDS[self.data].defaults | values | {"dp": dp})

    def read_data(self, settings: Settings) -> Data:
        """Read the data to learn; ValueError if an option is of other data."""
        kind, before = KINDS[self.data], {}
        for name, other in KINDS.items():
            if name != self.data:
                owner = f"is an option of --data {name}, and --data {self.data} learns {kind.unit}"
                self.refuse(other.options, f"{{}} {owner}; leave one of the two out")
        if self.resumes and self.checkpoint is not None:
            saved = Saved.newest(self.checkpoint, self.resume_from)
            before = (description_in(saved) or {}).get("data", {})
        return kind.read(settings, before, **{name: self.asked.get(name) for name in kind.options})

    def keep(self) -> Keep | None:
        """Return the folder to save in and to go on from; ValueError if one is missing."""
        if self.checkpoint is None:
            for name, why in NEED_A_FOLDER.items():
                self.refuse([name], f"{{}} needs --checkpoint FOLDER, {why}")
            return None
        if self.elastic and self.transport != "process":
            why = f", not {self.transport}"
            if self.transport == "mpi":
                why = ": MPI ends all ranks when one dies; start the command again with --resume, "
                why += "and mpiexec with fewer ranks"
            raise WrongInput(f"--elastic needs --transport process{why}")
        return Keep(self.checkpoint, self.every or Keep.every, self.resumes, self.resume_from)

    @property
    def resumes(self) -> bool:
        """Whether the run goes on from a checkpoint."""
        return self.resume or self.resume_from is not None

    def train(
        self,
        settings: Settings,
        data: Data,
        model: nn.Module,
        keep: Keep | None,
        first: int,
    ) -> tuple[dict, Settings]:
        """Train on the ranks; print the data, the ranks and the losses; return weights and mesh."""
        size = sum(p.size for p in model.parameters() if p.requires_grad)
        kind, N = kind_of(data), settings.ranks
        layout = plan_in_words(settings) if settings.servers else mesh_in_words(settings)
        print(
            f"{kind.description(data)['source']}: {kind.size(data)}; {size:,} parameters\n"
            f"{plural(N, 'rank')}, {layout} {settings.batch} {kind.unit}",
            flush=True,
        )
        begin = time.perf_counter()
        where: dict[str, Any] = {"device": self.device, "timeout": self.timeout}
        where["transport"] = self.transport
        if self.elastic and keep is not None:
            losses, state, settings = train_elastic(data, settings, keep, log=self.log, **where)
        else:
            way = train_with_servers if settings.servers else train
            ranks = run_on_ranks(way, N, data, settings, keep, self.log, **where)
            losses, state, *_ = ranks[0]
        seconds = time.perf_counter() - begin
        if settings.servers:
            print(traffic_in_words(ranks))
        if self.replay:
            arrays = replayed(ranks, data, settings, **where)
            print(f"replay of the servers' logs: the same bits in all {arrays} arrays")
        mean = sum(losses[-20:]) / len(losses[-20:])
        print(
            f"{plural(len(losses) - first, 'step')} in {seconds:.0f} s: "
            f"loss {losses[0]:.3f} -> {mean:.3f} nats/{kind.target(data)}"
        )
        print(kind.remark(data, mean), end="")
        if self.plot is not None and (self.transport != "mpi" or mpi.is_first()):
            # Servers have a rate of their own.
            steps = range(first, 0 if settings.servers else len(losses))
            rates = [settings.lr * warm_up_and_decay(step, settings.steps) for step in steps]
            title = kind.description(data)["source"]
            save_loss_curve(self.plot, losses, rates, kind.target(data), title)
            print(f"loss and learning rate: {self.plot}")
        return state, settings

    def certify(self, model: nn.Module, data: Data, settings: Settings) -> int:
        """Print the certificate of the trained weights; return 0 if it is good, else 1."""
        row = certify(model, data, settings, self.transport, self.device)
        against = "against one device"
        if self.device != "cpu":
            against = f"on {self.device} against the host"
        print(
            f"certificate: {'ok' if row['ok'] else 'FAILED'}. {plural(settings.ranks, 'rank')} "
            f"{against}, in float64, {row['case']}:\n"
            f"  largest gradient difference {row['difference']:.1e}; {row['detail']}; "
            f"allowed {BOUND:.0e}"
        )
        return 0 if row["ok"] else 1


def first_step_and_remarks(keep: Keep, data: Data, settings: Settings) -> tuple[int, list[str]]:
    """Return the first step of a run; in words what it goes on from, if it does."""
    run = description(data, settings)
    saved = keep.saved(run, DEFAULTS)
    if not saved:
        return 0, []
    grows = changes(saved.about[DESCRIPTION], run)
    _, first = steps_done_and_next(saved, grows)
    saved.check()
    remarks = [f"goes on after step {saved.step}, from {saved.path}"]
    newer = [str(n) for n in manifest.whole_ones(saved.path.parent) if n > saved.step]
    if newer:
        remarks.append(f"newer ones ({', '.join(newer)}) are renamed to aside-*")
    remarks += grows
    before = settings_in(saved, DEFAULTS)
    if first >= settings.steps:
        remarks.append(f"no update is left of --steps {settings.steps}")
    elif not grows and before["steps"] != settings.steps:
        last = before["lr"] * warm_up_and_decay(first - 1, before["steps"])
        rate = settings.lr * warm_up_and_decay(first, settings.steps)
        by = f"--steps {settings.steps}, not {before['steps']}"
        remarks.append(f"{by}: the learning rate goes on with {rate:.1e}, after {last:.1e}")
    return first, remarks


def data_parallel_ranks(ranks: int | None, asked: dict, default: int) -> int:
    """Return dp; where it is not given it follows from the rest. `default`: ranks, if none is."""
    pp, cp, tp, ep = (asked.get(axis, 1) for axis in ("pp", "cp", "tp", "ep"))
    dp, rest = asked.get("dp"), pp * cp * tp
    if dp is None:
        dp = (ranks or (default if rest * ep == 1 else rest * ep)) // rest
    if ranks not in (None, dp * rest) or dp < 1:
        context = f" x --cp {cp}" if cp > 1 else ""
        raise WrongInput(
            f"--ranks {ranks} is not --dp {dp or 1} x --pp {pp}{context} x --tp {tp}; leave "
            "--ranks out"
        )
    return dp


@dataclass
class TranslateCommand(Command):
    """Translate numbers in words, English to Chinese or back, with the newest checkpoint of
    `minidist train --data numbers --checkpoint FOLDER`, and say whether each is right."""

    EXAMPLES = (
        "minidist translate 321 --checkpoint run",
        'minidist translate 321 "twenty million five" --checkpoint run',
        "minidist translate 99999999 --checkpoint run --beam 8",
    )
    text: list[str] = argument(
        "a number in words of the language that the model reads, or in digits; without one, the "
        "lines of standard input",
        "TEXT",
        nargs="*",
    )
    checkpoint: str = option("where the checkpoints are", metavar="FOLDER", required=True)
    beam: int = option(
        "beginnings that are kept while it writes; 1: the most likely word each time",
        whole(1000, "all beginnings are decoded together, in a second or so"),
        "K",
        default=1,
    )

    def run(self) -> int:
        """Print a line per text, as soon as it is translated."""
        model, data = load(self.checkpoint)
        for text in self.text or (line for line in sys.stdin if line.strip()):
            translation = translate(model, data, text, self.beam)
            right = "  (right)" if translation.written == translation.right else ""
            print(f"{translation}{right}", flush=True)
        return 0
