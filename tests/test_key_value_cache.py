"""Decoding with a cache of keys and values: it is equal to a pass over the whole text."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist import nn, no_grad
from minidist.autograd.eight_bits import EightBits
from minidist.backend import on_gpu, to_host
from minidist.nn.generate import reader, sample
from minidist.nn.key_value_cache import CachedDecoder
from minidist.parallel.mixed_precision import multiply_in_eight_bits
from minidist.rng import generator
from minidist.verify.compare import BOUND
from minidist.verify.strategies.cases import random_weights
from tests.strategies import compositions, seeds, transformers


@st.composite
def llamas(draw):
    """Draw a small Llama in float64: query heads that share keys and values."""
    kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    return nn.Llama(
        vocab=draw(st.integers(2, 9)),
        width=kv_heads * group * 2 * draw(st.integers(1, 2)),
        heads=kv_heads * group,
        kv_heads=kv_heads,
        depth=draw(st.integers(1, 2)),
        context=draw(st.integers(1, 5)),
        theta=10.0,
        dtype="float64",
        dropout=draw(st.sampled_from([0.0, 0.3])),
        tied=draw(st.booleans()),
    )


def texts(model, B, T=None):
    return generator(0, "texts").integers(0, model.vocab, (B, T or model.context))


def in_pieces(model, tokens, pieces):
    """Return the logits of a decoder that reads pieces of these lengths."""
    decoder, ends = CachedDecoder(model), np.cumsum([0, *pieces])
    read = [decoder(tokens[:, a:b]).data for a, b in pairwise(ends)]
    assert decoder.length == ends[-1]
    return np.concatenate(read, axis=1)


@given(st.one_of(transformers(experts=(0,)), llamas()), st.data(), st.integers(1, 3))
def test_pieces_of_any_lengths_give_what_the_whole_text_gives(model, data, B):
    model = random_weights(model)
    T = data.draw(st.integers(1, model.context))
    pieces, tokens = data.draw(st.sampled_from(list(compositions(T)))), texts(model, B, T)
    with no_grad():
        want = model(tokens).data
    assert abs(in_pieces(model, tokens, pieces) - want).max() <= BOUND * abs(want).max()


def llama(**more):
    """Four query heads of width 4 read two heads of keys and values; three blocks."""
    sizes = {"vocab": 7, "width": 16, "heads": 4, "kv_heads": 2, "depth": 3, "context": 12}
    return random_weights(nn.Llama(**sizes | {"dtype": "float64", "theta": 10.0} | more))


def test_a_piece_is_read_where_it_is_in_the_text():
    model, tokens = llama(), texts(llama(), 2, 6)
    for pieces, cause in {
        (1,): "the heads of queries are in another order",
        (6,): "a token sees those after it in its piece",
        (1, 1, 1, 1, 1, 1): "a token is not at its position in the text",
    }.items():
        with no_grad():
            want = model(tokens[:, : sum(pieces)]).data
        assert np.allclose(in_pieces(model, tokens, pieces), want, rtol=0, atol=1e-9), cause


@pytest.mark.gpu
def test_a_gpu_decodes_what_the_host_does():
    model, tokens = llama(), texts(llama(), 2)
    want, decoder = in_pieces(model, tokens, (5, 1, 1, 5)), CachedDecoder(model.to("gpu"))
    pieces = [decoder(tokens[:, a:b]).data for a, b in pairwise((0, 5, 6, 7, 12))]
    found = np.concatenate([to_host(piece) for piece in pieces], axis=1)
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-9)
    assert on_gpu(decoder.caches[0].kv)


def test_what_is_too_long_or_another_batch_is_refused():
    model = llama()
    decoder = CachedDecoder(model, positions=4)
    decoder(texts(model, 2, 3))
    with pytest.raises(ValueError, match=r"5 tokens do not fit a cache of 4 positions; call begin"):
        decoder(texts(model, 2, 2))
    with pytest.raises(ValueError, match="2 texts were begun, not 3"):
        decoder(texts(model, 3, 1))
    assert decoder(texts(model, 2, 1)).shape == (2, 1, 7)  # a refusal has changed nothing
    for positions in (0, 13, 2.5, "3"):
        with pytest.raises(ValueError, match="of a cache are a whole number from 1 to 12, not"):
            CachedDecoder(model, positions)


@pytest.mark.parametrize("options, block", [({"experts": 2}, 4), ({}, None)])
def test_a_model_that_does_not_read_in_pieces_is_read_whole(options, block):
    model = nn.Transformer(7, 8, 2, 1, 12, **options)
    multiply_in_eight_bits(model, EightBits(block))
    with pytest.raises(ValueError, match=r"pass model.tokens. all tokens again"):
        CachedDecoder(model)
    read = reader(model, 4)
    for n in (3, 4):
        want = model(np.arange(n)[None]).data[0, -1]
        np.testing.assert_array_equal(read(list(range(n))), want)


# Drawing a text.


class Digits:
    """Text whose characters are the digits of its tokens."""

    def encode(self, text):
        return np.array([int(c) for c in text])

    def decode(self, tokens):
        return "".join(map(str, tokens))


def drawn(model, prompt, length, seed, temperature=0.8):
    """Draw a text as `sample` does, with a pass over all that is read for every token."""
    random, tokens = generator(seed, "sample"), [int(c) for c in prompt]
    first = max(0, len(tokens) - model.context)
    for _ in range(length):
        if len(tokens) - first > model.context:
            first = len(tokens) - max(1, model.context // 2)
        with no_grad():
            logits = model(np.array([tokens[first:]])).data[0, -1] / temperature
        p = np.exp(logits - logits.max())
        tokens.append(int(random.choice(len(p), p=p / p.sum())))
    return Digits().decode(tokens)


@given(st.one_of(transformers(), llamas()), st.integers(1, 8), st.integers(0, 12), seeds)
def test_a_sample_is_what_passes_over_the_whole_text_draw(model, prompt, length, seed):
    model = random_weights(model)
    prompt = Digits().decode(texts(model, 1, prompt)[0])
    assert sample(model, Digits(), prompt, length, seed) == drawn(model, prompt, length, seed)


def test_every_position_of_a_text_is_computed_once(monkeypatch):
    """Until the context is full; then the last half is read again, as many tokens as follow."""
    computed, forward = [], nn.Embedding.forward
    monkeypatch.setattr(
        nn.Embedding,
        "forward",
        lambda self, tokens, *rest: computed.append(tokens.size) or forward(self, tokens, *rest),
    )
    model = llama(context=40)
    sample(model, Digits(), "123", 30)
    assert computed == [3] + [1] * 29
    computed.clear()
    sample(model, Digits(), "123", 400)
    assert sum(computed) < 2 * 400
