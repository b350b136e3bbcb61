# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
#   minidist: {lesson: 7, minutes: 30, needs: [1, 6], leads_to: [8, 10, 16], lab: pipelines}
# ---

# %% [markdown]
# (lesson-7)=
# # 7. GPipe: micro-batches fill the pipeline
#
# **Question.** A model that is cut by its layers uses one rank at a time. Into how many pieces must
# a batch be cut so that all ranks work, and what does a piece cost?
#
# You need [stages](06_layer_split.py). New words: [micro-batch](pages/glossary.md#micro-batch),
# [bubble](pages/glossary.md#bubble). Letters: $p$ ranks; $m$ micro-batches; $X$, $Y$ input and
# output of a rank's layers; $TF$, $TB$ the times of forward and backward of a micro-batch there.

# %% tags=["setup", "hide-input"]
import tracemalloc
from functools import partial

import numpy as np
from support import begin, exercise, figures
from support.devices import Device, idle, length

from minidist import Cluster, Tensor, nn
from minidist.autograd import recompute
from minidist.events import EventLog
from minidist.nn.datasets import Batch, digits
from minidist.pipeline_parallel import Pipeline, actions, add_communication, programs
from minidist.planning import simulate
from minidist.verify import equivalence

begin()
p, (images, labels) = 4, digits("float64")
cluster, batch = Cluster(p), Batch(images[:64], labels[:64])
network = partial(nn.MLP, [64, *[24] * 7, 10], dtype="float64")  # 8 layers, 2 on each rank

# %% [markdown]
# ## Problem: of 64 GPUs 63 wait
#
# A rank waits for its neighbour. So each of 4 ranks is idle for 75 % of the time, of 64 for 98 %.
#
# ## Idea: cut the batch, too
#
# While rank 1 works on the first *micro-batch*, rank 0 works on the second ([Huang et al.
# 2019](https://arxiv.org/abs/1811.06965), section 2.2). First all go forward, then all backward:
#
# ```text
# rank 0   F0 F1 F2 F3                   B3 B2 B1 B0
# rank 1      F0 F1 F2 F3             B3 B2 B1 B0
# rank 2         F0 F1 F2 F3       B3 B2 B1 B0
# rank 3            F0 F1 F2 F3 B3 B2 B1 B0
# ```
#
# Two lines list the actions of a rank, a *schedule*. One loop executes any such list:


# %%
def fill_and_drain(rank, p, m):
    yield from map(actions.Forward, range(m))
    yield from map(actions.Backward, reversed(range(m)))


def execute(program, group, stage, batch, after=lambda action: None):
    """Do the actions of this rank; stage: X -> Y of its layers; batch: the micro-batches."""
    x, y, dy = {}, {}, {}  # of the micro-batches in flight
    for action in program:
        i = action.micro_batch
        match action:
            case actions.RecvActivation(peer=rank):
                x[i] = Tensor(group.recv(rank), requires_grad=True)
            case actions.Forward():
                y[i] = stage(x.get(i, Tensor(batch[i].inputs)))
                if group.rank == group.size - 1:
                    y[i] = nn.cross_entropy(y[i], batch[i].targets, batch[i].total)
            case actions.SendActivation(peer=rank):
                group.send(y[i].data, rank)
                y[i].data = np.broadcast_to(np.zeros((), y[i].dtype), y[i].shape)  # Y is not kept
            case actions.RecvGradient(peer=rank):
                dy[i] = group.recv(rank)
            case actions.Backward():
                y.pop(i).backward(dy.pop(i, None))
            case actions.SendGradient(peer=rank):
                group.send(x.pop(i).grad, rank)
        after(action)


# %% [markdown]
# Is it exact? Each part divides its loss by the size of the *whole* batch; gradients are summed. We
# compare with one device and with the library's [`gpipe`](../minidist/pipeline_parallel/gpipe.py).


# %%
def ours(group):
    stage = nn.Sequential(network().layers[2 * group.rank : 2 * group.rank + 2])
    execute(program[group.rank], group, stage, batch.micro_batches(3))  # of 22, 21 and 21 images
    return {name: q.grad for name, q in stage.named_parameters().items()}


program = add_communication([list(fill_and_drain(rank, p, 3)) for rank in range(p)])
print("rank 1:", *program[1])  # <F0 receives an activation, >F0 sends one
got, whole = {name: grad for part in cluster.run(ours) for name, grad in part.items()}, network()
library = equivalence.gradients("gpipe", network(), batch.inputs, batch.targets, p, micro_batches=3)
nn.cross_entropy(whole(batch.inputs), batch.targets).backward()
error = max(abs(got[q.name] - q.grad).max() for q in whole.parameters())
print(f"4 ranks: {error:.0e} from one device")
assert error < 1e-12 and all(np.array_equal(got[name], library[name]) for name in got)

# %% [markdown]
# ## Who waits, and how many pieces are best?
#
# :::{admonition} Predict before you run
# Of 4 ranks with 4 micro-batches and $TB = 2 TF$, what share is idle? Which $m$ makes it 10 %?
# :::
#
# But each piece has a price: messages, and products of few rows, which use a device badly. Take
# sleeping devices with $TF$ = 80 ms/$m$ + 2 ms and twice as much for $TB$.
#
# :::{admonition} Predict before you run
# One device takes 4 times 246 ms for the batch. Which $m$ is the fastest on 4 ranks: 4, 8 or 32?
# :::


# %% tags=["hide-output"]
def step(group, m):
    forward = (0.080 + 0.002 * m) / 64  # seconds per row
    naps = [Device(f"layers.{i}", 64, forward, 2 * forward, "float64") for i in range(p)]
    Pipeline(nn.Sequential(naps), group, "gpipe", m).backward(batch)


logs = {m: EventLog() for m in (1, 2, 4, 8, 16, 32)}
for m, log in logs.items():
    cluster.run(step, m, log=log)
    exact = simulate(programs("gpipe", p, m), 2, 1, 3 / 2)
    assert exact.makespan == (m + p - 1) * (2 + 1 + 3 / 2)
    ms, formula = 1e3 * length(log), (m + p - 1) * (240 / m + 6)
    print(f"m = {m}: {ms:.0f} ms, idle {idle(log):.0%}; formulas {formula:.0f}, {exact.bubble:.0%}")

# %% [markdown]
# :::{dropdown} Where does the number come from?
# A rank works for $m (TF + TB)$. The first forward takes $(p - 1) TF$ to reach the last rank, the
# last backward $(p - 1) TB$ to come back: a step takes $(m + p - 1)(TF + TB)$, and the idle share,
# the *bubble*, is $(p - 1)/(m + p - 1)$: 3/7 for 4 micro-batches, below 10 % from 28 on. To show
# that any times will do, `simulate` has exact clocks with $TF = 2$ and $TB = TI + TW = 1 + 3/2$,
# its two halves. With the price, a step is shortest where $m^2 = 240 (p - 1)/6$: at $m$ = 11.
# :::
#
# ## What is held?
#
# When all have gone forward, all $m$ micro-batches are *in flight*: each keeps $X$ and each layer's
# output for its backward. Or it keeps $X$ alone, and backward first runs the layers again:
# `recompute` ([Chen et al. 2016](https://arxiv.org/abs/1604.06174)), at the price of one forward.
#
# :::{admonition} Predict before you run
# Rank 1 has 3 layers of equal width. How many arrays of the size of $X$ does it hold when all of 8
# micro-batches are in flight, and how many with `recompute`, which drops $Y$ once it is sent?
# :::


# %% tags=["hide-output"]
def stash(group, m, again):
    layers, held = nn.Sequential(nn.MLP([256] * 5).layers[:3]), []
    parts = Batch(np.zeros((m * 128, 256), "float32"), np.zeros(m * 128, int)).micro_batches(m)
    own = add_communication(programs("gpipe", p, m))[group.rank]
    stage = partial(recompute, layers) if again else layers
    tracemalloc.start()  # NumPy reports its arrays to it
    group.barrier()
    execute(own, group, stage, parts, lambda _: held.append(tracemalloc.get_traced_memory()[0]))
    tracemalloc.stop()
    return held[3 * m - 1] / (128 * 256 * 4)  # on rank 1, after <F, F, >F of all, in arrays


kept = {each: [cluster.run(stash, m, each == 1)[1] for m in (1, 4, 8)] for each in (4, 1)}
for each, arrays in kept.items():
    print("recompute:" if each == 1 else "all is kept:", *(f"{n:.1f} arrays" for n in arrays))
    assert np.allclose(arrays, [each, 4 * each, 8 * each], atol=0.5)


# %% tags=["hide-input"]
def draw(plt):
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(11, 2.9), width_ratios=(5, 4, 4))
    figures.rank_bars(left, logs[8], 1e3, numbered=False)
    left.set(title=f"m = 8: idle {idle(logs[8]):.0%} of the time", xlabel="time (ms)")
    m = np.linspace(1, 34, 200)
    middle.plot(m, (m + p - 1) * (240 / m + 6), color=figures.INK)
    middle.plot(list(logs), [1e3 * length(log) for log in logs.values()], "o", color=figures.INK)
    middle.axvline(11, color=figures.EMPHASIS, linestyle="--")
    middle.set(title="Time of a step (ms): least at 11", xlabel="micro-batches m", ylim=(0, None))
    for each, arrays in kept.items():
        right.plot([0, 9], [0, 9 * each], "-", [1, 4, 8], arrays, "o", color=figures.INK)
        right.text(9.2, 9 * each, "all is kept" if each == 4 else "recompute", va="center")
    right.set(title="Arrays on rank 1", xlabel="micro-batches m", xlim=(0, 14), xticks=[1, 4, 8])
    return figure


figures.show(
    draw,
    "07_gpipe",
    caption="Blue: forward, orange: backward. Lines: formulas, dots: measured.",
    alt="Left: four ranks work on eight micro-batches. Middle: the time of a step falls, is least "
    "at eleven micro-batches, and rises again. Right: what a rank holds grows with them.",
)

# %% [markdown]
# ## Exercise 1: how many micro-batches?
#
# What is the least $m$ for which $p$ ranks are idle for at most the share `bubble`, a `Fraction`?


# %% tags=["exercise"]
def enough(p, bubble):
    raise NotImplementedError  # your lines here


exercise.judge("07.1", enough)

# %% [markdown]
# ## Exercise 2: a schedule of your own
#
# Backward has two halves: `BackwardInput(i)`, for which another rank waits, and
# `BackwardWeight(i)`, for which nobody waits. Write a rank's `actions` so that its `BackwardWeight`
# are all at the end, in any order, and no rank waits longer than it must.


# %% tags=["exercise"]
def weights_last(rank, p, m):
    raise NotImplementedError  # your lines here


exercise.judge("07.2", weights_last)

# %% [markdown]
# ## Exercise 3: why did this break?
#
# Somebody adds up the gradients of $m$ parts, each of its part's mean loss, and divides by $m$. The
# test has 64 images in 4 parts. Later 5 images came in 8 parts: a `ValueError`. Now empty parts are
# skipped, and the last step of every epoch is wrong. Leave the right gradient in the model.


# %% tags=["exercise"]
def in_parts(model, x, y, m):
    raise NotImplementedError  # your lines here


exercise.judge("07.3", in_parts)
cluster.close()

# %% [markdown]
# ## At work
#
# | here | PyTorch | Megatron-LM | DeepSpeed | JAX |
# |---|---|---|---|---|
# | `gpipe` | `ScheduleGPipe` | | | |
# | `recompute` | `checkpoint` | `--recompute-granularity` | `checkpoint` | `jax.checkpoint` |
#
# **What it costs.** A large $m$ makes the bubble small, the pieces small, and the memory large.
#
# **Try:** [write a schedule](../minidist/observe/pages/static/schedules.html).
# **Next:** rank 3 could begin backward with its first micro-batch: [lesson 8](08_one_f_one_b.py).
