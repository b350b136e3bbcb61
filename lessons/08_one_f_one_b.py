# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
#   minidist: {lesson: 8, minutes: 25, needs: [7], leads_to: [9, 10, 10b, 24], lab: pipelines}
# ---

# %% [markdown]
# (lesson-8)=
# # 8. 1F1B: the same bubble in less memory
#
# **Question.** GPipe keeps every micro-batch until its backward. How few can a rank keep without
# being idle for longer?
#
# You need [programs and the bubble](07_gpipe.py). New words: [stash](pages/glossary.md#stash),
# [deadlock](pages/glossary.md#deadlock). Letters: $p$ ranks, $r$ one of them; $m$ micro-batches,
# $i$ one of them; $TF$, $TB$ the times of its forward and of its backward on one rank.

# %% tags=["setup", "hide-input"]
import tracemalloc
from itertools import product

import numpy as np
from support import begin, exercise, figures

from minidist import Cluster, nn
from minidist.errors import Deadlock
from minidist.nn.datasets import Batch, digits
from minidist.pipeline_parallel import Pipeline, actions, add_communication, programs
from minidist.planning import simulate

begin()
images, labels = digits("float64")
cluster = Cluster(4)

# %% [markdown]
# ## Problem: a bubble of 9 % costs 172 GB
#
# A block of width 4096 keeps 20 times 4096 numbers per position ([lesson
# 13](13_sequence_parallel.py) counts): in 16 bits, 5.2 MB for 32 blocks. On each of 4 ranks an
# example of 4096 positions needs 5.4 GB, from its forward to its backward. For a bubble
# $(p-1)/(m+p-1)$ of 9 %, GPipe keeps $m = 32$ of them at once: 172 GB.
#
# ## Idea: backward as soon as possible
#
# Backward of micro-batch 0 can begin when its forward has reached the last rank. In every tick a
# rank does its oldest backward if it can; else its next forward, unless its *stash*, the
# micro-batches between their forward and their backward, is `most(r)` already.
# ![Bars of four ranks appear one after the other](../figures/moving/08_filling.svg)


# %%
def as_soon_as_possible(p, m, most):
    order, end = [[] for _ in range(p)], {}  # end: {(kind, rank, micro-batch): its tick}
    forwards, backwards, now = [0] * p, [0] * p, 0

    def there(kind, rank, i):  # was it done before this tick? Outside of the pipeline: always
        return not 0 <= rank < p or end.get((kind, rank, i), now) < now

    while min(backwards) < m:
        for r in range(p):
            f, b = forwards[r], backwards[r]
            if b < m and there("F", r, b) and there("B", r + 1, b):
                order[r].append(actions.Backward(b))
                end["B", r, b], backwards[r] = now, b + 1
            elif f < m and f - b < most(r) and there("F", r - 1, f):
                order[r].append(actions.Forward(f))
                end["F", r, f], forwards[r] = now, f + 1
        now += 1
    return order


# %% [markdown]
# With $p - r$ it is [`1f1b`](../minidist/pipeline_parallel/one_f_one_b.py), PipeDream-Flush of
# [Narayanan et al. 2021](https://arxiv.org/abs/2006.09503), section 3.2. The gradient is exact:


# %%
def gradients(group, order):
    pipeline = Pipeline(nn.MLP([64, 32, 32, 32, 10], dtype="float64"), group, order)
    pipeline.backward(Batch(images[:64], labels[:64]))
    return [p.grad for p in pipeline.parameters()]


for p, m in product(range(1, 7), range(1, 11)):
    assert as_soon_as_possible(p, m, lambda r, p=p: p - r) == programs("1f1b", p, m)
one = nn.MLP([64, 32, 32, 32, 10], dtype="float64")
nn.cross_entropy(one(images[:64]), labels[:64]).backward()
ranks = cluster.run(gradients, as_soon_as_possible(4, 8, lambda r: 4 - r))
got = [grad for rank in ranks for grad in rank]
error = max(abs(grad - p.grad).max() for grad, p in zip(got, one.parameters(), strict=True))
print(f"60 pipelines: the library's order; on 4 real ranks: one device's gradient, {error:.0e}")
assert error < 1e-12

# %% [markdown]
# ## How few are enough?
#
# :::{admonition} Predict before you run
# 4 ranks, 8 micro-batches, $TB = 2 TF$. Rank 0 may keep 1, 2, ... 8 of them, each later rank one
# fewer. From which number on does the time no longer fall? And if a transfer takes a fifth of $TF$?
# :::

# %% tags=["hide-output"]
sweep = {}
for most in range(1, 9):
    order = as_soon_as_possible(4, 8, lambda r, most=most: max(1, most - r))
    sweep[most], slow = simulate(order).makespan, simulate(order, latency=0.2).makespan
    print(f"at most {most} on rank 0: time {sweep[most]}, with transfers {slow:.1f}")
assert sweep[3] > sweep[4] == sweep[8] == (8 + 4 - 1) * 3  # (m + p - 1)(TF + TB)

# %% [markdown]
# :::{dropdown} Where does the number come from?
# A micro-batch is back on rank $r$ after $(p - r)(TF + TB)$. A rank that never waits begins one per
# $TF + TB$, so $p - r$ are on their way, and the stash is $\min(m, p - r)$. With fewer, the rank
# waits until the first one is back. With more, nothing is gained: to fill and to drain still takes
# $(p - 1)(TF + TB)$. A transfer makes the way longer, not the work: one more on the way hides it.
# :::
#
# ## What does a rank hold?
#
# :::{admonition} Predict before you run
# Two layers of width 256 on each of 4 real ranks, micro-batches of 64 rows. From 8 to 32
# micro-batches, how many times more does rank 0 hold at its peak, in GPipe and in 1F1B?
# :::


# %% tags=["hide-output"]
def held(group, schedule, m):
    pipeline = Pipeline(nn.MLP([256] * 9), group, schedule, m)
    batch = Batch(np.zeros((64 * m, 256), np.float32), np.zeros(64 * m, int)).micro_batches(m)
    tracemalloc.start()
    pipeline.run(batch)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return pipeline.stages[0].peak, peak


MANY, stash = (2, 4, 8, 16, 32), {}
for schedule, m in product(("gpipe", "1f1b"), MANY):
    stash[schedule, m], peaks = zip(*cluster.run(held, schedule, m), strict=True)
    print(f"{schedule}, m = {m:2}: stash {stash[schedule, m]}, rank 0 {peaks[0] / 1e6:.1f} MB")
    assert [*stash[schedule, m]] == [m if schedule == "gpipe" else min(m, 4 - r) for r in range(4)]


# %% tags=["hide-input"]
def draw(plt):
    figure, axes = plt.subplots(2, 2, figsize=(12, 4.8), width_ratios=(2.1, 1))
    top, bottom = axes[:, 1]
    for ax, name, title in zip(axes[:, 0], ("gpipe", "1f1b"), ("GPipe", "1F1B"), strict=True):
        result = simulate(programs(name, 4, 8))
        figures.rank_bars(ax, result.timeline)
        for r, most in enumerate(result.peak_stash):
            ax.text(33.4, r, f"holds {most}", va="center", fontweight="bold")
        ax.set(title=f"{title}; grey: idle", xlim=(0, 37), xticks=[0, 10, 20, 30, 33])
        top.loglog(MANY, [stash[name, m][0] for m in MANY], "o-", base=2, color=figures.INK)
        top.text(38, stash[name, 32][0], f"{title}, rank 0", va="center")
    ax.set_xlabel("time (1 = one forward)")
    ax.legend(ncols=2, fontsize=9, loc="upper left", bbox_to_anchor=(0, -0.14))
    top.set(title="Stash, measured", xlabel="micro-batches", xlim=(1.7, 230), ylim=(1.5, 48))
    top.set(xticks=MANY, xticklabels=MANY, yticks=MANY, yticklabels=MANY)
    bottom.plot(list(sweep), list(sweep.values()), "o-", color=figures.INK)
    bottom.plot(4, sweep[4], "o", color=figures.EMPHASIS, markersize=11)
    bottom.set(title="Time (1 = one forward); large dot: 1F1B", ylim=(0, 105), xticks=range(1, 9))
    bottom.set_xlabel("micro-batches that rank 0 may keep")
    return figure


figures.show(
    draw,
    "08_one_f_one_b",
    caption="Both orders take 33 units. GPipe holds 8 micro-batches on every rank, 1F1B 4 to 1.",
    alt="Two timelines end together; in 1F1B ranks take turns. Right: only GPipe's stash grows.",
)

# %% [markdown]
# ## Where does the order bite?
#
# minidist's `send` never waits. In many libraries a large send waits for its receiver: a
# *rendezvous*, which needs no buffer. Naively, a receive is just before its use, and a send just
# after. `>F1` sends activation 1, `<B0` receives gradient 0:

# %%
naive = add_communication(programs("1f1b", 2, 3))
print("rank 0:", *naive[0], "\nrank 1:", *naive[1])

# %% [markdown]
# :::{admonition} Predict before you run
# Each send waits until its receive has begun. Before which actions do the two ranks stop for good?
# :::

# %% tags=["hide-output"]
try:
    simulate(naive, buffer=0)  # a send waits: no message is ever buffered
except Deadlock as stuck:
    print(stuck)
safe = add_communication(programs("1f1b", 2, 3), rendezvous_safe=True)
print(f"mended, it takes {simulate(safe, buffer=0).makespan}; rank 1:", *safe[1])

# %% [markdown]
# One rank sends an activation, the other a gradient, and neither receives. The cure is one global
# order: replay all programs, and write a transfer into *both* programs when it happens. Then the
# earliest transfer that is not done is the next one on both sides.
#
# ## Exercise 1: 1F1B for one rank
#
# No clock, no other ranks: write this generator of `actions.Forward` and `actions.Backward`. Any
# order will do that has 1F1B's stash on every rank and takes no longer.


# %% tags=["exercise"]
def one_f_one_b(rank, p, m):
    """Yield the actions of one rank."""
    raise NotImplementedError  # your lines here


exercise.judge("08.1", one_f_one_b)

# %% [markdown]
# ## Exercise 2: repair it locally
#
# There is a cure without a replay: where a program sends to a neighbour and next receives from the
# same one, odd ranks receive first. The step must end if $m \ge p$, and if $m = 1$.


# %% tags=["exercise"]
def odd_receive_first(program, rank):
    """Return a program with naive transfers, mended; actions.SENDS, .RECEIVES have the types."""
    raise NotImplementedError  # your lines here


exercise.judge("08.2", odd_receive_first)

# %% [markdown]
# ## Exercise 3: why did this break?
#
# To allocate nothing in the loop, a rank copies the activation of micro-batch $i$ into its buffer
# number `i % count`. One buffer passed all tests on two ranks. On three, gradients are wrong, and
# nothing is raised. How many does a rank need under 1F1B? (Rank 0 receives none.)


# %% tags=["exercise"]
def buffers_needed(rank, p, m):
    raise NotImplementedError  # your line here


exercise.judge("08.3", buffers_needed)
cluster.close()

# %% [markdown]
# ## At work
#
# | here | PyTorch | Megatron-LM | DeepSpeed | JAX |
# |---|---|---|---|---|
# | `1f1b` | `Schedule1F1B` | its default | `TrainSchedule` | |
# | odd ranks receive first | | `_p2p_ops` | | |
#
# **What it costs.** $p$ micro-batches on the first rank, one on the last. The bubble is there once
# per update: the pipeline drains, because gradients must be complete before weights change.
#
# **Try:** [write a schedule](../minidist/observe/pages/static/schedules.html).
# **Next:** must they? [Lesson 9](09_pipedream.py) never drains.
