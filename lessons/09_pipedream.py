# %% [markdown]
# # 9. PipeDream: no flush, no bubble, and gradients of the past
#
# In lesson 8 the pipeline still drained before every update of the weights: the *flush*. Without
# it the ranks hardly wait any more; but the weights change while a minibatch is in the pipeline.
# This lesson is about which weights a pass uses, which must be kept, and how that affects
# learning. The library's version: `pipedream.py`, `weight_stashing.py` and `weight_versions.py` in
# `minidist/pipeline_parallel`.
#
# Letters: `p` stages, one per rank, `s` one of them (0 is the first); `b` a *minibatch*, that is,
# the examples of one update; *version* `n` of a stage's weights: those with `n` updates in them.
# `F3`, `B3`, `U3` are forward and backward of minibatch 3, and the update after them.

# %%
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
from support import exercise, figures

from minidist import Cluster, nn, optim
from minidist.datasets import Batch, digits
from minidist.events import EventLog
from minidist.nn.flat_parameters import FlatParameters
from minidist.observe import timeline
from minidist.pipeline_parallel import PipeDream, add_communication, programs
from minidist.pipeline_parallel.executor import execute
from minidist.pipeline_parallel.stage import Stage
from minidist.planning import simulate
from minidist.rng import generator

figures.arguments()
images, labels = digits("float64")
clusters = {p: Cluster(p) for p in (1, 4)}

# %% [markdown]
# ## Problem
#
# What does the flush cost? Four ranks take 24 portions of work: as six batches of four with a flush
# after each, or all in a row. A unit is one forward; a backward takes two.

# %%
batch, stream_of_24 = simulate(programs("1f1b", 4, 4)), simulate(programs("pipedream", 4, 24))
print(f"six batches: {6 * batch.makespan} units, idle {float(batch.bubble):.0%} of them")
print(f"one stream:   {stream_of_24.makespan} units, idle {float(stream_of_24.bubble):.0%}")
assert (6 * batch.makespan, stream_of_24.makespan) == (126, 81)

# %% [markdown]
# 45 of the 126 units are lost by draining between the batches. The rest of a rank's idle time, 9
# units, is one fill and one drain for the whole training, however long.
#
# ## Picture
#
# Each rank updates its own stage after every backward and goes on at once. An update took no time
# above; here, to be seen, it takes a unit:

# %%
print(timeline.text(simulate(programs("pipedream", 4, 6), update=1).timeline))

# %% [markdown]
# Follow minibatch 3. On rank 0 `F3` comes before `U0`: it sees version 0. `B3` comes after `U2`: by
# then the weights are version 3. On rank 3 `F3` and `B3` both come after `U2`: version 3. So a
# minibatch sees different weights on different ranks, and on rank 0 even forward and backward
# differ.
#
# ## Math
#
# There are three remedies. *Weight stashing*: a stage keeps the weights that a minibatch's forward
# used until its backward is done. *Vertical sync*: for each minibatch all stages use the version
# that the first stage used. *2BW* (`pipedream_2bw`), double-buffered weights: an update only after
# every `m` minibatches (then micro-batches; the paper takes `m >= p`, and `p - 1` will do), so that
# two buffers are enough.
#
#     version that minibatch b uses on stage s                                  buffers kept
#     weight stashing   max(0, b - (p-1-s))        F and B alike                p - s
#     vertical sync     max(0, b - (p-1))          ... and on all stages alike  p
#     2BW               max(0, floor(b/m) - 1)     one update older than newest 2
#
# (Narayanan et al., SOSP 2019, section 3.3; 2BW: Narayanan et al., ICML 2021, section 3.1.) The
# first line is read off the program: when `F` of a minibatch begins on stage `s`, `p-1-s` others
# are in flight there, and exactly their updates are missing.
#
# What does such a delay of `d` updates do? Take one weight and the loss `l w^2 / 2`, whose gradient
# is `l w`. Descent with rate `e` and a gradient that is `d` updates old is
# `w[t+1] = w[t] - a w[t-d]`, with `a = e l`. Put `w[t] = z^t`: it solves this if
# `z^(d+1) - z^d + a = 0`, and it shrinks if all such `z` lie inside the unit circle.


# %%
def largest_stable(d):
    """Return the largest a at which the delayed descent does not grow, by bisection."""
    low, high = 0.0, 3.0
    for _ in range(50):
        a = (low + high) / 2
        roots = np.roots([1, -1, *[0] * (d - 1), a] if d else [1, a - 1])
        low, high = (a, high) if max(abs(roots)) < 1 else (low, a)
    return low


limits = [largest_stable(d) for d in range(4)]
print("delay 0 to 3: stable up to a =", np.round(limits, 3))
assert np.allclose(limits[:2], [2, 1]) and limits[3] < limits[0] / 4

# %% [markdown]
# One update of delay halves the largest learning rate; three leave less than a quarter of it.
#
# ## Code
#
# A stage that updates. Its parameters are views of one vector, the newest buffer; a graph in flight
# keeps the arrays that its forward used. So *weight stashing is one line*: the update writes to a
# new buffer. Without it backward uses weights that forward never used.


# %%
class Updating(Stage):
    """A stage with an Update; `stash` says whether older weights survive it."""

    def __init__(self, layers, rank, size, lr, stash):
        super().__init__(layers, first=rank == 0, last=rank == size - 1)
        self.flat = FlatParameters(self.parameters())
        self.newest, self.lr, self.stash = self.flat.vector, lr, stash

    def update(self, b):
        self.flat.collect_gradients()
        if self.stash:
            self.newest = self.newest.copy()  # the line
        self.newest -= self.lr * self.flat.gradient
        self.start_next()

    def start_next(self):
        """Make the parameters views of the newest buffer, without gradients."""
        self.flat.bind(self.newest)
        for p in self.flat.parameters:
            p.grad = None


LR = 0.2


def stream(count, size, seed=0, per_update=1):
    """Return minibatches of the digits; `per_update` of them share an update."""
    order = generator(seed, "order").permutation(len(images))
    picks = np.resize(order, (count, size))
    return [Batch(images[i], labels[i], total=size * per_update) for i in picks]


def mlp(seed=0):
    return nn.MLP([64, 64, 64, 64, 10], seed=seed, dtype="float64")  # one layer per stage


def ours(group, kind, stash=True):
    """Return this rank's weights after a stream of 16 minibatches."""
    stage = kind([mlp().layers[group.rank]], group.rank, group.size, LR, stash)
    stage.begin(stream(16, 32))
    execute(add_communication(programs("pipedream", group.size, 16))[group.rank], group, [stage])
    return stage.newest


def the_librarys(group, scheme):
    pipe = PipeDream(mlp(), group, partial(optim.SGD, lr=LR), scheme)
    pipe.train(stream(16, 32))
    return pipe.stage.weights.newest.weights


for stash, scheme in ((True, "weight_stashing"), (False, "none")):
    runs = clusters[4].run(ours, Updating, stash), clusters[4].run(the_librarys, scheme)
    assert all(np.array_equal(a, b) for a, b in zip(*runs, strict=True))
print("four stages, with and without stashing: the library's weights, bit for bit")

# %% [markdown]
# ## Measurement: versions, memory, and the gradient of nothing
#
# With every vector of weights the library keeps the number of updates in it, and it records the
# number of the vector that a pass really uses. An optimizer that keeps a log tells us the rest:
# each gradient that it was given, and the weights that it produced.


# %%
class Diary(optim.SGD):
    """SGD with a log: weights[n] is version n, gradients[n] the gradient from n to n + 1."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, lr)
        self.gradients, self.weights = [], [[p.data.copy() for p in parameters]]

    def step(self):
        self.gradients.append([p.grad.copy() for p in self.parameters])
        super().step()
        self.weights.append([p.data.copy() for p in self.parameters])


def watched(group, scheme, **options):
    """Return (passes and versions, buffers kept, gradients, weights) of this stage."""
    pipe = PipeDream(mlp(), group, partial(Diary, lr=LR), scheme, **options)
    pipe.train(stream(16, 32, per_update=options.get("update_every", 1)))
    diary = pipe.stage.weights.optimizer
    return pipe.used, pipe.stage.weights.most, diary.gradients, diary.weights


FORMULAS = {  # of 4 stages: the version that minibatch b uses on s; the buffers that s keeps
    "weight_stashing": (lambda b, s: max(0, b - (3 - s)), lambda s: 4 - s),
    "vertical_sync": (lambda b, s: max(0, b - 3), lambda s: 4),
    "2bw": (lambda b, s: max(0, b // 4 - 1), lambda s: 2),
}
OPTIONS = {"2bw": {"update_every": 4}}
seen = {
    scheme: clusters[4].run(partial(watched, scheme=scheme, **OPTIONS.get(scheme, {})))
    for scheme in (*FORMULAS, "none")
}
for scheme, (version_of, buffers) in FORMULAS.items():
    for s, (used, most, _, _) in enumerate(seen[scheme]):
        assert all(version == version_of(b, s) for _, b, version in used)
        assert most == buffers(s), f"{scheme}: stage {s} kept {most}"
    kept = [most for _, most, _, _ in seen[scheme]]
    print(f"{scheme:16} versions as the formula says; buffers kept by the stages: {kept}")
found = [[n for _, b, n in used if b == 8] for used, *_ in seen["none"]]
print(f"none: versions at F8 and B8 on the stages: {found}")
assert found == [[5, 8], [6, 8], [7, 8], [8, 8]]

# %% [markdown]
# Are these the gradients of any weights? We combine recorded weights, one version per stage, and
# let one device compute the gradient there. With stashing the formula says which versions to take.
# Without it we try, for minibatch 8, all versions that existed on each stage between its forward
# and its backward: 4 x 3 x 2 x 1 = 24 combinations.


# %%
def error(recorded, b, versions):
    """Return |got - want| / |want| of b's gradients in the worst layer; want: at `versions`."""
    model, minibatch, worst = mlp(), stream(16, 32)[b], 0.0
    for layer, (*_, weights), n in zip(model.layers, recorded, versions, strict=True):
        for p, array in zip(layer.parameters(), weights[n], strict=True):
            p.data[...] = array
    nn.cross_entropy(model(minibatch.inputs), minibatch.targets).backward()
    for layer, (_, _, gradients, _) in zip(model.layers, recorded, strict=True):
        want = np.concatenate([p.grad.ravel() for p in layer.parameters()])
        got = np.concatenate([g.ravel() for g in gradients[b]])
        worst = max(worst, np.linalg.norm(got - want) / np.linalg.norm(want))
    return worst


version_of, _ = FORMULAS["weight_stashing"]
at_formula = [[version_of(b, s) for s in range(4)] for b in range(16)]
off = max(error(seen["weight_stashing"], b, versions) for b, versions in enumerate(at_formula))
print(f"stashing: every minibatch, at the versions of the formula: off by {off:.0e}")
between = list(product(*(range(5 + s, 9) for s in range(4))))
nearest = min(error(seen["none"], 8, versions) for versions in between)
print(f"none: minibatch 8, against the nearest of {len(between)} gradients: off by {nearest:.0%}")
assert off < 1e-12 and nearest > 0.03

# %% [markdown]
# So a stale gradient *is* a gradient, of older weights; without stashing it is the gradient of no
# weights at all. `minidist verify` checks whole trainings: one rank without a pipeline, given the
# versions, ends with the same bits (`minidist/verify/replays/pipedream.py`).
#
# ## Measurement: what staleness costs
#
# 80 updates of 32 digits each, on four ranks; without delay, on one. 2BW takes an update's digits
# as four micro-batches of 8. The loss is the mean of the last 20 updates and of two seeds.

# %%
RATES, SEEDS, UPDATES = (0.02, 0.06, 0.2), (0, 1), 80
NAMES = {
    "synchronous": "synchronous, delay 0",
    "2bw": "2BW, delay 1",
    "weight_stashing": "stashing, delay 3 - s",
    "vertical_sync": "vertical sync, delay 3",
    "none": "no stashing",
}


def learned(group, scheme):
    """Return the loss at the end per rate, a mean over seeds; None but on the last rank."""
    options = OPTIONS.get(scheme, {})
    every = options.get("update_every", 1)
    scheme = "weight_stashing" if scheme == "synchronous" else scheme  # one stage has no delay
    losses = []
    for rate, seed in product(RATES, SEEDS):
        pipe = PipeDream(mlp(seed), group, partial(optim.SGD, lr=rate), scheme, **options)
        found = pipe.train(stream(UPDATES * every, 32 // every, seed, every))
        losses.append(sum(loss for b, loss in found.items() if b >= (UPDATES - 20) * every) / 20)
    if group.rank == group.size - 1:
        return np.reshape(losses, (len(RATES), len(SEEDS))).mean(axis=1)


final = {s: clusters[1 if s == "synchronous" else 4].run(learned, s)[-1] for s in NAMES}
for scheme, name in NAMES.items():
    print(f"{name:23} loss {final[scheme].round(2)} at rates {RATES}")
    assert final[scheme][0] < 1.15 * final["synchronous"][0], "a small rate forgives every delay"
assert final["vertical_sync"][-1] > 2.5 * final["synchronous"][-1]
assert final["weight_stashing"][-1] < 0.6 * final["vertical_sync"][-1]
assert final["weight_stashing"][-1] < final["none"][-1]

# %% [markdown]
# At the smallest rate no scheme loses more than a few percent. At the largest, which is the best of
# the three without delay, vertical sync hardly learns at all. Stashing does better on the same
# pipeline, because only its first stage is 3 updates behind, and its last stage none. And no
# stashing? At small rates it learns as well as stashing, because versions that differ little make a
# small error; at the largest it ends worse. The 24 combinations have shown that it promises
# nothing.


# %%
def draw(plt):
    figure, axes = plt.subplot_mosaic(
        [["flush", "rate"], ["stream", "rate"]], figsize=(12, 4.8), width_ratios=[1.8, 1]
    )
    figure.suptitle(
        "Without flushes ranks wait at the ends only, and gradients are of older weights"
    )
    flushed = [
        replace(e, start=e.start + shift, end=e.end + shift)
        for shift in (0, batch.makespan)
        for e in batch.timeline.events
    ]
    streamed = simulate(programs("pipedream", 4, 10), update=0.5).timeline
    for name, log in (("flush", EventLog(flushed)), ("stream", streamed)):
        figures.rank_bars(axes[name], log)
        axes[name].set_xlim(0, 45)
    axes["flush"].set_title("1F1B, two batches of four: ranks run empty (grey) between them")
    axes["stream"].set_title("PipeDream: rank 0 updates 3 times between F and B of minibatch 4")
    edge = {"edgecolor": figures.INK, "facecolor": "none", "linewidth": 2.5, "zorder": 3}
    axes["stream"].barh([0, 0], [1, 2], 0.86, [12.5, 24], **edge)
    axes["stream"].set_xlabel("time, in forwards", loc="right")
    axes["stream"].legend(ncols=3, fontsize=9, loc="upper left", bbox_to_anchor=(0, -0.12))

    right, grey = axes["rate"], "#777777"
    colors = [figures.INK, grey, grey, figures.EMPHASIS, figures.EMPHASIS]
    for scheme, line, color in zip(NAMES, ("o-", "s-", "D--", "^-", "v--"), colors, strict=True):
        right.plot(RATES, final[scheme], line, color=color)
    ends = {NAMES[s]: (final[s][-1], color) for s, color in zip(NAMES, colors, strict=True)}
    figures.label_ends(right, 0.215, ends, gap=0.11)
    right.set(title=f"Loss, mean of updates {UPDATES - 19} to {UPDATES}", xlabel="learning rate")
    right.set(xscale="log", xlim=(0.018, 0.7), ylim=(0, 2.2), ylabel="nats per digit")
    right.set_xticks(RATES, [f"{rate:g}" for rate in RATES])
    right.minorticks_off()
    right.spines["bottom"].set_bounds(0.018, 0.2)
    return figure


figures.save(draw, "09_pipedream")

# %% [markdown]
# ## Exercise 1: how old is a gradient?
#
# How many updates does stage `s` of `p` make between `F` and `B` of minibatch `b`? The gradient is
# late by this number of updates.
#
# *Hint:* the formula for stashing says which version `F` sees. Which is the newest when `B` begins?


# %%
def updates_between(b, s, p):
    raise NotImplementedError  # your line here


def finds_another_age(attempt):
    for p in (1, 2, 4):
        for s, program in enumerate(programs("pipedream", p, 9)):
            order = [str(action) for action in program]
            for b in range(9):
                between = order[order.index(f"F{b}") : order.index(f"B{b}")]
                want, got = sum(name[0] == "U" for name in between), attempt(b, s, p)
                if got != want:
                    return f"minibatch {b} on stage {s} of {p}: {want} updates, not {got}"


exercise.judge(1, finds_another_age, updates_between, tempting=[lambda b, s, p: p - 1 - s])

# %% [markdown]
# ## Exercise 2: the largest rate
#
# Find the closed form of `largest_stable(d)`.
#
# *Hint:* at the limit a root is on the unit circle. Put `z = exp(i t)` into
# `z^d (z - 1) = -a` and compare lengths and angles of both sides: `z - 1` has the length
# `2 sin(t/2)` and the angle `(t + pi)/2`, and `-a` the angle `pi`.


# %%
def limit(d):
    """Return the largest a at which the delayed descent does not grow."""
    raise NotImplementedError  # your line here


def finds_another_rate(attempt):
    for d in range(8):
        got, want = attempt(d), largest_stable(d)
        if not abs(got - want) < 1e-6:
            return f"for a delay of {d} it is {want:.3f}, not {got:.3f}"


exercise.judge(2, finds_another_rate, limit, tempting=[lambda d: 2 / (d + 1)])

# %% [markdown]
# ## Exercise 3: why did this break?
#
# To be sure that backward finds the stashed weights, somebody binds them again before it. All
# gradients are right, the loss falls, nothing complains; but the final weights are not those of
# weight stashing. Write an `update` that repairs it.
#
# *Hint:* which version does `flat.vector` hold when the update begins? Follow rank 0: of 16
# updates, how many are in its weights at the end?


# %%
class Careful(Updating):
    """Weight stashing, with the weights of each minibatch bound again before its backward."""

    def begin(self, batch):
        super().begin(batch)
        self.held = {}

    def forward(self, b):
        self.held[b] = self.flat.vector
        super().forward(b)

    def backward(self, b):
        self.flat.bind(self.held.pop(b))
        super().backward(b)

    def update(self, b):
        self.flat.collect_gradients()
        self.newest = self.flat.vector - self.lr * self.flat.gradient
        self.start_next()


class Mended(Careful):
    def update(self, b):
        raise NotImplementedError  # your lines here


def finds_other_weights(kind):
    want, got = clusters[4].run(ours, Updating), clusters[4].run(ours, kind)
    off = [np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(got, want, strict=True)]
    if any(off):
        return f"the ranks' weights are off by {', '.join(f'{x:.1%}' for x in off)}"


exercise.judge(3, finds_other_weights, Mended, tempting=[Careful])

# %% [markdown]
# ## What it costs, and the next problem
#
# - **Memory for old weights**: `p - s` versions on stage `s`, most on the first, which also has the
#   most activations in flight. 2BW needs two everywhere.
# - **Another algorithm.** The gradient is exact, but of weights that are gone. The best rate
#   without delay may be too large with it, and only training shows it.
# - **The slowest stage sets the pace.** With the bubble gone, a stage that takes twice as long
#   costs twice the time. PipeDream gives it two ranks, which take turns (SOSP 2019, section 3.2):
#   `programs("pipedream", 3, m, replicas=[2, 1])`.
#
# Is there a way to keep the update synchronous, with one device's gradient up to rounding, and
# still avoid the bubble? Nearly. That is lesson 10, `10_interleaved_and_zero_bubble.py`.

# %%
for cluster in clusters.values():
    cluster.close()
