# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
#   minidist: {lesson: 0, minutes: 25, needs: [], leads_to: [1, 2, 3], lab: none}
# ---

# %% [markdown]
# (lesson-0)=
# # 0. What one device runs out of
#
# **Question.** What runs out first when a model is trained: compute, memory or communication?
#
# You need NumPy and the chain rule. New words: [activation](pages/glossary.md#activation),
# [micro-batch](pages/glossary.md#micro-batch). Letters: $P$ parameters; $B$ examples of a batch;
# $l_i$ the loss of example $i$; $N$ devices; $S$ bytes of an array that they add up.

# %% tags=["setup", "hide-input"]
import time

import numpy as np
from support import begin, exercise, figures
from threadpoolctl import threadpool_limits

from minidist import nn, optim
from minidist.autograd.recomputation import kept_bytes
from minidist.nn.datasets import digits, text
from minidist.observe.bench.steps import transformer_step
from minidist.observe.step_parts import step_parts

begin()
limits = threadpool_limits(1)  # one device is one core here
images, labels = digits("float64")  # [1797, 64], [1797]

# %% [markdown]
# ## Problem: one core needs 100,000 years
#
# Training takes about 6 operations per parameter and token: a product and a sum in forward, twice
# that in backward ([Kaplan et al. 2020](https://arxiv.org/abs/2001.08361), section 2.1). GPT-3 has
# 175 billion parameters and has read 300 billion tokens ([Brown et al.
# 2020](https://arxiv.org/abs/2005.14165), table 2.1): $3 \times 10^{23}$ operations. A core that
# does $10^{11}$ per second needs 100,000 years. Many must share the work. We look at one first.
#
# ## Idea: a step is forward, backward, update
#
# *Forward* computes the loss of a batch, *backward* its gradient, *update* new parameters: Adam's
# ([Kingma and Ba 2015](https://arxiv.org/abs/1412.6980)) keeps averages of gradient and square.


# %%
def train(model, x, y, batches, eta=1e-3, b1=0.9, b2=0.999, eps=1e-8):
    """Train in place, a step for each of the batches, which are indices of examples."""
    mean, square = ([np.zeros_like(p.data) for p in model.parameters()] for _ in range(2))
    for step, batch in enumerate(batches, 1):
        loss = nn.cross_entropy(model(x[batch]), y[batch])  # forward
        loss.backward()  # backward: fills p.grad
        for p, a, s in zip(model.parameters(), mean, square, strict=True):  # update
            a += (1 - b1) * (p.grad - a)
            s += (1 - b2) * (p.grad**2 - s)
            a_hat, s_hat = a / (1 - b1**step), s / (1 - b2**step)  # they began at zero
            p.data -= eta * a_hat / (np.sqrt(s_hat) + eps)
            p.grad = None  # or the next backward would add to it


# %% [markdown]
# The rest of the course changes this loop, one line at a time. Does it learn, and is it the
# [library's Adam](../minidist/nn/optim/rules.py)? We train on 1,500 digits, and test on 297.

# %%
order = np.random.default_rng(0).permutation(len(images))
batches, ask = 15 * np.array_split(order[:1500], 24), order[1500:]
ours, theirs = (nn.MLP([64, 128, 128, 10], dtype="float64") for _ in range(2))
train(ours, images, labels, batches)
right = (ours(images[ask]).data.argmax(axis=1) == labels[ask]).mean()
adam = optim.Adam(theirs.parameters(), lr=1e-3)
for batch in batches:
    nn.cross_entropy(theirs(images[batch]), labels[batch]).backward()
    adam.step()
    adam.zero_grad()
apart = max(abs(ours.state()[name] - w).max() for name, w in theirs.state().items())
print(f"{right:.1%} of {len(ask)} digits are right; the library's weights differ by {apart:.0e}")
assert apart < 1e-9

# %% [markdown]
# ## What stays in memory?
#
# A number has 4 bytes (float32). Parameters, gradients and averages depend on the model alone.
# Forward also keeps what backward will read, the *activations*: in an MLP the input, the outputs of
# all layers, and for the loss 16 bytes per example.
#
# :::{admonition} Predict before you run
# An MLP of widths 64, 512, 512 and 10 has 301,066 parameters. How many bytes stay per parameter: 4,
# 8, 12 or 16? From which batch on do activations need more: about 10, 100 or 1,000 examples?
# :::

# %% tags=["hide-output"]
model = nn.MLP([64, 512, 512, 10])
P, adam = sum(p.size for p in model.parameters()), optim.Adam(model.parameters(), lr=1e-3)
BATCHES = np.array([1, 250, 500, 750, 1000, 1250, 1500])
losses = [nn.cross_entropy(model(np.zeros((B, 64), "f")), np.zeros(B, int)) for B in BATCHES]
kept = np.array([kept_bytes(loss) for loss in losses])
losses[0].backward()
adam.step()
fixed = sum(p.data.nbytes + p.grad.nbytes for p in model.parameters())
fixed += sum(average.nbytes for averages in adam.state for average in averages)
print(f"{P:,} parameters: {fixed:,} bytes, {fixed / P:g} for each")
print(f"activations, in units of that: {np.round(kept / fixed, 2)} for {BATCHES}")
assert fixed == 16 * P and (kept == 4408 * BATCHES).all(), "to the byte"

# %% [markdown]
# :::{dropdown} Where does the number come from?
# A parameter, its gradient and its two averages have 4 bytes each: 16 bytes. An example needs
# $4 (64 + 512 + 512 + 10) + 16 = 4408$ bytes. Both are equal at $16 P / 4408$, or 1,093 examples.
# :::
#
# The loss of a batch is a mean. So $dW = \sum_i dW_i$, where $dW_i$ is the gradient of $l_i / B$,
# and a sum may be cut anywhere. A device can take a large batch in *micro-batches*, one after the
# other, while `p.grad` adds up. Each one's activations are free after its backward.
#
# ## Where does the time go?
#
# :::{admonition} Predict before you run
# A Transformer of two blocks reads 16 texts of 64 characters. How many times as long as forward
# does backward take: 1, 2 or 3 times? Is it the same for a small model and for a large one?
# :::

# %% tags=["hide-output"]
corpus = text()  # half a million characters: the help pages of Python
inputs, targets = (windows[:16] for windows in corpus.windows(64))
parts, tiny = {}, transformer_step(corpus.vocab, width=8, depth=2, context=2, batch=1)
for width in (32, 64, 128, 256):
    model, clock = nn.Transformer(corpus.vocab, width, 4, 2, 64), [time.perf_counter()]
    for _ in range(6):
        loss = nn.cross_entropy(model(inputs), targets)
        clock.append(time.perf_counter())
        loss.backward()
        clock.append(time.perf_counter())
    forward, backward = np.median(np.diff(clock).reshape(6, 2), axis=0)
    parts[width] = step_parts(transformer_step(corpus.vocab, width, depth=2), tiny, rounds=3)
    print(f"width {width:3}: backward / forward = {backward / forward:.2f}")
speed = 6 * sum(p.size for p in model.parameters()) * inputs.size / (forward + backward)
print(f"this core: {speed:.0e} operations per second; GPT-3: {3.15e23 / speed / 3.15e7:.0e} years")

# %% [markdown]
# In products of matrices the ratio is 2, as [lesson 1](01_autograd.py) counts. The rest takes about
# as long in both directions: *element-wise* functions (softmax, Adam), *copies* (and sums, which
# memory limits) and *Python*, each [measured](../minidist/observe/step_parts.py). Products grow
# faster with the width than all of these. A large model spends most of its time in products.


# %% tags=["hide-input"]
def draw(plt):
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), width_ratios=[1, 1.3])
    figures.columns(left, parts, [figures.FORWARD, figures.OWN, figures.UPDATE, figures.IDLE])
    left.set(title="Where the time of a step goes", xlabel="width of the Transformer")
    areas = [np.full(7, 4 * P), np.full(7, 4 * P), np.full(7, 8 * P), 4408 * BATCHES]
    colors = [figures.FORWARD, figures.BACKWARD, figures.UPDATE, figures.OWN]
    right.stackplot(BATCHES, np.array(areas) / 1e6, colors=colors, alpha=0.6)
    for y, name in (0.6, "parameters"), (1.8, "gradients"), (3.6, "averages"), (6, "activations"):
        right.text(1470, y, name, ha="right", va="center")
    right.plot(BATCHES, (fixed + kept) / 1e6, "ko", clip_on=False, label="measured")
    right.axhline((fixed + 4408 * 64) / 1e6, ls="--", color="k", label="in micro-batches of 64")
    right.set(title="Memory of a step, MB", xlabel="examples of a batch", xlim=(0, 1500))
    right.legend(loc="upper left")
    return figure


figures.show(
    draw,
    "00_single_device",
    caption="Left: a Transformer, 16 x 64 tokens. Python: a step on 2 tokens of width 8. Others: "
    "what functions of a kind take beyond that. Right: an MLP (areas: the formula).",
    alt="Products are most of a wide model's step, less of a narrow one's; activations grow.",
)

# %% [markdown]
# ## What hurts first?
#
# Three models of Brown et al. with their batches, on larger devices: 80 GB of memory, $10^{14}$
# operations per second, a link of 100 Gbit/s. Devices that share a batch need the sum of their
# gradients. Nearly $2 S$ bytes then leave each of them ([lesson 2](02_collectives.py)); $S = 4 P$.
#
# :::{admonition} Predict before you run
# Which of the three models fits one device? If 300 devices share a step of GPT-3, what takes
# longer: computing or sending?
# :::

# %% tags=["hide-output"]
for name, size, tokens in [("small", 125e6, 5e5), ("6.7B", 6.7e9, 2e6), ("GPT-3", 175e9, 3.2e6)]:
    compute, memory, sending = 6 * size * tokens / 1e14, 16 * size / 80e9, 8 * size / 12.5e9
    print(f"{name:5}: 16 P bytes fill {memory:5.2f} devices; a step computes {compute:8,.1f} s on")
    print(f"{'':7}one, {compute / 300:6.2f} s on 300, which also send for {sending:6.2f} s")

# %% [markdown]
# *Compute is first*: the small model fits, but 600,000 steps (300 billion tokens) of 3.75 s take 26
# days. So we share the batch. *Memory is next*: beyond 5 billion parameters (80 GB / 16 bytes) no
# step is possible. So we share the model. *Communication is last, and in every remedy*:
#
# | family | splits | sends | begins in |
# |---|---|---|---|
# | data parallel | the batch | gradients | [lesson 3](03_data_parallel.py) |
# | ZeRO | what data parallelism keeps N times | gradients, parameters | [lesson 5](05_zero.py) |
# | pipeline | the layers | activations of neighbours | [lesson 6](06_layer_split.py) |
# | tensor parallel | the matrices of a layer | activations | [lesson 11](11_column_and_row.py) |
# | sequence parallel | the positions | activations | [lesson 13](13_sequence_parallel.py) |
#
# ## Exercise 1: what fits?
#
# How many examples can a batch have if an MLP is trained with Adam in `memory` bytes? 0 if none.


# %% tags=["exercise"]
def largest_batch(sizes, memory):
    """Return a number of examples; sizes: the widths of the layers, the input's first."""
    raise NotImplementedError  # your lines here


exercise.judge("00.1", largest_batch)

# %% [markdown]
# ## Exercise 2: when does sending take as long?
#
# Devices share `tokens` tokens; each sends $2 S = 8 P$ bytes. At which $N$ are both times equal?


# %% tags=["exercise"]
def devices(tokens, speed, link):
    """Return N, not rounded; speed: a device's operations per second; link: bytes per second."""
    raise NotImplementedError  # your line here


exercise.judge("00.2", devices)

# %% [markdown]
# ## Exercise 3: why did this break?
#
# For micro-batches of 48, 48 and 4 examples somebody calls
# `nn.cross_entropy(model(x[piece]), y[piece]).backward()`, then divides `p.grad` by 3, their
# number: wrong, but right for 50 and 50. (`reduction_size`, a third argument, is the divisor.)


# %% tags=["exercise"]
def accumulate(model, x, y, pieces):
    """Leave the gradient of the batch's mean loss in p.grad; pieces: lists of indices of x."""
    raise NotImplementedError  # your lines here


exercise.judge("00.3", accumulate)

# %% [markdown]
# ## At work
#
# | here | PyTorch | Megatron-LM | DeepSpeed | JAX |
# |---|---|---|---|---|
# | `loss.backward()` | the same | | `engine.backward(loss)` | `jax.grad` |
# | `adam.step()` | `torch.optim.Adam` | `--optimizer adam` | `engine.step()` | `optax.adam` |
# | micro-batches | a loop | `--micro-batch-size` | `train_micro_batch_size_per_gpu` | a loop |
#
# **What it costs.** Time grows with parameters times examples; 16 bytes per parameter always stay.
#
# **Next:** all strategies cut the gradient into parts. How is it made? [Lesson 1](01_autograd.py).
