"""Two translators and a reconstruction: what each term adds, and where its gradient goes."""

import numpy as np
import pytest

from minidist import nn, optim
from minidist.autograd.losses import IGNORED, counted
from minidist.nn.embedding import BEGIN, END, PAD
from minidist.rng import Randomness
from minidist.verify.strategies.cases import random_weights
from tests.nn.differences import assert_gradients_are_differences
from tests.strategies import assert_same_bits, gradients, watch_dtypes

U, V, S, T = 9, 7, 5, 4
TOKENS = np.array(
    [
        [3, 4, 5, PAD, PAD, BEGIN, 3, 4, PAD],
        [3, 4, 5, 6, 7, BEGIN, 6, 5, 3],
        [8, PAD, PAD, PAD, PAD, BEGIN, 6, PAD, PAD],
    ]
)
TARGETS = np.array([[3, 4, END, IGNORED], [6, 5, 3, END], [6, END, IGNORED, IGNORED]])
BACK_TOKENS = np.array(
    [
        [3, 4, PAD, BEGIN, 3, 4, 5, PAD, PAD],
        [6, 5, 3, BEGIN, 3, 4, 5, 6, 7],
        [6, PAD, PAD, BEGIN, 8, PAD, PAD, PAD, PAD],
    ]
)
BACK_TARGETS = np.array(
    [[3, 4, 5, END] + [IGNORED] * 2, [3, 4, 5, 6, 7, END], [8, END] + [IGNORED] * 4]
)
BOTH = np.concatenate([TARGETS, BACK_TARGETS], axis=1)


def translators(dtype="float64", names=("there", "back"), **more):
    more |= {"width": 8, "heads": 2, "depth": 1, "dtype": dtype}
    there = nn.Seq2Seq(U, V, source_length=S, target_length=T, name=names[0], **more)
    return there, nn.Seq2Seq(V, U, source_length=T - 1, target_length=S + 1, name=names[1], **more)


def model_of(weight=0.7, read="soft", **more):
    return random_weights(nn.Dual(*translators(**more), weight, read))


def loss_of(model, randomness=None):
    return model.loss(model(TOKENS, randomness), BOTH)


def gradient_of(model):
    """Return {name: gradient} of the loss on the three pairs."""
    model.zero_grad()
    loss_of(model).backward()
    return gradients(model)


def with_weight(weight, read="soft"):
    return gradient_of(model_of(weight, read))


def test_rows_and_targets_of_the_way_back_are_made_of_the_same_rows():
    model = model_of()
    np.testing.assert_array_equal(model.turned(TOKENS), BACK_TOKENS)
    np.testing.assert_array_equal(model.targets(TOKENS), BOTH)
    assert model.targets(TOKENS[:0]).shape == (0, T + S + 1)


def test_the_loss_against_its_formula():
    for read in nn.dual.READS:
        model = model_of(0.7, read)
        back, n = model.back, counted(BOTH)
        assert n == 9 + 12
        logits = model.there(TOKENS).data
        e = np.exp(logits - logits.max(axis=-1, keepdims=True))
        p = e / e.sum(axis=-1, keepdims=True)
        if read == "hard":
            p = np.eye(V)[p.argmax(axis=-1)]
        embedding = back.layers[0]
        source = p[:, : T - 1] @ embedding.source.token.weight.data
        source += embedding.source.position.weight.data
        x = embedding(BACK_TOKENS).data.copy()
        x[:, : T - 1, :-1] = source
        x = nn.Sequential(back.layers[1:])(nn.module.Tensor(x))
        want = nn.cross_entropy(model.there(TOKENS), TARGETS, n).item()
        want += nn.cross_entropy(back(BACK_TOKENS), BACK_TARGETS, n).item()
        want += 0.7 * nn.cross_entropy(x, BACK_TARGETS, n).item()
        assert loss_of(model).item() == pytest.approx(want, rel=1e-12), read


def test_gradients_of_a_soft_reading_are_differences_also_with_dropout():
    model = model_of(dropout=0.3)
    randomness = Randomness(0, 0, np.arange(3))
    assert_gradients_are_differences(model, lambda: loss_of(model, randomness))


def test_a_hard_reading_is_the_way_back_on_the_words_that_were_written():
    model = model_of(0.7, "hard")
    model.there.layers[-1].linear.weight.data[:, PAD] = 0  # for PAD is never the first choice
    words = model.there(TOKENS).data.argmax(axis=-1)[:, : T - 1]
    rows, held = BACK_TOKENS.copy(), BACK_TOKENS[:, : T - 1] != PAD
    assert (words[held] != PAD).all() and (words != rows[:, : T - 1])[held].any()
    rows[:, : T - 1] = np.where(held, words, PAD)
    found, n = gradient_of(model), counted(BOTH)
    model.zero_grad()
    nn.cross_entropy(model.there(TOKENS), TARGETS, n).backward()
    nn.cross_entropy(model.back(BACK_TOKENS), BACK_TARGETS, n).backward()
    (0.7 * nn.cross_entropy(model.back(rows), BACK_TARGETS, n)).backward()
    for name, want in gradients(model).items():
        np.testing.assert_allclose(found[name], want, rtol=1e-9, atol=1e-13, err_msg=name)


def test_weight_0_is_two_translators_bit_by_bit():
    there, back = (random_weights(model) for model in translators())
    n = counted(BOTH)
    nn.cross_entropy(there(TOKENS), TARGETS, n).backward()
    nn.cross_entropy(back(BACK_TOKENS), BACK_TARGETS, n).backward()
    for read in nn.dual.READS:
        assert_same_bits(with_weight(0, read), gradients(there) | gradients(back))


@pytest.mark.parametrize("read", nn.dual.READS)
def test_padding_counts_in_no_term(read):
    model = model_of(1.0, read)
    for part, name in (model.there, "target"), (model.back, "target"), (model.there, "source"):
        getattr(part.layers[0], name).token.weight.data[PAD] *= 100
    assert_same_bits(gradient_of(model), with_weight(1.0, read))
    for name in "there.embedding.source", "there.embedding.target", "back.embedding.target":
        assert not gradients(model)[f"{name}.token.weight"][PAD].any(), name


@pytest.mark.parametrize("read", nn.dual.READS)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_training_step_keeps_its_dtype(dtype, read, place, device):
    model = nn.Dual(*translators(dtype), read=read).to(device)
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    with watch_dtypes() as dtypes:
        model(place(TOKENS)).sum().backward()
    assert dtypes == {np.dtype(dtype)}
    model.loss(model(place(TOKENS)), place(BOTH)).backward()
    optimizer.step()
    assert all(p.dtype == dtype for p in model.parameters())


@pytest.mark.parametrize(
    "change, message",
    [
        ({"source_vocab": 8}, "needs source_vocab=7, not 8"),
        ({"target_vocab": 8}, "needs target_vocab=9, not 8"),
        ({"source_length": 4}, "needs source_length=3, not 4: .* without END"),
        ({"target_length": 5}, "needs target_length=6, not 5"),
        ({"name": "there"}, "two parameters are named 'there.embedding.source.token.weight'"),
    ],
)
def test_a_way_back_that_does_not_fit_is_refused(change, message):
    sizes = {"source_vocab": V, "target_vocab": U, "source_length": T - 1, "target_length": S + 1}
    more = {"width": 8, "heads": 2, "depth": 1, "name": "back"}
    with pytest.raises(ValueError, match=message):
        nn.Dual(translators("float32")[0], nn.Seq2Seq(**sizes | more | change))


def test_what_does_not_fit_is_an_error():
    model = model_of()
    with pytest.raises(ValueError, match="unknown way to read 'loud'; choose one of soft, hard"):
        nn.Dual(*translators(), read="loud")
    for weight in (-1, np.inf, np.nan):
        with pytest.raises(ValueError, match=f"is a number from 0, not {weight}"):
            nn.Dual(*translators(), weight)
    with pytest.raises(ValueError, match=r"tokens are \[B, 5 \+ 4\], .* not \[3, 8\]"):
        model(TOKENS[:, :-1])
    with pytest.raises(ValueError, match=r"targets are \[3, 4 \+ 6\], .* not \[3, 4\]; make them"):
        model.loss(model(TOKENS), TARGETS)
