# %% [markdown]
# # 21. How far does it scale?
#
# Lesson 3 ran one step on more and more ranks and saw it gain less and less. This lesson asks how
# far it can go. Two laws are fitted to a few ranks and predict more ranks, which we then measure. A
# line of two numbers, latency and bandwidth, explains where they are wrong. Three walls end it: too
# little work per rank, too many bytes, too large a batch.
#
# Letters: `N` ranks; `B` examples of a batch, all ranks together; `S` bytes of an array, here of
# the whole gradient; `alpha` seconds of latency, `beta` seconds per byte; `h` hosts of `k` ranks.
#
# Links are measured on MPI, too, on one machine or many (`pip install -e ".[mpi]"`); rank 0 prints:
#
#     mpiexec -n 4 python -m mpi4py lessons/21_scaling.py

# %%
import os
import platform
import sys
from time import perf_counter, sleep

import numpy as np
from support import exercise, figures
from threadpoolctl import threadpool_limits

from minidist import Cluster, nn, no_grad, optim
from minidist.comm.collectives import in_rank_order, ring
from minidist.comm.mpi import library as mpi
from minidist.datasets import digits
from minidist.planning.costs.collectives import level_bytes

figures.arguments()
transport, first, world = "process", True, 4
if mpi.launched() > 1:  # by mpiexec
    transport, first, world = "mpi-subset", mpi.load().COMM_WORLD.rank == 0, mpi.processes()
    sys.stdout = sys.stdout if first else open(os.devnull, "w")
RANKS = [N for N in range(1, world + 1) if N <= 4 or N & (N - 1) == 0]  # 1, 2, 3, 4, 8, 16, ...
clusters = {N: Cluster(N, transport) for N in RANKS}
images, labels = digits()  # images[1797, 64] in float32, labels[1797]


def place(group):
    """Return this rank's host, and the cores that it may use."""
    if hasattr(os, "sched_getaffinity"):
        return platform.node(), os.sched_getaffinity(0)
    return platform.node(), range(os.cpu_count() or 1)


def turns(N):
    """Return how many of N ranks share a core, on the fullest host."""
    hosts = {}
    for host, cores in clusters[N].run(place):
        hosts.setdefault(host, []).append(cores)
    return max(-(-len(ranks) // len(set().union(*ranks))) for ranks in hosts.values())


SHARED = {N: turns(N) for N in RANKS}
print(f"transport {transport!r}; {{ranks: how many share a core}} = {SHARED}")

# %% [markdown]
# ## Problem: what would 16 ranks buy?
#
# Nobody tries 16 ranks in order to learn that 4 were enough. We time 2 to 4, and ask two questions:
#
# - *strong scaling*: the batch stays, 384 images. How much sooner is a step done?
# - *weak scaling*: the batch grows, 96 images a rank. How much more is done in the time?
#
# Each is a speed-up over *one rank with the same batch*. To check the predictions we need 16 ranks
# with a core each. So these ranks sleep instead of computing (lesson 6): they need no core. The
# all_reduce is a real ring (lesson 2); a rank that sends a message sleeps as long as a slow link
# takes.

# %%
FIXED, EACH = 0.010, 0.120 / 384  # seconds of one rank's work, per step and per image
ALPHA, BETA, S = 2e-3, 8e-3 / 48_000, 48_000  # a link's seconds, per message and per byte; bytes
FEW, MANY = [2, 3, 4], [8, 16]
sleepers = {N: Cluster(N, "thread") for N in (1, *FEW, *MANY)}


class Channel:
    """A group that calls `before(array, to)` before each message."""

    def __init__(self, group, before):
        self.group, self.before = group, before
        self.rank, self.size, self.recv = group.rank, group.size, group.recv

    def send(self, array, to):
        self.before(array, to)
        self.group.send(array, to)


def all_reduce(group, S):
    link = Channel(group, lambda array, to: sleep(ALPHA + BETA * array.nbytes))
    ring(link, np.ones(S // 4, "float32"), np.add)


def step(group, B):
    sleep(FIXED + EACH * B / group.size)
    all_reduce(group, S)


def clocked(group, work, *arguments):
    group.barrier()
    start = perf_counter()
    work(group, *arguments)
    return perf_counter() - start


def shortest(N, work, *arguments):
    """Return the least seconds of some runs, each until the last of N ranks is ready."""
    tries = 1 if N == 1 else 4  # noise only adds time, and more to many short sleeps
    return min(max(sleepers[N].run(clocked, work, *arguments)) for _ in range(tries))


STRONG, SHARE, SMALL = 384, 96, 32
alone = sorted({SMALL, STRONG, *(SHARE * N for N in sleepers)})
runs = [(1, B) for B in alone] + [(2, SMALL)]
runs += [(N, B) for N in (*FEW, *MANY) for B in dict.fromkeys([STRONG, SHARE * N])]
took = {(N, B): shortest(N, step, B) for N, B in runs}
strong = {N: took[1, STRONG] / took[N, STRONG] for N in sleepers}
weak = {N: took[1, SHARE * N] / took[N, SHARE * N] for N in sleepers}
for N in FEW:
    print(f"{N} ranks: strong {strong[N]:.2f} x, weak {weak[N]:.2f} x as fast as one")

# %% [markdown]
# ## Picture
#
#     one rank       |work work work work work work work work|same|
#
#     strong, N = 2  |work work work work|same|wait|             half the work each
#     strong, N = 4  |work work|same| wait |                     less work, no less of the rest
#
#     weak, N = 4    |work work work work work work work work|same| wait |    4 times the images
#
#     same: each rank does it for itself: the optimizer, overhead of each operation
#     wait: all_reduce
#
# ## Math
#
# Call `s` the share of a step that N ranks cannot shorten.
#
#     Amdahl      1 / (s + (1-s)/N)    s of one rank's time; strong: never more than 1/s
#     Gustafson   N - (N-1) s          s of N ranks' time; weak: no bound, a loss of s per rank
#     a step      fixed + each B/N + 2 (N-1) (alpha + beta S/N)
#
# [Amdahl 1967](https://doi.org/10.1145/1465482.1465560) said the first in words; as formulas both
# are in [Gustafson 1988](https://doi.org/10.1145/42411.42415), who reports 1,016 to 1,021 on 1,024
# processors. They do not contradict each other: they divide by different times. The third line says
# where s comes from; `fixed` and `each` are seconds of one rank, per step and per image, and a ring
# sends 2 (N-1) messages of S/N bytes one after the other.
#
# ## Code
#
# In the right coordinates each law is a straight line through 0. To fit it is one division.


# %%
def amdahl(speedups):
    """Fit s to {N: speed-up}:  1/speed-up - 1/N  =  s (1 - 1/N)."""
    x, y = np.array([(1 - 1 / N, 1 / speedup - 1 / N) for N, speedup in speedups.items()]).T
    return x @ y / (x @ x)


def gustafson(speedups):
    """Fit s to {N: speed-up}:  N - speed-up  =  s (N - 1)."""
    x, y = np.array([(N - 1, N - speedup) for N, speedup in speedups.items()]).T
    return x @ y / (x @ x)


def line(x, y):
    """Fit y = a + b x, with the relative errors of all points weighted alike; return a and b."""
    x, y = np.asarray(x, float), np.asarray(y, float)
    b, a = np.polyfit(x, y, 1, w=1 / y)
    return a, b


some = np.array([2, 4, 64])
assert abs(amdahl(dict(zip(some, 1 / (0.1 + 0.9 / some), strict=True))) - 0.1) < 1e-12
assert abs(gustafson(dict(zip(some, some - (some - 1) * 0.1, strict=True))) - 0.1) < 1e-12

# %% [markdown]
# ## Measurement: two laws, and what they leave out
#
# Both laws are fitted to 2, 3 and 4 ranks. The third line is fitted to less: `fixed` and `each` to
# one rank's steps, `alpha` and `beta` to all_reduces of two ranks. All predict 8 and 16 ranks.

# %%
few = [{N: found[N] for N in FEW} for found in (strong, weak)]
s_strong, s_weak = amdahl(few[0]), gustafson(few[1])
laws = {
    "strong": (strong, "Amdahl", lambda N: 1 / (s_strong + (1 - s_strong) / N)),
    "weak": (weak, "Gustafson", lambda N: N - (N - 1) * s_weak),
}
fixed, each = line(alone, [took[1, B] for B in alone])
arrays = [S // 2, S, 2 * S]
alpha, beta = line(arrays, [shortest(2, all_reduce, size) for size in arrays])
alpha /= 2  # two ranks send 2 messages of S/2 bytes, so the line is 2 alpha + beta S


def predicted(N, B):
    """Return the seconds of a step."""
    return fixed + each * B / N + 2 * (N - 1) * (alpha + beta * S / N)


def by_parts(kind, N):
    B = STRONG if kind == "strong" else SHARE * N
    return predicted(1, B) / predicted(N, B)


print(f"fixed {fixed * 1e3:.1f} ms, each {each * 1e6:.0f} us, alpha {alpha * 1e3:.2f} ms, ", end="")
print(f"1/beta {1 / beta / 1e6:.1f} MB/s; Amdahl's s {s_strong:.2f}, Gustafson's {s_weak:.2f}")
errors = {}
for kind, (found, name, law) in laws.items():
    for N in MANY:
        guesses = law(N), by_parts(kind, N)
        errors[kind, N] = [abs(guess / found[N] - 1) for guess in guesses]
        print(f"{kind:6} on {N:2}: measured {found[N]:.2f} x", end="")
        for by, guess, error in zip((name, "parts"), guesses, errors[kind, N], strict=True):
            print(f"; {by} said {guess:.2f} x, wrong by {error:.0%}", end="")
        print()
    assert errors[kind, 16][1] < errors[kind, 16][0]
shares = {N: round(float(amdahl({N: strong[N]})), 2) for N in (*FEW, *MANY)}
print(f"Amdahl's s for each N alone: {shares}")
assert errors["strong", 16][0] > 0.2 and shares[16] > shares[2]

# %% [markdown]
# For one N, Amdahl's s is the *experimentally determined serial fraction* of [Karp and Flatt
# 1990](https://doi.org/10.1145/78607.78614). As long as it is the same for all N, the law holds. If
# it rises, as here, overhead grows with N, and neither law has a term that grows: a ring's latency
# does, with 2 (N-1). Four ranks show little of it, so the laws promise too much. The parts predict
# it, though they were never fitted to more than two ranks. (These ranks have no other parts. A real
# step has more: ranks wait for the slowest one, and share caches, memory and switches.)
#
# ## Measurement: latency and bandwidth
#
# What does it cost to wait on this machine? We time the library's all_reduce for arrays of 1 KB to
# 4 MB, on processes without any sleep, in turns, and fit `alpha + beta S`. Is the line right? In
# each round we leave out a size and predict it from the others.

# %%
BYTES = 1 << np.arange(10, 24, 2)


def all_reduce_seconds(group, calls=9):
    """Return the median seconds of an all_reduce, for each size in BYTES."""
    table = []
    for array in [np.ones(size // 4, "float32") for size in BYTES]:
        seconds = []
        for _ in range(calls):
            group.barrier()
            start = perf_counter()
            group.all_reduce(array)
            seconds.append(perf_counter() - start)
        table.append(np.median(seconds))
    return table


waits, links = {N: [] for N in RANKS[1:]}, {}
for _ in range(5):
    for N in waits:
        waits[N].append(np.max(clusters[N].run(all_reduce_seconds), axis=0))
least_waits = {N: np.min(waits[N], axis=0) for N in waits}
for N in waits:
    links[N] = line(BYTES, least_waits[N])
    wrong = []
    for size in BYTES:
        others, ratios = BYTES != size, []
        for times in np.array(waits[N]):
            a, b = line(BYTES[others], times[others])
            ratios.append((a + b * size) / times[~others].item())
        wrong.append(abs(np.median(ratios) - 1))
    words = f"alpha = {links[N][0] * 1e6:.0f} us, 1/beta = {1 / links[N][1] / 1e9:.2f} GB/s"
    print(f"{N} ranks: {words}, a size left out is predicted within {max(wrong):.0%}")

# %% [markdown]
# Here `alpha` and `beta` are those of a whole all_reduce on N ranks. Ranks that share a core also
# wait for their turn.
#
# ## Three walls
#
# **Work per rank.** `fixed` and `2 (N-1) alpha` do not shrink with a rank's share. If the share is
# small, they are nearly all of the step. For the sleeping ranks:

# %%
still = fixed + 2 * alpha
print(f"{SMALL} images: two ranks are {took[1, SMALL] / took[2, SMALL]:.2f} x as fast as one")
print(f"below {still / each:.0f} images a rank, most is what does not shrink, even without beta S")

# %% [markdown]
# **Bytes.** `beta S` does not shrink either, and it grows with the model. Fewer and larger calls
# (buckets, lesson 3) save latency, but no bytes. More images per rank make both a smaller share.

# %%
print(f"the gradient's {S / 1e3:.0f} KB take as long as {beta * S / each:.0f} images;", end="")
print(f" messages below {alpha / beta / 1e3:.0f} KB wait more for latency than for bytes")

# %% [markdown]
# **Batch.** So give each rank enough images, and let the batch grow with N: weak scaling, no bound.
# But a larger batch must also be *worth* more. We count the steps that a linear model needs until
# its loss on all digits is 0.3. Each batch gets its own learning rate (otherwise we would compare
# rates); the search only doubles it. Each of two ranks trains alone, in its own order of examples.


# %%
BATCHES = [2, 4, 8, 16, 32, 64, 128, 256]


def steps_to_the_loss(B, rate, at_most, order, goal=0.3):
    """Return how many steps of SGD reach the goal; at_most, if more are needed."""
    model, random = nn.MLP([64, 10]), np.random.default_rng(order)
    optimizer = optim.SGD(model.parameters(), lr=rate)
    for step in range(1, at_most):
        mine = random.integers(0, len(images), B)
        nn.cross_entropy(model(images[mine]), labels[mine]).backward()
        optimizer.step()
        optimizer.zero_grad()
        with no_grad():
            if nn.cross_entropy(model(images), labels).data <= goal:
                return step
    return at_most


def least_steps(group):
    """Return the steps for each batch; the rate is doubled as long as that helps."""
    rate, found = 0.2, []
    with threadpool_limits(1):
        for B in BATCHES:
            best = steps_to_the_loss(B, rate, 1000, group.rank)
            while (faster := steps_to_the_loss(B, 2 * rate, best, group.rank)) < best:
                best, rate = faster, 2 * rate
            found.append(best)
    return found


steps = np.mean(clusters[2].run(least_steps), axis=0)
least, slope = line(1 / np.array(BATCHES), steps)
B_crit = slope / least
print("steps to the loss:", dict(zip(BATCHES, steps.tolist(), strict=True)))
print(f"steps = {least:.1f} (1 + {B_crit:.0f} / B)")
assert steps[0] > 1.6 * steps[1] and steps[-2] < 1.3 * steps[-1]
assert max(abs((least + slope / np.array(BATCHES)) / steps - 1)) < 0.25

# %% [markdown]
# At first twice the batch halves the steps; at last it saves none: *perfect scaling*, *diminishing
# returns*, *maximal data parallelism* ([Shallue et al.
# 2019](https://jmlr.org/papers/v20/18-789.html)). The law is from [McCandlish et al.
# 2018](https://arxiv.org/abs/1812.06162): a gradient has noise, a batch averages it, and beyond
# `B_crit` little noise is left. `B_crit` belongs to the problem, not to the machine: no link
# is fast enough to change it.
#
# ## Hosts
#
# Links between hosts are the slowest, and all k ranks of a host share one. In the default, flat
# all_reduce each rank reduces its slice of all others' arrays: `2 k (h-1) S` bytes pass between h
# hosts. A hierarchical one (lesson 2, which compares it with a ring) sends `2 (h-1) S`: less than
# `2 S` per host, whatever h is. A ring whose ranks follow the hosts' order sends `2 h (N-1)/N S`:
# on many hosts little more, on two up to twice as much. But it takes `2 (N-1)` steps, and its ranks
# must be placed well (exercise 1). Counted on threads:


# %%
def crossed(group, algorithm, host):
    """Return the bytes that this rank sends to other hosts; rank r is on host[r]."""
    sent = []

    def watch(array, to):
        sent.append(array.nbytes * (host[to] != host[group.rank]))

    algorithm(Channel(group, watch), np.ones(12 * group.size), np.add)
    return sum(sent)


def total_crossed(algorithm, host):
    """Return the bytes of all ranks, for an array of 96 bytes per rank."""
    with Cluster(len(host), "thread") as ranks:
        return sum(ranks.run(crossed, algorithm, host))


for host in ([0, 0, 1, 1], [0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 2, 2]):
    size, h = 96 * len(host), len(set(host))
    flat = total_crossed(in_rank_order, host)
    levels = sum(between for _, between in level_bytes(size // 8, 8, host))
    around = total_crossed(ring, host)
    assert flat == 2 * len(host) // h * (h - 1) * size and levels == 2 * (h - 1) * size
    assert around == 2 * h * (len(host) - 1) * size // len(host)
    print(f"ranks on hosts {host}: flat {flat / size:.0f} S,", end="")
    print(f" hierarchical {levels / size:.0f} S, ring {around / size:.1f} S")

# %% [markdown]
# The figure has a wall in each panel.


# %%
def draw(plt):
    figure, (left, center, right) = plt.subplots(1, 3, figsize=(13, 4.8))
    figure.suptitle("Three walls: too little work per rank, too many bytes, too large a batch")
    many, ticks = 2.0 ** np.arange(0, 4.01, 0.1), 2 ** np.arange(5)
    for kind, color, marker in (
        ("weak", figures.UPDATE, "s"),
        ("strong", figures.FORWARD, "o"),
    ):
        row, name, law = laws[kind]
        words = f"{kind}, {name}: {law(16):.1f} x on 16, measured {row[16]:.1f}"
        left.plot(many, law(many), "--", color=color, lw=1.5, label=words)
        parts = [by_parts(kind, N) for N in many]
        left.plot(many, parts, color=color, lw=1.5, label=f"{kind}, by parts: {parts[-1]:.1f} x")
        for N in sleepers:
            left.plot(N, row[N], marker, mfc="white" if N in MANY else color, mec=color, ms=7)
    left.plot(many, many, ":", color=figures.INK, lw=1, label="ideal")
    left.plot([], [], "o", mfc="white", mec=figures.INK, label="hollow: measured, not fitted")
    left.set(xscale="log", yscale="log", xlim=(0.9, 18), ylim=(0.8, 40), xlabel="sleeping ranks")
    left.set(title="Work per rank: fitted to 2 to 4 ranks", ylabel="times as fast as one rank")
    left.set_xticks(ticks, ticks)
    left.set_yticks(ticks, ticks)
    sizes, colors = np.geomspace(BYTES[0], BYTES[-1]), [figures.COMMUNICATION, figures.BACKWARD]
    for N, color in zip(dict.fromkeys([2, RANKS[-1]]), colors, strict=False):
        alpha, beta = links[N]
        words = f"{N} ranks: {alpha * 1e6:.0f} us + S / ({1 / beta / 1e9:.1f} GB/s)"
        center.plot(sizes, 1e6 * (alpha + beta * sizes), color=color, label=words)
        face = color if SHARED[N] == 1 else "white"
        center.plot(BYTES, 1e6 * least_waits[N], "o", mfc=face, mec=color)
    center.plot([], [], "o", mfc="white", mec=figures.INK, label="hollow: ranks share a core")
    center.set(xscale="log", yscale="log", xlabel="S, bytes of the array")
    even = links[2][0] / links[2][1]  # bytes for which latency and bandwidth cost the same
    center.axvline(even, 0, 0.8, color=figures.INK, lw=0.8, label="alpha / beta of 2 ranks")
    center.set(title="Bytes: an all_reduce takes alpha + beta S", ylabel="us per all_reduce")
    batches = np.geomspace(BATCHES[0], BATCHES[-1])
    right.plot(BATCHES, steps, "o", color=figures.FORWARD)
    law = f"{least:.0f} (1 + {B_crit:.0f} / B)"
    right.plot(batches, least + slope / batches, color=figures.FORWARD, label=law)
    perfect = "perfect: twice the batch, half the steps"
    right.plot(batches, slope / batches, "--", color=figures.INK, lw=1, label=perfect)
    right.axhline(least, ls=":", color=figures.INK, lw=1, label="never fewer")
    right.axvline(B_crit, 0, 0.75, color=figures.INK, lw=0.8, label=f"B_crit = {B_crit:.0f}")
    right.set(xscale="log", yscale="log", xlabel="B, examples of a batch", ylim=(8, 300))
    right.set(title="Batch: steps until the loss is 0.3", ylabel="steps")
    right.set_xticks(BATCHES, BATCHES)
    right.set_yticks([10, 20, 50, 100, 200], [10, 20, 50, 100, 200])
    for axes, corner in [(left, "upper left"), (center, "upper left"), (right, "upper right")]:
        axes.minorticks_off()
        axes.legend(loc=corner, fontsize=9)
    return figure


if first:
    figures.save(draw, "21_scaling")

# %% [markdown]
# ## Exercise 1: where ranks are placed
#
# `mpiexec` may fill host after host, or deal ranks to hosts in turn. Write `crossing(host, S)`: the
# bytes that a ring all_reduce of any S bytes sends between hosts, all ranks together, if rank r is
# on `host[r]`. N divides S.
#
# *Hint:* rank r sends only to r + 1, the last one to 0. How many bytes does each send (lesson 2)?


# %%
def crossing(host, S):
    """Return the bytes that cross between hosts."""
    raise NotImplementedError  # your lines here


# %%
def check_crossing(attempt):
    for host in ("aabb", "abab", "aaabbb", "abcabc", "aabbcc", "aaaa"):
        size, want = 96 * len(host), total_crossed(ring, host)
        if (got := attempt(host, size)) != want:
            return f"ranks on {host}, S = {size}: {want} bytes cross, not {got}"


def all_of_them(host, S):
    return 2 * (len(host) - 1) * S


def one_ring_of_hosts(host, S):
    return 2 * (len(set(host)) - 1) * S


exercise.judge(1, check_crossing, crossing, tempting=[all_of_them, one_ring_of_hosts])

# %% [markdown]
# ## Exercise 2: why did this break?
#
# A profile says that an all_reduce of four numbers takes 60 ms. So somebody buys a faster link, and
# the step takes as long as before. Look at what was measured:


# %%
def work(group):
    sleep(0.06 * (group.rank == group.size - 1))  # one rank has more to do


def as_profiled(group, x):
    """Return the sum, and the seconds that the all_reduce took."""
    work(group)
    start = perf_counter()
    total = group.all_reduce(x)
    return total, perf_counter() - start


def five_times(group, attempt, x):
    """Return whether the sums were right, and the median seconds of five tries."""
    tries = []
    for _ in range(5):
        group.barrier()
        tries.append(attempt(group, x))
    right = all(np.array_equal(total, group.size * x) for total, _ in tries)
    return right, np.median([seconds for _, seconds in tries])


for r, (_, seconds) in enumerate(clusters[2].run(five_times, as_profiled, np.ones(4))):
    print(f"rank {r}: {seconds * 1e3:.2f} ms in all_reduce")

# %% [markdown]
# Who waits, and for what? Write `timed(group, x)` in the same form: `work`, then the sum and the
# seconds of the sum itself, on every rank.
#
# *Hint:* nobody may start a clock before all have arrived.


# %%
def timed(group, x):
    """Return the sum, and the seconds that the all_reduce took."""
    raise NotImplementedError  # your lines here


# %%
def check_timed(attempt):
    for r, (right, seconds) in enumerate(clusters[2].run(five_times, attempt, np.ones(4))):
        if not right:
            return "the sum is wrong"
        if not 0 < seconds < 0.03:
            return f"rank {r} says {seconds * 1e3:.1f} ms, which is not what four numbers take"


def starts_before_the_barrier(group, x):
    work(group)
    start = perf_counter()
    group.barrier()
    return group.all_reduce(x), perf_counter() - start


exercise.judge(2, check_timed, timed, tempting=[as_profiled, starts_before_the_barrier])

# %% [markdown]
# ## Exercise 3: the best batch on N ranks
#
# Weak scaling lets B grow like N. Is that best? A step takes `rest + each B / N` seconds (`rest` is
# what N ranks cannot shorten, waiting included); training takes `least (1 + B_crit / B)` steps.
# Write `best_batch(N, rest, each, B_crit)`: the B, whole or not, with which training ends first.
#
# *Hint:* multiply; two terms depend on B. For which B does one fall as fast as the other rises?
# The best B grows with the square root of N, not with N.


# %%
def best_batch(N, rest, each, B_crit):
    """Return the batch, all ranks together, for which steps x seconds per step is least."""
    raise NotImplementedError  # your lines here


# %%
def training(B, N, rest, each, B_crit):
    return (1 + B_crit / B) * (rest + each * B / N)


def check_batch(attempt):
    for N, *given in [(1, 2e-3, 3e-5, 24), (16, 2e-3, 3e-5, 24), (1024, 0.1, 1e-3, 1e6)]:
        grid = np.geomspace(1e-3, 1e9, 100_001)
        want = grid[np.argmin(training(grid, N, *given))]
        if not abs((got := attempt(N, *given)) / want - 1) < 1e-2:
            return f"(N, rest, each, B_crit) = {(N, *given)}: {want:.1f} images, not {got:.1f}"


def always_critical(N, rest, each, B_crit):
    return B_crit


def grows_with_the_ranks(N, rest, each, B_crit):
    return N * (rest * B_crit / each) ** 0.5


exercise.judge(3, check_batch, best_batch, tempting=[always_critical, grows_with_the_ranks])

# %% [markdown]
# ## What it costs, and the next problem
#
# - **All ranks pay for what is not shortened**: at an efficiency of one half, half of the ranks
#   contribute nothing.
# - **A fit is good in its range.** Amdahl's law, fitted to 4 ranks, was wrong on 16. A model of the
#   parts reaches farther, until a shared switch or one slow rank of thousands adds a part.
# - **A larger batch is not free**: it takes more examples and another learning rate, and beyond
#   `B_crit` it gains nothing.
#
# When data parallelism is at its walls, the other axes begin: lesson 16 cuts layers and matrices,
# so that more ranks share an example, and lesson 20 compares what that costs. And with more ranks,
# one of them dies more often: lesson 22.

# %%
for cluster in (*clusters.values(), *sleepers.values()):
    cluster.close()
