"""What planners refuse: an error in one line, which names the number and the remedy."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from minidist import nn
from minidist.pipeline_parallel import programs
from minidist.planning import (
    Machine,
    Plan,
    TransformerSize,
    memory,
    pipedream,
    search,
    seconds,
    simulate,
    tofu,
    traffic,
    year_of_training,
)
from minidist.planning.costs.stages import cut_of
from minidist.planning.flexflow import Cut, Simulator, cuts, data_parallel, flexflow
from minidist.planning.graph import Graph, Op, Value
from minidist.planning.gspmd import PARTIAL, Split, propagate
from minidist.planning.plans.published import size_of
from minidist.planning.tracing import trace
from minidist.planning.year_of_training import Run, Slowdown, replay
from tests.planning.test_graphs import PRODUCT, graph_of

RATES = {"flops": 1e9, "memory": 1e30, "link": 1e8, "network": 1e7}
PAIR = Machine(2, 2, **RATES)
LAYERS = graph_of([PRODUCT, ("matmul", ("y", "V"), "r", "bo,oc->bc")], b=2, i=1, o=2, c=2)
CLASSES, EMBEDDING = np.zeros(6, int), nn.Embedding(5, 2, dtype="float64")
CALM = Run(hosts=4, interval=90, save=10, restart=60, failures=1e30)
ENDLESS = [  # an interval that no clock notices, hosts and links that change without an end
    replace(CALM, interval=1e-20, save=0),
    replace(CALM, failures=1e-9, broken=0),
    replace(CALM, slowdowns=(Slowdown(1e-9, 1e-9, 2),)),
]


def size(**more):
    return TransformerSize(
        **{"layers": 2, "width": 16, "heads": 4, "sequence": 8, "vocab": 12} | more
    )


def estimated(size, plan, batch):
    return seconds(size, plan, Machine(plan.ranks, 1, **RATES), batch)


def held(plan=None, batch=16, rank=0, **more):
    return memory(size(), plan or Plan(), batch, rank, **more)


def mlp(targets=CLASSES, loss=nn.cross_entropy, frozen=None):
    model = nn.MLP([4, 2], dtype="float64")
    if frozen:
        model.freeze(frozen)
    return trace(model, np.ones((6, 4)), targets, loss)


def embedded(x):
    return EMBEDDING(4 - x)


def reshaped(*shape):
    return trace(
        lambda x: (x * x).reshape(*shape), np.ones((3, 8)), np.ones(shape), nn.squared_error
    )


def cut_like(**cut):
    return Simulator(LAYERS, Machine(2, 2, 1, 10**9, 1, 1))(cut)


def an_op(indices):
    values = {
        "x": Value("x", (2, 3), "float64", "input"),
        "y": Value("y", (2,), "float64", "result"),
    }
    return Graph(values, [Op("sum", ("x",), "y", indices)])


def published(ranks, batch, wanted=1):
    return search(size_of("124m"), Machine(ranks, 8, **RATES), batch, wanted)


def run_1f1b(**times):
    return simulate(programs("1f1b", 2, 2), **times)


def profile(number):
    return pipedream([(1, 1, 1), (1, number, 1)], 2, 1.0)


def annotated(**places):
    return propagate(graph_of([PRODUCT], b=4, i=6, o=2), {"t": places})


REFUSED = {
    "plans": [
        (partial(Plan, dp=0), "dp is a whole number from 1, not 0"),
        (partial(Plan, tp=True), "tp is a whole number from 1, not True"),
        (partial(Plan, micro_batches=1.5), "micro_batches is a whole number from 1, not 1.5"),
        (partial(Plan, dp=4, ep=3), "ep=3 does not divide dp=4; use a divisor of it"),
        (partial(Plan, cp=2, sequence=True), "cp=2 cuts the sequence already"),
        (partial(Plan, zero=4), "zero is one of 0, 1, 2, 3, not 4"),
        (partial(Plan, shards=2), "shards=2 is for ZeRO, and not for experts over ep=1; use"),
        (partial(Plan, dp=4, ep=2, zero=1, shards=2), "shards=2 is for ZeRO, and not for experts"),
        (partial(Plan, dp=3, cp=4, zero=3, shards=6), "groups of 6 shards do not make up dp=3 x"),
        (partial(Plan, dp=4, zero=3, shards=0), "shards is a whole number from 1, not 0"),
        (partial(Plan, recompute=True), "recompute is one of none, selective, full, not True"),
        (partial(Plan, precision="float64"), "precision is one of mixed, float32, not 'float64'"),
        (partial(Plan, schedule="pipedream"), "schedule is one of layer_split, gpipe, 1f1b"),
        (partial(Plan, schedule="1f1b", chunks=2), "1f1b has at most 1 chunks, not 2"),
        (partial(Plan, schedule="zb_v"), "zb_v has 2 chunks per rank, not 1"),
    ],
    "machines": [
        (partial(Machine, 2, 2, **RATES | {name: wrong}), f"{name} is a number above 0")
        for name, wrong in (("flops", 0), ("link", -1), ("memory", math.nan), ("network", 10**400))
    ]
    + [
        (partial(Machine, 0, 2, **RATES), "ranks is a whole number from 1, not 0"),
        (partial(Machine, 2, 2, **RATES, latency=math.inf), "latency is a number from 0, not inf"),
    ]
    + [
        (partial(Machine, 1, 1, **RATES, efficiency=wrong), "efficiency")
        for wrong in (0, 1.5, math.nan, True, (), ((8, 0.5), (4, 0.6)), ((4, 0.5), (8, 0.25)))
    ],
    "sizes": [
        (partial(size, width=10), "width 10 does not split into 4 heads; use a multiple of 4"),
        (partial(size, layers=0), "layers is a whole number from 1, not 0"),
        (partial(size, layers=10**9), "1000000000 layers are too many, .* use 10,000 or less"),
        (partial(size, width=10**400), r"width is (a whole number from 1|too large)"),
        (partial(size, experts=1), "cannot choose 2 of 1 experts"),
        (partial(size, experts=None), "experts is a whole number from 1, not None"),
        (partial(size_of, "13B"), "did you mean 13b.*--layers, --width, --heads"),
        (partial(size_of, "llama"), "choose.*--layers, --width, --heads"),
    ],
    "memory": [
        (partial(held, Plan(dp=4, micro_batches=4), 15), "15 examples do not fill 4 micro-batches"),
        (partial(held, keeps="all"), "keeps is one of minidist, korthikanti, not 'all'"),
        (partial(held, per_parameter=20), "no count of 20 bytes per parameter for mixed"),
        (partial(held, Plan(precision="float32"), per_parameter=18), "18 bytes per parameter for"),
        (partial(held, Plan(precision="float32"), keeps="korthikanti"), "count dense blocks in"),
        (partial(held, rank=1), "rank 1 is not in a pipeline of 1; use 0 to 0"),
        (partial(cut_of, 7, 2, "blocks"), '7 blocks do not make 2 equal stages; use cut="layers"'),
        (partial(cut_of, 2, 5, "layers"), "cannot cut 4 layers into 5 stages; use at most 4"),
    ],
    "models that a plan cannot cut": [
        (partial(question, size(experts=experts), plan, 16), message)
        for question in (memory, traffic, estimated)
        for experts, plan, message in (
            (0, Plan(tp=3), "tp=3 does not divide 4 heads; use a divisor of them"),
            (0, Plan(2, ep=2), "ep=2 needs experts, and the model has 0; use ep=1"),
            (6, Plan(4, ep=4), "ep=4 does not divide 6 experts; use a divisor of them"),
        )
    ],
    "searches": [
        (partial(published, 10**12 + 39, 1), "1000000000039 is too large to look for its"),
        (partial(published, 10**400, 1), "ranks is too large: use 1,000,000,000,000,000,000 or"),
        (partial(published, 2, 2 * 10**17), "100000000000000000 is too large to look for its"),
        (partial(published, 2, 2.0), "batch is a whole number from 1, not 2.0"),
        (partial(published, 2, 2, 0), "wanted is a whole number from 1, not 0"),
        (
            partial(
                seconds,
                size(),
                Plan(2, 2, micro_batches=3, zero=2, schedule="zb_h1"),
                Machine(4, 2, **RATES),
                6,
            ),
            "and zb_h1 computes it later; use zero=1, or gpipe",
        ),
    ],
    "simulations": [
        (partial(run_1f1b, buffer=-1), "0 or more messages, not -1"),
        (partial(run_1f1b, buffer=1.5), "0 or more messages, not 1.5"),
        (partial(run_1f1b, latency=-1), "no transfer has latency -1 and bandwidth None"),
        (partial(run_1f1b, latency=math.nan), "no transfer has latency nan"),
        (partial(run_1f1b, bandwidth=0), "no transfer has latency 0 and bandwidth 0"),
        (partial(run_1f1b, forward=[1, -2]), "a duration is a number from 0, not -2"),
        (partial(run_1f1b, forward=[1, 2, 3]), "for 2 ranks with 2 virtual stages: give one"),
        (partial(run_1f1b, update=math.inf), "a duration is a number from 0, not inf"),
        (partial(run_1f1b, backward_input="1"), "a duration is a number from 0, not '1'"),
        (partial(run_1f1b, overhead=-1), "an overhead is a number from 0, not -1"),
        (partial(simulate, []), "there is no program for any rank"),
    ],
    "PipeDream's profiles and levels": [
        *(
            (partial(profile, n), "layer 1 has the profile")
            for n in (10**400, math.nan, -1, "1", [])
        ),
        (partial(pipedream, [(1, 1)], 4, 1), "layer 0 has the profile"),
        (partial(pipedream, [], 1, 1), "no layer"),
        (partial(pipedream, [(1, 1, 1)], 1.5, 1), "no pipeline on 1.5 ranks"),
        (partial(pipedream, [(1, 1, 1)], 4, [(2, 1), (3, 1)]), "no levels of 4 ranks"),
        (partial(pipedream, [(1, 1, 1)], 4, 0), "no levels of 4 ranks"),
        (partial(pipedream, [(1, 1, 1)], 4, []), "are no levels of 4 ranks"),
        (partial(pipedream, [(1, 1, 1)], 1001, 1.0), "1001 ranks or nodes on one level are too"),
        (partial(pipedream, [(1, 1, 1)], 1, 1, "free"), "unknown cost 'free'; choose one of"),
    ],
    "graphs": [
        (partial(graph_of, [PRODUCT], b=0, i=6, o=2), r"x has shape \[0, 6\]; every axis has a"),
        (partial(graph_of, [PRODUCT] * 2, b=4, i=6, o=2), "an op makes y, which is known before"),
        (
            partial(
                Graph, {"x": Value("x", (1,), "float64", "input")}, [Op("exp", ("x",), "y", "b->b")]
            ),
            "an op makes y, which is not among the values",
        ),
        (partial(an_op, "ab->ba"), "'ba' does not describe y"),
        (partial(an_op, "ab,b->a"), "1 inputs"),
        (partial(an_op, "aa->a"), "'aa'"),
        (partial(propagate, Graph({}, []), {}), "a graph without ops has no loss; give it one op"),
        (partial(flexflow, Graph({}, []), PAIR), "a graph without ops has no loss; give it one op"),
    ],
    "models that are traced": [
        (partial(mlp, frozen="layers.0.bias"), r"input 2 of Linear needs no gradient.*frozen"),
        (
            partial(trace, lambda x: x**3, np.ones((6, 4)), np.zeros(6, int)),
            "no index description of Power is known",
        ),
        (partial(mlp, loss=lambda y, t: nn.cross_entropy(y, 1 - t)), "a loss of other values"),
        (
            partial(mlp, np.ones((6, 2)), lambda y, t: nn.squared_error(y, 1 - t)),
            "a loss of other values than the targets",
        ),
        (
            partial(
                trace,
                embedded,
                np.arange(3),
                np.ones((3, 2)),
                nn.squared_error,
            ),
            "an embedding of other indices than the inputs",
        ),
        (partial(reshaped, 2, 12), "an axis of 3 does not divide into parts of 2"),
    ],
    "annotations": [
        (partial(annotated, x=place), r"t: x.* (cannot be annotated as|has no axis) ")
        for place in (0, None, Split("a"), Split(0.0), Split(-1), Split(2), PARTIAL)
    ]
    + [
        (partial(annotated, V=Split(0)), "unknown value of t 'V'"),
        (
            partial(
                propagate,
                graph_of([PRODUCT], b=4, i=6, o=2),
                {"s": {"x": Split(0)}, "t": {"x": Split(0)}},
            ),
            "two mesh axes cannot split axis 0 of x",
        ),
    ],
    "cuts": [
        *(
            (
                partial(planner, graph_of([PRODUCT], b=4, i=6, o=2), ranks),
                r"cannot be cut over .* ranks",
            )
            for planner in (tofu, data_parallel)
            for ranks in (0, 2.0, math.nan, None, "2", 10**12 + 39)
        ),
        (partial(cuts, LAYERS, 2, "SOX"), "'X' is no dimension of SOAP"),
        (partial(cuts, LAYERS, 0, "S"), "cannot be cut over 0 ranks"),
        (partial(cut_like, y=Cut()), "no cut for r"),
        (partial(cut_like, y=Cut(), r=Cut((), 2)), "cut of r needs ranks 2 to 2 of 2"),
        (partial(cut_like, y=Cut((("b", 3),)), r=Cut()), "cut of y splits b, of length 2, into 3"),
        (partial(cut_like, y=Cut((("x", 2),)), r=Cut()), "cut of y splits x, which"),
        (partial(cut_like, y=Cut((("b", 2), ("b", 1))), r=Cut()), "cut of y names a letter twice"),
        (partial(cut_like, y=Cut((("b", 0),)), r=Cut()), "into 0 parts that are not equal"),
        *(
            (partial(flexflow, LAYERS, PAIR, **more), "make no walks")
            for more in ({"budget": 2}, {"sharpness": -1}, {"sharpness": math.nan})
        ),
    ],
    "runs of a year": [
        (partial(replace, CALM, **{name: wrong}), name)
        for name, wrong in (
            ("hosts", 2.5),
            ("interval", 0),
            ("save", -1),
            ("failures", math.inf),
            ("repair", 0),
            ("spares", 1.5),
            ("broken", 2),
            ("elastic", 5),
            ("evict", math.nan),
            ("linked", 2),
            ("links", (1, 1, 1)),
            ("links", (1, 1, 1, 0.5)),
        )
    ]
    + [
        (partial(Slowdown, **{"every": 1, "lasts": 1, "factor": 2} | {name: wrong}), name)
        for name, wrong in (("every", 0), ("lasts", math.inf), ("factor", 0.5), ("part", 2))
    ]
    + [(partial(replay, CALM, 0), "finite")]
    + [(partial(replay, run, 1e5), r"1,000 events took .* of 100000 s") for run in ENDLESS],
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_planned_is_refused(what, monkeypatch):
    monkeypatch.setattr(year_of_training, "MOST", 1000)
    for call, message in REFUSED[what]:
        with pytest.raises(ValueError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value), call
