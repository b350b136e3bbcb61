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
from tests.planning.flexflow.test_simulator import branches, mlp
from tests.planted import planted
from tests.strategies import index_graphs, machines

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


def check_law(steps=20_000):
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


def test_the_walk_visits_strategies_by_the_exponential_of_their_cost():
    check_law()


def test_a_walk_with_another_law_is_named():
    with planted("walk_uphill"), pytest.raises(AssertionError, match="does not visit strategies"):
        check_law()


@pytest.mark.parametrize(
    "graph, ranks, budget",
    [(mlp(8, [16, 64, 4]), 2, 200), (branches(), 2, 200), (mlp(4, [32, 16]), 4, 200)],
)
def test_it_finds_what_brute_force_does_in_most_seeds(graph, ranks, budget):
    machine = Machine(ranks, 2, flops=1e9, memory=1e9, link=1e9, network=2e8, latency=1e-7)
    best, many = brute_force(graph, machine)
    found = [flexflow(graph, machine, seed, budget)[1] for seed in range(10)]
    assert min(found) >= best
    assert sum(seconds == best for seconds in found) >= 8, (best, many, found)


@pytest.mark.slow
@pytest.mark.parametrize(
    "graph, ranks, dims",
    [
        (mlp(8, [64, 256, 8]), 4, "SOAP"),
        (branches(), 4, "SOAP"),
        (mlp(8, [64, 256, 8]), 2, "SOAPR"),
        (mlp(4, [8, 32, 16, 4]), 2, "SOAP"),
    ],
)
def test_it_does_so_in_larger_spaces_too(graph, ranks, dims):
    machine = Machine(ranks, 2, flops=1e9, memory=1e9, link=1e9, network=1e8, latency=1e-6)
    best, many = brute_force(graph, machine, dims)
    found = [flexflow(graph, machine, seed, 1000, dims)[1] for seed in range(10)]
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


def test_two_seeds_may_walk_on_two_ways():
    graph, machine = mlp(8, [64, 256, 8]), Machine(4, 2, 1e9, 1e9, 1e9, 1e8)
    assert len({flexflow(graph, machine, seed, 60)[1] for seed in range(5)}) > 1


@pytest.mark.parametrize(
    "graph, cut",
    [
        (mlp(512, [8, 8]), {"h0": "b"}),  # few parameters: samples
        (mlp(2, [64, 512]), {"h0": "o"}),  # many parameters, few samples
    ],
)
def test_an_op_is_cut_along_what_moves_least(graph, cut):
    strategy, _ = flexflow(graph, SLOW_LINKS, budget=200)
    assert {name: strategy[name].degrees for name in cut} == {n: ((x, 2),) for n, x in cut.items()}


def test_branches_go_to_different_ranks_where_only_whole_ops_may_move():
    strategy, seconds = flexflow(branches(), Machine(2, 2, 1e3, 1e9, 1e9, 1e9), dims="O")
    assert strategy["left"].first != strategy["right"].first
    assert seconds == brute_force(branches(), Machine(2, 2, 1e3, 1e9, 1e9, 1e9), "O")[0]


def peaks(graph):
    """Return the bytes of the fullest rank of all strategies, fewest first."""
    simulate = Simulator(graph, SLOW_LINKS)
    return sorted({max(simulate(s).memory) for s in every_strategy(graph, SLOW_LINKS)})


def test_what_does_not_fit_is_not_returned():
    graph = mlp(2, [16, 64])
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
    graph = mlp(2, [16, 64])
    memory = peaks(graph)[0] - 3
    with pytest.raises(ValueError, match=f"the best lacks 3 bytes of the {memory} of a rank"):
        flexflow(graph, Machine(2, 2, 1e9, memory, 1e8, 1e8), budget=400)


def test_the_larger_space_has_the_better_strategy():
    graph, dims = mlp(64, [64, 64, 64]), ("", "S", "SA", "SAP", "SOAP", "SOAPR")
    best = {d: brute_force(graph, SLOW_LINKS, d)[0] for d in dims}
    assert list(best.values()) == sorted(best.values(), reverse=True)
    assert best["SOAP"] < best["S"] < best[""]
    assert flexflow(graph, SLOW_LINKS, dims="S")[1] == best["S"]


@pytest.mark.parametrize("more", [{"budget": 2}, {"sharpness": -1}, {"sharpness": math.nan}])
def test_a_walk_that_cannot_be_is_refused(more):
    with pytest.raises(ValueError, match="make no walks"):
        flexflow(mlp(2, [2, 2]), SLOW_LINKS, **more)
