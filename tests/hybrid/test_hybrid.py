"""Five axes on a mesh: gradients, clipping and weights equal one device's."""

import copy
from itertools import product

import numpy as np
import pytest

from minidist import Mesh, nn, optim
from minidist.backend import address
from minidist.context_parallel import plain
from minidist.errors import RankFailed
from minidist.hybrid import Hybrid
from minidist.nn.datasets import Batch
from minidist.observe.costs import measure_costs
from minidist.rng import Randomness, generator
from minidist.verify import equivalence
from minidist.verify.compare import compare
from minidist.verify.strategies import STRATEGIES
from minidist.verify.strategies.cases import (
    Case,
    documents,
    random_weights,
    translator_case,
)

AXES = ("dp", "pp", "cp", "tp", "ep")  # ep divides dp, so it has no ranks of its own
HEADS = 12
SAFE = {"rendezvous_safe": True, "schedule": "gpipe"}
MESHES = [
    (dp, pp, cp, tp, ep)
    for dp, pp, cp, tp, ep in product(range(1, 9), repeat=5)
    if dp * pp * cp * tp <= 8 and dp % ep == 0 and pp <= 5 and tp <= 4
]


def model_for(ep, tied):
    """Return a model of five layers; with experts, if there is an axis for them: for odd ep two,
    so that some ranks have none.
    """
    mixture = {"experts": 2 if ep % 2 else 4, "capacity": 0.8, "balance": 0.5} if ep > 1 else {}
    return random_weights(
        nn.Transformer(11, 24, HEADS, 3, 12, 3, "float64", dropout=0.2, tied=tied, **mixture)
    )


def on(group, mesh, model, options):
    """Return a Hybrid on this mesh, (dp, pp, cp, tp, ep), without the options that do not fit."""
    *sizes, ep = mesh
    options, (_, _, cp, tp) = dict(options), sizes
    if cp * ep > 1:
        options.pop("split_sequence", None)
    if HEADS // tp % cp:
        options.pop("attention", None)
    return Hybrid(model, Mesh(group, **dict(zip(AXES, sizes, strict=False))), ep=ep, **options)


def ranks_of(mesh):
    return int(np.prod(mesh[:-1]))


def transformer_and_batches(mesh, tied, B):
    tokens = generator(0, "hybrid").integers(0, 11, (2, 2, B, 12))
    return model_for(mesh[-1], tied), tokens


def translator_and_batches(*_):
    """Return a Seq2Seq, and two batches of ten or eleven examples."""
    case = translator_case(21, 2, 24, HEADS)
    return case.model, [(case.inputs[i::2], case.targets[i::2]) for i in range(2)]


KV_HEADS = {1: 3, 2: 1, 3: 1, 4: 2}  # by tp: some ranks of tp hold the same one


def llama_and_batches(mesh, tied, B):
    """Return a Llama, with experts if there is an axis for them, and its batches."""
    mixture = {"experts": 4, "capacity": None, "balance": 0.5} if mesh[-1] > 1 else {}
    sizes = {"vocab": 11, "width": 24, "heads": HEADS, "depth": 3, "context": 12, "hidden": 24}
    kv_heads = KV_HEADS[mesh[3]]
    model = nn.Llama(**sizes, kv_heads=kv_heads, seed=3, dtype="float64", tied=tied, **mixture)
    return random_weights(model), transformer_and_batches(mesh, tied, B)[1]


KINDS = {
    "GPT": transformer_and_batches,
    "Llama": llama_and_batches,
    "Seq2Seq": translator_and_batches,
}


def steps_of(group, mesh, options, kind, tied, B):
    """Train two steps on the mesh and on one device; return what differs on this rank."""
    model, batches = KINDS[kind](mesh, tied, B)
    hybrid = on(group, mesh, copy.deepcopy(model), options)
    ours = optim.AdamW(hybrid.parameters(), lr=1e-2, weight_decay=0.1)
    theirs = optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    rows = []
    for step, (inputs, targets) in enumerate(batches):
        loss = hybrid.backward(Batch(inputs, targets, seed=7, step=step))
        want = nn.cross_entropy(model(inputs, Randomness(7, step, np.arange(len(inputs)))), targets)
        want.backward()
        wanted = {name: p.grad for name, p in model.named_parameters().items()}
        comparison = compare([hybrid.gradients()], wanted)
        norms = ours.clip_global_norm(0.1, hybrid.sum_squares), theirs.clip_global_norm(0.1)
        rows.append((comparison, loss - want.item(), norms[0] / norms[1] - 1))
        hybrid.step(ours)
        theirs.step()
        theirs.zero_grad()
    state = hybrid.state()
    assert list(state) == list(model.state())
    return rows, compare([state], model.state())


def check(ranks, mesh, options, kind="GPT", tied=False, B=5):
    found = ranks.run(steps_of, mesh, options, kind, tied, B)
    for step, rows in enumerate(zip(*(rows for rows, _ in found), strict=True)):
        for comparison, loss, _ in rows:
            assert comparison.ok, str(comparison)
            assert abs(loss) < 1e-12
        norms = [1 + norm for _, _, norm in rows]
        assert max(abs(norm - 1) for norm in norms) <= 1e-12, f"step {step}, mesh {mesh}: {norms}"
    for _, weights in found:
        assert weights.ok, str(weights)


EVERYDAY = {  # kind, (dp, pp, cp, tp, ep), options, B
    "no examples": ("GPT", (2, 1, 1, 2, 1), {"split_sequence": True, "zero": 1}, 1),
    "7 micro-batches": ("GPT", (2, 2, 1, 1, 1), {"schedule": "gpipe", "micro_batches": 7}, 5),
    "zero bubble": ("GPT", (1, 2, 2, 1, 1), {"schedule": "zb_h1", "weights_last": True}, 5),
    "recomputed": ("GPT", (2, 1, 2, 1, 2), {"recompute": True, "positions": plain}, 5),
    "a V": ("GPT", (1, 2, 1, 2, 1), {"schedule": "zb_v", "split_sequence": True}, 5),
    "processes": ("GPT", (1, 2, 1, 2, 1), {"cut": [range(1), range(1, 5)], **SAFE}, 5),
    "two chunks": ("GPT", (2, 2, 1, 1, 1), {"zero": 2, "schedule": "interleaved", "chunks": 2}, 5),
    "3 micro-batches": ("GPT", (2, 1, 1, 1, 1), {"zero": 2, "micro_batches": 3}, 5),
    "no experts": ("GPT", (3, 1, 1, 1, 3), {"zero": 3, "micro_batches": 3}, 5),
    "copies of 2": ("GPT", (4, 1, 1, 1, 1), {"zero": 2, "shards": 2}, 3),
    "Ulysses": ("GPT", (2, 1, 2, 1, 1), {"zero": 3, "shards": 2, "attention": "ulysses"}, 5),
    "a Llama": ("Llama", (1, 2, 1, 2, 1), {"schedule": "zb_h1", "recompute": True}, 5),
    "its heads": ("Llama", (1, 1, 1, 4, 1), {"split_sequence": True}, 5),
    "its experts": ("Llama", (2, 1, 1, 2, 2), {"zero": 1, "micro_batches": 2}, 5),
    "a Seq2Seq": ("Seq2Seq", (1, 2, 1, 2, 1), {"schedule": "interleaved", "chunks": 3}, 5),
    "its shards": ("Seq2Seq", (2, 2, 1, 1, 1), {"zero": 3, "micro_batches": 2}, 5),
}


@pytest.mark.parametrize("kind, mesh, options, B", EVERYDAY.values(), ids=EVERYDAY)
def test_a_mesh_leaves_the_gradients_norms_and_weights_of_one_device(
    cluster, kind, mesh, options, B
):
    tied = mesh[1] > 1 and options.get("zero", 0) < 2
    transport = "process" if options.get("rendezvous_safe") else "thread"
    check(cluster(ranks_of(mesh), transport), mesh, options, kind, tied, B)


OTHERS = [
    {"schedule": "gpipe", "split_sequence": True, "zero": 1},
    {"schedule": "zb_h1", "weights_last": True, "attention": "ulysses"},
    {"schedule": "looped_bfs", "chunks": 2, "zero": 2},
    {"schedule": "1f1b", "zero": 3},
    {"schedule": "layer_split", "recompute": True},
]


@pytest.mark.slow
@pytest.mark.grid(60)
@pytest.mark.parametrize("options", OTHERS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_mesh_of_up_to_eight_ranks(cluster, mesh, kind, options):
    if kind == "Seq2Seq":
        mesh = (*mesh[:2], 1, mesh[3], 1)
        options = {name: value for name, value in options.items() if name != "split_sequence"}
    if mesh[1] > 2:  # five layers are in at most two chunks of two ranks
        options = {name: value for name, value in options.items() if name != "chunks"}
        if options["schedule"] == "looped_bfs":
            options["schedule"] = "1f1b"
    check(cluster(ranks_of(mesh), "thread"), mesh, options, kind)


def test_shards_may_be_uneven(cluster):
    """A block has 534 numbers, for four ranks."""
    model = nn.Transformer(6, 6, 3, 1, 4, dtype="float64")
    tokens = generator(0, "uneven").integers(0, 6, (2, 2, 4))
    case = Case("uneven", model, *tokens, options={"dp": 2, "cp": 2, "zero": 1, "micro_batches": 1})
    found = measure_costs("hybrid", case, cluster(4, "thread"))
    states = [cost.held["optimizer state"] for cost in found]
    two_each = 2 * 8 * sum(p.size for p in model.parameters())
    assert sum(states) == two_each and len(set(states)) == 2


@pytest.mark.parametrize("top_k", [1, 3])
def test_every_choice_of_an_expert_is_gathered_over_context(cluster, top_k):
    model = nn.Transformer(6, 6, 3, 2, 5, dtype="float64", experts=3, top_k=top_k)
    tokens = generator(0, "choices").integers(0, 6, (2, 2, 5))
    case = Case("choices", model, *tokens, options={"cp": 2, "micro_batches": 1})
    row = equivalence.check("hybrid", case, 2, cluster(2, "thread"))
    assert row["ok"], row["detail"]


def test_an_axis_of_size_one_runs_the_same_code_and_moves_nothing(cluster):
    def worker(group, mesh):
        mesh = Mesh(group, **mesh)
        model = nn.Transformer(7, 8, 4, 2, 8, dtype="float64")
        hybrid = Hybrid(model, mesh, split_sequence=mesh.cp.size == 1)
        hybrid.backward(Batch(np.ones((3, 8), int), np.ones((3, 8), int)))
        hybrid.sum_squares()
        hybrid.state()
        moved = {name: getattr(mesh, name).ledger.total > 0 for name in mesh.axes}
        kinds = [type(layer).__name__ for layer in hybrid.pipeline.model.layers]
        return moved, kinds

    alone = {"dp": 1, "pp": 1, "cp": 1, "tp": 1}
    (moved, kinds), *_ = cluster(1).run(worker, alone)
    assert moved == dict.fromkeys(alone, False)
    assert kinds == ["ParallelEmbedding", "Block", "Block", "VocabParallelHead"]
    for axis in moved:
        for found, _ in cluster(2).run(worker, alone | {axis: 2}):
            assert found == {name: name == axis for name in alone}


def transformer(heads=4, depth=2, **more):
    return nn.Transformer(7, 12, heads, depth, 8, dtype="float64", **more)


SEQ2SEQ = translator_case().model
ALONE = {"dp": 1, "pp": 1, "tp": 1}
WRONG = [  # axes of four ranks, options, the model, what is said
    ({"dp": 2, "pp": 2, "tp": 2}, {}, {}, "dp=2 x pp=2 x tp=2 does not make 4 ranks"),
    ({"dp": 4, "pp": 0, "tp": 1}, {}, {}, "dp=4 x pp=0 x tp=1 does not make 4 ranks"),
    ({"dp": 2, "pp": 2}, {}, {}, "the mesh has no axis tp; give it size 1"),
    (ALONE | {"tp": 4}, {}, {"heads": 6}, "cannot split 6 heads over 4 ranks; use a multiple of 4"),
    (ALONE | {"pp": 4}, {"chunks": 2}, {}, "1f1b has at most 1 chunk per rank, not 2"),
    (
        ALONE | {"pp": 4},
        {"chunks": 2, "schedule": "interleaved"},
        {},
        "cannot cut 4 layers into 8 stages; use at most 4",
    ),
    (ALONE | {"pp": 4}, {"schedule": "magic"}, {}, "unknown schedule 'magic'; choose one of"),
    (ALONE | {"pp": 4}, {"schedule": "pipedream"}, {}, "pipedream updates the weights"),
    (ALONE | {"pp": 4}, {"micro_batches": 0}, {}, "one or more micro-batches, not 0"),
    ({"dp": 1, "pp": 1, "ep": 2, "tp": 2}, {}, {}, "Hybrid has no axis ep; make the mesh of dp"),
    (ALONE | {"dp": 4}, {"ep": 3}, {}, "ep=3 does not divide dp=4; use a divisor of it"),
    (ALONE | {"dp": 4}, {"ep": 2}, {}, "ep=2 needs experts; use nn.Transformer"),
    (ALONE | {"cp": 4}, {"attention": "magic"}, {}, "unknown attention 'magic'"),
    (ALONE | {"cp": 4}, {"ulysses": 3}, {}, "4 ranks are not cut into groups of 3"),
    (ALONE | {"cp": 2, "tp": 2}, {"split_sequence": True}, {}, "cp=2 cuts the sequence already"),
    (ALONE | {"cp": 4}, {}, SEQ2SEQ, r"cuts one sequence, .* a source of 4 .* \(cp=1\)"),
    (ALONE | {"tp": 4}, {"split_sequence": True}, SEQ2SEQ, "two, of 4 and 5 positions"),
    (ALONE | {"dp": 4}, {"zero": 4}, {}, "the stages 1, 2 and 3, and 0 is none, not 4"),
    (
        ALONE | {"dp": 2, "tp": 2},
        {"zero": 2, "split_sequence": True},
        {},
        "would also sum partial gradients over tp",
    ),
    (ALONE | {"dp": 4}, {"zero": 3, "recompute": True}, {}, "and zero=3 keeps one layer's; use"),
    (ALONE | {"dp": 4}, {"zero": 2}, {"tied": True}, "token.weight' belongs to several layers"),
    (ALONE | {"dp": 4}, {"zero": 2, "schedule": "zb_h1"}, {}, "this schedule computes it later"),
    (ALONE | {"dp": 4}, {"shards": 2}, {}, "shards=2 cuts what ZeRO shares among fewer ranks"),
    (ALONE | {"dp": 4}, {"zero": 1, "shards": 3}, {}, "groups of 3 shards do not make up 4 ranks"),
    (
        ALONE | {"dp": 4},
        {"zero": 3, "shards": 2, "ep": 2},
        {"experts": 2},
        "experts over ep=2 have fewer already",
    ),
]


@pytest.mark.parametrize("axes, options, model, message", WRONG, ids=[m for *_, m in WRONG])
def test_wrong_meshes_and_options_are_refused(cluster, axes, options, model, message):
    def worker(group):
        whole = transformer(**model) if isinstance(model, dict) else model
        Hybrid(whole, Mesh(group, **axes), **options)

    with pytest.raises(RankFailed, match=message) as caught:
        cluster(4, "thread").run(worker)
    assert isinstance(caught.value.__cause__, ValueError)


def batch():
    return Batch(*generator(0, "mesh").integers(0, 7, (2, 4, 8)))


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_a_second_batch_on_top_of_summed_gradients_is_refused(cluster, zero):
    """Summed over two ranks once more, they would come to three batches' gradient, not two's."""

    def worker(group):
        hybrid = Hybrid(transformer(), Mesh(group, dp=2, pp=1, tp=1), zero=zero)
        optimizer = optim.SGD(hybrid.parameters(), lr=0.0)
        for _ in range(2):
            hybrid.backward(batch())
            optimizer.zero_grad()
        hybrid.backward(batch())
        with pytest.raises(ValueError, match="would be summed again; call zero_grad"):
            hybrid.backward(batch())

    cluster(2, "thread").run(worker)


def test_stage_3_has_the_weights_of_two_layers_and_its_shards_alone(cluster):
    """Of six layers the vectors are in two places, and a model's state is not there."""

    def worker(group):
        hybrid = Hybrid(transformer(depth=4), Mesh(group, dp=2, pp=1, tp=1), zero=3)
        layers = hybrid.pipeline.model.layers
        with pytest.raises(ValueError, match=r"keeps its shard of it; use .*hybrid"):
            hybrid.pipeline.model.state()
        return len(layers), {address(layer.home.vector) for layer in layers}

    for layers, places in cluster(2, "thread").run(worker):
        assert (layers, len(places)) == (6, 2)


TAKE = {
    name: s for name, s in STRATEGIES.items() if s.models.include(nn.Transformer(3, 2, 1, 1, 2))
}


@pytest.mark.slow
@pytest.mark.grid(12)
@pytest.mark.parametrize("name", TAKE)
def test_every_strategy_that_splits_a_transformer_keeps_documents_apart(cluster, name):
    tokens, nexts = generator(0, "documents everywhere").integers(0, 11, (2, 4, 12))
    model = random_weights(nn.Transformer(11, 8, 4, 2, 12, 2, "float64", 0.2))
    case = Case("documents", model, tokens, nexts, documents=documents(4, 12))
    row = equivalence.check(name, case, 2, cluster(2, "thread"), rerun=False)
    assert row["ok"], row["detail"]
