# %% [markdown]
# # 2. Collectives: how ranks add up what they hold
#
# Lesson 1 ended with one device that makes a gradient. From here on there are many: *ranks*,
# processes that share nothing and can only send each other arrays. Each makes its own gradient, and
# each needs the sum of all of them: an *all-reduce*. We build it from `send` and `recv` alone,
# first the obvious way, then around a ring, and count what each costs. The library's
# versions are in `minidist/comm/collectives.py`.
#
# Letters: `N` ranks, `r` one of them, `S` bytes in the array that each rank holds.

# %%
import os
import time
from functools import partial
from math import ceil, log2

import numpy as np
from support import exercise, figures

from minidist import Cluster
from minidist.comm.cluster import TRANSPORTS
from minidist.comm.collectives import ON_MESSAGES
from minidist.comm.local.thread_transport import ThreadRanks
from minidist.rng import generator

figures.arguments()
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
clusters = {N: Cluster(N) for N in (2, 3, 4)}  # a process per rank; they stay up for the lesson

# %% [markdown]
# ## Problem
#
# The obvious way: every rank sends to rank 0, rank 0 adds, rank 0 sends the sum to every rank. A
# `group` is what a rank knows about the others: its own number, the number of ranks, and how to
# reach them.


# %%
def naive(group, x, combine=np.add):
    """All-reduce the flat array x in place, everything through rank 0."""
    if group.rank == 0:
        for r in range(1, group.size):
            combine(x, group.recv(r), out=x)
        for r in range(1, group.size):
            group.send(x, to=r)
    else:
        group.send(x, to=0)
        x[...] = group.recv(0)


big, link = 14e9, 100e9 / 8  # bytes; bytes per second
print(f"64 ranks, 14 GB: {2 * 63 * big / link:.0f} s; a ring: {2 * 63 / 64 * big / link:.1f} s")

# %% [markdown]
# Rank 0 takes `(N-1) S` in and then sends `(N-1) S` out, while the rest wait. The printed line is
# for 64 ranks that hold the gradient of 7 billion parameters at two bytes each, with a link of 100
# Gbit/s in either direction: minutes for each step of training. The second number is what the ring
# of this lesson would take.
#
# ## Picture
#
# Cut each array into N chunks and put the ranks in a ring; everyone sends to the right and receives
# from the left, all at the same time. Three ranks a, b, c: `a0` is chunk 0 of rank a's array, `ab0`
# the sum `a0 + b0`, `*0` the whole sum of chunk 0.
#
#     reduce-scatter                                  all-gather
#
#     rank a       rank b       rank c                rank a       rank b       rank c
#     a0 a1 a2     b0 b1 b2     c0 c1 c2              a0 *1 ca2    ab0 b1 *2    *0 bc1 c2
#         -- a0 -->    -- b1 -->    -- c2 --> a           -- *1 -->    -- *2 -->    -- *0 --> a
#     a0 a1 ca2    ab0 b1 b2    c0 bc1 c2             *0 *1 ca2    ab0 *1 *2    *0 bc1 *2
#         -- ca2 -->   -- ab0 -->   -- bc1 --> a          -- *0 -->    -- *1 -->    -- *2 --> a
#     a0 *1 ca2    ab0 b1 *2    *0 bc1 c2             *0 *1 *2     *0 *1 *2     *0 *1 *2
#
# After the first half each rank owns the whole sum of one chunk; that half alone is a collective,
# *reduce-scatter*. The second half, in which every rank gets all chunks, is an *all-gather*. Lesson
# 5 will put work between the two.
#
# ## Math
#
#     reduce-scatter   N-1 steps, in each of them every rank sends one chunk     (N-1) S/N
#     all-gather       N-1 more steps, the finished chunks go round              (N-1) S/N
#     together         2(N-1) steps,   2(N-1)/N S bytes per rank  <  2 S,  however large N is
#
# Can it be less? Take one number of the array. Before any rank knows its sum, N-1 messages must
# have brought the others' shares together; then each of the other N-1 ranks must receive it. That
# is 2(N-1) messages per number, `2(N-1) S` for all ranks together, so the busiest rank sends at
# least `2(N-1)/N S`: the ring is optimal in bytes (Patarasuk and Yuan 2009). In steps it is not.
#
# ## Code
#
# The ring, written out. Indices are modulo N; the parts of `cut` are views, so `mine` is a part of
# `x` itself.


# %%
def ring(group, x, combine=np.add):
    """All-reduce the flat array x in place around a ring."""
    N, r = group.size, group.rank
    cut = np.array_split(x, N)
    for step in range(N - 1):  # reduce-scatter
        group.send(cut[(r - step) % N], to=(r + 1) % N)
        mine = cut[(r - step - 1) % N]
        combine(group.recv((r - 1) % N), mine, out=mine)
    for step in range(N - 1):  # all-gather
        group.send(cut[(r - step + 1) % N], to=(r + 1) % N)
        cut[(r - step) % N][...] = group.recv((r - 1) % N)


def share(rank, n):
    return generator(0, f"gradient of rank {rank}").standard_normal(n, dtype=np.float32)


def both_rings(group, n):
    x = share(group.rank, n)
    theirs = group.all_reduce(x, algorithm="ring")
    ring(group, x)
    return x.tobytes(), theirs.tobytes()


for cluster in clusters.values():
    for ours, theirs in cluster.run(both_rings, 1001):  # 1001: chunks differ by an element
        assert ours == theirs, "bit for bit"
print("our ring gives the library's bits on 2, 3 and 4 ranks")

# %% [markdown]
# Every rank first sends, then receives. That works because minidist's `send` is *buffered*: it
# copies the array and returns at once, at the price of memory for messages in flight. A *blocking*
# send returns only when the other side has taken the message; with it this ring would wait
# permanently: exercise 3. There is a third protocol, *request and response*: send a question, then
# receive the answer. Lesson 4 uses it. (To work in the meantime, `irecv` returns a `Request`, and
# its `wait()` the array.)
#
# ## Measurement: steps and bytes
#
# There are more ways. A *tree* adds up pairs of ranks, then pairs of pairs, up to rank 0, and sends
# the sum back down: few steps, whole arrays. *Recursive halving and doubling* (Rabenseifner's,
# described in Thakur et al. 2005) swaps halves with the rank at distance N/2, then quarters at N/4,
# and back: the tree's few steps with the ring's bytes, if N is a power of two. What each must cost,
# before we look; *path* is the bytes that pass one after the other:
#
#                         steps             path                busiest rank sends
#     naive               2(N-1)            2(N-1) S            (N-1) S
#     tree                2 ceil(log2 N)    2 ceil(log2 N) S    ceil(log2 N) S
#     ring                2(N-1)            2(N-1)/N S          2(N-1)/N S
#     halving_doubling    2 log2 N          2(N-1)/N S          2(N-1)/N S
#
# A group's `ledger` counts the bytes that this rank has sent. For steps and path we give
# each rank a clock that runs on messages alone: a message costs `latency + bytes * per_byte`, a
# rank sends one at a time and takes in one at a time, and each message says when it arrives.
# Latency 1 and free bytes counts steps; free messages and one second per byte measures the path.


# %%
class Clock:
    """A group whose messages carry the time; nothing else takes time."""

    def __init__(self, group, latency, per_byte):
        self.group, self.rank, self.size = group, group.rank, group.size
        self.latency, self.per_byte = latency, per_byte
        self.now = self.out_is_free = self.in_is_free = 0.0

    def send(self, array, to):
        cost = self.latency + self.per_byte * array.nbytes
        self.out_is_free = max(self.out_is_free, self.now) + cost
        self.group.send(array, to)
        self.group.send(np.array([self.out_is_free, cost]), to, tag=1)

    def recv(self, source):
        array = self.group.recv(source)
        arrival, cost = self.group.recv(source, tag=1)
        self.now = self.in_is_free = max(self.now, arrival, self.in_is_free + cost)
        return array

    def end(self):
        return max(self.now, self.out_is_free)


WAYS = {"naive": naive, **ON_MESSAGES}  # the library's algorithms: (group, x, combine), like ours


def predicted(name, N, S):
    """Return (steps, bytes on the path, bytes of the busiest rank); N divides the elements."""
    levels = ceil(log2(N))
    return {
        "naive": (2 * (N - 1), 2 * (N - 1) * S, (N - 1) * S),
        "tree": (2 * levels, 2 * levels * S, levels * S),
        "ring": (2 * (N - 1), 2 * (N - 1) * S / N, 2 * (N - 1) * S / N),
        "halving_doubling": (2 * levels, 2 * (N - 1) * S / N, 2 * (N - 1) * S / N),
    }[name]


def audit(group, name, n):
    """Return this rank's (steps, bytes on the path, bytes sent), and the sum's bits."""
    x, ends = share(group.rank, n), []
    for latency, per_byte in [(1, 0), (0, 1)]:
        clock = Clock(group, latency, per_byte)
        WAYS[name](clock, x.copy(), np.add)
        ends.append(clock.end())
    before = group.ledger.total
    WAYS[name](group, x, np.add)
    return *ends, group.ledger.total - before, x.tobytes()


busiest, n = {name: {} for name in WAYS}, 840  # 840: any N up to 8 divides it
for N in range(2, 9):
    cluster = clusters.get(N) or Cluster(N, transport="thread")  # bytes do not ask what a rank is
    for name in WAYS:
        if name == "halving_doubling" and N & (N - 1):
            continue
        *numbers, bits = zip(*cluster.run(audit, name, n), strict=True)
        steps, path, most = map(max, numbers)
        assert (steps, path, most) == predicted(name, N, 4 * n) and len(set(bits)) == 1
        assert sum(numbers[2]) == 2 * (N - 1) * 4 * n, "all ranks together"
        busiest[name][N] = most / (4 * n)
        if N in (4, 8):
            print(f"N = {N}, {name:16} steps {steps:3.0f}, path {path / 4 / n:5.2f} S,", end=" ")
            print(f"busiest rank sends {busiest[name][N]:.2f} S")
    if N not in clusters:
        cluster.close()

# %% [markdown]
# All as predicted, to the byte. And all ranks *together* always move `2(N-1) S`: none of these ways
# saves traffic; the good ones spread it evenly. (Where N does not divide the array,
# `minidist/planning/costs/collectives.py` has the exact bytes of every rank.)
#
# The loop also asserts that all ranks get the same bits. Floating-point addition rounds, and
# `(a + b) + c` rounds differently from `a + (b + c)`; each way adds in its own order, so its last
# bits differ from the others'. But its order is fixed, and each chunk is finished in one place and
# then copied. So ranks that start with equal weights keep equal weights.
#
# So far all pairs of ranks were alike. Ranks on one machine, a *host*, share its memory; a network
# between hosts is slower. `algorithm="hierarchical"` first reduces inside each host, so that each
# of its ranks has the sum of one slice. Ranks with the same slice then reduce it between hosts, and
# each host gathers the slices. Between h hosts `2(h-1) S` bytes pass, for any number of ranks. Here
# four threads simulate two hosts:


# %%
def between_hosts(group, n):
    group.all_reduce(share(group.rank, n), algorithm="hierarchical")
    return group.ledger.bytes["all_reduce between hosts"]


TRANSPORTS["two hosts"] = partial(ThreadRanks, hosts=[0, 0, 1, 1])
with Cluster(4, transport="two hosts") as cluster:
    moved = sum(cluster.run(between_hosts, n))
assert moved == 2 * (2 - 1) * 4 * n
print(f"bytes between 2 hosts of 2 ranks: hierarchical {moved / 4 / n:.0f} S;", end=" ")
print(f"in the ring, where ranks 1 and 3 send to the other host, {2 * busiest['ring'][4]:.0f} S")

# %% [markdown]
# ## Measurement: time
#
# Now real time, on four ranks, for arrays of 256 bytes to 4 MB. (Times are your machine's and not
# asserted.)


# %%
def race(group, n, names, repeats=5):
    """Return ms[repeats, names]; names take turns, so that a hiccup hits all of them."""
    x, times = np.ones(n, np.float32), []
    for _ in range(repeats):
        for name in names:
            group.barrier()
            start = time.perf_counter()
            naive(group, x.copy()) if name == "naive" else group.all_reduce(x, algorithm=name)
            times.append(1e3 * (time.perf_counter() - start))
    return np.reshape(times, (repeats, len(names)))


NAMES = [*WAYS, "shared memory"]
ELEMENTS, samples = [2**k for k in range(6, 21, 2)], {}
for _ in range(3):
    for n in ELEMENTS:  # the library's default, None, is in shared memory
        per_rank = clusters[4].run(race, n, [*WAYS, None])
        samples.setdefault(n, []).append(np.max(per_rank, axis=0))  # the slowest rank's
times = {n: np.median(np.concatenate(found), axis=0) for n, found in samples.items()}
print(f"4 ranks on {CORES} cores, ms: {'1 KB':>14} {'4 MB':>8}")
for name, small, large in zip(NAMES, times[ELEMENTS[1]], times[ELEMENTS[-1]], strict=True):
    print(f"{name:>26} {small:12.2f} {large:8.2f}")

# %% [markdown]
# How to read it:
#
# - *Small arrays pay for steps.* On four ranks the ring has six, the tree four; with a thousand
#   ranks it would be 1998 against 20. (The naive way is fast here: the slow part of a message is to
#   wake a sleeping rank, and rank 0, once awake, takes all messages that have arrived.)
# - *Large arrays pay for bytes.* But why do all four ways of sending take about the same time with
#   4 MB? Here a link is a memory copy by the cores: with fewer cores than ranks, all traffic queues
#   for them, `2(N-1) S` for every way. Where every rank has a link, the path is what counts.
# - *Shared memory*, the library's default, sends nothing: each rank puts its array where all ranks
#   see it, sums up one slice of all arrays and fetches the other slices. Its bytes per rank equal
#   the ring's. Up to 2 MB it takes three meetings of all ranks, for any N: they are the time of a
#   small array. `group.empty` makes arrays that are in shared memory from the start.
#
# The figure: left, what the busiest rank sends; right, what that costs on this machine.


# %%
LOOKS = {  # colour, line and marker; name and its height on the left
    "naive": (figures.EMPHASIS, "x-", "naive: $N - 1$", 7),
    "tree": ("#777777", "s--", r"tree: $\lceil\log_2 N\rceil$", 3),
    "ring": (figures.COMMUNICATION, "o-", "ring: $2(N-1)/N < 2$", 1.75),
    "halving_doubling": (figures.INK, "^:", "halving-doubling: as the ring", 1.2),
    "shared memory": ("#56B4E9", "D-.", "", 0),
}


def draw(plt):
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4))
    figure.suptitle("A ring spreads the bytes, a tree saves steps, shared memory needs no messages")
    for name, found in busiest.items():
        color, look, words, height = LOOKS[name]
        left.plot(*zip(*found.items(), strict=True), look, color=color, clip_on=False)
        left.text(8.3, height, words, color=color, va="center", fontsize=10)
    left.set(title="What the busiest rank sends", xlabel="ranks N", ylabel="bytes (units of S)")
    left.set(xticks=range(2, 9), xlim=(1.8, 12.3), ylim=(0, 7.2))
    left.spines["bottom"].set_bounds(1.8, 8)
    height = 0.0
    for i in np.argsort(times[ELEMENTS[0]]):
        color, look, *_ = LOOKS[NAMES[i]]
        found = [times[n][i] for n in ELEMENTS]
        right.loglog(ELEMENTS, found, look, color=color, markersize=5)
        height = max(found[0], height * 1.3)  # names keep their distance
        right.text(48, height, NAMES[i], color=color, va="center", ha="right", fontsize=9)
    right.set(
        title=f"What it takes, 4 ranks on {CORES} cores", xlabel="array (bytes)", xlim=(1.5, 2e6)
    )
    right.set_ylabel("time of one all_reduce (ms)")
    right.set_xticks(ELEMENTS[1::2], ["1 K", "16 K", "256 K", "4 M"])
    right.set_yticks([0.1, 0.3, 1, 3, 10], ["0.1", "0.3", "1", "3", "10"])
    right.minorticks_off()
    right.spines["bottom"].set_bounds(ELEMENTS[0], ELEMENTS[-1])
    return figure


figures.save(draw, "02_collectives")

# %% [markdown]
# ## Exercise 1: an assembly line
#
# Rank 0 has an array, every rank needs it, and the ranks form a line: each may send only to the
# next. To hand on the whole array takes `N-1` messages of S bytes, one after the other, while all
# but two ranks idle. Cut it into `K` chunks and let them flow. The check wants the array on every
# rank, S bytes from each rank but the last, and `N + K - 2` steps by the clock.
#
# *Hint:* when the first chunk has come in, rank r can hand it on before it asks for the second;
# rank 0 only sends, the last rank only receives. `np.array_split(x, K)` gives views of `x`. (The
# lessons on pipelines do this with micro-batches for chunks.)


# %%
def pipelined_broadcast(group, x, K):
    """Fill the flat array x with rank 0's, in place, in K chunks; r sends only to r + 1."""
    raise NotImplementedError  # your lines here


def broadcast_by(group, attempt, n, K):
    x = np.arange(n, dtype=np.float32) * (group.rank == 0)
    attempt(group, x, K)
    moved, clock = group.ledger.total, Clock(group, 1, 0)
    attempt(clock, x.copy(), K)
    return (x == np.arange(n)).all(), moved, clock.end()


def check_broadcast(attempt, n=1200, K=6):
    for N in (3, 4):
        right, moved, ends = zip(*clusters[N].run(broadcast_by, attempt, n, K), strict=True)
        if not all(right):
            return f"rank {right.index(False)} of {N} does not have rank 0's array"
        if list(moved) != [4 * n] * (N - 1) + [0]:
            return f"the array arrives, but {N} ranks sent {list(moved)} bytes"
        if max(ends) != N + K - 2:
            return f"the array arrives after {max(ends):.0f} steps; K chunks take {N + K - 2}"


def all_in_then_all_on(group, x, K):
    chunks = np.array_split(x, K)
    for chunk in chunks if group.rank > 0 else []:
        chunk[...] = group.recv(group.rank - 1)
    for chunk in chunks if group.rank < group.size - 1 else []:
        group.send(chunk, to=group.rank + 1)


exercise.judge(1, check_broadcast, pipelined_broadcast, tempting=[all_in_then_all_on])

# %% [markdown]
# ## Exercise 2: tree or ring?
#
# For which array do both take the same time, if a message costs `latency + bytes * per_byte`?
# Return S for N ranks. Libraries choose their algorithm by such numbers.
#
# *Hint:* both rows of the table above, each as `steps * latency + path * per_byte`.


# %%
def equal_at(N, latency, per_byte):
    raise NotImplementedError  # your line here


def check_equal(attempt):
    for N, latency, per_byte in [(3, 1.0, 0.5), (4, 2e-5, 1e-9), (1000, 5e-6, 4e-11)]:
        S = attempt(N, latency, per_byte)
        costs = [predicted(name, N, S) for name in ("tree", "ring")]
        tree, ring = (steps * latency + path * per_byte for steps, path, _ in costs)
        if not abs(tree - ring) < 1e-9 * ring:
            return f"N = {N}, S = {S:,.0f}: tree {tree:.3g} s, ring {ring:.3g} s"


def by_the_busiest_rank(N, latency, per_byte):  # and not by the path
    levels = ceil(log2(N))
    return 2 * latency * (N - 1 - levels) / per_byte / (levels - 2 * (N - 1) / N)


exercise.judge(2, check_equal, equal_at, tempting=[by_the_busiest_rank])

# %% [markdown]
# ## Exercise 3: why did this break?
#
# A ring whose `send` returns only when the message has been taken. The library detects that no rank
# can go on, and its error says which rank waits for which. Which circle is it? Write an `exchange`
# with which numbers go round on 2, 3 and 4 ranks. *Hint:* to break a circle it is enough that one
# rank does something different.

# %%
TAKEN = 1


def blocking_ring(group, exchange):
    """Add up the ranks' numbers by handing them round; return the sum."""
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    x = total = np.array(group.rank)

    def send():
        group.send(x, right)
        group.recv(right, tag=TAKEN)  # waits for the receiver

    def recv():
        array = group.recv(left)
        group.send(np.empty(0), left, tag=TAKEN)
        return array

    for _ in range(group.size - 1):
        x = exchange(group.rank, send, recv)
        total = total + x
    return int(total)


def exchange(rank, send, recv):
    """Call send() once and recv() once; return what recv returned."""
    raise NotImplementedError  # your lines here


def send_first(rank, send, recv):
    send()
    return recv()


def receive_first(rank, send, recv):
    array = recv()
    send()
    return array


def check_exchange(attempt):
    for N, cluster in clusters.items():
        sums = cluster.run(blocking_ring, attempt)
        if sums != [N * (N - 1) // 2] * N:
            return f"the sums of 0 to {N - 1} are {sums}"


exercise.judge(3, check_exchange, exchange, tempting=[send_first, receive_first])

# %% [markdown]
# ## What it costs, and the next problem
#
# - **Up to `2 S` per rank.** The best all-reduce moves the array once out of each of two ranks, and
#   nearly twice out of each of many. More ranks make it no cheaper; only a smaller S does.
# - **A latency per step.** A hundred small arrays cost a hundred times the steps. Put them into one
#   flat vector.
# - **All ranks meet.** A collective ends when the slowest rank has arrived.
#
# We can now sum what all ranks hold, with the same bits everywhere. What should they sum, and is
# that the gradient which one device would have computed? That is lesson 3, `03_data_parallel.py`.

# %%
for cluster in clusters.values():
    cluster.close()
