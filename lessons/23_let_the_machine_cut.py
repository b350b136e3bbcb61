# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
#   minidist: {lesson: 23, minutes: 25, needs: [3, 11], leads_to: [23b], lab: none}
# ---

# %% [markdown]
# (lesson-23)=
# # 23. Let the machine cut
#
# **Question.** [Lesson 11](11_column_and_row.py) cut two weights by hand. If you say how *one*
# array is cut, can a program find all other cuts, and what has to travel?
#
# You need columns, rows and [data parallelism](03_data_parallel.py). New words:
# [propagation](pages/glossary.md#propagation), [partial sum](pages/glossary.md#partial-sum).
# Letters: $N$ ranks; $B$ examples; $C$ width of input and output, $F$ between the layers; $S$ bytes
# of an array; $P$ parameters.

# %% tags=["setup", "hide-input"]
from math import prod

import numpy as np
from support import begin, exercise, figures

from minidist import Cluster, Mesh, nn
from minidist.planning import gspmd, propagate, tofu, trace
from minidist.planning.gspmd import Split
from minidist.planning.tofu import axes_of, works_of

begin()
N, C, F, BATCHES = 2, 64, 256, (16, 64, 256, 1024)
ranks, model = Cluster(N, "thread"), nn.MLP([C, F, C], dtype="float64")
X = np.random.default_rng(0).standard_normal((max(BATCHES), C))
graphs = {B: trace(model, X[:B], np.arange(B) % C) for B in BATCHES}

# %% [markdown]
# ## Problem: an MLP of two layers has 47,775,744 cuts
#
# `trace` runs a model once, and reads its graph from what the tensors recorded. An op has a letter
# for each axis: `ac,cb->ab` is a product of inputs[a, c] and a weight[c, b]. It can be cut along
# each of its letters, a value along each of its axes. A step of a small MLP has 16 ops and 12
# values; the heading has the product of all choices.
#
# ## Idea: a cut spreads, and where a letter is missing there is a sum
#
# [GSPMD](https://arxiv.org/abs/2105.04663) asks a person for the cut of a few arrays, even one.
#
# - An op with an operand that is split along a letter is cut by this letter. Its other operands
#   that have the letter are split along it, too. So the cut spreads, from op to op.
# - An operand *without* the letter takes part in every rank's piece. If it is the output, each rank
#   has a partial sum of it. If it is an input, each rank has a partial sum of its *gradient*.


# %%
def spread(graph, split):
    """Return {op's output: the letter that cuts it}; split: {value: the axis that is split}."""
    split, cut, before = dict(split), {}, -1
    while len(cut) > before:  # until nothing changes
        before = len(cut)
        for op in graph.ops:
            for name, term in op.operands:
                if name in split and op.output not in cut and term[split[name]] not in op.whole:
                    cut[op.output] = letter = term[split[name]]
                    for other, letters in op.operands:
                        if letter in letters:
                            split.setdefault(other, letters.index(letter))
    return cut


def sums(graph, cut):
    """Return the values that have to be summed over the ranks; "d x": the gradient of x."""
    every = [(op.output, name, term) for op in graph.ops for name, term in op.operands]
    lack = [(made, name) for made, name, term in every if made in cut and cut[made] not in term]
    return [name if name == made else f"d {name}" for made, name in lack]


# %% [markdown]
# :::{admonition} Predict before you run
# The first weight is annotated: split by columns, letter b. Which other ops are cut, and along
# what? Which two values are summed? And if the batch is annotated instead?
# :::

# %% tags=["hide-output"]
ONE = {"a weight": {"layers.0.weight": 1}, "the batch": {"inputs": 0}}
for op in graphs[16].ops:
    print(f"{op.kind:14} {op.indices:9} of {', '.join(op.inputs)} -> {op.output}")
for what, split in ONE.items():
    cut = spread(graphs[16], split)
    print(f"{what} annotated: {cut}\n    summed: {', '.join(sums(graphs[16], cut))}")

# %% [markdown]
# From *one* annotated weight follow the rows of the second, and Megatron-LM's $g$ (`matmul.1`) and
# $f$ (`d inputs`). From the batch follows data parallelism: the gradients of all parameters are
# summed. Is it right? [The library's version](../minidist/planning/gspmd.py) returns a
# program that ranks run. (If two letters compete, it votes; and it knows all_gather.)


# %%
def worker(group, layout, arrays):
    mesh = Mesh(group, tp=N)
    parts = gspmd.execute(layout, mesh, arrays)
    return mesh.tp.ledger.total, gspmd.whole(layout, mesh, parts)


travels = {what: [] for what in ONE}
for B, graph in graphs.items():
    arrays = {name: p.data for name, p in model.named_parameters().items()}
    arrays |= {"inputs": X[:B], "targets": np.arange(B) % C}
    nn.cross_entropy(model(X[:B]), arrays["targets"]).backward()
    for what, split in ONE.items():
        layout = propagate(graph, {"tp": {name: Split(axis) for name, axis in split.items()}})
        results = ranks.run(worker, layout, arrays)
        for name, p in model.named_parameters().items():
            assert np.allclose(results[0][1][f"d {name}"].reshape(p.shape), p.grad, rtol=1e-9)
        travels[what].append(sum(sent for sent, _ in results))
        summed = sums(graph, spread(graph, split))
        assert sorted(summed) == sorted(name for name, _, _ in layout.collectives)
        S = sum(graph.values[name.removeprefix("d ")].nbytes for name in summed)
        assert travels[what][-1] == 2 * (N - 1) * S
    model.zero_grad()
print("gradients as on one device, and each sum sends 2 (N - 1) S bytes")

# %% [markdown]
# ## Which annotation sends less?
#
# :::{admonition} Predict before you run
# The MLP has 33,088 parameters, and $C$ is 64. Which annotation sends fewer bytes for 16 examples,
# which for 1,024? From which batch on?
# :::
# :::{dropdown} Where does the number come from?
# The batch: all $P$ gradients are summed, $2 (N-1) 8 P$ bytes (the loss: 16 more). A weight:
# `matmul.1` and `d inputs`, $2 (N-1) 8 (B C + B C)$ bytes. Equal for $B = P/(2 C) = 258.5$.
# :::
#
# A person has to choose. [Tofu](https://arxiv.org/abs/1807.08887) searches: it cuts every op and
# every value, such that the fewest bytes travel. It keeps *nothing* twice: a rank has one of $N$
# parts of each value. So an op that is cut along a letter costs, for each operand of $S$ bytes:
#
# | the operand | bytes | why |
# |---|---|---|
# | is kept by this letter | 0 | each rank has its part |
# | lacks the letter | $S (N-1)$ | all fetch it, or it is a partial sum |
# | is kept by another letter | $S - S/N$ | a rank has $1/N$ of what it needs |
#
# Dynamic programming finds the least sum: op after op, for each way to keep the values that later
# ops need, only the best way to cut all earlier ops is remembered.
#
# :::{admonition} Predict before you run
# Tofu tries all cuts. Does its best plan send fewer bytes than the better annotation, or more?
# :::

# %% tags=["hide-output"]
choices = prod(len(work.letters) for work in works_of(graphs[16], N))
print(f"{choices * prod(len(axes_of(graphs[16], name, N)) for name in graphs[16].values):,} cuts")
plans = {B: tofu(graph, N) for B, graph in graphs.items()}
travels["Tofu, no copies"] = [sent for _, sent in plans.values()]
for what, sent in {"examples": BATCHES, **travels}.items():
    print(f"{what:15}", *(f"{number:9,}" for number in sent))

# %% [markdown]
# More, at every $B$: it searches among other plans. Annotated, ranks keep whole copies of inputs or
# weights. Tofu fetches weights when they are needed, about $3 P$ numbers for large batches, as
# [ZeRO 3](05_zero.py) does. Still, it finds columns, rows and examples, and nobody told it.


# %% tags=["hide-input"]
def draw(plt):
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.6), width_ratios=[2, 3])
    names = {"a": "examples", "b": "columns", "c": "rows", None: "whole"}
    tints = {"a": figures.OWN, "b": figures.BACKWARD, "c": figures.UPDATE, None: figures.SAME}
    rows = {f"{what}\nannotated": spread(graphs[16], split) for what, split in ONE.items()}
    rows |= {f"Tofu,\nB = {B}": {k: x for k, (x,) in plans[B][0].ops.items()} for B in (16, 1024)}
    for row, cut in enumerate(rows.values()):
        for column, op in enumerate(graphs[16].ops):
            letter = cut.get(op.output)
            right.barh(row, 0.94, 0.8, column, align="center", color=tints[letter])
            words = f"{op.output.partition('.')[0].replace('_', chr(10))}\n{names[letter]}"
            right.text(column + 0.47, row, words, ha="center", va="center", fontsize=9)
    right.set_yticks(range(4), rows)
    right.set(xticks=[], title="from left to right: what each op is cut along", ylim=(3.5, -0.5))
    for (what, sent), color in zip(travels.items(), ("b", "a", None), strict=True):
        left.loglog(BATCHES, sent, "o-", color=tints[color] if color else figures.INK)
        left.text(1200, sent[-1], what, va="center")
    for letter, *ends in (("b", 16, 258.5), ("a", 258.5, 1024)):
        left.axvspan(*ends, color=tints[letter], alpha=0.2, lw=0)
    left.set(title="bytes of a step; shaded: who sends least", xlabel="examples")
    left.minorticks_off()
    left.set_xticks(BATCHES, BATCHES)
    return figure


figures.show(
    draw,
    "23_let_the_machine_cut",
    caption="Left: the ground shows which annotation sends least. Right: who cuts what.",
    alt="One annotated weight sends least up to 258 examples, then the batch; Tofu sends more. It "
    "cuts 16 examples by columns and rows, 1,024 by examples.",
)

# %% [markdown]
# ## Exercise 1: where do the two annotations cross?
#
# Write `crossing(widths)`: the smallest batch for which the annotated batch sends fewer bytes than
# columns and rows, for an MLP with these three widths. The loss does not count.


# %% tags=["exercise"]
def crossing(widths):
    """Return a whole number of examples; widths: [input, between the layers, output]."""
    raise NotImplementedError  # your line here


exercise.judge("23.1", crossing)

# %% [markdown]
# ## Exercise 2: why did this break?
#
# Somebody annotates both weights by columns. The gradients are right, but four values travel, no
# longer two. Write `axes(depth)`: the axis that each weight of an MLP of `depth` layers, all of one
# width, is split by, such that the fewest values travel. `depth` is even.


# %% tags=["exercise"]
def axes(depth):
    """Return a list of 0 (rows) and 1 (columns)."""
    raise NotImplementedError  # your line here


exercise.judge("23.2", axes)

# %% [markdown]
# ## Exercise 3: Tofu's price of one product
#
# A step has three products of `X[b, i]`, `W[i, o]`, `Y[b, o]` or their gradients. Write `fewest`:
# the fewest bytes that they cost by the table above, if each array is kept along one letter.


# %% tags=["exercise"]
def fewest(b, i, o, N):
    """Return bytes, 8 for each number; the lengths b, i and o are multiples of N."""
    raise NotImplementedError  # your lines here


exercise.judge("23.3", fewest)
ranks.close()

# %% [markdown]
# ## At work
#
# | here | PyTorch | Megatron-LM | DeepSpeed | JAX |
# |---|---|---|---|---|
# | an annotation | `distribute_tensor` | | | `NamedSharding` |
# | `Split(1)` | `Shard(1)` | | | `PartitionSpec(None, "tp")` |
# | `propagate` | DTensor | | | `jit` |
#
# **What it costs.** GSPMD obeys a bad annotation. A search is as good as what it counts: bytes are
# not seconds. [Alpa](https://arxiv.org/abs/2201.12023) searches stages, too.
#
# **Next:** searches that count seconds. [Lesson 23b](23b_flexflow_and_pipedream.py).
