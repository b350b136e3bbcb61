"""A Transformer split by matrices, by heads, by vocabulary, by sequence: one device's gradients."""

import copy
from functools import partial

import numpy as np
import pytest

from minidist import Tensor, nn, optim
from minidist.autograd import recompute
from minidist.autograd.deferred import compute
from minidist.planning.costs.collectives import all_reduce_bytes
from minidist.rng import Randomness
from minidist.tensor_parallel import (
    ParallelTransformer,
    counted_here,
    unsplit,
    vocab_parallel,
)
from minidist.tensor_parallel.sequence_parallel import all_reduce_partial, sequence_parallel
from minidist.verify.compare import compare
from minidist.verify.strategies.cases import random_weights, translator_case
from tests.strategies import arrays
from tests.tensor_parallel.judges import (
    SPLITS,
    check,
    config_of,
    judge_transformer,
)

both_splits = pytest.mark.parametrize("kind", ["matrices", "sequence"])


def recomputed(model, tokens, randomness):
    """Run the layers so that backward runs each of them again."""
    x = tokens
    for layer in model.layers:
        x = recompute(layer, x, randomness, parameters=layer.parameters())
    return x


class Deferring:
    """A tensor whose backward puts the weights' gradients off, and then computes them."""

    def __init__(self, tensor, ledger):
        self.tensor, self.data, self.ledger = tensor, tensor.data, ledger

    def backward(self, grad):
        later = []
        self.tensor.backward(grad, deferred=later)
        moved = self.ledger.total
        compute(later)
        assert later and self.ledger.total == moved, "a gradient that is put off communicates"


@both_splits
@pytest.mark.parametrize("again", [False, True])
def test_weight_gradients_that_are_put_off_are_the_same_and_move_nothing(cluster, kind, again):
    def worker(group, kind, config):
        def run(model, tokens, randomness):
            y = recomputed(model, tokens, randomness) if again else model(tokens, randomness)
            return Deferring(y, group.ledger)

        return judge_transformer(group, kind, config, 6, run=run)

    check(cluster(3, "thread").run(worker, kind, config_of(depth=2)))


@both_splits
@pytest.mark.parametrize("tied", [True, False])
def test_load_state_takes_a_single_device_state_and_keeps_its_part(cluster, kind, tied):
    def worker(group, kind, config):
        whole = random_weights(nn.Transformer(**config), 1)
        other = nn.Transformer(**config | {"seed": 5})
        drawn = SPLITS[kind](copy.deepcopy(other), group)
        loaded = SPLITS[kind](other, group)
        loaded.load_state(whole.state())
        found = {n: unsplit(p.data, p, group) for n, p in loaded.named_parameters().items()}
        same = all(np.array_equal(found[n], x) for n, x in whole.state().items())
        own = all(
            np.array_equal(p.data, p.shard.of(whole.state()[n]) if p.shard else whole.state()[n])
            for n, p in loaded.named_parameters().items()
        )
        views = all(np.shares_memory(p.data, p.home.vector) for p in loaded.parameters())
        want = nn.Transformer(**config | {"seed": 5}).state()
        by_name = all(
            np.array_equal(unsplit(p.data, p, group), want[n])
            for n, p in drawn.named_parameters().items()
        )
        return same, own, views, by_name, list(found) == list(whole.state())

    config = config_of(tied=tied)
    assert cluster(3, "thread").run(worker, kind, config) == [(True,) * 5] * 3


def test_a_split_seq2seq_takes_a_single_device_state_and_gives_it_back(cluster):
    def worker(group):
        whole, other = (translator_case(width=24, heads=12).model for _ in range(2))
        random_weights(other, 5)
        parts = ParallelTransformer(other, group)
        parts.load_state(whole.state())
        found = {n: unsplit(p.data, p, group) for n, p in parts.named_parameters().items()}
        counted = group.all_reduce(
            sum(p.size for p in counted_here(parts.parameters(), group)), label="numbers"
        )
        padding = 24 * sum(-n % group.size for n in (whole.source_vocab, whole.vocab, whole.vocab))
        assert counted - padding == sum(p.size for p in whole.parameters())
        return all(np.array_equal(found[n], x) for n, x in whole.state().items())

    assert cluster(3, "thread").run(worker) == [True] * 3


def train_some_steps(group, kind, rule, vocab, tied):
    """Train on random tokens; return the weights' comparison with one device's, and the padding.

    Biases are not zeros at first: the gradient of the keys' is rounding alone, which the quotient
    of Adam's averages would make as large as any other.
    """
    whole = random_weights(nn.Transformer(**config_of(vocab=vocab, tied=tied)), 0)
    parts = SPLITS[kind](copy.deepcopy(whole), group)
    loss = partial(vocab_parallel.cross_entropy, group=group, vocab=vocab)
    ours, theirs = rule(parts.parameters()), rule(whole.parameters())
    padded = [p for p in parts.parameters() if p.shard and p.shard.indices.max() >= p.shard.full]
    largest = 0.0
    for step in range(4):
        x, targets = np.random.default_rng(step).integers(0, vocab, (2, 3, 12))
        randomness = Randomness(0, step, np.arange(3))
        nn.cross_entropy(whole(x, randomness), targets).backward()
        loss(parts(x, randomness), targets).backward()
        if kind == "sequence":
            all_reduce_partial(parts, group)
        for optimizer in (theirs, ours):
            optimizer.step()
        for p in padded:
            extra = p.shard.indices >= p.shard.full
            for array in (p.data, p.grad):
                largest = max(largest, abs(np.compress(extra, array, p.shard.axis)).max())
        for optimizer in (theirs, ours):
            optimizer.zero_grad()
    got = {n: unsplit(p.data, p, group) for n, p in parts.named_parameters().items()}
    return compare([got], whole.state()), largest, len(padded)


@both_splits
def test_padding_of_the_vocabulary_stays_zero_and_gets_no_gradient(cluster, kind):
    for rule, vocab, size in [
        (partial(optim.AdamW, lr=0.01, weight_decay=0.1), 7, 2),
        (partial(optim.Adam, lr=0.01, weight_decay=0.1), 3, 4),  # a rank of padding alone
        (partial(optim.SGD, lr=0.1, momentum=0.9), 4, 3),
    ]:
        ranks = cluster(size, "thread")
        found = ranks.run(train_some_steps, kind, rule, vocab, vocab % 2 == 1)
        for comparison, largest, _ in found:
            assert comparison.ok and largest == 0, (comparison, largest)
        assert sum(padded for _, _, padded in found) > 0


def block_ledgers(group, kind, dtype):
    """Return what others took from this rank in a block's forward, and in its backward."""
    model = nn.Transformer(5, 24, 12, 1, 12, dtype=dtype, dropout=0.1)
    block = SPLITS[kind](model, group).layers[1]
    T = 12 // group.size if kind == "sequence" else 12
    x = Tensor(arrays(5, T, 24, dtype=dtype), requires_grad=True)
    y = block(x, Randomness(0, 0, np.arange(5)))
    forward = group.ledger.bytes.copy()
    y.backward(arrays(*y.shape, dtype=dtype))
    return dict(forward), dict(group.ledger.bytes - forward)


def block_bytes(B, T, C, itemsize, N, sequence=False):
    """Return {operation: payload bytes that each rank sends}, forward and backward.

    For one block of a split Transformer on a batch X[B, T, C]. If only matrices are split: two
    all_reduces each way. With the sequence split, N dividing T: two all_gathers and two
    reduce_scatters each way, and backward gathers the inputs of two products once more.
    """
    n = B * T * C
    if not sequence:
        way = {"all_reduce": [2 * own for own in all_reduce_bytes(None, n, itemsize, N)]}
        return way, way
    part = [(N - 1) * n // N * itemsize] * N  # N - 1 others take n/N; or all but one's own n/N
    forward = {"all_gather": [2 * p for p in part], "reduce_scatter": [2 * p for p in part]}
    return forward, forward | {"all_gather": [4 * p for p in part]}


@both_splits
def test_each_rank_gives_the_bytes_of_the_formula_per_operation(cluster, kind):
    for dtype, size in [("float32", 4), ("float64", 3), ("float32", 1)]:
        itemsize = np.dtype(dtype).itemsize
        for rank, found in enumerate(cluster(size, "thread").run(block_ledgers, kind, dtype)):
            want = block_bytes(5, 12, 24, itemsize, size, kind == "sequence")
            assert found == tuple(
                {op: ranks[rank] for op, ranks in half.items() if ranks[rank]} for half in want
            )


def test_a_frozen_model_communicates_no_gradient(cluster):
    """With the embedding frozen the first norm's input needs no gradient, nor does anything else.

    With all weights frozen and a differentiable input nothing is gathered again for dW.
    """

    def worker(group):
        model = nn.Transformer(5, 12, 12, 1, 12, dtype="float64")
        block = sequence_parallel(model, group).layers[1]
        block.freeze()
        x = Tensor(arrays(2, 4, 12), requires_grad=True)
        y = block(x)
        forward = group.ledger.bytes.copy()
        y.sum().backward()
        frozen = dict(group.ledger.bytes - forward)
        before = group.ledger.total
        column = block.expand
        for p in column.parameters():
            p.requires_grad = True
        y = column(x.detach())
        middle = group.ledger.total
        y.sum().backward()
        return frozen, middle - before, dict(group.ledger.bytes)["reduce_scatter"]

    S = 2 * 12 * 12 * 8
    for frozen, forward, _ in cluster(3, "thread").run(worker):
        assert frozen == {"all_gather": 2 * 2 * S // 3, "reduce_scatter": 2 * 2 * S // 3}
        assert forward == 2 * S // 3
