# %% [markdown]
# # 16. Several axes at once: data x pipeline x tensor, and two more
#
# Examples can be split over ranks (lesson 3), layers (lessons 6 to 10), and matrices (lessons 11 to
# 13). Lesson 13 ended where tensor parallelism does: at the edge of a machine. To use more ranks,
# all three splits are done at once, on a grid of ranks. The library's version is
# `minidist/hybrid.py`; the analysis is from Narayanan et al. (SC 2021), section 3.
#
# Letters: `dp x pp x tp` ranks, split by data, pipeline and tensor; `L` blocks; `B` examples of `T`
# tokens in the batch, `C` the width, `V` words; `e` bytes a number, `S = B T C e` the bytes of one
# activation of the whole batch, `P` the bytes of all parameters; `m` micro-batches in a pipeline.

# %%
from functools import partial
from itertools import product

import numpy as np
from support import exercise, figures

from minidist import Cluster, Mesh, nn, optim
from minidist.autograd.kept import kept_bytes
from minidist.datasets import Batch, text
from minidist.hybrid import Hybrid
from minidist.pipeline_parallel import Pipeline, programs
from minidist.planning import simulate
from minidist.rng import Randomness
from minidist.tensor_parallel import ParallelTransformer, vocab_parallel

figures.arguments()
eight = Cluster(8)
topics = text()
V, C, HEADS, L, T, B, e = topics.vocab, 32, 8, 6, 16, 16, 8
windows, nexts = topics.windows(T)
inputs, targets = windows[:B], nexts[:B]
S = B * T * C * e


def fresh():
    return nn.Transformer(V, C, HEADS, L, T, 0, "float64", dropout=0.1, tied=True)


# %% [markdown]
# ## Problem
#
# One batch of 16 examples, 8 ranks. They can be arranged in ten ways. We do forward and backward in
# each, compare all gradients with one device's, and count the bytes that every axis sends, a rank's
# parameters, and the most that it keeps for backward.

# %%
MESHES = [(8 // (pp * tp), pp, tp) for tp, pp in product((1, 2, 4, 8), repeat=2) if pp * tp <= 8]
AXES = ("dp", "pp", "tp")
GRAIN = 2  # examples in a micro-batch, whatever the mesh


def on_mesh(group, mesh, model):
    """Return this rank's Hybrid and Mesh."""
    mesh = Mesh(group, **dict(zip(AXES, mesh, strict=True)))
    return Hybrid(model, mesh, "1f1b", B // (mesh.dp.size * GRAIN)), mesh


def one_batch(group, mesh, model):
    """Return (loss, gradients), {axis: bytes sent}, bytes of (parameters, activations)."""
    hybrid, mesh = on_mesh(group, mesh, model)
    (stage,), peak = hybrid.pipeline.stages, [0]

    def watched(i, forward=stage.forward):
        forward(i)
        peak.append(kept_bytes(*stage.outputs.values()))

    stage.forward = watched
    loss = hybrid.backward(Batch(inputs, targets))
    sent = {name: getattr(mesh, name).ledger.total for name in mesh.axes}
    sent["pp"] += sum(g.ledger.total for g in hybrid.pipeline.shared.values() if g is not None)
    held = sum(p.data.nbytes for p in hybrid.parameters()), max(peak)
    gradients = hybrid.whole({name: p.grad for name, p in hybrid.named_parameters().items()})
    return (loss, gradients), sent, held


alone = fresh()
loss = nn.cross_entropy(alone(inputs, Randomness(0, 0, np.arange(B))), targets)
loss.backward()
want = {name: p.grad.copy() for name, p in alone.named_parameters().items()}
P = sum(p.data.nbytes for p in alone.parameters())


def error(got, want=want):
    """Return the largest difference from one device, relative to each array's largest element."""
    return max(abs(got[name] - want[name]).max() / abs(want[name]).max() for name in want)


sent, held = {}, {}
for mesh in MESHES:
    results, moved, sizes = zip(*eight.run(one_batch, mesh, fresh()), strict=True)
    assert all(abs(part - loss.item()) < 1e-12 and error(got) < 1e-9 for part, got in results)
    sent[mesh] = {axis: sum(by_axis[axis] for by_axis in moved) for axis in AXES}
    held[mesh] = np.max(sizes, axis=0)
    total = sum(sent[mesh].values())
    print(f"dp x pp x tp = {' x '.join(map(str, mesh))}: {total / 1e6:5.1f} MB sent in a step")
assert sum(sent[1, 1, 8].values()) > 24 * sum(sent[1, 8, 1].values())

# %% [markdown]
# The same gradient on every mesh, and up to 25 times the bytes. Bytes are not everything: a mesh
# that sends least may wait most, or hold most. This lesson counts all three.
#
# ## Picture
#
# 2 x 2 x 2. A rank with the coordinates (d, p, t) has the number `(d pp + p) tp + t`: ranks with
# neighbouring numbers, which sit in one machine, are neighbours on the tensor axis, "tp fastest".
#
#                   first half of the layers        second half of the layers
#                     half of     half of             half of     half of
#                    matrices    matrices            matrices    matrices
#     first half of
#     the batch      rank 0 <-tp-> rank 1   <-pp->   rank 2 <-tp-> rank 3      machine 0
#                      ^             ^                 ^             ^
#                      dp            dp                dp            dp
#                      v             v                 v             v
#     second half    rank 4 <-tp-> rank 5   <-pp->   rank 6 <-tp-> rank 7      machine 1
#
# Rank 2 communicates with 3 (tp), with 0 (pp), with 6 (dp), and with no other rank.
#
# ## Math
#
#     dp   dw = sum_d dw_d                    examples: gradients of the same part, once a step
#     pp   dE = dE_first + dE_last            layers: only a tied embedding E is summed
#     tp   dX = sum_t dX_t, Y = sum_t Y_t     matrices: inside the layers, in every micro-batch
#
# The sums run over different indices, so their order does not matter, and none needs a factor: the
# loss is divided once, by the targets of the whole batch. (With the sequence split, lesson 13, one
# more: partial gradients over tp.)
#
# ## Code
#
# So no axis has to know about the others. Each gets its own group, and that is the composition:


# %%
def our_gradients(group, mesh, model):
    """Return {name: gradient of this rank's part}, of the whole batch."""
    dp, pp, tp = mesh
    mesh = Mesh(group, dp=dp, pp=pp, tp=tp)
    model = ParallelTransformer(model, mesh.tp)  # matrices
    loss = partial(vocab_parallel.cross_entropy, group=mesh.tp, vocab=model.vocab)
    m = B // (dp * GRAIN)
    pipeline = Pipeline(model, mesh.pp, "1f1b", m, loss=loss)  # layers
    mine = Batch(inputs, targets).share(mesh.dp.rank, dp)  # examples
    pipeline.run(mine.micro_batches(m))
    named = pipeline.named_parameters()
    return {name: mesh.dp.all_reduce(p.grad, label=name) for name, p in named.items()}


def librarys_gradients(group, mesh, model):
    hybrid, _ = on_mesh(group, mesh, model)
    hybrid.backward(Batch(inputs, targets))
    return {name: p.grad for name, p in hybrid.named_parameters().items()}


ours = eight.run(our_gradients, (2, 2, 2), fresh())
library = eight.run(librarys_gradients, (2, 2, 2), fresh())
for mine, its in zip(ours, library, strict=True):
    assert mine.keys() == its.keys()
    assert all((mine[name] == its[name]).all() for name in its), "bit for bit"
print("our lines leave the library's bits on every rank")

# %% [markdown]
# ## Measurement: what each axis costs
#
# All ranks together, in one step:
#
#     tp   (tp-1) ((8 L + 4) S + 6 B T e)     4 all_reduces a block, 2 for embedding and head;
#                                             3 of a number per position in the loss (lesson 12)
#     pp   2 (pp-1) S tp  +  2 dp E           X there, dX back, at each of pp - 1 cuts, from each tp
#                                             rank the same; if pp > 1, the sum of dE
#     dp   2 (dp-1) Q                         one all_reduce of Q, all that pp x tp ranks hold
#
# Q is P, but with norms, biases after the rows, and positions (R bytes) counted tp times, and with
# the embedding twice if pp > 1, and padded to a multiple of tp words. The loss itself, a number, is
# summed over pp and dp.


# %%
def formula(dp, pp, tp):
    """Return the bytes that all ranks send per axis."""
    E = -(-V // tp) * tp * C * e
    R = (L * 6 * C + 2 * C + T * C) * e
    Q = (P - V * C * e - R) + tp * R + E * (2 if pp > 1 else 1)
    return {
        "dp": 2 * (dp - 1) * Q + 16 * (dp - 1) * pp * tp,
        "pp": 2 * (pp - 1) * S * tp + (2 * dp * E if pp > 1 else 0) + 16 * (pp - 1) * dp * tp,
        "tp": (tp - 1) * ((8 * L + 4) * S + 6 * B * T * e),
    }


bubbles = {}
print("dp pp tp |  kB sent:  dp      pp      tp | kB a rank: parameters, activations | bubble")
for mesh in MESHES:
    dp, pp, tp = mesh
    m = B // (dp * GRAIN)
    bubbles[mesh] = float(simulate(programs("1f1b", pp, m)).bubble)
    assert sent[mesh] == formula(*mesh), (mesh, sent[mesh], formula(*mesh))
    assert abs(bubbles[mesh] - (pp - 1) / (m + pp - 1)) < 1e-12
    kB = " ".join(f"{sent[mesh][axis] / 1e3:7.0f}" for axis in AXES)
    memory = "{:11.0f} {:12.0f}".format(*(held[mesh] / 1e3))
    print(f"{dp:2} {pp:2} {tp:2} | {kB:>29} | {memory:>34} | {bubbles[mesh]:6.2f}")

# %% [markdown]
# Read it by columns.
#
# - *dp* sends what depends on P, not on the batch, once a step. It splits no parameters. `Hybrid`
#   begins with a stage when its last backward ends, so with several chunks per rank most of it is
#   sent during backward (`pipeline_parallel/reduction.py`).
# - *pp* sends least: activations at the cuts, not in each layer. But the bubble,
#   `(pp-1)/(m+pp-1)` of all time, grows with pp; m is `B/(2 dp)`, 2 examples to a micro-batch.
#   (The paper divides by the time without a bubble: `(p-1)/m`; section 3.3.1, with t = 1.)
# - *tp* has no bubble and splits nearly all parameters and most activations, but sends over `8 L S`
#   for each rank more, and waits for it. (The paper's `8 bsh (t-1)/t`, section 3.2, is per layer,
#   device and micro-batch.)
# - Activations do not shrink by pp: the first rank keeps `pp` micro-batches (lesson 8).
#
# ## The same formulas at size
#
# Now 64 ranks in machines of 8, a model of 52 billion parameters: L = 64, C = 8192, T = 2048, 64
# examples, one to a micro-batch, 16 bits a number and 16 bytes a parameter with AdamW's state. We
# assume, per rank, 300 GB/s inside a machine, 50 GB/s between machines, 156 Tflop/s and 80 GB. An
# axis is fast if its groups are within a machine; else its sums go round one ring, which leaves a
# machine by one rank's link. (`levels`: a sum over tp on two levels, so that the ranks of a machine
# send an eighth each, by their own links.) The sum over dp runs during backward (lesson 3) of the
# last micro-batch, because no gradient is complete before; everything else waits.


# %%
def at_size(dp, pp, tp, depth=64, width=8192, examples=64, between=50e9, levels=False):
    """Return (seconds of a step, GB of a rank)."""
    weights, m = 12 * depth * width**2, examples // dp
    x = 2 * 2048 * width  # bytes of X[1, T, C]
    link = [300e9 if stride <= 8 else between for stride in (tp, tp * pp, tp * pp * dp)]
    compute = 6 * weights * examples * 2048 / 64 / 156e12
    per_byte = (tp - 1) / tp / link[0]
    if levels and tp > 8:
        per_byte = 7 / 8 / 300e9 + (1 - 8 / tp) / 8 / between
    over_tp = 8 * depth / pp * per_byte * m * x
    over_pp = (pp > 1) * 2 * m * x / link[1]
    over_dp = 2 * (dp - 1) / dp * 2 * weights / (pp * tp) / link[2]
    hidden = compute * 2 / 3 / m  # the last backward
    seconds = compute * (m + pp - 1) / m + over_tp + over_pp + max(0, over_dp - hidden)
    in_flight = min(m, pp) * depth / pp  # blocks' activations, of (10 + 24/tp) / 2 x: lesson 13
    return seconds, (16 * weights / (pp * tp) + in_flight * x / 2 * (10 + 24 / tp)) / 1e9


sizes = [(pp, tp) for pp, tp in product([1, 2, 4, 8, 16, 32, 64], repeat=2) if pp * tp <= 64]
table = {(64 // (pp * tp), pp, tp): at_size(64 // (pp * tp), pp, tp) for pp, tp in sizes}
ranking = sorted(table, key=lambda mesh: table[mesh][0])
fitting = [mesh for mesh in ranking if table[mesh][1] < 80]
for mesh in [*fitting[:3], (8, 1, 8), (2, 2, 16), (1, 64, 1), (1, 1, 64), (64, 1, 1)]:
    seconds, memory = table[mesh]
    fits = "" if memory < 80 else "  does not fit"
    print(f"{' x '.join(map(str, mesh)):10} {seconds:5.1f} s a step, {memory:4.0f} GB a rank{fits}")
two_levels = at_size(2, 2, 16, levels=True)[0]
print(f"2 x 2 x 16 {two_levels:5.1f} s a step, if sums over tp are on two levels")
assert fitting[:2] == [(4, 2, 8), (2, 4, 8)] and table[2, 4, 8][0] < two_levels
narrow, wide = ([table[mesh][0] for mesh in table if (mesh[2] > 8) == w] for w in (False, True))
assert max(narrow) < min(wide)
slower = [at_size(*mesh, between=25e9)[0] for mesh in fitting[:2]]
assert abs(slower[0] - slower[1]) < 0.01 < table[2, 4, 8][0] - table[4, 2, 8][0]

# %% [markdown]
# The rules of thumb, and the paper's takeaways 1 and 2 (sections 3.2 and 3.3), follow from it:
#
# 1. *tp inside a machine*, and no wider: its bytes per rank are the most, and each layer waits.
#    (With sums on two levels, and a link for each rank, a wider tp loses less: the last line.)
# 2. *pp across machines*, until the model fits: its bytes are the fewest, its bubble grows.
# 3. *dp with all ranks that are left*: it sends once a step, in part during backward. So no more tp
#    x pp than memory needs: 4 x 2 x 8 before 2 x 4 x 8, and 8 x 1 x 8 if only it fitted. (At 25
#    GB/s between machines the first two are equal: over dp the first sends three times the bytes.)
#
# In a rank's number tp is therefore the fastest axis, and dp, which can hide some of its bytes, the
# slowest; `Mesh` takes them in this order. (Attention's T x T probabilities are taken as recomputed
# here, as `autograd/attention.py` does beyond 128 positions: hence only 10 + 24/tp.)


# %%
def draw(plt):
    figure, panels = plt.subplots(1, 3, figsize=(11.5, 5.2), sharey=True, width_ratios=[5, 4, 2])
    figure.suptitle("Ten meshes of eight ranks, one gradient: none is best in all three")
    pink, blue = {"facecolor": figures.COMMUNICATION}, {"facecolor": figures.OWN}
    looks = {"dp": pink | {"hatch": "///"}, "pp": pink | {"hatch": "..."}, "tp": pink}
    for y, mesh in enumerate(MESHES):
        lengths = {axis: sent[mesh][axis] / 1e6 for axis in AXES}
        pieces = [(n, axis if n > 1 else "", looks[axis]) for axis, n in lengths.items() if n]
        figures.stack(panels[0], y, pieces)
        own, activations = held[mesh] / 1e6
        figures.stack(panels[1], y, [(own, "", blue | {"hatch": "///"}), (activations, "", blue)])
        figures.stack(panels[2], y, [(100 * bubbles[mesh], "", {"color": figures.IDLE})])
    panels[0].text(
        24,
        2.4,
        "dp: gradients\npp (dots): activations at cuts\ntp: activations in layers",
        ha="right",
    )
    panels[1].text(0.75, 8.2, "hatched: parameters\nplain: activations")
    panels[0].set(title="Sent by all ranks in a step", xlabel="MB", ylabel="dp x pp x tp")
    panels[0].set_yticks(range(len(MESHES)), [" x ".join(map(str, mesh)) for mesh in MESHES])
    panels[0].invert_yaxis()
    panels[1].set(title="Held by the fullest rank", xlabel="MB")
    panels[2].set(title="Idle in the bubble", xlabel="% of the time")
    for axes in panels:
        axes.tick_params(axis="y", length=0)
    return figure


figures.save(draw, "16_hybrid")

# %% [markdown]
# ## The other two axes, and ZeRO
#
# Positions (lesson 14) and experts (lesson 15) are axes, too. They leave the others as they are
# and change the groups of the sums:
#
#     cp   positions of every example: dw is summed over dp x cp, in one sum
#     ep   experts: neighbours on dp hold different ones; an expert's dw is summed over dp/ep x cp
#
# And what ranks have copies of need not be updated on all of them: with `zero=1` (lesson 5) a rank
# updates its shard, keeps AdamW's moments of this shard alone, and gets the other new weights.


# %%
def all_axes(group, model, zero):
    """Return the gradients, and the bytes of AdamW's moments on this rank."""
    mesh = Mesh(group, dp=2, pp=1, cp=2, tp=2)
    hybrid = Hybrid(model, mesh, "1f1b", B // (2 * GRAIN), ep=2, zero=zero)
    optimizer = optim.AdamW(hybrid.parameters(), lr=1e-3)
    hybrid.backward(Batch(inputs, targets))
    gradients = hybrid.gradients()
    hybrid.step(optimizer)
    return gradients, sum(x.nbytes for moments in optimizer.state for x in moments)


def with_experts():
    return nn.Transformer(V, C, HEADS, 2, T, 0, "float64", dropout=0.1, experts=4)


alone = with_experts()
nn.cross_entropy(alone(inputs, Randomness(0, 0, np.arange(B))), targets).backward()
want_of_experts = {name: p.grad for name, p in alone.named_parameters().items()}
moments = {}
for zero in (0, 1):
    results = eight.run(all_axes, with_experts(), zero)
    assert max(error(got, want_of_experts) for got, _ in results) < 1e-9
    moments[zero] = max(nbytes for _, nbytes in results)
    print(f"2 x 1 x 2 x 2, 4 experts over 2, zero={zero}: {moments[zero] / 1e3:.0f} kB of moments")
assert 2 < moments[0] / moments[1] < 4  # experts are on 2 ranks each, everything else on 4

# %% [markdown]
# ## Exercise 1: who are my peers?
#
# Write `peers(rank, axis, sizes)`: the ranks of this rank's group on an axis, in order, given
# `sizes = {"dp": ..., "pp": ..., "tp": ...}`; no communication.
#
# *Hint:* an axis has a stride, the product of the sizes after it. Subtract your own coordinate from
# your number, and add each of 0 to size - 1 instead.


# %%
def peers(rank, axis, sizes):
    """Return the ranks that differ from this one on this axis alone, including itself."""
    raise NotImplementedError  # your lines here


# %%
def members(group, mesh):
    mesh = Mesh(group, dp=mesh[0], pp=mesh[1], tp=mesh[2])
    return {axis: getattr(mesh, axis).members for axis in mesh.axes}


def check_peers(attempt):
    """Return what is wrong, or None."""
    for mesh in MESHES:
        sizes = dict(zip(AXES, mesh, strict=True))
        for rank, groups in enumerate(eight.run(members, mesh)):
            for axis, right in groups.items():
                got = list(attempt(rank, axis, sizes))
                if got != right:
                    where = f"rank {rank} of {' x '.join(map(str, mesh))}"
                    return f"{axis} of {where} is {right}, not {got}"


def slowest_first(rank, axis, sizes):
    """Numbers the grid with dp fastest."""
    stride = {"dp": 1, "pp": sizes["dp"], "tp": sizes["dp"] * sizes["pp"]}[axis]
    return [rank + (i - rank // stride % sizes[axis]) * stride for i in range(sizes[axis])]


exercise.judge(1, check_peers, peers, tempting=[slowest_first])

# %% [markdown]
# ## Exercise 2: why did this break?
#
# An optimizer that clips scales the gradient by `min(1, max_norm / norm)`, with the norm of the
# *whole* gradient, the root of the sum of all its squares. Here each rank took only what it holds
# (`clip_global_norm` refuses this: if parameters are spread over ranks, it asks for `sum_squares`):


# %%
def clip_factors(group, squares, max_norm=0.5):
    """Return what each rank would scale its gradients by."""
    hybrid, mesh = on_mesh(group, (2, 2, 2), fresh())
    hybrid.backward(Batch(inputs, targets))
    return min(1.0, max_norm / squares(hybrid, mesh) ** 0.5)


def own_squares(hybrid, mesh):
    return sum((p.grad**2).sum() for p in hybrid.parameters())


right = min(1.0, 0.5 / sum((grad**2).sum() for grad in want.values()) ** 0.5)
factors = eight.run(clip_factors, own_squares)
print(f"one device scales by {right:.3f}, ranks 0 to 3 by", [f"{f:.3f}" for f in factors[:4]])
assert abs(eight.run(clip_factors, lambda hybrid, mesh: hybrid.sum_squares())[0] / right - 1) < 1e-9

# %% [markdown]
# Each rank scales by a different factor, so the step has a wrong direction, and copies of a
# parameter drift apart: ranks 0 and 1 hold the same norm layers. Summing all ranks' squares is no
# cure: several ranks hold some of the parameters. Write `whole_squares(hybrid, mesh)`, the sum of
# squares in which each parameter counts once.
#
# *Hint:* go through `hybrid.named_parameters()`; `p.shard is None` if all tp ranks hold all of
# p; `hybrid.pipeline.shared.get(name)` is the group of the two stages that share it, or None. Then
# all_reduce a NumPy number, over those axes where ranks hold different things.


# %%
def whole_squares(hybrid, mesh):
    """Return the sum of squares of the whole gradient."""
    raise NotImplementedError  # your lines here


# %%
def check_squares(attempt):
    for rank, factor in enumerate(eight.run(clip_factors, attempt)):
        if abs(factor / right - 1) > 1e-9:
            return f"rank {rank} scales by {factor:.3f}, not {right:.3f}"


def all_ranks(hybrid, mesh):
    return mesh.group.all_reduce(np.array(own_squares(hybrid, mesh))).item()


def model_ranks(hybrid, mesh):
    return mesh.pp.all_reduce(mesh.tp.all_reduce(np.array(own_squares(hybrid, mesh)))).item()


exercise.judge(2, check_squares, whole_squares, tempting=[own_squares, all_ranks, model_ranks])

# %% [markdown]
# ## Exercise 3: the same X, tp times
#
# Between two stages every tp rank sends the same X[B, T, C] to its counterpart: `S tp` bytes where
# S would do, over the slow links between machines. (Narayanan et al., section 4.1, call the cure
# the scatter/gather communication optimization.) Write `move(x, mesh)` for two stages: all ranks of
# stage 0 call it with the same x, the ranks of stage 1 with None; there it returns x. Over pp each
# rank may send only `S/tp`; the rest is gathered within the machine.
#
# *Hint:* cut along T. `mesh.pp.send(part, 1)`, `mesh.pp.recv(0)`, `mesh.tp.all_gather(part, 1)`.


# %%
def move(x, mesh):
    """Return x on the ranks of stage 1, None on the ranks of stage 0."""
    raise NotImplementedError  # your lines here


# %%
def try_move(group, attempt):
    mesh = Mesh(group, dp=1, pp=2, tp=4)
    x = np.arange(2.0 * 8 * 3).reshape(2, 8, 3)
    got = attempt(x if mesh.pp.rank == 0 else None, mesh)
    right = np.array_equal(got, x) if mesh.pp.rank == 1 else got is None
    return right, mesh.pp.ledger.total / x.nbytes


def check_move(attempt):
    arrived, shares = zip(*eight.run(try_move, attempt), strict=True)
    if not all(arrived):
        return "X has not arrived everywhere"
    if max(shares) > 1 / 4:
        return f"a rank sends {max(shares):g} S over pp"


def everyone_sends_all(x, mesh):
    return mesh.pp.send(x, 1) if mesh.pp.rank == 0 else mesh.pp.recv(0)


def one_sends_all(x, mesh):
    if mesh.pp.rank == 0:
        return mesh.pp.send(x, 1) if mesh.tp.rank == 0 else None
    return mesh.tp.broadcast(mesh.pp.recv(0) if mesh.tp.rank == 0 else None)


exercise.judge(3, check_move, move, tempting=[everyone_sends_all, one_sends_all])

# %% [markdown]
# ## What it costs, and the next problem
#
# - **Three sums to get right**, each over its own group, and one place where all meet: the norm.
# - **A mesh is chosen before the program starts**, for one model, batch and machine. Our choice
#   took a formula and 28 candidates; layers of unequal cost and mixed hardware make it a search.
# - **One rank that stops stops all**: it is missing in several groups.
# - **dp still keeps parameters and gradients dp times**, and, without `zero=1`, AdamW's moments.
#
# Every lesson has ended with what its strategy costs. What remains is the choice among them for a
# given model and machine: lesson 20 measures all of them side by side.

# %%
eight.close()
