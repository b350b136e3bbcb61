# %% [markdown]
# # 23. Let the machine cut: can a search find columns and rows?
#
# Lesson 11 cut two weights by hand: the first by columns, the second by rows. Four papers let a
# program decide: [GSPMD](https://arxiv.org/abs/2105.04663),
# [Tofu](https://arxiv.org/abs/1807.08887), [FlexFlow](https://arxiv.org/abs/1807.05358) and
# [PipeDream](https://doi.org/10.1145/3341301.3359646). This lesson gives all of them the same MLP.
# What does each find? The library has a file for each in `minidist/planning/`.
#
# Letters: `N` ranks, `B` examples, `C` width of input and output, `F` width between the layers, `S`
# bytes of an array; `b i o` letters of an op: `"bi,io->bo"` is `Y[b, o] = sum_i X[b, i] W[i, o]`.

# %%
from itertools import pairwise, product
from math import inf, prod

import numpy as np
from support import exercise, figures

from minidist import Cluster, Mesh, nn
from minidist.planning import Machine, flexflow, pipedream, propagate, tofu, trace
from minidist.planning.graphs.graph import Graph, Op, Value
from minidist.planning.gspmd import program as placed_program
from minidist.planning.gspmd.placement import Split
from minidist.planning.tofu import axes_of, works_of
from minidist.rng import generator

figures.arguments()
N, C, F = 2, 64, 256
SIZES, BATCHES = [C, F, C], [16, 64, 256, 1024]
ranks = Cluster(N, transport="thread")
random = generator(23, "lesson")

# %% [markdown]
# ## Problem: a small MLP has millions of cuts
#
# `trace` runs a model once and reads the graph from what its tensors recorded: values, and ops with
# an index description each; a product `"bi,io->bo"` is written `"ac,cb->ab"`. An op can be cut
# along each of its letters, a value along each of its axes. How many choices are there, if each op
# and each value is cut in two?


# %%
def graph_of(B):
    """Return the arrays of a step, and its graph."""
    model = nn.MLP(SIZES, dtype="float64")
    arrays = {name: p.data for name, p in model.named_parameters().items()}
    arrays |= {"inputs": random.standard_normal((B, C)), "targets": np.arange(B) % C}
    return model, arrays, trace(model, arrays["inputs"], arrays["targets"])


_, _, graph = graph_of(64)
for op in graph.ops:
    print(f"{op.kind:14} {op.indices:11} {', '.join(op.inputs)} -> {op.output}")
choices = prod(len(work.letters) for work in works_of(graph, N))
choices *= prod(len(axes_of(graph, name, N)) for name in graph.values)
print(f"forward and backward, two ranks: {choices:,} cuts")
assert choices > 10**7

# %% [markdown]
# ## Picture
#
#     who         is given                      looks for                       by
#     GSPMD       a few tensors' placements     what follows from them          spreading, op by op
#     Tofu        N                             fewest bytes                    dynamic programming
#     FlexFlow    rates of a machine            fewest seconds                  a random walk
#     PipeDream   seconds and bytes of layers   least time of slowest stage     dynamic programming
#
# ## Math
#
# By hand, all ranks together, in a step (8 bytes per element, P parameters):
#
#     split the batch       2 (N - 1) 8 P                all_reduce of the gradients
#     columns, then rows    2 (N - 1) 8 (B C + B C)      g: partial Y;  f: partial dX
#
# Tofu keeps nothing twice: each rank keeps one of N parts of every value, cut along one letter. If
# an op is cut along a letter, too, a value of S bytes in it makes these bytes travel:
#
#     the value is kept by this letter         0             each rank has what it needs
#     the value lacks the letter               S (N - 1)     fetched by all, or a partial sum
#     it is kept by another letter             S - S / N     each rank has 1/N of what it needs
#
# ## Code
#
# One product, forward and both products of backward: they have the same three arrays, X, W and Y
# (or their gradients), so they cost the same. All cuts of it, tried one by one:


# %%
def travels(S, term, letter, kept):
    if letter not in term:
        return S * (N - 1)
    return 0 if letter == kept else S - S // N


def fewest(n):
    """Return the fewest bytes of X W in a step, and the letters that X, W and Y are kept by."""
    terms, best = ("bi", "io", "bo"), (inf, None)
    for kept in product(*terms):
        costs = [
            sum(
                travels(8 * prod(n[x] for x in term), term, letter, own)
                for term, own in zip(terms, kept, strict=True)
            )
            for letter in "bio"
        ]
        best = min(best, (3 * min(costs), kept))
    return best


def single(n):
    """Return the graph of one product, as the library has it."""
    shapes = {
        name: tuple(n[x] for x in own) for name, own in (("X", "bi"), ("W", "io"), ("Y", "bo"))
    }
    values = {
        name: Value(name, shape, np.dtype("float64"), "result" if name == "Y" else "parameter")
        for name, shape in shapes.items()
    }
    return Graph(values, [Op("matmul", ("X", "W"), "Y", "bi,io->bo")])


for n in ({"b": 8, "i": 64, "o": 64}, {"b": 64, "i": 8, "o": 64}, {"b": 64, "i": 64, "o": 8}):
    found, kept = fewest(n)
    print(f"{n}: {found:,} bytes; X, W, Y are kept by {kept}")
    assert found == tofu(single(n), N)[1]

# %% [markdown]
# Each letter is missing in one of the three arrays. So one array travels, and the best letter is
# the one that the smallest array lacks. The MLP has two products that share an array: a choice for
# one changes the other. Dynamic programming goes through the ops in order. For each way to cut the
# values that later ops need, it keeps only the best way to cut all earlier ones.
#
# ## Measurement
#
# GSPMD's program runs here twice: first two weights are annotated, then the batch. The ranks'
# gradients are compared with one device's, and the bytes are counted. Tofu's cuts do not run: their
# bytes are computed.

# %%
HAND = {
    "two weights": {"tp": {"layers.0.weight": Split(1), "layers.1.weight": Split(0)}},
    "the batch": {"dp": {"inputs": Split(0)}},
}


def worker(group, layout, arrays):
    """Run GSPMD's program on this rank; return whole gradients and the bytes it sent."""
    mesh = Mesh(group, **{layout.axes[0]: N})
    parts = placed_program.run(layout, mesh, arrays)
    sent = getattr(mesh, layout.axes[0]).ledger.total
    return placed_program.whole(layout, mesh, parts), sent


def gspmd(annotations, model, arrays, graph):
    layout = propagate(graph, annotations)
    results = ranks.run(worker, layout, arrays)
    loss = nn.cross_entropy(model(arrays["inputs"]), arrays["targets"])
    loss.backward()
    for name, p in model.named_parameters().items():
        got = results[0][0][f"d {name}"].reshape(p.shape)
        assert np.abs(got - p.grad).max() <= 1e-9 * np.abs(p.grad).max()
        p.grad = None
    return layout, sum(sent for _, sent in results)


P = C * F + F + F * C + C
bytes_sent = {name: [] for name in (*HAND, "Tofu")}
found = {}
for B in BATCHES:
    made = graph_of(B)
    for name, annotations in HAND.items():
        layout, sent = gspmd(annotations, *made)
        bytes_sent[name].append(sent)
        if B == BATCHES[0]:
            print(f"GSPMD, {name} annotated: {[(v, kind) for v, _, kind in layout.collectives]}")
            found["GSPMD, " + name] = {
                s.op.output: [*s.cuts] for s in layout.steps if hasattr(s, "op")
            }
    cuts, least = tofu(made[2], N)
    bytes_sent["Tofu"].append(least)
    found[f"Tofu, B = {B}"] = {name: [x for x in own if x] for name, own in cuts.ops.items()}
    row = ", ".join(f"{name} {sent[-1]:,}" for name, sent in bytes_sent.items())
    print(f"B = {B:4}: {row}")
for B, sent, batch in zip(BATCHES, bytes_sent["two weights"], bytes_sent["the batch"], strict=True):
    assert sent == 2 * (N - 1) * 8 * 2 * B * C
    assert batch == 2 * (N - 1) * 8 * (P + 1)  # and the loss
assert all(least > min(cuts) for *cuts, least in zip(*bytes_sent.values(), strict=True))
assert abs(bytes_sent["Tofu"][-1] / (3 * (N - 1) * 8 * P) - 1) < 0.01

# %% [markdown]
# Two annotations give Megatron's g (`matmul.1`) and f (`d inputs`). Tofu's best plan sends more
# than the better cut by hand, at every B. It searches among other plans: by hand, ranks keep whole
# copies, of the inputs or of the weights. Tofu keeps nothing twice, so it sends what a rank lacks:
# with 1,024 examples about 3 P numbers, as ZeRO 3 does (lesson 5), where copies need 2 P. Still,
# nobody told it about columns, rows or examples:

# %%
KINDS = {"a": "examples", "b": "columns", "c": "rows"}  # of "ac,cb->ab": what `trace` writes


def in_words(ops):
    """Return how the two products are cut."""
    return [KINDS[ops[f"matmul.{i}"][0]] if ops[f"matmul.{i}"] else "whole" for i in (0, 1)]


for who, ops in found.items():
    print(f"{who:22} {' and '.join(in_words(ops))}")
assert in_words(found[f"Tofu, B = {BATCHES[0]}"]) == ["columns", "rows"]
assert in_words(found[f"Tofu, B = {BATCHES[-1]}"]) == ["examples", "examples"]

# %% [markdown]
# FlexFlow and PipeDream count seconds, so they need a machine: 5 GFLOP/s and 1 GB/s. FlexFlow cuts
# samples, attributes and parameters, and places whole operators (`SOAP`). To cut by rows it has to
# make partial sums: we allow it (`R`, which its paper does not have).

# %%
machine = Machine(ranks=N, per_node=N, flops=5e9, memory=4e9, link=1e9, network=1e9, latency=1e-5)


def profile(B):
    """Return (seconds, bytes of the output, bytes of the parameters) per layer."""
    return [(6 * B * n * m / machine.flops, 8 * B * m, 8 * (n * m + m)) for n, m in pairwise(SIZES)]


for B in (BATCHES[0], BATCHES[-1]):
    graph = graph_of(B)[2]
    strategy, seconds = flexflow(graph, machine, seed=0, budget=600, dims="SOAPR")
    ops = {name: [x for x, _ in cut.degrees] for name, cut in strategy.items()}
    found[f"FlexFlow, B = {B}"] = ops
    print(f"B = {B:4}: FlexFlow {seconds * 1e3:.3f} ms: {' and '.join(in_words(ops))}", end="; ")
    stages, slowest = pipedream(profile(B), N, machine.link)
    found[f"PipeDream, B = {B}"] = stages
    print(f"PipeDream {slowest * 1e3:.3f} ms: stages (first, last + 1, replicas) {stages}")
    assert in_words(ops) == in_words(found[f"Tofu, B = {B}"]) and stages == [(0, 2, 2)]

# %% [markdown]
# FlexFlow finds the same cuts as Tofu. PipeDream cuts no layer: of two stages and two replicas, it
# takes the replicas.


# %%
def draw(plt):
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.8), width_ratios=[2, 3])
    figure.suptitle("Four papers cut the same MLP")
    colors = {"two weights": figures.BACKWARD, "the batch": figures.FORWARD, "Tofu": figures.INK}
    labels = {"two weights": "two weights annotated", "the batch": "the batch annotated"}
    for name, sent in bytes_sent.items():
        label = labels.get(name, "Tofu: keeps nothing twice")
        left.plot(BATCHES, sent, "o-", color=colors[name], label=label)
    left.set(xscale="log", yscale="log", xlabel="examples", ylabel="bytes per step, all ranks")
    left.set_xticks(BATCHES, BATCHES)
    left.minorticks_off()
    left.set_title("Which cut sends least depends on the batch")
    left.legend()
    tints = {"examples": figures.FORWARD, "columns": figures.BACKWARD, "rows": figures.UPDATE}
    tints |= {"whole": figures.IDLE}
    papers = ["GSPMD", "Tofu", "FlexFlow", "PipeDream"]
    ends = [who for who in found if not who.endswith((" 64", " 256"))]
    shown = {who: found[who] for who in sorted(ends, key=lambda n: papers.index(n.split(",")[0]))}
    for row, own in enumerate(shown.values()):
        for column in (0, 1):
            if isinstance(own, list):  # PipeDream's stages
                at = next(k for k, (a, b, _) in enumerate(own) if a <= column < b)
                several = own[at][2] > 1
                words = f"{own[at][2]} replicas" if several else f"stage {at}"
                tint = figures.FORWARD if several else figures.COMMUNICATION
            else:
                words = in_words(own)[column]
                tint = tints[words]
            right.barh(row, 0.94, 0.8, column, align="center", color=tint)
            place = {"ha": "center", "va": "center", "color": "white"}
            right.text(column + 0.47, row, words, **place)
    right.set_yticks(range(len(shown)), shown)
    right.set_xticks([0.47, 1.47], ["first product", "second product"])
    right.tick_params(length=0)
    right.invert_yaxis()
    for side in ("left", "bottom"):
        right.spines[side].set_visible(False)
    right.set_title("What each of them cuts")
    return figure


figures.save(draw, "23_let_the_machine_cut")

# %% [markdown]
# ## Exercise 1: where do the two cuts by hand cross?
#
# Write `crossing(widths)`: the smallest batch for which splitting the batch sends fewer bytes than
# columns and rows, for an MLP with these three widths. Do not count the loss.
#
# *Hint:* both formulas of Math have `2 (N - 1) 8`. What is `B C + B C` if input and output differ?


# %%
def crossing(widths):
    """Return the smallest batch."""
    raise NotImplementedError  # your line here


# %%
def check_crossing(attempt):
    """Return what is wrong, or None."""
    for widths in ([64, 256, 64], [8, 32, 24], [100, 10, 20]):
        c, f, out = widths
        parameters = c * f + f + f * out + out
        want = next(B for B in range(1, 10**6) if parameters < B * (c + out))
        if (got := attempt(widths)) != want:
            return f"widths {widths}: {want} examples, not {got}"


def without_biases(widths):
    return widths[0] * widths[1] * 2 // (widths[0] + widths[2])


def g_alone(widths):
    c, f, out = widths
    return (c * f + f + f * out + out) // out + 1


exercise.judge(1, check_crossing, crossing, tempting=[without_biases, g_alone])

# %% [markdown]
# ## Exercise 2: why did this break?
#
# Somebody annotates both weights by columns. The gradients are right, but more travels:

# %%
made = graph_of(16)
columns = {"tp": {"layers.0.weight": Split(1), "layers.1.weight": Split(1)}}
layout, sent = gspmd(columns, *made)
print(f"{sent:,} bytes, not {bytes_sent['two weights'][0]:,}:", layout.collectives)
assert sent > bytes_sent["two weights"][0]

# %% [markdown]
# Write `axes(depth)`: the axis that each weight of an MLP of `depth` layers, all of the same width,
# is split by, such that the fewest values travel. `depth` is even.
#
# *Hint:* a product that is cut by rows needs X in parts. Which cut of the product before it leaves
# exactly these parts?


# %%
def axes(depth):
    """Return a list of 0 (rows) and 1 (columns)."""
    raise NotImplementedError  # your line here


# %%
def moves(own):
    """Return how many values travel."""
    model = nn.MLP([8] * (len(own) + 1), dtype="float64")
    annotated = {f"layers.{i}.weight": Split(axis) for i, axis in enumerate(own)}
    return len(
        propagate(trace(model, np.ones((4, 8)), np.zeros(4, int)), {"tp": annotated}).collectives
    )


def check_axes(attempt):
    for depth in (2, 4):
        want = min(moves(own) for own in product((0, 1), repeat=depth))
        if (got := moves(attempt(depth))) != want:
            return f"{depth} layers: {got} values travel; {want} are possible"


def all_columns(depth):
    return [1] * depth


def rows_first(depth):
    return [0, 1] * (depth // 2)


exercise.judge(2, check_axes, axes, tempting=[all_columns, rows_first])

# %% [markdown]
# ## Exercise 3: PipeDream's choice for two ranks
#
# Two ranks are either two stages, or two replicas of one stage. k replicas take turns; their sum of
# gradients takes `2 (k - 1) w / bandwidth` seconds for w bytes of parameters, while they compute.
# Write `fastest(seconds, parameters, bandwidth)`: the seconds per minibatch of the better choice.
# The activations are so small that they cost nothing.
#
# *Hint:* the slowest stage counts. Two replicas finish two minibatches in the longer of two times.


# %%
def fastest(seconds, parameters, bandwidth):
    """Return seconds per minibatch; the lists have an entry for each layer."""
    raise NotImplementedError  # your lines here


# %%
def check_fastest(attempt):
    draws = generator(3, "profiles")
    for _ in range(20):
        seconds, parameters = draws.integers(1, 20, (2, 4)).tolist()
        layers = [(t, 0, w) for t, w in zip(seconds, parameters, strict=True)]
        want = float(pipedream(layers, 2, 4)[1])
        if not abs((got := attempt(seconds, parameters, 4)) - want) < 1e-9:
            return f"seconds {seconds}, parameters {parameters}: {want:g} s, not {got:g} s"


def two_stages(seconds, parameters, bandwidth):
    return min(max(sum(seconds[:i]), sum(seconds[i:])) for i in range(1, len(seconds)))


def two_replicas(seconds, parameters, bandwidth):
    return max(sum(seconds), 2 * sum(parameters) / bandwidth) / 2


exercise.judge(3, check_fastest, fastest, tempting=[two_stages, two_replicas])

# %% [markdown]
# ## What it costs, and the next problem
#
# - **A search finds the best of what it can say.** Tofu cannot keep a value twice, so it fetches
#   parameters as ZeRO-3 does. FlexFlow knows replicas; PipeDream knows only stages and replicas.
# - **It is as good as what it counts.** Bytes are not seconds; seconds come from rates and a
#   simulator. GSPMD counts nothing: a person annotates.
# - **Halves of halves may miss the best.** For 4 ranks Tofu cuts in two, and then each half in two.
#   With 8 examples, an MLP of widths 4, 12 and 16 takes 7,680 bytes instead of 7,296
#   (`tests/planning/test_tofu.py`): the first step does not know the second.
#
# A real run has all of these axes at once, and its plan was made by people. Lesson 24 reads one.

# %%
ranks.close()
