"""What planners do with odd graphs and odd numbers: an answer, or an error with the remedy."""

import math

import numpy as np
import pytest

from minidist.pieces import prime_factors
from minidist.planning import Machine, TransformerSize, flexflow, pipedream, tofu
from minidist.planning.flexflow import Simulator, data_parallel
from minidist.planning.graph import Graph, Op, Value, with_gradients
from minidist.planning.gspmd import Replicated, Split, propagate

RATES = {"flops": 1e9, "memory": 1e30, "link": 1e8, "network": 1e7}
PRODUCT = ("matmul", ("x", "W"), "y", "bi,io->bo")
SHAPES = {"x": "bi", "W": "io", "l": "", "r": "bi"}  # of other values: [b, o]
ODD = {
    "one op": [PRODUCT],
    "a loss": [PRODUCT, ("sum", ("y",), "l", "bo->")],
    "an unused output": [PRODUCT, ("exp", ("x",), "r", "bi->bi"), ("sum", ("y",), "l", "bo->")],
    "a loss of something else": [PRODUCT, ("sum", ("x",), "l", "bi->")],
    "a diamond": [
        PRODUCT,
        ("relu", ("y",), "a", "bo->bo"),
        ("exp", ("y",), "c", "bo->bo"),
        ("add", ("a", "c"), "s", "bo,bo->bo"),
        ("sum", ("s",), "l", "bo->"),
    ],
    "a repeated input": [PRODUCT, ("multiply", ("y", "y"), "s", "bo,bo->bo")],
    "no parameters": [("sum", ("x",), "l", "bi->")],
}


def odd(ops, **lengths):
    """Return a graph of these ops: x is the input, W a parameter."""
    values = {}
    for name in dict.fromkeys(n for _, inputs, output, _ in ops for n in (*inputs, output)):
        kind = {"x": "input", "W": "parameter"}.get(name, "result")
        shape = tuple(lengths[letter] for letter in SHAPES.get(name, "bo"))
        values[name] = Value(name, shape, np.dtype("float64"), kind)
    return Graph(values, [Op(*op) for op in ops])


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("b, i, o", [(4, 6, 2), (1, 1, 1), (7, 3, 5), (10**9, 10**9, 10**9)])
@pytest.mark.parametrize("name", ODD)
def test_every_planner_plans_an_odd_graph(name, b, i, o, ranks):
    graph, machine = odd(ODD[name], b=b, i=i, o=o), Machine(ranks, 2, **RATES)
    together = [tofu(graph, ranks, steps)[1] for steps in (1, 3)]
    assert together[0] >= together[1] >= 0 and (ranks > 1 or together == [0, 0])
    parallel = Simulator(graph, machine)(data_parallel(graph, ranks)).seconds
    assert 0 < flexflow(graph, machine, budget=30)[1] <= parallel
    layout = propagate(graph, {"d": {"x": Split(0)}})
    assert layout.results[graph.ops[-1].output] == (Replicated(),)


def test_what_the_loss_does_not_need_has_no_gradient():
    """Neither the value r, nor what it alone is made of."""
    ops = [("exp", ("x",), "r", "bi->bi"), PRODUCT, ("sum", ("y",), "l", "bo->")]
    whole, _ = with_gradients(odd(ops, b=4, i=6, o=2))
    without, _ = with_gradients(odd(ops[1:], b=4, i=6, o=2))
    assert [op for op in whole.ops if op.kind != "exp"] == without.ops
    unrelated, _ = with_gradients(odd(ODD["a loss of something else"], b=4, i=6, o=2))
    assert "d x" in unrelated.values and "d W" not in unrelated.values


def test_a_graph_without_a_loss_is_refused_by_those_who_need_one():
    empty = Graph({}, [])
    assert tofu(empty, 3)[1] == 0
    for plans in (
        lambda: propagate(empty, {}),
        lambda: flexflow(empty, Machine(2, 2, **RATES)),
    ):
        with pytest.raises(ValueError, match="a graph without ops has no loss; give it one op"):
            plans()


def test_a_graph_has_no_empty_values_and_no_value_twice():
    with pytest.raises(ValueError, match=r"x has shape \[0, 6\]; every axis has a length from 1"):
        odd([PRODUCT], b=0, i=6, o=2)
    with pytest.raises(ValueError, match="an op makes y, which is known before"):
        odd([PRODUCT, PRODUCT], b=4, i=6, o=2)
    with pytest.raises(ValueError, match="an op makes y, which is not among the values"):
        Graph(
            {"x": Value("x", (1,), np.dtype("float64"), "input")}, [Op("exp", ("x",), "y", "b->b")]
        )


@pytest.mark.parametrize("placement", [0, None, "x", Split("a"), Split(0.0), Split(-1), Split(2)])
def test_an_annotation_that_is_no_placement_is_refused(placement):
    with pytest.raises(ValueError, match=r"t: x.* (cannot be annotated as|has no axis) "):
        propagate(odd([PRODUCT], b=4, i=6, o=2), {"t": {"x": placement}})


@pytest.mark.parametrize("ranks", [0, -1, 2.0, math.nan, None, "2", 10**12 + 39])
def test_a_number_of_ranks_that_cannot_be_searched_is_refused_at_once(ranks):
    graph = odd([PRODUCT], b=4, i=6, o=2)
    with pytest.raises(ValueError, match=r"cannot be cut over .* ranks"):
        tofu(graph, ranks)
    with pytest.raises(ValueError, match=r"cannot be cut over .* ranks"):
        data_parallel(graph, ranks)


def test_a_large_prime_is_found_prime_at_once():
    assert prime_factors(999_999_999_989) == (999_999_999_989,)
    assert prime_factors(2 * 3 * 3 * 999_983) == (999_983, 3, 3, 2)


@pytest.mark.parametrize("number", [10**400, 10**309, math.nan, -1, "1", None])
def test_a_machine_and_a_model_take_numbers_that_floats_can_hold(number):
    for name in ("flops", "memory", "link", "network"):
        with pytest.raises(ValueError, match=f"{name} is a number above 0"):
            Machine(2, 2, **RATES | {name: number})
    assert Machine(2, 2, **RATES | {"memory": np.float32(3)}).memory == 3  # without a warning
    with pytest.raises(ValueError, match=r"width is (a whole number from 1|too large)"):
        TransformerSize(1, number, 1, 1, 1)


def test_a_model_has_no_more_layers_than_can_be_listed():
    with pytest.raises(ValueError, match=r"1000000000 layers are too many, .* use 10,000 or less"):
        TransformerSize(10**9, 8, 1, 1, 1)
    with pytest.raises(ValueError, match="experts is a whole number from 1, not None"):
        TransformerSize(1, 8, 1, 1, 1, experts=None)


def test_a_level_has_no_more_ranks_than_replicas_can_be_tried():
    with pytest.raises(ValueError, match="1001 ranks or nodes on one level are too many"):
        pipedream([(1, 1, 1)], 1001, 1.0)
    assert pipedream([(1, 1, 0)], 1000, 1.0)[0] == [(0, 1, 1000)]


@pytest.mark.parametrize("number", [10**400, math.nan, math.inf, -1, "1", None, [], 1j])
def test_a_profile_is_of_numbers_that_floats_can_hold(number):
    with pytest.raises(ValueError, match="layer 1 has the profile"):
        pipedream([(1, 1, 1), (1, number, 1)], 2, 1.0)
    for bandwidth in (
        [] if number == math.inf else [number, [(2, number)]]  # one rank sends nothing
    ) + [[3], [(2.0, 1)], [(2, 1, 1)], []]:
        with pytest.raises(ValueError, match="are no levels of 2 ranks"):
            pipedream([(1, 1, 1)], 2, bandwidth)
