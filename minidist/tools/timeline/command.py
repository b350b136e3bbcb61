"""`minidist timeline`: a schedule as a picture and in numbers, simulated, or measured as well."""

import argparse
import re
import shutil
from fractions import Fraction

DURATIONS = {
    "forward": ("1", "duration of F"),
    "backward_input": ("1", "of I; B is I and W"),
    "backward_weight": ("1", "of W"),
    "update": ("1", "of U, which asynchronous schedules have"),
    "latency": ("0", "of a transfer to another rank"),
    "overhead": ("0", "of a transfer: how long it keeps its sender"),
}


MOST_RANKS = 1_000  # rows of a picture
EXACT = re.compile(r"\d{1,9}(\.\d{1,9}|/0*[1-9]\d{0,8})?", re.ASCII)


def add_timeline(commands, formatter, whole, seconds) -> None:
    """Add the command's arguments; `whole` and `seconds` read a number from a word."""
    parser = commands.add_parser(
        "timeline",
        formatter_class=formatter,
        help="draw a pipeline's schedule, simulated or measured, and say what its bubble costs",
        description="Draw a schedule as the papers do, a row per rank and a cell per action, "
        "with its makespan, bubbles and stash. Durations are of one full stage: 1, 0.5, 1/3, "
        "or one per rank or virtual stage: 1,2,1,1.",
    )
    parser.set_defaults(command=timeline_command)
    parser.add_argument(
        "--schedule",
        default="1f1b",
        metavar="NAME",
        help="layer_split, gpipe, 1f1b, interleaved, zb_h1, zb_h2, zb_v, pipedream, pipedream_2bw",
    )
    parser.add_argument("--stages", type=whole, default=4, help="ranks")
    parser.add_argument("--microbatches", type=whole, default=8, help="of one batch")
    parser.add_argument("--chunks", type=whole, default=1, help="stages per rank, of interleaved")
    for name, (default, meaning) in DURATIONS.items():
        parser.add_argument(
            "--" + name.replace("_", "-"),
            type=_time if name in ("latency", "overhead") else _times,
            default=argparse.SUPPRESS,
            metavar="T",
            help=f"{meaning} (default: {default})",
        )
    parser.add_argument(
        "--measured",
        action="store_true",
        help="run it on that many processes, and simulate it with what was measured",
    )
    parser.add_argument("--timeout", type=seconds, metavar="SECONDS", help="give up after so long")
    parser.add_argument(
        "--out", metavar="FILE", help=".txt, .json (Chrome trace, for Perfetto), .png, .pdf, .svg"
    )


def _time(word: str) -> int | Fraction:
    """Read a whole number, a decimal fraction or a fraction, exactly."""
    if not EXACT.fullmatch(word):
        raise argparse.ArgumentTypeError(f"{word!r} is no time: 2, 0.5 or 1/3 is one")
    exact = Fraction(word)
    return exact.numerator if exact.denominator == 1 else exact


def _times(word: str) -> int | Fraction | list[int | Fraction]:
    """Read a time, or several with commas between them."""
    found = [_time(part) for part in word.split(",")]
    return found if len(found) > 1 else found[0]


def timeline_command(given) -> int:
    """Print the picture and the numbers; write the file."""
    from minidist.pipeline_parallel import programs
    from minidist.planning import simulate
    from minidist.tools import timeline

    durations = {name: getattr(given, name) for name in DURATIONS if hasattr(given, name)}
    if given.measured and durations:
        option = "--" + next(iter(durations)).replace("_", "-")
        raise ValueError(f"--measured takes all times from the run: leave {option} out")
    if given.out is not None:
        timeline.check_path(given.out)
    if given.stages > MOST_RANKS:
        raise ValueError(
            f"{given.stages} ranks are too many rows for a picture; "
            f"use --stages {MOST_RANKS} or less"
        )
    title = f"{given.schedule}: {given.stages} ranks, {given.microbatches} micro-batches"
    title += f", {given.chunks} chunks" if given.chunks > 1 else ""
    shape = given.schedule, given.stages, given.microbatches, given.chunks
    width = min(max(shutil.get_terminal_size((100, 24)).columns, 40), 200)
    simulation = simulate(programs(*shape), **({"update": 1} | durations))
    print(f"{title}\n", flush=True)
    if given.measured:
        log = _measured(shape, given.timeout, width)
    else:
        log = simulation.timeline
        print(f"{timeline.text(log, width)}\n\n{in_words(simulation)}")
    if given.out is not None:
        timeline.save(log, given.out, title, width)
        print(f"\nwritten: {given.out}")
    return 0


def in_words(simulation) -> str:
    """Return makespan, bubbles and stash as lines."""
    peaks = " ".join(f"{float(peak):g}" for peak in simulation.peak_stash)
    return "\n".join(
        (
            f"makespan     {_amount(simulation.makespan, simulation.unit)}",
            f"bubble       {float(simulation.bubble):.1%} of ranks x makespan is idle",
            f"span bubble  {float(simulation.span_bubble):.1%}, counted from each rank's own start",
            f"peak stash   {peaks}: most passes through a stage, per rank, that wait for backward",
        )
    )


def _amount(time, unit: str) -> str:
    return f"{time * 1e3:.1f} ms" if unit == "s" else f"{float(time):g} {unit}"


def _measured(shape: tuple, timeout: float | None, width: int):
    """Run a schedule, print the real and the simulated picture; return the real log."""
    from minidist.comm.report import fair_share_of_cores
    from minidist.pipeline_parallel.actions import COMPUTE
    from minidist.tools import timeline
    from minidist.tools.measure_pipeline import WARM_UP, measure_pipeline

    real = measure_pipeline(*shape, timeout=timeout)
    end = max(real.makespan, real.simulation.makespan)
    print(
        f"measured: the step of median makespan, of {len(real.makespans)} after {WARM_UP} to warm "
        "up; one BLAS thread per rank"
    )
    print(timeline.text(real.log, width, end), "\n", sep="")
    print("simulated, with the times of the run, stage by stage:")
    for kind in COMPUTE:
        if any(real.durations[kind.sign]):
            each = " ".join(f"{seconds * 1e3:.2f}" for seconds in real.durations[kind.sign])
            print(f"  {kind.sign} {each} ms")
    print(f"  a send {real.overhead * 1e3:.2f} ms, a message {real.latency * 1e3:.2f} ms")
    print(timeline.text(real.simulation.timeline, width, end), "\n", sep="")
    print(in_words(real.simulation))
    print(
        f"measured     {_amount(real.makespan, 's')}: {real.ratio:.2f} times the simulated makespan"
    )
    cores, ranks = fair_share_of_cores(1), shape[1]
    if ranks > cores:
        print(f"{ranks} ranks take turns on {cores} cores, which the simulation does not know")
    return real.log
