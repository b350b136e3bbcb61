"""What a strategy will cost before it runs, and which one is best.  In reading order:

Programs and tasks on clocks
    simulator.py          any pipeline's programs: makespan, bubbles, stash, timeline, critical path
    clock.py              tasks that wait for each other, on devices that do one at a time
    year_of_training.py   a long run whose hosts fail or slow down: what is useful, lost, waited for

A plan by hand, and the best one by search (Transformers of any size, without arrays)
    costs/                what a plan sends and holds, and the closed forms that papers print
    plans/plan.py         how a run is split, and what a machine can do
    plans/block.py        seconds of one block: its products, and what travels between them
    plans/estimate.py     seconds and bytes of one plan
    plans/search.py       the best of all plans
    plans/why.py          why each other one is worse, in words
    plans/published.py    published models and runs: their seconds, and those of the plan

Four papers that cut
    graph.py              a model as values and ops, which three of them read
    tracing.py            from a model to its graph
    computation.py        what each op computes, whole or in parts
    gspmd.py              annotations spread; the result runs
    tofu.py               fewest bytes, by dynamic programming
    flexflow.py           fewest seconds, by a random walk over simulated strategies
    pipedream.py          stages and their replicas, from a profile of the layers
"""

# ruff: noqa: F401  # type checkers read the imports below; `_MODULE_OF` lists the names once

from typing import TYPE_CHECKING

from minidist import on_first_use

if TYPE_CHECKING:
    from minidist.planning.costs.memory import memory
    from minidist.planning.costs.traffic import traffic
    from minidist.planning.costs.transformer_size import TransformerSize
    from minidist.planning.flexflow import flexflow
    from minidist.planning.gspmd import propagate
    from minidist.planning.pipedream import pipedream
    from minidist.planning.plans.estimate import Estimate, seconds
    from minidist.planning.plans.plan import Machine, Plan
    from minidist.planning.plans.search import search
    from minidist.planning.simulator import Simulation, simulate
    from minidist.planning.tofu import tofu
    from minidist.planning.tracing import trace

# Each name is imported when it is first used: simulations need no NumPy, models do.
_MODULE_OF = {
    "Estimate": "plans.estimate",
    "Machine": "plans.plan",
    "Plan": "plans.plan",
    "Simulation": "simulator",
    "TransformerSize": "costs.transformer_size",
    "flexflow": "flexflow",
    "memory": "costs.memory",
    "pipedream": "pipedream",
    "propagate": "gspmd",
    "search": "plans.search",
    "seconds": "plans.estimate",
    "simulate": "simulator",
    "tofu": "tofu",
    "trace": "tracing",
    "traffic": "costs.traffic",
}

__all__ = sorted(_MODULE_OF)
__getattr__, __dir__ = on_first_use(__name__, _MODULE_OF)


# At once: a function's file of the same name, imported later, would take the name.
for _name in ("flexflow", "pipedream", "tofu"):
    __getattr__(_name)
