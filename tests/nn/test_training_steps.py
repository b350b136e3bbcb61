"""A step of every kind of model: its dtypes, deferred gradients, rounding; and that it learns."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist import datasets, nn, no_grad, optim
from minidist.backend import to_host
from minidist.nn.embedding import BEGIN, PAD
from minidist.rng import Randomness
from tests.strategies import (
    arrays,
    assert_same_bits,
    gradients,
    seeds,
    sentences,
    transformers,
    translators,
    watch_dtypes,
)

MODELS = {
    "MLP, relu": lambda **more: nn.MLP([4, 8, 3], "relu", **more),
    "MLP, gelu": lambda **more: nn.MLP([4, 8, 3], "gelu", **more),
    "Siamese": lambda **more: nn.Siamese([4, 5, 4], classes=3, **more),
    "Transformer": lambda **more: nn.Transformer(5, 4, 2, 2, 3, **more),
    "Transformer, tied": lambda **more: nn.Transformer(5, 4, 2, 2, 3, tied=True, **more),
    "experts": lambda **more: nn.Transformer(5, 4, 2, 2, 3, tied=True, experts=2, **more),
    "Seq2Seq": lambda **more: nn.Seq2Seq(7, 6, 4, 2, 2, 4, 3, **more),
}
every_model = pytest.mark.parametrize("name", MODELS)


def batch_of(model, dtype):
    """Return inputs and targets; some words of a source are padding."""
    if isinstance(model, nn.Seq2Seq):
        tokens = np.array([[3, 4, 5, 6, BEGIN, 3, 4], [6, 5, PAD, PAD, BEGIN, 5, PAD]])
        return tokens, np.array([[3, 4, 2], [5, 2, 0]])
    if isinstance(model, nn.Transformer):
        tokens = np.random.default_rng(0).integers(0, 5, (4, 3))
        return tokens, tokens
    shape = (5, 2, 4) if isinstance(model, nn.Siamese) else (5, 4)
    return arrays(*shape, dtype=dtype), np.arange(5) % 3


@every_model
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_it_keeps_its_dtype(name, dtype, place, device):
    more = {"dropout": 0.2} if name in ("Seq2Seq", "experts") or "Transformer" in name else {}
    model = MODELS[name](dtype=dtype, **more).to(device)
    optimizer = optim.AdamW(model.parameters(), lr=np.float64(0.01))
    x, targets = batch_of(model, dtype)
    before, randomness = model.state(), Randomness(0, 0, np.arange(len(x)))
    with watch_dtypes() as dtypes:
        y = model(place(x) if x.dtype == dtype else x, randomness)
        nn.cross_entropy(y, targets).backward()
    assert dtypes == {np.dtype(dtype)}
    norm = optimizer.clip_global_norm(0.1)
    assert type(norm) is float if device == "cpu" else norm.dtype == "float64" and norm.ndim == 0
    optimizer.step()
    for p in model.parameters():
        assert p.dtype == p.grad.dtype == p.home.vector.dtype == dtype
        assert bool(abs(p.data).max() < 10), p.name  # no NaN, either
        assert (to_host(p.data) != before[p.name]).any(), p.name


@every_model
def test_half_and_single_precision_are_near_double_precision(name, place, device):
    model = MODELS[name](dtype="float64")
    x, _ = batch_of(model, "float64")
    want = model(x).data
    for dtype, bound in [("float64", 1e-12), ("float32", 1e-5), ("float16", 1e-2)]:
        given_x = place(x.astype(dtype)) if x.dtype.kind == "f" else x
        got = to_host(model.astype(dtype).to(device)(given_x).data)
        assert abs(got - want).max() < bound * abs(want).max()


@given(model=transformers() | translators(dropout=(0.0, 0.3)), data=st.data(), seed=seeds)
def test_deferred_gradients_have_the_same_bits(model, data, seed):
    if isinstance(model, nn.Seq2Seq):
        tokens = data.draw(sentences(model))
        targets = tokens[:, model.source_length :]
    else:
        shape = (2, model.context)
        tokens = targets = np.random.default_rng(seed).integers(0, model.vocab, shape)
    randomness, results = Randomness(0, 0, np.arange(len(tokens))), []
    for thunks in (None, []):
        for p in model.parameters():
            p.grad = None
        nn.cross_entropy(model(tokens, randomness), targets).backward(deferred=thunks)
        for thunk in thunks or []:
            thunk()
        results.append(gradients(model))
    assert_same_bits(*results)


@pytest.mark.parametrize(
    "model, batch, epochs",
    [(nn.CNN(1, 10, (8, 16)), 50, 2), (nn.ResidualMLP(64, 32, 4, 10), 125, 5)],
    ids=["CNN", "ResidualMLP"],
)
def test_it_learns_the_digits(model, batch, epochs):
    images, labels = datasets.digits()
    images = images.reshape(-1, 1, 8, 8) if isinstance(model, nn.CNN) else images
    optimizer = optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(epochs):
        for share in datasets.Sampler(1500, batch).epoch(epoch):
            nn.cross_entropy(model(images[share.examples]), labels[share.examples]).backward()
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    with no_grad():
        right = model(images[1500:]).data.argmax(axis=-1) == labels[1500:]
    assert right.mean() > 0.8
