"""Decode with a cache: a block keeps the keys and values of the positions that it has read.

    O = softmax(q K^T / sqrt D) V over all positions up to q's: K and V grow, nothing else is kept

(Shazeer 2019, Fast Transformer Decoding, section 2.4.) A position sees itself and earlier ones, so
its keys and values stay what they are when others follow. A text of T tokens that are drawn one by
one is T positions to compute, where a pass over all that is written for every token is T (T + 1)/2.

    decoder = CachedDecoder(model)
    logits = decoder(tokens[:, :5])      # [B, 5, V]
    logits = decoder(tokens[:, 5:6])     # [B, 1, V]: what model(tokens[:, :6]) has in its column 5

An encoder-decoder has other keys and values, too: a block's of the source. No word of the target
changes them, so they are computed once.

    decoder = CachedTranslator(model, sources)
    logits = decoder(words[:, :1])       # [B, 1, V]: words that may follow BEGIN
    decoder.keep([0, 0, 2])              # row 0 goes on in two ways, and row 1 not at all
    logits = decoder(words[:, 1:2])      # [3, 1, V]

Letters: n new positions of T; K heads of keys and values, each read by G heads of queries; S source
positions.
"""

import copy
import math
from functools import partial
from numbers import Integral
from typing import TypeVar

import numpy as np

from minidist.autograd import Tensor, no_grad
from minidist.autograd.kernels.softmax import causal_softmax
from minidist.autograd.products import batched_matmul
from minidist.autograd.recording import Since
from minidist.backend import Array, array_module, on_device_of, whole_numbers
from minidist.errors import WrongInput, check_number
from minidist.nn.dropout import Dropout
from minidist.nn.embedding import BEGIN
from minidist.nn.mixture_of_experts import mixtures
from minidist.nn.module import Sequential
from minidist.nn.seq2seq import DecoderBlock, Seq2Seq, parted
from minidist.nn.transformer import Transformer
from minidist.pieces import Positions
from minidist.rng import Randomness

Model = TypeVar("Model", bound=Sequential)


class KeyValueCache:
    """An attention's `attend`, from new positions to all so far: QKV[G + 2, B, K, n, D] -> O.

    The caller says which positions are new. A call that an error ends, in this block or in a later
    one, counts none: they are written again.

    kv  [2, B, K, positions, D]
    """

    def __init__(self, positions: int):
        self.positions = positions
        self.kv: Array | None = None

    def __call__(self, qkv: Tensor, randomness: Randomness | None = None) -> Tensor:
        assert randomness is not None and randomness.positions is not None  # see `randomness_at`
        new, last = qkv.data[-2:], randomness.positions.length
        _, B, K, n, D = new.shape
        first = last - n
        if self.kv is None or first == 0:
            self.kv = array_module(new).empty((2, B, K, self.positions, D), new.dtype)
        self.kv[..., first:last, :] = new
        k, v = self.kv[..., :last, :]
        mixed = [attend_from(q, k, v, first) for q in qkv.data[:-2]]  # G times [B, K, n, D]
        return Tensor(array_module(new).stack(mixed, axis=2).reshape(B, len(mixed) * K, n, D))

    def of(self, rows: Array) -> Array | None:
        """Return the keys and values of these rows of the batch: see CachedTranslator."""
        return None if self.kv is None else self.kv[:, rows]


def attend_from(q: Array, k: Array, v: Array, first: int) -> Array:
    """Return O[B, K, n, D]; Q[B, K, n, D] is at position `first` and after it, K and V at all."""
    p = batched_matmul(q * (1 / math.sqrt(q.shape[-1])), k.swapaxes(-1, -2))  # [B, K, n, T]
    causal_softmax(p, first)
    return batched_matmul(p.astype(q.dtype, copy=False), v).astype(q.dtype, copy=False)


class CachedDecoder:
    """A language model that reads some tokens at a time: tokens[B, n] -> logits[B, n, V].

    model      not changed; the weights are shared with it. If they change, `begin` again: what was
               read with others is refused
    positions  the most that it reads before it begins again; by default the model's context
    length     positions read so far

    ValueError for a mixture of experts: which choices an expert drops depends on the whole
    sequence; and for EightBits(None), whose scales do
    """

    def __init__(self, model: Transformer, positions: int | None = None):
        self.positions = model.context if positions is None else positions
        allowed = f"the positions of a cache are a whole number from 1 to {model.context}"
        check_number(allowed, self.positions, lambda n: 1 <= n <= model.context, Integral)
        self.model, self.weights = copy_of(model), Since(partial(last_changed, model))
        self.begin()

    def begin(self) -> None:
        """Forget what was read."""
        self.batch, self.length = 0, 0
        self.caches = []
        for layer in self.model.layers:
            if hasattr(layer, "attention"):
                self.caches.append(KeyValueCache(self.positions))
                layer.attention.attend = self.caches[-1]

    def __call__(self, tokens: Array) -> Tensor:
        tokens = whole_numbers(tokens, "token indices")
        B, n = tokens.shape
        if self.length and self.batch != B:
            raise WrongInput(f"{self.batch} texts were begun, not {B}; call begin() for others")
        if self.length == 0:
            self.weights.follow()
        check_weights(self.weights, "call begin(), and read the text again")
        first, last = self.length, self.length + n
        if last > self.positions:
            raise WrongInput(
                f"{last} tokens do not fit a cache of {self.positions} positions; call begin(), "
                "and read the last ones again"
            )
        with no_grad():
            logits = self.model(tokens, randomness_at(first, last, B))
        self.batch, self.length = B, last
        return logits


class CachedTranslator:
    """An encoder-decoder that has read sources[B, S], and reads words[B, n] -> logits[B, n, V].

    model    not changed; the weights are shared with it, and must not change meanwhile
    length   words of the targets that were read, with BEGIN
    reads    the source that each row of words translates: rows share its keys and values
    """

    def __init__(self, model: Seq2Seq, sources: np.ndarray):
        self.model, self.length = copy_of(model), 0
        self.weights = Since(partial(last_changed, model))
        self.blocks = [layer for layer in self.model.layers if isinstance(layer, DecoderBlock)]
        self.caches = [KeyValueCache(model.target_length) for _ in self.blocks]
        for block, cache in zip(self.blocks, self.caches, strict=True):
            block.attention.attend = cache
        with no_grad():
            x = self.model.embedding(np.pad(sources, ((0, 0), (0, 1)), constant_values=BEGIN))
            for layer in self.model.layers[1 : -1 - len(self.blocks)]:
                x = layer(x)
            source, self.held, _ = parted(x, model.source_length)
            self.sources = [block.keys_and_values(source) for block in self.blocks]
        self.reads = on_device_of(np.arange(len(sources)), self.held)

    def keep(self, rows: np.ndarray) -> None:
        """Go on with these rows of words, in this order; a row may be there several times."""
        if np.array_equal(rows, np.arange(len(self.reads))):
            return
        rows = on_device_of(whole_numbers(rows, "row indices"), self.held)
        kept = [cache.of(rows) for cache in self.caches]  # all, before the first is replaced
        for cache, kv in zip(self.caches, kept, strict=True):
            cache.kv = kv
        self.reads = self.reads[rows]

    def __call__(self, words: Array) -> Tensor:
        words = whole_numbers(words, "token indices")
        B, n = words.shape
        if len(self.reads) != B:
            raise WrongInput(f"{len(self.reads)} targets are written, not {B}; call keep(rows)")
        check_weights(self.weights, "make a CachedTranslator of the model as it is now")
        randomness, held = randomness_at(self.length, self.length + n, B), self.held[self.reads]
        with no_grad():
            x = self.model.embedding.target(words, randomness)
            for block, kv in zip(self.blocks, self.sources, strict=True):
                x = block.write(x, kv[:, self.reads], held, randomness)
            logits = self.model.layers[-1](x)
        self.length += n
        return logits


def reads_in_pieces(model: Sequential) -> bool:
    """Return whether what a position gives depends on earlier positions alone."""
    products = [p.format.product for p in model.parameters()]
    return not any(mixtures(model)) and all(bits is None or bits.block for bits in products)


def copy_of(model: Model) -> Model:
    """Return a model without dropout, whose attention may have another `attend`; weights shared."""
    if not reads_in_pieces(model):
        raise WrongInput(
            "an expert's capacity and a scale of EightBits(None) are of the whole sequence, so "
            "this model does not read it in pieces; pass model(tokens) all tokens again"
        )
    shared = [*model.parameters(), *(layer.flat for layer in model.layers)]
    copied = copy.deepcopy(model, {id(x): x for x in shared})
    for dropout in copied.modules(Dropout):
        dropout.rate = 0
    return copied


def last_changed(model: Sequential) -> int:
    return max(max(p.updated, p.replaced) for p in model.parameters())


def check_weights(weights: Since, remedy: str) -> None:
    """Raise ValueError if keys and values were computed with other weights than the model's."""
    if weights.behind():
        raise WrongInput(f"the weights have changed since this text was begun; {remedy}")


def randomness_at(first: int, last: int, B: int) -> Randomness:
    """Return the Randomness of B rows whose columns are positions `first` to `last` - 1."""
    return Randomness(0, 0, np.arange(B), positions=Positions(((first, last),), last))
