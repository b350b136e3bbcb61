# %% [markdown]
# # 1. Where gradients come from
#
# Every strategy in this course moves gradients about, sums them, delays them or cuts them up. Here
# we build the machine that makes them, in forty lines, and look at the three handles by which the
# later lessons hold it: hooks, deferred weight gradients, and recomputation.
#
# Letters: `B` batch, `C` width, `x, y` values, `dx, dy` gradients of the loss with respect to them.

# %%
import itertools
import statistics
import time
import tracemalloc
from collections import Counter
from functools import partial

import numpy as np
from threadpoolctl import threadpool_limits

from minidist import Tensor, nn, no_grad
from minidist.autograd import Function, attention, functions, gradcheck, recompute
from minidist.datasets import text
from minidist.rng import generator
from minidist.tools import figures

figures.arguments()
limits = threadpool_limits(1)  # one core, so that times compare

# %% [markdown]
# ## Problem
#
# A gradient is a slope, and a slope can be measured: move a parameter a little up, a little down,
# and look at the loss. That is the *central difference*. It costs two forward passes per
# parameter. For a Transformer with four blocks:


# %%
def seconds(work, rounds=3):
    """Return the median time of calling `work`."""
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


corpus = text()
inputs, targets = (windows[:8] for windows in corpus.windows(64))
model = nn.Transformer(corpus.vocab, 128, 4, 4, 64, dtype="float64")
P = sum(p.size for p in model.parameters())


def forward():
    with no_grad():
        return nn.cross_entropy(model(inputs), targets).item()


def forward_and_backward():
    nn.cross_entropy(model(inputs), targets).backward()


slow = 2 * P * seconds(forward)
fast = seconds(forward_and_backward)
print(f"{P:,} parameters, one gradient by central differences: {slow / 3600:.1f} hours")
print(f"the same gradient by backward: {fast:.3f} s, {slow / fast:,.0f} times less")
assert slow > 100 * fast

# %% [markdown]
# Both are the same slope. We have no hours, so we try three of the parameters:

# %%
for p in model.parameters():
    p.grad = None
forward_and_backward()
step = 1e-5
for name, place in [
    ("head.linear.weight", (5, 7)),
    ("blocks.2.expand.bias", (3,)),
    ("blocks.0.norm_1.gain", (0,)),
]:
    p = model.named_parameters()[name]
    losses = []
    for distance in (step, -2 * step, step):  # up, down, and back to where it was
        p.data[place] += distance
        losses.append(forward())
    slope = (losses[0] - losses[1]) / (2 * step)
    print(f"{name:21} {place!s:7} difference {slope:+.8f}   backward {p.grad[place]:+.8f}")
    assert abs(slope - p.grad[place]) < 1e-7

# %% [markdown]
# ## Picture
#
# Forward writes down who was made from whom. Backward walks the same lines the other way.
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
# So an operation needs only one thing beside its forward: how to turn `dy` into `dx` (Griewank and
# Walther, Evaluating Derivatives, 2008, chapter 3). The order of creation, reversed, is an order in
# which every `dy` is complete before it is passed on: nobody is used before they are made.
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
# twice, and hold it to the library: the same bits, for every input.


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
# For each product `x w` of forward, backward has two of the same size. We have counted:

# %%
ratio = work["backward"] / work["forward"]
print(f"forward {work['forward']:,} operations, backward {work['backward']:,}: {ratio:.2f} times")
assert work["backward"] == 2 * work["forward"]

wide = nn.MLP([512] * 5)
batch = Tensor(generator(0, "batch").standard_normal((256, 512)).astype("float32"), True)
graphs = iter([wide(batch).sum() for _ in range(5)])
forward_time = seconds(lambda: wide(batch).sum(), 5)
backward_time = seconds(lambda: next(graphs).backward(), 5)
print(f"in seconds, on an MLP of width 512: {backward_time / forward_time:.2f} times")

# %% [markdown]
# A gradient costs two more forward passes, whatever the number of parameters. That is the bargain.
# (The ratio of the seconds is only near 2: relu, bias and allocation count there too.)
#
# ## Measurement: are the library's gradients right?
#
# Not one slope per parameter, but one per input: pick a random direction `v` and random weights
# `u` of the outputs, and compare `<J^T u, v>`, from backward, with the slope of `<u, f>` along `v`,
# from two forward passes. A wrong element sets the two numbers apart, unless it is wrong by so
# little that it hides below the bound of 1e-6: differences are no exact reference. (Two mistakes
# that cancel along a random direction are no worry.)

# %%
B, C = 4, 6
x, w, b = (random.standard_normal(shape) for shape in [(B, C), (C, 5), (5,)])
gain, bias, qkv = (random.standard_normal(shape) for shape in [(C,), (C,), (3, 2, 2, 5, 3)])
classes = np.array([3, 0, 5, 3])
CHECKS = {
    "linear": (functions.linear, x, w, b),
    "relu": (functions.relu, x),
    "gelu": (functions.gelu, x),
    "layer_norm": (functions.layer_norm, x, gain, bias),
    "embedding": (partial(functions.embedding, classes), x[:, :3].repeat(2, axis=0)),
    "softmax": (functions.softmax, x),
    "causal_attention": (attention.causal_attention, qkv),
    "cross_entropy": (partial(nn.cross_entropy, targets=classes), x),
    "recompute": (partial(recompute, lambda x, w, b: functions.linear(x, w, b).exp()), x, w, b),
}
for name, (function, *values) in CHECKS.items():
    print(f"{name:17} off by {gradcheck(function, *values):.0e}")  # raises if above 1e-6

# %% [markdown]
# ## Handle 1: hooks
#
# A parameter's gradient may get contributions from several places. `add_hook` calls you when the
# last one is in. The gradients of the last layers are finished first, while backward is still busy
# below. A rank can send them off in the meantime: that is how communication will be hidden.

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
# another device. `dw = x^T dy` is not: nobody needs it before the update. With `deferred=` backward
# does only the urgent half and hands the other half over as a list of functions to call later. A
# pipeline fills its idle time with them.

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
# Forward keeps every layer's activations until backward comes by. Chen et al. (Training Deep Nets
# with Sublinear Memory Cost, 2016) keep only the inputs of *segments* of `k` layers, and run a
# segment forward again when backward reaches it. The field calls this *activation checkpointing*
# (or gradient checkpointing), compilers *rematerialisation*. With `n` layers that keep `a` bytes
# each, and inputs of `i` bytes:
#
# ```
#     remember:    n a                 n forwards, n backwards
#     recompute:   n/k i  +  k a       n more forwards; smallest at k = sqrt(n i / a)
# ```
#
# Below, `n = 32` and `i = a`, so the best `k` is sqrt 32, about 5.7. Segments should be equal: we
# take 4, which divides 32. (8 would cost the same, `12 a`, and 5.7 could save no more than 6%.)
#
# To watch the memory we write an operation of our own. It changes nothing, but notes how many bytes
# are held whenever forward or backward passes by. (NumPy reports its arrays to `tracemalloc`.)


# %%
class Log:
    """Rows of (work done, in forward passes of one layer; bytes held since the start)."""

    def __init__(self):
        self.start, self.done, self.rows = tracemalloc.get_traced_memory()[0], 0, []

    def note(self):
        self.rows.append((self.done, tracemalloc.get_traced_memory()[0] - self.start))


class Probe(Function):
    """Y = X  =>  dX = dY.  It stands before a layer, whose backward costs two of its forwards."""

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


def remember(layers, x, log=None):
    for layer in layers:
        x = layer(Probe(log)(x) if log else x)
    return x


def recompute_segments(layers, x, log=None):
    for start in range(0, len(layers), K):
        segment = layers[start : start + K]
        parameters = [p for layer in segment for p in layer.parameters()]
        x = recompute(lambda x, s=segment: remember(s, x, log), x, parameters=parameters)
    return x


# %%
N, K, BATCH, WIDTH = 32, 4, 512, 256
assert N // 4 + 4 == N // 8 + 8 == 12 and 0.94 < 2 * N**0.5 / 12 < 1
deep = nn.Sequential(
    [nn.Linear(WIDTH, WIDTH, activation="relu", name=f"layers.{j}") for j in range(N)]
)
x = generator(0, "deep").standard_normal((BATCH, WIDTH)).astype("float32")
rows, grads, durations = {}, {}, {}
for way in remember, recompute_segments:
    durations[way] = seconds(lambda way=way: way(deep.layers, Tensor(x, True)).sum().backward())
    for p in deep.parameters():
        p.grad = None
    tracemalloc.start()
    log = Log()
    loss = way(deep.layers, Tensor(x, True), log).sum()
    log.note()
    loss.backward()
    tracemalloc.stop()
    rows[way] = np.array(log.rows)
    grads[way] = [p.grad.copy() for p in deep.parameters()]

i = a = x.nbytes  # a layer keeps its result, which is the next one's input
formulas = {remember: N * a, recompute_segments: N // K * i + K * a}
peaks = {way: found[:, 1].max() for way, found in rows.items()}
for way in rows:
    print(
        f"{way.__name__:18} {rows[way][-1, 0]:3} forward passes' worth of work, "
        f"{1e3 * durations[way]:5.1f} ms; at most {peaks[way] / 2**20:4.1f} MiB held, "
        f"formula {formulas[way] / 2**20:.1f}"
    )
assert all(map(np.array_equal, grads[remember], grads[recompute_segments]))
assert rows[remember][-1, 0] == 3 * N and rows[recompute_segments][-1, 0] == 4 * N
assert 0.99 * formulas[remember] <= peaks[remember] <= 1.05 * formulas[remember]
in_hand = 2 * i  # see below
assert formulas[recompute_segments] <= peaks[recompute_segments]
assert peaks[recompute_segments] <= 1.05 * (formulas[recompute_segments] + in_hand)

# %% [markdown]
# The gradients are the same bits, and the work is 4/3. (The seconds may tell less: to touch fresh
# memory costs time too, and recompute touches less of it.) The formula counts what forward leaves
# behind. What backward has in its hands comes on top: the gradient that goes into a layer and the
# one that comes out, at most `2 i`. That is also why neither curve of the figure ends at 0: the
# last gradient is still in hand, and with recompute those of a whole segment's weights, which are
# handed on when the segment is done.
#
# ## The figure


# %%
def draw(plt):
    figure, axes = plt.subplots(figsize=(9, 4.8))
    looks = {remember: figures.FORWARD, recompute_segments: figures.EMPHASIS}
    for way, colour in looks.items():
        done, held = rows[way].T
        axes.fill_between(done, held / 2**20, color=colour, alpha=0.15, linewidth=0)
        axes.plot(done, held / 2**20, color=colour)
    top, low = peaks[remember] / 2**20, peaks[recompute_segments] / 2**20
    figure.suptitle(f"Recompute: 4/3 of the work, {low / top:.0%} of the memory, the same gradient")
    axes.text(
        N + 6, 0.98 * top, f"remember everything: at most {top:.0f} MiB", color=figures.FORWARD
    )
    at = rows[recompute_segments][rows[recompute_segments][:, 1].argmax(), 0]
    axes.annotate(
        f"recompute, {N // K} segments of {K}: at most {low:.0f} MiB",
        (at, low),
        (2.2 * N, 1.55 * low),
        color=figures.EMPHASIS,
        arrowprops={"arrowstyle": "-", "color": figures.EMPHASIS, "relpos": (0, 0.5)},
    )
    axes.axvline(N, color=figures.IDLE, linestyle=":", linewidth=1.5, zorder=0)
    axes.text(N - 1, 1.1 * top, "forward", ha="right")
    axes.text(N + 1, 1.1 * top, "backward")
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
# ## Exercise
#
# Many language models normalise by the root mean square (Zhang and Sennrich 2019), and minidist
# does not have it. Write its backward; `gradcheck` is the judge.
#
# ```
#     Y = X / r,   r = sqrt(mean of X^2 over the last axis + eps)
# ```
#
# *Hint: `r` depends on every element of the row. So there are two terms, `dX = dY / r` and one that
# goes through `r`: first find `dr`, a sum over the row, then `dr/dX`, which is `X / (C r)`.*


# %%
class RMSNorm(Function):
    def forward(self, x, eps=1e-5):
        self.r = np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps)
        self.y = x / self.r
        return self.y

    def backward(self, grad):
        raise NotImplementedError  # your lines here


class RMSNormWithoutR(RMSNorm):
    """The tempting answer: as if r were a constant."""

    def backward(self, grad):
        return grad / self.r


def check(norm):
    """Say "solved", "not solved yet", or what is wrong."""
    x = generator(0, "exercise").standard_normal((3, 2, 5))
    try:
        error = gradcheck(lambda x: norm()(x), x)
    except NotImplementedError:
        return "not solved yet"
    except AssertionError as difference:
        return f"wrong: {difference}"
    return f"solved, off by {error:.0e}"


print("exercise:", check(RMSNorm))
print("a tempting answer:", check(RMSNormWithoutR))
assert check(RMSNormWithoutR).startswith("wrong")

# %% [markdown]
# ## What it costs, and the next problem
#
# A gradient costs two forwards of work and, until backward is through, the memory of all
# activations; recompute trades a third more work for most of that memory. `p.grad` is a sum of
# contributions, and sums can be taken apart: over examples, over micro-batches, over ranks.
#
# We can now make a gradient, know when each part of it is ready, and put half of the work off. But
# it is still one device that does it all. To share the work, ranks must talk: the next lesson is
# about messages, and about what it costs to add up a vector that is spread over many devices.
