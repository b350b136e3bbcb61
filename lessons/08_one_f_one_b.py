# %% [markdown]
# # 8. 1F1B: the same bubble in less memory
#
# GPipe keeps all m micro-batches in flight (lesson 7). That is not necessary: backward of the first
# one can begin as soon as it has reached the last rank. The library's version is
# `minidist/pipeline_parallel/one_f_one_b.py`: PipeDream-Flush (Narayanan et al., ICML 2021,
# section 3.2).
#
# Letters: `p` ranks, `r` one of them; `m` micro-batches, `i` one of them; `F` and `B` the times of
# one micro-batch's forward and backward on one stage. A rank's *stash*: the micro-batches that it
# holds between their forward and their backward.

# %%
import tracemalloc
from fractions import Fraction
from functools import partial

import numpy as np
from support import exercise, figures
from support.devices import Device, length, quiet

from minidist import Cluster, nn
from minidist.datasets import Batch, digits
from minidist.errors import Deadlock
from minidist.observe import timeline
from minidist.pipeline_parallel import Pipeline, actions, add_communication, programs, validate
from minidist.pipeline_parallel.actions import Backward, Forward
from minidist.pipeline_parallel.executor import execute
from minidist.pipeline_parallel.placement import Programs
from minidist.pipeline_parallel.stage import Stage
from minidist.planning import simulate

figures.arguments()
images, labels = digits()
clusters = {p: Cluster(p) for p in (2, 3, 4)}

# %% [markdown]
# ## Problem
#
# Four ranks, two layers of width 256 each, micro-batches of 64 rows. To shrink the bubble we want
# many of them. What must each rank hold then, besides its weights: how many micro-batches, and on
# rank 0 how many bytes?

# %%
ROWS, WIDTH = 64, 256


def stash(group, schedule, m):
    """Return the most micro-batches and the most bytes that this rank held at once."""
    pipeline = Pipeline(nn.MLP([WIDTH] * 9), group, schedule, m)
    x, y = np.zeros((m * ROWS, WIDTH), np.float32), np.zeros(m * ROWS, int)
    tracemalloc.start()
    batch = Batch(x, y).micro_batches(m)
    before = tracemalloc.get_traced_memory()[0]
    pipeline.run(batch)
    peak = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    return pipeline.stages[0].peak, peak


MANY = (2, 4, 8, 16, 32)
found = {(s, m): clusters[4].run(stash, s, m) for s in ("gpipe", "1f1b") for m in MANY}
for (schedule, m), ranks in found.items():
    held, peaks = zip(*ranks, strict=True)
    print(f"{schedule}, m = {m:2}: stash per rank {held}, {peaks[0] / 1e6:.2f} MB on rank 0")
    assert list(held) == [m if schedule == "gpipe" else min(m, 4 - r) for r in range(4)]
assert found["gpipe", 32][0][1] > 2 * found["1f1b", 32][0][1]

# %% [markdown]
# Under GPipe memory grows with m; under 1F1B it stops at `p - r` micro-batches. (The bytes that do
# not grow are gradients of the weights and what a product needs while it runs.)
#
# ## Picture
#
# Above GPipe, below 1F1B, with B = 2 F. Under 1F1B rank 3 alternates from its first micro-batch on;
# rank 0 has four in flight and waits for the first one. Both schedules end at the same time.

# %%
for schedule in ("gpipe", "1f1b"):
    print(timeline.text(simulate(programs(schedule, 4, 8)).timeline), "\n")

# %% [markdown]
# ## Math
#
#     time     a micro-batch is back on rank r after p - r forwards and backwards: (p - r)(F + B)
#     rate     a rank that never waits takes one per F + B, so p - r of them must be in flight
#     stash    min(m, p - r), where GPipe has m;   bubble (p - 1)/(m + p - 1), as before
#
# ## Code: as soon as possible
#
# Let us not take the order from a paper but find it. Time goes in ticks, F and B take one each. In
# every tick a rank does the oldest backward that it can; otherwise the next forward, unless it
# already holds `most(r)` micro-batches.


# %%
def as_soon_as_possible(p, m, most):
    """Return the programs that this rule makes."""
    order, end = [[] for _ in range(p)], {}  # {(kind, rank, micro-batch): its tick}
    forwards, backwards, now = [0] * p, [0] * p, 0

    def there(kind, rank, i):  # was it done before this tick? Outside the pipeline: always
        return not 0 <= rank < p or end.get((kind, rank, i), now) < now

    while min(backwards) < m:
        for r in range(p):
            f, b = forwards[r], backwards[r]
            if b < m and there("F", r, b) and there("B", r + 1, b):
                order[r].append(Backward(b))
                end["B", r, b], backwards[r] = now, b + 1
            elif f < m and f - b < most(r) and there("F", r - 1, f):
                order[r].append(Forward(f))
                end["F", r, f], forwards[r] = now, f + 1
        now += 1
    return Programs(order)


sweep = {}
for cap in range(1, 9):
    result = simulate(as_soon_as_possible(4, 8, lambda r, cap=cap: max(1, cap - r)))
    sweep[cap] = result.makespan
    print(f"at most {cap} on rank 0: time {result.makespan}, stash {result.peak_stash}")
assert min(cap for cap in sweep if sweep[cap] == min(sweep.values())) == 4

for p in range(1, 7):
    for m in range(1, 11):
        ours = as_soon_as_possible(p, m, lambda r, p=p: p - r)
        assert ours == programs("1f1b", p, m), "the library's order, action by action"

# %% [markdown]
# With fewer than 4 it takes longer; with more, rank 0 holds more without any gain. At `p - r` the
# order *is* 1F1B. One rank can also find its order alone, without a clock; that is exercise 1.
#
# ## Measurement: the same bubble, the same gradient
#
# Exactly, for p up to 6 and m up to 12, with F = 2 and B = 5/2; and on four real ranks whose layers
# sleep, 8 ms forward and 16 ms backward for a micro-batch of 8 rows. One device would take
# 8 x 4 x 24 = 768 ms.

# %%
for p in range(1, 7):
    for m in range(1, 13):
        result = simulate(programs("1f1b", p, m), Fraction(2), Fraction(1), Fraction(3, 2))
        assert result.makespan == (m + p - 1) * (2 + Fraction(5, 2))
        assert result.bubble == Fraction(p - 1, m + p - 1)
        assert result.peak_stash == [min(m, p - r) for r in range(p)]

naps = nn.Sequential([Device(f"layers.{i}", 64, 0.001, 0.002) for i in range(4)])


def step(group, schedule):
    """Return this rank's gradients of a batch of 64 in 8 micro-batches."""
    pipeline = Pipeline(naps, group, schedule, 8)
    pipeline.backward(Batch(images[:64], labels[:64]))
    return [p.grad for p in pipeline.parameters()]


gradients = {}
for schedule in ("gpipe", "1f1b"):
    log = quiet(lambda log, s=schedule: clusters[4].run(step, s, log=log), 0.264)
    gradients[schedule] = clusters[4].run(step, schedule)
    print(f"{schedule}: {1e3 * length(log):.0f} ms; (m + p - 1)(F + B) = 264 ms")
    assert 0.264 < length(log) < 0.768, "at least the naps; one device is a wide margin"
for ranks in zip(*gradients.values(), strict=True):
    for a, b in zip(*ranks, strict=True):
        assert np.allclose(a, b, rtol=1e-3, atol=1e-6), "equal but for the order of the sum"

# %% [markdown]
# If 1F1B is a little slower, the reason is that transfers take time. GPipe waits for them only
# while it fills and drains; 1F1B in every round, because rank r + 1 waits for a forward that rank r
# begins only when it has a gradient from rank r + 1. One more micro-batch in flight hides that.
# With transfers that take a fifth of F:

# %%
ways = programs("gpipe", 4, 8), programs("1f1b", 4, 8), as_soon_as_possible(4, 8, lambda r: 5 - r)
took = [float(simulate(value, latency=Fraction(1, 5)).makespan) for value in ways]
print(f"gpipe {took[0]}, 1f1b {took[1]}, at most p - r + 1 in flight {took[2]}")
assert took[0] == took[2] < took[1]

# %% [markdown]
# ## Where the order bites: sends that wait
#
# minidist's `send` never waits. In many other libraries a send returns when the receiver has taken
# the message: a *rendezvous*, which needs no buffer. Then the place of every transfer matters. The
# naive place is a receive just before its use, a send just after. Two ranks, three micro-batches;
# `>F1` sends the activation of
# micro-batch 1, `<B0` receives the gradient of 0:

# %%
naive = add_communication(programs("1f1b", 2, 3))
print("rank 0:", *naive[0], "\nrank 1:", *naive[1])

# %% [markdown]
# Rank 0 sends activation 1 forward while rank 1 sends gradient 0 back: both wait for the other to
# receive. The simulator finds it without any rank (`buffer=0`: sends wait), and so do real ranks
# whose `send` waits for an acknowledgement:


# %%
class Blocking:
    """A group whose send returns only when the message has been taken."""

    def __init__(self, group):
        self.group, self.log = group, None

    def send(self, array, to, tag):
        self.group.send(array, to, tag)
        self.group.recv(to, tag=-1 - tag)

    def recv(self, source, tag):
        array = self.group.recv(source, tag)
        self.group.send(np.empty(0), source, tag=-1 - tag)
        return array


def mlp(p):
    return nn.MLP([64, *[24] * (p - 1), 10], dtype="float64")


def run_program(group, value, kind=Stage, blocking=False):
    """Execute programs on 60 images; return this rank's gradients."""
    m = 1 + max(action.micro_batch for action in value[0])
    stage = kind(
        [mlp(group.size).layers[group.rank]], group.rank == 0, group.rank == group.size - 1
    )
    stage.begin(Batch(images[:60].astype("float64"), labels[:60]).micro_batches(m))
    execute(value[group.rank], Blocking(group) if blocking else group, [stage])
    return {p.name: p.grad for p in stage.parameters()}


def largest_error(parts):
    """Return (name, error) of the gradient that is furthest from one device's."""
    model = mlp(len(parts))
    nn.cross_entropy(model(images[:60].astype("float64")), labels[:60]).backward()
    got = {name: g for part in parts for name, g in part.items()}
    want = {p.name: p.grad for p in model.parameters()}
    errors = {name: np.abs(got[name] - w).max() / np.abs(w).max() for name, w in want.items()}
    return max(errors.items(), key=lambda item: item[1])


for way in (
    lambda: simulate(naive, buffer=0),
    lambda: clusters[2].run(run_program, naive, Stage, True),
):
    try:
        way()
    except Deadlock as stuck:
        print(f"{type(stuck).__name__}: {stuck}")
    else:
        raise AssertionError("it cannot have come to an end")

# %% [markdown]
# Both wait in their own `send` for the acknowledgement that the other would send in `recv`.
# The cure is one global order. Replay the programs, and write every transfer into the programs of
# *both* ranks when it happens: then the earliest transfer that is not done is the next one on both
# sides, and some rank can always go on. That is `rendezvous_safe=True`. Compare rank 1 below with
# rank 1 above: it takes the activation of micro-batch 1 before it sends gradient 0.

# %%
for p in (2, 3, 4):
    safe = add_communication(programs("1f1b", p, 5), rendezvous_safe=True)
    assert simulate(safe, buffer=0).makespan == simulate(programs("1f1b", p, 5)).makespan
    _, worst = largest_error(clusters[p].run(run_program, safe, Stage, True))
    assert worst < 1e-9
    print(f"{p} ranks with blocking sends: done, gradients {worst:.0e} from one device")
print("rank 1:", *add_communication(programs("1f1b", 2, 3), rendezvous_safe=True)[1])


# %%
def draw(plt):
    figure = plt.figure(figsize=(12, 5.4))
    figure.suptitle(
        "Backward as soon as possible: GPipe's time if transfers are free, "
        "at most p micro-batches held"
    )
    grid = figure.add_gridspec(2, 2, width_ratios=(2, 1))
    for row, (schedule, name) in enumerate((("gpipe", "GPipe"), ("1f1b", "1F1B"))):
        axes, result = figure.add_subplot(grid[row, 0]), simulate(programs(schedule, 4, 8))
        figures.rank_bars(axes, result.timeline)
        for r, held in enumerate(result.peak_stash):
            axes.text(33.4, r, f"holds {held}", va="center", fontweight="bold")
        axes.set(title=f"{name}, 8 micro-batches; grey: idle", xlim=(0, 37))
        axes.set_xticks([0, 10, 20, 30, 33])
        axes.spines["bottom"].set_bounds(0, 33)
    axes.set_xlabel("time, in forwards", loc="right")
    axes.legend(ncols=2, fontsize=9, loc="upper left", bbox_to_anchor=(0, -0.12))

    top, bottom = figure.add_subplot(grid[0, 1]), figure.add_subplot(grid[1, 1])
    for schedule, line, r in (("gpipe", "-", 0), ("1f1b", "--", 0), ("1f1b", ":", 2)):
        most = [found[schedule, m][r][0] for m in MANY]
        top.plot(MANY, most, "o" + line, color=figures.INK)
    top.text(20, 25, "GPipe, any rank: m", ha="right")
    top.text(33, 6.8, "1F1B, rank 0: 4", va="center", ha="right")
    top.text(33, -0.8, "1F1B, rank 2: 2", va="center", ha="right")
    top.set(title="Micro-batches held at most, measured", xlabel="micro-batches m")
    top.set(xlim=(0, 34), ylim=(-3, 34), xticks=MANY[1:], yticks=MANY[1:])

    bottom.plot(list(sweep), list(sweep.values()), "o-", color=figures.INK)
    bottom.plot(4, sweep[4], "o", color=figures.EMPHASIS, markersize=11)
    bottom.text(4.2, sweep[4] + 9, "p = 4: 1F1B", color=figures.EMPHASIS)
    bottom.set(title="Time in forwards, p = 4, m = 8", ylim=(0, 105), xticks=range(1, 9))
    bottom.set_xlabel("micro-batches allowed on rank 0")
    return figure


figures.save(draw, "08_one_f_one_b")

# %% [markdown]
# ## Exercise 1: 1F1B for one rank
#
# No clock, no other ranks: write the generator `one_f_one_b(rank, p, m)` of Forward and Backward.
# Any order will do that has 1F1B's stash on every rank and takes no longer.
#
# *Hint:* `ahead = min(p - 1 - rank, m)` forwards; then, as long as there are forwards left, one
# forward and one backward, of different micro-batches; then what is left of the backwards.


# %%
def one_f_one_b(rank, p, m):
    raise NotImplementedError  # your lines here


def show(program):
    return " ".join(map(str, program))


def finds_another_schedule(attempt):
    for p in (1, 2, 4):
        for m in (1, 3, 4, 9):
            right = programs("1f1b", p, m)
            value = Programs([list(attempt(r, p, m)) for r in range(p)])
            validate(value, p, m)  # a ValueError shows where a program cannot be right
            got, want = simulate(value), simulate(right)
            if got.peak_stash != want.peak_stash:
                return f"p = {p}, m = {m}: the stash is {got.peak_stash}, not {want.peak_stash}"
            if got.makespan != want.makespan:
                took = f"that stash, but {got.makespan} units, not {want.makespan}"
                return f"p = {p}, m = {m}: {took}: rank 0 does {show(value[0])}"


exercise.judge(
    1, finds_another_schedule, one_f_one_b, tempting=[lambda r, p, m: programs("gpipe", p, m)[r]]
)

# %% [markdown]
# ## Exercise 2: repair it locally
#
# There is a cure without a global replay: where a program sends to a neighbour and then receives
# from the same one, let the odd ranks receive first. Write `odd_receive_first(program, rank)` for a
# program with naive transfers; return a list. With `buffer=0` it must finish.
#
# *Hint:* a receive that answers the send just before it cannot come first: exchange two
# neighbouring actions only if peers agree and micro-batches differ. `actions.SENDS` and
# `actions.RECEIVES` have the types.


# %%
def odd_receive_first(program, rank):
    raise NotImplementedError  # your lines here


def finds_a_deadlock(attempt):
    for p in (2, 3, 4):
        for m in (1, 3, 8):
            value = add_communication(programs("1f1b", p, m))
            value = Programs([attempt(list(a), r) for r, a in enumerate(value)])
            validate(value, p, m)
            simulate(value, buffer=0)  # a Deadlock of programs is a ValueError


def exchange_all(program, rank):
    for i in range(len(program) - 1) if rank % 2 else ():
        if type(program[i]) in actions.SENDS and type(program[i + 1]) in actions.RECEIVES:
            program[i : i + 2] = program[i + 1], program[i]
    return program


exercise.judge(
    2, finds_a_deadlock, odd_receive_first, tempting=[lambda program, rank: program, exchange_all]
)

# %% [markdown]
# ## Exercise 3: why did this break?
#
# To allocate nothing in the loop, a stage copies what arrives into its own buffers, used in turns.
# One buffer passed all tests on two ranks. On three, gradients are wrong, and no error is raised.
# Return the least number of buffers that a rank needs under 1F1B. (Rank 0 receives no activation,
# so it is not checked.)
#
# *Hint:* until when is a received activation needed, and which action reads it last? How many are
# there at once on the last rank, and how many on the one before?


# %%
def buffers_needed(rank, p, m):
    raise NotImplementedError  # your line here


class BufferedStage(Stage):
    """A stage that keeps each received activation in one of `count` arrays."""

    def __init__(self, *arguments, count):
        super().__init__(*arguments)
        self.buffers, self.count = {}, count

    def forward(self, i):
        if not self.first:
            arrived = self.received[i]
            slot = self.buffers.setdefault(i % self.count, np.empty_like(arrived))
            slot[...] = arrived
            self.received[i] = slot
        super().forward(i)


def run_buffered(group, value, count):
    return run_program(group, value, partial(BufferedStage, count=count[group.rank]))


def finds_another_count(attempt):
    for p in (2, 3, 4):
        for m in (2, 6):
            value = add_communication(programs("1f1b", p, m))
            count = [1, *(attempt(rank, p, m) for rank in range(1, p))]
            name, worst = largest_error(clusters[p].run(run_buffered, value, count))
            if worst > 1e-9:
                return f"{p} ranks, m = {m}, buffers {count}: {name} is off by {worst:.0%}"
            most = simulate(value).peak_stash
            if any(count[rank] > most[rank] for rank in range(1, p)):
                return f"{p} ranks, m = {m}, buffers {count}: right, but fewer would do"


exercise.judge(
    3, finds_another_count, buffers_needed, tempting=[lambda *_: 1, lambda rank, p, m: m]
)

# %% [markdown]
# ## What it costs, and the next problem
#
# - **Memory** for at most p micro-batches, for any m: now m may grow, and the bubble
#   (p - 1)/(m + p - 1) shrinks. The first rank still holds p times as many as the last one.
# - **Order matters more.** Sends and receives cross, and a transport whose sends wait needs a plan.
# - **The bubble is still there,** once per update: the pipeline drains because all gradients must
#   be complete before the weights may change.
#
# Must they? If a micro-batch may use weights that are a little old, the pipeline never drains: that
# is PipeDream, lesson 9, `09_pipedream.py`.

# %%
for cluster in clusters.values():
    cluster.close()
