"""This machine's rates: what functions, updates, collectives and messages take, one by one.

All ranks do the same at once, so that they compete for cores and memory as they do in a step. Each
thing is timed at some sizes; what lies between them is interpolated. No strategy is run here.

    kinds of functions   their sizes: multiply-adds of products, numbers of all others
    all others           what an addition of as many numbers takes
"""

from bisect import bisect
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from statistics import mean, median
from time import perf_counter, thread_time

import numpy as np
from threadpoolctl import threadpool_limits

from minidist import nn
from minidist.autograd import Tensor, deferred
from minidist.backend import keep_freed_memory
from minidist.comm import Group
from minidist.data_parallel.compression import ErrorFeedback, Int8, Sign, TopK
from minidist.data_parallel.power_sgd import PowerSGD
from minidist.nn.flat_parameters import FlatParameters
from minidist.observe.machine.timed_functions import T, functions_timed
from minidist.observe.stopwatch import CoreClock, median_seconds, there_and_back
from minidist.verify.watch import adamw

Curve = list[tuple[float, float]]  # (size, seconds), by size
OTHERS = "Add", 8  # the function whose time all take that are not timed themselves


@dataclass(frozen=True)
class Rates:
    """Seconds of one core, by what is done and its size.

    curves  (kind, itemsize, part)  of a function: 0 forward, 1 and 2 backward's input and weight
                                    halves
            "update"                of AdamW's first step, by numbers
            (operation, ranks)      of a collective, by bytes of a rank's array
            "send", "recv"          what a message takes its sender and its receiver, by bytes
    delay   seconds from the end of a send until the receiver goes on, no core being used
    cores   that the ranks have together while all of them compute
    """

    curves: dict[tuple | str, Curve]
    delay: float
    cores: float

    def of(self, what: tuple | str, size: float) -> float:
        """Return the seconds of an update, a collective or a message."""
        return at(self.curves[what], size)

    def seconds(self, kind: str, size: int, itemsize: int = 8) -> tuple[float, float, float]:
        """Return the seconds of a function's forward, and of the halves of its backward."""
        known = (key for key in ((kind, itemsize), (kind, 8)) if (*key, 0) in self.curves)
        key = next(known, OTHERS)
        return self.of((*key, 0), size), self.of((*key, 1), size), self.of((*key, 2), size)


def at(curve: Curve, size: float) -> float:
    """Return the seconds at a size: between two that were timed, or on the line through the two
    nearest, at least 0.
    """
    if len(curve) == 1:
        return curve[0][1]
    i = min(max(1, bisect([x for x, _ in curve], size)), len(curve) - 1)
    (x0, y0), (x1, y1) = curve[i - 1 : i + 1]
    return max(0.0, y0 + (size - x0) * (y1 - y0) / (x1 - x0))


def core_seconds(group: Group, call: Callable, repeats: int) -> float:
    """Return the median seconds of a core that call() takes, which all ranks begin together."""
    return median_seconds(call, group.barrier, repeats, CoreClock())


def _three_parts(group: Group, forward: Callable[[], Tensor], repeats: int) -> list[float]:
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


def measure_rates(
    group: Group, wanted: set | None = None, rows=(T, 4 * T, 16 * T), repeats: int = 5
) -> Rates:
    """Measure rates on a group's ranks at once; a worker of `run`.

    wanted  the keys of functions, and the names of collectives, to be measured; None: all
    """
    keep_freed_memory()
    cores = cores_had(group)
    curves: dict[tuple | str, Curve] = defaultdict(list)
    for kind, dtype, size, forward in functions_timed(rows, group.split(group.rank)):
        key = kind, np.dtype(dtype).itemsize
        if wanted is None or key in wanted or key == OTHERS:
            for part, seconds in enumerate(_three_parts(group, forward, repeats)):
                curves[(*key, part)].append((size, seconds))
    for n in (1 << 10, 1 << 18):
        curves["update"].append((n, core_seconds(group, _first_step(n), repeats)))
    share = cores / group.size  # of a core that a rank has while all work
    for ranks in dict.fromkeys((group.size, max(1, group.size // 2), 1)):
        own = group.split(group.rank // ranks)
        calls = _collectives(own) + (_compressed(own) if ranks == group.size else [])
        for name, size, call in calls:
            if wanted is None or name in wanted:
                seconds = share * median_seconds(call, group.barrier, repeats)
                curves[name, ranks].append((size, seconds))
    delay = _messages(group, repeats, curves) if group.size > 1 else 0.0
    return Rates(dict(curves), delay, cores)


def cores_had(group: Group) -> float:
    """Return how many cores the ranks have together while all of them compute.

    At most one each. Fewer than the machine has, if other programs want them, too.
    """
    x = np.full((64, 64), 0.5)
    group.barrier()
    start, used = perf_counter(), thread_time()
    while thread_time() - used < 0.02:
        x @ x
    share = (thread_time() - used) / (perf_counter() - start)
    return float(group.all_reduce(np.array(min(1.0, share))))


def products(dimensions: Iterable[int] = (16, 64, 256, 1024)) -> list[tuple[int, float]]:
    """Return (dimension, operations per second of a core) of square products in float64, rising.

    What a `planning.Machine` is told of its products: `flops`, the last, and shares of it.
    """
    found, best = [], 0.0
    with threadpool_limits(1):
        for n in dimensions:
            x, taken = np.full((n, n), 0.5), []
            repeats = max(1, 2**20 // n**2)
            for _ in range(5):
                start = perf_counter()
                for _ in range(repeats):
                    x @ x
                taken.append((perf_counter() - start) / repeats)
            best = max(best, 2 * n**3 / min(taken))
            found.append((n, best))
    return found


def _first_step(n: int) -> Callable:
    def step():
        w = nn.Parameter(np.zeros(n), name="w")
        FlatParameters([w])
        w.grad = np.ones(n)
        adamw([w]).step()

    return step


def _collectives(group: Group) -> list[tuple[str, int, Callable]]:
    """Return (operation, bytes of a rank's array, function to call), at two sizes."""
    found: list[tuple[str, int, Callable]] = [("barrier", 0, group.barrier)]
    for n in (1 << 6, 1 << 13, 1 << 17):
        x, place = np.ones(n), group.empty(n, "float64")
        pieces = np.array_split(x, group.size)
        found += [
            ("all_reduce", x.nbytes, partial(group.all_reduce, x)),
            ("all_reduce in place", x.nbytes, partial(group.all_reduce, place, out=place)),
            ("reduce_scatter", x.nbytes, partial(group.reduce_scatter, x)),
            ("all_gather", x.nbytes, partial(group.all_gather, x)),
            ("all_to_all", x.nbytes, partial(group.all_to_all, pieces)),
        ]
    return found


def _compressed(group: Group) -> list[tuple[str, int, Callable]]:
    """Return (compressor, bytes of a gradient, function that sums it), at two sizes."""

    def call(feedback: ErrorFeedback, weight: nn.Parameter) -> None:
        weight.grad = np.ones_like(weight.data)
        feedback.all_reduce_gradients()

    found: list[tuple[str, int, Callable]] = []
    for make in (partial(TopK, 0.01), Sign, Int8, partial(PowerSGD, 2)):
        for n in (1 << 8, 1 << 14):
            model, compressor = nn.Linear(64, n // 64, bias=False, dtype="float64"), make()
            feedback = ErrorFeedback(model, group, compressor)
            found.append((type(compressor).__name__, 8 * n, partial(call, feedback, model.weight)))
    return found


def _messages(group: Group, repeats: int, curves: dict[tuple | str, Curve]) -> float:
    """Add what sends and receives take between pairs of ranks; return the delay of a message."""
    peer = group.rank ^ 1
    for n in (1 << 6, 1 << 13, 1 << 17):
        x = np.ones(n)
        for name, call in (("send", partial(group.send, x)), ("recv", group.recv)):
            seconds = core_seconds(group, partial(call, peer), repeats)
            curves[name].append((x.nbytes, seconds))
    trip = there_and_back(group.rank, partial(group.send, np.ones(1)), group.recv)
    one_way = median_seconds(trip, group.barrier, 10 * repeats) / 2
    return max(0.0, one_way - sum(at(curves[name], 8) for name in ("send", "recv")))


def merged(several: list[Rates]) -> Rates:
    """Return the medians, point by point, of rates that were measured one after the other."""
    curves = {}
    for key in several[0].curves:
        points = zip(*(rates.curves[key] for rates in several), strict=True)
        curves[key] = [(same[0][0], median(seconds for _, seconds in same)) for same in points]
    return Rates(curves, median(r.delay for r in several), mean(r.cores for r in several))
