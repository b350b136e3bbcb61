# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
#   minidist: {lesson: 10, minutes: 25, needs: [5, 8], leads_to: [10b, 24], lab: pipelines}
# ---

# %% [markdown]
# (lesson-10)=
# # 10. Interleaved: more and shorter stages
#
# **Question.** A batch has only so many micro-batches. What does a pipeline gain, and what does it
# pay, if each rank holds several short stages instead of a long one?
#
# You need [1F1B, and its bubble](08_one_f_one_b.py). New word: [chunk](pages/glossary.md#chunk).
# Letters: $p$ ranks, $r$ one of them; $m$ micro-batches; $v$ chunks of a rank; $TF$, $TB$ the times
# of forward and backward of a micro-batch through all layers of one rank. `F3.1` is forward of
# micro-batch 3 in chunk 1.

# %% tags=["setup", "hide-input"]
from fractions import Fraction
from itertools import product

from support import begin, exercise, figures

from minidist import Cluster, nn
from minidist.nn.datasets import Batch, digits
from minidist.pipeline_parallel import Pipeline, programs
from minidist.pipeline_parallel.actions import Backward, Forward, Programs
from minidist.planning import simulate

begin()
images, labels = digits("float64")
pair, cluster = Cluster(2), Cluster(4)
WIDTHS = [64, *[32] * 15, 10]  # 16 layers: up to 4 chunks for each of 4 ranks

# %% [markdown]
# ## Problem: 8 ranks with 8 micro-batches are idle for 47 % of the time
#
# The bubble is $(p-1)/(m+p-1)$, here 7/15. More micro-batches would help, but the size of a batch
# is given: beyond some size more examples teach nothing new. What is left is $p - 1$: the first
# micro-batch has to pass so many stages before the last rank has work.
#
# ## Idea: pass shorter stages
#
# Cut the model into $p v$ stages, each $1/v$ as long. Rank $r$ holds the *virtual stages* $r$,
# $p + r$, ... as its *chunks*. The last rank has work after $p - 1$ short stages, and a micro-batch
# goes round all ranks $v$ times ([Narayanan et al. 2021](https://arxiv.org/abs/2104.04473), section
# 2.2.2). Micro-batches go in groups of $p$: a group passes all chunks before the next one starts.
# This is it for two ranks with two chunks each; backward takes the last chunk first:


# %%
def two_by_two(rank, m):
    """Return the program of one of 2 ranks; m is even."""
    order = [(i, chunk) for first in range(0, m, 2) for chunk in (0, 1) for i in (first, first + 1)]
    forwards = [Forward(i, chunk) for i, chunk in order]
    backwards = [Backward(i, 1 - chunk) for i, chunk in order]
    ahead = (4, 2)[rank]  # 2 (p - 1 - r) + (v - 1) p forwards, then F and B take turns
    program = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards[:-ahead], strict=True):
        program += [forward, backward]
    return program + backwards[-ahead:]


for m in (4, 6, 12):
    ours = Programs([two_by_two(r, m) for r in (0, 1)])
    assert ours == programs("interleaved", 2, m, chunks=2)
print("rank 0:", *two_by_two(0, 4), "\nrank 1:", *two_by_two(1, 4))

# %% [markdown]
# So it is the library's [`interleaved`](../minidist/pipeline_parallel/interleaved.py). Its gradient
# is one device's, because only the order has changed:


# %%
def step(group, order):
    """Return this rank's gradients, and the bytes that it sent."""
    pipeline = Pipeline(nn.MLP(WIDTHS, activation="gelu", dtype="float64"), group, order)
    pipeline.backward(Batch(images[:48], labels[:48]))
    return {name: p.grad for name, p in pipeline.named_parameters().items()}, group.ledger.total


one = nn.MLP(WIDTHS, activation="gelu", dtype="float64")
nn.cross_entropy(one(images[:48]), labels[:48]).backward()
found = {name: grad for grads, _ in pair.run(step, ours) for name, grad in grads.items()}
error = max(abs(found[name] - p.grad).max() for name, p in one.named_parameters().items())
print(f"2 ranks with 2 chunks each: {error:.0e} from one device")
assert error < 1e-12

# %% [markdown]
# ## How much is gained?
#
# :::{admonition} Predict before you run
# 4 ranks, 8 micro-batches, $TF = 1$ and $TB = 2$. In 1F1B a rank is idle for $(p-1)(TF + TB) = 9$.
# And with 2 chunks, and with 4?
# :::

# %% tags=["hide-output"]
for v in (1, 2, 4):
    found = simulate(programs("interleaved", 4, 8, v))
    print(f"v = {v}: idle {float(found.makespan - 24)}, {float(found.bubble):.0%} of the time")
for p, v, TF in product((2, 3, 4), (1, 2, 3, 4), (1, 5)):
    idle = simulate(programs("interleaved", p, 3 * p, v), TF).makespan - 3 * p * (TF + 2)
    assert idle == Fraction((p - 1) * (TF + 2), v)

# %% [markdown]
# :::{dropdown} Where does the number come from?
# The last rank begins after $p - 1$ stages of $TF/v$. After its last backward, a gradient passes
# $p - 1$ stages of $TB/v$ back to rank 0. In between it always has work: while a micro-batch goes
# round the other $p - 1$ ranks, the other $p - 1$ of its group pass. So a rank is idle for
# $(p - 1)(TF + TB)/v$.
# :::
#
# ## What does it cost?
#
# There is another order of the same passes. `looped_bfs`, breadth-first ([Lamy-Poirier
# 2023](https://arxiv.org/abs/2211.05953)), lets *all* micro-batches pass a chunk before the next
# chunk begins. Its idle time is the same. A chunk works in one piece, so its gradient is complete
# early, and $m$ may be any number.
#
# :::{admonition} Predict before you run
# 4 real ranks, 8 micro-batches. How many times the bytes of 1F1B do 2 chunks send, and 4? What is
# the stash of rank 0, which is 4 in 1F1B? (A pass through one of $v$ chunks counts $1/v$.)
# :::

# %% tags=["hide-output"]
ORDERS = ("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("looped_bfs", 2), ("looped_bfs", 4)
for name, v in ORDERS:
    order = programs(name, 4, 8, v)
    sent, result = sum(sent for _, sent in cluster.run(step, order)), simulate(order)
    stash = float(max(result.peak_stash))
    print(f"{name:11} v = {v}: idle {float(result.bubble):3.0%}, stash {stash}, {sent:7,} bytes")
    assert sent == 2 * (4 * v - 1) * 48 * 32 * 8  # an activation and a gradient per boundary
    if name == "interleaved":
        assert stash == (2 * (4 - 1) + (v - 1) * 4 + 1) / v

# %% [markdown]
# The bytes are $(p v - 1)/(p - 1)$ times as many: one boundary follows each stage. The first rank
# begins $2 (p-1) + (v-1) p + 1$ passes before its first backward, each of $1/v$.
#
# ## When does latency eat the gain?
#
# :::{admonition} Predict before you run
# Now each transfer takes half of $TF$. Which is the shortest, and which is longer than 1F1B: GPipe,
# `interleaved` with 2 or 4 chunks, `looped_bfs` with 2? (Columns: 0, 0.5, 1, 1.5, 2 times $TF$.)
# :::


# %% tags=["hide-output"]
def makespan(name, v, latency):
    return simulate(programs(name, 4, 8, v), latency=latency).makespan


EIGHTHS = [Fraction(i, 8) for i in range(17)]
for name, v in (("gpipe", 1), *ORDERS[:4]):
    print(f"{name:11} v = {v}:", *(float(makespan(name, v, L)) for L in EIGHTHS[::4]))
for v in (2, 4):
    wins = [L for L in EIGHTHS if makespan("interleaved", v, L) < makespan("1f1b", 1, L)]
    print(f"{v} chunks are shorter than 1F1B up to a latency of {float(wins[-1])} TF")


# %% tags=["hide-input"]
def draw(plt):
    grid = [[name, "latency"] for name in ("1f1b", "interleaved", "looped_bfs")]
    figure, axes = plt.subplot_mosaic(grid, figsize=(13, 5.4), width_ratios=(2.4, 1))
    for name, v in (ORDERS[0], ORDERS[1], ORDERS[3]):
        ax, result = axes[name], simulate(programs(name, 4, 8, v))
        figures.rank_bars(ax, result.timeline, numbered=False)
        for e in result.timeline.events:
            number, _, chunk = e.name[1:].partition(".")
            if chunk:  # paler
                ax.barh(e.rank, float(e.seconds), 0.8, float(e.start), color="white", alpha=0.5)
            ink = "white" if e.name[0] == "F" and not chunk else figures.INK
            middle = {"ha": "center", "va": "center", "fontsize": 7, "color": ink}
            ax.text(float(e.start + e.end) / 2, e.rank, number, **middle)
        title = f"{name}, v = {v}: {float(result.bubble):.0%} idle"
        ax.set(title=title, xlim=(0, 33), xticks=range(0, 34, 3))
    ax.set_xlabel("time (1 = one forward of a rank); pale: the second chunk; grey: idle")
    ax = axes["latency"]
    for name, v in (("gpipe", 1), *ORDERS[:4]):
        times = [float(makespan(name, v, L)) for L in EIGHTHS]
        shown = [time for time in times if time < 78]
        ax.plot(EIGHTHS[: len(shown)], shown, color=figures.EMPHASIS if v > 1 else figures.INK)
        ax.text(float(EIGHTHS[len(shown) - 1]) + 0.04, shown[-1], f"{name}, v = {v}", va="center")
    ax.set(title="Time of a step, by latency of a transfer", xlim=(0, 3.9), ylim=(25, 79))
    ax.set(xticks=(0, 0.5, 1, 1.5, 2), xlabel="latency (1 = one forward of a rank)")
    return figure


figures.show(
    draw,
    "10_interleaved",
    caption="Shorter stages fill sooner; with 2 chunks or 4, latency is paid more often.",
    alt="Timelines of three orders; with two chunks a rank the empty corners are half as large. "
    "Right: time over latency, steepest for four chunks, flattest for GPipe.",
)

# %% [markdown]
# ## Exercise 1: count the messages
#
# An activation or a gradient of one micro-batch that goes to another rank is a message. Write
# `messages(p, m, v)`: how many are there in a step, on all ranks together?


# %% tags=["exercise"]
def messages(p, m, v):
    raise NotImplementedError  # your line here


exercise.judge("10.1", messages)

# %% [markdown]
# ## Exercise 2: the last group is short, and why did this break?
#
# On 4 ranks with 2 chunks, somebody let 9 micro-batches through, in groups of 4, 4 and 1. Nothing
# is raised, and the gradient is right, but a rank is idle for 10, longer than in 1F1B. Groups may
# be longer than $p$. Write `groups(p, m)`, $m \ge p$, so that the idle time is again
# $(p-1)(TF+TB)/2$, and the largest group, on which the stash depends, is as small as possible.


# %% tags=["exercise"]
def groups(p, m):
    """Return the sizes of the groups; their sum is m."""
    raise NotImplementedError  # your lines here


exercise.judge("10.2", groups)

# %% [markdown]
# ## Exercise 3: who gathers more often?
#
# Let data-parallel ranks share the weights of a chunk as in [ZeRO 3](05_zero.py). They are gathered
# when a chunk begins to work, and dropped when another chunk does. Write `gathers(program)`: how
# often does a rank gather? Then compare the two orders.


# %% tags=["exercise"]
def gathers(program):
    """Return the number of gathers; each action of the program has a `chunk`."""
    raise NotImplementedError  # your lines here


exercise.judge("10.3", gathers)
pair.close()
cluster.close()

# %% [markdown]
# ## At work
#
# | here | PyTorch | Megatron-LM | DeepSpeed | JAX |
# |---|---|---|---|---|
# | `interleaved` | `ScheduleInterleaved1F1B` | `--num-layers-per-virtual-pipeline-stage` | | |
# | longer groups | | `--microbatch-group-size-per-virtual-pipeline-stage` | | |
# | `looped_bfs` | `ScheduleLoopedBFS` | | | |
#
# **What it costs.** $(p v - 1)/(p - 1)$ times the messages, a larger stash, $p v$ equal stages.
#
# **Try:** [write a schedule](../minidist/observe/pages/static/schedules.html).
# **Next:** shorten what is waited for, not the stages. [Lesson 10b](10b_zero_bubble.py).
