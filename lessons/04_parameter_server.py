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
from support import exercise, figures

from minidist import Cluster, nn, optim
from minidist.data_parallel.parameter_server import Push, Server, ServerPlan, join, train
from minidist.datasets import digits
from minidist.nn.flat_parameters import FlatParameters
from minidist.planning.costs.collectives import all_reduce_bytes
from minidist.planning.costs.parameter_server import parameter_server_bytes
from minidist.rng import generator
from minidist.verify.replays.parameter_server import replay_server

figures.arguments()
images, labels = digits("float64")
clusters = {size: Cluster(size) for size in (2, 3, 4, 5, 9)}

# %% [markdown]
# ## Problem
#
# Four ranks work, with an all_reduce after every minibatch. A minibatch takes 2 ms, but one in five
# has a hiccup and takes 10 ms: another program, a slow disk, a hot chip. (Naps stand in for work,
# so that each rank is a device of its own on any machine.)

# %%
COUNT = 120  # minibatches, 30 for each rank
NAPS = np.where(generator(0, "hiccups").random(COUNT) < 0.2, 0.010, 0.002)


def together(group):
    group.barrier()
    start = time.perf_counter()
    for nap in NAPS[group.rank :: 4]:
        time.sleep(nap)
        group.all_reduce(np.zeros(1000))
    return time.perf_counter() - start


took, busy = max(clusters[4].run(together)), NAPS.sum() / 4
slowest = NAPS.reshape(30, 4).max(axis=1).sum()  # of each step
print(f"30 steps take {1e3 * took:.0f} ms, the slowest rank of each step {1e3 * slowest:.0f} ms of")
print(f"them; on average a rank has {1e3 * busy:.0f} ms of work")
assert took > slowest > 1.5 * busy

# %% [markdown]
# No rank is slow, and yet each rank waits for others nearly half of its time: the more ranks there
# are, the likelier is a hiccup on one of them in any step.
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
# Worker 3's gradient is for version 0, and it is applied to version 1: its *staleness* is 1.
#
# ## Math
#
# With `g_k` the gradient of worker `k`, `d` its staleness and `lr` the learning rate:
#
#     synchronous         w[t+1] = w[t] - lr sum_k g_k(w[t])                lesson 3, on a server
#     asynchronous        w[t+1] = w[t] - lr g_k(w[t - d])
#     bounded staleness   a worker begins clock c when all have done c - s
#
# By the names of the library: the first line is `parameter_server`. The second is Dean et al. (NIPS
# 2012, section 4.1), who let every worker run at its own speed: Downpour SGD, `downpour`. The third
# is Ho et al. (NIPS 2013, section 2): *stale synchronous parallel*, `ssp`. How stale is a gradient
# on average? From pull to push a worker works on one gradient. An update falls into at most one
# such interval of each *other* worker, and makes that gradient one update staler:
#
#     sum of d over all gradients <= (W - 1) times their number,     mean d <= W - 1
#
# This holds whichever worker is slow; only the distribution depends on their speeds.
#
# ## Code
#
# An asynchronous server. `recv_any` takes a message from any of several ranks, here from the lowest
# that has sent one (the library's server takes turns). The log says which gradient each update
# applied, and with which version this gradient was computed.

# %%
PULL, PUSH, DONE = range(3)
LR = 0.2
ROWS = np.resize(generator(0, "order").permutation(len(images)), (400, 32))  # minibatches


def serve(group, w):
    """Keep w[P]; return it and the log when all workers are done."""
    version, log, working = 0, [], set(range(1, group.size))
    while working:
        worker, (kind, batch, read) = group.recv_any(sorted(working))
        if kind == PULL:
            group.send(np.append(w, version), worker, tag=1)
        elif kind == PUSH:
            w -= LR * group.recv(worker, tag=1)
            log.append([Push(worker, (int(batch),), (int(read),))])
            version += 1
        else:
            working.discard(worker)
    return w, log


def work(group, model, flat, batches):
    """Pull, compute, push; flat: the model's parameters as one vector."""
    for batch in batches:
        group.send(np.array([PULL, batch, 0]), 0)
        *_, version = pulled = group.recv(0, tag=1)
        flat.vector[:] = pulled[:-1]
        backward(model, batch, NAPS[batch])
        flat.collect_gradients()
        group.send(np.array([PUSH, batch, int(version)]), 0)
        group.send(flat.gradient, 0, tag=1)
    group.send(np.array([DONE, 0, 0]), 0)


def backward(model, batch, nap=0.0):
    """Compute the gradient of a minibatch."""
    time.sleep(nap)
    for p in model.parameters():
        p.grad = None
    nn.cross_entropy(model(images[ROWS[batch]]), labels[ROWS[batch]]).backward()


def mlp():
    return nn.MLP([64, 32, 10], dtype="float64")


def share(rank, size, count=COUNT):
    """Return the minibatches of a worker; rank 0 is the server."""
    return range(rank - 1, count, size - 1) if rank else range(0)


def ours(group, serve):
    model = mlp()
    flat = FlatParameters(model.parameters())
    if group.rank == 0:
        return serve(group, flat.vector)
    work(group, model, flat, share(group.rank, group.size))


# %% [markdown]
# Is it right? Two runs differ, because ranks race. But the log alone determines the result of its
# run. The library's `replay_server` goes through the log on one rank, without messages, and
# computes every gradient with the recorded version. Not a bit may differ.

# %%
ASYNCHRONOUS = ServerPlan(staleness=None)


def oracle(group, logs, plan):
    """Return, on rank 0, the weights that the servers' logs lead to."""
    if group.rank > 0:
        return None  # ranks that only make BLAS have as many threads as in the run: the same bits
    batches = {plan.servers + w: share(1 + w, 5) for w in range(4)}
    found = replay_server(mlp(), plan, logs, batches, backward, partial(optim.SGD, lr=LR))
    return np.concatenate([array.ravel() for array in found.values()])


weights, log = clusters[5].run(ours, serve)[0]
print("updates in the order of workers:", "".join(str(push.worker) for (push,) in log[:60]), "...")
assert np.array_equal(weights, clusters[5].run(oracle, [log], ASYNCHRONOUS)[0])
print("our server, and the replay of its log: the same bits")

# %% [markdown]
# And the library's? It has *plans*: who may read when, and what makes an update. `staleness=0` is
# the synchronous server, `None` is Downpour, and `s` is the bound between them. With `quorum=q` an
# update waits for only `q` workers. The others keep their late gradients in a *delayed buffer* and
# push the sum another time; the server waits for a worker that has missed `s` updates in a row. The
# minibatches are the same as in the problem, with the same hiccups.

# %%
PLANS = {
    "synchronous": ServerPlan(),
    "SSP, s = 3": ServerPlan(staleness=3),
    "quorum 3, s = 3": ServerPlan(quorum=3, staleness=3),
    "Downpour": ASYNCHRONOUS,
}


def library(group, plan):
    """Return (weights, log, staleness of each gradient, seconds) on the server."""
    role, start = join(group, mlp(), partial(optim.SGD, lr=LR), plan), time.perf_counter()
    train(role, lambda model, b: backward(model, b, NAPS[b]), share(group.rank, group.size))
    if isinstance(role, Server):
        return role.flat.vector, role.log, role.staleness(), time.perf_counter() - start


histograms, seconds = {}, {}
print(f"{'plan':18} time  updates  staleness: mean  most")
for name, plan in PLANS.items():
    runs = [clusters[5].run(library, plan)[0] for _ in range(2)]
    seconds[name] = min(run[-1] for run in runs)
    weights, log, stale, _ = runs[0]
    assert np.array_equal(weights, clusters[5].run(oracle, [log], plan)[0]), name
    assert len(stale) == COUNT and np.mean(stale) <= 3, "every gradient once; at most W - 1"
    ms, updates = 1e3 * seconds[name], len(log)
    print(f"{name:15} {ms:4.0f} ms {updates:8} {np.mean(stale):16.2f} {max(stale):5}")
    histograms[name] = np.bincount(stale)
assert len(histograms["synchronous"]) == 1, "nothing is stale"
assert seconds["synchronous"] > slowest, "the naps alone; no program can disturb that bound"

# %% [markdown]
# All four end with the bits of their replay. The synchronous server waits for the slowest worker in
# *every* clock, SSP for one that is more than `s` clocks behind, Downpour for no worker. The less
# the servers wait, the older a gradient may get. (SSP's staleness can be above `s`, which counts
# clocks: in each clock the three other workers make three updates.) With the quorum there are a few
# updates more than 30: each takes three gradients or more, and late ones are sent together. A bound
# does not help against a worker that is *always* slow: after `s` clocks all run at its speed.
#
# ## Measurement: bytes, and the server as a bottleneck
#
# In a clock every worker takes `P` bytes from the servers and sends them `P`. All that goes through
# `S` ranks. An all_reduce moves nearly as much in sum, but every rank carries the same load.


# %%
def one_clock(group, plan):
    """Return the bytes that this rank sends in one clock."""
    role = join(group, mlp(), partial(optim.SGD, lr=LR), plan)
    train(role, backward, [0])
    return role.group.ledger.bytes["send"]


elements = sum(p.size for p in mlp().parameters())
P = 8 * elements
CROWDS = (1, 2, 4, 8)
loads = {"1 server": [], "2 servers": [], "all_reduce": []}
for W in CROWDS:
    sent = clusters[W + 1].run(one_clock, ServerPlan())
    assert sum(sent) == parameter_server_bytes(elements, 8, 1, [1] * W), "to the byte"
    loads["1 server"].append((sent[0] + sum(sent[1:])) / P)  # out of it, and into it
    assert abs(loads["1 server"][-1] / (2 * W) - 1) < 0.01, "and headers"
    loads["2 servers"].append(loads["1 server"][-1] / 2)
    loads["all_reduce"].append(2 * max(all_reduce_bytes(None, elements, 8, W)) / P)
*sent, _, _ = clusters[4].run(one_clock, ServerPlan(servers=2))  # the last two work
assert abs(sum(sent) / P - 2) < 0.01 and abs(sent[0] - sent[1]) < 16, "half of 2 P from each"
print(f"P = {P:,} bytes. In and out of the busiest rank, per clock, in units of P:")
for name, row in loads.items():
    print(f"  {name:11}" + "".join(f"{x:7.2f} ({W})" for W, x in zip(CROWDS, row, strict=True)))

# %% [markdown]
# A server's load grows with `W / S`; an all_reduce's stays below `4 P`. That is why Downpour has
# `n_fetch` and `n_push`: with 3, a worker pulls before every third minibatch only, and pushes the
# sum of three. And it is why pushes may be *sparse* (`ServerPlan(sparse=True)`): a batch of 64
# words touches 64 rows of an embedding at most, and if the optimizer skips zero gradients (SGD,
# Adagrad), the other rows need not be sent. With 4,096 words of width 8 that is
# 64 x (8 x 8 + 8) = 4,608 bytes, eight numbers and a row's place each, and not 262,144.
#
# ## Measurement: what staleness costs in learning
#
# The digits, 240 updates of 32 images, and 1, 4 or 8 workers of equal speed.

# %%
RATES, UPDATES = (0.05, 0.2, 0.8), 240


def learned(group, rate):
    """Return the mean staleness, and the loss on all digits, on the server."""
    model = mlp()
    role = join(group, model, partial(optim.SGD, lr=rate), ASYNCHRONOUS)
    mine = share(group.rank, group.size, UPDATES)
    train(role, lambda model, b: backward(model, b, 0.001), mine)
    if isinstance(role, Server):
        return float(np.mean(role.staleness())), float(nn.cross_entropy(model(images), labels))


final = {W: [clusters[W + 1].run(learned, rate)[0] for rate in RATES] for W in (1, 4, 8)}
print("loss at learning rates", ", ".join(map(str, RATES)))
for W, row in final.items():
    losses = ", ".join(f"{loss:.2f}" for _, loss in row)
    print(f"{W} workers, mean staleness {np.mean([d for d, _ in row]):.1f}: loss {losses}")
    assert all(d <= W - 1 for d, _ in row)
assert final[8][0][1] < 1.2 * final[1][0][1], "a small rate forgives staleness"
assert final[8][2][1] > 1.3 * final[1][2][1], "a large one does not"

# %% [markdown]
# The same number of gradients, each computed correctly, and yet at the large rate 8 workers have
# learnt little or nothing: ln 10 = 2.3 is the loss of guessing. The longest step that is still
# stable overshoots if its direction belongs to older weights; lesson 9 computes by how much.


# %%
def draw(plt):
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(12, 4.2))
    figure.suptitle("Servers: nobody waits, gradients are stale, and all bytes pass one place")
    for name, shift, color, hatch in (
        ("SSP, s = 3", -0.2, figures.IDLE, "///"),
        ("Downpour", 0.2, figures.EMPHASIS, None),
    ):
        look = {"color": color, "hatch": hatch, "edgecolor": figures.INK, "label": name}
        left.bar(np.arange(len(histograms[name])) + shift, histograms[name], 0.4, **look)
    left.set(title="One minibatch in five has a hiccup", xlabel="staleness, in updates")
    left.set(ylabel=f"gradients of {COUNT}", xticks=range(0, len(histograms["Downpour"]) + 1, 2))
    left.legend()

    for row, line in zip(loads.values(), ("o-", "s--", "D:"), strict=True):
        middle.plot(CROWDS, row, line, color=figures.COMMUNICATION)
    ends = {name: (row[-1], figures.INK) for name, row in loads.items()}
    figures.label_ends(middle, 8.3, ends, 0.8)
    middle.set(title="In and out of the busiest rank per clock", xlabel="workers")
    middle.set(xticks=CROWDS, xlim=(0.5, 11), ylim=(0, 17), ylabel="bytes, in units of P")
    middle.spines["bottom"].set_bounds(0.5, 8)

    for (W, row), line in zip(final.items(), ("o-", "s--", "D:"), strict=True):
        color = figures.EMPHASIS if W == 8 else figures.INK
        right.plot(RATES, [loss for _, loss in row], line, color=color)
    ends = {f"{W} worker{'s' * (W > 1)}": (row[-1][1], figures.INK) for W, row in final.items()}
    figures.label_ends(right, 0.87, ends, 0.05 * max(y for y, _ in ends.values()))
    right.set(title=f"Downpour, loss after {UPDATES} updates", xlabel="learning rate")
    right.set(xscale="log", xlim=(0.045, 2), ylabel="nats per digit")
    right.set_ylim(0, 1.15 * max(y for y, _ in ends.values()))
    right.set_xticks(RATES, [f"{rate:g}" for rate in RATES])
    right.minorticks_off()
    right.spines["bottom"].set_bounds(0.045, 0.8)
    return figure


figures.save(draw, "04_parameter_server")

# %% [markdown]
# ## Exercise 1: the bound
#
# May a worker begin clock `c`? `clocks` has the number of minibatches that each worker has done,
# including its own.
#
# *Hint:* the slowest decides.


# %%
def may_begin(c, clocks, s):
    raise NotImplementedError  # your line here


def finds_another_bound(attempt):
    for s, *clocks in product(range(3), range(5), range(5), range(5)):
        for c in clocks:
            if bool(attempt(c, clocks, s)) != all(c - s <= other for other in clocks):
                return f"may_begin({c}, {clocks}, {s}) is {attempt(c, clocks, s)}"


exercise.judge(
    1, finds_another_bound, may_begin, tempting=[lambda c, clocks, s: c - max(clocks) <= s]
)

# %% [markdown]
# ## Exercise 2: the delayed buffer
#
# `gradients` come one after the other; after the n-th the worker offers what it has not sent yet,
# and `in_time[n]` says whether the server takes it. Return the list of what is sent. What is left
# at the end, if anything, is sent too.
#
# *Hint:* keep a sum that grows while nothing is taken, and starts again when it has been sent.


# %%
def delayed(gradients, in_time):
    raise NotImplementedError  # your lines here


def finds_other_messages(attempt):
    for in_time in product((True, False), repeat=5):
        sent = [float(x) for x in attempt([np.array(10.0**n) for n in range(5)], in_time)]
        want, ends = [], [n + 1 for n in range(5) if in_time[n] or n == 4]
        for start, stop in zip([0, *ends], ends, strict=False):
            want.append(sum(10.0**n for n in range(start, stop)))
        if sent != want:
            return f"{in_time} sends {sent}, not {want}"


def forgets_the_late(gradients, in_time):
    return [g for g, taken in zip(gradients, in_time, strict=True) if taken]


exercise.judge(2, finds_other_messages, delayed, tempting=[forgets_the_late])

# %% [markdown]
# ## Exercise 3: why did this break?
#
# Somebody makes the server faster: a push is applied to the first half of `w` at once, and to the
# second half when the next push comes. Every gradient is applied once, everywhere, in order. The
# loss falls as before, but the replay of the log differs. The replay can treat the run as one of
# two servers with half of `w` each, if it knows both halves' versions. Which two versions did a
# worker read that got version `v` from this server?
#
# *Hint:* when the server answers a pull, how many updates are in the first half, how many in the
# second? (Threads that share memory without a lock get into the same state, a *torn read*.)


# %%
def serve_in_halves(group, w):
    """The same as `serve`, but the second half of an update waits for the next one."""
    version, log, working, late = 0, [], set(range(1, group.size)), 0.0
    first, second = np.split(w, 2)  # views
    while working:
        worker, (kind, batch, read) = group.recv_any(sorted(working))
        if kind == PULL:
            group.send(np.append(w, version), worker, tag=1)
        elif kind == PUSH:
            second -= late
            step, late = np.split(LR * group.recv(worker, tag=1), 2)
            first -= step
            log.append([Push(worker, (int(batch),), (int(read),))])
            version += 1
        else:
            working.discard(worker)
    second -= late
    return w, log


torn, torn_log = clusters[5].run(ours, serve_in_halves)[0]


def versions_read(v):
    """Return the versions of the first and of the second half."""
    raise NotImplementedError  # your line here


def finds_other_bits(attempt):
    if min(attempt(0)) < 0:
        return f"versions_read(0) is {attempt(0)}, and versions begin at 0"
    logs = [
        [[Push(p.worker + 1, p.batches, (attempt(*p.versions)[half],))] for (p,) in torn_log]
        for half in range(2)
    ]
    want = clusters[5].run(oracle, logs, ServerPlan(servers=2, staleness=None))[0]
    if not np.array_equal(torn, want):
        return f"the replay is off by up to {np.abs(torn - want).max():.1e}"


exercise.judge(
    3, finds_other_bits, versions_read, tempting=[lambda v: (v, v), lambda v: (v, v + 1)]
)

# %% [markdown]
# ## What it costs, and the next problem
#
# - **Bytes meet at the servers:** `2 W P / S` per clock in and out of each. With as many servers as
#   workers that is `2 P`, about half of all_reduce's load, but on twice the ranks.
# - **Staleness limits the learning rate:** no worker waits, but more workers need smaller steps.
# - **No two runs are equal.** A log and a replay make one run repeatable; debugging begins there.
# - **A server is a single point of failure,** and every worker still holds all weights while it
#   computes.
#
# Cut the servers into as many slices as there are ranks, and let every rank be both server and
# worker, in step: then nothing is kept twice and no rank is special. That is ZeRO, lesson 5,
# `05_zero.py`.

# %%
for cluster in clusters.values():
    cluster.close()
