# %% [markdown]
# # 9. PipeDream: no flush, no bubble, and gradients of the past
#
# Until now a pipeline ran empty before the weights were updated: the *flush*. Leave it out, and the
# ranks never wait again; but while a minibatch is on its way, the weights change under it. This
# lesson is about which weights are used, which are kept, and what it does to learning. The
# library's version: `pipedream.py` and `weight_versions.py` in `minidist/pipeline_parallel`.
#
# Letters: `p` stages, one per rank, `s` one of them; minibatch `b`; *version* `n` of a stage's
# weights: those after `n` updates; `F3`, `B3`, `U3`: forward, backward, and the update after them.
# A *minibatch* is what an update belongs to, so it is lesson 8's batch and micro-batch in one; only
# under 2BW, double-buffered weights, do several micro-batches share an update.

# %%
import time
from fractions import Fraction
from functools import partial
from itertools import product

import numpy as np

from minidist import Cluster, nn, optim
from minidist.datasets import digits
from minidist.nn.flat_parameters import FlatParameters
from minidist.pipeline_parallel import PipeDream, add_communication, programs
from minidist.pipeline_parallel.actions import Backward, Update
from minidist.pipeline_parallel.executor import execute
from minidist.pipeline_parallel.one_f_one_b import one_f_one_b
from minidist.pipeline_parallel.stage import MicroBatch, Stage
from minidist.planning import simulate
from minidist.rng import generator
from minidist.tools import figures, timeline
from minidist.tools.replay import replay
from minidist.tools.timeline_figure import Bar, meaning

figures.arguments()
images, labels = digits("float64")
clusters = {p: Cluster(p) for p in (1, 2, 3, 4)}

# %% [markdown]
# ## Problem
#
# What does the flush cost? Programs are values, and the executor only calls a stage's methods. So
# here is a stage that sleeps, 3 ms forward and 6 ms backward: every rank is a device of its own, on
# any machine. Four ranks take 24 micro-batches: in six batches of four, with a flush after each, or
# all in a row.


# %%
class Sleeper:
    """A stage that takes its time and does nothing else."""

    forward_seconds = 3e-3

    def __init__(self):
        self.received, self.gradients = {}, {}

    def forward(self, i):
        time.sleep(self.forward_seconds)

    def backward(self, i):
        time.sleep(2 * self.forward_seconds)

    def output(self, i):
        return np.zeros(1)

    def input_gradient(self, i):
        return np.zeros(1)

    def update(self, i):
        pass


def seconds(group, schedule, m, batches):
    program = add_communication(programs(schedule, group.size, m))[group.rank]
    group.barrier()
    start = time.perf_counter()
    for _ in range(batches):
        execute(program, group, [Sleeper()])
    group.barrier()
    return time.perf_counter() - start


def quiet(schedule, m, batches):
    """Return (seconds, those of the simulator, share of idle time); noise only ever adds.

    The fastest run counts; there are no more of them once one is within 10% of the simulator's.
    """
    ideal = simulate(programs(schedule, 4, m))
    units, found = float(ideal.makespan) * batches, []
    while len(found) < 8 and (not found or found[-1] > 1.1 * units * Sleeper.forward_seconds):
        found.append(max(clusters[4].run(seconds, schedule, m, batches)))
    return min(found), units * Sleeper.forward_seconds, float(ideal.bubble)


with_flush, least_with_flush, idle_with = quiet("1f1b", 4, 6)
without, least_without, idle_without = quiet("pipedream", 24, 1)
for name, took, least, idle in (
    ("with flushes", with_flush, least_with_flush, idle_with),
    ("without", without, least_without, idle_without),
):
    print(
        f"{name:12} {1e3 * took:.0f} ms; by the simulator {1e3 * least:.0f} ms, of which a rank "
        f"is idle {idle:.0%}"
    )
    assert took > 0.99 * least
assert without < least_with_flush, "faster than any run with flushes can be"
assert idle_without < idle_with / 3

# %% [markdown]
# ## Picture
#
# Each rank updates its own stage after every backward, and goes on at once:

# %%
print(timeline.text(simulate(programs("pipedream", 4, 6), update=1).timeline))

# %% [markdown]
# Follow minibatch 3. On rank 0 `F3` comes before `U0`: it sees version 0. `B3` comes after `U2`:
# the weights are version 3 by then. On rank 3 both come after `U2`: version 3.
#
# ## Math
#
# Which version a stage uses for minibatch `b`, and how many it must keep at once. *Stashing* keeps
# what forward has used until backward is done; *vertical sync* sends a minibatch through all stages
# with the version that the first one used; *2BW* updates less often, so that two buffers do:
#
#     weight stashing   max(0, b - (p-1-s))           F and B the same on a stage      p - s kept
#     vertical sync     max(0, b - (p-1))             ... and the same on all stages   p kept
#     2BW               max(0, floor((k-1)/m) - 1)    two are enough                   2 kept
#
# (Narayanan et al., SOSP 2019, section 3.3. 2BW: Narayanan et al., ICML 2021, section 3.1; there is
# an update after every `m` micro-batches, and `k` counts these from 1. The paper asks for `m >= p`;
# in the order of our programs `p-1` are enough.) The first line comes from the program: when `F` of
# a minibatch begins on stage `s`, `p-1-s` others are in flight there, and the updates of exactly
# these are missing.
#
# What does a delay of `d` updates do? On the parabola `l w^2 / 2` it turns gradient descent with
# rate `e` into `w[t+1] = w[t] - a w[t-d]`, `a = e l`. That shrinks as long as all roots of
# `z^(d+1) - z^d + a` lie inside the unit circle:


# %%
def largest_stable(d):
    """Return the largest a at which the delayed descent does not grow, by bisection."""
    low, high = 0.0, 3.0
    for _ in range(50):
        a = (low + high) / 2
        roots = np.roots([1.0, -1.0, *[0.0] * (d - 1), a] if d else [1.0, a - 1.0])
        low, high = (a, high) if max(abs(roots)) < 1 else (low, a)
    return low


limits = [largest_stable(d) for d in range(4)]
print("delay 0 to 3: stable up to a =", ", ".join(f"{a:.3f}" for a in limits))
assert np.allclose(limits[:2], [2, 1]) and limits[3] < limits[0] / 4

# %% [markdown]
# One update of delay halves the largest learning rate; three leave less than a quarter of it.
#
# ## Code
#
# A stage that updates. Its parameters are views of the newest buffer; a graph in flight holds on to
# the arrays that it has seen. So *weight stashing is one line*: the update writes to a new buffer.
# Without that line backward finds weights that forward has never met.


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
        self.flat.bind(self.newest)
        for p in self.flat.parameters:
            p.grad = None


def stream(count, size, seed=0, per_update=1):
    """Return minibatches of the digits; `per_update` of them share an update."""
    order = generator(seed, "order").permutation(len(images))
    picks = np.resize(order, (count, size))
    return [MicroBatch(images[i], labels[i], None, size * per_update) for i in picks]


LR = 0.2


def mlp(seed=0):
    return nn.MLP([64, 64, 64, 64, 10], seed=seed, dtype="float64")  # one layer per stage of four


def ours(group, stash, count=16):
    """Return this stage's weights after a stream of minibatches."""
    layers = mlp().layers
    cut = np.array_split(np.arange(len(layers)), group.size)[group.rank]
    stage = Updating([layers[i] for i in cut], group.rank, group.size, LR, stash)
    program = add_communication(programs("pipedream", group.size, count))[group.rank]
    stage.begin(stream(count, 32))
    execute(program, group, [stage])
    return stage.newest.tobytes()


def the_librarys(group, scheme, count=16):
    pipe = PipeDream(mlp(), group, partial(optim.SGD, lr=LR), scheme)
    pipe.train(stream(count, 32))
    return pipe.stage.weights.newest[:-1].tobytes()  # behind the weights: a counter of updates


for p in (2, 4):
    for stash, scheme in ((True, "weight_stashing"), (False, "none")):
        assert clusters[p].run(ours, stash) == clusters[p].run(the_librarys, scheme)
print("2 and 4 stages, with and without stashing: the library's weights, bit for bit")

# %% [markdown]
# ## Measurement: versions, memory, and the gradient of nothing
#
# The library ends every buffer with a counter of its updates, and reads it from the buffer that a
# pass really uses. An optimizer that keeps a diary tells us the rest: each gradient it was given,
# and the weights it left.


# %%
class Diary(optim.SGD):
    """SGD that remembers: weights[n] is version n, gradients[n] what led from n to n + 1."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, lr)
        self.gradients, self.weights = [], [[p.data.copy() for p in parameters]]

    def step(self):
        self.gradients.append([p.grad.copy() for p in self.parameters])
        super().step()
        self.weights.append([p.data.copy() for p in self.parameters])


def watched(group, scheme, count=16, **options):
    """Return (passes and their versions, buffers kept, gradients, weights) of this stage."""
    pipe = PipeDream(mlp(), group, partial(Diary, lr=LR), scheme, **options)
    per_update = options.get("update_every", 1)
    pipe.train(stream(count, 32, per_update=per_update))
    diary = pipe.stage.weights.optimizer
    return pipe.used, pipe.stage.weights.most, diary.gradients, diary.weights


FORMULAS = {  # the version that minibatch b uses, k = b + 1; the buffers that are kept
    "weight_stashing": (lambda b, s, p, m: max(0, b - (p - 1 - s)), lambda s, p: p - s),
    "vertical_sync": (lambda b, s, p, m: max(0, b - (p - 1)), lambda s, p: p),
    "2bw": (lambda b, s, p, m: max(0, b // m - 1), lambda s, p: 2),
}
watch = {scheme: partial(watched, scheme=scheme) for scheme in (*FORMULAS, "none")}
watch["2bw"] = partial(watch["2bw"], update_every=4)
for scheme, (version_of, buffers) in FORMULAS.items():
    for p in (2, 3, 4):
        seen = clusters[p].run(watch[scheme])
        for s, (used, most, _, _) in enumerate(seen):
            assert all(version == version_of(b, s, p, 4) for _, b, version in used)
            assert most == buffers(s, p), f"{scheme}: stage {s} of {p} kept {most}"
    print(f"{scheme:16} versions as said; buffers kept by 4 stages: {[m for _, m, _, _ in seen]}")

none = clusters[4].run(watch["none"])
for s, (used, _, _, _) in enumerate(none):
    passes = {(letter, b): n for letter, b, n in used}
    print(f"none, stage {s}: minibatch 8 forward {passes['F', 8]}, backward {passes['B', 8]}")
    assert passes["B", 8] - passes["F", 8] == 3 - s

# %% [markdown]
# Are these gradients of anything? We put recorded weights together, a version per stage, and let
# one device compute the gradient there. With stashing we know which versions to take. Without it we
# try, for minibatch 8, all that there were on each stage between its forward and its backward.


# %%
def error(seen, b, versions):
    """Return |got - want| / |want| of minibatch b's gradients, in the layer where it is largest.

    seen      what the stages have recorded
    versions  per stage, that of the weights with which one device computes what we want
    """
    model, minibatch = mlp(), stream(16, 32)[b]
    for layer, (*_, weights), n in zip(model.layers, seen, versions, strict=True):
        for p, array in zip(layer.parameters(), weights[n], strict=True):
            p.data[...] = array
    nn.cross_entropy(model(minibatch.inputs), minibatch.targets).backward()
    worst = 0.0
    for layer, (_, _, gradients, _) in zip(model.layers, seen, strict=True):
        want = np.concatenate([p.grad.ravel() for p in layer.parameters()])
        got = np.concatenate([g.ravel() for g in gradients[b]])
        worst = max(worst, np.linalg.norm(got - want) / np.linalg.norm(want))
    return worst


stashed = clusters[4].run(watch["weight_stashing"])
version_of, _ = FORMULAS["weight_stashing"]
off = max(error(stashed, b, [version_of(b, s, 4, 1) for s in range(4)]) for b in range(16))
print(f"stashing: all minibatches, against the gradient at the versions of the formula: {off:.0e}")
between = list(product(*(range(5 + s, 9) for s in range(4))))
nearest = min(error(none, 8, versions) for versions in between)
print(f"none: minibatch 8, against the nearest of {len(between)} gradients: {nearest:.0%} off")
assert off < 1e-12 and nearest > 0.03

# %% [markdown]
# So a stale gradient is a gradient: of weights that were. Without stashing it is of none. The
# library's *oracle*, `minidist/tools/replay.py`, makes the same point about whole
# trainings: one rank, no pipeline, takes minibatch after minibatch with the versions it is told.


# %%
def oracle(group, versions, updates, count, per_update):
    """Return the weights of a training with these versions per stage and minibatch."""
    batches = stream(count, 32, per_update=per_update)
    sgd = partial(optim.SGD, lr=LR)
    return replay(mlp(), [range(i, i + 1) for i in range(4)], batches, versions, updates, sgd)


for scheme in FORMULAS:
    every = 4 if scheme == "2bw" else 1
    seen = clusters[4].run(watch[scheme])
    versions = [{b: n for letter, b, n in used if letter == "F"} for used, *_ in seen]
    updates = [range(every - 1, 16, every)] * 4
    want = list(clusters[1].run(oracle, versions, updates, 16, every)[0].values())
    got = [array for *_, weights in seen for array in weights[-1]]
    assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True)), scheme
print("stashing, vertical sync, 2BW: the replay ends with the same bits")

# %% [markdown]
# ## Measurement: what staleness costs
#
# The same number of updates, of 32 digits each, on four ranks; 2BW takes them as four micro-batches
# of 8. One device stands for the synchronous pipeline, which computes the same (lesson 8).

# %%
RATES, SEEDS, UPDATES = (0.02, 0.06, 0.2), (0, 1), 80
LABELS = {
    "synchronous": "synchronous, delay 0",
    "2bw": "2BW, delay 1",
    "weight_stashing": "stashing, delay p-1-s",
    "vertical_sync": "vertical sync, delay p-1",
    "none": "no stashing",
}


def learned(group, scheme, rates, seeds):
    """Return {rate: the loss of the last 20 updates, per seed}, on the last rank."""
    result = {rate: [] for rate in rates}
    for rate, seed in [(rate, seed) for rate in rates for seed in seeds]:
        model, sgd = mlp(seed), partial(optim.SGD, lr=rate)
        every = 4 if scheme == "2bw" else 1
        batches = stream(UPDATES * every, 32 // every, seed, every)
        way = "weight_stashing" if scheme == "synchronous" else scheme
        options = {"update_every": every} if scheme == "2bw" else {}
        losses = PipeDream(model, group, sgd, way, **options).train(batches)
        if losses:  # on the last rank
            parts = np.reshape([losses[b] for b in range(len(batches))], (UPDATES, every))
            result[rate].append(float(parts.sum(axis=1)[-20:].mean()))
    return result


final = {}
for scheme in LABELS:
    cluster = clusters[1 if scheme == "synchronous" else 4]
    final[scheme] = cluster.run(learned, scheme, RATES, SEEDS)[-1]
    rounded = {rate: np.round(runs, 2).tolist() for rate, runs in final[scheme].items()}
    print(f"{LABELS[scheme]:25} {rounded}")
means = {scheme: [np.mean(runs) for runs in by_rate.values()] for scheme, by_rate in final.items()}
for scheme in LABELS:
    assert means[scheme][0] < 1.15 * means["synchronous"][0], "a small rate forgives every delay"
assert means["vertical_sync"][-1] > 2.5 * means["synchronous"][-1]
assert means["weight_stashing"][-1] < 0.6 * means["vertical_sync"][-1]

# %% [markdown]
# At the small rate no scheme loses more than a few percent; at the large one, the best of the three
# for the synchronous pipeline, vertical sync hardly learns at all. Stashing does better with
# the same pipeline, since only the first stage is `p - 1` behind and the last is not at all. And no
# stashing? At small rates it learns as well as stashing: versions that differ little make an error
# that is small. It promises nothing, and you have seen how far off it is where steps are large.


# %%
def with_flushes(p, m, batches):
    """Return 1F1B's programs for several batches, one after the other, with their updates."""
    result = [[] for _ in range(p)]
    for first in range(0, batches * m, m):
        for own, program in zip(result, programs("1f1b", p, m), strict=True):
            own += [type(a)(first + a.micro_batch) for a in program] + [Update(first + m - 1)]
    return result


def bars(axes, programs, outlined=()):
    """Draw what a simulation finds: a row per rank, a bar per action."""
    for event in simulate(programs, update=Fraction(1, 2)).timeline.events:
        bar = Bar(event.rank, 0.8, event, meaning(event))
        place = event.rank, float(event.seconds), 0.8, float(event.start)
        axes.barh(*place, color=bar.color, edgecolor="white")
        if (event.rank, event.name) in outlined:
            edge = {"edgecolor": figures.INK, "facecolor": "none", "linewidth": 2.5, "zorder": 3}
            axes.barh(*place, **edge)
        if event.name[0] != "U":
            middle = float(event.start + event.end) / 2
            style = {"fontsize": 8, "ha": "center", "va": "center"}
            axes.text(middle, event.rank, event.name[1:], color=bar.ink, **style)
    rows = range(len(programs))
    axes.set(xlim=(0, 45), ylim=(len(rows) - 0.5, -0.5), xticks=[])
    axes.set_yticks(rows, [f"rank {r}" for r in rows])
    axes.tick_params(axis="y", length=0)


def draw(plt):
    figure, axes = plt.subplot_mosaic(
        [["flush", "rate"], ["no flush", "rate"]], figsize=(11, 4.6), width_ratios=[1.7, 1]
    )
    figure.suptitle("Without flushes ranks work all the time, on gradients of older weights")
    bars(axes["flush"], with_flushes(4, 4, 2))
    axes["flush"].set_title("1F1B, two batches of four micro-batches: ranks run empty between them")
    bars(axes["no flush"], programs("pipedream", 4, 10), {(0, "F4"), (0, "B4")})
    axes["no flush"].set_title("PipeDream: rank 0 updates 3 times between F and B of minibatch 4")
    keys = {"forward": figures.FORWARD, "backward": figures.BACKWARD, "update": figures.UPDATE}
    patches = [plt.Rectangle((0, 0), 1, 1, color=color, label=key) for key, color in keys.items()]
    below = {"loc": "upper left", "bbox_to_anchor": (0, 0)}
    axes["no flush"].legend(handles=patches, ncols=3, fontsize=9, **below)
    axes["no flush"].set_xlabel("time", loc="right")

    colors = [figures.INK, figures.UPDATE, figures.FORWARD, figures.EMPHASIS, figures.COMMUNICATION]
    for (scheme, label), color, marker in zip(LABELS.items(), colors, "osD^v", strict=True):
        axes["rate"].plot(RATES, means[scheme], marker=marker, color=color, label=label)
    title = f"Loss, mean of updates {UPDATES - 19} to {UPDATES}"
    axes["rate"].set(title=title, xlabel="learning rate", xscale="log")
    axes["rate"].set_xticks(RATES, [f"{rate:g}" for rate in RATES])
    axes["rate"].minorticks_off()
    axes["rate"].set_ylim(0, 3.4)
    axes["rate"].legend(fontsize=9, loc="upper left")
    return figure


figures.save(draw, "09_pipedream")

# %% [markdown]
# ## Replicas: pipeline and data parallelism at once
#
# A stage that takes twice as long holds everybody up. PipeDream gives it twice the ranks: minibatch
# `b` goes to replica `b mod k` of `k`, forward and backward (SOSP 2019, section 3.2), and an update
# applies the sum of `k` gradients, with an all-reduce among the replicas. Stage 0 on ranks 0 and 1:

# %%
COSTS = {"forward": [2, 1], "backward_input": [2, 1], "backward_weight": [2, 1]}  # per stage
short, alone, replicated = (
    simulate(programs("pipedream", p, m, replicas=replicas), **COSTS)
    for p, m, replicas in ((3, 6, [2, 1]), (2, 60, [1, 1]), (3, 60, [2, 1]))
)
print(timeline.text(short.timeline))
for ranks, found in ((2, alone), (3, replicated)):
    each, idle = float(found.makespan / 60), float(found.bubble)
    print(f"{ranks} ranks: {each:.2f} units per minibatch, {idle:.0%} idle")
assert alone.makespan > 1.9 * replicated.makespan


def with_replicas(group):
    """Return (the losses of 8 minibatches, this rank's weights)."""
    pipe = PipeDream(mlp(), group, partial(optim.SGD, lr=LR), replicas=[2, 1])
    return pipe.train(stream(8, 32)), pipe.stage.weights.newest.tobytes()


(_, first), (_, second), (losses, _) = clusters[3].run(with_replicas)
assert first == second and sorted(losses) == list(range(8))
print("on three real ranks, after 8 minibatches: both replicas of stage 0 have the same bits")

# %% [markdown]
# ## Exercises
#
# **1. A program of your own.** Write the program of 2BW: 1F1B over `m` micro-batches, without
# flushes, and an update after every `every` backwards and at the end. The check compares with the
# library's for many `p` and `m`. *Hint:* go through `one_f_one_b(rank, p, m)`; an update bears the
# number of the micro-batch before it.


# %%
def two_buffered(rank, p, m, every):
    """Yield the actions of 2BW on one rank."""
    raise NotImplementedError  # your lines here


def check_program(attempt):
    """Say "solved", "not solved yet", or what is wrong."""
    for p, m, every in [(1, 3, 1), (2, 5, 2), (3, 8, 2), (4, 12, 3), (4, 10, 5)]:
        want = programs("pipedream_2bw", p, m, update_every=every)
        for rank in range(p):
            try:
                got = list(attempt(rank, p, m, every))
            except NotImplementedError:
                return "not solved yet"
            if got != want[rank]:
                at = sum(a == b for a, b in zip(got, want[rank], strict=False))
                return f"wrong: rank {rank} of {p} (m = {m}, every = {every}), near action {at}"
    return "solved"


def forgets_the_end(rank, p, m, every):
    for action in one_f_one_b(rank, p, m):
        yield action
        if isinstance(action, Backward) and (action.micro_batch + 1) % every == 0:
            yield Update(action.micro_batch)


print("exercise 1:", check_program(two_buffered))
print("a tempting answer:", check_program(forgets_the_end))
assert check_program(forgets_the_end).startswith("wrong")

# %% [markdown]
# **2. The largest rate.** Find the closed form of `largest_stable(d)`. *Hint:* at the limit a root
# lies on the unit circle. Put `z = exp(i t)` into `z^(d+1) - z^d = -a` and compare the angles of
# both sides: `z - 1` has the angle `(t + pi)/2` and the length `2 sin(t/2)`.


# %%
def limit(d):
    """Return the largest a at which the delayed descent does not grow."""
    raise NotImplementedError  # your line here


def check_limit(attempt):
    for d in range(8):
        try:
            got, want = attempt(d), largest_stable(d)
        except NotImplementedError:
            return "not solved yet"
        if not abs(got - want) < 1e-6:
            return f"wrong: for a delay of {d} it is {want:.3f}, not {got:.3f}"
    return "solved"


print("exercise 2:", check_limit(limit))
print("a tempting answer:", check_limit(lambda d: 2 / (d + 1)))
assert check_limit(lambda d: 2 / (d + 1)).startswith("wrong")

# %% [markdown]
# **3. Why did this break?** Somebody binds the stashed weights explicitly before backward, to be
# sure that it finds them. All gradients are right, the loss falls, nothing complains; but the
# weights are not those of weight stashing. Say how many of the 60 updates are in rank 0's weights
# at the end, then repair `update` in its marked line. *Hint:* which version does `flat.vector` hold
# when the update begins?


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
        self.newest = self.flat.vector - self.lr * self.flat.gradient  # repair this line
        self.flat.bind(self.newest)
        for p in self.flat.parameters:
            p.grad = None


def trained(group, kind):
    """Return (the losses, the weights) of a stage of this kind."""
    layer = mlp().layers[group.rank]
    stage = kind([layer], group.rank, group.size, LR, True)
    program = add_communication(programs("pipedream", group.size, 60))[group.rank]
    stage.begin(stream(60, 32))
    execute(program, group, [stage])
    return list(stage.losses.values()), stage.newest.tobytes()


def check_repair(kind):
    want, got = clusters[4].run(trained, Updating), clusters[4].run(trained, kind)
    if [bits for _, bits in want] == [bits for _, bits in got]:
        return "solved"
    wrong = [rank for rank in range(4) if want[rank][1] != got[rank][1]]
    ends = [np.mean(run[-1][0][-10:]) for run in (got, want)]
    losses = "the loss ends at {:.2f}, with weight stashing at {:.2f}".format(*ends)
    return f"not solved yet: ranks {wrong} have other weights; {losses}"


print("exercise 3:", check_repair(Careful))

# %% [markdown]
# ## What it costs, and the next problem
#
# - **Memory for old weights**: `p - s` versions on stage `s`, most on the first, which also has the
#   most activations in flight. 2BW needs two, wherever.
# - **Another algorithm.** The gradient is exact, of weights that are gone. A rate that was the best
#   without delay may be too large with it, and nothing but training tells.
# - **The bubble is gone** for as long as the stream lasts; then only the slowest stage counts.
#
# Is there a way to keep the update synchronous, one device's gradient but for rounding, and still
# lose the bubble? Nearly. That is lesson 10.

# %%
for cluster in clusters.values():
    cluster.close()
