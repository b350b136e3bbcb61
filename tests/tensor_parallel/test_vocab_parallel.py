"""The vocabulary split over ranks: cross-entropy and argmax as if the logits lay on one device."""

import tracemalloc
from functools import partial
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist import Tensor, nn
from minidist.errors import RankFailed
from minidist.planning.costs.collectives import all_reduce_bytes
from minidist.tensor_parallel import (
    ParallelTransformer,
    VocabParallelHead,
    vocab_parallel,
)
from tests.strategies import arrays, seeds, watch_dtypes
from tests.tensor_parallel.judges import padded_part


def losses(group, logits, targets, reduction_size, padding=0.0):
    """Return (loss, dlogits) of the split cross-entropy, put together, and the padding's dlogits.

    padding  what stands in the columns beyond the vocabulary, which a head leaves 0
    """
    vocab = logits.shape[-1]
    own = padded_part(logits, group)
    each = own.shape[-1]
    real = max(0, min(each, vocab - group.rank * each))
    own[..., real:] = padding
    own = Tensor(own, requires_grad=True)
    loss = vocab_parallel.cross_entropy(own, targets, reduction_size, group=group, vocab=vocab)
    loss.backward(np.full((), 1.5, loss.dtype))
    whole = group.all_gather(own.grad, -1)[..., :vocab]
    best = vocab_parallel.argmax(own.data, group, vocab)
    return loss.data, whole, own.grad[..., real:], best


def held_to_one_device(found, logits, targets, reduction_size, rtol=1e-9):
    want = Tensor(logits, requires_grad=True)
    loss = nn.cross_entropy(want, targets, reduction_size)
    loss.backward(np.full((), 1.5, loss.dtype))
    scale = 1 / (reduction_size or max(1, nn.counted(targets)))
    for got, dlogits, extra, best in found:
        assert (got.dtype, got.shape) == (loss.dtype, ()) and dlogits.dtype == logits.dtype
        np.testing.assert_allclose(got, loss.data, rtol=rtol, atol=rtol)
        np.testing.assert_allclose(dlogits, want.grad, rtol=rtol, atol=rtol * scale)
        assert not extra.any() and not dlogits[targets == nn.IGNORED].any()
        np.testing.assert_array_equal(best, logits.argmax(axis=-1), strict=True)


@settings(max_examples=60)
@given(
    size=st.integers(1, 4),
    shape=st.lists(st.integers(0, 4), min_size=1, max_size=2),
    vocab=st.integers(1, 9),
    reduction_size=st.sampled_from([None, 3.0, 100]),
    scale=st.sampled_from([1.0, 30.0, 1e4]),
    padding=st.sampled_from([0.0, 50.0, 1e5]),
    seed=seeds,
)
def test_cross_entropy_is_the_one_of_whole_logits(
    cluster, size, shape, vocab, reduction_size, scale, padding, seed
):
    logits = scale * arrays(*shape, vocab, seed=seed)
    targets = np.random.default_rng(seed).integers(nn.IGNORED, vocab, shape)
    reduction_size = reduction_size or (None if nn.counted(targets) else 1)
    found = cluster(size, "thread").run(losses, logits, targets, reduction_size, padding)
    held_to_one_device(found, logits, targets, reduction_size)


@pytest.mark.parametrize("dtype, rtol", [("float16", 2e-3), ("float32", 2e-6), ("float64", 1e-9)])
def test_large_logits_and_ranks_of_padding_alone_neither_overflow_nor_warn(cluster, dtype, rtol):
    """All logits are far from the padding's 0: a maximum or an exponential of it would show."""

    def worker(group, *case):
        with np.errstate(all="raise", under="ignore"):
            return losses(group, *case)

    for (vocab, size), shift in product([(5, 4), (1, 4), (3, 2)], [1e4, -1e4]):
        logits = (arrays(2, 3, vocab) * 8 + shift).astype(dtype)
        targets = np.arange(6).reshape(2, 3) % vocab
        found = cluster(size, "thread").run(worker, logits, targets, None)
        held_to_one_device(found, logits, targets, None, rtol)


def test_the_first_of_equal_logits_is_predicted_and_padding_never(cluster):
    equal = np.zeros((1, 6, 5))
    equal[0, np.arange(5), np.arange(5)] = -1  # all but one are the largest
    equal[0, 5] = -np.inf
    for logits in equal, -5 - abs(arrays(4, 5)):  # less than the padding's
        for size in 1, 3, 4:
            found = cluster(size, "thread").run(
                lambda group, x=logits: vocab_parallel.argmax(padded_part(x, group), group, 5)
            )
            for best in found:
                np.testing.assert_array_equal(best, logits.argmax(axis=-1))


WRONG = [
    ([[0, 5]], (1, 2), "target 5 is outside a vocabulary of 5"),
    ([[0, 7]], (1, 2), "target 7 is outside a vocabulary of 5"),
    ([[-2, 0]], (1, 2), "target index -2 is negative; what does not count is IGNORED = -1"),
    ([[0.5, 1.0]], (1, 2), "target indices must be integers"),
    ([[0, 1, 2]], (1, 2), r"need targets \[1, 2\], got \[1, 3\]"),
    (np.zeros((0, 2), int), (0, 2), "none of 0 targets counts: .* reduction_size="),
    ([[-1, -1]], (1, 2), "none of 2 targets counts: .* reduction_size="),
]


def test_wrong_targets_are_refused(cluster):
    """A target that would fall into the padding of the last rank, too."""

    def worker(group, targets, shape):
        logits = padded_part(arrays(*shape, 5), group)
        vocab_parallel.cross_entropy(Tensor(logits), targets, group=group, vocab=5)

    for targets, shape, message in WRONG:
        with pytest.raises(RankFailed, match=message) as caught:
            cluster(4, "thread").run(worker, np.asarray(targets), shape)
        assert isinstance(caught.value.__cause__, ValueError)


def test_three_all_reduces_of_a_number_per_target_and_nothing_backward(cluster):
    def worker(group):
        logits = Tensor(padded_part(arrays(3, 7, 50), group), requires_grad=True)
        targets = np.zeros((3, 7), int)
        loss = vocab_parallel.cross_entropy(logits, targets, group=group, vocab=50)
        forward = dict(group.ledger.bytes)
        loss.backward()
        return forward, dict(group.ledger.bytes)

    bytes_sent = all_reduce_bytes(None, 3 * 7, 8, 3)
    for rank, (forward, both_ways) in enumerate(cluster(3, "thread").run(worker)):
        assert forward == both_ways == {"all_reduce": 3 * bytes_sent[rank]}


def test_no_rank_ever_holds_as_many_numbers_as_the_whole_logits(cluster):
    """All that a rank allocates at any time, its own logits aside, is less than B T V numbers.

    Its logits are B T V/4; probabilities and what they are computed from, as many each.
    """

    def worker(group, B, T, V, C):
        head = nn.Head(C, V, dtype="float64")
        split = VocabParallelHead(head, group)
        del head
        x = Tensor(arrays(B, T, C), requires_grad=True)
        targets = np.zeros((B, T), int)

        def peak():
            tracemalloc.start()
            try:
                logits = split(x)
                loss = vocab_parallel.cross_entropy(logits, targets, group=group, vocab=V)
                loss.backward()
                return tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()

        # What the pass needs, it needs each time. What the rank's process allocates for itself,
        # as an import or a table of old runs that grows, it needs once.
        return min(peak() for _ in range(3))

    B, T, V, C = 4, 16, 8000, 2
    for peak in cluster(4).run(worker, B, T, V, C):
        assert B * T * V * 8 / 4 < peak < 0.85 * B * T * V * 8


def test_a_training_step_keeps_its_dtype(cluster):
    def worker(group, dtype):
        model = ParallelTransformer(nn.Transformer(5, 8, 4, 1, 4, dtype=dtype, tied=True), group)
        loss = partial(vocab_parallel.cross_entropy, group=group, vocab=5)
        tokens = np.arange(8).reshape(2, 4) % 5
        with watch_dtypes() as dtypes:
            loss(model(tokens), tokens).backward()
        return {str(d) for d in dtypes}, {str(p.grad.dtype) for p in model.parameters()}

    for dtype in "float16", "float32":
        assert cluster(2).run(worker, dtype) == [({dtype}, {dtype})] * 2
