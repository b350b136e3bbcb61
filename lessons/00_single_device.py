# %% [markdown]
# # 0. One device
#
# Before we spread training over many devices we should know one device well: what a step does,
# what it costs in seconds and bytes, and where it stops. Our device is one core of a CPU.
#
# Letters: `B` batch, `C` width of a layer, `P` parameters, `T` sequence length.

# %%
import time

import numpy as np
from threadpoolctl import threadpool_limits

from minidist import Tensor, nn, optim
from minidist.autograd import functions_below
from minidist.datasets import Sampler, digits, text
from minidist.rng import generator
from minidist.tools import figures

figures.arguments()
limits = threadpool_limits(1)  # one device is one core here

# %% [markdown]
# ## Problem
#
# A text of about half a million characters, the help pages inside Python, and a character
# Transformer of two blocks. How long does one pass over the text, one *epoch*, take here? We time
# a few steps and multiply. Each step has three parts, and we keep their times apart.

# %%
WIDTHS, CONTEXT, BATCH = [32, 64, 128, 256], 64, 16
corpus = text()
inputs, targets = corpus.windows(CONTEXT)
STEPS_PER_EPOCH = len(inputs) / BATCH


def time_step(model, x, y, rounds=9):
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
    print(
        f"width {width:3}: {sizes[-1]:9,} parameters, {1e3 * sum(parts[-1]):6.1f} ms a step, "
        f"{STEPS_PER_EPOCH * sum(parts[-1]):6.1f} s an epoch"
    )

# %% [markdown]
# That is a toy. A training step costs about 6 operations per parameter and token: 2 in the forward
# pass, 4 in backward (Kaplan et al. 2020, section 2.1). GPT-3 has 175 billion parameters and has
# read 300 billion tokens (Brown et al. 2020, table 2.1). (Kaplan's N leaves the embeddings out; our
# `P` counts all parameters. The embeddings are 16% of them at width 32, 3% at width 256, where we
# measure.) At the speed we have just found:

# %%
embeddings = sum(p.size for n, p in model.named_parameters().items() if "embedding" in n)
assert 0.02 < embeddings / count(model) < 0.03
speed = 6 * sizes[-1] * BATCH * CONTEXT / sum(parts[-1])  # operations per second
years = 6 * 175e9 * 300e9 / speed / (365 * 24 * 3600)
print(f"{speed / 1e9:.0f} billion operations a second: GPT-3 would take {years:,.0f} years here,")
print(
    f"and {16 * 175e9 / 1e12:.1f} TB of memory before the first example is read. Why 16? Read on."
)
assert speed > 0 and years > 100

# %% [markdown]
# ## Picture
#
# ```
#     batch --> forward --> loss --> backward --> gradients --> update --> new parameters
#                  |                    ^                         ^  |
#                  +--- activations ----+           Adam's m, v --+--+
# ```
#
# Forward leaves something behind for backward, and one update leaves something for the next. What
# is left behind fills the memory.
#
# ## Math
#
# ```
#     L(w)     = 1/n  sum over examples i  of  l_i(w)                the loss of a batch of n
#     dL/dw    = sum over parts k  of  1/n  sum over i in k  of  dl_i/dw      however it is cut
#     w       <- w - lr m' / (sqrt v' + eps)         Adam; m, v: running means of dL/dw, its square
#                m' = m / (1 - b1^t),  v' = v / (1 - b2^t)      they start at 0: bias correction
# ```
#
# The second line is all of data parallelism. Keep an eye on its `1/n`: `n` is the size of the whole
# batch, not of the part.
#
# ## Code
#
# The digits: 1,797 images of 8 x 8 pixels. We train on 1,500 and keep 297 to ask at the end. The
# loop is the ten lines that the rest of this course will change, one line at a time. First the
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


def accuracy(model, images, labels):
    return (model(images).data.argmax(axis=1) == labels).mean()


# %%
images, labels = digits()
order = generator(0, "held out").permutation(len(images))
learn, ask = order[:1500], order[1500:]
model = nn.MLP([64, 128, 128, 10])
begin = time.perf_counter()
train(model, AdamByHand(model.parameters(), lr=1e-3), images[learn], labels[learn], epochs=25)
seconds, share_right = time.perf_counter() - begin, accuracy(model, images[ask], labels[ask])
print(
    f"{count(model):,} parameters, 25 epochs in {seconds:.2f} s: "
    f"{share_right:.1%} of the {len(ask)} held-out digits are right"
)
assert share_right > 0.95

# %% [markdown]
# The library's `optim.Adam` is the same rule, over one flat vector per layer instead of one array
# per parameter. In float64 both end up with the same weights, up to rounding:

# %%
ours, theirs = (nn.MLP([64, 128, 128, 10], dtype="float64") for _ in range(2))
x, y = images[learn].astype("float64"), labels[learn]
train(ours, AdamByHand(ours.parameters(), lr=1e-3), x, y, epochs=2)
train(theirs, optim.Adam(theirs.parameters(), lr=1e-3), x, y, epochs=2)
apart = max(abs(ours.state()[name] - w).max() for name, w in theirs.state().items())
print(
    f"after {2 * len(Sampler(1500, 64))} updates by hand and by the library, no weight differs "
    f"by more than {apart:.0e}"
)
assert apart < 1e-9

# %% [markdown]
# ## Measurement: time
#
# Back to the Transformer's steps. Backward multiplies two matrices for each one that forward
# multiplies; lesson 1 counts them. The update touches each parameter once, however large the batch.

# %%
for width, (forward, backward, update) in zip(WIDTHS, parts, strict=True):
    print(
        f"width {width:3}: forward {1e3 * forward:5.1f} ms, backward {1e3 * backward:5.1f} ms, "
        f"update {1e3 * update:4.1f} ms ({update / (forward + backward + update):.0%} of the step)"
    )

# %% [markdown]
# ## Measurement: memory
#
# Sixteen bytes per parameter in float32: 4 for itself, 4 for its gradient, 8 for Adam's two
# averages. We ask the arrays:

# %%
SIZES = [64, 512, 512, 10]
model = nn.MLP(SIZES)
optimizer = optim.Adam(model.parameters(), lr=1e-3)
nn.cross_entropy(model(images[:64]), labels[:64]).backward()
optimizer.step()

P = count(model)
parameter_bytes = sum(layer.flat.vector.nbytes for layer in model.layers)
gradient_bytes = sum(layer.flat.gradient.nbytes for layer in model.layers)
adam_bytes = sum(array.nbytes for arrays in optimizer.state for array in arrays)
assert (parameter_bytes, gradient_bytes, adam_bytes) == (4 * P, 4 * P, 8 * P)
print(
    f"{P:,} parameters: {parameter_bytes:,} bytes of parameters, {gradient_bytes:,} of "
    f"gradients, {adam_bytes:,} of Adam's state: 16 bytes per parameter"
)

# %% [markdown]
# Then there is what forward leaves for backward. The loss knows the function that made it, and each
# function knows those that made its inputs, and keeps the arrays that its backward will read. We
# walk this graph and add up the floating-point arrays that are not parameters, each one once.


# %%
def activations(loss):
    """Return the bytes of activations that the graph below `loss` keeps."""
    owners = {}
    for function in functions_below(loss):
        leaves = [x.data for x in function.inputs if isinstance(x, Tensor)]
        for array in vars(function).values():
            if isinstance(array, np.ndarray) and array.dtype.kind == "f":
                if not any(np.may_share_memory(array, leaf) for leaf in leaves):
                    owners[array.__array_interface__["data"][0]] = array.nbytes  # views once
    return sum(owners.values())


def formula(sizes, batch):
    """4 B (C0 + C1 + ... + Cn): the input, every layer's output, and at the end the
    probabilities.
    """
    return 4 * batch * sum(sizes)


def measured(sizes, batch):
    x, y = np.zeros((batch, sizes[0]), "float32"), np.zeros(batch, int)
    return activations(nn.cross_entropy(nn.MLP(sizes)(x), y))


BATCHES = [1, 250, 500, 750, 1000, 1250, 1500]
held = [measured(SIZES, batch) for batch in BATCHES]
assert held == [formula(SIZES, batch) for batch in BATCHES]
assert measured([7, 5, 3, 2], 11) == formula([7, 5, 3, 2], 11)
for batch, found in list(zip(BATCHES, held, strict=True))[::2]:
    print(
        f"batch {batch:4}: activations {found / 1e6:5.2f} MB, "
        f"beside {16 * P / 1e6:.2f} MB for parameters, gradients and Adam"
    )

# %% [markdown]
# The formula is exact, to the byte. (A value that no backward reads is not kept: a relu's reads
# only its result, so what came into it is gone. Lesson 1 shows how to keep less still.)
#
# ## Too large a batch? Take it in pieces
#
# Activations are needed until their own backward. So cut the batch into *micro-batches*, run
# forward and backward on one after the other, and let the gradients add up in `p.grad`. There is
# one trap. Three micro-batches of 48, 48 and 4 examples make a batch of 100:


# %%
def gradients_in_pieces(model, x, y, cuts, reduction_size):
    """Return all gradients as one vector, added up over the pieces of the batch, and the most
    activations held at a time.
    """
    most = 0
    for piece in np.split(np.arange(len(x)), cuts):
        loss = nn.cross_entropy(model(x[piece]), y[piece], reduction_size)
        most = max(most, activations(loss))
        loss.backward()  # adds to p.grad
    total = np.concatenate([p.grad.ravel() for p in model.parameters()])
    for p in model.parameters():
        p.grad = None
    return total, most


x, y = images[learn[:100]].astype("float64"), labels[learn[:100]]
model = nn.MLP(SIZES, dtype="float64")
whole, whole_bytes = gradients_in_pieces(model, x, y, [], None)
right, pieces_bytes = gradients_in_pieces(model, x, y, [48, 96], reduction_size=100)
means, _ = gradients_in_pieces(model, x, y, [48, 96], reduction_size=None)  # each its own mean


def error(gradient):
    return abs(gradient - whole).max() / abs(whole).max()


print(f"sums, divided by 100 in the loss:  off by {error(right):.0e}, which is rounding")
print(f"mean of the three means:           off by {error(means / 3):.0%} of the largest gradient")
print(f"activations: {whole_bytes:,} bytes for the whole batch, {pieces_bytes:,} in pieces")
assert error(right) < 1e-12 < 1e-2 < error(means / 3)
assert pieces_bytes * 100 == whole_bytes * 48

# %% [markdown]
# In the mean of means, each of the 4 examples in the small piece weighs as much as 12 of the
# others. So minidist scales **once, in the loss**: divide by the number of targets in the whole
# update, `reduction_size`, and from then on only add. With equal pieces both ways agree, which is
# why the mistake survives so long; on ranks whose shards differ by one example it is back.
#
# ## The figure
#
# Left, where the time goes; right, what stays in memory, each in the colour of the part of the step
# that needs it: forward leaves activations, backward gradients, the update its averages.


# %%
def draw(plt):
    figure, (left, right_axes) = plt.subplots(1, 2, figsize=(10, 4.6), width_ratios=[1, 1.25])
    figure.get_layout_engine().set(w_pad=0.12)
    figure.suptitle("One device: time grows with the model, memory with the model and the batch")

    millions, epoch = np.array(sizes) / 1e6, STEPS_PER_EPOCH * np.array(parts)
    rows = {
        "in all": (epoch.sum(axis=1), figures.INK, 1.45),
        "backward": (epoch[:, 1], figures.BACKWARD, 1),
        "forward": (epoch[:, 0], figures.FORWARD, 0.75),
        "update": (epoch[:, 2], figures.UPDATE, 1),
    }
    for name, (seconds, colour, shift) in rows.items():
        left.loglog(millions, seconds, "o-", color=colour)
        left.text(1.12 * millions[-1], shift * seconds[-1], name, color=colour, va="center")
    first, last = epoch.sum(axis=1)[[0, -1]]
    left.plot(millions, last * millions / millions[-1], "--", color=figures.INK, linewidth=1)
    left.text(0.09, 0.55 * last * 0.09 / millions[-1], "in proportion\nto parameters", fontsize=9)
    left.text(millions[0], 1.3 * first, f"{first:.0f} s", ha="center")
    left.text(millions[-1], 1.3 * last, f"{last:.0f} s", ha="right")
    left.set(
        title="A Transformer on half a million characters",
        xlabel="parameters (millions)",
        ylabel="time of one epoch (s)",
        xlim=(0.02, 6),
        ylim=(0.6 * epoch[0, 2], 2.5 * last),
    )
    left.set_xticks([0.03, 0.1, 0.3, 1], ["0.03", "0.1", "0.3", "1"])
    left.set_yticks([0.1, 1, 10, 100], ["0.1", "1", "10", "100"])
    left.minorticks_off()
    left.spines["bottom"].set_bounds(0.02, millions[-1])

    grid = np.array([0, BATCHES[-1]])
    levels = np.array([0, 4 * P, 8 * P, 16 * P]) / 1e6
    layers = ["parameters", "gradients", "Adam's two averages"]
    shades = [figures.IDLE, figures.BACKWARD, figures.UPDATE]
    for low, high, name, colour in zip(levels, levels[1:], layers, shades, strict=False):
        right_axes.fill_between(grid, low, high, color=colour, alpha=0.75, linewidth=0)
        right_axes.text(40, (low + high) / 2, name, va="center")
    top = levels[-1] + formula(SIZES, grid) / 1e6
    right_axes.fill_between(grid, levels[-1], top, color=figures.FORWARD, alpha=0.25, linewidth=0)
    right_axes.plot(grid, top, color=figures.FORWARD)
    right_axes.plot(
        BATCHES, levels[-1] + np.array(held) / 1e6, "o", color=figures.FORWARD, clip_on=False
    )
    right_axes.text(880, 8.2, "activations")
    right_axes.annotate(
        "line: formula, dots: measured",
        (1000, levels[-1] + formula(SIZES, 1000) / 1e6),
        (960, 12.4),
        ha="right",
        arrowprops={"arrowstyle": "-", "color": figures.INK, "linewidth": 1, "shrinkB": 6},
    )
    piece = (16 * P + formula(SIZES, 64)) / 1e6
    right_axes.plot(grid, [piece, piece], "--", color=figures.EMPHASIS)
    right_axes.text(1490, piece + 0.2, "in micro-batches of 64", color=figures.EMPHASIS, ha="right")
    right_axes.set(
        title=f"An MLP of {P / 1e6:.2f} million parameters",
        xlabel="batch (examples)",
        ylabel="memory of a training step (MB)",
        xlim=(0, BATCHES[-1]),
        yticks=[0, 5, 10, 15],
        ylim=(0, 18),
    )
    return figure


figures.save(draw, "00_single_device")

# %% [markdown]
# ## Exercise
#
# A device has `memory` bytes. How many examples can a batch have, at most, if an MLP of these sizes
# is trained on it with Adam in float32? Write `largest_batch`; the check builds the model and
# measures.
#
# *Hint: first pay for what does not depend on the batch. A layer from `C_in` to `C_out` has
# `C_in C_out + C_out` parameters. If nothing is left, the answer is 0.*


# %%
def largest_batch(sizes, memory):
    raise NotImplementedError  # your lines here


def check(largest_batch):
    """Say "solved", "not solved yet", or what is wrong."""
    for sizes, memory in [([64, 32, 10], 100_000), (SIZES, 9_000_000), ([5, 4], 999), ([9, 9], 9)]:
        try:
            batch = largest_batch(sizes, memory)
        except NotImplementedError:
            return "not solved yet"
        fixed = 16 * count(nn.MLP(sizes))
        fits = batch == 0 or fixed + measured(sizes, batch) <= memory
        if not fits or fixed + measured(sizes, batch + 1) <= memory:
            return (
                f"wrong: {sizes} in {memory:,} bytes with a batch of {batch}; "
                f"{'one more fits' if fits else 'that does not fit'}"
            )
    return "solved"


def forgets_adam(sizes, memory):
    return memory // formula(sizes, 1)


print("exercise:", check(largest_batch))
print("a tempting answer:", check(forgets_adam))
assert check(forgets_adam).startswith("wrong")

# %% [markdown]
# ## What it costs, and the next problem
#
# | on one device | grows with | way out on one device | way out on many |
# |---|---|---|---|
# | time | parameters x examples | wait | data parallel: each rank takes a part of the batch |
# | activations | batch x widths | micro-batches, recompute | pipelines, sequence parallel |
# | 16 bytes per parameter | parameters | none | tensor parallel, pipelines, ZeRO |
#
# Micro-batches buy memory with nothing but patience. No trick on one device makes a step shorter,
# and none makes room for a model whose 16 bytes per parameter do not fit.
#
# All the ways out have one thing in common: they cut the *gradient* into parts. So the next lesson,
# `01_autograd.py`, opens the box that makes it.
