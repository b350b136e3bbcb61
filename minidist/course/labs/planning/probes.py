"""What the planning lab asks of a student's code; it runs beside that code, and judges nothing.

Models, plans and machines travel as dicts of their fields.
"""

from dataclasses import fields
from math import prod

import numpy as np

from minidist.planning import Machine, Plan, TransformerSize
from minidist.planning.costs import memory, stages, traffic
from minidist.planning.costs.memory import CONVENTIONS, positions
from minidist.planning.pipedream import nested
from minidist.planning.plans import block
from minidist.planning.plans.search import Search

AXES = "tp", "cp", "pp", "dp", "ep"
TIMED = "the plans that are timed"


def layers(model, plan):
    """Return the dense and the experts' parameters of each layer of each rank of pp."""
    size, plan = TransformerSize(**model), Plan(**plan)
    own = {r: stages.layer_parameters(size, plan, r) for r in range(plan.pp)}
    return {f"the layers of rank {r}": np.array(each, int) for r, each in own.items()}


def states(layers, plan, buffers):
    held = memory.elements_of([stages.Parameters(*n) for n in layers], Plan(**plan), buffers)
    return dict(zip(("parameters", "gradients", "optimizer's parameters"), held, strict=True))


def activations(model, plan, batch):
    size, plan = TransformerSize(**model), Plan(**plan)
    kept = CONVENTIONS["minidist"](size, plan, memory.micro_batch(plan, batch))
    held = [memory.activations(size, plan, r, kept) for r in range(plan.pp)]
    return {"the bytes of activations, by rank": held}


def sent(axis, model, plan, batch):
    """Return the bytes and the operations of each rank of pp along an axis."""
    size, plan = TransformerSize(**model), Plan(**plan)
    rows = [memory.micro_batch(plan, batch) * positions(size, plan)]
    over = {"dp": traffic.over_data, "pp": traffic.over_pipeline, "cp": traffic.over_context}[axis]
    each = [over(size, plan, r, *(rows if axis != "dp" else [])) for r in range(plan.pp)]
    bytes_, operations = zip(*each, strict=True)
    return {"the bytes, by rank": [float(n) for n in bytes_], "the operations, by rank": operations}


def seconds(plan, machine, nbytes, operations):
    """Return by axis how fast, and in how many seconds, these bytes and operations travel."""
    plan, machine = Plan(**plan), Machine(**machine)
    rates = {f"the rate of {axis}": int(block.rate_of(axis, plan, machine)) for axis in AXES}
    times = [block.travel(axis, plan, machine, nbytes, operations) for axis in AXES]
    return rates | {f"the seconds over {a}": t for a, t in zip(AXES, times, strict=True)}


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


def search(model, machine, batch, schedules, wanted):
    """Return the best plans: by field an array of what each of them has, -1 for None."""
    found = Counted(TransformerSize(**model), Machine(**machine), batch, schedules)
    best = list(found.best(wanted))
    plans = {
        f.name: np.array([number(getattr(e.plan, f.name)) for e in best]) for f in fields(Plan)
    }
    return plans | {"seconds": [e.seconds for e in best], TIMED: found.timed}
