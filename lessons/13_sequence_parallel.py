# %% [markdown]
# # 13. Sequence parallelism: no activation is kept twice
#
# In lesson 12 the ranks split the inside of a block's two branches: attention's heads and the MLP's
# columns. Every rank still does norms, dropout and the sums between the branches for all positions,
# with the same result. Here the sequence is split there (Korthikanti et al.
# 2022, section 4.2.2). The library's version is `minidist/tensor_parallel/sequence_parallel.py`.
#
# Letters: `N` ranks, `r` one of them; `B` examples of `T` positions, `C` the width, `H` heads;
# `e` bytes a number, `S = B T C e` the bytes of one activation X[B, T, C]. A{+N} is a partial sum:
# A is the sum of what the ranks have. A reduce_scatter gives each rank its part of such a sum; an
# all_gather joins the parts of all ranks (lesson 2).

# %%
import numpy as np
from support import exercise, figures

from minidist import Cluster, Tensor, nn
from minidist.autograd import Function, functions
from minidist.autograd.attention import causal_attention
from minidist.autograd.kept import kept
from minidist.planning.costs.kept import korthikanti_bytes
from minidist.rng import Randomness, generator
from minidist.tensor_parallel import ParallelTransformer, unsplit
from minidist.tensor_parallel.sequence_parallel import all_reduce_partial, sequence_parallel

figures.arguments()
clusters = {N: Cluster(N) for N in (1, 2, 4)}
B, T, C, H = 2, 64, 64, 8
randomness = Randomness(seed=0, step=0, examples=np.arange(B))

# %% [markdown]
# ## Problem
#
# What does a rank keep of one block between forward and backward? `kept` walks the graph below the
# block's output and lists the arrays that backward will read, each once, without the weights. We
# print them for 1, 2 and 4 ranks, in units of S.


# %%
def split_block(group, way, dtype):
    """Return the only block of a model, split by matrices ("tp") or by sequence as well."""
    model = nn.Transformer(32, C, H, 1, T, 0, dtype, dropout=0.1)
    split = ParallelTransformer(model, group) if way == "tp" else sequence_parallel(model, group)
    return split.layers[1]


def own_positions(x, group):
    """X[B, T, C] -> X_r[B, T/N, C]."""
    return np.split(x, group.size, axis=1)[group.rank].copy()


def input_of(group, way, dtype):
    x = generator(0, "x").standard_normal((B, T, C)).astype(dtype)
    return Tensor(x if way == "tp" else own_positions(x, group), requires_grad=True)


def memory(group, way):
    """Return [(what, how many S)] of what this rank keeps of the library's block."""
    y = split_block(group, way, "float32")(input_of(group, way, "float32"), randomness)
    return [(what, array.nbytes / (4 * B * T * C)) for what, array in kept(y)]


on = {N: clusters[N].run(memory, "tp")[0] for N in clusters}
for (what, one), (_, two), (_, four) in zip(on[1], on[2], on[4], strict=True):
    print(f"{what:18} {one:6.3f} {two:6.3f} {four:6.3f}  {'on every rank' if one == four else ''}")
total = {N: sum(size for _, size in on[N]) for N in on}
print(f"{'all, in S':18}", *[f"{size:6.3f}" for size in total.values()])
assert total[4] > 1.4 * total[1] / 4

# %% [markdown]
# Four ranks keep 10.5 S each; a quarter of one device's 28.5 S would be 7.1. These do not shrink:
# the norms' normalised input (`n`) and deviation (`r`), their output, which is the next matrix's
# input, and dropout's masks. (The sums `x + ...` are done N times too, but keep nothing.)
#
# ## Picture
#
#     tensor parallel: X[B, T, C] on every rank; between the branches N times the same
#
#       X -> norm -> f -> columns | heads or gelu | rows -> g -> dropout -> + X
#                    |                                      |
#                 identity | all_reduce                all_reduce | identity
#
#     sequence parallel: X_r[B, T/N, C]; between the branches each rank has its own positions
#
#       X_r -> norm -> f' -> columns | heads or gelu | rows -> g' -> dropout -> + X_r
#                      |                                       |
#             all_gather | reduce_scatter          reduce_scatter | all_gather
#
# (forward | backward; the paper writes g for our f', and g with a bar for g'.) Norm, dropout and
# sum act on each position alone, so T/N positions are enough for them. The matrices' inputs are
# needed whole: every rank's heads attend to all positions.
#
# ## Math
#
#     all_reduce(Y)          =  all_gather(reduce_scatter(Y))            (N-1) S + (N-1) S bytes
#     a block, tp            4 all_reduces                               8 (N-1) S, all ranks
#     a block, sequence      4 reduce_scatters and 4 all_gathers         8 (N-1) S: the same
#
# An all_reduce is a reduce_scatter and then an all_gather. Tensor parallelism does both at once,
# after the rows. Sequence parallelism does norm, dropout and sum between the two. That is all.
#
# ## Code
#
# The two functions, and a block that is made with them. Its weights are the library's: a rank has
# its heads' columns of `qkv`, its columns of `expand`, its rows of `output` and `contract`.


# %%
def reduce_scatter(x, group):
    """X[B, T, C]{+N} -> X_r[B, T/N, C]; the group cuts along the first axis."""
    rows = group.reduce_scatter(np.moveaxis(x, 1, 0).copy())
    return np.moveaxis(rows, 0, 1).copy()


class Enter(Function):
    """f': forward all_gather X_r -> X;  backward reduce_scatter dX{+N} -> dX_r."""

    def __init__(self, group):
        self.group = group

    def forward(self, x):
        return self.group.all_gather(x, axis=1)

    def backward(self, grad):
        return reduce_scatter(grad, self.group)


class Leave(Enter):
    """g': forward reduce_scatter Y{+N} -> Y_r;  backward all_gather dY_r -> dY."""

    def forward(self, x):
        return Enter.backward(self, x)

    def backward(self, grad):
        return Enter.forward(self, grad)


def into_columns(x, layer, group):
    return functions.linear(Enter(group)(x), layer.weight, layer.bias)  # [B, T, F/N]


def out_of_rows(y, layer, group):
    return Leave(group)(functions.linear(y, layer.weight)) + layer.bias  # [B, T/N, C]


def our_block(block, x, group, into_columns=into_columns):
    """X_r[B, T/N, C] -> the same shape: lesson 12's block, its sequence split."""
    attention = block.attention
    qkv = into_columns(block.norm_1(x), attention.qkv, group)
    qkv = qkv.reshape(B, T, 3, H // group.size, C // H).transpose(2, 0, 3, 1, 4)
    mixed = causal_attention(qkv).transpose(0, 2, 1, 3).reshape(B, T, C // group.size)
    x = x + block.dropout_1(out_of_rows(mixed, attention.output, group), randomness)
    hidden = functions.gelu(into_columns(block.norm_2(x), block.expand, group))
    return x + block.dropout_2(out_of_rows(hidden, block.contract, group), randomness)


# %% [markdown]
# Two things need care. *Dropout:* a rank masks its positions only, with their part of one device's
# mask. A mask here is a hash of (seed, step, layer, example, element), so a rank asks for a window
# of it; the block's `dropout_1` and `dropout_2` do. *Gradients:* norms and the rows' biases are on
# every rank, but see only T/N positions, so their gradients are partial sums. An all_reduce of
# each completes them (`all_reduce_partial`). In lesson 12 they saw all T, and were complete.
# We compare with one device, in float64.


# %%
def on_ranks(group, forward, finish):
    """Return {name: whole gradient} of a block, joined from all ranks' parts."""
    block, x = split_block(group, "sequence", "float64"), input_of(group, "sequence", "float64")
    forward(block, x, group).backward(own_positions(dy, group))
    finish(block, group)
    named = block.named_parameters().items()
    whole = {name: unsplit(p.grad, p, group) for name, p in named}
    return whole | {"X": group.all_gather(x.grad, axis=1)}


def the_librarys(block, x, group):
    return block(x, randomness)


def off(got, want):
    """Return {name: largest difference, relative to the largest element}."""
    return {name: abs(got[name] - want[name]).max() / abs(want[name]).max() for name in want}


dy = generator(0, "dy").standard_normal((B, T, C))
want = clusters[1].run(on_ranks, the_librarys, all_reduce_partial)[0]  # one rank: one device
for N in (2, 4):
    for name, forward in (("ours", our_block), ("the library's", the_librarys)):
        found = clusters[N].run(on_ranks, forward, all_reduce_partial)
        error = max(max(off(got, want).values()) for got in found)
        print(f"{N} ranks, {name}: all gradients within {error:.0e} of one device")
        assert error < 1e-9

# %% [markdown]
# ## Keep X_r, gather X again
#
# One thing is still kept N times. `functions.linear` needs its input for dW = X^T dY, and that
# input is the gathered X, whole, on every rank. So make the gathering part of the product: keep
# X_r, and gather X once more in backward. It saves memory and costs bytes, 2 (N-1) S per block.
# The library does this.


# %%
class Gathered(Function):
    """Y = X W + b with X = all_gather of X_r; keeps X_r[B, T/N, C]."""

    def __init__(self, group):
        self.group = group

    def forward(self, x, w, b):
        self.x, self.w = x, w
        return self.group.all_gather(x, axis=1) @ w + b

    def backward(self, dy):
        whole = self.group.all_gather(self.x, axis=1)  # once more
        dw = np.tensordot(whole, dy, axes=([0, 1], [0, 1]))
        return reduce_scatter(dy @ self.w.T, self.group), dw, dy.sum(axis=(0, 1))


def our_lean_block(block, x, group):
    def keeping_a_part(x, layer, group):
        return Gathered(group)(x, layer.weight, layer.bias)

    return our_block(block, x, group, keeping_a_part)


for got in clusters[4].run(on_ranks, our_lean_block, all_reduce_partial):
    assert max(off(got, want).values()) < 1e-9

# %% [markdown]
# ## Measurement
#
# What a rank keeps, in S, from the list above:
#
#                             between the branches              inside them
#     tensor parallel         4 + 2/e + 2/C                     (16 + H T/C) / N
#     sequence, X kept        2 + (2 + 2/e + 2/C) / N           (16 + H T/C) / N
#     sequence                (4 + 2/e + 2/C) / N               (16 + H T/C) / N
#
# 4: what two norms keep as wide as X, and the inputs of two matrices; 2/e: two masks of one byte a
# number; 2/C: a deviation per position and norm. 16: q, k, v; the heads' output; gelu's input, its
# factor and its output, each four times as wide as X. H T/C: attention's T x T probabilities.
# Besides memory we count the bytes of a block's forward and backward, over all ranks.

# %%
WAYS = {"tensor parallel": the_librarys, "sequence, X kept": our_block, "sequence": our_lean_block}


def costs(group, name):
    """Return (S kept, S sent in forward and backward) of this rank."""
    way = "tp" if name == "tensor parallel" else "sequence"
    y = WAYS[name](split_block(group, way, "float32"), input_of(group, way, "float32"), group)
    memory = sum(array.nbytes for _, array in kept(y))
    y.backward(np.ones_like(y.data))
    return memory / (4 * B * T * C), group.ledger.total / (4 * B * T * C)


def memory_formula(name, N, e=4):
    fixed, inside = 2 + 2 / e + 2 / C, (16 + H * T / C) / N
    whole = {"tensor parallel": 2 + fixed, "sequence, X kept": 2 + fixed / N}
    return whole.get(name, (2 + fixed) / N) + inside


found = {}
for N, cluster in clusters.items():
    for name in WAYS:
        per_rank = cluster.run(costs, name)
        found[name, N], sent = per_rank[0][0], sum(sent for _, sent in per_rank)
        print(f"N = {N}, {name:16}: a rank keeps {found[name, N]:6.3f} S, all send {sent:2.0f} S")
        assert abs(found[name, N] - memory_formula(name, N)) < 1e-9
        assert sent == (10 if name == "sequence" else 8) * (N - 1)

# %% [markdown]
# Now the last row of each N is one device's 28.531 S, divided by N. The paper counts differently: 2
# bytes a number, no factor of gelu, and a dropout of attention's probabilities. In its letters
# (s = T, b = B, h = C, a = H, t = N; equations 2 and 4) a layer keeps
#
#     tensor parallel   sbh (10 + 24/t + 5 as/(ht)) bytes          sequence   sbh (34 + 5 as/h) / t
#
# and for GPT-3's shapes, one example on 8 ranks, that is:

# %%
for name, split in (("tensor parallel", False), ("sequence", True)):
    size = 96 * korthikanti_bytes(1, 2048, 12288, 96, 8, split)
    print(f"GPT-3, {name:15}: {size / 1e9:.0f} GB on each of 8 ranks")

# %% [markdown]
# Time: the paper's layers run 3% faster than with tensor parallelism alone (its table 4), because
# norms and dropout see T/N positions. They do the extra gather during the product dY W^T, which
# does not need X; ours waits for it.


# %%
def draw(plt):
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6), width_ratios=[3, 2])
    figure.suptitle("Split the sequence between the matrices, and no activation is kept twice")
    rows = [(0, "sequence", 1)]
    rows += [(y + i, name, N) for y, N in ((1.4, 2), (4.8, 4)) for i, name in enumerate(WAYS)]
    for y, name, N in rows:
        alike = memory_formula(name, 1e18)  # what no N shrinks
        own = found[name, N] - alike
        own_look, alike_look = {"color": figures.OWN}, {"color": figures.SAME}
        figures.stack(left, y, [(own, "", own_look), (alike, "", alike_look)])
        left.text(found[name, N] + 0.3, y, f"{found[name, N]:.1f}", va="center", fontsize=9)
        if N > 1:
            left.plot([found["sequence", 1] / N] * 2, [y - 0.5, y + 0.5], color=figures.INK, lw=1)
    names = [f"{N} ranks: {name}" if N > 1 else "one device" for _, name, N in rows]
    left.set_yticks([y for y, *_ in rows], names, fontsize=9)
    left.text(19.2, 1.4, "grey: the same on every rank", va="center", fontsize=9)
    left.text(19.2, 2.4, "line: one device's 28.5 / N", va="center", fontsize=9)
    left.set(title="A rank keeps 1/N of a block's activations ...", xlim=(0, 31))
    left.set(xlabel="activations X[B, T, C] (S bytes each)")

    pink = {"color": figures.COMMUNICATION}
    two = [(4, "4 reduce_\nscatter", pink), (4, "4 all_\ngather", pink)]
    sums = [(2, "all_\nreduce", pink)] * 4
    for y, pieces in enumerate([sums, two, [*two, (2, "2 more", pink)]]):
        figures.stack(right, y, pieces)
    right.set_yticks(range(3), ["tensor\nparallel", "sequence,\nX kept", "sequence"], fontsize=9)
    right.set(title="... for a quarter more bytes", xlabel="sent by all ranks, in (N - 1) S")
    for axes in (left, right):
        axes.invert_yaxis()
        axes.tick_params(axis="y", length=0)
    return figure


figures.save(draw, "13_sequence_parallel")

# %% [markdown]
# ## Exercise 1: whose mask?
#
# Write `own_mask(group, name, rate, randomness)`: what dropout keeps of X_r[B, T/N, C], so that all
# ranks' masks side by side are one device's mask of X[B, T, C].
#
# *Hint:* `randomness.keep(name, rate, shape, window=, full_shape=)`: the window is a slice per axis
# of one example, within the full shape of one example.


# %%
def own_mask(group, name, rate, randomness):
    """Return booleans [B, T/N, C]."""
    raise NotImplementedError  # your line here


# %%
def check_mask(attempt):
    """Return what is wrong, or None."""
    parts = clusters[4].run(attempt, "layer", 0.5, randomness)
    if any(np.shape(part) != (B, T // 4, C) for part in parts):
        return "a rank's mask is [B, T/N, C]"
    same = np.mean(np.concatenate(parts, axis=1) == randomness.keep("layer", 0.5, (B, T, C)))
    return None if same == 1 else f"{same:.0%} of it is one device's mask"


def plain_call(group, name, rate, randomness):
    """All ranks drop the same elements of their parts."""
    return randomness.keep(name, rate, (B, T // group.size, C))


def seed_per_rank(group, name, rate, randomness):
    own = Randomness(randomness.seed + group.rank, randomness.step, randomness.examples)
    return own.keep(name, rate, (B, T // group.size, C))


exercise.judge(1, check_mask, own_mask, tempting=[plain_call, seed_per_rank])

# %% [markdown]
# ## Exercise 2: why did this break?
#
# Somebody turned on sequence parallelism in a program that was right without it. The loss of the
# first step is the same to rounding. The gradients, compared with one device's, are not:

# %%
broken = clusters[4].run(on_ranks, our_block, lambda block, group: None)[0]
for name, distance in off(broken, want).items():
    print(f"{name:32} off by {distance:.1e}")

# %% [markdown]
# Which parameters are off, and why these? Write `complete(block, group)`, to be called after
# backward, which repairs them and does not change the others. (Without it the ranks' norms would
# drift apart, each following its own positions.)
#
# *Hint:* a parameter that is split has a `p.shard`; every rank has the whole of all others.


# %%
def complete(block, group):
    """Give every parameter its whole gradient, in place."""
    raise NotImplementedError  # your lines here


# %%
def check_complete(attempt):
    for got in clusters[4].run(on_ranks, our_block, attempt):
        wrong = [name for name, distance in off(got, want).items() if not distance < 1e-9]
        if wrong:
            return f"{len(wrong)} of {len(want)} gradients are off: {', '.join(wrong[:2])} ..."


def sum_everything(block, group):
    for p in block.parameters():
        p.grad = group.all_reduce(p.grad)


def average(block, group):
    for p in block.parameters():
        if p.shard is None:
            p.grad = group.all_reduce(p.grad) / group.size


exercise.judge(2, check_complete, complete, tempting=[sum_everything, average])

# %% [markdown]
# ## Exercise 3: the bytes of a whole step
#
# A Transformer has more than blocks. The embedding's rows are split over the vocabulary, so it ends
# in a sum over ranks; the head is a column-split product. Write `step_bytes(N, depth)` in units of
# S: what all ranks send for all layers in forward and backward, with `Gathered` products. (The loss
# and the sums of partial gradients are left out.)
#
# *Hint:* the embedding ends like a branch, with g'; the head begins like one, with f'.


# %%
def step_bytes(N, depth):
    """Return bytes / S."""
    raise NotImplementedError  # your line here


# %%
def one_step(group, depth):
    model = sequence_parallel(nn.Transformer(32, C, H, depth, T), group)
    y = model(np.zeros((B, T), int))
    y.backward(np.ones_like(y.data))
    return group.ledger.total / (4 * B * T * C)


def check_step(attempt):
    for N, depth in ((1, 1), (2, 1), (4, 1), (2, 3)):
        said, sent = attempt(N, depth), sum(clusters[N].run(one_step, depth))
        if said != sent:
            return f"{said} S for N = {N}, depth {depth}; measured {sent:g}"


def only_blocks(N, depth):
    return 10 * (N - 1) * depth


def head_keeps_X(N, depth):
    return (N - 1) * (10 * depth + 4)


exercise.judge(3, check_step, step_bytes, tempting=[only_blocks, head_keeps_X])

# %% [markdown]
# ## What it costs, and the next problem
#
# - **Bytes:** a quarter more than tensor parallelism, 10 (N-1) S instead of 8, for keeping X_r.
# - **T must be a multiple of N**, and the partial gradients of parameters between the branches must
#   be summed; if that is forgotten, no error is raised, but the gradient is wrong.
# - **The communication has no slack:** the next product waits for the gather. It needs the fastest
#   links there are, so N stays within a machine.
# - **H T/C grows with T.** Attention's probabilities are split over heads, never over positions.
#   Beyond 128 positions `autograd/attention.py` computes them again in backward, block by block
#   (Dao et al. 2022), and keeps H/C. What is left grows with T, and then needs another cut.
#
# Ranks beyond one machine have to be put on another axis: layers or examples. Lesson 16 does all
# three at once.

# %%
for cluster in clusters.values():
    cluster.close()
