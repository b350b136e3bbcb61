"""What a FlexFlow strategy takes: bytes and memory element by element, seconds by hand."""

import math
from collections import defaultdict
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist import nn
from minidist.events import Event
from minidist.planning.flexflow import Cut, Simulator, cuts, data_parallel
from minidist.planning.graph import Graph, Op, Value
from minidist.planning.plans.plan import Machine
from minidist.planning.tracing import trace
from tests.planted import planted
from tests.strategies import index_graphs, machines

FAST = {"flops": 1, "memory": 10**9, "link": 1, "network": 1}


def mlp(B, sizes, dtype="float64"):
    """Return the graph of linear layers with a ReLU between them, and a loss."""
    values, ops, name = {}, [], "x"

    def value(name, shape, kind="result"):
        values[name] = Value(name, shape, np.dtype(dtype), kind)
        return name

    value("x", (B, sizes[0]), "input")
    for i, (C, F) in enumerate(pairwise(sizes)):
        weight = value(f"w{i}", (C, F), "parameter")
        ops.append(Op("matmul", (name, weight), value(f"h{i}", (B, F)), "bi,io->bo", frozenset()))
        name = f"h{i}"
        if i < len(sizes) - 2:
            ops.append(Op("relu", (name,), value(f"a{i}", (B, F)), "bo->bo", frozenset()))
            name = f"a{i}"
    ops.append(Op("loss", (name,), value("loss", ()), "bo->", frozenset("o")))
    return Graph(values, ops)


@st.composite
def strategies(draw, graph, machine, dims="SOAPR"):
    every = cuts(graph, machine.ranks, dims)
    return {name: draw(st.sampled_from(own)) for name, own in every.items()}


def itemsize(graph, name):
    return np.dtype(graph.values[name].dtype).itemsize


def elements(box):
    return set(product(*(range(*side) for side in box)))


class ByHand:
    """The bytes of a strategy, counted element by element."""

    def __init__(self, graph, strategy, ranks):
        self.graph, self.strategy = graph, strategy
        self.makers = {op.output: op for op in graph.ops}
        self.sent, self.held = [0] * ranks, [defaultdict(set) for _ in range(ranks)]
        self.learned = {name for name, v in graph.values.items() if v.kind == "parameter"}
        for op in graph.ops:
            if self.learned & set(op.inputs):
                self.learned.add(op.output)
            for name, letters in zip(op.inputs, op.terms[0], strict=True):
                self._touch(op, name, letters)
                if name in self.makers:
                    self._edge(op, name, letters)
            self._touch(op, op.output, op.terms[1])
        used = {name for op in graph.ops for name in op.inputs}
        for name, value in graph.values.items():
            if value.kind == "parameter" or (name in self.makers and name not in used):
                self._sum(name)

    def parts(self, op, letters, shape):
        cut = self.strategy[op.output]
        return list(zip(cut.ranks, map(elements, cut.boxes(letters, shape)), strict=True))

    def _touch(self, op, name, letters):
        for rank, own in self.parts(op, letters, self.graph.values[name].shape):
            self.held[rank][name] |= own

    def _edge(self, op, name, letters):
        value, maker = self.graph.values[name], self.makers[name]
        for there, made in self.parts(maker, maker.terms[1], value.shape):
            for here, needed in self.parts(op, letters, value.shape):
                if there != here:
                    size = len(made & needed) * itemsize(self.graph, name)
                    self.sent[there] += size
                    self.sent[here] += size * (name in self.learned)

    def _sum(self, name):
        for element in product(*map(range, self.graph.values[name].shape)):
            holders = [r for r, held in enumerate(self.held) if element in held[name]]
            n = len(holders)
            for rank in holders:
                self.sent[rank] += 2 * (n - 1) / n * itemsize(self.graph, name)

    @property
    def memory(self):
        return [
            sum(
                len(own) * itemsize(self.graph, name) * (1 + (name in parameters))
                for name, own in held.items()
            )
            for held in self.held
            for parameters in [{n for n, v in self.graph.values.items() if v.kind == "parameter"}]
        ]


def events_of(found):
    """Return an Event of each task: computation on a rank, or a message on a link of it."""
    events, tasks = [], found.tasks
    for task, (start, end) in enumerate(tasks.times()):
        name, device = tasks.names[task], tasks.devices[task]
        rank, *link = [device] if isinstance(device, int) else device[::-1]
        sends = ("communication", tasks.bytes[task], *link) if link else ()
        events.append(Event(rank, name, start, end, *sends))
    return events


def sent_by(graph, strategy, machine):
    return sum(Simulator(graph, machine)(strategy).sent)


def check_replicas(N=4):
    graph = mlp(N, [3, 8, 2])
    sent = sent_by(graph, data_parallel(graph, N), Machine(N, N, **FAST))
    parameters = sum(math.prod(v.shape) for v in graph.values.values() if v.kind == "parameter")
    want = 2 * (N - 1) * 8 * (parameters + 1)  # and the loss
    assert sent >= want, f"gradients of replicas are not added up: {sent} bytes sent, not {want}"
    assert sent == want


@pytest.mark.parametrize("N", [1, 2, 4])
def test_data_parallelism_sends_what_the_ring_of_its_parameters_does(N):
    check_replicas(N)


def check_partial_sums():
    graph = mlp(2, [4, 2])
    strategy = {"h0": Cut((("i", 2),), 0), "loss": Cut((), 2)}
    sent = sent_by(graph, strategy, Machine(3, 3, **FAST))
    want = 2 * (2 * 2 * 2 * 8)  # from two ranks, all of h0[2, 2] to a third; and its gradient back
    assert sent >= want, f"a partial sum is missing: {sent} bytes sent, not {want}"
    assert sent == want


def test_all_partial_sums_go_to_whatever_needs_them():
    check_partial_sums()


@pytest.mark.parametrize(
    "name, check, words",
    [
        ("replicas_whose_gradients_stay_apart", check_replicas, "replicas are not added up"),
        ("partial_sums_from_one_rank", check_partial_sums, "a partial sum is missing"),
    ],
)
def test_what_is_left_out_is_named(name, check, words):
    with planted(name), pytest.raises(AssertionError, match=words):
        check()


@settings(max_examples=60)
@given(graph=index_graphs(), machine=machines(), data=st.data())
def test_every_byte_is_counted_element_by_element(graph, machine, data):
    strategy = data.draw(strategies(graph, machine))
    got, want = Simulator(graph, machine)(strategy), ByHand(graph, strategy, machine.ranks)
    assert got.sent == pytest.approx(want.sent)
    assert got.memory == want.memory


def seconds_of(op, graph, machine):
    """Return the roofline's time of an op on one rank."""
    inputs, output = op.terms
    shapes = [graph.values[name].shape for name in (*op.inputs, op.output)]
    n = dict(zip("".join([*inputs, output]), [x for shape in shapes for x in shape], strict=True))
    flops = math.prod(n.values()) * (2 if op.kind == "matmul" else 1)
    read = sum(
        math.prod(shape) * itemsize(graph, name)
        for shape, name in zip(shapes, (*op.inputs, op.output), strict=True)
    )
    return machine.overhead + max(flops / machine.flops, read / machine.memory_bandwidth)


@given(graph=index_graphs(), machine=machines(most=1))
def test_on_one_rank_all_ops_follow_each_other(graph, machine):
    found = Simulator(graph, machine)({op.output: Cut() for op in graph.ops})
    learned, want = {n for n, v in graph.values.items() if v.kind == "parameter"}, 0
    for op in graph.ops:
        gradients = sum(name in learned for name in op.inputs)
        learned |= {op.output} if gradients else set()
        want += (1 + gradients) * seconds_of(op, graph, machine)
    assert found.seconds == pytest.approx(want) and found.busy == [pytest.approx(want)]
    assert found.sent == [0]


def two_linears():
    graph = mlp(2, [1, 2, 2], "float32")
    values = {name: graph.values[name] for name in ("x", "w0", "h0", "w1", "h1")}
    first, second = graph.ops[0], Op("matmul", ("h0", "w1"), "h1", "bi,io->bo", frozenset())
    return Graph(values, [first, second])


def test_the_picture_of_the_file_second_by_second():
    strategy = {"h0": Cut((("b", 2),)), "h1": Cut((("o", 2),))}
    found = Simulator(two_linears(), Machine(2, 2, **FAST))(strategy)
    events = {e.name: (e.rank, e.start, e.end, e.bytes) for e in events_of(found)}
    assert events["F h0.0"] == (0, 0, 4, 0)  # 2 FLOPs for each of 1 x 1 x 2
    assert events["h0.0 > h1.1"] == (0, 4, 12, 8)  # 2 numbers of 4 bytes
    assert events["F h1.1"] == (1, 12, 20, 0)
    assert events["B h1.1"] == (1, 20, 36, 0)  # two gradients
    assert events["h1.1 > h0.0"] == (1, 36, 44, 8)
    assert events["B h0.0"] == (0, 44, 48, 0)  # x has no gradient
    assert events["sum w0"][1:] == (48, 56, 8)  # 2 numbers on 2 ranks
    assert found.seconds == 56 and found.busy == [32, 32] and found.sent == [24, 24]
    assert found.memory == [4 * (1 + 2 * 2 + 4 + 2 * 2 + 2)] * 2  # x, w0, h0, w1, h1


@pytest.mark.parametrize("per_node, seconds", [(2, 4 + 1 + 16 / 4), (1, 4 + 1 + 16 / 2)])
def test_a_message_takes_the_link_of_its_node_or_the_network(per_node, seconds):
    machine = Machine(2, per_node, flops=2, memory=10**9, link=4, network=2, latency=1)
    found = Simulator(two_linears(), machine)({"h0": Cut((), 0), "h1": Cut((), 1)})
    events = {event.name: event for event in events_of(found)}
    assert events["h0.0 > h1.0"].end == seconds
    assert events["h0.0 > h1.0"].thread == ("link" if per_node == 2 else "network")


def branches():
    """Two linear layers of the same input, and the sum of both."""
    graph = mlp(2, [2, 2])
    x, w, h, loss = (graph.values[name] for name in ("x", "w0", "h0", "loss"))
    values = {"x": x, "u": w, "v": w, "left": h, "right": h, "both": h, "loss": loss}
    ops = [
        Op("matmul", ("x", "u"), "left", "bi,io->bo", frozenset()),
        Op("matmul", ("x", "v"), "right", "bi,io->bo", frozenset()),
        Op("add", ("left", "right"), "both", "bo,bo->bo", frozenset()),
        Op("loss", ("both",), "loss", "bo->", frozenset("o")),
    ]
    return Graph(values, ops)


def test_ops_on_different_ranks_overlap():
    simulator = Simulator(branches(), Machine(2, 2, flops=1, memory=1e9, link=1e9, network=1e9))
    alone = simulator({name: Cut() for name in simulator.makers})
    apart = simulator({name: Cut((), int(name == "right")) for name in simulator.makers})
    linear = 2 * 2**3
    assert alone.seconds == pytest.approx(4 * linear + 4 + 8 + 4 + 4)
    assert apart.seconds == pytest.approx(alone.seconds - 2 * linear)


@settings(max_examples=50)
@given(graph=index_graphs(), machine=machines(), data=st.data())
def test_the_timeline_has_every_task_and_no_device_does_two_at_once(graph, machine, data):
    found = Simulator(graph, machine)(data.draw(strategies(graph, machine)))
    events = events_of(found)
    assert len(events) == len(found.tasks.names)
    assert max(event.end for event in events) == found.seconds
    lanes = defaultdict(list)
    for event in events:
        lanes[event.rank, event.thread].append((event.start, event.end))
    for lane in map(sorted, lanes.values()):
        assert all(a[1] <= b[0] for a, b in pairwise(lane))
    for rank in range(machine.ranks):
        own = [event for event in events if event.rank == rank]
        assert sum(event.bytes for event in own) == pytest.approx(found.sent[rank])
        computing = sum(event.seconds for event in own if event.category == "compute")
        assert computing == pytest.approx(found.busy[rank])


@settings(max_examples=30)
@given(graph=index_graphs(), machine=machines(), data=st.data())
def test_what_is_remembered_of_one_strategy_changes_no_other(graph, machine, data):
    simulator = Simulator(graph, machine)
    for _ in range(4):
        strategy = data.draw(strategies(graph, machine))
        assert simulator(strategy) == Simulator(graph, machine)(strategy)


@pytest.mark.parametrize("tied", [False, True])
def test_data_parallelism_of_a_traced_transformer_sends_what_real_ranks_do(tied):
    """2 (N - 1) times the parameters' bytes, and the loss; a tied parameter is added up once."""
    N, tokens = 4, np.arange(24).reshape(4, 6) % 11
    model = nn.Transformer(11, width=8, heads=2, depth=1, context=6, tied=tied)
    graph = trace(model, tokens, tokens)
    found = Simulator(graph, Machine(N, N, **FAST))(data_parallel(graph, N))
    parameters = sum(parameter.data.nbytes for parameter in model.parameters())
    loss = graph.values[graph.ops[-1].output].nbytes
    assert sum(found.sent) == 2 * (N - 1) * (parameters + loss)


def test_who_takes_a_third_of_an_array_receives_a_third():
    """Queries, keys and values are taken from one array: each goes where its op is."""
    tokens = np.arange(12).reshape(2, 6) % 11
    graph = trace(nn.Transformer(11, width=8, heads=2, depth=1, context=6), tokens, tokens)
    thirds = [op for op in graph.ops if op.kind == "take"]
    assert len(thirds) == 3 and len({op.inputs for op in thirds}) == 1
    for op in thirds:
        strategy = {each.output: Cut((), int(each is op)) for each in graph.ops}
        found = Simulator(graph, Machine(2, 2, **FAST))(strategy)
        sizes = [size for size in found.tasks.bytes if size]
        assert sizes == [graph.values[op.output].nbytes] * len(sizes) and len(sizes) == 4


@pytest.mark.parametrize(
    "strategy, message",
    [
        ({"h0": Cut()}, "no cut for h1"),
        ({"h0": Cut(), "h1": Cut((), 2)}, "cut of h1 needs ranks 2 to 2 of 2"),
        ({"h0": Cut((("b", 3),)), "h1": Cut()}, "cut of h0 splits b, of length 2, into 3 parts"),
        ({"h0": Cut((("z", 2),)), "h1": Cut()}, "cut of h0 splits z, which"),
        ({"h0": Cut((("b", 2), ("b", 1))), "h1": Cut()}, "cut of h0 names a letter twice"),
        ({"h0": Cut((("b", 0),)), "h1": Cut()}, "into 0 parts that are not equal"),
    ],
)
def test_a_strategy_that_cannot_be_is_refused(strategy, message):
    with pytest.raises(ValueError, match=message):
        Simulator(two_linears(), Machine(2, 2, **FAST))(strategy)
