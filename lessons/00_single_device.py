# %% [markdown]
# # 0. One device
#
# This course is about training one model on many devices. Every way to do that splits something,
# and pays for it by sending something else. To see what is worth splitting, we first look at one
# device: what a training step does, what it costs in seconds and in bytes, and which of three
# things runs out first: *compute* (operations per second), *memory* (bytes that fit) or
# *communication* (bytes per second between devices). Our device is one core of a CPU.
#
# Letters: `P` parameters, `B` examples in a batch, `C0 ... Cn` the widths of a network's layers.

# %%
import time

import numpy as np
from support import exercise, figures
from threadpoolctl import threadpool_limits

from minidist import nn, optim
from minidist.autograd.kept import kept_bytes
from minidist.datasets import Sampler, digits, text
from minidist.rng import generator

figures.arguments()
limits = threadpool_limits(1)  # one device is one core here

# %% [markdown]
# ## Problem
#
# A text of about half a million characters, the help pages inside Python, and a character
# Transformer of two blocks. How long does one pass over the text, one *epoch*, take here? A step
# has three parts, and we keep their times apart: *forward* computes the loss of a batch, *backward*
# its gradient, *update* changes the parameters. We time a few steps and multiply.

# %%
WIDTHS, CONTEXT, BATCH = [32, 64, 128, 256], 64, 16
corpus = text()
inputs, targets = corpus.windows(CONTEXT)
STEPS_PER_EPOCH = len(inputs) / BATCH


def time_step(model, x, y, rounds=6):
    """Return the median seconds of forward, backward and update."""
    optimizer, rows = optim.Adam(model.parameters(), lr=1e-3), []
    for _ in range(rounds):
        times = [time.perf_counter()]
        loss = nn.cross_entropy(model(x), y)
        times.append(time.perf_counter())
        loss.backward()
        times.append(time.perf_counter())
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter())
        rows.append(np.diff(times))
    return np.median(rows, axis=0)


def count(model):
    return sum(p.size for p in model.parameters())


sizes, parts = [], []
for width in WIDTHS:
    model = nn.Transformer(corpus.vocab, width, 4, 2, CONTEXT)
    sizes.append(count(model))
    parts.append(time_step(model, inputs[:BATCH], targets[:BATCH]))
    forward, backward, update = 1e3 * parts[-1]
    print(
        f"{sizes[-1]:9,} parameters: forward {forward:5.1f} ms, backward {backward:5.1f} ms,",
        end="",
    )
    print(f" update {update:4.1f} ms; an epoch {STEPS_PER_EPOCH * sum(parts[-1]):5.1f} s")
speed = 6 * sizes[-1] * BATCH * CONTEXT / sum(parts[-1])  # operations per second, see below
years = 6 * 175e9 * 300e9 / speed / (365 * 24 * 3600)
print(f"{speed / 1e9:.0f} billion operations a second: GPT-3 would take {years:,.0f} years here,")
print(f"and {16 * 175e9 / 1e12:.1f} TB of memory before the first example is read")

# %% [markdown]
# Time grows with the number of parameters. A parameter costs about 6 operations per token (here a
# character): a multiplication and an addition in forward, twice that in backward (Kaplan et al.
# 2020, section 2.1; they leave embeddings out, under 3% of our largest model). GPT-3 has 175
# billion parameters and has read 300 billion tokens (Brown et al. 2020, table 2.1); that makes the
# years. The terabytes are 16 bytes per parameter: see below.
#
# ## Picture
#
# ```
#     batch --> forward --> loss --> backward --> gradients --> update --> new parameters
#                  |                    ^                         ^  |
#                  +--- activations ----+           Adam's m, v --+--+
# ```
#
# Forward keeps arrays for backward, and one update keeps averages for the next. These arrays fill
# the memory.
#
# ## Math
#
# ```
#     L(w)     = 1/n  sum over examples i  of  l_i(w)                the loss of a batch of n
#     dL/dw    = sum over parts k  of  1/n  sum over i in k  of  dl_i/dw      however it is cut
#     w       <- w - lr m' / (sqrt v' + eps)         Adam; m, v: running means of dL/dw, its square
#                m' = m / (1 - b1^t),  v' = v / (1 - b2^t)      bias correction in update t
# ```
#
# The second line is all of data parallelism. Keep an eye on its `1/n`: `n` is the size of the whole
# batch, not the size of the part (exercise 3).
#
# ## Code
#
# The digits: 1,797 images of 8 x 8 pixels. We train on 1,500 and keep 297 for a test at the end.
# The loop in `train` is what the rest of this course will change, one line at a time. First the
# update, written out (Kingma and Ba 2015, algorithm 1):


# %%
class AdamByHand:
    def __init__(self, parameters, lr):
        self.parameters, self.lr, self.t = parameters, lr, 0
        self.m = [np.zeros_like(p.data) for p in parameters]
        self.v = [np.zeros_like(p.data) for p in parameters]

    def step(self, b1=0.9, b2=0.999, eps=1e-8):
        self.t += 1
        for p, m, v in zip(self.parameters, self.m, self.v, strict=True):
            m += (1 - b1) * (p.grad - m)
            v += (1 - b2) * (p.grad**2 - v)
            p.data -= self.lr * (m / (1 - b1**self.t)) / (np.sqrt(v / (1 - b2**self.t)) + eps)

    def zero_grad(self):
        for p in self.parameters:
            p.grad = None


def train(model, optimizer, images, labels, epochs):
    for epoch in range(epochs):
        for share in Sampler(len(images), batch=64).epoch(epoch):  # every epoch in a new order
            x, y = images[share.examples], labels[share.examples]
            loss = nn.cross_entropy(model(x), y)  # forward
            loss.backward()  # fills p.grad
            optimizer.step()  # update
            optimizer.zero_grad()  # or the next backward would add to it


images, labels = digits()
order = generator(0, "held out").permutation(len(images))
learn, ask = order[:1500], order[1500:]
model = nn.MLP([64, 128, 128, 10])
train(model, AdamByHand(model.parameters(), lr=1e-3), images[learn], labels[learn], epochs=15)
right = (model(images[ask]).data.argmax(axis=1) == labels[ask]).mean()
print(
    f"{count(model):,} parameters, 15 epochs: {right:.1%} of {len(ask)} held-out digits are right"
)
assert right > 0.95

# %% [markdown]
# The library's `optim.Adam` is the same rule, over one flat vector per layer instead of one array
# per parameter. In float64 both give the same weights, up to rounding:

# %%
ours, theirs = (nn.MLP([64, 128, 128, 10], dtype="float64") for _ in range(2))
x, y = images[learn].astype("float64"), labels[learn]
train(ours, AdamByHand(ours.parameters(), lr=1e-3), x, y, epochs=2)
train(theirs, optim.Adam(theirs.parameters(), lr=1e-3), x, y, epochs=2)
apart = max(abs(ours.state()[name] - w).max() for name, w in theirs.state().items())
print(f"48 updates by hand and by the library: no weight differs by more than {apart:.0e}")
assert apart < 1e-9

# %% [markdown]
# ## Measurement: memory
#
# Sixteen bytes per parameter in float32: 4 for itself, 4 for its gradient, 8 for Adam's two
# averages. We measure the arrays:

# %%
SIZES = [64, 512, 512, 10]
model = nn.MLP(SIZES)
optimizer = optim.Adam(model.parameters(), lr=1e-3)
nn.cross_entropy(model(images[:64]), labels[:64]).backward()
optimizer.step()
P = count(model)
parameters = sum(layer.flat.vector.nbytes for layer in model.layers)
gradients = sum(layer.flat.gradient.nbytes for layer in model.layers)
averages = sum(array.nbytes for arrays in optimizer.state for array in arrays)
print(f"{P:,} parameters: {parameters:,} bytes, gradients {gradients:,}, averages {averages:,}")
assert (parameters, gradients, averages) == (4 * P, 4 * P, 8 * P)

# %% [markdown]
# Then there are the arrays that forward keeps for backward, the *activations*. The loss knows the
# function that made it, each function knows those that made its inputs, and each keeps the arrays
# that its backward will read. `kept_bytes` walks this graph and adds them up. For an MLP they are
# the input, every layer's output (the last one as probabilities), and per example two integers of 8
# bytes, its row and its label.


# %%
def formula(sizes, batch):
    return batch * (4 * sum(sizes) + 2 * 8)


def measured(sizes, batch):
    x, y = np.zeros((batch, sizes[0]), "float32"), np.zeros(batch, int)
    return kept_bytes(nn.cross_entropy(nn.MLP(sizes)(x), y))


BATCHES = [1, 250, 500, 750, 1000, 1250, 1500]
held = [measured(SIZES, batch) for batch in BATCHES]
for batch, found in list(zip(BATCHES, held, strict=True))[::2]:
    print(f"batch {batch:4}: activations {found / 1e6:5.2f} MB, beside {16 * P / 1e6:.2f} MB")
assert held == [formula(SIZES, batch) for batch in BATCHES], "to the byte"

# %% [markdown]
# Activations are needed until their own backward. So a batch that is too large can be cut into
# *micro-batches*: run forward and backward on one after the other, and let the gradients add up in
# `p.grad`; the dashed line in the figure. Exercise 3 shows the one trap in it.
#
# The figure: left, where the time goes; right, what stays in memory, each in the colour of the part
# of the step in which it first appears. Later lessons keep these colours.


# %%
def draw(plt):
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.4), width_ratios=[1, 1.2])
    figure.suptitle("One device: time grows with the model, memory with the model and the batch")
    millions, epoch = np.array(sizes) / 1e6, STEPS_PER_EPOCH * np.array(parts)
    looks = {"forward": (figures.FORWARD, "o-"), "backward": (figures.BACKWARD, "s--")}
    looks |= {"update": (figures.UPDATE, "^:")}
    for (name, (color, look)), seconds in zip(looks.items(), epoch.T, strict=True):
        left.loglog(millions, seconds, look, color=color)
        left.text(1.15 * millions[-1], seconds[-1], name, color=color, va="center")
    left.set(title="A Transformer on half a million characters", ylabel="time of an epoch (s)")
    left.set(xlabel="parameters (millions)", xlim=(0.02, 6))
    left.set_xticks([0.03, 0.1, 0.3, 1], ["0.03", "0.1", "0.3", "1"])
    left.set_yticks([0.1, 1, 10], ["0.1", "1", "10"])
    left.minorticks_off()
    left.spines["bottom"].set_bounds(0.02, millions[-1])

    grid = np.array([0, BATCHES[-1]])
    top = (16 * P + formula(SIZES, grid)) / 1e6
    layers = {  # from, to, colour, hatch
        "parameters": (0, 4 * P / 1e6, figures.FORWARD, ""),
        "gradients": (4 * P / 1e6, 8 * P / 1e6, figures.BACKWARD, "//"),
        "Adam's two averages": (8 * P / 1e6, 16 * P / 1e6, figures.UPDATE, ".."),
        "activations": (16 * P / 1e6, top, figures.FORWARD, ""),
    }
    for name, (low, high, color, hatch) in layers.items():
        alpha = 0.3 if name == "activations" else 0.7
        look = {"color": color, "alpha": alpha, "hatch": hatch, "edgecolor": "white"}
        right.fill_between(grid, low, high, linewidth=0, **look)
        middle = (low + np.max(high)) / 2 + (name == "activations") * -0.8
        place = (1050 if name == "activations" else 30, middle)
        right.text(*place, name, va="center", bbox={"facecolor": "white", "pad": 2, "lw": 0})
    right.plot(BATCHES, (16 * P + np.array(held)) / 1e6, "o", color=figures.FORWARD, clip_on=False)
    right.text(700, 9.4, "line: formula\ndots: measured", ha="right")
    right.plot(grid, top, color=figures.FORWARD)
    piece = (16 * P + formula(SIZES, 64)) / 1e6
    right.plot(grid, [piece, piece], "--", color=figures.EMPHASIS)
    right.text(1490, piece + 0.2, "in micro-batches of 64", color=figures.EMPHASIS, ha="right")
    right.set(title=f"An MLP of {P / 1e6:.2f} million parameters", ylabel="memory of a step (MB)")
    right.set(xlabel="batch (examples)", xlim=(0, BATCHES[-1]), ylim=(0, 12))
    return figure


figures.save(draw, "00_single_device")

# %% [markdown]
# ## Measurement: what hurts first
#
# Now three real models of Brown et al. (2020, table 2.1) with their batches, on a larger device:
# 80 GB of memory and 1e14 operations per second (an NVIDIA A100 has that memory, and three times
# that speed at its peak, in 16-bit numbers), and a link of 100 Gbit/s to its neighbours.
# Communication: if devices share a batch, each needs the sum of all gradients. Lesson 2 shows
# that this takes two copies of the gradient through each link, here of 2 bytes per parameter.

# %%
MEMORY, SPEED, LINK = 80e9, 1e14, 100e9 / 8  # bytes, operations per second, bytes per second
for name, P_real, tokens in [
    ("GPT-3 small", 125e6, 0.5e6),
    ("GPT-3 6.7B", 6.7e9, 2e6),
    ("GPT-3", 175e9, 3.2e6),
]:
    compute, bytes_held, sending = 6 * P_real * tokens / SPEED, 16 * P_real, 2 * 2 * P_real / LINK
    print(
        f"{name:11} a step: {compute:7,.0f} s of compute, {bytes_held / 1e9:5,.0f} GB held", end=""
    )
    print(f" ({bytes_held / MEMORY:5.2f} devices), {sending:6.2f} s of sending")

# %% [markdown]
# *Compute hurts first.* The small model fits in 2.5% of the memory, and 300 billion tokens are
# 600,000 steps of 3.75 seconds: 26 days. So we share the batch.
#
# *Memory hurts next*, all at once: beyond 5 billion parameters (80 GB / 16) a step is not slow but
# impossible. So we share the model as well, or its gradients and Adam's averages.
#
# *Communication hurts last, and then always.* A single device sends nothing. Share the step of the
# largest model among 600 devices, and each computes for 56 seconds and sends for 56 (exercise 2).
# Every remedy has this price, and each family of strategies is a choice of what to split and,
# therefore, what to send:
#
# | family | splits | sends | lessons |
# |---|---|---|---|
# | data parallel | the batch | gradients, once per step | 3; without waiting: 4 |
# | ZeRO | what data parallelism keeps on every device | gradients and parameters | 5 |
# | pipeline | the layers | activations between neighbours | 6 to 10 |
# | tensor parallel | the matrices in a layer | activations, several times per layer | 11, 12 |
# | sequence parallel | each example's positions, between matrices | activations, elsewhere | 13 |
# | context parallel | each example's positions, everywhere | keys and values | 14 |
# | experts | the experts of a layer | positions' activations | 15 |
# | hybrid | all of these, on a grid of devices | each axis its own | 16 |
#
# Lesson 20 compares them. One promise holds for all, and this course checks it: their gradient is
# the one that a single device would have computed; or, where no device waits (lessons 4 and 9),
# exactly the older one that the strategy promises.
#
# ## Exercise 1: what fits
#
# A device has `memory` bytes. How many examples can a batch have, at most, if an MLP of these sizes
# is trained on it with Adam in float32? The check builds the model and measures.
#
# *Hint:* first pay for what does not depend on the batch. A layer from `C_in` to `C_out` has
# `C_in C_out + C_out` parameters. If nothing is left, the answer is 0.


# %%
def largest_batch(sizes, memory):
    raise NotImplementedError  # your lines here


def check_batch(attempt):
    for sizes, memory in [([64, 32, 10], 100_000), (SIZES, 9_000_000), ([5, 4], 999), ([9, 9], 9)]:
        batch, fixed = attempt(sizes, memory), 16 * count(nn.MLP(sizes))
        if batch > 0 and fixed + measured(sizes, batch) > memory:
            return f"{sizes} in {memory:,} bytes: a batch of {batch} does not fit"
        if fixed + measured(sizes, batch + 1) <= memory:
            return f"{sizes} in {memory:,} bytes: a batch of {batch}, but one more fits"


def forgets_adam(sizes, memory):
    return memory // formula(sizes, 1)


# Prints what the check says about your answer, and about tempting wrong ones, which it must refuse.
exercise.judge(1, check_batch, largest_batch, tempting=[forgets_adam])

# %% [markdown]
# ## Exercise 2: where sending wins
#
# N devices share a batch of `tokens` tokens evenly. At which N, not rounded, does a step send for
# as long as it computes? Units are as in `SPEED` and `LINK`. *Hint:* set the two times equal; the
# size of the model drops out.


# %%
def devices(tokens, speed, link):
    raise NotImplementedError  # your line here


def check_devices(attempt):
    for tokens, speed, link in [(3.2e6, 1e14, 12.5e9), (5e5, 1e14, 12.5e9), (3.2e6, 3e14, 5e10)]:
        N = attempt(tokens, speed, link)
        computing, sending = 6 * 1e9 * tokens / speed / N, 4 * 1e9 / link
        if not abs(computing / sending - 1) < 1e-6:
            return (
                f"{N:,.0f} devices, P = 1e9: {computing:.3f} s of compute, {sending:.3f} s sending"
            )


def one_copy(tokens, speed, link):  # of the gradient, where an all-reduce moves two
    return 6 * tokens * link / (2 * speed)


exercise.judge(2, check_devices, devices, tempting=[one_copy])

# %% [markdown]
# ## Exercise 3: why did this break?
#
# A batch of 100 examples in micro-batches of 48, 48 and 4. `mean_of_means` runs, nothing complains,
# the loss goes down; yet its gradient is not the batch's. With pieces of 50 and 50 it would be. Why
# did nobody notice? Which examples have too much weight? Write `accumulate`. *Hint:* see the second
# line of the math; `nn.cross_entropy(logits, targets, reduction_size)` divides by `reduction_size`.


# %%
def accumulate(model, x, y, pieces):
    """Compute the gradient of the batch's mean loss in p.grad, one piece of the batch at a time."""
    raise NotImplementedError  # your lines here


def mean_of_means(model, x, y, pieces):
    for piece in pieces:
        nn.cross_entropy(model(x[piece]), y[piece]).backward()  # adds to p.grad
    for p in model.parameters():
        p.grad = p.grad / len(pieces)


def all_at_once(model, x, y, pieces):
    nn.cross_entropy(model(x), y).backward()


def gradient_by(way, x, y):
    """Return the gradient as one vector, and the most examples that waited for their backward."""
    model, waiting, seen = nn.MLP([64, 32, 10], dtype="float64"), [], []
    forward = model.forward

    def watched(x, *more):
        waiting.append(len(x))
        seen.append(sum(waiting))
        return forward(x, *more)

    model.forward = watched
    model.parameters()[0].add_hook(lambda p: waiting.clear())  # called by backward: lesson 1
    way(model, x, y, np.split(np.arange(100), [48, 96]))
    return np.concatenate([p.grad.ravel() for p in model.parameters()]), max(seen)


def check_pieces(attempt):
    x, y = images[:100].astype("float64"), labels[:100]
    (want, _), (got, most) = gradient_by(all_at_once, x, y), gradient_by(attempt, x, y)
    if (error := abs(got - want).max() / abs(want).max()) > 1e-12:
        return f"off by {error:.0%} of the largest gradient"
    if most > 48:
        return f"the gradient is right, but the activations of {most} examples were kept"


exercise.judge(3, check_pieces, accumulate, tempting=[mean_of_means, all_at_once])

# %% [markdown]
# ## What it costs, and the next problem
#
# | on one device | grows with | way out on one device | way out on many |
# |---|---|---|---|
# | time | parameters x examples | wait | share the batch |
# | activations | batch x widths | micro-batches, recompute | pipelines, sequence parallel |
# | 16 bytes per parameter | parameters | none | ZeRO, pipelines, tensor parallel |
#
# Micro-batches, and recompute (lesson 1), save memory and cost only time. They make no step
# shorter, and no room for a model whose 16 bytes per parameter do not fit.
#
# All these ways have one thing in common: they cut the *gradient* into parts. So the next lesson,
# `01_autograd.py`, shows how a gradient is made.
