# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
#   minidist: {lesson: 20, minutes: 40, needs: [3, 5, 8, 13, 16], leads_to: [21, 24], lab: planning}
# ---

# %% [markdown]
# (lesson-20)=
# # 20. Which strategy when
#
# **Question.** All strategies of this course compute one gradient. Which of them should one take,
# given a model and a machine?
#
# You need [ZeRO](05_zero.py), [1F1B](08_one_f_one_b.py) and [meshes](16_hybrid.py). Letters: $P$
# parameters; $L$ blocks of width $C$, $H$ heads; $B$ examples of $T$ positions; $N$ ranks, $p$ of
# them along the pipeline axis; $m$ micro-batches.

# %% tags=["setup", "hide-input"]
import numpy as np
from support import begin, exercise, figures, measured

from minidist import Cluster, nn
from minidist.observe.costs import alone, example, measure_costs, useful_share
from minidist.planning import Plan, TransformerSize, memory
from minidist.verify.strategies import STRATEGIES, Case

begin()
cluster = Cluster(4)

# %% [markdown]
# ## Problem: the state alone fills 40 GPUs
#
# GPT-3 has 175 billion parameters: 96 blocks of width 12,288, 96 heads, examples of 2,048 tokens.
# With [18 bytes each](05_zero.py) they are 3,150 GB, as much as 40 GPUs of 80 GB have. There are 64
# such GPUs, 8 in a host. What is cut, and along which links do its parts meet?
#
# ## Idea: ask what is missing
#
# ```text
# Does a step fit into one device: 18 P bytes, and the activations of one example?
# |
# +- yes -- are there at least as many examples as ranks?
# |         +- yes   data parallelism: `bucketed`; `zero_1` costs no more bytes
# |         +- no    cut matrices too, or positions if they are what is long
# |
# +- no --- does one block fit, with its activations?
#           +- no    cut matrices (`sequence`) inside a host; positions (`ring_attention`,
#           |        `ulysses`) if they are long; experts over ranks (`expert`). Ask again
#           +- yes   can a host's links take in 3 P numbers while a step's work is done?
#                    +- yes   `zero_3`; if it must recompute, compare that with a bubble
#                    +- no    cut matrices in a host, layers across hosts: `hybrid`, `1f1b`;
#                             `zb_h1` if the bubble hurts. The rest is data parallel
# ```
#
# Old gradients suit ranks of unequal speed (`ssp`, `pipedream`), [inexact ones](19_fewer_bytes.py)
# slow links. A block keeps what [Korthikanti et al. 2022](https://arxiv.org/abs/2205.05198) count.

# %%
P, L, C, H, T, B = 175e9, 96, 12288, 96, 2048, 64
GPUS, HOST, ROOM, SPEED = 64, 8, 80e9, 150e12  # operations per second of a GPU
LINK, INSIDE = 25e9, 300e9  # bytes per second: of a link to other hosts, of a GPU inside its host


def held(t=1, p=1, d=1, zero=0, recompute="nothing"):
    """Return the bytes of the fullest rank: its state, and the activations of 1F1B."""
    state = {0: 18, 1: 6 + 12 / d, 3: 18 / d}[zero] * P / (t * p)
    block = {"nothing": 34 + 5 * H * T / C, "attention": 34, "all": 2}[recompute] * T * C / t
    return state + L * block * min(1, B / d / p)


def place(links):
    """Follow the tree for this model; return a strategy and its plan; links: of a host."""
    if held() <= ROOM:
        return "bucketed", {"d": GPUS}
    if held() / L > ROOM:
        return "sequence", {"t": HOST}
    network = 3 * 2 * P / (links * LINK)  # numbers of 2 bytes
    work = 8 * P * B * T / GPUS / SPEED  # forward, forward again, backward: 2 + 2 + 4
    if network <= work:
        return "zero_3", {"d": GPUS, "zero": 3, "recompute": "all"}
    return "hybrid", {"t": HOST, "p": GPUS // HOST, "recompute": "attention"}


# %% [markdown]
# :::{admonition} Predict before you run
# Where does the tree go if a host has one link to other hosts, and if eight? Which plan is faster?
# :::

# %% tags=["hide-output"]
for links in (1, 8):
    name, plan = place(links)
    print(f"{links} links: {name}, {plan}, {held(**plan) / 1e9:.1f} GB a GPU")
forward, idle, network = 2 * P * B * T / GPUS / SPEED, (8 - 1) / (B + 8 - 1), 6 * P / LINK
inside = 10 * L / 8 * B * T * C * 2 * 7 / 8 / INSIDE
print(f"zero_3: {4 * forward:.1f} s of work; network {network:.0f} s, or {network / 8:.1f} s by 8")
print(f"8 x 8: {3 * forward / (1 - idle):.1f} s, a bubble of {idle:.0%}; {inside:.1f} s in hosts")
mesh = Plan(tp=8, pp=8, micro_batches=B, sequence=True, recompute="selective", cut="blocks")
size = TransformerSize(L, C, H, T, vocab=51200)
library = max(sum(memory(size, mesh, B, r, "korthikanti", 18).values()) for r in range(8))
print(f"the library, with the embedding: {library / 1e9:.1f} GB for 8 x 8")
assert 0.95 < held(t=8, p=8, recompute="attention") / library < 1

# %% [markdown]
# :::{dropdown} Where does the number come from?
# `zero_3` gathers all weights twice and scatters their gradients once: each host takes in $3 P$
# numbers of 2 bytes, 1,050 GB. One ring of all GPUs enters a host by one link: 42 s. Eight rings of
# an eighth of the bytes, or [two levels](02_collectives.py), use eight links: 5.2 s.
# :::
#
# With eight links the work hides the network. But 8 by 8 is faster: its bubble and its bytes take
# less than the second forward pass that `zero_3` needs to fit. In 2021 it waited: 768 GPUs took
# as long for a step as 1,536 ([Narayanan et al. 2021](https://arxiv.org/abs/2104.04473), table 2).
#
# ## Data, tensor and pipeline parallelism side by side
#
# | | data (`naive`) | tensor (`sequence`) | pipeline (`1f1b`) |
# |---|---|---|---|
# | what travels | gradients | activations, in each block | activations, at cuts |
# | numbers, all ranks | $2 (N-1) P$ | $(N-1) (10 L + 5) B T C$ | $2 (p-1) B T C$ |
# | idle share | 0 | 0 | $(p-1) / (m+p-1)$ |
#
# A gather or a scatter counts 1, an all_reduce 2. A block has four pairs of gather and scatter, and
# [gathers X again](13_sequence_parallel.py) for $dW$ of two matrices, cut by columns: 10. Embedding
# and head have two pairs, and the head gathers X again: 5.
#
# :::{admonition} Predict before you run
# One Transformer on four ranks: which of the three sends most, and which holds most? What happens
# to the bytes of each with four times the batch?
# :::

# %% tags=["hide-output"]
case = example("naive")
many = Case("32 examples", case.model, *np.zeros((2, 32, 16), int))  # in place of 8
L, C, T, P = 6, 32, 16, sum(p.size for p in case.model.parameters())
table = {"naive": 2 * P, "sequence": (10 * L + 5) * 8 * T * C, "1f1b": 2 * 8 * T * C}
for name, numbers in table.items():
    ranks = measured.costs(name, 4)
    sent, most = sum(cost.sent for cost in ranks), max(cost.memory for cost in ranks)
    assert 1 <= sent / (3 * 8 * numbers) < 1.02, name  # N - 1, bytes
    grown = sum(cost.sent for cost in measure_costs(name, many, cluster)) / sent
    words = f"{sent / 1e3:4.0f} kB sent, {grown:.1f} times as much for 4 times the batch"
    print(f"{name:8} {words}; {most / 1e3:4.0f} kB held")

# %% [markdown]
# :::{admonition} Predict before you run
# Of all that train this Transformer, exactly or with old weights: which strategy holds least, and
# which sends least? What do they pay with?
# :::

# %% tags=["hide-output"]
points = {}
for name, record in STRATEGIES.items():
    case, exact = example(name), record.promise != "invariant"
    if exact and record.costs.compared and isinstance(case.model, nn.Transformer):
        ranks, one = measured.costs(name, 4), alone(case)
        sent = sum(cost.sent for cost in ranks) / one.held["parameters"]
        most = 100 * max(cost.memory for cost in ranks) / one.memory
        points[name] = sent, most, useful_share(name, case, ranks, one)
sends, holds = min(points, key=points.get), min(points, key=lambda name: points[name][1])
print(f"{sends} sends least, {holds} holds least, {points[holds][2]:.0%} of its time is useful")


# %% tags=["hide-input"]
def draw(plt):
    figure, axes = plt.subplots(figsize=(10, 6))
    colors = {"examples": figures.FORWARD, "layers": figures.BACKWARD, "positions": figures.OWN}
    colors |= {"matrices": figures.COMMUNICATION, "servers, or several": figures.UPDATE}
    labels = {}
    for name, (x, y, useful) in points.items():
        color = colors.get(STRATEGIES[name].costs.cuts, figures.UPDATE)
        axes.scatter(x, y, 250 * useful, color=color, edgecolor="white", zorder=3)
        labels.setdefault((x > 0.4, x > 0.8, round(x), round(y / 1.2)), []).append(name)
    for names in labels.values():
        x, y, _ = max(points[name] for name in names)
        at = {"xytext": (-9, 0), "ha": "right"} if x < 0.4 or 5 < x < 7 else {"xytext": (9, 5)}
        axes.annotate(", ".join(names), (x, y), textcoords="offset points", fontsize=9, **at)
    for least, style, words in ((0.6, "--", "60 % useful or more"), (1, "-", "no idle time")):
        front = sorted((x, y) for x, y, useful in points.values() if useful >= least)
        xs, ys = [x for x, _ in front], np.minimum.accumulate([y for _, y in front])
        axes.step([*xs, 30], [*ys, ys[-1]], style, where="post", color=figures.INK, lw=1)
        axes.text(30, 0.98 * ys[-1], f"best with {words}", ha="right", va="top", fontsize=9)
    for words, color in colors.items():
        axes.plot([], [], "o", color=color, ms=10, label=words)
    axes.legend(title="colour: what is cut\narea: useful share of time", loc="upper left")
    axes.annotate("better", (1.4, 42), (2.3, 65), fontsize=13, arrowprops={"arrowstyle": "-|>"})
    axes.set(xscale="log", yscale="log", xlim=(0.1, 32), ylim=(11.8, 115))
    axes.set_xticks([0.3, 1, 3, 10], ["0.3", "1", "3", "10"])
    axes.set_yticks([12.5, 25, 50, 100], ["12.5 %", "25 %", "50 %", "100 %"])
    axes.minorticks_off()
    axes.set_xlabel("bytes that all ranks send in a step, over those of the parameters")
    axes.set_ylabel("held by the fullest rank, of one device")
    axes.set_title(f"{len(points)} strategies on four ranks: less memory costs bytes or idle time")
    return figure


figures.show(
    draw,
    "20_choosing",
    caption="A mark's area is the share of the ranks' time that is useful. Lines: Pareto fronts.",
    alt="Pipelines send and hold little, and idle. Data parallelism sends twenty times as much.",
)

# %% [markdown]
# ## Exercise 1: from which batch on?
#
# Data parallelism sends gradients, whatever the batch; `sequence` sends activations. From how many
# examples on does `naive` send less? All that you need is in the table.


# %% tags=["exercise"]
def crossing(P, L, C, T):
    """Return the number of examples, with a fraction, with which both send as much."""
    raise NotImplementedError  # your line here


exercise.judge("20.1", crossing)

# %% [markdown]
# ## Exercise 2: why did this break?
#
# `zero_3` cuts the batch, weights, gradients and AdamW's state into $N$ parts. So a quarter of one
# device's memory was planned for each of four ranks, and was too little. What is not cut? Return
# the smallest $N$ of 1, 2, 4 and 8 with which no rank holds more than `memory` bytes, or None.


# %% tags=["exercise"]
def least_ranks(name, memory):
    """measured.costs(name, 4) has what a step costs each of N ranks, with .memory bytes."""
    raise NotImplementedError  # your lines here


exercise.judge("20.2", least_ranks)

# %% [markdown]
# ## Exercise 3: four ranks on two cores
#
# Rank $r$ needs `works[r]` seconds of a core, and all begin at once. While some ranks are at work,
# each has the share min(1, cores / ranks at work) of a core. When is the last one done?


# %% tags=["exercise"]
def all_done(works, cores):
    """Return seconds."""
    raise NotImplementedError  # your lines here


exercise.judge("20.3", all_done)
cluster.close()

# %% [markdown]
# ## At work
#
# | here | PyTorch | Megatron-LM | DeepSpeed | JAX |
# |---|---|---|---|---|
# | `zero_3` | `fully_shard` | `--use-torch-fsdp2` | `"stage": 3` | `P("data")` for W |
# | `hybrid` | `init_device_mesh` | `--tensor-model-parallel-size` | | `jax.make_mesh` |
#
# **What it costs.** Among the plans that fit, seconds decide; close ones must be measured.
# **Try:** [ask what a mesh costs](../minidist/observe/pages/static/calculator.html).
# **Next:** here were four ranks. [How many are worth having?](21_scaling.py)
