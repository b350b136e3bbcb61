# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
#   minidist: {lesson: 3, minutes: 35, needs: [1, 2], leads_to: [5, 17b, 21], lab: data_parallel}
# ---

# %% [markdown]
# (lesson-3)=
# # 3. Many ranks, one gradient
#
# **Question.** Ranks share a batch. How does each get the whole batch's gradient, and who waits?
#
# You need [hooks](01_autograd.py) and [all_reduce](02_collectives.py). New words:
# [shard](pages/glossary.md#shard), [bucket](pages/glossary.md#bucket). Letters: $N$ ranks; $B$
# examples, $b_r$ on rank $r$; $S$ bytes; $\alpha$ and $\beta$ seconds per message and per byte.

# %% tags=["setup", "hide-input"]
from functools import partial

import numpy as np
from support import begin, exercise, figures
from support.links import linked_cluster, watch_backward

from minidist import nn
from minidist.data_parallel.bucketed import Bucketed
from minidist.data_parallel.naive import all_reduce_gradients
from minidist.nn.datasets import digits
from minidist.verify.compare import compare

begin()
N, cluster = 4, linked_cluster(4, alpha=2e-3, beta=15e-9)  # its all_reduce sleeps: see below
images, labels = digits("float64")
mlp = partial(nn.MLP, [64, 32, 10], dtype="float64")

# %% [markdown]
# ## Problem: one core needs 304 days
#
# ResNet-50 takes $3.8 \times 10^9$ multiply-adds per image in forward ([He et al.
# 2016](https://arxiv.org/abs/1512.03385), table 1). With backward, 90 passes over 1.28 million
# images are $2.6 \times 10^{18}$ operations: 304 days at $10^{11}$ per second. [Goyal et al.
# 2017](https://arxiv.org/abs/1706.02677) did it in an hour, on 256 GPUs.
#
# ## Idea: share the batch, and sum the gradients
#
# Each rank begins with the same weights, takes its *shard* of the batch, and divides its loss by
# the size $B$ of the *whole* batch. Then they only have to sum gradients, and send nothing else.


# %%
def by_hand(group, model, loss):
    loss.backward()
    for p in model.parameters():
        p.grad = group.all_reduce(p.grad, label=p.name)


def gradient(group, way, model, x, y, counts, B):
    """Return the gradient of x, y on every rank, and the bytes that this rank has sent."""
    end = sum(counts[: group.rank + 1])  # counts: the examples of each rank
    mine = slice(end - counts[group.rank], end)  # its shard, perhaps empty
    loss = nn.cross_entropy(model(x[mine]), y[mine], reduction_size=B)  # divided by B
    way(group, model, loss)
    return {p.name: p.grad for p in model.parameters()}, group.ledger.total


# %% [markdown]
# The last batch of an epoch has 5 of 1797 images. Four ranks share it as 2, 1, 1, 1. We compare
# with one device, and with the library's [`naive`](../minidist/data_parallel/naive.py), in float64:


# %%
def one_device(x, y):
    model = mlp()
    nn.cross_entropy(model(x), y).backward()
    return {p.name: p.grad for p in model.parameters()}


def naive(group, model, loss):
    loss.backward()
    all_reduce_gradients(model, group)


case = mlp(), images[-5:], labels[-5:], [2, 1, 1, 1], 5
ours, theirs = ([g for g, _ in cluster.run(gradient, way, *case)] for way in (by_hand, naive))
print(f"one device: {compare(ours, one_device(*case[1:3]))}; library: {compare(ours, theirs[0])}")
assert compare(ours, one_device(*case[1:3])).ok and compare(ours, theirs[0], 0.0).ok

# %% [markdown]
# ## Why a sum, and not a mean of means?
#
# It is tempting to let each rank take the mean over its own shard, and then the mean over ranks.
#
# :::{admonition} Predict before you run
# How far off is this gradient if ranks have 8, 8, 8, 8 examples? And 9, 8, 8, 7? And 29, 1, 1, 1?
# :::

# %% tags=["hide-output"]
batch = images[-32:], labels[-32:]
for counts in ([8, 8, 8, 8], [9, 8, 8, 7], [29, 1, 1, 1]):
    means = cluster.run(gradient, by_hand, mlp(), *batch, counts, None)  # None: over its own shard
    found = [{name: g / N for name, g in rank.items()} for rank, _ in means]
    print(f"{counts!s:14}: off by {compare(found, one_device(*batch)).error:.1%}")

# %% [markdown]
# With equal shards nobody sees the mistake, so tests with a round batch pass. PyTorch's DDP takes
# the mean of means: [what to do about it](check_your_own.py).
#
# :::{dropdown} Where does the number come from?
# Let $dW_r$ be the gradient of the mean over the $b_r$ examples of rank $r$. One device's gradient
# is $\sum_r (b_r / B) \, dW_r$, not $\sum_r (1/N) \, dW_r$. With 29, 1, 1, 1 a single example
# counts 8 times what it should. A loss that is divided by $B$ has the right weights inside.
# :::
#
# ## What travels?
#
# :::{admonition} Predict before you run
# The model has $S$ bytes. How many do the four ranks send in a step? And with twice the batch?
# :::

# %% tags=["hide-output"]
S = sum(p.data.nbytes for p in mlp().parameters())
for B in (32, 64):
    found = cluster.run(gradient, by_hand, mlp(), images[:B], labels[:B], np.full(N, B // N), B)
    print(f"a batch of {B}: {sum(sent for _, sent in found) / S:g} S")
assert sum(sent for _, sent in found) == 2 * (N - 1) * S, "to the byte"

# %% [markdown]
# ## Who waits?
#
# All sums come *after* backward, though the last layer's gradient is complete early. So let the
# hook of each parameter give it to a second thread, which sums while backward goes on:


# %%
def overlapped(group, model, loss):
    second = group.split(0)  # the second thread's group

    def add_up(p):
        p.grad = second.all_reduce(p.grad, label=p.name)

    network = second.beside(add_up, "network")  # a queue to the second thread
    for p in model.parameters():
        p.add_hook(network.put)
    loss.backward()
    network.wait("the last sum")


# %% [markdown]
# Six layers sleep for 20 ms each in backward. An all_reduce sleeps for
# $2 (N - 1) (\alpha + \beta S / N)$ seconds: 18 ms for a layer's weights, and 12 ms for its bias,
# by latency alone. The library's [`bucketed`](../minidist/data_parallel/bucketed.py) sums both in
# one *bucket* ([Li et al. 2020](https://arxiv.org/abs/2006.15704), section 3.2).
#
# :::{admonition} Predict before you run
# How many ms are it from the start of backward to the last sum: naive, overlapped, bucketed?
# :::


# %% tags=["hide-output"]
def bucketed(group, model, loss):
    buckets = [layer.parameters() for layer in reversed(model.layers)]
    with Bucketed(model, group, check_weights=False, buckets=buckets).reduce():
        loss.backward()


runs = {way.__name__: watch_backward(cluster, way) for way in (naive, overlapped, bucketed)}
for name, run in runs.items():
    print(f"{name:10} {run.ms:4.0f} ms, {len(run.sums):2} all_reduces")
assert all(run.gradients == runs["naive"].gradients for run in runs.values()), "the same bits"
assert runs["bucketed"].ms < runs["naive"].ms

# %% [markdown]
# :::{dropdown} Where does the number come from?
# Naive: $6 \times 20 + 6 \times 30 = 300$ ms. Overlapped: after 20 ms the network has work for
# $6 \times 30$ ms: 200. Bucketed: a layer's 18 ms hide behind the next layer's 20, so only the last
# ones show: 138. Each takes a little longer, because ranks have to meet.
# :::


# %% tags=["hide-input"]
def draw(plt):
    figure, axes = plt.subplots(3, 1, figsize=(9, 4.2), sharex=True)
    for ax, (name, run) in zip(axes, runs.items(), strict=True):
        ax.broken_barh(run.layers, (0.6, 0.8), color=figures.BACKWARD, edgecolor="white")
        ax.broken_barh(run.sums, (-0.4, 0.8), color=figures.COMMUNICATION, edgecolor="white")
        ax.set(title=f"{name}: {run.ms:.0f} ms", yticks=[0, 1], yticklabels=["sums", "backward"])
    ax.set(xlabel="ms", xlim=(0, None))
    return figure


figures.show(
    draw,
    "03_data_parallel",
    caption="One rank's backward through six layers, and its sums over links that sleep.",
    alt="Naive: 12 sums follow backward. Bucketed: 6 sums, and only the last one is not hidden.",
)

# %% [markdown]
# ## What else must be right?
#
# - *The order.* All ranks sum the same buckets in one order, even if a parameter has no gradient.
# - *The learning rate* grows with $B$, in proportion, after a warm-up, [to a limit](21_scaling.py).
# - *Micro-batches.* Their gradients add up on the rank; only the last backward needs the sum.
# - *Batch norm* takes its mean over a rank's shard, unless [ranks share it](17b_batch_norm.py).
#
# ## Exercise 1: a bucket by hand
#
# One all_reduce per layer, of one flat array. `model.layers` are layers with `.parameters()`.


# %% tags=["exercise"]
def reduce_per_layer(group, model):
    """Give each p.grad the sum of the ranks' p.grad, of the same shape."""
    raise NotImplementedError  # your lines here


exercise.judge("03.1", reduce_per_layer)

# %% [markdown]
# ## Exercise 2: the wall
#
# The batch stays. Forward and backward take `compute` seconds on one rank, the update `update`;
# nothing overlaps, and there is no latency. By which factor is a step of $N$ ranks faster?


# %% tags=["exercise"]
def speedup(N, compute, update, S, link):
    """Return the factor; S: bytes of the gradient, link: bytes per second."""
    raise NotImplementedError  # your lines here


exercise.judge("03.2", speedup)

# %% [markdown]
# ## Exercise 3: why did this break?
#
# Somebody's model refuses an empty shard. So a rank without examples skips the step. Then the
# others meet the gradient of its *next* step, or wait. Write a `step` that is right.


# %% tags=["exercise"]
def step(group, model, x, y, B):
    """Leave the whole batch's gradient in p.grad; x, y: this rank's shard; B: the whole batch."""
    raise NotImplementedError  # your lines here


exercise.judge("03.3", step)
cluster.close()

# %% [markdown]
# ## At work
#
# | here | PyTorch | Megatron-LM | DeepSpeed | JAX |
# |---|---|---|---|---|
# | `bucketed` | `DistributedDataParallel` | `--overlap-grad-reduce` | `overlap_comm` | `psum` |
# | a bucket | `bucket_cap_mb` | `--ddp-bucket-size` | `reduce_bucket_size` | |
#
# **What it costs.** All ranks wait for the slowest. Each has all weights, gradients and averages.
#
# **Next:** nobody waits [with servers](04_parameter_server.py); no copies, in [lesson
# 5](05_zero.py).
