"""ZeRO's stages 2 and 3 on a mesh: one device's weights, refusals."""

import numpy as np
import pytest

from minidist import Mesh, nn, optim
from minidist.backend import address
from minidist.errors import RankFailed
from minidist.hybrid import Hybrid
from minidist.nn.datasets import Batch
from minidist.rng import generator
from tests.hybrid.test_hybrid import MESHES, check, ranks_of, translated_steps

STAGES = [2, 3]
each_stage = pytest.mark.parametrize("stage", STAGES)
SMALL = {
    "one rank": ((1, 1, 1, 1, 1), {}),
    "3 micro-batches": ((2, 1, 1, 1, 1), {"micro_batches": 3}),
    "gpipe": ((2, 2, 1, 1, 1), {"schedule": "gpipe"}),
    "two chunks": ((2, 2, 1, 1, 1), {"schedule": "interleaved", "chunks": 2}),
    "breadth first": ((2, 1, 1, 2, 1), {"schedule": "looped_bfs", "chunks": 2}),
    "experts and context": ((2, 1, 2, 1, 2), {}),
    "ranks without experts": ((3, 1, 1, 1, 3), {}),
    "copies of 2": ((4, 1, 1, 1, 1), {"shards": 2}),
    "copies over context": ((2, 1, 2, 1, 1), {"shards": 2, "attention": "ulysses"}),
    "whole copies": ((1, 2, 2, 1, 1), {"shards": 1}),
}


@each_stage
@pytest.mark.parametrize("mesh, options", SMALL.values(), ids=SMALL)
def test_a_mesh_leaves_the_gradients_norms_and_weights_of_one_device(cluster, mesh, options, stage):
    check(cluster(ranks_of(mesh), "thread"), mesh, options | {"zero": stage}, tied=False)


@pytest.mark.slow
@pytest.mark.grid(24)
@each_stage
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_mesh_of_up_to_eight_ranks(cluster, mesh, stage):
    dp, pp, cp, _, ep = mesh
    every = [{}, {"schedule": "gpipe", "micro_batches": 2}]
    every += [{"shards": k * cp} for k in range(1, dp) if dp % k == 0 and ep == 1]
    if pp > 1 and 2 * pp <= 5:
        every.append({"schedule": "interleaved", "chunks": 2, "micro_batches": 2 * pp})
    for options in every:
        check(cluster(ranks_of(mesh), "thread"), mesh, options | {"zero": stage}, tied=False)


@each_stage
def test_a_seq2seq_is_sharded_too(cluster, stage):
    options = {"zero": stage, "micro_batches": 2}
    check(cluster(4, "thread"), (2, 2, 1, 1, 1), options, False, steps=translated_steps)


@each_stage
@pytest.mark.parametrize("mesh, m, B", [((2, 1, 1, 2, 1), 4, 1), ((2, 2, 1, 1, 1), 7, 5)])
def test_micro_batches_and_shares_may_be_uneven_and_empty(cluster, stage, mesh, m, B):
    options = {"zero": stage, "micro_batches": m}
    check(cluster(ranks_of(mesh), "thread"), mesh, options, False, B)


def model():
    return nn.Transformer(7, 12, 4, 2, 8, dtype="float64")


def batch():
    return Batch(*generator(0, "mesh").integers(0, 7, (2, 4, 8)))


def trained(hybrid):
    """Take two steps; return the weights."""
    optimizer = optim.SGD(hybrid.parameters(), 0.5, momentum=0.9)
    for _ in range(2):
        hybrid.backward(batch())
        hybrid.step(optimizer)
    return hybrid.state()


@pytest.mark.parametrize("options", [{"zero": 3}, {"zero": 2}, {"zero": 3, "shards": 1}], ids=str)
def test_what_is_loaded_is_what_is_trained_on(cluster, options):
    """From other weights, after a step of which nothing may be left."""

    def worker(group, options):
        mesh = Mesh(group, dp=2, pp=2, tp=1)
        want = trained(Hybrid(model(), mesh))
        other = model()
        for p in other.parameters():
            p.data *= 3
        sharded = Hybrid(other, mesh, **options)
        trained(sharded)
        sharded.load_state(model().state())
        same = all(np.array_equal(w, sharded.state()[n]) for n, w in model().state().items())
        return same, want, trained(sharded)

    for same, want, found in cluster(4, "thread").run(worker, options):
        assert same
        for name, weights in want.items():
            np.testing.assert_allclose(found[name], weights, 1e-9, 1e-12)


def test_stage_3_has_the_weights_of_two_layers_and_its_shards_alone(cluster):
    """Of six layers the vectors are in two places, and a model's state is not there."""

    def worker(group):
        hybrid = Hybrid(
            nn.Transformer(7, 12, 4, 4, 8, dtype="float64"), Mesh(group, dp=2, pp=1, tp=1), zero=3
        )
        layers = hybrid.pipeline.model.layers
        with pytest.raises(ValueError, match=r"keeps its shard of it; use .*hybrid"):
            hybrid.pipeline.model.state()
        return len(layers), {address(layer.home.vector) for layer in layers}

    for layers, places in cluster(2, "thread").run(worker):
        assert (layers, len(places)) == (6, 2)


WRONG = [
    ({"zero": 4}, {}, "ZeRO has the stages 1, 2 and 3, and 0 is none, not 4"),
    ({"zero": 2, "split_sequence": True}, {}, "would also sum partial gradients over tp"),
    ({"zero": 3, "recompute": True}, {}, "at once, and zero=3 keeps one layer's; use zero=1"),
    ({"zero": 2}, {"tied": True}, "'embedding.token.weight' belongs to several layers"),
    ({"zero": 2, "schedule": "zb_h1"}, {}, "and this schedule computes it later; use zero=1"),
    ({"shards": 2}, {}, "shards=2 cuts what ZeRO shares among fewer ranks"),
    ({"zero": 1, "shards": 3}, {}, "groups of 3 shards do not make up 2 ranks; use a divisor of 2"),
    ({"zero": 3, "shards": 2, "ep": 2}, {"experts": 2}, "experts over ep=2 have fewer already"),
]


@pytest.mark.parametrize("options, kind, message", WRONG, ids=[m for *_, m in WRONG])
def test_what_does_not_go_together_is_refused_with_a_remedy(cluster, options, kind, message):
    def worker(group, options, kind):
        mesh = Mesh(group, dp=2, pp=1, tp=2)
        Hybrid(nn.Transformer(7, 12, 4, 2, 8, dtype="float64", **kind), mesh, **options)

    with pytest.raises(RankFailed, match=message) as caught:
        cluster(4, "thread").run(worker, options, kind)
    assert isinstance(caught.value.__cause__, ValueError)


@each_stage
def test_a_second_batch_on_top_of_shards_that_are_summed_is_refused(cluster, stage):
    def worker(group, stage):
        hybrid = Hybrid(model(), Mesh(group, dp=2, pp=1, tp=1), zero=stage)
        hybrid.backward(batch())
        with pytest.raises(ValueError, match="would be summed again; call zero_grad"):
            hybrid.backward(batch())

    cluster(2, "thread").run(worker, stage)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_copies_are_summed_once_whatever_the_micro_batches(cluster, stage):
    def worker(group, stage):
        mesh = Mesh(group, dp=4, pp=1, tp=1)
        hybrid = Hybrid(model(), mesh, micro_batches=4, zero=stage, shards=2)
        hybrid.backward(batch())
        (between,) = hybrid.copies.between.values()
        return between.ledger.total

    found = cluster(4, "thread").run(worker, stage)
    assert sum(found) == 2 * sum(p.data.nbytes for p in model().parameters())
