"""The vocabulary split over ranks: embedding, logits, and a cross-entropy that never joins them.

Shoeybi et al., Megatron-LM (2019), section 3. Letters: N ranks, r this one, V vocabulary. The
embedding's rows and the head's columns are cut into equal runs; where N does not divide V, the last
rows and columns are padding (section 5.1).

    embedding      Y = sum over r of (W_r[x], or 0 where x is another rank's)             (g)
    head           logits_r[B, T, V/N] = f(X[B, T, C]) W_r[C, V/N]
    cross-entropy  M = max over r of max logits_r        Z = sum over r of sum exp(logits_r - M)
                   L = sum over targets of (log Z - (logits[target] - M)) / n

No rank has the logit of a target that is IGNORED; its row has the loss 0 and the gradient 0.

The loss takes three all_reduces of B T numbers each instead of a gather of B T V numbers, which no
rank ever holds.
"""

import numpy as np

from minidist import nn
from minidist.autograd import Function, Tensor, functions
from minidist.autograd.functions import check_indices
from minidist.autograd.losses import IGNORED, reduction_size_or
from minidist.backend import Array, array_module, on_device_of, widen
from minidist.comm import Group
from minidist.errors import WrongInput
from minidist.parallel.collective_functions import copy_to, reduce_from
from minidist.rng import Randomness
from minidist.tensor_parallel.whole import columns_of, rows_of


def own_tokens(vocab: int, group: Group) -> np.ndarray:
    """Return the r-th of N equal runs of tokens; tokens from `vocab` on are padding."""
    each = -(-vocab // group.size)
    return np.arange(group.rank * each, (group.rank + 1) * each)


class VocabParallelEmbedding(nn.Module):
    """Y[..., C] = g(W_r[x - first] where x is this rank's, else 0);  W[V/N, C]."""

    def __init__(self, embedding: nn.Embedding, group: Group, leave=reduce_from):
        self.vocab, self.group, self.leave = len(embedding.weight), group, leave
        self.tokens = own_tokens(self.vocab, group)
        self.weight = rows_of(embedding.weight, self.tokens)

    def forward(self, indices: Array, randomness: Randomness | None = None) -> Tensor:
        domain = f"a vocabulary of {{}}, the rows of {self.weight.name}"
        tokens = check_indices(indices, "token", self.vocab, domain=domain)
        local = tokens - self.tokens[0]
        is_here = (local >= 0) & (local < len(self.tokens))
        rows = functions.embedding(np.where(is_here, local, 0), self.weight)
        mask = on_device_of(is_here[..., None].astype(rows.dtype), rows.data)
        return self.leave(rows * mask, self.group)


def split_tables(embedding: nn.Module, group: Group, leave=reduce_from) -> None:
    """Split the table of each vocabulary that an embedding has: a source's, a target's."""
    for part in embedding.modules(nn.TokenAndPosition):
        assert isinstance(part, nn.TokenAndPosition)
        part.token = VocabParallelEmbedding(part.token, group, leave)


def split_product(x: Tensor, weight: Tensor, group: Group, transposed: bool) -> Tensor:
    """logits[B, T, V/N] = f(X[B, T, C]) W[C, V/N]; transposed: W is stored as [V/N, C]."""
    return functions.linear(copy_to(x, group), weight, transposed=transposed)


class VocabParallelHead(nn.Module):
    """X[B, T, C] -> logits[B, T, V/N] = f(norm(X)) W[C, V/N]; tied: W = E_r^T."""

    def __init__(self, head: nn.Head, group: Group, tied_to=None, product=split_product):
        self.norm, self.group, self.product = head.norm, group, product
        self.tied = tied_to is not None
        self.weight = tied_to
        if tied_to is None:
            weight = head.linear.weight
            self.weight = columns_of(weight, own_tokens(weight.shape[1], group))

    def forward(self, x: Tensor, randomness: Randomness | None = None) -> Tensor:
        return self.product(self.norm(x), self.weight, self.group, self.tied)


def split_head(
    head: nn.Module, embedding: nn.Module, group: Group, product=split_product
) -> VocabParallelHead:
    """Split a head by columns; a tied one has the split table of the embedding."""
    assert isinstance(head, nn.Head)
    table = next(embedding.modules(VocabParallelEmbedding))
    return VocabParallelHead(head, group, table.weight if head.tied else None, product)


class VocabParallelCrossEntropy(Function):
    """L = sum of (log Z - logits[target] + M) / n  =>  dlogits_r = (exp(logits_r - M)/Z - 1) dL/n.

    The 1 is subtracted at the target, on the rank that has it. Padding counts as -infinity.
    """

    def __init__(self, targets: np.ndarray, vocab: int, reduction_size: float, group: Group):
        self.targets, self.vocab = targets, vocab
        self.reduction_size, self.group = reduction_size, group

    def forward(self, logits):
        xp, group, each = array_module(logits), self.group, logits.shape[-1]
        rows = widen(logits).reshape(-1, each)
        first = group.rank * each
        real = max(0, min(each, self.vocab - first))  # columns that are no padding
        highest = rows[:, :real].max(axis=1) if real else xp.full(len(rows), -xp.inf, rows.dtype)
        highest = group.all_reduce(highest, op="max", label="maximum")
        p = xp.zeros_like(rows)  # not the exponential of padding, which may overflow
        xp.exp(rows[:, :real] - highest[:, None], out=p[:, :real])
        sums = group.all_reduce(p.sum(axis=1), label="sum of exponentials")
        targets = self.targets.reshape(-1)
        self.ignored = on_device_of(targets == IGNORED, logits)
        local = targets - first
        here = np.flatnonzero((local >= 0) & (local < each))  # rows whose target this rank has
        self.picked = on_device_of(here, logits), on_device_of(local[here], logits)
        target = xp.zeros(len(rows), rows.dtype)
        target[self.picked[0]] = rows[self.picked] - highest[self.picked[0]]
        target = group.all_reduce(target, label="logit of the target")
        p /= sums[:, None]
        self.p, self.shape, self.dtype = p, logits.shape, logits.dtype
        losses = xp.log(sums) - target
        losses[self.ignored] = 0
        return losses.sum() / self.reduction_size

    def backward(self, grad):
        dlogits = self.p
        dlogits[self.picked] -= 1
        dlogits[self.ignored] = 0
        dlogits *= grad / self.reduction_size
        return dlogits.reshape(self.shape).astype(self.dtype, copy=False)


def check_loss(model: nn.Module) -> None:
    """Raise ValueError unless a model's loss can be the cross entropy over a split vocabulary."""
    if model.loss is not nn.cross_entropy:
        raise WrongInput(
            "the vocabulary is cut, and the loss is the cross entropy over it; this model has "
            "another loss: use TensorParallel(..., split='attention'), or train it by "
            "DataParallel, Zero or Pipeline"
        )


def cross_entropy(
    logits: Tensor,
    targets: Array,
    reduction_size: float | None = None,
    *,
    group: Group,
    vocab: int,
) -> Tensor:
    """Return the cross-entropy of logits[..., V/N] split over the ranks, as the loss of one device.

    vocab  V without padding
    """
    targets = check_indices(targets, "target", vocab, first=IGNORED)
    if targets.shape != logits.shape[:-1]:
        raise WrongInput(
            f"logits {list(logits.shape)} need targets {list(logits.shape[:-1])}, "
            f"got {list(targets.shape)}"
        )
    n = reduction_size_or(targets, reduction_size)
    return VocabParallelCrossEntropy(targets, vocab, n, group)(logits)


def argmax(logits: Array, group: Group, vocab: int) -> Array:
    """Return the most likely token of each row of logits[..., V/N]; never a padding token."""
    xp, each = array_module(logits), logits.shape[-1]
    real = max(0, min(each, vocab - group.rank * each))
    best = xp.full(logits.shape[:-1], -xp.inf, logits.dtype)
    where = xp.zeros(logits.shape[:-1], np.int64)
    if real:
        where = logits[..., :real].argmax(axis=-1)
        best = logits[..., :real].max(axis=-1)
    bests = group.all_gather(best[None], label="best logits")
    tokens = group.all_gather(where[None] + group.rank * each, label="best tokens")
    winner = bests.argmax(axis=0)[None]
    return xp.take_along_axis(tokens, winner, axis=0)[0]
