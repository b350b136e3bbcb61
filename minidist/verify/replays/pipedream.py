"""Reference of asynchronous pipelines: one rank replays a training with the recorded versions.

It has no pipeline: minibatch after minibatch it takes, per stage, the weights of the recorded
version, computes forward and backward, and applies the gradients to the newest weights. The weights
of a pipeline with weight stashing must equal the replay's bit for bit. So run it as a rank, with
the same share of the cores and the same shapes.
"""

import copy
from collections.abc import Callable

import numpy as np

from minidist import nn
from minidist.autograd import Tensor
from minidist.nn.datasets import Batch
from minidist.nn.flat_parameters import FlatParameters


def replay(
    model: nn.Sequential,
    cut: list[range],
    minibatches: list[Batch],
    versions: list[dict[int, int]],
    updates: list[list[int]],
    optimizer: Callable,
    loss: Callable = nn.cross_entropy,
) -> dict[str, np.ndarray]:
    """Return the weights after all minibatches, by name; the model does not change.

    cut          layers per stage
    versions     per stage, {minibatch: the version that its forward and backward use}
    updates      per stage, the minibatches after whose backward the stage updates
    optimizer    parameters -> Optimizer
    """
    model = copy.deepcopy(model)
    stages = [[model.layers[i] for i in part] for part in cut]
    flats = [FlatParameters(_parameters(layers)) for layers in stages]
    optimizers = [optimizer(flat.parameters) for flat in flats]
    history = [[flat.vector.copy()] for flat in flats]
    for b, minibatch in enumerate(minibatches):
        for flat, old, version in zip(flats, history, versions, strict=True):
            flat.bind(old[version[b]])
        _forward_backward(stages, minibatch, loss)
        for flat, old, at, rule in zip(flats, history, updates, optimizers, strict=True):
            if b in at:
                flat.bind(old[-1].copy())
                rule.step()
                rule.zero_grad()
                old.append(flat.vector)
    for flat, old in zip(flats, history, strict=True):
        flat.bind(old[-1])
    return model.state()


def _forward_backward(stages: list[list[nn.Module]], minibatch: Batch, loss: Callable) -> None:
    """Compute the gradients; put a leaf between stages, as where the activation is a message."""
    x, ends = minibatch.inputs, list[tuple]()
    for layers in stages:
        begin = x if not ends else Tensor(x.data, requires_grad=True)
        x = begin if isinstance(begin, Tensor) or begin.dtype.kind in "iu" else Tensor(begin)
        for layer in layers:
            x = layer(x, minibatch.randomness)
        ends.append((begin, x))
    grad = None
    ends[-1] = ends[-1][0], loss(x, minibatch.targets, reduction_size=minibatch.total)
    for begin, end in reversed(ends):
        if end.requires_grad:  # else everything so far is frozen
            end.backward(grad)
        grad = begin.grad if isinstance(begin, Tensor) else None


def _parameters(layers: list[nn.Module]) -> list[nn.Parameter]:
    once = dict.fromkeys(p for layer in layers for p in layer.parameters())  # some may be tied
    return [p for p in once if p.requires_grad]
