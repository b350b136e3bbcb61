"""What a strategy will cost before it runs, and which one is best.  In reading order:

Programs on virtual clocks
    simulator.py          any pipeline's programs: makespan, bubbles, stash, timeline
    shared_cores.py       ranks that share the cores of one machine

A plan by hand, and the best one by search (Transformers of any size, without arrays)
    plan.py               how a run is split, and what a machine can do
    costs/                closed forms of what is sent, held and computed: see its __init__
    models.py             published sizes and their meshes
    roofline.py           seconds of a product
    step_time.py          seconds of a pipeline, for any number of micro-batches
    estimate.py           seconds and bytes of one plan
    plan_search.py        the best of all plans
    plan_space.py         which plans there are
    why.py                why each other one is worse, in words

Four papers that cut
    graphs/               the graph of a model, which three of them read: see its __init__
    gspmd.py              annotations spread; placement_rules.py, placed_program.py: rules, the run
    tofu.py               fewest bytes, by dynamic programming
    flexflow.py           fewest seconds, by a random walk; soap.py, soap_simulator.py,
                          task_graph.py: its cuts, and their simulated time
    pipedream.py          stages and their replicas, from a profile of the layers
"""

from typing import TYPE_CHECKING

from minidist.first_use import on_first_use

if TYPE_CHECKING:
    from minidist.planning.costs.memory import memory
    from minidist.planning.costs.traffic import traffic
    from minidist.planning.costs.transformer_size import TransformerSize
    from minidist.planning.estimate import Estimate, seconds
    from minidist.planning.flexflow import flexflow
    from minidist.planning.graphs.tracing import trace
    from minidist.planning.gspmd import propagate
    from minidist.planning.pipedream import pipedream
    from minidist.planning.plan import Machine, Plan
    from minidist.planning.plan_search import search
    from minidist.planning.simulator import Simulation, simulate
    from minidist.planning.tofu import tofu

__all__ = [
    "Estimate",
    "Machine",
    "Plan",
    "Simulation",
    "TransformerSize",
    "flexflow",
    "memory",
    "pipedream",
    "propagate",
    "search",
    "seconds",
    "simulate",
    "tofu",
    "trace",
    "traffic",
]

# Each name is imported when it is first used: simulations need no NumPy, models do.
_MODULE_OF = {
    "Estimate": "estimate",
    "Machine": "plan",
    "Plan": "plan",
    "Simulation": "simulator",
    "TransformerSize": "costs.transformer_size",
    "flexflow": "flexflow",
    "memory": "costs.memory",
    "pipedream": "pipedream",
    "propagate": "gspmd",
    "search": "plan_search",
    "seconds": "estimate",
    "simulate": "simulator",
    "tofu": "tofu",
    "trace": "graphs.tracing",
    "traffic": "costs.traffic",
}

__getattr__, __dir__ = on_first_use(__name__, _MODULE_OF)


# At once: a function's file of the same name, imported later, would take the name.
for _name in ("flexflow", "pipedream", "tofu"):
    __getattr__(_name)
