# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
#   minidist: {lesson: 24, minutes: 30, needs: [5, 8, 16, 20], leads_to: [25], lab: none}
# ---

# %% [markdown]
# (lesson-24)=
# # 24. Read a real run
#
# **Question.** A step on 384 GPUs took 107 seconds. Its matrix products need 39. Where do the other
# 68 go, and how much of that follows from sizes, mesh and rates?
#
# You need [1F1B](08_one_f_one_b.py), [ZeRO](05_zero.py) and [meshes](16_hybrid.py). New words:
# [MFU](pages/glossary.md#mfu), [closed form](pages/glossary.md#closed-form). Letters: $L$ blocks,
# $C$ width, $V$ vocabulary, $T$ positions; $B$ examples of a batch, $b$ of a micro-batch, $m$
# micro-batches; $d$, $p$, $t$ ranks along data, pipeline, tensor; $P$ parameters.

# %% tags=["setup", "hide-input"]
import numpy as np
from support import begin, exercise, figures

from minidist.pipeline_parallel import programs
from minidist.planning import Plan, TransformerSize, memory, simulate, traffic
from minidist.planning.plans.published import DEEPSEEK, candidates, deepseek_text, rows, summary

begin()
PEAK, T, V, GiB = 312e12, 2048, 250_880, 2**30  # FLOP/s of an A100 in 16 bits

# %% [markdown]
# ## Problem: 39 seconds of matrix products take 107
#
# BLOOM has 176 billion parameters and was trained on 384 A100 GPUs. Its team published not only a
# [paper](https://arxiv.org/abs/2211.05100), but also [how it was set
# up](https://github.com/bigscience-workshop/bigscience/blob/master/train/tr11-176B-ml/README.md)
# and [what other meshes
# measured](https://github.com/bigscience-workshop/bigscience/blob/master/train/tr11-176B-ml/chronicles-prequel.md).
# One had 78 blocks of width 13,824, $d$ = 8, $p$ = 12, $t$ = 4: 2,048 examples took 107.12 s.
#
# ## Idea: a size is arithmetic, a time is arithmetic times a rate
#
# Parameters and FLOPs ([Narayanan et al. 2021](https://arxiv.org/abs/2104.04473), equations 2, 3),
# and the bytes of model and optimizer on a rank ([a table](05_zero.py#bytes-per-parameter)):
#
# $$P = L (12 C^2 + 13 C) + (V + T + 2) C$$ (parameters)
# $$96 B T L C^2 (1 + T/(6 C) + V/(16 L C))$$ (flops)
# $$P/(p t) \cdot (2 + 4 + 12/d)$$ (bytes)
#
# :::{dropdown} Where does the number come from?
# A block's products have $12 C^2$ weights: a multiply and an add per position are 24 of the 96. A
# second forward, which computes activations again, takes 24, and backward 48.
# :::


# %%
def parameters(L, C):
    return L * (12 * C**2 + 13 * C) + (V + T + 2) * C


def flops(L, C, B):
    return 96 * B * T * L * C**2 * (1 + T / (6 * C) + V / (16 * L * C))


def states(L, C, d, p, t):
    return parameters(L, C) / (p * t) * (2 + 4 + 12 / d)


# %% [markdown]
# :::{admonition} Predict before you run
# BLOOM has $L$ = 70 and $C$ = 14,336. How many GiB are its weights in 16 bits? A step of 2,048
# examples took 104.70 s: how many teraFLOP/s are that per GPU? The team printed 329 and 149.77.
# :::

# %% tags=["hide-output"]
bloom, candidate = (TransformerSize(*size, T, V) for size in ((70, 14336, 112), (78, 13824, 96)))
mesh = Plan(dp=8, pp=12, tp=4, micro_batches=128, zero=1, recompute="full")
assert parameters(70, 14336) == bloom.parameters
assert np.isclose(flops(70, 14336, 2048), bloom.flops(2048, recompute=True))
held = memory(bloom, mesh, 2048, rank=1, keeps="korthikanti", per_parameter=18)
held = sum(held[kind] for kind in ("parameters", "gradients", "optimizer"))
assert abs(states(70, 14336, 8, 12, 4) / held - 1) < 0.01  # stages are not quite equal
print(f"weights: {2 * bloom.parameters / GiB:.0f} GiB (published: 329)")
print(f"{flops(70, 14336, 2048) / 384 / 104.70 / 1e12:.2f} teraFLOP/s per GPU (published: 149.77)")

# %% [markdown]
# These are arithmetic. But the published rate counts the second forward, too. MFU does not.
#
# ## Four steps, two unknown numbers
#
# Eleven stages have 7 blocks, the last has 1 and the head. A pipeline takes $m$ times its slowest
# stage, and fills and drains once. Gradients are summed and weights updated once, too.
#
# :::{admonition} Predict before you run
# The seconds of a block, and of what happens once, are fitted to $m$ = 32 and 64. How far off is
# the prediction for 96 and 128: 0.5 %, 5 % or 20 %?
# :::

# %% tags=["hide-output"]
MEASURED = {32: 35.77, 64: 59.65, 96: 83.11, 128: 107.12}  # micro-batches: seconds of a step
stages = np.array([7] * 11 + [1 + 3 / 4 * V / (12 * 13824)])  # the head is not run again
span = {  # in blocks; a backward that runs forward again takes three forwards
    m: simulate(programs("1f1b", 12, m), list(stages / 4), backward=list(3 * stages / 4)).makespan
    for m in MEASURED
}
block = (MEASURED[64] - MEASURED[32]) / (span[64] - span[32])
once = MEASURED[32] - block * span[32]
for m, seconds in MEASURED.items():
    ours = block * span[m] + once
    print(f"m = {m:3}: measured {seconds:6.2f} s, predicted {ours:.2f} ({ours / seconds - 1:+.1%})")
sums, _ = traffic(candidate, mesh, 2048)["dp"]
links = 4 * 12.5e9 / 8  # bytes per second of a GPU: the 8 of a host share 4 links of 100 Gbit/s
print(f"a block {1e3 * block:.0f} ms; once {once:.1f} s, {sums / links:.1f} s on the links")

# %% [markdown]
# A straight line predicts as well. The simulator also says what its slope and start consist of.
#
# ## Where do the seconds go?
#
# :::{admonition} Predict before you run
# Beside 39 s of products at the peak: the second forward; unequal stages; blocks that are slower
# than the peak; fill and drain; what happens once. Which is the largest, which the smallest?
# :::

# %% tags=["hide-output"]
own, both = (candidate.flops(2048, recompute=again) / 384 / PEAK for again in (False, True))
at_peak = 2 * 4 * candidate.block_multiply_adds(2 * T) / 4 / PEAK  # 4 passes, over 4 ranks
parts = {
    "the model's products, at the peak": own,
    "forward again": both - own,
    "stages are unequal": 7 * 128 * at_peak - both,
    "blocks are slower than the peak": 7 * 128 * (block - at_peak),
    "the pipeline fills and drains": block * (span[128] - 7 * 128),
    "sums and update, once": once,
}
parts["not explained"] = MEASURED[128] - sum(parts.values())
for what, seconds in parts.items():
    print(f"{seconds:6.1f} s  {what}")

# %% [markdown]
# ## Does it hold for other runs?
#
# *Seconds.* [The planner](../minidist/planning/plans/published.py) has one free number, the share
# of the peak that products reach. Here are 21 steps of four reports, with [Llama
# 3](https://arxiv.org/abs/2407.21783). *Bytes.* BLOOM's team printed what `nvidia-smi` showed.

# %%
published = rows()  # minidist plan --published
print(summary(published))
ratios = [shown / found for shown, found in candidates()]
low, mean, high = min(ratios), np.mean(ratios), max(ratios)
print(f"{len(ratios)} meshes: shown / closed forms {low:.2f} to {high:.2f}, on average {mean:.2f}")

# %% [markdown]
# The closed form is a lower bound: it lacks CUDA's own memory, buffers, logits, and what the
# allocator keeps, about a quarter of what the GPUs held. To plan, leave a quarter free.
#
# ## A run of today: experts on eight hosts, products in eight bits
#
# [DeepSeek-V3](https://arxiv.org/abs/2412.19437): 2,048 GPUs, $p$ = 16, no tensor axis, 64 ranks of
# [experts](15_experts.py). A step of 15,360 examples [is published](https://arxiv.org/abs/2505.09343);
# [we compute](../minidist/planning/plans/published.py) it. Positions go once to each of at most 4
# hosts: that takes about as long as products at their peaks, and [hides](10b_zero_bubble.py) behind
# them (section 3.2.1). Forward and backward took 17.6 of 19.9 s: why, and with which $b$, is open.

# %%
print(deepseek_text())
step = DEEPSEEK
wider, anywhere = step.network(out=2), step.network(crossings=step.crossings(limited=False))
print(f"all_to_all in 16 bits: {wider:.1f} s; in 8 bits, to any host: {anywhere:.1f} s")


# %% tags=["hide-input"]
def draw(plt):
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.6), width_ratios=[3, 2])
    tints = [figures.FORWARD, figures.BACKWARD, *[figures.IDLE] * 3, figures.COMMUNICATION]
    start = 0.0
    for row, (seconds, tint) in enumerate(zip(parts.values(), tints, strict=False)):
        left.barh(row, seconds, 0.7, start, color=tint)
        left.text(start + seconds + 1, row, f"{seconds:.0f} s", va="center")
        start += seconds
    left.set_yticks(range(6), [*parts][:6])
    left.set(title="107 seconds of a step on 384 GPUs", xlabel="seconds", xlim=(0, 120))
    left.invert_yaxis()
    colors = figures.FORWARD, figures.BACKWARD, figures.EMPHASIS, figures.UPDATE
    sources = "Megatron-LM 2021", "Megatron-LM 2022", "BLOOM", "Llama 3"
    for source, color in zip(sources, colors, strict=True):
        of = [(row["seconds"], row["ratio"]) for row in published if source in row["run"]]
        right.semilogx(*zip(*of, strict=True), "o", color=color, label=source)
    right.axhline(1, color=figures.INK, lw=1)
    right.set(title="21 steps: predicted / published", xlabel="seconds, published", ylim=(0.6, 1.4))
    right.legend(ncols=2, loc="lower right", fontsize=9)
    return figure


figures.show(
    draw,
    "24_read_a_real_run",
    caption="Products at the peak are a third of the step. One free number serves 21 steps.",
    alt="Bars of 39, 13, 3, 40, 8 and 4 s that end at 107 s. 21 ratios between 0.8 and 1.2.",
)

# %% [markdown]
# ## Exercise 1: how many days?
#
# Write `days`: of a run with these tokens, parameters, GPUs, and FLOP/s that each GPU reaches, if
# activations are computed again. For 450 billion tokens, 1,008 billion parameters and 3,072 GPUs of
# 163 teraFLOP/s Narayanan et al. say 84 days.


# %% tags=["exercise"]
def days(tokens, parameters, gpus, rate):
    """Return days; attention's scores and the head do not count."""
    raise NotImplementedError  # your line here


exercise.judge("24.1", days)

# %% [markdown]
# ## Exercise 2: why did this break?
#
# The team planned to begin with batches of 16 examples ($d$ = 8, $b$ = 2). A step took 15 s, at 8
# teraFLOP/s per GPU in place of 150. So the run began with 192. Write `least_batch`: the fewest
# examples with which a pipeline of $p$ equal stages works for at least `share` of its time.


# %% tags=["exercise"]
def least_batch(p, d, b, share):
    """Return a whole number of examples, a multiple of d b."""
    raise NotImplementedError  # your line here


exercise.judge("24.2", least_batch)

# %% [markdown]
# ## Exercise 3: read another run
#
# [Korthikanti et al. 2022](https://arxiv.org/abs/2205.05198), table 5, print the MFU of four runs
# on A100 GPUs, with $T$ = 2048 and $V$ = 51,200. Write `seconds_of`: the seconds of a step.


# %% tags=["exercise"]
def seconds_of(L, C, B, ranks, mfu):
    """Return seconds; you may use TransformerSize(L, C, 1, 2048, 51200)."""
    raise NotImplementedError  # your lines here


exercise.judge("24.3", seconds_of)

# %% [markdown]
# ## At work
#
# | here | PyTorch | Megatron-LM | DeepSpeed | JAX |
# |---|---|---|---|---|
# | FLOPs of a step | `FlopCounterMode` | `--log-throughput` | `FlopsProfiler` | `cost_analysis` |
#
# **What it costs.** Rates must be measured: a form says what a number is made of, not its rate.
#
# **Try:** [ask what a run costs](../minidist/observe/pages/static/calculator.html).
# **Next:** a project with all of it. [Lesson 25](25_translator.py).
