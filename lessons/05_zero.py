# %% [markdown]
# # 5. ZeRO: every rank keeps a different part
#
# Data parallelism (lesson 3) makes a step faster, but no rank's memory smaller: every rank keeps
# all parameters, all gradients and all of the optimizer's state. Here each rank keeps a part, in
# three stages, and the result of training does not change, up to rounding. The library's version
# is `minidist/data_parallel/zero.py`; you write stage 1 yourself.
#
# Letters: `N` ranks, `P` parameters, `b` of them in the largest layer; `s = P/N`, a rank's *shard*;
# `M` micro-batches; `W` parameters, `dW` their gradient, `m, v` Adam's two averages, its *moments*.

# %%
import sys
import zlib
from functools import partial

import numpy as np
from support import exercise, figures

from minidist import Cluster, nn, optim
from minidist.data_parallel.naive import all_reduce_gradients
from minidist.data_parallel.zero import Zero
from minidist.datasets import digits
from minidist.errors import RankFailed
from minidist.events import EventLog
from minidist.planning.costs.zero import zero_bytes_held, zero_bytes_moved
from minidist.verify.compare import compare

figures.arguments()
images, labels = digits()  # images[1797, 64] in float32, labels[1797]
clusters = {size: Cluster(size) for size in (1, 2, 4)}
WIDTHS = [64, *[256] * 7, 10]

# %% [markdown]
# ## Problem
#
# In float32 a parameter takes 4 bytes, its gradient 4, AdamW's two moments 8: sixteen bytes per
# parameter (lesson 0), before the first activation. Four ranks take three steps of plain data
# parallelism, with the gradient clipped to a length of 0.5; then each reports what it holds, and a
# checksum of its moments.


# %%
def batch_loss(group, model, step, batch=60):
    """Return the loss of this rank's part of a batch, divided by the whole batch's size."""
    mine = np.array_split(np.arange(batch * step, batch * (step + 1)), group.size)[group.rank]
    x = images[mine].astype(model.parameters()[0].dtype)
    return nn.cross_entropy(model(x), labels[mine], reduction_size=batch)


def train_plain(group, widths, steps=3, dtype="float32"):
    model = nn.MLP(widths, dtype=dtype)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(steps):
        batch_loss(group, model, step).backward()
        all_reduce_gradients(model, group)
        optimizer.clip_global_norm(0.5)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def what_a_rank_holds(group):
    """Return the bytes of weights, gradients and moments, and a checksum of the moments."""
    model, optimizer = train_plain(group, WIDTHS)
    moments = [array for arrays in optimizer.state for array in arrays]
    flats = [layer.flat for layer in model.layers]
    kinds = [[f.vector for f in flats], [f.gradient for f in flats], moments]
    checksum = zlib.crc32(b"".join(array.tobytes() for array in moments))
    return [sum(array.nbytes for array in kind) for kind in kinds], checksum


SIZES = [layer.flat.size for layer in nn.MLP(WIDTHS).layers]
P, b = sum(SIZES), max(SIZES)
found = clusters[4].run(what_a_rank_holds)
for rank, (held, checksum) in enumerate(found):
    print(f"rank {rank}: W, dW, mv: {held} bytes, {sum(held) / P:.0f} P; moments {checksum:08x}")
    assert held == list(zero_bytes_held(0, SIZES, 4, rank).values()) and sum(held) == 16 * P
    assert checksum == found[0][1]

# %% [markdown]
# Four times the same, to the last bit: N ranks are N copies. A model of 7.5e9 parameters takes 120
# GB on each of 64 ranks, more than a device of 80 GB has, and a 65th rank brings no room at all.
#
# ## Picture
#
#     plain         rank 0 [ W W W W | dW dW dW dW | mv mv mv mv ]     the same on ranks 1, 2, 3
#     stage 1       rank 0 [ W W W W | dW dW dW dW | mv          ]     rank 1 has the second mv
#     stage 2       rank 0 [ W W W W | dW          | mv          ]     and the second dW
#     stage 3       rank 0 [ W       | dW          | mv          ]     and the second W
#
#     a step        my dW of my batch -- reduce_scatter --> my part of the sum -- AdamW -->
#                   my part of the new W -- all_gather --> all of the new W
#
# ## Math
#
# AdamW is elementwise: new `w_i` needs `w_i`, `dw_i`, `m_i`, `v_i` and no other element. So the
# rank that has the sum of gradient `i` can do update `i` for all ranks. And an all_reduce has two
# halves (lesson 2). The update moves in between them, and the bytes do not change:
#
#     all_reduce = all_gather after reduce_scatter      (N-1)/N P + (N-1)/N P = 2 (N-1)/N P elements
#     |dW|^2     = sum over ranks of |my part of dW|^2  clipping needs one number from each rank
#
#     bytes held    plain    16 P
#                   1         8 P +  8 s            W and dW are whole
#                   2         4 P + 12 s +  4 b     W is whole; dW of one layer at a time
#                   3               16 s + 12 b     W of two layers at a time, dW of one
#
# The stages (`zero_1`, `zero_2` and `zero_3` in the library) are from Rajbhandari et al., ZeRO
# (2020), section 5; section 7 has the traffic.
#
# ## Code
#
# Stage 1 by hand, AdamW written out, for one flat vector per layer.


# %%
def train_by_hand(group, widths, steps=3, dtype="float32", total=None):
    """Keep W and dW whole, and only my shard's moments. For `total` see exercise 3."""
    model = nn.MLP(widths, dtype=dtype)
    flats = [layer.flat for layer in model.layers]
    cut = [np.array_split(np.arange(f.size), group.size)[group.rank] for f in flats]
    m, v = ([np.zeros(len(own), dtype) for own in cut] for _ in "mv")
    for t in range(1, steps + 1):
        batch_loss(group, model, t - 1).backward()
        shards = [group.reduce_scatter(f.gradient) for f in flats]  # the sum, my part of it
        squares = np.array(sum(float(g @ g) for g in shards))
        squares = group.all_reduce(squares) if total is None else total(group, squares)
        length = np.sqrt(squares)
        for f, own, g, m_i, v_i in zip(flats, cut, shards, m, v, strict=True):
            g = g * min(1.0, 0.5 / length)  # clipping
            w = f.vector[own] * (1 - 1e-2 * 0.1)  # weight decay
            m_i[:] = 0.9 * m_i + 0.1 * g
            v_i[:] = 0.999 * v_i + 0.001 * g * g
            w -= 1e-2 * (m_i / (1 - 0.9**t)) / (np.sqrt(v_i / (1 - 0.999**t)) + 1e-8)
            f.vector[:] = group.all_gather(w)  # all ranks' parts
        for p in model.parameters():
            p.grad = None
    return model, m, v


def train_zero(group, widths, stage, steps=3, dtype="float32"):
    """Return zero, bytes held (peak of weights and gradients; moments) and moved per step."""
    model = nn.MLP(widths, dtype=dtype)
    zero = Zero(model, group, stage)
    optimizer = optim.AdamW(zero.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(steps):
        zero.accumulate(batch_loss(group, model, step))
        optimizer.clip_global_norm(0.5, zero.sum_squares)
        zero.step(optimizer)
    ledgers = [part.ledger.bytes for part in zero.groups]
    moved = sum(ledger["reduce_scatter"] + ledger["all_gather"] for ledger in ledgers)
    moments = sum(array.nbytes for arrays in optimizer.state for array in arrays)
    return zero, zero.peak + moments, moved // steps


def weights_of(way, size, *args):
    """Return the weights on each rank after some steps in float64."""

    def worker(group):
        trained = way(group, WIDTHS, *args, dtype="float64")
        return trained[0].state()

    return clusters[size].run(worker)


want = weights_of(train_plain, 1)[0]
ways = {"by hand": weights_of(train_by_hand, 4)}
for stage in (1, 2, 3):
    ways[f"library, stage {stage}"] = weights_of(train_zero, 4, stage)
for name, weights in ways.items():
    comparison = compare(weights, want)
    print(f"{name:>16}: weights of 4 ranks against one device, {comparison}")
    assert comparison.ok

# %% [markdown]
# ## Measurement
#
# **Memory.** Whenever backward reaches a layer, the library adds up the bytes of weights and
# gradients, whole ones and shards. Their peak and the moments are compared, on every rank, with the
# formula. In the same loop: the bytes that each rank sends.

# %%
measured = {}
for stage in range(4):
    for N in clusters:
        if stage == 0:
            rows = clusters[N].run(what_a_rank_holds)
        else:
            rows = clusters[N].run(lambda *args: train_zero(*args)[1:], WIDTHS, stage, 1)
            formula = [zero_bytes_moved(stage, SIZES, 4, N, r) for r in range(N)]
            assert [moved for _, moved in rows] == formula
        held = [int(np.sum(nbytes)) for nbytes, _ in rows]
        assert held == [sum(zero_bytes_held(stage, SIZES, N, r).values()) for r in range(N)]
        measured[stage, N] = held[0] / P
    row = [f"{measured[stage, N]:6.2f} on {N}" for N in clusters]
    print(f"stage {stage}: bytes per parameter", *row)

# %% [markdown]
# On 4 ranks stage 3 holds 5.9 bytes per parameter where data parallelism holds 16. On one rank it
# holds 17.9: there is nothing to cut, and the `12 b` of whole layers are added.
#
# **Traffic** was asserted in the same loop. Stages 1 and 2 move what data parallelism moves,
# `2 (N-1)/N P` elements from each rank. Stage 3 gathers the weights once for forward and once more
# for backward, and scatters gradients: three times `(N-1)/N P`.
#
# **Two buffers.** In stage 3 a layer's weights exist only while it computes. Layer k's weights are
# in buffer `k mod 2`; a second thread fills the other buffer with the next layer's in the meantime.
# The forward pass of one step of a wider model on two ranks:

# %%
LAYERS = 4


def one_step(group):
    model = nn.MLP([768] * (LAYERS + 1)).flatten(group.empty)
    for k, layer in enumerate(model.layers):

        def spanned(x, randomness=None, forward=layer.forward, k=k):
            with group.log.span(f"forward {k}"):
                return forward(x, randomness)

        layer.forward = spanned
    zero, x = Zero(model, group, 3), np.ones((512, 768), np.float32)
    optimizer = optim.SGD(zero.parameters(), lr=0.0)
    for _ in range(3):
        zero.accumulate(nn.cross_entropy(model(x), np.zeros(512, int), 512 * group.size))
        zero.step(optimizer)


log = EventLog()
clusters[2].run(one_step, log=log)
mine = [e for e in log.from_zero().events if e.rank == 0]
gathers = {k: [e for e in mine if e.name == f"all_gather layer {k}"] for k in range(LAYERS)}
forwards = {k: [e for e in mine if e.name == f"forward {k}"] for k in range(LAYERS)}
begin = gathers[0][-2].start
shown = [e for e in mine if e.start >= begin and e.name.startswith(("all_gather", "forward"))]
for e in shown[: 2 * LAYERS]:
    start, end = 1e3 * (e.start - begin), 1e3 * (e.end - begin)
    print(f"{start:6.1f} to {end:5.1f} ms  {e.thread:6}  {e.name}")
early = [
    gathers[k][2 * i].start < forwards[k - 1][i].end for k in range(1, LAYERS) for i in range(3)
]
print(f"{sum(early)} of {len(early)} gathers began while the layer before computed")
assert any(early)  # how many is a matter of how busy the machine is

# %% [markdown]
# **And does it fit?** That was the goal. Two ranks may use what they use now and `12 P` bytes more:
# a limit of the operating system on private memory. Plain data parallelism needs `16 P`,
# stage 3 on two ranks `8 P + 12 b`, here `9.5 P`.

# %%
BIG = [64, *[1024] * 9, 10]


def in_little_memory(group, way, budget):
    import resource

    way(group, [64, *[512] * 3, 10])  # BLAS and threads take what they need
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[5]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (used + budget, hard))
    way(group, BIG, steps=1)
    return "it fits"


def try_in(budget, way):
    with Cluster(2) as fresh:
        try:
            return fresh.run(in_little_memory, way, budget)[0]
        except RankFailed as failed:
            return failed.__cause__


big = sum(layer.flat.size for layer in nn.MLP(BIG).layers)
if sys.platform.startswith("linux"):
    tries = {"plain data parallelism": train_plain, "stage 3": partial(train_zero, stage=3)}
    tries = {name: try_in(12 * big, way) for name, way in tries.items()}
    for name, outcome in tries.items():
        print(f"{name}, {12 * big / 1e6:.0f} MB: {outcome}")
    assert isinstance(tries["plain data parallelism"], MemoryError)
    assert tries["stage 3"] == "it fits"
else:
    print("no such limit here: this experiment needs Linux")

# %% [markdown]
# The figure: left, what each of four ranks keeps; right, how the sum shrinks with more ranks.


# %%
def draw(plt):
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6))
    figure.suptitle("Each stage cuts one more of the things that all ranks had in common")
    kinds = {"optimizer state": (figures.UPDATE, "..."), "gradients": (figures.BACKWARD, "///")}
    kinds["parameters"] = figures.FORWARD, ""
    for stage in range(4):
        top = 0.0
        for kind, (color, hatch) in kinds.items():
            height = zero_bytes_held(stage, SIZES, 4, 0)[kind] / P
            left.bar(stage, height, 0.8, top, color=color, hatch=hatch, edgecolor="white")
            if stage == 0:
                paper = {"facecolor": "white", "edgecolor": "none", "pad": 2}
                words = kind.replace(" ", "\n")
                left.text(0, top + height / 2, words, ha="center", va="center", bbox=paper)
            top += height
        left.text(stage, top + 0.2, f"{measured[stage, 4]:.1f}", ha="center")
    left.set_xticks(range(4), ["plain", "stage 1", "stage 2", "stage 3"])
    left.set(title="On each of 4 ranks (numbers: measured)", yticks=range(0, 17, 4), ylim=(0, 18.5))
    left.set_ylabel("bytes per parameter")
    ranks = 2 ** np.arange(7)
    for stage, look in enumerate(["-", "--", "-.", ":"]):
        curve = [sum(zero_bytes_held(stage, SIZES, N, 0).values()) / P for N in ranks]
        right.plot(ranks, curve, look, color=figures.INK, linewidth=1.5)
        right.plot(list(clusters), [measured[stage, N] for N in clusters], "o", color=figures.INK)
        right.text(70, curve[-1], f"stage {stage}" if stage else "plain", va="center")
    right.plot([1, 64], [12 * b / P] * 2, color=figures.IDLE, linewidth=1)
    right.text(1, 12 * b / P - 0.2, "12 b: three whole layers", fontsize=9, va="top")
    right.set_xscale("log", base=2)
    right.set(title="Formula (lines) and measurement (dots)", xlabel="ranks N", ylim=(0, 18.5))
    right.set(xticks=ranks, xticklabels=ranks, xlim=(0.9, 150), yticks=range(0, 17, 4))
    right.spines["bottom"].set_bounds(1, 64)
    return figure


figures.save(draw, "05_zero")

# %% [markdown]
# ## Exercise 1: the paper's 120 GB
#
# In mixed precision the sixteen bytes are different: weights 2, gradients 2, and 12 that belong to
# the optimizer (weights and two moments in float32). Return the bytes per rank of stages 0 (plain)
# to 3, for P parameters on N ranks. *Hint:* ignore the whole layers, `b`; what does each stage
# divide by N?


# %%
def mixed_bytes(stage, P, N):
    raise NotImplementedError  # your lines here


def check_bytes(attempt):
    for stage, want in enumerate([120, 31.4, 16.6, 1.9]):  # GB, in figure 1 of the paper
        if abs((found := attempt(stage, 7.5e9, 64) / 1e9) - want) > 0.05:
            return f"stage {stage} holds {want} GB per rank, not {found:.1f}"


def cuts_nothing_before_stage_3(stage, P, N):
    return 16 * P / (N if stage == 3 else 1)


exercise.judge(1, check_bytes, mixed_bytes, tempting=[cuts_nothing_before_stage_3])

# %% [markdown]
# ## Exercise 2: micro-batches
#
# With M micro-batches per step, which stage can wait for the last one, which cannot? Return the
# elements that a rank sends per step, for an N that divides all layers. *Hint:* a stage without
# memory for whole gradients must reduce each one; a stage without weights must gather them each
# time.


# %%
def elements_sent(stage, P, N, M):
    raise NotImplementedError  # your lines here


def moved_by(group, stage, M):
    model = nn.MLP([4, 4, 4]).flatten(group.empty)
    zero = Zero(model, group, stage)
    for i in range(M):
        logits = model(np.ones((2, 4), np.float32))
        zero.accumulate(nn.cross_entropy(logits, np.zeros(2, int), 4 * M), last=i == M - 1)
    zero.step(optim.SGD(zero.parameters(), 0.1))
    return sum(part.ledger.total for part in zero.groups) // 4


def check_sent(attempt):
    for stage, M in [(1, 1), (2, 1), (3, 1), (1, 3), (2, 3), (3, 3)]:
        found, sent = attempt(stage, 40, 4, M), clusters[4].run(moved_by, stage, M)[0]
        if found != sent:
            return f"stage {stage}, M = {M}: {sent} elements were sent, not {found}"


def as_if_m_were_1(stage, P, N, M):
    return (3 if stage == 3 else 2) * P * (N - 1) / N


exercise.judge(2, check_sent, elements_sent, tempting=[as_if_m_were_1])

# %% [markdown]
# ## Exercise 3: why did this break?
#
# Somebody clips by a rank's own squares: `only_mine`. There is no error, all ranks agree with each
# other in every bit, and the loss falls. Yet the weights are not one device's. How can all ranks
# agree on something wrong? Return the sum that `train_by_hand` needs. *Hint:* which rank updates an
# element, and on which ranks does the update depend? `|dW|^2` is in the math above.


# %%
def total(group, squares):
    """Return |dW|^2 of the whole gradient; squares is |dW|^2 of this rank's part."""
    raise NotImplementedError  # your lines here


def check_total(attempt):
    def worker(group):
        return train_by_hand(group, WIDTHS, dtype="float64", total=attempt)[0].state()

    found = clusters[4].run(worker)
    assert compare(found, found[0], 0.0).ok  # to compare ranks with each other finds nothing
    return None if (comparison := compare(found, want)).ok else comparison


def only_mine(group, squares):
    return squares


exercise.judge(3, check_total, total, tempting=[only_mine])

# %% [markdown]
# ## What it costs, and the next problem
#
# - **Stages 1 and 2 cost no more bytes** than data parallelism, and save N - 1 of N equal updates.
#   Stage 2 with micro-batches costs more: a reduction for each instead of one.
# - **Stage 3 costs 50% more traffic**, and compute waits for a layer that arrives late. It is worth
#   it if the weights do not fit otherwise.
# - **Memory cannot fall below three layers.** With any number of ranks, one layer's weights and
#   gradient are whole while it computes, and so are the next layer's weights.
# - **Activations are not cut at all.**
#
# A layer that is too large for one rank has to be cut inside (tensor parallelism), and a model can
# be cut between layers without moving weights at all: `06_layer_split.py`.

# %%
for cluster in clusters.values():
    cluster.close()
