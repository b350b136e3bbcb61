"""Writing with a cache: what an encoder-decoder reads word by word is equal to a whole pass."""

from collections import Counter
from contextlib import suppress
from functools import partial
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist import nn, no_grad
from minidist.backend import on_gpu, to_host
from minidist.nn.embedding import BEGIN, PAD
from minidist.nn.generate import translate
from minidist.nn.key_value_cache import CachedDecoder, CachedTranslator
from minidist.rng import generator
from minidist.verify.compare import BOUND
from minidist.verify.strategies.cases import random_weights
from tests.strategies import compositions, seeds, sentences, translators


def whole(model, tokens):
    """Return the logits[B, t, V] of a pass over tokens[B, S + t], all positions at once."""
    with no_grad():
        return model(tokens).data


def translator(**more):
    """Two blocks read five words at most and write six, of vocabularies of 7 and 9."""
    sizes = {"source_vocab": 7, "target_vocab": 9, "width": 8, "heads": 2, "depth": 2}
    lengths = {"source_length": 5, "target_length": 6}
    return random_weights(nn.Seq2Seq(**sizes | lengths | {"dtype": "float64"} | more))


SOURCES = np.array([[3, 4, 5, 6, 3], [6, 4, PAD, PAD, PAD], [5, 3, 4, PAD, PAD]])


def words_of(B, T=6):
    """Return BEGIN and T - 1 words in each of B rows."""
    words = generator(0, "words").integers(0, 9, (B, T))
    words[:, 0] = BEGIN
    return words


@given(translators(dropout=(0.0, 0.3)), st.data())
def test_pieces_of_any_lengths_give_what_all_words_give(model, data):
    tokens, S = data.draw(sentences(model)), model.source_length
    T = data.draw(st.integers(1, model.target_length))
    pieces = data.draw(st.sampled_from(list(compositions(T))))
    decoder, ends = CachedTranslator(model, tokens[:, :S]), S + np.cumsum([0, *pieces])
    found = [decoder(tokens[:, a:b]).data for a, b in pairwise(ends)]
    want = whole(model, tokens[:, : S + T])
    assert decoder.length == T
    assert abs(np.concatenate(found, axis=1) - want).max() <= BOUND * abs(want).max()


@given(translators(), st.data(), seeds)
def test_rows_that_go_on_have_what_their_own_words_give(model, data, seed):
    """Every word, any rows go on: none, in another order, or several times."""
    S, random = model.source_length, np.random.default_rng(seed)
    tokens = data.draw(sentences(model))[:, : S + 1]
    decoder = CachedTranslator(model, tokens[:, :S])
    for _ in range(model.target_length):
        want = whole(model, tokens)[:, -1:]
        found = decoder(tokens[:, -1:]).data
        assert abs(found - want).max(initial=0) <= BOUND * abs(want).max(initial=0)
        rows = random.integers(0, len(tokens), random.integers(0, 5) if len(tokens) else 0)
        decoder.keep(rows)
        words = random.integers(0, model.vocab, (len(rows), 1))
        tokens = np.concatenate([tokens[rows], words], axis=1)


def is_interrupted(decoder, linear, words):
    """Let an error end a call in this product; return False if no word needs the product."""

    def interrupted(*args):
        raise KeyboardInterrupt

    linear.forward, ended = interrupted, True
    with suppress(KeyboardInterrupt):
        decoder(words)
        ended = False
    del linear.forward
    return ended


def readers():
    """Yield what makes a decoder or translator, its model, its words and their logits."""
    words = words_of(3)
    model = random_weights(nn.Transformer(9, 8, 2, 2, 6, dtype="float64"))
    yield partial(CachedDecoder, model), model, words, whole(model, words)
    model = translator()
    want = whole(model, np.concatenate([SOURCES, words], axis=1))
    yield partial(CachedTranslator, model, SOURCES), model, words, want


def test_a_call_that_an_error_ended_has_read_nothing():
    """Wherever it was: blocks before it have kept keys and values, those behind it have not."""
    interrupted = 0
    for (make, model, words, want), t in product(readers(), (0, 3)):
        for k in range(len(list(model.modules(nn.Linear)))):
            decoder, logits = make(), []
            linear = list(decoder.model.modules(nn.Linear))[k]
            for a, b in pairwise((0, 3, 5, 6)):
                rows = words[: 3 if t or isinstance(decoder, CachedTranslator) else 1]
                if a == t and not is_interrupted(decoder, linear, rows[:, a:b]):
                    break
                logits.append(decoder(words[:, a:b]).data)
            else:
                interrupted += 1
                np.testing.assert_allclose(np.concatenate(logits, axis=1), want, atol=1e-9)
    assert interrupted == 2 * (9 + 13)


def test_what_was_read_with_other_weights_is_refused():
    for make, model, words, _ in readers():
        decoder = make()
        decoder(words[:, :1])
        model.load_state(model.state())
        with pytest.raises(ValueError, match="the weights have changed since this text was begun"):
            decoder(words[:, 1:2])


def test_a_row_goes_on_with_what_its_parent_has_read():
    model, words = translator(), words_of(3)
    for sources, rows, cause in [
        (SOURCES, [0, 1, 2], "keys of the source's padding are attended to"),
        (SOURCES[[0, 0, 0]], [1, 2, 0], "a beginning goes on with what another one has read"),
        (SOURCES, [2, 0, 0], "a row reads its source as far as another row's source has words"),
    ]:
        decoder = CachedTranslator(model, sources)
        decoder(words[:, :3])
        decoder.keep(rows)
        tokens = np.concatenate([sources[rows], words[rows, :3], words[:, 3:4]], axis=1)
        found, want = decoder(words[:, 3:4]).data, whole(model, tokens)[:, -1:]
        assert np.allclose(found, want, rtol=0, atol=1e-9), cause


@pytest.mark.gpu
def test_a_gpu_reads_what_the_host_does():
    model, words = translator(), words_of(3)
    want = whole(model, np.concatenate([SOURCES[[2, 0]], words[[2, 0]]], axis=1))
    decoder = CachedTranslator(model.to("gpu"), SOURCES)
    first = to_host(decoder(words[:, :4]).data)[[2, 0]]
    decoder.keep([2, 0])
    found = np.concatenate([first, to_host(decoder(words[[2, 0], 4:]).data)], axis=1)
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-9)
    assert on_gpu(decoder.caches[0].kv) and on_gpu(decoder.held)


def test_every_position_is_computed_once(monkeypatch):
    """Of B sources: B S in the encoder, and B for each word; not t for the word after t others."""
    rows, forward = Counter(), nn.Linear.forward

    def counted(self, x, *rest):
        rows[self.weight.name] += x.size // x.shape[-1]
        return forward(self, x, *rest)

    monkeypatch.setattr(nn.Linear, "forward", counted)
    model, K = translator(target_length=20), 3
    model.layers[-1].linear.weight.data[:, 2] = model.layers[-1].norm.bias.data[...] = 0
    for beam, beginnings in {1: 3 * 20, K: 3 * (1 + K * 19)}.items():
        rows.clear()
        translate(model, SOURCES, beam)
        source = [name for name in rows if "encoder" in name or "key_value" in name]
        assert len(source) == 2 * 5 + 2 and {rows[name] for name in source} == {3 * 5}
        written = [name for name in rows if name not in source]
        assert len(written) == 2 * 6 + 1 and {rows[name] for name in written} == {beginnings}


def test_what_is_too_long_or_another_batch_is_refused():
    decoder = CachedTranslator(translator(), SOURCES)
    decoder(words_of(3, 5))
    with pytest.raises(ValueError, match="in a context of 6"):
        decoder(words_of(3, 2))
    with pytest.raises(ValueError, match=r"3 targets are written, not 2; call keep\(rows\)"):
        decoder(words_of(2, 1))
    assert decoder(words_of(3, 1)).shape == (3, 1, 9)  # a refusal has changed nothing
