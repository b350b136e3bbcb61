# %% [markdown]
# # 4. Parameter servers: who waits for whom, and how old may a gradient be?
#
# In lesson 3 all ranks meet in every step, so all go as fast as the slowest. Here some ranks *keep*
# the weights, and the others *pull* them and *push* gradients, each at its own pace. The library's
# version: `parameter_server.py`, `server_plan.py` and `sparse_update.py` in
# `minidist/data_parallel`.
#
# Letters: `S` servers, `W` workers, `P` bytes of parameters; a *version* of the weights: the number
# of updates in them; a worker's *clock*: the minibatches it has done; `s` the staleness bound.

# %%
import time
from functools import partial
from itertools import product

import numpy as np

from minidist import Cluster, nn, optim
from minidist.data_parallel.parameter_server import Plan, Push, Server, join, train
from minidist.datasets import digits
from minidist.nn.flat_parameters import FlatParameters
from minidist.rng import generator
from minidist.tools import figures
from minidist.tools.replay_server import replay_server
from minidist.tools.volume import all_reduce_bytes, parameter_server_bytes

figures.arguments()
images, labels = digits("float64")
clusters = {size: Cluster(size) for size in (2, 3, 4, 5, 9)}

# %% [markdown]
# ## Problem
#
# Four ranks work, with an all_reduce after every minibatch. One of them is slow: its minibatch
# takes 10 ms, that of the others 2 ms. (Naps stand in for work, so that each rank is a device of
# its own on any machine.)

# %%
NAPS = {1: 0.002, 2: 0.002, 3: 0.002, 4: 0.010}  # rank: seconds; rank 0 will be the server


def together(group, steps):
    group.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        time.sleep(NAPS[1 + group.rank])
        group.all_reduce(np.zeros(1000))
    return (time.perf_counter() - start) / steps


step = max(clusters[4].run(together, 30))
alone = sum(1 / nap for nap in NAPS.values())
print(f"{1e3 * step:.1f} ms a step: {4 / step:.0f} minibatches/s; without waiting: {alone:.0f}")
assert 4 / step < alone / 3.5  # on quiet ranks: 400 of 1600

# %% [markdown]
# Three ranks wait four fifths of their time.
#
# ## Picture
#
#                   server 0: first half of w         server 1: second half
#                     |  ^                              |  ^
#      pull: w, version  |  push: dw                    |  |        P bytes down, P bytes up
#                     v  |                              v  |        per worker and minibatch
#      worker 2:  w -> forward, backward -> dw      worker 3, worker 4, ...
#
#      worker 2   pull 0 | gradient of w0 | push -> update 0 | pull 1 | gradient of w1 | push ->
#      worker 3   pull 0 | gradient of w0           | push -> update 1  <- one update too late
#
# Worker 3's gradient is that of version 0, and it is applied to version 1: its *staleness* is 1.
#
# ## Math
#
#     synchronous         w[t+1] = w[t] - lr sum_k g_k(w[t])                lesson 3, on a server
#     asynchronous        w[t+1] = w[t] - lr g(w[t - d])                    d: its staleness
#     bounded staleness   a worker begins clock c when all have done c - s
#
# Dean et al. (NIPS 2012, section 4.1) let every worker go as it can: Downpour SGD. Ho et al. (NIPS
# 2013, section 2) bound it: SSP. How stale is a gradient on average? From pull to push a worker is
# under way with one gradient. An update falls into at most one such interval of each *other*
# worker, and makes one gradient one update staler:
#
#     sum of d over all gradients <= (W - 1) times their number,     mean d <= W - 1
#
# whoever is slow, and nearly equal if workers pull as soon as they have pushed. Only the
# distribution depends on their speeds.
#
# ## Code
#
# An asynchronous server. `recv_any` takes the next message from any of several ranks, here of the
# lowest that has sent one (the library's server takes turns). The log says which update was made of
# which gradient, and which version that one had been computed with.


# %%
PULL, PUSH, DONE = range(3)


def serve(group, w, lr):
    """Keep w[P]; return it and the log when all workers are done."""
    version, log, working = 0, [], set(range(1, group.size))
    while working:
        worker, (kind, batch, read) = group.recv_any(sorted(working))
        if kind == PULL:
            group.send(np.append(w, version), worker, tag=1)
        elif kind == PUSH:
            w -= lr * group.recv(worker, tag=1)
            log.append([Push(worker, (int(batch),), (int(read),))])
            version += 1
        else:
            working.discard(worker)
    return w, log


def work(group, flat, batches, gradient):
    """Pull, compute, push; flat: the model's parameters as one vector."""
    for batch in batches:
        group.send(np.array([PULL, batch, 0]), 0)
        *_, version = pulled = group.recv(0, tag=1)
        flat.vector[:] = pulled[:-1]
        flat.gradient[:] = gradient(batch)
        group.send(np.array([PUSH, batch, int(version)]), 0)
        group.send(flat.gradient, 0, tag=1)
    group.send(np.array([DONE, 0, 0]), 0)


# %% [markdown]
# Is it right? Two runs differ, since ranks race. But each run has an oracle: the log alone says
# what must come out. The library's `replay_server` goes through it on one rank, without messages,
# and computes every gradient with the version that was recorded. Not a bit may differ.

# %%
LR, COUNT = 0.2, 160
order = generator(0, "order").permutation(len(images))
ROWS = np.resize(order, (400, 32))  # minibatches


def mlp():
    return nn.MLP([64, 32, 10], dtype="float64")


def backward(model, batch, nap=0.0):
    time.sleep(nap)
    loss = nn.cross_entropy(model(images[ROWS[batch]]), labels[ROWS[batch]])
    loss.backward()
    return loss


def share(rank, size, count):
    """Deal minibatches to ranks 1, 2, ..., with as many shares as they are fast."""
    turns = [r for r in range(1, size) for _ in range(5 if NAPS.get(r, 0) < 0.01 else 1)]
    return [b for b in range(count) if turns[b % len(turns)] == rank]


def ours(group, serve):
    model = mlp()
    flat = FlatParameters(model.parameters())
    if group.rank == 0:
        return serve(group, flat.vector, LR)

    def gradient(batch):
        for p in model.parameters():
            p.grad = None
        backward(model, batch, NAPS[group.rank])
        flat.collect_gradients()
        return flat.gradient

    work(group, flat, share(group.rank, group.size, COUNT), gradient)


def oracle(group, logs, size, plan):
    """Return the weights that the servers' logs lead to."""
    if group.rank == 0:
        batches = {w: share(w, size, COUNT) for w in range(1, size)}
        found = replay_server(mlp(), plan, logs, batches, backward, partial(optim.SGD, lr=LR))
        return np.concatenate([array.ravel() for array in found.values()])


ASYNCHRONOUS = Plan(staleness=None)
weights, log = clusters[5].run(ours, serve)[0]
want = clusters[5].run(oracle, [log], 5, ASYNCHRONOUS)[0]
print("updates in the order of workers:", "".join(str(push.worker) for (push,) in log))
assert np.array_equal(weights, want)
print("our server, and the replay of its log: the same bits")

# %% [markdown]
# And the library's? It has *plans*: who may read when, and what makes an update. `staleness=0` is
# the synchronous server, `None` is Downpour, and `s` is the bound between them. With a `quorum` it
# does not wait for those that lag: they keep late gradients in a *delayed buffer*, which sends the
# sum another time; after `s` missed updates in a row it does wait.


# %%
PLANS = {
    "synchronous": Plan(),
    "SSP, s = 3": Plan(staleness=3),
    "quorum 3, s = 3": Plan(quorum=3, staleness=3),
    "Downpour": ASYNCHRONOUS,
}


def library(group, plan, batches, naps):
    """Return (weights, log, staleness, seconds) on the server; naps[rank](batch): seconds."""
    role = join(group, mlp(), partial(optim.SGD, lr=LR), plan)
    start, own = time.perf_counter(), naps.get(group.rank)
    train(role, lambda model, b: backward(model, b, own(b)), batches.get(group.rank, []))
    if isinstance(role, Server):
        return role.flat.vector, role.log, role.staleness(), time.perf_counter() - start


SLOW = {rank: lambda b, nap=nap: nap for rank, nap in NAPS.items()}
dealt, histograms = {rank: share(rank, 5, COUNT) for rank in NAPS}, {}
print("one slow worker:     updates   staleness: mean  most   the slow worker's mean")
for name, plan in PLANS.items():
    weights, log, stale, _ = clusters[5].run(library, plan, dealt, SLOW)[0]
    assert np.array_equal(weights, clusters[5].run(oracle, [log], 5, plan)[0]), name
    pushes = [(update, p) for update, parts in enumerate(log) for p in parts]
    slowest = [update - v for update, p in pushes if p.worker == 4 for v in p.versions]
    print(f"{name:20} {len(log):7} {np.mean(stale):17.2f} {max(stale):5} {np.mean(slowest):16.1f}")
    histograms[name] = np.bincount(stale)
    assert sum(len(p.batches) for _, p in pushes) == COUNT, "every gradient, once"
    if name == "synchronous":
        assert set(stale) == {0}
    if name == "Downpour":
        assert 1 < np.mean(stale) <= 3 and max(stale) > 3, "at most W - 1 on average"

# %% [markdown]
# All four end with the bits of their replay; no mean is above `W - 1 = 3`.
#
# A bound does not help with a worker that is *always* slow: after `s` clocks all have its pace. It
# helps with hiccups. Now every fifth minibatch or so takes 10 ms, on whatever worker, and all
# workers have the same number of them:

# %%
HICCUP = generator(0, "hiccups").random(400) < 0.2
HICCUPS = dict.fromkeys(NAPS, lambda b: 0.010 if HICCUP[b] else 0.002)
evenly = {rank: range(rank - 1, COUNT, 4) for rank in NAPS}
seconds = {}
for name, plan in PLANS.items():
    seconds[name] = min(clusters[5].run(library, plan, evenly, HICCUPS)[0][3] for _ in range(2))
busiest = max(sum(HICCUPS[r](b) for b in evenly[r]) for r in NAPS)
print(", ".join(f"{name} {1e3 * s:.0f} ms" for name, s in seconds.items()), end="; ")
print(f"the worker with most to do naps {1e3 * busiest:.0f} ms")
assert seconds["Downpour"] < seconds["synchronous"]

# %% [markdown]
# The synchronous server waits for the slowest of *every* clock, the others for that of several.
#
# ## Measurement: bytes, and the server as a bottleneck
#
# In a clock every worker takes `P` bytes from the servers and sends them `P`. All that goes through
# `S` ranks. An all_reduce moves nearly as much in sum, but every rank carries the same load.


# %%
def one_clock(group, plan):
    """Return the bytes that others take from this rank in one clock."""
    role = join(group, mlp(), partial(optim.SGD, lr=LR), plan)
    train(role, backward, [0])
    return role.group.ledger.bytes["send"]


elements = sum(p.size for p in mlp().parameters())
P = 8 * elements
CROWDS = (1, 2, 4, 8)
loads = {"1 server": [], "2 servers": [], "all_reduce": []}
for W in CROWDS:
    sent = clusters[W + 1].run(one_clock, Plan())
    assert sum(sent) == parameter_server_bytes(elements, 8, 1, [1] * W)
    loads["1 server"].append((sent[0] + sum(sent[1:])) / P)  # out of it, and into it
    assert abs(loads["1 server"][-1] / (2 * W) - 1) < 0.01, "and headers"
    loads["2 servers"].append(loads["1 server"][-1] / 2)
    loads["all_reduce"].append(2 * max(all_reduce_bytes(None, elements, 8, W)) / P)
*sent, _, _ = clusters[4].run(one_clock, Plan(servers=2))  # the last two work
assert abs(sum(sent) / P - 2) < 0.01 and abs(sent[0] - sent[1]) < 16, "half of 2 P from each"
print(f"P = {P:,} bytes. In and out of the busiest rank, per clock, in units of P:")
for name, row in loads.items():
    print(f"  {name:11}" + "".join(f"{x:7.2f} ({W})" for W, x in zip(CROWDS, row, strict=True)))

# %% [markdown]
# A server's load grows with `W / S`; an all_reduce's stays below `4 P`. That is why Downpour has
# `n_fetch` and `n_push`: pull before every third minibatch only, push the sum of three, and let the
# worker descend by itself in between. And it is why pushes may be *sparse*: a batch touches few
# rows of an embedding, and where the rule leaves zero gradients alone (SGD, Adagrad) nobody need
# hear of the others. 64 of 4,096 words per batch:


# %%
WORDS = np.minimum(generator(0, "words").zipf(1.3, (12, 64)), 4096) - 1


def words_backward(model, batch):
    nn.squared_error(model(WORDS[batch]), np.ones((64, 8))).backward()


def embedded(group, plan):
    model = nn.Sequential([nn.Embedding(4096, 8, dtype="float64")])
    role = join(group, model, partial(optim.Adagrad, lr=LR), plan)
    mine = range(group.rank - 1, 12, group.size - 1) if group.rank else []
    train(role, words_backward, mine)
    return role.flat.vector, role.group.ledger.bytes["send"]


(dense, _), *workers = clusters[3].run(embedded, Plan())
(sparse, _), *few = clusters[3].run(embedded, Plan(sparse=True))
before, after = (sum(sent for _, sent in side) for side in (workers, few))
touched = sum(len(np.unique(batch)) for batch in WORDS)
assert np.array_equal(dense, sparse), "the bits of dense pushes"
assert before - after == 12 * 8 * 4096 * 8 - touched * (8 * 8 + 8), "a row: 8 numbers and its own"
print(f"12 pushes: {before:,} bytes dense, {after:,} sparse ({touched} rows), the same weights")

# %% [markdown]
# ## Measurement: what staleness costs in learning
#
# The digits, 240 updates of 32 images, and 1, 2, 4 or 8 workers of equal speed.

# %%
RATES, UPDATES = (0.05, 0.2, 0.8), 240


def learned(group, rate):
    """Return the mean staleness, and the loss on all digits, on the server."""
    model = mlp()
    role = join(group, model, partial(optim.SGD, lr=rate), ASYNCHRONOUS)
    mine = range(group.rank - 1, UPDATES, group.size - 1) if group.rank else []
    train(role, lambda model, b: backward(model, b, 0.001), mine)
    if isinstance(role, Server):
        return float(np.mean(role.staleness())), float(nn.cross_entropy(model(images), labels))


final = {W: [clusters[W + 1].run(learned, rate)[0] for rate in RATES] for W in CROWDS}
for W, row in final.items():
    losses = ", ".join(f"{loss:.2f}" for _, loss in row)
    print(f"{W} workers, mean staleness {np.mean([d for d, _ in row]):.1f}: loss {losses}")
    assert all(d <= W - 1 for d, _ in row)
print("       at learning rates", ", ".join(map(str, RATES)))
assert final[8][0][1] < 1.2 * final[1][0][1], "a small rate forgives staleness"
assert final[8][2][1] > 1.3 * final[1][2][1], "a large one does not"


# %%
def draw(plt):
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(12, 4.2))
    figure.suptitle("Servers: nobody waits, gradients are stale, and all bytes pass one place")
    for (name, color), shift in zip(
        (("Downpour", figures.EMPHASIS), ("SSP, s = 3", figures.FORWARD)), (-0.2, 0.2), strict=True
    ):
        counts = histograms[name]
        left.bar(np.arange(len(counts)) + shift, counts, 0.4, color=color, label=name)
    left.set(title="One worker of four is 5 times slower", xlabel="staleness, updates")
    left.set_ylabel("gradients")
    left.legend()

    colors = [figures.EMPHASIS, figures.BACKWARD, figures.UPDATE]
    for (name, row), color in zip(loads.items(), colors, strict=True):
        middle.plot(CROWDS, row, "o-", color=color)
        middle.text(8.2, row[-1], name, color=color, va="center")
    middle.set(title="Load of the busiest rank per clock", xlabel="workers", ylabel="bytes / P")
    middle.set(xticks=CROWDS, xlim=(0.5, 11), ylim=(0, 17))
    middle.spines["bottom"].set_bounds(0.5, 8)

    colors = [figures.INK, figures.UPDATE, figures.BACKWARD, figures.EMPHASIS]
    for (W, row), color, marker in zip(final.items(), colors, "os^D", strict=True):
        label = f"{W} worker{'s' * (W > 1)}, mean {np.mean([d for d, _ in row]):.1f}"
        right.plot(RATES, [loss for _, loss in row], marker=marker, color=color, label=label)
    right.set(title=f"Downpour, loss after {UPDATES} updates", xlabel="learning rate")
    right.set(xscale="log", ylim=(0, 4.2))
    right.set_xticks(RATES, [f"{rate:g}" for rate in RATES])
    right.minorticks_off()
    right.legend(title="staleness", loc="upper left", fontsize=9, title_fontsize=9)
    return figure


figures.save(draw, "04_parameter_server")

# %% [markdown]
# ## Why did this break?
#
# Somebody makes the server faster: a worker's push is applied to the first half of `w` at once, and
# to the second half when the next push comes. Every gradient is applied once, everywhere, in order.
# The loss falls as before. Why is the replay off?


# %%
def serve_in_halves(group, w, lr):
    """As `serve`, but the second half of an update waits for the next one."""
    version, log, working, rest = 0, [], set(range(1, group.size)), 0.0
    first, second = np.split(w, 2)  # views
    while working:
        worker, (kind, batch, read) = group.recv_any(sorted(working))
        if kind == PULL:
            group.send(np.append(w, version), worker, tag=1)
        elif kind == PUSH:
            second -= rest
            step, rest = np.split(lr * group.recv(worker, tag=1), 2)
            first -= step
            log.append([Push(worker, (int(batch),), (int(read),))])
            version += 1
        else:
            working.discard(worker)
    second -= rest
    return w, log


weights, log = clusters[5].run(ours, serve_in_halves)[0]
want = clusters[5].run(oracle, [log], 5, ASYNCHRONOUS)[0]
print(f"in halves: the replay is off by up to {np.abs(weights - want).max():.1e}")
assert not np.array_equal(weights, want)

# %% [markdown]
# A *torn read*: who pulls between the halves gets weights of no version. (Threads that share memory
# get there by themselves.) The log lies; a mixture as such is no crime. Two servers give one too,
# since each slice has updates of its own, but they also log a version each. Tell the replay that
# the second half was one version older, and it finds every bit:

# %%
older = [[Push(p.worker, p.batches, (max(0, p.versions[0] - 1),))] for (p,) in log]
truth = clusters[5].run(oracle, [log, older], 5, Plan(servers=2, staleness=None))[0]
assert np.array_equal(weights, truth)
print("with the versions of both halves: the same bits")

# %% [markdown]
# ## Exercises
#
# **1. The bound.** May a worker begin clock `c`? `clocks` are the minibatches that each worker has
# done, its own among them. *Hint:* the slowest decides.


# %%
def may_begin(c, clocks, s):
    raise NotImplementedError  # your line here


# %% [markdown]
# **2. The delayed buffer.** `gradients` come one after the other; `in_time[n]` says whether the
# server took what was offered after the n-th. Return the list of what travels, and at the end,
# always, what is left, if there is any.


# %%
def delayed(gradients, in_time):
    raise NotImplementedError  # your lines here


# %% [markdown]
# **3. A sparse push.** Return the numbers of the rows of `gradient[V, C]` that are not all zeros,
# and these rows. *Hint:* `(gradient != 0).any(axis=1)`; a sum of a row may be zero by chance.


# %%
def touched_rows(gradient):
    raise NotImplementedError  # your lines here


# %% [markdown]
# The checks, and tempting answers that must not pass.


# %%
def check(exercise, attempt):
    """Say "solved", "not solved yet", or what is wrong."""
    try:
        return exercise(attempt) or "solved"
    except NotImplementedError:
        return "not solved yet"


def bound(attempt):
    for s, *clocks in product(range(3), range(5), range(5), range(5)):
        for c in clocks:
            if bool(attempt(c, clocks, s)) != all(c - s <= other for other in clocks):
                return f"wrong: may_begin({c}, {clocks}, {s}) is {attempt(c, clocks, s)}"


def buffer(attempt):
    for in_time in product((True, False), repeat=5):
        sent = [float(x) for x in attempt([np.array(10.0**n) for n in range(5)], in_time)]
        want, ends = [], [n + 1 for n in range(5) if in_time[n] or n == 4]
        for start, stop in zip([0, *ends], ends, strict=False):
            want.append(sum(10.0**n for n in range(start, stop)))
        if sent != want:
            return f"wrong: {in_time} sends {sent}, not {want}"


def rows(attempt):
    gradient = np.zeros((6, 2))
    gradient[[1, 4]] = [[1.0, -1.0], [0.0, 3.0]]
    numbers, elements = attempt(gradient)
    if list(numbers) != [1, 4] or not np.array_equal(elements, gradient[[1, 4]]):
        return f"wrong: rows {list(numbers)} of a gradient whose rows 1 and 4 are not zero"


TEMPTING = [
    (bound, lambda c, clocks, s: c - max(clocks) <= s),
    (bound, lambda c, clocks, s: c - min(clocks) <= s + 1),
    (
        buffer,
        lambda gradients, in_time: [g for g, on in zip(gradients, in_time, strict=True) if on],
    ),
    (rows, lambda g: (np.flatnonzero(g.sum(axis=1)), g[g.sum(axis=1) != 0])),
]
for exercise, attempt in ((bound, may_begin), (buffer, delayed), (rows, touched_rows)):
    print(f"exercise, {exercise.__name__}:", check(exercise, attempt))
for exercise, attempt in TEMPTING:
    print("a tempting answer:", check(exercise, attempt))
    assert check(exercise, attempt).startswith("wrong")

# %% [markdown]
# ## What it costs, and the next problem
#
# - **Bytes meet at the servers:** `2 W P / S` per clock in and out of each. With as many servers as
#   workers that is all_reduce's load, on twice the ranks.
# - **Staleness is paid in learning rate:** nobody waits, but more workers need smaller steps.
# - **No two runs are equal.** A log and a replay make one run repeatable; debugging begins there.
# - **A server is a single point of failure,** and every worker still holds all weights while it
#   computes.
#
# Cut the servers into as many slices as there are ranks, and let every rank be both server and
# worker, in step: then nothing is kept twice and no rank is special. That is ZeRO, lesson 5.

# %%
for cluster in clusters.values():
    cluster.close()
