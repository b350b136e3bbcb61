"""This machine's rates: what functions, updates, collectives and messages take, one by one.

All ranks do the same at once, so that they compete for cores and memory as they do in a step. Each
thing is timed at some sizes; what lies between them is interpolated. No strategy is run here.

    kinds of functions   their sizes: multiply-adds of products, numbers of all others
    all others           what an addition of as many numbers takes
"""

from bisect import bisect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import mean, median
from time import perf_counter, thread_time

import numpy as np

from minidist import nn
from minidist.autograd import deferred
from minidist.backend import keep_freed_memory
from minidist.comm import Group
from minidist.data_parallel.compression import ErrorFeedback, Int8, Sign, TopK
from minidist.data_parallel.power_sgd import PowerSGD
from minidist.nn.flat_parameters import FlatParameters
from minidist.tools.costs.watch import adamw
from minidist.tools.machine.timed_functions import T, functions_timed

Curve = list[tuple[float, float]]  # (size, seconds), by size
OTHERS = "Add", 8  # the function whose time all take that are not timed themselves


@dataclass(frozen=True)
class Rates:
    """Seconds of one core, by what is done and its size.

    functions    {(kind, itemsize): curves of forward, of backward's input half, of its weight half}
    update       of AdamW's first step, by numbers
    collectives  {(operation, ranks of the group): by bytes of a rank's array}
    send, recv   what a message takes its sender and its receiver, by bytes
    delay        seconds from the end of a send until the receiver goes on, no core being used
    cores        that the ranks have together while all of them compute
    """

    functions: dict[tuple[str, int], tuple[Curve, Curve, Curve]]
    update: Curve
    collectives: dict[tuple[str, int], Curve]
    messages: dict[str, Curve]
    delay: float
    cores: float

    def seconds(self, kind: str, size: int, itemsize: int = 8) -> tuple[float, float, float]:
        """Return the seconds of a function's forward, and of the halves of its backward."""
        curves = self.functions.get((kind, itemsize)) or self.functions.get((kind, 8))
        curves = curves or self.functions[OTHERS]
        return tuple(at(curve, size) for curve in curves)

    def collective(self, name: str, ranks: int, nbytes: int) -> float:
        """Return the seconds of a collective, of a core of each rank of the group."""
        return at(self.collectives[name, ranks], nbytes)


def at(curve: Curve, size: float) -> float:
    """Return the seconds at a size: between two that were timed, or on the line through the two
    nearest, at least 0.
    """
    if len(curve) == 1:
        return curve[0][1]
    i = min(max(1, bisect([x for x, _ in curve], size)), len(curve) - 1)
    (x0, y0), (x1, y1) = curve[i - 1 : i + 1]
    return max(0.0, y0 + (size - x0) * (y1 - y0) / (x1 - x0))


def timed(group: Group, call: Callable, repeats: int, now: Callable = thread_time) -> float:
    """Return the median seconds of call(), which all ranks begin together.

    now  the clock: by default of this thread's time on a core, whoever else wants that core
    """
    call()
    taken = []
    for _ in range(repeats):
        group.barrier()
        start = now()
        call()
        taken.append(now() - start)
    return median(taken)


def _three_parts(group: Group, forward: Callable, repeats: int) -> list[float]:
    """Return the median seconds of forward and of both halves of backward, without the first."""
    taken = []
    for _ in range(1 + repeats):
        group.barrier()
        moments = [thread_time()]
        y = forward()
        moments.append(thread_time())
        later: list = []
        y.backward(np.ones(y.shape, y.dtype), deferred=later)
        moments.append(thread_time())
        deferred.compute(later)
        moments.append(thread_time())
        taken.append(np.diff(moments))
    return np.median(taken[1:], axis=0).tolist()


def measure(
    group: Group, wanted: set | None = None, rows=(T, 4 * T, 16 * T), repeats: int = 5
) -> Rates:
    """Measure rates on a group's ranks at once; a worker of `run`.

    wanted  the keys of functions, and the names of collectives, to be measured; None: all
    """
    keep_freed_memory()
    cores = cores_had(group)
    curves: dict[tuple[str, int], tuple[Curve, ...]] = {}
    for kind, dtype, size, forward in functions_timed(rows, group.split(group.rank)):
        key = kind, np.dtype(dtype).itemsize
        if wanted is None or key in wanted or key == OTHERS:
            own = curves.setdefault(key, ([], [], []))
            for curve, seconds in zip(own, _three_parts(group, forward, repeats), strict=True):
                curve.append((size, seconds))
    update = [(n, timed(group, _first_step(n), repeats)) for n in (1 << 10, 1 << 18)]
    share = cores / group.size  # of a core that a rank has while all work
    collectives: dict[tuple[str, int], Curve] = {}
    for part in dict.fromkeys((group.size, max(1, group.size // 2), 1)):
        own = group.split(group.rank // part)
        calls = _collectives(own) + (_compressed(own) if part == group.size else [])
        for name, size, call in calls:
            if wanted is None or name in wanted:
                seconds = share * timed(group, call, repeats, perf_counter)
                collectives.setdefault((name, part), []).append((size, seconds))
    messages, delay = _messages(group, repeats) if group.size > 1 else ({}, 0.0)
    return Rates(curves, update, collectives, messages, delay, cores)


def cores_had(group: Group, seconds: float = 0.02) -> float:
    """Return how many cores the ranks have together while all of them compute.

    At most one each. Fewer than the machine has, if other programs want them, too.
    """
    x = np.full((64, 64), 0.5)
    group.barrier()
    start, used = perf_counter(), thread_time()
    while thread_time() - used < seconds:
        x @ x
    share = (thread_time() - used) / (perf_counter() - start)
    return float(group.all_reduce(np.array(min(1.0, share))))


def _first_step(n: int) -> Callable:
    def step():
        w = nn.Parameter(np.zeros(n), name="w")
        FlatParameters([w])
        w.grad = np.ones(n)
        adamw([w]).step()

    return step


def _collectives(group: Group) -> list[tuple[str, int, Callable]]:
    """Return (operation, bytes of a rank's array, function to call), at two sizes."""
    found = [("barrier", 0, group.barrier)]
    for n in (1 << 6, 1 << 13, 1 << 17):
        x, place = np.ones(n), group.empty(n, "float64")
        pieces = np.array_split(x, group.size)
        found += [
            ("all_reduce", x.nbytes, lambda x=x: group.all_reduce(x)),
            ("all_reduce in place", x.nbytes, lambda p=place: group.all_reduce(p, out=p)),
            ("reduce_scatter", x.nbytes, lambda x=x: group.reduce_scatter(x)),
            ("all_gather", x.nbytes, lambda x=x: group.all_gather(x)),
            ("all_to_all", x.nbytes, lambda pieces=pieces: group.all_to_all(pieces)),
        ]
    return found


def _compressed(group: Group) -> list[tuple[str, int, Callable]]:
    """Return the same for sums of compressed gradients, with what each rank remembers."""
    found = []
    for make in (partial(TopK, 0.01), Sign, Int8, partial(PowerSGD, 2)):
        for n in (1 << 8, 1 << 14):
            model = nn.Linear(64, n // 64, bias=False, dtype="float64")
            compressor = make()
            feedback = ErrorFeedback(model, group, compressor)

            def call(feedback=feedback, weight=model.weight):
                weight.grad = np.ones_like(weight.data)
                feedback.all_reduce_gradients()

            found.append((type(compressor).__name__, 8 * n, call))
    return found


def _messages(group: Group, repeats: int) -> tuple[dict[str, Curve], float]:
    """Return what sends and receives take, and the delay of a message, between pairs of ranks."""
    peer, one = group.rank ^ 1, np.ones(1)
    curves: dict[str, Curve] = {"send": [], "recv": []}
    for n in (1 << 6, 1 << 13, 1 << 17):
        x = np.ones(n)
        for name, call in (
            ("send", partial(group.send, x, peer)),
            ("recv", partial(group.recv, peer)),
        ):
            curves[name].append((x.nbytes, timed(group, call, repeats)))

    def there_and_back():
        if group.rank % 2 == 0:
            group.send(one, peer)
            group.recv(peer)
        else:
            group.recv(peer)
            group.send(one, peer)

    trip = timed(group, there_and_back, 10 * repeats, perf_counter) / 2
    return curves, max(0.0, trip - sum(at(curve, 8) for curve in curves.values()))


def merged(several: list[Rates]) -> Rates:
    """Return the medians, point by point, of rates that were measured one after the other."""

    def middle(curves: list[Curve]) -> Curve:
        return [
            (points[0][0], median(y for _, y in points)) for points in zip(*curves, strict=True)
        ]

    first = several[0]
    return replace(
        first,
        functions={
            key: tuple(middle([r.functions[key][i] for r in several]) for i in range(3))
            for key in first.functions
        },
        update=middle([r.update for r in several]),
        collectives={
            key: middle([r.collectives[key] for r in several]) for key in first.collectives
        },
        messages={key: middle([r.messages[key] for r in several]) for key in first.messages},
        delay=median(r.delay for r in several),
        cores=mean(r.cores for r in several),
    )
