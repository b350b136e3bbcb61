# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
#   minidist: {lesson: 6, minutes: 25, needs: [1, 2, 5], leads_to: [7, 9, 16], lab: pipelines}
# ---

# %% [markdown]
# (lesson-6)=
# # 6. A model cut between its layers
#
# **Question.** Every rank holds some layers in a row, and they stay where they are. What crosses a
# cut, and why do 4 ranks take as long as one?
#
# You need [send and recv](02_collectives.py). New word: [stage](pages/glossary.md#stage). Letters:
# $p$ ranks, $r$ one of them; $X$, $Y$ input and output of a stage; $B$ examples of width $C$.

# %% tags=["setup", "hide-input"]
from functools import partial

import numpy as np
from support import begin, exercise, figures
from support.devices import Device, idle, length, quiet

from minidist import Cluster, Tensor, nn, optim
from minidist.events import EventLog
from minidist.nn.datasets import Batch, digits
from minidist.pipeline_parallel import Pipeline, branch_placement
from minidist.pipeline_parallel.partition import partition
from minidist.verify import equivalence

begin()
clusters, (images, labels) = {p: Cluster(p) for p in (1, 2, 4)}, digits("float64")
B, C, x, y = 100, 24, images[:100], labels[:100]
small = partial(nn.ResidualMLP, 64, C, depth=4, classes=10, dtype="float64")
big = partial(nn.ResidualMLP, 64, 256, depth=8, classes=10)

# %% [markdown]
# ## Problem: ZeRO 3 sends 45 GB per step
#
# A model of 7.5 billion parameters has 120 GB of state. [ZeRO 3](05_zero.py) holds 1.9 GB of it on
# each of 64 GPUs. But in each step a GPU gathers all weights twice and scatters all gradients: in
# 16 bits that is three times 15 GB, and 1.8 s over a link of 25 GB/s.
#
# ## Idea: weights stay, activations travel
#
# A layer needs the output of the layer before, and backward the gradient of its own output. Nothing
# else has to cross a cut. For 8 examples of 2048 positions and a width of 4096 that is 134 MB in 16
# bits, in each direction. A rank's layers are its *stage*. No graph crosses a cut: the array that
# arrives is a new leaf, and this leaf's gradient is sent back.


# %%
def split_step(group, layers, x, y):
    """Compute the gradients of this rank's layers: X -> Y, dY -> dX."""
    before, after = group.rank - 1, group.rank + 1
    first, last = group.rank == 0, after == group.size
    h = leaf = Tensor(x) if first else Tensor(group.recv(before), requires_grad=True)
    for layer in layers:
        h = layer(h)
    if last:
        nn.cross_entropy(h, y).backward()
    else:
        group.send(h.data, to=after)
        h.backward(group.recv(after))
    if not first:
        group.send(leaf.grad, to=before)


# %% [markdown]
# Is it exact? We compare a residual network with one device, and with the library's
# [`layer_split`](../minidist/pipeline_parallel/layer_split.py).


# %%
def ours(group, cut):
    layers = [small().layers[i] for i in cut[group.rank]]
    split_step(group, layers, x, y)
    return {p.name: p.grad for layer in layers for p in layer.parameters()}, group.ledger.total


model = small()
nn.cross_entropy(model(x), y).backward()
for p in (2, 4):
    parts, sent = zip(*clusters[p].run(ours, partition([1] * 6, p)), strict=True)
    got = {name: grad for part in parts for name, grad in part.items()}
    library = equivalence.gradients("layer_split", small(), x, y, size=p, micro_batches=1)
    error = max(abs(got[q.name] - q.grad).max() for q in model.parameters())
    print(f"{p} ranks: {error:.0e} from one device, {sum(sent):,} bytes sent", end="; ")
    print("the library's bits:", all(np.array_equal(got[name], library[name]) for name in got))
    assert error < 1e-12 and sum(sent) == (p - 1) * 2 * B * C * 8

# %% [markdown]
# ## What crosses a cut?
#
# :::{admonition} Predict before you run
# 2 ranks sent 38,400 bytes. What are they? What becomes of them with half the examples, with 4
# ranks, and with three times as many layers?
# :::
# :::{dropdown} Answer
# $2 B C$ numbers of 8 bytes: $Y$ there, its gradient back. So half as many; three times as many, at
# three cuts; and no more. The parameters are not in it.
# :::
#
# ## What does a rank hold?
#
# The 16 bytes per parameter of weights, gradients and AdamW's state are cut by $p$. The first layer
# is small, so we do not count layers: `partition(costs, p)` finds the stages whose most expensive
# one costs least. Here a layer costs as much as it has parameters.

# %%
counts = [sum(p.size for p in layer.parameters()) for layer in big().layers]


def held(group, cut):
    """Return the bytes of all weights, gradients and moments that I have after a step."""
    pipeline = Pipeline(big(), group, "layer_split", micro_batches=1, cut=cut)
    optimizer = optim.AdamW(pipeline.parameters(), lr=1e-3)
    pipeline.backward(Batch(x.astype("float32"), y))
    optimizer.step()
    arrays = [array for p in pipeline.parameters() for array in (p.data, p.grad)]
    return sum(array.nbytes for some in (arrays, *optimizer.state) for array in some)


memory = {}
for p, cluster in clusters.items():
    cut = partition(counts, p)
    memory[p] = cluster.run(held, cut)
    print(f"each of {p} holds", ", ".join(f"{nbytes / 1e6:.1f} MB" for nbytes in memory[p]))
    assert memory[p] == [16 * sum(counts[i] for i in part) for part in cut]

# %% [markdown]
# ## Who waits?
#
# :::{admonition} Predict before you run
# A device is a layer that sleeps: 20 ms forward and 40 ms backward for the batch. How long do four
# such layers take on 1, 2 and 4 ranks?
# :::
# :::{admonition} Predict before you run
# A siamese network ([Bromley et al.
# 1993](https://papers.nips.cc/paper/1993/hash/288cc0ff022877bd3df94bc9360b9c5d-Abstract.html)) runs
# one branch on both halves of a pair, and compares the results. The library's `siamese` has the
# branch on two ranks, and sums its gradients. With such a nap in it: how long, on 1 and 2 ranks?
# :::

# %% tags=["hide-output"]
naps = nn.Sequential([Device(f"layers.{i}", 64, 0.2e-3, 0.4e-3, "float64") for i in range(4)])
siamese = nn.Siamese([64, 16, 8], dtype="float64")
siamese.branch.append(Device("nap", 8, 0.2e-3, 0.4e-3, "float64"))


def chain(group):
    Pipeline(naps, group, "layer_split", micro_batches=1).backward(Batch(x, y))


def fork(group):
    branch_placement.forward_backward(siamese, np.stack([x, x], axis=1), y % 2, group)
    branch_placement.all_reduce_shared(siamese, group)


def timed(p, step, seconds):
    return quiet(lambda log: clusters[p].run(step, log=log), seconds)


chains = {p: timed(p, chain, 0.240) for p in clusters}
forks = {p: timed(p, fork, 0.120 / p) for p in (1, 2)}
for p, log in chains.items():
    print(f"chain on {p}: {1e3 * length(log):.0f} ms, idle {idle(log):.1%} of the time")
    assert length(log) > 0.240
print(*(f"siamese on {p}: {1e3 * length(log):.0f} ms;" for p, log in forks.items()))


# %% tags=["hide-input"]
def draw(plt):
    grid = [["chain", "memory"], ["fork", "memory"]]
    figure, axes = plt.subplot_mosaic(grid, figsize=(9, 3.6), height_ratios=(4, 2))
    branches = EventLog([e for e in forks[2].events if e.name != "join"])
    for name, log in {"chain": chains[4], "fork": branches}.items():
        figures.rank_bars(axes[name], log, 1e3, numbered=False)
        axes[name].set_xlim(0, 1.1e3 * length(chains[4]))
    axes["chain"].set_title("A chain of 4 stages: one rank works")
    axes["fork"].set(title="Two branches: both ranks work", xlabel="time (ms), measured")
    axes["fork"].legend(loc="center right")
    right, at = axes["memory"], [0, 2, 3, 5, 6, 7, 8]
    right.bar(at, np.concatenate(list(memory.values())) / 1e6, color=figures.OWN)
    right.set(title="Held after a step of AdamW", ylabel="MB per rank")
    right.set_xticks([0, 2.5, 6.5], ["1 rank", "2 ranks", "4 ranks"])
    return figure


figures.show(
    draw,
    "06_layer_split",
    caption="Memory is cut by the number of ranks, time is not. Grey: a rank waits.",
    alt="Left: of four stages in a chain one works at a time; two branches on two ranks work at "
    "once. Right: bytes per rank fall from 17 MB on 1 rank to a half and a quarter on 2 and 4.",
)

# %% [markdown]
# :::{dropdown} Where does the number come from?
# A rank begins when its neighbour has ended: $p - 1$ of $p$ ranks wait at any moment. So the idle
# share is $(p - 1)/p$, and the time is the sum of all stages, for every cut. As soon as ranks work
# at once, in [lesson 7](07_gpipe.py), the slowest stage decides. Then the costs are seconds.
# :::
#
# ## Exercise 1: the best cut in two
#
# Two stages, neither empty: how many layers has the first, if the slower stage costs least? Of
# several such cuts return the smallest number.


# %% tags=["exercise"]
def cut_in_two(costs):
    raise NotImplementedError  # your lines here


exercise.judge("06.1", cut_in_two)

# %% [markdown]
# ## Exercise 2: who waits if stages differ?
#
# Stage $r$ takes `times[r]`, forward and backward together. One batch at a time goes through. Which
# share of the ranks' time is idle?


# %% tags=["exercise"]
def idle_share(times):
    raise NotImplementedError  # your lines here


exercise.judge("06.2", idle_share)

# %% [markdown]
# ## Exercise 3: why did this break?
#
# Somebody cuts a residual layer, `y = s + second(first(s))` with `s = stem(x)`, in the middle. Rank
# 0 sends `s` and `h = first(s)`, receives the gradient of `h`, and runs `h.backward` with it. The
# loss is right, training runs, and one layer's gradients are wrong. Whose? Write a step that is
# right, with `stem` and `first` on rank 0. (To run `s.backward` once, give `first` its own leaf.)


# %% tags=["exercise"]
def inside(group, stem, first, second, head, x, y):
    raise NotImplementedError  # your lines here


exercise.judge("06.3", inside)
for cluster in clusters.values():
    cluster.close()

# %% [markdown]
# ## At work
#
# | here | PyTorch | Megatron-LM | DeepSpeed | JAX |
# |---|---|---|---|---|
# | a stage | `PipelineStage` | `--pipeline-model-parallel-size` | `PipelineModule` | |
# | `partition` | `SplitPoint` | | `partition_method` | |
#
# **What it costs.** Memory is cut by $p$, time is not: $(p - 1)/p$ of the ranks' time is idle.
#
# **Next:** while rank 1 works on one piece, rank 0 begins the next: [lesson 7](07_gpipe.py).
