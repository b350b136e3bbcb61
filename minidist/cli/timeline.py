"""`minidist timeline`: a schedule as a picture and in numbers, simulated, or measured as well."""

import shutil
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from minidist.cli.options import (
    DEVICE,
    RANKS,
    TIMEOUT,
    Command,
    argument,
    exact_time,
    exact_times,
    flag,
    option,
    whole,
)
from minidist.errors import WrongInput
from minidist.events import EventLog
from minidist.observe import timeline
from minidist.pipeline_parallel import SCHEDULES, add_reductions, programs, read, validate
from minidist.pipeline_parallel.actions import (
    COMPUTE,
    Programs,
    Reduce,
    last_stage,
    micro_batches_of,
)
from minidist.pipeline_parallel.schedules import takes
from minidist.planning import Simulation, simulate

DURATIONS = {  # of the simulator, with the usual values
    "forward": 1,
    "backward_input": 1,
    "backward_weight": 1,
    "update": 1,
    "latency": 0,
    "overhead": 0,
    "reduce": 0,
}
SHAPE = {"schedule": "1f1b", "pp": 4, "micro_batches": 8, "chunks": 1}  # --program refuses them
MOST_ROWS = 1_000  # of a picture: a rank has one
MOST_DRAWN = 20_000  # forward, over all ranks: they are simulated and drawn in seconds
SEARCHED = "zb_auto", "v_half", "v_min"  # orders that take a while to find
ROWS = whole(MOST_ROWS, "a picture has a row for each")
PASSES = whole(MOST_DRAWN, "every forward pass is simulated and drawn")
Time = int | Fraction | list[int | Fraction] | None


class Order(NamedTuple):
    """The actions that are drawn: a schedule's name or programs; of programs, chunks is None."""

    schedule: str | Programs
    ranks: int
    micro_batches: int
    chunks: int | None

    @property
    def stages(self) -> int:
        if isinstance(self.schedule, str):
            return self.ranks * (self.chunks or 1)
        return 1 + last_stage(self.schedule.placement)


@dataclass
class TimelineCommand(Command):
    """Draw a schedule as the papers do, a row per rank and a cell per action, with its
    makespan, bubbles and stash. Durations are of one full stage: 1, 0.5, 1/3, or one per
    rank or virtual stage: 1,2,1,1."""

    EXAMPLES = (
        "minidist timeline 1f1b",
        "minidist timeline zb_v --pp 4 --micro-batches 8 --out zb_v.svg",
        "minidist timeline gpipe --pp 2 --measured",
    )
    name: str | None = argument(", ".join(SCHEDULES), "SCHEDULE", nargs="?", choices=SCHEDULES)
    schedule: str | None = option(
        "the same as SCHEDULE (default: 1f1b)", metavar="NAME", choices=SCHEDULES
    )
    pp: int | None = option("ranks of the pipeline (default: 4)", ROWS)
    micro_batches: int | None = option("of one batch (default: 8)", PASSES)
    chunks: int | None = option(
        "stages per rank, of a schedule that takes any number; a V has 2 (default: 1)", PASSES
    )
    memory: int | None = option(
        "of zb_auto: most micro-batches in flight on a rank (default: any number)", PASSES, "M"
    )
    program: str | None = option(
        "an order of your own, instead of a schedule: a text (or PyTorch's CSV) as "
        "pipeline_parallel.write writes it",
        metavar="FILE",
    )
    forward: Time = option("duration of F (default: 1)", exact_times, "T")
    backward_input: Time = option("duration of I; B is I and W (default: 1)", exact_times, "T")
    backward_weight: Time = option("duration of W (default: 1)", exact_times, "T")
    update: Time = option(
        "duration of U, which only asynchronous schedules have (default: 1)", exact_times, "T"
    )
    latency: Time = option("time of a transfer to another rank (default: 0)", exact_time, "T")
    overhead: Time = option(
        "time that a transfer keeps its sender busy (default: 0)", exact_time, "T"
    )
    reduce: Time = option(
        "add R, the sum of a stage's gradients over copies of it: its duration (default: 0)",
        exact_times,
        "T",
    )
    measured: bool = flag(
        "run it on real processes, and simulate it with the times measured; zb_auto is searched "
        "for the times of a run before",
    )
    dp: int = option(
        "with --measured, copies of the pipeline, whose gradients are summed at R", RANKS, default=1
    )
    timeout: float | None = option(*TIMEOUT)
    device: str = option(DEVICE, default="cpu")
    out: str | None = option(
        ".txt, .json (Chrome trace, for Perfetto), .png, .pdf, .svg", metavar="FILE"
    )

    def run(self) -> int:
        """Print the picture and the numbers; write the file."""
        order = self.order()
        self.check(order)
        durations = {name: self.asked[name] for name in DURATIONS if name in self.asked}
        schedule, end = order.schedule, f", {order.stages} stages"
        if isinstance(schedule, str):
            options = {n: time for n, time in durations.items() if n in takes(schedule)}
            options |= {} if self.memory is None else {"memory": self.memory}
            end = f", {order.chunks} chunks" if order.chunks != 1 else ""
        title = f"{self.program or schedule}: {order.ranks} ranks, {order.micro_batches} "
        title += f"micro-batches{end}"
        if schedule in SEARCHED:
            print(f"{title}\n", flush=True)
        if isinstance(schedule, str):
            built = programs(
                schedule, order.ranks, order.micro_batches, order.chunks or 1, **options
            )
        else:
            built, options = schedule, {}
        if self.reduce is not None:
            built = add_reductions(built)
        if schedule not in SEARCHED:  # an order that cannot be built is an error without a title
            print(f"{title}\n", flush=True)
        width = min(max(shutil.get_terminal_size((100, 24)).columns, 40), 200)
        simulation = simulate(built, **(DURATIONS | durations))
        if self.measured:
            log = self.print_measured(order, options, width)
        else:
            log = simulation.timeline
            print(f"{timeline.text(log, width)}\n\n{in_words(simulation)}")
        if self.out is not None:
            timeline.save(log, self.out, title, width)
            print(f"\nwritten: {self.out}")
        return 0

    def order(self) -> Order:
        """Return the order to draw; of a file, its programs and their sizes."""
        if self.name is not None:
            twice = f"{self.name} and --schedule {self.schedule}; leave one of them out"
            self.refuse(["schedule"], twice)
            self.asked["schedule"] = self.name
        if self.program is None:
            return Order(*(self.asked.get(name, usual) for name, usual in SHAPE.items()))
        complete = "the file of --program says all of its order; leave {} out"
        self.refuse([*SHAPE, "memory"], complete)
        order = read(Path(self.program))
        validate(order, len(order), micro_batches_of(order))
        return Order(order, len(order), micro_batches_of(order), None)

    def check(self, order: Order) -> None:
        """Raise ValueError for what cannot be drawn, before anything runs."""
        if self.measured:
            self.refuse(DURATIONS, "--measured takes all times from the run; leave {} out")
        else:
            remedy = "; add --measured, or leave {} out"
            self.refuse(["device"], f"a simulation needs no device{remedy}")
            self.refuse(["dp"], f"a simulation has one copy of a pipeline{remedy}")
        if self.device != "cpu":
            from minidist.backend import check_device  # needs NumPy

            check_device(self.device)
        if self.out is not None:
            timeline.check_path(self.out)
        if order.ranks > MOST_ROWS:
            raise WrongInput(
                f"{order.ranks} ranks are too many rows for a picture; use {MOST_ROWS} programs or "
                "fewer"
            )
        if (passes := order.stages * order.micro_batches) > MOST_DRAWN:
            raise WrongInput(
                f"{order.stages} stages and {order.micro_batches} micro-batches make {passes} "
                f"forward passes, more than the {MOST_DRAWN} that are drawn; use fewer "
                "micro-batches"
            )

    def print_measured(self, order: Order, options: dict, width: int) -> EventLog:
        """Run a schedule, print the real and the simulated picture; return the real log."""
        from minidist.comm.local import limits  # needs NumPy, as does the next one
        from minidist.observe.measure_pipeline import WARM_UP, measure_pipeline, measured_times

        where = {"timeout": self.timeout, "device": self.device, "copies": self.dp, **options}
        where |= measured_times(*order, **where)
        real = measure_pipeline(*order, **where)
        end = max(real.makespan, real.simulation.makespan)
        times = [
            f"  {kind.sign} {' '.join(f'{s * 1e3:.2f}' for s in real.durations[kind.sign])} ms"
            for kind in (*COMPUTE, Reduce)
            if any(real.durations[kind.sign])
        ]
        print(
            f"measured: the step of median makespan, of {len(real.makespans)} after {WARM_UP} to "
            "warm up; one BLAS thread per rank\n"
            f"{timeline.text(real.log, width, end)}\n\n"
            "simulated, with the times of the run, stage by stage:",
            *times,
            f"  a send {real.overhead * 1e3:.2f} ms, a message {real.latency * 1e3:.2f} ms",
            f"{timeline.text(real.simulation.timeline, width, end)}\n\n{in_words(real.simulation)}",
            f"measured     {amount(real.makespan, 's')}: {real.ratio:.2f} times the simulated "
            "makespan",
            sep="\n",
        )
        cores, ranks = limits.cores(), order.ranks * self.dp
        if ranks > cores:
            print(f"{ranks} ranks share {cores} cores, which the simulation does not know")
        return real.log


def in_words(simulation: Simulation) -> str:
    """Return makespan, bubbles and stash as lines."""
    peaks = " ".join(f"{float(peak):g}" for peak in simulation.peak_stash)
    return "\n".join(
        (
            f"makespan     {amount(simulation.makespan, simulation.unit)}",
            f"bubble       {float(simulation.bubble):.1%} of ranks x makespan is idle",
            f"span bubble  {float(simulation.span_bubble):.1%}, counted from each rank's own start",
            f"peak stash   {peaks}: per rank, the most forward passes that wait for their backward",
        )
    )


def amount(time, unit: str) -> str:
    return f"{time * 1e3:.1f} ms" if unit == "s" else f"{float(time):g} {unit}"
