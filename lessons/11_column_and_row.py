# %% [markdown]
# # 11. Columns and rows: one matrix on many ranks
#
# A pipeline cuts between layers. When one layer is too big for a rank, the cut must go through its
# matrix. There are two ways, and the one makes what the other takes. The library's versions are
# `minidist/tensor_parallel/column_parallel.py` and `row_parallel.py`, after Shoeybi et al. 2019
# (Megatron-LM), section 3.
#
# Letters: `N` ranks, `r` one of them; `B` examples, `C` the width, `F = 4C` the width between the
# two layers of an MLP. `A[B, C/N]` is the part of A that a rank holds; `A[B, C]{+N}` is a partial
# sum: every rank has one, and A is their sum.

# %%
import gc
import time
import tracemalloc
from itertools import product

import numpy as np
from threadpoolctl import threadpool_limits

from minidist import Cluster, Tensor, nn, optim
from minidist.autograd import Function, functions
from minidist.collective_functions import all_gather, gather, reduce_from, scatter
from minidist.pipeline_parallel.partition import partition
from minidist.rng import generator
from minidist.tensor_parallel import ColumnParallelLinear, RowParallelLinear, unsplit
from minidist.tools import figures

figures.arguments()
clusters = {N: Cluster(N) for N in (1, 2, 4)}

# %% [markdown]
# ## Problem
#
# How much memory does one MLP need to be trained? Its weights, their gradients, and AdamW's two
# moments: 4 numbers of 4 bytes per parameter. (`tracemalloc` counts what NumPy has allocated.)


# %%
def whole_mlp(first, second, group):
    return nn.Sequential([first, second])


def bytes_held(group, build, C):
    """Return what stays after one step of AdamW on an MLP."""
    tracemalloc.start()
    mlp = build(*nn.MLP([C, 4 * C, C], activation="gelu").layers, group)
    gc.collect()  # layers of which only a part was taken
    optimizer, x = optim.AdamW(mlp.parameters(), lr=1e-3), np.ones((1, C), np.float32)
    nn.squared_error(mlp(Tensor(x)), x).backward()
    optimizer.step()
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return held


C = 384
P = 2 * 4 * C * C + 5 * C
whole = clusters[1].run(bytes_held, whole_mlp, C)[0]
print(f"width {C}: {P:,} parameters, {whole:,} bytes held, {whole / P:.1f} per parameter")
assert 16 <= whole / P < 16.5
print(f"width 12288 (GPT-3; Brown et al. 2020, table 2.1): {16 * 8 * 12288**2 / 1e9:.1f} GB an MLP")
try:
    partition([1, 1], 4)
except ValueError as error:
    print("a pipeline of four ranks:", error)

# %% [markdown]
# ## Picture
#
#     X[B, C] -> f ->  X W1_r + b1_r  -> gelu -> H_r[B, F/N] ->  H_r W2_r  -> Y[B, C]{+N} -> g -> Y
#                        W1[C, F/N]                               W2[F/N, C]                  + b2
#                        columns                                  rows
#
#     forward  f: nothing                                                        g: all_reduce
#     backward f: all_reduce of dX{+N}                                           g: nothing
#
# *Columns.* A column of W1 makes one column of H, and needs all of X: no communication. An
# activation acts on each number of H alone, so it fits behind. *Rows.* A row of W2 meets one column
# of H, the very one that the rank has made; what comes out is a partial sum of all of Y.
#
# ## Math
#
#     columns  H = [X W_0 | X W_1 | ...]     dX = sum over r of dH_r W_r^T    f: all_reduce backward
#     rows     Y = sum over r of H_r W_r     dH_r = dY W_r^T                  g: all_reduce forward
#     both     dW_r = (own input)^T (own gradient): no communication for a weight, ever
#
# ## Code
#
# The ten lines that matter: f and g, and between them two products that know nothing of ranks.


# %%
class CopyTo(Function):
    """f.  Forward: identity;  backward: dX = all_reduce of dX{+N}."""

    def __init__(self, group):
        self.group = group

    def forward(self, x):
        return x

    def backward(self, grad):
        return self.group.all_reduce(grad)


class ReduceFrom(Function):
    """g.  Forward: Y = all_reduce of Y{+N};  backward: identity."""

    def __init__(self, group):
        self.group = group

    def forward(self, y):
        return self.group.all_reduce(y)

    def backward(self, grad):
        return grad


class OurMLP(nn.Module):
    def __init__(self, first, second, group):
        self.group, F = group, first.weight.shape[1]
        mine = np.array_split(np.arange(F), group.size)[group.rank]
        self.w1 = first.weight.part(nn.Shard(1, mine, F))  # these columns, copied
        self.b1 = first.bias.part(nn.Shard(0, mine, F))
        self.w2 = second.weight.part(nn.Shard(0, mine, F))  # these rows
        self.b2 = second.bias

    def forward(self, x, randomness=None):
        h = functions.gelu(functions.linear(CopyTo(self.group)(x), self.w1, self.b1))
        return ReduceFrom(self.group)(functions.linear(h, self.w2)) + self.b2


def library_mlp(first, second, group):
    return nn.Sequential([ColumnParallelLinear(first, group), RowParallelLinear(second, group)])


def gradients(group, build, model, x, targets):
    """Return the whole gradients of every parameter and of the input, after one backward."""
    mlp, x = build(*model.layers, group), Tensor(x, requires_grad=True)
    nn.squared_error(mlp(x), targets).backward()
    named = mlp.named_parameters().items()
    return {"input": x.grad} | {name: unsplit(p.grad, p, group) for name, p in named}


def one_device(model, x, targets):
    x = Tensor(x, requires_grad=True)
    nn.squared_error(model(x), targets).backward()
    return {"input": x.grad} | {n: p.grad.copy() for n, p in model.named_parameters().items()}


def random(name, *shape):
    return generator(0, name).standard_normal(shape)


model = nn.MLP([12, 48, 12], activation="gelu", dtype="float64")
for name, p in model.named_parameters().items():
    if "bias" in name:
        p.data[...] = random(name, *p.shape)  # they begin as 0, which would hide mistakes
x, targets = random("x", 7, 12), random("targets", 7, 12)
want = one_device(model, x, targets)
for N in (2, 4):
    ours = clusters[N].run(gradients, OurMLP, model, x, targets)
    library = clusters[N].run(gradients, library_mlp, model, x, targets)
    for got, theirs in zip(ours, library, strict=True):
        assert all((got[name] == theirs[name]).all() for name in want), "not the library's bits"
        error = max(abs(got[name] - want[name]).max() / abs(want[name]).max() for name in want)
        assert error < 1e-12
    print(f"{N} ranks: the library's bits; all gradients within {error:.0e} of one device")

# %% [markdown]
# ## Why f and g are a pair
#
# A backward is the adjoint of its forward: `<f x, y> = <x, f* y>`. Between ranks the inner product
# must say what it counts. What is *the same* on all ranks is one array, counted once. Where each
# rank has an array *of its own*, there are N arrays, and all of them count.
#
# f takes one X and makes N copies, each for a use of its own: `<f x, y> = sum_r <x, y_r> =
# <x, sum_r y_r>`. So f* is a sum over ranks, which is g, and g* is f.


# %%
def inner(group, a, b, layout):
    own = np.array((a * b).sum())
    return (group.all_reduce(own) if layout == "own" else own).item()


def adjoint_gap(group, forward, backward, source, result):
    """Return |<A x, y> - <x, A* y>| / |<A x, y>| for random arrays of these layouts."""
    x = random(f"x {group.rank if source == 'own' else 'all'}", 3, 8)
    shape = forward(group, x).shape
    y = random(f"y {group.rank if result == 'own' else 'all'}", *shape)
    left = inner(group, forward(group, x), y, result)
    return abs(left - inner(group, x, backward(group, y), source)) / abs(left)


def own_part(group, x):
    return np.split(x, group.size, axis=-1)[group.rank]


MAPS = {
    "copies": lambda group, x: x,
    "sum": lambda group, x: group.all_reduce(x),
    "own part": own_part,
    "joined": lambda group, x: group.all_gather(x, axis=-1),
    "own part of sum": lambda group, x: own_part(group, group.all_reduce(x)),  # a reduce_scatter
}
PAIRS = [  # function, forward, backward, layout before, layout after
    ("f", "copies", "sum", "same", "own"),
    ("g", "sum", "copies", "own", "same"),
    ("scatter", "own part", "joined", "same", "own"),
    ("gather, then all do the same", "joined", "own part", "own", "same"),
    ("gather, then each its own", "joined", "own part of sum", "own", "own"),
    ("gather, then each its own", "joined", "own part", "own", "own"),
]
for name, forward, back, source, result in PAIRS:
    gaps = clusters[4].run(adjoint_gap, MAPS[forward], MAPS[back], source, result)
    is_adjoint = max(gaps) < 1e-12
    assert is_adjoint == ((name, back) != ("gather, then each its own", "own part"))
    print(f"{name:30} back: {back:16} {'adjoint' if is_adjoint else 'not its adjoint'}")

# %% [markdown]
# The last three rows have one forward. Which backward is right depends on what *follows*. If all
# ranks do the same with the gathered X, dX is the same everywhere and a part of it is right
# (`gather`). If each rank uses it for its own columns, dX is a partial sum, to be added up before
# it is cut (`all_gather`, whose backward is reduce_scatter). Take the wrong one of the two:


# %%
def weight_gradient(group, join, model, x, targets):
    first, second = model.layers
    column = ColumnParallelLinear(first, group)
    y = second(join(column(Tensor(x)), group))  # the second layer is whole, on every rank
    nn.squared_error(y, targets).backward()
    return unsplit(column.weight.grad, column.weight, group)


for join in (gather, all_gather):
    got = clusters[4].run(weight_gradient, join, model, x, targets)[0]
    ratio = np.median(got / want["layers.0.weight"])  # of all elements the same
    print(f"column, {join.__name__}, whole layer: the column's gradient is {ratio:.3f} times right")
    assert abs(ratio - (1 if join is gather else 4)) < 1e-6

# %% [markdown]
# ## Measurement: bytes, and why columns come first
#
# Any order computes the right thing, if `gather` and `scatter` mend what does not fit: a column
# layer takes X whole and leaves a part, a row layer takes a part and leaves Y whole.


# %%
def run_plan(group, plan, model, x, targets):
    """Do forward and backward, layer i split by plan[i]; return (gradients, bytes sent)."""
    kinds = {"column": ColumnParallelLinear, "row": RowParallelLinear}
    layers = [kinds[way](layer, group) for way, layer in zip(plan, model.layers, strict=True)]
    x = y = Tensor(x, requires_grad=True)
    is_split = False
    for way, layer in zip(plan, layers, strict=True):
        if way == "column":
            y = gather(y, group) if is_split else y
        else:
            y = y if is_split else scatter(y, group)
        y, is_split = layer(y), way == "column"
    y = gather(y, group) if is_split else y
    nn.squared_error(y, targets).backward()
    moved = group.ledger.total
    found = {
        n: unsplit(p.grad, p, group) for lay in layers for n, p in lay.named_parameters().items()
    }
    return found | {"input": x.grad}, moved


# In units of (N - 1) B C itemsize, all ranks together, forward + backward, F = 4C. An all_reduce
# moves 2 units per C, an all_gather 1.
CLOSED_FORMS = {
    ("column", "row"): 2 + 2,  # g of Y; f of dX
    ("column", "column"): (4 + 1) + (2 + 8),  # gather H, gather Y; f of dX, f of dH
    ("row", "row"): (8 + 2) + (1 + 4),  # g of H, g of Y; all_gather dX, all_gather dH
    ("row", "column"): (8 + 1) + (1 + 8),  # g of H, gather Y; all_gather dX, f of dH
}
units = {}
for plan, closed_form in CLOSED_FORMS.items():
    for N in (2, 4):
        results = clusters[N].run(run_plan, plan, model, x, targets)
        for got, _ in results:
            assert all(np.allclose(got[n], want[n], rtol=1e-9, atol=1e-12) for n in want)
        moved = sum(bytes for _, bytes in results)
        assert moved == closed_form * (N - 1) * x.nbytes
    units[plan] = moved / (3 * x.nbytes)
    print(f"{' then '.join(plan):20} {moved:6,} bytes on 4 ranks = {units[plan]:.0f} (N - 1) B C 8")

# %% [markdown]
# Column then row meets once forward and once backward, with C wide arrays. Row then column meets
# twice each way, in the middle where it is 4C wide, and *before* the activation, because
# `gelu(a + b)` is not `gelu(a) + gelu(b)`: 4.5 times the bytes.
#
# ## Measurement: memory
#
# A rank holds 1/N of both weights and of the first bias, and all of the second bias.

# %%
for N in (2, 4):
    formula = 16 * ((8 * C * C + 4 * C) / N + C)
    held = max(clusters[N].run(bytes_held, library_mlp, C))
    print(
        f"{N} ranks: {held:,} bytes each, formula {formula:,.0f}; one rank {whole / held:.2f} times"
    )
    assert abs(held / formula - 1) < 0.03

# %% [markdown]
# ## Measurement: when does it pay?
#
#     compute per rank         3 * 2 * (2 * B C 4C) / N = 48 B C^2 / N     operations
#     sent per rank            4 (N - 1)/N B C 4                           bytes
#     operations per byte      3 C / (N - 1)
#
# The batch cancels: more examples do not help, only a wider matrix does. We measure the parts: a
# whole step on one rank, the half of it that a rank of two computes, and the two all_reduces that
# it adds; then the two ranks together. One BLAS thread each, 64 examples, the fastest of many.
# (With fewer than two idle cores the ranks take turns, and together they are slower than said.)


# %%
def steps(group, C, F, repeats):
    """Return the seconds of forward and backward of [C, F, C]."""
    mlp = library_mlp(*nn.MLP([C, F, C], activation="relu").layers, group)
    x, times = np.ones((64, C), np.float32), []
    with threadpool_limits(1):
        for _ in range(repeats):
            leaf = Tensor(x, requires_grad=True)
            group.barrier()
            start = time.perf_counter()
            nn.squared_error(mlp(leaf), x).backward()
            times.append(time.perf_counter() - start)
    return times


def two_sums(group, C, F, repeats):
    x, times = np.ones((64, C), np.float32), []
    for _ in range(repeats):
        group.barrier()
        start = time.perf_counter()
        group.all_reduce(x)
        group.all_reduce(x)
        times.append(time.perf_counter() - start)
    return times


WIDTHS = [32, 64, 128, 256]
RUNS = {
    "whole": (1, steps, 4),
    "half": (1, steps, 2),
    "sums": (2, two_sums, 4),
    "two": (2, steps, 4),
}
fastest = {(name, C): np.inf for C in WIDTHS for name in RUNS}
for _ in range(5):  # rounds, so that a hiccup of the machine does not hit one alone
    for name, C in fastest:
        N, call, factor = RUNS[name]
        times = np.max(clusters[N].run(call, C, factor * C, 40), axis=0)
        fastest[name, C] = min(fastest[name, C], 1e3 * times.min())
expected, speedup = [], []
print(
    "width   operations a byte   ms: whole    half   sums   two ranks   times as fast: said, found"
)
for C in WIDTHS:
    whole_step, half, sums, two = (fastest[name, C] for name in RUNS)
    expected.append(whole_step / (half + sums))
    speedup.append(whole_step / two)
    print(
        f"{C:5} {3 * C:19} {whole_step:13.2f} {half:7.2f} {sums:6.2f} {two:11.2f}"
        f" {expected[-1]:21.2f} {speedup[-1]:6.2f}"
    )
share = [fastest["sums", C] / fastest["half", C] for C in WIDTHS]
assert share[0] > 2 * share[-1], "a wider matrix computes more for a byte"

# %% [markdown]
# ## The figure


# %%
RANKS = (figures.FORWARD, figures.BACKWARD)


def draw(plt):
    figure = plt.figure(figsize=(11, 7))
    figure.suptitle("Columns then rows: each rank needs the others once forward, once backward")
    grid = figure.add_gridspec(2, 2, height_ratios=[1, 1])
    draw_matrices(figure.add_subplot(grid[0, :]))
    draw_bytes(figure.add_subplot(grid[1, 0]))
    draw_speed(figure.add_subplot(grid[1, 1]))
    return figure


def draw_matrices(axes):
    from matplotlib.patches import Rectangle

    axes.set(xlim=(0, 30), ylim=(-2.7, 6), aspect="equal")
    axes.axis("off")

    def matrix(x, width, height, parts, beside, label):
        """Draw a matrix in equal parts, beside each other or one below the other."""
        w, h = (width / parts, height) if beside else (width, height / parts)
        for i in range(parts):
            left = x + i * w if beside else x
            bottom = 2 - height / 2 if beside else 2 + height / 2 - (i + 1) * h
            look = {"facecolor": RANKS[i] if parts == 2 else "#E4E4E4", "edgecolor": "white"}
            axes.add_patch(Rectangle((left, bottom), w, h, hatch="///" if i else None, **look))
            if parts == 2:
                middle = left + w / 2, bottom + h / 2
                axes.text(*middle, i, ha="center", va="center", fontsize=11, bbox=white)
        axes.text(x + width / 2, 2.3 + height / 2, label, ha="center", va="bottom", fontsize=10)

    def sign(x, text, **more):
        axes.text(x, 2, text, ha="center", va="center", fontsize=14, **more)

    def meeting(x, name, forward, backward):
        pink = {"boxstyle": "circle,pad=0.25", "facecolor": figures.COMMUNICATION}
        sign(x, name, bbox=pink | {"edgecolor": "none"}, fontweight="bold", style="italic")
        for y, text in ((-1.2, forward), (-2.3, backward)):
            weight = "bold" if "all_reduce" in text else "normal"
            axes.text(x, y, text, ha="center", va="center", fontsize=10, fontweight=weight)

    white = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
    matrix(3, 2, 3, 1, True, "X[B, C]\non both")
    meeting(6.3, "f", "nothing", "all_reduce dX")
    sign(7.8, "×")
    matrix(8.6, 4, 2, 2, True, "W1[C, F/N]\ncolumns")
    sign(13.4, "=")
    matrix(14.2, 4, 3, 2, True, "H[B, F/N]\ngelu of each part")
    sign(19, "×")
    matrix(19.8, 2, 4, 2, False, "W2[F/N, C]\nrows")
    sign(22.6, "=")
    axes.text(25, 3.8, "Y[B, C]{+N}\npartial sums", ha="center", va="bottom", fontsize=10)
    meeting(25, "g", "all_reduce Y", "nothing")
    matrix(27.6, 2, 3, 1, True, "Y[B, C]\non both")
    for y, text in ((-1.2, "forward →"), (-2.3, "← backward")):
        axes.text(0, y, text, va="center", fontsize=10)
        axes.text(16.2, y, "nothing", ha="center", va="center", fontsize=10)
    axes.text(0, 2, "0, 1: the rank\nthat holds\nthis part", va="center", fontsize=9)


def draw_bytes(axes):
    names = [" then ".join(plan) for plan in CLOSED_FORMS]
    axes.barh(names, list(CLOSED_FORMS.values()), color=figures.COMMUNICATION, height=0.55)
    axes.plot([units[plan] for plan in CLOSED_FORMS], names, "o", color=figures.INK)
    for name, value in zip(names, CLOSED_FORMS.values(), strict=True):
        axes.text(value + 0.5, name, f"{value}", va="center")
    axes.invert_yaxis()
    axes.set(
        title="Bytes of a step (bars: formula, dots: measured)",
        xlabel=r"all ranks together, in units of $(N-1)\,B\,C$ itemsize",
        xlim=(0, 20),
        xticks=[0, 5, 10, 15, 20],
    )


def draw_speed(axes):
    axes.semilogx(WIDTHS, expected, "o-", color=figures.FORWARD, base=2)
    for height, text in ((1, "one rank"), (2, "ideal")):
        axes.axhline(height, color=figures.IDLE, linestyle="--", linewidth=1, zorder=0)
        axes.text(WIDTHS[0], height + 0.04, text, color="#777777", fontsize=9)
    axes.set(
        title="Two ranks against one: whole / (half + sums)",
        xlabel="width C (operations per byte: 3C)",
        ylabel="times as fast, from measured parts",
        ylim=(0, 2.25),
    )
    axes.set_yticks([0, 0.5, 1, 1.5, 2])
    axes.set_xticks(WIDTHS, [str(C) for C in WIDTHS])
    axes.minorticks_off()


figures.save(draw, "11_column_and_row")

# %% [markdown]
# ## Exercise 1: the mean over ranks
#
# `Mean` is g with a division: every rank has an array of its own, and all get their mean. Write its
# backward.
#
# *Hint:* `<mean(x_0, ..., x_{N-1}), y>`; y is the same on all ranks. What multiplies x_r?


# %%
class Mean(Function):
    """Forward: Y = (1/N) sum over r of X_r, on every rank;  backward: yours."""

    def __init__(self, group):
        self.group = group

    def forward(self, x):
        return self.group.all_reduce(x) / self.group.size

    def backward(self, grad):
        raise NotImplementedError  # your line here


# %%
def try_mean(group, kind):
    def forward(group, x):
        return kind(group).forward(x)

    def backward(group, y):
        return kind(group).backward(y)

    try:
        return adjoint_gap(group, forward, backward, "own", "same")
    except NotImplementedError:
        return None


def check_mean(kind):
    """Say "solved", "not solved yet", or what is wrong."""
    for N in (2, 4):
        gaps = clusters[N].run(try_mean, kind)
        if None in gaps:
            return "not solved yet"
        if max(gaps) > 1e-12:
            return f"wrong: on {N} ranks <mean x, y> and <x, mean* y> are {max(gaps):.0%} apart"
    return "solved"


class LikeG(Mean):
    def backward(self, grad):
        return grad


class OnceMore(Mean):
    def backward(self, grad):
        return self.group.all_reduce(grad) / self.group.size


print("exercise 1:", check_mean(Mean))
for tempting in (LikeG, OnceMore):
    print("a tempting answer:", check_mean(tempting))
    assert check_mean(tempting).startswith("wrong")

# %% [markdown]
# ## Exercise 2: why did this break?
#
# A row layer, which passes its first test: loss and gradients equal one device's. From the second
# step on, the losses part.


# %%
def broken_row(x, w, b, group):
    """Y[B, F] from X[B, C/N], W[C/N, F] and b[F]."""
    return reduce_from(functions.linear(x, w, b), group)


def losses(group, row, model, x, targets, steps=3):
    """Train a row layer by plain gradient descent, beside the same layer on one device."""
    whole = model.layers[1]
    whole.bias.data[...] = 0
    layer = RowParallelLinear(whole, group)
    w, b = layer.weight, nn.Parameter(whole.bias.data.copy(), "own bias")
    x, found = np.tile(x, 4), []
    for _ in range(steps):
        split = nn.squared_error(row(scatter(Tensor(x), group), w, b, group), targets)
        alone = nn.squared_error(whole(Tensor(x)), targets)
        split.backward()
        alone.backward()
        db = np.zeros_like(b.data) if b.grad is None else b.grad
        gradient_off = abs(db - whole.bias.grad).max() / abs(whole.bias.grad).max()
        found.append(((split.item() - alone.item()) / alone.item(), gradient_off))
        for p in (w, b, whole.weight, whole.bias):
            p.data = p.data - 0.01 * (0 if p.grad is None else p.grad)
            p.grad = None
    return found


for step, (loss_off, gradient_off) in enumerate(
    clusters[4].run(losses, broken_row, model, x, targets)[0]
):
    print(f"step {step}: loss off by {loss_off:+.1e}, the bias' gradient by {gradient_off:.1e}")

# %% [markdown]
# Write `repaired_row`. The check compares three steps; three tempting answers must not pass.
#
# *Hint:* what does the bias add to Y on 4 ranks, and what is it before the first update? A repair
# must be right in the forward *and* in the gradient of b, of which every rank keeps a copy.


# %%
def repaired_row(x, w, b, group):
    raise NotImplementedError  # your lines here


# %%
def try_row(group, row):
    """Return (what b adds to Y, in units of b; the outcome of three steps), or None."""
    nothing, w, b = Tensor(np.zeros((1, 3))), Tensor(np.zeros((3, 5))), np.arange(1.0, 6)
    try:
        added = (row(nothing, w, Tensor(b), group).data / b).max()
    except NotImplementedError:
        return None
    return added, losses(group, row, model, x, targets)


def check_row(row):
    """Say "solved", "not solved yet", or what is wrong."""
    for outcome in clusters[4].run(try_row, row):
        if outcome is None:
            return "not solved yet"
        added, found = outcome
        if abs(added - 1) > 1e-12:
            return f"wrong: on 4 ranks b adds {added:.2f} b to Y"
        for step, (loss_off, gradient_off) in enumerate(found):
            if gradient_off > 1e-9:
                return f"wrong: in step {step} the bias' gradient is off by {gradient_off:.0%}"
            if abs(loss_off) > 1e-9:
                return f"wrong: in step {step} the loss is off by {loss_off:+.0%}"
    return "solved"


def a_share_each(x, w, b, group):
    return reduce_from(functions.linear(x, w, b * (1 / group.size)), group)


def only_rank_0(x, w, b, group):
    return reduce_from(functions.linear(x, w, b if group.rank == 0 else None), group)


print("exercise 2:", check_row(repaired_row))
for tempting in (broken_row, a_share_each, only_rank_0):
    print("a tempting answer:", check_row(tempting))
    assert check_row(tempting).startswith("wrong")

# %% [markdown]
# ## Exercise 3: the price of a plan
#
# Write `price(plan, widths)`: what forward and backward of `run_plan` move, in units of
# (N - 1) B itemsize. The MLP of the check has three layers, and all eight plans are measured.
#
# *Hint:* walk through the plan as `run_plan` does. column: 2 C_in backward (f). row: 2 C_out
# forward (g). `gather` of C: C forward. `scatter` of C: C backward. What do the cheapest plans for
# [8, 32, 4, 16] have in common?


# %%
def price(plan, widths):
    """Return the numbers moved: widths[i] goes into layer i, widths[i + 1] comes out."""
    raise NotImplementedError  # your lines here


# %%
WIDTH_LIST = [8, 32, 4, 16]
three = nn.MLP(WIDTH_LIST, activation="gelu", dtype="float64")
inputs, outputs = random("inputs", 5, 8), random("outputs", 5, 16)
PLANS = list(product(("column", "row"), repeat=3))
measured = {}
for plan in PLANS:
    moved = sum(bytes for _, bytes in clusters[2].run(run_plan, plan, three, inputs, outputs))
    measured[plan] = moved / (5 * 8)


def check_price(attempt):
    """Say "solved", "not solved yet", or what is wrong."""
    for plan in PLANS:
        try:
            said = attempt(plan, WIDTH_LIST)
        except NotImplementedError:
            return "not solved yet"
        if said != measured[plan]:
            return f"wrong: {', '.join(plan)} moves {measured[plan]:.0f} numbers, not {said}"
    return "solved"


def only_f_and_g(plan, widths):
    return sum(
        2 * widths[i] if way == "column" else 2 * widths[i + 1] for i, way in enumerate(plan)
    )


print("exercise 3:", check_price(price))
print("a tempting answer:", check_price(only_f_and_g))
assert check_price(only_f_and_g).startswith("wrong")

# %% [markdown]
# ## What it costs, and the next problem
#
# - **Nothing can hide the meetings.** The next layer needs Y, so everybody waits for g, in every
#   layer. Data parallelism meets once a step, and beside backward.
# - **Thin slices.** 1/N of a matrix is a smaller product per byte: `3C/(N - 1)` operations.
# - **X, Y and the row's bias are whole on every rank.** Only what lies between f and g is split.
#
# An MLP is two of a Transformer block's four matrices. Attention has no obvious columns and rows,
# and the vocabulary makes logits larger than anything in this lesson: lesson 12.

# %%
for cluster in clusters.values():
    cluster.close()
