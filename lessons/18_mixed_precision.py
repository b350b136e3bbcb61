# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
#   minidist: {lesson: 18, minutes: 35, needs: [3, 5], leads_to: [19, 20, 24], lab: bits_and_bytes}
# ---

# %% [markdown]
# (lesson-18)=
# # 18. Mixed precision: which numbers may have 16 or 8 bits?
#
# **Question.** Numbers of 16 or 8 bits take fewer bytes, and are multiplied several times faster.
# Where does a step of training lose something by them, and what repairs it?
#
# You need [what a step keeps](05_zero.py). New words: [spacing](pages/glossary.md#spacing),
# [float32 copy](pages/glossary.md#float32-copy), [loss scale](pages/glossary.md#loss-scale),
# [underflow](pages/glossary.md#underflow). Letters: $N$ ranks, $P$ parameters.

# %% tags=["setup", "hide-input"]
from functools import partial

import numpy as np
from support import begin, exercise, figures
from threadpoolctl import threadpool_limits

from minidist import Cluster, Tensor, datasets, nn, optim
from minidist.autograd import Function, functions
from minidist.backend import BFLOAT16, E4M3, FLOAT16, rounded
from minidist.data_parallel.naive import all_reduce_gradients
from minidist.parallel.mixed_precision import LossScale, MixedPrecision

begin()
threadpool_limits(1)
RATE, N, cluster, exact = 1e-4, 2, Cluster(2), np.asarray
X, Y = (array[:256] for array in datasets.digits())


def model(seed=0):
    sizes = {"a": (64, 128, False, "relu"), "b": (128, 10, False)}
    layers = [nn.Linear(*size, name=name, seed=seed) for name, size in sizes.items()]
    return nn.Sequential(layers).astype("float16").astype("float32")  # weights that float16 has


# %% [markdown]
# ## Problem: a weight of 0.1 never moves
#
# bfloat16 has 8 significant bits. Its number after 0.1 is $2^{-11} = 0.0005$ away. Adam moves a
# weight by about the learning rate, 0.00008 in Llama 3 405B ([Dubey et al.
# 2024](https://arxiv.org/abs/2407.21783), table 3). The sum is rounded to 0.1 again.
#
# ## Idea: round what is multiplied, not what is added up
#
# Sums need many bits, such as a weight and its updates; factors do not. So weights stay in float32,
# as *copies* that the optimizer updates, and products round their factors to the nearest numbers of
# a format ([Micikevicius et al. 2018](https://arxiv.org/abs/1710.03740), sections 3.1 to 3.3).

# %%
FORMATS = {"bfloat16": BFLOAT16, "float16": FLOAT16, "e4m3": E4M3}
bfloat16, float16, e4m3 = (partial(rounded, form=form) for form in FORMATS.values())


class Product(Function):
    """Y = X W  =>  dX = dY W^T, dW = X^T dY: factors and results are rounded, sums are not."""

    def __init__(self, factor, result):
        self.factor, self.result = factor, result

    def forward(self, x, w):
        self.x, self.w = self.factor(x), self.factor(w)
        return self.result(self.x @ self.w)

    def backward(self, dy):
        dy = self.factor(dy)
        return self.result(dy @ self.w.T), self.result(self.x.T @ dy)


def learn(factor=exact, result=exact, sums=(exact,) * 3, steps=400, scale=1.0, seed=0):
    """Return two trained matrices, losses, and the share of right answers; round Adam's sums."""
    first, second = weights = model(seed).parameters()
    rule, losses = optim.Adam(weights, RATE), []
    for _ in range(steps):
        hidden = functions.relu(Product(factor, result)(Tensor(result(X)), first))
        logits = Product(factor, result)(hidden, second)
        losses.append(nn.cross_entropy(logits, Y))
        rule.zero_grad()
        (losses[-1] * scale).backward()
        rule.step(factor=1 / scale)
        for p, averages in zip(weights, rule.state, strict=True):
            for array, rounds in zip([p.data, *averages], sums, strict=True):
                array[...] = rounds(array)
    return weights, [*map(float, losses)], np.mean(logits.data.argmax(axis=1) == Y)


# %% [markdown]
# Is it right? The library's strategy is `mixed_precision`, an optimizer [around an
# optimizer](../minidist/parallel/mixed_precision.py). NumPy has no bfloat16, so bits are float16's.
#
# :::{admonition} Predict before you run
# Two ranks sum gradients of 16 bits, and agree by a byte each to take the step. How many bytes do
# they send, compared with float32's?
# :::


# %% tags=["hide-output"]
def library(group):
    low = model().astype("float16")
    optimizer = MixedPrecision(optim.Adam(low.parameters(), RATE), group, LossScale(1.0, None))
    for _ in range(20):
        nn.cross_entropy(low(X.astype("float16")), Y, N * len(Y)).backward()
        all_reduce_gradients(low, group)
        optimizer.step()
        optimizer.zero_grad()
    return low.layers[0].weight.data, group.ledger.total / 20


(theirs, sent), P = cluster.run(library)[0], 64 * 128 + 128 * 10
equal = np.mean(float16(learn(float16, float16, steps=20)[0][0].data) == theirs)
print(f"{equal:.0%} of weights equal; a step sends {N * sent:,.0f} = 2 (N - 1) (2 P + 1) bytes")
assert equal > 0.99 and N * sent == 2 * (N - 1) * (2 * P + 1)

# %% [markdown]
# ## Who learns like float32?
#
# e4m3, a format of 8 bits ([Micikevicius et al. 2022](https://arxiv.org/abs/2209.05433)), has no
# number between 0 and 0.002. So an array is multiplied by a *scale*: the largest power of two with
# which its largest number fits. float16's smallest is $2^{-24}$. Let 16,384 ranks have 256 images
# each. This library divides the loss by all images before backward; PyTorch by the rank's: so in
# backward its gradients are $2^{14}$ times as large. A *loss scale* of $2^{14}$ does the same.
#
# :::{admonition} Predict before you run
# Which learn like float32 in 400 steps: bfloat16 with copies and without, e4m3 with scales and
# without, float16 divided by the rank's images and by all?
# :::


# %% tags=["hide-output"]
def scaled_e4m3(x):
    scale = 2.0 ** np.floor(np.log2(448 / max(abs(x).max(), 1e-30)))
    return e4m3(x * scale) / scale


RUNS = {
    "float32": learn(),
    "bfloat16": learn(bfloat16, bfloat16),
    "bfloat16, no copies": learn(bfloat16, bfloat16, (bfloat16, exact, exact)),
    "e4m3, no scale": learn(e4m3, bfloat16),
    "e4m3, a scale per array": learn(scaled_e4m3, bfloat16),
    "float16, by the rank's images": learn(float16, float16),
    "float16, by all images": learn(float16, float16, scale=2**-14),
}
for name, (_, losses, right) in RUNS.items():
    print(f"{name:30} loss {losses[-1]:.2f}, {right:.0%} right")
g = np.concatenate([p.grad[p.grad != 0] for p in RUNS["float32"][0]])
print(f"{np.mean(float16(g / 2**14) == 0):.0%} of the gradients are 0 in float16, by all images")


# %% tags=["hide-input"]
figures.show(
    partial(figures.numbers_and_losses, gradients=g, formats=FORMATS, runs=RUNS),
    "18_mixed_precision",
    caption="Left: what is left of a format's bar is 0. Right: four runs cannot be told apart.",
    alt="Left: many gradients are below float16's or e4m3's smallest number. Right: seven losses.",
)

# %% [markdown]
# Lost updates need copies, lost gradients a loss scale. If a gradient is infinite, all ranks halve
# the scale and skip the step. bfloat16 has float32's exponents and needs none.
#
# ## Which sums need how many bits?
#
# Weights and Adam's two averages are sums over time. We round one to bfloat16: to nearest, or
# *at random*: up with the probability of the fraction that is lost, so that the mean is right
# ([Zamirai et al. 2021](https://arxiv.org/abs/2010.06192)).


# %% tags=["hide-output"]
uniform = np.random.default_rng(0).random
WAYS = {"nearest": bfloat16, "at random": lambda x: rounded(x, BFLOAT16, uniform(x.shape))}
best = [learn(seed=seed)[1][-1] for seed in range(3)]
for at, name in enumerate(("weights", "first average", "second average")):
    for way, rounds in WAYS.items():
        sums = [rounds if i == at else exact for i in range(3)]
        worse = np.array([learn(sums=sums, seed=seed)[1][-1] for seed in range(3)]) - best
        print(f"{name:14} {way:9}: loss {worse.mean():+.4f}, by seed +- {worse.std():.4f}")
        assert (abs(worse).max() > 0.02) == ((at, way) == (0, "nearest"))

# %% [markdown]
# A step takes 1/1000 off the second average, less than half a spacing: to nearest it never falls.
# (400 steps do not show it.) Weights learn if rounded at random: 8 bytes per parameter with
# averages of 16 bits ([its file](../minidist/nn/optim/stochastic_rounding.py)). A draw is a hash of
# step, name and place in the whole array: all ranks that have a weight round it alike.
#
# Newer scales are for 32 numbers (MX, [Rouhani et al. 2023](https://arxiv.org/abs/2310.10537)) or
# 128 ([DeepSeek-V3](https://arxiv.org/abs/2412.19437), [here](../minidist/autograd/eight_bits.py)).
#
# :::{admonition} Predict before you run
# 4,096 normal numbers, of which one is replaced by 1,000,000. How many become 0 in e4m3, with one
# scale, and with a scale for each block of 32?
# :::
# :::{dropdown} Where does the number come from?
# The scale is $2^{-12}$, and half of e4m3's smallest number $2^{-10}$: what is below 4 becomes 0.
# That is all 4,095 others, or the 31 of one block. Exercise 3 counts them.
# :::
#
# ## Exercise 1: how small is too small?
#
# Return from which size on an update counts: $w$ plus 1.01 of it is another number of $w$'s format,
# and $w$ plus 0.99 of it is not. $w$ is positive and no power of two.


# %% tags=["exercise"]
def smallest_update(w):
    """Return a Python float; w is an np.float16 or an np.float32."""
    raise NotImplementedError  # your line here


exercise.judge("18.1", smallest_update)

# %% [markdown]
# ## Exercise 2: why did this break?
#
# Somebody saved the all_reduce of one byte: a rank skips the step if one of its own gradients is
# infinite. On copies of a whole model all was well. With [ZeRO's shards](05_zero.py) the weights of
# the ranks came apart. Why only there? Write `skip`, with any collectives.


# %% tags=["exercise"]
def skip(group, finite):
    """Return whether to skip the step, the same on all ranks; finite: this rank's gradients are."""
    raise NotImplementedError  # your line here


exercise.judge("18.2", skip)

# %% [markdown]
# ## Exercise 3: a scale for each block
#
# Return for each block of neighbours of `x[n]` the largest power of two with which none of its
# elements is above 448. The last block may be shorter. For a block of zeros return 1.


# %% tags=["exercise"]
def block_scales(x, block):
    """Return an array of powers of two, one for each `block` elements."""
    raise NotImplementedError  # your lines here


exercise.judge("18.3", block_scales)
cluster.close()

# %% [markdown]
# ## At work
#
# | here | PyTorch | Megatron-LM | DeepSpeed | JAX |
# |---|---|---|---|---|
# | copies; at random | `MixedPrecisionPolicy`; torchao | `--bf16` | `"bf16"` | `jnp.bfloat16` |
# | loss scale | `GradScaler` | `--initial-loss-scale` | `"fp16"` | `jmp.DynamicLossScale` |
# | 8 bits | torchao `convert_to_float8_training` | `--fp8-format` | | |
#
# **What it costs.** [12 bytes](05_zero.py) per parameter in the optimizer, where float32 has 8.
# **Next:** all gradients still travel. [Could some stay at home?](19_fewer_bytes.py)
