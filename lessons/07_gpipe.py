# %% [markdown]
# # 7. GPipe: micro-batches fill the pipeline
#
# Cut by layers, a model uses one rank at a time (lesson 6). Cut the batch as well, and while rank 1
# works on one piece, rank 0 works on the next. The library's version is
# `minidist/pipeline_parallel/gpipe.py`, after Huang et al. 2019.
#
# Letters: `p` ranks, `r` one of them; `m` micro-batches, `i` one of them; `F` and `B` the times of
# one micro-batch's forward and backward on one stage; `n` examples in the batch.

# %%
import time
import tracemalloc
from fractions import Fraction

import numpy as np
from support import exercise, figures
from support.devices import Device, idle, length, quiet
from threadpoolctl import threadpool_limits

from minidist import Cluster, Tensor, nn
from minidist.autograd import recompute
from minidist.datasets import Batch, digits
from minidist.observe import timeline
from minidist.pipeline_parallel import Pipeline, actions, add_communication, programs, validate
from minidist.pipeline_parallel.actions import Backward, Forward
from minidist.pipeline_parallel.partition import counted_costs, partition
from minidist.pipeline_parallel.placement import Programs
from minidist.planning import simulate
from minidist.verify import equivalence

figures.arguments()
images, labels = digits()
clusters = {p: Cluster(p) for p in (1, 2, 4)}

# %% [markdown]
# ## Problem
#
# Four stages on four devices. As in lesson 6, a stage is a layer that sleeps: 40 ms forward and
# 80 ms backward for a batch of 64 rows, and less in proportion for a part of it.

# %%
naps = nn.Sequential([Device(f"layers.{i}", 64, 0.040 / 64, 0.080 / 64) for i in range(4)])


def step(group, m):
    """Do one batch of 64 in m pieces; return the most that were between forward and backward."""
    pipeline = Pipeline(naps, group, "gpipe", m)
    pipeline.backward(Batch(images[:64], labels[:64]))
    return pipeline.stages[0].peak


logs, alone = {}, 4 * 0.120
logs[1] = quiet(lambda log: clusters[4].run(step, 1, log=log), alone)
print(f"four devices in turns: {1e3 * length(logs[1]):.0f} ms; one with all layers: 480 ms")
assert length(logs[1]) > alone

# %% [markdown]
# ## Picture
#
# Cut the batch into four *micro-batches*. First every one goes forward (fill), then every one
# backward (drain). A unit is one forward; a backward takes two:

# %%
print(timeline.text(simulate(programs("gpipe", 4, 4)).timeline))

# %% [markdown]
# ## Math
#
#     time      a rank works m (F + B); the first forward takes (p - 1) F to reach the last rank,
#               the last backward (p - 1) B to come back:  (m + p - 1)(F + B) in all
#     bubble    1 - m/(m + p - 1) = (p - 1)/(m + p - 1), the share of time that a rank idles
#     gradient  d/dw (1/n) sum_j l_j = sum_i d/dw [(1/n) sum_{j in i} l_j]: micro-batches are summed
#
# The last line is lesson 3's: every micro-batch divides by `n`, the size of the *whole* batch, and
# the sum is right even if the micro-batches are uneven.
#
# ## Code: a program is a value
#
# What a rank does is a list of actions. The schedule makes the list; two lines say it all.


# %%
def fill_and_drain(rank, p, m):
    yield from map(Forward, range(m))
    yield from map(Backward, reversed(range(m)))


ours = Programs([list(fill_and_drain(r, 4, 4)) for r in range(4)])
assert ours == programs("gpipe", 4, 4)
validate(ours, 4, 4)
print("rank 1:", *add_communication(ours)[1])

# %% [markdown]
# `<F0` receives an activation, `>F0` sends one. The same value is validated, drawn (above),
# simulated and executed. The executor knows actions, and nothing about schedules:


# %%
def execute(program, group, stage, batch, after=lambda action: None):
    """Run the program; `stage` maps X[n/m, ...] to Y, and the last one ends in a loss."""
    received, gradients, inputs, outputs = {}, {}, {}, {}
    for action in program:
        i, part = action.micro_batch, batch[action.micro_batch]
        match action:
            case actions.RecvActivation(peer=rank):
                received[i] = group.recv(rank)
            case Forward():
                x = part.inputs if group.rank == 0 else received.pop(i)
                inputs[i] = Tensor(x, requires_grad=group.rank > 0)
                outputs[i] = stage(inputs[i])
                if group.rank == group.size - 1:
                    outputs[i] = nn.cross_entropy(outputs[i], part.targets, part.total)  # total: n
            case actions.SendActivation(peer=rank):
                group.send(outputs[i].data, rank)
            case actions.RecvGradient(peer=rank):
                gradients[i] = group.recv(rank)
            case Backward():
                outputs.pop(i).backward(gradients.pop(i, None))
            case actions.SendGradient(peer=rank):
                group.send(inputs.pop(i).grad, rank)
        after(action)


def our_gradients(group, model, x, y, value):
    cut = partition([1] * len(model.layers), group.size)
    mine = nn.Sequential([model.layers[i] for i in cut[group.rank]])
    execute(value[group.rank], group, mine, Batch(x, y).micro_batches(4))
    return {name: p.grad for name, p in mine.named_parameters().items()}


def one_device(model, x, y):
    for p in model.parameters():
        p.grad = None
    nn.cross_entropy(model(x), y).backward()
    return {name: p.grad.copy() for name, p in model.named_parameters().items()}


def error(got, want):
    """Return |got - want| / |want| over all parameters together."""
    square = sum(float(((got[name] - want[name]) ** 2).sum()) for name in want)
    return (square / sum(float((w**2).sum()) for w in want.values())) ** 0.5


x, y = images[:50].astype("float64"), labels[:50]
model = nn.ResidualMLP(64, 24, 4, 10, dtype="float64")
want = one_device(model, x, y)
for p in (2, 4):
    value = add_communication(Programs([list(fill_and_drain(r, p, 4)) for r in range(p)]))
    parts = clusters[p].run(our_gradients, model, x, y, value)  # 13, 13, 12 and 12 images
    got = {name: g for part in parts for name, g in part.items()}
    library = equivalence.gradients("gpipe", model, x, y, size=p, micro_batches=4)
    assert error(got, want) < 1e-9 and all((got[name] == library[name]).all() for name in want)
    print(f"{p} ranks: {error(got, want):.1e} from one device, and the library's bits")

# %% [markdown]
# ## Measurement: the bubble
#
# Simulated exactly, for p up to 6 and m up to 12. The formula holds for any F and B, so here B is
# not 2 F: F = 2, B = 5/2. Then measured on four ranks, with B = 2 F.

# %%
for p in range(1, 7):
    for m in range(1, 13):
        found = simulate(programs("gpipe", p, m), 2, Fraction(1), Fraction(3, 2))  # F; B in halves
        assert found.makespan == (m + p - 1) * (2 + Fraction(5, 2))
        assert found.bubble == Fraction(p - 1, m + p - 1) and found.peak_stash == [m] * p

for m in (1, 2, 4, 8):
    formula, bubble = (m + 3) * 0.120 / m, 3 / (m + 3)  # (m + p - 1)(F + B)
    logs[m] = log = quiet(lambda log, m=m: clusters[4].run(step, m, log=log), formula)
    print(
        f"m = {m}: {1e3 * length(log):.0f} ms, {alone / length(log):.1f} times as fast as one "
        f"device; bubble {idle(log):.1%}, formula {bubble:.1%}"
    )
    assert length(log) > formula
assert length(logs[8]) < length(logs[1]), "a wide margin: the naps alone are 165 and 480 ms"
assert clusters[4].run(step, 8) == [8] * 4, "all at once, even on rank 3"

# %% [markdown]
# Each micro-batch takes some tenths of a millisecond for its messages and for waking up, so the
# measured bubble is larger than the formula, and the shorter the naps, the larger the difference.
#
# ## Measurement: memory
#
# Fill first means that all m micro-batches are *in flight* at once: between its F and its B each
# keeps the graph, with every layer's activation. We watch rank 0 of 2 while our `execute` runs,
# with micro-batches of 128 rows through 6 layers of width 256.
#
# The way out is to keep only a stage's input, and to run the forward pass again in backward (Chen
# et al. 2016): `recompute` (lesson 1). Its price is one more forward: (F + F + B)/(F + B) = 4/3 of
# the time, where B = 2 F.

# %%
ROWS, WIDTH, DEEP, M = 128, 256, 12, 8


def stash(group, again):
    """Return (action, bytes that are held after it) for each action."""
    layers, half = nn.MLP([WIDTH] * (DEEP + 1)).layers, DEEP // 2
    mine = nn.Sequential(layers[group.rank * half : (group.rank + 1) * half])
    stage, held = (lambda x: recompute(mine, x)) if again else mine, []
    zeros = np.zeros((M * ROWS, WIDTH), np.float32)
    batch = Batch(zeros, np.zeros(M * ROWS, int)).micro_batches(M)

    def watch(action):
        held.append((str(action), tracemalloc.get_traced_memory()[0]))

    tracemalloc.start()
    execute(add_communication(programs("gpipe", 2, M))[group.rank], group, stage, batch, watch)
    tracemalloc.stop()
    return held


held = {again: clusters[2].run(stash, again)[0] for again in (False, True)}
one = ROWS * WIDTH * 4  # an activation of one micro-batch
for again, layers_kept in ((False, DEEP // 2), (True, 1)):
    first, *_, last = (n for action, n in held[again] if action.startswith("F"))
    name = "recompute" if again else "keep every activation"
    print(f"{name}: {first / 1e6:.2f} MB after F0, {last / 1e6:.2f} after F{M - 1}")
    assert abs((last - first) / (M - 1) / one - layers_kept) < 0.1, "activations per micro-batch"

# %% [markdown]
# 0.13 MB is one activation. A micro-batch keeps its six layers' outputs. With `recompute` it should
# keep the stage's input; on rank 0 that is a part of the batch, which is held anyway and not
# counted. What is counted is the last layer's output: `execute` holds it until B, though it has
# been sent. (In the figure, gradients that arrive early are also kept during the drain.)
#
# ## Measurement: does it pay?
#
# No naps now: a network and a batch that fit one process easily, on this machine. The formula says
# that more micro-batches are faster. It assumes that m pieces cost what the whole costs. They do
# not: a product of few rows uses a core badly, and the gradient of a weight is read and written m
# times. So we measure the CPU time of one process that takes 512 images in m pieces. Two ranks
# could at best do that work in (m + p - 1)/(p m) = (m + 1)/(2m) of this time.


# %%
def milliseconds(group, m):
    """Return the (CPU ms, ms) of a gradient of 512 images in m pieces: the least of three."""
    wide, found = nn.MLP([64, *[512] * 6, 10]), []
    cut = partition(counted_costs(wide, images[:1]), group.size)
    pipeline = Pipeline(wide, group, "gpipe", m, cut=cut)
    with threadpool_limits(1):
        for _ in range(4):  # the first one also allocates
            for p in pipeline.parameters():
                p.grad = None
            group.barrier()
            start = time.process_time(), time.perf_counter()
            pipeline.backward(Batch(images[:512], labels[:512]))
            group.barrier()
            found.append((time.process_time() - start[0], time.perf_counter() - start[1]))
    return 1e3 * np.min(found[1:], axis=0)


cpu = {m: clusters[1].run(milliseconds, m)[0][0] for m in (1, 4, 8, 32)}
for m, one_process in cpu.items():
    both = one_process * (m + 1) / (2 * m)
    print(
        f"m = {m:2}: one process {one_process:5.1f} ms; two ranks at least {both:5.1f} ms, "
        f"{cpu[1] / both:.2f} times as fast as one with m = 1"
    )
measured = max(ms for _, ms in clusters[2].run(milliseconds, 4))
print(f"two ranks, m = 4, by the clock: {measured:.1f} ms, {cpu[1] / measured:.2f} times as fast")
assert cpu[32] > 1.2 * cpu[1], "small pieces cost more"

# %% [markdown]
# With m = 1 the second rank contributes nothing. With m = 32 the bubble is nearly gone, but the
# pieces have become so expensive that little or nothing is left of the gain: the best m is between.
# Real time also includes messages, and whatever else this machine does. One process whose matrix
# products use both cores has no bubble at all, nor has data parallelism (lesson 3): a model that
# fits needs no pipeline. A model that does not fit needs one, and so do devices whose link can
# carry activations in time but not all gradients.


# %%
def draw(plt):
    figure = plt.figure(figsize=(11, 5.2))
    figure.suptitle("Micro-batches fill the pipeline; each one in flight takes memory")
    grid = figure.add_gridspec(2, 2, width_ratios=(6, 5))
    for row, m in enumerate((1, 8)):
        axes = figure.add_subplot(grid[row, 0])
        figures.rank_bars(axes, logs[m], 1e3, numbered=False)
        axes.set_xlim(0, 1.1e3 * length(logs[1]))
        axes.set_title(f"m = {m}: a rank is idle (grey) {idle(logs[m]):.0%} of the time")
    axes.set_xlabel("time (ms), measured")
    axes.legend(loc="center right")

    top, bottom = figure.add_subplot(grid[0, 1]), figure.add_subplot(grid[1, 1])
    m = np.arange(1, 17)
    for p, line in ((8, ":"), (4, "-"), (2, "--")):
        top.plot(m, (p - 1) / (m + p - 1), line, color=figures.INK)
        top.text(16.3, (p - 1) / (15 + p), f"p = {p}", va="center")
    top.plot(list(logs), [idle(log) for log in logs.values()], "o", color=figures.EMPHASIS)
    top.set(title="Idle share (p - 1)/(m + p - 1); dots: measured", xlabel="micro-batches m")
    top.set(xlim=(0.5, 18.5), ylim=(0, 1), xticks=[1, 4, 8, 12, 16], yticks=[0, 0.5, 1])
    top.spines["bottom"].set_bounds(0.5, 16)

    for again, line in ((False, "-"), (True, "--")):
        after = [n / 1e6 for action, n in held[again] if action[0] in "FB"]
        bottom.step(range(1, 2 * M + 1), after, line, where="mid", color=figures.INK)
    bottom.text(M + 0.5, 6.7, "every layer's output is kept", ha="center")
    bottom.text(M + 0.5, 1.8, "recompute: only the last one's", ha="center")
    bottom.set(title="Held on rank 0 of 2, m = 8, after each action, measured", ylim=(0, 8))
    bottom.set_ylabel("MB")
    bottom.set_xticks([1, M, M + 1, 2 * M], ["F0", f"F{M - 1}", f"\nB{M - 1}", "B0"])
    return figure


figures.save(draw, "07_gpipe")

# %% [markdown]
# ## Exercise 1: how many micro-batches?
#
# Write `enough(p, bubble)`: the least m for which p ranks are idle for at most the share `bubble`,
# a `Fraction` above 0.
#
# *Hint:* solve `(p - 1)/(m + p - 1) <= bubble` for m; round up; m is at least 1.


# %%
def enough(p, bubble):
    raise NotImplementedError  # your lines here


def finds_another_number(attempt):
    for p in (1, 2, 3, 5):
        for bubble in (Fraction(1, 2), Fraction(1, 5), Fraction(2, 7)):
            idles = [simulate(programs("gpipe", p, n)).bubble for n in range(1, 25)]
            right = next(n for n, share in enumerate(idles, 1) if share <= bubble)
            if (m := attempt(p, bubble)) != right:
                return f"p = {p}, bubble {bubble}: {right} micro-batches, not {m}"


exercise.judge(1, finds_another_number, enough, tempting=[lambda p, bubble: 4 * p])

# %% [markdown]
# ## Exercise 2: a schedule of your own
#
# Backward has two halves: `BackwardInput(i)` computes dX, which another rank waits for, and
# `BackwardWeight(i)` dW, which nobody waits for. Write `weights_last(rank, p, m)`: like
# `fill_and_drain`, but with `BackwardInput(i)` where `Backward(i)` was, and every
# `BackwardWeight(i)` at the end, in any order. (Then one product can do all dW of a weight, so that
# small pieces cost less, and the bubble is smaller, too.)
#
# *Hint:* three lines of `yield from map(...)`; both types are in `actions`.


# %%
def weights_last(rank, p, m):
    raise NotImplementedError  # your lines here


def show(program):
    return " ".join(map(str, program))


def finds_another_schedule(attempt):
    F, I, W = Fraction(2), Fraction(3), Fraction(5)
    for p in (1, 2, 4):
        for m in (1, 3, 6):
            value = Programs([list(attempt(r, p, m)) for r in range(p)])
            validate(value, p, m)  # a ValueError shows where a program cannot be right
            for own in value:
                if any(isinstance(action, Backward) for action in own):
                    return f"p = {p}, m = {m}: a B does both halves at once: {show(own)}"
                if not all(isinstance(action, actions.BackwardWeight) for action in own[-m:]):
                    return f"p = {p}, m = {m}: not every W is at the end: {show(own)}"
            took, least = simulate(value, F, I, W).makespan, (m + p - 1) * (F + I) + m * W
            if took != least:
                return f"p = {p}, m = {m} takes {took}, not {least}; who waits for what?"


def each_weight_at_once(rank, p, m):
    yield from map(Forward, range(m))
    for i in reversed(range(m)):
        yield from (actions.BackwardInput(i), actions.BackwardWeight(i))


wrong = [fill_and_drain, each_weight_at_once]
exercise.judge(2, finds_another_schedule, weights_last, tempting=wrong)

# %% [markdown]
# ## Exercise 3: why did this break?
#
# This gradient in m parts passed its test, a batch of 64 in 4 parts. At the end of the first epoch,
# with 5 images left for 8 parts, training stopped with a `ValueError`. Somebody skipped the empty
# parts; since then it runs, and the last step of every epoch is wrong. Write it for all batches.
#
# *Hint:* read the math again. What does one part divide by, and what is left to do after the sum?


# %%
def means_of_parts(model, x, y, m):
    for part in np.array_split(np.arange(len(x)), m):
        if len(part) > 0:
            nn.cross_entropy(model(x[part]), y[part]).backward()
    for p in model.parameters():
        p.grad = p.grad / m


def in_parts(model, x, y, m):
    raise NotImplementedError  # your lines here


def finds_another_gradient(attempt):
    for n, m in ((64, 4), (50, 4), (5, 8)):
        x, y = images[:n].astype("float64"), labels[:n]
        want = one_device(model, x, y)
        for p in model.parameters():
            p.grad = None
        attempt(model, x, y, m)
        none = [name for name, p in model.named_parameters().items() if p.grad is None]
        if none:
            return f"{n} images in {m} parts: {none[0]} has no gradient; leave one in its `.grad`"
        off = error({name: p.grad for name, p in model.named_parameters().items()}, want)
        if off > 1e-9:
            return f"{n} images in {m} parts are off by {off:.1%}"


exercise.judge(3, finds_another_gradient, in_parts, tempting=[means_of_parts])

# %% [markdown]
# ## What it costs, and the next problem
#
# - **A bubble** of (p - 1)/(m + p - 1): make m large. But small micro-batches are slow.
# - **Memory for m micro-batches** on every rank: make m small. Recompute buys most of it back for
#   one more forward pass, a third more time.
# - **Every step drains.** The pipeline is filled and emptied for each update.
#
# The first two pull at m from both ends. Do we need all m in flight? Rank 3 of 4 could begin with
# backward as soon as it has its first micro-batch. That is lesson 8, `08_one_f_one_b.py`.

# %%
for cluster in clusters.values():
    cluster.close()
