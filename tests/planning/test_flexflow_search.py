"""FlexFlow's walk: the law that it follows, what it finds beside brute force, what it refuses."""

import math
from collections import Counter
from itertools import islice, product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist.planning.flexflow import Cut, Score, Simulator, cuts, data_parallel, flexflow, walk
from minidist.planning.plans.plan import Machine
from tests.planning.test_graphs import graph_of, layers
from tests.strategies import index_graphs, machines

BRANCHES = graph_of(  # two linear layers of the same input, and the sum of both
    [
        ("matmul", ("x", "U"), "left", "bi,io->bo"),
        ("matmul", ("x", "V"), "right", "bi,io->bo"),
        ("add", ("left", "right"), "both", "bo,bo->bo"),
        ("loss", ("both",), "loss", "bo->", frozenset("o")),
    ],
    b=2,
    i=2,
    o=2,
)
SLOW_LINKS = Machine(2, 2, flops=1e9, memory=1e9, link=1e8, network=1e8, latency=1e-6)


def every_strategy(graph, machine, dims="SOAP"):
    options = cuts(graph, machine.ranks, dims)
    for chosen in product(*options.values()):
        yield dict(zip(options, chosen, strict=True))


def brute_force(graph, machine, dims="SOAP"):
    """Return the seconds of the best of all strategies, and how many there are."""
    simulate = Simulator(graph, machine)
    seconds = [simulate(strategy).seconds for strategy in every_strategy(graph, machine, dims)]
    return min(seconds), len(seconds)


def test_the_walk_visits_strategies_by_the_exponential_of_their_cost(steps=20_000):
    options = {"h": ["a", "b", "c"], "y": ["d", "e"]}
    costs = {key: 1 + number / 5 for number, key in enumerate(product(*options.values()))}
    start = {"h": "a", "y": "d"}

    def cost(*chosen):
        return Score(0, costs[chosen])

    visits = Counter(
        (now["h"], now["y"]) for _, now in islice(walk(start, options, cost, Random(1), 2), steps)
    )
    weights = {key: math.exp(-2 * seconds) for key, seconds in costs.items()}
    total = sum(weights.values())
    off = sum(abs(visits[key] / steps - weights[key] / total) for key in costs) / 2
    assert off < 0.02, f"the walk does not visit strategies by exp(-beta cost): off by {off:.2f}"


@pytest.mark.parametrize(
    "graph, ranks, budget",
    [
        (layers(8, [16, 64, 4], loss=True), 2, 200),
        (BRANCHES, 2, 200),
        (layers(4, [32, 16], loss=True), 4, 200),
    ],
)
def test_it_finds_what_brute_force_does_in_most_seeds(graph, ranks, budget):
    machine = Machine(ranks, 2, flops=1e9, memory=1e9, link=1e9, network=2e8, latency=1e-7)
    best, many = brute_force(graph, machine)
    found = [flexflow(graph, machine, seed, budget)[1] for seed in range(10)]
    assert min(found) >= best
    assert sum(seconds == best for seconds in found) >= 8, (best, many, found)


@settings(max_examples=20)
@given(graph=index_graphs(), machine=machines(), seed=st.integers(0, 99))
def test_its_cost_is_the_simulation_and_no_worse_than_what_it_began_with(graph, machine, seed):
    strategy, seconds = flexflow(graph, machine, seed, 20)
    simulate = Simulator(graph, machine)
    assert seconds == simulate(strategy).seconds
    assert seconds <= simulate(data_parallel(graph, machine.ranks)).seconds
    assert seconds <= simulate({op.output: Cut() for op in graph.ops}).seconds
    assert max(simulate(strategy).memory) <= machine.memory
    assert flexflow(graph, machine, seed, 20) == (strategy, seconds)


def peaks(graph):
    """Return the bytes of the fullest rank of all strategies, fewest first."""
    simulate = Simulator(graph, SLOW_LINKS)
    return sorted({max(simulate(s).memory) for s in every_strategy(graph, SLOW_LINKS)})


def test_what_does_not_fit_is_not_returned():
    graph = layers(2, [16, 64], loss=True)
    for memory in peaks(graph)[:2]:
        small = Machine(2, 2, 1e9, memory, 1e8, 1e8, 1e-6)
        assert max(Simulator(graph, small)(data_parallel(graph, 2)).memory) > memory
        fitting = [
            found.seconds
            for strategy in every_strategy(graph, small)
            if max((found := Simulator(graph, small)(strategy)).memory) <= memory
        ]
        strategy, seconds = flexflow(graph, small, budget=200)
        assert max(Simulator(graph, small)(strategy).memory) <= memory
        assert seconds == min(fitting)


def test_if_nothing_fits_an_error_says_how_much_is_lacking():
    graph = layers(2, [16, 64], loss=True)
    memory = peaks(graph)[0] - 3
    with pytest.raises(ValueError, match=f"the best lacks 3 bytes of the {memory} of a rank"):
        flexflow(graph, Machine(2, 2, 1e9, memory, 1e8, 1e8), budget=400)
