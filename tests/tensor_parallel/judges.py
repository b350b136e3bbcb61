"""Workers that hold a split layer, or a split Transformer, against the whole one.

The weights are random, biases and gains too: a new layer's biases are zeros, and a zero may be
added N times, or not at all, without anyone seeing it. The gradient of the output is random.
"""

import copy

import numpy as np

from minidist import Tensor, nn
from minidist.parallel.collective_functions import own_part
from minidist.rng import Randomness
from minidist.tensor_parallel import ParallelTransformer, unsplit
from minidist.tensor_parallel.sequence_parallel import all_reduce_partial, sequence_parallel
from minidist.verify.compare import compare
from minidist.verify.strategies.cases import collect, random_weights
from tests.strategies import arrays

OUTPUT, INPUT = "(output)", "(input)"


def judge_layers(group, build, split, x, seed, split_input=False, split_output=False, axis=-1):
    """Return how the split layers' output and gradients compare with the whole ones'.

    build         () -> the whole module, the same on every rank
    split         (module, group) -> its split version
    split_input, split_output
                  whether a rank has its part, along `axis`, of X and dX; of Y and dY
    """
    whole = random_weights(build(), seed)
    parts = split(copy.deepcopy(whole), group)
    want_x = Tensor(x, requires_grad=True)
    got_x = Tensor(own_part(x, group, axis) if split_input else x, requires_grad=True)
    want_y, got_y = whole(want_x), parts(got_x)
    grad = arrays(*want_y.shape, seed=[seed, 99])
    want_y.backward(grad)
    got_y.backward(own_part(grad, group, axis) if split_output else grad)
    want = collect(whole)
    want |= {OUTPUT: want_y.data, INPUT: want_x.grad}
    got = whole_gradients(parts, group)
    y, dx = got_y.data, got_x.grad
    got[OUTPUT] = group.all_gather(y, axis) if split_output else y
    got[INPUT] = group.all_gather(dx, axis) if split_input else dx
    return compare([got], want)


def whole_gradients(model, group):
    """Return all gradients; of a split parameter, the parts of all ranks put together."""
    named = model.named_parameters()
    return {name: unsplit(array, named[name], group) for name, array in collect(model).items()}


SPLITS = {"matrices": ParallelTransformer, "sequence": sequence_parallel}


def config_of(tied=True, dropout=0.3, vocab=7, heads=12, width=12, depth=1, context=12):
    return {
        "vocab": vocab,
        "width": width,
        "heads": heads,
        "depth": depth,
        "context": context,
        "dtype": "float64",
        "dropout": dropout,
        "tied": tied,
    }


def padded_part(x, group):
    """Return this rank's part of x[..., V], cut like the vocabulary: padding is zeros."""
    each = -(-x.shape[-1] // group.size)
    padding = [(0, 0)] * (x.ndim - 1) + [(0, each * group.size - x.shape[-1])]
    return np.pad(x, padding)[..., group.rank * each : (group.rank + 1) * each]


def judge_transformer(group, kind, config, T, run):
    """Return how a split Transformer's logits and gradients compare with the whole one's.

    run  (model, tokens, randomness) -> logits, in place of a plain call of the split model
    """
    whole = random_weights(nn.Transformer(**config), 0)
    tokens, randomness = np.arange(3 * T).reshape(3, T) % whole.vocab, Randomness(0, 3, [7, 0, 2])
    parts = SPLITS[kind](copy.deepcopy(whole), group)
    logits = whole(tokens, randomness)
    grad = arrays(*logits.shape, seed=[0, 99])
    logits.backward(grad)
    want = {n: p.grad for n, p in whole.named_parameters().items()} | {OUTPUT: logits.data}
    got_y = run(parts, tokens, randomness)
    got_y.backward(padded_part(grad, group))
    if kind == "sequence":
        all_reduce_partial(parts, group)
    got = whole_gradients(parts, group)
    got[OUTPUT] = group.all_gather(got_y.data, -1)[..., : whole.vocab]
    return compare([got], want)


def check(comparisons):
    for rank, comparison in enumerate(comparisons):
        assert comparison.ok, f"rank {rank}: {comparison}"
