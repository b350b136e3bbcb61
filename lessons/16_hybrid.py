# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
#   minidist: {lesson: 16, minutes: 40, needs: [3, 7, 11, 14, 15], leads_to: [20, 24], lab: hybrid}
# ---

# %% [markdown]
# (lesson-16)=
# # 16. Several axes at once: data x pipeline x tensor, and two more
#
# **Question.** Examples, layers and matrices can all be split over ranks. If they are split at the
# same time, what is left to sum, and which axis belongs inside a machine?
#
# You need [data parallelism](03_data_parallel.py), [micro-batches](07_gpipe.py) and [f and
# g](11_column_and_row.py). New word: [mesh](pages/glossary.md#mesh). Letters: $d$, $p$, $t$, $c$,
# $e$ ranks of the data, pipeline, tensor, context and expert axis (in code `dp`, `pp`, ...); $L$
# layers; $m$ micro-batches; $P$ parameters; $S$ bytes of one activation of the whole batch.

# %% tags=["setup", "hide-input"]
import numpy as np
from support import begin, exercise, figures

from minidist import Cluster, Mesh, nn
from minidist.autograd.recomputation import kept_bytes
from minidist.hybrid import Hybrid
from minidist.nn.datasets import Batch, text

begin()
cluster = Cluster(8, "thread")
MESHES = (8, 1, 1), (4, 2, 1), (4, 1, 2), (2, 4, 1), (2, 2, 2), (2, 1, 4), (1, 8, 1), (1, 1, 8)
B, C, F, L, normal = 8, 6, 16, 8, np.random.default_rng(0).standard_normal
X, TARGET, W1, W2 = normal((B, C)), normal((B, C)), normal((L, C, F)) / 3, normal((L, F, C)) / 3

# %% [markdown]
# ## Problem: a model of 825 GB, ranks of 80
#
# 64 blocks of width 8192 have 52 billion parameters, of 16 bytes in training. Split matrices send
# in each layer: they end at the edge of a machine. 64 stages wait. A split batch divides nothing.
#
# ## Idea: three sums over three indices
#
# Put the ranks into a grid. Each has some examples, some layers, and some columns and rows. The
# gradients of weights are sums over examples, activations are sums over rows: different indices. So
# no sum knows of another one, and none needs a factor: the loss is divided by the whole batch.


# %%
def step(group, d, p, t):
    """Return [(layer, own columns, dW1 and dW2^T)] of this rank, for L layers Y = X + MLP(X)."""
    mesh = Mesh(group, dp=d, pp=p, tp=t)
    own = np.split(np.arange(F), t)[mesh.tp.rank]  # matrices
    layers = np.split(np.arange(L), p)[mesh.pp.rank]
    mine = np.split(np.arange(B), d)[mesh.dp.rank]  # examples
    saved, found = [], []
    x = X[mine] if mesh.pp.rank == 0 else mesh.pp.recv(mesh.pp.rank - 1)
    for layer in layers:
        a = np.maximum(x @ W1[layer][:, own], 0)
        saved.append((layer, x, a))
        x = x + mesh.tp.all_reduce(a @ W2[layer][own])  # t: in each layer
    dx = (x - TARGET[mine]) / B
    if mesh.pp.rank < p - 1:
        mesh.pp.send(x, mesh.pp.rank + 1)  # p: at each cut
        dx = mesh.pp.recv(mesh.pp.rank + 1)
    for layer, x, a in reversed(saved):
        da = dx @ W2[layer][own].T * (a > 0)
        dw = np.stack([x.T @ da, dx.T @ a])
        found.append((layer, own, mesh.dp.all_reduce(dw)))  # d: once a step
        dx = dx + mesh.tp.all_reduce(da @ W1[layer][:, own].T)  # t: in each layer
    if mesh.pp.rank > 0:
        mesh.pp.send(dx, mesh.pp.rank - 1)  # p: at each cut
    return found


with Cluster(1) as alone:
    want = {layer: dw for layer, _, dw in alone.run(step, 1, 1, 1)[0]}
for mesh in MESHES:
    for of_rank in cluster.run(step, *mesh):
        assert all(np.allclose(dw, want[layer][..., own], 1e-9) for layer, own, dw in of_rank)
print(f"{len(MESHES)} meshes of 8 ranks have the gradient of one device")

# %% [markdown]
# :::{admonition} Predict before you run
# In the mesh 2 x 2 x 2 a rank's number is 4 x (its place on d) + 2 x (on p) + (on t). With which
# ranks does rank 2 communicate, and in which sums?
# :::
# :::{dropdown} Answer
# With 3 on t, in each layer; with 0 on p, at the cut; with 6 on d, once a step. With no other rank.
# Neighbouring numbers, which sit in one machine, are neighbours on t.
# :::
#
# ## What does each axis send, hold and wait for?
#
# The library's [`hybrid`](../minidist/hybrid.py) cuts a Transformer in this way. All ranks together
# send about $8 L (t-1) S$ bytes on $t$, activations in each layer; $2 (p-1) t S$ on $p$, those at
# the cuts; and $2 (d-1)$ times the bytes of $P$ on $d$, gradients, once a step.
#
# :::{admonition} Predict before you run
# 8 ranks, 1F1B, 2 examples to a micro-batch: which mesh sends least, holds least, never waits?
# :::


# %% tags=["hide-output"]
def library(group, d, p, t):
    """Return the whole gradients, [bytes sent on d, p, t], bytes held at the peak."""
    mesh, model = Mesh(group, dp=d, pp=p, tp=t), nn.Transformer(*SIZES)
    hybrid = Hybrid(model, mesh, "1f1b", 8 // d, check_weights=False)
    (stage,), peak = hybrid.pipeline.stages, [0]
    run = stage.forward
    stage.forward = lambda i: (run(i), peak.append(kept_bytes(*stage.outputs.values())))
    hybrid.backward(Batch(inputs, targets))
    sent = [axis.ledger.total for axis in (mesh.dp, mesh.pp, mesh.tp)]
    return hybrid.gradients(), sent, sum(p.data.nbytes for p in hybrid.parameters()) + max(peak)


SIZES = text().vocab, 32, 8, 6, 16, 0, "float64"
inputs, targets = (tokens[:16] for tokens in text().windows(16))
alone, rows = nn.Transformer(*SIZES), []
nn.cross_entropy(alone(inputs), targets).backward()
P, S = sum(p.data.nbytes for p in alone.parameters()), inputs.size * 32 * 8  # bytes
want = {name: p.grad for name, p in alone.named_parameters().items()}
for d, p, t in MESHES:
    gradients, sent, held = zip(*cluster.run(library, d, p, t), strict=True)
    assert all(np.allclose(gradients[0][n], want[n], rtol=1e-6, atol=1e-12) for n in want)
    formula = 2 * (d - 1) * P, 2 * (p - 1) * t * S, 8 * 6 * (t - 1) * S
    assert np.allclose(np.sum(sent, axis=0), formula, rtol=0.09)  # the rest: embedding, head, loss
    idle = 100 * (p - 1) / (8 // d + p - 1)
    rows.append([*np.sum(sent, axis=0) / 1e6, np.sum(sent) / 1e6, max(held) / 1e6, idle])
    words = "{} x {} x {}: {:.2f} + {:.2f} + {:5.2f} = {:5.2f} MB sent, {:.2f} held, idle {:2.0f}%"
    print(words.format(d, p, t, *rows[-1]))

# %% [markdown]
# :::{dropdown} Where does the number come from?
# A block has 4 all_reduces over $t$, of $2 (t-1) S$ each. At a cut X goes forward and its gradient
# back, from each rank of $t$. Idle: $(p-1) / (m + p - 1)$. The first stage keeps $p$ micro-batches
# of $L/p$ blocks: activations do not shrink with $p$.
# :::


# %% tags=["hide-input"]
def draw(plt):
    figure, panels = plt.subplots(1, 3, figsize=(9.5, 3.6), sharey=True, width_ratios=[5, 4, 3])
    looks = [{"facecolor": figures.COMMUNICATION, "hatch": hatch} for hatch in ("///", "...", "")]
    for y, (*sent, _, held, idle) in enumerate(rows):
        parts = zip(sent, "dpt", looks, strict=True)
        figures.stack(panels[0], y, [(x, name if x > 1 else "", look) for x, name, look in parts])
        figures.stack(panels[1], y, [(held, "", {"color": figures.OWN})])
        figures.stack(panels[2], y, [(idle, "", {"color": figures.IDLE})])
    titles = "MB sent by all", "MB on the fullest rank", "% of the time idle"
    for ax, title, column in zip(panels, titles, np.transpose(rows)[3:], strict=True):
        for y, x in enumerate(column):
            ax.text(x, y, f" {x:.2g}", va="center", weight="bold" if x == column.min() else None)
        ax.set(title=title, xlim=(0, 1.2 * column.max()))
    panels[0].set_yticks(range(8), [" x ".join(map(str, mesh)) for mesh in MESHES])
    panels[0].set(ylabel="d x p x t", ylim=(7.5, -0.5))
    return figure


figures.show(
    draw,
    "16_hybrid",
    caption="Eight meshes, one gradient. Bold: the least of a column. Dots: sent on p.",
    alt="Bars for eight meshes: 1 x 8 x 1 sends least; 1 x 1 x 8 holds least, and sends most.",
)

# %% [markdown]
# ## Which mesh for 52 billion parameters?
#
# 64 ranks in machines of 8, with 300 GB/s inside, 50 outside, 156 Tflop/s and 80 GB each; 64
# examples of 2048 positions, one a micro-batch. Sums are rings; on $d$ during the last backward.
#
# :::{admonition} Predict before you run
# Which $t$ has the fastest mesh that fits? And how much slower is a mesh with $t = 16$?
# :::


# %% tags=["hide-output"]
def at_size(d, p, t):
    """Return (seconds of a step, GB of a rank)."""
    weights, m, x = 12 * 64 * 8192**2, 64 // d, 2 * 2048 * 8192  # x: bytes of X[1, T, C]
    link_t, link_p, link_d = (300e9 if n <= 8 else 50e9 for n in (t, p * t, d * p * t))
    compute = 6 * weights * 64 * 2048 / 64 / 156e12
    over_t = 8 * 64 / p * (t - 1) / t * m * x / link_t
    over_p = 2 * m * x / link_p if p > 1 else 0
    over_d = max(0, 2 * (d - 1) / d * 2 * weights / (p * t) / link_d - compute * 2 / 3 / m)
    held = 16 * weights / (p * t) + min(m, p) * 64 / p * x / 2 * (10 + 24 / t)  # lesson 13
    return compute * (m + p - 1) / m + over_t + over_p + over_d, held / 1e9


every = [(2 ** (6 - i - j), 2**i, 2**j) for i in range(7) for j in range(7 - i)]
fitting = sorted((m for m in every if at_size(*m)[1] < 80), key=lambda m: at_size(*m))
for mesh in [*fitting[:3], (8, 1, 8), (2, 2, 16), (1, 64, 1), (64, 1, 1)]:
    print("{} x {} x {}: {:4.1f} s, {:3.0f} GB".format(*mesh, *at_size(*mesh)))

# %% [markdown]
# Hence the rules ([Narayanan et al. 2021](https://arxiv.org/abs/2104.04473), section 3): $t$ inside
# a machine; $p$ across machines until the model fits; $d$ with all ranks that are left.
#
# [Positions](14_context_parallel.py) and [experts](15_experts.py) are axes, too: gradients are
# summed over $d c$ ranks, or an expert's over $d c / e$. With `zero=1` a rank updates only a part
# of what it has copies of ([ZeRO](05_zero.py)): AdamW is elementwise. Muon ([Jordan et al.
# 2024](https://kellerjordan.github.io/posts/muon/)) makes momentum of whole matrices orthogonal:
# their parts [travel to a rank](../minidist/parallel/whole_matrices.py), parts of the update back.
#
# ## Exercise 1: who are my peers?
#
# Write `peers(rank, axis, sizes)`, the ranks of this rank's group on an axis, in order. The last
# axis of `sizes`, such as {"dp": 2, "pp": 2, "tp": 2}, has neighbouring ranks.


# %% tags=["exercise"]
def peers(rank, axis, sizes):
    """Return the ranks that differ from this one on this axis alone, with itself."""
    raise NotImplementedError  # your lines here


exercise.judge("16.1", peers)

# %% [markdown]
# ## Exercise 2: why did this break?
#
# Clipping needs the sum of *all* squares. Here a rank took `sum((p.grad**2).sum() for p in
# hybrid.parameters())`. Why do copies of a parameter drift apart? Write `whole_squares`, where each
# parameter counts once. `p.shard` is None if all ranks of t have all of p;
# `hybrid.pipeline.shared.get(name)` is the group of two stages that have it, else None.


# %% tags=["exercise"]
def whole_squares(hybrid, mesh):
    """Return the sum of squares of the whole gradient, on all ranks; hybrid.named_parameters()."""
    raise NotImplementedError  # your lines here


exercise.judge("16.2", whole_squares)

# %% [markdown]
# ## Exercise 3: the same X, t times
#
# At a cut every rank of $t$ sends the same X[B, T, C]: $t S$ bytes over slow links, where $S$ would
# do. Write `move`, which all ranks of two stages call. Each may send $S/t$ over p. (Section 4.1.)


# %% tags=["exercise"]
def move(x, mesh):
    """Return x on all ranks of stage 1, None on stage 0; x is None on stage 1. t divides T."""
    raise NotImplementedError  # your lines here


exercise.judge("16.3", move)
cluster.close()

# %% [markdown]
# ## At work
#
# | here | PyTorch | Megatron-LM | DeepSpeed | JAX |
# |---|---|---|---|---|
# | `Mesh` | `init_device_mesh` | `initialize_model_parallel` | `ProcessTopology` | `make_mesh` |
#
# **What it costs.** Three sums to get right, one norm over all, and a choice before the start.
# **Next:** [which strategy when?](20_choosing.py)
