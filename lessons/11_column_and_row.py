# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
#   minidist: {lesson: 11, minutes: 30, needs: [1, 2], leads_to: [12, 13, 17], lab: splits}
# ---

# %% [markdown]
# (lesson-11)=
# # 11. Columns and rows: one matrix on many ranks
#
# **Question.** A layer is too big for one rank, so the cut goes through its matrices. Why is the
# first matrix of an MLP cut by columns and the second one by rows, and not the other way round?
#
# You need [backward by hand](01_autograd.py) and [all_reduce](02_collectives.py). New words:
# [column split](pages/glossary.md#column-split), [row split](pages/glossary.md#row-split),
# [partial sum](pages/glossary.md#partial-sum), [f and g](pages/glossary.md#f-and-g). Letters: $N$
# ranks; $B$ examples; $C$ the width of X, $F = 4 C$ that between the matrices; $S$ bytes.

# %% tags=["setup", "hide-input"]
import numpy as np
from support import begin, exercise, figures

from minidist import Cluster, Tensor, nn
from minidist.autograd import functions
from minidist.autograd.kernels.layers import gelu, gelu_backward
from minidist.parallel.collective_functions import reduce_from
from minidist.tensor_parallel import ColumnParallelLinear, RowParallelLinear

begin()
N, B, C, F = 4, 6, 12, 48
cluster = Cluster(N)
X, dY = np.random.default_rng(0).standard_normal((2, B, C))
first = nn.Linear(C, F, False, "gelu", name="first", dtype="float64")  # no biases
second = nn.Linear(F, C, False, name="second", dtype="float64")
W1, W2 = first.weight.data, second.weight.data

# %% [markdown]
# ## Problem: one MLP of GPT-3 needs 19.3 GB
#
# An MLP has $8 C^2$ weights. Training takes [16 bytes for each](05_zero.py): weight, gradient and
# AdamW's two moments. GPT-3 has $C = 12288$ ([Brown et al. 2020](https://arxiv.org/abs/2005.14165),
# table 2.1). A pipeline gives a rank whole layers, and makes no layer smaller or faster.
#
# ## Idea: columns make whole numbers, rows make partial sums
#
# *Columns.* A column of the first matrix makes one column of the result. It needs X, and nothing
# from other ranks. The gelu acts on every number alone, so a rank applies it to its own numbers.
#
# *Rows.* A row of the second matrix is multiplied with one column of that result, and this rank has
# the column. What it gets has the shape of Y, but it is a partial sum: the ranks' arrays must be
# added ([Shoeybi et al. 2019](https://arxiv.org/abs/1909.08053), section 3).


# %%
def mlp(group):
    """Return Y and dX, the same on all ranks, and the gradients of this rank's weights."""
    own = np.split(np.arange(F), N)[group.rank]
    w1, w2 = W1[:, own], W2[own]  # its columns, its rows
    z = X @ w1  # [B, F/N]: some numbers, each of them whole
    a, slope = gelu(z)
    y = group.all_reduce(a @ w2)  # g: add the partial sums
    dz = gelu_backward(dY @ w2.T, z, slope)
    dx = group.all_reduce(dz @ w1.T)  # f: add the partial sums of backward
    return y, dx, X.T @ dz, a.T @ dY


# %% [markdown]
# Is it right? One device has the whole matrices. The library has a layer of each kind, `column` and
# `row`: [column_parallel.py](../minidist/tensor_parallel/column_parallel.py) and
# [row_parallel.py](../minidist/tensor_parallel/row_parallel.py).


# %%
def gradients(layers):
    x = Tensor(X, requires_grad=True)
    y = nn.Sequential(layers)(x)
    y.backward(dY)
    return y.data, x.grad, *(layer.weight.grad for layer in layers)


def library(group):
    return gradients([ColumnParallelLinear(first, group), RowParallelLinear(second, group)])


want = gradients([first, second])
for name, run in (("ours", mlp), ("the library", library)):
    y, dx, dw1, dw2 = zip(*cluster.run(run), strict=True)
    got = y[0], dx[0], np.concatenate(dw1, axis=1), np.concatenate(dw2)
    error = max(abs(a - b).max() for a, b in zip(got, want, strict=True))
    print(f"{N} ranks against one device, {name}: {error:.0e}")
    assert error < 1e-12

# %% [markdown]
# :::{admonition} Predict before you run
# Two all_reduces: for Y and for dX. Why does no gradient of a weight need one?
# :::
# :::{dropdown} Answer
# The gradient of a weight is a sum over examples, and every rank has all examples. The axis that is
# cut is summed over in Y and in dX only.
# :::
#
# ## Why not rows first?
#
# Then partial sums arise *before* the gelu, and they cannot pass it: `gelu(a + b)` is not
# `gelu(a) + gelu(b)`. The ranks must meet in the middle, where arrays are four times as wide.


# %% tags=["hide-input"]
def draw(plt):
    figure, panels = plt.subplots(2, 1, figsize=(9, 4.6), layout="constrained")
    titles = "Columns, then rows: gelu sees whole numbers", "Rows first: gelu must wait for the sum"
    above = [(0, 2, 3, 1, 1, "X"), (3.4, 4, 2, 2, 1, "W1"), (8.8, 4, 3, 2, 1, "whole numbers")]
    above += [(16.8, 2, 4, 1, 2, "W2"), (20.2, 4, 3, 2, 1, "partial sums"), (26.8, 2, 3, 1, 1, "Y")]
    below = [(0, 2, 3, 2, 1, "X"), (3.4, 4, 2, 1, 2, "W1"), (8.8, 8, 3, 2, 1, "partial sums")]
    below += [(19.6, 4, 3, 1, 1, "")]
    signs = {2.7: "×", 8.1: "=", 14.4: "gelu", 16.1: "×", 19.5: "=", 22.2: "+", 25.5: "g"}
    others = {2.7: "×", 8.1: "=", 12.8: "+", 18.2: "g", 25.2: "gelu"}
    contents = zip(panels, titles, (above, below), (signs, others), strict=True)
    for ax, title, matrices, words in contents:
        ax.set(xlim=(0, 29), ylim=(-0.7, 5), aspect="equal", title=title)
        ax.axis("off")
        for x, width, height, *parts, name in matrices:
            figures.matrix(ax, x, 2 - height / 2, (width, height), *parts)
            ax.text(x + width / 2, 2.3 + height / 2, name, ha="center")
        for x, word in words.items():
            color = figures.COMMUNICATION if word == "g" else "white"
            look = {"boxstyle": "round,pad=0.2", "edgecolor": "none", "facecolor": color}
            ax.text(x, 2, word, ha="center", va="center", bbox=look)
    panels[0].text(25.5, 0.2, "adds $B$ × $C$\nnumbers", ha="center", va="top")
    panels[1].text(18.2, 0.2, "adds $B$ × 4 $C$\nnumbers", ha="center", va="top")
    return figure


figures.show(
    draw,
    "11_column_and_row",
    caption="0, 1: the rank that has this part. Grey: the same on both ranks. Pink: they meet.",
    alt="Above, W1 is cut by columns: both ranks have whole numbers, apply gelu, and meet once, at "
    "Y. Below, W1 is cut by rows: partial sums four times as wide must be added before gelu.",
)

# %% [markdown]
# ## What does each order send?
#
# Any order can be made right: an all_gather joins the columns of an array where it must be whole.
# Over all ranks an all_reduce of $S$ bytes sends $2 (N-1) S$, an all_gather $(N-1) S$.
#
# :::{admonition} Predict before you run
# Column then row sends 4 units of $(N-1) B C$ numbers: 2 in forward, 2 in backward. How many units
# does row then column send, with $F = 4 C$?
# :::


# %% tags=["hide-output"]
def sent(group, ways):
    """Return what a rank sends in forward and backward, with the two layers cut in these ways."""
    mend = ways != ("column", "row")
    cut = {
        "column": lambda layer: ColumnParallelLinear(layer, group, gather_output=mend),
        "row": lambda layer: RowParallelLinear(layer, group, scatter_input=mend),
    }
    gradients([cut[ways[0]](first), cut[ways[1]](second)])
    return group.ledger.total


UNITS = {  # of (N - 1) B C numbers, forward + backward
    ("column", "row"): 2 + 2,  # all_reduce Y; all_reduce dX
    ("column", "column"): (4 + 1) + (2 + 8),  # gather both outputs; all_reduce both gradients
    ("row", "row"): (8 + 2) + (1 + 4),  # all_reduce both outputs; gather both gradients
    ("row", "column"): (8 + 1) + (1 + 8),  # all_reduce, gather Y; gather dX, all_reduce
}
for ways, units in UNITS.items():
    measured = sum(cluster.run(sent, ways))
    print(f"{' then '.join(ways):18} sends {measured:6,} bytes = {units:2} (N - 1) B C 8")
    assert measured == units * (N - 1) * X.nbytes

# %% [markdown]
# :::{admonition} Predict before you run
# With 8 times the batch, does the part of the time in which a rank computes grow, stay or shrink?
# :::

# %% tags=["hide-output"]
for where, link in (("in a machine (450 GB/s)", 450e9), ("between machines (50 GB/s)", 50e9)):
    small, large = (6 * width / (8 - 1) * link / 4e14 for width in (1024, 12288))  # 4e14 FLOP/s
    print(f"8 ranks {where}: computing / sending {small:.1f} for C = 1024, {large:.1f} for GPT-3")

# %% [markdown]
# :::{dropdown} Where does the number come from?
# Two products of $2 B C F$ FLOPs in forward, four in backward, so with $F = 4 C$ a rank computes
# $48 B C^2 / N$. It sends $4 (N-1) B C / N$ numbers of 2 bytes. That is $6 C / (N-1)$ FLOPs per
# byte, without $B$: only a wider matrix helps, and more ranks make it worse.
# :::
#
# ## Why are f and g a pair?
#
# Shoeybi et al. name them. $f$ copies X to the ranks, and its backward adds; $g$ adds, and its
# backward copies. Each is the other's adjoint: an array that is the same on all ranks counts once;
# if every rank has its own, all of them count. So the adjoint of "one array becomes $N$" is "$N$
# arrays become one sum". There are [more such pairs](../minidist/parallel/collective_functions.py).
#
# ## Exercise 1: the mean over ranks
#
# Forward gives all ranks the mean of their arrays. Write backward, for this rank's own array.


# %% tags=["exercise"]
def mean_backward(dy, group):
    """Return dX_r; dy: the gradient of the mean, the same on all ranks."""
    raise NotImplementedError  # your line here


exercise.judge("11.1", mean_backward)

# %% [markdown]
# ## Exercise 2: why did this break?
#
# A training with `broken_row` begins with one device's loss and gradients. From the second step on
# the loss is wrong. Why? Write `repaired_row`; every rank has the whole b, and needs its gradient.


# %% tags=["exercise"]
def broken_row(x, w, b, group):
    return reduce_from(functions.linear(x, w, b), group)  # reduce_from: g


def repaired_row(x, w, b, group):
    """Return Y[B, F] of X[B, C/N], W[C/N, F] and b[F]."""
    raise NotImplementedError  # your lines here


exercise.judge("11.2", repaired_row)

# %% [markdown]
# ## Exercise 3: the price of an order
#
# Write `price(ways, widths)`: the numbers that all ranks send in forward and backward, in units of
# $(N-1) B$. The widths of the MLP are now any `(before, between, after)`.


# %% tags=["exercise"]
def price(ways, widths):
    """Return the units; ways: such as ("column", "row"), a key of UNITS above."""
    raise NotImplementedError  # your lines here


exercise.judge("11.3", price)
cluster.close()

# %% [markdown]
# ## At work
#
# | here | PyTorch | Megatron-LM | DeepSpeed | JAX |
# |---|---|---|---|---|
# | `column` | `ColwiseParallel` | `ColumnParallelLinear` | | `P(None, "tp")` |
# | `row` | `RowwiseParallel` | `RowParallelLinear` | | `P("tp", None)` |
# | $g$ | | `reduce_from_tensor_model_parallel_region` | | `psum` |
#
# **What it costs.** All ranks wait for $g$, in every MLP. X and Y are whole on every rank.
#
# **Next:** [attention and the vocabulary](12_parallel_transformer.py) have columns and rows, too.
