# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
#   minidist: {lesson: 22, minutes: 30, needs: [3], leads_to: [23, 24], lab: failures}
# ---

# %% [markdown]
# (lesson-22)=
# # 22. When a rank dies: how often should a run save?
#
# **Question.** One rank that dies stops all; they go on from the last checkpoint. When to save?
#
# You need [data parallelism](03_data_parallel.py). New words:
# [checkpoint](pages/glossary.md#checkpoint), [elastic](pages/glossary.md#elastic). Letters: $\tau$
# seconds of training between two saves, $\delta$ of a save, $M$ mean seconds between failures of
# any rank, $R$ of a restart; $N$ ranks.

# %% tags=["setup", "hide-input"]
import signal
import tempfile
from pathlib import Path
from time import monotonic, sleep

import numpy as np
from support import begin, exercise, figures

from minidist import Cluster, checkpoint, nn, optim
from minidist.checkpoint.manifest import whole_ones
from minidist.data_parallel.naive import all_reduce_gradients
from minidist.errors import RankDied
from minidist.nn.datasets import digits
from minidist.planning.year_of_training import DAY, Run, Slowdown, closed_form, replay

begin()
images, labels = digits()
ranks, disk = Cluster(2), tempfile.TemporaryDirectory(prefix="minidist-")

# %% [markdown]
# ## Problem: a day of work takes ten months
#
# In 54 days of Llama 3, on 16,384 GPUs, 419 interruptions were unexpected ([Dubey et al.
# 2024](https://arxiv.org/abs/2407.21783), section 3.3.4): $M$ is 3.1 hours. A run that never saves
# begins again after every failure, so 24 hours of work take ten months: $M (\exp(24/M) - 1)$ hours.
#
# ## Idea: one cost falls with the interval, one rises
#
# ```text
# |=== tau ===|save|=== tau ===|save|=== lost ===X  restart  |=== tau ===|save|== ...
#                                   ^ checkpoint ^ a rank dies: all go on from the checkpoint
# ```
#
# For each useful second, saves take $\delta/\tau$. A failure hits the middle of an interval, on
# average: $\tau/(2 M)$. The sum is least where both are equal, $\tau = \sqrt{2 \delta M}$ ([Young
# 1974](https://doi.org/10.1145/361147.361115)), for rare failures. Exactly, if no restart fails:
#
# $$(M + R)/\tau \cdot (\exp((\tau + \delta)/M) - 1)$$ (cost)


# %%
def young(delta, M):
    return np.sqrt(2 * delta * M)


def cost(tau, delta, M, R=0.0):  # seconds for a second of useful work
    return (M + R) / tau * np.expm1((tau + delta) / M)


def best(delta, M):
    tau = M * np.geomspace(1e-4, 10, 100_001)
    return tau[np.argmin(cost(tau, delta, M))]


# %% [markdown]
# :::{dropdown} Where does the number come from?
# An interval and its save are finished with the probability $\exp(-(\tau + \delta)/M)$, say `q`. A
# life, of $M$ seconds after $R$ of a restart, finishes at least one with probability `q`, at least
# two with `q^2`: on average `q + q^2 + q^3 + ... = 1/(1/q - 1)`, each with $\tau$ useful seconds.
# :::
# :::{admonition} Predict before you run
# $\delta$ = 5, $M$ = 15 minutes: Young's interval is a third too long. Does it cost 33, 10 or
# 3 % more? (The best: figures 3 to 5, [Daly 2006](https://doi.org/10.1016/j.future.2004.11.016).)
# :::
# :::{admonition} Predict before you run
# More than 90 % was useful. Would saves of 60 s and restarts of 300 s do? And without spares, if
# repairs take a day? Some hosts get slow, most for 10 minutes, a few for a day: is one best
# replaced at once, later or never? ([Replay](../minidist/planning/year_of_training.py) by events.)
# :::

# %% tags=["hide-output"]
for M, daly in [(24 * 60, 117), (6 * 60, 57), (15, 9.1)]:  # minutes
    more = cost(young(5, M), 5, M) / cost(best(5, M), 5, M) - 1
    print(f"M = {M:4}: best {best(5, M):.1f}, Daly {daly}; Young {young(5, M):.1f}, +{more:.1%}")
for save, R, k, n in (60, 300, 99, 2048), (5, 60, 99, 2048), (5, 60, 0, 2048), (5, 60, 0, 1900):
    run = Run(2048, young(save, 186 * 60), save, R, 2048 * 186 * 60, spares=k, elastic=n)
    print(f"save {save:2} s, restart {R:3} s, {k:2} spare hosts, at least {n} train:", end=" ")
    print(f"{replay(run, 54 * DAY).goodput:.0%} useful (Daly's equation: {closed_form(run):.0%})")
slow = Slowdown(60 * DAY, 600, 1.3), Slowdown(500 * DAY, DAY, 1.3)  # a host: often short, or long
for evict in (0, 1800, np.inf):  # seconds: it leaves at the first save after them
    run = Run(2048, young(5, 186 * 60), 5, 300, 2048 * 186 * 60, 99, slowdowns=slow, evict=evict)
    print(f"slow hosts leave after {evict:4} s: {replay(run, 54 * DAY).goodput:.0%} useful")

# %% [markdown]
# ## A worker that may die at any moment
#
# The newest whole checkpoint of a folder has weights and step. A step sleeps 8 ms, a save 32 ms.


# %%
def train(group, folder, every, victim, seconds, steps=10_000):  # on from the newest checkpoint
    model, first = nn.MLP([64, 32, 10]), 0
    if whole_ones(folder):
        state, first = checkpoint.load(folder)
        model.load_state(state)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    group.barrier()
    with open(f"{folder}.{group.rank}", "w", buffering=1) as log:
        print(monotonic(), file=log)  # the start; below, the begin and the end of each save
        if group.rank == victim:
            signal.setitimer(signal.ITIMER_REAL, seconds)  # it kills without a warning
        for step in range(first, steps):
            sleep(0.008)
            mine = (64 * step + np.arange(64))[group.rank :: group.size] % len(images)
            nn.cross_entropy(model(images[mine]), labels[mine], reduction_size=64).backward()
            all_reduce_gradients(model, group)
            optimizer.step()
            optimizer.zero_grad()
            if (step + 1) % every == 0:
                print(monotonic(), file=log)
                sleep(0.032)
                checkpoint.save(folder, model.state(), step + 1, group)
                print(monotonic(), file=log)
    return model.state()


# %% [markdown]
# :::{admonition} Predict before you run
# Four runs save after 1, 4, 16 and 64 steps. They have the same five deaths, 0.3 s apart on
# average. Which one saves most steps? Does a run that died have other weights in the end?
# :::

# %% tags=["hide-output"]
M, EVERY = 0.32, (1, 4, 16, 64)
lives = -M * np.log([0.5, 0.1, 0.7, 0.9, 0.3])  # quantiles of failures at random
done, pieces = {}, {every: [] for every in EVERY}  # (0: useful, 1: a save, 2: lost; seconds)
for every in EVERY:
    folder = Path(disk.name, str(every))
    for i, life in enumerate(lives):
        try:
            ranks.run(train, folder, every, i % 2, life)
        except RankDied:  # the next run starts both ranks again
            start, *times = (float(line) for line in open(f"{folder}.0"))
            whole = times[: len(times) // 2 * 2]  # a last save may lack its end
            kinds = [0, 1] * (len(whole) // 2) + [2]
            pieces[every] += zip(kinds, np.diff([start, *whole, start + life]), strict=True)
    done[every] = max(whole_ones(folder), default=0)
spent = {e: [sum(t for k, t in pieces[e] if k == kind) for kind in range(3)] for e in EVERY}
save = np.mean([t for own in pieces.values() for kind, t in own if kind == 1])
step = sum(useful for useful, _, _ in spent.values()) / sum(done.values())
for every in EVERY:
    shares = " ".join(f"{seconds / lives.sum():4.0%}" for seconds in spent[every])
    print(f"after {every:2}: {done[every]:2} steps; useful, saves, lost {shares};", end=" ")
    print(f"by (cost) {1 / cost(every * step, save, M):.0%} useful")
saved, _ = checkpoint.load(Path(disk.name, str(most := max(done, key=done.get))))
calm = ranks.run(train, Path(disk.name, "calm"), 10_000, None, 0.0, done[most])[0]
assert all(np.array_equal(saved[name], calm[name]) for name in calm)
print(f"after {most}: as without a death, bit for bit; Young: {young(save, M) / step:.0f} steps")


# %% tags=["hide-input"]
def draw(plt):
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.4), width_ratios=[3, 2])
    colors = figures.FORWARD, figures.BACKWARD, figures.EMPHASIS
    looks = [{"color": color, "edgecolor": "none"} for color in colors]
    for row, every in enumerate(EVERY):
        figures.stack(left, row, [(t, "", looks[kind]) for kind, t in pieces[every]])
    left.vlines(np.cumsum(lives), -0.5, 3.5, color=figures.INK, ls=":", lw=1)
    left.set_yticks(range(len(EVERY)), [f"after {every}" for every in EVERY])
    left.set(title="four runs, the same five deaths (dotted)", xlabel="seconds, without restarts")
    left.invert_yaxis()
    x = np.geomspace(1, 100)
    useful = 1 / cost(x * step, save, M)
    saves = save / (x * step) * useful
    right.stackplot(x, useful, saves, 1 - useful - saves, colors=colors)
    right.plot(EVERY, [s[0] / sum(s) for s in spent.values()], "wo", mec=figures.INK, clip_on=False)
    right.axvline(young(save, M) / step, color="white", ls="--")
    for words, *at in (("useful", 5, 0.2), ("saves", 1.2, 0.6), ("lost", 40, 0.8)):
        right.text(*at, words, color="white", weight="bold")
    right.set(title="share (dots: measured)", xlabel="steps between two saves", xscale="log")
    right.margins(0)
    return figure


figures.show(
    draw,
    "22_lost_work",
    caption="Saving too often costs saves, saving too rarely loses work. Dashed: Young's interval.",
    alt="The run that saves after each step mostly saves, the one that saves after 64 loses most.",
)

# %% [markdown]
# ## Exercise 1: how much does a failure lose?
#
# Young says half an interval, which is right if failures are rare. Write `lost`: the mean seconds
# between the end of the last save, or the start, and the failure, for any $M$.


# %% tags=["exercise"]
def lost(tau, delta, M):
    """Return the mean seconds that a failure loses."""
    raise NotImplementedError  # your line here


exercise.judge("22.1", lost)

# %% [markdown]
# ## Exercise 2: why did this break?
#
# A save takes 5 minutes, $M$ is 3.1 hours. Now [a second
# thread](../minidist/checkpoint/run_checkpoints.py) writes; training waits 1 second, for a copy.
# Young's formula with 1 second makes the run *slower* than before. What does a failure lose now?
# Write `interval`: a $\tau$ whose useful share is within 1 % of the best. Saves do not overlap.


# %% tags=["exercise"]
def interval(copy, write, M):
    """Return a tau, in the unit of the arguments."""
    raise NotImplementedError  # your line here


exercise.judge("22.2", interval)

# %% [markdown]
# ## Exercise 3: from one rank to 262,144
#
# Write `best_interval`: a $\tau$ whose cost is within 1 % of the least; `alone`: one rank's $M$.


# %% tags=["exercise"]
def best_interval(N, alone, delta):
    """Return a tau, in the unit of the arguments."""
    raise NotImplementedError  # your lines here


exercise.judge("22.3", best_interval)
ranks.close()
disk.cleanup()

# %% [markdown]
# ## At work
#
# | here | PyTorch | Megatron-LM | DeepSpeed | JAX |
# |---|---|---|---|---|
# | `checkpoint` | `torch.distributed.checkpoint` | `--save-interval` | `save_checkpoint` | Orbax |
# | a second thread | `async_save` | `--async-save` | | `AsyncCheckpointer` |
# | `train --elastic` | `torchrun` | | `elasticity` | |
#
# **What it costs.** At best about $\sqrt{2 \delta/M}$ of the useful time. Ranks die in saves, too:
# [the manifest](../minidist/checkpoint/writing.py) is written last. A checkpoint fits any
# [mesh](16_hybrid.py).
# **Next:** all cuts so far were made by hand. [Lesson 23](23_let_the_machine_cut.py).
