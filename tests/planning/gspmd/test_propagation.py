"""Annotations of a few tensors place all others, and the ranks' result is one device's."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from minidist import Mesh, Tensor, nn, run
from minidist.nn.transformer import Block
from minidist.planning import gspmd, propagate, trace
from minidist.planning.gspmd import PARTIAL, REPLICATED, Split
from minidist.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from minidist.tensor_parallel.parallel_attention import ParallelAttention
from minidist.verify.compare import compare
from minidist.verify.mistakes.register import find
from tests.planning.graphs.test_gradients import given_arrays, one_device
from tests.planted import planted
from tests.strategies import arrays

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


@pytest.mark.parametrize("transport", ["thread", "process"])
def test_two_annotated_weights_are_column_and_row_with_f_and_g(transport):
    layout, _ = certified(mlp(), {"tp": TWO}, {"tp": 2}, transport)
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


def test_the_axes_of_a_mesh_do_not_meet():
    layout, _ = certified(block(), {"dp": BATCH, "tp": FOUR}, {"dp": 2, "tp": 2})
    alone = {
        axis: propagate(trace(*block()), {axis: a}).collectives
        for axis, a in (("dp", BATCH), ("tp", FOUR))
    }
    for axis, collectives in alone.items():
        assert [row for row in layout.collectives if row[1] == axis] == collectives


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


@settings(max_examples=25, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(data=st.data(), which=st.sampled_from([mlp, block]), wide=st.booleans())
def test_any_annotations_compute_what_one_device_computes(data, which, wide):
    made, sizes = (
        which(),
        {"a": 2, "b": 2} if wide else {"a": data.draw(st.sampled_from([1, 2, 3]))},
    )
    certified(made, data.draw(annotations_of(trace(*made), sizes)), sizes)


@pytest.mark.parametrize("name", ["partial_sum_forgotten", "gradient_not_dual"])
def test_the_certificate_sees_a_wrong_rule_and_a_wrong_dual(name):
    assert find(name).family == "placements"
    for annotations in ({"dp": BATCH}, {"dp": TWO}):
        with planted(name), pytest.raises(AssertionError, match="differs on rank"):
            certified(mlp(), annotations, {"dp": 2})


@pytest.mark.parametrize(
    "annotations, words",
    [
        (
            {"tp": {"layers.9.weight": Split(0)}},
            "unknown value of tp 'layers.9.weight'",
        ),
        ({"tp": {"inputs": Split(2)}}, r"inputs\[6, 4\] has no axis 2"),
        ({"tp": {"inputs": PARTIAL}}, "cannot be annotated as partial"),
        ({"dp": BATCH, "tp": BATCH}, "two mesh axes cannot split axis 0 of inputs"),
    ],
)
def test_annotations_that_no_value_can_have_are_refused(annotations, words):
    with pytest.raises(ValueError, match=words):
        propagate(trace(*mlp()), annotations)
