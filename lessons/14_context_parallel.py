# %% [markdown]
# # 14. Context parallelism: how does attention see a sequence that no rank holds?
#
# One long example cannot be split by data parallelism, and tensor parallelism cannot use more ranks
# than there are heads. Here every rank holds the whole model and a part of the *positions*. Every
# layer works on each position alone, except attention: there each query needs the keys and values
# of all earlier positions. Two methods bring them together: ring attention
# ([Liu, Zaharia, Abbeel 2023](https://arxiv.org/abs/2310.01889)) and Ulysses
# ([Jacobs et al. 2023](https://arxiv.org/abs/2309.14509)). The library's versions are in
# `minidist/context_parallel/`.
#
# *Sequence parallelism* means three things in papers. The first is the split between the matrices
# of tensor parallelism, as in lesson 13 ([Korthikanti et al. 2022](https://arxiv.org/abs/2205.05198)):
# its attention still sees all T positions. The second is Ulysses, and the third any split of the
# sequence over ranks, such as the ring. The last two are now called context parallelism.
#
# Letters: `N` ranks, `r` one of them; `B` examples of `T` positions, `H` heads of width `D`,
# `C = H D`; `e` bytes a number; `S = B T C e`, the bytes of Q, or of K, V or O, on all ranks
# together.

# %%
import tracemalloc

import numpy as np
from support import exercise, figures

from minidist import Cluster, Tensor, nn
from minidist.autograd.attention import CausalAttention, causal_attention
from minidist.autograd.kept import kept_bytes
from minidist.context_parallel import columns, context_parallel, plain, zigzag
from minidist.context_parallel.ring_attention import ring_attention
from minidist.context_parallel.ulysses import ulysses
from minidist.planning.costs.context_parallel import ring_bytes, ulysses_bytes
from minidist.replicas import sum_gradients
from minidist.rng import Randomness, generator

figures.arguments()
clusters = {N: Cluster(N) for N in (1, 4)}
B, H, D = 1, 4, 16
C = H * D


def draw_numbers(name, *shape):
    return generator(0, name).standard_normal(shape)


# %% [markdown]
# ## Problem
#
# What does one block keep between forward and backward? Attention in blocks keeps no T x T
# probabilities (`autograd/attention.py`). So a block keeps a fixed number of values per position,
# and its memory grows with T. We measure it, and scale it to a model of 7 billion parameters.

# %%
block, T = nn.Transformer(8, C, H, 1, 512).layers[1], 512
per_position = kept_bytes(block(Tensor(draw_numbers("x", 1, T, C).astype("float32")))) / (4 * T)
assert per_position == 20 * C + H + 2
large = {"C": 4096, "H": 32, "layers": 32, "T": 128 * 1024}
numbers = large["layers"] * large["T"] * (20 * large["C"] + large["H"] + 2)
print(f"a block keeps {per_position:.0f} = 20 C + H + 2 numbers per position")
print(f"32 layers of width 4096, one example of 128 Ki positions, 2 bytes: {2e-9 * numbers:.0f} GB")

# %% [markdown]
# ## Picture
#
#     rank     0         1         2         3          Q stays; a rank sends the K, V that it has
#     hop 0    K0 V0     K1 V1     K2 V2     K3 V3      to the next rank, computes with them, and
#     hop 1    K3 V3     K0 V0     K1 V1     K2 V2      receives the K, V of the rank before
#     hop 2    K2 V2     K3 V3     K0 V0     K1 V1
#     hop 3    K1 V1     K2 V2     K3 V3     K0 V0      now every query has met every key
#
# Ulysses has no hops: an all_to_all gives each rank all positions of H/N heads, and another one
# brings O back to the ranks of its positions.
#
# ## Math
#
# A hop gives a softmax over its own keys: the output O_i and the sum of exponentials Z_i. Two of
# them join exactly, in any order (the ring keeps log Z, because Z overflows):
#
#     Z = Z_1 + Z_2        O = (Z_1 O_1 + Z_2 O_2) / Z
#
# Backward sends K, V round again. With log Z of all keys, P = exp(scores - log Z) is right in every
# block. The gradient of the scores, P (dP - <dO, O>), needs no other rank; <dO, O> is the inner
# product of two rows ([Dao et al. 2022](https://arxiv.org/abs/2205.14135), appendix B.2). dQ is
# summed on the rank of Q. dK and dV are sums over all ranks. So they follow their K and V round the
# ring, each rank adds its part, and they end on the rank of K and V.
#
# ## Code
#
# The forward pass of the ring. `at` holds the positions of the keys. The mask compares positions,
# so that any cut of the sequence is right. We also count the pairs of query and key that the mask
# leaves in each hop.


# %%
def our_ring(group, qkv, held):
    """Return this rank's O[B, H, T/N, D], and per hop how many pairs it has to compute."""
    own = held[group.rank].indices
    q, k, v = qkv[..., own, :]
    o, log_z, at, pairs = 0.0, -1e30, own, []
    for hop in range(group.size):
        if hop < group.size - 1:  # first send, then compute: the transfer travels meanwhile
            for array in (k, v, at):
                group.send(array, (group.rank + 1) % group.size)
        sees = own[:, None] >= at[None, :]
        pairs.append(int(sees.sum()))
        if pairs[-1]:
            s = np.where(sees, q @ k.swapaxes(-1, -2) / np.sqrt(D), -1e30)
            largest = s.max(-1, keepdims=True)
            z = np.exp(s - largest).sum(-1, keepdims=True)
            o_i, log_z_i = np.exp(s - largest) / z @ v, largest + np.log(z)
            both = np.logaddexp(log_z, log_z_i)
            o = o * np.exp(log_z - both) + o_i * np.exp(log_z_i - both)
            log_z = both
        if hop < group.size - 1:
            k, v, at = (group.recv((group.rank - 1) % group.size) for _ in range(3))
    return o, pairs


def library(group, attention, qkv, grad, held):
    """Return this rank's O and dQKV, and the bytes that it sent forward and backward."""
    own = held[group.rank].indices
    x = Tensor(qkv[..., own, :].copy(), requires_grad=True)
    y = attention(x, group, held)
    forward = group.ledger.total
    y.backward(grad[..., own, :].copy())
    return y.data, x.grad, (forward, group.ledger.total - forward)


# %%
T, N = 500, 4  # which 8 pieces do not divide
qkv, grad = draw_numbers("qkv", 3, B, H, T, D), draw_numbers("grad", B, H, T, D)
whole = Tensor(qkv, requires_grad=True)
want = CausalAttention()(whole)  # all T x T scores at once
want.backward(grad)
pairs = {}
for cut in (plain, zigzag):
    held = cut(T, N)
    ours = clusters[N].run(our_ring, qkv, held)
    pairs[cut] = np.array([counted for _, counted in ours])  # [rank, hop]
    for (o, _), own in zip(ours, held, strict=True):
        assert abs(o - want.data[..., own.indices, :]).max() < 1e-12
    for attention in (ring_attention, ulysses):
        found = clusters[N].run(library, attention, qkv, grad, held)
        for (o, dqkv, _), own in zip(found, held, strict=True):
            assert abs(o - want.data[..., own.indices, :]).max() < 1e-12
            assert abs(dqkv - whole.grad[..., own.indices, :]).max() < 1e-12
print("ours, the library's ring and Ulysses: equal to attention on one device, for both cuts")

# %% [markdown]
# A whole model needs no more than that. The embedding and dropout are told which positions the
# columns are, the loss is divided by all targets, and every gradient is a partial sum over the
# ranks, as in data parallelism:


# %%
def step(group, attention, cut):
    """Return the whole gradients of a Transformer, each rank with its part of the sequence."""
    model = nn.Transformer(8, 32, 4, 2, 60, 0, "float64", dropout=0.1, tied=True)
    x, y = generator(0, "tokens").integers(0, 8, (2, 3, 60))
    held = cut(60, group.size)[group.rank]
    randomness = Randomness(0, 0, np.arange(3), positions=held)
    context_parallel(model, group, attention, cut)
    logits = model(columns(x, held), randomness)
    nn.cross_entropy(logits, columns(y, held), reduction_size=y.size).backward()
    sum_gradients(model.parameters(), group)
    return {name: p.grad.copy() for name, p in model.named_parameters().items()}


one = clusters[1].run(step, "ring", plain)[0]
for attention in ("ring", "ulysses"):
    for got in clusters[4].run(step, attention, zigzag):
        assert all(abs(got[name] - one[name]).max() < 1e-12 for name in one)
print("a Transformer with dropout on 4 ranks: one device's gradients")

# %% [markdown]
# ## Measurement: who waits?
#
# The ring is as fast as its slowest rank: no rank gets the next block before its neighbour sends
# it. If each rank holds one run of positions (`plain`), the queries of rank 0 have no earlier keys,
# and rank 0 is idle after hop 0. `zigzag` cuts 2N pieces and gives rank r the pieces r and
# 2N - 1 - r, an early and a late one
# ([Llama 3, Dubey et al. 2024](https://arxiv.org/abs/2407.21783), section 3.3.2). Llama 3 cuts the
# positions so, but has no ring: each rank waits until it has gathered all of K and V, and then
# computes with its own Q. The wait is short, because several heads of Q share one head of K and V
# (grouped queries); in return any mask is possible.
#
# We count pairs, as if all ranks began each hop together and each pair took the same time:

# %%
for cut, counted in pairs.items():
    print(
        f"{cut.__name__}: pairs per rank, of all pairs:", (counted.sum(1) / counted.sum()).round(3)
    )
time = {cut: counted.max(0).sum() for cut, counted in pairs.items()}  # each hop: its busiest rank
print(f"pairs of the busiest ranks, hop by hop: plain {time[plain] / time[zigzag]:.2f} x zigzag")
assert pairs[plain].sum() == pairs[zigzag].sum() == T * (T + 1) / 2
assert abs(time[plain] / time[zigzag] - (2 * N - 1) / N) < 0.03
assert pairs[zigzag].sum(1).max() < 1.02 * pairs[zigzag].sum(1).mean()

# %% [markdown]
# ## Measurement: bytes and peak memory over T
#
#     all ranks send, per layer         forward          backward
#     ring                              2 (N-1) S        4 (N-1) S       K, V;  K, V, dK and dV
#     Ulysses                           4 (N-1) S/N      4 (N-1) S/N     Q, K, V and O, each way
#
# The memory is the peak of attention alone, forward and backward, on one rank.


# %%
def peak(group, attention, T):
    """Return the most bytes that attention had allocated at once on this rank, and what it sent."""
    held = zigzag(T, group.size)
    qkv, grad = (np.zeros((*k, B, H, T, D), "float32") for k in ((3,), ()))
    tracemalloc.start()
    if attention in (CausalAttention, causal_attention):
        x = Tensor(qkv.copy(), requires_grad=True)
        (attention()(x) if attention is CausalAttention else attention(x)).backward(grad)
        sent = 0, 0
    else:
        *_, sent = library(group, attention, qkv, grad, held)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return most, sent


WAYS = {
    "one device, all scores at once": (CausalAttention, 1),
    "one device, in blocks": (causal_attention, 1),
    "Ulysses, 4 ranks": (ulysses, 4),
    "ring, 4 ranks": (ring_attention, 4),
}
FORMULAS = {"Ulysses, 4 ranks": ulysses_bytes, "ring, 4 ranks": ring_bytes}
lengths = [256, 512, 1024, 2048]
peaks, sent = {name: [] for name in WAYS}, {}
for T in lengths:
    S = B * T * C * 4
    for name, (attention, size) in WAYS.items():
        found = clusters[size].run(peak, attention, T)
        peaks[name].append(max(most for most, _ in found))
        if size > 1:
            assert [both for _, both in found] == FORMULAS[name]([T // N] * N, S // T)
            sent[name] = found[0][1]
for name, found in peaks.items():
    print(f"{name:31}", *[f"{n / 2**20:7.2f}" for n in found], "MiB for T =", lengths)
growth = {name: found[-1] / found[-2] for name, found in peaks.items()}
assert growth["one device, all scores at once"] > 3.5  # T^2
assert all(1.5 < growth[name] < 2.6 for name in list(WAYS)[1:])  # T, and not T^2
for name, (forward, backward) in sent.items():
    print(f"{name}: each sends {forward / S:g} S forward, {backward / S:g} S backward")

# %% [markdown]
# For large T a rank needs more than 1/N of one device's memory: arrays that are sent and received
# are in memory, too. (The ring's line is steeper up to T = 1024: the library takes 128 queries at a
# time, and below that a rank's runs are shorter.) A rank of the ring sends 6 (N-1)/N S, which does
# not shrink as N grows. A rank of Ulysses sends 8 (N-1)/N^2 S, which does. But the ring sends to
# one neighbour only, *during* the products, and splits no heads.


# %%
COLORS = figures.FORWARD, figures.BACKWARD, figures.UPDATE, figures.COMMUNICATION  # of ranks


def triangle(axes, cut):
    """Draw which rank computes which pairs, and in which hop."""
    from matplotlib.patches import Polygon

    size = 2 * N
    runs = [(a, b, r) for r, own in enumerate(cut(size, N)) for a, b in own.runs]
    for a, b, r in runs:
        for c, d, owner in runs:
            if c <= a:
                corners = [(c, a), (d, b), (c, b)] if c == a else [(c, a), (d, a), (d, b), (c, b)]
                look = {"facecolor": COLORS[r], "edgecolor": "white"}
                axes.add_patch(Polygon(corners, **look))
                x, y = np.mean(corners, axis=0)
                style = {"ha": "center", "va": "center", "fontsize": 8, "color": "white"}
                axes.text(x, y, (r - owner) % N, **style)
    axes.set(xlim=(0, size), ylim=(size, 0), xticks=[], yticks=[], aspect="equal")
    axes.set(xlabel="keys, by position", ylabel="queries, by position")


def hops(axes, counted, end):
    """Draw the hops one after the other; each takes as long as its busiest rank."""
    start = 0
    for hop in range(N):
        longest = counted[:, hop].max()
        for r in range(N):
            axes.barh(r, longest, 0.8, start, color=figures.ROW)
            axes.barh(r, counted[r, hop], 0.8, start, color=COLORS[r], edgecolor="white")
        start += longest
        axes.axvline(start, color=figures.INK, lw=0.8, ls=":")
        axes.text(start - longest / 2, -0.7, f"hop {hop}", ha="center", fontsize=9)
    busy = counted.sum() / (N * start)
    axes.set_title(
        f"if a hop lasts as long as its busiest rank,\nthe ranks work {busy:.0%} of the time"
    )
    axes.set(xlim=(0, 1.02 * end), ylim=(N - 0.5, -1.2), xticks=[], xlabel="time, counted in pairs")
    axes.set_yticks(range(N), [f"rank {r}" for r in range(N)])
    axes.tick_params(axis="y", length=0)


def memory_over_positions(axes):
    colors = dict(zip(WAYS, [figures.INK, figures.INK, figures.OWN, figures.EMPHASIS], strict=True))
    sends = {name: f"\na rank sends {sum(n) / S:g} S" for name, n in sent.items()}
    for name, found in peaks.items():
        style = {"ls": "--" if "at once" in name else "-", "marker": "o", "ms": 4}
        axes.plot(lengths, [n / 2**20 for n in found], color=colors[name], **style)
        other = [peaks[rival][-1] for rival in sent if name in sent and rival != name]
        place = "center" if not other else "bottom" if found[-1] > other[0] else "top"
        words = name.replace(", all", ",\nall") + sends.get(name, "")
        where = lengths[-1] * 1.1, found[-1] / 2**20
        axes.text(*where, words, color=colors[name], va=place, fontsize=9)
    axes.set(xscale="log", yscale="log", xlabel="positions T", xlim=(230, 9000))
    axes.set_xticks(lengths, lengths)
    axes.minorticks_off()
    axes.set_title(
        "peak memory of attention on a rank, MiB\n(S: the bytes of Q on all ranks together)"
    )


def draw(plt):
    figure = plt.figure(figsize=(12, 6.6))
    figure.suptitle(
        "No rank holds the sequence: keys and values go round, and zig-zag shares the work"
    )
    grid = figure.add_gridspec(2, 3, width_ratios=[1, 1, 1.2], height_ratios=[1.6, 1])
    titles = {plain: "plain cut: runs of neighbours", zigzag: "zig-zag: pieces r and 2N - 1 - r"}
    for column, (cut, title) in enumerate(titles.items()):
        axes = figure.add_subplot(grid[0, column])
        triangle(axes, cut)
        axes.set_title(f"{title}\n(colour: the query's rank; number: hop)")
        hops(figure.add_subplot(grid[1, column]), pairs[cut], time[plain])
    memory_over_positions(figure.add_subplot(grid[:, 2]))
    return figure


figures.save(draw, "14_context_parallel")

# %% [markdown]
# ## Exercise 1: join
#
# Write `join(parts)`: each part is (O_i[n, D], log Z_i[n, 1]) of a softmax over its own keys.
# Return O and log Z over all keys. Scores of 800 must not overflow.
#
# *Hint:* subtract the largest log Z_i before you take exponentials.


# %%
def join(parts):
    """Return (O[n, D], log Z[n, 1])."""
    raise NotImplementedError  # your lines here


# %%
def softmax_over(scores, values):
    largest = scores.max(-1, keepdims=True)
    z = np.exp(scores - largest).sum(-1, keepdims=True)
    return np.exp(scores - largest) / z @ values, largest + np.log(z)


def check_join(attempt):
    """Return what is wrong, or None."""
    for scale in (1, 800):
        scores, values = scale * draw_numbers("scores", 3, 9), draw_numbers("values", 9, 2)
        cuts = [slice(0, 2), slice(2, 6), slice(6, 9)]
        with np.errstate(all="ignore"):
            found = attempt([softmax_over(scores[:, keys], values[keys]) for keys in cuts])
        for got, right, name in zip(
            found, softmax_over(scores, values), ("O", "log Z"), strict=True
        ):
            if not np.allclose(got, right, rtol=1e-9):
                return (
                    f"{name} is off by {abs(got - right).max():.2g} where scores are about {scale}"
                )


def mean_of_outputs(parts):
    return np.mean([o for o, _ in parts], axis=0), np.logaddexp.reduce([z for _, z in parts])


def without_a_maximum(parts):
    z = sum(np.exp(log_z) for _, log_z in parts)
    return sum(np.exp(log_z) * o for o, log_z in parts) / z, np.log(z)


exercise.judge(1, check_join, join, tempting=[mean_of_outputs, without_a_maximum])

# %% [markdown]
# ## Exercise 2: why did this break?
#
# Somebody wrote Ulysses for runs of neighbours. Then the cut became zig-zag. Nothing is raised, all
# shapes agree, and these positions get a wrong output:


# %%
def side_by_side(pieces, held):
    """Join what the ranks have sent: [..., T/N, D] each."""
    return np.concatenate(pieces, axis=-2)


T = 24
held, qkv = zigzag(T, 3), draw_numbers("short", 3, 1, 1, T, 4)
at = np.concatenate([own.indices for own in held])  # the positions of the joined rows
pieces = [qkv[..., own.indices, :] for own in held]
broken = causal_attention(Tensor(side_by_side(pieces, held))).data
right = causal_attention(Tensor(qkv)).data[..., at, :]
print("wrong at positions", *sorted(at[abs(broken - right).max(axis=(0, 1, 3)) > 1e-9]))

# %% [markdown]
# Why are the first positions right? Which keys did position 4 see? Write `in_order(pieces, held)`,
# which returns [..., T, D] in the order of the sequence, for any cut.
#
# *Hint:* `held[r].indices` are the positions of the rows of `pieces[r]`.


# %%
def in_order(pieces, held):
    """Return [..., T, D]."""
    raise NotImplementedError  # your lines here


# %%
def check_order(attempt):
    for cut, T, N in ((plain, 12, 3), (zigzag, 24, 3), (zigzag, 13, 4)):
        whole, held = draw_numbers("order", 2, T, 3), cut(T, N)
        found = attempt([whole[:, own.indices] for own in held], held)
        if not np.array_equal(found, whole):
            return f"{cut.__name__}({T}, {N}) comes out in another order"


def the_wrong_way_round(pieces, held):
    at = np.concatenate([own.indices for own in held])
    return np.concatenate(pieces, axis=-2)[..., at, :]


exercise.judge(2, check_order, in_order, tempting=[side_by_side, the_wrong_way_round])

# %% [markdown]
# ## Exercise 3: when is the transfer hidden?
#
# After hop 0, a hop computes two products over the pairs that the mask leaves (a multiply-add is 2
# FLOPs). Meanwhile K and V of one rank are on their way. A rank computes `flops` per second, a link
# carries `link` bytes per second, a number has `e` bytes. Write `least_positions(flops, link, e)`:
# how many positions a rank must have, under zig-zag, so that it never waits. (Liu et al., section
# 3, find flops/link for e = 2, without a mask.)
#
# *Hint:* with c positions on each rank, how many of the c^2 pairs does the mask leave?


# %%
def least_positions(flops, link, e):
    """Return T/N."""
    raise NotImplementedError  # your line here


# %%
def check_least(attempt):
    c = 64
    counted = [
        pairs
        for _, pairs in clusters[N].run(our_ring, np.zeros((3, 1, 1, c * N, D)), zigzag(c * N, N))
    ]
    computing = 2 * 2 * D * np.array(counted)[:, 1:].max()  # FLOPs of a hop, for one head
    for flops, link, e in ((4e14, 5e10, 2), (1e12, 1e10, 4)):
        sending = 2 * c * D * e
        found, needed = attempt(flops, link, e), c * (sending / link) / (computing / flops)
        if abs(found / needed - 1) > 1e-9:
            return f"{found:g} positions; counted in a run with 64, {needed:g} are needed"


def without_a_mask(flops, link, e):
    return e * flops / (2 * link)


def a_number_is_one_byte(flops, link, e):
    return flops / link


exercise.judge(3, check_least, least_positions, tempting=[without_a_mask, a_number_is_one_byte])

# %% [markdown]
# ## What it costs, and the next problem
#
# - **Parameters are on every rank,** and their gradients are summed over the ranks, as in data
#   parallelism. ZeRO (lesson 5) or tensor parallelism splits them, on another axis of the mesh.
# - **Everything that knows about positions must know the cut:** embedding, dropout, mask, targets.
#   If one of them does not, another model is trained, often without an error.
# - **Ring:** N - 1 hops per layer, whose latency counts where T/N is small; the bytes per rank do
#   not shrink with N. **Ulysses:** N must divide the heads that tensor parallelism has left, and
#   every rank sends to every other one.
# - **Work still grows with T^2.** N ranks share it; they do not reduce it.
#
# Every position still passes through every parameter. Lesson 15: what if it needs only some?

# %%
for cluster in clusters.values():
    cluster.close()
