"""The meaning of events' names in pictures: "F3.1" is an action, "all_reduce w" an all_reduce.

A log is a *program's* if all its compute events are actions of `pipeline_parallel/actions.py`, from
a simulator or from a run. Several actions in one event, "W0 W1 W2", were done together. R is drawn
like them, though it is communication; in a run, what it consists of is inside it.
"""

import re

from minidist.events import Event
from minidist.observe.tracks import Tracks
from minidist.pipeline_parallel.actions import Action, Reduce
from minidist.pipeline_parallel.text import read_action

MEANINGS = {
    "F": "forward",
    "B": "backward",
    "I": "input half of backward",
    "W": "weight half of backward",
    "U": "update",
    "R": "sum over ranks",
}


def actions(name: str) -> list[Action]:
    """Return the actions that an event's name lists; none if it names something else."""
    words = name.split(" ")
    found = [action for word in words if (action := read_action(word))]
    return found if len(found) == len(words) else []


def kind(name: str) -> str:
    """Return the leading word of a name, without the number or label after it."""
    word = re.match(r"[<>]?[^\W\d]+", name)
    return word.group() if word else name or "?"


def is_drawn(e: Event) -> bool:
    """Return whether a program's picture has this event as an action."""
    return e.category == "compute" or bool(actions(e.name))


def is_program(rows: Tracks) -> bool:
    """Return whether all compute events are actions, none of them inside another event."""
    found = [(d, e) for row in rows.values() for d, e in row if e.category == "compute"]
    return bool(found) and all(depth == 0 and actions(e.name) for depth, e in found)


def chunks_of(rows: Tracks) -> int:
    """Return how many chunks of a model each rank of a program holds."""
    names = {e.name for row in rows.values() for _, e in row if e.category == "compute"}
    return 1 + max(a.chunk for name in names for a in actions(name))


def micro_batches(run: list[Action]) -> str:
    """Return the numbers of actions done together: "3", "0-2", "0,2,3"; of R there are none."""
    found = [a.micro_batch for a in run if not isinstance(a, Reduce)]
    if len(found) > 1 and found == list(range(found[0], found[-1] + 1)):
        return f"{found[0]}-{found[-1]}"
    return ",".join(map(str, found))
