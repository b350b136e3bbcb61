# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
#   minidist: {lesson: 4, minutes: 25, needs: [3], leads_to: [5, 9, 19], lab: none}
# ---

# %% [markdown]
# (lesson-4)=
# # 4. Parameter servers: nobody waits, but gradients are old
#
# **Question.** Ranks that meet in every step wait for the slowest one. If they do not meet, their
# gradients are for old weights. How old may a gradient be, and who still waits?
#
# You need [data parallelism](03_data_parallel.py). New words: [clock](pages/glossary.md#clock),
# [staleness](pages/glossary.md#staleness). Letters: $N$ ranks; $W$ the weights, $dW$ their
# gradient, $S$ the bytes of each; $\eta$ the learning rate.

# %% tags=["setup", "hide-input"]
import time

import numpy as np
from support import begin, exercise, figures

from minidist import Cluster, nn, optim
from minidist.data_parallel.parameter_server import ServerPlan, join, train
from minidist.nn.datasets import digits
from minidist.nn.flat_parameters import FlatParameters

begin()
N, CLOCKS, RATE = 4, 30, 0.2
cluster, (images, labels) = Cluster(N), digits("float64")
rows = np.random.default_rng(0).integers(len(images), size=(240, 32))  # of each minibatch
naps = np.where(np.random.default_rng(1).random((CLOCKS, N)) < 0.2, 0.050, 0.010)
model = nn.MLP([64, 32, 10], dtype="float64")
flat = FlatParameters(model.parameters())  # all weights as a vector, all gradients as another one
first = flat.vector.copy()


def gradient_of(batch, w):
    flat.vector[:] = w
    for p in model.parameters():
        p.grad = None
    nn.cross_entropy(model(images[rows[batch]]), labels[rows[batch]]).backward()
    flat.collect_gradients()
    return flat.gradient


# %% [markdown]
# ## Problem: no rank is slow, and ranks wait for 64 % of the time
#
# A minibatch takes 10 ms, but one in five takes 50 ms: another program, a slow disk. The mean is 18
# ms. With an all_reduce in every step, all wait for the slowest: of 100 ranks always one has a
# hiccup, so a step takes 50 ms, and 32 of them are waiting.
#
# ## Idea: one rank keeps the weights
#
# A worker *pulls* the weights, computes a gradient, and *pushes* it, which also asks for the next
# pull. The server, rank 0, applies each push at once. A worker's *clock* counts its minibatches.
# The *bound* says how many clocks it may be ahead of the slowest worker when it pulls. With bound 0
# all work in step. Without a bound nobody waits.


# %%
def serve(group, bound):
    """Keep w; return it, and a row per update: [seconds, minibatch, version, lead]."""
    w, done, pulled, log = first.copy(), dict.fromkeys(range(1, N), 0), {}, []
    start = time.perf_counter()
    while min(done.values()) < CLOCKS:
        for k in done.keys() - pulled.keys():
            lead = done[k] - min(done.values())  # clocks of the slowest that w does not have yet
            if lead <= bound and done[k] < CLOCKS:
                group.send(w, k)
                pulled[k] = len(log), lead  # the version of w is the number of its updates
        worker, gradient = group.recv_any(sorted(pulled))
        w -= RATE * gradient
        log.append((time.perf_counter() - start, N * done[worker] + worker, *pulled.pop(worker)))
        done[worker] += 1
    return w, np.array(log), group.ledger.total


def work(group, bound):
    group.barrier()
    if group.rank == 0:
        return serve(group, bound)
    for batch in range(group.rank, N * CLOCKS, N):
        gradient = gradient_of(batch, group.recv(0))  # pull
        time.sleep(naps.flat[batch])
        group.send(gradient, 0)  # push


# %% [markdown]
# Is it exact? By the log, update $i$ used a gradient for version $j$ of the weights:
#
# $$W_{i+1} = W_i - \eta \, dW(W_j)$$ (stale)
#
# Its *staleness* was $i - j$. One device can replay this, to the bit. With bound 0 a clock's
# gradients are for one version, as in the [library's
# server](../minidist/data_parallel/parameter_server.py), which adds them up first.


# %%
def one_device(group, batches, versions_read, rate=RATE):
    versions = [first]
    for batch, j in zip(batches, versions_read, strict=True):
        versions.append(versions[-1] - rate * gradient_of(batch, versions[j]))
    return versions[-1]


def library(group):
    def backward(model, batch):
        nn.cross_entropy(model(images[rows[batch]]), labels[rows[batch]]).backward()

    role = join(group, model, lambda own: optim.SGD(own, lr=RATE), ServerPlan(staleness=0))
    return train(role, backward, range(group.rank, N * CLOCKS, N)).flat.vector


runs = {bound: cluster.run(work, bound)[0] for bound in (0, 3, np.inf)}
for bound, (w, log, sent) in runs.items():
    again = cluster.run(one_device, *log[:, 1:3].T.astype(int))[0]
    print(f"bound {bound}: {abs(w - again).max()} from the replay; sent {sent // w.nbytes} S")
    assert np.array_equal(w, again) and sent == len(log) * w.nbytes and log[:, 3].max() <= bound
print(f"bound 0: {abs(runs[0][0] - cluster.run(library)[0]).max():.0e} from the library's server")

# %% [markdown]
# ## Who waits, and how old is a gradient?
#
# :::{admonition} Predict before you run
# Of the time that bound 0 takes beyond no bound, bound 3 wins back: a fifth, half, nearly all?
# :::

# %% tags=["hide-output"]
print(f"naps of the slowest worker of each clock: {1e3 * naps[:, 1:].max(axis=1).sum():.0f} ms")
for bound, (_, log, _) in runs.items():
    ms, lead, age = 1e3 * log[-1, 0], log[:, 3].max(), np.arange(len(log)) - log[:, 2]
    print(f"bound {bound}: {ms:.0f} ms; a gradient is up to {lead:.0f} clocks old,", end=" ")
    print(f"or {age.max():.0f} updates, and {age.mean():.1f} updates on average")


# %% tags=["hide-input"]
def draw(plt):
    figure, axes = plt.subplots(1, 3, figsize=(9, 2.7), sharex=True, sharey=True)
    for ax, (bound, (_, log, _)) in zip(axes, runs.items(), strict=True):
        times, name = 1e3 * log[:, 0], f"bound {bound}".replace("bound inf", "no bound")
        ax.axvspan(0, times[-1], color=figures.ROW)
        ax.plot(times, log[:, 3], "o", color=figures.FORWARD, markersize=4)
        if bound < np.inf:
            ax.plot([0, times[-1]], [bound + 0.4] * 2, color=figures.EMPHASIS)
        ax.set(title=f"{name}: {times[-1]:.0f} ms", xlabel="time (ms)", xlim=(0, None))
    axes[0].set(ylabel="staleness (clocks)", ylim=(-0.5, None))
    axes[0].text(5, 0.7, "the bound", color=figures.EMPHASIS)
    return figure


figures.show(
    draw,
    "04_parameter_server",
    caption="A dot is a gradient, when it is applied. The less workers wait, the older it is.",
    alt="Gradients by time and staleness. Bound 0: all at zero, the longest run. Bound 3: none "
    "above three. No bound: they reach higher. Both runs are shorter.",
)

# %% [markdown]
# :::{dropdown} Where does the number come from?
# An update makes at most one gradient of each other worker older: the one that it is
# computing. So the mean staleness is at most $N - 2$, without a bound too. The bound limits the
# largest: another worker may be 3 clocks behind at the pull, and begin a clock while it is 3 ahead.
# It does up to 7 updates in between.
# :::
#
# If one worker is *always* slow, soon all others are 3 clocks ahead of it, and go at its speed. In
# the library, bound 0 is `parameter_server`, a bound `ssp` ([Ho et al.
# 2013](https://proceedings.neurips.cc/paper/2013/hash/b7bb35b9c6ca2aee2df08cf09d7016c2-Abstract.html),
# section 2), and no bound `downpour` ([Dean et al. 2012, section
# 4.1](https://proceedings.neurips.cc/paper/2012/hash/6aca97005c68f1206823815f66102863-Abstract.html)).
#
# ## What travels?
#
# :::{admonition} Predict before you run
# In a clock every worker pulls $S$ bytes and pushes $S$. How many go in and out of the server of 63
# workers? And in and out of one of 64 ranks that all_reduce their gradients?
# :::
# :::{dropdown} Answer
# $2 (N-1) S$ = 126 S (above, 30 clocks of 3 workers sent 90 S one way); in an all_reduce $4 (N-1)
# S / N$, less than 4 S. More servers share the load: each keeps a slice of $W$. And a push may be
# *sparse*: 64 words touch at most 64 rows of an embedding.
# :::
#
# ## What does an old gradient cost?
#
# :::{admonition} Predict before you run
# 240 updates with gradients that are 0, 3 or 7 updates old, as 1, 4 or 8 equal workers make them.
# At which learning rates does age do harm: 0.05, 0.2, 0.8?
# :::

# %% tags=["hide-output"]
for age in (0, 3, 7):
    for rate in (0.05, 0.2, 0.8):
        flat.vector[:] = one_device(None, range(240), [max(i - age, 0) for i in range(240)], rate)
        loss = nn.cross_entropy(model(images), labels)
        print(f"{age} updates old, rate {rate}: loss {loss.item():.2f}")

# %% [markdown]
# Each gradient is right, but for weights that are no longer there. A short step forgives this, a
# long one ends as bad as a guess, at $\log 10$ = 2.3: see [lesson 9](09_pipedream.py).
#
# ## Exercise 1: the bound
#
# A worker has done `clock` minibatches; `clocks` has those of all workers. May it begin the next?


# %% tags=["exercise"]
def may_begin(clock, clocks, bound):
    raise NotImplementedError  # your line here


exercise.judge("04.1", may_begin)

# %% [markdown]
# ## Exercise 2: gradients that come too late
#
# The library's `quorum=2` makes an update of two pushes, and declines later ones. Then a worker
# keeps the gradient, goes on, and offers the sum after its next minibatch; `in_time` says which
# offers the server takes. What is left at the end is sent in any case. Return all that is sent.


# %% tags=["exercise"]
def sent_by(gradients, in_time):
    raise NotImplementedError  # your lines here


exercise.judge("04.2", sent_by)

# %% [markdown]
# ## Exercise 3: why did this break?
#
# Somebody makes the server faster: a push changes the first half of `w` at once, and the second
# half when the next push comes. Every gradient is applied once, everywhere, in order. But the
# replay of the log differs. It is right if it treats the halves as two servers. Which version of
# each half did a worker read that pulled after `v` pushes? Return two numbers.


# %% tags=["exercise"]
def versions_read(v):
    raise NotImplementedError  # your line here


exercise.judge("04.3", versions_read)
cluster.close()

# %% [markdown]
# ## At work
#
# | here | PyTorch | Megatron-LM | DeepSpeed | JAX |
# |---|---|---|---|---|
# | `serve`, `work` | `torch.distributed.rpc` | | | |
#
# **What it costs.** All bytes meet at the servers, old gradients need smaller steps, no two runs
# are equal, and every worker still keeps all weights.
#
# **Next:** let every rank be both, the server of one slice and a worker: [lesson 5](05_zero.py).
