"""How long a pipeline's programs take: makespan, bubbles, stash, timeline, deadlocks.

The replay is in replay.py. Fractions stay exact.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from numbers import Integral, Real

from minidist.errors import WrongInput
from minidist.events import Event, EventLog
from minidist.pipeline_parallel.actions import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Reduce,
    Update,
    communicates,
    last_stage,
    placement_of,
)
from minidist.pipeline_parallel.communication import add_communication
from minidist.pipeline_parallel.timed_order import is_duration
from minidist.planning.replay import Replay, Time, divided, mean_chunks


@dataclass(frozen=True)
class Simulation:
    """The result of a replay. Times are in the unit of the durations.

    makespan      from zero to the end of the last action, which may be an R
    spans         per rank, from the start of its first compute action to the end of its last
    busy          per rank, the time it computes; not the time of an R, which runs beside it
    peak_stash    per rank, the most forward passes at once that wait for (the last part of) their
                  backward, in stages: a pass through one of v chunks counts 1/v; v is the mean over
                  the ranks, if they have different numbers of chunks
    unit          of times: "units", or "s" if the durations were measured
    """

    makespan: Time
    spans: list
    busy: list
    peak_stash: list
    _replay: Replay = field(repr=False, compare=False)
    unit: str = field(default="units", compare=False)

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
        log = EventLog(unit=self.unit)

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
        raise WrongInput(f"a buffer has room for 0 or more messages, not {buffer!r}")
    rate_ok = bandwidth is None or (isinstance(bandwidth, Real | Decimal) and float(bandwidth) > 0)
    if not (is_duration(latency) and rate_ok):
        raise WrongInput(f"no transfer has latency {latency!r} and bandwidth {bandwidth!r}")
    if not is_duration(overhead):
        raise WrongInput(f"an overhead is a number from 0, not {overhead!r}")
    if buffer is not None and not communicates(programs):
        programs = add_communication(programs)
    given: dict[type[Action], object] = {Forward: forward, BackwardInput: backward_input}
    given |= {BackwardWeight: backward_weight, Update: update, Reduce: reduce}
    durations = {kind: _per_chunk(programs, each) for kind, each in given.items()}
    inputs, weights = durations[BackwardInput], durations[BackwardWeight]
    whole = [[a + b for a, b in zip(*r, strict=True)] for r in zip(inputs, weights, strict=True)]
    durations[Backward] = whole if backward is None else _per_chunk(programs, backward)
    delay = latency if bandwidth is None else latency + divided(1, bandwidth)
    replay = Replay(programs, durations, delay, overhead, buffer)
    ends, spans, busy, stash = replay.run()
    return Simulation(max(ends), spans, busy, stash, replay, unit)


def _per_chunk(programs, given) -> list[list]:
    """Return the duration per rank and chunk."""
    placement = placement_of(programs)
    stages, p = 1 + last_stage(placement), len(programs)
    one = not hasattr(given, "__len__")
    given = [given] if one else list(given)
    if wrong := [time for time in given if not is_duration(time)]:
        raise WrongInput(f"a duration is a number from 0, not {wrong[0]!r}")
    if one:
        return [[divided(given[0], mean_chunks(placement)) for _ in own] for own in placement]
    if len(given) == stages:
        return [[given[k] for k in own] for own in placement]
    if len(given) == p:
        return [[divided(given[r], len(own)) for _ in own] for r, own in enumerate(placement)]
    counts = f"{len(given)} durations for {p} ranks with {stages} virtual stages"
    raise WrongInput(f"{counts}: give one number, {f'{p}, ' if p < stages else ''}or {stages}")
