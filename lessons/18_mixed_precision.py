# %% [markdown]
# # 18. Mixed precision: what is lost in 16 or 8 bits, and what repairs it?
#
# Numbers of 16 bits take half the memory and half the bytes on every link, and processors multiply
# them several times faster. But float16 ends at 65504 on one side and at 6e-8 on the other, and has
# 11 significant bits. Training needs more of both. [Micikevicius et al.
# 2018](https://arxiv.org/abs/1710.03740) name what is lost and repair it (sections 3.1 to 3.3). The
# library's version is `minidist/mixed_precision.py`.
#
# Letters: `w` a weight, `g` its gradient, `s` the loss scale; `P` parameters; `N` ranks. The
# *spacing* at w is the distance to the next number of w's format: in float16 2^-10 |w|, or down to
# half of that.

# %%
import copy
import math

import numpy as np
from support import exercise, figures

from minidist import Cluster, nn, optim
from minidist.autograd.losses import scaled
from minidist.data_parallel.naive import all_reduce_gradients
from minidist.data_parallel.zero import Zero
from minidist.datasets import digits
from minidist.mixed_precision import LossScale, MixedPrecision, overflow_allowed, underflow
from minidist.planning.costs.zero import BYTES, zero_bytes_held

figures.arguments()
clusters = {N: Cluster(N) for N in (2, 3)}
images, labels = (array[:256] for array in digits())
images = images.reshape(len(images), -1)
SIZES = [64, 64, 64, 10]

# %% [markdown]
# ## Problem: float16 alone goes less than half of float32's way
#
# GPT-3 was trained on batches of 3.2 million tokens with a learning rate of 6e-5 ([Brown et al.
# 2020](https://arxiv.org/abs/2005.14165), table 2.1). We take such numbers: 256 images per rank on
# 16,384 ranks, 4 million in a batch, and a rate of 3e-5. To need one rank only, all ranks have the
# same images: the sum of their gradients is 16,384 times ours.
#
# By what is the loss divided? In this library by the whole batch, 4 million, so that the gradients
# of ranks only have to be summed (lesson 3). Then no number that enters backward is above 2.4e-7, a
# few times float16's smallest. PyTorch's DistributedDataParallel divides by the rank's own 256, and
# averages over ranks after backward: its numbers are 16,384 times larger. We try both.

# %%
RANKS, RATE, STEPS = 16384, 3e-5, 100


def loss_of(model, s=1.0, ranks=RANKS):
    """Return the loss, divided by the images of `ranks` ranks; backward gives s times its slope."""
    x = images.astype(model.parameters()[0].dtype)
    return scaled(nn.cross_entropy(model(x), labels, len(images) * ranks), s)


def learn(dtype, copies=False, s=1.0, ranks=RANKS, stored=None):
    """Train with Adam; return the loss after each step. `stored` rounds what a step has written."""
    model = nn.MLP(SIZES, "relu").astype(dtype)
    rule, losses = optim.Adam(model.parameters(), RATE), []
    float32 = [part.data.astype("float32") for part in rule.slices] if copies else None
    for _ in range(STEPS + 1):
        loss = loss_of(model, s, ranks)
        losses.append(float(loss) * ranks)
        loss.backward()
        rule.step(float32, factor=ranks / s)  # the ranks' sum or average, without the scale
        for part in rule.slices if stored else ():
            part.data[...] = stored(part.data)
        model.zero_grad()
    return losses


ways = {
    "float16": {},
    "with loss scaling": {"s": 2.0**15},
    "with float32 copies": {"copies": True},
    "with both": {"copies": True, "s": 2.0**15},
}
RUNS = {"float32": learn("float32")}
RUNS |= {name: learn("float16", **way) for name, way in ways.items()}
own = {name: learn("float16", **way, ranks=1) for name, way in ways.items()}


def progress(losses):
    """Return how much of float32's way a run has gone."""
    first, last = RUNS["float32"][0], RUNS["float32"][-1]
    return (first - losses[-1]) / (first - last)


print(f"{STEPS} steps in float32: loss {RUNS['float32'][0]:.3f} -> {RUNS['float32'][-1]:.3f}")
print("of this way, if the loss is divided by    the batch   a rank's images")
for name in ways:
    print(f"  {name:36} {progress(RUNS[name]):9.0%} {progress(own[name]):15.0%}")
assert progress(RUNS["float16"]) < progress(own["float16"]) < 0.5
assert 0.97 < progress(RUNS["with both"]) < 1.03
assert max(progress(RUNS["with loss scaling"]), progress(RUNS["with float32 copies"])) < 0.9
assert abs(progress(own["with loss scaling"]) - progress(own["float16"])) < 0.03
assert 0.97 < progress(own["with float32 copies"]) < 1.03

# %% [markdown]
# In the right column scaling changes nothing, and copies of the weights repair everything: there,
# all that is lost is lost when weights are updated. So what the left column loses besides is lost
# by our division, and the scale gives it back. Does a run that divides by its own number need no
# scale? Micikevicius et al. did not need one for image classifiers (section 4.1). But their
# detector's gradients were so small that it diverged without a scale; 8 was enough (section 3.2).
#
# ## Picture
#
#     float32 copy  w ---- round ----> float16 w ---> forward ---> loss
#          ^                                                        | times s
#          | Adam                                                   v
#     g / s in float32 <---- sum over ranks <---- float16 g s <--- backward
#
# Two things are lost, at the two places where a number is rounded to float16. A *gradient* of up to
# half of float16's smallest number becomes 0. An *update* below half the spacing at w leaves w as
# it is: 0.1 has a spacing of 6e-5, and Adam's update is about 3e-5 long. Each loss has its repair:
# the gradient is multiplied by s, and the update is added to a copy that has 24 bits.
#
# ## Math
#
#     underflow          g s = 0 in float16            if |g| s <= 2^-25
#     overflow           g s is infinite               if |g| s >= 65520
#     a lost update      float16(w + u) = w            if |u| < spacing(w) / 2 (w no power of 2)
#
# s is a power of two, so s g / s = g in every bit that neither limit takes. No s stays right:
# dynamic scaling begins high, halves s whenever a gradient is infinite, skips that step, and
# doubles s after some good steps. Sums need the third repair: 2048 + 1 = 2048 in float16, so
# products, norms and softmax add up in float32 and round once (section 3.3).
#
# ## Code
#
# The copies are a float32 model of their own, which an ordinary optimizer trains. All ranks have
# to decide together: a rank that holds other parameters, of ZeRO or of a pipeline, may be the only
# one whose gradients are infinite. So one byte per rank is reduced to the maximum.


# %%
class OurMixedPrecision:
    """Train a float16 model by a float32 copy of it."""

    def __init__(self, model, group, s):
        self.model, self.group, self.s = model, group, s
        self.wide = copy.deepcopy(model).astype("float32")
        self.rule = optim.Adam(self.wide.parameters(), RATE)

    def step(self):
        pairs = list(zip(self.model.parameters(), self.wide.parameters(), strict=True))
        infinite = np.array(not all(np.isfinite(p.grad).all() for p, _ in pairs), "uint8")
        if self.group.all_reduce(infinite, op="max"):
            self.s /= 2
        else:
            for p, wide in pairs:
                wide.grad = p.grad.astype("float32") / np.float32(self.s)
            self.rule.step()
            self.model.load_state(self.wide.state())  # rounds
        self.model.zero_grad()
        self.wide.zero_grad()


def train(group, way, first_scale):
    """Take ten steps on this rank's half of the images; return weights, last scale, bytes sent."""
    model = nn.MLP(SIZES, "relu").astype("float16")
    mine = np.array_split(np.arange(len(images)), group.size)[group.rank]
    if way == "ours":
        optimizer = OurMixedPrecision(model, group, first_scale)
    else:
        share = Zero(model, group, stage=2)  # each rank has half of the gradients and copies
        rule, scale = optim.Adam(share.parameters(), RATE), LossScale(first_scale)
        optimizer = MixedPrecision(rule, group, scale)
    with overflow_allowed():
        for _ in range(10):
            s = optimizer.s if way == "ours" else optimizer.loss_scale
            x = images[mine].astype("float16")
            loss = scaled(nn.cross_entropy(model(x), labels[mine], len(images)), s)
            if way == "ours":
                loss.backward()
                all_reduce_gradients(model, group)
                optimizer.step()
            else:
                share.accumulate(loss)
                share.step(optimizer)
    return model.state(), s


ours, librarys = (clusters[2].run(train, way, 2.0**24) for way in ("ours", "the library's"))
for (state, end), (want, same) in zip(ours, librarys, strict=True):
    assert end == same and all(np.array_equal(state[name], w) for name, w in want.items())
print(
    f"ours equals the library's, bit for bit; both have halved s from 2^24 to 2^{math.log2(end):g}"
)

# %% [markdown]
# The library's run is on ZeRO's shards, ours on whole replicas, and no bit differs: elements are
# added in the order of the ranks in both.
#
# ## Measurement
#
# What do formats lose of these gradients? 8-bit floats ([Micikevicius et al.
# 2022](https://arxiv.org/abs/2209.05433)) have two layouts, e4m3 and e5m2: bits of exponent and of
# mantissa. We count the gradients that become 0: divided by the batch, divided by a rank's images,
# with one scale for all tensors, and with a scale for each tensor. A scale is the largest power of
# two that does not overflow. (Only zeros are counted. What few bits of mantissa lose is not.)

# %%
FORMATS = {  # smallest number, largest number
    "float16": (2.0**-24, 65504.0),
    "bfloat16": (2.0**-133, 3.39e38),
    "e5m2": (2.0**-16, 57344.0),
    "e4m3": (2.0**-9, 448.0),
}
model = nn.MLP(SIZES, "relu")
loss_of(model).backward()
gradients = {name: p.grad.copy() for name, p in model.named_parameters().items()}


def largest_scale(arrays, largest):
    return 2.0 ** math.floor(math.log2(largest / max(float(np.abs(g).max()) for g in arrays)))


def lost(smallest, scales):
    """Return the share of all nonzero gradients that a format rounds to 0."""
    zeros = sum(((g != 0) & (abs(g) * k <= smallest / 2)).sum() for g, k in scales)
    return zeros / sum((g != 0).sum() for g in gradients.values())


shares = {}
for name, (smallest, largest) in FORMATS.items():
    tensors = list(gradients.values())
    one = min(1e30, largest_scale(tensors, largest))
    scales = [[(g, k) for g in tensors] for k in (1, RANKS, one)]
    each = [(g, min(1e30, largest_scale([g], largest))) for g in tensors]
    shares[name] = [float(lost(smallest, way)) for way in (*scales, each)]
    words = "{:9} lost: {:6.1%} by the batch, {:6.2%} by a rank's, {:6.2%} one scale, {:6.2%} each"
    print(words.format(name, *shares[name]))
assert shares["float16"][0] == underflow(gradients, "float16") > 0.1 > 0.01 > shares["float16"][1]
assert shares["e4m3"][1] > 0.1 and shares["e4m3"][3] <= shares["e4m3"][2] < 0.01

# %% [markdown]
# Without a scale, e4m3 loses many of these gradients by either division. bfloat16 loses none: it
# has float32's exponents. It pays with bits: 8 instead of 11. So more updates are lost. We store
# the weights in bfloat16, by rounding float32 to its upper half, and leave the rest in float32:


# %%
def bfloat16(x):
    """Round x, float32, to the nearest number of 8 significant bits; a tie goes to the even one."""
    bits = x.view("uint32")
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)).view("float32")


RUNS["bfloat16"] = learn("float32", stored=bfloat16)
RUNS["bfloat16, copies"] = learn("float32", copies=True, stored=bfloat16)
for name in ("bfloat16", "bfloat16, copies"):
    print(f"{name:16} {progress(RUNS[name]):4.0%} of float32's way, without a scale")
assert progress(RUNS["bfloat16"]) < progress(own["float16"])
assert 0.97 < progress(RUNS["bfloat16, copies"]) < 1.03

# %% [markdown]
# Bytes: a gradient of 2 bytes halves the all_reduce. (Sums of many ranks may be kept in float32:
# `model.astype("float16", grad_dtype="float32")` moves 4 bytes.) Memory: per parameter 2 for the
# weight, 2 for the gradient, 12 for Adam's two moments and the copy. That is 16, as in float32: 4,
# 4 and 8. What shrinks is what all ranks hold in ZeRO (lesson 5), and the activations.


# %%
def bytes_sent(group, dtype):
    model = nn.MLP(SIZES, "relu").astype(dtype)
    nn.cross_entropy(model(images.astype(dtype)), labels).backward()
    all_reduce_gradients(model, group)
    return group.ledger.total


P = sum(p.size for p in model.parameters())
sent = {dtype: sum(clusters[2].run(bytes_sent, dtype)) for dtype in ("float32", "float16")}
print("all_reduce:", ", ".join(f"{dtype} {nbytes:,} bytes" for dtype, nbytes in sent.items()))
assert sent["float32"] == 2 * sent["float16"] == 2 * 4 * P
assert sum(zero_bytes_held(0, [P], 1, 0, BYTES["mixed", 16]).values()) == 16 * P


# %%
def draw(plt):
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 5), width_ratios=[3, 2])
    figure.suptitle("Two things are lost in 16 bits, and each has its repair")
    g = np.concatenate([g.ravel() for g in gradients.values()])
    powers, bins = np.log2(np.abs(g[g != 0])), np.arange(-45, 17)
    for shift, color, words in (
        (0, figures.IDLE, "divided by the batch"),
        (15, figures.OWN, "times $2^{15}$"),
    ):
        heights, *_ = left.hist(powers + shift, bins, color=color, alpha=0.8)
        top = int(heights.argmax())
        left.text(bins[top] + 0.5, heights[top] * 1.03, words, ha="center", fontsize=10)
    below = -0.06 * left.get_ylim()[1]
    colors = figures.FORWARD, figures.UPDATE, figures.BACKWARD, figures.COMMUNICATION
    for row, ((name, (smallest, largest)), color) in enumerate(
        zip(FORMATS.items(), colors, strict=True)
    ):
        begin, end, y = (
            max(-45, math.log2(smallest)),
            min(16, math.log2(largest)),
            below * (row + 1.3),
        )
        left.plot([begin, end], [y, y], color=color, lw=11, solid_capstyle="butt")
        middle = {"ha": "right", "va": "center", "fontsize": 9}
        left.text(end - 0.5, y, name, color="white", weight="bold", **middle)
    left.axvline(-24, 0, 0.95, color=figures.FORWARD, lw=1, ls="--")
    left.set(title="Gradients: below $2^{-24}$ float16 has nothing but 0", yticks=[])
    left.set(xlim=(-45, 16), xlabel="log2 |gradient|", ylabel="how many")
    left.spines["bottom"].set_position(("data", below * 5.3))
    looks = {
        "float32": (figures.INK, "-"),
        "float16": (figures.EMPHASIS, "-"),
        "with loss scaling": (figures.BACKWARD, "-"),
        "with float32 copies": (figures.COMMUNICATION, "-"),
        "with both": (figures.FORWARD, "--"),
        "bfloat16": (figures.UPDATE, "-"),
        "bfloat16, copies": (figures.UPDATE, ":"),
    }
    for name, losses in RUNS.items():
        right.plot(
            losses, color=looks[name][0], ls=looks[name][1], lw=4 if name == "float32" else 2
        )
    ends = {name: (losses[-1], looks[name][0]) for name, losses in RUNS.items()}
    figures.label_ends(right, STEPS + 1, ends, 0.005)
    right.set(title="Loss divided by the batch: float16 needs both", xlabel="step", ylabel="loss")
    right.set(xlim=(0, 1.6 * STEPS), xticks=range(0, STEPS + 1, 20))
    return figure


figures.save(draw, "18_mixed_precision")

# %% [markdown]
# ## Exercise 1: how small is too small?
#
# Write `smallest_update(w)`: the limit u, for a float16 number w > 0 that is no power of two, such
# that w + 1.01 u rounds to another float16 number and w + 0.99 u does not.
#
# *Hint:* `np.spacing(w)` is the distance from w to the next number of w's dtype.


# %%
def smallest_update(w):
    """Return u, a Python float."""
    raise NotImplementedError  # your line here


# %%
def check_update(attempt):
    """Return what is wrong, or None."""
    for number in (0.1, 1.5, 3e-3, 700.0):
        w, u = np.float16(number), float(attempt(np.float16(number)))
        for factor, moves in ((0.99, False), (1.01, True)):
            if (np.float16(float(w) + factor * u) != w) != moves:
                words = "moves" if not moves else "does not move"
                return f"{w} {words} by {factor * u:.3g}, {factor} times your {u:.3g}"


def machine_epsilon(w):
    return float(np.finfo("float16").eps)


def relative(w):
    return float(w) * float(np.finfo("float16").eps) / 2


exercise.judge(1, check_update, smallest_update, tempting=[machine_epsilon, relative])

# %% [markdown]
# ## Exercise 2: why did this break?
#
# Somebody saves the all_reduce of the byte: each rank looks at its own gradients. On replicas all
# was well. On ZeRO's shards the weights of the ranks come apart. Why only there? Write
# `skip(group, finite)`, which returns on every rank whether the step is skipped. It may call
# collectives.
#
# *Hint:* on replicas, every rank looks at the same sum. Who holds an infinite shard?


# %%
def skip(group, finite):
    """Return a bool, the same on all ranks."""
    raise NotImplementedError  # your line here


# %%
def on_each(group, attempt, pattern):
    return bool(attempt(group, pattern[group.rank]))


def check_skip(attempt):
    for pattern in ((True, True, True), (True, False, True), (False, True, True), (False,) * 3):
        said = clusters[3].run(on_each, attempt, pattern)
        if said != [not all(pattern)] * 3:
            return f"ranks whose gradients are finite: {pattern}; they skip: {said}"


def own(group, finite):
    return not finite


def rank_0_decides(group, finite):
    return not group.broadcast(np.array(finite))


def minimum(group, finite):
    return group.all_reduce(np.array(not finite, "uint8"), op="min")


exercise.judge(2, check_skip, skip, tempting=[own, rank_0_decides, minimum])

# %% [markdown]
# ## Exercise 3: the best static scale
#
# Write `static_scale(gradients, ranks)` for a scale that never changes: the largest power of two
# with which no element overflows float16, neither on a rank nor in the sum over the ranks.
# `gradients` are float32 arrays of one rank; every rank may have as large ones, of one sign.
#
# *Hint:* float16 ends at 65504; `math.frexp` and `math.log2` know powers of two.


# %%
def static_scale(gradients, ranks):
    """Return a power of two."""
    raise NotImplementedError  # your lines here


# %%
def check_scale(attempt):
    random = np.random.default_rng(0)
    for ranks, size in ((1, 1.0), (4, 1e-3), (3, 1e-6), (8, 40.0)):
        arrays = [(random.standard_normal(9) * size).astype("float32") for _ in range(3)]
        k, most = attempt(arrays, ranks), ranks * max(float(np.abs(g).max()) for g in arrays)
        if math.frexp(k)[0] != 0.5:
            return f"{k} is no power of two: it would round every gradient"
        if k * most > 65504:
            return f"{ranks} ranks: {k:g} times their sum, {most:.3g}, is more than 65504"
        if 2 * k * most <= 65504:
            return f"{ranks} ranks: {2 * k:g} would not overflow either"


def of_one_rank(gradients, ranks):
    return largest_scale(gradients, 65504)


def not_a_power(gradients, ranks):
    return 65504 / (ranks * max(np.abs(g).max() for g in gradients))


exercise.judge(3, check_scale, static_scale, tempting=[of_one_rank, not_a_power])

# %% [markdown]
# ## What it costs, and the next problem
#
# - **12 bytes per parameter** of optimizer state where float32 has 8; ZeRO divides them by N.
# - **A decision per step:** one byte per rank, and the update waits for all gradients.
# - **Skipped steps:** each halving is a batch whose gradients were computed and thrown away.
# - **On a CPU it is slower:** NumPy has no float16 products; every array is widened and rounded.
#   `minidist train --precision float16` shows the same training, on any mesh, and not its speed.
#
# The gradients now take 2 bytes each, and all P of them still travel, in every step. Lesson 19 asks
# which of them could stay at home.

# %%
for cluster in clusters.values():
    cluster.close()
