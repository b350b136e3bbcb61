"""Replay a pipeline's programs on virtual clocks: makespan, bubbles, stash, timeline, deadlocks.

Every rank is a coroutine with its own clock. It runs through its program and stops only if it needs
something that does not exist yet: a message, or room in a buffer. Every such thing gets a time when
it is made; the rank that needs it moves its own clock to that time or later. So no queue of events
is sorted, and the cost of an action does not depend on the number of ranks. Each thing is made by
one rank and needed by one rank; therefore the result does not depend on the order in which the
ranks are resumed (a Kahn process network: Kahn, The Semantics of a Simple Language for Parallel
Programming, 1974). A rank has a second clock, for R: one begins where the rank is then, or when the
R before it has ended; and nothing waits for it but the end. It knows actions, not schedules. All
arithmetic is +, / and comparison: Fractions stay exact.
"""

from collections import Counter, deque
from collections.abc import Callable, Generator, Hashable
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from numbers import Integral, Rational, Real

from minidist.events import Event, EventLog
from minidist.pipeline_parallel.actions import (
    RECEIVES,
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Reduce,
    Transfer,
    Update,
    other_end,
)
from minidist.pipeline_parallel.communication import add_communication
from minidist.pipeline_parallel.execution_order import Stuck, message
from minidist.pipeline_parallel.placement import communicates, last_stage, placement_of
from minidist.pipeline_parallel.timed_order import is_duration

Time = float  # or a Fraction, with which all arithmetic is exact
Process = Generator[Hashable, None, tuple]  # a rank: waits for things; returns its result
Wait = Generator[Hashable, None, Time]  # waits for things; returns a time
BESIDE = "communication", 0, "sums"  # category, bytes and thread of an R, as in a real run


@dataclass(frozen=True)
class Simulation:
    """The result of a replay. Times are in the unit of the durations.

    makespan      from zero to the end of the last action, which may be an R
    spans         per rank, from the start of its first compute action to the end of its last
    busy          per rank, the time it computes; not the time of an R, which runs beside it
    peak_stash    per rank, the most forward passes at once that wait for (the last part of) their
                  backward, in stages: a pass through one of v chunks counts 1/v; v is the mean over
                  the ranks, if they have different numbers of chunks
    """

    makespan: Time
    spans: list
    busy: list
    peak_stash: list
    _replay: "Replay" = field(repr=False, compare=False)

    @property
    def unit(self) -> str:
        """The unit of times: "units", or "s" if the durations were measured."""
        return self._replay.unit

    @property
    def span(self):
        """The longest of the ranks' own spans."""
        return max(self.spans, default=0)

    @property
    def bubble(self):
        """The share of makespan times ranks in which nothing is computed: the idle share."""
        return self._idle_share(self.makespan)

    @property
    def span_bubble(self):
        """The idle share of the longest span, counted from each rank's own start."""
        return self._idle_share(self.span)

    def _idle_share(self, whole):
        whole = len(self.busy) * whole
        return 1 - divided(sum(self.busy), whole) if whole else 0

    @property
    def timeline(self) -> EventLog:
        """All actions that take time, and waiting transfers, as events; runs the replay again."""
        log = EventLog(unit=self._replay.unit)

        def see(r: int, action: Action, start: Time, end: Time, clock: Time, *more) -> None:
            if end > start:
                log.events.append(Event(r, str(action), start, end, *more))

        self.replay(see)
        return log

    def replay(self, see: Callable[..., None]) -> None:
        """Run again; call see(rank, action, start, end, when the rank goes on, category, ...)."""
        self._replay.run(see)


def simulate(
    programs: list[list[Action]],
    forward=1,
    backward_input=1,
    backward_weight=1,
    latency=0,
    bandwidth=None,
    buffer: int | None = None,
    update=0,
    reduce=0,
    overhead=0,
    unit: str = "units",
    backward=None,
) -> Simulation:
    """Replay programs; transfers are added if the programs have none.

    forward, backward_input, backward_weight, update, reduce
               duration for one full stage: a number, or a list of one per virtual stage, or of one
               per rank. A chunk takes 1/v of it where it is not given per virtual stage, with
               v chunks per rank: the mean for one number, the rank's own for one per rank.
    backward   duration of a B, of a full stage; None: as long as its two halves
    latency    time of a transfer
    bandwidth  transfers per unit of time: one takes latency + 1/bandwidth; None: latency alone
    buffer     how many activations from one virtual stage to the next, or gradients back, may wait
               to be received; a sender of one more waits. 0: rendezvous, both ends wait until the
               transfer is done. None: no bound.
    overhead   how long a transfer to another rank blocks its sender
    unit       unit of the durations, for pictures: "s" if they were measured

    A deadlock raises Stuck, which names the action before which each rank waits.
    """
    if buffer is not None and not (isinstance(buffer, Integral) and buffer >= 0):
        raise ValueError(f"a buffer has room for 0 or more messages, not {buffer!r}")
    rate_ok = bandwidth is None or (isinstance(bandwidth, Real | Decimal) and float(bandwidth) > 0)
    if not (is_duration(latency) and rate_ok):
        raise ValueError(f"no transfer has latency {latency!r} and bandwidth {bandwidth!r}")
    if not is_duration(overhead):
        raise ValueError(f"an overhead is a number from 0, not {overhead!r}")
    if buffer is not None and not communicates(programs):
        programs = add_communication(programs)
    given: dict[type[Action], object] = {Forward: forward, BackwardInput: backward_input}
    given |= {BackwardWeight: backward_weight, Update: update, Reduce: reduce}
    durations = {kind: _per_chunk(programs, each) for kind, each in given.items()}
    inputs, weights = durations[BackwardInput], durations[BackwardWeight]
    whole = [[a + b for a, b in zip(*r, strict=True)] for r in zip(inputs, weights, strict=True)]
    durations[Backward] = whole if backward is None else _per_chunk(programs, backward)
    delay = latency if bandwidth is None else latency + divided(1, bandwidth)
    return Replay(programs, durations, delay, overhead, buffer, unit).run()


def _per_chunk(programs, given) -> list[list]:
    """Return the duration per rank and chunk."""
    placement = placement_of(programs)
    stages, p = 1 + last_stage(placement), len(programs)
    one = not hasattr(given, "__len__")
    given = [given] if one else list(given)
    if wrong := [time for time in given if not is_duration(time)]:
        raise ValueError(f"a duration is a number from 0, not {wrong[0]!r}")
    if one:
        return [[divided(given[0], _mean_chunks(placement)) for _ in own] for own in placement]
    if len(given) == stages:
        return [[given[k] for k in own] for own in placement]
    if len(given) == p:
        return [[divided(given[r], len(own)) for _ in own] for r, own in enumerate(placement)]
    counts = f"{len(given)} durations for {p} ranks with {stages} virtual stages"
    raise ValueError(f"{counts}: give one number, {f'{p}, ' if p < stages else ''}or {stages}")


def _mean_chunks(placement: list[list[int]]) -> Time:
    return divided(sum(map(len, placement)), len(placement))


def divided(a, b):
    """Divide, exactly where both are exact."""
    if isinstance(a, int) and isinstance(b, int) and b and a % b == 0:
        return a // b  # faster than a Fraction, in all that is added to it
    return Fraction(a) / b if isinstance(a, Rational) and isinstance(b, Rational) else a / b


class Replay:
    """The clocks of all ranks, and the time at which each message or slot was made."""

    def __init__(self, programs, durations: dict, delay, overhead, buffer: int | None, unit: str):
        self.programs, self.durations, self.delay, self.buffer = programs, durations, delay, buffer
        self.overhead, self.unit = overhead, unit
        self.placement, self.explicit = placement_of(programs), communicates(programs)
        self.last, self.v = last_stage(self.placement), _mean_chunks(self.placement)

    def run(self, see: Callable[..., None] | None = None) -> Simulation:
        """Run all programs to their ends, and show `see` each action; Stuck if all wait."""
        p, results = len(self.programs), {}
        self.times: dict[Hashable, Time] = {}  # of what exists
        self.senders: dict[Hashable, int] = {}  # of what a neighbouring stage has made
        self.waiting: dict[Hashable, tuple[int, Process]] = {}  # which rank waits for it
        self.sent, self.taken = Counter[tuple](), Counter[tuple]()  # messages per lane
        self.before: dict[int, Action] = {}  # where a rank waits
        self.ready: deque[tuple[int, Process]] = deque((r, self._rank(r, see)) for r in range(p))
        while self.ready:
            rank, process = self.ready.popleft()
            try:
                self.waiting[next(process)] = rank, process
            except StopIteration as finished:
                results[rank] = finished.value
        if len(results) < p:
            raise Stuck.at({r: self.before[r] for r in range(p) if r not in results})
        ends, spans, busy, peaks = map(list, zip(*(results[r] for r in range(p)), strict=True))
        return Simulation(max(ends), spans, busy, peaks, self)

    def _make(self, thing, time) -> None:
        self.times[thing] = time
        if thing in self.waiting:
            self.ready.append(self.waiting.pop(thing))

    def _need(self, rank: int, action: Action, thing: Hashable) -> Wait:
        """Wait until a thing exists; return its time and remove it: only one rank needs it."""
        if thing not in self.times:
            self.before[rank] = action
            yield thing
        return self.times.pop(thing)

    def _rank(self, r: int, see: Callable[..., None] | None) -> Process:
        """Run one program; return (end, span, busy, peak stash)."""
        nothing: Time = 0  # whole, so that Fractions stay exact
        clock = busy = end = summed = nothing  # summed: when all R so far have ended
        first: Time | None = None
        stash = peak = 0
        own = self.placement[r]
        for action in self.programs[r]:
            if type(action) is Reduce:  # beside what follows
                start = max(clock, summed)
                summed = start + self.durations[Reduce][r][action.chunk]
                if see:
                    see(r, action, start, summed, clock, *BESIDE)
                continue
            start, compute = clock, not isinstance(action, Transfer)
            if isinstance(action, Transfer):
                clock = yield from self._transfer(r, action, clock)
            else:
                kind, m, k = type(action), action.micro_batch, own[action.chunk]
                forward, gradient = kind is Forward, kind is Backward or kind is BackwardInput
                if not self.explicit and (k > 0 if forward else gradient and k < self.last):
                    time = yield from self._need(r, action, (forward, k, m))
                    here = self.senders.pop((forward, k, m)) == r
                    start = max(clock, time if here else time + self.delay)
                elif kind is Update:
                    start = yield from self._meet_replicas(r, action, k, clock)
                clock = end = start + self.durations[kind][r][action.chunk]
                if not self.explicit and (k < self.last if forward else gradient and k > 0):
                    following = k + 1 if forward else k - 1
                    self.senders[forward, following, m] = r
                    self._make((forward, following, m), end)
                    clock += 0 if following in own else self.overhead
                if forward:
                    stash += 1
                    peak = max(peak, stash)
                elif kind is Backward or kind is BackwardWeight:
                    stash -= 1
                first = start if first is None else first
                busy += end - start
            if see:
                category = "compute" if compute else "communication"
                see(r, action, start, end if compute else clock, clock, category)
        span = 0 if first is None else end - first
        return max(clock, summed), span, busy, divided(peak, self.v)

    def _meet_replicas(self, r: int, action: Action, k: int, clock: Time) -> Wait:
        """Wait until all ranks that hold this stage have reached this update."""
        others = [q for q, own in enumerate(self.placement) if k in own and q != r]
        for q in others:
            self._make((Update, k, action.micro_batch, r, q), clock)
        for q in others:
            thing = (Update, k, action.micro_batch, q, r)
            clock = max(clock, (yield from self._need(r, action, thing)))
        return clock

    def _transfer(self, r: int, action: Transfer, clock: Time) -> Wait:
        """Do one end of a transfer; return the time when the rank goes on."""
        receives = type(action) in RECEIVES
        sender, send = (action.peer, other_end(action, r)) if receives else (r, action)
        thing, lane = message(sender, send), (type(send), sender, send.chunk, send.peer)
        bound, delay = (None, 0) if sender == send.peer else (self.buffer, self.delay)
        if receives:
            clock = max(clock, (yield from self._need(r, action, thing)))
            clock += delay if bound == 0 else 0  # both ends wait for the transfer
            if bound is not None:
                self._make((lane, self.taken[lane]), clock)
                self.taken[lane] += 1
            return clock
        room = (lane, self.sent[lane] - (bound or 0))
        self.sent[lane] += 1
        if bound and room[1] >= 0:
            clock = max(clock, (yield from self._need(r, action, room)))
        self._make(thing, clock if bound == 0 else clock + delay)
        if bound == 0:
            return max(clock, (yield from self._need(r, action, room)))
        return clock if sender == send.peer else clock + self.overhead
