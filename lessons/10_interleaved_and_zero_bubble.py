# %% [markdown]
# # 10. Interleaved and zero bubble: what the order of the work alone can win
#
# The schedule 1F1B of lesson 8 is synchronous and stashes little, but it idles while it fills and
# drains. PipeDream (lesson 9) avoids that by training with old weights. Two other ideas make the
# bubble smaller and do not change the gradient: *more, smaller stages* on each rank, and a
# *backward in two halves*; other ranks wait for only one half. The library's versions are
# `interleaved.py` and `zero_bubble.py` in `minidist/pipeline_parallel`.
#
# Letters: `p` ranks, `m` micro-batches, `v` chunks (stages) per rank; `F` forward, `B` backward,
# `I` its half for the input, `W` its half for the weights, `B = I + W`; `TF`, `TI`, `TW`: the time
# they take for all layers of one rank. `F3` is F of micro-batch 3, `F3.1` its F of chunk 1. The
# *stash* of a rank: the micro-batches that wait for the end of their backward; one that waits in
# one chunk counts 1/v.

# %%
import time
from fractions import Fraction
from functools import partial
from itertools import product
from random import Random

import numpy as np
from support import devices, exercise, figures

from minidist import Cluster, nn
from minidist.datasets import Batch, digits
from minidist.observe import timeline
from minidist.observe.timeline.figure import COLORS, draw_into
from minidist.pipeline_parallel import Pipeline, add_communication, programs
from minidist.pipeline_parallel.actions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Transfer,
)
from minidist.pipeline_parallel.executor import execute
from minidist.pipeline_parallel.placement import Programs
from minidist.pipeline_parallel.random_order import random_order
from minidist.planning import simulate

figures.arguments()
images, labels = digits("float64")
cluster = Cluster(4)
CHUNKS = {"1f1b": 1, "interleaved": 2, "zb_h1": 1, "zb_h2": 1, "zb_v": 2}

# %% [markdown]
# ## Problem
#
# Four ranks, eight micro-batches. Two cores cannot be four devices, so the stages only sleep: 5 ms
# each for F, I and W. So every rank acts as a device, and 5 ms is the unit of time.


# %%
class Sleepers:
    """A rank's chunks, which only take their time."""

    unit = 5e-3

    def __init__(self, chunks):
        self.chunks, self.received, self.output_gradients = chunks, {}, {}

    def forward(self, i):
        time.sleep(self.unit / self.chunks)

    def backward(self, i):
        time.sleep(2 * self.unit / self.chunks)

    def backward_weights(self, run):
        time.sleep(len(run) * self.unit / self.chunks)

    def output(self, i):
        return np.zeros(1)

    backward_input, input_gradient = forward, output


def asleep(group, schedule, m, chunks):
    program = add_communication(programs(schedule, group.size, m, chunks))[group.rank]
    execute(program, group, [Sleepers(chunks)] * chunks)


def units_of(schedule, m=8):
    """Return how many units the shortest of a few runs takes: noise only ever adds to a time."""
    said = simulate(programs(schedule, 4, m, CHUNKS[schedule])).makespan
    run = partial(cluster.run, asleep, schedule, m, CHUNKS[schedule])
    log = devices.quiet(lambda log: run(log=log), said * Sleepers.unit)
    return devices.length(log) / Sleepers.unit


units = units_of("1f1b")
print(f"1F1B: {units:.1f} units, of which each rank works 24: {1 - 24 / units:.0%} idle")
assert units > 32  # (m + p - 1) 3 = 33

# %% [markdown]
# More micro-batches would help, as lesson 7 has shown; but the size of the batch is given.
#
# ## Picture
#
# Who waits for what? Backward of a linear layer `Y = X W` is two products, `dX = dY W^T` and
# `dW = X^T dY`:
#
#     F3 of a stage   ->  F3 of the next stage
#     I3 of a stage   ->  I3 of the stage before: it needs dX
#     W3 of a stage   ->  nobody. Only the optimizer, at the end.
#
# A `B` that does both sends `dX` only after it has also computed `dW`. Every stage on the way back
# adds that wait, and the first rank waits for all of them. Below, `dX` is sent as soon as possible,
# and `W` runs when there is nothing more urgent to do:

# %%
for schedule in ("1f1b", "zb_h1"):
    print(timeline.text(simulate(programs(schedule, 4, 6)).timeline), end="\n\n")

# %% [markdown]
# ## Math
#
# The time that a rank is idle while `m` micro-batches pass:
#
#     1F1B           (p-1) (TF + TI + TW)
#     interleaved    (p-1) (TF + TI + TW) / v    a fill passes p-1 chunks, each 1/v of a rank's work
#     ZB-H1          (p-1) (TF + TI - TW)        dX comes back without a W on its way, and W fills
#                                                as much of the drain
#     ZB-H2          (p-1) (TF + TI - 2 TW)      counted from a rank's own start
#     ZB-V           0                           likewise, where TF = TI = TW
#
# Interleaved: Narayanan et al., SC 2021, section 2.2.2. ZB-H1 and ZB-H2: Qi et al., *Zero Bubble
# (Almost) Pipeline Parallelism*, ICLR 2024 (arXiv 2401.10241), sections 2.1 and 2.2, formulas in
# 2.3; ZB-V: section 6 of the arXiv version.
#
# ## Code
#
# *Interleaved.* Rank `r` holds the stages `r`, `p + r`, `2p + r`... Micro-batches go in groups of
# `p`; a group goes through all chunks before the next one starts. So the `i`-th pass is of
# micro-batch `i mod p + p floor(i / pv)` and chunk `floor(i / p) mod v`, and backward takes the
# chunks from the last. Micro-batch 0 reaches the last chunk after `(v-1) p` passes, and rank `r`
# does two more for every later rank: one until F has reached that rank, one until B is back.


# %%
def our_interleaved(rank, p, m, v):
    def place(i):
        return i % p + i // (p * v) * p, i // p % v

    def backward(i):
        micro_batch, chunk = place(i)
        return Backward(micro_batch, v - 1 - chunk)

    ahead = min(m * v, 2 * (p - 1 - rank) + (v - 1) * p)  # before F and B take turns
    for i in range(m * v + ahead):
        if i < m * v:
            yield Forward(*place(i))
        if i >= ahead:
            yield backward(i - ahead)


# %% [markdown]
# *ZB-H1.* A stage has several layers, and `dX` passes through all of them. So its `I` is the whole
# chain, and a list of products, one per weight, is deferred. A rank does as many forwards before
# its first `I` as in 1F1B before its first `B`; then in turn an `I`, a `W` that is `rank`
# micro-batches late (so every rank stashes `p`, as the first one of 1F1B), and an `F`. The late `W`
# are left for the end, where 1F1B drains.


# %%
def our_zb_h1(rank, p, m):
    ahead = p - rank
    yield from map(Forward, range(min(ahead, m)))
    for i in range(m):
        yield BackwardInput(i)
        if i >= rank:
            yield BackwardWeight(i - rank)
        if i + ahead < m:
            yield Forward(i + ahead)
    yield from map(BackwardWeight, range(max(0, m - rank), m))


for p, m in product((2, 3, 4), (12, 24)):
    assert programs("zb_h1", p, m) == [list(our_zb_h1(r, p, m)) for r in range(p)]
    for v in (1, 2, 3):
        ours = Programs([our_interleaved(r, p, m, v) for r in range(p)])
        assert ours == programs("interleaved", p, m, v)
print("both programs equal the library's")

# %% [markdown]
# *ZB-H2* does more forwards first, `2(p - rank) - 1`, until the first `I` arrives: no rank idles
# after its start, and `2p - 1` are stashed. *ZB-V* achieves this in the memory of 1F1B: two
# chunks per rank, laid out as a V. Rank `r` holds the stages `r` and `2p - 1 - r`. So a micro-batch
# turns around on the last rank, and its loss is computed on the first, where its backward begins
# without a wait. The figure below shows all five.
#
# ## Measurement: the formulas, exactly
#
# The simulator computes with fractions, so `==` is the right comparison. ZB-H2 and ZB-V are counted
# from each rank's own start. This leaves out their fill, `(p-1) TF`, in ZB-V half of it, which the
# step before could hide if no rank waited for all others in between (section 4 of the paper). The
# formulas hold for enough micro-batches (m >= 2p - 1 suffices for all), and for a W no longer than
# F and I, because a longer W makes the next rank wait.


# %%
def idle(schedule, p, m, times):
    """Return how long a rank idles; in ZB-H2 and ZB-V of its own span, from start to end."""
    found = simulate(programs(schedule, p, m, CHUNKS[schedule]), *times)
    own_start = schedule in ("zb_h2", "zb_v")
    return (found.span if own_start else found.makespan) - m * sum(times)


def formula(schedule, p, times):
    TF, TI, TW = times
    work = {"1f1b": TF + TI + TW, "interleaved": Fraction(TF + TI + TW, 2)}
    work |= {"zb_h1": TF + TI - TW, "zb_h2": TF + TI - 2 * TW, "zb_v": 0}
    return (p - 1) * work[schedule]


equal, unequal = [(1, 1, 1), (2, 2, 2)], [(2, 3, 1), (3, 2, 2), (3, 4, 3)]
for schedule in CHUNKS:
    times = equal if schedule == "zb_v" else equal + unequal
    cases = list(product((2, 3, 4), (12,), times))
    assert all(idle(schedule, p, m, t) == formula(schedule, p, t) for p, m, t in cases)
    print(f"{schedule:12} {len(cases)} cases, all exact")
print(f"ZB-V with (TF, TI, TW) = (2, 3, 1), p = 4: {idle('zb_v', 4, 12, (2, 3, 1))} units idle")

# %% [markdown]
# ## Measurement: real ranks
#
# First the gradient: eight layers on four ranks against one device. Then the bytes: an activation
# and its gradient cross `pv - 1` boundaries instead of `p - 1`; ZB-V saves one, where it turns
# around on a rank. Then the time of the sleeping stages, and what the simulator predicts.


# %%
WIDTHS = [64, *[32] * 7, 10]


def one_batch(group, schedule, chunks):
    """Return (the gradients of this rank's layers, bytes sent)."""
    model = nn.MLP(WIDTHS, activation="gelu", dtype="float64")
    pipeline = Pipeline(model, group, schedule, micro_batches=8, chunks=chunks)
    pipeline.backward(Batch(images[:40], labels[:40]))
    return {name: p.grad for name, p in pipeline.named_parameters().items()}, group.ledger.total


whole = nn.MLP(WIDTHS, activation="gelu", dtype="float64")
nn.cross_entropy(whole(images[:40]), labels[:40]).backward()
want = {name: p.grad for name, p in whole.named_parameters().items()}
largest = max(abs(grad).max() for grad in want.values())
activation = 40 * 32 * 8  # bytes: 40 examples, width 32, float64

print("              bubble   stash of the ranks    bytes    units: said, measured   error")
for schedule, v in CHUNKS.items():
    results = cluster.run(one_batch, schedule, v)
    got = {name: grad for gradients, _ in results for name, grad in gradients.items()}
    error = max(abs(got[name] - want[name]).max() for name in want) / largest
    moved = sum(sent for _, sent in results)
    crossings = 4 * v - 1 - (schedule == "zb_v")
    assert error < 1e-12 and moved == 2 * crossings * activation
    said = simulate(programs(schedule, 4, 8, v))
    units = units_of(schedule)
    assert units > 0.99 * said.makespan  # a sleep is never shorter than it should be
    stash = " ".join(f"{float(most):3g}" for most in said.peak_stash)
    print(
        f"{schedule:12}  {float(said.bubble):5.1%}   {stash:18}  {moved:7,}"
        f"    {float(said.makespan):5.1f}   {units:5.1f}         {error:.0e}"
    )

# %% [markdown]
# By the simulator ZB-V is the shortest of these five, with a stash of 4. ZB-H2 is not shorter than
# ZB-H1: its ranks work without a pause, 24 of 24 units, but start and end one after another. That
# helps only if a rank may begin its next step before the others have ended this one.
# Interleaved stashes up to `(2(p-1) + (v-1)p + 1)/v`, more than 1F1B's `p`. The measured times are
# longer, because of messages, of waking up, and of what else this machine does.
#
# ## Measurement: the library's other orders
#
# The same actions, ordered for another purpose:
#
# - `looped_bfs` ([Lamy-Poirier 2023](https://arxiv.org/abs/2211.05953)): all micro-batches pass a
#   chunk before the next chunk begins. It has the bubble of `interleaved` and stashes all m. But a
#   chunk's gradient is complete early, and m is any number.
# - `interleaved_zb` (PyTorch's ScheduleInterleavedZeroBubble): the rule of ZB-H1 for the passes of
#   `interleaved`. The bubble of ZB-H1 is divided by v, in the stash of ZB-H1.
# - `zb_auto` (Qi et al. 2024, section 3.1): a search, for given times, latency and room.
# - `dualpipe_v` ([DeepSeek-AI 2024](https://arxiv.org/abs/2412.19437), section 3.2.1, cut in half):
#   on a V, most passes are a pair: a forward, and a backward of another micro-batch. While one of
#   them computes, the other's messages can travel. A rank here runs one after the other.
# - `v_half`, `v_min` ([Qi et al. 2024](https://arxiv.org/abs/2405.15362), sections 2 and 3): a V
#   with a smaller stash, for a larger bubble than ZB-V's. With more ranks the stash comes closer to
#   a half and a third of 1F1B's.
# - `pipeline` runs any program that ranks can execute: yours, or one drawn by `random_order`.

# %%
MORE = CHUNKS | {"looped_bfs": 2, "interleaved_zb": 2, "zb_auto": 1}
MORE |= {"dualpipe_v": 2, "v_half": 2, "v_min": 2}
orders = {schedule: simulate(programs(schedule, 4, 8, v)) for schedule, v in MORE.items()}
orders["random"] = simulate(random_order(Random(10), [[0], [1], [2], [3]], 8))
print("p = 4, m = 8      makespan   bubble   largest stash")
for schedule, said in orders.items():
    numbers = float(said.makespan), float(said.bubble), float(max(said.peak_stash))
    print("{:16} {:9.1f}   {:6.1%}   {:4.1f}".format(schedule, *numbers))
most = {schedule: max(said.peak_stash) for schedule, said in orders.items()}
assert orders["looped_bfs"].makespan == orders["interleaved"].makespan and most["looped_bfs"] == 8
assert orders["interleaved_zb"].makespan == 24 + Fraction(3, 2) and most["interleaved_zb"] == 4
assert most["dualpipe_v"] == 4 + Fraction(1, 2) and (most["v_half"], most["v_min"]) == (3, 2)
for p in (4, 8, 16, 32):
    half, least = (
        max(simulate(programs(s, p, 2 * p, 2)).peak_stash) / p for s in ("v_half", "v_min")
    )
    print(f"p = {p:2}: of 1F1B's stash v_half has {float(half):.0%}, v_min {float(least):.0%}")
assert half < 0.55 and least < 0.4
times = {"forward": 2, "backward_input": 3, "backward_weight": 1}
searched = simulate(programs("zb_auto", 4, 8, memory=5, **times), *times.values())
h1, h2 = (simulate(programs(name, 4, 8), *times.values()) for name in ("zb_h1", "zb_h2"))
assert h2.makespan < searched.makespan < h1.makespan and max(searched.peak_stash) == 5
for name, said in {"zb_h1": h1, "zb_auto, room for 5": searched, "zb_h2": h2}.items():
    print(f"TF, TI, TW = 2, 3, 1: {name}: {said.makespan} units, a stash of {max(said.peak_stash)}")

# %% [markdown]
# ## Measurement: when latency eats the gain
#
# So far a transfer took no time. Let each take `L`, with `TF = TI = TW = 1`. With chunks there are
# more transfers, and less work between two of them:


# %%
def makespan(schedule, v, latency):
    return simulate(programs(schedule, 4, 8, v), latency=latency).makespan


for v, limit in ((2, Fraction(11, 8)), (4, Fraction(3, 8))):
    before, at, after = (
        makespan("interleaved", v, L) - makespan("1f1b", 1, L)
        for L in (limit - Fraction(1, 8), limit, limit + Fraction(1, 8))
    )
    assert before < at == 0 < after
    print(f"interleaved with {v} chunks is shorter than 1F1B up to L = {limit}, longer beyond")
assert all(makespan("zb_h1", 1, L) < makespan("1f1b", 1, L) for L in range(5))
print("ZB-H1 sends what 1F1B sends, and sooner: no latency up to 4 turns that around")


# %%
TITLES = {
    "1f1b": "1F1B: 27% of the time is idle",
    "interleaved": "interleaved, 2 chunks (the second one lower): 16%",
    "zb_h1": "ZB-H1: 11%",
    "zb_h2": "ZB-H2: none after a rank's start, a stash of 7 instead of 4",
    "zb_v": "ZB-V: none after a rank's start, 1F1B's stash",
}


def draw(plt):
    panels = [[name, "latency"] for name in TITLES]
    figure, axes = plt.subplot_mosaic(panels, figsize=(13, 8.4), width_ratios=[2.6, 1])
    figure.suptitle("The same work in another order: 4 ranks, 8 micro-batches, TF = TI = TW")
    for name, title in TITLES.items():
        draw_into(axes[name], simulate(programs(name, 4, 8, CHUNKS[name])).timeline)
        axes[name].set(title=title, xlim=(0, 33), xticks=range(0, 34, 3))
        axes[name].tick_params(axis="x", labelbottom=name == "zb_v")
    axes["zb_v"].set_xlabel("time, in forward passes of a rank", loc="right")
    words = {"forward": "forward", "backward": "backward, or its input half"}
    words["weight half of backward"] = "its weight half"
    patches = [plt.Rectangle((0, 0), 1, 1, color=COLORS[word]) for word in words]
    below = {"loc": "upper left", "bbox_to_anchor": (-0.02, -0.2), "fontsize": 9}
    axes["zb_v"].legend(patches, words.values(), ncols=3, columnspacing=1.2, **below)

    latencies, panel = [Fraction(i, 8) for i in range(17)], axes["latency"]
    for schedule, v, name, color, style, height in (
        ("1f1b", 1, "1F1B", figures.INK, "-", 65.7),
        ("interleaved", 2, "interleaved,\nv = 2", figures.EMPHASIS, "--", 70),
        ("zb_h1", 1, "ZB-H1", "#777777", "-", 57),
        ("zb_v", 2, "ZB-V", "#777777", "-.", 62.8),
        ("interleaved", 4, "", figures.EMPHASIS, ":", 70),
    ):
        times = [float(makespan(schedule, v, L)) for L in latencies]
        panel.plot(latencies, times, style, color=color)
        panel.text(2.04, height, name, va="center", fontsize=9)
    panel.text(0.9, 68, "interleaved,\nv = 4", ha="right", fontsize=9)
    panel.set(title="Latency eats interleaving's gain first", xlim=(0, 2.7), ylim=(22, 74))
    panel.set(xlabel="latency, in forward passes of a rank", xticks=[0, 0.5, 1, 1.5, 2])
    panel.set(ylabel="makespan, in forward passes of a rank")
    return figure


figures.save(draw, "10_interleaved_and_zero_bubble")

# %% [markdown]
# ## Exercise 1: count the transfers
#
# Write `crossings_of(schedule, p, m, v)`: the number of activations and gradients that go from one
# rank to another, for "1f1b" (`v` is 1), "interleaved" and "zb_v" (`v` is 2), from 2 ranks on. The
# check counts them in the programs.
#
# *Hint:* how many stages are there, and how many of their boundaries are between two ranks?


# %%
def crossings_of(schedule, p, m, v):
    """Return how many messages all ranks together send to other ranks."""
    raise NotImplementedError  # your lines here


# %%
def check_crossings(attempt):
    """Return what is wrong, or None."""
    for schedule, v in (("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zb_v", 2)):
        for p, m in product((2, 3, 4), (12, 24)):
            ranks = enumerate(add_communication(programs(schedule, p, m, v)))
            ends = sum(a.peer != r for r, own in ranks for a in own if isinstance(a, Transfer))
            got = attempt(schedule, p, m, v)
            if got != ends // 2:
                what = f"{schedule} with p = {p}, m = {m}, v = {v}"
                return f"{what} has {ends // 2} transfers, not {got}"


def v_times_as_many(schedule, p, m, v):
    return 2 * m * (p - 1) * v


exercise.judge(1, check_crossings, crossings_of, tempting=[v_times_as_many])

# %% [markdown]
# ## Exercise 2: why did this break?
#
# Somebody's stage saves memory: all micro-batches are received into one buffer. In ZB-H1, where W
# of rank `r` is `r` micro-batches late, rank 0 is right, and the others have wrong gradients of
# their weights, though every dX is right.


# %%
def broken_stage(inputs, gradients, w, late, allocate):
    """Return (dX of every micro-batch, dW); W runs `late` micro-batches after I."""
    buffer, put_off, dxs, dw = allocate(), [], [], np.zeros_like(w)
    for x, dy in zip(inputs, gradients, strict=True):
        buffer[...] = x  # received
        dxs.append(dy @ w.T)  # I
        put_off.append((buffer, dy))
        if len(put_off) > late:
            dw += np.dot(put_off[0][0].T, put_off[0][1])  # W
            del put_off[0]
    return dxs, dw + sum(x.T @ dy for x, dy in put_off)


# %% [markdown]
# Why? Write `repaired_stage`, which receives into `late + 1` buffers (calls of `allocate`) and
# copies nothing else.
#
# *Hint:* what does W read, and what has happened to it since I?


# %%
def repaired_stage(inputs, gradients, w, late, allocate):
    raise NotImplementedError  # your lines here


# %%
def check_stage(attempt):
    xs, dys = images[:64].reshape(8, 8, 64), np.random.default_rng(0).standard_normal((8, 8, 5))
    w, right = np.ones((64, 5)), np.tensordot(xs, dys, axes=([0, 1], [0, 1]))
    for rank in range(4):
        free = [np.empty((8, 64)) for _ in range(9)]
        dxs, dw = attempt(xs, dys, w, rank, free.pop)
        off = abs(dw - right).max() / abs(right).max()
        if not np.allclose(dxs, dys @ w.T) or off > 1e-12:
            return f"on rank {rank} dW is off by {off:.0%}"
        if 9 - len(free) != rank + 1:
            return f"on rank {rank} it takes {9 - len(free)} buffers, not {rank + 1}"


def a_buffer_each(inputs, gradients, w, late, allocate):
    for x in inputs:
        allocate()[...] = x
    return gradients @ w.T, np.tensordot(inputs, gradients, axes=([0, 1], [0, 1]))


exercise.judge(2, check_stage, repaired_stage, tempting=[broken_stage, a_buffer_each])

# %% [markdown]
# ## Exercise 3: a planner
#
# Write `best(times, room, latency)`: which of `CHUNKS` has the shortest makespan with 4 ranks and 8
# micro-batches, and a stash of at most `room` on every rank?
#
# *Hint:* programs are values, so simulate them all.


# %%
def best(times, room, latency):
    """Return the name of a schedule that fits and is not slower than any other that fits."""
    raise NotImplementedError  # your lines here


# %%
def check_best(attempt):
    for times, room, latency in product(((1, 1, 1), (2, 3, 1), (2, 2, 4)), (4, 6, 7), (0, 1, 3)):
        fits = {}
        for name, v in CHUNKS.items():
            found = simulate(programs(name, 4, 8, v), *times, latency=latency)
            if max(found.peak_stash) <= room:
                fits[name] = found.makespan
        name, where = (
            attempt(times, room, latency),
            f"times {times}, room {room}, latency {latency}",
        )
        if name not in fits:
            return f"with {where}, {name!r} does not fit"
        if fits[name] != min(fits.values()):
            return f"with {where}, {name!r} takes {fits[name]}, {min(fits.values())} is best"


def always_zb_v(times, room, latency):
    return "zb_v"


exercise.judge(3, check_best, best, tempting=[always_zb_v])

# %% [markdown]
# ## What it costs, and the next problem
#
# - **Interleaved:** `(pv-1)/(p-1)` times the transfers, each with its latency; more in the stash; a
#   model with `pv` stages of equal cost, and micro-batches in groups of `p`.
# - **Zero bubble:** between `I` and `W` a stage keeps what the products need. ZB-H2 keeps `2p - 1`
#   micro-batches. No bubble at all needs `TF`, `TI` and `TW` alike; in attention the products
#   without weights have no `W`, so there `TI` is the largest.
# - **All of them** only reorder. The gradient is one device's, and so is the update. Ranks still
#   start and end one after another, and anything that makes all ranks meet, such as a global norm
#   for clipping, brings the bubble back.
#
# And a pipeline cuts between layers. One layer that does not fit a device, or that is too slow, is
# the next problem: lesson 11 cuts the matrix itself.

# %%
cluster.close()
