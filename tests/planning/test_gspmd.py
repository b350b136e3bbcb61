"""Placements: what they mean, their duals, and the collectives between them."""

from collections import Counter
from itertools import product

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from minidist import Mesh, Tensor, nn, run
from minidist.nn.transformer import Block
from minidist.pieces import split_ends
from minidist.planning import gspmd, propagate, trace
from minidist.planning.computation import compute
from minidist.planning.graph import Op, adjoint
from minidist.planning.gspmd import (
    PARTIAL,
    REPLICATED,
    Partial,
    Rule,
    Split,
    collective,
    dual,
    part,
    redistribute,
    repeated,
    rules,
)
from minidist.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from minidist.tensor_parallel.parallel_attention import ParallelAttention
from minidist.verify.compare import compare
from tests.planning.test_graphs import given_arrays, one_device
from tests.strategies import arrays, seeds, shapes


def placements(axes):
    return [REPLICATED, PARTIAL, *map(Split, range(axes))]


def parts_of(x, placement, size, seed=0):
    """Return what the ranks have; the terms of a partial sum are any integers."""
    if placement != PARTIAL:
        return [part(x, placement, rank, size) for rank in range(size)]
    terms = [np.rint(9 * arrays(*x.shape, seed=seed + r)) for r in range(size - 1)]
    return [*terms, x - sum(terms, start=np.zeros_like(x))]


def full(parts, placement):
    """Return X from what the ranks have: the meaning of a placement."""
    match placement:
        case Split(axis):
            return np.concatenate(parts, axis=axis)
        case Partial():
            return sum(parts[1:], start=parts[0])
    for rank, x in enumerate(parts):
        if x.shape != parts[0].shape or not np.allclose(x, parts[0], rtol=1e-9, atol=1e-12):
            raise ValueError(f"a replicated value differs on ranks 0 and {rank}")
    return parts[0]


def why_no_pair(x, dx, placement, size):
    """Say why a value and its gradient do not pair, each element once; None if they do."""
    found = sum(
        (a * b).sum()
        for a, b in zip(
            parts_of(x, placement, size), parts_of(dx, dual(placement), size, 50), strict=True
        )
    )
    want = (x * dx).sum()
    if found == want:
        return None
    if placement == dual(placement) == REPLICATED:
        return (
            f"<X, dX> is counted {size} times; the gradient of a replicated value is a partial "
            f"sum, not {dual(placement)}"
        )
    return f"<X, dX> of {placement} and {dual(placement)} is {found}, not {want}"


def test_a_value_and_its_gradient_pair_each_element_once():
    x, dx = (np.rint(9 * arrays(4, 5, seed=seed)) for seed in (1, 2))
    for placement, size in product(placements(2), (2, 3)):
        why = why_no_pair(x, dx, placement, size)
        assert why is None, why


@given(shape=shapes(1, 3, 5), size=st.integers(1, 5), seed=seeds)
def test_the_parts_of_a_value_are_the_value(shape, size, seed):
    x = np.rint(9 * arrays(*shape, seed=seed))
    for placement in placements(len(shape)):
        np.testing.assert_array_equal(full(parts_of(x, placement, size), placement), x)
        parts = [part(x, placement, rank, size) for rank in range(size)]
        np.testing.assert_array_equal(full(parts, placement), x)


def convert_all(group, x, given):
    """Return {(source, target): (this rank's part, whether bytes were sent)}."""
    found = {}
    for source, target in product(placements(x.ndim), repeat=2):
        before = group.ledger.total
        y = redistribute(given[source][group.rank], group, source, target)
        found[source, target] = y, group.ledger.total > before
    return found


@pytest.mark.parametrize("size", [1, 3])
def test_between_all_placements_a_collective_keeps_the_value(size):
    x = np.rint(9 * arrays(4, 5))
    given = {placement: parts_of(x, placement, size) for placement in placements(2)}
    ranks = run(convert_all, size, x, given, transport="thread")
    for source, target in ranks[0]:
        parts = [found[source, target][0] for found in ranks]
        np.testing.assert_array_equal(full(parts, target), x, err_msg=f"{source} -> {target}")
        sent = any(found[source, target][1] for found in ranks)
        assert sent == (size > 1 and collective(source, target) is not None)


LENGTHS = dict(zip("abcdefgh", (4, 5, 3, 6, 4, 5, 4, 4), strict=True))
FORWARD = [
    Op("matmul", ("x", "w"), "y", "ac,cb->ab"),
    Op("matmul", ("x", "w"), "y", "abc,dc->abd"),
    Op("add", ("x", "w"), "y", "ab,ab->ab"),
    Op("add", ("x", "w"), "y", "ab,b->ab"),
    Op("multiply", ("x", "w"), "y", "ab,b->ba"),
    Op("sum", ("x",), "y", "abc->ac"),
    Op("take", ("x",), "y", "abc->cb", frozenset("a"), (2,)),
    Op("slice", ("x",), "y", "db->cb", frozenset("dc"), (1, 4)),
    Op("embedding", ("inputs", "w"), "y", "ab,dc->abc"),
    *(Op(kind, ("x",), "y", "ab->ba") for kind in ("relu", "gelu_tanh", "gelu_erf", "exp", "log")),
    *(Op(kind, ("x",), "y", "abc->abc", frozenset("b")) for kind in ("softmax", "log_softmax")),
    Op("causal_softmax", ("x",), "y", "baeg->baeg", frozenset("eg"), (0.5,)),
    Op("normalize", ("x",), "y", "abc->abc", frozenset("bc"), (1e-5,)),
    Op("cross_entropy", ("x", "targets"), "y", "abc,ab->", frozenset("c"), (20,)),
    Op("squared_error", ("x", "targets"), "y", "ab,ab->", frozenset(), (20,)),
]
BACKWARD = [
    adjoint(op, place, f"dx{place}")
    for op in FORWARD
    for place, name in enumerate(op.inputs)
    if name not in ("inputs", "targets")
]


def words(op):
    return f"{op.kind} {op.indices}"


def whole_inputs(op):
    """Return an array for each input: positive, so that a log has a value; or tokens, classes."""
    found = []
    for i, (name, term) in enumerate(zip(op.inputs, op.terms[0], strict=True)):
        shape = [LENGTHS[letter] for letter in term]
        x = np.abs(arrays(*shape, seed=i)) + 0.1
        integers = name == "inputs" or (name == "targets" and "cross" in op.kind)
        found.append((x * 2).astype(int) % 3 if integers else x)
    return found


def spans(op, placed, rank, size):
    """Return this rank's part of each letter that a placement splits."""
    found = {letter: (0, LENGTHS[letter]) for letter in op.letters}
    for term, placement in zip((*op.terms[0], op.terms[1]), placed, strict=False):
        if isinstance(placement, Split):
            ends = split_ends(LENGTHS[term[placement.axis]], size)
            found[term[placement.axis]] = ends[rank], ends[rank + 1]
    return found


def computed(op, rule, size=3):
    """Return the output's parts if each rank computes from its parts; None if it cannot."""
    given = [
        parts_of(x, placement, size, 70 + i)
        for i, (x, placement) in enumerate(zip(whole_inputs(op), rule.inputs, strict=True))
    ]
    try:
        with np.errstate(all="ignore"):
            return [
                compute(
                    op, [x[rank] for x in given], spans(op, (*rule.inputs, rule.output), rank, size)
                )
                for rank in range(size)
            ]
    except (ValueError, IndexError):
        return None


def wanted(op):
    return compute(op, whole_inputs(op), spans(op, repeated(op).inputs, 0, 1))


def makes(parts, placement, want):
    """Return whether these parts, in this placement, are the value."""
    try:
        whole = full(parts, placement)
    except ValueError:
        return False
    return whole.shape == want.shape and np.allclose(whole, want, rtol=1e-9, atol=1e-12)


def why_wrong(op, rule):
    """Say why a rule does not compute the op; None if it does."""
    want, parts = wanted(op), computed(op, rule)
    if parts is not None and makes(parts, rule.output, want):
        return None
    told = f"{words(op)} from {' '.join(map(str, rule.inputs))} to {rule.output}"
    cuts = [
        term[placement.axis]
        for term, placement in zip(
            (*op.terms[0], op.terms[1]), (*rule.inputs, rule.output), strict=True
        )
        if isinstance(placement, Split)
    ]
    if set(cuts) & op.whole:
        return f"{told}: {op.kind} cannot be cut by {cuts[0]}"
    if parts is not None and makes(parts, PARTIAL, want):
        return f"{told} forgets that the parts are terms of a sum"
    return f"{told} computes something else"


def test_every_rule_computes_the_op():
    for op in (*FORWARD, *BACKWARD):
        for rule in rules(op):
            why = why_wrong(op, rule)
            assert why is None, why


def test_no_other_placements_compute_the_op():
    """All placements of all inputs and of the output, by brute force."""
    for op in (*FORWARD, *BACKWARD):
        want, found, choices = wanted(op), set(), []
        for x in whole_inputs(op):
            choices.append([p for p in placements(x.ndim) if p != PARTIAL or x.dtype.kind == "f"])
        for inputs in product(*choices):
            for output in placements(want.ndim):
                rule = Rule(inputs, output)
                parts = computed(op, rule)
                if parts is not None and makes(parts, output, want):
                    found.add(rule)
        assert found == set(rules(op)), words(op)


TWO = {"layers.0.weight": Split(1), "layers.1.weight": Split(0)}
BATCH = {"inputs": Split(0)}
FOUR = {
    "block.attention.qkv.weight": Split(2),  # [C, 3, H, D]: the heads
    "block.attention.output.weight": Split(0),  # [H, D, C]
    "block.expand.weight": Split(1),
    "block.contract.weight": Split(0),
}


def mlp():
    model = nn.MLP([4, 8, 3], "gelu", dtype="float64")
    return model, arrays(6, 4), np.arange(6) % 3, nn.cross_entropy


def block(B=2, T=5, C=8, H=4):
    return Block(C, H, dtype="float64"), arrays(B, T, C), arrays(B, T, C, seed=1), nn.squared_error


def worker(group, layout, sizes, arrays):
    """Return the loss and the gradients, whole, and the bytes that the program sent."""
    mesh = Mesh(group, **sizes)
    before = [Counter(getattr(mesh, axis).ledger.bytes) for axis in sizes]
    parts = gspmd.execute(layout, mesh, arrays)
    sent = {
        axis: dict(getattr(mesh, axis).ledger.bytes - own)
        for axis, own in zip(sizes, before, strict=True)
    }
    return gspmd.whole(layout, mesh, parts), sent


def certified(made, annotations, sizes, transport="thread"):
    """Return the layout and the bytes, if the ranks' loss and gradients are one device's."""
    model, inputs, targets, loss = made
    graph = trace(model, inputs, targets, loss)
    layout = propagate(graph, annotations)
    given, N = given_arrays(model, inputs, targets), int(np.prod(list(sizes.values())))
    ranks = run(worker, N, layout, sizes, given, transport=transport)
    want = one_device(model, inputs, targets, loss)
    want[graph.ops[-1].output] = want.pop("loss")
    comparison = compare([found for found, _ in ranks], want)
    assert comparison.ok, f"{comparison}; {layout.collectives}"
    return layout, [sent for _, sent in ranks]


def test_two_annotated_weights_are_column_and_row_with_f_and_g():
    layout, _ = certified(mlp(), {"tp": TWO}, {"tp": 2}, "process")
    placed = {name: own for name, (own,) in layout.placements.items()}
    assert layout.collectives == [
        ("matmul.1", "tp", "all_reduce"),
        ("d inputs", "tp", "all_reduce"),
    ]
    assert placed["layers.0.bias"] == Split(0)
    assert placed["gelu_tanh.0"] == Split(1)
    assert placed["matmul.1"] == PARTIAL
    assert placed["layers.1.bias"] == placed["add.1"] == REPLICATED  # added once, after the sum


def test_the_annotated_batch_is_data_parallelism():
    layout, sent = certified(mlp(), {"dp": BATCH}, {"dp": 3})
    parameters = [n for n, v in layout.graph.values.items() if v.kind == "parameter"]
    reduced = [(f"d {name}", "dp", "all_reduce") for name in parameters]
    assert layout.collectives == [*reduced, ("cross_entropy.0", "dp", "all_reduce")]
    nbytes = 8 + sum(layout.graph.values[name].nbytes for name in parameters)
    assert sum(s["dp"]["all_reduce"] for s in sent) == 2 * (3 - 1) * nbytes


def lesson_12(group, inputs, targets):
    """Return the bytes of a Transformer's block that is split by hand."""
    split, *_ = block()
    split.attention = ParallelAttention(
        split.attention, group, ColumnParallelLinear, RowParallelLinear
    )
    split.expand = ColumnParallelLinear(split.expand, group)
    split.contract = RowParallelLinear(split.contract, group)
    before = Counter(group.ledger.bytes)
    nn.squared_error(split(Tensor(inputs, requires_grad=True)), targets).backward()
    return dict(group.ledger.bytes - before)


def test_four_annotations_are_megatrons_block_to_the_byte():
    made = block()
    layout, sent = certified(made, {"tp": FOUR}, {"tp": 2})
    assert [(axis, name) for _, axis, name in layout.collectives] == [("tp", "all_reduce")] * 4
    by_hand = run(lesson_12, 2, made[1], made[2], transport="thread")
    assert [own["tp"] for own in sent] == by_hand


def test_the_split_input_makes_megatrons_block_sequence_parallel():
    annotations = {"tp": {**FOUR, "inputs": Split(1)}}
    layout, _ = certified(block(T=6), annotations, {"tp": 2})
    forward_and_backward = [c for v, _, c in layout.collectives if "block." not in v][:-1]
    assert forward_and_backward == [
        *["all_gather", "reduce_scatter"] * 2,
        *["all_gather", "reduce_scatter"] * 2,
    ]


@st.composite
def annotations_of(draw, graph, axes):
    """Draw annotations of any values, each mesh axis its own."""
    found = {}
    for axis in axes:
        names = draw(st.lists(st.sampled_from(list(graph.values)), max_size=3, unique=True))
        found[axis] = {}
        for name in names:
            free = [
                placement
                for placement in [REPLICATED, *map(Split, range(len(graph.values[name].shape)))]
                if placement == REPLICATED
                or all(placement != before.get(name) for before in found.values())
            ]
            found[axis][name] = draw(st.sampled_from(free))
    return found


@settings(max_examples=15, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(data=st.data(), which=st.sampled_from([mlp, block]), wide=st.booleans())
def test_any_annotations_compute_what_one_device_computes(data, which, wide):
    made, sizes = (
        which(),
        {"a": 2, "b": 2} if wide else {"a": data.draw(st.sampled_from([1, 2, 3]))},
    )
    certified(made, data.draw(annotations_of(trace(*made), sizes)), sizes)
