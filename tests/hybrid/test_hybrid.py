"""Five axes on a mesh: gradients, clipping and weights equal one device's."""

import copy
from itertools import cycle, product

import numpy as np
import pytest

from minidist import Mesh, nn, optim
from minidist.context_parallel import plain
from minidist.errors import RankFailed
from minidist.hybrid import Hybrid
from minidist.nn.datasets import Batch
from minidist.observe.costs import measure_costs
from minidist.rng import Randomness, generator
from minidist.verify import equivalence
from minidist.verify.compare import compare
from minidist.verify.strategies.cases import (
    Case,
    random_weights,
    translator_case,
)
from tests import causes

AXES = ("dp", "pp", "cp", "tp", "ep")  # ep divides dp, so it has no ranks of its own
HEADS = 12
SCHEDULES = [
    {"schedule": "1f1b"},
    {"schedule": "gpipe", "split_sequence": True, "zero": 1},
    {"schedule": "zb_h1", "weights_last": True, "attention": "ulysses"},
]
MESHES = [
    (dp, pp, cp, tp, ep)
    for dp, pp, cp, tp, ep in product(range(1, 9), repeat=5)
    if dp * pp * cp * tp <= 8 and dp % ep == 0 and pp <= 5 and tp <= 4
]
SMALL = [
    (1, 1, 1, 1, 1),
    (2, 1, 1, 1, 1),
    (1, 2, 1, 1, 1),
    (1, 1, 2, 1, 1),
    (1, 1, 1, 2, 1),
    (2, 1, 1, 1, 2),
    (1, 3, 1, 1, 1),
    (2, 2, 1, 1, 1),
    (1, 2, 1, 2, 1),
    (2, 1, 1, 2, 1),
    (2, 1, 2, 1, 2),
    (1, 2, 2, 1, 1),
    (3, 1, 1, 1, 3),
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


def three_steps(group, mesh, options, tied, B=5):
    """Train three steps on the mesh and on one device; return what differs on this rank."""
    tokens = generator(0, "hybrid").integers(0, 11, (3, 2, B, 12))
    return steps_of(group, mesh, options, model_for(mesh[-1], tied), tokens)


def translated_steps(group, mesh, options, *_):
    """The same of a Seq2Seq, on three batches of seven examples."""
    case = translator_case(21, 2, 24, HEADS)
    batches = [(case.inputs[i::3], case.targets[i::3]) for i in range(3)]
    return steps_of(group, mesh, options, case.model, batches)


KV_HEADS = {1: 3, 2: 1, 3: 1, 4: 2}  # by tp: some ranks of tp hold the same one


def llama_steps(group, mesh, options, tied, B):
    """The same of a Llama, with experts if there is an axis for them."""
    mixture = {"experts": 4, "capacity": None, "balance": 0.5} if mesh[-1] > 1 else {}
    sizes = {"vocab": 11, "width": 24, "heads": HEADS, "depth": 3, "context": 12, "hidden": 24}
    model = nn.Llama(
        **sizes, kv_heads=KV_HEADS[mesh[3]], seed=3, dtype="float64", tied=tied, **mixture
    )
    tokens = generator(0, "hybrid").integers(0, 11, (3, 2, B, 12))
    return steps_of(group, mesh, options, random_weights(model), tokens)


def steps_of(group, mesh, options, model, batches):
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


def check(ranks, mesh, options, tied, B=5, steps=three_steps):
    found = ranks.run(steps, mesh, options, tied, B)
    for step, rows in enumerate(zip(*(rows for rows, _ in found), strict=True)):
        for comparison, loss, _ in rows:
            assert comparison.ok, str(comparison)
            assert abs(loss) < 1e-12
        norms = [1 + norm for _, _, norm in rows]
        if max(abs(norm - 1) for norm in norms) > 1e-12:
            pytest.fail(f"step {step}, mesh {mesh}: {causes.of_norms(norms, 1.0)}")
    for _, weights in found:
        assert weights.ok, str(weights)


@pytest.mark.parametrize(
    "mesh, options",
    list(zip(SMALL, cycle(SCHEDULES), strict=False)),
    ids=lambda x: x["schedule"] if isinstance(x, dict) else str(x),
)
def test_a_mesh_leaves_the_gradients_and_weights_of_one_device(cluster, mesh, options):
    check(cluster(ranks_of(mesh), "thread"), mesh, options, tied=mesh[1] > 1)


LLAMAS = [
    ((1, 1, 1, 4, 1), {"split_sequence": True}),
    ((1, 2, 1, 2, 1), {"schedule": "zb_h1", "weights_last": True, "recompute": True}),
    ((2, 1, 2, 1, 1), {"zero": 1, "attention": "gathered", "micro_batches": 1}),
    ((1, 1, 2, 2, 1), {"attention": "ulysses"}),
    ((2, 1, 1, 2, 2), {"zero": 1, "micro_batches": 2}),
]


@pytest.mark.parametrize("mesh, options", LLAMAS, ids=str)
def test_a_mesh_leaves_the_gradients_and_weights_of_one_devices_llama(cluster, mesh, options):
    check(cluster(4, "thread"), mesh, options, tied=mesh[1] > 1, steps=llama_steps)


@pytest.mark.slow
@pytest.mark.grid(16)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_mesh_of_a_llama(cluster, mesh):
    options = SCHEDULES[MESHES.index(mesh) % 3]
    check(cluster(ranks_of(mesh), "thread"), mesh, options, tied=False, steps=llama_steps)


TRANSLATED = [
    ((2, 1, 1, 2, 1), {"zero": 1, "micro_batches": 2}),
    ((1, 2, 1, 2, 1), {"recompute": True, "micro_batches": 8}),
    ((2, 2, 1, 1, 1), {"schedule": "zb_h1", "weights_last": True, "zero": 1}),
    ((1, 2, 1, 2, 1), {"schedule": "interleaved", "chunks": 3, "micro_batches": 2}),
]


@pytest.mark.parametrize("mesh, options", TRANSLATED, ids=str)
def test_a_mesh_leaves_the_gradients_and_weights_of_one_devices_seq2seq(cluster, mesh, options):
    check(cluster(4, "thread"), mesh, options, False, steps=translated_steps)


@pytest.mark.slow
@pytest.mark.grid(8)
@pytest.mark.parametrize("mesh", [m for m in MESHES if m[2] == m[4] == 1], ids=str)
def test_every_mesh_of_a_seq2seq(cluster, mesh):
    ranks = cluster(ranks_of(mesh), "thread")
    for more in {}, {"zero": 1, "schedule": "gpipe"}, {"schedule": "zb_h1", "recompute": True}:
        check(ranks, mesh, more, False, steps=translated_steps)


@pytest.mark.parametrize(
    "axes, options, message",
    [
        ({"cp": 2}, {}, r"cuts one sequence, .* a source of 4 positions and .* \(cp=1\)"),
        ({"tp": 2}, {"split_sequence": True}, r"two, of 4 and 5 positions; .*split_sequence=False"),
        ({"dp": 2}, {"ep": 2}, r"ep=2 needs experts; use nn\.Transformer\(..., experts=2\)"),
    ],
)
def test_a_seq2seq_goes_on_dp_pp_and_tp_alone(cluster, axes, options, message):
    def worker(group):
        mesh = Mesh(group, **{"dp": 1, "pp": 1, "tp": 1} | axes)
        Hybrid(translator_case().model, mesh, **options)

    with pytest.raises(RankFailed, match=message) as caught:
        cluster(2, "thread").run(worker)
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize("mesh", [(1, 1, 3, 1, 1), (2, 1, 2, 1, 2)], ids=str)
def test_the_sequence_may_be_cut_plainly(cluster, mesh):
    check(cluster(ranks_of(mesh), "thread"), mesh, {"positions": plain}, tied=True)


@pytest.mark.slow
@pytest.mark.grid(24)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_mesh_of_up_to_eight_ranks(cluster, mesh):
    """Under all sets of options; those of more than four ranks with ZeRO and one of the others."""
    some = [SCHEDULES[1], SCHEDULES[2 * (MESHES.index(mesh) % 2)]]
    for options in SCHEDULES if ranks_of(mesh) <= 4 else some:
        check(cluster(ranks_of(mesh), "thread"), mesh, options, tied=not options.get("zero"))


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


OPTIONS = {
    "recompute": {"recompute": True},
    "recompute with the sequence split": {"recompute": True, "split_sequence": True},
    "recompute and weights last": {"schedule": "zb_h1", "weights_last": True, "recompute": True},
    "zero bubble with the sequence split": {"schedule": "zb_h2", "split_sequence": True},
    "two chunks": {"schedule": "interleaved", "chunks": 2},
    "two chunks with the sequence split": {
        "schedule": "interleaved",
        "chunks": 2,
        "split_sequence": True,
    },
    "a V": {"schedule": "zb_v", "split_sequence": True},
    "a cut of one's own": {"cut": [range(1), range(1, 5)]},
    "a rendezvous": {"rendezvous_safe": True, "schedule": "gpipe"},
    "layer split": {"schedule": "layer_split"},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_schedule_and_option_of_a_pipeline_goes_with_split_matrices(cluster, name):
    transport = "process" if name in ("a V", "a rendezvous") else "thread"
    check(cluster(4, transport), (1, 2, 1, 2, 1), OPTIONS[name], tied=True)


@pytest.mark.parametrize("options", [{}, {"schedule": "zb_v"}], ids=str)
def test_what_is_computed_again_travels_again(cluster, options):
    """Keys and values over cp, rows over ep, and choices."""
    mesh = (2, 2, 2, 1, 2) if options else (2, 1, 2, 1, 2)
    check(cluster(ranks_of(mesh), "thread"), mesh, {"recompute": True, **options}, tied=True)


@pytest.mark.parametrize(
    "mesh, micro_batches, B",
    [
        ((2, 1, 1, 2, 1), 4, 1),  # one data-parallel rank has nothing at all
        ((2, 2, 1, 1, 1), 7, 5),  # of seven micro-batches some are empty
        ((1, 2, 1, 2, 1), 3, 5),
        ((3, 1, 1, 1, 1), 1, 7),
        ((4, 1, 1, 1, 1), 2, 3),
        ((2, 1, 2, 1, 2), 4, 1),
        ((2, 2, 1, 1, 2), 3, 3),
    ],
)
def test_micro_batches_and_shares_may_be_uneven_and_empty(cluster, mesh, micro_batches, B):
    for more in ({}, {"split_sequence": True, "zero": 1}):
        options = {"micro_batches": micro_batches, **more}
        check(cluster(ranks_of(mesh), "thread"), mesh, options, True, B)


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


def build(group, axes, options, heads=4):
    model = nn.Transformer(7, 12, heads, 2, 8)
    return Hybrid(model, Mesh(group, **axes), **options)


WRONG = [
    ({"dp": 2, "pp": 2, "tp": 2}, {}, "dp=2 x pp=2 x tp=2 does not make 4 ranks"),
    ({"dp": 4, "pp": 0, "tp": 1}, {}, "dp=4 x pp=0 x tp=1 does not make 4 ranks"),
    ({"dp": 2, "pp": 2}, {}, "the mesh has no axis tp; give it size 1"),
    ({"pp": 1, "tp": 4}, {}, "the mesh has no axis dp; give it size 1"),
    ({"dp": 1, "pp": 1, "tp": 4}, {}, "cannot split 6 heads over 4 ranks; use a multiple of 4"),
    ({"dp": 1, "pp": 4, "tp": 1}, {"chunks": 2}, "1f1b has at most 1 chunk per rank, not 2"),
    (
        {"dp": 1, "pp": 4, "tp": 1},
        {"chunks": 2, "schedule": "interleaved"},
        "cannot cut 4 layers into 8 stages; use at most 4",
    ),
    ({"dp": 1, "pp": 2, "tp": 2}, {"schedule": "magic"}, "unknown schedule 'magic'; choose one of"),
    ({"dp": 1, "pp": 2, "tp": 2}, {"schedule": "pipedream"}, "pipedream updates the weights"),
    ({"dp": 1, "pp": 2, "tp": 2}, {"schedule": "pipedream_2bw"}, "2bw updates the weights"),
    ({"dp": 1, "pp": 2, "tp": 2}, {"micro_batches": 0}, "one or more micro-batches, not 0"),
    ({"dp": 1, "pp": 1, "ep": 2, "tp": 2}, {}, "Hybrid has no axis ep; make the mesh of dp, pp"),
    ({"dp": 4, "pp": 1, "tp": 1}, {"ep": 3}, "ep=3 does not divide dp=4; use a divisor of it"),
    ({"dp": 4, "pp": 1, "tp": 1}, {"ep": 0}, "ep=0 does not divide dp=4; use a divisor of it"),
    ({"dp": 4, "pp": 1, "tp": 1}, {"ep": 2}, "ep=2 needs experts; use nn.Transformer"),
    ({"dp": 4, "pp": 1, "tp": 1}, {"zero": 4}, "the stages 1, 2 and 3, and 0 is none, not 4"),
    ({"dp": 1, "pp": 1, "cp": 4, "tp": 1}, {"attention": "magic"}, "unknown attention 'magic'"),
    ({"dp": 1, "pp": 1, "cp": 4, "tp": 1}, {"ulysses": 3}, "4 ranks are not cut into groups of 3"),
    (
        {"dp": 1, "pp": 1, "cp": 2, "tp": 2},
        {"split_sequence": True},
        "cp=2 cuts the sequence already; leave out split_sequence, or use cp=1",
    ),
]


@pytest.mark.parametrize("axes, options, message", WRONG)
def test_wrong_meshes_and_options_are_refused_with_the_numbers(cluster, axes, options, message):
    with pytest.raises(RankFailed, match=message) as caught:
        cluster(4, "thread").run(build, axes, options, 6)
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_second_batch_on_top_of_summed_gradients_is_refused(cluster):
    """Summed over two ranks once more, they would come to three batches' gradient, not two's."""

    def worker(group):
        hybrid = build(group, {"dp": 2, "pp": 1, "tp": 1}, {})
        optimizer = optim.SGD(hybrid.parameters(), lr=0.0)
        batch = np.zeros((2, 4, 8), int)
        for _ in range(2):
            hybrid.backward(Batch(*batch))
            optimizer.zero_grad()
        hybrid.backward(Batch(*batch))
        with pytest.raises(ValueError, match="would be summed again; call zero_grad"):
            hybrid.backward(Batch(*batch))

    cluster(2, "thread").run(worker)
