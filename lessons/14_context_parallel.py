# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
#   minidist: {lesson: 14, minutes: 25, needs: [2, 12, 13], leads_to: [15, 16, 24], lab: context}
# ---

# %% [markdown]
# (lesson-14)=
# # 14. Attention over a sequence that no rank holds
#
# **Question.** Every rank has a part of the positions, and a query needs the keys and values of all
# earlier ones. How can the output still be exact, what has to travel, and who waits?
#
# You need [send and all_gather](02_collectives.py). New words: [hop](pages/glossary.md#hop),
# [zig-zag](pages/glossary.md#zig-zag). Letters: $N$ ranks, $r$ one of them; $T$ positions; $H$
# heads of width $D$, $G$ of which read one head of K and V; $S$ bytes of Q, of all ranks together.

# %% tags=["setup", "hide-input"]
import numpy as np
from support import begin, exercise, figures

from minidist import Cluster, Tensor
from minidist.context_parallel.cuts import plain as library_plain
from minidist.context_parallel.ring_attention import ring_attention
from minidist.planning.costs.layers import ring_bytes

begin()
N, T, D = 4, 64, 8
cluster = Cluster(N)
Q, K, V = np.random.default_rng(0).standard_normal((3, T, D))
S = Q.nbytes

# %% [markdown]
# ## Problem: one example of 128 Ki positions needs 687 GB
#
# A block keeps 20 numbers for each channel of a position ([lesson 13](13_sequence_parallel.py)). In
# 32 blocks of width 4096, of 16 bits, these are 5 MB, so one example of 128 Ki positions needs 687
# GB: more than eight GPUs of 80 GB have. So the sequence is split. Only attention is a problem.
#
# ## Idea: two softmaxes can be joined
#
# A softmax over the keys of one rank needs no other key, and two join exactly, in any order:
#
# $$Z = Z_1 + Z_2 \qquad O = (Z_1 O_1 + Z_2 O_2) / Z$$ (join)
#
# So let Q stay, and let K and V go round ([Liu et al. 2023](https://arxiv.org/abs/2310.01889); [the
# library's](../minidist/context_parallel/ring_attention.py)): at hop 0 its own, and after hop
# $N - 1$ every query has met every key. The code keeps $\log Z$, because $Z$ itself overflows.


# %%
def softmax_over(q, k, v, sees):
    """Attention to these keys only: O_i, and the log of the sum of exponentials."""
    s = np.where(sees, q @ k.T / np.sqrt(D), -1e30)
    log_z = np.logaddexp.reduce(s, axis=1, keepdims=True)
    return np.exp(s - log_z) @ v, log_z


def join(o, log_z, o_i, log_z_i):
    both = np.logaddexp(log_z, log_z_i)
    return o * np.exp(log_z - both) + o_i * np.exp(log_z_i - both), both


def ring(group, cut):
    own = cut(group.rank)
    q, k, v = Q[own], K[own], V[own]
    o, log_z, pairs = 0.0, -1e30, []
    for hop in range(N):
        at = cut((group.rank - hop) % N)  # whose keys these are
        sees = own[:, None] >= at  # a query sees the keys of its own and of earlier positions
        o, log_z = join(o, log_z, *softmax_over(q, k, v, sees))
        pairs.append(sees.sum())
        if hop < N - 1:  # pass K and V on, and get the neighbour's
            group.send(np.stack([k, v]), (group.rank + 1) % N)
            k, v = group.recv((group.rank - 1) % N)
    return o, pairs, group.ledger.total


def plain(r):  # each rank holds a run of neighbours
    return np.split(np.arange(T), N)[r]


def library(group):
    qkv = Tensor(np.stack([Q, K, V])[:, None, None, plain(group.rank)])  # [3, B, H, T/N, D]
    return ring_attention(qkv, group, library_plain(T, N)).data[0, 0]


whole, _ = softmax_over(Q, K, V, np.tri(T, dtype=bool))
ours = cluster.run(ring, plain)
outputs = [o for o, _, _ in ours], cluster.run(library)
error, theirs = (abs(np.concatenate(o) - whole).max() for o in outputs)
print(f"4 ranks against one device: ours {error:.0e}, the library {theirs:.0e}")
assert max(error, theirs) < 1e-12

# %% [markdown]
# Backward needs no second softmax: with $\log Z$ of *all* keys, each block's probabilities are
# right at once. K and V go round again, and dK, dV with them: each rank adds its part.
#
# ## Who waits?
#
# ![Eight by eight blocks of queries and keys, coloured hop by hop](../figures/moving/14_zigzag.svg)
#
# :::{admonition} Predict before you run
# Rank 0 has the first quarter of the positions, rank 3 the last. A hop lasts as long as its busiest
# rank. For how much of the time do the ranks work: 100 %, 80 %, 60 % or 25 %? And if rank $r$ had
# pieces $r$ and $2 N - 1 - r$ of $2 N$, an early and a late one?
# :::


# %% tags=["hide-output"]
def zigzag(r):
    pieces = np.split(np.arange(T), 2 * N)
    return np.concatenate([pieces[r], pieces[2 * N - 1 - r]])


runs = {"plain": ours, "zig-zag": cluster.run(ring, zigzag)}
counted = {cut: np.array([n for _, n, _ in run]) for cut, run in runs.items()}  # [rank, hop]
busy = {cut: n.sum() / (N * n.max(axis=0).sum()) for cut, n in counted.items()}
print({cut: f"{share:.0%} of the time at work" for cut, share in busy.items()})


# %% tags=["hide-input"]
def draw(plt):
    figure, axes = plt.subplots(1, 2, figsize=(9, 2.4), sharex=True, layout="constrained")
    for ax, (cut, n) in zip(axes, counted.items(), strict=True):
        starts = np.cumsum([0, *n.max(axis=0)])
        for hop in range(N):
            ax.barh(range(N), n[:, hop].max(), 0.8, starts[hop], color=figures.ROW)
            ax.barh(range(N), n[:, hop], 0.8, starts[hop], color=figures.OWN, edgecolor="white")
            ax.text(starts[hop : hop + 2].mean(), -0.65, f"hop {hop}", ha="center", fontsize=8)
        ax.set(title=f"{cut}: at work {busy[cut]:.0%} of the time\n", ylim=(N - 0.5, -1))
        ax.set(xlabel="pairs", yticks=range(N), yticklabels=[f"rank {r}" for r in range(N)])
    return figure


figures.show(
    draw,
    "14_context_parallel",
    caption="Colour: a rank computes. Grey: it waits for the busiest rank of the hop.",
    alt="Four ranks over four hops: under the plain cut all but one wait, with zig-zag none does.",
)

# %% [markdown]
# :::{dropdown} Where does the number come from?
# Counted in $(T/N)^2$ pairs, the hops of the plain cut take 1/2, 1, 1 and 1, and the work is
# $N^2/2$ on $N$ ranks: $(N/2) / (N - 1/2) = 4/7$. With zig-zag each hop takes 1/2.
# :::
#
# ## What travels?
#
# | a layer, all ranks | forward | backward | what |
# |---|---|---|---|
# | `ring_attention` | $2 (N-1) S/G$ | $4 (N-1) S/G$ | K, V; then K, V, dK, dV |
# | `gathered_attention` | $2 (N-1) S/G$ | $2 (N-1) S/G$ | K, V; then dK, dV, by reduce_scatter |
# | `ulysses` | $(N-1) (2 + 2/G) S / N$ | as much | Q, K, V and O, by all_to_all |
#
# $G$ query heads share a head of keys and values: 16 in Llama 3 405B, which gathers all K and V
# first ([Dubey et al. 2024](https://arxiv.org/abs/2407.21783), section 3.3.2); here 1. Ulysses
# ([Jacobs et al. 2023](https://arxiv.org/abs/2309.14509)) gives each rank all positions of $H/N$
# heads; with fewer heads of K than ranks it sends copies. `usp`: neighbours exchange heads, and
# their groups form a ring ([Fang and Zhao 2024](https://arxiv.org/abs/2405.07719)).
#
# :::{admonition} Predict before you run
# From 4 to 8 ranks, with the same sequence: do the bytes that *one* rank sends grow, stay or
# shrink, in the ring and in Ulysses?
# :::

# %% tags=["hide-output"]
sent, formula = sum(sent for _, _, sent in ours), ring_bytes([T // N] * N, 8 * D)
assert sent == 2 * (N - 1) * S == sum(forward for forward, _ in formula)
print(f"the ring sent {sent / S:g} S = 2 (N - 1) S, in forward")
for n in (4, 8):
    print(f"{n} ranks: one sends {6 * (n - 1) / n:.2f} S, in Ulysses {8 * (n - 1) / n**2:.2f} S")

# %% [markdown]
# ## Several documents in a window
#
# A query must not see another document: all of these compute [each as if it were
# alone](../minidist/autograd/attention.py). But zig-zag balances one triangle, not three:

# %%
document = np.repeat([0, 1, 2], [40, 8, 16])  # of each position
sees = np.tri(T, dtype=bool) & (document[:, None] == document)
for cut in (plain, zigzag):
    work = [int(sees[cut(r)].sum()) for r in range(N)]
    print(f"{cut.__name__}: {np.mean(work) / max(work):.0%} of the time at work; pairs: {work}")

# %% [markdown]
# :::{admonition} Predict before you run
# Which parts of the model must know the cut: embedding, layer norm, the mask, dropout, the loss?
# :::
# :::{dropdown} Answer
# All that know *where* a position is: the embedding of positions, the mask, dropout's mask, and the
# targets of the loss. If one of them does not know the cut, another model is trained, silently.
# :::
#
# ## Exercise 1: the mean is not the join
#
# Write `join_all(parts)` for any number of parts $(O_i, \log Z_i)$. The result is `(O, log Z)` over
# all keys. Scores of 800 must not overflow.


# %% tags=["exercise"]
def join_all(parts):
    """Return (O[n, D], log Z[n, 1]); parts: [(O_i[n, D], log Z_i[n, 1]), ...]."""
    raise NotImplementedError  # your lines here


exercise.judge("14.1", join_all)

# %% [markdown]
# ## Exercise 2: why did this break?
#
# Somebody wrote Ulysses for runs of neighbours: after the all_to_all a rank joins the pieces with
# `np.concatenate(pieces, axis=-2)` and computes attention. Then the cut became zig-zag. All shapes
# agree, and most positions get a wrong output. Write `in_order(pieces, held)`, right for any cut.


# %% tags=["exercise"]
def in_order(pieces, held):
    """Return [..., T, D] in the order of the sequence.

    pieces  [array[..., T_r, D] of rank r, ...]
    held    [own, ...]: own.indices are the positions of the rows of rank r's piece
    """
    raise NotImplementedError  # your lines here


exercise.judge("14.2", in_order)

# %% [markdown]
# ## Exercise 3: when is the transfer hidden?
#
# After hop 0, a hop computes two products over the pairs that the mask leaves (a multiply-add is 2
# FLOPs). Meanwhile K and V of one rank are on their way. Write `least_positions(flops, link,
# size)`: how many positions a rank must have, under zig-zag, so that it never waits.


# %% tags=["exercise"]
def least_positions(flops, link, size):
    """Return T/N; flops and link: per second, of a rank; size: bytes of a number."""
    raise NotImplementedError  # your line here


exercise.judge("14.3", least_positions)
cluster.close()

# %% [markdown]
# ## At work
#
# | here | PyTorch | Megatron-LM | DeepSpeed | JAX |
# |---|---|---|---|---|
# | `ring`, zig-zag | `context_parallel` | `--context-parallel-size` | | `ppermute` |
# | gathered | | `--cp-comm-type all_gather` | | `all_gather` |
# | Ulysses | | `--cp-comm-type a2a` | `DistributedAttention` | `all_to_all` |
#
# **What it costs.** Parameters are on every rank, and their gradients are summed, as in [data
# parallelism](03_data_parallel.py). $N$ ranks share the work, which still grows with $T^2$.
# **Try:** [cut the triangle yourself](../minidist/observe/pages/static/attention.html).
# **Next:** every position still passes through every parameter. [Lesson 15](15_experts.py).
