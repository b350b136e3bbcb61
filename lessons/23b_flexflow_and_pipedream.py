# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
#   minidist: {lesson: 23b, minutes: 30, needs: [9, 23], leads_to: [24], lab: planning}
# ---

# %% [markdown]
# (lesson-23b)=
# # 23b. Search for seconds: FlexFlow and PipeDream
#
# **Question.** Bytes are not seconds. How does a program find the fastest cut for a given machine,
# if there are too many cuts to try?
#
# You need [pipelines that do not drain](09_pipedream.py) and [cuts of a
# graph](23_let_the_machine_cut.py). New words: [stage](pages/glossary.md#stage),
# [replica](pages/glossary.md#replica). Letters: $N$ ranks; $B$ examples; $L$ layers.

# %% tags=["setup", "hide-input"]
from functools import cache
from itertools import product
from math import comb, exp
from random import Random
from time import perf_counter, sleep

import numpy as np
from support import begin, exercise, figures

from minidist import Cluster, nn
from minidist.planning import Machine, flexflow, pipedream, trace
from minidist.planning.flexflow import Simulator, cuts, data_parallel

begin()
FLOPS, BANDWIDTH, B = 5e12, 1.25e9, 64  # of a GPU, per second; a link of 10 Gbit/s; images
widths = [3, 64, 64, 128, 128, *[256] * 3, *[512] * 6]  # VGG-16: 13 convolutions, 3 linear
sides = [224] * 2 + [112] * 2 + [56] * 3 + [28] * 3 + [14] * 3
shapes = [(9 * i, o, side**2) for i, o, side in zip(widths, widths[1:], sides, strict=False)]
shapes += [(25088, 4096, 1), (4096, 4096, 1), (4096, 1000, 1)]
i, o, n = np.array(shapes).T
pool = np.where(np.isin(range(16), [1, 3, 6, 9, 12]), 4, 1)
# of each layer: seconds of forward and backward, bytes of the output, bytes of the parameters
VGG = np.stack([6 * B * i * o * n / FLOPS, 4 * B * o * n / pool, 4 * (i + 1) * o]).T.tolist()

# %% [markdown]
# ## Problem: 16 GPUs are 1.4 times as fast as one
#
# Data parallelism of VGG-16, over links of 10 Gbit/s, waits for the sum of gradients. A pipeline
# sends less, but its layers are unequal. So let a stage have several replicas, which take turns
# with the minibatches. There are 155,117,520 such pipelines of 16 layers on 16 ranks.
#
# :::{dropdown} Where does the number come from?
# One GPU of 5 TFLOP/s needs 1.19 s for 64 images. The parameters have 553 MB. So by the first line
# below, 16 replicas need $2 \cdot 15 \cdot 553 / 1250 = 13.3$ s for 16 minibatches: 0.83 s each.
# :::
#
# ## Idea: the slowest stage counts, so a best pipeline has a best beginning
#
# [PipeDream](https://doi.org/10.1145/3341301.3359646), section 3.1, counts seconds per minibatch:
#
# ```text
# a stage      max(its seconds, 2 (replicas - 1) x bytes of parameters / bandwidth) / replicas
# a cut        2 x bytes of the activation / bandwidth
# a pipeline   the slowest of its stages and cuts
# ```
#
# Whatever the last stage is, those before it should be as fast as they can be: a smaller problem of
# the same kind (dynamic programming).


# %%
def stage(layers, replicas):
    seconds, _, parameters = map(sum, zip(*layers, strict=True))
    return max(seconds, 2 * (replicas - 1) * parameters / BANDWIDTH) / replicas


@cache
def fastest(j, N):
    """Return (seconds per minibatch, [(first layer, last + 1, replicas)]) of the first j layers."""
    best = stage(VGG[:j], N), [(0, j, N)]
    for i in range(1, j):  # the last stage: layers i to j - 1
        for replicas in range(1, N):
            before, stages = fastest(i, N - replicas)
            slowest = max(before, 2 * VGG[i - 1][1] / BANDWIDTH, stage(VGG[i:j], replicas))
            best = min(best, (slowest, [*stages, (i, j, replicas)]))
    return best


# %% [markdown]
# :::{admonition} Predict before you run
# Layers 0 to 12 are convolutions, with nearly all of the work and a tenth of the parameters; 13 to
# 15 are linear. Which stages does the search choose on 16 ranks, with how many replicas?
# :::

# %% tags=["hide-output"]
seconds, stages = fastest(16, 16)
assert (stages, seconds) == pipedream(VGG, 16, BANDWIDTH)
print(f"{comb(30, 15):,} pipelines; 1 GPU {stage(VGG, 1):.2f} s, 16 {stage(VGG, 16):.2f} s")
print(f"fastest: {seconds:.3f} s per minibatch, (first, last + 1, replicas) {stages}")

# %% [markdown]
# [The authors' own plan](https://github.com/msr-fiddle/pipedream) has all 13 convolutions on 15
# ranks and the linear layers on one: a layer away from ours. Does a pipeline keep the promise? The
# plan for 4 ranks runs on ranks that sleep, 20 times as fast.


# %% tags=["hide-output"]
def stream(group, stages, count):  # returns when each minibatch left this rank
    owner = [s for s, (_, _, replicas) in enumerate(stages) for _ in range(replicas)]
    ranks_of = [[r for r, own in enumerate(owner) if own == s] for s in range(len(stages))]
    s, left = owner[group.rank], []
    for i in range(ranks_of[s].index(group.rank), count, len(ranks_of[s])):  # they take turns
        if s > 0:
            group.recv(ranks_of[s - 1][i % len(ranks_of[s - 1])])
        sleep(sum(layer[0] for layer in VGG[slice(*stages[s][:2])]) / 20)
        left.append(perf_counter())
        if s < len(stages) - 1:
            group.send(np.ones(1), ranks_of[s + 1][i % len(ranks_of[s + 1])])
    return left


said, stages_4 = fastest(16, 4)
with Cluster(4, "thread") as ranks:
    left = ranks.run(stream, stages_4, 24)[-1]
measured = (left[-1] - left[5]) / 18  # the first ones fill the pipeline
print(f"{stages_4}: {50 * said:.1f} ms per minibatch promised, {1e3 * measured:.1f} measured")

# %% [markdown]
# ## What if any op can be cut in any way?
#
# [FlexFlow](https://arxiv.org/abs/1807.05358) cuts each op along samples, attributes or parameters,
# and chooses its ranks. [A simulator](../minidist/planning/flexflow.py) says how long a
# strategy takes. All ops matter to each other, so no part is a smaller problem. FlexFlow walks at
# random: it proposes another cut for one op, takes it if faster, and *sometimes* if slower.


# %%
def walk(options, seconds, start, sharpness, seed, tries=300):  # options: {op: its cuts}
    random, now, path = Random(seed), start, [seconds(start)]
    for _ in range(tries):
        name = random.choice([*options])
        proposed = {**now, name: random.choice(options[name])}
        longer = (seconds(proposed) - path[-1]) / path[0]
        if random.random() < exp(-sharpness * max(0, longer)):
            now = proposed
        path.append(seconds(now))
    return path


# %% [markdown]
# On 2 ranks the MLP of [lesson 23](23_let_the_machine_cut.py) has 4,800 strategies, few enough to
# try them all. (R is a cut by rows, which the paper does not have.)
#
# :::{admonition} Predict before you run
# Eight walks never take a slower strategy, eight sometimes do, eight take any. How many find the
# fastest of all in 300 tries?
# :::
# :::{admonition} Predict before you run
# What does the search choose for 16 examples, and for 1,024: columns and rows, or examples?
# :::

# %% tags=["hide-output"]
machine = Machine(2, 2, flops=5e9, memory=4e9, link=1e9, network=1e9, latency=1e-5)
model = nn.MLP([64, 256, 64], dtype="float64")
graphs = {B: trace(model, np.ones((B, 64)), np.arange(B) % 64) for B in (16, 1024)}
options, simulate, walks = cuts(graphs[16], 2, "SOAPR"), Simulator(graphs[16], machine), {}
cost = cache(lambda *chosen: simulate(dict(zip(options, chosen, strict=True))).seconds)
least, start = min(cost(*own) for own in product(*options.values())), data_parallel(graphs[16], 2)
for words, sharpness in {"never": 1e9, "sometimes": 50, "any": 0}.items():
    paths = [walk(options, lambda s: cost(*s.values()), start, sharpness, k) for k in range(8)]
    found, walks[words] = sum(min(path) == least for path in paths), paths[0]
    print(f"{words} slower: {found} of 8 walks find the fastest, {1e3 * least:.3f} ms")
for B, graph in graphs.items():
    strategy, seconds = flexflow(graph, machine, budget=600, dims="SOAPR")
    chosen = [strategy[f"matmul.{i}"].degrees[0][0] for i in (0, 1)]
    print(f"{B} examples: {1e3 * seconds:.3f} ms, the products are cut along {chosen}")
    assert B != 16 or seconds == least


# %% tags=["hide-input"]
def draw(plt):
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.4))
    work, parameters = (100 * np.array(VGG) / np.sum(VGG, axis=0)).T[[0, 2]]
    colors = [figures.FORWARD] * stages[0][1] + [figures.BACKWARD] * (16 - stages[0][1])
    left.bar(np.arange(16) - 0.2, work, 0.4, color=colors)
    left.bar(np.arange(16) + 0.2, parameters, 0.4, color=colors, hatch="////", ec="white", lw=0)
    left.text(0, 20, f"{stages[0][2]} replicas", color=figures.FORWARD)
    left.text(14, 60, f"{stages[1][2]} rank", color=figures.BACKWARD)
    left.set(title="VGG-16: % of the work, hatched: of the parameters", xlabel="layer")
    looks = {"sometimes": figures.FORWARD, "never": figures.EMPHASIS}
    for words, color in looks.items():
        right.plot(1e3 * np.array(walks[words]), color=color, lw=1.5)
    ends = {f"{words} slower": (1e3 * walks[words][-1], looks[words]) for words in looks}
    figures.label_ends(right, 305, ends, 0.02)
    right.axhline(1e3 * least, color=figures.INK, ls=":", lw=1)
    right.set(title="ms of a step on a walk (dotted: fastest)", xlabel="tries")
    return figure


figures.show(
    draw,
    "23b_flexflow_and_pipedream",
    caption="Much work and few parameters get replicas. Only a walk that may slow down arrives.",
    alt="Convolutions have the work, linear layers the parameters. Of two walks one gets stuck.",
)

# %% [markdown]
# ## Exercise 1: two ranks
#
# Two ranks are two stages, or two replicas of one. Write `two_ranks`: the seconds per minibatch of
# the better choice, counted as PipeDream counts, if activations have no bytes.


# %% tags=["exercise"]
def two_ranks(seconds, parameters, bandwidth):
    """Return seconds; the lists have an entry for each layer, parameters are bytes."""
    raise NotImplementedError  # your lines here


exercise.judge("23b.1", two_ranks)

# %% [markdown]
# ## Exercise 2: why did this break?
#
# Somebody goes there if `chance < exp(sharpness * (here - there))`. With seconds it works. With
# bytes in place of seconds it ends with "OverflowError: math range error". Write `accepted`.


# %% tags=["exercise"]
def accepted(here, there, sharpness, chance):
    """Return whether to go there; chance: a random number from 0 to 1."""
    raise NotImplementedError  # your line here


exercise.judge("23b.2", accepted)

# %% [markdown]
# ## Exercise 3: how many pipelines are there?
#
# Write `pipelines(L, N)`: how many ways there are to cut $L$ layers into stages and to give each
# stage some of $N$ ranks. All ranks are used.


# %% tags=["exercise"]
def pipelines(L, N):
    """Return a whole number."""
    raise NotImplementedError  # your lines here


exercise.judge("23b.3", pipelines)

# %% [markdown]
# ## At work
#
# | here | PyTorch | Megatron-LM | DeepSpeed | JAX |
# |---|---|---|---|---|
# | stages | `SplitPoint` | `--pipeline-model-parallel-size` | `partition_method` | Alpa |
#
# **What it costs.** The rates must be measured. PipeDream cuts no layer. A walk promises nothing.
#
# **Next:** what do closed forms say of a run on 384 GPUs? [Lesson 24](24_read_a_real_run.py).
