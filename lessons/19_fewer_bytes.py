# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
#   minidist: {lesson: 19, minutes: 35, needs: [2, 3], leads_to: [20, 21], lab: bits_and_bytes}
# ---

# %% [markdown]
# (lesson-19)=
# # 19. Fewer bytes, fewer meetings: what may be left out of the sum?
#
# **Question.** Ranks may send a part of a gradient, or meet rarely. What may they leave out, what
# must they remember, and when does it save time?
#
# You need [data parallelism](03_data_parallel.py). New words:
# [compressor](pages/glossary.md#compressor), [error feedback](pages/glossary.md#error-feedback).
# Letters: $N$ ranks; $P$ parameters; $n$ elements of $dW$, $k$ sent, $u$ owed; $h$ local steps.

# %% tags=["setup", "hide-input"]
import time

import numpy as np
from support import begin, exercise, figures

from minidist import Cluster, nn, optim
from minidist.data_parallel.compression import ErrorFeedback, Int8, Sign, TopK
from minidist.data_parallel.local_sgd import LocalSGD
from minidist.data_parallel.power_sgd import PowerSGD
from minidist.data_parallel.streaming_diloco import StreamingDiLoCo
from minidist.nn.datasets import Sampler, digits

begin()
(images, labels), N, STEPS, RATE, cluster = digits(), 4, 80, 0.3, Cluster(4)

# %% [markdown]
# ## Problem: one step waits for seven minutes
#
# Data parallelism adds up 7 billion gradients. In float32 a rank sends almost $8 P$ bytes, 56 GB.
# Between two sites with 1 Gbit/s that takes 448 seconds, in every step.
#
# ## Idea: send the largest, and owe the rest
#
# Each rank sends the $k$ largest elements and adds the others to its next gradient ([Stich et al.
# 2018](https://arxiv.org/abs/1809.07599)): what was sent is the sum of all $dW$ less the last $u$.


# %%
def top_k(group, dw, u, k):
    """Return (the sum of what all ranks send, what this rank still owes) of flat arrays."""
    v = dw + u
    places = np.argpartition(abs(v), v.size - k)[v.size - k :].astype("uint32")
    all_places, all_values = (group.all_gather(x).reshape(N, k) for x in (places, v[places]))
    total = np.zeros_like(v)  # another rank chooses other places
    for at, values in zip(all_places, all_values, strict=True):
        total[at] += values
    v[places] = 0
    return total, v


# %% [markdown]
# Is it right? With a tenth it is the [library's](../minidist/data_parallel/compression.py) `top_k`.


# %%
def compare(group):
    layer, u, same = nn.Linear(64, 10, bias=False, dtype="float64"), 0.0, []
    feedback, random = ErrorFeedback(layer, group, TopK(0.1)), np.random.default_rng(group.rank)
    for _ in range(3):
        dw = layer.weight.grad = random.standard_normal((64, 10))
        feedback.all_reduce_gradients()
        total, u = top_k(group, dw.ravel(), u, 64)
        own = layer.weight.grad, feedback.errors[layer.weight.name]
        same += [np.array_equal(total, own[0].ravel()), np.array_equal(u, own[1].ravel())]
    return same


assert np.all(cluster.run(compare))
print("with a tenth of the elements it is the library's top_k, bit for bit")

# %% [markdown]
# ## Who must remember?
#
# A rule is *unbiased* if the mean of what it sends is the gradient: 8 bits rounded at random
# (`int8`, [Alistarh et al. 2017](https://arxiv.org/abs/1610.02132)), or a random element times $n$.
# If its variance is bounded it needs no memory: errors cancel out. The largest elements, signs
# (`sign`, [Karimireddy et al. 2019](https://arxiv.org/abs/1901.09847)) and two thin matrices
# (`power_sgd`, [Vogels et al. 2019](https://arxiv.org/abs/1905.13727)) are *biased*. They need a
# memory, and each step must send at least a fixed share of what is owed, whatever the gradient is.
#
# :::{admonition} Predict before you run
# One gradient of 100 elements, 2,000 times, and one element is sent each time. Which rules come
# close to the sum: the largest, the first, a random one times 100, with memory or without?
# :::
# :::{dropdown} Where does the number come from?
# The largest, with memory: its share is 1/100 or more, so $u$ stays bounded. Without: one element
# of 100 arrives. The first: the others never do. A random one times 100: the mean is right, the
# error $\sqrt{99/2000}$ = 22 %. With memory it explodes: 100 times an element is sent, -99 owed.
# :::
#
# ## What does it cost in loss?
#
# | float32, all ranks | bytes of a step | |
# |---|---|---|
# | `top_k` | $8 N (N-1) k$ | all_gather of values and places |
# | `sign`; `int8` | $N (N-1) (n/8 + 8)$; $N (N-1) (n + 8)$ | all_gather, and a scale |
# | `power_sgd` | $8 (N-1) k$ (rows + columns) | all_reduces of two thin matrices, $k$ wide |
# | naive; `local_sgd` | $8 (N-1) n$; $8 (N-1) n / h$ | all_reduce; after $h$ steps |
# | `streaming_diloco` | $N (N-1) (n/2 + 4) / h$ | all_gather of 4 bits, beside the next steps |
#
# Compressed parts cannot be added up on the way: each of $N$ ranks sends its own to $N-1$ others.
# Local SGD ([Stich 2019](https://arxiv.org/abs/1805.09767)): the mean of weights after $h$ steps.
# DiLoCo ([Douillard et al. 2023](https://arxiv.org/abs/2311.08105)): AdamW inside, then Nesterov's
# momentum along the mean change. Streaming DiLoCo ([Douillard et al.
# 2025](https://arxiv.org/abs/2501.18512)): parts meet in turn, beside later steps; then ranks mix.
# :::{admonition} Predict before you run
# 80 steps of SGD on the same batches. How much larger is the loss with 1 % of each gradient, with
# memory and without? And with `int8`?
# :::


# %% tags=["hide-output"]
def train(group, method, remember):
    """Return a loss and the bytes sent; method: a compressor, local steps, DiLoCo's options."""
    model = nn.MLP([64, 128, 10])
    local = LocalSGD(model, group, RATE, method) if isinstance(method, int) else None
    feedback, rule = ErrorFeedback(model, group, method), optim.SGD(model.parameters(), RATE)
    if isinstance(method, dict):
        rule.lr, local = RATE * N, StreamingDiLoCo(model, group, rule, **method)  # own loss has 1/N
    for _, share in zip(range(STEPS), Sampler(1797, 128, 0, group.rank, N), strict=False):
        x, y = images[share.examples], labels[share.examples]
        nn.cross_entropy(model(x), y, share.total).backward()
        if local:
            local.step()
        else:
            feedback.all_reduce_gradients()
            rule.step()
        if not remember:
            feedback.errors.clear()
        model.zero_grad()
    if isinstance(method, dict):
        model.load_state(local.state())  # the common weights
    sent = getattr(local, "apart", group).ledger.total  # it sends in a group of its own
    return float(nn.cross_entropy(model(images), labels)), sent


METHODS = {"naive": 1, "local_sgd 40": 40, "streaming 40": {"every": 40, "fragments": 2, "tau": 4}}
METHODS |= {"int8": Int8(), "sign": Sign()}
METHODS |= {"power_sgd 1": PowerSGD(1), "top_k 1 %": TopK(0.01), "top_k 0.3 %": TopK(0.003)}
found, took = {}, {}
for name, method in METHODS.items():
    ranks = cluster.run(train, method, True)
    forgets = ranks if isinstance(method, int | dict) else cluster.run(train, method, False)
    found[name] = sum(sent for _, sent in ranks) / STEPS / 1e3, ranks[0][0], forgets[0][0]
    print("{:12} {:5.1f} kB a step, loss {:.3f}, without memory {:.3f}".format(name, *found[name]))
assert found["naive"][0] == 8 * (N - 1) * (64 * 128 + 128 + 128 * 10 + 10) / 1e3
assert found["streaming 40"][0] == N * (N - 1) * (9610 / 2 + 2 * 4) * 2 / STEPS / 1e3
assert found["top_k 1 %"][0] == 8 * N * (N - 1) * (81 + 1 + 12 + 1) / 1e3

# %% [markdown]
# ## When does it save time?
#
# :::{admonition} Predict before you run
# Four ranks of one machine sum a million gradients. Which method is fastest? And if each rank then
# waits for a link of 100 Mbit/s?
# :::


# %% tags=["hide-output"]
def seconds(group, compress):
    layer = nn.Linear(1024, 1024, bias=False)
    layer.weight.grad = np.random.default_rng(group.rank).standard_normal((1024, 1024), "float32")
    add = ErrorFeedback(layer, group, compress).all_reduce_gradients
    group.barrier()
    start, before = time.perf_counter(), group.ledger.total
    group.all_reduce(layer.weight.grad) if compress == 1 else add()
    inside = time.perf_counter() - start
    time.sleep((group.ledger.total - before) / 12.5e6)  # bytes per second
    return inside, time.perf_counter() - start


for name in ("naive", "int8", "sign", "power_sgd 1", "top_k 1 %"):
    took[name] = 1e3 * np.min([np.max(cluster.run(seconds, METHODS[name]), 0) for _ in (1, 2)], 0)
    print("{:12} {:4.0f} ms in the machine, {:4.0f} ms by the slow link".format(name, *took[name]))


# %% tags=["hide-input"]
def draw(plt):
    figure, axes = plt.subplots(1, 3, figsize=(10, 3.2), sharey=True)
    for row, name in enumerate(names := sorted(found, key=found.get)):
        sent, loss, forgets = found[name]
        axes[0].barh(row, sent, color=figures.COMMUNICATION)
        axes[1].plot(forgets, row, "x", color=figures.EMPHASIS)
        axes[1].plot(loss, row, "o", color=figures.FORWARD)
        for k, color in enumerate((figures.FORWARD, figures.COMMUNICATION) if name in took else ()):
            axes[2].barh(row + 0.2 - 0.4 * k, took[name][k], 0.36, color=color)
    axes[0].set(xscale="log", title="kB in a step", yticks=range(len(names)), yticklabels=names)
    axes[1].set(xlim=(0, None), title="loss (x: without memory)")
    axes[2].set(title="ms of a sum (pink: by a slow link)")
    return figure


figures.show(
    draw,
    "19_fewer_bytes",
    caption="Far fewer bytes at nearly one loss; fewer seconds only where the link is slow.",
    alt="With memory losses differ little. naive is fastest in the machine, slowest by the link.",
)

# %% [markdown]
# ## Exercise 1: the memory
#
# A rule is a function of an array that returns what is sent of it. Let any rule remember.


# %% tags=["exercise"]
def remembering(rule):
    """Return a function gradient -> what is sent, which remembers from call to call."""
    raise NotImplementedError  # your lines here


exercise.judge("19.1", remembering)

# %% [markdown]
# ## Exercise 2: why did this break?
#
# Somebody wrote the loop of `top_k` in one line: `total[all_places] += all_values`. With one rank
# it is right, with four some elements are wrong. Which? Write `sparse_sum`, without a loop.


# %% tags=["exercise"]
def sparse_sum(places, values, n):
    """Return the sum over ranks, [n], of values[N, k] at places[N, k]."""
    raise NotImplementedError  # your line here


exercise.judge("19.2", sparse_sum)

# %% [markdown]
# ## Exercise 3: when is it fewer?
#
# Return the largest $k$ for which `top_k` sends no more than an all_reduce of $n$ elements.


# %% tags=["exercise"]
def most(n, N, itemsize):
    """Return k, an int; a number has `itemsize` bytes, a place 4."""
    raise NotImplementedError  # your line here


exercise.judge("19.3", most)
cluster.close()

# %% [markdown]
# ## At work
#
# | here | PyTorch | Megatron-LM | DeepSpeed | JAX |
# |---|---|---|---|---|
# | `power_sgd`, `local_sgd`, `sign` | `powerSGD_hook`, `PostLocalSGDOptimizer` | | `OneBitAdam` | |
#
# **What it costs.** It is another training; $u$ is as large as the model; learning bounds $h$.
# **Next:** all strategies side by side, and [which one to choose](20_choosing.py).
