"""What ranks send, in all, is what ledgers of real ranks count; and the busiest one is found."""

from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pytest

from minidist import nn, optim, run
from minidist.comm import Mesh
from minidist.events import EventLog
from minidist.hybrid import Hybrid
from minidist.nn.datasets import Batch
from minidist.planning import Plan, TransformerSize, traffic
from minidist.planning.costs.traffic import sent

V, C, H, L, T, B = 12, 16, 4, 4, 8, 24
DENSE = [
    (dp, pp, cp, tp, schedule, chunks, sequence, zero)
    for dp, pp, cp, tp, (schedule, chunks), sequence, zero in product(
        (1, 2),
        (1, 2, 3),
        (1, 2),
        (1, 2, 4),
        (("gpipe", 1), ("zb_v", 2), ("interleaved", 2)),
        (False, True),
        (0, 1),
    )
    if not (sequence and (cp > 1 or tp == 1)) and pp * chunks <= L + 2 and dp * pp * cp * tp <= 8
]


def measured(group, plan, tied=False, experts=0, vocab=V):
    """Return {axis: bytes that this rank sends in a step of a real mesh}, without the loss."""
    options = {"experts": experts, "top_k": 2, "capacity": None} if experts else {}
    model = nn.Transformer(vocab, C, H, L, T, tied=tied, **options)
    mesh = Mesh(group, dp=plan.dp, pp=plan.pp, cp=plan.cp, tp=plan.tp)
    more = {"chunks": plan.chunks} if plan.chunks > 1 else {}
    names = "schedule", "micro_batches", "ep", "zero", "shards"
    hybrid = Hybrid(
        model,
        mesh,
        split_sequence=plan.sequence,
        check_weights=False,
        **{name: getattr(plan, name) for name in names},
        **more,
    )
    hybrid.backward(Batch(*[np.zeros((B, T), int)] * 2))
    hybrid.step(optim.SGD(hybrid.parameters(), lr=0.0))
    shared = list(hybrid.pipeline.shared.values())
    axes = {"pp": [mesh.pp, *shared], "tp": [mesh.tp, hybrid.tp_sums], "cp": [hybrid.cp]}
    axes["ep"] = [hybrid.expert_group]
    others = {group for groups in axes.values() for group in groups}
    axes["dp"] = [group for group in hybrid.groups if group not in others]
    sent = {axis: sum(g.ledger.total for g in set(groups)) for axis, groups in axes.items()}
    for axis, ranks in ("pp", mesh.pp), ("dp", hybrid.replicas):  # the loss, one number
        sent[axis] -= 8 * 2 * (ranks.size - 1) if ranks.rank == 0 else 0
    return sent


def of_ranks(cluster, plan, **more):
    """Return {axis: bytes} of all ranks of a plan, measured."""
    ranks = cluster(plan.ranks, "thread").run(partial(measured, plan=plan, **more))
    return {axis: sum(rank[axis] for rank in ranks) for axis in ranks[0]}


def total(size, plan):
    """Return the bytes of all ranks per axis."""
    each = [sent(size, plan, B, r) for r in range(plan.pp)]
    copies = plan.ranks // plan.pp
    return {axis: copies * sum(own[axis][0] for own in each) for axis in each[0]}


def plan_of(dp, pp, cp, tp, schedule, chunks, sequence, zero, **more):
    given = {"schedule": schedule, "chunks": chunks, "sequence": sequence, "zero": zero}
    return Plan(dp, pp, tp, cp, micro_batches=pp, precision="float32", **given, **more)


EVERY = [(False, slice(0, None, 13)), (True, slice(5, None, 13))]
EVERY += [pytest.param(tied, slice(None), marks=pytest.mark.slow) for tied in (False, True)]


@pytest.mark.parametrize("tied, some", EVERY)
def test_all_ranks_together_send_what_real_ranks_do(cluster, tied, some):
    for axes in DENSE[some]:
        plan = plan_of(*axes)
        sent = total(TransformerSize(L, C, H, T, V, tied), plan)
        assert sent == of_ranks(cluster, plan, tied=tied), plan


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize(
    "dp, pp, cp, shards", [(4, 1, 1, 2), (4, 1, 1, 1), (2, 1, 2, 2), (2, 2, 1, None), (2, 2, 2, 1)]
)
def test_zero_on_a_mesh_sends_what_real_ranks_do(cluster, dp, pp, cp, shards, zero):
    plan = plan_of(dp, pp, cp, 1, "gpipe", 1, False, zero, shards=shards)
    sent = total(TransformerSize(L, C, H, T, V, tied=False), plan)
    assert sent["dp"] == of_ranks(cluster, plan)["dp"]


@pytest.mark.parametrize("tp, vocab", [(2, 13), (4, 13), (4, 14)])
def test_a_tied_gradient_between_stages_has_the_rows_of_a_padded_vocabulary(cluster, tp, vocab):
    """13 tokens are 2 x 7, or 4 x 4; a number of a gradient has 4 bytes."""
    size, rows = TransformerSize(L, C, H, T, vocab), {2: 7, 4: 4}[tp]
    plan = Plan(1, 2, tp, micro_batches=2, precision="float32")
    kept = [
        sent(replace(size, tied=tied), plan, B, r)["pp"] for tied in (False, True) for r in (0, 1)
    ]
    for without, tied in zip(kept[:2], kept[2:], strict=True):
        assert (tied[0] - without[0], tied[1] - without[1]) == (rows * C * 4, 1)
    assert total(size, plan)["pp"] == of_ranks(cluster, plan, tied=True, vocab=vocab)["pp"]


@pytest.mark.parametrize(
    "dp, ep, cp, tp, zero", [(2, 2, 1, 1, 0), (4, 2, 1, 2, 1), (2, 2, 2, 1, 0), (1, 1, 2, 2, 0)]
)
def test_experts_that_are_all_chosen_send_what_real_ranks_do(cluster, dp, ep, cp, tp, zero):
    """Two experts, two choices: every expert gets every position."""
    plan = Plan(dp, 1, tp, cp, ep, precision="float32", zero=zero)
    size = TransformerSize(L, C, H, T, V, tied=False, experts=2, top_k=2)
    assert total(size, plan) == of_ranks(cluster, plan, experts=2)


PRECISIONS = [("float32", 4, 4), ("mixed", 2, 2)]  # w, g bytes


@pytest.mark.parametrize("precision, w, g", PRECISIONS)
@pytest.mark.parametrize("stage, N, m", list(product((0, 1, 2, 3), (2, 4), (1, 2))))
def test_zero_sends_gradients_and_weights_as_often_as_its_stage_says(stage, N, m, precision, w, g):
    plan = Plan(N, zero=stage, micro_batches=m, precision=precision)
    size = TransformerSize(L, C, H, T, V, tied=False)
    said = "weights are gathered for forward, and again for backward" if stage == 3 else plan
    each = {0: 2 * g, 1: g + w, 2: m * g + w, 3: m * g + 2 * m * w}[stage]
    found = sent(size, plan, B)["dp"][0]
    assert N * found == each * (N - 1) * size.parameters, said


def test_the_busiest_rank_of_each_axis_is_found():
    size, plan = TransformerSize(L, C, H, T, V), Plan(2, 3, 2, micro_batches=4)
    each = [sent(size, plan, B, r) for r in range(3)]
    found = traffic(size, plan, B)
    assert found == {axis: max(own[axis] for own in each) for axis in found}
    assert set(found) == {"dp", "pp", "tp", "cp", "ep"} and found["cp"] == found["ep"] == (0, 0)
    assert each[1]["pp"][1] == 8  # of 4 micro-batches, to both neighbours


def step(group, model, axes, options):
    hybrid = Hybrid(model, Mesh(group, **axes), micro_batches=2, **options)
    hybrid.backward(Batch(*[np.zeros((4, T), int)] * 2))
    hybrid.step(optim.SGD(hybrid.parameters(), lr=0.0))


LOSS = "all_reduce maximum", "all_reduce sum of exponentials", "all_reduce logit of the target"
SPLIT = "all_reduce f", "all_reduce g", *LOSS
SEQUENCE = "reduce_scatter", "all_gather sequence", "all_gather sequence, once more"
SEQUENCE = *SEQUENCE, "all_gather reduce_scatter", *LOSS
NAMES = "all_reduce blocks", "all_reduce head", "all_reduce embedding"
COUNTED = [  # axis, options, experts, the names of its operations, or beginnings of names
    ("tp", {}, 0, SPLIT, ()),
    ("tp", {}, 2, SPLIT, ()),
    ("tp", {"split_sequence": True}, 0, SEQUENCE, NAMES),
    ("dp", {}, 0, ["all_reduce copies"], ()),
    ("dp", {"zero": 1}, 0, (), ("reduce_scatter shard", "all_gather shard")),
    ("pp", {}, 0, ["send"], ()),
    ("cp", {}, 0, ["send"], ()),
    ("cp", {}, 2, ["send", "all_gather chosen experts"], ()),
    ("ep", {"ep": 2}, 2, ["all_to_all counts", "all_to_all rows"], ()),
]


@pytest.mark.parametrize("axis, options, experts, names, beginnings", COUNTED)
def test_two_real_ranks_take_part_in_so_many_operations(axis, options, experts, names, beginnings):
    axes = dict.fromkeys(("dp", "pp", "cp", "tp"), 1) | {"dp" if axis == "ep" else axis: 2}
    more = {"experts": experts, "capacity": None} if experts else {}
    model, log = nn.Transformer(V, C, H, 2, T, **more), EventLog()
    run(step, 2, model, axes, options, transport="thread", log=log)
    words = {"sequence": options.get("split_sequence", False), "zero": options.get("zero", 0)}
    plan = Plan(**axes, ep=options.get("ep", 1), micro_batches=2, precision="float32", **words)
    for r in (0, 1):
        found = Counter(e.name for e in log.events if e.rank == r)
        count = sum(n for name, n in found.items() if name in names or name.startswith(beginnings))
        size, at = TransformerSize.of(model), r if axis == "pp" else 0
        assert count == sent(size, plan, 4, at)[axis][1]


def test_ranks_of_ep_sum_over_tp_once_for_all_experts():
    """4 real ranks, dp=2 x tp=2; each has 2 of 4 experts."""
    model, log = nn.Transformer(V, C, H, 2, T, experts=4, capacity=None), EventLog()
    run(
        step, 4, model, {"dp": 2, "pp": 1, "cp": 1, "tp": 2}, {"ep": 2}, transport="thread", log=log
    )
    plan = Plan(2, tp=2, ep=2, micro_batches=2, precision="float32")
    want = sent(TransformerSize.of(model), plan, 4)["tp"][1]
    for r in range(4):
        assert sum(e.name in SPLIT for e in log.events if e.rank == r) == want


def test_parts_that_all_ranks_have_are_summed_if_the_sequence_is_split():
    """Of 2 ranks, each number is sent once: 2 (n - 1)/n. A gate is [C, E], an expert's bias C."""
    plan = Plan(tp=2, sequence=True, precision="float32")

    def moved(experts, T):
        rows = B * T  # in a block 10 (n - 1)/n S, and of experts a number of each of 2 T rows; 5 at
        in_blocks = L * 10 * C + 5 * C + L * (4 if experts else 0)  # both ends
        return sent(TransformerSize(L, C, H, T, V, experts=experts), plan, B)["tp"][0] - (
            in_blocks * rows * 4 // 2 + 6 * rows * 4 // 2
        )

    norms, ends = 4 * C, T * C + 2 * C  # positions, and the last norm
    assert moved(0, T) == (L * (norms + C + C) + ends) * 4
    assert moved(6, T) == (L * (norms + C + 6 * C + 6 * C) + ends) * 4


@pytest.mark.parametrize("experts", [0, 4])
def test_recomputation_gathers_and_scatters_a_split_sequence_again(experts):
    """Forward has an all_gather and a reduce_scatter for attention, and for what follows it."""
    size, rows = TransformerSize(L, C, H, T, V, experts=experts), B * T
    plans = (Plan(tp=2, sequence=True, recompute=r) for r in ("none", "full"))
    kept, again = (traffic(size, plan, B)["tp"] for plan in plans)
    assert again[0] - kept[0] == L * 2 * 2 * rows * C * 2 // 2
    assert again[1] - kept[1] == L * 2 * 2


def test_recomputation_repeats_the_forward_part():
    size, rows = TransformerSize(L, C, H, T, V), B * T
    kept, again = (traffic(size, Plan(tp=2, recompute=r), B)["tp"] for r in ("none", "full"))
    assert again[0] - kept[0] == L * 2 * rows * C * 2  # two all_reduces per block: 2 S of 2 ranks
    assert again[1] - kept[1] == 2 * L


def test_recomputation_repeats_messages_and_rows_of_the_forward_pass():
    """Of cp, 2 of 6 again; of experts, 2 of 4 and all counts."""
    size = TransformerSize(L, C, H, T, V, experts=2)

    def both(axis, size=size, **axes):
        return (traffic(size, Plan(**axes, recompute=r), B)[axis] for r in ("none", "full"))

    kept, again = both("cp", TransformerSize(L, C, H, T, V), cp=2)
    assert again[0] * 6 == kept[0] * 8 and again[1] * 3 == kept[1] * 4
    kept, again = both("ep", dp=2, ep=2)
    counts = L * 8
    assert (again[0] - 2 * counts) * 4 == (kept[0] - counts) * 6 and again[1] * 5 == kept[1] * 8


@pytest.mark.parametrize("tp, share", [(1, 4), (2, 4), (4, 2), (8, 1)])
def test_a_ring_of_grouped_queries_sends_two_heads_of_keys_in_place_of_eight(tp, share):
    """tp splits 2 heads of keys into 2 parts at most: with more ranks, a head is on several."""
    whole = TransformerSize(2, 64, 8, 32, 100, llama=True)
    plan, grouped = Plan(cp=2, tp=tp), replace(whole, kv_heads=2)
    assert traffic(whole, plan, 1)["cp"][0] == share * traffic(grouped, plan, 1)["cp"][0]
