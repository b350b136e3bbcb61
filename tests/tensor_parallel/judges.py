"""Workers that hold a split layer, or a split Transformer, against the whole one.

The weights are random, biases and gains too: a new layer's biases are zeros, and a zero may be
added N times, or not at all, without anyone seeing it. The gradient of the output is random.
"""

import copy

import numpy as np

from minidist import Tensor, nn
from minidist.collective_functions import own_part
from minidist.rng import Randomness
from minidist.tensor_parallel import ParallelTransformer, VocabParallelHead
from minidist.tensor_parallel.parallel_transformer import Parts, split_attention
from minidist.tensor_parallel.sequence_parallel import all_reduce_partial, sequence_parallel
from minidist.tensor_parallel.vocab_parallel import split_tables
from minidist.tools.compare import compare
from minidist.tools.strategies.cases import collect, random_weights, translator_case
from minidist.tools.strategies.tensor_parallel import whole_gradients
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


def split_heads(model, group):
    for block in model.layers[1:-1]:
        split_attention(block, group, Parts())
    return model.flatten()


def split_vocabulary(model, group):
    embedding, *blocks, head = model.layers
    split_tables(embedding, group)
    head = VocabParallelHead(head, group, embedding.token.weight if head.tied else None)
    return nn.Sequential([embedding, *blocks, head])


SPLITS = {
    "attention": split_heads,
    "vocab": split_vocabulary,
    "matrices": ParallelTransformer,
    "sequence": sequence_parallel,
}


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


def judge_transformer(group, kind, config, T, B=3, seed=0, run=None):
    """Return how a split Transformer's logits and gradients compare with the whole one's.

    run  (model, tokens, randomness) -> logits, in place of a plain call of the split model
    """
    whole = random_weights(nn.Transformer(**config), seed)
    tokens = np.random.default_rng(seed).integers(0, whole.vocab, (B, T))
    return judge_split(group, kind, whole, tokens, seed, run)


def judge_translator(group, kind, heads=12, B=7, run=None):
    """Return the same of a Seq2Seq, one of whose sources is empty."""
    case = translator_case(B, depth=2, width=2 * heads, heads=heads)
    return judge_split(group, kind, case.model, case.inputs, 0, run)


def judge_split(group, kind, whole, tokens, seed, run):
    parts = SPLITS[kind](copy.deepcopy(whole), group)
    randomness = Randomness(seed, 3, np.random.default_rng(seed).permutation(100)[: len(tokens)])
    logits = whole(tokens, randomness)
    grad = arrays(*logits.shape, seed=[seed, 99])
    logits.backward(grad)
    want = {n: p.grad for n, p in whole.named_parameters().items()} | {OUTPUT: logits.data}
    got_y = parts(tokens, randomness) if run is None else run(parts, tokens, randomness)
    split_output = kind != "attention"
    got_y.backward(padded_part(grad, group) if split_output else grad)
    if kind == "sequence":
        all_reduce_partial(parts, group)
    got = whole_gradients(parts, group)
    y = got_y.data
    got[OUTPUT] = group.all_gather(y, -1)[..., : whole.vocab] if split_output else y
    return compare([got], want)


def check(comparisons):
    for rank, comparison in enumerate(comparisons):
        assert comparison.ok, f"rank {rank}: {comparison}"
