"""What a certificate sets up by itself, and a program may forget: a trainer follows or refuses."""

import numpy as np
import pytest

from minidist import nn
from minidist.data_parallel.naive import all_reduce_gradients
from minidist.datasets import Batch
from minidist.errors import RankFailed
from minidist.mixed_precision import LossScale, MixedPrecision
from minidist.pipeline_parallel import Pipeline
from minidist.rng import Randomness
from minidist.trainer import loss_of
from tests.hybrid.trainers import TOKENS, TRAINERS, on_mesh, refused, sgd, transformer
from tests.strategies import gradients


@pytest.mark.parametrize("name", TRAINERS)
def test_a_batch_without_the_optimizers_loss_scale_is_refused(cluster, name):
    """Its gradient would be divided by a scale that it never had."""
    make, size = TRAINERS[name]

    def worker(group):
        trainer = make(transformer(), group)
        optimizer = MixedPrecision(sgd(trainer.parameters()), group, LossScale(4.0))
        words = refused(trainer.backward, Batch(TOKENS, TOKENS))
        trainer.backward(Batch(TOKENS, TOKENS, loss_scale=optimizer.loss_scale))
        trainer.step(optimizer)
        return words

    for words in cluster(size, "thread").run(worker):
        assert "divides gradients by its loss scale 4.0" in words


class Doubled(nn.Sequential):
    """A model with a loss of its own."""

    def loss(self, outputs, targets, reduction_size=None):
        return 2 * nn.cross_entropy(outputs, targets, reduction_size)


def test_a_pipeline_takes_the_models_own_loss_and_a_mesh_refuses_it(cluster):
    def worker(group):
        pipe = Pipeline(Doubled(transformer().layers), group)
        pipe.backward(Batch(TOKENS, TOKENS))
        return gradients(pipe.model)

    whole = Doubled(transformer().layers)
    loss_of(whole, Batch(TOKENS, TOKENS)).backward()
    for found in cluster(2, "thread").run(worker):
        for name, g in found.items():
            np.testing.assert_allclose(g, gradients(whole)[name], rtol=1e-9, atol=1e-12)
    with pytest.raises(RankFailed, match="the loss of a Doubled is its own"):
        cluster(1, "thread").run(lambda group: on_mesh(Doubled(transformer().layers), group))


@pytest.mark.parametrize("batch", [4, None])
def test_a_balancing_loss_of_a_part_is_not_summed_as_if_it_were_of_the_batch(cluster, batch):
    def worker(group):
        model, mine = transformer(experts=3), np.arange(4)[group.rank :: 2]
        logits = model(TOKENS[mine], Randomness(0, 0, mine, batch))
        nn.cross_entropy(logits, TOKENS[mine], TOKENS.size).backward()
        return refused(all_reduce_gradients, model, group)

    for words in cluster(2, "thread").run(worker):
        assert (words is None) if batch else "has a part of the batch" in words
