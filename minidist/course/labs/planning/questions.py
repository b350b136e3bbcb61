"""What the planning lab asks; `plan` and `model` are fields of a Plan and of a TransformerSize.

The right answer is the package's own, but a planner may find other plans than the package's: they
are timed here, and have to be nearly as fast.
"""

from dataclasses import asdict, replace
from functools import partial
from typing import Any

from minidist.course.answers import Answer
from minidist.course.labs.planning import probes
from minidist.course.question import Questions, Random, ask, ints
from minidist.errors import plural
from minidist.planning import Machine, Plan, TransformerSize, seconds
from minidist.planning.plans.estimate import fullest
from minidist.planning.plans.search import meshes, micro_batches, options, orders
from minidist.planning.plans.why import bytes_of, in_short, seconds_of

SCHEDULES = ["1f1b", "interleaved", "zb_h1"]
SLACK = 1.01  # a plan may take this many times the package's seconds
MORE = 1.5  # and a search may time this many times as many plans


def drawn(rng: Random, layers: int, **fields) -> dict:
    """Draw a model; 2, 3 and 4 ranks divide its heads, and not its vocabulary."""
    (C, V), (T,) = ints(rng, 4, 20, 2), ints(rng, 9, 40, 1)
    usual: dict[str, Any] = {"tied": bool(rng.integers(2)), "top_k": int(rng.integers(1, 3))}
    return asdict(TransformerSize(layers, 12 * C, 12, T, 12 * V + 5, **usual | fields))


def held(rng: Random) -> Questions:
    several, m, given = int(rng.integers(7, 10)), int(rng.integers(5, 9)), dict[str, Any]()
    for tied in (True, False):
        for one in (Plan(), Plan(pp=3, tp=4), Plan(pp=2, tp=3, schedule="zb_v", chunks=2)):
            given = {"model": drawn(rng, several, tied=tied), "plan": asdict(one)}
            about = f"{'tied' if tied else 'not tied'}, {in_short(one)}"
            yield ask(about, probes.layers, group="dense layers", **given)
    for one in (Plan(3), Plan(6, ep=3), Plan(2, tp=4, ep=2)):
        given = {"model": drawn(rng, 4, experts=6), "plan": asdict(one)}
        yield ask(f"6 experts, {in_short(one)}", probes.layers, group="experts", **given)
    for zero in range(4):
        for dp, cp, ep in ((1, 1, 1), (5, 1, 1), (several, 1, 1), (6, 1, 2), (4, 3, 2)):
            one = Plan(dp, cp=cp, ep=ep, zero=zero)
            layers = [(n, k if ep > 1 else 0) for n, k in rng.integers(50, 500, (5, 2)).tolist()]
            given = {"layers": layers, "plan": asdict(one), "buffers": dp > 5}
            yield ask(in_short(one), probes.states, group="states", **given)
    for schedule, v in {"gpipe": 1, "1f1b": 1, "interleaved": 3, "zb_h1": 1, "zb_v": 2}.items():
        for again in ("none", "full"):
            one = Plan(1, 3, 2, 1, 1, 3 * m, schedule, chunks=v, recompute=again)
            given = {"model": drawn(rng, several), "plan": asdict(one), "batch": 3 * m * v}
            yield ask(in_short(one), probes.activations, group="activations", **given)


def sent(rng: Random) -> Questions:
    m, precision = int(rng.integers(2, 6)), str(rng.choice(["mixed", "float32"]))
    own: dict[str, Any] = {"micro_batches": m, "precision": precision}
    over = {
        "dp": [Plan(int(rng.integers(5, 8)), 2 if z < 2 else 1, zero=z, **own) for z in range(4)],
        "pp": [Plan(), Plan(pp=2, tp=3, **own), Plan(pp=4, tp=2, sequence=True, **own)],
        "cp": [Plan(), Plan(pp=2, tp=3, cp=4, **own), Plan(cp=3, recompute="full", **own)],
    }
    over["dp"] += [Plan(6, cp=2, ep=3, zero=z, **own) for z in range(2)]
    over["pp"] += [Plan(pp=3, schedule=s, chunks=2, **own) for s in ("zb_v", "interleaved")]
    over["cp"] += [Plan(4, cp=3, tp=2, ep=2, recompute=again, **own) for again in ("none", "full")]
    for axis, plans in over.items():
        for i, one in enumerate(plans):
            experts, batch = 6 if one.ep > 1 else 0, one.dp * m * int(rng.integers(1, 4))
            size = drawn(rng, 8, experts=experts, tied=i % 2 == 1)
            given = {"model": size, "plan": asdict(one), "axis": axis}
            about = f"{in_short(one)}, {plural(experts, 'expert')}"
            yield ask(about, probes.sent, group=f"over {axis}", batch=batch, **given)
    for per_node in (1, 6, 8, 16, 48):
        for one in (Plan(2, 3, 4, 2, 2), Plan(8, 3, 2, 1, 4), Plan(2, 2, 3, 4), Plan(8, 1, 1, 6)):
            given = {"machine": machine(rng, 48, per_node, 1e9), "plan": asdict(one)}
            moved = {"nbytes": int(rng.integers(10**6)), "operations": int(rng.integers(1, 99))}
            about = f"{in_short(one)}, {plural(per_node, 'rank')} in a node"
            yield ask(about, probes.seconds, group="links", **given, **moved)


def stages(rng: Random) -> Questions:
    N, nodes, rate = ints(rng, 3, 6, 3)
    one = [(1, [(N, rate)]), (6, [(1, rate)]), (5, [(N, rate)]), (7, [(4, rate)]), (2, [(5, 8)])]
    two = [(6, [(2, 2 * rate), (nodes, rate)]), (4, [(nodes, 9), (1, 7), (2, 5)])]
    for cost in ("paper", "released"):
        for n, levels in [*one, *two, (5, [(2, rate), (2, rate)])]:
            work = sorted(ints(rng, 1, 60, n), reverse=n < 6)  # else least where w is
            sizes = ints(rng, 5, 200, n), sorted(ints(rng, 1, 90, n))
            given = {"profile": list(zip(work, *sizes, strict=True)), "levels": levels}
            shape = " x ".join(str(units) for units, _ in levels)
            about = f"{plural(n, 'layer')}, {cost}, units of each level: {shape}"
            group = "nodes" if len(levels) > 1 else f"one level, {cost}"
            yield ask(about, probes.pipeline, group=group, cost=cost, **given)


def machine(rng: Random, ranks: int, per_node: int, memory: float, fast: bool = False) -> dict:
    flops, link = 1e12 * rng.uniform(2, 12), 1e9 * rng.uniform(30, 60)
    network = 1e9 * rng.uniform(10, 30) if fast else 1e9 * rng.uniform(0.3, 3)
    return asdict(Machine(ranks, per_node, flops, memory, link, network, 1e-5, 3e11))


def planner(rng: Random) -> Questions:
    few = int(rng.choice([6, 12]))
    for group, N, per_node, room in (  # room: of what ZeRO 3 with recomputation needs
        ("slow links", 8, 4, (1.1, 2)),
        ("slow links", few, 2, (1.1, 2)),
        ("little memory", 8, 4, (1.03, 1.3)),
        ("little memory", few, 2, (1.03, 1.3)),
        ("the next best", 1, 1, (1.1, 3)),
        ("the next best", 6, 2, (1.5, 5)),
        ("few are timed", 8, 2, (6, 12)),
        ("few are timed", 12, 4, (6, 12)),
    ):
        (L,), (T,), (V,) = ints(rng, 5, 12, 1), ints(rng, 1, 5, 1), ints(rng, 2, 40, 1)
        size, m = TransformerSize(L, 768, 12, 256 * T, 1000 * V), int(rng.integers(2, 5))
        lean = Plan(N, micro_batches=m, zero=3 if N > 1 else 0, recompute="full")
        memory = float(sum(fullest(size, lean, N * m).values()) * rng.uniform(*room))
        where = machine(rng, N, per_node, memory, fast=group == "the next best")
        given = {"model": asdict(size), "machine": where, "batch": N * m, "schedules": SCHEDULES}
        given["wanted"] = 6 if group == "the next best" else 1
        judge = partial(as_good, given=given, counted=group == "few are timed")
        about = f"{L} blocks, {N * m} examples, {plural(N, 'rank')} of {bytes_of(memory)}"
        yield ask(f"{about}, {per_node} in a node", probes.search, judge, group, **given)


def as_good(answer: Answer, want: Answer, given: dict, counted: bool) -> str | None:
    """Judge plans: each fits and is as fast as the package's of its place; few are timed."""
    size, where = TransformerSize(**given["model"]), Machine(**given["machine"])
    columns = [[None if v == -1 else v for v in answer[name].tolist()] for name in asdict(Plan())]
    plans, best = [Plan(*values) for values in zip(*columns, strict=True)], want["seconds"]
    if len(set(plans)) != len(best):
        return f"there are {plural(len(set(plans)), 'plan')}, not {len(best)}"
    if odd := set(plans) - space(size, where, given):
        return f"no search tries {odd.pop()}"
    for one, least in zip(plans, best, strict=True):
        found = seconds(size, one, where, given["batch"])
        if not found.fits:
            return f"{in_short(one)} needs {bytes_of(found.held)} of {bytes_of(found.room)}"
        if found.seconds > SLACK * least:
            return f"{in_short(one)} takes {seconds_of(found.seconds)}, not {seconds_of(least)}"
    timed, most = (int(times[probes.TIMED]) for times in (answer, want))
    return f"{timed} plans are timed, not {most}" if counted and timed > MORE * most else None


def space(size: TransformerSize, where: Machine, given: dict) -> set[Plan]:
    """Return all plans that a search tries: two of them are never one plan in other words."""
    return {
        plan
        for mesh in meshes(size, where.ranks, given["batch"])
        for m in micro_batches(given["batch"], mesh)
        for option in options(size, replace(mesh, micro_batches=m), where.per_node)
        for plan in orders(size, option, given["schedules"])
    }


QUESTIONS = {"10.1": held, "10.2": sent, "10.3": stages, "10.4": planner}
