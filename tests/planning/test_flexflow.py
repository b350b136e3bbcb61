"""The cuts of FlexFlow: what a part is, what kind a letter has, and that none is left out."""

import math
from collections import Counter, defaultdict
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist import nn
from minidist.events import Event
from minidist.planning.flexflow import Cut, Simulator, cuts, data_parallel, kinds, pieces, shared
from minidist.planning.plans.plan import Machine
from minidist.planning.tracing import trace
from tests.planning.test_graphs import graph_of, layers
from tests.strategies import arrays, index_graphs, machines


def one_op(indices, n, parameters=()):
    """Return a graph of one op; n: letter -> length; parameters: which inputs are some."""
    names = ["VW"[i] if i in parameters else "xz"[i] for i in range(1 + indices.count(","))]
    return graph_of([("op", tuple(names), "y", indices)], **n)


PRODUCTS = ["bi,io->bo", "bti,io->bto", "bo->bo", "bo,o->bo", "bhqd,bhkd->bhqk", "bo->", "bqk->bq"]


def taken(array, box):
    return array[tuple(slice(first, last) for first, last in box)]


@settings(max_examples=60)
@given(indices=st.sampled_from(PRODUCTS), data=st.data(), ranks=st.integers(1, 6))
def test_the_parts_compute_what_the_whole_op_does(indices, data, ranks):
    """Each part on its own boxes, and partial sums added where they are."""
    letters = sorted(set(indices) - set(",->"))
    n = {letter: data.draw(st.sampled_from([1, 2, 3, 4, 6])) for letter in letters}
    graph = one_op(indices, n)
    cut = data.draw(st.sampled_from(cuts(graph, ranks, "SOAPR")["y"]))
    inputs, output = graph.ops[0].terms
    shapes = [graph.values[name].shape for name in graph.ops[0].inputs]
    given_arrays = [arrays(*shape, seed=i) for i, shape in enumerate(shapes)]
    want = np.einsum(indices, *given_arrays)
    boxes = [cut.boxes(x, shape) for x, shape in zip(inputs, shapes, strict=True)]
    got = np.zeros_like(want)
    for part, box in enumerate(cut.boxes(output, want.shape)):
        own = [taken(x, b[part]) for x, b in zip(given_arrays, boxes, strict=True)]
        got[tuple(slice(*side) for side in box)] += np.einsum(indices, *own)
    np.testing.assert_allclose(got, want, atol=1e-12)
    assert 0 <= cut.ranks[0] and cut.ranks[-1] < ranks


@pytest.mark.parametrize(
    "indices, parameters, want",
    [
        ("bti,io->bto", {1}, {"b": "sample", "t": "attribute", "o": "parameter", "i": "reduction"}),
        ("bto,o->bto", {1}, {"b": "sample", "t": "attribute", "o": "parameter"}),
        ("bto->bto", set(), {"b": "sample", "t": "attribute", "o": "attribute"}),
        (
            "bhqd,bhkd->bhqk",
            set(),
            {"b": "sample", "h": "attribute", "q": "attribute", "k": "attribute"},
        ),
        ("bo->", set(), {"b": "sample", "o": "reduction"}),
    ],
)
def test_letters_have_the_kinds_of_the_paper(indices, parameters, want):
    n = dict.fromkeys("bhqkdtio", 2)
    found = kinds(one_op(indices, n, parameters))["y"]
    assert {letter: found[letter] for letter in want} == want


def parts_by_hand(n, ranks):
    """Return every {letter: degree} that divides all letters into at most so many parts."""
    choices = [[(x, d) for d in range(1, ranks + 1) if size % d == 0] for x, size in n.items()]
    every = [{x: d for x, d in choice if d > 1} for choice in product(*choices)]
    return [degrees for degrees in every if math.prod(degrees.values()) <= ranks]


@given(indices=st.sampled_from(PRODUCTS), data=st.data(), ranks=st.integers(1, 6))
def test_no_cut_is_left_out_and_none_comes_twice(indices, data, ranks):
    letters = sorted(set(indices) - set(",->"))
    n = {letter: data.draw(st.sampled_from([1, 2, 3, 4, 6])) for letter in letters}
    graph = one_op(indices, n)
    found = cuts(graph, ranks, "SOAPR")["y"]
    want = Counter()
    for degrees in parts_by_hand(n, ranks):
        orders, firsts = math.factorial(len(degrees)), ranks - math.prod(degrees.values()) + 1
        want[tuple(sorted(degrees.items()))] += orders * firsts
    assert Counter(tuple(sorted(cut.degrees)) for cut in found) == want
    assert len(set(found)) == len(found)


sides = st.tuples(st.integers(0, 4), st.integers(0, 4)).map(sorted).map(tuple)
boxes = st.integers(0, 3).flatmap(lambda k: st.lists(st.tuples(*[sides] * k), max_size=4))


def elements(box):
    return set(product(*(range(*side) for side in box)))


@given(drawn=boxes)
def test_what_boxes_share_is_counted_element_by_element(drawn):
    for a, b in product(drawn, drawn):
        assert shared(a, b) == len(elements(a) & elements(b))
    owners = {}
    for number, box in enumerate(drawn):
        for element in elements(box):
            owners.setdefault(element, set()).add(number)
    assert pieces(list(enumerate(drawn))) == Counter(map(frozenset, owners.values()))


TWO_LINEARS = graph_of(
    [("matmul", ("x", "V"), "y0", "bi,io->bo"), ("matmul", ("y0", "W"), "y1", "bo,op->bp")],
    "float32",
    b=2,
    i=1,
    o=2,
    p=2,
)
FAST = {"flops": 1, "memory": 10**9, "link": 1, "network": 1}


@st.composite
def strategies(draw, graph, machine, dims="SOAPR"):
    every = cuts(graph, machine.ranks, dims)
    return {name: draw(st.sampled_from(own)) for name, own in every.items()}


def itemsize(graph, name):
    return np.dtype(graph.values[name].dtype).itemsize


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


def test_data_parallelism_sends_what_the_ring_of_its_parameters_does(N=4):
    graph = layers(N, [3, 8, 2], loss=True)
    sent = sum(Simulator(graph, Machine(N, N, **FAST))(data_parallel(graph, N)).sent)
    parameters = sum(math.prod(v.shape) for v in graph.values.values() if v.kind == "parameter")
    want = 2 * (N - 1) * 8 * (parameters + 1)  # and the loss
    assert sent >= want, f"gradients of replicas are not added up: {sent} bytes sent, not {want}"
    assert sent == want


def test_all_partial_sums_go_to_whatever_needs_them():
    strategy = {"y0": Cut((("i", 2),), 0), "loss": Cut((), 2)}
    sent = sum(Simulator(layers(2, [4, 2], loss=True), Machine(3, 3, **FAST))(strategy).sent)
    want = 2 * (2 * 2 * 2 * 8)  # from two ranks, all of y0[2, 2] to a third; and its gradient back
    assert sent >= want, f"a partial sum is missing: {sent} bytes sent, not {want}"
    assert sent == want


@settings(max_examples=30)
@given(graph=index_graphs(), machine=machines(), data=st.data())
def test_every_byte_is_counted_element_by_element(graph, machine, data):
    strategy = data.draw(strategies(graph, machine))
    got, want = Simulator(graph, machine)(strategy), ByHand(graph, strategy, machine.ranks)
    assert got.sent == pytest.approx(want.sent)
    assert got.memory == want.memory


def test_the_picture_of_the_file_second_by_second():
    strategy = {"y0": Cut((("b", 2),)), "y1": Cut((("p", 2),))}
    found = Simulator(TWO_LINEARS, Machine(2, 2, **FAST))(strategy)
    events = {e.name: (e.rank, e.start, e.end, e.bytes) for e in events_of(found)}
    assert events["F y0.0"] == (0, 0, 4, 0)  # 2 FLOPs for each of 1 x 1 x 2
    assert events["y0.0 > y1.1"] == (0, 4, 12, 8)  # 2 numbers of 4 bytes
    assert events["F y1.1"] == (1, 12, 20, 0)
    assert events["B y1.1"] == (1, 20, 36, 0)  # two gradients
    assert events["y1.1 > y0.0"] == (1, 36, 44, 8)
    assert events["B y0.0"] == (0, 44, 48, 0)  # x has no gradient
    assert events["sum V"][1:] == (48, 56, 8)  # 2 numbers on 2 ranks
    assert found.seconds == 56 and found.busy == [32, 32] and found.sent == [24, 24]
    assert found.memory == [4 * (1 + 2 * 2 + 4 + 2 * 2 + 2)] * 2  # x, V, y0, W, y1


@pytest.mark.parametrize("per_node, seconds", [(2, 4 + 1 + 16 / 4), (1, 4 + 1 + 16 / 2)])
def test_a_message_takes_the_link_of_its_node_or_the_network(per_node, seconds):
    machine = Machine(2, per_node, flops=2, memory=10**9, link=4, network=2, latency=1)
    found = Simulator(TWO_LINEARS, machine)({"y0": Cut((), 0), "y1": Cut((), 1)})
    events = {event.name: event for event in events_of(found)}
    assert events["y0.0 > y1.0"].end == seconds
    assert events["y0.0 > y1.0"].thread == ("link" if per_node == 2 else "network")


@settings(max_examples=20)
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
