# %% [markdown]
# # 17. Convolutions and batch norm: what do channel and spatial cuts send, and whose mean is it?
#
# A convolution can be split over ranks in two ways: by its channels, like the columns and rows of
# lesson 11 (Dryden et al. 2019, [SC](https://doi.org/10.1145/3295500.3356207)), and by the rows of
# its images (Dryden et al. 2019, [IPDPS](https://arxiv.org/abs/1903.06681)). The library's versions
# are `channel_parallel.py` and `spatial_parallel.py` in `minidist/tensor_parallel/`. Between two
# convolutions is batch norm, which makes examples depend on each other.
#
# Letters: `N` ranks, `r` one of them; `B` images X[B, C, H, W] of `C` channels, H x W pixels; `K` x
# K windows; `e` bytes a number. A{+N} is a partial sum: A is the sum of what the ranks have. `f`
# and `g` are lesson 11's: f is an all_reduce in backward, g in forward.

# %%
from functools import partial

import numpy as np
from support import exercise, figures

from minidist import Cluster, Tensor, datasets, nn
from minidist.autograd import Function, functions
from minidist.autograd.convolution import convolution
from minidist.collective_functions import copy_to, reduce_from
from minidist.data_parallel.naive import all_reduce_gradients
from minidist.data_parallel.sync_batch_norm import sync_batch_norm
from minidist.planning.costs.convolutions import block_bytes
from minidist.rng import generator
from minidist.tensor_parallel import (
    ChannelParallelConv2d,
    FilterParallelConv2d,
    SpatialConv2d,
    unsplit,
)
from minidist.tensor_parallel.channel_parallel import keep_own_channels

figures.arguments()
N = 4
cluster = Cluster(N)

# %% [markdown]
# ## Problem
#
# Either cut sends something: activations, or gradients of weights. In a convolutional network
# neither is always small. Here are the four stages of ResNet-34
# ([He et al. 2016](https://arxiv.org/abs/1512.03385), table 1), made of blocks of two convolutions
# of 3 x 3, for 32 images in float32:

# %%
B, STAGES = 32, {64: 56, 128: 28, 256: 14, 512: 7}  # channels: height and width
for C, H in STAGES.items():
    print(
        f"C = {C:3}, {H:2} x {H:2}: an activation {4 * B * C * H * H / 1e6:5.1f} MB, "
        f"the weights of a block {4 * 2 * 9 * C * C / 1e6:5.1f} MB"
    )

# %% [markdown]
# From stage to stage activations halve, and weights grow by 4. So which cut sends less?
#
# Batch norm is a second problem. Lesson 3 promised that the sum of the shards' gradients is the
# batch's gradient. With batch norm it is not, because every shard subtracts its own mean.
#
# ## Picture
#
#     channels  X[B, C, H, W] -> f -> conv, filters/N -> norm, relu -> conv, channels/N -> g -> norm
#                                     X * W[C/N, C, K, K]              Z_r * V[C, C/N, K, K]{+N}
#
#     rows      X[B, C, H/N, W] -> halos -> conv, all weights -> norm, relu -> halos -> conv -> norm
#               rank r - 1    . . . . .                         sums over ranks
#                             a a a a a
#               rank r        . . . . .      r needs row a of rank r - 1 and row b of rank r + 1:
#                             . . . . .      floor(K/2) rows over every border, both ways
#               rank r + 1    b b b b b
#
# *Channels.* A filter sees all channels of X and makes one channel of the output, as a column of a
# matrix does; an input channel is like a row of the matrix. So a block is lesson 11's MLP: one
# all_reduce of its output forward, one of dX backward. *Rows.* Every rank has all weights, its own
# rows of the image, and the *halo*: the few rows of its neighbours that its windows see. In
# backward the gradients of the halo go back to the neighbours, which add them. The weights'
# gradients are partial sums, as in data parallelism.
#
# ## Math
#
# For a block of two convolutions of 3 x 3 in forward and backward, over all ranks:
#
#     channels   2 all_reduces of X                            4 (N-1) B C H W e
#     rows       2 rows per border, convolution and way        8 (N-1) B C W e
#                an all_reduce of 2 x 9 C^2 gradients         36 (N-1) C^2 e
#
# Only the first line grows with the height H, and only the last one does not grow with B. Rows send
# less if 9 C < B W (H - 2). (Batch norm's sums, below, are a few numbers per channel.)
#
# Batch norm computes n = (x - mean) / sqrt(var + eps) per channel, with the mean over all examples
# and pixels ([Ioffe and Szegedy 2015](https://arxiv.org/abs/1502.03167)). Which cut divides these?
#
#     examples   no rank has the mean     sum over ranks (count, sum x, sum x^2), in backward
#     rows       no rank has the mean     (sum dy, sum dy n): 4 C + 1 numbers, whatever the batch
#     channels   one rank has all of it   nothing
#
# ## Code
#
# First a halo of one row, then the convolutions of both cuts.


# %%
class Halos(Function):
    """X[B, C, H/N, W] -> with the neighbours' rows [B, C, H/N + 2, W]; zeros beyond the image."""

    def __init__(self, group):
        self.group = group
        self.edges = [(q, end) for q, end in ((group.rank - 1, 0), (group.rank + 1, -1))]
        self.edges = [(q, end) for q, end in self.edges if 0 <= q < group.size]

    def forward(self, x):
        y = np.pad(x, [(0, 0), (0, 0), (1, 1), (0, 0)])
        for q, end in self.edges:
            self.group.send(x[:, :, end], q)  # never waits
        for q, end in self.edges:
            y[:, :, end] = self.group.recv(q)
        return y

    def backward(self, dy):
        dx = dy[:, :, 1:-1].copy()
        for q, end in self.edges:
            self.group.send(dy[:, :, end], q)
        for q, end in self.edges:
            dx[:, :, end] += self.group.recv(q)
        return dx


def by_rows(x, conv, group):
    return convolution(Halos(group)(x), conv.weight, padding=(0, 1))  # zeros left and right


def by_filters(x, conv, group):
    return convolution(copy_to(x, group), conv.weight, padding=1)


def by_input_channels(x, conv, group):
    return reduce_from(convolution(x, conv.weight, padding=1), group)


# %% [markdown]
# A block adds conv(relu(norm(conv(X)))) to X. We run this branch twice: with the library's layers,
# and with the functions above on the weights of these layers. If channels are split, a rank has its
# filters, their norm, and its input channels of the second convolution. If rows are split, it has
# all weights, and a norm that sums over the ranks.

# %%
C, H, W = 8, 16, 6
x, dy = (generator(0, name).standard_normal((3, C, H, W)) for name in ("x", "dy"))


def own_rows(x, group):
    return np.split(x, group.size, axis=2)[group.rank].copy()


def layers():
    more = {"padding": 1, "bias": False, "dtype": "float64"}
    first, second = (nn.Conv2d(C, C, 3, name=name, **more) for name in ("first", "second"))
    return first, nn.BatchNorm(C, dtype="float64"), second


def branch(x, first, norm, second):
    return second(functions.relu(norm(first(x))))


def by_channels_on_ranks(group, ours):
    """Return (dX, dW, dV as one device has them; bytes by operation)."""
    first, norm, second = layers()
    first, second = FilterParallelConv2d(first, group), ChannelParallelConv2d(second, group)
    steps = [partial(by_filters, conv=first, group=group)] if ours else [first]
    steps += [keep_own_channels(norm, group)]
    steps += [partial(by_input_channels, conv=second, group=group)] if ours else [second]
    own = Tensor(x, requires_grad=True)
    branch(own, *steps).backward(dy)
    sent = dict(group.ledger.bytes)
    return [own.grad, *(unsplit(c.weight.grad, c.weight, group) for c in (first, second))], sent


def by_rows_on_ranks(group, ours):
    first, norm, second = layers()
    norm.sum_over_ranks = group.all_reduce
    ends = tuple(range(0, H + 1, H // group.size))
    steps = [SpatialConv2d(first, group, ends), norm, SpatialConv2d(second, group, ends)]
    if ours:
        steps = [partial(by_rows, conv=c, group=group) for c in (first, second)]
        steps.insert(1, norm)
    own = Tensor(own_rows(x, group), requires_grad=True)
    branch(own, *steps).backward(own_rows(dy, group))
    weights = [group.all_reduce(c.weight.grad) for c in (first, second)]
    sent = dict(group.ledger.bytes)
    return [group.all_gather(own.grad, 2), *weights], sent


def one_device():
    (first, norm, second), whole = layers(), Tensor(x, requires_grad=True)
    branch(whole, first, norm, second).backward(dy)
    return [whole.grad, first.weight.grad, second.weight.grad]


def off(got, want):
    """Return the largest difference, relative to the largest element, of several arrays."""
    return max(abs(g - w).max() / abs(w).max() for g, w in zip(got, want, strict=True))


want, sent = one_device(), {}
for way, worker in {"channels": by_channels_on_ranks, "rows": by_rows_on_ranks}.items():
    for whose in ("ours", "the library's"):
        found = cluster.run(worker, whose == "ours")
        error = max(off(got, want) for got, _ in found)
        sent[way] = {op: sum(s.get(op, 0) for _, s in found) for op in ("send", "all_reduce")}
        print(f"{way}, {whose}: dX, dW and dV within {error:.0e} of one device")
        assert error < 1e-9

# %% [markdown]
# ## Measurement: bytes
#
# First the formulas against what was sent just now, then for the stages of ResNet-34.

# %%
terms = block_bytes(3, C, H, W, 8, N)
norm = 2 * (N - 1) * (4 * C + 1) * 8
assert sent["channels"] == {"send": 0, "all_reduce": terms["channels"]}
assert sent["rows"] == {"send": terms["halos"], "all_reduce": terms["weights"] + norm}
print("what was sent is what the formulas say, to the byte")

for C_, H_ in STAGES.items():
    terms = block_bytes(B, C_, H_, H_, 4, N)
    channels, rows = terms["channels"], terms["halos"] + terms["weights"]
    better = "rows" if rows < channels else "channels"
    print(
        f"C = {C_:3}, {H_:2} x {H_:2}: channels {channels / 1e6:5.0f} MB; rows "
        f"{terms['halos'] / 1e6:3.0f} + {terms['weights'] / 1e6:3.0f} MB: {better}"
    )
    assert (rows < channels) == (9 * C_ < B * H_ * (H_ - 2))

# %% [markdown]
# So rows are better where images are large, and channels where there are many of them. (If examples
# are split as well, the weights' gradients are summed in any case, and rows send only their halos
# in addition.) Memory says the same: rows divide activations, channels divide weights.
#
# ## Measurement: whose mean?
#
# 256 digits, cut into shards. If every shard has its own mean, how far is the sum of the shards'
# gradients from the batch's gradient? This needs no ranks: one device takes shard after shard.

# %%
images, labels = datasets.digits()
chosen = generator(0, "digits").permutation(len(labels))[:256]
images, labels = images[chosen].reshape(-1, 1, 8, 8).astype("float64"), labels[chosen]


def gradient_of(model):
    return np.concatenate([p.grad.reshape(-1) for p in model.parameters() if p.requires_grad])


def in_shards(size):
    model = nn.CNN(1, 10, (8,), dtype="float64")
    for start in range(0, 256, size):
        own = slice(start, start + size)
        nn.cross_entropy(model(images[own]), labels[own], reduction_size=256).backward()
    return gradient_of(model)


def synchronised(group, size):
    """Every rank has `size` images: the gradient of all of them, by the library."""
    model = sync_batch_norm(nn.CNN(1, 10, (8,), dtype="float64"), group)
    own = slice(group.rank * size, (group.rank + 1) * size)
    nn.cross_entropy(model(images[own]), labels[own], reduction_size=size * group.size).backward()
    all_reduce_gradients(model, group)
    return gradient_of(model)


def distance(got, want):
    return np.linalg.norm(got - want) / np.linalg.norm(want)


whole = in_shards(256)
local = {size: distance(in_shards(size), whole) for size in (2, 4, 8, 16, 32, 64, 128)}
sync = distance(cluster.run(synchronised, 64)[0], whole)
for size, error in local.items():
    print(f"shards of {size:3} images: the gradient is off by {error:6.1%}")
print(f"4 ranks of 64, with sums over the ranks: {sync:.0e}")
assert local[2] > 5 * local[64] > 0.01 and sync < 1e-9

# %% [markdown]
# No average makes a local mean right; larger shards only make it less wrong. It is another model.
# (Whether that model learns worse is another question: a gradient's distance does not say.)
# So `all_reduce_gradients` refuses a model whose batch norms are not synchronised:


# %%
def unsynchronised(group):
    try:
        all_reduce_gradients(nn.CNN(1, 10, (8,)), group)
    except ValueError as error:
        return str(error)


print(cluster.run(unsynchronised)[0])


# %%
def draw(plt):
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 5), width_ratios=[6, 5])
    figure.suptitle("A cut image sends the rows at its borders; a cut batch sums its statistics")
    pink = {"facecolor": figures.COMMUNICATION, "edgecolor": "white"}
    grey = {"facecolor": figures.SAME, "edgecolor": "white"}
    columns, apart = 6, 8.5
    for rank in range(3):
        for row in range(4 * rank - 1, 4 * rank + 5):
            whose = row // 4  # who has this row; the rows -1 and 12 are zeros
            own = figures.part(rank) if whose == rank else grey
            look = own if whose in (-1, rank, 3) else pink | {"hatch": figures.part(whose)["hatch"]}
            for column in range(columns):
                left.add_patch(plt.Rectangle((rank * apart + column, row), 1, 1, **look))
        left.text(rank * apart + columns / 2, 4 * rank - 1.4, f"rank {rank}", ha="center")
    for row in range(-1, 13):
        left.text(-0.4, row + 0.5, row if 0 <= row < 12 else "zeros", ha="right", va="center")
    arrow = {"arrowstyle": "->", "color": figures.INK, "lw": 1.8}
    for rank in (0, 1):
        edge, row = rank * apart + columns, 4 * rank + 4
        left.annotate("", (edge - 0.5, row + 0.5), (edge + 3, row + 0.5), arrowprops=arrow)
        left.annotate("", (edge + 3, row - 0.5), (edge - 0.5, row - 0.5), arrowprops=arrow)
    words = "arrows: forward. In\nbackward the gradients\nof pink rows go back,\nand are added"
    left.text(0.6, 10.5, words, va="center")
    words = "blue: own rows\npink: halo, rows\nof a neighbour\npattern: the rank\nthat has the row"
    left.text(2 * apart, 1.6, words, va="center")
    left.set(xlim=(-2.4, 2 * apart + columns), ylim=(13.2, -2.4))
    left.set(title="12 rows on 3 ranks: windows of 3 x 3 need a halo of one row")
    left.set_aspect("equal")
    left.axis("off")

    right.plot(list(local), [100 * e for e in local.values()], "o-", color=figures.EMPHASIS)
    right.plot([2, 128], [0, 0], color=figures.UPDATE, clip_on=False)
    right.text(4.6, 100 * local[4], "every shard has its own mean", color=figures.EMPHASIS)
    right.text(2, 0.7, f"the mean of all, by sums over 4 ranks: {sync:.0e}", color=figures.UPDATE)
    right.set_xscale("log", base=2)
    right.set(xticks=list(local), xticklabels=list(local), ylim=(0, None))
    right.set(xlabel="images per shard, of 256", ylabel="error of the gradient, %")
    right.set_title("Batch norm: whose mean is it?")
    return figure


figures.save(draw, "17_convolutions_and_batch_norm")

# %% [markdown]
# ## Exercise 1: larger windows, larger strides
#
# Windows of K rows, K odd, have stride s, and the image floor(K/2) rows of zeros at each end. Row p
# of the output is computed by the rank that has row s p of the input. Of two ranks the second one's
# rows begin at `first`. Write `rows_over(first, K, s)`: how many rows cross the border, both ways.
#
# *Hint:* the first rank's last window has the last multiple of s before `first` in its middle.


# %%
def rows_over(first, K, s):
    raise NotImplementedError  # your lines here


# %%
def crossing(group, first, K, s):
    """Send halos of one image of 24 rows, 1 channel and 1 column; return the rows sent."""
    conv = nn.Conv2d(1, 1, K, s, K // 2, dtype="float64")
    split = SpatialConv2d(conv, group, (0, first, 24))
    split(Tensor(np.zeros((1, 1, first if group.rank == 0 else 24 - first, K))))
    return group.ledger.total // (8 * K)


pair = Cluster(2, "thread")


def check_rows(attempt):
    cases = [(3, 1, 12), (5, 1, 12), (3, 2, 12), (3, 2, 11), (5, 2, 12), (7, 3, 13), (5, 4, 12)]
    for K, s, first in cases:
        said, right = attempt(first, K, s), sum(pair.run(crossing, first, K, s))
        if said != right:
            return f"{said} rows for K = {K}, stride {s}, border before {first}; sent: {right}"


def always_two_halves(first, K, s):
    return 2 * (K // 2)


def half_per_stride(first, K, s):
    return 2 * (K // 2) // s


def overlap_of_windows(first, K, s):
    return max(0, K - s)


tempting = [always_two_halves, half_per_stride, overlap_of_windows]
exercise.judge(1, check_rows, rows_over, tempting=tempting)

# %% [markdown]
# ## Exercise 2: why did this break?
#
# Somebody wrote halos, and tested them: the output is one device's, bit for bit. Training is worse.
# This is how far dX is off, row by row:


# %%
def forgets(group, dy):
    return dy[:, :, 1:-1].copy()


def dx_on_ranks(group, give_back):
    conv = nn.Conv2d(C, C, 3, padding=1, bias=False, dtype="float64")
    whole, own = Tensor(x, requires_grad=True), Tensor(own_rows(x, group), requires_grad=True)
    conv(whole).backward(dy)
    halos = Halos(group)
    halos.backward = lambda dy: give_back(group, dy)
    convolution(halos(own), conv.weight, padding=(0, 1)).backward(own_rows(dy, group))
    return abs(group.all_gather(own.grad, 2) - whole.grad).max(axis=(0, 1, 3))


print(*[f"{error:.0e}" for error in cluster.run(dx_on_ranks, forgets)[0]])

# %% [markdown]
# Which rows are wrong, and why these? Write `give_back(group, dy)`, from dy[B, C, H/N + 2, W] of
# the rows with their halos to dX[B, C, H/N, W].
#
# *Hint:* `group.send(array, to)` never waits. The first and the last rank have one neighbour only.


# %%
def give_back(group, dy):
    raise NotImplementedError  # your lines here


# %%
def check_give_back(attempt):
    wrong = np.flatnonzero(cluster.run(dx_on_ranks, attempt)[0] > 1e-9)
    return f"dX is off in the rows {wrong.tolist()} of {H}" if len(wrong) else None


def replaces(group, dy):
    dx = dy[:, :, 1:-1].copy()
    ends = [(q, e) for q, e in ((group.rank - 1, 0), (group.rank + 1, -1)) if 0 <= q < group.size]
    for q, end in ends:
        group.send(dy[:, :, end], q)
    for q, end in ends:
        dx[:, :, end] = group.recv(q)
    return dx


exercise.judge(2, check_give_back, give_back, tempting=[forgets, replaces])

# %% [markdown]
# ## Exercise 3: the mean of means
#
# The last batch of an epoch is dealt unevenly; a rank may get no example at all. Write
# `statistics(group, x)`, which takes this rank's rows x[count, C] and returns (mean[C],
# variance[C]) of all ranks' rows, with one all_reduce.
#
# *Hint:* three sums.


# %%
def statistics(group, x):
    raise NotImplementedError  # your lines here


# %%
SIZES = [5, 3, 2, 0]


def given(group, attempt):
    rows = generator(0, "statistics").standard_normal((sum(SIZES), 3)) + 2
    start = sum(SIZES[: group.rank])
    sums, all_reduce = [], group.all_reduce
    group.all_reduce = lambda *args, **more: sums.append(1) or all_reduce(*args, **more)
    mean, variance = attempt(group, rows[start : start + SIZES[group.rank]])
    calls = [op for op in group.ledger.bytes if op != "all_reduce"] + ["all_reduce"] * len(sums)
    return off([mean, variance], [rows.mean(axis=0), rows.var(axis=0)]), calls


def check_statistics(attempt):
    with np.errstate(all="ignore"):
        found = cluster.run(given, attempt)
    error = max(error for error, _ in found)
    if not error < 1e-9:
        return f"with {SIZES} examples the statistics are off by {error:.1%}"
    if (calls := found[0][1]) != ["all_reduce"]:
        return f"it called {', '.join(calls) or 'nothing'}; one all_reduce is enough"


def mean_first(group, x):
    n = group.all_reduce(np.array(len(x)))
    mean = group.all_reduce(x.sum(axis=0)) / n
    return mean, group.all_reduce(((x - mean) ** 2).sum(axis=0)) / n


def mean_of_means(group, x):
    x = np.zeros((1, 3)) if len(x) == 0 else x
    both = np.stack([x.mean(axis=0), x.var(axis=0)])
    return tuple(group.all_reduce(both) / group.size)


def weighted_variances(group, x):
    sums = np.concatenate([[len(x)], x.sum(axis=0), x.var(axis=0) * len(x) if len(x) else [0] * 3])
    total = group.all_reduce(sums)
    return total[1:4] / total[0], total[4:] / total[0]


tempting = [mean_first, mean_of_means, weighted_variances]
exercise.judge(3, check_statistics, statistics, tempting=tempting)

# %% [markdown]
# ## What it costs, and the next problem
#
# - **Channels:** 4 (N-1) B C H W e per block, as in lesson 11; norms send nothing; N must divide
#   the channels.
# - **Rows:** halos do not grow with H. But with many ranks a rank computes a row or two, and sends
#   as many. Every weight, and its gradient, is on every rank.
# - **Batch norm** makes all ranks wait for each other where they share a channel, once forward and
#   once backward per layer: few bytes, but two waits. Layer norm needs no other example: its mean
#   is over the channels of one position.
# - **A sum of squares loses digits** where the mean is large. `autograd/batch_norm.py` subtracts a
#   number near the mean first, and sums over ranks in float64.
#
# Early and late layers of a network have different best cuts, and changing from one to the other
# sends bytes, too. Lesson 20 compares strategies, and chooses by hand.

# %%
for ranks in (cluster, pair):
    ranks.close()
