"""A schedule that misses its numbers, as a report shows it."""

import base64
import zlib
from typing import Any

from minidist.observe import timeline
from minidist.pipeline_parallel.actions import Programs
from minidist.pipeline_parallel.text import as_text
from minidist.planning.simulator import Simulation


def drawn(made: Programs, replay: Simulation, given: dict[str, Any]) -> str:
    """Return its timeline, and the address that opens it in `minidist explore`.

    given  the page's other fields, as the times of the actions
    """
    packer = zlib.compressobj(9, wbits=-zlib.MAX_WBITS)
    packed = packer.compress(as_text(made).encode()) + packer.flush()
    fields: dict = {"p": len(made), "m": 1 + max(a.micro_batch for own in made for a in own)}
    fields |= given | {"text.z": base64.urlsafe_b64encode(packed).decode().rstrip("=")}
    address = "&".join(f"{name}={value}" for name, value in fields.items())
    link = f"to try it, `minidist explore`, and there\nschedules.html#{address}"
    return f"{timeline.text(replay.timeline)}\n{link}"
