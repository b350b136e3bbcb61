# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
#   minidist: {lesson: 5, minutes: 30, needs: [2, 3], leads_to: [6, 16, 18, 20], lab: data_parallel}
# ---

# %% [markdown]
# (lesson-5)=
# # 5. ZeRO: every rank keeps a different part
#
# **Question.** In data parallelism every rank keeps the same sixteen bytes per parameter. What is
# left of them if every rank keeps another part, and how many bytes more must it send?
#
# You need [reduce_scatter](02_collectives.py). New word: [shard](pages/glossary.md#shard). Letters:
# $N$ ranks; $P$ parameters, $n$ in the largest layer, $P/N$ in a shard; $m$ micro-batches.

# %% tags=["setup", "hide-input"]
import numpy as np
from support import begin, exercise, figures

from minidist import Cluster, nn, optim
from minidist.data_parallel.zero import Zero
from minidist.nn.datasets import digits
from minidist.nn.flat_parameters import FlatParameters
from minidist.planning.costs.zero import zero_bytes_held, zero_bytes_moved

begin()
clusters, (images, labels) = {N: Cluster(N) for N in (1, 2, 4)}, digits()
WIDTHS, RATE, DECAY, STEPS = [64, *[256] * 7, 10], 1e-2, 0.1, 3
sizes = [layer.flat.size for layer in nn.MLP(WIDTHS).layers]
P, n = sum(sizes), max(sizes)


def loss_of(model, step, rank=0, ranks=1):
    """Return the loss of a rank's part of 60 images, divided by 60."""
    own = np.array_split(np.arange(60 * step, 60 * (step + 1)), ranks)[rank]
    x = images[own].astype(model.parameters()[0].dtype)
    return nn.cross_entropy(model(x), labels[own], reduction_size=60)


# %% [markdown]
# ## Problem: 64 GPUs hold a model 64 times, and it does not fit
#
# A parameter takes 4 bytes in float32, its gradient 4, AdamW's two averages (moments) 8. So 7.5
# billion parameters take 120 GB, and a GPU has 80 GB. In data parallelism each of 64 GPUs holds the
# same 120 GB, and a 65th brings no room at all.
#
# ## Idea: each rank updates one shard
#
# AdamW is elementwise: a new weight needs its own gradient and its own two moments. So the rank
# that has the summed gradient of an element can update it for all, between the two halves of an
# all_reduce ([Rajbhandari et al. 2020](https://arxiv.org/abs/1910.02054), section 5.1).


# %%
def zero_1(group):
    """Train with AdamW; keep the moments of my shard only."""
    model = nn.MLP(WIDTHS, dtype="float64")
    flat = FlatParameters(model.parameters())  # one vector of all weights, one of all gradients
    own = np.array_split(np.arange(flat.size), group.size)[group.rank]
    first, second = np.zeros((2, len(own)))  # the moments
    for step in range(1, STEPS + 1):
        model.zero_grad()
        loss_of(model, step, group.rank, group.size).backward()
        flat.collect_gradients()
        g = group.reduce_scatter(flat.gradient)  # the sum over the ranks, my shard of it
        first = 0.9 * first + 0.1 * g
        second = 0.999 * second + 0.001 * g * g
        w = flat.vector[own] * (1 - RATE * DECAY)
        w -= RATE * first / (1 - 0.9**step) / (np.sqrt(second / (1 - 0.999**step)) + 1e-8)
        flat.vector[:] = group.all_gather(w)  # everybody's shard
    return model.state()


# %% [markdown]
# Is it exact? We compare it, and the [library's](../minidist/data_parallel/zero.py) `zero_1`,
# `zero_2` and `zero_3`, with one device. Stage 2 also cuts gradients: each layer's is scattered in
# backward. Stage 3 also cuts weights: each layer's are gathered in forward and again in backward.


# %%
def library(group, stage, dtype="float32", shards=None, block=None):
    """Return all weights, and the bytes that this rank holds, sends in a step, and to copies."""
    model = nn.MLP(WIDTHS, dtype=dtype)
    zero = Zero(model, group, stage, shards, block=block)
    optimizer = optim.AdamW(zero.parameters(), lr=RATE, weight_decay=DECAY)
    for step in range(1, STEPS + 1):
        zero.accumulate(loss_of(model, step, group.rank, group.size))
        zero.step(optimizer)
    sent = sum(part.ledger.total for part in zero.groups) // STEPS
    moments = sum(array.nbytes for arrays in optimizer.state for array in arrays)
    return zero.state(), zero.peak + moments, sent, zero.between.ledger.total // STEPS


model = nn.MLP(WIDTHS, dtype="float64")
optimizer = optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)
for step in range(1, STEPS + 1):
    loss_of(model, step).backward()
    optimizer.step()
    optimizer.zero_grad()
ways = {f"zero_{stage}": clusters[4].run(library, stage, "float64")[0][0] for stage in (1, 2, 3)}
want, ways["by hand"] = model.state(), clusters[4].run(zero_1)[0]
for name, got in ways.items():
    error = max(abs(got[key] - want[key]).max() for key in want)
    print(f"{name}: weights of 4 ranks are {error:.0e} from one device's")
    assert error < 1e-9

# %% [markdown]
# ## What travels, and what is held?
#
# :::{admonition} Predict before you run
# In plain data parallelism each of 4 ranks sends $2 (N-1)/N$ = 1.5 elements per parameter and step.
# How many in stages 1, 2 and 3?
# :::
# :::{admonition} Predict before you run
# Plain ranks hold 16 bytes per parameter. How many do 4 ranks hold in stages 1, 2 and 3? And is it
# 16/64 = 0.25 on 64 ranks in stage 3? (The figure shows it.)
# :::

# %% tags=["hide-output"]
measured = {(0, N): 16.0 for N in clusters}  # bytes per parameter of the last rank
for stage in (1, 2, 3):
    for N, cluster in clusters.items():
        for r, (_, held, sent, _) in enumerate(cluster.run(library, stage)):
            assert held == sum(zero_bytes_held(stage, sizes, N, r).values())
            assert sent == zero_bytes_moved(stage, sizes, 4, N, r)
        measured[stage, N] = held / P
    print(f"stage {stage} on 4 ranks: sent {sent / 4 / P:.2f} elements, held {held / P:.2f} bytes")


# %% tags=["hide-input"]
def draw(plt):
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2))
    kinds, ends = ("optimizer state", "gradients", "parameters"), np.zeros(4)
    colors = figures.UPDATE, figures.BACKWARD, figures.FORWARD
    names, ranks = ["plain", "stage 1", "stage 2", "stage 3"], 2 ** np.arange(7)
    for kind, color in zip(kinds, colors, strict=True):
        widths = [zero_bytes_held(stage, sizes, 4, 3)[kind] / P for stage in range(4)]
        left.barh(names, widths, 0.7, ends, color=color, edgecolor="white", label=kind)
        ends += widths
    left.set(title="Bytes per parameter on 4 ranks", xticks=range(0, 17, 4), ylim=(3.6, -0.6))
    left.legend(loc="lower right")
    for stage, color in enumerate((figures.INK, *colors)):
        curve = [sum(zero_bytes_held(stage, sizes, N, N - 1).values()) / P for N in ranks]
        right.semilogx(ranks, curve, base=2, color=color)
        right.plot(list(clusters), [measured[stage, N] for N in clusters], "o", color=color)
        right.text(70, curve[-1], names[stage], va="center", color=color)
    right.hlines(12 * n / P, 1, 64, color=figures.IDLE)
    right.set(title="Lines: formula, dots: measured", xlim=(0.9, 200), xlabel="ranks")
    right.set(xticks=ranks, xticklabels=ranks, yticks=range(0, 17, 4))
    return figure


figures.show(
    draw,
    "05_zero",
    caption="Each stage cuts one more kind of bytes. Grey: a gradient and two weights stay whole.",
    alt="Left: bytes per parameter on 4 ranks, less in each stage. Right: bytes against ranks.",
)

# %% [markdown]
# :::{dropdown} Where does the number come from?
# In stage 3: $16 P/N$ bytes in shards; $12 n$ whole: one layer's gradient, the weights of two.
# :::
#
# Is the network between hosts slow? Keep one [copy](../minidist/data_parallel/hierarchical_zero.py)
# per host, and sum its shards over the hosts once a step
# ([Zhang et al. 2022](https://arxiv.org/abs/2205.00119)). Or send the weights as
# [int8](../minidist/data_parallel/quantized_gather.py), rounded; the shards stay float32
# ([Wang et al. 2023](https://arxiv.org/abs/2306.10209)).

# %%
for shards, block in (4, None), (2, None), (4, 128):  # ranks 0 1 | 2 3: half a ring of 4 crosses
    rows = clusters[4].run(library, 3, "float32", shards, block)
    sent, far = (sum(row[i] for row in rows) / 16 / P for i in (2, 3))
    print(f"{shards} ranks a copy, int8 {block}: 4 x {sent:.2f} P bytes, {far or sent / 2:.2f} far")
    assert shards == 4 or (sent, far) == (3 / 2 + 1 / 2, 1 / 2)

# %% [markdown]
# (bytes-per-parameter)=
# ## Which 16, 18 or 20 bytes?
#
# In mixed precision weights and gradients have 16 bits, in which many updates would be lost
# ([lesson 18](18_mixed_precision.py)): the optimizer has float32 copies. Some also sum in float32.
#
# | Adam | weight | gradient | optimizer | sum | stage 1 | stage 2 | stage 3 |
# |---|---|---|---|---|---|---|---|
# | float32 | 4 | 4 | 8 | 16 | $8 + 8/N$ | $4 + 12/N$ | $16/N$ |
# | 16 bits: the ZeRO paper, section 3.1 | 2 | 2 | 12 | 16 | $4 + 12/N$ | $2 + 14/N$ | $16/N$ |
# | 16 bits: Megatron-LM | 2 | 4 | 12 | 18 | $6 + 12/N$ | $2 + 16/N$ | $18/N$ |
# | 16 bits: DeepSpeed | 2 | 2 + 4 | 12 | 20 | $8 + 12/N$ | $2 + 18/N$ | $20/N$ |
#
# Activations and whole layers are not counted. SGD with momentum keeps 4 bytes less than Adam.
# [Lesson 20](20_choosing.py) counts 18, and a run in [lesson 24](24_read_a_real_run.py) took 20.
#
# :::{admonition} Predict before you run
# The model of 7.5 billion parameters, 16 bytes in mixed precision, on 64 GPUs: what does each hold
# in stages 1, 2 and 3?
# :::
# :::{dropdown} Answer
# 30 + 90/64 = 31.4 GB, 15 + 105/64 = 16.6 GB, 120/64 = 1.9 GB: figure 1 of the paper.
# :::
#
# ## Exercise 1: how many GPUs?
#
# Return the least number of ranks on which the state of $P$ parameters fits into `memory` bytes
# each, or None if no number does. `each`: the bytes of a (weight, gradient, optimizer). Stage 0 is
# plain data parallelism; whole layers are not counted.


# %% tags=["exercise"]
def least_ranks(stage, P, memory, each):
    raise NotImplementedError  # your lines here


exercise.judge("05.1", least_ranks)

# %% [markdown]
# ## Exercise 2: micro-batches
#
# With $m$ micro-batches per step, which stage can wait for the last one? Return how many elements a
# rank sends per step, where $N$ divides all layers.


# %% tags=["exercise"]
def elements_sent(stage, P, N, m):
    raise NotImplementedError  # your lines here


exercise.judge("05.2", elements_sent)

# %% [markdown]
# ## Exercise 3: why did this break?
#
# Somebody clips the gradient in `zero_1`: `g *= min(1, 0.5 / np.sqrt(g @ g))`. There is no error,
# all ranks agree in every bit, and the loss falls. Yet the weights are not one device's. Return the
# sum that each rank needs in place of its `squares`, `g @ g`.


# %% tags=["exercise"]
def total(group, squares):
    raise NotImplementedError  # your line here


exercise.judge("05.3", total)
for cluster in clusters.values():
    cluster.close()

# %% [markdown]
# ## At work
#
# | here | PyTorch | Megatron-LM | DeepSpeed | JAX |
# |---|---|---|---|---|
# | `zero_1` | `ZeroRedundancyOptimizer` | `--use-distributed-optimizer` | `"stage": 1` | |
# | `zero_3` | `fully_shard`; HSDP | `--use-torch-fsdp2` | `"stage": 3`; MiCS | `NamedSharding` |
#
# **What it costs.** Stages 1 and 2 send what an all_reduce sends, stage 3 half as much again.
#
# **Try:** [ask what a mesh costs](../minidist/observe/pages/static/calculator.html).
# **Next:** a cut between layers moves no weights at all. [Lesson 6](06_layer_split.py).
