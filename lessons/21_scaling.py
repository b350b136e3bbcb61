# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
#   minidist: {lesson: 21, minutes: 25, needs: [2, 3], leads_to: [19, 20, 22], lab: none}
# ---

# %% [markdown]
# (lesson-21)=
# # 21. How far does it scale?
#
# **Question.** You have timed steps on 1, 2 and 4 ranks. What will 16 gain, and what ends the gain?
#
# You need [the ring](02_collectives.py) and [data parallelism](03_data_parallel.py). New words:
# [strong scaling](pages/glossary.md#strong-scaling), [weak
# scaling](pages/glossary.md#weak-scaling), [critical batch
# size](pages/glossary.md#critical-batch-size). Letters: $N$ ranks; $B$ examples of a batch; $S$
# bytes of the gradient; $\alpha$ latency, $\beta$ seconds per byte; $s$ a serial share.

# %% tags=["setup", "hide-input"]
from time import perf_counter, sleep

import numpy as np
from support import begin, exercise, figures
from threadpoolctl import threadpool_limits

from minidist import Cluster, nn, optim
from minidist.nn.datasets import digits
from minidist.planning.costs.collectives import all_reduce_bytes

begin()
threadpool_limits(1)
NAMES, S, RANKS = ("fixed", "each", "alpha", "beta"), 48_000, np.array([1, 2, 4, 8, 16])
SLEPT = FIXED, EACH, ALPHA, BETA = 10e-3, 120e-3 / 384, 4e-3, 8e-3 / 48_000  # seconds
clusters, (images, labels) = {N: Cluster(N, "thread") for N in RANKS.tolist()}, digits()

# %% [markdown]
# ## Problem: half of 786,432 dollars a day pays for waiting
#
# A GPU for 2 dollars an hour: 16,384 of them cost 786,432 dollars a day. If they are 8,192 times as
# fast as one, half of that pays for waiting. One wants to know this from a few ranks.
#
# ## Idea: a step pays four prices, and each has its own count
#
# | price, in seconds | of what | how many in a step |
# |---|---|---|
# | `fixed` | what each rank does for itself: the optimizer, overhead | 1 |
# | `each` | an image | $B/N$ |
# | $\alpha$ | a message of [the ring](02_collectives.py) | $2 (N-1)$ |
# | $\beta$ | a byte of it | $2 (N-1) S/N$ |
#
# The counts are known. So a few measured steps give the prices, and these predict any other step.
# To have 16 ranks, let them *sleep* as long as work and link take: a rank that sleeps needs no
# core. We choose the prices, so we can check the fit. A step must send what [the library's
# ring](../minidist/comm/collectives.py) sends.


# %%
def counts(N, B):
    return np.array([1, B / N, 2 * (N - 1), 2 * (N - 1) * S / N])


def prices_of(runs):  # fitted to the seconds of runs (N, B), so that relative errors count
    rows = [counts(*run) / seconds_of(*run) for run in runs]
    return np.linalg.lstsq(np.array(rows), np.ones(len(rows)))[0]


def step(group, B):  # a step that sleeps: its seconds, and the bytes that this rank sent
    N, part = group.size, np.ones(S // 4 // group.size, "float32")
    group.barrier()
    start = perf_counter()
    sleep(FIXED + EACH * B / N)
    for _ in range(2 * (N - 1)):
        sleep(ALPHA + BETA * part.nbytes)
        group.send(part, (group.rank + 1) % N)
        group.recv((group.rank - 1) % N)
    return perf_counter() - start, group.ledger.total


def seconds_of(N, B):
    tries = [clusters[N].run(step, B) for _ in range(5)]
    assert [sent for _, sent in tries[0]] == all_reduce_bytes("ring", S // 4, 4, N)
    return min(max(seconds for seconds, _ in ranks) for ranks in tries)  # noise only adds time


prices = prices_of([(1, 96), (1, 384), (2, 96), (2, 384), (4, 96), (4, 384)])
print("fitted / slept:", dict(zip(NAMES, (prices / SLEPT).round(2).tolist(), strict=True)))

# %% [markdown]
# ## What does the famous law leave out?
#
# In *strong scaling* the batch stays. If $N$ ranks cannot shorten a share $s$ of one rank's time,
# the gain is $1 / (s + (1 - s)/N)$ ([Amdahl 1967](https://doi.org/10.1145/1465482.1465560)).
#
# :::{admonition} Predict before you run
# With 384 images, 4 ranks are 1.7 times as fast as one. And 16: four times, twice, or less?
# :::

# %% tags=["hide-output"]
seconds = np.array([seconds_of(N, 384) for N in RANKS.tolist()])
gain = seconds[0] / seconds
laws = {s: 1 / (s + (1 - s) / RANKS) for s in np.linspace(0, 1, 1001)}
s = min(laws, key=lambda s: sum((laws[s] / gain - 1)[1:3] ** 2))  # fitted to 2 and 4 ranks
said = {f"Amdahl, s = {s:.2f}": laws[s]}
said["four prices"] = [prices @ counts(1, 384) / (prices @ counts(N, 384)) for N in RANKS]
for who, gains in {"ranks": RANKS, "measured gain": gain, **said}.items():
    print(f"{who:16}", *(f"{each:5.3g}" for each in gains))

# %% [markdown]
# The law has no term that *grows* with $N$. The ring's latency does. ([Karp and Flatt
# 1990](https://doi.org/10.1145/78607.78614) find it by solving for $s$ at each $N$: $s$ rises.)
#
# :::{dropdown} Where does the number come from?
# In milliseconds, as slept: $10 + 120 = 130$ on one rank, $10 + 30 + 6 (4 + 2) = 76$ on four, and
# $10 + 7.5 + 30 (4 + 0.5) = 152.5$ on sixteen. So 4 ranks gain $130/76$, and 16 gain $130/152.5$.
# :::
#
# ## Which wall is next?
#
# In *weak scaling* the batch grows with $N$. Then the gain is $N - (N-1) s$, where $s$ is a share
# of $N$ ranks' time ([Gustafson 1988](https://doi.org/10.1145/42411.42415)): no bound.
#
# :::{admonition} Predict before you run
# A step of 384 images on 16 ranks: which price takes most of the time? And with 96 images a rank?
# :::

# %% tags=["hide-output"]
for N, B in ((4, 384), (16, 384), (16, 1536)):
    share = dict(zip(NAMES, prices * counts(N, B) / (prices @ counts(N, B)), strict=True))
    print(f"{N:2} ranks, {B:4} images:", {name: f"{part:.0%}" for name, part in share.items()})

# %% [markdown]
# | wall | what does not shrink with $N$ | what helps |
# |---|---|---|
# | work per rank | `fixed`, $2 (N-1) \alpha$ | more images a rank, [buckets](03_data_parallel.py) |
# | bytes | $2 (N-1) S/N \approx 2 S$ | more images a rank, [fewer bytes](19_fewer_bytes.py) |
# | batch | the steps that training needs | nothing that one can buy |
#
# But a larger batch must also be *worth* more. We count the steps of a linear model until its loss
# on all digits is 0.3. Each batch gets the best of four learning rates.
#
# :::{admonition} Predict before you run
# From 2 to 4 examples, the steps fall by nearly half. How much do they fall from 128 to 256?
# :::


# %% tags=["hide-output"]
def steps_needed(B, rate):
    model, random = nn.MLP([64, 10]), np.random.default_rng(0)
    optimizer = optim.SGD(model.parameters(), lr=rate)
    for done in range(300):
        if nn.cross_entropy(model(images), labels).data <= 0.3:
            return done
        mine = random.integers(0, len(images), B)
        nn.cross_entropy(model(images[mine]), labels[mine]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return 300


BATCHES = 2 ** np.arange(1, 9)
steps = [min(steps_needed(B, rate) for rate in (0.6, 1.2, 2.4, 4.8)) for B in BATCHES]
slope, least = np.polyfit(1 / BATCHES, steps, 1, w=1 / np.array(steps))
print(dict(zip(BATCHES.tolist(), steps, strict=True)), end=" steps; fitted: ")
print(f"{least:.1f} (1 + {slope / least:.0f} / B)")

# %% [markdown]
# The law $1 + B_{crit}/B$ is from [McCandlish et al. 2018](https://arxiv.org/abs/1812.06162): a
# batch averages a gradient's noise, and beyond $B_{crit}$, the critical batch size, little is left.
# [Shallue et al. 2019](https://jmlr.org/papers/v20/18-789.html) measured many such curves.


# %% tags=["hide-input"]
def draw(plt):
    places = [["gain", "steps"], ["error", "steps"]]
    figure, on = plt.subplot_mosaic(places, figsize=(10, 4.4), height_ratios=[2, 1])
    styles = {"color": figures.EMPHASIS, "ls": "--"}, {"color": figures.FORWARD}
    for (who, guess), style in zip(said.items(), styles, strict=True):
        on["gain"].plot(RANKS, guess, **style)
        on["gain"].text(17, guess[-1], who, color=style["color"], va="center")
        on["error"].plot(RANKS, 100 * (guess / gain - 1), marker="o", ms=4, **style)
    on["gain"].plot(RANKS[:3], gain[:3], "o", color=figures.INK)
    on["gain"].plot(RANKS[3:], gain[3:], "o", mec=figures.INK, mfc="white")
    on["gain"].set_title("gain over one rank (hollow: not fitted)")
    on["error"].set(title="error of the prediction, %", xlabel="ranks")
    x, crit, color = BATCHES, slope / least, figures.FORWARD
    on["steps"].semilogy(x, steps, "o", x, least + slope / x, "-", x, slope / x, ":", color=color)
    on["steps"].plot([2, crit, crit], [least, least, 300], ":", color=figures.INK)
    on["steps"].text(1.1 * crit, 150, "critical batch size")
    on["steps"].set(title="steps to a loss of 0.3", xlabel="examples of a batch", ylim=(9, 300))
    for name, ticks in (("gain", RANKS), ("error", RANKS), ("steps", BATCHES)):
        on[name].set_xscale("log", base=2)
        on[name].set_xticks(ticks, ticks)
    return figure


figures.show(
    draw,
    "21_scaling",
    caption="Left: only one of two fits predicts 16 ranks. Right: more examples save fewer steps.",
    alt="On 16 ranks Amdahl's law promises too much. Steps fall with the batch, and then stay.",
)

# %% [markdown]
# ## Exercise 1: how many ranks are enough?
#
# The batch stays. Write `fastest`: the number of ranks, at most `B`, whose step is shortest.


# %% tags=["exercise"]
def fastest(B, S, fixed, each, alpha, beta):
    """Return a whole number of ranks, from 1 to B."""
    raise NotImplementedError  # your lines here


exercise.judge("21.1", fastest)

# %% [markdown]
# ## Exercise 2: why did this break?
#
# Each rank called `work()`, started a clock, called `group.all_reduce(x)` and read the clock: 60 ms
# on rank 0, for four numbers. Somebody bought a faster link, and a step took as long as before. Who
# waits, and for what? Write `timed`, whose seconds are those of the sum alone, on every rank.


# %% tags=["exercise"]
def timed(group, work, x):
    """Do the work; return (the sum of all ranks' x, the seconds that the sum took)."""
    raise NotImplementedError  # your lines here


exercise.judge("21.2", timed)

# %% [markdown]
# ## Exercise 3: the best batch on N ranks
#
# A step takes `rest + each B / N` seconds; training takes `least (1 + B_crit / B)` steps. Does the
# best $B$ grow like $N$? Write `best_batch`: the $B$, whole or not, that ends training first.


# %% tags=["exercise"]
def best_batch(N, rest, each, B_crit):
    """Return the batch, over all ranks."""
    raise NotImplementedError  # your line here


exercise.judge("21.3", best_batch)
for cluster in clusters.values():
    cluster.close()

# %% [markdown]
# ## At work
#
# | here | PyTorch | Megatron-LM | DeepSpeed | JAX |
# |---|---|---|---|---|
# | seconds of a step | `torch.profiler` | `--log-throughput` | `FlopsProfiler` | `jax.profiler` |
# | a batch that grows | | `--rampup-batch-size` | | |
#
# **What it costs.** A larger batch needs more examples. One slow rank of many is a fifth price.
#
# **Next:** with more ranks, one of them dies more often. [Lesson 22](22_lost_work.py).
