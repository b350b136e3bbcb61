# %% [markdown]
# # 20. Which strategy when
#
# Lesson 16 chose among the meshes of one strategy. This lesson puts all strategies of the library
# into one table: what a rank takes in, sends, holds and waits for, and how many ranks a strategy
# can use. The first three and the work of a rank are measured, and equal closed forms. These and
# simulated schedules give the useful share of a rank's time. Rules follow, and a function that
# chooses.
#
# Letters: `N` ranks, `r` one of them; a batch of `B` examples, of `T` tokens each; a Transformer of
# `L` blocks, width `C`, `H` heads, `V` different tokens; `X = T C` numbers of one example between
# two layers; `m` micro-batches; `P` parameters, and `A` numbers that one device keeps for backward.

# %%
from dataclasses import replace
from time import perf_counter

import numpy as np

from minidist import Cluster, Mesh, nn, optim
from minidist.hybrid import Hybrid
from minidist.planning.costs.layers import block_activation_bytes, block_parameters
from minidist.planning.costs.single_device import single_device_cost
from minidist.tools import equivalence, exercise, figures
from minidist.tools.costs import table
from minidist.tools.costs.measured import measure_costs, rates
from minidist.tools.strategies import STRATEGIES, Case
from minidist.tools.strategies.cases import EXAMPLE

figures.arguments()
B, T, C, H, L, V = EXAMPLE.values()  # of the batch and the Transformer that most strategies fit
clusters = {size: Cluster(size) for size in (1, 2, 4)}
cases = {name: table.example(name) for name in STRATEGIES}
RANKS = {name: record.most_ranks for name, record in STRATEGIES.items()}  # 4; of siamese, 2
print(f"a batch of {B} examples x {T} tokens; {L} blocks of width {C}, {H} heads, {V} tokens")

# %% [markdown]
# ## Problem
#
# One batch, one step, four ranks. `minidist verify` shows that all strategies compute the gradient
# of one device, or, if they are asynchronous, exactly the stale one that they promise. Here each
# runs one step with AdamW, and its ranks are watched: what they send, hold and compute.

# %%
costs = {name: measure_costs(name, cases[name], clusters[RANKS[name]]) for name in cases}
moved = {name: sum(cost.sent for cost in own) for name, own in costs.items()}
fullest = {name: max(own, key=lambda cost: cost.memory) for name, own in costs.items()}
held = {name: fullest[name].memory / single_device_cost(cases[name]).memory for name in cases}
useful = {name: STRATEGIES[name].useful_share(cases[name], RANKS[name]) for name in cases}
same = [name for name in cases if isinstance(cases[name].model, nn.Transformer)]
for what, values in [("bytes", moved), ("memory of a rank", held), ("useful time", useful)]:
    low, high = min(same, key=values.get), max(same, key=values.get)
    print(f"{what}: {low} least, {high} {values[high] / values[low]:.1f} times as much")

# %% [markdown]
# One gradient, one batch, one model: 33 times the bytes, 7 times the memory, and between a quarter
# and all of the ranks' time is useful. No strategy is best at all three.
#
# ## Picture
#
#                 a step is  examples  x  layers  x  matrices      and, between steps,  state
#
#     data          cuts     examples                              keeps all of it N times
#     ZeRO          cuts     examples                              cuts it
#     servers       cut      examples                              keep it on other ranks
#     pipelines     cut                   layers                   cut with the layers
#     tensor        cuts                            matrices       cut with the matrices
#     sequence      cuts                            matrices       and positions between them
#     hybrid        cuts     examples  x  layers  x  matrices
#
# Something crosses every cut. Gradients cross a cut of examples, once a step. Activations cross a
# cut of layers at the cut, and a cut of matrices in every layer.
#
# ## Math
#
# What all ranks send in a step, in numbers of 8 bytes:
#
#     naive, bucketed, zero_1, zero_2     2 (N-1) P         gradients there, sums or weights back
#     zero_3                              3 (N-1) P         weights twice, gradients once
#     servers, W workers                  2 W P             and 16 bytes a request
#     pipelines                           2 cuts B X        chunks have more cuts
#     attention                           4 (N-1) L B X     an all_reduce each way and block
#     sequence                            (10 L + 5) (N-1) B X, and small ones (lesson 13)
#
# What a rank holds: weights, gradients, AdamW's two moments, 4 P in all; and activations A.
#
#     naive       4 P + A/N
#     zero_1      2 P + 2 P/N + A/N
#     pipeline    4 P_r + A_r f/m             of r's layers; f micro-batches in flight: m (gpipe),
#                                             N - r (1F1B); pipedream: N - r versions of weights
#     sequence    about 4 P/N + A/N
#
# And a step takes, with u, the *useful share*, counted as if links were free:
#
#     seconds  =  work / (N u speed)  +  parameters updated / update  +  bytes sent / link
#     u        =  work of one device / (N x work of the slowest rank, its waiting included)
#
# Speed, update and link are what a rank does per second. u < 1 has three causes: some ranks have
# less to do than others (servers, first and last layers), work is done N times (all but attention's
# matrices under `attention`), or ranks wait (bubble).
#
# ## Code
#
# Three rows by hand: what the fullest rank takes in and holds.


# %%
def by_hand(name, N=4):
    """Return (examples, positions, layers), bytes that stay, bytes of activations at their peak."""
    block = 12 * C * C + 13 * C  # QKV 3, output 1, expand 4, contract 4; biases and norms
    first, head = V * C + T * C, 2 * C + V * C
    ends = 8 * (2 * T * C + T + T * V)  # of one example: the head's norm, the loss
    if name == "naive":  # some of the examples, all of the layers
        P = first + L * block + head
        kept = L * block_activation_bytes(B // N, T, C, H, 8, dropout=False) + B // N * ends
        return (B // N, T, L + 2), 8 * 4 * P, kept
    if name == "gpipe":  # all examples, one at a time but all in flight; the second rank's 2 blocks
        kept = B * 2 * block_activation_bytes(1, T, C, H, 8, dropout=False)
        return (B, T, 2), 8 * 4 * 2 * block, kept
    P = first - V * C + 2 * C + 2 * V * C // N + L * block_parameters(C, N)  # sequence
    kept = L * block_activation_bytes(B, T, C, H, 8, N, sequence=True, dropout=False)
    return (B, T // N, L + 2), 8 * 4 * P, kept + B * ends // N + 8 * B * (T * C + T)


alone = measure_costs("naive", cases["naive"], clusters[1])[0]
assert alone == replace(single_device_cost(cases["naive"]), sent=0)
for name in ("naive", "gpipe", "sequence"):
    print(f"{name}: takes in {by_hand(name)[0]}, holds {by_hand(name)[1:]} bytes")
    most = fullest[name]
    entered, activations = (most.examples, most.positions, most.layers), most.held["activations"]
    assert by_hand(name) == (entered, most.memory - activations, activations)

# %% [markdown]
# The `predict` of each strategy's record (`minidist/tools/strategies/`) does the same, with the
# closed forms of `minidist/planning/costs/`. Now each measured cost of each rank must equal it:
# what enters its layers, what it holds, its multiply-adds; and the bytes of all ranks. One is a
# bound: passes of `zb_h1` and `zb_h2` hold less between the two halves of their backward. (Messages
# on their way, and what an operation needs for a moment, are not counted.)

# %%
for name, own in costs.items():
    forms = STRATEGIES[name].predict(cases[name], RANKS[name])
    assert sum(cost.sent for cost in forms) == moved[name], name
    for cost, form in zip(own, forms, strict=True):
        if STRATEGIES[name].costs.bound:
            assert 0.8 < cost.held["activations"] / form.held["activations"] <= 1
            form = replace(form, held=cost.held)
        assert replace(form, sent=cost.sent) == cost, name
print(f"{len(costs)} strategies: each rank costs what its closed form says")

# %% [markdown]
# ## Measurement: the table
#
# Still missing is the number of ranks beyond which there is nothing left to cut. If the library
# refuses one more rank, its message is shown; if it does not, that rank has nothing to do.

# %%
for name in ("siamese", "gpipe", "zb_v", "pipedream", "column", "attention", "sequence"):
    size = table.limit(name, cases[name])[0] + 1
    try:
        equivalence.check(name, cases[name], size, transport="thread")
        raise AssertionError(f"{name} ran on {size} ranks")
    except ValueError as error:
        print(f"{name} on {size} ranks: {str(error).split(';')[0]}")
spare = STRATEGIES["naive"].predict(cases["naive"], B + 1)[-1]
print(f"naive on {B + 1} ranks: the last one takes in {spare.examples} examples")

# %%
rows = table.rows(costs)
assert [cells[0] for cells in rows] == equivalence.strategies()  # none is missing
print(table.text(rows))

# %% [markdown]
# How to read it. *Input*: examples x positions x layers that the fullest rank runs. *Bytes*: of all
# ranks (of the busiest). *Memory*: of the fullest rank, what stays + activations at their peak; *of
# one*: against one device with the same model. *Balance*: the busiest rank's multiply-adds over the
# mean. *Useful*: the u above, for pipelines replayed with 8 micro-batches, asynchronous ones with a
# stream of 160. *Limit*: ranks, and what each of them then has one of. `siamese` runs on two ranks
# and another model, `column` and `row` on an MLP; `hybrid` has pp = 2, tp = 2.
#
# Some rows are alike: `bucketed` sends what `naive` sends, but during backward; the three kinds of
# servers differ in who waits. Some numbers surprise. Servers show 2.00 and 50 %: two of four ranks
# compute nothing. All pipelines have 1.30: a rank with the embedding has one block to compute, the
# second one has two. `attention` and `vocab` have 1.00 and still 35 % and 25 %: the ranks do equal
# work, most of it N times. The limits ignore learning: more asynchronous ranks make older
# gradients (`pipedream`'s first rank is N - 1 updates late, lesson 9). Norms, residual sums and
# optimizers are not in u, which counts products alone.
#
# ## Rules
#
# They are read from the table, and asserted where they compare rows:

# %%
more = {"inputs": np.tile(cases["naive"].inputs, (4, 1)), "targets": np.zeros((4 * B, T), int)}
grown = {name: STRATEGIES[name].costs.bytes(replace(cases[name], **more), 4) / moved[name]
         for name in ("naive", "1f1b", "sequence")}  # fmt: skip
print("4 x the batch, bytes:", {name: round(ratio, 2) for name, ratio in grown.items()})
assert grown["naive"] == 1 and grown["1f1b"] == 4 and grown["sequence"] > 3.9
assert useful["naive"] == 1 and moved["zero_1"] == moved["zero_2"] == moved["naive"]
assert held["zero_3"] < held["zero_2"] < held["zero_1"] < held["naive"]
assert moved["zero_3"] == 1.5 * moved["naive"] and moved["1f1b"] == min(moved[n] for n in same)
assert held["1f1b"] < held["gpipe"] and useful["1f1b"] >= useful["gpipe"]
assert useful["zb_h2"] >= useful["zb_h1"] > useful["1f1b"] and held["zb_h2"] > held["zb_h1"]
assert useful["pipedream"] > useful["zb_h2"] and held["pipedream"] > held["1f1b"]
assert useful["sequence"] == 1 and useful["attention"] < 0.5 and useful["vocab"] < 0.5

# %% [markdown]
# 1. *The model fits and the batch is large*: `bucketed`. All of it is useful, and its bytes do not
#    grow with the batch; those of pipelines and matrices do. (`naive` sends as much, later.)
# 2. *Weights fit, AdamW's state does not*: `zero_1`, then `zero_2`: less memory, no more bytes.
#    `zero_3` if weights do not fit either, for 50% more bytes.
# 3. *The layers do not fit together, or links are slow*: a pipeline. It sends least of all and
#    holds a part of everything, but its u is smaller. `1f1b`, not `gpipe`: as useful, in less
#    memory; `zb_h1` if its activations fit; `interleaved` or `zb_v` if links take 2 to 2.3 times
#    the bytes. Have many micro-batches: with N = 4 equal stages 4 leave a bubble of 43 %, 16 one of
#    16 %. `layer_split` is what a pipeline is without overlap: 25 %.
# 4. *One layer does not fit, or there are fewer examples than ranks, and links are fast*:
#    `sequence`. `attention`, `vocab`, `column` and `row` are its parts; alone they repeat the rest.
# 5. *Fast links inside a machine, slow ones between*: `hybrid`: matrices inside, layers or examples
#    across, and no more cuts of matrices and layers than memory needs (lesson 16).
# 6. *Two inputs through one network*: `siamese`, on two ranks, and data parallelism over pairs.
# 7. *Ranks of unequal speed, and a gradient may be old*: `ssp`, `downpour`, `pipedream`. No rank
#    waits; `pipedream` keeps N - r versions of weights (`pipedream_2bw` two), servers send 2 W P.
#    The price is not in the table: stale gradients, which lessons 4 and 9 measure in learning.
#
# ## A function that chooses
#
# It applies the formula for seconds (under Math) to all candidates that fit; for the bytes of a
# rank it takes the ranks' mean.


# %%
def choose(candidates, N, memory, speed, update, link):
    """Return [(seconds, bytes held, label)] of the candidates that fit, fastest first.

    candidates     {label: (strategy, case)}, of one model and batch
    memory         bytes per rank
    speed, update  multiply-adds, and parameters updated, per second and rank
    link           bytes per second that a rank sends
    """
    found = []
    for label, (name, problem) in candidates.items():
        ranks, whole = STRATEGIES[name].predict(problem, N), single_device_cost(problem).work
        most = max(cost.memory for cost in ranks)
        updated = max(cost.held["optimizer state"] for cost in ranks) / 16
        compute = 3 * whole / (N * STRATEGIES[name].useful_share(problem, N) * speed)
        if most <= memory:
            found.append((compute + updated / update + ranks[0].sent / link, most, label))
    return sorted(found)


exact = [name for name in same if STRATEGIES[name].promise == "exact"]
candidates = {name: (name, cases[name]) for name in exact}
for link, parts in ((10e9, (1, 0.36, 0.3, 0.2)), (1e8, (1, 0.2))):
    for part in parts:
        found = choose(candidates, 4, part * alone.memory, speed=4e9, update=2e8, link=link)
        best = [f"{label} {seconds * 1e3:.1f} ms" for seconds, _, label in found[:3]]
        print(f"link {link / 1e9:4.1f} GB/s, memory {part:4.0%} of one device's: {', '.join(best)}")

# %% [markdown]
# The first answer goes beyond rule 1: `zero_2` sends what `bucketed` sends, and each rank updates a
# quarter of the parameters. With less memory ZeRO's stages drop out, and what is left cuts layers.
# If links are 100 times slower, pipelines win, and the more memory there is, the more of their
# bubble can be filled.
#
# ## Measurement: is the choice right?
#
# Two ranks can be dp = 2, pp = 2 or tp = 2. Two models: *wide*, 2 blocks of width 192, with batches
# of 2 examples of 4 tokens; *narrow*, 4 blocks of width 32, with 16 examples of 32. First the
# machine's own `rates`: both ranks train the whole batch by themselves, and they sum 8 MB. Then the
# three meshes, in turn, the best of 8 rounds, so that a slow moment of the machine affects all.

# %%
SHAPES = {"wide": (32, 192, 8, 2, 4, 2), "narrow": (32, 32, 4, 4, 32, 16)}  # V, C, H, L, T, B
AXES = ("dp", "pp", "tp")


def shaped(shape, axis):
    """Return a model and batch, with the options of a mesh; a pipeline has 2 micro-batches."""
    *sizes, length, examples = shape
    words = np.random.default_rng(0).integers(0, shape[0], (examples, length))
    options = {axis: 2, "micro_batches": 2 if axis == "pp" else 1}
    model = nn.Transformer(*sizes, length, dtype="float64")
    return Case(axis, model, words, words, options=options)


def race(group, meshes, rounds=8):
    """Return {axis: the least seconds of a step}."""
    steps, seconds = {}, dict.fromkeys(AXES, np.inf)
    for axis, (_, problem) in meshes.items():
        mesh = Mesh(group, **(dict.fromkeys(AXES, 1) | {axis: 2}))
        hybrid = Hybrid(problem.model, mesh, "1f1b", problem.options["micro_batches"])
        steps[axis] = hybrid, optim.AdamW(hybrid.parameters(), 1e-3), problem
    for axis in rounds * AXES:
        hybrid, optimizer, problem = steps[axis]
        group.barrier()
        start = perf_counter()
        hybrid.backward(problem.inputs, problem.targets)
        optimizer.step()
        optimizer.zero_grad()
        seconds[axis] = min(seconds[axis], perf_counter() - start)
    return seconds


order = {}
for shape, sizes in SHAPES.items():
    meshes = {axis: ("hybrid", shaped(sizes, axis)) for axis in AXES}
    ranking = choose(meshes, 2, np.inf, **rates(meshes["dp"][1], clusters[2]))
    ranks = clusters[2].run(race, meshes)
    took = {axis: max(seconds[axis] for seconds in ranks) for axis in AXES}
    said = {axis: seconds for seconds, _, axis in ranking}  # the fastest first
    for axis in said:
        in_ms = f"{said[axis] * 1e3:5.1f} ms predicted, {took[axis] * 1e3:5.1f} measured"
        print(f"{shape:6} {axis}: {in_ms}")
    ratios = [times["tp"] / times["dp"] for times in (said, took)]
    print(f"{shape:6} tp over dp: {ratios[0]:.2f} predicted, {ratios[1]:.2f} measured")
    order[shape] = list(said)
assert order["wide"][0] == "tp" and order["narrow"][-1] == "pp"

# %% [markdown]
# The same two ranks, and what is best for one model is not for the other. In *wide* dp sums 7 MB of
# gradients and updates all of them on both ranks; tp does half of everything. In *narrow* there is
# almost nothing to sum, and by the formula dp and tp are equal. On an idle machine dp wins: the
# formula ignores norms and residual sums, done by both tp ranks, and a wait in each of 21
# all_reduces. So trust it to exclude candidates, and measure those that are close. (pp waits a
# third of the time. If other programs want the cores, that costs little: they get them. The
# measured times are therefore printed, not asserted.)


# %%
MARKS = {  # colour, marker
    "examples": (figures.FORWARD, "o"),
    "servers": (figures.UPDATE, "D"),
    "layers": (figures.BACKWARD, "s"),
    "matrices": (figures.COMMUNICATION, "^"),
    "layers and matrices": (figures.EMPHASIS, "P"),
    "branches": (figures.INK, "X"),
}


assert {record.costs.cuts for record in STRATEGIES.values()} <= set(MARKS)


def draw(plt):
    figure, axes = plt.subplots(figsize=(10, 6.5))
    places = {}  # {(height, bytes): names}: some cost the same
    for words, (color, marker) in MARKS.items():
        for name in [n for n, record in STRATEGIES.items() if record.costs.cuts == words]:
            x = moved[name] / single_device_cost(cases[name]).held["parameters"]
            places.setdefault((round(100 * held[name], 1), round(x, 2)), []).append(name)
            axes.plot(x, 100 * held[name], marker, color=color, ms=10, mec="white", zorder=3)
        axes.plot([], [], marker, color=color, ms=9, label=words)
    labels = []  # pushed up where a mark nearby has its own
    for (y, x), names in sorted(places.items()):
        at = max([y, *(1.09 * below for near, below in labels if 0.7 < near / x < 1.4)])
        labels.append((x, at))
        words = ", ".join(f"{name} {useful[name]:.0%}" for name in names)
        line = {"arrowstyle": "-", "color": figures.IDLE, "lw": 0.8, "relpos": (0, 0.5)}
        axes.annotate(words, (x, y), (x * 1.13, at), fontsize=9, va="center", arrowprops=line)
    axes.set(xscale="log", yscale="log", xlim=(0.27, 30), ylim=(12, 115))
    axes.minorticks_off()
    axes.set_xticks([0.3, 1, 3, 10], ["0.3", "1", "3", "10"])
    axes.set_yticks([12.5, 25, 50, 100], ["12.5", "25", "50", "100"])
    axes.set_xlabel("bytes that all ranks send in a step, over those of one device's parameters")
    axes.set_ylabel("held by the fullest rank, % of one device")
    title = "Four ranks, one step: less memory is paid for in bytes or in time"
    axes.set_title(f"{title}\n(after each name: the share of the ranks' time that is of use)")
    axes.legend(title="what is cut", loc="upper left", fontsize=9)
    return figure


figures.save(draw, "20_choosing")

# %% [markdown]
# ## Exercise 1: from which batch on?
#
# Data parallelism sends gradients, whatever the batch; `sequence` sends activations. Write
# `crossing(P, L, C, T)`: the number of examples, with a fraction, from which on `naive` sends less
# than `sequence`. P counts parameters; leave out what is small beside `L C T`.
#
# *Hint:* both sums of bytes are under Math. N drops out.


# %%
def crossing(P, L, C, T):
    """Return the batch, in examples, at which both send as many bytes."""
    raise NotImplementedError  # your lines here


# %%
def check_crossing(attempt):
    for blocks, width, length in [(6, 32, 16), (2, 192, 8)]:
        model, bills = nn.Transformer(64, width, 8, blocks, length, dtype="float64"), []
        for examples in (0, 1):
            problem = Case("crossing", model, *np.zeros((2, examples, length), int))
            bills.append([STRATEGIES[n].costs.bytes(problem, 4) for n in ("naive", "sequence")])
        want = (bills[0][0] - bills[0][1]) / (bills[1][1] - bills[0][1])
        given = sum(p.size for p in model.parameters()), blocks, width, length
        if not abs(attempt(*given) / want - 1) < 0.06:
            return f"(P, L, C, T) = {given}: {want:.2f} examples, not {attempt(*given):.2f}"


def one_way(P, L, C, T):
    return P / ((10 * L + 5) * C * T)


exercise.judge(1, check_crossing, crossing, tempting=[one_way])

# %% [markdown]
# ## Exercise 2: why did this break?
#
# `zero_3` cuts the batch, weights, gradients and AdamW's state into N parts. So a quarter of one
# device's memory was planned for each of four ranks:

# %%
planned, needed = alone.memory / 4, fullest["zero_3"].memory
print(f"planned {planned / 1e3:.0f} kB a rank; held {needed / 1e3:.0f} kB")
assert needed > 1.1 * planned

# %% [markdown]
# Not everything is cut: a layer must be whole while it computes, two layers' weights (the next
# one's are being gathered) and one gradient. Other strategies have other remainders, and a
# pipeline's first rank is not its fullest. Write `least_ranks(name, memory)`: the smallest N of 1,
# 2, 4 and 8 on which no rank holds more than `memory` bytes, or None.
#
# *Hint:* `STRATEGIES[name].predict(cases[name], N)` has a cost per rank, and a cost has `.memory`.


# %%
def least_ranks(name, memory):
    raise NotImplementedError  # your lines here


# %%
def check_ranks(attempt):
    for name in ("zero_3", "1f1b", "gpipe", "sequence", "attention"):
        needs = {
            N: max(c.memory for c in STRATEGIES[name].predict(cases[name], N)) for N in (1, 2, 4, 8)
        }
        for memory in alone.memory * np.array([1.1, 0.6, 0.27, 0.25, 0.18, 0.14]):
            want = next((N for N, most in needs.items() if most <= memory), None)
            got = attempt(name, memory)
            if got != want:
                return f"{name} in {memory / 1e3:.0f} kB: N = {want}, not {got}"


def by_division(name, memory):
    return next((N for N in (1, 2, 4, 8) if alone.memory / N <= memory), None)


def first_rank(name, memory):
    fits = (N for N in (1, 2, 4, 8) if STRATEGIES[name].predict(cases[name], N)[0].memory <= memory)
    return next(fits, None)


exercise.judge(2, check_ranks, least_ranks, tempting=[by_division, first_rank])

# %% [markdown]
# ## Exercise 3: how many servers?
#
# The table's limit of servers counts examples. Another limit is reached first: a server's traffic.
# In a clock each of W workers pulls and pushes the server's slice of the model's P bytes. Write
# `servers(W, P, link, seconds)`: the fewest servers such that each one's traffic takes no longer
# than a worker computes, `seconds`, if `link` bytes a second pass a server, in and out together.
#
# *Hint:* with S servers a slice has P/S bytes; W slices go out, W come in.


# %%
def servers(W, P, link, seconds):
    raise NotImplementedError  # your lines here


# %%
def check_servers(attempt):
    for W, P, link, seconds in ((8, 4e6, 1e9, 0.03), (30, 4e6, 1e9, 0.03), (2, 1e6, 1e9, 0.1)):
        want = next(S for S in range(1, 100) if 2 * W * P / S <= link * seconds)
        got = attempt(W, P, link, seconds)
        if got != want:
            return f"{W} workers, {P:.0e} bytes, {seconds} s: {want} servers, not {got}"


def pulls_alone(W, P, link, seconds):
    return int(np.ceil(W * P / link / seconds))


exercise.judge(3, check_servers, servers, tempting=[pulls_alone])

# %% [markdown]
# ## What it costs, and the next problem
#
# - **The table is for one model and one batch.** With other sizes other rows win; therefore the
#   closed forms are functions. They ignore overlap (`bucketed` hides what `naive` waits for), the
#   latency of messages, and work outside of products.
# - **u is bounded by the worst cut**: 1.30 in nine rows. A cut by cost, not by number of layers
#   (lesson 6), is the first thing to try.
# - **It says nothing about learning.** Larger batches for more data-parallel ranks, and stale
#   gradients, change what a step achieves.
#
# Here there were four ranks. Lesson 21 asks how many are worth having. And a problem is yours: a
# strategy of your own. `README.md` says how to add one; the assertion beside the table will ask for
# its row.

# %%
for cluster in clusters.values():
    cluster.close()
