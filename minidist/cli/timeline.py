"""`minidist timeline`: a schedule as a picture and in numbers, simulated, or measured as well."""

import argparse
import shutil
from pathlib import Path
from typing import NamedTuple

from minidist.cli.arguments import (
    DEFAULT,
    RANKS,
    add_device,
    add_option,
    add_timeout,
    option_of,
    time,
    times,
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

DURATIONS = {  # of the simulator: how each is read, its default, what it is
    "forward": (times, 1, "duration of F"),
    "backward_input": (times, 1, "duration of I; B is I and W"),
    "backward_weight": (times, 1, "duration of W"),
    "update": (times, 1, "duration of U, which only asynchronous schedules have"),
    "latency": (time, 0, "time of a transfer to another rank"),
    "overhead": (time, 0, "time that a transfer keeps its sender busy"),
    "reduce": (times, 0, "add R, the sum of a stage's gradients over copies of it: its duration"),
}
MOST_ROWS = 1_000  # of a picture: a rank has one
MOST_DRAWN = 20_000  # forward, over all ranks: they are simulated and drawn in seconds
SEARCHED = "zb_auto", "v_half", "v_min"  # orders that take a while to find
ROWS = whole(MOST_ROWS, "a picture has a row for each")
PASSES = whole(MOST_DRAWN, "every forward pass is simulated and drawn")
SHAPE = {"schedule": "1f1b", "pp": 4, "micro_batches": 8, "chunks": 1}
OPTIONS: dict[str, dict] = {  # the arguments of add_argument
    "schedule": {"choices": SCHEDULES, "metavar": "NAME", "help": "the same as SCHEDULE"},
    "pp": {"type": ROWS, "help": "ranks of the pipeline"},
    "micro_batches": {"type": PASSES, "help": "of one batch"},
    "chunks": {
        "type": PASSES,
        "help": "stages per rank, of a schedule that takes any number; a V has 2",
    },
    "memory": {
        "type": PASSES,
        "metavar": "M",
        "help": "of zb_auto: most micro-batches in flight on a rank (default: any number)",
    },
    "program": {
        "metavar": "FILE",
        "help": "an order of your own, instead of a schedule: a text (or PyTorch's CSV) as "
        "pipeline_parallel.write writes it",
    },
    **{
        name: {"type": how, "metavar": "T", "help": f"{meaning} (default: {usual})"}
        for name, (how, usual, meaning) in DURATIONS.items()
    },
    "measured": {
        "action": "store_true",
        "help": "run it on real processes, and simulate it with the times measured; zb_auto is "
        "searched for the times of a run before",
    },
    "dp": {
        "type": RANKS,
        "default": 1,
        "help": "with --measured, copies of the pipeline, whose gradients are summed at R"
        + DEFAULT,
    },
}


class Order(NamedTuple):
    """What is drawn: a schedule's name or programs; chunks is None if the programs say them."""

    schedule: str | Programs
    ranks: int
    micro_batches: int
    chunks: int | None

    @property
    def stages(self) -> int:
        if isinstance(self.schedule, str):
            return self.ranks * (self.chunks or 1)
        return 1 + last_stage(self.schedule.placement)


EXAMPLES = (
    "minidist timeline 1f1b",
    "minidist timeline zb_v --pp 4 --micro-batches 8 --out zb_v.svg",
    "minidist timeline gpipe --pp 2 --measured",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command and add its arguments."""
    parser.description = (
        "Draw a schedule as the papers do, a row per rank and a cell per action, with its "
        "makespan, bubbles and stash. Durations are of one full stage: 1, 0.5, 1/3, or one per "
        "rank or virtual stage: 1,2,1,1."
    )
    words = ", ".join(SCHEDULES)
    add_option(parser, "name", words, metavar="SCHEDULE", nargs="?", choices=SCHEDULES)
    for name, options in OPTIONS.items():
        if name in SHAPE:  # run() sets the default: --program refuses what is given
            options = options | {"help": f"{options['help']} (default: {SHAPE[name]})"}
        parser.add_argument(option_of(name), **options)
    add_timeout(parser)
    add_device(parser)
    parser.add_argument(
        "--out", metavar="FILE", help=".txt, .json (Chrome trace, for Perfetto), .png, .pdf, .svg"
    )
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Print the picture and the numbers; write the file."""
    order = _order(given)
    _check(given, order)
    options, title = _options(given), _title(order, given)
    slow = order.schedule in SEARCHED
    if slow:
        print(f"{title}\n", flush=True)
    bare = order.schedule
    if isinstance(bare, str):
        bare = programs(bare, order.ranks, order.micro_batches, order.chunks or 1, **options)
    if given.reduce is not None:
        bare = add_reductions(bare)
    if not slow:
        print(f"{title}\n", flush=True)
    width = min(max(shutil.get_terminal_size((100, 24)).columns, 40), 200)
    durations = {name: usual for name, (_, usual, _) in DURATIONS.items()} | _durations(given)
    simulation = simulate(bare, **durations)
    if given.measured:
        log = _measured(order, options, given, width)
    else:
        log = simulation.timeline
        print(f"{timeline.text(log, width)}\n\n{_in_words(simulation)}")
    if given.out is not None:
        timeline.save(log, given.out, title, width)
        print(f"\nwritten: {given.out}")
    return 0


def _order(given: argparse.Namespace) -> Order:
    """Return what is drawn; of a file, its programs and their sizes."""
    if given.name is not None and given.schedule is not None:
        raise WrongInput(f"{given.name} and --schedule {given.schedule}; leave one of them out")
    given.schedule = given.name or given.schedule
    if given.program is None:
        for name, usual in SHAPE.items():
            if getattr(given, name) is None:
                setattr(given, name, usual)
        return Order(given.schedule, given.pp, given.micro_batches, given.chunks)
    for name in (*SHAPE, "memory"):
        if getattr(given, name) is not None:
            option = option_of(name)
            raise WrongInput(f"the file of --program says all of its order; leave {option} out")
    own = read(Path(given.program))
    validate(own, len(own), micro_batches_of(own))
    return Order(own, len(own), micro_batches_of(own), None)


def _title(order: Order, given: argparse.Namespace) -> str:
    name, end = order.schedule, ""
    if order.chunks is None:
        name, end = given.program, f", {order.stages} stages"
    elif order.chunks > 1:
        end = f", {order.chunks} chunks"
    return f"{name}: {order.ranks} ranks, {order.micro_batches} micro-batches{end}"


def _check(given: argparse.Namespace, order: Order) -> None:
    """Raise ValueError for what cannot be drawn, before anything runs."""
    if given.measured and (durations := _durations(given)):
        option = option_of(next(iter(durations)))
        raise WrongInput(f"--measured takes all times from the run; leave {option} out")
    if given.device != "cpu":
        from minidist.backend import check_device  # needs NumPy

        if not given.measured:
            raise WrongInput("a simulation needs no device; add --measured, or leave --device out")
        check_device(given.device)
    if given.dp > 1 and not given.measured:
        raise WrongInput(
            "a simulation has one copy of a pipeline; add --measured, or leave --dp out"
        )
    if given.out is not None:
        timeline.check_path(given.out)
    if order.ranks > MOST_ROWS:
        raise WrongInput(
            f"{order.ranks} ranks are too many rows for a picture; use {MOST_ROWS} programs or "
            "fewer"
        )
    if (passes := order.stages * order.micro_batches) > MOST_DRAWN:
        raise WrongInput(
            f"{order.stages} stages and {order.micro_batches} micro-batches make {passes} forward "
            f"passes, more than the {MOST_DRAWN} that are drawn; use fewer micro-batches"
        )


def _durations(given: argparse.Namespace) -> dict:
    """Return the durations that were given."""
    found = {name: getattr(given, name) for name in DURATIONS}
    return {name: duration for name, duration in found.items() if duration is not None}


def _options(given: argparse.Namespace) -> dict:
    """Return the options of the schedule: `memory`, and the durations that it is searched for."""
    known = [] if given.program is not None else takes(given.schedule)
    options = {name: time for name, time in _durations(given).items() if name in known}
    return options if given.memory is None else options | {"memory": given.memory}


def _in_words(simulation: Simulation) -> str:
    """Return makespan, bubbles and stash as lines."""
    peaks = " ".join(f"{float(peak):g}" for peak in simulation.peak_stash)
    return "\n".join(
        (
            f"makespan     {_amount(simulation.makespan, simulation.unit)}",
            f"bubble       {float(simulation.bubble):.1%} of ranks x makespan is idle",
            f"span bubble  {float(simulation.span_bubble):.1%}, counted from each rank's own start",
            f"peak stash   {peaks}: per rank, the most forward passes that wait for their backward",
        )
    )


def _amount(time, unit: str) -> str:
    return f"{time * 1e3:.1f} ms" if unit == "s" else f"{float(time):g} {unit}"


def _measured(order: Order, options: dict, given: argparse.Namespace, width: int) -> EventLog:
    """Run a schedule, print the real and the simulated picture; return the real log."""
    from minidist.comm.local import limits  # needs NumPy, as does the next one
    from minidist.observe.measure_pipeline import WARM_UP, measure_pipeline, measured_times

    settings = {"timeout": given.timeout, "device": given.device, "copies": given.dp, **options}
    settings |= measured_times(*order, **settings)
    real = measure_pipeline(*order, **settings)
    end = max(real.makespan, real.simulation.makespan)
    print(
        f"measured: the step of median makespan, of {len(real.makespans)} after {WARM_UP} to warm "
        "up; one BLAS thread per rank\n"
        f"{timeline.text(real.log, width, end)}\n\n"
        f"simulated, with the times of the run, stage by stage:\n{_times_of(real)}\n"
        f"{timeline.text(real.simulation.timeline, width, end)}\n\n{_in_words(real.simulation)}\n"
        f"measured     {_amount(real.makespan, 's')}: {real.ratio:.2f} times the simulated makespan"
    )
    cores, ranks = limits.cores(), order.ranks * given.dp
    if ranks > cores:
        print(f"{ranks} ranks share {cores} cores, which the simulation does not know")
    return real.log


def _times_of(real) -> str:
    """Return a line per kind of action, with its time on each stage, and one for transfers."""
    lines = []
    for kind in (*COMPUTE, Reduce):
        if any(real.durations[kind.sign]):
            each = " ".join(f"{seconds * 1e3:.2f}" for seconds in real.durations[kind.sign])
            lines.append(f"  {kind.sign} {each} ms")
    sends = f"  a send {real.overhead * 1e3:.2f} ms, a message {real.latency * 1e3:.2f} ms"
    return "\n".join([*lines, sends])
