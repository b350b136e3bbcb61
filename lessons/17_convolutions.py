# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
#   minidist: {lesson: 17, minutes: 30, needs: [2, 11], leads_to: [17b, 20], lab: none}
# ---

# %% [markdown]
# (lesson-17)=
# # 17. Images cut by channels, images cut by rows
#
# **Question.** A convolution can be cut by its channels, or by the rows of its images. What does
# each cut send, and which one sends less?
#
# You need [the functions $f$ and $g$](11_column_and_row.py). New word:
# [halo](pages/glossary.md#halo). Letters: $N$ ranks, $r$ one of them; $B$ images `X[B, C, height,
# width]` of $C$ channels, $S$ bytes in all; $Y$ an output, $W$ weights.

# %% tags=["setup", "hide-input"]
import numpy as np
from support import begin, exercise, figures

from minidist import Cluster, Tensor, nn
from minidist.autograd import Function, functions
from minidist.autograd.convolution import convolution
from minidist.planning.costs.layers import block_bytes
from minidist.tensor_parallel import ChannelParallelConv2d, FilterParallelConv2d, SpatialConv2d

begin()
N, C, cluster = 4, 8, Cluster(4)
X, dY = np.random.default_rng(0).standard_normal((2, 3, C, 16, 6))
kind = {"padding": 1, "bias": False, "dtype": "float64"}
convs = [nn.Conv2d(C, C, 3, name=name, **kind) for name in ("first", "second")]

# %% [markdown]
# ## Problem: twenty layers keep 86 GB of one image
#
# A photograph of 4096 x 4096 pixels in 64 channels has $2^{30}$ numbers: 4.3 GB in float32. Twenty
# such layers keep 86 GB until backward, more than a GPU of 80 GB has. A batch of one image cannot
# be cut by examples. The image itself can.
#
# ## Idea: a channel is a column, and a row has neighbours
#
# *Channels* ([Dryden et al. 2019](https://doi.org/10.1145/3295500.3356207), at SC). A filter sees
# all channels of X and makes one channel of the output, as a column of a matrix does; an input
# channel is like a row. So two convolutions are the MLP of [lesson 11](11_column_and_row.py).
#
# *Rows* ([Dryden et al. 2019](https://arxiv.org/abs/1903.06681), at IPDPS). Every rank has all
# weights and some rows of every image. At its border a window of 3 x 3 also sees one row of the
# neighbour: the *halo*. In backward the gradient of a halo goes back to the neighbour, which adds
# it to its own. The $dW$ of the ranks are summed, as in [data parallelism](03_data_parallel.py).


# %%
class Halo(Function):
    """X[B, C, rows, width] -> a row of each neighbour around it; zeros where the image ends."""

    def __init__(self, group):
        self.group, r = group, group.rank
        self.sides = [(q, end) for q, end in ((r - 1, 0), (r + 1, -1)) if 0 <= q < N]

    def swap(self, rows):
        """Send a row to each neighbour; return what comes, and on which side."""
        for q, end in self.sides:
            self.group.send(rows[:, :, end], q)  # never waits
        return [(end, self.group.recv(q)) for q, end in self.sides]

    def forward(self, x):
        y = np.pad(x, [(0, 0), (0, 0), (1, 1), (0, 0)])
        for end, row in self.swap(x):
            y[:, :, end] = row
        return y

    def backward(self, dy):
        dx = dy[:, :, 1:-1].copy()
        for end, row in self.swap(dy):
            dx[:, :, end] += row
        return dx


def by_rows(conv, group):
    return lambda x: convolution(Halo(group)(x), conv.weight, padding=(0, 1))


# %% [markdown]
# Is it exact? Ranks compare their parts with one device's. So do the library's strategies `spatial`
# ([its file](../minidist/tensor_parallel/spatial_parallel.py)), by rows, and `channel` ([its
# file](../minidist/tensor_parallel/channel_parallel.py)).


# %%
def step(x, dy, pair):
    x = Tensor(x, requires_grad=True)
    y = pair[1](functions.relu(pair[0](x)))
    y.backward(dy)
    return y.data, x.grad


def compare(group):
    rows = [np.split(array, N, axis=2)[group.rank] for array in (X, dY, *whole)]
    ours = [by_rows(conv, group) for conv in convs]
    spatial = [SpatialConv2d(conv, group, (0, 4, 8, 12, 16)) for conv in convs]
    channel = FilterParallelConv2d(convs[0], group), ChannelParallelConv2d(convs[1], group)
    errors, sent = [], [0]
    for pair, (x, dy, *want) in ((ours, rows), (spatial, rows), (channel, [X, dY, *whole])):
        errors.append(max(abs(a - b).max() for a, b in zip(step(x, dy, pair), want, strict=True)))
        sent.append(group.ledger.total)
    return errors, np.diff(sent)


whole = step(X, dY, convs)
errors, sent = map(np.array, zip(*cluster.run(compare), strict=True))
print("ours, `spatial`, `channel`: within", *[f"{error:.0e}" for error in errors.max(axis=0)])
assert errors.max() < 1e-11

# %% [markdown]
# ## What travels?
#
# | two convolutions, all ranks | bytes | what |
# |---|---|---|
# | channels | $4 (N-1) S$ | all_reduces of Y forward, of $dX$ backward |
# | rows: halos | $8 (N-1) S$ / height | some rows over each of $N-1$ borders |
# | rows: weights | $36 (N-1) C^2$ numbers | an all_reduce of $dW$ |
#
# :::{admonition} Predict before you run
# Two convolutions of 3 x 3, forward and backward: how many rows of an image cross one border?
# :::

# %% tags=["hide-output"]
terms = block_bytes(*X.shape, 8, N)
assert [terms["halos"], terms["halos"], terms["channels"]] == sent.sum(axis=0).tolist()
print("ours, `spatial`, `channel` sent", sent.sum(axis=0), "bytes: as in the table")
print(f"over each border {terms['halos'] / (N - 1) / X[:, :, 0].nbytes:g} rows of every image")

# %% [markdown]
# :::{dropdown} Where does the number come from?
# Each convolution sends one row both ways, and backward sends their gradients the other way round:
# $2 \times 2 \times 2$ rows. In numbers, rows send less if `36 C C + 8 B C width < 4 B C height
# width`, which is `9 C < B width (height - 2)`.
# :::
#
# :::{admonition} Predict before you run
# ResNet-34 ([He et al. 2016](https://arxiv.org/abs/1512.03385), table 1) has stages of 64, 128, 256
# and 512 channels with 56, 28, 14 and 7 rows and columns. In which do rows send less, for 32 images
# on four ranks?
# :::

# %% tags=["hide-output"]
STAGES = {64: 56, 128: 28, 256: 14, 512: 7}  # channels: rows
each = [block_bytes(32, wide, high, high, 4, N) for wide, high in STAGES.items()]
mb = {what: np.array([stage[what] for stage in each]) / 1e6 for what in terms}
for wide, channels, halos, weights in zip(STAGES, *mb.values(), strict=True):
    print(f"{wide:3} channels: {channels:3.0f} MB; rows: {halos:.0f} + {weights:.0f} MB")


# %% tags=["hide-input"]
def draw(plt):
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.9), width_ratios=[5, 4])
    for r in range(3):
        left.text(8 * r + 2.5, max(0, 4 * r - 1) - 0.8, f"rank {r}", ha="center", weight="bold")
        for row in range(max(0, 4 * r - 1), min(12, 4 * r + 5)):
            color = figures.OWN if row // 4 == r else figures.COMMUNICATION
            left.barh(row, 5, 1, 8 * r, color=color, edgecolor="white")
            left.text(8 * r + 2.5, row, f"row {row}", ha="center", va="center", fontsize=8)
    for x, y, to in ((5, 3, 3), (8, 4, -3), (13, 7, 3), (16, 8, -3)):
        left.annotate("", (x + to, y), (x, y), arrowprops={"arrowstyle": "->"})
    left.set(ylim=(13, -3), title="12 rows on three ranks, windows of 3 x 3")
    left.axis("off")
    at, halos = np.arange(4), mb["halos"]
    right.bar(at - 0.2, mb["channels"], 0.36, color=figures.BACKWARD, label="channels: Y, dX")
    right.bar(at + 0.2, halos, 0.36, color=figures.COMMUNICATION, label="rows: halos")
    right.bar(at + 0.2, mb["weights"], 0.36, halos, color=figures.UPDATE, label="rows: dW")
    right.set_xticks(range(4), [f"{wide}\n{high} x {high}" for wide, high in STAGES.items()])
    right.set(xlabel="channels; pixels", title="MB sent for a block of ResNet-34, 32 images")
    right.legend()
    return figure


figures.show(
    draw,
    "17_convolutions",
    caption="Pink: halos. Arrows: forward; backward sends gradients the other way round.",
    alt="Left: three ranks with four rows of an image each and a row of every neighbour. Right: "
    "bytes in four stages: for channels they fall from 308 to 39 MB, for rows they grow to 124.",
)

# %% [markdown]
# Halos do not grow with the height, nor $dW$ with the batch; an activation grows with both. Memory
# says the same: rows divide activations, channels divide weights. If the batch is cut as well, $dW$
# is summed in any case, and halos are all that rows add.
#
# :::{admonition} Predict before you run
# Images of 56 rows, first on 4 ranks, then on 14. What happens to the work of an inner rank, and to
# the bytes of its halos?
# :::
# :::{dropdown} Answer
# The work falls from 14 rows to 4. The bytes stay: one row to each side, per convolution and pass.
# They travel while a rank computes the rows that need no halo, if there are enough of these. An
# all_reduce behaves alike: a rank sends $2 S (N-1)/N$, nearly the same for all $N$.
# :::
#
# ## Exercise 1: larger windows, larger strides
#
# Windows of `window` x `window` pixels, an odd number, move by `stride` rows. Above and below an
# image are `window // 2` rows of zeros. The rank that has row `stride * i`, the middle of a window,
# computes row `i` of the output. Two ranks share an image; the second one's rows begin at `start`.
# How many rows cross the border in forward, both ways together?


# %% tags=["exercise"]
def rows_over(start, window, stride):
    """Return a number of rows."""
    raise NotImplementedError  # your lines here


exercise.judge("17.1", rows_over)

# %% [markdown]
# ## Exercise 2: why did this break?
#
# For windows of 5 x 5 somebody made halos of two rows, and wrote in backward `dx[:, :, :2] =
# received` and `dx[:, :, -2:] = received`. The output is one device's to the last bit, and training
# is worse. In which rows is $dX$ wrong, and why? Write `give_back` for `halo` rows on each side.


# %% tags=["exercise"]
def give_back(group, dy, halo):
    """dy[B, C, halo + rows + halo, width] -> dx[B, C, rows, width], with halo <= rows."""
    raise NotImplementedError  # your lines here


exercise.judge("17.2", give_back)

# %% [markdown]
# ## Exercise 3: one message instead of many
#
# On a slow link a message costs more than a row. So a rank may fetch, before the first layer, all
# rows that its output of the *last* layer sees, and compute some rows twice. How many rows of the
# image does a row of the last output see above the middle of its window? All windows are odd.


# %% tags=["exercise"]
def reach(layers):
    """Return a number of rows; layers: [(window, stride), ...], the first one first."""
    raise NotImplementedError  # your lines here


exercise.judge("17.3", reach)
cluster.close()

# %% [markdown]
# ## At work
#
# | here | PyTorch | Megatron-LM | DeepSpeed | JAX |
# |---|---|---|---|---|
# | `Halo` | `DTensor` with `Shard(3)`: by columns | | | `P(None, None, "rows")` for X |
# | channels | | | | `P("filters")` for W |
#
# **What it costs.** Rows: every rank has every weight. Channels: nothing hides the all_reduces.
#
# **Next:** a batch norm is between two convolutions. [Whose mean is it?](17b_batch_norm.py)
