# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
#   minidist: {lesson: 17b, minutes: 25, needs: [1, 2, 3], leads_to: [18, 20], lab: none}
# ---

# %% [markdown]
# (lesson-17b)=
# # 17b. Whose mean does a batch norm subtract?
#
# **Question.** Batch norm subtracts the mean of a batch. If the batch is cut over ranks, should a
# rank subtract its own mean or the mean of all, and does it matter for the accuracy?
#
# You need [the sum of shards' gradients](03_data_parallel.py). New word:
# [synchronised batch norm](pages/glossary.md#synchronised-batch-norm). Letters: $N$ ranks; $B$
# examples `X[B, C]` of $C$ channels; $Y$ is X, normalised.

# %% tags=["setup", "hide-input"]
import numpy as np
from support import begin, exercise, figures

from minidist import Cluster, Tensor, datasets, nn, optim
from minidist.autograd import Function
from minidist.data_parallel.sync_batch_norm import sync_batch_norm

begin()
N, C, cluster = 4, 64, Cluster(4)
X, dY = np.random.default_rng(0).standard_normal((2, 30, C)) + 3
digits = datasets.digit_images()
images, held_out = (half[0].reshape(-1, 64) for half in (digits.train, digits.held_out))
labels, answers = digits.train[1], digits.held_out[1]

# %% [markdown]
# ## Problem: with two examples, every number becomes 1 or -1
#
# Batch norm ([Ioffe and Szegedy 2015](https://arxiv.org/abs/1502.03167)) makes the mean of a
# channel 0 and its variance 1. A detector of objects needs large images, and a GPU has room for one
# or two ([Peng et al. 2018](https://arxiv.org/abs/1711.07240)). A rank that normalises two numbers
# by itself makes them -1 and 1, whatever they were.
#
# :::{dropdown} Where does the number come from?
# The mean is in the middle of the two, and the standard deviation is half of their distance.
# :::
#
# ## Idea: three sums forward, two backward
#
# Mean and variance follow from sums: how many numbers, their sum, the sum of their squares. Sums of
# parts add up, so one all_reduce gives every rank the statistics of the whole batch. In backward,
# because an example changes the mean and the variance of all examples, there are two sums more:
#
# `dX = (dY - mean(dY) - Y mean(dY Y)) / sqrt(variance)`


# %%
class Norm(Function):
    """Y = (X - mean) / sqrt(variance) per channel of X[B, C]; `add` sums an array over ranks."""

    def __init__(self, add):
        self.add = add

    def forward(self, x):
        sums = self.add(np.hstack([np.ones((len(x), 1)), x, x * x]).sum(axis=0))
        self.n = sums[0]
        mean, square = sums[1:].reshape(2, -1) / self.n
        self.scale = 1 / np.sqrt(square - mean**2 + 1e-5)
        self.y = (x - mean) * self.scale
        return self.y

    def backward(self, dy):
        mean, slope = self.add(np.stack([dy, dy * self.y]).sum(axis=1)) / self.n
        return (dy - mean - self.y * slope) * self.scale


# %% [markdown]
# Is it exact? Four ranks have 8, 8, 7 and 7 of 30 examples. The library's strategy is
# `sync_batch_norm` ([its file](../minidist/data_parallel/sync_batch_norm.py)).


# %%
def one_step(norm, x, dy):
    x = Tensor(x, requires_grad=True)
    y = norm(x)
    y.backward(dy)
    return np.stack([y.data, x.grad])


def on_ranks(group):
    x, dy = (np.array_split(array, N)[group.rank] for array in (X, dY))
    ours, sent = one_step(Norm(group.all_reduce), x, dy), group.ledger.total
    return ours, one_step(sync_batch_norm(nn.BatchNorm(C, dtype="float64"), group), x, dy), sent


whole = one_step(Norm(lambda sums: sums), X, dY)
*parts, sent = zip(*cluster.run(on_ranks), strict=True)
errors = [abs(np.concatenate(part, axis=1) - whole).max() for part in parts]
print("Y and dX against one device: ours {:.0e}, the library {:.0e}".format(*errors))
assert max(errors) < 1e-11

# %% [markdown]
# :::{admonition} Predict before you run
# How many bytes do the four ranks send for this norm? And for ten times as many examples?
# :::

# %% tags=["hide-output"]
print(f"{sum(sent):,} bytes: 2 (N - 1) all_reduced arrays of 4 C + 1 numbers, for any batch")
assert sum(sent) == 2 * (N - 1) * (4 * C + 1) * 8

# %% [markdown]
# Few bytes, but two waits per layer: ResNet-50 has 53 batch norms, and waits 106 times in a step. A
# cut of [rows](17_convolutions.py) needs the sums, too; a cut of channels sends nothing.
#
# ## Does a local mean matter for the gradient?
#
# A model with a norm after its first layer learns digits from batches of 32. Where ranks use their
# own means they do not meet in forward, so one device can take shard after shard.
#
# :::{admonition} Predict before you run
# Ranks have 2, 4, 8 or 16 of the 32 examples each. How far is the sum of their gradients from the
# batch's gradient: 1 %, 10 % or more of its length?
# :::


# %% tags=["hide-output"]
def model_of(seed):
    first, rest = nn.Linear(64, 64, name="first", seed=seed), nn.MLP([64, 64, 10], "relu", seed)
    return nn.Sequential([first, nn.BatchNorm(64), rest])


def accumulate(model, examples, size):
    """Add up the gradients of shards of `size` examples, each with its own mean."""
    for shard in np.split(examples, len(examples) // size):
        nn.cross_entropy(model(images[shard]), labels[shard], len(examples)).backward()


def gradient(size):
    model = model_of(0)
    accumulate(model, np.arange(32), size)
    return np.concatenate([p.grad.ravel() for p in model.parameters() if p.requires_grad])


SIZES, right = (2, 4, 8, 16, 32), gradient(32)
off = [np.linalg.norm(gradient(size) - right) / np.linalg.norm(right) for size in SIZES]
print("2, 4, 8, 16 and 32 examples a rank: off by", *[f"{error:.0%}" for error in off])

# %% [markdown]
# No average repairs that: it is the gradient of another model. So `all_reduce_gradients` of [lesson
# 3](03_data_parallel.py) refuses batch norms that are not synchronised.
#
# ## Does it matter for the accuracy?
#
# In evaluation there is no batch. A layer uses *running averages* of mean and variance, which each
# step of the training moves a little. Ranks with the same sums have the same averages, bit for bit;
# ranks with their own means do not, and PyTorch's data parallelism takes those of rank 0.
#
# :::{admonition} Predict before you run
# 60 steps with each size, four times. Which sizes have a lower accuracy on held-out digits?
# :::


# %% tags=["hide-output"]
def accuracies(size, seed):
    model = model_of(seed)
    optimizer = optim.Adam(model.parameters(), 0.01)
    for _, share in zip(range(60), datasets.Sampler(1472, 32, seed), strict=False):
        accumulate(model, share.examples, size)
        optimizer.step()
        optimizer.zero_grad()
    return [np.mean(model.train(on)(held_out).data.argmax(1) == answers) for on in (False, True)]


scores = np.array([[accuracies(size, seed) for seed in range(4)] for size in SIZES])
for size, (running, batch) in zip(SIZES, scores.mean(axis=1), strict=True):
    print(f"{size:2} examples: {running:.1%} by running averages, {batch:.1%} by a batch's mean")


# %% tags=["hide-input"]
def draw(plt):
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), sharex=True)
    left.plot(np.multiply(off, 100), "o-", color=figures.EMPHASIS)
    left.set(ylim=(0, None), title="Error of the gradient, %")
    right.plot(100 * scores[..., 0], "o", color=figures.FORWARD, alpha=0.5)
    right.plot(100 * scores[..., 0].mean(axis=1), color=figures.FORWARD)
    right.set(yticks=range(80, 101, 5), title="Accuracy in evaluation, %: four runs, their mean")
    for axes in (left, right):
        axes.set(xlabel="examples that share a mean")
        axes.set_xticks(range(len(SIZES)), ["2", "4", "8", "16", "all 32"])
    return figure


figures.show(
    draw,
    "17b_batch_norm",
    caption="All local means change the gradient; only those of very few examples cost accuracy.",
    alt="Left: the error of the gradient is largest with 2 examples, and large with 16. Right: the "
    "accuracy with all 32 is that with 16 and with 8 examples; it is lowest with 2.",
)

# %% [markdown]
# So the distance of a gradient says little about learning. What counts is how many *numbers* share
# a mean: of images of 8 x 8 pixels, two have 128 per channel. GroupNorm ([Wu and He
# 2018](https://arxiv.org/abs/1803.08494)) needs no other example: its means are over groups of
# channels of one. With two images a GPU, ResNet-50's error is 10.6 % lower with it (abstract).
#
# ## Exercise 1: the mean of means
#
# The last batch of an epoch is dealt unevenly, and a rank may have no example. This rank's rows are
# `x[rows, C]`. Use *one* all_reduce.


# %% tags=["exercise"]
def statistics(group, x):
    """Return (mean[C], variance[C]) of the rows of all ranks."""
    raise NotImplementedError  # your lines here


exercise.judge("17b.1", statistics)

# %% [markdown]
# ## Exercise 2: why did this break?
#
# A `Norm` is all in float32; the numbers of a channel are near 4096. Some variances are negative,
# and their roots nan. Which line is it? Now each rank subtracts its own mean before it sums
# squares. Write `variance(parts)`, of the rows of all ranks together.


# %% tags=["exercise"]
def variance(parts):
    """Return variance[C]; parts: [(rows, mean[C], sum of (x - mean)^2 [C]) of each rank, ...]."""
    raise NotImplementedError  # your lines here


exercise.judge("17b.2", variance)

# %% [markdown]
# ## Exercise 3: a norm that costs nothing
#
# In evaluation mean and variance are constants. So the norm can become a part of the layer before
# it: `X @ W + b` is `(X @ weight + bias - mean) / sqrt(variance + eps) * gain + shift`.


# %% tags=["exercise"]
def fold(weight, bias, mean, variance, gain, shift, eps):
    """Return (W[C, F], b[F]); weight is [C, F], all others but eps are [F]."""
    raise NotImplementedError  # your lines here


exercise.judge("17b.3", fold)
cluster.close()

# %% [markdown]
# ## At work
#
# | here | PyTorch | Megatron-LM | DeepSpeed | JAX |
# |---|---|---|---|---|
# | `sync_batch_norm` | `nn.SyncBatchNorm` | | | Flax: `BatchNorm(axis_name=...)` |
#
# **What it costs.** Two all_reduces of a few numbers per layer: latency, not bytes.
#
# **Next:** these sums need many bits. [How few do for the rest?](18_mixed_precision.py)
