"""Where the time of a training step goes: products, element-wise functions, copies, Python.

    parts = step_parts(step, tiny)    # tiny: a step of as many calls, on next to nothing

products      of matrices, as products.py defines them
element-wise  what else the functions of the graph compute, number by number; the optimizer
copies        what is left, which memory limits: copies into another layout, sums of gradients
Python        the tiny step, and therefore what every call takes however small its arrays are

Python's profile hook says which function works now. The hook itself takes time, as long in the tiny
step, so that the first three parts are differences of the two steps. Python is timed without it.
Times are this thread's own, on a core.
"""

from collections.abc import Callable
from statistics import median
from time import thread_time
from types import FrameType

from minidist.observe.products import multiplies, watched
from minidist.observe.stopwatch import CoreClock, median_seconds

ROOMS = {  # whose functions belong to a part; others belong to the part of their caller
    "minidist.autograd.attention": "element-wise",
    "minidist.autograd.functions": "element-wise",
    "minidist.autograd.kernels": "element-wise",
    "minidist.autograd.losses": "element-wise",
    "minidist.optim": "element-wise",
    "minidist.autograd.operators": "copies",
    "minidist.autograd.tensor": "copies",
}
PARTS = "products", "element-wise", "copies"


def step_parts(step: Callable, tiny: Callable, rounds: int = 5) -> dict[str, float]:
    """Return {part: seconds} of a step, medians of the rounds."""
    python = median_seconds(tiny, repeats=rounds, clock=CoreClock())
    step()
    whole, empty = zip(
        *[(seconds_by_part(step), seconds_by_part(tiny)) for _ in range(rounds)], strict=True
    )
    parts = {
        part: max(0.0, median(t[part] for t in whole) - median(t[part] for t in empty))
        for part in PARTS
    }
    return parts | {"Python": python}


def seconds_by_part(call: Callable, now: Callable[[], float] = thread_time) -> dict[str, float]:
    """Return what a call spends in each part; a function's time is without that of its callees."""
    spent, stack = dict.fromkeys(PARTS, 0.0), ["copies"]
    since = now()

    def watch(frame, event, result) -> None:
        nonlocal since
        if event == "call":
            spent[stack[-1]] += now() - since
            stack.append(_part(frame, stack[-1]))
            since = now()
        elif event == "return" and len(stack) > 1:
            spent[stack.pop()] += now() - since
            since = now()

    watched(call, watch)
    return spent


def _part(frame: FrameType, caller: str) -> str:
    if multiplies(frame):
        return "products"
    name = frame.f_globals.get("__name__", "")
    return next((part for room, part in ROOMS.items() if name.startswith(room)), caller)
