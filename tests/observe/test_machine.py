"""A machine's rates, and steps predicted from them: with rates that are known, exactly."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest

from minidist import Cluster
from minidist.observe import machine
from minidist.observe.machine.prediction import predicted, program, spread, total
from minidist.observe.machine.rates import Rates, at, measure_rates, merged
from minidist.observe.machine.steps import StepTimes, workload
from minidist.observe.machine.trace import Act, Call, Pass, trace, used
from minidist.pipeline_parallel import programs
from minidist.planning import simulate
from minidist.planning.shared_cores import Meet, Receive, Send, Work
from minidist.verify.strategies import STRATEGIES

COLLECTIVES = (
    "barrier all_reduce reduce_scatter all_gather all_to_all TopK Sign Int8 PowerSGD".split()
)
SHOWN = (
    "naive bucketed zero_3 1f1b gpipe zb_h1 interleaved zb_v layer_split siamese pipedream "
    "parameter_server sequence column ring_attention top_k hybrid"
).split()
COMPARED = [n for n, record in STRATEGIES.items() if record.costs.compared]


def known_rates(cores=4.0, forward=1.0, inputs=2.0, weights=4.0, update=0.0, collective=0.0):
    """Every function takes these seconds, whatever its size; so does every collective."""
    names = [*COLLECTIVES, "all_reduce in place"]
    seconds = {("Add", 8, part): taken for part, taken in enumerate((forward, inputs, weights))}
    seconds |= {(name, ranks): collective for name in names for ranks in (1, 2, 4)}
    seconds |= {"update": update, "send": 0.0, "recv": 0.0}
    return Rates({what: [(1, taken)] for what, taken in seconds.items()}, 0.0, cores)


def traced(names):
    """Return {strategy: (its example, what each of two ranks does in a step of it)}."""
    found = {}
    with Cluster(2, transport="thread") as ranks:
        for name in names:
            case = STRATEGIES[name].costs.example(2)
            found[name] = case, ranks.run(trace, name, case)
    return found


@pytest.fixture(scope="module")
def traces():
    return traced(SHOWN)


@pytest.fixture(scope="module")
def all_traces():
    return traced([name for name in COMPARED if 2 in STRATEGIES[name].ranks])


def products(log):
    """Return the multiply-adds of a rank's forward passes in float64 products."""
    graphs = [entry for entry in log if isinstance(entry, Pass)]
    sizes = [o.size for graph in graphs for o in graph.operations if o.kind in WITH_PRODUCTS]
    return sum(sizes)


WITH_PRODUCTS = ("Linear", "CausalAttention", "RingAttention")
CONVOLUTIONS = ("channel", "spatial", "sync_batch_norm")  # their sizes count columns, too


def assert_products_are_those_of_the_closed_forms(traces):
    for name, (case, logs) in traces.items():
        if name not in CONVOLUTIONS:
            forms = [cost.work for cost in STRATEGIES[name].predict(case, 2)]
            assert [products(log) for log in logs] == forms, f"{name} computes other products"


def assert_bytes_are_those_of_the_closed_forms(traces):
    """Of those strategies that use nothing but these within a step."""
    factors = {"send": 1, "recv": 0, "barrier": 0, "reduce_scatter": 1 / 2, "all_gather": 1}
    factors |= {"all_reduce": 1, "all_reduce in place": 1}  # each of 2 ranks sends S
    checked = set()
    for name, (case, logs) in traces.items():
        calls = [e for log in logs for e in log if isinstance(e, Call) and len(set(e.ranks)) > 1]
        if STRATEGIES[name].family != "parameter server" and {c.name for c in calls} <= set(
            factors
        ):
            moved = sum(factors[call.name] * call.bytes for call in calls)
            assert moved == STRATEGIES[name].costs.bytes(case, 2), f"{name} moves other bytes"
            checked.add(name)
    return checked


def test_each_rank_computes_the_products_of_its_closed_form(traces):
    assert_products_are_those_of_the_closed_forms(traces)


def test_messages_and_sums_have_the_bytes_of_the_closed_form(traces):
    checked = assert_bytes_are_those_of_the_closed_forms(traces)
    assert set(SHOWN) - checked == {"parameter_server", "top_k"}


@pytest.mark.slow
def test_all_strategies_do_what_their_closed_forms_say(all_traces):
    assert_products_are_those_of_the_closed_forms(all_traces)
    assert len(assert_bytes_are_those_of_the_closed_forms(all_traces)) > 25
    assert_more_cores_help(all_traces)


def test_a_synchronous_step_takes_what_its_parts_take(traces):
    """All ranks do the same, and have a core each: the parts are added up."""
    _, logs = traces["naive"]
    (graph,) = [entry for entry in logs[0] if isinstance(entry, Pass)]
    sums = [e for e in logs[0] if isinstance(e, Call)]
    functions = sum(map(sum, [total(graph, known_rates())]))
    assert functions == 7 * len(graph.operations)
    rates = known_rates(update=0.5, collective=0.25)
    assert predicted(logs, rates) == pytest.approx(functions + 0.25 * len(sums) + 0.5)
    assert predicted(logs, replace(rates, cores=1.0)) == pytest.approx(2 * predicted(logs, rates))


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb_h1", "interleaved", "zb_v", "layer_split"])
def test_a_pipeline_takes_what_the_simulator_says(traces, name):
    """With a core for each rank, free messages, and the seconds of each stage's functions."""
    _, logs = traces[name]
    made = programs(name, 2, 4, 2 if name in ("interleaved", "zb_v") else 1)
    functions = {}  # of each virtual stage
    for log, own in zip(logs, made.placement, strict=True):
        for entry, graph in pairwise(log):
            if isinstance(entry, Act) and isinstance(graph, Pass):
                chunk = int(entry.name.partition(".")[2] or 0)
                functions[own[chunk]] = len(graph.operations)
    times = [functions[k] for k in sorted(functions)]
    want = simulate(made, times, [2 * t for t in times], [4 * t for t in times]).makespan
    assert predicted(logs, known_rates()) == pytest.approx(want)


def test_two_ranks_on_one_core_take_the_work_of_both(traces):
    """A waiting rank takes no core, so that not even a pipeline leaves the only one idle."""
    for name in ("1f1b", "zb_h1", "siamese", "pipedream"):
        _, logs = traces[name]
        steps = [program(log, known_rates()) for log in logs]
        work = sum(step.seconds for own in steps for step in own if isinstance(step, Work))
        assert predicted(logs, known_rates(cores=1.0)) == pytest.approx(work)


def test_more_cores_help(traces):
    assert_more_cores_help(traces)


def assert_more_cores_help(traces):
    for name, (_, logs) in traces.items():
        one, two = (predicted(logs, known_rates(cores=float(n))) for n in (1, 2))
        assert 0 < two <= one <= 2 * two * (1 + 1e-9), f"{name}: {two} s on two cores, {one} on one"


def test_work_is_spread_between_calls():
    calls = [Call("all_reduce", 8, (0, 1), (), True), Call("send", 8, (0, 1), (0,), True)]
    steps = spread(3.0, calls, known_rates(collective=5.0))
    kinds = [type(step) for step in steps]
    assert kinds == [Work, Meet, Work, Work, Work, Send, Work]
    assert [s.seconds for s in steps if isinstance(s, Work)] == [1, 5, 1, 0, 1]
    (arrived, work) = spread(0.0, [calls[1]._replace(name="recv")], known_rates())
    assert isinstance(arrived, Receive) and work == Work(0.0)


def test_seconds_between_two_sizes_are_on_a_line_and_never_negative():
    curve = [(10, 1.0), (20, 2.0), (40, 8.0)]
    assert [at(curve, x) for x in (10, 15, 20, 30, 50)] == [1, 1.5, 2, 5, 11]
    assert at([(10, 1.0), (20, 3.0)], 1) == 0 and at([(10, 1.0)], 99) == 1


def test_an_unknown_function_takes_what_an_addition_does():
    rates = known_rates()
    assert rates.seconds("Something", 5) == rates.seconds("Add", 5) == (1.0, 2.0, 4.0)


def test_only_what_a_step_uses_is_measured(traces):
    _, logs = traces["column"]
    wanted = used(logs)
    assert {("Linear", 8), ("GeluTanh", 8), "all_reduce"} <= wanted
    with Cluster(1, transport="thread") as ranks:
        (found,) = ranks.run(measure_rates, {("Linear", 8), "all_reduce"}, (32, 64), 1)
    functions = {(kind, 8, part) for kind in ("Linear", "Add") for part in range(3)}
    assert set(found.curves) == functions | {"update", ("all_reduce", 1)}
    forward, inputs, weights = (found.curves["Linear", 8, part] for part in range(3))
    assert [size for size, _ in forward] == [32 * 64 * 256, 64 * 64 * 256]
    assert all(seconds > 0 for curve in (forward, inputs, weights) for _, seconds in curve)


def test_rates_measured_in_turns_are_merged_point_by_point():
    several = [known_rates(cores=c, forward=f) for c, f in ((2.0, 1.0), (1.0, 9.0), (1.5, 2.0))]
    found = merged(several)
    assert found.curves["Add", 8, 0] == [(1, 2.0)] and found.cores == 1.5


def test_a_step_is_timed_unwatched_and_from_its_begin():
    """What times the steps wraps no layer and looks at no graph."""
    with Cluster(1, transport="thread") as ranks:
        assert ranks.run(_stopped) == [(7.0, ["a layer"], "a graph")]


def _stopped(group):
    moments = iter([1.0, 3.0, 10.0])
    watch = StepTimes(group, now=lambda: next(moments))
    watch.model()
    watch.holds([])
    return watch.seconds, watch.layers(["a layer"]), watch.graph("a graph")


@pytest.mark.parametrize("name", COMPARED)
def test_a_workload_is_the_example_on_more_work(name):
    ranks = STRATEGIES[name].most_ranks
    small, large = STRATEGIES[name].costs.example(ranks), workload(name, ranks)
    assert type(large.model) is type(small.model) and large.options == small.options
    assert len(large.inputs) > len(small.inputs) and len(large.targets) == len(large.inputs)


def test_a_row_has_what_was_predicted_and_measured():
    (row,) = machine.predict_and_measure(["naive"], (1,), rounds=1, repeats=1)
    assert (row["strategy"], row["ranks"]) == ("naive", 1)
    assert row["ratio"] == pytest.approx(row["predicted_ms"] / row["measured_ms"])
    assert 0.1 < row["ratio"] < 10 and math.isfinite(row["measured_ms"])
    assert machine.line(row).split()[:2] == ["naive", "1"]
    assert "naive on 1" in machine.summary([row])


def test_what_cannot_be_measured_is_refused():
    with pytest.raises(ValueError, match=r"unknown strategy 'naiv'; did you mean naive\?"):
        next(machine.predict_and_measure(["naiv"]))
    with pytest.raises(ValueError, match="on 1 to 4 ranks, not on 5"):
        next(machine.predict_and_measure(["naive"], (1, 5)))
