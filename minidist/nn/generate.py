"""Write text with a trained model: a language model draws it, an encoder-decoder translates.

A language model is given the text so far and draws the next token, one after the other.
An encoder-decoder writes word by word, greedily or with a beam.

The source is encoded once. Then the decoder reads BEGIN, and each word as it is written, and gives
the probability of each next word. It keeps what it has read in a cache: see CachedTranslator.

    greedy  take the most likely word
    beam    keep the K most likely beginnings; extend each by every word, and keep the K best
            (Wu et al., Google's Neural Machine Translation System, 2016, without their length
            normalization and coverage penalty: the score is log p)

Letters: S source and T target positions, t words written so far with BEGIN, V words of the target's
vocabulary, K beginnings.
"""

import math
from collections.abc import Callable
from numbers import Integral
from typing import Protocol

import numpy as np

from minidist.autograd import functions, no_grad
from minidist.backend import Array, to_host
from minidist.errors import WrongInput, check_number
from minidist.nn.embedding import BEGIN, END, PAD
from minidist.nn.key_value_cache import CachedDecoder, CachedTranslator, reads_in_pieces
from minidist.nn.seq2seq import Seq2Seq
from minidist.nn.transformer import Transformer
from minidist.rng import generator


class Alphabet(Protocol):
    """What turns text into tokens and back: `data.Text`, say."""

    def encode(self, text: str) -> np.ndarray: ...
    def decode(self, tokens: list[int]) -> str: ...


def sample(
    model: Transformer,
    text: Alphabet,
    prompt: str,
    length: int,
    seed: int = 0,
    temperature: float = 0.8,
) -> str:
    """Return the prompt and `length` characters after it, drawn one by one from the model.

    The temperature divides the logits: 0.8 sharpens the distribution, 1 would leave it as it is.
    Once the context is full, the model goes on as if the text began with the last half of it.
    """
    check_number("length is a whole number from 0", length, lambda n: n >= 0, Integral)
    allowed = "the temperature is a finite number above 0; with 1e-6 the most likely one is drawn"
    check_number(allowed, temperature, lambda x: 0 < x < math.inf)
    random = generator(seed, "sample")
    tokens = list(text.encode(prompt))
    if not tokens:
        raise WrongInput("the prompt is empty; the model reads one character or more to go on from")
    first, room = max(0, len(tokens) - model.context), min(model.context, len(tokens) + length)
    read = reader(model, room)
    for _ in range(length):
        if len(tokens) - first > model.context:
            read, first = reader(model, room), len(tokens) - max(1, model.context // 2)
        logits = to_host(read(tokens[first:])).astype(np.float64)
        if not np.isfinite(logits).all():
            raise WrongInput("the model's logits are not finite: its weights have diverged")
        p = np.exp((logits - logits.max()) / temperature)
        tokens.append(int(random.choice(len(p), p=p / p.sum())))
    return text.decode(tokens)


def reader(model: Transformer, positions: int) -> Callable[[list[int]], Array]:
    """Return a function of a text that grows to `positions`: the logits[V] after it.

    It keeps what it has read in a cache, if it can (CachedDecoder); else it reads all again.
    """
    decoder = CachedDecoder(model, positions) if reads_in_pieces(model) else None

    def read(tokens: list[int]) -> Array:
        if decoder is not None:
            return decoder(np.array([tokens[decoder.length :]])).data[0, -1]
        with no_grad():
            return model(np.array([tokens])).data[0, -1]

    return read


def translate(model: Seq2Seq, sources: np.ndarray, beam: int = 1) -> np.ndarray:
    """Return the most likely targets[B, T] that were found for sources[B, S].

    After END a target is PAD. If no END is among the first T words, the target ends there.

    beam  K, from 1: with 1, greedy
    """
    sources = np.asarray(sources)
    if sources.ndim != 2 or sources.shape[1] != model.source_length:
        raise WrongInput(
            f"sources are [B, {model.source_length}], padded with {PAD}; not {list(sources.shape)}"
        )
    check_number("a beam keeps 1 beginning or more", beam, lambda n: n >= 1, Integral)
    decoder = CachedTranslator(model, sources)
    return greedy(decoder) if beam == 1 else beam_search(decoder, beam)


def next_words(decoder: CachedTranslator, written: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return log p[n, V] of the word after written[n, t], on the host, in float64.

    rows[n]  the row of the decoder's last call that has read all words but the last
    """
    decoder.keep(rows)
    logits = decoder(written[:, decoder.length :])[:, -1:]
    return to_host(functions.log_softmax(logits).data)[:, 0].astype(np.float64)


def greedy(decoder: CachedTranslator) -> np.ndarray:
    """Return targets[B, T], each word the most likely one after those before it."""
    B, T = len(decoder.held), decoder.model.target_length
    written = np.full((B, 1), BEGIN)
    going = rows = np.arange(B)  # sentences that have not ended; their rows in the decoder
    for _ in range(T):
        word = np.full(B, PAD)
        word[going] = next_words(decoder, written[going], rows).argmax(axis=-1)
        written = np.concatenate([written, word[:, None]], axis=1)
        rows = np.flatnonzero(word[going] != END)
        going = going[rows]
        if not len(going):
            break
    return padded(written[:, 1:], T)


def beam_search(decoder: CachedTranslator, beam: int) -> np.ndarray:
    """Return targets[B, T], each the most likely of the K that are kept."""
    B, T, V = len(decoder.held), decoder.model.target_length, decoder.model.vocab
    sentence = np.arange(B)[:, None]
    written = np.full((B, 1, 1), BEGIN)  # [B, K, t]
    row = sentence.copy()  # of the decoder that has read each beginning, [B, K]
    score = np.zeros((B, 1))  # log p of each beginning
    for _ in range(T):
        following = np.full((*score.shape, V), -np.inf)
        ended = (written == END).any(axis=-1)
        following[ended, PAD] = 0  # a beginning that has ended keeps its score
        b, k = np.nonzero(~ended)
        if not len(b):
            break
        following[b, k] = next_words(decoder, written[b, k], row[b, k])
        row[b, k] = np.arange(len(b))
        total = (score[:, :, None] + following).reshape(B, -1)
        best = largest(total, beam)
        score = np.take_along_axis(total, best, axis=1)
        before, word = np.divmod(best, V)
        written = np.concatenate([written[sentence, before], word[:, :, None]], axis=2)
        row = row[sentence, before]
    return padded(written[:, 0, 1:], T)


def largest(total: np.ndarray, n: int) -> np.ndarray:
    """Return the indices of the n largest of each row, largest first; of equal ones, the first."""
    n = min(n, total.shape[1])
    least = np.partition(total, -n, axis=1)[:, -n, None]
    ordered = np.where(total >= least, -total, np.inf)  # a sort is fast where most are equal
    return np.argsort(ordered, axis=1, kind="stable")[:, :n]


def padded(words: np.ndarray, length: int) -> np.ndarray:
    """Return words[B, t] with PAD after them, [B, length]."""
    return np.pad(words, ((0, 0), (0, length - words.shape[1])), constant_values=PAD)
