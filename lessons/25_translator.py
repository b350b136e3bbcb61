# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
#   minidist: {lesson: 25, minutes: 45, needs: [3, 4, 6, 12, 16], leads_to: [], lab: none}
# ---

# %% [markdown]
# (lesson-25)=
# # 25. A project: which ingredient does your translator need?
#
# **Question.** Choose three ingredients of the table below. What does each change: memory, bytes,
# and how well it translates, after the same pairs or after the same time?
#
# You need [data parallelism](03_data_parallel.py), [servers](04_parameter_server.py),
# [stages](06_layer_split.py) and [split vocabularies](12_parallel_transformer.py). Words:
# [staleness](pages/glossary.md#staleness). Letters: $N$ ranks; $P$ parameters.

# %% tags=["setup", "hide-input"]
from functools import partial
from heapq import heappop, heappush

import numpy as np
from support import begin, exercise, figures
from threadpoolctl import threadpool_limits

from minidist import Cluster, Mesh, datasets, nn, no_grad, optim
from minidist.data_parallel.parameter_server import ServerPlan, join, train
from minidist.hybrid import Hybrid
from minidist.nn import generate
from minidist.nn.datasets import Batch
from minidist.training.servers import Minibatches
from minidist.training.settings import Settings

begin()
threadpool_limits(1)
B, SEEDS, pairs = 32, 4, datasets.numbers(examples=8000, held_out=200)
(inputs, targets), S = pairs.train, pairs.source_length


def translator(seed=0):
    words, T = (len(pairs.source), len(pairs.target)), pairs.target_length
    sizes = {"source_length": S, "target_length": T, "width": 32, "heads": 4, "depth": 1}
    return nn.Seq2Seq(*words, **sizes, seed=seed)


# %% [markdown]
# ## Problem: 96 GPUs, six days, and everything at once
#
# Google's translator had layers on ranks, batches over ranks and servers that nobody waited for: 96
# GPUs for six days ([Wu et al. 2016](https://arxiv.org/abs/1609.08144)). Who can tell what each of
# them bought? Ours writes numbers in words, from English to Chinese. English counts thousands,
# Chinese ten thousands, so it cannot go word by word.
#
# | ingredient | `minidist train --data numbers` | lesson |
# |---|---|---|
# | data | `--ranks 2` | [3](03_data_parallel.py) |
# | layers | `--pp 2` | [6](06_layer_split.py) |
# | vocabulary, heads, matrices | `--tp 2` | [12](12_parallel_transformer.py) |
# | a server, nobody waits | `--servers 1 --ranks 3` | [4](04_parameter_server.py) |
# | two gradients in a push | `--servers 1 --ranks 3 --push-every 2` | [4](04_parameter_server.py) |
# | pushes of touched rows | `--servers 1 --ranks 3 --sparse` | [19](19_fewer_bytes.py) |
# | the way back, too | `--reconstruction 0.5` | [He et al.](https://arxiv.org/abs/1611.00179) |
#
# The project: choose three rows, write down what you expect of memory, bytes and accuracy, run
# them, and explain each surprise in a sentence. This page does it for some of them.
#
# ## Idea: change one thing, and use a clock that is not the machine's
#
# Of two workers, one is half as fast. They take 1 and 2 units of time for 16 pairs. Either both
# wait for the slow one, or nobody waits, and gradients are of old weights.


# %%
def race(seed, waits, pushes=1, until=200, rate=3e-3):
    """Return the accuracy after 3,200 pairs, and the accuracy and the model after `until` units."""
    model, random, seen = translator(seed), np.random.default_rng(seed), 0
    optimizer = optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98))
    clock = [(2, "both")] if waits else [(1, "fast"), (2, "slow")]  # when it is done, who
    workers, turns = {who: translator(seed) for _, who in clock}, {who: 0 for _, who in clock}
    while clock:
        now, who = heappop(clock)
        worker, mine = workers[who], random.integers(0, len(inputs), B if waits else B // 2)
        nn.cross_entropy(worker(inputs[mine]), targets[mine]).backward()  # at weights of before
        seen, turns[who] = seen + len(mine), turns[who] + 1
        if turns[who] % pushes == 0:
            for p, q in zip(model.parameters(), worker.parameters(), strict=True):
                p.grad = q.grad / pushes
            optimizer.clip_global_norm(1.0)
            optimizer.lr = rate * min(1, now / 40)
            optimizer.step()
            worker.zero_grad()
        worker.load_state(model.state())
        if seen == 3200:
            first = accuracy(model)
        if (then := now + (1 if who == "fast" else 2)) <= until:
            heappush(clock, (then, who))
    return first, accuracy(model), model


def accuracy(model):
    tokens, goals = pairs.held_out
    with no_grad():
        right = model(tokens).data.argmax(axis=-1) == goals
    return right[goals != nn.IGNORED].mean()


# %% [markdown]
# ## What is held, and what travels?
#
# :::{admonition} Predict before you run
# Data, layers, vocabulary on 2 ranks, a server with 2 workers: which sends most in a step? Which
# holds fewest weights on its fullest rank? Which end with the weights of one device?
# :::


# %% tags=["hide-output"]
def hybrid(group, **axes):
    mesh = Mesh(group, **{"dp": 1, "pp": 1, "tp": 1} | axes)
    split = Hybrid(translator(), mesh, micro_batches=2 * mesh.pp.size)
    before = sum(axis.ledger.total for axis in split.groups)
    split.backward(Batch(inputs[:B], targets[:B], step=0, examples=np.arange(B)))
    split.step(optim.SGD(split.parameters(), lr=0.1))
    sent = sum(axis.ledger.total for axis in split.groups) - before
    return sent, sum(p.data.nbytes for p in split.parameters()), split.state()


def servers(group, **options):
    model, settings = translator(), Settings(steps=12, batch=B)
    plan = ServerPlan(servers=1, staleness=None, **options)
    role = join(group, model, lambda slices: optim.SGD(slices, lr=0.1), plan)
    work, before = Minibatches(inputs, targets, settings, 2), role.group.ledger.total
    train(role, work.backward, work.of(group.rank - 1) if group.rank else [])
    sent = (role.group.ledger.total - before) / settings.steps
    return sent, sum(p.data.nbytes for p in model.parameters()), None


HYBRID = {"one rank": {}, "data": {"dp": 2}, "layers": {"pp": 2}, "vocabulary": {"tp": 2}}
SERVERS, states = {"a server": {}, "two in a push": {"n_push": 2}}, {}
for name, options in (HYBRID | SERVERS).items():
    N, way = (3, servers) if name in SERVERS else (2 if options else 1, hybrid)
    with Cluster(N, "thread") as ranks:
        sent, held, (states[name], *_) = zip(*ranks.run(partial(way, **options)), strict=True)
    print(f"{name:13} {N} ranks: {sum(sent) / 1e3:5.0f} kB sent, {max(held) / 1e3:4.0f} kB held")
for name in ("data", "layers", "vocabulary"):
    assert all(np.allclose(states[name][x], w, atol=1e-6) for x, w in states["one rank"].items())

# %% [markdown]
# Those who wait have one device's weights. Layers and vocabulary buy memory; matrices send most.
#
# ## Who is right after the same pairs, and who after the same time?
#
# :::{admonition} Predict before you run
# In 200 units those who wait see 3,200 pairs. How many do those see who do not wait? Who translates
# better after 3,200 pairs, and who after 200 units?
# :::
# :::{dropdown} Where does the number come from?
# Waiting: $200/2$ steps of 32 pairs are 3,200. Not waiting: $200/1 + 200/2 = 300$ gradients of 16
# pairs are 4,800: half as many again, at weights that are up to two updates old.
# :::
#
# :::{admonition} Predict before you run
# Two gradients in one push save up to a quarter of the bytes. What do they cost?
# :::

# %% tags=["hide-output"]
RACES = {"all wait": (True, 1), "nobody waits": (False, 1), "two in a push": (False, 2)}
found, models = {}, {}
for name, (waits, pushes) in RACES.items():
    *both, models[name] = zip(*(race(k, waits, pushes) for k in range(SEEDS)), strict=True)
    found[name] = 100 * np.array(both)
    same_pairs, same_time = np.median(found[name], axis=1)
    when = f"after 3,200 pairs, {same_time:.0f} % after 200 units"
    print(f"{name:13} {same_pairs:.0f} % right {when}")
row = pairs.held_out[0][[7], :S]
for model, *_ in models.values():
    print(pairs.source.decode(row[0]), "->", pairs.target.decode(generate.translate(model, row)[0]))


# %% tags=["hide-input"]
def draw(plt):
    figure, axes = plt.subplots(figsize=(8, 2.6))
    looks = (figures.INK, -0.15, "after 3,200 pairs"), (figures.FORWARD, 0.15, "after 200 units")
    for row, both in enumerate(found.values()):
        for (color, shift, words), values in zip(looks, both, strict=True):
            axes.hlines(row + shift, min(values), max(values), color=color)
            axes.plot(values, [row + shift] * SEEDS, "o", color=color, ms=5)
            axes.text(max(values) + 0.5, row + shift, words, color=color, va="center", fontsize=9)
    axes.set_yticks(range(len(found)), found)
    axes.set(xlabel="% of the words of 200 new numbers that are right", ylim=(2.5, -0.5))
    return figure


figures.show(
    draw,
    "25_translator",
    caption="A dot is a run from one of four seeds; a line is their range.",
    alt="After the same pairs those who wait are best, after the same time those who do not; two "
    "gradients in a push are worst in both.",
)

# %% [markdown]
# ## Exercise 1: predict two rows
#
# Write `bytes_sent(P, N)`: what all ranks together send in a step, for data parallelism on $N$
# ranks, and for a server with $N$ workers that pull and push once a step. Numbers have 4 bytes.


# %% tags=["exercise"]
def bytes_sent(P, N):
    """Return (bytes of data parallelism, bytes of the server and its workers)."""
    raise NotImplementedError  # your lines here


exercise.judge("25.1", bytes_sent)

# %% [markdown]
# ## Exercise 2: why did this break?
#
# The loss fell to 0.00 in a few steps, and not one translation was right. The decoder had read the
# targets themselves. Write `decoder_inputs(targets)`: what it has to read, such that column t is
# predicted from what is known by then. `targets` has words, END, and IGNORED behind it.


# %% tags=["exercise"]
def decoder_inputs(targets):
    """Return [B, T]: BEGIN, then words, then PAD (minidist.nn.embedding; nn.IGNORED)."""
    raise NotImplementedError  # your lines here


exercise.judge("25.2", decoder_inputs)

# %% [markdown]
# ## Exercise 3: one step of a beam
#
# The likeliest next word may lead nowhere. A beam keeps the `keep` best beginnings. Write `step`:
# from the log-probabilities of some beginnings, and of each next word after each of them, return
# `(beginning, word, score)` of the best, three sequences, best first.


# %% tags=["exercise"]
def step(scores, following, keep):
    """scores[i] of beginning i; following[i, V] of the next word."""
    raise NotImplementedError  # your lines here


exercise.judge("25.3", step)

# %% [markdown]
# ## At work
#
# | here | PyTorch | Megatron-LM | DeepSpeed | JAX |
# |---|---|---|---|---|
# | `Hybrid` | `parallelize_module` | `--tensor-model-parallel-size` | `PipelineModule` | `jit` |
#
# **What it costs.** A slow rank made waiting expensive; change `rate` and run again. For $T$ words,
# `translate` computes $T$ positions, not $T (T+1)/2$: [a cache](../minidist/nn/key_value_cache.py)
# keeps $2 (S + T) C$ numbers per block, keys and values of the source and of what is written.
#
# **Next:** take your own model, or load [a published Llama](../minidist/checkpoint/llama.py), and
# ask [lesson 20](20_choosing.py) what it needs.
