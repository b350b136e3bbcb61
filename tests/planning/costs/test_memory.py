"""What a rank holds: equal to what real ranks were measured to hold, and to the papers' words."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from minidist import nn
from minidist.autograd import Tensor, recompute
from minidist.autograd.recomputation import kept_bytes
from minidist.observe.costs import measure_costs
from minidist.pipeline_parallel.holders import cut_of as cut_in_equal_numbers
from minidist.pipeline_parallel.holders import holders
from minidist.planning import Machine, Plan, TransformerSize, memory, seconds, traffic
from minidist.planning.costs.memory import korthikanti, korthikanti_bytes, micro_batch, minidist
from minidist.planning.costs.stages import cut_of, layer_parameters
from minidist.planning.costs.zero import BYTES, zero_bytes_held
from minidist.verify.strategies.cases import Case

B = 12


def model_of(T=8, **more):
    return nn.Transformer(12, 16, 4, 4, T, **({"dtype": "float64"} | more))


def measured(cluster, model, plan):
    """Return what each rank of a mesh holds, in float32, under the names of `memory`."""
    tokens = np.zeros((B, model.context), int)
    names = ("dp", "pp", "cp", "ep", "schedule", "micro_batches", "chunks", "zero", "shards")
    case = Case("plan", model, tokens, tokens, options={n: getattr(plan, n) for n in names})
    ranks = measure_costs("hybrid", case, cluster(plan.ranks, "thread"))
    return [{kind.split()[0]: n // 2 for kind, n in cost.held.items()} for cost in ranks]


def total(held):
    return sum(held.values())


SCHEDULES = ("gpipe", 1), ("1f1b", 1), ("zb_h1", 1), ("zb_v", 2), ("interleaved", 2)


MESHES = [  # every third one of up to 8 ranks
    mesh
    for i, mesh in enumerate(product((1, 2), (1, 2, 3), (1, 2), (1, 2), (0, 1)))
    if np.prod(mesh[:4]) <= 8 and i % 3 == 0
]


@pytest.mark.parametrize("T", [8, 132])
@pytest.mark.parametrize("schedule, chunks", SCHEDULES)
def test_a_mesh_holds_what_real_ranks_do(cluster, schedule, chunks, T):
    """Where backward is in two halves, what waits for the second one is counted at its most."""
    model = model_of(T)
    for dp, pp, cp, tp, zero in MESHES[T % 8 // 4 :: 2]:
        more = {"schedule": schedule, "chunks": chunks, "micro_batches": pp, "zero": zero}
        plan = Plan(dp, pp, tp, cp, precision="float32", **more)
        ranks = measured(cluster, model, plan)
        for r in range(pp):
            planned, held = memory(TransformerSize.of(model), plan, B, r), ranks[r * cp * tp]
            if schedule.startswith("zb"):
                most, real = planned.pop("activations"), held.pop("activations")
                assert 0.9 * most <= real <= most, (plan, r)
            assert planned == held, (plan, r)


@pytest.mark.parametrize(
    "axes, zero, more",
    [
        ((2, 2, 1, 1), 2, {"micro_batches": 3}),
        ((2, 2, 1, 1), 3, {"micro_batches": 2, "schedule": "interleaved", "chunks": 2}),
        ((2, 1, 1, 2), 3, {}),
        ((4, 1, 1, 1), 3, {"shards": 2, "micro_batches": 2}),
        ((4, 1, 1, 1), 1, {"shards": 2, "micro_batches": 2}),
    ],
)
def test_zero_on_a_mesh_holds_what_real_ranks_do(cluster, axes, zero, more):
    model, plan = model_of(), Plan(*axes, zero=zero, precision="float32", **more)
    ranks = measured(cluster, model, plan)
    for r in range(plan.pp):
        held = ranks[r * plan.cp * plan.tp]
        assert memory(TransformerSize.of(model), plan, B, r) == held


@pytest.mark.parametrize("sequence", [False, True])
def test_ranks_hold_the_padded_rows_of_a_vocabulary_that_they_do_not_divide(cluster, sequence):
    """11 tokens on 2 ranks: 6 rows each."""
    tokens = np.arange(24).reshape(3, 8) % 11
    model = nn.Transformer(11, 16, 4, 2, 8, dtype="float64")
    case = Case("padded", model, tokens, tokens, options={"split_sequence": sequence})
    case = replace(case, options=case.options | {"micro_batches": 1})
    ranks = measure_costs("hybrid", case, cluster(2, "thread"))
    plan = Plan(tp=2, sequence=sequence, precision="float32")
    planned = memory(TransformerSize.of(model), plan, 3)
    for cost in ranks:
        assert {kind.split()[0]: n // 2 for kind, n in cost.held.items()} == planned


@pytest.mark.parametrize("cp", [2, 4])
def test_positions_that_cp_does_not_divide_are_those_of_the_fullest_rank(cluster, cp):
    """Of 9 positions, the first of 2 ranks has 5, the first of 4 ranks 3."""
    model, plan = model_of(9), Plan(cp=cp, precision="float32")
    most = max(measured(cluster, model, plan), key=total)
    assert memory(TransformerSize.of(model), plan, B) == most


@pytest.mark.parametrize("stage, N", list(product((0, 1, 2, 3), (1, 2, 3))))
def test_zero_holds_what_its_closed_forms_say(stage, N):
    """Of layers, in float32 and mixed, with 16 and 18 bytes per parameter."""
    model = model_of()
    size, plan = TransformerSize.of(model), Plan(N, zero=stage, precision="float32")
    sizes = [layer.dense for layer in layer_parameters(size, plan, 0)]
    states = ("parameters", "gradients", "optimizer")

    def held(plan, **more):
        found = memory(size, plan, B, **more)
        return tuple(found[kind] for kind in states)

    assert held(plan) == tuple(zero_bytes_held(stage, sizes, N, 0).values())
    for g in (2, 4):
        want = zero_bytes_held(stage, sizes, N, 0, BYTES["mixed", 14 + g])
        assert held(Plan(N, zero=stage), per_parameter=14 + g) == tuple(want.values())


@pytest.mark.parametrize("zero, shards", list(product((1, 2, 3), (1, 2, 4))))
def test_a_copy_of_few_ranks_is_held_as_if_there_were_no_others(zero, shards):
    model = model_of()
    size, plan = TransformerSize.of(model), Plan(8, zero=zero, precision="float32", shards=shards)
    found, few = memory(size, plan, 8), memory(size, replace(plan, dp=shards, shards=None), shards)
    assert found == few


@pytest.mark.parametrize("dp, ep, zero", [(1, 1, 0), (2, 2, 0), (4, 2, 1)])
def test_experts_that_are_all_chosen_are_held_as_by_real_ranks(cluster, dp, ep, zero):
    model = model_of(experts=4, top_k=4, capacity=None)
    plan = Plan(dp, ep=ep, zero=zero, precision="float32")
    assert memory(TransformerSize.of(model), plan, B) == measured(cluster, model, plan)[0]


@pytest.mark.parametrize("tied, pp", list(product((False, True), (1, 2, 3, 6))))
def test_ranks_hold_the_parameters_of_their_stages_and_a_tied_one_once(tied, pp):
    """Compared with the model's own names, stage by stage."""
    model = model_of(tied=tied)
    sizes = {name: p.size for name, p in model.named_parameters().items()}
    where = holders(model, cut_in_equal_numbers(6, pp))
    for r in range(pp):
        layers = layer_parameters(TransformerSize.of(model), Plan(pp=pp), r)
        own = sum(size for name, size in sizes.items() if r in where[name])
        assert sum(layer.dense for layer in layers) == own


def test_stages_are_cut_in_equal_numbers_of_layers_or_of_blocks():
    assert [s.blocks for s in cut_of(5, 3, "layers")] == [1, 2, 2]
    assert [s.blocks for s in cut_of(128, 64, "blocks")] == [2] * 64
    with pytest.raises(ValueError, match='7 blocks do not make 2 equal stages; use cut="layers"'):
        cut_of(7, 2, "blocks")
    with pytest.raises(ValueError, match="cannot cut 4 layers into 5 stages; use at most 4"):
        cut_of(2, 5, "layers")


REAL = [(8, "float32"), (132, "float32"), (8, "float16"), (132, "float16")]


@pytest.mark.parametrize("T, dtype", REAL)
def test_a_real_block_keeps_what_is_said_and_its_input_if_it_runs_again(T, dtype):
    """Measured, byte by byte. While it runs again, it keeps all that it kept before, once."""
    model, precision = model_of(T, dtype=dtype), "mixed" if dtype == "float16" else dtype
    size, block = TransformerSize.of(model), model.layers[1]
    x = Tensor(np.ones((B, T, 16), dtype), requires_grad=True) * 1.0
    whole = kept_bytes(block(x))
    assert minidist(size, Plan(precision=precision), B).block == whole
    found = minidist(size, Plan(precision=precision, recompute="full"), B)
    assert found.block == recompute(block, x).creator.arguments[0].data.nbytes
    assert found.once == found.deferred_block == whole


def test_what_runs_again_counts_once_and_longer_where_backward_is_in_two_halves():
    size = TransformerSize(4, 16, 4, 8, 12)
    plan = Plan(pp=2, micro_batches=4, recompute="full", cut="blocks")
    kept = minidist(size, plan, 1)
    held = memory(size, plan, 4)["activations"]
    in_flight = 2 * (kept.embedding + 2 * kept.block)
    assert held == in_flight + kept.once, "the block that runs again is not counted"
    split = Plan(pp=2, micro_batches=4, recompute="full", cut="blocks", schedule="zb_h1")
    each = kept.block * 2 + kept.head
    waits = 2 * kept.deferred_block + kept.deferred_end
    assert memory(size, split, 4, 1)["activations"] == 2 * each + waits + kept.once


@pytest.mark.parametrize("precision, itemsize", [("mixed", 2), ("float32", 4)])
def test_the_input_of_a_block_that_runs_again_is_split_with_the_sequence(precision, itemsize):
    """3 examples of 8 / 2 positions and width 16."""
    size = TransformerSize(4, 16, 4, 8, 12)
    for sequence, held in ((False, 8), (True, 4)):
        plan = Plan(tp=2, sequence=sequence, recompute="full", precision=precision)
        assert minidist(size, plan, 3).block == 3 * held * 16 * itemsize


def test_half_precision_may_hold_more_between_the_halves_of_backward():
    """16 X + 8 X + 24 X / tp against 12 X + 48 X / tp."""
    size, x = TransformerSize(4, 16, 4, 8, 12), 8 * 16
    found = [minidist(size, Plan(tp=tp), 1).deferred_block for tp in (1, 2, 4)]
    assert found == [0, 0, 24 * x + 6 * x - (12 * x + 12 * x)]


def test_the_largest_micro_batch_and_a_padded_vocabulary_are_counted():
    assert micro_batch(Plan(2, micro_batches=2), 9) == 3
    size = TransformerSize(4, 16, 4, 8, 13, tied=False)
    first, *_, last = layer_parameters(size, Plan(tp=2), 0)
    assert (first.dense, last.dense) == (7 * 16 + 8 * 16, 7 * 16 + 2 * 16)


@pytest.mark.parametrize("sequence", [False, True])
def test_the_papers_convention_is_the_papers_equations(sequence):
    size = TransformerSize(96, 12288, 96, 2048, 51200)
    for tp in (1, 2, 8):
        plan = Plan(tp=tp, sequence=sequence)
        whole = korthikanti(size, plan, 3).block
        assert whole == korthikanti_bytes(3, 2048, 12288, 96, tp, sequence)
        assert korthikanti(size, plan, 3).embedding == 3 * 2048 * 12288 // (tp if sequence else 1)
        scores = 5 * 96 * 3 * 2048**2 // tp
        selective = Plan(tp=tp, sequence=sequence, recompute="selective")
        assert korthikanti(size, selective, 3).block == whole - scores
        full = Plan(tp=tp, sequence=sequence, recompute="full")
        assert korthikanti(size, full, 3).block == 2 * 3 * 2048 * 12288


def test_the_first_rank_of_an_interleaved_pipeline_holds_the_papers_share_more():
    """Korthikanti et al. 2022, section 4.2.3: L layers times 1 + (p - 1)/(p v)."""
    size = TransformerSize(24, 1024, 16, 512, 50304)
    for p, v in product((2, 4), (1, 2, 3)):
        plan = Plan(pp=p, micro_batches=6 * p, schedule="interleaved", chunks=v, cut="blocks")
        kept = korthikanti(size, plan, 1)
        held = memory(size, plan, 6 * p, keeps="korthikanti")["activations"]
        blocks = 24 * kept.block * (p * v + p - 1) // (p * v)
        assert 0 <= held - blocks <= 2 * p * kept.embedding


WRONG = [
    ({"plan": Plan(dp=4, micro_batches=4), "batch": 15}, "15 examples do not fill 4 micro-batches"),
    ({"keeps": "all"}, "keeps is one of minidist, korthikanti, not 'all'"),
    ({"per_parameter": 20}, "no count of 20 bytes per parameter for mixed"),
    ({"plan": Plan(precision="float32"), "per_parameter": 18}, "18 bytes per parameter for float"),
    ({"plan": Plan(precision="float32"), "keeps": "korthikanti"}, "count dense blocks in 16 bits"),
    ({"rank": 1}, "rank 1 is not in a pipeline of 1; use 0 to 0"),
]


UNEVEN = [
    (0, Plan(tp=3), "tp=3 does not divide 4 heads; use a divisor of them"),
    (0, Plan(tp=8), "tp=8 does not divide 4 heads; use a divisor of them"),
    (0, Plan(2, ep=2), "ep=2 needs experts, and the model has 0; use ep=1"),
    (2, Plan(4, ep=4), "ep=4 does not divide 2 experts; use a divisor of them"),
    (6, Plan(4, ep=4), "ep=4 does not divide 6 experts; use a divisor of them"),
]


def seconds_of(size, plan, batch):
    return seconds(size, plan, Machine(plan.ranks, 1, 1.0, 1.0, 1.0, 1.0), batch)


@pytest.mark.parametrize("question", [memory, traffic, seconds_of])
@pytest.mark.parametrize("experts, plan, said", UNEVEN)
def test_what_cannot_be_cut_is_refused_by_every_question(question, experts, plan, said):
    with pytest.raises(ValueError) as error:
        question(TransformerSize(2, 16, 4, 8, 12, experts=experts), plan, 16)
    assert str(error.value) == said


@pytest.mark.parametrize("given, said", WRONG)
def test_a_question_without_an_answer_is_refused(given, said):
    size = TransformerSize(2, 16, 4, 8, 12)
    with pytest.raises(ValueError) as error:
        memory(**({"size": size, "plan": Plan(), "batch": 16} | given))
    assert said in str(error.value) and "\n" not in str(error.value)
