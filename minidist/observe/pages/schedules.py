"""Schedules: choose one or write one, and see it judged, simulated, drawn and proved.

answer(schedule="1f1b", p=4, m=8)      -> {"drawing": {"makespan": 33.0, "rows": ...}, ...}
answer(text="rank 0 F0 B0 B0")         -> {"fault": {"message": ..., "rank": 0, "at": 2}, ...}
answer(puzzles="yes")                  -> {"puzzles": ...}, from puzzles.toml
"""

import tomllib
from argparse import ArgumentTypeError
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from minidist.cli.options import exact_time, exact_times
from minidist.errors import WrongInput, check_name, check_number
from minidist.events import Event, EventLog
from minidist.observe import timeline
from minidist.observe.pages.written import MOST_ACTIONS, text_of
from minidist.pipeline_parallel import (
    actions,
    add_communication,
    programs,
    read,
    schedules,
    validate,
)
from minidist.pipeline_parallel.actions import Programs
from minidist.pipeline_parallel.text import as_text as program_text
from minidist.pipeline_parallel.validation import certificate
from minidist.planning.clock import Time, divided
from minidist.planning.simulator import Moment, critical_path, needs, simulate, stash, waits

FIRST = {"schedule": "1f1b", "p": 4, "m": 8}
OPTIONS = {"chunks": 1, "weights_last": "no", "replicas": "", "update_every": ""}
WRITTEN = {"text": "", "python": "", "made": ""}  # made: what python yields, if it has been run
TIMES = {"forward": "1", "backward_input": "1", "backward_weight": "1"}  # per stage or rank
LINKS = {"latency": "0", "overhead": "0", "bandwidth": "", "limit": "", "size": "1048576"}
USUAL: dict = FIRST | OPTIONS | WRITTEN | TIMES | LINKS
RANKS = "a page draws at most 64 ranks"
ACTIONS = f"a page draws at most {MOST_ACTIONS:,} actions"
built = lru_cache(16)(programs)  # zb_auto searches once for the same times


def answer(puzzles: str = "", **question) -> dict:
    """Return the judgement of programs; ValueError for numbers that no schedule has.

    Asked is `python`, else `text`, else a schedule by its name; USUAL has all fields. `limit`: the
    forward passes that a rank may keep, in stages. `size`: bytes of an activation between stages.
    """
    if puzzles:
        return tomllib.loads(Path(__file__).with_name("puzzles.toml").read_text("utf-8"))
    for name in question:
        check_name("field", name, USUAL)
    asked = USUAL | {name: value for name, value in question.items() if value not in ("", None)}
    p, m, python, text = (asked[name] for name in ("p", "m", "python", "text"))
    schedules.check_numbers(asked["schedule"], p, m, asked["chunks"], None)
    check_number(RANKS, p, lambda n: n <= 64)
    if not (python or text):
        return _judged(_named(asked), m, asked)
    try:
        made = _read(asked["made"] or text_of(python, p, m) if python else text)
    except ValueError as error:
        return unread(text, error)
    return _judged(made, m if python else actions.micro_batches_of(made), asked)


def unread(text: str, error: ValueError) -> dict:
    """Return the answer to what is no program."""
    names = "csv", "p", "m", "chunks", "stages", "drawing", "certificate"
    return {"text": text, "placement": [], "grid": []} | dict.fromkeys(names) | _fault(error)


def as_text(answer: dict) -> str:
    return answer["words"]


def _named(asked: dict) -> Programs:
    """Return the programs of a schedule by its name, with its options; zb_auto has the times."""
    p, m, chunks = (asked[name] for name in ("p", "m", "chunks"))
    check_number(ACTIONS, 2 * p * m * chunks, lambda n: n <= MOST_ACTIONS)
    options: dict = {"weights_last": True} if asked["weights_last"] == "yes" else {}
    if asked["update_every"]:
        options["update_every"] = _number(asked["update_every"])
    if asked["replicas"]:
        options["replicas"] = tuple(map(_number, str(asked["replicas"]).split()))
    if asked["schedule"] == "zb_auto":
        durations = _durations(asked)
        options |= {name: durations[name] for name in (*TIMES, "latency")}
        options["memory"] = _number(asked["limit"])
    made = built(asked["schedule"], p, m, chunks, **options)
    check_number(ACTIONS, sum(map(len, made)), lambda n: n <= MOST_ACTIONS)
    return made


def _read(text: str) -> Programs:
    """Return the programs of a text, in either format; a text is never taken for a file's name."""
    check_number("a text has at most 200,000 characters", len(text), lambda n: n <= 200_000)
    made = read(text + "\n")
    check_number(RANKS, len(made), lambda n: n <= 64)
    check_number(ACTIONS, sum(map(len, [*made, *made.placement])), lambda n: n <= MOST_ACTIONS)
    return made


def _number(text: str, reader: Callable = exact_time):
    """Return the number in a text, by a reader of the command line; None if it is empty."""
    cleaned = "" if text is None else str(text).replace(",", " ")
    try:
        return reader(",".join(cleaned.split())) if cleaned else None
    except ArgumentTypeError as error:
        raise WrongInput(str(error)) from None


def _durations(asked: dict) -> dict:
    """Return the times that `simulate` takes; the latency has what the bandwidth adds."""
    durations = {name: _number(asked[name], exact_times) for name in TIMES}
    durations |= {name: _number(asked[name]) for name in ("latency", "overhead")}
    if (rate := _number(asked["bandwidth"])) is not None:
        check_number("a bandwidth is more than 0 transfers per unit", rate, lambda t: t > 0)
        durations["latency"] += divided(1, rate)
    return {name: tuple(t) if isinstance(t, list) else t for name, t in durations.items()}


def _judged(made: Programs, m: int, asked: dict) -> dict:
    """Return all that a page has to say of programs."""
    result: dict = {"text": program_text(made), "csv": None, "p": len(made), "m": m, "fault": None}
    with suppress(ValueError):  # updates, or replicas: PyTorch has no word for them
        result["csv"] = program_text(made, "torch")
    result |= {
        "chunks": max(map(len, made.placement)),
        "stages": 1 + actions.last_stage(made.placement),
        "placement": made.placement,
        "grid": [[str(action) for action in program] for program in made],
    }
    try:
        validate(made, len(made), m)
    except ValueError as error:
        return result | {"drawing": None, "certificate": None} | _fault(error)
    drawn, proved = _drawing(made, asked), certificate(made, m)
    return result | {"drawing": drawn, "certificate": proved, "words": _words(drawn, proved)}


def _fault(error: ValueError) -> dict:
    places = {name: getattr(error, name, None) for name in ("rank", "at", "line", "column")}
    return {"fault": {"message": str(error).partition("\n")[0], **places}, "words": str(error)}


def _drawing(made: Programs, asked: dict) -> dict:
    """Return the drawing of valid programs, and their numbers."""
    simulation, limit = simulate(made, **_durations(asked)), _number(asked["limit"])
    peaks, clocks = simulation.peak_stash, simulation.moments
    return {
        "rows": _rows(made, clocks),
        "makespan": float(simulation.makespan),
        "span": float(simulation.span),
        "bubble": float(simulation.bubble),
        "span_bubble": float(simulation.span_bubble),
        "peak_stash": [float(peak) for peak in peaks],
        "stash": [[[float(t), float(n)] for t, n in row] for row in stash(made, clocks)],
        "over": [r for r, peak in enumerate(peaks) if limit is not None and peak > limit],
        "links": _links(made, _number(asked["size"])),
    }


def _rows(made: Programs, clocks: list[list[Moment]]) -> list[list[dict]]:
    """Return the drawing of each action."""
    needed = needs(made)
    waited = waits(needed, clocks)
    critical = set(critical_path(waited, clocks))
    rows: list[list[dict]] = [[] for _ in made]
    for r, program in enumerate(made):
        for i, (action, (start, end, _)) in enumerate(zip(program, clocks[r], strict=True)):
            row = {"name": str(action), "kind": action.sign, "micro_batch": action.micro_batch}
            row |= {"chunk": action.chunk, "start": float(start), "end": float(end)}
            row |= {"needs": needed[r][i], "waited": waited[r][i], "critical": (r, i) in critical}
            rows[r].append(row)
    return rows


def _links(made: Programs, size: Time) -> list[dict]:
    """Return the messages from rank to rank, and their bytes."""
    sent = Counter[tuple](
        (r, action.peer, type(action))
        for r, program in enumerate(add_communication(made))
        for action in program
        if isinstance(action, actions.SendActivation | actions.SendGradient) and action.peer != r
    )
    links = []
    for source, to in sorted({(source, to) for source, to, _ in sent}):
        forth, back = (sent[source, to, kind] for kind in actions.SENDS)
        link = {"source": source, "to": to, "activations": forth, "gradients": back}
        links.append(link | {"bytes": int((forth + back) * size)})
    return links


def _words(drawn: dict, proved: dict) -> str:
    """Return the drawing in words; of small programs also a picture in text."""
    steps = [(r, step) for r, row in enumerate(drawn["rows"]) for step in row]
    picture = f"{len(steps)} actions: minidist timeline --program draws them"
    if len(steps) <= 300:
        events = [Event(r, step["name"], step["start"], step["end"]) for r, step in steps]
        picture = timeline.text(EventLog([e for e in events if e.seconds], unit="units"))
    sent = [f"rank {each['source']} to {each['to']}: {each['bytes']:,}" for each in drawn["links"]]
    return f"""{picture}

makespan {drawn["makespan"]:g}, of which {drawn["bubble"]:.1%} are idle
longest span of a rank {drawn["span"]:g}, of which {drawn["span_bubble"]:.1%} are idle
most forward passes kept, in stages: {", ".join(f"{n:g}" for n in drawn["peak_stash"])}
bytes sent: {", ".join(sent) or "none"}\n{proved["words"]}\n"""
