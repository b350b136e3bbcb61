"""Cut layers into contiguous stages so that the slowest stage is as fast as it can be.

Once full, a pipeline finishes one micro-batch in the time of its slowest stage. PipeDream
(Narayanan et al. 2019, section 3.1) finds the cuts by dynamic programming: the best way to cut
layers[i:] into k stages is a first stage and the best way to cut the rest into k - 1. PipeDream
also replicates stages and counts the transfers between them (planning/pipedream.py); this file only
cuts layers.

    costs  3  1  4 | 1  5 | 9      p = 3: stages of 8, 6 and 9

Letters: n layers, p stages; B batch, T sequence, C width, V vocabulary.
"""

import copy
import math
import statistics
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate

from minidist.autograd import (
    Function,
    Tensor,
    attention,
    convolution,
    functions,
    functions_below,
    operators,
)
from minidist.autograd.eight_bits import LinearInEightBits
from minidist.autograd.recording import recording
from minidist.backend import Array, clock, on_gpu
from minidist.errors import WrongInput
from minidist.events import Clock
from minidist.nn import Module
from minidist.pieces import computed_scores
from minidist.pipeline_parallel.actions import check_lengths
from minidist.rng import Randomness

Cost = int | float | Fraction
_Cut = tuple[tuple[Cost, ...], tuple[int, ...]]  # costs of the stages, slowest first; lengths


def partition(costs: Sequence[Cost], p: int) -> list[range]:
    """Return the p ranges of layers, none empty, whose slowest stage costs least.

    Ties: the second slowest stage costs least, and so on. If all costs are equal, the first stage
    has the fewest layers, then the second, and so on. Exact with ints and Fractions. Time n^2 p,
    times n for the sums.

    costs  one number per layer, at least 0, in any unit
    """
    costs, n = list(costs), len(costs)
    check_lengths(n, p)
    for i, cost in enumerate(costs):
        if not 0 <= cost < math.inf:
            raise WrongInput(f"layer {i} costs {cost}; a cost is a finite number from 0")
    best: dict[int, _Cut] = {n: ((), ())}  # {i: the cut of layers[i:]}
    for k in range(1, p + 1):
        best = {
            i: min(_prepend(costs[i:j], *best[j]) for j in best if j > i) for i in range(n - k + 1)
        }
    _, lengths = best[0]
    ends = accumulate(lengths)
    return [range(end - length, end) for end, length in zip(ends, lengths, strict=True)]


def _prepend(stage: list[Cost], others: tuple[Cost, ...], lengths: tuple[int, ...]) -> _Cut:
    """Put a stage before a cut; return a key that compares by costs first, then by lengths."""
    return tuple(sorted((sum(stage), *others), reverse=True)), (len(stage), *lengths)


def counted_costs(
    model: Module, x: Tensor | Array, randomness: Randomness | None = None
) -> list[int]:
    """Return the multiply-adds of each layer's matrix products in one forward pass on x.

    Counted are linear layers, convolutions, products of two tensors, and the two products of
    attention, over all scores that are computed. Everything else counts as 0: a look-up in an
    embedding, norms, activations, sums, and whatever is inside `recompute`. Backward does twice as
    many where the input needs a gradient; attention in blocks computes its scores once more.

    Per example: a Transformer's block 12 T C^2 + 2 S C, its head T C V, its embedding 0, with S =
    `computed_scores(T)` of pieces.py: T^2 up to 128 positions.
    """
    with recording(True):
        outputs = [output for _, output in _run(model, x, randomness)]
    return [
        sum(map(multiply_adds, functions_below(y))) if y.creator is not None else 0 for y in outputs
    ]


def multiply_adds(function: Function) -> int:
    """Return the number of elements in its products, times the number of terms in each sum."""
    match function:
        case functions.Linear() | LinearInEightBits():
            x, shape = function.x, function.result_shape
            return math.prod(shape) * x.shape[-1]
        case convolution.Convolution(result_shape=shape, w=w):
            return math.prod(shape) * w[0].size
        case operators.MatMul(result_shape=shape, a=a):
            return math.prod(shape) * a.shape[-1]
        case attention.CausalAttention(q=q) | attention.BlockwiseAttention(q=q):
            B, H, T, D = q.shape
            return 2 * B * H * computed_scores(T) * D  # Q K^T and P V
    return 0


def measured_costs(
    model: Module,
    x: Tensor | Array,
    randomness: Randomness | None = None,
    repeats: int = 5,
) -> list[float]:
    """Return the seconds of each layer's forward and backward on x: the median of `repeats`.

    Every repeat passes through all layers, so that a slow moment of the machine does not hit one
    layer only. One extra repeat warms up first. The model does not change.
    """
    if repeats < 1:
        raise WrongInput(f"cannot take the median of {repeats} repeats; use 1 or more")
    timer = clock("gpu" if any(on_gpu(p.data) for p in model.parameters()) else "cpu")
    model = copy.deepcopy(model)
    spans: list[list[tuple]] = [[] for _ in model.layers]
    with recording(True):
        inputs = [leaf for leaf, _ in _run(model, x, randomness)]
        for _ in range(1 + repeats):
            for layer, leaf, taken in zip(model.layers, inputs, spans, strict=True):
                taken.append(_span(layer, leaf, randomness, timer))
    return [
        statistics.median(timer.seconds(stop) - timer.seconds(start) for start, stop in taken[1:])
        for taken in spans
    ]


def _span(layer: Module, x: Tensor | Array, randomness: Randomness | None, timer: Clock) -> tuple:
    """Return when a forward and a backward pass begin and end."""
    for leaf in [x, *layer.parameters()]:
        if isinstance(leaf, Tensor):
            leaf.grad = None  # a second gradient would be added, the first is written
    start = timer.now()
    y = layer(x, randomness)
    if y.requires_grad:
        y.backward(y.xp.ones_like(y.data))
    return start, timer.now()


def _run(model: Module, x: Tensor | Array, randomness: Randomness | None) -> list[tuple]:
    """Return (input, output) of each layer; an input of floats is a leaf that needs a gradient."""
    results = []
    for layer in model.layers:
        data = x.data if isinstance(x, Tensor) else x
        leaf = Tensor(data, requires_grad=True) if data.dtype.kind == "f" else data
        x = layer(leaf, randomness)
        results.append((leaf, x))
    return results
