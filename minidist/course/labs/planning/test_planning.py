"""A rank's memory, its traffic, PipeDream's stages, a planner that misses nothing.

Models, plans and machines travel as dicts of their fields. A planner may find other plans than the
package's: they are timed here, and have to be nearly as fast.
"""

from dataclasses import asdict, fields, replace
from math import prod
from typing import Any

import numpy as np
import pytest

from minidist import planning
from minidist.course.inside import inside, task
from minidist.errors import plural
from minidist.planning import Machine, Plan, TransformerSize
from minidist.planning.costs import memory, stages, traffic
from minidist.planning.costs.memory import CONVENTIONS, positions
from minidist.planning.pipedream import nested
from minidist.planning.plans import block
from minidist.planning.plans.estimate import fullest
from minidist.planning.plans.search import Search, meshes, micro_batches, options, orders
from minidist.planning.plans.why import bytes_of, in_short, seconds_of

AXES = "tp", "cp", "pp", "dp", "ep"
TIMED = "the plans that are timed"


@inside
def layers(model, plan):
    """Return the dense and the experts' parameters of each layer of each rank of pp."""
    size, plan = TransformerSize(**model), Plan(**plan)
    own = {r: stages.layer_parameters(size, plan, r) for r in range(plan.pp)}
    return {f"the layers of rank {r}": np.array(each, int) for r, each in own.items()}


@inside
def states(layers, plan, buffers):
    held = memory.elements_of([stages.Parameters(*n) for n in layers], Plan(**plan), buffers)
    return dict(zip(("parameters", "gradients", "optimizer's parameters"), held, strict=True))


@inside
def activations(model, plan, batch):
    size, plan = TransformerSize(**model), Plan(**plan)
    kept = CONVENTIONS["minidist"](size, plan, memory.micro_batch(plan, batch))
    held = [memory.activations(size, plan, r, kept) for r in range(plan.pp)]
    return {"the bytes of activations, by rank": held}


@inside
def sent(axis, model, plan, batch):
    """Return the bytes and the operations of each rank of pp along an axis."""
    size, plan = TransformerSize(**model), Plan(**plan)
    rows = [memory.micro_batch(plan, batch) * positions(size, plan)]
    over = {"dp": traffic.over_data, "pp": traffic.over_pipeline, "cp": traffic.over_context}[axis]
    each = [over(size, plan, r, *(rows if axis != "dp" else [])) for r in range(plan.pp)]
    bytes_, operations = zip(*each, strict=True)
    return {"the bytes, by rank": [float(n) for n in bytes_], "the operations, by rank": operations}


@inside
def seconds(plan, machine, nbytes, operations):
    """Return by axis how fast, and in how many seconds, these bytes and operations travel."""
    plan, machine = Plan(**plan), Machine(**machine)
    rates = {f"the rate of {axis}": int(block.rate_of(axis, plan, machine)) for axis in AXES}
    times = [block.travel(axis, plan, machine, nbytes, operations) for axis in AXES]
    return rates | {f"the seconds over {a}": t for a, t in zip(AXES, times, strict=True)}


@inside
def pipeline(profile, levels, cost):
    """Return the seconds of a pipeline, and the stages of each level: first, stop, replicas."""
    made, taken = nested(profile, prod(units for units, _ in levels), levels, cost)
    found = {"the seconds": float(taken)}
    for level in reversed(range(len(levels))):
        rows = [(stage.first, stage.stop, stage.replicas) for stage in made]
        found[f"the stages of level {level}"] = np.array(rows, int).reshape(-1, 3)
        made = [inner for stage in made for inner in stage.inside]
    return found


def number(value):
    return -1 if value is None else value


class Counted(Search):
    """A search that counts the plans whose stages it times."""

    timed = 0

    def step(self, plan):
        self.timed += 1
        return super().step(plan)


@inside(any_form=True)
def search(model, machine, batch, schedules, wanted):
    """Return the best plans: by field an array of what each of them has, -1 for None."""
    found = Counted(TransformerSize(**model), Machine(**machine), batch, schedules)
    best = list(found.best(wanted))
    plans = {
        f.name: np.array([number(getattr(e.plan, f.name)) for e in best]) for f in fields(Plan)
    }
    return plans | {"seconds": [e.seconds for e in best], TIMED: found.timed}


SCHEDULES = ["1f1b", "interleaved", "zb_h1"]
SLACK = 1.01  # a plan may take this many times the package's seconds
MORE = 1.5  # and a search may time this many times as many plans


def drawn(rng, layers, **fields) -> dict:
    """Draw a model; 2, 3 and 4 ranks divide its heads, and not its vocabulary."""
    (C, V), T = rng.integers(4, 20, 2).tolist(), int(rng.integers(9, 40))
    usual: dict[str, Any] = {"tied": bool(rng.integers(2)), "top_k": int(rng.integers(1, 3))}
    return asdict(TransformerSize(layers, 12 * C, 12, T, 12 * V + 5, **usual | fields))


@task("10.1")
@pytest.mark.parametrize("tied", [True, False])
def test_dense_layers_are_divided_by_pp_and_tp(tied, rng):
    for plan in (Plan(), Plan(pp=3, tp=4), Plan(pp=2, tp=3, schedule="zb_v", chunks=2)):
        layers.check(drawn(rng, int(rng.integers(7, 10)), tied=tied), asdict(plan))


@task("10.1")
def test_experts_are_divided_by_ep(rng):
    for plan in (Plan(3), Plan(6, ep=3), Plan(2, tp=4, ep=2)):
        layers.check(drawn(rng, 4, experts=6), asdict(plan))


@task("10.1")
@pytest.mark.parametrize("zero", range(4))
def test_zero_divides_states_by_their_copies(zero, rng):
    for dp, cp, ep in ((1, 1, 1), (5, 1, 1), (8, 1, 1), (6, 1, 2), (4, 3, 2)):
        plan = Plan(dp, cp=cp, ep=ep, zero=zero)
        counts = [(n, k if ep > 1 else 0) for n, k in rng.integers(50, 500, (5, 2)).tolist()]
        states.check(counts, asdict(plan), dp > 5)


@task("10.1")
@pytest.mark.parametrize(
    "schedule, v", [("gpipe", 1), ("1f1b", 1), ("interleaved", 3), ("zb_h1", 1), ("zb_v", 2)]
)
def test_activations_are_those_in_flight(schedule, v, rng):
    m = int(rng.integers(5, 9))
    for again in ("none", "full"):
        plan = Plan(1, 3, 2, 1, 1, 3 * m, schedule, chunks=v, recompute=again)
        activations.check(drawn(rng, int(rng.integers(7, 10))), asdict(plan), 3 * m * v)


AXIS_PLANS = {
    "dp": [
        *({"dp": 6, "pp": 2 if zero < 2 else 1, "zero": zero} for zero in range(4)),
        *({"dp": 6, "cp": 2, "ep": 3, "zero": zero} for zero in range(2)),
    ],
    "pp": [
        {},
        {"pp": 2, "tp": 3},
        {"pp": 4, "tp": 2, "sequence": True},
        {"pp": 3, "schedule": "zb_v", "chunks": 2},
        {"pp": 3, "schedule": "interleaved", "chunks": 2},
    ],
    "cp": [
        {},
        {"pp": 2, "tp": 3, "cp": 4},
        {"cp": 3, "recompute": "full"},
        *({"dp": 4, "cp": 3, "tp": 2, "ep": 2, "recompute": r} for r in ("none", "full")),
    ],
}


@task("10.2")
@pytest.mark.parametrize("axis", AXIS_PLANS)
def test_an_axis_moves_its_bytes(axis, rng):
    m, precision = int(rng.integers(2, 6)), str(rng.choice(["mixed", "float32"]))
    for i, own in enumerate(AXIS_PLANS[axis]):
        plan = Plan(**own, micro_batches=m, precision=precision)
        model = drawn(rng, 8, experts=6 if plan.ep > 1 else 0, tied=i % 2 == 1)
        sent.check(axis, model, asdict(plan), plan.dp * m * int(rng.integers(1, 4)))


def machine(rng, ranks, per_node, memory, fast=False) -> dict:
    flops, link = 1e12 * rng.uniform(2, 12), 1e9 * rng.uniform(30, 60)
    network = 1e9 * rng.uniform(10, 30) if fast else 1e9 * rng.uniform(0.3, 3)
    return asdict(Machine(ranks, per_node, flops, memory, link, network, 1e-5, 3e11))


@task("10.2")
@pytest.mark.parametrize("per_node", [1, 6, 8, 16, 48])
def test_an_axis_is_as_fast_as_its_slowest_link(per_node, rng):
    for plan in (Plan(2, 3, 4, 2, 2), Plan(8, 3, 2, 1, 4), Plan(2, 2, 3, 4), Plan(8, 1, 1, 6)):
        moved = int(rng.integers(10**6)), int(rng.integers(1, 99))
        seconds.check(asdict(plan), machine(rng, 48, per_node, 1e9), *moved)


@task("10.3")
@pytest.mark.parametrize("cost", ["paper", "released"])
@pytest.mark.parametrize("group", ["one level, paper", "one level, released", "nodes"])
def test_stages_take_the_least_time(group, cost, rng):
    N, nodes, rate = rng.integers(3, 6, 3).tolist()
    one = [(1, [(N, rate)]), (6, [(1, rate)]), (5, [(N, rate)]), (7, [(4, rate)]), (2, [(5, 8)])]
    two = [(6, [(2, 2 * rate), (nodes, rate)]), (4, [(nodes, 9), (1, 7), (2, 5)])]
    cases = [*two, (5, [(2, rate), (2, rate)])] if group == "nodes" else one
    for n, levels in cases if group.endswith(("nodes", cost)) else ():
        work = sorted(rng.integers(1, 60, n).tolist(), reverse=n < 6)  # else least where w is
        sizes = rng.integers(5, 200, n).tolist(), sorted(rng.integers(1, 90, n).tolist())
        pipeline.check(list(zip(work, *sizes, strict=True)), levels, cost)


SLOW, LITTLE, NEXT, FEW = "slow links", "little memory", "the next best", "few are timed"


@task("10.4")
@pytest.mark.parametrize(
    "group, N, per_node, room",  # room: of what ZeRO 3 with recomputation needs
    [
        (SLOW, 8, 4, (1.1, 2)),
        (SLOW, 12, 2, (1.1, 2)),
        (LITTLE, 8, 4, (1.03, 1.3)),
        (LITTLE, 6, 2, (1.03, 1.3)),
        (NEXT, 1, 1, (1.1, 3)),
        (NEXT, 6, 2, (1.5, 5)),
        (FEW, 8, 2, (6, 12)),
        (FEW, 12, 4, (6, 12)),
    ],
)
def test_a_planner_misses_no_plan(group, N, per_node, room, rng):
    L, T, V = int(rng.integers(5, 12)), int(rng.integers(1, 5)), int(rng.integers(2, 40))
    size, m = TransformerSize(L, 768, 12, 256 * T, 1000 * V), int(rng.integers(2, 5))
    lean = Plan(N, micro_batches=m, zero=3 if N > 1 else 0, recompute="full")
    memory = float(sum(fullest(size, lean, N * m).values()) * rng.uniform(*room))
    given = {"model": asdict(size), "machine": machine(rng, N, per_node, memory, group == NEXT)}
    given |= {"batch": N * m, "schedules": SCHEDULES, "wanted": 6 if group == NEXT else 1}
    check_plans(search(**given), search.package(**given), given, counted=group == FEW)


def check_plans(answer, want, given, counted):
    """Judge plans: each fits and is as fast as the package's of its place; few are timed."""
    size, where = TransformerSize(**given["model"]), Machine(**given["machine"])
    columns = [[None if v == -1 else v for v in answer[name].tolist()] for name in asdict(Plan())]
    plans, best = [Plan(*values) for values in zip(*columns, strict=True)], want["seconds"]
    count = plural(len(set(plans)), "plan")
    assert len(set(plans)) == len(best), f"there are {count}, not {len(best)}"
    odd = set(plans) - space(size, where, given)
    assert not odd, f"no search tries {odd}"
    for plan, least in zip(plans, best, strict=True):
        found = planning.seconds(size, plan, where, given["batch"])
        room = f"{bytes_of(found.held)} of {bytes_of(found.room)}"
        assert found.fits, f"{in_short(plan)} needs {room}"
        took = f"{seconds_of(found.seconds)}, not {seconds_of(least)}"
        assert found.seconds <= SLACK * least, f"{in_short(plan)} takes {took}"
    timed, most = (int(times[TIMED]) for times in (answer, want))
    assert not counted or timed <= MORE * most, f"{timed} plans are timed, not {most}"


def space(size, where, given) -> set[Plan]:
    """Return all plans that a search tries: two of them are never one plan in other words."""
    return {
        plan
        for mesh in meshes(size, where.ranks, given["batch"])
        for m in micro_batches(given["batch"], mesh)
        for option in options(size, replace(mesh, micro_batches=m), where.per_node)
        for plan in orders(size, option, given["schedules"])
    }


def test_the_next_best_plans_are_no_plan_in_other_words():
    rng = np.random.default_rng(0)
    size = TransformerSize(6, 768, 12, 512, 9000)
    given = {"model": asdict(size), "machine": machine(rng, 6, 2, 1e12, fast=True), "batch": 12}
    given |= {"schedules": SCHEDULES, "wanted": 6}
    right = search(**given)
    check_plans(right, right, given, counted=True)
    first = {n: np.repeat(a[:1], 6) if isinstance(a, np.ndarray) else a for n, a in right.items()}
    others = [{}, {"sequence": np.arange(6)}, {"cut": np.array(["layers", "blocks"] * 3)}]
    for other in others:
        with pytest.raises(AssertionError, match=r"plans?, not 6|no search tries"):
            check_plans(first | other, right, given, counted=False)
