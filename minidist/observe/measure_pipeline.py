"""Run a pipeline's schedule for real, and simulate it with the durations measured in that run.

    measured = measure_pipeline("1f1b", stages=2, micro_batches=8)
    print(timeline.text(measured.log), timeline.text(measured.simulation.timeline), measured.ratio)

Every stage is two layers of an MLP, large enough that an action takes some milliseconds; a rank has
one BLAS thread. The log of the run gives the seconds of each action, of a send, and of a message:
from the start of its send to the end of its receive, if the receiver was waiting. A simulation that
knows only these and the schedule should predict the time of the real run, if there are as many
cores as ranks.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from statistics import mean, median

import numpy as np
from threadpoolctl import threadpool_limits

from minidist import nn, optim
from minidist.backend import to_device
from minidist.comm import Group, Mesh, run
from minidist.errors import WrongInput
from minidist.events import Event, EventLog
from minidist.nn.datasets import Batch
from minidist.observe.timeline.lines import kind as kind_of
from minidist.pipeline_parallel import (
    PipeDream,
    Pipeline,
    add_communication,
    add_reductions,
    programs,
)
from minidist.pipeline_parallel.actions import (
    COMPUTE,
    SENDS,
    Action,
    BackwardWeight,
    Programs,
    Reduce,
    Transfer,
    last_stage,
    other_end,
)
from minidist.pipeline_parallel.execution_order import message
from minidist.pipeline_parallel.executor import steps
from minidist.pipeline_parallel.schedules import order_of, takes
from minidist.planning import Simulation, simulate
from minidist.rng import generator
from minidist.verify.strategies import STRATEGIES

WARM_UP = 2  # steps that are not counted
HALVES = {"forward": "F", "backward_input": "I", "backward_weight": "W"}


@dataclass(frozen=True)
class Measured:
    """A real run and its simulation; times are seconds.

    log         of the step whose makespan is the median, from zero
    makespans   of all measured steps, from the start of the first action to the end of the last
    durations   {"F": [per virtual stage], "B": ..., "U": ..., "R": ...}: medians; means for W,
                because several may be computed together
    overhead    median time of a send to another rank
    latency     median time from the start of a send to the end of a receive that waited for it
    simulation  the result with these durations, this overhead and this latency
    """

    log: EventLog
    makespans: list[float]
    durations: dict[str, list[float]]
    overhead: float
    latency: float
    simulation: Simulation

    @property
    def makespan(self) -> float:
        return median(self.makespans)

    @property
    def ratio(self) -> float:
        """Real over simulated makespan."""
        return self.makespan / self.simulation.makespan


def measure_pipeline(
    schedule: str | Programs,
    stages: int,
    micro_batches: int,
    chunks: int | None = 1,
    width: int = 1024,
    rows: int = 64,
    repeats: int = 5,
    timeout: float | None = None,
    device: str = "cpu",
    copies: int = 1,
    **options,
) -> Measured:
    """Run a schedule on `stages` processes: first warm up, then measure steps; simulate it.

    schedule     a name; or programs of your own, which say themselves how many chunks there are
    width, rows  shape of X[rows, width], one micro-batch's activation and input of a stage
    repeats      number of measured steps
    device       where the ranks compute; on a GPU the log has its times, not the host's
    copies       of the whole pipeline, each on `stages` processes; the gradients are summed over
                 them, stage by stage, at R. The log is the first copy's
    options      options of the schedule, see `programs`
    """
    if isinstance(schedule, str):
        bare = programs(schedule, stages, micro_batches, chunks or 1, **options)
    else:
        bare, chunks = order_of(schedule, stages, micro_batches, **options), None
    if copies > 1:
        bare = add_reductions(bare)
    if options.get("replicas"):
        raise WrongInput("a pipeline with replicas of a stage is not measured; leave them out")
    stage_count = 1 + last_stage(bare.placement)
    ranks, log, order = stages * copies, EventLog(), (schedule, micro_batches, chunks, options)
    settings = order, stage_count, (rows, width), WARM_UP + repeats, copies
    parts = run(_worker, ranks, *settings, timeout=timeout, device=device, log=log)
    runs = [EventLog([e for steps in parts for e in steps[i]]) for i in range(repeats)]
    spans = [max(e.end for e in r.events) - min(e.start for e in r.events) for r in runs]
    firsts, *others = ([_of_copy(r, copy, stages) for r in runs] for copy in range(copies))
    durations, overhead, latency = _medians(bare, sum(others, firsts))
    simulation = simulate(
        bare,
        forward=durations["F"],
        backward_input=durations["I"],
        backward_weight=durations["W"],
        backward=durations["B"],
        update=durations["U"],
        reduce=durations["R"],
        latency=latency,
        overhead=overhead,
        unit="s",
    )
    middle = sorted(range(repeats), key=spans.__getitem__)[repeats // 2]
    return Measured(firsts[middle].from_zero(), spans, durations, overhead, latency, simulation)


def measured_times(schedule: str | Programs, *shape, **settings) -> dict:
    """Return the times of a run, as options of a schedule that is searched for them; else nothing.

    The arguments are those of `measure_pipeline`.
    """
    if not isinstance(schedule, str) or "forward" not in takes(schedule):
        return {}
    first = measure_pipeline(schedule, *shape, **settings)
    times = {name: first.durations[sign] for name, sign in HALVES.items()}
    return times | {"latency": first.latency}


def _worker(group: Group, order: tuple, stages: int, shape: tuple[int, int], steps: int, copies):
    """Run the steps; return this rank's events in each that counts.

    order  schedule, micro-batches, chunks, options of the schedule
    """
    log, (schedule, m, chunks, options), (rows, width) = group.log or EventLog(), order, shape
    mesh = Mesh(group, dp=copies, pp=group.size // copies)
    copy_ranks = mesh.over("pp")
    options = options | ({"sums": partial(_sum, mesh.over("dp"))} if copies > 1 else {})
    with threadpool_limits(1):
        model = nn.MLP([width] * (2 * stages + 1))
        model.to(group.device)
        inputs = generator(0, "examples").standard_normal((rows * m, width)).astype("float32")
        x, targets = to_device(inputs, group.device), np.arange(rows * m) % width
        batch = Batch(x, targets).micro_batches(m)
        parts = []
        for _ in range(steps):
            step = _step(model, copy_ranks, schedule, m, chunks, options)
            group.barrier()
            begin = len(log.events)
            step(batch)
            parts.append(slice(begin, len(log.events)))
        events = log.in_seconds().events
        return [events[part] for part in parts[WARM_UP:]]


def _step(model: nn.Sequential, group: Group, schedule, m: int, chunks: int | None, options):
    """Return a function that sends a batch's micro-batches through this rank's stages."""
    named = isinstance(schedule, str)
    scheme = getattr(STRATEGIES[schedule].start, "keywords", {}).get("scheme") if named else None
    if scheme is not None:
        sgd = lambda parameters: optim.SGD(parameters, lr=1e-3)  # noqa: E731
        # The weights are from an earlier run, which does not matter: only time is measured.
        options = {"check_weights": False, **options}
        return PipeDream(model, group, sgd, scheme, **options).train
    for p in model.parameters():
        p.grad = None
    return Pipeline(model, group, schedule, m, chunks, **options).run


def _sum(group: Group, layers: list[nn.Module]) -> None:
    """Sum the gradients of these layers over the copies of the pipeline."""
    for flat in (layer.flat for layer in layers if layer.flat is not None):
        flat.collect_gradients()
        group.all_reduce(flat.gradient, out=flat.gradient)


def _of_copy(log: EventLog, copy: int, stages: int) -> EventLog:
    """Return the events of one copy's ranks, numbered from 0."""
    events = [e for e in log.events if e.rank // stages == copy]
    return EventLog([replace(e, rank=e.rank % stages) for e in events])


def _medians(bare: Programs, runs: list[EventLog]) -> tuple[dict[str, list[float]], float, float]:
    """Return {sign of an action: seconds per virtual stage}, seconds of a send, and latency."""
    seconds: dict[tuple[str, int], list[float]] = defaultdict(list)
    sends, latencies = [0.0], [0.0]
    for log in runs:
        sent, received = {}, {}
        for rank, action, at_once, e in _paired(bare, log):
            if isinstance(action, Transfer):
                if type(action) in SENDS:
                    sent[message(rank, action)] = e
                else:
                    received[message(action.peer, other_end(action, rank))] = e
            else:
                k = bare.placement[rank][action.chunk]
                seconds[action.sign, k] += [e.seconds / at_once] * at_once
        pairs = [(sent[key], e) for key, e in received.items() if e.rank != sent[key].rank]
        sends += [send.seconds for send, _ in pairs]
        latencies += [recv.end - send.start for send, recv in pairs if recv.start <= send.start]
    durations = {
        kind.sign: [
            (mean if kind is BackwardWeight else median)(seconds.get((kind.sign, k), [0.0]))
            for k in range(1 + last_stage(bare.placement))
        ]
        for kind in (*COMPUTE, Reduce)
    }
    return durations, median(sends[1:] or sends), median(latencies[1:] or latencies)


def _paired(bare: Programs, log: EventLog) -> Iterator[tuple[int, Action, int, Event]]:
    """Yield (rank, action, number of actions in this event, event) for the whole log."""
    for rank, program in enumerate(add_communication(bare)):
        of_rank = [e for e in log.events if e.rank == rank and not e.name.startswith("all_reduce")]
        sums = {e.name: e for e in of_rank if kind_of(e.name) == Reduce.sign}
        inline = [a for a in program if not isinstance(a, Reduce)]
        events = [e for e in of_rank if e.name not in sums]
        for (action, at_once), e in zip(steps(inline), events, strict=True):
            assert isinstance(action, Transfer) or e.name == " ".join(map(str, at_once))
            yield rank, action, len(at_once), e
        for action in program:
            if str(action) in sums:  # of one copy there are none
                yield rank, action, 1, sums[str(action)]
