"""The encoder-decoder: what its layers compute, what each position reads, and what padding is."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist import Tensor, nn
from minidist.nn.embedding import BEGIN, PAD
from minidist.rng import Randomness
from minidist.verify import equivalence
from minidist.verify.strategies.cases import Case, random_weights
from tests.nn.differences import assert_gradients_are_differences
from tests.nn.formulas import seq2seq
from tests.strategies import (
    arrays,
    seeds,
    sentences,
    translators,
)


def small(dropout=0.0, dtype="float64", depth=2, S=4, T=3, seed=0):
    return nn.Seq2Seq(7, 6, 4, 2, depth, S, T, seed, dtype, dropout)


def differing(model, tokens, changed):
    """Return which [b, t] have other logits; those that should be equal have the same bits."""
    return (model(changed).data != model(tokens).data).any(axis=-1)


@given(model=translators(), data=st.data())
def test_no_logits_depend_on_a_later_target_token(model, data):
    tokens = data.draw(sentences(model))
    t = data.draw(st.integers(0, model.target_length - 1))
    changed = tokens.copy()
    changed[:, model.source_length + t] += 1
    changed[:, model.source_length + t] %= model.vocab
    early = differing(model, tokens, changed)[:, :t]
    assert not early.any(), (
        f"the decoder looks ahead: target token {t} changes the logits of positions "
        f"{np.flatnonzero(early.any(axis=0)).tolist()}, before it"
    )


@given(model=translators(), data=st.data(), more=st.integers(1, 4))
def test_how_far_a_source_is_padded_does_not_matter(model, data, more):
    S, tokens = model.source_length, data.draw(sentences(model))
    width = model.layers[0].source.token.weight.shape[1]
    heads, depth = model.layers[1].attention.heads, (len(model.layers) - 2) // 2
    longer = nn.Seq2Seq(
        model.source_vocab, model.vocab, width, heads, depth, S + more, model.target_length, 1,
        "float64",
    )  # fmt: skip
    state, name = model.state(), "embedding.source.position.weight"
    longer.load_state(state | {name: np.concatenate([state[name], np.ones((more, width))])})
    padded = np.insert(tokens, [S] * more, PAD, axis=1)
    got, want = longer(padded).data, model(tokens).data
    off = abs(got - want).max()
    assert off < 1e-9, (
        f"keys of padding are attended to: {more} more columns of PAD change the logits "
        f"by {off:.1e}"
    )


def test_an_empty_source_is_read_as_nothing():
    """The decoder is then a language model whose cross-attention adds its output's bias."""
    model = small()
    tokens = np.array([[PAD] * 4 + [BEGIN, 3, 4]])
    logits = model(tokens)
    logits.sum().backward()
    assert np.isfinite(logits.data).all()
    for name, p in model.named_parameters().items():
        assert np.isfinite(p.grad).all(), name
        if name.startswith(("embedding.source", "encoder")):
            assert not p.grad.any(), name
    for p in model.layers[0].source.parameters():
        p.data += 1
    np.testing.assert_array_equal(model(tokens).data, logits.data)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradients_of_all_parameters_are_differences(dropout):
    model = small(dropout)
    for p in model.parameters():
        p.data[...] += 0.1 * arrays(*p.shape, seed=3)  # biases and gains too
    tokens = np.array([[3, 4, 5, 6, BEGIN, 3, 4], [6, 5, PAD, PAD, BEGIN, 5, PAD]])
    targets = np.array([[3, 4, 2], [5, 2, 0]])
    randomness = Randomness(0, 0, np.arange(2))
    assert_gradients_are_differences(
        model, lambda: nn.cross_entropy(model(tokens, randomness), targets)
    )


@given(model=translators(dropout=(0.0, 0.3)), data=st.data(), seed=seeds)
def test_the_model_against_its_formula(model, data, seed):
    """Blocks, heads, masks, dropout by example and name; sources of any lengths, or empty."""
    tokens = data.draw(sentences(model))
    tokens = tokens[:, : model.source_length + data.draw(st.integers(1, model.target_length))]
    randomness = Randomness(seed, 2, 5 + np.arange(len(tokens)))
    got = model(tokens, randomness).data
    np.testing.assert_allclose(got, seq2seq(model, tokens, randomness), rtol=1e-8, atol=1e-9)


def narrow_case(examples=60):
    """A Seq2Seq of width 4 with dropout 0.5, which drops all 4 numbers of one source word in 16."""
    model = random_weights(small(0.5))
    tokens = np.random.default_rng(0).integers(3, 6, (examples, 7))
    tokens[:, 4] = BEGIN
    tokens[1::3, 2:4] = PAD
    tokens[2::3, :4] = PAD  # an empty source
    return Case("narrow", model, tokens, tokens[:, 4:])


def test_a_source_word_that_dropout_drops_whole_is_still_a_word():
    case = narrow_case()
    model, tokens, randomness = case.model, case.inputs, Randomness(0, 0, np.arange(60))
    words, x = tokens[:, :4] != PAD, model.layers[0](tokens, randomness).data[:, :4, :4]
    assert (words & ~x.any(axis=-1)).sum() > 4  # dropped whole
    got = model(tokens, randomness).data
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got, seq2seq(model, tokens, randomness), rtol=1e-9)


@pytest.mark.parametrize(
    "strategy, options",
    [
        ("gpipe", {"micro_batches": 3}),
        ("zb_v", {"chunks": 2}),
        ("pipeline", {"recompute": True}),
        ("attention", {}),
        ("hybrid", {"tp": 2}),
        ("hybrid", {"pp": 2}),
    ],
)
def test_every_rank_knows_a_dropped_word_from_padding(cluster, strategy, options):
    """By differences of the loss in NumPy: no stage but the first sees the tokens."""
    case, randomness = narrow_case(), Randomness(0, 0, np.arange(60))
    ranks = cluster(2, "thread")
    names = "embedding.source.token.weight", "encoder.0.attention.key_value.weight"
    outcome = equivalence.gradients(
        strategy, case.model, case.inputs, case.targets, 2, cluster=ranks, **options
    )

    def loss():
        return nn.cross_entropy(
            Tensor(seq2seq(case.model, case.inputs, randomness)), case.targets
        ).item()

    for name in names:
        p, direction = case.model.named_parameters()[name], arrays(*outcome[name].shape)
        start, ends = p.data.copy(), []
        for step in (1e-5, -1e-5):
            p.data[...] = start + step * direction
            ends.append(loss())
        p.data[...] = start
        want = (ends[0] - ends[1]) / 2e-5
        assert (outcome[name] * direction).sum() == pytest.approx(want, rel=1e-6), name
