"""Data x pipeline x tensor on a mesh: gradients, clipping and weights equal one device's."""

import copy
import os
import signal
from itertools import product

import numpy as np
import pytest

from minidist import Cluster, Mesh, nn, optim
from minidist.errors import RankDied, RankFailed
from minidist.hybrid import Hybrid
from minidist.pipeline_parallel.stage import Stage
from minidist.rng import Randomness, generator
from minidist.tools.causes import cause_of
from minidist.tools.compare import compare
from minidist.tools.strategies.cases import random_weights
from tests.comm.test_cluster import gone

SCHEDULES = [
    {"schedule": "1f1b"},
    {"schedule": "gpipe", "split_sequence": True},
    {"schedule": "zb_h1", "weights_last": True},
]
MESHES = [
    (dp, pp, tp)
    for dp, pp, tp in product(range(1, 9), repeat=3)
    if dp * pp * tp <= 8 and pp <= 5 and tp in (1, 2, 3, 4)
]
SMALL = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (1, 2, 2), (2, 1, 2), (1, 3, 1)]


def three_steps(group, mesh, options, tied, B=5):
    """Train three steps on the mesh and on one device; return what differs on this rank."""
    dp, pp, tp = mesh
    tokens = generator(0, "hybrid").integers(0, 11, (3, 2, B, 12))
    model = nn.Transformer(11, 24, 12, 3, 12, 3, "float64", dropout=0.2, tied=tied)
    random_weights(model)
    hybrid = Hybrid(copy.deepcopy(model), Mesh(group, dp=dp, pp=pp, tp=tp), **options)
    ours = optim.AdamW(hybrid.parameters(), lr=1e-2, weight_decay=0.1)
    theirs = optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    rows = []
    for step, (inputs, targets) in enumerate(tokens):
        loss = hybrid.backward(inputs, targets, seed=7, step=step)
        want = nn.cross_entropy(model(inputs, Randomness(7, step, np.arange(B))), targets)
        want.backward()
        got = hybrid.whole({name: p.grad for name, p in hybrid.named_parameters().items()})
        comparison = compare([got], {n: p.grad for n, p in model.named_parameters().items()})
        norms = ours.clip_global_norm(0.1, hybrid.sum_squares), theirs.clip_global_norm(0.1)
        rows.append((comparison, loss - want.item(), norms[0] / norms[1] - 1))
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    return rows, compare([hybrid.state()], model.state())


def check(ranks, mesh, options, tied, B=5):
    found = ranks.run(three_steps, mesh, options, tied, B)
    for step, rows in enumerate(zip(*(rows for rows, _ in found), strict=True)):
        for comparison, loss, _ in rows:
            assert comparison.ok, str(comparison)
            assert abs(loss) < 1e-12
        norms = [1 + norm for _, _, norm in rows]
        if max(abs(norm - 1) for norm in norms) > 1e-12:
            pytest.fail(f"step {step}, mesh {mesh}: {cause_of.norms(norms, 1.0)}")
    for _, weights in found:
        assert weights.ok, str(weights)


@pytest.mark.parametrize("options", SCHEDULES, ids=lambda o: o["schedule"])
@pytest.mark.parametrize("mesh", SMALL, ids=str)
def test_a_mesh_leaves_the_gradients_and_weights_of_one_device(cluster, mesh, options):
    check(cluster(int(np.prod(mesh))), mesh, options, tied=mesh[1] > 1)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("options", SCHEDULES, ids=lambda o: o["schedule"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_mesh_of_up_to_eight_ranks(cluster, mesh, options, tied):
    check(cluster(int(np.prod(mesh))), mesh, options, tied)


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
    check(cluster(4), (1, 2, 2), OPTIONS[name], tied=True)


@pytest.mark.parametrize(
    "mesh, micro_batches, B",
    [
        ((2, 1, 2), 4, 1),  # one data-parallel rank has nothing at all
        ((2, 2, 1), 7, 5),  # of seven micro-batches some are empty
        ((1, 2, 2), 3, 5),
        ((3, 1, 1), 1, 7),
        ((4, 1, 1), 2, 3),
    ],
)
def test_micro_batches_and_shares_may_be_uneven_and_empty(cluster, mesh, micro_batches, B):
    for split_sequence in (False, True):
        options = {"micro_batches": micro_batches, "split_sequence": split_sequence}
        check(cluster(int(np.prod(mesh))), mesh, options, True, B)


def test_an_axis_of_size_one_runs_the_same_code_and_moves_nothing(cluster):
    def worker(group, mesh):
        mesh = Mesh(group, **mesh)
        hybrid = Hybrid(nn.Transformer(7, 8, 4, 2, 8, dtype="float64"), mesh, split_sequence=True)
        hybrid.backward(np.ones((3, 8), int), np.ones((3, 8), int))
        hybrid.sum_squares()
        hybrid.state()
        moved = {name: getattr(mesh, name).ledger.total > 0 for name in mesh.axes}
        kinds = [type(layer).__name__ for layer in hybrid.pipeline.model.layers]
        return moved, kinds

    (moved, kinds), *_ = cluster(1).run(worker, {"dp": 1, "pp": 1, "tp": 1})
    assert moved == {"dp": False, "pp": False, "tp": False}
    assert kinds == ["ParallelEmbedding", "Block", "Block", "VocabParallelHead"]
    for axis in moved:
        mesh = {"dp": 1, "pp": 1, "tp": 1} | {axis: 2}
        for found, _ in cluster(2).run(worker, mesh):
            assert found == {name: name == axis for name in mesh}


@pytest.mark.parametrize("mesh", [(1, 1, 1), (1, 2, 2), (2, 1, 3), (1, 4, 1)])
@pytest.mark.parametrize("tied", [False, True])
def test_state_is_the_single_device_state_in_its_order(cluster, mesh, tied):
    def worker(group):
        model = random_weights(nn.Transformer(11, 24, 12, 3, 12, dtype="float64", tied=tied))
        want = model.state()
        dp, pp, tp = mesh
        got = Hybrid(model, Mesh(group, dp=dp, pp=pp, tp=tp)).state()
        return list(got) == list(want) and all(np.array_equal(got[n], want[n]) for n in want)

    ranks = int(np.prod(mesh))
    assert cluster(ranks).run(worker) == [True] * ranks


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
]


@pytest.mark.parametrize("axes, options, message", WRONG)
def test_wrong_meshes_and_options_are_refused_with_the_numbers(cluster, axes, options, message):
    with pytest.raises(RankFailed, match=message) as caught:
        cluster(4, "thread").run(build, axes, options, 6)
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize("lengths", [(4, 6, 4), (4, 4, 6), (4, 4, 3), (6, 4, 4)])
def test_inputs_targets_and_examples_of_different_numbers_are_refused(cluster, lengths):
    """A batch that is dealt to ranks would otherwise lose what is too much."""

    def worker(group):
        hybrid = build(group, {"dp": 2, "pp": 1, "tp": 1}, {})
        inputs, targets = (np.zeros((n, 8), int) for n in lengths[:2])
        hybrid.backward(inputs, targets, examples=np.arange(lengths[2]))

    message = "they must agree" if lengths[0] != lengths[1] else "give one number per input"
    with pytest.raises(RankFailed, match=message) as caught:
        cluster(2, "thread").run(worker)
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_second_batch_on_top_of_summed_gradients_is_refused(cluster):
    """Summed over two ranks once more, they would come to three batches' gradient, not two's."""

    def worker(group):
        hybrid = build(group, {"dp": 2, "pp": 1, "tp": 1}, {})
        optimizer = optim.SGD(hybrid.parameters(), lr=0.0)
        batch = np.zeros((2, 4, 8), int)
        for _ in range(2):
            hybrid.backward(*batch)
            optimizer.zero_grad()
        hybrid.backward(*batch)
        with pytest.raises(ValueError, match="would be summed again; call zero_grad"):
            hybrid.backward(*batch)

    cluster(2, "thread").run(worker)


def test_a_sequence_that_does_not_split_is_refused_with_the_numbers(cluster):
    def worker(group):
        hybrid = build(group, {"dp": 1, "pp": 1, "tp": 2}, {"split_sequence": True})
        hybrid.backward(np.zeros((2, 5), int), np.zeros((2, 5), int))

    with pytest.raises(RankFailed, match="a sequence of 5 positions over 2 ranks; use a multiple"):
        cluster(2, "thread").run(worker)


def test_a_rank_that_is_killed_in_the_middle_is_one_error_and_leaves_nothing():
    """Its neighbours on the mesh wait for it in collectives and messages; they stop, too."""

    def worker(group, phase, time):
        if group.rank == 2:
            sound, calls = getattr(Stage, phase), []

            def die(stage, *arguments):
                calls.append(1)
                if len(calls) == time:
                    os.kill(os.getpid(), signal.SIGKILL)
                sound(stage, *arguments)

            setattr(Stage, phase, die)
        options = {"schedule": "zb_h1", "split_sequence": True, "recompute": True}
        hybrid = build(group, {"dp": 1, "pp": 2, "tp": 2}, options)
        hybrid.backward(np.zeros((8, 8), int), np.zeros((8, 8), int))

    with Cluster(4) as ranks:
        for phase, time in ("forward", 3), ("backward_input", 2), ("backward_weights", 1):
            pids = ranks.run(lambda group: os.getpid())
            with pytest.raises(RankDied, match=r"rank 2 died .*killed by SIGKILL"):
                ranks.run(worker, phase, time)
            assert gone(pids, within=2)
        assert ranks.run(lambda group: group.size) == [4] * 4
