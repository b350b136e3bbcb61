# %% [markdown]
# # 22. When a rank dies: how often should a run save?
#
# All ranks take part in every step, so a rank that dies stops them all. The run goes on from its
# last checkpoint, and what was done since then is lost. To save often costs time; to save rarely
# loses work. [Young 1974](https://doi.org/10.1145/361147.361115) and [Daly
# 2006](https://doi.org/10.1016/j.future.2004.11.016) computed the interval at which the sum is
# least. This lesson measures it: it kills ranks. The library saves in `minidist/checkpoint/`.
#
# Letters: `tau` seconds of training between two saves, `delta` seconds of a save, `M` mean seconds
# between failures of any rank, `R` seconds of a restart; `N` ranks.

# %%
import itertools
import math
import signal
import tempfile
from pathlib import Path
from time import monotonic, sleep

import numpy as np
from support import exercise, figures
from threadpoolctl import threadpool_limits

from minidist import Cluster, checkpoint, nn, optim
from minidist.checkpoint import Saved, manifest, parts_of, restore
from minidist.checkpoint.parts import about
from minidist.data_parallel.naive import all_reduce_gradients
from minidist.datasets import digits
from minidist.errors import RankDied
from minidist.rng import generator

figures.arguments()
images, labels = digits()
SIZES, BATCH, N = [64, 32, 10], 64, 2
ranks, disk = Cluster(N), tempfile.TemporaryDirectory(prefix="minidist-")

# %% [markdown]
# ## Problem: a day of work takes ten months
#
# Llama 3 was trained on 16,384 GPUs. In 54 days, 419 interruptions were unexpected ([Grattafiori et
# al. 2024](https://arxiv.org/abs/2407.21783), section 3.3.4): one in three hours. Suppose that
# such a run does not save, and has 24 hours of work. It begins again after every failure, until
# there is a day without one. If failures come at random, this takes `M (e^(24/M) - 1)` hours.

# %%
hours = 54 * 24 / 419
months = hours * math.expm1(24 / hours) / (24 * 30)
print(f"a failure each {hours:.1f} hours: 24 hours of work, never saved, take {months:.0f} months")
assert 9 < months < 11

# %% [markdown]
# ## Picture
#
#     |=== tau ===|save|=== tau ===|save|=== lost ===X  restart  |=== tau ===|save|=== tau ...
#                                       ^            ^           ^
#                               this checkpoint   a rank dies   all ranks go on from there
#
# ## Math
#
# Seconds of each kind per second of useful work, if failures are rare:
#
#     saves       delta / tau
#     lost work   (tau + delta) / (2 M)      on average a failure hits the middle of an interval
#     restarts    R / M                      whatever tau is
#
# The sum is least at `tau = sqrt(2 delta M)`: this is Young's interval. There, about as much time
# goes into saves as into lost work.
#
# The exact sum for failures at random: an interval and its save are finished with the probability
# `q = e^(-(tau + delta)/M)`, k of them in a row with q^k. So a life, from a restart to the next
# failure, finishes `q + q^2 + ... = 1/(1/q - 1)` intervals on average. A restart and a life take
# `M + R` seconds. So a second of useful work takes
#
#     (M + R) / tau  (e^((tau + delta)/M) - 1)    seconds
#
# R is a factor: it raises the curve and does not move its minimum. (In Daly's model ranks also die
# during restarts; that changes this factor alone.) Daly writes the minimum as a series in `x =
# sqrt(delta/(2 M))`. His equation 37:
#
#     tau = sqrt(2 delta M) (1 + x/3 + x^2/9) - delta     if delta < 2 M, else M


# %%
def cost(tau, delta, M, R=0.0):
    """Return the seconds that a second of useful work takes."""
    return (M + R) / tau * np.expm1((tau + delta) / M)


def young(delta, M):
    return math.sqrt(2 * delta * M)


def daly(delta, M):
    if delta >= 2 * M:
        return M
    x = math.sqrt(delta / (2 * M))
    return young(delta, M) * (1 + x / 3 + x**2 / 9) - delta


def exact(delta, M):
    """Search for the interval of the least cost."""
    tau = M * np.geomspace(1e-4, 10, 100_001)
    return tau[np.argmin(cost(tau, delta, M))]


for M, published in [(24 * 60, 117), (6 * 60, 57), (15, 9.1)]:  # minutes: Daly's figures 3 to 5
    first, series, least = young(5, M), daly(5, M), exact(5, M)
    more = cost(first, 5, M) / cost(least, 5, M) - 1
    print(f"M = {M:4} min: Young {first:5.1f}, Daly {series:5.1f}, exact {least:5.1f} min;", end="")
    print(f" Young's costs {more:.2%} more than the exact one")
    assert abs(series / published - 1) < 0.01 > abs(series / least - 1)

# %% [markdown]
# Young's interval is good as long as M is much longer than a save. And near the minimum the curve
# is flat: even where the interval is a third too long, it costs 3%.
#
# ## Code
#
# A worker that may die at any moment. It needs nothing but a folder: the newest whole checkpoint
# has the weights, the optimizer's state and the step, and the step says which batch is next. The
# log has the times of its start and of each save. `setitimer` is a clock that kills its process
# without a warning.
#
# A step sleeps 6 ms and a save 25 ms, as if the model were larger and the disk slower. A rank that
# sleeps needs no core, so other programs disturb the times less (as in lesson 6).


# %%
def take_step(group, model, optimizer, step):
    batch = np.arange(step * BATCH, (step + 1) * BATCH) % len(images)
    mine = np.array_split(batch, group.size)[group.rank]
    nn.cross_entropy(model(images[mine]), labels[mine], reduction_size=BATCH).backward()
    all_reduce_gradients(model, group)
    optimizer.step()
    optimizer.zero_grad()


def train(group, folder, log, every, victim, seconds):
    """Train on from the newest checkpoint until the victim dies; save after `every` steps."""
    with threadpool_limits(1), open(log, "a", buffering=1) as lines:
        model = nn.MLP(SIZES)
        optimizer, first = optim.AdamW(model.parameters(), lr=1e-3), 0
        if manifest.whole_ones(Path(folder)):
            saved = Saved.newest(folder)
            restore(saved, model, optimizer)
            first = saved.step
        nn.cross_entropy(model(images[:BATCH]), labels[:BATCH]).backward()  # the first is slow
        optimizer.zero_grad()
        note = (lambda: print(monotonic(), file=lines)) if group.rank == 0 else lambda: None
        group.barrier()
        note()
        group.barrier()
        if group.rank == victim:
            signal.setitimer(signal.ITIMER_REAL, seconds)  # SIGALRM ends the process
        for step in itertools.count(first):
            sleep(0.006)
            take_step(group, model, optimizer, step)
            if (step + 1) % every == 0:
                note()
                sleep(0.025)
                told = {"optimizer": about(optimizer)}
                checkpoint.save(folder, parts_of(model, optimizer), step + 1, group, told)
                note()


def undisturbed(group, stops):
    """Train without failures; return the weights after each number of steps in `stops`."""
    model, found = nn.MLP(SIZES), {}
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    with threadpool_limits(1):
        for step in range(max(stops) + 1):
            if step in stops:
                found[step] = model.state()
            take_step(group, model, optimizer, step)
    return found


# %% [markdown]
# ## Measurement
#
# The first life is a trial: how long do a step and a save take on this machine? Then we choose M so
# that the lesson is over soon: as long as ten saves, but not more than 0.8 s. (Llama 3's three
# hours would be ten saves of 19 minutes.)


# %%
def live(folder, every, victim, seconds):
    """Let a run live until the victim dies; return a life's pieces, and the restart's seconds."""
    log, begin = Path(disk.name, "log"), monotonic()
    log.unlink(missing_ok=True)
    try:
        ranks.run(train, f"{disk.name}/{folder}", log, every, victim, seconds)
    except RankDied:
        start, *times = (float(line) for line in log.read_text().split())
        return pieces([time - start for time in times], seconds), monotonic() - begin - seconds


def pieces(times, seconds):
    """Cut a life into (kind, begin, end), given the begin and the end of each save in turns."""
    found, at = [], 0.0
    for begin, end in zip(times[0::2], times[1::2], strict=False):  # a last save may lack its end
        found += [("work", at, begin), ("saves", begin, end)]
        at = end
    return [*found, ("lost work", at, max(at, seconds))]


def seconds_of(kind, lives):
    """Return the seconds of each piece of a kind."""
    return np.array([end - begin for life in lives for name, begin, end in life if name == kind])


trial, _ = live("trial", 3, 0, 1.0)
step = seconds_of("work", [trial]).mean() / 3
delta = seconds_of("saves", [trial]).mean()
M = min(10 * delta, 0.8)
parts = enumerate([1 / 8, 1 / 3, 1, 4], start=1)
EVERY = [max(i, round(part * young(delta, M) / step)) for i, part in parts]
print(f"a step {step * 1e3:.0f} ms, a save {delta * 1e3:.0f} ms; M = {M * 1e3:.0f} ms", end="")
print(f", Young {young(delta, M) * 1e3:.0f} ms; we save after {EVERY} steps")

# %% [markdown]
# Four runs save at different intervals: an eighth of Young's, a third, all of it, and four times as
# long. All have the same five failures, at random times with mean M. A dead rank is replaced: each
# life of a run begins with N new processes. The runs take turns, a life each, so that whatever else
# the machine does disturbs all alike. Which run has saved the most steps?

# %%
random = generator(22, "crashes")
LIVES = random.exponential(size=5)
LIVES *= M / LIVES.mean()  # five random numbers seldom have their mean
VICTIMS = random.integers(0, N, len(LIVES))
lives, restarts = {every: [] for every in EVERY}, []
for victim, seconds in zip(VICTIMS, LIVES, strict=True):
    for every in EVERY:
        life, restart = live(every, every, victim, seconds)
        lives[every].append(life)
        restarts.append(restart)
done = {every: max(manifest.whole_ones(Path(disk.name, str(every))), default=0) for every in EVERY}
calm = ranks.run(undisturbed, {*done.values()})[0]
for every in EVERY:
    state = checkpoint.load(f"{disk.name}/{every}")[0] if done[every] else calm[0]
    assert all(np.array_equal(state[name], w) for name, w in calm[done[every]].items())
print(f"{len(restarts)} deaths; {{save after so many steps: steps saved}} = {done}")
print("each run's weights have the bits of a run without failures")
too_often, *middle, too_rarely = done.values()
assert max(middle) > max(too_often, too_rarely)

# %% [markdown]
# Too often and too rarely are both wrong. Does the arithmetic of the picture explain the numbers?
# From the logs of all lives we take the mean seconds of a step and of a save. `saved_steps` replays
# the same five lives with these two numbers; the formula is the mean of many lives.


# %%
def saved_steps(every):
    """Return the steps that five lives save if each step and each save takes its mean time."""
    return sum(every * int(seconds // (every * step + delta)) for seconds in LIVES)


every_life = [life for run in lives.values() for life in run]
finished = sum(every * len(seconds_of("saves", lives[every])) for every in EVERY)
step = seconds_of("work", every_life).sum() / finished
delta = seconds_of("saves", every_life).mean()
R, taus = np.mean(restarts), {every: every * step for every in EVERY}
measured, replayed = (
    {every: LIVES.sum() / (steps[every] * step) if steps[every] else math.inf for every in EVERY}
    for steps in (done, {every: saved_steps(every) for every in EVERY})
)
print(f"a step {step * 1e3:.1f} ms, a save {delta * 1e3:.1f} ms; seconds per useful second:")
for every, tau in taus.items():
    print(f"tau = {tau * 1e3:4.0f} ms: measured {measured[every]:.2f}, replayed", end="")
    print(f" {replayed[every]:.2f}, formula {cost(tau, delta, M):.2f}")
    assert every == EVERY[-1] or 1 / 2 < measured[every] / replayed[every] < 2
best = {"Young": young(delta, M), "Daly": daly(delta, M), "exact": exact(delta, M)}
for name, tau in best.items():
    print(f"{name:5} interval {tau * 1e3:.0f} ms: {cost(tau, delta, M):.3f}")
print(f"with restarts of {R * 1e3:.0f} ms each, all of these are {(M + R) / M:.2f} times as long")


# %%
def draw(plt):
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.6), width_ratios=[3, 2])
    figure.suptitle("Saving too often costs saves, saving too rarely costs lost work")
    colors = {"work": figures.FORWARD, "saves": figures.BACKWARD, "lost work": figures.EMPHASIS}
    deaths = np.cumsum(LIVES)
    for row, every in enumerate(EVERY):
        for first, life in zip(deaths - LIVES, lives[every], strict=True):
            for kind, begin, end in life:
                hatch = "////" if kind == "lost work" else None
                style = {"color": colors[kind], "hatch": hatch, "edgecolor": "white", "lw": 0}
                left.barh(row, end - begin, 0.62, first + begin, **style)
        words = f"{1 / measured[every]:.0%} useful"
        left.text(1.01 * deaths[-1], row, words, va="center", fontsize=10)
    for death in deaths:
        left.axvline(death, color=figures.INK, lw=1, ls=":")
        left.plot(death, -0.62, "x", color=figures.INK, ms=8, mew=2, clip_on=False)
    left.set_yticks(range(len(EVERY)), [f"tau = {tau * 1e3:.0f} ms" for tau in taus.values()])
    left.set(
        ylim=(len(EVERY) - 0.5, -0.62), xlim=(0, deaths[-1]), xlabel="seconds, without restarts"
    )
    left.tick_params(axis="y", length=0)
    left.set_title("Four runs and the same five deaths (x)", pad=12)
    names = {"work": "work that was saved", "saves": "saves", "lost work": "lost work"}
    looks = [{"fc": colors[kind], "ec": "white", "lw": 0} for kind in names]
    looks[-1]["hatch"] = "////"
    handles = [plt.Rectangle((0, 0), 1, 1, **look) for look in looks]
    place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.16), "ncols": 3}
    left.legend(handles, names.values(), **place)
    tau = np.geomspace(0.7 * min(taus.values()), 1.4 * max(taus.values()), 200)
    all_of_it, saves = cost(tau, delta, M), delta / tau
    for y, color, words in [
        (all_of_it, figures.INK, "work, saves and lost work"),
        (saves, colors["saves"], "saves"),
        (all_of_it - 1 - saves, colors["lost work"], "lost work"),
    ]:
        right.plot(tau * 1e3, y, color=color, label=words)
    for every in EVERY:
        useful = done[every] * step
        for y, color in [
            (LIVES.sum(), figures.INK),
            (seconds_of("saves", lives[every]).sum(), colors["saves"]),
            (seconds_of("lost work", lives[every]).sum(), colors["lost work"]),
        ]:
            if useful:
                right.plot(taus[every] * 1e3, y / useful, "o", color=color, mec="white", ms=8)
    right.plot([], [], "o", color=figures.IDLE, label="measured: five lives")
    for (name, interval), x, side in zip(
        best.items(), (1.04, 0.96), ("left", "right"), strict=False
    ):
        right.axvline(interval * 1e3, color=figures.UPDATE, lw=1.2, ls="--")
        right.text(interval * 1e3 * x, 4.6, name, color=figures.UPDATE, ha=side)
    right.set(xscale="log", ylim=(0, 5), xlabel="tau, ms", ylabel="seconds per useful second")
    right.set_title("Least near Young's and Daly's intervals", pad=12)
    ticks = [
        tick for tick in (10, 20, 50, 100, 200, 500, 1000, 2000) if tau[0] < tick / 1e3 < tau[-1]
    ]
    right.minorticks_off()
    right.set_xticks(ticks, ticks)
    right.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, fontsize=9)
    return figure


figures.save(draw, "22_lost_work")

# %% [markdown]
# ## Exercise 1: how much does a failure lose?
#
# Young says half an interval. That is right as long as failures are rare. Write `lost(tau, delta,
# M)`: the mean seconds between the end of the last save, or the start, and the failure, for any M.
#
# *Hint:* M seconds pass between two failures. How many intervals are finished in them (Math)?


# %%
def lost(tau, delta, M):
    """Return the mean seconds that a failure loses."""
    raise NotImplementedError  # your line here


# %%
def check_lost(attempt):
    """Return what is wrong, or None."""
    lifetimes = generator(1, "lives").exponential(size=200_000)
    for tau, delta, M in [(60, 5, 2000), (60, 5, 60), (10, 1, 2)]:
        mean = np.mean(M * lifetimes % (tau + delta))
        if abs((got := attempt(tau, delta, M)) / mean - 1) > 0.02:
            return f"tau = {tau}, delta = {delta}, M = {M}: {mean:.2f} are lost, not {got:.2f}"


def half(tau, delta, M):
    return (tau + delta) / 2


def at_most_a_life(tau, delta, M):
    return min((tau + delta) / 2, M)


exercise.judge(1, check_lost, lost, tempting=[half, at_most_a_life])

# %% [markdown]
# ## Exercise 2: why did this break?
#
# A save takes 5 minutes, M is 3.1 hours. Somebody lets a second thread write
# (`minidist/checkpoint/background.py`): now training waits for a copy alone, 1 second. So 1 second
# goes into Young's formula, and the run becomes slower than before. How much is useful?


# %%
def useful(tau, copy, write, M):
    """Return the useful share of many lives, if a second thread writes."""
    lives = generator(2, "lives").exponential(M, 20_000)
    between = max(tau, write) + copy  # a save waits until the one before is whole
    saves = np.maximum(0, (lives - tau - copy - write) // between + 1)  # whole ones
    return tau * saves.sum() / lives.sum()


M_3h = 3.1 * 3600
tau = young(300, M_3h)
print(f"this thread, tau = {tau:.0f} s: {1 / cost(tau, 300, M_3h):.0%} useful;", end="")
tau = young(1, M_3h)
print(f" a second thread, tau = {tau:.0f} s: {useful(tau, 1, 300, M_3h):.0%}")

# %% [markdown]
# What does training wait for? Write `interval(copy, write, M)`: a tau whose useful share is within
# 1% of the best.
#
# *Hint:* which part of a save costs something in every interval, which part only in the interval of
# a failure? And when does a save begin while the one before is still being written?


# %%
def interval(copy, write, M):
    """Return a tau, in the unit of the arguments."""
    raise NotImplementedError  # your line here


# %%
def check_interval(attempt):
    for given in [(1, 300, 11160), (5, 30, 1000), (0.1, 600, 3000), (20, 30, 4000)]:
        most = max(useful(tau, *given) for tau in given[2] * np.geomspace(1e-3, 3, 200))
        share = useful(attempt(*given), *given)
        if share < 0.99 * most:
            words = f"(copy, write, M) = {given}, tau = {attempt(*given):.0f}"
            return f"{words}: {share:.1%} useful; {most:.1%} is possible"


def copies_alone(copy, write, M):
    return young(copy, M)


def as_before(copy, write, M):
    return young(copy + write, M)


exercise.judge(2, check_interval, interval, tempting=[copies_alone, as_before])

# %% [markdown]
# ## Exercise 3: more ranks
#
# A rank of Llama 3's cluster dies once in 5.8 years. But all ranks wait for each, so M falls as
# 1/N:

# %%
YEARS = 16384 * hours  # in hours, of one rank
for size in (1024, 16384, 262144):
    share = 1 / cost(exact(1 / 12, YEARS / size), 1 / 12, YEARS / size)
    print(f"{size:7,} ranks, saves of 5 minutes: at best {share:.0%} useful")

# %% [markdown]
# Write `best_interval(size, alone, delta)`: a tau whose cost is within 1% of the least; `alone` is
# the M of one rank.
#
# *Hint:* where one rank fails once in `alone` seconds, how often does one of `size` ranks? For the
# largest sizes a save is no longer short beside M.


# %%
def best_interval(size, alone, delta):
    """Return a tau, in the unit of the arguments."""
    raise NotImplementedError  # your lines here


# %%
def check_best(attempt):
    for size in (1, 1024, 16384, 262144):
        M, tau = YEARS / size, attempt(size, YEARS, 1 / 12)
        ratio = cost(tau, 1 / 12, M) / cost(exact(1 / 12, M), 1 / 12, M) if tau > 0 else math.inf
        if not ratio < 1.01:
            return f"{size} ranks: tau = {tau:.3g} hours costs {ratio - 1:.1%} more than the least"


def for_one_rank(size, alone, delta):
    return young(delta, alone)


def for_all_ranks(size, alone, delta):
    return young(delta, alone / size)


exercise.judge(3, check_best, best_interval, tempting=[for_one_rank, for_all_ranks])

# %% [markdown]
# ## What it costs, and the next problem
#
# - **Even the best interval costs** about `sqrt(2 delta / M)` of the useful time. A save that takes
#   a quarter of the time halves this. So each rank writes its own part, and in a second thread.
# - **M is a guess** from past failures. If it is wrong by a factor of 2, tau is wrong by 1.4, and
#   the cost above grows by 6% of itself: the curve is flat near its minimum. That failures are
#   independent is a guess, too: one switch may stop many ranks, again and again.
# - **Disk:** the last two checkpoints, with weights and Adam's two moments 12 bytes per parameter.
# - **A save must be whole.** Kills also hit saves here. A checkpoint counts when its manifest is
#   there, which is written last (`minidist/checkpoint/writing.py`).
#
# Here each dead rank was replaced at once. Where no spare is at hand, `minidist train --checkpoint
# FOLDER --elastic` goes on with fewer ranks, on a mesh that still fits: a checkpoint can be loaded
# on any of the meshes of lesson 16. All these cuts were made by hand. Lesson 23 lets a search make
# them.

# %%
ranks.close()
disk.cleanup()
