"""What each rank does in one step of a strategy, in order, counted without a clock.

A step with AdamW runs once on real ranks, watched as in observe/costs: a graph shows which
functions it computes and on how many numbers, the group what is sent, to whom, and who meets. Its
products and bytes are those of the strategy's closed forms.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from minidist import nn
from minidist.autograd import Function, Tensor, functions_below
from minidist.autograd.convolution import Convolution
from minidist.autograd.kept import arrays
from minidist.backend import Array, address, keep_freed_memory
from minidist.comm import Group
from minidist.context_parallel.gathered_attention import OwnQueries
from minidist.context_parallel.ring_attention import RingAttention
from minidist.observe.machine.timed_functions import windowed
from minidist.verify.strategies import STRATEGIES, Case
from minidist.verify.watch import Watch, products


class Operation(NamedTuple):
    """A function of a graph: its size in multiply-adds, or, if it has no product, in numbers."""

    kind: str
    size: int
    itemsize: int


class Pass(NamedTuple):
    """A forward pass, whose backward is to come."""

    operations: tuple[Operation, ...]


class Act(NamedTuple):
    """The begin, or the end, of an action of a pipeline: "F0", "W1 W2"."""

    name: str
    begins: bool


class Call(NamedTuple):
    """A collective or a message of this rank.

    bytes  that this rank gives: the size of its array
    ranks  of the group; of a message, its sender and its receiver
    key    what distinguishes a group, or a lane of messages, from others of the same ranks
    own    whether the rank's main thread calls it
    """

    name: str
    bytes: int
    ranks: tuple[int, ...]
    key: tuple
    own: bool


class Mark(NamedTuple):
    """Where a step begins, has sent all, or is done; and how many numbers this rank updates."""

    what: str
    numbers: int = 0


class Log(list):
    """The trace of a rank, in the place of its event log: pipelines log their actions there."""

    rank, clock = 0, None

    @contextmanager
    def span(self, name: str, category: str = "compute") -> Iterator[None]:
        self.append(Act(name, True))
        yield
        self.append(Act(name, False))


class TracedGroup(Group):
    """A group that writes each call of this rank into its trace; so do those split from it."""

    log: Log  # type: ignore[assignment]  # a pipeline needs only `span` of it, as of an EventLog

    def _group_of(self, ranks, kind, within_host=False):
        group = super()._group_of(ranks, kind, within_host)
        if isinstance(group, TracedGroup):
            group.log = self.log
        return group

    def _note(self, name: str, nbytes: int, ranks: tuple[int, ...], key: tuple = ()) -> None:
        thread = threading.current_thread()
        own = thread is threading.main_thread() or thread.name.startswith("rank ")
        self.log.append(Call(name, nbytes, ranks, (self.splits, *key), own))

    def send(self, array, to, tag=0):
        self._note("send", array.nbytes, (self.members[self.rank], self.members[to]), (tag,))
        super().send(array, to, tag)

    def recv(self, source, tag=0):
        array = super().recv(source, tag)
        ranks = self.members[source], self.members[self.rank]
        self._note("recv", array.nbytes, ranks, (tag,))
        return array

    def recv_any(self, sources=None, tag=0):
        source, array = super().recv_any(sources, tag)
        ranks = self.members[source], self.members[self.rank]
        self._note("recv", array.nbytes, ranks, (tag,))
        return source, array

    def all_reduce(self, x, *args, out=None, **options):
        in_place = out is not None and address(out) == address(x)
        name = "all_reduce in place" if in_place else "all_reduce"
        self._note(name, x.nbytes, tuple(self.members))
        return super().all_reduce(x, *args, out=out, **options)

    def reduce_scatter(self, x, *args, **options):
        self._note("reduce_scatter", x.nbytes, tuple(self.members))
        return super().reduce_scatter(x, *args, **options)

    def all_gather(self, x, *args, **options):
        self._note("all_gather", x.nbytes, tuple(self.members))
        return super().all_gather(x, *args, **options)

    def all_to_all(self, pieces, *args, **options):
        self._note("all_to_all", sum(p.nbytes for p in pieces), tuple(self.members))
        return super().all_to_all(pieces, *args, **options)

    def barrier(self, *args, **options):
        self._note("barrier", 0, tuple(self.members))
        return super().barrier(*args, **options)


class Tracer(Watch):
    """A watch that writes what it sees into the trace."""

    def __init__(self, group: TracedGroup):
        super().__init__()
        self.log = group.log

    def model(self, model):
        super().model(model)
        self.log.append(Mark("begin"))

    def stages(self, stages, model):
        super().stages(stages, model)
        self.log.append(Mark("begin"))

    def graph(self, y: Tensor, others=(), parameters=()) -> Tensor:
        super().graph(y, others, parameters)
        self.log.append(Pass(tuple(o for f in functions_below(y) for o in operations(f))))
        return y

    def compressor(self, compress: Callable) -> Callable:
        return TracedCompressor(compress, self.log)

    def sends(self, nbytes):
        super().sends(nbytes)
        self.log.append(Mark("sent"))

    def holds(self, homes, optimizer=None, **more):
        super().holds(homes, optimizer, **more)
        updated = [] if optimizer is None else optimizer.parameters
        self.log.append(Mark("end", sum(p.size for p in updated)))


class TracedCompressor:
    """A compressor whose sum of one gradient is one call, whatever it gathers for that."""

    def __init__(self, compress: Callable, log: Log):
        self.compress, self.log, self.q = compress, log, getattr(compress, "q", {})

    def __call__(self, v: Array, p: nn.Parameter, group: Group, step: int) -> Array:
        before, name = len(self.log), type(self.compress).__name__
        sent = self.compress(v, p, group, step)
        self.log[before:] = [Call(name, v.nbytes, tuple(group.members), (), own=True)]
        return sent


def operations(function: Function) -> list[Operation]:
    """Return the kind and the size of what a function computes: one, or one per tile."""
    saved = [value for key, value in vars(function).items() if key != "inputs"]
    held = [a for a in arrays(saved) if a.dtype.kind == "f"]
    numbers = max([int(np.prod(function.result_shape)), *(a.size for a in held)])
    itemsize = min((a.itemsize for a in held), default=8)
    kind, work = type(function).__name__, products(function)
    match function:
        case Convolution():
            return [Operation(kind, windowed(work, function.result_shape[1]), itemsize)]
        case RingAttention(held=ranks):
            tiles = [tile for source in range(len(ranks)) for tile in function.tiles(source)]
            return [Operation(kind, work // len(tiles), itemsize)] * len(tiles)
        case OwnQueries():
            tiles = list(function.tiles())
            return [Operation("RingAttention", work // len(tiles), itemsize)] * len(tiles)
    return [Operation(SIMILAR.get(kind, kind), work or numbers, itemsize)]


SIMILAR = {  # with a collective inside; but for that, like a function that is timed
    "GatheredLinear": "Linear",
    "GatheredProducts": "Linear",
    "VocabParallelCrossEntropy": "CrossEntropy",
}


def trace(group: Group, name: str, case: Case) -> Log:
    """Run one step of a strategy; return what this rank has done from its begin to its end."""
    keep_freed_memory()
    traced = TracedGroup(group.fabric, group.members, (), group.communicator)
    traced.log = Log()
    STRATEGIES[name].step(traced, case.to(group.device), Tracer(traced))
    first = next((i for i, e in enumerate(traced.log) if e == Mark("begin")), 0)
    return Log(traced.log[first:])


def used(traces: list[Log]) -> set:
    """Return what a step asks of the rates: keys of functions, and names of collectives."""
    entries = [entry for trace in traces for entry in trace]
    graphs = [entry for entry in entries if isinstance(entry, Pass)]
    functions = {(o.kind, o.itemsize) for graph in graphs for o in graph.operations}
    return functions | {entry.name for entry in entries if isinstance(entry, Call)}
