# %% [markdown]
# # 3. Data parallelism: many ranks, one gradient
#
# Every rank holds the whole model and a share of the batch. After backward, the ranks add up their
# gradients; from then on each of them goes on as if it had seen the whole batch. The library's
# version is `minidist/data_parallel/naive.py`; here you write it yourself. At the end the ranks do
# it while backward still runs: `bucketed.py`.
#
# Letters: `n` examples in the whole batch, `m_k` of them on rank `k`, `l_i` the loss of example
# `i`; `N` ranks; `P` parameters.

# %%
import os
import time
from contextlib import nullcontext

import numpy as np
from threadpoolctl import threadpool_limits

from minidist import Cluster, nn, optim
from minidist.data_parallel.bucketed import Bucketed
from minidist.data_parallel.naive import all_reduce_gradients
from minidist.datasets import Sampler, digits
from minidist.events import EventLog
from minidist.nn.flat_parameters import flat_slices
from minidist.tools import equivalence, figures, timeline

figures.arguments()
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
images, labels = digits()  # images[1797, 64] in float32, labels[1797]
SIZES = [64, 512, 512, 10]

# %% [markdown]
# ## Problem
#
# How long does one device take? In this lesson a device is one core: every rank gets one, so that
# "two ranks" means twice the hardware. We time the gradient of one batch, and count its work: a
# parameter costs a multiplication and an addition per example in the forward pass, and twice that
# in the backward pass, about `6 P` operations in all.
#
# Then we ask what the same core would need for a real job. ResNet-50 needs 3.8e9
# multiply-and-adds per image in the forward pass (He et al. 2016, table 1); it is trained on
# ImageNet's 1,281,167 images for 90 epochs.


# %%
def median_time(call, repeats=15):
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds))


def one_gradient(batch=448):
    loss = nn.cross_entropy(big(images[:batch]), labels[:batch])
    loss.backward()


big = nn.MLP(SIZES)
P = sum(p.size for p in big.parameters())
with threadpool_limits(1):
    seconds = median_time(one_gradient)
rate = 448 / seconds
days = 90 * 1_281_167 * (3 * 2 * 3.8e9) / (6 * P * rate) / 86_400
print(f"one core: {1e3 * seconds:.1f} ms for a batch of 448, {rate:,.0f} images/s, P = {P:,}")
print(f"that is {6 * P * rate / 1e9:.0f} Gflop/s; ResNet-50 on ImageNet would take {days:.0f} days")

# %% [markdown]
# Goyal et al. (2017) did that job in one hour, on 256 GPUs; its core is what this lesson builds.
#
# ## Picture
#
#     batch X[n, C]       rank 0        rank 1        rank 2        rank 3
#                        X[m_0, C]     X[m_1, C]     X[m_2, C]     X[m_3, C]     a shard each
#                            |             |             |             |
#                        w, forward    w, forward    w, forward    w, forward    the same weights
#                        backward      backward      backward      backward      no communication
#                            |             |             |             |
#                           dw_0          dw_1          dw_2          dw_3       partial: dw{+dp}
#                            |             |             |             |
#                            +------ all_reduce: dw = sum_k dw_k ------+
#                            |             |             |             |
#                            dw            dw            dw            dw        the same bits
#                            |             |             |             |
#                        w -= ...      w -= ...      w -= ...      w -= ...      the same weights
#
# Nothing else is sent in a step: not the weights, not the optimizer's state, not the data.
#
# ## Math
#
#     dw = d/dw (1/n) sum_i l_i                                   what one device computes
#        = sum_k (m_k/n) d/dw [(1/m_k) sum_{i in shard k} l_i]    shard means, weighted by size
#        = sum_k d/dw [(1/n) sum_{i in shard k} l_i]              the weight moves into the loss
#
# The third line is the recipe. Let every rank divide its loss by the `n` of the *whole* batch
# (`reduction_size=n`); then the gradients only have to be summed. No factor comes after the loss,
# and a rank with an empty shard adds an honest zero.
#
# ## Code
#
# The ten lines that matter. `counts` are the sizes of the shards; the model arrives on every rank
# as a copy of ours.


# %%
def worker(group, model, x, y, counts):
    """Leave the gradient of the whole batch on every rank: X[B/dp, C] -> dw{+dp} -> dw."""
    start = sum(counts[: group.rank])
    mine = slice(start, start + counts[group.rank])  # my shard, perhaps empty
    logits = model(x[mine])
    loss = nn.cross_entropy(logits, y[mine], reduction_size=sum(counts))  # n, not m_k
    loss.backward()
    for name, p in model.named_parameters().items():
        p.grad = group.all_reduce(p.grad, label=name)
    return {name: p.grad for name, p in model.named_parameters().items()}


def one_device(model, x, y):
    """Return {name: gradient} of the mean loss; the reference that everything is held to."""
    nn.cross_entropy(model(x), y).backward()
    gradients = {name: p.grad.copy() for name, p in model.named_parameters().items()}
    for p in model.parameters():
        p.grad = None
    return gradients


def relative_error(got, want):
    """Return |got - want| / |want|, the length of the whole difference against the gradient's."""
    difference = sum(float(((got[name] - want[name]) ** 2).sum()) for name in want)
    return (difference / sum(float((w**2).sum()) for w in want.values())) ** 0.5


# %% [markdown]
# Is it right? We try it on the last batch of an epoch: 1797 images in batches of 64 leave 5 for the
# end, which four ranks share as 2, 1, 1, 1. In float64, so that rounding stays near 1e-16 and a
# mistake has nowhere to hide. One `Cluster` per size: its ranks stay up for the whole lesson.

# %%
clusters = {size: Cluster(size) for size in (1, 2, 4)}
model = nn.MLP([64, 32, 10], dtype="float64")
x, y = images[-5:].astype("float64"), labels[-5:]

want = one_device(model, x, y)
ours = clusters[4].run(worker, model, x, y, [2, 1, 1, 1])
library = equivalence.gradients("naive", model, x, y, size=4)
for rank, gradients in enumerate(ours):
    error, gap = relative_error(gradients, want), relative_error(gradients, library)
    print(f"rank {rank}: {error:.1e} from one device, {gap:.1e} from the library's naive.py")
    assert error < 1e-9 and gap < 1e-9
    assert all((gradients[name] == ours[0][name]).all() for name in want), "ranks differ in a bit"

# %% [markdown]
# ## What breaks: the mean of the means
#
# It is tempting to let every rank take the mean over *its* shard, and then to average over ranks.
# Two lines change, and both look reasonable:


# %%
def mean_of_means(group, model, x, y, counts):
    """Wrong unless all shards are equal: weights every shard 1/N, where m_k/n is due."""
    start = sum(counts[: group.rank])
    mine = slice(start, start + counts[group.rank])
    m_k = max(counts[group.rank], 1)  # an empty shard has no mean: call it 0
    loss = nn.cross_entropy(model(x[mine]), y[mine], reduction_size=m_k)
    loss.backward()
    for name, p in model.named_parameters().items():
        p.grad = group.all_reduce(p.grad, label=name) / group.size  # and then by N
    return {name: p.grad for name, p in model.named_parameters().items()}


def errors(counts, first=0):
    """Return the relative gradient errors (mean of means, weighted sum) for these shards."""
    batch = slice(first, first + sum(counts))
    x, y = images[batch].astype("float64"), labels[batch]
    want = one_device(model, x, y)
    return [
        relative_error(clusters[4].run(way, model, x, y, counts)[0], want)
        for way in (mean_of_means, worker)
    ]


named = {
    "8 + 8 + 8 + 8": [8, 8, 8, 8],
    "2 + 1 + 1 + 1": [2, 1, 1, 1],
    "1 + 2 + 3 + 4": [1, 2, 3, 4],
    "29 + 1 + 1 + 1": [29, 1, 1, 1],
    "1 + 1 + 0 + 0": [1, 1, 0, 0],
}
found = {name: errors(counts) for name, counts in named.items()}
print(f"{'shards':>15}  {'mean of means':>14}  {'weighted sum':>13}   (relative gradient error)")
for name, (wrong, right) in found.items():
    print(f"{name:>15}  {wrong:14.1e}  {right:13.1e}")
    assert right < 1e-9
assert found["8 + 8 + 8 + 8"][0] < 1e-9, "equal shards: the two agree, so the mistake sleeps"
assert found["2 + 1 + 1 + 1"][0] > 1e-2
assert abs(found["1 + 1 + 0 + 0"][0] - 1 / 2) < 1e-9, "two ranks' means, divided by four"

# %% [markdown]
# With equal shards the mean of means *is* right, and that is what makes it dangerous: every test
# with a round batch size passes. Then comes an uneven batch, usually the last one of an epoch, and
# its gradient is off by tens of per cent, without any error message. With two empty shards of four
# it is cut in half. (Had we asked for the mean over an empty shard, `nn.cross_entropy` would have
# refused: it is 0/0.) The recipe is that of Goyal et al. (2017, section 3, remark 3): each worker
# divides its loss by the size of the whole minibatch, their `kn`, not by its own `n`.
#
# How wrong does it get? We move 32 examples step by step from equal shards towards rank 0. The
# error depends on which images meet in a shard, so each point is the mean over eight batches.

# %%
largest = [8, 9, 10, 11, 12, 14, 16, 18, 20, 23, 26, 29]
rests = [[len(part) for part in np.array_split(np.arange(32 - first), 3)] for first in largest]
draws = [
    [errors([first, *rest], 32 * draw) for first, rest in zip(largest, rests, strict=True)]
    for draw in range(8)
]
curve = np.mean(draws, axis=0)
assert curve[:, 1].max() < 1e-9 and curve[1:, 0].min() > 1e-3

# %% [markdown]
# ## Measurement
#
# **Bytes.** Of an array of S bytes, `all_reduce` moves `2 (N-1)/N S` out of each rank (lesson 2): a
# rank sums up one slice and hands the sum to everybody. A slice is a whole number of elements; a
# rank whose slice is `q` of `s` elements sends `s - q` in the first half, `(N-1) q` in the second.


# %%
def bytes_of_a_step(group, model, x, y, counts):
    worker(group, model, x, y, counts)
    return group.ledger.total  # payload that other ranks took from me


S = sum(p.data.nbytes for p in model.parameters())
for size in (2, 4):
    counts = [len(part) for part in np.array_split(np.arange(5), size)]
    sent = clusters[size].run(bytes_of_a_step, model, x, y, counts)
    for rank in range(size):
        owned = [(p.size, (p.size + size - 1 - rank) // size) for p in model.parameters()]
        assert sent[rank] == 8 * sum(s - q + (size - 1) * q for s, q in owned)
    assert sum(sent) == 2 * (size - 1) * S, "2 (N - 1) P itemsize, to the byte"
    formula = 2 * (size - 1) / size * S
    print(f"{size} ranks, S = {S:,} B: sent {sent}; 2(N-1)/N S = {formula:,.0f} per rank")

# %% [markdown]
# The batch size is nowhere in the formula. More examples per rank cost no byte more; more ranks
# never bring a rank's traffic above `2 S`.
#
# **Time.** Two questions can be asked of N ranks:
#
# - *strong scaling*: the batch stays (448 images, and once more with 1792), each rank's share
#   shrinks. Ideal: N times less time per step.
# - *weak scaling*: the share stays (448 images per rank), the batch grows. Ideal: the same time per
#   step, so N times the images.
#
# Either way the speed-up is images per second over those of one rank, the efficiency speed-up / N.
# Runs are interleaved, so that a hiccup hits all of them; times are your machine's, not asserted.


# %%
def timed_steps(group, batch, steps):
    """Return seconds[steps, 3]: forward and backward, all_reduce, update."""
    mine = np.array_split(np.arange(batch), group.size)[group.rank]
    x, y = images[mine], labels[mine]
    model = nn.MLP(SIZES)
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    seconds = []
    with threadpool_limits(1):  # one core per rank
        for _ in range(steps):
            group.barrier()
            clock = [time.perf_counter()]
            nn.cross_entropy(model(x), y, reduction_size=batch).backward()
            clock.append(time.perf_counter())
            for name, p in model.named_parameters().items():
                p.grad = group.all_reduce(p.grad, label=name)
            clock.append(time.perf_counter())
            optimizer.step()
            optimizer.zero_grad()
            clock.append(time.perf_counter())
            seconds.append(np.diff(clock))
    return np.array(seconds)


scaling = {  # (ranks, images in the batch)
    "strong": [(1, 448), (2, 448), (4, 448)],
    "strong, 4x": [(1, 1792), (2, 1792), (4, 1792)],
    "weak": [(1, 448), (2, 896), (4, 1792)],
}
runs = {run: [] for row in scaling.values() for run in row}
for _ in range(4):
    for (size, batch), steps in runs.items():
        per_rank = clusters[size].run(timed_steps, batch, 9)
        steps.append(np.mean(per_rank, axis=0)[2:])  # mean over ranks; two steps to warm up
median_step = {}
for run, steps in runs.items():
    steps = np.concatenate(steps)
    median_step[run] = 1e3 * steps[steps.sum(axis=1).argsort()[len(steps) // 2]]  # ms

speedups = {}
print(
    f"{CORES} cores            images  fwd+bwd  all_reduce  update   step ms  speed-up  efficiency"
)
for kind, row in scaling.items():
    rates = [batch / median_step[size, batch].sum() for size, batch in row]  # images per ms
    speedups[kind] = [rate / rates[0] for rate in rates]
    for (size, batch), speedup in zip(row, speedups[kind], strict=True):
        compute, reduce, update = median_step[size, batch]
        print(
            f"{kind:>10}, N = {size} {batch:7d} {compute:8.2f} {reduce:11.2f} {update:7.2f}"
            f" {compute + reduce + update:9.2f} {speedup:9.2f} {speedup / size:10.0%}"
        )
if CORES < 4:
    print(
        f"fewer cores ({CORES}) than ranks: with N = 4 they take turns, so that row cannot be ideal"
    )

# %% [markdown]
# Read the table from left to right.
#
# - *fwd+bwd* shrinks with the share (strong) or stays (weak), as long as every rank has a core.
# - *all_reduce* does neither: its bytes depend on the model alone. It also contains every wait: the
#   sum is there when the slowest rank has come. With more ranks than cores, some ranks start to
#   compute when others are done, and the early ones spend that time in `all_reduce`.
# - *update* never shrinks: each rank updates all P parameters. N ranks do the same work N times.
#
# So strong scaling runs into a wall: compute goes down as 1/N, communication does not. A second
# rank pays as soon as half the batch's compute is more than the all_reduce. From the table:

# %%
per_image = median_step[1, 448][0] / 448
reduce = median_step[2, 448][1]
print(f"break-even with 2 ranks: about {2 * reduce / per_image:.0f} images per batch (an estimate)")

# %% [markdown]
# And the point of it all: *training* is the same. Four ranks and one device take 40 AdamW steps on
# the digits, in batches of 64, over the end of the first epoch with its batch of 5.


# %%
def train(model, shares, all_reduce, steps=40):
    """Train in float64; return the weights {name: array} and this rank's part of each loss."""
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _, share in zip(range(steps), shares, strict=False):
        x, y = images[share.examples].astype("float64"), labels[share.examples]
        loss = nn.cross_entropy(model(x), y, reduction_size=share.total)
        loss.backward()
        for name, p in model.named_parameters().items():
            p.grad = all_reduce(p.grad, label=name)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return model.state(), np.array(losses)


def train_on_ranks(group, model):
    shares = iter(Sampler(len(images), 64, rank=group.rank, size=group.size))
    return train(model, shares, group.all_reduce)


def fresh():
    return nn.MLP([64, 64, 10], seed=3, dtype="float64")


alone, losses = train(fresh(), iter(Sampler(len(images), 64)), lambda grad, label: grad)
together = clusters[4].run(train_on_ranks, fresh())
worst = max(relative_error(weights, alone) for weights, _ in together)
parts = sum(part for _, part in together)
print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f} in 40 steps; weights of 4 ranks: {worst:.1e} away")
assert worst < 1e-9 and np.allclose(parts, losses, rtol=1e-9, atol=0)
assert losses[-1] < losses[0] / 3

# %% [markdown]
# Note the losses: each rank's is its part of the whole (a sum over its shard, divided by n), so the
# parts add up to the loss of the batch.
#
# The figure: what is right, and what it buys.


# %%
def draw(plt):
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.8))
    figure.suptitle(
        "Weigh each shard by its size, and the sum is one device's gradient, up to rounding"
    )

    wrong, right_way = figures.EMPHASIS, figures.UPDATE
    left.axhspan(1e-18, 1e-15, color=figures.IDLE, alpha=0.3, linewidth=0)
    left.text(29, 2e-18, "rounding in float64", color="#777777", fontsize=9, ha="right")
    left.semilogy(largest, curve[:, 1], "o-", color=right_way, markersize=4)
    left.semilogy(largest[1:], curve[1:, 0], "o-", color=wrong, markersize=4)
    left.semilogy(largest[0], curve[0, 0], "o", color=wrong, markersize=9, fillstyle="none")
    left.text(
        29, 4e-15, "sum weighted by $m_k/n$: exact up to rounding", color=right_way, ha="right"
    )
    left.text(29, 2e-3, "mean of the shards' means", color=wrong, ha="right")
    arrow = {"arrowstyle": "-", "color": wrong, "shrinkB": 5, "linewidth": 1, "relpos": (0.02, 0.5)}
    left.annotate(
        f"9 + 8 + 8 + 7: off by {curve[1, 0]:.0%}",
        (largest[1], curve[1, 0]),
        (9.6, 1e-4),
        color=wrong,
        fontsize=9,
        arrowprops=arrow,
    )
    left.annotate(
        "8 + 8 + 8 + 8: right, so the mistake hides",
        (largest[0], curve[0, 0]),
        (9, 1e-12),
        color=wrong,
        fontsize=9,
        arrowprops=arrow,
    )
    left.set(
        title="The mean of means fails as soon as shards differ",
        xlabel="images on rank 0 (of 32 images on 4 ranks)",
        ylabel="relative error of the gradient",
        xticks=[8, 12, 16, 20, 24, 28],
        yticks=[1e-16, 1e-12, 1e-8, 1e-4, 1],
        ylim=(1e-18, 10),
    )

    words = {
        "strong": ("strong, 448 images in all", figures.FORWARD),
        "strong, 4x": ("strong, 1792 images in all", figures.BACKWARD),
        "weak": ("weak, 448 images per rank", figures.COMMUNICATION),
    }
    if CORES < 4:
        right.axvspan(CORES + 0.2, 4, color=figures.IDLE, alpha=0.3, linewidth=0)
        right.text(3.95, 0.1, "more ranks than cores", color="#777777", fontsize=9, ha="right")
    right.plot([1, 4], [1, 4], "--", color=figures.INK, linewidth=1)
    right.text(2.9, 3.05, "ideal", ha="right")
    height = -1.0
    for kind in sorted(words, key=lambda kind: speedups[kind][-1]):
        text, color = words[kind]
        height = max(speedups[kind][-1], height + 0.17)  # one line
        right.plot([1, 2, 4], speedups[kind], "o-", color=color)
        right.text(4.12, height, text, color=color, fontsize=9, va="center")
    right.set(
        title=f"Speed-up, measured on {CORES} cores",
        xlabel="ranks",
        ylabel="images per second, relative to one rank",
        xticks=[1, 2, 4],
        xlim=(0.9, 6.2),
        ylim=(0, 4.2),
    )
    right.spines["bottom"].set_bounds(0.9, 4)
    return figure


figures.save(draw, "03_data_parallel")

# %% [markdown]
# ## Buckets, and communication beside backward
#
# Two things are clumsy in our worker. It makes one call *per parameter*: each is a meeting of all
# ranks, and a bias of 10 numbers pays for it as much as a matrix of 262,144. And all calls come
# *after* backward, though backward finishes the last layer first; that gradient then lies idle.
#
# So put parameters into *buckets*, last layers first, and let a second thread reduce a bucket as
# soon as its gradients are complete (Li et al. 2020, section 3.2):
#
#     compute thread        forward | backward: layer 3    layer 2    layer 1    layer 0 | wait |
#     communication thread                             [ bucket 0: layers 3, 2 ][ bucket 1: 1, 0 ]
#
# A parameter's hook (lesson 1) says when its gradient is complete. These are the lines that matter,
# from `minidist/data_parallel/bucketed.py`, a little shortened:
#
#     def _ready(self, p):                                     # the hook of every parameter
#         self.missing[self.bucket_of[p]] -= 1
#         while self.launched < len(self.buckets) and self.missing[self.launched] == 0:
#             self.orders.put(self.launched)                   # a queue to the second thread
#             self.launched += 1
#
#     def _communicate(self):                                  # the second thread
#         while (bucket := self.orders.get()) is not None:
#             for s in flat_slices(self.buckets[bucket]):      # a slice per flat vector
#                 self.group.all_reduce(s.gradient, out=s.gradient)
#
# Three rules keep it right:
#
# - *order*: buckets are launched in one order on all ranks. A bucket that is complete early waits
#   for those before it, or two ranks might meet with different buckets.
# - *all*: every bucket is launched once per step, also on a rank with an empty shard and for a
#   parameter that got no gradient: it adds zero. Otherwise the other ranks would wait for ever.
# - *last*: with several micro-batches the gradients add up first; only the last backward is inside
#   `with reducer.reduce()`, or sums would be summed again.
#
# With a small cap (bytes per bucket) each parameter is a bucket; with a large one there is a single
# bucket, and nothing is sent before backward ends. The bits do not depend on it: every element is
# added up in rank order.


# %%
DEEP, WIDE = [64, *[128] * 12, 10], [64, *[512] * 8, 10]  # of many messages; of much work
CAPS = [1, 150_000, 600_000, 1 << 30]


def deep_steps(group, cap, batch, steps, sizes=DEEP):
    """Return the gradients' bits, buckets, all_reduces per step, and seconds of each step.

    The naive way if cap is None.
    """
    model, seconds = nn.MLP(sizes).flatten(group.empty), []
    buckets = [[p] for p in model.parameters()]
    if cap is not None:
        reducer = Bucketed(model, group, cap)
        buckets = reducer.buckets
    mine = np.array_split(np.arange(batch), group.size)[group.rank]
    with threadpool_limits(1):
        for _ in range(steps):
            for p in model.parameters():
                p.grad = None
            group.barrier()
            start = time.perf_counter()
            loss = nn.cross_entropy(model(images[mine]), labels[mine], reduction_size=batch)
            with reducer.reduce() if cap is not None else nullcontext():
                with group.log.span("backward") if group.log else nullcontext():
                    loss.backward()
            if cap is None:
                all_reduce_gradients(model, group)
            seconds.append(time.perf_counter() - start)
    calls = sum(len(list(flat_slices(bucket))) for bucket in buckets)
    return [p.grad.tobytes() for p in model.parameters()], len(buckets), calls, seconds


naively = clusters[2].run(deep_steps, None, 127, 1)
for cap in CAPS:
    bucketed = clusters[2].run(deep_steps, cap, 127, 1)
    assert [bits for bits, *_ in bucketed] == [bits for bits, *_ in naively], f"cap {cap}"
print(f"buckets of at most {CAPS} bytes: the bits of the naive way, on both ranks")

# %% [markdown]
# Does it run beside backward? An `EventLog` notes who did what, and when. One step of a wide model
# with large shards: on every rank the first bucket is under way before backward ends. (A long
# all_reduce may be a wait for the other rank.)

# %%
log = EventLog()
_, buckets, calls, _ = clusters[2].run(deep_steps, 1_100_000, 1796, 1, WIDE, log=log)[0]
for rank in range(2):
    backward = next(e for e in log.named("backward") if e.rank == rank)
    sent = [e for e in log.events if e.rank == rank and e.name.startswith("all_reduce bucket")]
    assert len(sent) == calls and backward.start < sent[0].start < backward.end
print(f"{buckets} buckets, {calls} all_reduces")
print(timeline.text(log))

# %% [markdown]
# Messages and time, with small shards (64 images a rank), where messages matter:

# %%
rows = {cap: [] for cap in [None, *CAPS]}
for _ in range(3):
    for cap in rows:
        per_rank = clusters[2].run(deep_steps, cap, 128, 9)
        rows[cap] += list(np.max([seconds[2:] for *_, seconds in per_rank], axis=0))
        _, buckets, calls, _ = per_rank[0]
        layers = len(DEEP) - 1
        apart = cap in (None, 1)  # every parameter by itself
        assert calls == 2 * layers if apart else layers <= calls < layers + buckets
        if len(rows[cap]) == 21:
            name = (
                "one by one, after backward" if cap is None else f"buckets {buckets:2}, cap {cap:,}"
            )
            print(f"{name:29} all_reduces {calls}, {1e3 * np.median(rows[cap]):5.1f} ms a step")

# %% [markdown]
# Buckets save messages: a layer's weight and bias lie side by side in one flat vector and travel
# together, unless a bucket ends between them. (Layers lie apart; a bucket makes a call for each.)
# Overlap is another matter. It hides the time in which *other* hardware moves bytes. Here a rank's
# second thread adds and copies on the cores that backward needs; compare the last row, a single
# bucket without any overlap. Overlap wins with a core to spare per rank, or with a network card
# that works by itself.

# %% [markdown]
# ## Exercise
#
# A bucket by hand, without hooks and threads. `all_reduce` works in shared memory: each rank reads
# the others' arrays, and the fixed cost is that all must meet, in every call. Write
# `reduce_per_layer(group, model)`: one `all_reduce` per layer, on one flat vector that holds the
# layer's gradients one after the other.
# Same sums, same bytes, half the calls.
#
# The check runs it on four ranks, one of them with an empty shard, compares with one device and
# counts the calls.
#
# *Hint:* `model.layers` are the layers, `layer.parameters()` their parameters in a fixed order.
# Join with `np.concatenate([p.grad.reshape(-1) for p in ...])`; afterwards cut the sum at
# `p.size` and `reshape(p.shape)`.


# %%
def reduce_per_layer(group, model):
    """Give every parameter the sum of its gradient over ranks, in one all_reduce per layer."""
    raise NotImplementedError  # your lines here


# %% [markdown]
# The check. `Counter` stands in for the group and counts what goes through it. Two tempting answers
# must not pass.


# %%
class Counter:
    """A group that counts its collectives."""

    def __init__(self, group):
        self.group, self.rank, self.size, self.calls = group, group.rank, group.size, 0

    def all_reduce(self, x, **options):
        self.calls += 1
        return self.group.all_reduce(x, **options)


def try_exercise(group, attempt, model, x, y, counts):
    """Return (gradients, all_reduce calls, bytes sent), or None if nobody has begun."""
    start = sum(counts[: group.rank])
    mine = slice(start, start + counts[group.rank])
    nn.cross_entropy(model(x[mine]), y[mine], reduction_size=sum(counts)).backward()
    counter = Counter(group)
    try:
        attempt(counter, model)
    except NotImplementedError:
        return None
    gradients = {name: p.grad for name, p in model.named_parameters().items()}
    return gradients, counter.calls, group.ledger.total


def check(attempt):
    """Say "solved", "not solved yet", or what is wrong."""
    outcomes = clusters[4].run(try_exercise, attempt, model, x, y, [3, 1, 1, 0])
    if None in outcomes:
        return "not solved yet"
    for rank, (gradients, calls, _) in enumerate(outcomes):
        for name in want:
            if np.shape(gradients[name]) != want[name].shape:
                return f"wrong: on rank {rank} the gradient of {name} has another shape"
        if not (error := relative_error(gradients, want)) < 1e-9:
            return f"wrong: on rank {rank} the gradient is off by {error:.0%}"
        if calls != len(model.layers):
            return f"wrong: the sums are right, but {calls} calls for {len(model.layers)} layers"
    if sum(sent for _, _, sent in outcomes) != 2 * 3 * S:
        return "wrong: the sums are right, but it did not move 2 (N - 1) S bytes"
    return "solved"


def one_call_per_parameter(group, model):
    all_reduce_gradients(model, group)


def divides_once_more(group, model):
    all_reduce_gradients(model, group)
    for p in model.parameters():
        p.grad = p.grad / group.size


print("exercise:", check(reduce_per_layer))
for tempting in (one_call_per_parameter, divides_once_more):
    print("a tempting answer:", check(tempting))
    assert check(tempting).startswith("wrong")
# %% [markdown]
# ## What it costs, and the next problem
#
# - **Memory does not shrink.** Every rank holds all weights, all gradients and AdamW's two moments.
#   A model that does not fit one device does not fit a thousand. (Later: ZeRO shards them; tensor
#   and pipeline parallelism cut the model itself.)
# - **Everybody waits for the slowest, every step.**
# - **The batch has to grow** to keep many ranks busy (weak scaling), and a larger batch means fewer
#   updates per epoch. That is a question of learning, not of this lesson's arithmetic.
# - **Many meetings, all after backward,** in the naive way. Buckets make fewer calls and start them
#   early; that hides communication which has hardware of its own, and no other.
#
# The next lesson takes up the second point: `04_parameter_server.py` keeps the weights in one
# place, and nobody has to wait. `05_zero.py` takes up the first: N copies of everything, N times
# the same update.

# %%
for cluster in clusters.values():
    cluster.close()
