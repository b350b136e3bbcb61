# %% [markdown]
# # 2. Collectives: how ranks add up what they have
#
# In the next lesson every rank will hold a gradient, and every rank will need the sum of all of
# them: an *all-reduce*. Here we build it from nothing but `send` and `recv`, first the obvious way,
# then around a ring, and count what each way costs. The library's versions are in
# `minidist/comm/collectives.py`.
#
# Letters: `N` ranks, `r` one of them, `S` bytes in the array that each rank holds, `c` a chunk of
# it.

# %%
import os
import time
from math import ceil, log2

import numpy as np

from minidist import Cluster
from minidist.comm.collectives import ALGORITHMS
from minidist.errors import CollectiveMismatch, CommError, Deadlock
from minidist.rng import generator
from minidist.tools import figures
from minidist.tools.volume import all_reduce_bytes

figures.arguments()
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
clusters = {N: Cluster(N) for N in (2, 3, 4)}  # a process per rank; they stay up for the lesson

# %% [markdown]
# ## Problem
#
# The obvious way: everyone sends to rank 0, rank 0 adds, rank 0 sends the sum to everyone. A
# `group` is what a rank knows of the others: its own number, how many they are, and how to reach
# them. Its `ledger` counts the bytes that others took from this rank.


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


def milliseconds(group, calls, repeats):
    """Time each of the calls in turn, again and again; return ms[repeats, calls]."""
    times = []
    for _ in range(repeats):
        for call in calls:
            group.barrier()
            start = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - start))
    return np.reshape(times, (repeats, len(calls)))


def slowest(per_rank):
    """Return the median over repeats of the slowest rank's time, for each call."""
    return np.median(np.max(per_rank, axis=0), axis=0)


def problem(group, n):
    x = np.ones(n, np.float32)
    naive(group, x)
    assert (x == group.size).all()
    return group.ledger.total, milliseconds(group, [lambda: naive(group, x)], 9)


n = 1_000_000
S = 4 * n
for N, cluster in clusters.items():
    sent, times = zip(*cluster.run(problem, n), strict=True)
    assert list(sent) == [(N - 1) * S, *[S] * (N - 1)], "to the byte"
    print(
        f"N = {N}: {slowest(times)[0]:5.1f} ms; MB sent by each rank: "
        f"{[b / 1e6 for b in sent]}; rank 0 also takes in {sum(sent[1:]) / 1e6:.0f}"
    )

# %% [markdown]
# Rank 0 takes `(N-1) S` in and sends `(N-1) S` out, one after the other, while the rest wait. Let
# us give 64 ranks the gradient of 7 billion parameters at two bytes each, and every rank a link of
# 100 Gbit/s in either direction:

# %%
big, link = 14e9, 100e9 / 8  # bytes; bytes per second
naive_seconds, ring_seconds = 2 * 63 * big / link, 2 * 63 / 64 * big / link
print(f"through rank 0: {naive_seconds:.0f} s a step. This lesson's ring: {ring_seconds:.1f} s.")
assert round(naive_seconds / ring_seconds) == 64

# %% [markdown]
# ## What the ranks may assume: protocols
#
# Before we do better, let us see what `send` and `recv` promise. `recv` always waits. Whether
# `send` waits is a choice. A *blocking* send returns when the other side has taken the message. We
# can make one from an acknowledgement; the `tag` keeps it apart from the messages proper.

# %%
ACKNOWLEDGED = 1


def blocking_send(group, x, to):
    group.send(x, to)
    group.recv(to, tag=ACKNOWLEDGED)  # has it been taken?


def blocking_recv(group, source):
    x = group.recv(source)
    group.send(np.empty(0), source, tag=ACKNOWLEDGED)
    return x


def in_turns(group):
    """Swap numbers with the partner: the even rank sends first, the odd one receives first."""
    mine, partner = np.array([group.rank]), group.rank ^ 1
    if group.rank % 2 == 0:
        blocking_send(group, mine, partner)
        return blocking_recv(group, partner).item()
    theirs = blocking_recv(group, partner).item()
    blocking_send(group, mine, partner)
    return theirs


print("blocking, in turns:", clusters[4].run(in_turns))

# %% [markdown]
# That needed a plan of who goes first. Without one, ranks wait for each other in a circle, each for
# something that comes only after what it waits for. Two ways to get there: ranks 0 and 1 both
# *send* first, blocking; ranks 2 and 3 both *receive* first. The library looks at what every rank
# waits for, sees that nobody can ever go on, and says so:


# %%
def in_a_circle(group):
    mine, partner = np.array([group.rank]), group.rank ^ 1
    if group.rank < 2:
        blocking_send(group, mine, partner)
        return blocking_recv(group, partner).item()
    theirs = group.recv(partner).item()
    group.send(mine, partner)
    return theirs


def process_id(group):
    return os.getpid()


before = clusters[4].run(process_id)
try:
    clusters[4].run(in_a_circle)
except Deadlock as error:
    print(f"Deadlock: {error}")
else:
    raise AssertionError("it cannot have come to an end")
after = clusters[4].run(process_id)
assert not set(before) & set(after)
print("after an error the next run gets fresh ranks, so nothing old is in the way")

# %% [markdown]
# In a *buffered* send the message is copied and travels by itself; the sender goes on at once. Then
# both may send first, and no plan is needed. minidist's `send` is of this kind: it never waits, and
# the price is memory for what is under way. (No buffer helps two ranks that both *receive* first.)


# %%
def both_send_first(group):
    mine, partner = np.array([group.rank]), group.rank ^ 1
    group.send(mine, partner)
    mine[0] = -1  # the message is a copy: this does not reach it
    return group.recv(partner).item()


assert clusters[4].run(both_send_first) == clusters[4].run(in_turns) == [1, 0, 3, 2]
print("buffered, both send first:", clusters[4].run(both_send_first))

# %% [markdown]
# *Request and response*: ask now, do something useful, take the answer later. `irecv` returns a
# `Request`, its `wait()` the array. A small parameter server on rank 0: whoever sends a gradient
# gets the new weights back. The two directions have tags of their own.

# %%
GRADIENT, WEIGHTS = 2, 3


def serve(group):
    weights = np.zeros(3)
    for worker in range(1, group.size):
        weights = weights - group.recv(worker, tag=GRADIENT)
        group.send(weights, worker, tag=WEIGHTS)
    return weights


def ask(group):
    answer = group.irecv(0, tag=WEIGHTS)
    group.send(np.full(3, float(group.rank)), 0, tag=GRADIENT)
    # ... the answer is under way; here a worker would prepare its next batch ...
    return answer.wait()


def ping(group):
    return serve(group) if group.rank == 0 else ask(group)


for rank, weights in enumerate(clusters[4].run(ping)):
    print(f"rank {rank} ({'server' if rank == 0 else 'worker'}): {weights}")

# %% [markdown]
# A *collective* is a call that all ranks make together, and then order matters. Here two gradients
# of one shape are summed, but rank 1 takes them in the other order, as a loop over a set might.
# Nothing is wrong with any single call, so the ranks happily add weights to biases. A `label` says
# what is meant; the ranks compare labels before any data moves.


# %%
def swapped(group, labelled):
    gradients = {"weight": np.full(2, 10.0), "bias": np.full(2, 1.0)}
    order = ["weight", "bias"] if group.rank == 0 else ["bias", "weight"]
    labels = {name: name if labelled else None for name in order}
    return {name: group.all_reduce(gradients[name], label=labels[name]) for name in order}


silent = clusters[2].run(swapped, False)
print(f"without labels: weight {silent[0]['weight']}, where [20. 20.] is right")
assert (silent[0]["weight"] == 11).all()
try:
    clusters[2].run(swapped, True)
except CollectiveMismatch as error:
    print(f"with labels, CollectiveMismatch: {error}")
else:
    raise AssertionError("two labels met, and nobody said so")

# %% [markdown]
# ## Picture
#
# Now do better than rank 0. Cut each array into N chunks and put the ranks in a ring; everyone
# sends to the right and receives from the left, all at the same time. `a0` is chunk 0 of rank a's
# array, `ab0` the sum `a0 + b0`. Three ranks:
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
#     *c: the whole sum of chunk c. After the first half each rank owns one of them.
#
# ## Math
#
#     reduce-scatter   N-1 steps, in each of them every rank sends one chunk     (N-1) S/N
#     all-gather       N-1 steps more, the finished chunks go round              (N-1) S/N
#     together         2(N-1) steps,   2(N-1)/N S bytes per rank  <  2 S,  however large N is
#
# Can it be less? Take one number. Before the first rank knows its sum, N-1 messages must have
# brought the others' shares together; each of the other N-1 ranks has yet to hear of it. That is
# 2(N-1) messages a number, `2(N-1) S` for all ranks, so the busiest sends at least `2(N-1)/N S`:
# the ring is optimal in bytes (Patarasu and Yuan 2009). In steps it is not.
#
# ## Code
#
# The ring, written out. The indices are modulo N; `cut` are views, so that `mine` is part of `x`.


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


def compare(group, n):
    """Return the bits of three results: our ring, the library's ring, and our naive sum."""
    x = share(group.rank, n)
    ours, through_0 = x.copy(), x.copy()
    ring(group, ours)
    naive(group, through_0)
    theirs = group.all_reduce(x, algorithm="ring")
    return ours.tobytes(), theirs.tobytes(), through_0.tobytes()


for N, cluster in clusters.items():
    in_rank_order = share(0, 1001)
    for r in range(1, N):
        in_rank_order = in_rank_order + share(r, 1001)
    for ours, theirs, through_0 in cluster.run(compare, 1001):
        assert ours == theirs, "bit for bit"
        assert through_0 == in_rank_order.tobytes()
    print(f"N = {N}: our ring gives the library's bits on every rank")

# %% [markdown]
# ## Measurement: steps and bytes
#
# There are more ways. A *tree* folds the ranks in pairs, then pairs of pairs, up to rank 0, and
# unfolds: few steps, whole arrays. *Recursive halving and doubling* (Rabenseifner's, described in
# Thakur et al. 2005) swaps halves with the rank at distance N/2, then quarters at N/4, and back:
# the few steps of the tree with the bytes of the ring, if N is a power of two. We first say what
# each must cost, and then look. *Path* is what passes one after the other; the last column is what
# the busiest rank sends.
#
#                         steps             path                busiest rank
#     naive               2(N-1)            2(N-1) S            (N-1) S
#     tree                2 ceil(log2 N)    2 ceil(log2 N) S    ceil(log2 N) S
#     ring                2(N-1)            2(N-1)/N S          2(N-1)/N S
#     halving_doubling    2 log2 N          2(N-1)/N S          2(N-1)/N S
#
# Bytes are in the ledger. For steps we give each rank a clock that runs on messages alone: a
# message costs `latency + bytes / bandwidth`, a rank sends one at a time and takes in one at a
# time, and each message says when it arrives. Latency 1 and free bytes counts steps; free messages
# and one second a byte measures the path.


# %%
class Clock:
    """A group whose messages carry the time; nothing else takes any."""

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


WAYS = {"naive": naive, **ALGORITHMS}  # the library's algorithms: (group, x, combine), like ours


def on_the_clock(group, way, n, latency, per_byte):
    clock = Clock(group, latency, per_byte)
    way(clock, np.ones(n, np.float32), np.add)
    return clock.end()


def count_bytes(group, name, n):
    x = np.ones(n, np.float32)
    naive(group, x) if name == "naive" else group.all_reduce(x, algorithm=name)
    return group.ledger.total


def predicted(name, N, S):
    """Return (steps, bytes on the path, bytes of the busiest rank); N divides the elements."""
    levels = ceil(log2(N))
    return {
        "naive": (2 * (N - 1), 2 * (N - 1) * S, (N - 1) * S),
        "tree": (2 * levels, 2 * levels * S, levels * S),
        "ring": (2 * (N - 1), 2 * (N - 1) * S / N, 2 * (N - 1) * S / N),
        "halving_doubling": (2 * levels, 2 * (N - 1) * S / N, 2 * (N - 1) * S / N),
    }[name]


def closed_form(name, n, N):
    """Return every rank's bytes, for any n."""
    if name == "naive":
        return [4 * n * (N - 1), *[4 * n] * (N - 1)]
    return all_reduce_bytes(name, n, 4, N)


def runs_on(name, N):
    return name != "halving_doubling" or N & (N - 1) == 0


print(f"{'':24}steps: said, found   path / S: said, found   busiest / S: said, found")
for N, cluster in clusters.items():
    for name, way in WAYS.items():
        if not runs_on(name, N):
            continue
        steps, path, busiest = predicted(name, N, S=4 * 1200)
        found_steps = max(cluster.run(on_the_clock, way, 1200, 1, 0))
        found_path = max(cluster.run(on_the_clock, way, 1200, 0, 1))
        sent = cluster.run(count_bytes, name, 1200)
        print(
            f"N = {N}, {name:16} {steps:9} {found_steps:7.0f} {path / 4800:13.2f}"
            f" {found_path / 4800:7.2f} {busiest / 4800:16.2f} {max(sent) / 4800:7.2f}"
        )
        assert (found_steps, found_path, max(sent)) == (steps, path, busiest)

# %% [markdown]
# Where N does not divide the array, some chunks have an element more. `tools/volume.py` has the
# closed forms for every rank; 1001 elements have to agree to the byte, also for the library's
# default, which sends no messages: in memory that all ranks see, each rank sums up one slice and
# copies the others. (Where N divides the array, its bytes are the ring's.) Bytes do not ask what a
# rank is, so beyond four ranks we take threads.

# %%
busiest = {name: {} for name in [*WAYS, None]}
for N in range(2, 9):
    cluster = clusters.get(N) or Cluster(N, transport="thread")
    for name in busiest:
        if runs_on(name, N):
            sent = cluster.run(count_bytes, name, 1001)
            assert sent == closed_form(name, 1001, N), (name, N, sent)
            busiest[name][N] = max(sent)
            assert sum(sent) == 2 * (N - 1) * 4004, "all ranks together: the same for every way"
    if N not in clusters:
        cluster.close()
print("naive, tree, ring, halving_doubling, shared memory: every rank's bytes as predicted")
print("4 ranks, 4004 bytes each:", {str(name): closed_form(name, 1001, 4) for name in busiest})

# %% [markdown]
# Mind the last assertion. All ranks *together* always move `2(N-1) S`. None of these ways saves
# traffic; the good ones spread it evenly.
#
# ## Measurement: time
#
# What is a message worth here? Two ranks play ping-pong, with 4 bytes and with 4 MB: latency and
# bandwidth of this machine. From these two numbers the clock can say what each way should take,
# before it is measured. Times are not asserted: they are your machine's.


# %%
def ping_pong(group, n):
    x = np.ones(n, np.float32)

    def there_and_back():
        if group.rank == 0:
            group.send(x, to=1)
            group.recv(1)
        else:
            group.send(group.recv(0), to=0)

    return milliseconds(group, [there_and_back], 31)


def race(group, n, names, repeats):
    x = np.ones(n, np.float32)
    calls = [
        (lambda: naive(group, x.copy()))
        if name == "naive"
        else (lambda name=name: group.all_reduce(x, algorithm=name))
        for name in names
    ]
    return milliseconds(group, calls, repeats)


latency = slowest(clusters[2].run(ping_pong, 1))[0] / 2
per_byte = (slowest(clusters[2].run(ping_pong, n))[0] / 2 - latency) / S
print(f"a message: {1e3 * latency:.0f} us + bytes / ({1e-6 / per_byte:.1f} GB/s)")
ELEMENTS = [2**k for k in range(6, 21, 2)]  # 256 bytes to 4 MB
samples = {}
for _ in range(4):  # rounds, so that a hiccup of the machine does not hit one size alone
    for N in (2, 4):
        for elements in ELEMENTS:
            repeats = 11 if elements < 2**16 else 5
            per_rank = clusters[N].run(race, elements, [*WAYS, None], repeats)
            samples.setdefault((N, elements), []).append(np.max(per_rank, axis=0))
times = {
    (N, name, elements): median
    for (N, elements), found in samples.items()
    for name, median in zip([*WAYS, None], np.median(np.concatenate(found), axis=0), strict=True)
}

small, large = ELEMENTS[2], ELEMENTS[-1]
print(f"milliseconds on {CORES} cores        {4 * small:,} bytes         {4 * large:,} bytes")
print(f"{'':27}expected  measured    expected  measured")
for N in (2, 4):
    for name in [*WAYS, None]:
        row = f"N = {N}, {name or 'shared memory':16}"
        for elements in (small, large):
            expected = "-"
            if name is not None:
                way = clusters[N].run(on_the_clock, WAYS[name], elements, latency, per_byte)
                expected = f"{max(way):.2f}"
            row += f" {expected:>11} {times[N, name, elements]:9.2f}"
        print(row)

# %% [markdown]
# How to read it:
#
# - *Small arrays pay for steps.* On four ranks the ring has six, the tree four; with a thousand
#   ranks it would be 1998 against 20. (The clock is unfair to the naive way with few ranks: what
#   makes a message slow here is that a sleeping rank must wake up, and rank 0, once awake, takes in
#   the messages that already lie there for much less.)
# - *Large arrays pay for bytes*, and the clock expects the ring to be far ahead. It counts on a
#   link per rank, though. Here the "links" are memory copies by the cores. As soon as the ranks
#   share those, all of the traffic queues for them, and that is `2(N-1) S` for everybody. On
#   machines with a network between them the expected column is what counts.
# - *Shared memory* needs no messages, and hence fewer copies of each byte: a rank reads the others'
#   arrays where they lie. It takes three meetings, whatever N; for a small array on two ranks they
#   may cost more than the two messages of the tree. Gradients are large, so it is the default.
#
# ## Measurement: which bits?
#
# Floating-point addition rounds, and `(a + b) + c` rounds elsewhere than `a + (b + c)`. Each way
# adds in its own order, so each has its own last bits. But the order is fixed, and every chunk is
# finished in one place and then copied. So we can foretell the bits with NumPy alone:


# %%
def bits(group, name, n):
    return group.all_reduce(share(group.rank, n), algorithm=name)


def foretold(name, x):
    """Return the sum of four ranks' x, added in the order of each way."""
    if name == "tree":
        return (x[0] + x[1]) + (x[2] + x[3])  # neighbours first
    if name == "halving_doubling":
        return (x[0] + x[2]) + (x[1] + x[3])  # distance 2 first
    if name is None:
        return ((x[0] + x[1]) + x[2]) + x[3]  # rank order
    cut = [np.array_split(part, 4) for part in x]  # the ring: chunk c starts at rank c
    turns = [[cut[(c + step) % 4][c] for step in range(4)] for c in range(4)]
    return np.concatenate([((a + b) + c) + d for a, b, c, d in turns])


shares = [share(r, 100_001) for r in range(4)]
exact = np.sum(shares, axis=0, dtype=np.float64)
results = {}
for name in [*ALGORITHMS, None]:
    first, second = (clusters[4].run(bits, name, 100_001) for _ in range(2))
    results[name] = foretold(name, shares)
    assert {x.tobytes() for x in first + second} == {results[name].tobytes()}
    differ = np.mean(results[name] != results["ring"])
    error = np.max(np.abs(results[name] - exact)) / np.max(np.abs(exact))
    print(
        f"{name or 'shared memory':16} same bits on 4 ranks and in 2 runs, as foretold; "
        f"{differ:.0%} differ from the ring's; error {error:.0e}"
    )
assert all((results[name] != results["ring"]).any() for name in ("tree", "halving_doubling", None))

# %% [markdown]
# None is more right than another. What matters is that ranks agree: replicas that differ in one bit
# drift apart, and a bug that shows up only in every other run is hard to find.
#
# ## Measurement: what shared memory saves
#
# An ordinary array belongs to one process. What others reduce of it is copied into shared memory,
# part by part, and what they have reduced is copied out. `group.empty` gives an array that lies
# there already; reduced into itself, `out=x`, it needs no copy on either side. The ledger sees no
# difference: those copies stay at home. The clock on the wall does.


# %%
def three_arrays(group, n):
    ordinary, shared = np.ones(n, np.float32), group.empty(n, "float32")
    shared[...] = 1
    moved = []
    for x, out in [(ordinary, None), (ordinary, ordinary), (shared, shared)]:
        before = group.ledger.total
        result = group.all_reduce(x, out=out, op="max")
        assert (result is x) == (out is x)
        moved.append(group.ledger.total - before)
    calls = [
        lambda: group.all_reduce(ordinary, op="max"),  # max: the numbers stay as they are
        lambda: group.all_reduce(ordinary, op="max", out=ordinary),
        lambda: group.all_reduce(shared, op="max", out=shared),
    ]
    return moved, milliseconds(group, calls, 15)


moved, copies = zip(*clusters[2].run(three_arrays, large), strict=True)
assert all(counts == [4 * large] * 3 for counts in moved)
for text, median in zip(
    ["ordinary, fresh result", "ordinary, out=x", "group.empty, out=x"],
    slowest(copies),
    strict=True,
):
    print(f"{text:24} {median:6.2f} ms   for {4 * large:,} bytes on 2 ranks")

# %% [markdown]
# ## The figure
#
# Left, what a rank has to send; right, what that costs on this machine.


# %%
def draw(plt):
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.8))
    figure.get_layout_engine().set(w_pad=0.12)
    figure.suptitle("A ring spreads the bytes, a tree saves steps, shared memory needs no messages")
    colours = {
        "naive": figures.EMPHASIS,
        "tree": figures.BACKWARD,
        "ring": figures.FORWARD,
        "halving_doubling": figures.UPDATE,
        None: figures.COMMUNICATION,
    }
    grey = {"color": "#777777", "fontsize": 9}

    places = {"naive": (8.2, 7), "tree": (8.2, 3.08), "ring": (8.2, 1.72)}
    words = {
        "naive": "naive: $N - 1$",
        "tree": r"tree: $\lceil\log_2 N\rceil$",
        "ring": "ring: $2(N-1)/N$",
    }
    sizes = np.arange(2, 9)
    for name, place in places.items():
        line = [predicted(name, int(N), 1)[2] for N in sizes]
        found = [busiest[name][int(N)] / 4004 for N in sizes]
        left.plot(sizes, line, color=colours[name], clip_on=False)
        left.plot(sizes, found, "o", color=colours[name], clip_on=False)
        left.text(*place, words[name], color=colours[name], va="center")
    found = {N: moved / 4004 for N, moved in busiest["halving_doubling"].items()}
    left.plot(*zip(*found.items(), strict=True), "o", color=figures.UPDATE, ms=11, fillstyle="none")
    left.text(8.2, 1.3, "halving-doubling: the same", color=figures.UPDATE, va="center", fontsize=9)
    left.plot([2, 8], [2, 2], "--", color=figures.IDLE, linewidth=1, zorder=0)
    left.text(8.2, 2.13, "2: never reached", va="center", **grey)
    left.text(2, 7, "lines: formula\ndots: measured", va="top", **grey)
    left.set(
        title="What the busiest rank sends",
        xlabel="ranks N",
        ylabel="bytes, in units of the array's size S",
        xticks=sizes,
        xlim=(1.8, 11.2),
        ylim=(0, 7.2),
    )
    left.spines["bottom"].set_bounds(1.8, 8)

    kilobytes = 4 * np.array(ELEMENTS) / 1024
    height = 0.0
    for name in sorted(colours, key=lambda name: times[4, name, ELEMENTS[0]]):
        line = [times[4, name, elements] for elements in ELEMENTS]
        right.loglog(kilobytes, line, "o-", color=colours[name], markersize=4)
        height = max(line[0], height * 1.25)  # labels keep their distance
        text = (name or "shared memory").replace("_", "-")
        right.text(0.19, height, text, color=colours[name], va="center", ha="right", fontsize=9)
    if CORES < 4:
        note = (
            "more ranks than cores: large messages queue\nfor the cores, and only their sum counts"
        )
        right.text(0.25, 0.97, note, va="top", transform=right.get_xaxis_transform(), **grey)
    right.set(
        title=f"Small arrays pay for steps, large for bytes (4 ranks, {CORES} cores)",
        xlabel="array (bytes)",
        ylabel="time of one all_reduce (ms)",
        xlim=(0.008, 4500),
    )
    right.set_xticks([1, 16, 256, 4096], ["1 K", "16 K", "256 K", "4 M"])
    right.set_yticks([0.1, 0.3, 1, 3, 10, 30], ["0.1", "0.3", "1", "3", "10", "30"])
    right.minorticks_off()
    right.set_ylim(0.7 * min(times[4, None, n] for n in ELEMENTS), 1.4 * max(times.values()))
    right.spines["bottom"].set_bounds(0.25, 4096)
    return figure


figures.save(draw, "02_collectives")

# %% [markdown]
# ## Exercise
#
# Rank 0 has an array, everyone needs it, and the ranks stand in a line: each may send only to the
# next. Handing the whole array on from rank to rank takes `N-1` messages of S bytes, one after the
# other, while all but two ranks idle. Cut it into `K` chunks instead and let them flow as on an
# assembly line. Write `pipelined_broadcast`.
#
# The check runs it on three and four ranks: right everywhere, S bytes from each rank but the last,
# and by the clock `N + K - 2` steps.
#
# *Hint:* when the first chunk has come in, rank r can hand it on before it asks for the second.
# Rank 0 only sends, the last rank only receives. `np.array_split(x, K)` gives views of `x`. This
# little sentence returns in the lessons on pipelines, with micro-batches as chunks.


# %%
def pipelined_broadcast(group, x, K):
    """Fill the flat array x with rank 0's, in place, in K chunks; r sends only to r + 1."""
    raise NotImplementedError  # your lines here


# %%
def try_exercise(group, attempt, n, K):
    """Return (x, steps, bytes sent), or None if nobody has begun."""
    want = np.arange(n, dtype=np.float32)
    clock, right, moved = Clock(group, 1, 0), [], []
    for channel in (group, clock):
        x = want.copy() if group.rank == 0 else np.zeros_like(want)
        try:
            attempt(channel, x, K)
        except NotImplementedError:
            return None
        right.append((x == want).all())
        moved.append(group.ledger.total)
    return all(right), clock.end(), moved[0]  # the clock's own messages are not to be counted


def check(attempt, n=1200, K=6):
    """Say "solved", "not solved yet", or what is wrong."""
    for N in (3, 4):
        try:
            outcomes = clusters[N].run(try_exercise, attempt, n, K)
        except CommError as error:
            return f"wrong: {type(error).__name__}: {error}"
        if None in outcomes:
            return "not solved yet"
        right, ends, moved = zip(*outcomes, strict=True)
        if not all(right):
            return f"wrong: rank {right.index(False)} of {N} does not have rank 0's array"
        if list(moved) != [4 * n] * (N - 1) + [0]:
            return f"wrong: the array arrives, but {N} ranks sent {list(moved)} bytes"
        if max(ends) != N + K - 2:
            return f"wrong: the array arrives after {max(ends):.0f} steps; {N + K - 2} are enough"
    return "solved"


def one_after_the_other(group, x, K):
    """Take in all chunks, then hand all of them on."""
    chunks = np.array_split(x, K)
    for chunk in chunks if group.rank > 0 else []:
        chunk[...] = group.recv(group.rank - 1)
    for chunk in chunks if group.rank < group.size - 1 else []:
        group.send(chunk, to=group.rank + 1)


def rank_0_sends_all(group, x, K):
    for r in range(1, group.size) if group.rank == 0 else []:
        group.send(x, to=r)
    if group.rank > 0:
        x[...] = group.recv(0)


print("exercise:", check(pipelined_broadcast))
for tempting in (one_after_the_other, rank_0_sends_all):
    verdict = check(tempting)
    print("a tempting answer:", verdict)
    assert verdict.startswith("wrong: the array arrives")

# %% [markdown]
# ## What it costs, and the next problem
#
# - **`2 S` per rank, always.** The best all-reduce moves nearly twice the array out of each rank,
#   however many ranks there are. More ranks make it no cheaper; only a smaller S does.
# - **A latency per step.** A hundred small arrays cost a hundred times the steps. Put them into one
#   flat vector.
# - **No way is the best for all sizes.** Real libraries choose by size and N.
# - **Everybody meets.** A collective ends when the slowest rank has come.
#
# We can now sum what all ranks hold, with the same bits everywhere. What should they sum, and is
# that the gradient which one device would have computed? That is lesson 3.

# %%
for cluster in clusters.values():
    cluster.close()
