"""What a certificate sets up by itself, and a program may forget: a trainer follows or refuses."""

import numpy as np
import pytest

from minidist import nn
from minidist.data_parallel.naive import all_reduce_gradients
from minidist.data_parallel.replicated import DataParallel
from minidist.nn.datasets import Batch
from minidist.parallel.mixed_precision import LossScale, MixedPrecision
from minidist.rng import Randomness
from tests.hybrid.trainers import TOKENS, TRAINERS, refused, sgd, transformer


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


@pytest.mark.parametrize("batch", [4, None])
def test_a_balancing_loss_of_a_part_is_not_summed_as_if_it_were_of_the_batch(cluster, batch):
    def worker(group):
        model, mine = transformer(experts=3), np.arange(4)[group.rank :: 2]
        logits = model(TOKENS[mine], Randomness(0, 0, mine, batch))
        nn.cross_entropy(logits, TOKENS[mine], TOKENS.size).backward()
        return refused(all_reduce_gradients, model, group)

    for words in cluster(2, "thread").run(worker):
        assert (words is None) if batch else "has a part of the batch" in words


def test_a_layer_put_in_after_the_trainer_was_made_is_what_trains(cluster):
    def worker(group):
        model = nn.MLP([4, 3], dtype="float64").flatten()
        trainer = DataParallel(model, group)
        model.layers[-1] = nn.Linear(4, 3, name="new", dtype="float64")
        model.flatten()
        optimizer, before = sgd(trainer.parameters()), model.state()
        trainer.backward(Batch(np.ones((2, 4)), np.array([0, 1])))
        trainer.step(optimizer)
        return [np.array_equal(before[name], array) for name, array in model.state().items()]

    assert cluster(2, "thread").run(worker) == [[False, False]] * 2
