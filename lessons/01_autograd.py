# %% [markdown]
# # 1. Where gradients come from
#
# Lesson 0 called `loss.backward()` and got the gradient of every parameter. Every strategy in this
# course moves such gradients about, sums them, delays them or cuts them up. Here we build the
# machine that makes them, in forty lines, and look at the three handles that later lessons use:
# hooks, deferred weight gradients, and recomputation.
#
# Letters: `B` batch, `C` width, `x, y` values, `dx, dy` gradients of the loss with respect to them.

# %%
import itertools
import time
import tracemalloc
from collections import Counter

import numpy as np
from support import exercise, figures
from threadpoolctl import threadpool_limits

from minidist import Tensor, nn, no_grad
from minidist.autograd import Function, functions, gradcheck, recompute
from minidist.datasets import text
from minidist.rng import generator

figures.arguments()
limits = threadpool_limits(1)  # one core, so that times compare

# %% [markdown]
# ## Problem
#
# A gradient is a slope, and a slope can be measured: move a parameter a little up, a little down,
# and look at the loss. That is the *central difference*. It costs two forward passes per
# parameter. For a Transformer with four blocks:


# %%
def seconds(work):
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


corpus = text()
inputs, targets = (windows[:8] for windows in corpus.windows(64))
model = nn.Transformer(corpus.vocab, 128, 4, 4, 64, dtype="float64")
P = sum(p.size for p in model.parameters())


def forward():
    with no_grad():
        return nn.cross_entropy(model(inputs), targets).item()


forward()  # the first one takes longer
slow = 2 * P * seconds(forward)
fast = seconds(lambda: nn.cross_entropy(model(inputs), targets).backward())
print(f"{P:,} parameters, one gradient by central differences: {slow / 3600:.1f} hours")
print(f"the same gradient by backward: {fast:.3f} s, {slow / fast:,.0f} times less")
assert slow > 100 * fast  # 2 P forwards against about three: no load can turn that round
p, losses = model.named_parameters()["head.linear.weight"], []
for distance in (1e-5, -2e-5, 1e-5):  # up, down, and back to where it was
    p.data[5, 7] += distance
    losses.append(forward())
slope = (losses[0] - losses[1]) / 2e-5
print(f"of one parameter: difference {slope:+.8f}, backward {p.grad[5, 7]:+.8f}")
assert abs(slope - p.grad[5, 7]) < 1e-7

# %% [markdown]
# Both ways find the same slopes. How can one pass find them all?
#
# ## Picture
#
# Forward records which value was made from which. Backward follows the same lines in reverse.
#
# ```
#     forward -->     x ---+
#                          +--> matmul --> add --> relu --> sum --> loss
#                     w ---+               /
#                                    b ---+
#
#     backward <--   dx <--+
#                          +--- matmul <-- add <-- relu <-- sum <-- 1
#                    dw <--+               /
#                                   db <--+
#
#     sum      dy = the 1, repeated          relu     dx = dy where y > 0
#     add      dx = dy, db = dy summed       matmul   dx = dy w^T, dw = x^T dy
#              over what b was repeated for
# ```
#
# ## Math
#
# ```
#     y = f(x), J = df/dx:    dx = J^T dy                 a vector-Jacobian product; no J is built
#     y = f_n(...f_1(x)):     dx = J_1^T (... (J_n^T dy))  from the loss down, always a vector
#     x used in two places:   dx = the sum of both         what forward copies, backward adds
# ```
#
# So an operation needs one thing besides its forward: how to turn `dy` into `dx`. In the reversed
# order of creation every `dy` is complete before it is passed on, because no value is used before
# it is made.
#
# ## Code
#
# The engine. `made_from` lists the inputs of a value, each with its vector-Jacobian product.

# %%
clock, work = itertools.count(), Counter()  # work: operations in matrix products


class Value:
    def __init__(self, data, *made_from):
        self.data, self.made_from, self.grad, self.order = data, made_from, 0.0, next(clock)

    def __matmul__(self, w):
        return Value(
            product(self.data, w.data, "forward"),
            (self, lambda dy: product(dy, w.data.T, "backward")),
            (w, lambda dy: product(self.data.T, dy, "backward")),
        )

    def __add__(self, b):
        return Value(
            self.data + b.data,
            (self, lambda dy: unbroadcast(dy, self.data.shape)),
            (b, lambda dy: unbroadcast(dy, b.data.shape)),
        )

    def relu(self):
        y = np.maximum(self.data, 0)
        return Value(y, (self, lambda dy: dy * (y > 0)))

    def sum(self):
        return Value(self.data.sum(), (self, lambda dy: np.broadcast_to(dy, self.data.shape)))

    def backward(self):
        self.grad, below, stack = 1.0, {self}, [self]
        while stack:
            fresh = {x for x, _ in stack.pop().made_from} - below
            below |= fresh
            stack += fresh
        for y in sorted(below, key=lambda value: value.order, reverse=True):
            for x, vjp in y.made_from:
                x.grad = x.grad + vjp(y.grad)


def unbroadcast(dy, shape):
    """What forward repeated, backward sums."""
    dy = dy.sum(axis=tuple(range(dy.ndim - len(shape))))
    return dy.sum(axis=tuple(i for i, n in enumerate(shape) if n == 1), keepdims=True)


def product(a, b, when):
    work[when] += 2 * a.shape[0] * a.shape[1] * b.shape[1]
    return a @ b


# %% [markdown]
# That is all. We try it on a network that has a bias to un-broadcast and a value, `h`, that is used
# twice, and compare it with the library: the same bits, for every input.


# %%
def network(x, w1, b1, w2, b2, w3, relu):
    h = relu(x @ w1 + b1)
    h = relu(h @ w2 + b2) + h
    return (h @ w3).sum()


random = generator(0, "network")
shapes = [(32, 20), (20, 64), (64,), (64, 64), (1, 64), (64, 5)]
arrays = [random.standard_normal(shape) for shape in shapes]
ours = [Value(a) for a in arrays]
network(*ours, relu=Value.relu).backward()
theirs = [Tensor(a, requires_grad=True) for a in arrays]
network(*theirs, relu=functions.relu).backward()
assert all(np.array_equal(x.grad, y.grad) for x, y in zip(ours, theirs, strict=True))
print("six gradients by forty lines and by minidist: the same bits")

# %% [markdown]
# The library does the same with more care: it frees the graph on the way back, keeps no gradients
# of values in between, skips what needs none, and checks shapes and types.
#
# ## Measurement: what backward costs
#
# For each product `x w` of forward, backward has two of the same size, `dy w^T` and `x^T dy`. The
# engine has counted their operations:

# %%
ratio = work["backward"] / work["forward"]
print(f"forward {work['forward']:,} operations, backward {work['backward']:,}: {ratio:.2f} times")
assert work["backward"] == 2 * work["forward"]

# %% [markdown]
# In operations of products a gradient costs two more forward passes, whatever the number of
# parameters. That is the bargain, and it is lesson 0's 2 + 4 operations per parameter. (Training
# needs a little less: nobody asks for the `dx` of the data, which is counted here. By the clock the
# ratio is another one, because other work than products takes time: lesson 0's figure.)
#
# ## Handle 1: hooks
#
# A parameter's gradient may get contributions from several places. `add_hook` calls you when the
# last one is added. The gradients of the last layers are finished first, while backward still works
# on the layers below. A device can send them in the meantime, as lesson 3 does.

# %%
model = nn.MLP([64, 128, 128, 10], dtype="float64")
digits_like = generator(0, "images").standard_normal((32, 64))
labels = np.arange(32) % 10
ready = []
undo = [p.add_hook(lambda p: ready.append(p.name)) for p in model.parameters()]
nn.cross_entropy(model(digits_like), labels).backward()
for remove in undo:
    remove()
print("in the model:", *model.named_parameters())
print("finished:    ", *ready)
layer_of = [int(name.split(".")[1]) for name in ready]
assert sorted(ready) == sorted(model.named_parameters())
assert layer_of == sorted(layer_of, reverse=True)

# %% [markdown]
# ## Handle 2: deferred weight gradients
#
# Of backward's two products, `dx = dy w^T` is urgent: the layer below waits for it, perhaps on
# another device. `dw = x^T dy` is not urgent: only the update needs it. With `deferred=` backward
# computes only the urgent half and returns the other half as a list of functions to call later. A
# pipeline (lesson 10) fills its idle time with them.

# %%
want = {name: p.grad.copy() for name, p in model.named_parameters().items()}
for p in model.parameters():
    p.grad = None
later = []
nn.cross_entropy(model(digits_like), labels).backward(deferred=later)
assert all(p.grad is None for p in model.parameters())
print(f"after backward: no parameter has a gradient, {len(later)} functions are waiting")
for compute in later:
    compute()
assert all(np.array_equal(p.grad, want[name]) for name, p in model.named_parameters().items())
print("after calling them: the same bits as before")

# %% [markdown]
# ## Handle 3: recompute instead of remember
#
# Forward keeps every layer's activations until their backward. Chen et al. (Training Deep Nets
# with Sublinear Memory Cost, 2016) keep only the inputs of *segments* of `k` layers, and run a
# segment forward again when backward reaches it. The field calls this *activation checkpointing*.
# With `n` layers that keep `a` bytes each, and inputs of `i` bytes:
#
# ```
#     remember:    n a                 n forwards, n backwards
#     recompute:   (n/k) i + k a       n more forwards; smallest at k = sqrt(n i / a)
# ```
#
# Below, `n = 32` and `i = a`, so the best `k` is sqrt 32, about 5.7; 4 divides 32, and costs `12 a`
# as 8 would. To watch the memory we write an operation of our own. It changes nothing, but records
# how many bytes are held whenever forward or backward reaches it.


# %%
class Log:
    """Rows of (work done, in forward passes of one layer; bytes held)."""

    def __init__(self):
        self.done, self.rows = 0, []

    def note(self):
        self.rows.append((self.done, tracemalloc.get_traced_memory()[0]))


class Probe(Function):
    """Y = X  =>  dX = dY.  It precedes a layer, whose backward costs two of its forwards."""

    def __init__(self, log):
        self.log = log

    def forward(self, x):
        self.log.note()
        self.log.done += 1
        return x

    def backward(self, grad):
        self.log.done += 2
        self.log.note()
        return grad


def remember(layers, x, log):
    for layer in layers:
        x = layer(Probe(log)(x))
    return x


def recompute_segments(layers, x, log):
    for start in range(0, len(layers), K):
        segment = layers[start : start + K]
        parameters = [p for layer in segment for p in layer.parameters()]
        x = recompute(lambda x, s=segment: remember(s, x, log), x, parameters=parameters)
    return x


# %%
N, K, BATCH, WIDTH = 32, 4, 512, 256
layers = [nn.Linear(WIDTH, WIDTH, activation="relu", name=f"layers.{j}") for j in range(N)]
deep = nn.Sequential(layers)
x = generator(0, "deep").standard_normal((BATCH, WIDTH)).astype("float32")
curves, grads = {}, {}
for way in remember, recompute_segments:
    for p in deep.parameters():
        p.grad = None
    tracemalloc.start()  # NumPy reports its arrays to it
    log, before = Log(), tracemalloc.get_traced_memory()[0]
    loss = way(deep.layers, Tensor(x, True), log).sum()
    log.note()
    loss.backward()
    tracemalloc.stop()
    curves[way] = np.array(log.rows) - (0, before)
    grads[way] = [p.grad.copy() for p in deep.parameters()]

i = a = x.nbytes  # a layer keeps its result, which is the next one's input
formulas = {remember: N * a, recompute_segments: N // K * i + K * a}
peaks = {way: curve[:, 1].max() for way, curve in curves.items()}
for way, curve in curves.items():
    print(f"{way.__name__:18} {curve[-1, 0]:3} forward passes' worth of work; at most", end=" ")
    print(f"{peaks[way] / 2**20:4.1f} MiB held, formula {formulas[way] / 2**20:.1f}")
assert all(map(np.array_equal, grads[remember], grads[recompute_segments]))
assert [curve[-1, 0] for curve in curves.values()] == [3 * N, 4 * N]
for way, peak in peaks.items():
    assert 0.96 * formulas[way] <= peak <= 1.05 * (formulas[way] + 2 * i)  # see below

# %% [markdown]
# The gradients are the same bits, and the work is 4/3. The formula counts what forward keeps.
# Backward itself adds the gradient that goes into a layer and the one that comes out, at most
# `2 i`. That is also why neither curve of the figure ends at 0: the last gradient still exists, and
# with recompute also what a segment keeps until it is done: its result, the gradient that came in,
# and the gradients of its weights.
#
# ## The figure


# %%
def draw(plt):
    figure, axes = plt.subplots(figsize=(9, 4.8))
    looks = {remember: (figures.INK, "-"), recompute_segments: (figures.EMPHASIS, "--")}
    for way, (color, line) in looks.items():
        done, held = curves[way].T
        axes.fill_between(done, held / 2**20, color=color, alpha=0.12, linewidth=0)
        axes.plot(done, held / 2**20, line, color=color)
    top, low = (peak / 2**20 for peak in peaks.values())
    figure.suptitle(f"Recompute: 4/3 of the work, {low / top:.0%} of the memory, the same gradient")
    axes.text(N + 6, 0.98 * top, f"remember everything: at most {top:.1f} MiB")
    words = f"recompute, {N // K} segments of {K}: at most {low:.1f} MiB"
    axes.text(2.3 * N, 1.35 * low, words, color=figures.EMPHASIS)
    axes.axvline(N, color=figures.IDLE, linestyle=":", linewidth=1.5, zorder=0)
    axes.text(N - 1, 1.1 * top, "forward", ha="right", color=figures.FORWARD)
    axes.text(N + 1, 1.1 * top, "backward", color=figures.BACKWARD)
    axes.set(
        title=f"An MLP of {N} layers of width {WIDTH}, batch {BATCH}, float32",
        xlabel="work done (forward passes of one layer; a backward pass of one layer counts two)",
        ylabel="activations held (MiB)",
        xticks=range(0, 4 * N + 1, N),
        yticks=[0, 4, 8, 12, 16],
        xlim=(0, 4 * N + 2),
        ylim=(0, 1.18 * top),
    )
    return figure


figures.save(draw, "01_autograd")

# %% [markdown]
# ## Exercise 1: a backward of your own
#
# Many language models normalise by the root mean square (Zhang and Sennrich 2019), and minidist
# does not have it. Write its backward. It is checked by `gradcheck`, which picks a random direction
# `v` and random weights `u` of the outputs, and compares `<J^T u, v>`, from backward, with the
# slope of `<u, f>` along `v`, from two forward passes.
#
# ```
#     Y = X / r,   r = sqrt(mean of X^2 over the last axis + eps)
# ```
#
# *Hint:* `r` depends on every element of the row. So there are two terms, `dY / r` and one through
# `r`: `dr`, a sum over the row, times the slope of `r` along each element, `X / (C r)`.


# %%
def rms_norm_backward(grad, x, r):
    """Return dX[B, C] from dY[B, C], X[B, C] and r[B, 1]."""
    raise NotImplementedError  # your lines here


def check_norm(attempt):
    class RMSNorm(Function):
        def forward(self, x):
            self.x, self.r = x, np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-5)
            return x / self.r

        def backward(self, grad):
            return attempt(grad, self.x, self.r)

    try:
        gradcheck(lambda x: RMSNorm()(x), generator(0, "exercise").standard_normal((3, 5)))
    except AssertionError as difference:
        return difference


def as_if_r_were_constant(grad, x, r):
    return grad / r


exercise.judge(1, check_norm, rms_norm_backward, tempting=[as_if_r_were_constant])

# %% [markdown]
# ## Exercise 2: segments
#
# Return the length of the segments that recompute `n` layers with the fewest bytes, where a layer
# keeps `a` bytes and its input has `i`. Segments are equal: the length divides `n`. *Hint:* in a
# Transformer's block `a` is many times `i`; should segments be longer then, or shorter?


# %%
def segment(n, i, a):
    raise NotImplementedError  # your line here


def check_segment(attempt):
    for n, i, a in [(32, 1, 1), (32, 12, 11), (64, 1, 16), (24, 8, 1)]:
        k, held = attempt(n, i, a), {k: n // k * i + k * a for k in range(1, n + 1) if n % k == 0}
        if k not in held:
            return f"{n} layers cannot be cut into segments of {k}"
        if held[k] > min(held.values()):
            return f"n, i, a = {n}, {i}, {a}: {held[k]} bytes, and {min(held.values())} will do"


def nearest_to_the_root(n, i, a):
    lengths = (k for k in range(1, n + 1) if n % k == 0)
    return min(lengths, key=lambda k: abs(k - (n * i / a) ** 0.5))


exercise.judge(2, check_segment, segment, tempting=[nearest_to_the_root])

# %% [markdown]
# ## Exercise 3: why did this break?
#
# Two batches are in flight: forward of the first, forward of the second, backward of the first,
# update, backward of the second. Nothing complains, but the second batch's `dx` is not the gradient
# of the loss that its forward computed. Which array did that backward read, and what had happened
# to it? Write an `update` with which both gradients are right. *Hint:* a function keeps the same
# arrays that its forward was given, not copies. (Lesson 9 is built on this.)


# %%
def update(w, lr):
    """Move the Tensor w against its gradient."""
    raise NotImplementedError  # your line here


def in_place(w, lr):
    w.data -= lr * w.grad


def check_update(attempt):
    random = generator(0, "two batches")
    first, second = (Tensor(random.standard_normal((4, 3)), requires_grad=True) for _ in range(2))
    w = Tensor(random.standard_normal((3, 2)), requires_grad=True)
    losses, old = [((x @ w) * (x @ w)).sum() for x in (first, second)], w.data.copy()
    losses[0].backward()
    new = old - 0.1 * w.grad
    attempt(w, 0.1)
    losses[1].backward()
    want = 2 * (second.data @ old) @ old.T  # loss = |x w|^2
    if (error := abs(second.grad - want).max() / abs(want).max()) > 1e-12:
        return f"dx of the second batch is off by {error:.0%}"
    if not np.allclose(w.data, new):
        return f"the gradient is right, but w is off by {abs(w.data - new).max():.2g}"


exercise.judge(3, check_update, update, tempting=[in_place])

# %% [markdown]
# ## What it costs, and the next problem
#
# A gradient costs two more forwards and, until backward is through, the memory of all activations;
# recompute trades a third more work for most of that memory. `p.grad` is a sum of contributions,
# and sums can be taken apart: over examples, over micro-batches, over devices.
#
# We can now make a gradient, know when each part of it is ready, and defer half of backward. But
# still one device does it all. To share the work, devices must communicate: the next lesson,
# `02_collectives.py`, is about messages, and about what it costs to add up a vector that is spread
# over many devices.
