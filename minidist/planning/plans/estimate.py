"""The seconds of one step of a plan on a machine, from rates: compute, communication, bubble.

    a stage     its blocks' products by the roofline (block.py), and what waits for collectives
    the step    the stages' times on the simulator, so that any schedule has its
                own bubble
    a collective of n ranks takes  bytes / rate + latency ceil(log2 n),  where the rate is `link` if
                the ranks of its axis are in one node, else `network`

What waits, and what is hidden:

    tp, ep      a product needs the result: the collective is added to forward and backward
    cp          keys and values travel while attention works on those before: what is longer counts
    pp          a message travels while both ends compute; it delays the next stage. A tied weight's
                gradient is summed over the first and the last rank at the end
    dp          one stage per rank: in buckets under the last backward, all but the first layer's
                gradients or the last one's time. Several: beside the backward of other stages. Sums
                between ZeRO's copies come with the last backward, too
    ZeRO        1: new weights are gathered after the update. 2: gradients are also scattered in
                every micro-batch, under its backward. 3: weights are gathered twice in every
                micro-batch, under forward and backward

Ranks are numbered as `Hybrid`'s mesh has them: tp is the innermost axis, then cp, pp, dp; ep is a
part of dp. Letters: m micro-batches of b examples, p stages, n ranks of an axis.

Once a pipeline is full, c more micro-batches add the same to its makespan, the longest path through
its program, each time; c is p, so that schedules in groups of p are full groups. So a long batch
needs not be simulated whole:

    makespan(m) = makespan(m0) + (m - m0) / c (makespan(m0 + c) - makespan(m0))

with m0 of a few times p, if the second c micro-batches add what the first did. Where they do not,
or where it would save nothing, the whole batch is simulated.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf
from typing import NamedTuple

from minidist.errors import WrongInput
from minidist.pipeline_parallel import add_reductions, programs
from minidist.pipeline_parallel.actions import Programs
from minidist.planning.costs import traffic
from minidist.planning.costs.memory import memory, positions
from minidist.planning.costs.stages import (
    Entry,
    StageLayers,
    bounded,
    cut_of,
    in_flight_on,
    largest,
    placement,
    stage_parameters,
)
from minidist.planning.costs.transformer_size import TransformerSize
from minidist.planning.costs.zero import BYTES, zero_passes
from minidist.planning.plans.block import block_of, hidden, travel
from minidist.planning.plans.plan import Machine, Plan, check_count
from minidist.planning.simulator import simulate

FULL = 4  # times p: micro-batches after which a pipeline is taken to be full
WHOLE = 3 * FULL + 3  # times p: what the three short simulations have together


class TimedPipeline(NamedTuple):
    """A schedule, and the durations of its actions, in any unit; tuples: one per virtual stage.

    delay   of a message from one stage to the next
    reduce  of the sum of a stage's gradients over its copies, beside what follows
    """

    schedule: str
    p: int
    chunks: int
    forward: tuple
    inputs: tuple
    weights: tuple
    delay: float = 0
    reduce: tuple | int = 0

    def makespan(self, m: int):
        """Return the time of a step of m micro-batches; exact with ints and Fractions."""
        p = self.p
        if m <= WHOLE * p:
            return simulated(self, m)
        first = FULL * p + (m - FULL * p) % p
        one, two, three = (simulated(self, first + i * p) for i in range(3))
        if not _same(two - one, three - two):
            return simulated(self, m)
        return one + (m - first) // p * (two - one)


@lru_cache(100_000)
def simulated(pipeline: TimedPipeline, m: int):
    """Return the makespan of all m micro-batches, action by action."""
    order = ordered(pipeline.schedule, pipeline.p, m, pipeline.chunks)
    return simulate(
        order,
        pipeline.forward,
        pipeline.inputs,
        pipeline.weights,
        latency=pipeline.delay,
        reduce=pipeline.reduce,
    ).makespan


@lru_cache(16)
def ordered(schedule: str, p: int, m: int, chunks: int) -> Programs:
    """Return the programs with their sums."""
    return add_reductions(programs(schedule, p, m, chunks))


def _same(a, b) -> bool:
    """Return whether two sums are equal, up to the rounding of floats."""
    return a == b or (isinstance(a, float) and abs(a - b) <= 1e-9 * max(abs(a), abs(b)))


Held = dict[str, int]  # bytes by kind


def fullest(size: TransformerSize, plan: Plan, batch: int, limit: float = inf) -> Held:
    """Return the bytes of the pipeline rank that holds most; {} if one is above the limit."""
    p, v = plan.pp, plan.chunks
    m = bounded(plan.schedule, p, plan.micro_batches)
    most: Held = {}
    for ranks in alike(size.layers, plan.cut, plan.schedule, p, v):
        points = most_in_flight(ranks, plan.schedule, p, m, v)
        held = memory(size, plan, batch, ranks[0], points=points)
        if sum(held.values()) > limit:
            return {}
        most = max(most, held, key=lambda by_kind: sum(by_kind.values()))
    return most


@lru_cache(1024)
def alike(layers: int, cut: str, schedule: str, p: int, chunks: int) -> list[tuple[int, ...]]:
    """Return the ranks, those with the same stages together.

    They hold the same for each micro-batch in flight.
    """
    stages = cut_of(layers, p * chunks, cut)
    groups: dict[tuple, list[int]] = {}
    for r, numbers in enumerate(placement(schedule, p, chunks)):
        groups.setdefault(tuple(stages[k] for k in numbers), []).append(r)
    return [tuple(ranks) for ranks in groups.values()]


@lru_cache(10_000)
def most_in_flight(ranks: tuple[int, ...], *shape) -> list[Entry]:
    """Return the entries of all these ranks that no other one exceeds."""
    return largest({entry for r in ranks for entry in in_flight_on(r, *shape)})


WHOLE_BACKWARD = "layer_split", "gpipe", "1f1b", "interleaved", "looped_bfs"


@dataclass(frozen=True)
class Estimate:
    """What a step of a plan takes, in seconds, and what the fullest rank holds, in bytes.

    spent          what they are spent on, the mean over all ranks; they add up to `seconds`
    ideal          seconds of the model's FLOPs at the machine's peak on all ranks
    communication  by axis, how long the busiest rank's links are in use; it may be hidden
    memory         by kind
    room           bytes that a rank can hold
    simulated      False: `seconds` is a lower bound
    why            in words, why it is not the best; empty for the best
    """

    plan: Plan
    seconds: float
    spent: dict[str, float]
    ideal: float
    communication: dict[str, float]
    memory: dict[str, int]
    room: float
    simulated: bool = True
    why: str = ""

    @property
    def held(self) -> int:
        return sum(self.memory.values())

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization, without recomputation (Chowdhery et al., PaLM, appendix B)."""
        return self.ideal / self.seconds if self.seconds else 1.0

    @property
    def fits(self) -> bool:
        return self.held <= self.room


def seconds(size: TransformerSize, plan: Plan, machine: Machine, batch: int) -> Estimate:
    """Estimate one step on a batch of `batch` examples; ValueError if the plan does not fit it."""
    check_count("batch", batch)
    b = plan.dp * plan.micro_batches
    if plan.ranks != machine.ranks:
        raise WrongInput(f"the plan has {plan.ranks} ranks, the machine {machine.ranks}")
    if batch % b:
        raise WrongInput(
            f"{batch} examples do not divide into dp={plan.dp} x {plan.micro_batches} "
            f"micro-batches; use a multiple of {b}"
        )
    if plan.zero > 1 and plan.schedule not in WHOLE_BACKWARD:
        raise WrongInput(
            f"ZeRO stage {plan.zero} sums a gradient when backward leaves its layer, and "
            f"{plan.schedule} computes it later; use zero=1, or {', '.join(WHOLE_BACKWARD[1:])}"
        )
    held = fullest(size, plan, batch)  # ValueError if the model cannot be split this way
    step = Step(size, plan, machine, batch)
    return step.estimate(step.makespan(), held)


class Step:
    """The parts of one step: the durations of every virtual stage, and what follows them.

    after  seconds after the pipeline: a tied weight's gradient is summed, the update, new weights
    """

    def __init__(self, size: TransformerSize, plan: Plan, machine: Machine, batch: int):
        self.size, self.plan, self.machine = size, plan, machine
        self.b = batch // (plan.dp * plan.micro_batches)
        self.rows = self.b * positions(size, plan)
        same = replace(plan, schedule="1f1b", chunks=1, zero=0, cut="layers", shards=None)
        self.block = block_of(size, same, machine, self.b)
        self.stages = cut_of(size.layers, plan.pp * plan.chunks, plan.cut)
        shape = plan.schedule, plan.pp, plan.chunks
        self.placement = placement(*shape)
        moved = {stage: self.over_data(stage) for stage in set(self.stages)}
        times = {stage: self.with_data(stage, *three) for stage, three in moved.items()}
        gathers = [moved[stage][1] for stage in self.stages]
        self.gathered = self.most(gathers) if plan.zero in (1, 2) else 0
        updates = {stage: self.update_of(stage) for stage in moved}
        self.update = self.most([updates[stage] for stage in self.stages])
        self.after = self.tied() + self.update + self.gathered
        self.sent = self.most([sum(moved[stage][:2]) for stage in self.stages])
        self.between = self.most([moved[stage][2] for stage in self.stages])
        forward, inputs, weights, sums = zip(*(times[s] for s in self.stages), strict=True)
        self.summed = sums[0]
        self.pipeline = TimedPipeline(*shape, forward, inputs, weights, self.delay(), sums)

    def most(self, each: list) -> float:
        """Return the sum of a rank's virtual stages, on the rank that has most."""
        return max(sum(each[k] for k in numbers) for numbers in self.placement)

    def with_data(
        self, stage: StageLayers, scatter: float, gather: float, between: float
    ) -> tuple[float, float, float, float]:
        """Return a stage's forward, the halves of backward, and the sum of its gradients.

        ZeRO 2 scatters in every micro-batch, ZeRO 3 also gathers, layer by layer. A single stage
        has its sum in buckets under the last backward.
        """
        zero, n = self.plan.zero, max(1, sum(stage))
        times = self.block.whole * stage.blocks + self.block.head * stage.head
        forward, back = times.forward, times.inputs + times.weights
        exposed = 0.0
        if zero > 1:
            exposed = hidden(back, scatter if zero == 2 else scatter + gather, n) - back
            forward = forward if zero == 2 else hidden(forward, gather, n)
        sums = (scatter + gather, scatter, 0, 0)[zero] + between
        if len(self.stages) == 1:
            sums = hidden(back, sums, n) - back
        return forward, times.inputs + exposed, times.weights, sums

    def over_data(self, stage: StageLayers) -> tuple[float, float, float]:
        """Return the seconds of scattering a stage's gradients, and of gathering its weights.

        And of summing ZeRO's copies. Without ZeRO the first two are the all_reduce of gradients.
        """
        size, plan = self.size, self.plan
        if plan.data == 1:
            return 0, 0, 0
        w, g, _ = BYTES[plan.precision, 16]
        layers = stage_parameters(size, plan, stage, size.tied and self.ends_meet())
        moved, count = traffic.shared_elements(plan, layers)
        copied, sums = traffic.copied_elements(plan, layers)
        scatter = travel("dp", plan.one_copy, self.machine, g * moved, count)
        between = travel("dp", plan, self.machine, g * copied, sums)
        if plan.zero:
            gather = travel("dp", plan.one_copy, self.machine, w * moved, count)
            return scatter, gather, between
        return scatter, travel("dp", plan, self.machine, g * moved, 0), 0  # of one operation

    def update_of(self, stage: StageLayers) -> float:
        """Return the seconds of AdamW on a stage: all states are read and written."""
        size, plan = self.size, self.plan
        layers = stage_parameters(size, plan, stage, size.tied and self.ends_meet())
        n, ep = (plan.sharing, plan.ep) if plan.zero else (1, 1)
        share = sum(held.dense + ep * held.experts for held in layers) / n
        return 2 * share * sum(BYTES[plan.precision, 16]) / self.machine.memory_bandwidth

    def delay(self) -> float:
        """Return the seconds of one message between stages."""
        if self.plan.pp == 1:
            return 0
        nbytes = traffic.message_bytes(self.size, self.plan, self.rows)
        return travel("pp", self.plan, self.machine, nbytes, 1)

    def ends_meet(self) -> bool:
        """Return whether one rank has the embedding and the head."""
        return any({0, len(self.stages) - 1} <= set(numbers) for numbers in self.placement)

    def tied(self) -> float:
        """Return the seconds in which two ranks sum the gradient of a tied weight [V/tp, C]."""
        if not self.size.tied or self.ends_meet():
            return 0
        return travel("pp", self.plan, self.machine, traffic.tied_bytes(self.size, self.plan), 1)

    def makespan(self) -> float:
        return self.pipeline.makespan(self.plan.micro_batches) + self.after

    def bound(self) -> float:
        """Return a time that the step cannot beat.

        Rank r waits until a micro-batch has passed r stages, then has its own work; and where
        backward is not in halves, its last gradient has to pass these stages again.
        """
        pipe, result = self.pipeline, 0.0
        whole_backward = self.plan.schedule in WHOLE_BACKWARD
        each = [sum(three) for three in zip(pipe.forward, pipe.inputs, pipe.weights, strict=True)]
        first = last = 0.0
        for r, numbers in enumerate(self.placement):
            work = self.plan.micro_batches * sum(each[k] for k in numbers)
            result = max(result, first + work + last)
            first += pipe.forward[r] + pipe.delay
            last += each[r] - pipe.forward[r] + pipe.delay if whole_backward else 0
        return result + self.after

    def links(self) -> dict[str, float]:
        """Return, by axis, the seconds that the busiest rank's links are in use in a step."""
        plan, m = self.plan, self.plan.micro_batches
        blocks = self.most([stage.blocks for stage in self.stages])
        busy = {axis: m * blocks * spent for axis, spent in self.block.links.items()}
        each = (traffic.over_pipeline(self.size, plan, r, self.rows) for r in range(plan.pp))
        busy["pp"] = max(travel("pp", plan, self.machine, *sent) for sent in each)
        busy["dp"] = self.sent * sum(zero_passes(plan.zero, m)) / 2 + self.between
        return busy

    def spent(self, taken: float) -> dict[str, float]:
        """Return the seconds of a step by what they are spent on, the mean over all ranks."""
        pipe, plan, block = self.pipeline, self.plan, self.block
        m, p, blocks = plan.micro_batches, plan.pp, sum(stage.blocks for stage in self.stages)
        spent = {name: m / p * blocks * times.total for name, times in block.spent.items()}
        spent["products"] += m / p * block.head.total * sum(stage.head for stage in self.stages)
        within = m / p * sum(map(sum, (pipe.forward, pipe.inputs, pipe.weights)))
        alone = self.summed if len(self.stages) == 1 else 0
        spent["data"] = within - sum(spent.values()) + alone + self.gathered
        spent["optimizer"] = self.update
        spent["waiting"] = max(0.0, taken - sum(spent.values()))
        return {name: time for name, time in spent.items() if time > 1e-9 * taken}

    def estimate(self, taken: float, held: Held, **more) -> Estimate:
        """Return the estimate of a step that takes these seconds and holds these bytes."""
        plan, machine = self.plan, self.machine
        batch = self.b * plan.dp * plan.micro_batches
        ideal = self.size.flops(batch) / (plan.ranks * machine.flops)
        links, room = self.links(), machine.memory
        return Estimate(plan, taken, self.spent(taken), ideal, links, held, room, **more)
