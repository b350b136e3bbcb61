# %% [markdown]
# # 12. A Transformer on many ranks: heads, columns, rows and words
#
# Lesson 11 split an MLP: the first matrix by columns, the second by rows, with f before and g
# after. A Transformer has three more places to cut: attention, the embedding and the head with its
# loss. All three turn out to be columns and rows again. The library's version is
# `minidist/tensor_parallel/parallel_transformer.py`, after Shoeybi et al. 2019 (Megatron-LM),
# section 3.
#
# Letters: `N` ranks, `r` one of them; `B` examples of `T` tokens, `C` the width, `H` heads of width
# `D = C/H`, `V` words in the vocabulary; `z[B, T, V]` logits. f: forward identity, backward
# all_reduce; g: forward all_reduce, backward identity.

# %%
from functools import partial

import numpy as np
from support import exercise, figures

from minidist import Cluster, Tensor, nn
from minidist.autograd import Function
from minidist.autograd.kept import kept
from minidist.data_parallel.naive import all_reduce_gradients
from minidist.rng import Randomness, generator
from minidist.tensor_parallel import (
    ColumnParallelLinear,
    ParallelAttention,
    ParallelTransformer,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
    unsplit,
    vocab_parallel,
)

figures.arguments()
clusters = {N: Cluster(N) for N in (1, 2, 4)}

# %% [markdown]
# ## Problem
#
# With a large vocabulary the largest array of a training step is no matrix. `kept` lists the arrays
# that forward keeps for backward; which is the largest?


# %%
def on_one_device(model, group):
    return model, nn.cross_entropy


def largest_kept(group, build, B, T, V):
    """Return (what, bytes) of the largest array that a forward pass keeps."""
    model, loss = build(nn.Transformer(V, 32, 4, 1, T), group)
    tokens = generator(0, "words").integers(0, V, (B, T))
    return max(
        ((what, a.nbytes) for what, a in kept(loss(model(tokens), tokens))), key=lambda x: x[1]
    )


B, T, V = 8, 16, 2003
((what, size),) = clusters[1].run(largest_kept, on_one_device, B, T, V)
print(f"B = {B}, T = {T}, V = {V}: {what}, {size:,} bytes; B T V 4 = {B * T * V * 4:,}")
assert size == B * T * V * 4
print(f"GPT-2's 50,257 words, 8 x 1024 tokens: {8 * 1024 * 50257 * 4 / 1e9:.2f} GB")

# %% [markdown]
# It belongs to the loss, which keeps a probability for every word at every position. Cutting only
# the blocks' matrices would leave this array whole, on every rank.
#
# ## Picture
#
#     X[B, T, C], the same on all ranks
#     |-- norm -> f -> QKV columns | attention of my heads | output rows -> g -> dropout -- + X
#     |-- norm -> f -> expand columns |        gelu        | contract rows -> g -> dropout -- + X
#
# Heads are independent of each other, so between f and g a rank computes its H/N heads alone. One
# matrix, QKV, makes queries, keys and values: its 3C columns are [3, H, D]. A head needs its own
# query, key and value, so a rank takes its heads out of each of the three blocks of columns:
#
#     columns of QKV      q0 q1 q2 q3 | k0 k1 k2 k3 | v0 v1 v2 v3        H = 4 heads
#     rank 0 of 2         q0 q1         k0 k1         v0 v1
#     rank 1 of 2               q2 q3         k2 k3         v2 v3
#
# ## Math
#
#     attention   [O_0 | ... | O_{H-1}] W_o = sum over heads of O_h W_o[rows of h]:    rows, then g
#     embedding   E[x] = sum over r of (E_r[x], or 0 where word x is another rank's):  rows, then g
#     head        z_r = f(X) W_r:  each rank has the logits of its own V/N words:      columns
#
# The loss of a position with logits z and target word y is `log(sum over words of exp z) - z[y]`.
# No rank has all z of a position, but it needs only three numbers from the others: the largest
# logit M, for stability; the sum of exponentials Z; and the target's logit.
#
#     M = max over r of max z_r       Z = sum over r of sum exp(z_r - M)
#     loss = log Z - (z[y] - M)       dz_r = exp(z_r - M)/Z, less 1 in the column of word y
#
# Three all_reduces of B T numbers replace a gather of B T V, and backward needs none at all.
#
# ## Code
#
# The same model, with its matrices replaced. What is not mentioned (norms, dropouts, sums,
# positions) runs on every rank as before. Then the loss.


# %%
def split_block(block, group):
    block.attention = ParallelAttention(block.attention, group)  # QKV columns, output rows
    block.expand = ColumnParallelLinear(block.expand, group)
    block.contract = RowParallelLinear(block.contract, group)
    return block


def our_transformer(model, group):
    embedding, *blocks, head = model.layers
    embedding.token = VocabParallelEmbedding(embedding.token, group)
    blocks = [split_block(block, group) for block in blocks]
    head = VocabParallelHead(head, group, embedding.token.weight if head.tied else None)
    return nn.Sequential([embedding, *blocks, head])  # tokens[B, T] -> logits[B, T, V/N]


class OurCrossEntropy(Function):
    """z_r[B, T, V/N] -> mean loss."""

    def __init__(self, targets, vocab, group):
        self.targets, self.vocab, self.group = targets.reshape(-1), vocab, group

    def forward(self, z):
        group, rows, self.shape = self.group, z.reshape(-1, z.shape[-1]).copy(), z.shape
        first = group.rank * rows.shape[1]  # my first word
        rows[:, max(0, self.vocab - first) :] = -np.inf  # padding, if N does not divide V
        rows -= group.all_reduce(rows.max(axis=1), op="max")[:, None]
        word = self.targets - first
        self.mine = np.flatnonzero((word >= 0) & (word < rows.shape[1]))
        self.word, target = word[self.mine], np.zeros(len(rows))
        target[self.mine] = rows[self.mine, self.word]
        self.p = np.exp(rows)
        Z = group.all_reduce(self.p.sum(axis=1))
        self.p /= Z[:, None]
        return (np.log(Z) - group.all_reduce(target)).mean()

    def backward(self, grad):
        self.p[self.mine, self.word] -= 1
        return (self.p * (grad / len(self.p))).reshape(self.shape)


# %% [markdown]
# Is it right? All parameters, in float64, with dropout: a mask is a hash of seed, step, layer,
# example and element (`Randomness`), so all ranks draw the same one. Neither 2 nor 4 divides 103
# words: ranks take equal runs of words, and the last run is padded with zeros, whose gradient is
# zero. The head is once a separate matrix and once *tied*, the same matrix as the embedding.


# %%
def ours(model, group):
    vocab = model.vocab
    loss = lambda z, targets: OurCrossEntropy(targets, vocab, group)(z)  # noqa: E731
    return our_transformer(model, group), loss


def librarys(model, group):
    loss = partial(vocab_parallel.cross_entropy, group=group, vocab=model.vocab)
    return ParallelTransformer(model, group), loss


def backward(model, loss):
    loss(model(tokens, Randomness(0, 0, np.arange(len(tokens)))), targets).backward()
    return model.named_parameters()


def gradients(group, build, model):
    named = backward(*build(model, group))
    return {name: unsplit(p.grad, p, group) for name, p in named.items()}


def small(tied=False):
    return nn.Transformer(103, 16, 4, 2, 8, 0, "float64", dropout=0.1, tied=tied)


tokens, targets = generator(0, "text").integers(0, 103, (2, 3, 8))
for tied in (False, True):
    want = {name: p.grad for name, p in backward(small(tied), nn.cross_entropy).items()}
    for N in (2, 4):
        error = 0.0
        for build in (ours, librarys):
            for got in clusters[N].run(gradients, build, small(tied)):
                assert got.keys() == want.keys()
                error = max(
                    error, *(abs(got[n] - want[n]).max() / abs(want[n]).max() for n in want)
                )
        head = "tied" if tied else "own head"
        print(f"{N} ranks, {head}: {len(want)} gradients, ours and the library's, {error:.0e} off")
        assert error < 1e-9

# %% [markdown]
# ## Measurement: no array of B T V
#
# The problem's measurement again, on more ranks:

# %%
for N in (2, 4):
    what, held = max(clusters[N].run(largest_kept, librarys, B, T, V), key=lambda found: found[1])
    formula = B * T * -(-V // N) * 4
    print(f"{N} ranks: {what}, {held:,} bytes each; B T (V/N, rounded up) 4 = {formula:,}")
    assert held == formula

# %% [markdown]
# ## Measurement: bytes, and why matrices are split inside one machine
#
# A block has two g forward and two f backward. An all_reduce of S bytes moves 2(N-1) S over all
# ranks, so with `S = B T C 4` a block moves `8 (N-1) S`, a rank 1/N of it (Narayanan et al. 2021,
# Megatron-LM, section 3.2). The embedding adds a g, the head an f. Data parallelism (lesson 3) sums
# the gradients instead: `2 (N-1) P 4` for P parameters, whatever the batch. A block has
# `12 C^2` weights, and some biases and norms, so the two cost the same at a little more than
# `B T = 3 C` tokens a step. We count both, for the blocks of a model:


# %%
def blocks_only():
    return nn.Transformer(11, C, 4, DEPTH, 16).layers[1:-1]


def split_matrices(group, B):
    model = nn.Sequential([split_block(block, group) for block in blocks_only()])
    x = np.ones((B, 16, C), np.float32)
    nn.squared_error(model(Tensor(x)), x).backward()
    return group.ledger.total


def split_batch(group, B):
    model, x = nn.Sequential(blocks_only()), np.ones((B // group.size, 16, C), np.float32)
    nn.squared_error(model(Tensor(x)), x, reduction_size=B * 16 * C).backward()
    all_reduce_gradients(model, group)
    return group.ledger.total


C, DEPTH, TOKENS = 32, 2, [64, 128, 256, 512]
P = sum(p.size for block in blocks_only() for p in block.parameters())
sent = {}
for tokens_a_step in TOKENS:
    for way in (split_matrices, split_batch):
        sent[way, tokens_a_step] = sum(clusters[4].run(way, tokens_a_step // 16))
    tp, dp = sent[split_matrices, tokens_a_step], sent[split_batch, tokens_a_step]
    print(f"{tokens_a_step:4} tokens: split matrices {tp:9,} bytes, split batch {dp:,}")
    assert tp == DEPTH * 8 * 3 * tokens_a_step * C * 4 and dp == 2 * 3 * P * 4

# %% [markdown]
# What is that in seconds? The largest model of Shoeybi et al. has C = 3072 and 72 blocks. Its
# matrices are split over 8 GPUs, and its batch over 64 such groups (table 1), 8 x 1024 tokens for
# each. A server has 300 GB/s between its 16 GPUs, and 100 GB/s to the other servers, for all 16
# (section 5). With 2 bytes a number, one GPU sends this, and by bandwidth alone it takes:

# %%
activation_bytes = 72 * 8 * 7 / 8 * 8 * 1024 * 3072 * 2
gradient_bytes = 2 * 63 / 64 * (8.3e9 / 8) * 2
for what, size in (("split matrices", activation_bytes), ("split batch", gradient_bytes)):
    print(
        f"{what}: {size / 1e9:4.1f} GB, {size / 300e9:.2f} s inside a server, "
        f"{size / (100e9 / 16):.2f} s between servers"
    )
assert 6 < activation_bytes / gradient_bytes < 7

# %% [markdown]
# 8192 tokens are close to 3C = 9216. But a GPU sums the gradients of its eighth of the model only:
# it sends six times as many bytes of activations as of gradients. Besides, gradients are sent once
# a step, for any number of micro-batches, and during backward. Activations make all ranks wait four
# times per block and micro-batch. Hence the rule: split matrices inside a machine; batch and
# pipeline between machines (Narayanan et al. 2021, section 3.2, takeaway 1).


# %%
def draw(plt):
    figure, (top, below) = plt.subplots(2, 1, figsize=(11, 6.4), height_ratios=[1, 1.6])
    figure.suptitle("A block meets twice each way; what lies outside f and g, every rank does")
    draw_block(top)
    line = np.array([32, 640])
    for way, bytes_at, color, style in (
        (split_matrices, DEPTH * 24 * line * C * 4, figures.COMMUNICATION, "o-"),
        (split_batch, [6 * P * 4] * 2, figures.INK, "s--"),
    ):
        below.loglog(line, bytes_at, style[1:], color=color)
        below.plot(TOKENS, [sent[way, n] for n in TOKENS], style[0], color=color)
    below.axvline(3 * C, color=figures.IDLE, linewidth=1, zorder=0)
    crossing = P / (4 * C * DEPTH)
    below.text(3 * C * 1.04, 1.9e5, f"3 C = {3 * C}; biases and norms make it {crossing:.0f}")
    below.text(225, 2e6, "split matrices: activations", ha="right")
    below.text(300, 4.4e5, "split batch: gradients")
    below.set(
        title=f"Up to about 3C tokens a step the matrices' split sends less (C = {C}, 4 ranks)"
    )
    below.set(xlabel="tokens a step, B T (lines: formula, marks: measured)")
    below.set(ylabel="bytes sent by all ranks", ylim=(1.5e5, 6e6))
    below.set_xticks([32, *TOKENS], [str(n) for n in (32, *TOKENS)])
    below.set_yticks([2e5, 1e6, 5e6], ["200 K", "1 M", "5 M"])
    below.minorticks_off()
    return figure


def draw_block(axes):
    meeting, alike = {"color": figures.COMMUNICATION}, {"facecolor": figures.SAME}
    for rank in (0, 1):
        own = figures.part(rank)
        attention = [
            (2.5, "QKV\ncolumns", own),
            (2.5, "my\nheads", own),
            (2.5, "output\nrows", own),
        ]
        mlp = [(2.5, "expand\ncolumns", own), (2.5, "gelu", own), (2.5, "contract\nrows", own)]
        pieces = []
        for branch in (attention, mlp):
            pieces += [(2, "norm", alike), (1, "f", meeting), *branch, (1, "g", meeting)]
            pieces += [(2.5, "dropout\n+ X", alike)]
        figures.stack(axes, rank, pieces, height=0.9)
    for x, words in ((2.5, "f: all_reduce backward"), (11, "g: all_reduce forward")):
        for branch in (0, 14):
            axes.text(x + branch, 1.75, words, ha="center", fontsize=10)
    axes.set_yticks([0, 1], ["rank 0", "rank 1"])
    axes.set(xticks=[], ylim=(2.1, -0.5), title="grey: the same on both ranks; blue: its own part")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)


figures.save(draw, "12_parallel_transformer")

# %% [markdown]
# ## Exercise 1: why did this break?
#
# QKV has 3C columns. Somebody cut them into N equal runs, as one cuts `expand`. All shapes fit,
# nothing fails, and yet the output is wrong. Why? Write `my_columns`.
#
# *Hint:* which of q, k and v does rank 0 of 2 get by equal runs? `np.arange(3 * width)`, reshaped
# to [3, H, D], has the heads as an axis.


# %%
def equal_runs(width, heads, rank, size):
    """Return the columns of QKV, 3 `width` in all, that a rank holds."""
    return np.array_split(np.arange(3 * width), size)[rank]


def my_columns(width, heads, rank, size):
    raise NotImplementedError  # your lines here


# %%
def attend(group, choose, x):
    """Return Y of an attention layer whose QKV is cut this way, and Y of the whole layer."""
    whole = nn.CausalSelfAttention(16, 4, dtype="float64")
    split, columns = ParallelAttention(whole, group), choose(16, 4, group.rank, group.size)
    split.qkv = ColumnParallelLinear(whole.qkv, group, columns=columns)
    return split(Tensor(x)).data, whole(Tensor(x)).data


def check_columns(choose):
    """Return what is wrong, or None."""
    x = generator(0, "x").standard_normal((2, 5, 16))
    for N in (2, 4):
        for got, right in clusters[N].run(attend, choose, x):
            off = np.linalg.norm(got - right) / np.linalg.norm(right)
            if off > 1e-12:
                return f"on {N} ranks the output is off by {off:.0%}"


def every_nth_head(width, heads, rank, size):
    """Whole heads, but not the ones whose rows of W_o the rank has."""
    return np.arange(3 * width).reshape(3, heads, -1)[:, rank::size].reshape(-1)


exercise.judge(1, check_columns, my_columns, tempting=[equal_runs, every_nth_head])

# %% [markdown]
# ## Exercise 2: the next word, without the logits
#
# To generate text every rank needs the most likely word, but has the logits of V/N words only.
# Write `next_words`: z_r[B, V/N] -> words[B], the same on all ranks, with at most two numbers per
# example from each rank to each other. (There is no padding here. Of equal logits the first wins.)
#
# *Hint:* each rank has a candidate. `group.all_gather(x[None])` stacks what the ranks have to
# [N, B]; all_reduce with op="max" finds the largest logit, but not its word.


# %%
def next_words(z, group):
    raise NotImplementedError  # your lines here


# %%
def find_words(group, attempt, z):
    return attempt(np.split(z, group.size, axis=1)[group.rank], group), group.ledger.total


def check_words(attempt):
    z = generator(0, "logits").standard_normal((6, 40))
    z[0] = 0  # all equal
    for N in (2, 4):
        for words, moved in clusters[N].run(find_words, attempt, z):
            if not np.array_equal(words, z.argmax(axis=1)):
                return f"{words} on {N} ranks, where {z.argmax(axis=1)} is right"
            if moved > 2 * 8 * 6 * (N - 1):
                return f"the words are right, for {moved} bytes from a rank of {N}"


def join_the_logits(z, group):
    return group.all_gather(z, axis=1).argmax(axis=1)


def forget_where_it_began(z, group):
    best = group.all_gather(z.max(axis=1)[None])
    words = group.all_gather(z.argmax(axis=1)[None])
    return np.take_along_axis(words, best.argmax(axis=0)[None], axis=0)[0]


exercise.judge(2, check_words, next_words, tempting=[join_the_logits, forget_where_it_began])

# %% [markdown]
# ## Exercise 3: the length of the gradient
#
# Clipping needs the length of the whole gradient: the root of the sum of all squares. A rank has
# parts of some gradients (`p.shard` is not None) and all of others, norms for example. Write
# `gradient_length`; one all_reduce is enough.
#
# *Hint:* how many times would a norm's gradient count if every rank added its squares?


# %%
def gradient_length(model, group):
    raise NotImplementedError  # your lines here


# %%
def find_length(group, attempt):
    model, loss = librarys(small(), group)
    backward(model, loss)
    return float(attempt(model, group))


def check_length(attempt):
    whole = backward(small(), nn.cross_entropy).values()
    right = sum((p.grad**2).sum() for p in whole) ** 0.5
    for N in (2, 4):
        for length in clusters[N].run(find_length, attempt):
            if abs(length / right - 1) > 1e-9:
                return f"{length / right:.4f} of the right length on {N} ranks"


def all_squares(model, group):
    own = sum((p.grad**2).sum() for p in model.parameters())
    return group.all_reduce(np.array(own)) ** 0.5


exercise.judge(3, check_length, gradient_length, tempting=[all_squares])

# %% [markdown]
# ## What it costs, and the next problem
#
# - **Four meetings per block that nothing hides**, of `B T C` numbers each: it needs links as fast
#   as those inside a machine.
# - **At most as many ranks as heads**, and thinner matrices on each (lesson 11).
# - **Norms, dropouts and sums N times over**, in time and in memory: from g to the next f every
#   rank computes and keeps the same X, for all positions.
#
# The last point is the next problem. Outside f and g nothing mixes positions, so there the sequence
# could be split: sequence parallelism, lesson 13.

# %%
for cluster in clusters.values():
    cluster.close()
