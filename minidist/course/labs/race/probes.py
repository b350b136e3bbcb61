"""What the race asks of a student's code; it runs beside that code, and judges nothing."""

import numpy as np

from minidist import nn
from minidist.course.labs.ranks import on_ranks
from minidist.nn.datasets import Batch
from minidist.pipeline_parallel import Pipeline
from minidist.pipeline_parallel.zb_auto import zb_auto

SIGNS = "FIWB"


def order(**problem):
    """Return each rank's actions as rows [which of SIGNS, micro-batch]."""
    made = [[(SIGNS.index(a.sign), a.micro_batch) for a in own] for own in zb_auto(**problem)]
    return {
        f"the program on rank {r}": np.array(own, np.int64).reshape(-1, 2)
        for r, own in enumerate(made)
    }


def gradients(sizes, state, inputs, targets, **problem):
    """Return per rank the gradients of a model that is trained in this order, and the loss."""
    made = zb_auto(**problem)

    def train(group):
        model = nn.MLP(sizes, "gelu", dtype="float64")
        model.load_state(state)
        pipeline = Pipeline(model, group, made)
        loss = pipeline.backward(Batch(inputs, targets))
        return {p.name: p.grad for p in pipeline.parameters()} | {"the loss": np.array(loss)}

    return on_ranks(train, problem["p"])
