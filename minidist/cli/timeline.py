"""`minidist timeline`: a schedule as a picture and in numbers, simulated, or measured as well."""

import argparse
import shutil

from minidist.cli.arguments import DEFAULT, add_device, add_timeout, time, times, whole
from minidist.events import EventLog
from minidist.pipeline_parallel import SCHEDULES, programs
from minidist.pipeline_parallel.actions import COMPUTE
from minidist.planning import Simulation, simulate
from minidist.tools import timeline

DURATIONS = {  # of the simulator: how each is read, its default, what it is
    "forward": (times, 1, "duration of F"),
    "backward_input": (times, 1, "duration of I; B is I and W"),
    "backward_weight": (times, 1, "duration of W"),
    "update": (times, 1, "duration of U, which only asynchronous schedules have"),
    "latency": (time, 0, "time of a transfer to another rank"),
    "overhead": (time, 0, "time that a transfer keeps its sender busy"),
}
MOST_RANKS = 1_000  # rows of a picture


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
        default="1f1b",
        metavar="NAME",
        help=", ".join(SCHEDULES) + DEFAULT,
    )
    parser.add_argument("--pp", type=whole, default=4, help="ranks of the pipeline" + DEFAULT)
    parser.add_argument("--micro-batches", type=whole, default=8, help="of one batch" + DEFAULT)
    parser.add_argument(
        "--chunks", type=whole, default=1, help="stages per rank, if interleaved" + DEFAULT
    )
    for name, (read, default, meaning) in DURATIONS.items():
        parser.add_argument(
            "--" + name.replace("_", "-"),
            type=read,
            metavar="T",
            help=f"{meaning} (default: {default})",
        )
    parser.add_argument(
        "--measured",
        action="store_true",
        help="run it on real processes, and simulate it with the times measured",
    )
    add_timeout(parser)
    add_device(parser)
    parser.add_argument(
        "--out", metavar="FILE", help=".txt, .json (Chrome trace, for Perfetto), .png, .pdf, .svg"
    )
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Print the picture and the numbers; write the file."""
    _check(given)
    title = f"{given.schedule}: {given.pp} ranks, {given.micro_batches} micro-batches"
    title += f", {given.chunks} chunks" if given.chunks > 1 else ""
    shape = given.schedule, given.pp, given.micro_batches, given.chunks
    width = min(max(shutil.get_terminal_size((100, 24)).columns, 40), 200)
    durations = {name: default for name, (_, default, _) in DURATIONS.items()} | _durations(given)
    simulation = simulate(programs(*shape), **durations)
    if given.measured:
        log = _measured(title, shape, given, width)
    else:
        log = simulation.timeline
        print(f"{title}\n\n{timeline.text(log, width)}\n\n{_in_words(simulation)}")
    if given.out is not None:
        timeline.save(log, given.out, title, width)
        print(f"\nwritten: {given.out}")
    return 0


def _check(given: argparse.Namespace) -> None:
    """Raise ValueError for what cannot be drawn, before anything runs."""
    if given.measured and (durations := _durations(given)):
        option = "--" + next(iter(durations)).replace("_", "-")
        raise ValueError(f"--measured takes all times from the run; leave {option} out")
    if given.device != "cpu":
        from minidist.backend import check_device  # needs NumPy

        if not given.measured:
            raise ValueError("a simulation needs no device; add --measured, or leave --device out")
        check_device(given.device)
    if given.out is not None:
        timeline.check_path(given.out)
    if given.pp > MOST_RANKS:
        raise ValueError(
            f"{given.pp} ranks are too many rows for a picture; use --pp {MOST_RANKS} or less"
        )


def _durations(given: argparse.Namespace) -> dict:
    """Return the durations that were given."""
    found = {name: getattr(given, name) for name in DURATIONS}
    return {name: duration for name, duration in found.items() if duration is not None}


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


def _measured(title: str, shape: tuple, given: argparse.Namespace, width: int) -> EventLog:
    """Run a schedule, print the real and the simulated picture; return the real log."""
    from minidist.comm.report import fair_share_of_cores  # needs NumPy, as does the next one
    from minidist.tools.measure_pipeline import WARM_UP, measure_pipeline

    print(f"{title}\n", flush=True)
    real = measure_pipeline(*shape, timeout=given.timeout, device=given.device)
    end = max(real.makespan, real.simulation.makespan)
    print(
        f"measured: the step of median makespan, of {len(real.makespans)} after {WARM_UP} to warm "
        "up; one BLAS thread per rank\n"
        f"{timeline.text(real.log, width, end)}\n\n"
        f"simulated, with the times of the run, stage by stage:\n{_times_of(real)}\n"
        f"{timeline.text(real.simulation.timeline, width, end)}\n\n{_in_words(real.simulation)}\n"
        f"measured     {_amount(real.makespan, 's')}: {real.ratio:.2f} times the simulated makespan"
    )
    cores, ranks = fair_share_of_cores(1), shape[1]
    if ranks > cores:
        print(f"{ranks} ranks share {cores} cores, which the simulation does not know")
    return real.log


def _times_of(real) -> str:
    """Return a line per kind of action, with its time on each stage, and one for transfers."""
    lines = []
    for kind in COMPUTE:
        if any(real.durations[kind.sign]):
            each = " ".join(f"{seconds * 1e3:.2f}" for seconds in real.durations[kind.sign])
            lines.append(f"  {kind.sign} {each} ms")
    sends = f"  a send {real.overhead * 1e3:.2f} ms, a message {real.latency * 1e3:.2f} ms"
    return "\n".join([*lines, sends])
