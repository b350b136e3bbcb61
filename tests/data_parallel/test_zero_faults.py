"""Mistakes of ZeRO: each must show in the weights after some steps, or in the bytes it holds."""

from contextlib import nullcontext

import pytest

from minidist.planning.costs.data_parallel import zero_bytes_held
from minidist.tools.compare import compare
from tests.data_parallel.test_zero import STAGES, each_stage, trained, transformer
from tests.planted import planted

MISTAKES = {
    "backward_with_another_layers_weights": [3],
    "zero_local_norm": STAGES,
    "last_micro_batch_only": [2, 3],
    "first_shard_everywhere": STAGES,
    "weights_not_gathered": [1, 2],
}


@pytest.mark.parametrize("name, stage", [(m, s) for m, stages in MISTAKES.items() for s in stages])
def test_a_mistake_shows_in_the_weights(cluster, name, stage):
    want = trained(cluster(1, "thread"), 0, transformer())[0][0]
    for context, ok in [(nullcontext(), True), (planted(name), False)]:
        with context:
            found = trained(cluster(2, "thread"), stage, transformer(), micro_batches=2)
        comparison = compare([weights for weights, _ in found], want)
        assert comparison.ok == ok, comparison
    assert comparison.error > 1e-6


@each_stage
def test_an_optimizer_that_is_not_cut_shows_in_the_bytes_alone(cluster, stage):
    sizes = [layer.flat.size for layer in transformer().layers]
    want = trained(cluster(1, "thread"), 0, transformer())[0][0]
    for context, counted in [(nullcontext(), stage), (planted("optimizer_not_sharded"), 0)]:
        with context:
            found = trained(cluster(4, "thread"), stage, transformer())
        assert compare([weights for weights, _ in found], want).ok
        for rank, (_, held) in enumerate(found):
            assert held == 2 * zero_bytes_held(counted, sizes, 4, rank)["optimizer state"]
