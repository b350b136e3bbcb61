# %% [markdown]
# # 3. Data parallelism: many ranks, one gradient
#
# Lesson 2 taught ranks to sum what they hold. What should they sum to train together? Here every
# rank holds the whole model and a share of the batch. After backward, the ranks add up their
# gradients; then each of them goes on as if it had seen the whole batch. You write it yourself (the
# library's is `minidist/data_parallel/naive.py`), see what breaks if one simply averages, and at
# the end let the ranks communicate while backward still runs (`bucketed.py`).
#
# Letters: `n` examples in the whole batch, `m_k` of them on rank `k`, `l_i` the loss of example
# `i`, `w` the parameters, `P` of them, `S` bytes together; `N` ranks.

# %%
import os
import time
from contextlib import nullcontext

import numpy as np
from support import exercise, figures
from threadpoolctl import threadpool_limits

from minidist import Cluster, nn, optim
from minidist.data_parallel.bucketed import Bucketed
from minidist.data_parallel.naive import all_reduce_gradients
from minidist.datasets import digits
from minidist.events import EventLog
from minidist.nn.flat_parameters import flat_slices
from minidist.observe import timeline
from minidist.verify import equivalence
from minidist.verify.compare import compare

figures.arguments()
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
clusters = {size: Cluster(size) for size in (1, 2, 4)}
images, labels = digits()  # images[1797, 64] in float32, labels[1797]
SIZES = [64, 512, 512, 10]

# %% [markdown]
# ## Problem
#
# In this lesson a device is one core: as long as there are enough, "two ranks" means twice the
# hardware. We time training steps of one device, in four parts, and count the work: a parameter
# costs about 6 operations per example, 2 forward and 4 backward (lesson 0). Then we ask what this
# core would need for a real job. ResNet-50 takes 3.8e9 multiply-and-adds per image in the forward
# pass (He et al. 2016, table 1), and is trained on ImageNet's 1,281,167 images for 90 epochs.


# %%
def timed_steps(group, batch, steps=6):
    """Return ms[steps, 4]: forward, backward, all_reduce, update; two steps to warm up."""
    mine = np.array_split(np.arange(batch), group.size)[group.rank]
    model, rows = nn.MLP(SIZES), []
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    with threadpool_limits(1):  # one core per rank
        for _ in range(steps):
            group.barrier()
            clock = [time.perf_counter()]
            loss = nn.cross_entropy(model(images[mine]), labels[mine], reduction_size=batch)
            clock.append(time.perf_counter())
            loss.backward()
            clock.append(time.perf_counter())
            all_reduce_gradients(model, group)
            clock.append(time.perf_counter())
            optimizer.step()
            optimizer.zero_grad()
            clock.append(time.perf_counter())
            rows.append(1e3 * np.diff(clock))
    return np.array(rows[2:])


P = sum(p.size for p in nn.MLP(SIZES).parameters())
step = np.median(clusters[1].run(timed_steps, 448)[0].sum(axis=1))  # ms
rate = 6 * P * 448 / (step / 1e3)  # operations per second
days = 90 * 1_281_167 * (3 * 2 * 3.8e9) / rate / 86_400
print(f"one core: {step:.1f} ms for a batch of 448 and P = {P:,}, {rate / 1e9:.0f} billion")
print(f"operations a second; ResNet-50 on ImageNet would take {days:.0f} days")

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
#                           dw_0          dw_1          dw_2          dw_3       partial sums
#                            +------ all_reduce: dw = sum_k dw_k ------+
#                           dw            dw            dw            dw         the same bits
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
# and a rank with an empty shard adds zero.
#
# ## Code
#
# The ten lines that matter. `counts` are the sizes of the shards; the model arrives on every rank
# as a copy of ours. Ranks compare their `label`s before any data moves: if two differ, an error is
# raised, and the gradients of two different weights are never added.


# %%
def worker(group, model, x, y, counts):
    """Compute the gradient of the whole batch, on every rank."""
    start = sum(counts[: group.rank])
    mine = slice(start, start + counts[group.rank])  # my shard, perhaps empty
    logits = model(x[mine])
    loss = nn.cross_entropy(logits, y[mine], reduction_size=sum(counts))  # n, not m_k
    loss.backward()
    for name, p in model.named_parameters().items():
        p.grad = group.all_reduce(p.grad, label=name)
    return {name: p.grad for name, p in model.named_parameters().items()}


def one_device(model, x, y):
    """Return {name: gradient} of the mean loss: the reference for all comparisons."""
    nn.cross_entropy(model(x), y).backward()
    gradients = {name: p.grad for name, p in model.named_parameters().items()}
    for p in model.parameters():
        p.grad = None
    return gradients


# %% [markdown]
# Is it right? We try it on the last batch of an epoch: 1797 images in batches of 64 leave 5 for the
# end, which four ranks share as 2, 1, 1, 1. We use float64, so that rounding stays near 1e-16 and
# cannot hide a mistake. `compare` asks for 1e-9 in every parameter on every rank.

# %%
model = nn.MLP([64, 32, 10], dtype="float64")
x, y = images[-5:].astype("float64"), labels[-5:]
want = one_device(model, x, y)
ours = clusters[4].run(worker, model, x, y, [2, 1, 1, 1])
library = equivalence.gradients("naive", model, x, y, size=4)
print("our four ranks against one device:", compare(ours, want))
print("against the library's naive.py:   ", compare(ours, library))
assert compare(ours, want).ok and compare(ours, library).ok
assert compare(ours, ours[0], 0.0).ok, "no two ranks differ in a bit"

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
    nn.cross_entropy(model(x[mine]), y[mine], reduction_size=m_k).backward()
    for name, p in model.named_parameters().items():
        p.grad = group.all_reduce(p.grad, label=name) / group.size  # and then by N
    return {name: p.grad for name, p in model.named_parameters().items()}


SHARDS = [[8, 8, 8, 8], [9, 8, 8, 7], [14, 6, 6, 6], [29, 1, 1, 1], [2, 1, 1, 1], [1, 1, 0, 0]]
found = []
for counts in SHARDS:
    x, y = images[-sum(counts) :].astype("float64"), labels[-sum(counts) :]
    ways = [clusters[4].run(way, model, x, y, counts) for way in (mean_of_means, worker)]
    found.append([compare(way, one_device(model, x, y)).error for way in ways])
    print(f"{counts!s:15} mean of means off by {found[-1][0]:7.1e}, sum by {found[-1][1]:.1e}")
wrong, good = zip(*found, strict=True)
assert max(good) < 1e-9 and min(wrong[1:]) > 1e-2
assert wrong[0] < 1e-9, "equal shards: the two agree, so the mistake sleeps"
assert abs(wrong[-1] - 1 / 2) < 1e-9, "two ranks' means, divided by four"

# %% [markdown]
# With equal shards the mean of means *is* right, and that is what makes it dangerous: every test
# with a round batch size passes. Then comes an uneven batch, usually the last one of an epoch, and
# its gradient is off, here by 9% to 257%, without an error message. With two empty shards of four
# it is cut in half. (For the mean over an empty shard, `nn.cross_entropy` raises an error: it is
# 0/0.) The recipe is from Goyal et al. (2017, section 3, remark 3): each worker divides its loss by
# the size of the whole minibatch, their `kn`, not by its own `n`.
#
# ## Measurement
#
# **Bytes.** An `all_reduce` of S bytes moves `2 (N-1)/N S` out of each rank, `2 (N-1) S` in all
# (lesson 2; ranks differ a little where N does not divide a parameter). The batch size is not in
# the formula: more examples per rank cost no more bytes.


# %%
def bytes_of_a_step(group, model, x, y, counts):
    worker(group, model, x, y, counts)
    return group.ledger.total  # payload bytes that this rank has sent


S = sum(p.data.nbytes for p in model.parameters())
sent = clusters[4].run(bytes_of_a_step, model, x, y, [1, 1, 0, 0])
print(f"4 ranks, S = {S:,} bytes: sent {sent}, in all {sum(sent) / S:.0f} S")
assert sum(sent) == 2 * 3 * S, "to the byte"

# %% [markdown]
# **Time.** Two questions can be asked of N ranks:
#
# - *strong scaling*: the batch stays, each rank's share shrinks. Ideal: a step takes 1/N.
# - *weak scaling*: the share stays, the batch grows. Ideal: a step takes the same time.
#
# In both cases the speed-up is images per second, divided by one rank's. Runs take turns, so that a
# hiccup hits all of them; times are your machine's, not asserted.

# %%
SCALING = {"strong": [(1, 448), (2, 448), (4, 448)], "weak": [(2, 896), (4, 1792)]}
runs = {run: [] for row in SCALING.values() for run in row}
for _ in range(2):
    for (size, batch), steps in runs.items():
        steps.append(np.mean(clusters[size].run(timed_steps, batch), axis=0))  # mean over ranks
medians = {}
for run, steps in runs.items():
    steps = np.concatenate(steps)
    medians[run] = steps[steps.sum(axis=1).argsort()[len(steps) // 2]]  # the median step
alone = 448 / medians[1, 448].sum()  # images per ms
speedups = {run: run[1] / parts.sum() / alone for run, parts in medians.items()}
print(f"{CORES} cores, ms      images  forward  backward  all_reduce  update    step  speed-up")
for kind, row in SCALING.items():
    for size, batch in row:
        forward, backward, reduce, update = medians[size, batch]
        print(
            f"{kind:6}, N = {size} {batch:9d} {forward:8.2f} {backward:9.2f} {reduce:11.2f}", end=""
        )
        print(f"{update:8.2f} {sum(medians[size, batch]):7.2f} {speedups[size, batch]:9.2f}")

# %% [markdown]
# Read it from left to right.
#
# - *forward* and *backward* shrink with the share (strong) or stay (weak).
# - *all_reduce* does neither: its bytes depend on the model alone. It also contains every wait: the
#   sum is complete when the slowest rank has arrived. With more ranks than cores, ranks compute in
#   turns, and early ones wait here for late ones: four ranks on two cores gain nothing over two.
# - *update* never shrinks: each rank updates all P parameters. N ranks do the same work N times.
#
# So strong scaling runs into a wall: compute goes down as 1/N, the rest does not (exercise 2). Weak
# scaling does not, but it changes the batch, and so what is learnt per epoch.
#
# The figure: what is right, and what it buys.


# %%
def draw(plt):
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), width_ratios=[1.2, 1])
    figure.suptitle("Weighted by their sizes, the shards' gradients add up to one device's")
    rows = range(len(SHARDS))
    left.axvspan(1e-17, 1e-15, color=figures.IDLE, alpha=0.4, linewidth=0)
    left.semilogx(wrong, rows, "x", color=figures.EMPHASIS, markersize=9)
    left.semilogx(good, rows, "o", color=figures.UPDATE, markersize=6)
    for row, error in enumerate(wrong[1:], 1):
        left.text(error / 3, row, f"{error:.0%}", ha="right", va="center")
    left.text(3e-15, 0, "equal shards: the mistake hides", va="center")
    left.text(3e-15, 4, "o  loss over n, and a sum", color=figures.UPDATE, va="center")
    left.text(3e-15, 3, "x  mean of the means", color=figures.EMPHASIS, va="center")
    left.text(3e-15, 5, "grey: rounding in float64", va="center", fontsize=9)
    left.set(title="What breaks: shards that differ", xlabel="relative error of the gradient")
    left.set(ylabel="images on ranks 0 to 3", xlim=(1e-17, 10), ylim=(5.5, -0.5))
    left.set_yticks(rows, [" + ".join(map(str, counts)) for counts in SHARDS])
    parts = {"forward": figures.FORWARD, "backward": figures.BACKWARD}
    parts |= {"all_reduce\nand waits": figures.COMMUNICATION, "update": figures.UPDATE}
    heights = np.array([medians[run] for run in SCALING["strong"]]).T  # [part, size]
    ends = np.cumsum(heights, axis=0)
    for (name, color), height, end, hatch in zip(
        parts.items(), heights, ends, ["", "///", "xxx", "..."], strict=True
    ):
        look = {"color": color, "edgecolor": "white", "hatch": hatch}
        right.bar(range(3), height, 0.6, end - height, **look)
        right.text(2.4, end[-1] - height[-1] / 2, name, color=color, va="center")
    for k, run in enumerate(SCALING["strong"]):
        right.text(k, ends[-1, k], f"{speedups[run]:.2f} x", ha="center", va="bottom")
    right.set(title=f"What it buys: 448 images on {CORES} cores", ylabel="time of a step (ms)")
    right.set_xticks(range(3), ["1 rank", "2 ranks", "4 ranks"])
    right.set_xlim(-0.5, 3.3)
    return figure


figures.save(draw, "03_data_parallel")

# %% [markdown]
# ## Buckets, and communication during backward
#
# Two things are slow in our worker. It makes one call *per parameter*: each is a meeting of all
# ranks, which costs a bias of 10 numbers as much as a matrix of 262,144. And all calls come *after*
# backward, although backward finishes the last layer first; that gradient then waits.
#
# So put parameters into *buckets*, last layers first, and let a second thread reduce a bucket as
# soon as its gradients are complete (Li et al. 2020, section 3.2). A parameter's hook (lesson 1)
# says when. The lines that matter, from `bucketed.py`, a little shortened:
#
#     def ready(self, p):                                      # the hook of every parameter
#         self.missing[self.bucket_of[p]] -= 1
#         while self.launched < len(self.buckets) and self.missing[self.launched] == 0:
#             self.orders.put(self.launched)                   # a queue to the second thread
#             self.launched += 1
#
#     def all_reduce(self, bucket):                            # the second thread, for each order
#         for s in flat_slices(self.buckets[bucket]):          # a slice per flat vector
#             self.group.all_reduce(s.gradient, out=s.gradient)
#
# All ranks launch buckets in the same order, whatever completes first, and every bucket once per
# step, even if a parameter got no gradient: otherwise two ranks would meet with different buckets,
# or wait permanently. The bits equal the naive way's, whatever a bucket holds.


# %%
def deep_step(group, cap, batch):
    """Return the gradients' bits and the number of all_reduces; cap None: the naive way."""
    model = nn.MLP([64, *[256] * 8, 10]).flatten(group.empty)
    reducer = None if cap is None else Bucketed(model, group, cap)
    buckets = reducer.buckets if reducer else [[p] for p in model.parameters()]
    mine = np.array_split(np.arange(batch), group.size)[group.rank]
    loss = nn.cross_entropy(model(images[mine]), labels[mine], reduction_size=batch)
    with threadpool_limits(1), reducer.reduce() if reducer else nullcontext():
        with group.log.span("backward") if group.log else nullcontext():
            loss.backward()
    if reducer is None:
        all_reduce_gradients(model, group)
    calls = sum(len(list(flat_slices(bucket))) for bucket in buckets)
    return [p.grad.tobytes() for p in model.parameters()], calls


naively = clusters[2].run(deep_step, None, 127)
for cap in (1, 400_000, 1 << 30):  # bytes per bucket
    bucketed = clusters[2].run(deep_step, cap, 127)
    assert [bits for bits, _ in bucketed] == [bits for bits, _ in naively], f"cap {cap}"
    assert bucketed[0][1] == {1: 18, 400_000: 15, 1 << 30: 9}[cap]  # 9 layers, two parameters each
    print(f"buckets of {cap:13,} bytes: {bucketed[0][1]:2} all_reduces, the naive way's bits")
log = EventLog()
_, calls = clusters[2].run(deep_step, 400_000, 1796, log=log)[0]
for rank in range(2):
    backward = next(e for e in log.named("backward") if e.rank == rank)
    sent = [e for e in log.events if e.rank == rank and e.name.startswith("all_reduce bucket")]
    assert len(sent) == calls and backward.start < sent[0].start < backward.end, "during backward"
print(timeline.text(log))

# %% [markdown]
# On every rank the first bucket is sent before backward ends (a long all_reduce may be a wait for
# the other rank). And a layer's weight and bias, which are side by side in one flat vector, are
# sent together unless a bucket ends between them. Does it save time? Overlap hides the time in
# which *other* hardware moves bytes, a network card for instance. Here the second thread adds and
# copies on the cores that backward needs, so there is almost nothing to hide.
#
# ## Exercise 1: a bucket by hand
#
# One `all_reduce` per layer, without hooks and threads, on one flat vector that holds the layer's
# gradients one after the other: same sums, same bytes, half the calls. *Hint:* `model.layers` are
# the layers, `layer.parameters()` their parameters in a fixed order. Join with `np.concatenate([
# p.grad.reshape(-1) for p in ...])`; cut the sum at `p.size` and `reshape(p.shape)`.


# %%
def reduce_per_layer(group, model):
    """Give every parameter the sum of its gradient over ranks, in one all_reduce per layer."""
    raise NotImplementedError  # your lines here


def reduced_by(group, attempt, model, x, y):
    mine = np.array_split(np.arange(len(x)), group.size)[group.rank]
    nn.cross_entropy(model(x[mine]), y[mine], reduction_size=len(x)).backward()
    attempt(group, model)
    return {name: p.grad for name, p in model.named_parameters().items()}


def check_layers(attempt):
    x, y, log = images[:6].astype("float64"), labels[:6], EventLog()
    gradients = clusters[4].run(reduced_by, attempt, model, x, y, log=log)
    if not (comparison := compare(gradients, one_device(model, x, y))).ok:
        return comparison
    calls = sum(e.rank == 0 and e.name.startswith("all_reduce") for e in log.events)
    if calls != len(model.layers):
        return f"the sums are right, but {calls} calls for {len(model.layers)} layers"


def one_call_per_parameter(group, model):
    all_reduce_gradients(model, group)


exercise.judge(1, check_layers, reduce_per_layer, tempting=[one_call_per_parameter])

# %% [markdown]
# ## Exercise 2: the wall
#
# Forward and backward take `compute` seconds on one rank, an update `update`; the gradient has `S`
# bytes, and each rank a link of `link` bytes per second. Nothing overlaps, latency is free. Return
# the speed-up of N ranks in strong scaling. *Hint:* which of the columns above shrink? One rank
# sends nothing.


# %%
def speedup(N, compute, update, S, link):
    raise NotImplementedError  # your lines here


def check_speedup(attempt):  # 0.1 s and 0.005 s; 100 MB over 10 GB/s
    for N, want in {1: 1.0, 2: 1.6154, 8: 3.0, 1000: 4.1866}.items():
        if not abs((found := attempt(N, 0.1, 0.005, 1e8, 1e10)) - want) < 1e-3:
            return f"{N} ranks are {want:.2f} times as fast as one, not {found:.2f} times"


def forgets_the_update(N, compute, update, S, link):
    return compute / (compute / N + 2 * (N - 1) / N * S / link)


exercise.judge(2, check_speedup, speedup, tempting=[forgets_the_update])

# %% [markdown]
# ## Exercise 3: why did this break?
#
# Somebody's model refuses an empty batch. So a rank without examples goes on to the next batch: it
# has nothing to add anyway. Four ranks do two batches, and rank 3 has no example of the first. Look
# at the error: which rank is where? To what was rank 3's gradient of batch 2 added before anybody
# noticed? Write a `step` that gives the right gradient. *Hint:* a collective needs all ranks.


# %%
class NeverEmpty(nn.MLP):
    def forward(self, x, randomness=None):
        if len(x) == 0:
            raise ValueError("this model needs an example")
        return super().forward(x, randomness)


def step(group, model, x, y, n):
    """Compute the whole batch's gradient in p.grad; x, y are my shard, n the batch's size."""
    raise NotImplementedError  # your lines here


def skips_if_empty(group, model, x, y, n):
    if len(x) > 0:
        nn.cross_entropy(model(x), y, reduction_size=n).backward()
        all_reduce_gradients(model, group)


def two_batches(group, attempt, model):
    gradients = []
    for batch in (range(3), range(3, 8)):
        mine = np.array_split(batch, group.size)[group.rank]
        attempt(group, model, images[mine].astype("float64"), labels[mine], len(batch))
        gradients.append({name: p.grad for name, p in model.named_parameters().items()})
        for p in model.parameters():
            p.grad = None
    return gradients


def check_step(attempt):
    model = NeverEmpty([64, 16, 10], dtype="float64")
    batches = clusters[4].run(two_batches, attempt, model)
    for k, batch in enumerate((range(3), range(3, 8))):
        want = one_device(model, images[batch].astype("float64"), labels[batch])
        if not (comparison := compare([rank[k] for rank in batches], want)).ok:
            return f"batch of {len(batch)}: {comparison}"


exercise.judge(3, check_step, step, tempting=[skips_if_empty])

# %% [markdown]
# ## What it costs, and the next problem
#
# - **Memory does not shrink.** Every rank holds all weights, all gradients and Adam's two averages.
#   A model that does not fit one device does not fit a thousand.
# - **All ranks wait for the slowest, every step.**
# - **The batch has to grow** to keep many ranks busy, and a larger batch means fewer updates per
#   epoch: a question of learning, which lesson 21 measures.
#
# The next lesson takes up the second point: `04_parameter_server.py` keeps the weights in one
# place, and no rank has to wait. `05_zero.py` takes up the first: N copies of everything, N times
# the same update.

# %%
for cluster in clusters.values():
    cluster.close()
