# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
#   minidist: {lesson: 1, minutes: 30, needs: [0], leads_to: [2, 3, 9, 10b], lab: autograd}
# ---

# %% [markdown]
# (lesson-1)=
# # 1. Where gradients come from
#
# **Question.** How does one pass backward find all slopes, what does it cost, what must be kept?
#
# You need the chain rule and [the step of a device](00_single_device.py). New words:
# [hook](pages/glossary.md#hook), [recomputation](pages/glossary.md#recomputation). Letters: $P$
# parameters; $L$ layers; $X$, $W$, $Y$ input, weights, output; $dX$, $dW$, $dY$ their gradients.

# %% tags=["setup", "hide-input"]
import numpy as np
from support import begin, exercise, figures
from support.probes import Probed, watch

from minidist import Tensor, nn
from minidist.autograd import functions, recompute

begin()
random = np.random.default_rng(0)

# %% [markdown]
# ## Problem: one step of GPT-3 needs 350 billion forward passes
#
# A gradient is a slope, and a slope can be measured: move a parameter a little up, a little down,
# and see how the loss changes. That takes two forward passes for each of 175 billion parameters.
#
# ## Idea: record forward, and go back from the loss
#
# Forward records which array was made from which. Backward visits them in reverse, the last one
# first. Each operation has to know one thing: how to turn `dY` into the gradients of its inputs.
#
# ```text
# forward    X, W  --> matmul --> relu --> sum --> loss
# backward  dX, dW <-- matmul <-- relu <-- sum <-- 1
# ```


# %%
tape, operations = [], []  # all arrays, as they were made; the operations of each product


class Value:
    """An array, and what it was made from: pairs of (an input, how dY becomes its gradient)."""

    def __init__(self, data, *made_from):
        self.data, self.made_from, self.grad = data, made_from, 0.0
        tape.append(self)

    def __matmul__(self, w):
        to_self, to_w = lambda dy: product(dy, w.data.T), lambda dy: product(self.data.T, dy)
        return Value(product(self.data, w.data), (self, to_self), (w, to_w))

    def __add__(self, x):
        return Value(self.data + x.data, (self, lambda dy: dy), (x, lambda dy: dy))

    def relu(self):
        return Value(np.maximum(self.data, 0), (self, lambda dy: dy * (self.data > 0)))

    def sum(self):
        return Value(self.data.sum(), (self, lambda dy: dy * np.ones_like(self.data)))

    def backward(self):
        self.grad = 1.0
        for y in reversed(tape):  # an array is made before it is used: here dY is complete
            for x, turn in y.made_from:
                x.grad = x.grad + turn(y.grad)  # used in two places: the sum of both


def product(a, b):
    operations.append(2 * a.shape[0] * a.shape[1] * b.shape[1])
    return a @ b


# %% [markdown]
# That is all. Is it right? In this network `h` is used twice. We compare with the
# [library](../minidist/autograd/tensor.py), and one slope with a measured one:


# %%
def network(x, w1, w2, w3, relu):
    h = relu(x @ w1)
    return (relu(h @ w2 + h) @ w3).sum()


arrays = [random.standard_normal(shape) for shape in [(32, 20), (20, 64), (64, 64), (64, 5)]]
ours, theirs = [Value(a) for a in arrays], [Tensor(a, requires_grad=True) for a in arrays]
network(*ours, relu=Value.relu).backward()
network(*theirs, relu=functions.relu).backward()
assert all(np.array_equal(x.grad, y.grad) for x, y in zip(ours, theirs, strict=True))
forward, backward = sum(operations[:3]), sum(operations[3:])

losses = []
for move in (1e-5, -2e-5):  # up, then down
    arrays[2][5, 7] += move
    losses.append(network(*map(Tensor, arrays), relu=functions.relu).item())
print("the same bits as the library's, in all four gradients; one slope is", end=" ")
print(f"{(losses[0] - losses[1]) / 2e-5:.6f} as measured, {ours[2].grad[5, 7]:.6f} by backward")

# %% [markdown]
# ## What does backward cost?
#
# :::{admonition} Predict before you run
# How many times as many operations do backward's matrix products have as forward's: 1, 2, 3, $P$?
# :::

# %% tags=["hide-output"]
print(f"forward {forward:,} operations, backward {backward:,}: {backward / forward:g} times")
assert backward == 2 * forward

# %% [markdown]
# :::{dropdown} Where does the number come from?
# For each product `X @ W` of forward, backward has two of the same size: `dY @ W.T` and `X.T @ dY`.
# So a gradient costs as much as 3 forward passes, for any $P$. (Training skips one of the products,
# because nobody needs the $dX$ of the data.) By measured slopes it would cost $2 P$ passes.
# :::
#
# ## Which gradient is finished first?
#
# A *hook* is called when the gradient of a parameter is complete: [data
# parallelism](03_data_parallel.py) sends it then. And `backward(deferred=...)` computes only each
# $dX$, which the layer below needs: [pipelines](10b_zero_bubble.py) keep the $dW$ for idle times.
#
# :::{admonition} Predict before you run
# An MLP has layers 0, 1 and 2. In which order are the gradients finished?
# :::

# %% tags=["hide-output"]
model, finished = nn.MLP([64, 128, 128, 10]), []
for p in model.parameters():
    p.add_hook(lambda p: finished.append(p.name))
nn.cross_entropy(model(np.ones((32, 64), "float32")), np.arange(32) % 10).backward()
print(*finished)

# %% [markdown]
# ## What must be kept?
#
# `X.T @ dY` reads $X$. So forward keeps the input of every layer until its backward. [Chen et al.
# 2016](https://arxiv.org/abs/1604.06174) keep only the inputs of *segments* of some layers, and run
# a segment forward again when backward reaches it: *recomputation*.
#
# :::{admonition} Predict before you run
# 32 layers keep 0.5 MiB each. Segments of 4 layers keep only their input, of 0.5 MiB. How much is
# held at most, about: 2, 4, 6 or 16 MiB? How much more work is it?
# :::


# %% tags=["hide-output"]
def step(segments, x, run):
    for segment in segments:
        x = run(segment, x)
    x.sum().backward()


L, LENGTH, MIB, curves, grads = 32, 4, 0.5, {}, {}  # layers, of a segment; MiB of an input
X = random.standard_normal((512, 256)).astype("float32")
for way, run in {"remember": lambda segment, x: segment(x), "recompute": recompute}.items():
    notes = []
    layers = [Probed(notes, 256, 256, activation="relu", name=f"layers.{i}") for i in range(L)]
    segments = [nn.Sequential(layers[i : i + LENGTH]) for i in range(0, L, LENGTH)]
    work, held = curves[way] = watch(notes, step, segments, Tensor(X, requires_grad=True), run)
    grads[way] = [p.grad for layer in layers for p in layer.parameters()]
    formula = (L if way == "remember" else L / LENGTH + LENGTH) * MIB
    print(f"{way:9} work {work[-1]}, at most {max(held):4.1f} MiB, formula {formula:4.1f}")
    assert formula <= max(held) <= formula + 2.2 * MIB, "two gradients come on top"
assert all(map(np.array_equal, *grads.values()))

# %% [markdown]
# :::{dropdown} Where does the number come from?
# 32 / 4 inputs, and the 4 layers of one segment: 12 times 0.5 MiB, and gradients on top. In general
# `layers / length * input_bytes + length * layer_bytes`: smallest where both terms are equal.
# :::


# %% tags=["hide-input"]
def draw(plt):
    figure, axes = plt.subplots(figsize=(9, 3.8))
    top, low = (max(held) for _, held in curves.values())
    axes.plot(*curves["remember"], color=figures.INK)
    axes.plot(*curves["recompute"], "--", color=figures.EMPHASIS)
    axes.text(L + 5, top, f"remember everything: at most {top:.1f} MiB", va="center")
    words = f"recompute, {L // LENGTH} segments of {LENGTH}: at most {low:.1f} MiB"
    axes.text(4 * L, low + 1.8, words, color=figures.EMPHASIS, ha="right", va="bottom")
    axes.set(xticks=range(0, 4 * L + 1, L), yticks=range(0, 17, 4), ylim=(0, 18))
    axes.set(ylabel="bytes held (MiB)", xlabel="work (forward of a layer: 1, backward: 2)")
    axes.set_title(f"Recompute: 4/3 of the work, {low / top:.0%} of the memory, the same gradient")
    return figure


figures.show(
    draw,
    "01_autograd",
    caption="What 32 layers hold. Forward ends at 32; then comes backward.",
    alt="One curve rises to 16 MiB and falls; one stays below 7 in eight teeth, and ends later.",
)

# %% [markdown]
# ## Exercise 1: a backward of your own
#
# Many language models divide by the root mean square ([Zhang and Sennrich
# 2019](https://arxiv.org/abs/1910.07467)): `Y = X / r`, `r = sqrt(mean(X**2) + eps)`, the mean over
# the last axis. Write its backward. The check compares it with central differences.


# %% tags=["exercise"]
def rms_norm_backward(dy, x, r):
    """Return dX[B, C] from dY[B, C], X[B, C] and r[B, 1]."""
    raise NotImplementedError  # your lines here


exercise.judge("01.1", rms_norm_backward)

# %% [markdown]
# ## Exercise 2: how long is the best segment?
#
# With which length of equal segments does recomputation hold the fewest bytes? In a Transformer a
# layer keeps many times the bytes of its input. Are its segments longer, or shorter?


# %% tags=["exercise"]
def segment(layers, input_bytes, layer_bytes):
    """Return a divisor of `layers`; input_bytes, layer_bytes: of the input, and of all it keeps."""
    raise NotImplementedError  # your line here


exercise.judge("01.2", segment)

# %% [markdown]
# ## Exercise 3: why did this break?
#
# Two batches are in flight: forward of the first, forward of the second, backward of the first,
# `w.data -= lr * w.grad`, backward of the second. Nothing is raised, but the second batch's $dX$ is
# wrong. Which array did its backward read? Write an `update` with which both are right.


# %% tags=["exercise"]
def update(w, lr):
    """Move the Tensor w against its gradient, by lr times the gradient."""
    raise NotImplementedError  # your line here


exercise.judge("01.3", update)

# %% [markdown]
# ## At work
#
# | here | PyTorch | Megatron-LM | DeepSpeed | JAX |
# |---|---|---|---|---|
# | `add_hook` | `register_post_accumulate_grad_hook` | | | |
# | `recompute` | `checkpoint` | `--recompute-granularity` | `checkpointing` | `jax.checkpoint` |
#
# **What it costs.** Two more passes' worth of products, and every layer's input until its backward.
#
# **Next:** `p.grad` is a sum, and sums can be made by many. [Lesson 2](02_collectives.py).
