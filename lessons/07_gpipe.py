# %% [markdown]
# # 7. GPipe: micro-batches fill the pipeline
#
# Cut by layers, a model uses one rank at a time (lesson 6). Cut the batch as well, and while rank 1
# works on one piece, rank 0 works on the next. The library's version is
# `minidist/pipeline_parallel/gpipe.py`, after Huang et al. 2019.
#
# Letters: `p` ranks, `r` one of them; `m` micro-batches, `i` one of them; `F` and `B` the times of
# one micro-batch's forward and backward on one stage.

# %%
import os
import time
import tracemalloc
from fractions import Fraction

import numpy as np
from threadpoolctl import threadpool_limits

from minidist import Cluster, Tensor, nn, optim
from minidist.autograd import Function, deferred, recompute
from minidist.datasets import digits
from minidist.events import EventLog
from minidist.pipeline_parallel import Pipeline, actions, add_communication, programs, validate
from minidist.pipeline_parallel.actions import Backward, Forward, Programs
from minidist.pipeline_parallel.partition import counted_costs, partition
from minidist.pipeline_parallel.stage import micro_batches
from minidist.planning import simulate
from minidist.tools import equivalence, figures, timeline

figures.arguments()
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
images, labels = digits()
clusters = {p: Cluster(p) for p in (1, 2, 4)}

# %% [markdown]
# ## Problem
#
# Four stages on four devices. To see four devices on any machine, a stage sleeps, which needs no
# core: 40 ms forward and 80 ms backward for the whole batch, in proportion less for a part of it.


# %%
class Nap(Function):
    """Y = X, after 40 ms for 64 rows  =>  dX = dY, after 80 ms."""

    def forward(self, x):
        time.sleep(0.040 * len(x) / 64)
        return x

    def backward(self, grad):
        time.sleep(0.080 * len(grad) / 64)
        return grad


class Device(nn.Module):
    """A linear layer whose time is that of a device of its own."""

    def __init__(self, name):
        self.linear = nn.Linear(64, 64, name=name)

    def forward(self, x, randomness=None):
        return Nap()(self.linear(x))


naps = nn.Sequential([Device(f"layers.{i}") for i in range(4)])


def step(group, schedule, m, repeats, again=False):
    """Return the peak stash, and the seconds of each repeat of one batch of 64."""
    pipeline, seconds = Pipeline(naps, group, schedule, m, recompute=again), []
    for _ in range(repeats):
        group.barrier()
        start = time.perf_counter()
        pipeline.backward(images[:64], labels[:64])
        group.barrier()
        seconds.append(time.perf_counter() - start)
    return pipeline.stages[0].peak, seconds


alone = 1e3 * (0.040 + 0.080) * 4
split = 1e3 * min(clusters[4].run(step, "layer_split", 1, 1)[0][1])
print(f"four devices in turns: {split:.0f} ms a step; one device with all layers: {alone:.0f} ms")
assert split > 0.99 * alone

# %% [markdown]
# ## Picture
#
# First every micro-batch goes forward (fill), then every one backward (drain):

# %%
print(timeline.text(simulate(programs("gpipe", 4, 4)).timeline))

# %% [markdown]
# ## Math
#
#     time      a rank works m (F + B); the wave needs (p - 1) F to reach the last rank, (p - 1) B
#               to come back:  (m + p - 1)(F + B) from first to last
#     bubble    1 - m/(m + p - 1) = (p - 1)/(m + p - 1), the share of time that a rank idles
#     gradient  d/dw (1/n) sum_j l_j = sum_i d/dw [(1/n) sum_{j in i} l_j]: micro-batches are summed
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
# That same value is validated, drawn (above), simulated and executed. Who runs it needs to know
# what an action is, and nothing about schedules:


# %%
def execute(program, group, stage, batch, after=lambda action: None):
    """Do what the program says; `stage` maps X[B/m, ...] to Y, and a loss ends the last one."""
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
                    outputs[i] = nn.cross_entropy(outputs[i], part.targets, part.total)
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
    execute(value[group.rank], group, mine, micro_batches(x, y, 4))
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
    print(f"{p} ranks, 4 micro-batches: {error(got, want):.1e} from one device")

# %% [markdown]
# ## Why the gradients only have to be summed
#
# `part.total` is the number of targets of the *whole* batch: every micro-batch divides by it, as
# every rank did in lesson 3. Forget it, and each micro-batch takes its own mean. In one process,
# with the same 50 images:


# %%
def sum_of_means(x, y, m):
    for p in model.parameters():
        p.grad = None
    for part in micro_batches(x, y, m):
        nn.cross_entropy(model(part.inputs), part.targets).backward()  # a mean of its own
    return {name: p.grad.copy() for name, p in model.named_parameters().items()}


for m in (2, 4):
    wrong = sum_of_means(x, y, m)
    length = sum((g**2).sum() for g in wrong.values()) / sum((g**2).sum() for g in want.values())
    mean = {name: g / m for name, g in wrong.items()}
    print(
        f"m = {m}: {length**0.5:.3f} times too long; divided by m, off by {error(mean, want):.1e}"
    )
    assert abs(length**0.5 - m) < 0.05 * m
    assert (error(mean, want) < 1e-9) == (50 % m == 0), "even micro-batches hide it"


def losses(rule, lr, total):
    """Train 30 steps on the 50 images in 4 micro-batches; return the last loss."""
    fresh = nn.ResidualMLP(64, 24, 4, 10, dtype="float64")
    optimizer = rule(fresh.parameters(), lr=lr)
    for _ in range(30):
        for part in micro_batches(x, y, 4):
            nn.cross_entropy(fresh(part.inputs), part.targets, total).backward()
        optimizer.step()
        optimizer.zero_grad()
    return nn.cross_entropy(fresh(x), y).item()


for rule, lr in ((optim.SGD, 0.05), (optim.AdamW, 0.003)):
    right, wrong = losses(rule, lr, 50), losses(rule, lr, None)
    print(f"{rule.__name__}: loss after 30 steps {right:.3f}; without the total {wrong:.3f}")

# %% [markdown]
# With SGD the missing 1/m is a learning rate m times too high. AdamW divides by the gradient's own
# size, so it hides the factor, and a loss curve tells nothing. Compare gradients, not curves.
#
# ## Measurement: the bubble
#
# Simulated exactly, for every p and m, whatever F and B are; then measured on four ranks.

# %%
for p in range(1, 7):
    for m in range(1, 13):
        found = simulate(programs("gpipe", p, m), Fraction(2), Fraction(1), Fraction(3, 2))
        assert found.makespan == (m + p - 1) * (2 + Fraction(5, 2))
        assert found.bubble == Fraction(p - 1, m + p - 1) and found.peak_stash == [m] * p


def length(log):
    """Return the seconds from the start of the first action to the end of the last."""
    busy = [e for e in log.events if e.category == "compute"]
    return max(e.end for e in busy) - min(e.start for e in busy)


def idle(log, p):
    """Return the share of p ranks' time in which nothing is computed."""
    busy = sum(e.seconds for e in log.events if e.category == "compute")
    return 1 - busy / (p * length(log))


def quiet(p, seconds, *run):
    """Return the log of the fastest run: noise only ever adds. No more once 10% from `seconds`."""
    logs = []
    while len(logs) < 8 and (not logs or length(logs[-1]) > 1.1 * seconds):
        logs.append(EventLog())
        clusters[p].run(*run, log=logs[-1])
    return min(logs, key=length)


logs = {}
for m in (1, 2, 4, 8):
    formula = (m + 3) * 0.120 / m  # (m + p - 1)(F + B)
    logs[m] = quiet(4, formula, step, "gpipe", m, 1)
    seconds, bubble = length(logs[m]), float(Fraction(3, m + 3))
    print(
        f"m = {m}: {1e3 * seconds:.0f} ms, {alone / 1e3 / seconds:.1f} times as fast as one "
        f"device; bubble {idle(logs[m], 4):.1%}, formula {bubble:.1%}"
    )
    assert seconds > formula and idle(logs[m], 4) > bubble - 0.1
assert length(logs[8]) < 0.75 * length(logs[1])
assert clusters[4].run(step, "gpipe", 8, 1)[3][0] == 8, "all in flight at once, even on rank 3"

# %% [markdown]
# ## Measurement: memory
#
# Fill first means that all m micro-batches are in flight at once: between its F and its B each
# keeps the graph, with every layer's input. We watch rank 0 of 2 while our `execute` runs, with
# micro-batches of 128 rows through 6 layers of width 256.
#
# The way out is to keep only a stage's input and output, and to run the forward pass again in
# backward (Chen et al. 2016): `recompute`, from `minidist/autograd/recompute.py`.

# %%
ROWS, WIDTH, DEEP, M = 128, 256, 12, 8


def stash(group, again):
    """Return (action, bytes that are held after it) for each action."""
    layers = nn.MLP([WIDTH] * (DEEP + 1)).layers
    half = DEEP // 2
    mine = nn.Sequential(layers[group.rank * half : (group.rank + 1) * half])
    zeros = np.zeros((M * ROWS, WIDTH), np.float32)
    batch = micro_batches(zeros, np.zeros(M * ROWS, int), M)
    program = add_communication(programs("gpipe", 2, M))[group.rank]
    held = []
    tracemalloc.start()
    execute(
        program,
        group,
        (lambda x: recompute(mine, x)) if again else mine,
        batch,
        lambda action: held.append((str(action), tracemalloc.get_traced_memory()[0])),
    )
    tracemalloc.stop()
    return held


held = {again: clusters[2].run(stash, again)[0] for again in (False, True)}
one = ROWS * WIDTH * 4  # an activation of one micro-batch
for again, layers_kept in ((False, DEEP // 2), (True, 1)):
    after_forward = [n for action, n in held[again] if action.startswith("F")]
    print(
        f"recompute {again}: after F0 {after_forward[0] / 1e6:.2f} MB, after F{M - 1} "
        f"{after_forward[-1] / 1e6:.2f}; one activation is {one / 1e6:.2f}"
    )
    per_micro_batch = (after_forward[-1] - after_forward[0]) / (M - 1)
    assert abs(per_micro_batch / one - layers_kept) < 0.1, "one activation per layer that is kept"


def forward_and_backward(again):
    """Return the ms of one micro-batch's F and B on one of four ranks: medians."""
    log = EventLog()
    clusters[4].run(step, "gpipe", 4, 2, again, log=log)
    kinds = [[e.seconds for e in log.events if e.name[0] == kind] for kind in "FB"]
    return 1e3 * sum(np.median(seconds) for seconds in kinds)


plain, again = forward_and_backward(False), forward_and_backward(True)
print(f"its price: {plain:.0f} ms become {again:.0f}; (F + F + B)/(F + B) = {4 / 3:.2f}")
assert 1.15 < again / plain < 1.6

# %% [markdown]
# ## Measurement: what a small micro-batch costs
#
# The formula says: more micro-batches, less bubble. It assumes that m pieces cost what the whole
# costs. They do not: a product of few rows uses the core badly, and the gradient of a weight is
# read and written m times. The second is avoidable. Backward computes dX, which another rank waits
# for, and dW, which nobody waits for. Put every dW off to the end, and one product per weight does
# for all micro-batches: `dW = [X_0; X_1; ...]^T [dY_0; dY_1; ...]`. In `programs`:
# `weights_last=True`. (The memory of all micro-batches is taken to the end for it.)


# %%
def cpu_ms(group, m, repeats):
    """Return CPU milliseconds of one gradient of 512 images, in m pieces: as they come, last."""
    wide, found = nn.MLP([64, *[512] * 4, 10]), []
    with threadpool_limits(1):
        for last in (False, True) * repeats:
            for p in wide.parameters():
                p.grad = None
            start, put_off = time.process_time(), [] if last else None
            for part in micro_batches(images[:512], labels[:512], m):
                y = wide(part.inputs)
                nn.cross_entropy(y, part.targets, part.total).backward(deferred=put_off)
            deferred.compute(put_off or [])
            found.append(1e3 * (time.process_time() - start))
    return np.median(np.reshape(found, (repeats, 2)), axis=0)


PIECES = (1, 8, 64)
cost = np.array([clusters[1].run(cpu_ms, m, 3)[0] for m in PIECES])
for m, (as_they_come, last) in zip(PIECES, cost, strict=True):
    print(f"{m:3} pieces: {as_they_come:5.1f} ms; weights last: {last:5.1f} ms")
assert cost[-1, 0] > 1.2 * cost[:, 0].min(), "small pieces cost more"

# %% [markdown]
# The bubble shrinks too, for dX leaves before dW is begun. With F = I = W = 1, where I and W are
# the halves of B:

# %%
late = programs("gpipe", 4, 4, weights_last=True)
print(timeline.text(simulate(late).timeline))
assert simulate(late).makespan == (4 + 3) * (1 + 1) + 4 * 1
assert simulate(ours).makespan == (4 + 3) * (1 + 1 + 1)

# %% [markdown]
# ## Measurement: does it pay?
#
# No naps now. A network and a batch that fit one process easily, on this machine: one process on
# one core, one process with all cores (BLAS cuts each product), a pipeline on two ranks with a core
# each. At most it could be 2 m/(m + 1) times as fast as one core.


# %%
def real_ms(group, m, threads, options):
    """Return the ms of two gradients of 512 images."""
    wide, found = nn.MLP([64, *[512] * 6, 10]), []
    cut = partition(counted_costs(wide, images[:1]), group.size)
    pipeline = Pipeline(wide, group, "gpipe", m, cut=cut, **options)
    with threadpool_limits(threads):
        for _ in range(3):
            for p in pipeline.parameters():
                p.grad = None
            group.barrier()
            start = time.perf_counter()
            pipeline.backward(images[:512], labels[:512])
            group.barrier()
            found.append(1e3 * (time.perf_counter() - start))
    return found[1:]


ways = {
    "one process, one core": (1, 1, 1, {}),
    f"one process, {CORES} cores": (1, 1, CORES, {}),
    **{f"two ranks, m = {m}": (2, m, 1, {}) for m in (1, 4, 8)},
    "two ranks, m = 8, weights last": (2, 8, 1, {"weights_last": True}),
}
times = {way: [] for way in ways}
for _ in range(3):  # in turns, so that a hiccup hits all of them
    for way, (p, *arguments) in ways.items():
        times[way] += np.max(clusters[p].run(real_ms, *arguments), axis=0).tolist()
reference = np.median(times["one process, one core"])
for way, found in times.items():
    p, m, *_ = ways[way]
    bound = f"at most {2 * m / (m + 1):.2f}" if p == 2 else ""
    print(f"{way:31} {np.median(found):6.1f} ms  {reference / np.median(found):5.2f}  {bound}")

# %% [markdown]
# An honest table; the second number is the gain. (If other programs run meanwhile, trust the bounds
# more than the times.) With m = 1 the second rank is for nothing. With more micro-batches the
# pipeline stays below its bound, since small pieces cost more (see above) and messages have their
# price. One process whose BLAS uses all cores has no bubble, nor has data parallelism (lesson 3). A
# model that fits needs no pipeline. One that does not fit does, and so does a link between devices
# that carries an activation in time but not all gradients.


# %%
def draw(plt):
    figure = plt.figure(figsize=(11, 5.2))
    figure.suptitle("Micro-batches fill the pipeline; each one in flight takes memory")
    grid = figure.add_gridspec(2, 2, width_ratios=(6, 5))
    for row, m in enumerate((1, 8)):
        axes = figure.add_subplot(grid[row, 0])
        for e in logs[m].from_zero().events:
            if e.category == "compute":
                color = figures.FORWARD if e.name[0] == "F" else figures.BACKWARD
                bar = [(1e3 * e.start, 1e3 * e.seconds)]
                axes.broken_barh(
                    bar, (e.rank - 0.4, 0.8), color=color, edgecolor="white", linewidth=0.6
                )
        axes.set(yticks=range(4), yticklabels=[f"rank {r}" for r in range(4)])
        axes.set_xlim(0, 1.1e3 * length(logs[1]))
        axes.set(ylim=(3.6, -0.6), title=f"m = {m}: idle {idle(logs[m], 4):.0%} of the time")
        axes.tick_params(axis="y", length=0)
    axes.set_xlabel("time (ms), measured")
    axes.text(0.8, 0.7, "forward", color=figures.FORWARD, transform=axes.transAxes)
    axes.text(0.8, 0.5, "backward", color="#A66F00", transform=axes.transAxes)

    top, bottom = figure.add_subplot(grid[0, 1]), figure.add_subplot(grid[1, 1])
    m = np.arange(1, 17)
    for p, color in ((2, figures.UPDATE), (4, figures.FORWARD), (8, figures.COMMUNICATION)):
        top.plot(m, (p - 1) / (m + p - 1), color=color)
        top.text(16.3, (p - 1) / (15 + p), f"p = {p}", color=color, va="center")
    top.plot(list(logs), [idle(log, 4) for log in logs.values()], "o", color=figures.FORWARD)
    top.set(title="Bubble: (p - 1)/(m + p - 1), dots measured", xlabel="micro-batches m")
    top.set(xlim=(0.5, 18.5), ylim=(0, 1), xticks=[1, 4, 8, 12, 16], yticks=[0, 0.5, 1])
    top.spines["bottom"].set_bounds(0.5, 16)

    for again, color in ((False, figures.EMPHASIS), (True, figures.UPDATE)):
        after = [n / 1e6 for action, n in held[again] if action[0] in "FB"]
        bottom.step(range(1, 2 * M + 1), after, where="mid", color=color)
    bottom.text(M + 0.5, 6.6, "keep every layer's input", color=figures.EMPHASIS, ha="center")
    bottom.text(M + 0.5, 2.2, "recompute", color=figures.UPDATE, ha="center")
    bottom.set(title="Bytes held on rank 0 of 2, measured (MB)", ylim=(0, 8), xlim=(0.5, 18.5))
    bottom.set_xticks([1, M, M + 1, 2 * M], ["F0", f"F{M - 1}", f"\nB{M - 1}", "B0"])
    bottom.spines["bottom"].set_bounds(0.5, 16.5)
    return figure


figures.save(draw, "07_gpipe")

# %% [markdown]
# ## Exercise 1: how many micro-batches?
#
# Write `enough(p, bubble)`: the least m for which p ranks idle at most the share `bubble`, a
# `Fraction` above 0.
#
# *Hint:* solve `(p - 1)/(m + p - 1) <= bubble` for m; round up; m is at least 1.


# %%
def enough(p, bubble):
    raise NotImplementedError  # your lines here


def check_enough(attempt):
    """Say "solved", "not solved yet", or what is wrong."""
    for p in (1, 2, 3, 5):
        for bubble in (Fraction(1, 2), Fraction(1, 5), Fraction(2, 7)):
            try:
                m = attempt(p, bubble)
            except NotImplementedError:
                return "not solved yet"
            idles = [simulate(programs("gpipe", p, n)).bubble for n in range(1, 25)]
            right = next(n for n, share in enumerate(idles, 1) if share <= bubble)
            if m != right:
                return f"wrong: p = {p}, bubble {bubble}: {right} micro-batches, not {m}"
    return "solved"


print("exercise 1:", check_enough(enough))
assert check_enough(lambda p, bubble: 4 * p).startswith("wrong")

# %% [markdown]
# ## Exercise 2: a schedule of your own
#
# Write `weights_last(rank, p, m)`: like `fill_and_drain`, but with both halves of backward apart,
# `BackwardInput(i)` where `Backward(i)` was, and every `BackwardWeight(i)` at the end, in order.
#
# *Hint:* three lines of `yield from map(...)`.


# %%
def weights_last(rank, p, m):
    raise NotImplementedError  # your lines here


def check_schedule(attempt):
    F, I, W = Fraction(2), Fraction(3), Fraction(5)
    for p in (1, 2, 4):
        for m in (1, 3, 6):
            try:
                value = Programs([list(attempt(r, p, m)) for r in range(p)])
                validate(value, p, m)
            except NotImplementedError:
                return "not solved yet"
            except ValueError as fault:
                return f"wrong: {fault}"
            if simulate(value, F, I, W).makespan != (m + p - 1) * (F + I) + m * W:
                return f"wrong: p = {p}, m = {m} takes too long; who waits for a weight's half?"
            if value != programs("gpipe", p, m, weights_last=True):
                return "wrong: in time, but not all W stand together at the end, in order"
    return "solved"


def halves_at_once(rank, p, m):
    yield from map(Forward, range(m))
    for i in reversed(range(m)):
        yield actions.BackwardInput(i)
        yield actions.BackwardWeight(i)


print("exercise 2:", check_schedule(weights_last))
for tempting in (fill_and_drain, halves_at_once):
    assert check_schedule(tempting).startswith("wrong")

# %% [markdown]
# ## Exercise 3: why did this break?
#
# This gradient in m parts passed its test, a batch of 64 in 4 parts. At the end of the first epoch,
# with 5 images left for 8 parts, training stopped with a `ValueError`. Somebody skipped the empty
# parts; since then it runs, and the last step of every epoch is wrong. Repair it for all batches.
#
# *Hint:* read the math again. What does one part divide by, and what is left to do after the sum?


# %%
def in_parts(model, x, y, m):
    for part in np.array_split(np.arange(len(x)), m):
        if len(part) > 0:
            nn.cross_entropy(model(x[part]), y[part]).backward()
    for p in model.parameters():
        p.grad = p.grad / m


def check_parts(attempt):
    for n, m in ((64, 4), (50, 4), (5, 8)):
        x, y = images[:n].astype("float64"), labels[:n]
        want = one_device(model, x, y)
        for p in model.parameters():
            p.grad = None
        attempt(model, x, y, m)
        off = error({name: p.grad for name, p in model.named_parameters().items()}, want)
        if off > 1e-9:
            return f"not solved yet: {n} images in {m} parts are off by {off:.0%}"
    return "solved"


print("exercise 3:", check_parts(in_parts))

# %% [markdown]
# ## What it costs, and the next problem
#
# - **A bubble** of (p - 1)/(m + p - 1): make m large. But small micro-batches are slow.
# - **Memory for m micro-batches** on every rank: make m small. Recompute buys most of it back for
#   one more forward pass, a third of the time.
# - **Every step drains.** The pipeline is filled and emptied for each update.
#
# The first two pull at m from both ends. Do we need all m in flight? Rank 3 of 4 could begin with
# backward as soon as it has its first micro-batch. That is `08_one_f_one_b.py`.

# %%
for cluster in clusters.values():
    cluster.close()
