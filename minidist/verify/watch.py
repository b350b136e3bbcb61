"""Watch a rank at work: what enters its layers, which products it computes, what its arrays hold.

Layers are wrapped in modules that record what enters them; graphs are inspected before backward
frees them. The step that is watched is in strategies/job.py.
"""

from collections.abc import Callable, Iterable
from functools import partial

import numpy as np

from minidist import nn, optim
from minidist.autograd import Function, Tensor, functions_below
from minidist.autograd.recomputation import arrays, owner
from minidist.backend import Array
from minidist.context_parallel.gathered_attention import OwnQueries
from minidist.context_parallel.ring_attention import RingAttention
from minidist.context_parallel.tiles import computed_scores
from minidist.pipeline_parallel.partition import multiply_adds
from minidist.pipeline_parallel.stage import Stage
from minidist.pipeline_parallel.weight_stashing import VersionedStage
from minidist.rng import Randomness
from minidist.tensor_parallel.sequence_parallel import GatheredLinear, GatheredProducts

# Of every step that is watched.
adamw: Callable[[list[nn.Parameter]], optim.Optimizer] = partial(optim.AdamW, lr=1e-3)


class Watch:
    """What a rank was seen to do.

    entered  {layer: [(examples, positions), ...]}, one entry per forward pass
    work     multiply-adds so far
    peak     the most bytes of floats that graphs held at once, without parameters
    kept     {what: arrays} that stay from step to step
    sent     payload bytes that this rank has sent
    """

    def __init__(self):
        self.entered, self.work, self.peak = {}, 0, 0
        self.kept, self.sent = {}, 0

    def layers(self, layers: Iterable[nn.Module]) -> list["WatchedLayer"]:
        """Return these layers, wrapped so that this watch records what enters them."""
        return [WatchedLayer(layer, self) for layer in layers]

    def model(self, model: nn.Module) -> None:
        """Wrap all layers of a model, in place; record each loss, or each embedding of a pair."""
        weights = [p.data for p in model.parameters()]
        if isinstance(model, nn.Siamese):
            flight: list[Tensor] = []

            def seen(y: Tensor) -> Tensor:
                flight.append(self.graph(y, flight, weights))
                return y

            branch, (join,) = self.layers(model.branch), self.layers([model.join])
            branch[-1].on_output = join.on_output = seen
            model.branch, model.join = branch, join
            return
        assert isinstance(model, nn.Sequential)
        model.sequence[:] = self.layers(model.sequence)
        model.loss = _then(partial(self.graph, parameters=weights), model.loss)

    def stages(self, stages: list[Stage], model: nn.Module) -> None:
        """Wrap the layers of a pipeline's rank; record each new pass and those in flight."""

        def passed(y: Tensor) -> Tensor:
            flight = [x for s in stages for x in (*s.outputs.values(), *s.deferred.values())]
            weights = [p.data for p in model.parameters()]
            for s in stages:
                if isinstance(s, VersionedStage):
                    weights += [version.weights for version in s.weights.in_flight.values()]
            return self.graph(y, flight, weights)

        for stage in stages:
            layers = self.layers(stage.layers)
            stage.layers = [*layers]
            if stage.last:
                stage.loss = _then(passed, stage.loss)
            else:
                layers[-1].on_output = passed

    def enters(self, layer: nn.Module, x: Tensor | Array) -> None:
        """Record that x enters a layer."""
        data = x.data if isinstance(x, Tensor) else x
        positions = data.shape[1] if data.ndim == 3 or data.dtype.kind in "iu" else 1
        self.entered.setdefault(id(layer), []).append((len(data), positions))

    def graph(self, y: Tensor, others: Iterable = (), parameters: Iterable[Array] = ()) -> Tensor:
        """Record the products below y, a new result, and what y's graph and others hold."""
        self.work += sum(map(products, functions_below(y)))
        self.peak = max(self.peak, graph_bytes([y, *others], parameters))
        return y

    def holds(self, homes: Iterable, optimizer=None, parameters=(), gradients=(), state=()) -> None:
        """Record what stays: these flat vectors, an optimizer's state, and other arrays."""
        homes, states = list(dict.fromkeys(homes)), [state]
        if optimizer is not None:
            states += [optimizer.copies, *optimizer.state]
        self.kept = {
            "parameters": [*(home.vector for home in homes), *parameters],
            "gradients": [*(home.gradient for home in homes), *gradients],
            "optimizer state": [array for arrays in states for array in arrays],
        }


class WatchedLayer(nn.Module):
    """A layer that reports its inputs to a watch, and its outputs to `on_output` if that is set."""

    def __init__(self, layer: nn.Module, watch: Watch):
        self.layer, self.flat, self.watch = layer, layer.flat, watch
        self.on_output: Callable[[Tensor], Tensor] | None = None

    def forward(self, x: Tensor | Array, randomness: Randomness | None = None) -> Tensor:
        self.watch.enters(self.layer, x)
        y = self.layer(x, randomness)
        return y if self.on_output is None else self.on_output(y)


def _then(second: Callable, first: Callable) -> Callable:
    return lambda *arguments, **more: second(first(*arguments, **more))


def products(function: Function) -> int:
    """Return the multiply-adds of a function that has been computed, on this rank."""
    match function:
        case GatheredLinear() | GatheredProducts():
            x, shape = function.x, function.result_shape
            return int(np.prod(shape)) * x.shape[-1]
        case RingAttention(qkv=qkv, held=held):
            blocks, B, K, _, D = qkv.shape
            tiles = [tile for source in range(len(held)) for tile in function.tiles(source)]
            return 2 * K * (blocks - 2) * D * computed_scores(tiles, B)
        case OwnQueries(q=q):
            G, B, K, _, D = q.shape
            return 2 * K * G * D * computed_scores(function.tiles(), B)
    return multiply_adds(function)


def graph_bytes(things: Iterable, parameters: Iterable[Array]) -> int:
    """Return the bytes of floats that backward from tensors, and what is deferred, will read.

    Every buffer counts once and whole; parameters do not count. Unlike in `kept`, received
    activations count, because nobody else holds them.
    """
    saved, nbytes = [], {}
    for thing in things:
        if isinstance(thing, Tensor):
            for function in functions_below(thing):
                saved += [value for key, value in vars(function).items() if key != "inputs"]
        else:
            saved += [deferred.contribution for deferred in thing]
    for array in map(owner, arrays(saved)):
        if array.dtype.kind == "f":
            nbytes[id(array)] = array.nbytes
    for weight in parameters:
        nbytes.pop(id(owner(weight)), None)
    return sum(nbytes.values())
