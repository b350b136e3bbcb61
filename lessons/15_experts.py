# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
#   minidist: {lesson: 15, minutes: 40, needs: [2, 3], leads_to: [16, 24], lab: context}
# ---

# %% [markdown]
# (lesson-15)=
# # 15. Experts: what if only a part of the model runs?
#
# **Question.** A block has many feed-forward parts, and each position runs through few of them. The
# data decide which. What travels between ranks, what is dropped, and who waits?
#
# You need [all_to_all](02_collectives.py). New: [expert](pages/glossary.md#expert),
# [router](pages/glossary.md#router), [capacity](pages/glossary.md#capacity), [balance
# loss](pages/glossary.md#balance-loss). $N$ ranks; $E$ experts, $k$ per position of $T$; $C$ width.

# %% tags=["setup", "hide-input"]
import numpy as np
from support import begin, exercise, figures

from minidist import Cluster, Tensor, nn, optim
from minidist.expert_parallel.sharded_experts import keep_own_experts
from minidist.nn.datasets import Sampler, text
from minidist.nn.router import route
from minidist.parallel.trainer import update

begin()
N, C, E, T = 4, 32, 8, 32
cluster = Cluster(N)
mixture = nn.MixtureOfExperts(C, E, top_k=1, capacity=None, dtype="float64")
GATE, EXPERTS = mixture.gate.weight.data, mixture.experts
X = np.random.default_rng(0).standard_normal((N, T, C))

# %% [markdown]
# ## Problem: 671 billion parameters, of which a position needs 37
#
# A feed-forward part has $8 C^2$ parameters, and each position is multiplied with all of them. With
# experts there are $8 C^2 E$, and a position is multiplied with $8 C^2 k$. So
# [DeepSeek-V3](https://arxiv.org/abs/2412.19437) has 671 billion parameters and computes like a
# model of 37 billion. No rank can hold them all, as [data parallelism](03_data_parallel.py) asks.
#
# ## Idea: experts stay, rows travel
#
# A rank keeps $E/N$ experts and its own examples. A gate, a small matrix, scores the experts for
# every position. A row (one position, one of its experts) goes to the expert's rank, and its result
# comes back ([Lepikhin et al. 2020](https://arxiv.org/abs/2006.16668), section 3.3.2). All is about
# order: rows leave sorted by expert, arrive sorted by sender, and run sorted by expert.


# %%
def exchange(group, rows, sizes):
    return np.concatenate(group.all_to_all(np.split(rows, np.cumsum(sizes)[:-1])))


def dispatch(group, rows, load, run):
    """Return run(own expert, its rows), in the order of rows; load[E]: rows of each expert."""
    coming = np.array(group.all_to_all(np.split(load, N)))  # [N, E/N]: how many will come
    rows = exchange(group, rows, load.reshape(N, -1).sum(axis=1))  # by sender
    expert = np.repeat(np.tile(np.arange(E // N), N), coming.reshape(-1))  # of each row
    results = np.concatenate([run(e, rows[expert == e]) for e in range(E // N)])  # by expert
    back = results[np.argsort(np.argsort(expert, kind="stable"))]  # by sender again
    return exchange(group, back, coming.sum(axis=1))


def layer(group, x):
    """x[n, C] -> Y[n, C]: each position runs through its best expert, k = 1."""
    p, own = np.exp(x @ GATE), EXPERTS[group.rank * E // N :]
    order = np.argsort(p.argmax(axis=1), kind="stable")
    load = np.bincount(p.argmax(axis=1), minlength=E)
    y = dispatch(group, x[order], load, lambda e, rows: own[e](Tensor(rows)).data)
    return (p.max(axis=1) / p.sum(axis=1))[:, None] * y[np.argsort(order)]


# %% [markdown]
# `argsort` of `argsort` undoes a sort. Of `expert` 1 0 1 0 0, the first gives the row at each
# place, 1 3 4 0 2, the second the place of each row, 3 0 4 1 2: row 0 finds its result at place 3.
# Right? One device, and the library's strategy [`expert`](../minidist/expert_parallel/dispatch.py):


# %%
def library(group, mixture, *dispatch):
    """Return Y, and the bytes that this rank sends in forward and backward."""
    keep_own_experts(mixture, group, *dispatch)
    y = mixture(Tensor(X[[group.rank]], requires_grad=True))
    y.backward(np.ones_like(y.data))
    return y.data[0], group.ledger.total


whole = mixture(Tensor(X)).data
ours = cluster.run(lambda group: layer(group, X[group.rank]))
theirs, sent = zip(*cluster.run(library, mixture), strict=True)
print(f"off by: ours {abs(ours - whole).max():.0e}, the library {abs(theirs - whole).max():.0e}")
assert np.allclose(ours, whole, atol=1e-12) and np.allclose(theirs, whole, atol=1e-12)

# %% [markdown]
# :::{admonition} Predict before you run
# A row that leaves its rank travels there and back, and in backward again. How do these bytes grow
# from 8 to 64 experts? And those of an all_reduce of gradients, if all ranks had all experts?
# :::

# %% tags=["hide-output"]
chosen = (X @ GATE).argmax(axis=-1)  # [N, T]
away = (chosen // (E // N) != np.arange(N)[:, None]).sum()
assert sum(sent) == 4 * 8 * C * away + 8 * E * (N - 1)
print(f"{away} of {chosen.size} rows leave their rank: {sum(sent):,} bytes are sent")
print(f"an all_reduce of {E} experts: {2 * (N - 1) * 8 * 8 * C**2 * E:,} bytes")

# %% [markdown]
# :::{dropdown} Where does the number come from?
# A row has $C$ numbers and travels four times: $4 \cdot 8 C$ bytes in float64. Ranks tell each
# other how many rows will come: $8 E (N-1)$ bytes. So 64 experts cost hardly more. The all_reduce
# sends $2 (N-1)$ times $8 C^2 E$ gradients: 8 times as many. Rows grow with the positions instead.
# :::
#
# ## What is dropped?
#
# A gate prefers the experts that it has chosen before, since only those learn. So each gets a
# capacity, 1.25 times its share of an example's rows; later rows are dropped: they skip the
# expert. And a loss is added ([Fedus et al. 2021](https://arxiv.org/abs/2101.03961), equations 3 to
# 6): `balance` times $E$ times the sum over experts of (share of the choices) x (mean score).
#
# :::{admonition} Predict before you run
# A block of 8 experts learns text with $k = 2$. With next to no balance loss, what part of the
# choices falls on the most chosen expert, and what part is dropped?
# :::

# %% tags=["hide-output"]
words = text(context=T)
inputs, targets = words.windows(T)
unseen, OPTIONS = np.arange(len(inputs))[-64:], [{"balance": x} for x in (0.001, 0.01, 0.1)]
OPTIONS.append({"balance": 0.0, "bias_rate": 0.01})  # see "What is done today?"


def train(group):
    """Return the loss and the choices [64, T, k] of unseen text, with this rank's options."""
    model = nn.Transformer(words.vocab, C, 4, 1, T, experts=E, top_k=2, **OPTIONS[group.rank])
    optimizer, seen = optim.AdamW(model.parameters(), lr=5e-3), []
    for _, batch in zip(range(100), Sampler(len(inputs) - 64, 16), strict=False):
        nn.cross_entropy(model(inputs[batch.examples]), targets[batch.examples]).backward()
        update(optimizer, model)  # optimizer.step(), a step of the bias, zero_grad()
    next(nn.mixtures(model)).gather_choices = lambda chosen, _: seen.append(chosen) or chosen
    return nn.cross_entropy(model(inputs[unseen]), targets[unseen]).item(), seen[0]


losses, choices = zip(*cluster.run(train), strict=True)
for way, loss, chosen in zip(OPTIONS, losses, choices, strict=True):
    most = np.bincount(chosen.reshape(-1)).max() / chosen.size
    dropped = 1 - route(chosen, E, capacity=10).kept.mean()  # 10 = 1.25 k T / E
    print(f"most chosen {most:.0%}, dropped {dropped:2.0%}, loss {loss:.2f}: {way}")

# %% [markdown]
# ## Who waits?
#
# :::{admonition} Predict before you run
# All ranks wait for the results of the busiest one. For how much of the time do the ranks work with
# the first gate and with the third, if nothing is dropped? And with a capacity?
# :::

# %% tags=["hide-output"]
of_ranks = {}  # the rows that each rank computes
for name, i, capacity in (("crowded", 0, None), ("capacity", 0, 10), ("balanced", 2, None)):
    of_ranks[name] = route(choices[i], E, capacity).load.reshape(N, -1).sum(axis=1)
    busy = of_ranks[name].mean() / of_ranks[name].max()  # if a row takes equally long everywhere
    print(f"{name:8}: rows of the ranks {of_ranks[name]}, at work {busy:.0%} of the time")


# %% tags=["hide-input"]
def draw(plt):
    figure, panels = plt.subplots(1, 3, figsize=(9, 2.2), sharex=True, sharey=True)
    for ax, (title, rows) in zip(panels, of_ranks.items(), strict=True):
        ax.barh(range(N), rows.max(), color=figures.ROW)
        ax.barh(range(N), rows, color=figures.OWN)
        ax.set(title=f"{title}:\n{rows.sum()} rows are computed", xlabel="rows", ylim=(3.5, -0.5))
    panels[0].set_yticks(range(N), [f"rank {r}" for r in range(N)])
    return figure


figures.show(
    draw,
    "15_experts",
    caption="Blue: rows that a rank computes. Grey: it waits for the busiest rank.",
    alt="Rows on four ranks: very unequal; fewer in all with a capacity; balanced, nearly equal.",
)

# %% [markdown]
# ## What is done today?
#
# *Balance without a loss*, the last line above: after each step a crowded expert gets a lower bias
# in the choice, not in the gate's weight, by [all ranks' loads](../minidist/nn/router.py)
# ([Wang et al. 2024](https://arxiv.org/abs/2408.15664)). *No drops*: with `capacity=None` an expert
# multiplies what comes ([Gale et al. 2022](https://arxiv.org/abs/2211.15841)). *Many small
# experts*, and a shared one ([Dai et al. 2024](https://arxiv.org/abs/2401.06066)). DeepSeek-V3 has
# all this, with a tiny balance loss, and 8 of 256 experts on at most 4 hosts: a position travels
# [once to each](../minidist/expert_parallel/once_per_rank.py) (sections 2.1.2 and 3.2.2).

# %%
small = {"expert_width": C // 2, "shared": 1, "groups": N, "most_groups": 2, "dtype": "float64"}
for way in ("rows", "positions"):
    ranks = cluster.run(library, nn.MixtureOfExperts(C, 32, 8, None, **small), way)
    print(f"8 of 32 experts, on 2 ranks at most: {sum(n for _, n in ranks):,} bytes as {way}")

# %% [markdown]
# ## Exercise 1: who is dropped?
#
# Write `kept(chosen, capacity)`: which choices are within the capacity. Each example has queues of
# its own, and no position may drop an earlier one, else the model sees the future.


# %% tags=["exercise"]
def kept(chosen, capacity):
    """Return booleans [B, T, k]; chosen[B, T, k]: experts; capacity: rows of an expert."""
    raise NotImplementedError  # your lines here


exercise.judge("15.1", kept)

# %% [markdown]
# ## Exercise 2: why did this break?
#
# A program summed all gradients over `model.group` and divided by $N$. Now its loss divides by all
# targets of the batch, and experts are spread; it still divides their gradients: now too small.
# Why? (Adam hides it. [A case](https://github.com/deepspeedai/DeepSpeed/issues/6545) of too large.)


# %% tags=["exercise"]
def finish(model, experts):
    """Give each p of model.parameters() its whole p.grad; `p in experts` if it is an expert's."""
    raise NotImplementedError  # your lines here


exercise.judge("15.2", finish)

# %% [markdown]
# ## Exercise 3: which rank sends how much?
#
# Write `sends(rows, C, r)`: the bytes that rank r sends in forward and backward, in float32. Before
# the rows it tells each other rank how many will come for each expert there: 8 bytes per count.


# %% tags=["exercise"]
def sends(rows, C, r):
    """Return bytes; rows[N, E]: rows that each rank has for each expert."""
    raise NotImplementedError  # your lines here


exercise.judge("15.3", sends)
cluster.close()

# %% [markdown]
# ## At work
#
# | here | PyTorch | Megatron-LM | DeepSpeed | JAX |
# |---|---|---|---|---|
# | `dispatch` | `all_to_all_single` | `--expert-model-parallel-size` | `MoE` | `all_to_all` |
#
# **What it costs.** $E/k$ times the memory that the work needs, four exchanges, and waiting.
#
# **Try:** [watch tokens travel](../minidist/observe/pages/static/experts.html).
# **Next:** ranks have the same attention and other experts: [two axes](16_hybrid.py) of one mesh.
