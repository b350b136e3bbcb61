"""Translation: greedy and with a beam, against loops written out and every target there is.

A decoder that is drawn at random is a table of odds: how likely is each word after each beginning?
"""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist import datasets, nn
from minidist.nn import generate as decoding
from minidist.nn.embedding import BEGIN, END, PAD
from minidist.nn.generate import padded, sample, translate
from minidist.nn.key_value_cache import CachedTranslator
from tests.strategies import sentences, translators


def log_softmax(x):
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def odds(model, source, words):
    """Return log p[T, V] of the words that may follow BEGIN and each beginning of `words`."""
    tokens = np.concatenate([source, [BEGIN], words]).astype(int)
    return log_softmax(model(tokens[None]).data[0])


def greedily(model, source):
    """Return a target[T], one word after the other; each time the model reads all of it anew."""
    words = []
    while len(words) < model.target_length and END not in words:
        words.append(int(odds(model, source, words)[-1].argmax()))
    return padded(np.array([words]), model.target_length)[0]


def likely_to_end(model, by):
    """Let END be more likely everywhere: the head adds `by` to its logit."""
    head = model.layers[-1]
    head.norm.bias.data[...] = 1
    head.norm.gain.data[...] *= 0.1
    head.linear.weight.data[:, END] += by / len(head.norm.bias.data)
    return model


@st.composite
def models_and_sources(draw):
    """Draw an encoder-decoder and sources[B, S]; END is likely in some of them."""
    model = likely_to_end(draw(translators()), draw(st.sampled_from([0.0, 1.0, 2.0])))
    return model, draw(sentences(model))[:, : model.source_length]


@given(models_and_sources())
def test_greedy_is_a_loop_that_takes_the_most_likely_word(drawn):
    model, sources = drawn
    want = [greedily(model, source) for source in sources]
    np.testing.assert_array_equal(translate(model, sources), want)


def best_of_a_beam(model, source, keep):
    """Return a target[T] by a beam whose every beginning is read anew for each word."""
    beam = [(0.0, [])]
    for _ in range(model.target_length):
        longer = []
        for score, words in beam:
            following = {PAD: 0.0}  # after END
            if END not in words:
                following = dict(enumerate(odds(model, source, words)[-1]))
            longer += [(score + following[word], [*words, word]) for word in following]
        beam = sorted(longer, key=lambda beginning: -beginning[0])[:keep]
    return beam[0][1]


@given(models_and_sources(), st.integers(1, 6))
def test_a_beam_is_what_passes_over_all_words_find(drawn, keep):
    model, sources = drawn
    want = [best_of_a_beam(model, source, keep) for source in sources]
    found = decoding.beam_search(CachedTranslator(model, sources), keep)
    np.testing.assert_array_equal(found, want)


def test_ended_sentences_are_not_asked_again_and_the_last_one_is_cut(monkeypatch):
    """Sentence n ends after n words."""
    model, read = nn.Seq2Seq(6, 6, 4, 2, 1, 2, 3), []

    def next_words(decoder, written, rows):
        read.append(read[-1][rows])
        words = np.where(read[-1] == written.shape[1], END, 3)
        return np.where(np.arange(model.vocab) == words[:, None], 0.0, -9.0)

    monkeypatch.setattr(decoding, "next_words", next_words)
    for beam in (1, 2):
        read[:] = [np.array([1, 2, 3, 4])]
        found = translate(model, np.full((4, 2), 3), beam)
        assert found.tolist() == [[END, PAD, PAD], [3, END, PAD], [3, 3, END], [3, 3, 3]]
        if beam == 1:
            assert [r.tolist() for r in read[1:]] == [[1, 2, 3, 4], [2, 3, 4], [3, 4]]
    read[:] = [np.array([1, 2])]
    found = translate(model, np.full((2, 2), 3))
    assert found.tolist() == [[END, PAD, PAD], [3, END, PAD]]
    assert [r.tolist() for r in read[1:]] == [[1, 2], [2]]


@pytest.mark.parametrize("beam", [1, 3])
def test_a_model_with_dropout_translates_without_it(beam, device):
    sources = np.array([[3, 4], [4, PAD]])
    models = [nn.Seq2Seq(5, 5, 4, 2, 1, 2, 3, dropout=rate).to(device) for rate in (0.0, 0.5)]
    results = [translate(model, sources, beam) for model in models]
    np.testing.assert_array_equal(*results)
    assert all(type(found) is np.ndarray for found in results)


@pytest.mark.parametrize("beam", [1, 30, 1500])
def test_of_equally_likely_words_the_first_is_written(monkeypatch, beam):
    model = nn.Seq2Seq(5, 40, 4, 2, 1, 2, 3)
    decoder = CachedTranslator(model, np.array([[3, 4]]))
    assert decoding.next_words(decoder, np.array([[BEGIN]]), np.array([0])).dtype == np.float64

    def next_words(decoder, written, rows):
        return np.where(np.arange(40) < 5, -np.inf, np.log(1 / 35))[None].repeat(len(rows), 0)

    monkeypatch.setattr(decoding, "next_words", next_words)
    np.testing.assert_array_equal(translate(model, [[3, 4]], beam), [[5, 5, 5]])


@pytest.mark.parametrize("temperature", [1e-6, 1e-300])
def test_a_low_temperature_draws_the_most_likely_character(temperature):
    text = datasets.text(None, 4)
    model = nn.Transformer(text.vocab, 4, 2, 1, 4)
    written = sample(model, text, "a", 2, temperature=temperature)
    for n in (1, 2):
        logits = model(text.encode(written[:n])[None]).data[0, -1]
        assert text.encode(written[n])[0] == logits.argmax()


def test_a_model_that_has_diverged_draws_nothing():
    text = datasets.text(None, 4)
    model = nn.Transformer(text.vocab, 4, 2, 1, 4)
    model.parameters()[0].data[...] = math.nan
    with pytest.raises(ValueError, match="logits are not finite"):
        sample(model, text, "a", 1)
