"""Watch a rank at work: what enters its layers, which products it computes, what its arrays hold.

Layers and stages get a `forward` that notes and then does what theirs did; graphs are looked into
before backward frees them. `measured.py` has a step of every strategy to be watched.
"""

from collections.abc import Iterable
from functools import partial

import numpy as np

from minidist import nn
from minidist.autograd import Function, Tensor, functions_below
from minidist.backend import Array
from minidist.comm import Group
from minidist.pipeline_parallel.partition import multiply_adds
from minidist.pipeline_parallel.stage import Stage
from minidist.tensor_parallel.sequence_parallel import GatheredLinear
from minidist.tools.activations import arrays, owner


class Watch:
    """What a rank has been seen to do.

    entered  {layer: [(examples, positions), ...]}, per time that something entered
    work     multiply-adds so far
    peak     bytes of floats that graphs have held at most, without parameters
    kept     {what: arrays} that stay from step to step
    sent     bytes that others have taken
    """

    def __init__(self):
        self.entered, self.work, self.peak = {}, 0, 0
        self.kept, self.sent = {}, 0

    def layers(self, layers: Iterable[nn.Module]) -> None:
        """Note from now on what enters these layers."""
        for layer in layers:
            layer.forward = partial(self._forward, layer, layer.forward)

    def _forward(self, layer, forward, x, randomness=None):
        data = x.data if isinstance(x, Tensor) else x
        positions = data.shape[1] if data.ndim == 3 or data.dtype.kind in "iu" else 1
        self.entered.setdefault(id(layer), []).append((len(data), positions))
        return forward(x, randomness)

    def graph(self, y: Tensor, others: Iterable = (), parameters: Iterable[Array] = ()) -> Tensor:
        """Note the products below y, a new result, and what y's graph and others hold; return y."""
        self.work += sum(map(_products, functions_below(y)))
        self.peak = max(self.peak, graph_bytes([y, *others], parameters))
        return y

    def stages(self, stages: list[Stage], model: nn.Module) -> None:
        """Note what enters the layers of a pipeline's rank, and each pass that is in flight."""
        for stage in stages:
            self.layers(stage.layers)
            stage.forward = partial(self._pass, stage, stage.forward, stages, model)

    def _pass(self, stage, forward, stages, model, i):
        forward(i)
        flight = [x for s in stages for x in (*s.outputs.values(), *s.put_off.values())]
        weights = [p.data for p in model.parameters()]
        if hasattr(stage, "weights"):
            weights += [version.weights for version in stage.weights.in_flight.values()]
        self.graph(stage.outputs[i], flight, weights)

    def sends(self, *groups: Group | None) -> None:
        """Note what others have taken from this rank through these groups."""
        self.sent = sum(g.ledger.total for g in groups if g is not None)

    def holds(self, homes: Iterable, optimizer=None, parameters=(), gradients=()) -> None:
        """Note what stays: these flat vectors, an optimizer's state, and arrays besides."""
        homes = list(dict.fromkeys(homes))
        state = [] if optimizer is None else optimizer.state
        self.kept = {
            "parameters": [*(home.vector for home in homes), *parameters],
            "gradients": [*(home.gradient for home in homes), *gradients],
            "optimizer state": [array for arrays in state for array in arrays],
        }


def _products(function: Function) -> int:
    match function:
        case GatheredLinear(result_shape=shape, x=x):
            return int(np.prod(shape)) * x.shape[-1]
    return multiply_adds(function)


def graph_bytes(things: Iterable, parameters: Iterable[Array]) -> int:
    """Return the bytes of floats that backward from tensors, and what is put off, will read.

    Every buffer counts once and whole; parameters do not count. Unlike in `kept`, what a stage has
    received does: nobody else holds it.
    """
    saved, found = [], {}
    for thing in things:
        if isinstance(thing, Tensor):
            for function in functions_below(thing):
                saved += [value for key, value in vars(function).items() if key != "inputs"]
        else:
            saved += [deferred.contribution for deferred in thing]
    for array in map(owner, arrays(saved)):
        if array.dtype.kind == "f":
            found[id(array)] = array.nbytes
    for weight in parameters:
        found.pop(id(owner(weight)), None)
    return sum(found.values())


def bytes_of(arrays: Iterable[Array]) -> int:
    """Return the bytes of the union: what is a view of another array does not count again."""
    total = reached = 0
    for start, nbytes in sorted((a.ctypes.data, a.nbytes) for a in arrays):
        total += max(0, start + nbytes - max(start, reached))
        reached = max(reached, start + nbytes)
    return total
