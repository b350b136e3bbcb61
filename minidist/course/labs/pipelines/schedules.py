"""Judge a schedule by a simulation: how long ranks idle, and what they hold, against the package's.

Of p ranks, m micro-batches, v chunks, with the times TF, TI, TW of a stage. What the package's own
schedules reach is what the papers' formulas say.
"""

import base64
import zlib
from functools import partial
from typing import Any

from minidist.course.answers import Answer, by_rank
from minidist.course.labs.pipelines import probes
from minidist.course.question import Question, Random, ask, ints
from minidist.errors import plural
from minidist.observe import timeline
from minidist.pipeline_parallel import validate
from minidist.pipeline_parallel.actions import Programs, looped
from minidist.pipeline_parallel.text import as_text
from minidist.planning import simulate


def times(rng: Random) -> dict[str, Any]:
    """Draw how long F, I and W of one stage take; W is the shortest: there all formulas hold."""
    f, i, w = ints(rng, 3, 9, 3)
    w = min(f, i, w) - int(rng.integers(0, 3))
    return {"forward": f, "backward_input": i, "backward_weight": w}


def scheduled(
    rng: Random, group: str, name: str, p: int, m: int, chunks: int = 1, **options
) -> Question:
    """Ask for a schedule as good as the package's; options: see `as_good`."""
    about = f"{plural(p, 'rank')}, {plural(m, 'micro-batch')}"
    about += f", {chunks} chunks" if chunks > 1 else ""
    judge = partial(as_good, placement=looped(p, chunks), m=m, t=times(rng), **options)
    return ask(about, probes.schedule, judge, group, name=name, p=p, m=m, chunks=chunks)


def as_good(
    answer: Answer,
    want: Answer,
    placement: list[list[int]],
    m: int,
    t: dict[str, Any],
    idles_like: Programs | None = None,
    span: bool = False,
    exactly: bool = False,
) -> str | None:
    """Judge a schedule: its ranks idle no longer, and none holds more, than the package's.

    idles_like  other programs than the package's, which may idle longer
    span        idle time is counted from each rank's own start
    exactly     ranks hold no less, either
    """
    made, best = (probes.read(by_rank(a, "the program"), placement) for a in (answer, want))
    if message := fault(made, m):
        return message
    got, wanted, slow = (simulate(x, **t) for x in (made, best, idles_like or best))
    idle, most = ((x.span if span else x.makespan) - m * sum(t.values()) for x in (got, slow))
    pairs = list(zip(got.peak_stash, wanted.peak_stash, strict=True))
    if idle <= most and all(a == b or (a < b and not exactly) for a, b in pairs):
        return None
    held, room = (", ".join(map(str, x.peak_stash)) for x in (got, wanted))
    unit = "micro-batches" if len(placement[0]) == 1 else "stages' worth"
    link = f"to try it, `minidist explore`, and there\nschedules.html#{fields(made, t)}"
    yours = f"yours: a rank idles {idle} units of time, the ranks hold {held} {unit} at their peaks"
    lines = [timeline.text(got.timeline), link, yours, f"wanted: it idles {most}, they hold {room}"]
    return "\n".join(lines)


def fault(made: Programs, m: int) -> str | None:
    """Return what `validate` says, without its picture."""
    try:
        validate(made, len(made), m)
    except ValueError as error:
        return str(error).splitlines()[0]
    return None


def fields(made: Programs, t: dict[str, Any]) -> str:
    """Return what the page of schedules has after its #, to show these programs."""
    packer = zlib.compressobj(9, wbits=-zlib.MAX_WBITS)
    packed = packer.compress(as_text(made).encode()) + packer.flush()
    found: dict = {"p": len(made), "m": 1 + max(a.micro_batch for own in made for a in own)}
    found |= t | {"text.z": base64.urlsafe_b64encode(packed).decode().rstrip("=")}
    return "&".join(f"{name}={value}" for name, value in found.items())
