# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
#   minidist: {lesson: 2, minutes: 35, needs: [1], leads_to: [3, 5, 14], lab: collectives}
# ---

# %% [markdown]
# (lesson-2)=
# # 2. How ranks add up what they hold
#
# **Question.** Every rank has an array and needs the sum of all. Which way of sending is fastest?
#
# You need [gradients](01_autograd.py), which ranks will add up. New words:
# [rank](pages/glossary.md#rank), [all-reduce](pages/glossary.md#all-reduce),
# [latency](pages/glossary.md#latency). Letters: $N$ ranks, $r$ one of them; $S$ bytes of a rank's
# array; $\alpha$ seconds per message, $\beta$ seconds per byte.

# %% tags=["setup", "hide-input"]
import time
from math import ceil, log2

import numpy as np
from support import begin, exercise, figures
from support.links import Links

from minidist import Cluster
from minidist.comm.collectives import tree

begin()
clusters = {N: Cluster(N) for N in (2, 3, 4)}  # a process for each rank

# %% [markdown]
# ## Problem: the obvious way takes 141 seconds per step
#
# *Ranks* are processes that share nothing: they send each other arrays. Let each of 64 ranks hold a
# gradient of 14 GB, with a link of 100 Gbit/s. The obvious way is to send all to rank 0, which adds
# up and sends the sum back: $2 (N - 1) S$ bytes pass through its link, in 141 s. The others wait.
#
# ## Idea: a ring, in which all links work all the time
#
# Cut the array into $N$ chunks. Each rank sends one to the right, receives one from the left, and
# adds. After $N - 1$ steps each rank has the sum of one chunk (*reduce-scatter*), after $N - 1$
# more of all (*all-gather*). Below, `ab0` is `a0 + b0`, and `*0` is the sum of all ranks:
#
# ```text
# rank a       rank b       rank c                rank a       rank b       rank c
# a0 a1 a2     b0 b1 b2     c0 c1 c2              a0 *1 ca2    ab0 b1 *2    *0 bc1 c2
#     -- a0 -->    -- b1 -->    -- c2 --> a           -- *1 -->    -- *2 -->    -- *0 --> a
# a0 a1 ca2    ab0 b1 b2    c0 bc1 c2             *0 *1 ca2    ab0 *1 *2    *0 bc1 *2
#     -- ca2 -->   -- ab0 -->   -- bc1 --> a          -- *0 -->    -- *1 -->    -- *2 --> a
# a0 *1 ca2    ab0 b1 *2    *0 bc1 c2             *0 *1 *2     *0 *1 *2     *0 *1 *2
# ```
# ![Four ranks pass the pieces of their arrays on, hop by hop](../figures/moving/02_ring.svg)


# %%
def naive(group, x):
    """All-reduce the flat array x in place: everything through rank 0."""
    if group.rank == 0:
        for r in range(1, group.size):
            x += group.recv(r)
        for r in range(1, group.size):
            group.send(x, to=r)
    else:
        group.send(x, to=0)
        x[...] = group.recv(0)


def ring(group, x):
    """All-reduce the flat array x in place: around a ring."""
    N, r = group.size, group.rank
    cut = np.array_split(x, N)  # views, parts of x
    for step in range(N - 1):  # reduce-scatter
        group.send(cut[(r - step) % N], to=(r + 1) % N)
        cut[(r - step - 1) % N] += group.recv((r - 1) % N)
    for step in range(N - 1):  # all-gather
        group.send(cut[(r - step + 1) % N], to=(r + 1) % N)
        cut[(r - step) % N][...] = group.recv((r - 1) % N)


# %% [markdown]
# :::{admonition} Predict before you run
# Four ranks hold $S$ bytes each. How many do the busiest rank and all ranks send, in both ways?
# :::


# %% tags=["hide-output"]
def add_up(group, way, xs):
    x = xs[group.rank].copy()
    way(group, x)
    return x, group.ledger.total  # the bytes that this rank has sent


xs = np.random.default_rng(0).standard_normal((4, 120_000), np.float32)
in_turn, in_ring = (clusters[4].run(add_up, way, xs) for way in (naive, ring))
library = clusters[4].run(lambda group: group.all_reduce(xs[group.rank], algorithm="ring"))
assert all(np.allclose(x, xs.sum(axis=0), atol=1e-5) for x, _ in in_turn)
assert all(np.array_equal(x, theirs) for (x, _), theirs in zip(in_ring, library, strict=True))
sent = np.array([[nbytes for _, nbytes in way] for way in (in_turn, in_ring)]) / xs[0].nbytes
print(f"sent by ranks 0 to 3, in units of S: naive {sent[0]}, ring {sent[1]}")
assert (sent[1] == 2 * 3 / 4).all() and (sent.sum(axis=1) == 2 * 3).all(), "to the byte"

# %% [markdown]
# Both give the sum of one device, and `ring` the bits of the
# [library's](../minidist/comm/collectives.py): the same on all ranks, because each chunk is
# finished in one place and then copied. Another way adds in another order: other last bits.
#
# :::{dropdown} Where does the number come from?
# A rank sends $2 (N - 1)$ chunks of $S/N$ bytes, less than $2 S$ for any $N$. It cannot be less
# ([Patarasuk and Yuan 2009](https://doi.org/10.1016/j.jpdc.2008.09.002)): for each element $N - 1$
# messages bring the parts together and $N - 1$ tell the sum. The ring spreads them evenly.
# :::
#
# ## What does a message cost?
#
# It takes $\alpha + \beta S$ seconds: a latency, and a time per byte. Our [links](support/links.py)
# sleep for 5 ms, and 20 ns per byte. We fit a line to `naive` on two ranks, to and fro.


# %%
def race(group, way, S):
    links, x = Links(group, alpha=5e-3, beta=20e-9), np.ones(S // 4, np.float32)
    group.barrier()
    start = time.monotonic()
    way(links, x)
    return 1e3 * (time.monotonic() - start)


def measure(way, N, S):  # ms until the last rank has the sum; noise only adds to them
    return min(max(clusters[N].run(race, way, S)) for _ in range(3))


SIZES = [1_200, 300_000, 900_000, 2_400_000]
beta, alpha = np.polyfit(SIZES, [measure(naive, 2, S) / 2 for S in SIZES], 1)
print(f"alpha = {alpha:.1f} ms, beta = {1e6 * beta:.1f} ns per byte")

# %% [markdown]
# Now a prediction. A *tree* adds up pairs of ranks, then pairs of pairs, and sends the sum back.
# ([Halving and doubling](https://doi.org/10.1177/1094342005051521) has few steps *and* few bytes.)
#
# | | steps, one after the other | bytes of a step | of the busiest rank |
# |---|---|---|---|
# | naive | $2 (N-1)$ | $S$ | $(N-1) S$ |
# | tree | $2 \lceil \log_2 N \rceil$ | $S$ | $\lceil \log_2 N \rceil S$ |
# | ring | $2 (N-1)$ | $S/N$ | $2 (N-1) S/N$ |
#
# :::{admonition} Predict before you run
# Four ranks. Which way is the fastest for 1.2 KB, and for 2.4 MB? About how many ms does it take?
# :::


# %% tags=["hide-output"]
def predict(name, N, S):
    steps = 2 * ceil(log2(N)) if name == "tree" else 2 * (N - 1)
    return steps * (alpha + beta * (S / N if name == "ring" else S))


WAYS = {"naive": naive, "tree": lambda group, x: tree(group, x, np.add), "ring": ring}
cases = [(4, S) for S in SIZES] + [(N, 900_000) for N in (2, 3)]
measured = {(name, N, S): measure(way, N, S) for name, way in WAYS.items() for N, S in cases}
for case, ms in measured.items():
    print(*case, f"bytes: {ms:5.1f} ms, predicted {predict(*case):5.1f} ms")


# %% tags=["hide-input"]
def draw(plt):
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), sharey=True)
    colors, sizes = (figures.EMPHASIS, figures.INK, figures.COMMUNICATION), np.geomspace(1e3, 3e6)
    for name, color, dot in zip(WAYS, colors, "os^", strict=True):
        left.loglog(sizes, [predict(name, 4, S) for S in sizes], color=color)
        left.plot(SIZES, [measured[name, 4, S] for S in SIZES], dot, color=color)
        right.plot(range(2, 9), [predict(name, N, 900_000) for N in range(2, 9)], color=color)
        right.plot([2, 3, 4], [measured[name, N, 900_000] for N in (2, 3, 4)], dot, color=color)
        right.text(8.2, predict(name, 8, 900_000), name, color=color, va="center")
    left.set(title="Four ranks: small arrays pay for steps", xlabel="bytes S", ylabel="ms")
    right.set(title="0.9 MB: large arrays pay for bytes", xlabel="ranks N", xlim=(1.8, 9))
    left.set_yticks([20, 50, 100, 200, 400], ["20", "50", "100", "200", "400"])
    left.minorticks_off()
    return figure


figures.show(
    draw,
    "02_collectives",
    caption="Dots: measured on links that sleep. Lines: predicted from two ranks.",
    alt="For 1 KB a tree is the fastest, from 0.3 MB on the ring; dots are on the lines.",
)

# %% [markdown]
# So libraries choose by size. Here the default sends nothing: ranks of one machine share memory.
# The network between machines (*hosts*) is slower. `algorithm="hierarchical"` reduces inside each
# host, so that each rank there has the sum of a part; ranks with the same part reduce it between
# hosts; then each host gathers ([how to run on several hosts](../minidist/comm/README.md)).
#
# :::{admonition} Predict before you run
# Ranks 0 and 1 are on one host, 2 and 3 on another. How many bytes cross: in a ring, on two levels?
# :::
# :::{dropdown} Answer
# In the ring ranks 1 and 3 send $1.5 S$ each to the other host: $3 S$. On two levels two pairs of
# ranks reduce $S/2$: $2 S$. With 8 ranks on each host it is still $2 S$.
# :::
#
# ## Exercise 1: an assembly line
#
# Rank 0 has an array, every rank needs it, and each rank may send only to the next. The whole array
# takes $N - 1$ steps of $S$ bytes. Cut it into chunks, which need `N + chunks - 2` shorter steps.


# %% tags=["exercise"]
def pipelined_broadcast(group, x, chunks):
    """Fill the flat array x with rank 0's, in place, by group.send(array, to) and recv(source)."""
    raise NotImplementedError  # your lines here


exercise.judge("02.1", pipelined_broadcast)

# %% [markdown]
# ## Exercise 2: tree or ring?
#
# For which $S$ do both take the same time?


# %% tags=["exercise"]
def equal_at(N, alpha, beta):
    """Return S for N ranks; alpha: seconds per message, beta: seconds per byte."""
    raise NotImplementedError  # your line here


exercise.judge("02.2", equal_at)

# %% [markdown]
# ## Exercise 3: why did this break?
#
# minidist's `send` copies the array and returns. Others have a `send` that returns only when the
# receiver takes the array. Our ring then stops: all wait in `send`. Write an `exchange` for 2 to 4.


# %% tags=["exercise"]
def exchange(rank, send, recv):
    """Call send() once and recv() once; return what recv returned."""
    raise NotImplementedError  # your lines here


exercise.judge("02.3", exchange)
for cluster in clusters.values():
    cluster.close()

# %% [markdown]
# ## At work
#
# | here | PyTorch | Megatron-LM | DeepSpeed | JAX |
# |---|---|---|---|---|
# | `all_reduce` | `dist.all_reduce` | | `comm.all_reduce` | `psum` |
# | `reduce_scatter` | `dist.reduce_scatter_tensor` | | | `psum_scatter` |
# | `send`, `recv` | `dist.send`, `dist.recv` | | | `ppermute` |
#
# **What it costs.** Nearly $2 S$ bytes per rank, a latency per step, and the slowest rank's delay.
#
# **Try:** [step through a ring](../minidist/observe/pages/static/collectives.html).
# **Next:** what should ranks add up to train together? [Lesson 3](03_data_parallel.py).
