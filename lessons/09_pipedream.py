# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
#   minidist: {lesson: 9, minutes: 30, needs: [8], leads_to: [10, 10b, 20], lab: pipelines}
# ---

# %% [markdown]
# (lesson-9)=
# # 9. PipeDream: no flush, no bubble, and gradients of the past
#
# **Question.** If a pipeline never drains, the weights change while an example is inside. Of which
# weights is its gradient?
#
# You need [1F1B](08_one_f_one_b.py). New words: [flush](pages/glossary.md#flush), [weight
# stashing](pages/glossary.md#weight-stashing); [version](pages/glossary.md#version) 3 of weights
# has 3 updates in it. Letters: $p$ ranks, $r$ one of them; $i$ a minibatch, an update's examples.

# %% tags=["setup", "hide-input"]
from functools import partial
from itertools import product

import numpy as np
from numpy.linalg import norm
from support import begin, exercise, figures

from minidist import Cluster, nn, optim, run
from minidist.nn.datasets import Batch, digits
from minidist.nn.flat_parameters import FlatParameters
from minidist.pipeline_parallel import PipeDream, add_communication, programs
from minidist.pipeline_parallel.executor import execute
from minidist.pipeline_parallel.stage import Stage
from minidist.planning import simulate

begin()
images, labels = digits("float64")
mlp = partial(nn.MLP, [64, 64, 64, 64, 10], dtype="float64")  # a layer for each of 4 ranks
cluster, LR = Cluster(4), 0.2


def stream(updates, seed=0):
    order = np.random.default_rng(seed).permutation(len(images))
    return [Batch(images[rows], labels[rows]) for rows in np.resize(order, (updates, 32))]


# %% [markdown]
# ## Problem: 45 of 126 units are lost by draining
#
# 4 ranks, 4 micro-batches, $TF = 1$ and $TB = 2$: 1F1B takes $(4 + 3) (TF + TB) = 21$, six batches
# 126. All 24 micro-batches in one stream take $(24 + 3) (TF + TB) = 81$. The rest is the *flush*:
# after each batch the ranks run empty, so that no pass sees two weights.
#
# ## Idea: update after every backward, and go on
#
# Without a flush, `F3` comes before `U0` on rank 0, and `B3` after `U2`: backward would use weights
# that forward never saw. *Weight stashing*, the library's `pipedream` ([Narayanan et al.
# 2019](https://doi.org/10.1145/3341301.3359646), section 3.3), keeps the weights of a
# forward until its backward. A graph holds the arrays that its forward used: one line is enough.


# %%
class Updating(Stage):
    def __init__(self, layer, group, stash):
        super().__init__([layer], group.rank == 0, group.rank == group.size - 1)
        self.flat = FlatParameters(self.parameters())  # the weights as one vector
        self.newest, self.stash = self.flat.vector, stash
        self.history = [self.newest.copy()]  # history[3] is version 3

    def update(self, i):
        self.flat.collect_gradients()
        if self.stash:
            self.newest = self.newest.copy()  # the line
        self.newest -= LR * self.flat.gradient
        self.history.append(self.newest.copy())
        self.flat.bind(self.newest)  # the next forward uses them
        for p in self.flat.parameters:
            p.grad = None


def ours(group, stash):
    stage = Updating(mlp().layers[group.rank], group, stash)
    stage.begin(stream(16))
    execute(add_communication(programs("pipedream", 4, 16))[group.rank], group, [stage])
    return stage.history


# %% [markdown]
# The [library](../minidist/pipeline_parallel/weight_stashing.py) ends with the same bits. One
# device without a pipeline gets them too, if it takes each gradient at the right versions:


# %%
def the_librarys(group, scheme):
    pipe = PipeDream(mlp(), group, partial(optim.SGD, lr=LR), scheme)
    pipe.train(stream(16))
    weights = pipe.stage.weights
    return weights.newest.weights, {f"{kind}{i}": n for kind, i, n in pipe.used}, weights.most


def gradients_at(i, weights):  # of minibatch i, on one device; weights: a vector per layer
    model, batch = mlp(), stream(16)[i]
    flat = FlatParameters(model.parameters())
    flat.bind(np.concatenate(weights))
    nn.cross_entropy(model(batch.inputs), batch.targets).backward()
    flat.collect_gradients()
    return np.split(flat.gradient, np.cumsum([len(vector) for vector in weights])[:-1])


stashed, unstashed = cluster.run(ours, True), cluster.run(ours, False)
schemes = "weight_stashing", "vertical_sync", "none", "2bw"
runs = {scheme: cluster.run(the_librarys, scheme) for scheme in schemes}
pairs = zip(stashed + unstashed, runs["weight_stashing"] + runs["none"], strict=True)
assert all(np.array_equal(history[-1], weights) for history, (weights, *_) in pairs)
replay = [[history[0]] for history in stashed]
for i in range(16):
    weights = [layer[max(0, i - (3 - r))] for r, layer in enumerate(replay)]
    for layer, gradient in zip(replay, gradients_at(i, weights), strict=True):
        layer.append(layer[-1] - LR * gradient)
off = max(abs(np.subtract(a, b)).max() for a, b in zip(replay, stashed, strict=True))
print(f"16 updates on 4 ranks, every version: off by {off:.0e} from one device")
assert off < 1e-12

# %% [markdown]
# :::{dropdown} Where does the number come from?
# When `F` of minibatch $i$ begins on rank $r$, $p - 1 - r$ others are between their forward and
# their backward there. Exactly their updates are missing, so both passes of $i$ use version
# $\max(0, i - (p - 1 - r))$. When `B` begins, all earlier updates are done: the newest is $i$.
# :::
#
# Two variants: *vertical sync* uses version $\max(0, i - (p - 1))$ on all ranks. `pipedream_2bw`
# ([Narayanan et al. 2021](https://arxiv.org/abs/2006.09503), section 3.1) updates once per $m$
# micro-batches; here $i$ is one of them, and it uses version $\max(0, \lfloor i/m \rfloor - 1)$.
#
# :::{admonition} Predict before you run
# How many vectors of weights does each of the 4 ranks keep at most: with weight stashing, vertical
# sync, 2BW ($m = 3$)?
# :::

# %% tags=["hide-output"]
kept = {scheme: [most for *_, most in ranks] for scheme, ranks in runs.items()}
print(kept)
assert [*kept.values()] == [[4, 3, 2, 1], [4] * 4, [1] * 4, [2] * 4]

# %% [markdown]
# ## And without stashing?
#
# :::{admonition} Predict before you run
# Which versions do `F8` and `B8` see on each rank? On every rank we try all versions from one to
# the other. For how many of these combinations is the gradient of minibatch 8 right?
# :::

# %% tags=["hide-output"]
print("version at F8 and B8:", [(used["F8"], used["B8"]) for _, used, _ in runs["none"]])
errors = []
for versions in product(*(range(5 + r, 9) for r in range(4))):
    want = gradients_at(8, [h[n] for h, n in zip(unstashed, versions, strict=True)])
    off = [norm((h[8] - h[9]) / LR - a) / norm(a) for h, a in zip(unstashed, want, strict=True)]
    errors.append(max(off))
print(f"off by {min(errors):.0%} from the nearest of {len(errors)} gradients")

# %% [markdown]
# So a stale gradient *is* a gradient, of older weights. Without stashing it is one of no weights.
#
# ## What does staleness cost?
#
# :::{admonition} Predict before you run
# 80 updates with rates 0.02, 0.06 and 0.2, the best of them for one device; the loss of the last
# 20. Which scheme learns worst at 0.2: weight stashing, vertical sync, or none? And at 0.02?
# :::


# %% tags=["hide-output"]
def learned(group, scheme):
    losses = np.zeros(3)
    for (at, rate), seed in product(enumerate((0.02, 0.06, 0.2)), range(3)):
        pipe = PipeDream(mlp(seed=seed), group, partial(optim.SGD, lr=rate), scheme)
        found = pipe.train(stream(80, seed))  # on the last rank
        losses[at] += sum(found.get(i, 0) for i in range(60, 80)) / 60
    return losses.round(2)


print("one device     ", run(learned, 1, "none")[0])
for scheme in schemes[:3]:
    print(f"{scheme:15}", cluster.run(learned, scheme)[3])


# %% tags=["hide-input"]
def draw(plt):
    figure, axes = plt.subplots(figsize=(11, 3.4))
    log, used = simulate(programs("pipedream", 4, 12), update=0.5).timeline, runs["weight_stashing"]
    figures.rank_bars(axes, log, numbered=False)
    for e in (e for e in log.events if e.name[0] != "U"):
        words, ink = f"{e.name}\nv{used[e.rank][1][e.name]}", {"F": "w", "B": "k"}[e.name[0]]
        middle = {"ha": "center", "va": "center", "fontsize": 8, "clip_on": True}
        axes.text((e.start + e.end) / 2, e.rank, words, color=ink, **middle)
    axes.set(title="F3 above v0: forward of minibatch 3 uses version 0", xlim=(0, 29))
    axes.set_xlabel("time (1 = one forward)")
    return figure


figures.show(
    draw,
    "09_pipedream",
    caption="F and B of a minibatch use one version; hatched: the update that makes the next one.",
    alt="Timeline of four ranks that never drain; each cell has its minibatch and its version.",
)

# %% [markdown]
# ## Exercise 1: how old is a gradient?
#
# How many updates does rank $r$ of $p$ make between `F` and `B` of minibatch $i$?


# %% tags=["exercise"]
def updates_between(i, r, p):
    raise NotImplementedError  # your line here


exercise.judge("09.1", updates_between)

# %% [markdown]
# ## Exercise 2: the largest rate
#
# Take one weight, with the gradient of `delay` updates ago: `w[n + 1] = w[n] - a * w[n - delay]`.
# Up to which `a` does it not grow, in closed form? Without a delay 2, with a delay of one 1.


# %% tags=["exercise"]
def largest_rate(delay):
    raise NotImplementedError  # your line here


exercise.judge("09.2", largest_rate)

# %% [markdown]
# ## Exercise 3: why did this break?
#
# A rank does `stashed[i] = w` at `F` of minibatch `i`, and at its `B`, which is `delay` minibatches
# later, `w = stashed.pop(i)` and `w = w - LR * gradient(w, i)`. Each gradient is of the right
# weights, and the loss falls; but most updates have no effect. Write the loop, mended.


# %% tags=["exercise"]
def train(gradient, w, updates, delay):
    """Return the weights after all updates with LR = 0.2; gradient: (weights, minibatch) -> dW."""
    raise NotImplementedError  # your lines here


exercise.judge("09.3", train)
cluster.close()

# %% [markdown]
# ## At work
#
# | here | PyTorch | Megatron-LM | DeepSpeed | JAX |
# |---|---|---|---|---|
# | a flush per update | `schedule.step` | `get_forward_backward_func` | `train_batch` | |
#
# **What it costs.** Old weights, and a best rate to be found again; stashing did not learn faster.
#
# **Next:** keep one device's update, and still be idle for less: [lesson 10](10_interleaved.py).
