"""The seconds of one step of a plan on a machine, from rates: compute, communication, bubble.

    a stage     its blocks' products by the roofline (roofline.py), and what waits for collectives
    the step    the stages' times on the simulator (step_time.py), so that any schedule has its
                own bubble
    a collective of n ranks takes  bytes / rate + latency ceil(log2 n),  where the rate is `link` if
                the ranks of its axis are in one node, else `network`

What waits, and what is hidden:

    tp, ep      a product needs the result: the collective is added to forward and backward
    cp          keys and values travel while attention works on those before: what is longer counts
    pp          a message travels while both ends compute; it delays the next stage. A tied weight's
                gradient is summed over the first and the last rank at the end
    dp          one stage per rank: in buckets under the last backward, all but the first layer's
                gradients or the last one's time. Several: beside the backward of other stages
    ZeRO        1: new weights are gathered after the update. 2: gradients are also scattered in
                every micro-batch, under its backward. 3: weights are gathered twice in every
                micro-batch, under forward and backward

Ranks are numbered as `Hybrid`'s mesh has them: tp is the innermost axis, then cp, pp, dp; ep is a
part of dp. Letters: m micro-batches of b examples, p stages, n ranks of an axis.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, inf, log2, prod
from typing import NamedTuple

from minidist.planning.costs.memory import BYTES, memory
from minidist.planning.costs.stages import Stage, check_split, cut_of, stage_parameters
from minidist.planning.costs.stash import in_flight, placement
from minidist.planning.costs.traffic import over_context, over_experts, over_tensor
from minidist.planning.costs.transformer_size import TransformerSize
from minidist.planning.plan import Machine, Plan
from minidist.planning.roofline import Times, attention_seconds, block_times, head_times
from minidist.planning.step_time import Pipeline

INNER_TO_OUTER = "tp", "cp", "pp", "dp"
WHOLE_BACKWARD = "layer_split", "gpipe", "1f1b", "interleaved", "looped_bfs"


@dataclass(frozen=True)
class Estimate:
    """What a step of a plan takes, in seconds, and what the fullest rank holds, in bytes.

    compute        products of the busiest rank
    bubble         share of the step in which a rank waits for others, the mean over all ranks
    communication  by axis, how long the busiest rank's links are in use; it may be hidden
    memory         by kind
    room           bytes that a rank can hold
    simulated      False: `seconds` is a lower bound, and `bubble` that of the bound
    why            in words, why it is not the best; empty for the best
    """

    plan: Plan
    seconds: float
    compute: float
    bubble: float
    communication: dict[str, float]
    memory: dict[str, int]
    room: float
    simulated: bool = True
    why: str = ""

    @property
    def held(self) -> int:
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        return self.held <= self.room


def seconds(size: TransformerSize, plan: Plan, machine: Machine, batch: int) -> Estimate:
    """Estimate one step on a batch of `batch` examples; ValueError if the plan does not fit it."""
    check(size, plan, machine, batch)
    step = Step(size, plan, machine, batch)
    return step.estimate(step.makespan(), fullest(size, plan, batch))


def fullest(
    size: TransformerSize, plan: Plan, batch: int, limit: float = inf
) -> dict[str, int] | None:
    """Return the bytes of the pipeline rank that holds most; None if that is above a limit."""
    shape = plan.schedule, plan.pp, plan.micro_batches, plan.chunks
    most: dict[str, int] = {}
    for r in fullest_ranks(size.layers, plan.cut, *shape):
        held = memory(size, plan, batch, r)
        if sum(held.values()) > limit:
            return None
        most = max(most, held, key=lambda own: sum(own.values()))
    return most


@lru_cache(10_000)
def fullest_ranks(
    layers: int, cut: str, schedule: str, p: int, m: int, chunks: int
) -> tuple[int, ...]:
    """Return the ranks among which the fullest is: no other has the same stages and holds more."""
    flights, stages = in_flight(schedule, p, m, chunks), cut_of(layers, p * chunks, cut)
    own = [[stages[k] for k in ks] for ks in placement(schedule, p, chunks)]
    found: list[int] = []
    for r in range(p):
        below = (own[s] == own[r] and no_more(flights[r], flights[s]) for s in found)
        found += [] if any(below) else [r]
    return tuple(found)


def no_more(points: tuple, others: tuple) -> bool:
    """Return whether every point has one among the others that is as large in all numbers."""
    return all(any(all(map(int.__le__, a, b)) for b in others) for a in points)


def check(size: TransformerSize, plan: Plan, machine: Machine, batch: int) -> None:
    """Raise ValueError for a plan that cannot be run with this model, machine and batch."""
    b, stages = plan.dp * plan.micro_batches, plan.pp * plan.chunks
    if plan.ranks != machine.ranks:
        raise ValueError(f"the plan has {plan.ranks} ranks, the machine {machine.ranks}")
    if batch % b:
        raise ValueError(
            f"{batch} examples do not divide into dp={plan.dp} x {plan.micro_batches} "
            f"micro-batches; use a multiple of {b}"
        )
    cut_of(size.layers, stages, plan.cut)
    check_split(size, plan)
    if plan.zero > 1 and plan.pp > 1:
        raise ValueError(f"ZeRO stage {plan.zero} has no stages of layers; use zero=1 or pp=1")


def rate_of(axis: str, plan: Plan, machine: Machine) -> float:
    """Return the bytes per second at which a rank sends along an axis."""
    order = INNER_TO_OUTER
    inner = prod(getattr(plan, a) for a in order[: order.index("dp" if axis == "ep" else axis)])
    inside = machine.per_node % (inner * getattr(plan, axis)) == 0
    return machine.link if inside else machine.network


def travel(axis: str, plan: Plan, machine: Machine, nbytes: float, operations: int) -> float:
    """Return the seconds that these bytes and operations take along an axis.

    Gradients are summed over dp x cp together, at the slower of both axes' rates.
    """
    ranks, rate = getattr(plan, axis), rate_of(axis, plan, machine)
    if axis == "dp" and plan.cp > 1:
        ranks, rate = plan.data, min(rate, rate_of("cp", plan, machine))
    rounds = 1 if axis in ("pp", "cp") else ceil(log2(ranks))
    return float(nbytes) / rate + operations * rounds * machine.latency


def hidden(work: float, sent: float, pieces: int) -> float:
    """Return the time of work in equal pieces whose results, or inputs, travel beside it.

    The first piece, or the last message, has nothing to hide behind.
    """
    return max(work + sent / pieces, sent + work / pieces) if sent else work


class Block(NamedTuple):
    """One block of one micro-batch: its products, these with what waits, the head's products.

    links  by axis, the seconds that its collectives over tp, ep and cp take
    """

    products: Times
    whole: Times
    head: Times
    links: dict[str, float]


@lru_cache(100_000)
def block_of(size: TransformerSize, plan: Plan, machine: Machine, b: int) -> Block:
    """Return the times of b examples; what embedding and head send is spread over the blocks."""
    rows, runs = b * ceil(size.sequence / plan.cp), plan.micro_batches * size.layers
    alone = replace(plan, pp=1, schedule="1f1b", chunks=1, cut="layers")
    ways = {"tp": over_tensor, "ep": over_experts, "cp": over_context}
    links = {
        axis: travel(axis, plan, machine, *way(size, alone, 0, rows)) / runs
        for axis, way in ways.items()
    }
    products = block_times(size, plan, machine, b)
    work = attention_seconds(size, plan, machine, b)
    whole = products + waiting(plan, work, **links)
    return Block(products, whole, head_times(size, plan, machine, b), links)


def waiting(plan: Plan, attention: float, tp: float, ep: float, cp: float) -> Times:
    """Return what a block's collectives add to its products; attention hides the ring of cp.

    Of tp, backward has as much as forward; half more if a split sequence is gathered again. Of cp,
    it has twice as much: keys and values again, and their gradients.
    """
    full, again = plan.recompute == "full", plan.recompute != "none"
    one = tp / ((2.5 if plan.sequence else 2) + full)
    two, ring = ep / (2 + full), cp / (3 + full)
    hides = attention * (1 - 1 / plan.cp)
    forward = one + two + max(0, ring - hides)
    return Times(forward, tp - one + ep - two + max(0, cp - ring - (2 + again) * hides))


class Step:
    """The parts of one step: the durations of every virtual stage, and what follows them.

    after  seconds after the pipeline: the sum of a tied weight's gradient, and new weights
    """

    def __init__(self, size: TransformerSize, plan: Plan, machine: Machine, batch: int):
        self.size, self.plan, self.machine = size, plan, machine
        self.b = batch // (plan.dp * plan.micro_batches)
        same = replace(plan, schedule="1f1b", chunks=1, zero=0, cut="layers")  # for all of them
        self.block = block_of(size, same, machine, self.b)
        self.stages = cut_of(size.layers, plan.pp * plan.chunks, plan.cut)
        shape = plan.schedule, plan.pp, plan.chunks
        self.placement = placement(*shape)
        moved = {stage: self.over_data(stage) for stage in set(self.stages)}
        times = {stage: self.with_data(stage, *both) for stage, both in moved.items()}
        gathers = [moved[stage][1] for stage in self.stages]
        self.after = self.tied() + (self.most(gathers) if plan.zero in (1, 2) else 0)
        self.sent = self.most([sum(moved[stage]) for stage in self.stages])
        forward, inputs, weights, sums = zip(*(times[s] for s in self.stages), strict=True)
        self.pipeline = Pipeline(*shape, forward, inputs, weights, self.delay(), sums)

    def most(self, each: list) -> float:
        """Return the sum of a rank's virtual stages, on the rank that has most."""
        return max(sum(each[k] for k in own) for own in self.placement)

    def with_data(
        self, stage: Stage, scatter: float, gather: float
    ) -> tuple[float, float, float, float]:
        """Return a stage's forward, the halves of backward, and the sum of its gradients.

        ZeRO 2 scatters in every micro-batch, ZeRO 3 also gathers, layer by layer. A single stage
        has its sum in buckets under the last backward.
        """
        zero, n = self.plan.zero, max(1, sum(stage))
        whole = self.block.whole * stage.blocks + self.block.head * stage.head
        forward, back = whole.forward, whole.inputs + whole.weights
        more = 0.0
        if zero > 1:
            more = hidden(back, scatter if zero == 2 else scatter + gather, n) - back
            forward = forward if zero == 2 else hidden(forward, gather, n)
        sums = (scatter + gather, scatter, 0, 0)[zero]
        if len(self.stages) == 1:
            sums = hidden(back, sums, n) - back
        return forward, whole.inputs + more, whole.weights, sums

    def over_data(self, stage: Stage) -> tuple[float, float]:
        """Return the seconds of scattering a stage's gradients, and of gathering its weights.

        Without ZeRO both together are the all_reduce of the gradients.
        """
        size, plan = self.size, self.plan
        if plan.data == 1:
            return 0, 0
        w, g, _ = BYTES[plan.precision, 16]
        layers = stage_parameters(size, plan, stage, size.tied and self.ends_meet())
        n, copies = plan.data, plan.data // plan.ep
        dense, experts = (sum(each) for each in zip(*layers, strict=True))
        moved = (n - 1) / n * dense + (copies - 1) / copies * experts
        count = len(layers) + (copies > 1) * sum(layer.experts > 0 for layer in layers)
        scatter = travel("dp", plan, self.machine, g * moved, count)
        if plan.zero:
            return scatter, travel("dp", plan, self.machine, w * moved, count)
        return scatter, travel("dp", plan, self.machine, g * moved, 0)  # of one operation

    def delay(self) -> float:
        """Return the seconds of one message between stages: X[b, T/cp, C], cut by sequence."""
        plan, size = self.plan, self.size
        if plan.pp == 1:
            return 0
        numbers = self.b * ceil(size.sequence / plan.cp) * size.width
        split = plan.tp if plan.sequence else 1
        return travel("pp", plan, self.machine, numbers * plan.itemsize / split, 1)

    def ends_meet(self) -> bool:
        """Return whether one rank has the embedding and the head."""
        return any({0, len(self.stages) - 1} <= set(own) for own in self.placement)

    def tied(self) -> float:
        """Return the seconds in which two ranks sum the gradient of a tied weight [V/tp, C]."""
        size, plan = self.size, self.plan
        if not size.tied or self.ends_meet():
            return 0
        numbers, g = ceil(size.vocab / plan.tp) * size.width, BYTES[plan.precision, 16][1]
        return travel("pp", plan, self.machine, numbers * g, 1)

    def makespan(self) -> float:
        return self.pipeline.makespan(self.plan.micro_batches) + self.after

    def bound(self) -> float:
        """Return a time that the step cannot beat.

        Rank r waits until a micro-batch has passed r stages, then has its own work; and where
        backward is not in halves, its last gradient has to pass these stages again.
        """
        pipe, result = self.pipeline, 0.0
        whole = self.plan.schedule in WHOLE_BACKWARD
        each = [sum(three) for three in zip(pipe.forward, pipe.inputs, pipe.weights, strict=True)]
        first = last = 0.0
        for r, own in enumerate(self.placement):
            work = self.plan.micro_batches * sum(each[k] for k in own)
            result = max(result, first + work + last)
            first += pipe.forward[r] + pipe.delay
            last += each[r] - pipe.forward[r] + pipe.delay if whole else 0
        return result + self.after

    def links(self) -> dict[str, float]:
        """Return, by axis, the seconds that the busiest rank's links are in use in a step."""
        plan, m, last = self.plan, self.plan.micro_batches, len(self.stages) - 1
        blocks = self.most([stage.blocks for stage in self.stages])
        found = {axis: m * blocks * spent for axis, spent in self.block.links.items()}
        rank_of = {k: r for r, own in enumerate(self.placement) for k in own}
        others = [(rank_of[k], rank_of.get(k - 1), rank_of.get(k + 1)) for k in range(last + 1)]
        sent = [
            m * self.pipeline.delay * sum(r not in (own, None) for r in near)
            for own, *near in others
        ]
        sent[0] += self.tied()
        sent[last] += self.tied()
        found["pp"] = self.most(sent)
        found["dp"] = self.sent * (1, 1, (m + 1) / 2, 3 * m / 2)[plan.zero]
        return found

    def estimate(self, taken: float, held: dict, **more) -> Estimate:
        """Return the estimate of a step that takes these seconds and holds these bytes."""
        pipe, plan, m = self.pipeline, self.plan, self.plan.micro_batches
        busy = m * sum(map(sum, (pipe.forward, pipe.inputs, pipe.weights)))
        block, head = self.block.products.total, self.block.head.total
        compute = m * self.most([s.blocks * block + s.head * head for s in self.stages])
        idle = 1 - busy / (plan.pp * taken) if taken else 0.0
        return Estimate(plan, taken, compute, idle, self.links(), held, self.machine.memory, **more)
