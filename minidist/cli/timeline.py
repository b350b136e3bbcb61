"""`minidist timeline`: a schedule as a picture and in numbers, simulated, or measured as well."""

import argparse
import shutil
from pathlib import Path

from minidist.cli.arguments import (
    DEFAULT,
    RANKS,
    add_device,
    add_timeout,
    option_of,
    time,
    times,
    whole,
)
from minidist.events import EventLog
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
from minidist.tools import timeline

DURATIONS = {  # of the simulator: how each is read, its default, what it is
    "forward": (times, 1, "duration of F"),
    "backward_input": (times, 1, "duration of I; B is I and W"),
    "backward_weight": (times, 1, "duration of W"),
    "update": (times, 1, "duration of U, which only asynchronous schedules have"),
    "latency": (time, 0, "time of a transfer to another rank"),
    "overhead": (time, 0, "time that a transfer keeps its sender busy"),
    "reduce": (times, 0, "add R, the sum of a stage's gradients over copies of it: its duration"),
}
SHAPE = {"schedule": "1f1b", "pp": 4, "micro_batches": 8, "chunks": 1}
MOST_ROWS = 1_000  # of a picture: a rank has one
MOST_DRAWN = 20_000  # forward, over all ranks: they are simulated and drawn in seconds
SEARCHED = "zb_auto", "v_half", "v_min"  # orders that take a while to find
PASSES = whole(MOST_DRAWN, "every forward pass is simulated and drawn")
WHOLE = {  # how each is read, and what it is
    "pp": (whole(MOST_ROWS, "a picture has a row for each"), "ranks of the pipeline"),
    "micro_batches": (PASSES, "of one batch"),
    "chunks": (PASSES, "stages per rank, of a schedule that takes any number; a V has 2"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command and add its arguments."""
    parser.description = (
        "Draw a schedule as the papers do, a row per rank and a cell per action, with its "
        "makespan, bubbles and stash. Durations are of one full stage: 1, 0.5, 1/3, or one per "
        "rank or virtual stage: 1,2,1,1."
    )
    parser.add_argument(
        "--schedule",
        choices=SCHEDULES,
        metavar="NAME",
        help=", ".join(SCHEDULES) + f" (default: {SHAPE['schedule']})",
    )
    for name, (how, meaning) in WHOLE.items():
        parser.add_argument(
            option_of(name),
            type=how,
            help=f"{meaning} (default: {SHAPE[name]})",
        )
    parser.add_argument(
        "--memory",
        type=PASSES,
        metavar="M",
        help="of zb_auto: most micro-batches in flight on a rank (default: any number)",
    )
    parser.add_argument(
        "--program",
        metavar="FILE",
        help="an order of your own, instead of a schedule: a text (or PyTorch's CSV) as "
        "pipeline_parallel.write writes it",
    )
    for name, (how, default, meaning) in DURATIONS.items():
        parser.add_argument(
            option_of(name),
            type=how,
            metavar="T",
            help=f"{meaning} (default: {default})",
        )
    parser.add_argument(
        "--measured",
        action="store_true",
        help="run it on real processes, and simulate it with the times measured; zb_auto is "
        "searched for the times of a run before",
    )
    parser.add_argument(
        "--dp",
        type=RANKS,
        default=1,
        help="with --measured, copies of the pipeline, whose gradients are summed at R" + DEFAULT,
    )
    add_timeout(parser)
    add_device(parser)
    parser.add_argument(
        "--out", metavar="FILE", help=".txt, .json (Chrome trace, for Perfetto), .png, .pdf, .svg"
    )
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Print the picture and the numbers; write the file."""
    shape = _shape(given)
    _check(given, shape)
    options, title = _options(given), _title(shape, given)
    if slow := shape[0] in SEARCHED:
        print(f"{title}\n", flush=True)
    order = shape[0] if given.program is not None else programs(*shape, **options)
    order = order if given.reduce is None else add_reductions(order)
    if not slow:
        print(f"{title}\n", flush=True)
    width = min(max(shutil.get_terminal_size((100, 24)).columns, 40), 200)
    durations = {name: default for name, (_, default, _) in DURATIONS.items()} | _durations(given)
    simulation = simulate(order, **durations)
    if given.measured:
        log = _measured(shape, options, given, width)
    else:
        log = simulation.timeline
        print(f"{timeline.text(log, width)}\n\n{_in_words(simulation)}")
    if given.out is not None:
        timeline.save(log, given.out, title, width)
        print(f"\nwritten: {given.out}")
    return 0


def _shape(given: argparse.Namespace) -> tuple[str | Programs, int, int, int | None]:
    """Return schedule, ranks, micro-batches and chunks; of a file, its programs and their sizes."""
    if given.program is None:
        for name in SHAPE:
            if getattr(given, name) is None:
                setattr(given, name, SHAPE[name])
        return given.schedule, given.pp, given.micro_batches, given.chunks
    for name in (*SHAPE, "memory"):
        if getattr(given, name) is not None:
            option = option_of(name)
            raise ValueError(f"the file of --program says all of its order; leave {option} out")
    own = read(Path(given.program))
    validate(own, len(own), micro_batches_of(own))
    return own, len(own), micro_batches_of(own), None


def _title(shape: tuple, given: argparse.Namespace) -> str:
    schedule, p, m, chunks = shape
    if chunks is None:
        stages = 1 + last_stage(schedule.placement)
        return f"{given.program}: {p} ranks, {m} micro-batches, {stages} stages"
    title = f"{schedule}: {p} ranks, {m} micro-batches"
    return title + (f", {chunks} chunks" if chunks > 1 else "")


def _check(given: argparse.Namespace, shape: tuple) -> None:
    """Raise ValueError for what cannot be drawn, before anything runs."""
    schedule, ranks, m, chunks = shape
    stages = ranks * chunks if chunks else 1 + last_stage(schedule.placement)
    if given.measured and (durations := _durations(given)):
        option = option_of(next(iter(durations)))
        raise ValueError(f"--measured takes all times from the run; leave {option} out")
    if given.device != "cpu":
        from minidist.backend import check_device  # needs NumPy

        if not given.measured:
            raise ValueError("a simulation needs no device; add --measured, or leave --device out")
        check_device(given.device)
    if given.dp > 1 and not given.measured:
        raise ValueError(
            "a simulation has one copy of a pipeline; add --measured, or leave --dp out"
        )
    if given.out is not None:
        timeline.check_path(given.out)
    if ranks > MOST_ROWS:
        raise ValueError(
            f"{ranks} ranks are too many rows for a picture; use {MOST_ROWS} programs or fewer"
        )
    if stages * m > MOST_DRAWN:
        raise ValueError(
            f"{stages} stages and {m} micro-batches make {stages * m} forward passes, more than "
            f"the {MOST_DRAWN} that are drawn; use fewer micro-batches"
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


def _measured(shape: tuple, options: dict, given: argparse.Namespace, width: int) -> EventLog:
    """Run a schedule, print the real and the simulated picture; return the real log."""
    from minidist.comm.report import fair_share_of_cores  # needs NumPy, as does the next one
    from minidist.tools.measure_pipeline import WARM_UP, measure_pipeline, measured_times

    settings = {"timeout": given.timeout, "device": given.device, "copies": given.dp, **options}
    settings |= measured_times(*shape, **settings)
    real = measure_pipeline(*shape, **settings)
    end = max(real.makespan, real.simulation.makespan)
    print(
        f"measured: the step of median makespan, of {len(real.makespans)} after {WARM_UP} to warm "
        "up; one BLAS thread per rank\n"
        f"{timeline.text(real.log, width, end)}\n\n"
        f"simulated, with the times of the run, stage by stage:\n{_times_of(real)}\n"
        f"{timeline.text(real.simulation.timeline, width, end)}\n\n{_in_words(real.simulation)}\n"
        f"measured     {_amount(real.makespan, 's')}: {real.ratio:.2f} times the simulated makespan"
    )
    cores, ranks = fair_share_of_cores(1), shape[1] * given.dp
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
