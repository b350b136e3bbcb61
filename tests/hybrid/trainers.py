"""Every Trainer, with the number of ranks that it needs: the rows of the tables in this folder."""

from functools import partial

import numpy as np

from minidist import Mesh, nn, optim
from minidist.data_parallel.replicated import DataParallel
from minidist.data_parallel.zero import Zero
from minidist.hybrid import Hybrid
from minidist.nn.datasets import Batch
from minidist.pipeline_parallel import Pipeline

TOKENS = np.arange(16).reshape(4, 4) % 7
STAGES = [1, 2, 3]


def transformer(seed=0, **more):
    return nn.Transformer(7, 8, 2, 2, 4, seed, dtype="float64", **more)


def sgd(parameters):
    return optim.SGD(parameters, 0.5)


def zero(model, group, stage, **more):
    return Zero(model.flatten(group.empty), group, stage, **more)


def on_mesh(model, group, dp=1, pp=1, tp=1, cp=1, **more):
    return Hybrid(model, Mesh(group, dp=dp, pp=pp, cp=cp, tp=tp), **more)


TRAINERS = {  # name: how it is made of (model, group), and the ranks
    "naive": (DataParallel, 2),
    **{f"zero_{stage}": (partial(zero, stage=stage), 2) for stage in STAGES},
    "1f1b": (Pipeline, 2),
    "zb_v": (partial(Pipeline, schedule="zb_v", chunks=2), 2),
    "hybrid": (partial(on_mesh, pp=2, tp=2), 4),
    "hybrid, ZeRO": (partial(on_mesh, dp=2, cp=2, zero=1), 4),
    "hybrid, ZeRO 2": (partial(on_mesh, dp=2, cp=2, zero=2, shards=2), 4),
    "hybrid, ZeRO 3": (partial(on_mesh, dp=2, pp=2, zero=3), 4),
}


def step(trainer, optimizer=None, batch=None):
    """Take one step, by default of gradient descent on TOKENS; return the loss."""
    loss = trainer.backward(batch or Batch(TOKENS, TOKENS))
    trainer.step(optimizer or sgd(trainer.parameters()))
    return loss


def refused(call, *arguments):
    """Return what a ValueError says, or None if there is none."""
    try:
        call(*arguments)
    except ValueError as error:
        return str(error)
    return None


def same(state, other):
    return all(np.array_equal(state[name], other[name]) for name in other)
