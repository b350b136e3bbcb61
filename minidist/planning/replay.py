"""Replay a pipeline's programs on virtual clocks: what simulator.py asks for, action by action.

Every rank is a coroutine with its own clock. It runs through its program and stops only if it needs
something that does not exist yet: a message, or room in a buffer. Every such thing gets a time when
it is made; the rank that needs it moves its own clock to that time or later. So no queue of events
is sorted, and the cost of an action does not depend on the number of ranks. Each thing is made by
one rank and needed by one rank; therefore the result does not depend on the order in which the
ranks are resumed (a Kahn process network: Kahn, The Semantics of a Simple Language for Parallel
Programming, 1974). A rank has a second clock, for R: one begins where the rank is then, or when the
R before it has ended; and nothing waits for it but the end. It knows actions, not schedules. All
arithmetic is + and comparison, of whole numbers if the durations are exact. On one core of an AMD
EPYC, for p = 16 and m = 256, 1.3 (layer_split) to 2.7 (gpipe) million actions per second; if their
transfers are written out, 1.0 to 1.5: time simulate(programs("gpipe", 16, 256)).
"""

from collections import defaultdict, deque
from collections.abc import Callable, Generator, Hashable
from decimal import Decimal
from fractions import Fraction
from functools import partial
from math import lcm
from numbers import Integral, Rational
from typing import Any

from minidist.pipeline_parallel.actions import (
    COMPUTE,
    RECEIVES,
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Reduce,
    Transfer,
    Update,
    communicates,
    last_stage,
    placement_of,
)
from minidist.pipeline_parallel.execution_order import Stuck

Time = float  # or a Fraction, with which all arithmetic is exact
Process = Generator[tuple, None, tuple]  # a rank: waits for things; returns its result
Wait = Generator[tuple, None, Time]  # waits for things; returns a time
BESIDE = "communication", 0, "sums"  # category, bytes and thread of an R, as in a real run


def divided(a, b):
    """Divide, exactly where both are exact."""
    if isinstance(a, int) and isinstance(b, int) and b and a % b == 0:
        return a // b  # faster than a Fraction, in all that is added to it
    return Fraction(a) / b if isinstance(a, Rational) and isinstance(b, Rational) else a / b


def mean_chunks(placement: list[list[int]]) -> Time:
    return divided(sum(map(len, placement)), len(placement))


class Lane(dict[int, Any]):
    """What has been made for one end and is not needed yet, by number; and who waits for which."""

    __slots__ = "sent", "taken", "waiting"

    def __init__(self) -> None:
        self.waiting: dict[int, tuple[int, Process]] = {}
        self.sent = self.taken = 0  # through a buffer


class Replay:
    """The clocks of all ranks, and the lanes in which things have the time when they were made.

    A lane is for what a stage gets from a neighbour, for the messages or the room of a buffer, or
    for what replicas tell each other. In here exact times are whole, see `fast`.
    """

    def __init__(self, programs, durations: dict, delay, overhead, buffer: int | None):
        self.programs, self.buffer = programs, buffer
        self.placement, self.explicit = placement_of(programs), communicates(programs)
        self.last = last_stage(self.placement)
        self.replicated = sum(map(len, self.placement)) > self.last + 1
        every = [time for ranks in durations.values() for own in ranks for time in own]
        number, self.outside = fast([*every, delay, overhead])
        self.delay, self.overhead = number(delay), number(overhead)
        self.durations = {
            kind: [[number(time) for time in own] for own in ranks]
            for kind, ranks in durations.items()
        }

    def run(self, see: Callable[..., None] | None = None) -> tuple[list, list, list, list]:
        """Run all programs to their ends, and show `see` each action; Stuck if all wait.

        Return ends, spans, busy times and peaks of the stash, in stages: each per rank.
        """
        p, results = len(self.programs), {}
        self.lanes: dict[Hashable, Lane] = defaultdict(Lane)
        self.before: dict[int, Action] = {}  # where a rank waits
        show = see and partial(self._show, see)
        self.ready: deque[tuple[int, Process]] = deque((r, self._rank(r, show)) for r in range(p))
        while self.ready:
            rank, process = self.ready.popleft()
            try:
                lane, number = next(process)
                lane.waiting[number] = rank, process
            except StopIteration as finished:
                results[rank] = finished.value
        if len(results) < p:
            raise Stuck.at({r: self.before[r] for r in range(p) if r not in results})
        *times, peaks = zip(*(results[r] for r in range(p)), strict=True)
        ends, spans, busy = (list(map(self.outside, each)) for each in times)
        v = mean_chunks(self.placement)
        return ends, spans, busy, [divided(n, v) for n in peaks]

    def _show(self, see, r: int, action: Action, start: Time, end: Time, clock: Time, *more):
        see(r, action, self.outside(start), self.outside(end), self.outside(clock), *more)

    def _make(self, lane: Lane, number: int, thing) -> None:
        lane[number] = thing
        if number in lane.waiting:
            self.ready.append(lane.waiting.pop(number))

    def _need(self, rank: int, action: Action, lane: Lane, number: int) -> Wait:
        """Wait until a thing exists; return it and remove it: only one rank needs it."""
        if number not in lane:
            self.before[rank] = action
            yield lane, number
        return lane.pop(number)

    def _passes(self, kind: type[Action], r: int) -> list[tuple]:
        """Return what all actions of a kind have in common, per chunk of a rank.

        That is (duration, lane that it needs, lane that it gives to, how long the rank is blocked
        after it, change of the stash).
        """
        forward, gradient, own = kind is Forward, kind in (Backward, BackwardInput), []
        change = 1 if forward else -1 if kind in (Backward, BackwardWeight) else 0
        step = 1 if forward else -1 if gradient else 0  # to the stage that needs the result
        for k, duration in zip(self.placement[r], self.durations[kind][r], strict=True):
            crosses = step and not self.explicit
            source = self.lanes[step, k] if crosses and 0 <= k - step <= self.last else None
            target = self.lanes[step, k + step] if crosses and 0 <= k + step <= self.last else None
            pause = 0 if k + step in self.placement[r] else self.overhead
            own.append((duration, source, target, pause, change))
        return own

    def _rank(self, r: int, see: Callable[..., None] | None) -> Process:
        """Run one program; return (end, span, busy, most passes in the stash)."""
        nothing: Time = 0
        clock = busy = end = summed = nothing  # summed: when all R so far have ended
        first: Time | None = None
        stash = peak = 0
        delay, ready = self.delay, self.ready
        passes = {kind: self._passes(kind, r) for kind in COMPUTE}
        for action in self.programs[r]:
            start, kind, m = clock, type(action), action.micro_batch
            if kind in passes:
                duration, source, target, pause, change = passes[kind][action.chunk]
                if source is not None:
                    if m not in source:  # `_need` and `_make` are written out: most time is here
                        self.before[r] = action
                        yield source, m
                    time, maker = source.pop(m)
                    if maker != r:
                        time += delay
                    if time > clock:
                        start = time
                elif kind is Update and self.replicated:
                    start = yield from self._meet_replicas(r, action, clock)
                clock = end = start + duration
                if target is not None:
                    target[m] = end, r
                    if m in target.waiting:
                        ready.append(target.waiting.pop(m))
                    clock += pause
                stash += change
                if stash > peak:
                    peak = stash
                if first is None:
                    first = start
                busy += duration
            elif kind is Reduce:  # beside what follows
                start = max(clock, summed)
                summed = start + self.durations[Reduce][r][action.chunk]
            else:
                clock = yield from self._transfer(r, action, clock)
            if see is None:
                continue
            if kind is Reduce:
                see(r, action, start, summed, clock, *BESIDE)
            elif kind in passes:
                see(r, action, start, end, clock, "compute")
            else:
                see(r, action, start, clock, clock, "communication")
        span = 0 if first is None else end - first
        return max(clock, summed), span, busy, peak

    def _meet_replicas(self, r: int, action: Action, clock: Time) -> Wait:
        """Wait until all ranks that hold this stage have reached this update."""
        k, m = self.placement[r][action.chunk], action.micro_batch
        others = [q for q, own in enumerate(self.placement) if k in own and q != r]
        for q in others:
            self._make(self.lanes[Update, k, r, q], m, clock)
        for q in others:
            clock = max(clock, (yield from self._need(r, action, self.lanes[Update, k, q, r], m)))
        return clock

    def _transfer(self, r: int, action: Transfer, clock: Time) -> Wait:
        """Do one end of a transfer; return the time when the rank goes on."""
        kind, m, here, there = type(action), action.micro_batch, r, action.peer
        near, far = action.chunk, action.peer_chunk
        receives, within = kind in RECEIVES, here == there
        bound, delay = (None, 0) if within else (self.buffer, self.delay)
        if receives:
            kind, here, there, near, far = RECEIVES[kind], there, here, far, near
        messages = self.lanes[kind, here, there, far]
        rooms = self.lanes["room", kind, here, near, there]
        if receives:
            clock = max(clock, (yield from self._need(r, action, messages, m)))
            clock += delay if bound == 0 else 0  # both ends wait for the transfer
            if bound is not None:
                self._make(rooms, rooms.taken, clock)
                rooms.taken += 1
            return clock
        room = rooms.sent - (bound or 0)
        rooms.sent += 1
        if bound and room >= 0:
            clock = max(clock, (yield from self._need(r, action, rooms, room)))
        self._make(messages, m, clock if bound == 0 else clock + delay)
        if bound == 0:
            return max(clock, (yield from self._need(r, action, rooms, room)))
        return clock if within else clock + self.overhead


def fast(times: list) -> tuple[Callable, Callable]:
    """Return (inside, outside): one makes times fast to add, the other takes sums of them back.

    Exact times become whole, others floats; Decimals and what is among them stay.
    """
    if all(isinstance(time, Integral) for time in times):
        return int, same
    if all(isinstance(time, Rational) for time in times):
        parts = lcm(*(int(time.denominator) for time in times))
        return (
            lambda time: int(time.numerator) * parts // int(time.denominator),
            lambda time: Fraction(time, parts),
        )
    return (same if any(isinstance(time, Decimal) for time in times) else float), same


def same(time: Time) -> Time:
    return time
