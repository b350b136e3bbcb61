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
from minidist.observe.costs import measure_costs
from minidist.planning import Plan, TransformerSize, traffic
from minidist.planning.costs.layers import block_bytes
from minidist.planning.costs.traffic import sent
from minidist.verify.strategies import STRATEGIES
from tests.strategies import arrays

V, C, H, L, T, B = 12, 16, 4, 4, 8, 24
EXPERTS = {"experts": 2}  # two experts, two choices: every expert gets every position
V_SHAPED = {"schedule": "zb_v", "chunks": 2}
INTERLEAVED = {"schedule": "interleaved", "chunks": 2}
PRECISIONS = [("float32", 4, 4), ("mixed", 2, 2)]  # bytes of a weight, of a gradient
MESHES = [  # the options of a plan, and those of a model
    ({"dp": 2, "pp": 2, "tp": 2, "micro_batches": 2}, {"tied": True}),
    ({"pp": 3, "micro_batches": 3, "schedule": "gpipe"}, {}),
    ({"dp": 2, "pp": 2, "zero": 1, "micro_batches": 2, **V_SHAPED}, {}),
    ({"pp": 2, "cp": 2, "micro_batches": 2, **INTERLEAVED}, {"tied": True}),
    ({"pp": 2, "tp": 2, "micro_batches": 2, "sequence": True, **V_SHAPED}, {"tied": True}),
    ({"dp": 2, "cp": 2, "tp": 2, "zero": 1}, {}),
    ({"tp": 4, "sequence": True}, {}),
    ({"dp": 4, "zero": 2, "shards": 2, "micro_batches": 2}, {}),
    ({"dp": 4, "zero": 1, "shards": 1}, {}),
    ({"dp": 2, "cp": 2, "zero": 3, "shards": 2}, {}),
    ({"dp": 2, "pp": 2, "zero": 3, "micro_batches": 2}, {}),
    ({"dp": 2, "pp": 2, "zero": 2, "micro_batches": 2}, {}),
    ({"pp": 2, "tp": 4, "micro_batches": 2}, {"tied": True, "vocab": 13}),
    ({"dp": 2, "ep": 2}, EXPERTS),
    ({"dp": 4, "ep": 2, "tp": 2, "zero": 1}, EXPERTS),
    ({"dp": 2, "ep": 2, "cp": 2}, EXPERTS),
    ({"cp": 2, "tp": 2}, EXPERTS),
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


def test_all_ranks_together_send_what_real_ranks_do(cluster):
    for options, more in MESHES:
        plan = Plan(precision="float32", **options)
        model = {"vocab": V, "tied": False, "experts": 0} | more
        size = TransformerSize(L, C, H, T, **model)
        assert total(size, plan) == of_ranks(cluster, plan, **model), (plan, more)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zero_sends_gradients_and_weights_as_often_as_its_stage_says(stage):
    size = TransformerSize(L, C, H, T, V, tied=False)
    for N, m, (precision, w, g) in product((2, 4), (1, 2), PRECISIONS):
        plan = Plan(N, zero=stage, micro_batches=m, precision=precision)
        why = "weights are gathered for forward, and again for backward" if stage == 3 else plan
        each = {0: 2 * g, 1: g + w, 2: m * g + w, 3: m * g + 2 * m * w}[stage]
        assert N * sent(size, plan, B)["dp"][0] == each * (N - 1) * size.parameters, why


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


def test_recomputation_repeats_what_the_forward_pass_sends():
    """Two all_reduces of tp per block, or the four halves of them; 2 of the 6 messages of cp; of
    experts, 2 of 4 and all counts.
    """

    def both(axis, experts=0, **axes):
        size = TransformerSize(L, C, H, T, V, experts=experts)
        return (traffic(size, Plan(**axes, recompute=r), B)[axis] for r in ("none", "full"))

    for sequence in (False, True):
        kept, again = both("tp", 4, tp=2, sequence=sequence)
        assert again[0] - kept[0] == L * 2 * B * T * C * 2
        assert again[1] - kept[1] == L * 2 * (1 + sequence)
    kept, again = both("cp", cp=2)
    assert again[0] * 6 == kept[0] * 8 and again[1] * 3 == kept[1] * 4
    kept, again = both("ep", 2, dp=2, ep=2)
    counts = L * 8
    assert (again[0] - 2 * counts) * 4 == (kept[0] - counts) * 6 and again[1] * 5 == kept[1] * 8


def test_a_ring_of_grouped_queries_sends_two_heads_of_keys_in_place_of_eight():
    """tp splits 2 heads of keys into 2 parts at most: with more ranks, a head is on several."""
    size = TransformerSize(2, 64, 8, 32, 100, llama=True)
    for tp, share in ((1, 4), (2, 4), (4, 2), (8, 1)):
        plan, grouped = Plan(cp=2, tp=tp), replace(size, kv_heads=2)
        assert traffic(size, plan, 1)["cp"][0] == share * traffic(grouped, plan, 1)["cp"][0]


def test_a_block_of_a_cnn_sends_what_its_terms_say(cluster):
    """By rows, a CNN of a stem and two blocks sends a block more than one of a stem and one."""
    B, C, H, W = 2, 6, 8, 6
    case = STRATEGIES["channel"].cases(1)[0]

    def sent(name, blocks, size):
        model = nn.CNN(C, 2, (C,) * blocks, dtype="float64")
        images, labels = arrays(B, C, H, W), np.zeros(B, int)
        ranks = measure_costs(
            name, replace(case, model=model, inputs=images, targets=labels), cluster(size, "thread")
        )
        return sum(cost.sent for cost in ranks)

    for size in (2, 3):
        terms = block_bytes(B, C, H, W, 8, size)
        assert sent("channel", 1, size) == terms["channels"]
        norms = 2 * (size - 1) * 2 * (8 * (2 * C + 1) + 8 * 2 * C + 8 * 2 * C)  # sums, gradients
        more = sent("spatial", 2, size) - sent("spatial", 1, size)
        assert more == terms["halos"] + terms["weights"] + norms
