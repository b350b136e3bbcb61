# %% [markdown]
# # 13. Sequence parallelism: nothing is kept twice
#
# Tensor parallelism (lesson 12) splits what lies inside the two branches of a block. Norms, dropout
# and the sums between them are done by every rank, for all positions, with the same result; what
# backward needs of them is kept N times. Here the sequence is split there (Korthikanti et al. 2022,
# section 4.2.2). The library's version is `minidist/tensor_parallel/sequence_parallel.py`.
#
# Letters: `N` ranks, `r` one of them; `B` examples of `T` positions, `C` the width, `H` heads;
# `e` bytes a number, `S = B T C e` the bytes of one activation X[B, T, C].

# %%
import time

import numpy as np

from minidist import Cluster, Tensor, nn
from minidist.autograd import Function, functions, functions_below
from minidist.autograd.attention import causal_attention
from minidist.datasets import text
from minidist.rng import Randomness, generator
from minidist.tensor_parallel import ParallelTransformer
from minidist.tensor_parallel.sequence_parallel import all_reduce_partial, sequence_parallel
from minidist.tools import equivalence, figures

figures.arguments()
clusters = {N: Cluster(N) for N in (1, 2, 4)}
B, T, C, H = 2, 64, 64, 8

# %% [markdown]
# ## Problem
#
# What does a rank keep of one block between forward and backward? We walk the graph below the
# block's output and list the arrays that its functions hold, each once; weights do not count.


# %%
def owner(array):
    """Return the array that owns the memory of this view."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def kept(y, parameters):
    """Return (what, elements, bytes per element) of each array that backward will need."""
    seen, found = {id(owner(p.data)) for p in parameters}, []
    for function in functions_below(y):
        for name, value in vars(function).items():
            if isinstance(value, np.ndarray) and id(owner(value)) not in seen:
                whole = owner(value)
                seen.add(id(whole))
                found.append((f"{type(function).__name__}.{name}", whole.size, whole.itemsize))
    return found


def split_block(group, way, dtype):
    """Return the model and its only block, split the given way."""
    model = nn.Transformer(32, C, H, 1, T, 0, dtype, dropout=0.1)
    model = ParallelTransformer(model, group) if way == "tp" else sequence_parallel(model, group)
    return model, model.layers[1]


def input_of(group, way, dtype):
    """Return a leaf: X[B, T, C], or this rank's positions of it, X_r[B, T/N, C]."""
    x = generator(0, "lesson 13").standard_normal((B, T, C)).astype(dtype)
    each = T // group.size
    own = slice(0, T) if way == "tp" else slice(group.rank * each, (group.rank + 1) * each)
    return Tensor(x[:, own].copy(), requires_grad=True)


randomness = Randomness(seed=0, step=0, examples=np.arange(B))


def memory(group, way):
    """Return what this rank keeps of the library's block."""
    model, block = split_block(group, way, "float32")
    y = block(input_of(group, way, "float32"), randomness)
    return kept(y, model.parameters())


def in_S(arrays):
    """Return how many activations of B T C float32 the arrays are."""
    return sum(elements * bytes_each for _, elements, bytes_each in arrays) / (4 * B * T * C)


rows = {N: clusters[N].run(memory, "tp")[0] for N in clusters}
for one, two, four in zip(rows[1], rows[2], rows[4], strict=True):
    sizes = [in_S([array]) for array in (one, two, four)]
    note = "on every rank" if sizes[0] == sizes[2] else ""
    print(f"{one[0]:18}", *[f"{size:7.3f}" for size in sizes], " ", note)
total = {N: in_S(rows[N]) for N in rows}
print(f"{'S per rank, N=1,2,4':18}", *[f"{size:6.3f}" for size in total.values()])
assert total[4] > 1.4 * total[1] / 4

sbh, layers = 2048 * 12288, 96  # GPT-3's T C, one example
print(f"GPT-3 over 8 ranks: {10 * sbh * layers / 1e9:.0f} GB of the same on each of them")

# %% [markdown]
# Four ranks keep 10.5 S each; a quarter of one device's 28.5 S would be 7.1. What does not shrink:
# the norms' normalised input, their output (the matrices' input), and dropout's masks. The sums
# `x + ...` are done N times too, but a sum keeps nothing for its backward. (The last line takes
# GPT-3's shapes and the paper's 10 sbh bytes, to which we come under "Measurement".)
#
# ## Picture
#
#     tensor parallel: X[B, T, C] on every rank; between the branches N times the same
#
#       X -> norm -> f -> columns | heads or gelu | rows -> g -> dropout -> + X
#                    |                                      |
#                 identity | all_reduce                all_reduce | identity
#
#     sequence parallel: X_r[B, T/N, C]; between the branches each rank has positions of its own
#
#       X_r -> norm -> f' -> columns | heads or gelu | rows -> g' -> dropout -> + X_r
#                      |                                       |
#             all_gather | reduce_scatter          reduce_scatter | all_gather
#
# (forward | backward; the paper writes g for our f', and g with a bar for g'.) Norm, dropout and
# sum act on each position alone, so T/N positions are enough for them. The matrices' inputs are
# needed whole: every rank's heads look at all positions.
#
# ## Math
#
#     all_reduce(Y)          =  all_gather(reduce_scatter(Y))            (N-1) S + (N-1) S bytes
#     a block, tp            4 all_reduces                               8 (N-1) S, all ranks
#     a block, sequence      4 reduce_scatters and 4 all_gathers         8 (N-1) S: the same
#
# The work between the branches moves into the middle of each all_reduce. That is all.
#
# ## Code
#
# The two functions, and a block that is made with them. Its weights are the library's: a rank has
# its heads' columns of `qkv`, its columns of `expand`, its rows of `output` and `contract`.


# %%
def reduce_scatter(x, group):
    """X[B, T, C]{+N} -> X_r[B, T/N, C]; the group cuts along the first axis."""
    rows = group.reduce_scatter(np.moveaxis(x, 1, 0).copy())
    return np.moveaxis(rows, 0, 1).copy()


class Enter(Function):
    """f': forward all_gather X_r -> X;  backward reduce_scatter dX{+N} -> dX_r."""

    def __init__(self, group):
        self.group = group

    def forward(self, x):
        return self.group.all_gather(x, axis=1)

    def backward(self, grad):
        return reduce_scatter(grad, self.group)


class Leave(Enter):
    """g': forward reduce_scatter Y{+N} -> Y_r;  backward all_gather dY_r -> dY."""

    def forward(self, x):
        return Enter.backward(self, x)

    def backward(self, grad):
        return Enter.forward(self, grad)


def into_columns(x, layer, group):
    return functions.linear(Enter(group)(x), layer.weight, layer.bias)  # [B, T, F/N]


def out_of_rows(y, layer, group):
    return Leave(group)(functions.linear(y, layer.weight)) + layer.bias  # [B, T/N, C]


def our_block(block, x, group, into_columns=into_columns):
    """X_r[B, T/N, C] -> the same shape: lesson 12's block, its sequence split."""
    attention = block.attention
    qkv = into_columns(block.norm_1(x), attention.qkv, group)
    qkv = qkv.reshape(B, T, 3, H // group.size, C // H).transpose(2, 0, 3, 1, 4)
    mixed = causal_attention(qkv).transpose(0, 2, 1, 3).reshape(B, T, C // group.size)
    x = x + block.dropout_1(out_of_rows(mixed, attention.output, group), randomness)
    hidden = functions.gelu(into_columns(block.norm_2(x), block.expand, group))
    return x + block.dropout_2(out_of_rows(hidden, block.contract, group), randomness)


# %% [markdown]
# A rank draws the mask of its positions only, and it has to be that part of one device's mask. A
# mask here is a hash of (seed, step, layer, example, element), so a rank asks for a window of it:
#
#     randomness.keep(name, rate, x.shape, window=(own positions, all C), full_shape=(T, C))
#
# That is what the block's `dropout_1` and `dropout_2` do (`SequenceDropout`). Now backward. The
# norms and the rows' biases are on every rank but have seen T/N positions: their gradients are
# partial sums, and one all_reduce each completes them. In lesson 12 they had seen all T, and were
# complete. We compare with one device, in float64.


# %%
def one_device(block, x, dy):
    leaf = Tensor(x, requires_grad=True)
    block(leaf, randomness).backward(dy)
    return {"X": leaf.grad, **{n: p.grad.copy() for n, p in block.named_parameters().items()}}


def on_ranks(group, forward, dy, finish):
    """Return {name: whole gradient} of a block, put together from all ranks' parts."""
    _, block = split_block(group, "sequence", "float64")
    x = input_of(group, "sequence", "float64")
    each = T // group.size
    y = forward(block, x, group)
    y.backward(dy[:, group.rank * each : (group.rank + 1) * each].copy())
    finish(block, group)
    whole = {"X": group.all_gather(x.grad, axis=1)}
    for name, p in block.named_parameters().items():
        shard, grad = p.shard, p.grad
        if shard is not None:
            parts, indices = group.all_gather(grad, shard.axis), group.all_gather(shard.indices)
            grad = shard.join(parts, indices)
        whole[name] = grad
    return whole


def the_librarys(block, x, group):
    return block(x, randomness)


def worst(got, want):
    """Return the largest difference, relative to the largest element of each array."""
    return max(abs(got[name] - want[name]).max() / abs(want[name]).max() for name in want)


dy = generator(1, "lesson 13").standard_normal((B, T, C))
model = nn.Transformer(32, C, H, 1, T, 0, "float64", dropout=0.1)
want = one_device(model.layers[1], generator(0, "lesson 13").standard_normal((B, T, C)), dy)
for N in clusters:
    ours = clusters[N].run(on_ranks, our_block, dy, all_reduce_partial)
    library = clusters[N].run(on_ranks, the_librarys, dy, all_reduce_partial)
    error = max(worst(got, want) for got in ours)
    gap = max(worst(a, b) for a, b in zip(ours, library, strict=True))
    print(f"N = {N}: {error:.0e} from one device, {gap:.0e} from the library's block")
    assert error < 1e-9 and gap < 1e-9

# %% [markdown]
# And a whole model, on a real text, embedding and vocabulary split too:

# %%
topics = text()
inputs, targets = (a[:3] for a in topics.windows(16))
tiny = nn.Transformer(topics.vocab, 32, 4, 2, 16, dtype="float64", dropout=0.1, tied=True)
nn.cross_entropy(tiny(inputs, Randomness(0, 0, np.arange(3))), targets).backward()
alone = {name: p.grad.copy() for name, p in tiny.named_parameters().items()}
split = equivalence.gradients("sequence", tiny, inputs, targets, size=4)
print(f"a tied Transformer on 4 ranks: {worst(split, alone):.0e} from one device")
assert worst(split, alone) < 1e-9

# %% [markdown]
# ## Keep X_r, gather X again
#
# One thing is still kept N times. `functions.linear` needs its input for dW = X^T dY, and that
# input is the gathered X, whole, on every rank. So make the gathering part of the product: keep
# X_r, and gather X once more in backward. Memory is bought with bytes, 2 (N-1) S per block.


# %%
class Gathered(Function):
    """Y = X W + b with X = all_gather of X_r; keeps X_r[B, T/N, C]."""

    def __init__(self, group):
        self.group = group

    def forward(self, x, w, b):
        self.x, self.w = x, w
        return self.group.all_gather(x, axis=1) @ w + b

    def backward(self, dy):
        whole = self.group.all_gather(self.x, axis=1)  # once more
        dw = np.tensordot(whole, dy, axes=([0, 1], [0, 1]))
        return reduce_scatter(dy @ self.w.T, self.group), dw, dy.sum(axis=(0, 1))


def keeping_a_part(x, layer, group):
    return Gathered(group)(x, layer.weight, layer.bias)


def our_lean_block(block, x, group):
    return our_block(block, x, group, keeping_a_part)


for got in clusters[4].run(on_ranks, our_lean_block, dy, all_reduce_partial):
    assert worst(got, want) < 1e-9

# %% [markdown]
# ## Measurement
#
# Memory, from the list above, in S:
#
#                             between the branches              inside them
#     tensor parallel         4 + 2/e + 2/C                     (16 + H T/C) / N
#     sequence, X kept        2 + (2 + 2/e + 2/C) / N           (16 + H T/C) / N
#     sequence                (4 + 2/e + 2/C) / N               (16 + H T/C) / N
#
# 4: the inputs of norms and matrices; 2/e: masks of one byte a number; 2/C: a deviation per
# position and norm. 16: q, k, v; the heads' output; gelu's input, its tanh and its output, four
# times as wide. H T/C: attention's T x T probabilities. Beside them the bytes of a block's forward
# and backward, from the ledgers of all ranks.

# %%
WAYS = {"tensor parallel": "tp", "sequence, X kept": our_block, "sequence": "sequence"}


def costs(group, way):
    """Return (arrays kept, bytes sent forward and backward, milliseconds), for this rank."""
    split = "tp" if way == "tp" else "sequence"
    model, block = split_block(group, split, "float32")

    def forward():
        x = input_of(group, split, "float32")
        return block(x, randomness) if isinstance(way, str) else way(block, x, group)

    y, times = forward(), []
    arrays = kept(y, model.parameters())
    y.backward(np.ones_like(y.data))
    sent = group.ledger.total
    for _ in range(7):
        group.barrier()
        start = time.perf_counter()
        forward().backward(np.ones_like(y.data))
        times.append(1e3 * (time.perf_counter() - start))
    return arrays, sent, times


def memory_formula(name, N, e=4):
    fixed, inside = 2 + 2 / e + 2 / C, (16 + H * T / C) / N
    whole = {"tensor parallel": 2 + fixed, "sequence, X kept": 2 + fixed / N}
    return whole.get(name, (2 + fixed) / N) + inside


found = {}
for N, cluster in clusters.items():
    for name, way in WAYS.items():
        arrays, sent, times = zip(*cluster.run(costs, way), strict=True)
        memory_S, sent_S = in_S(arrays[0]), sum(sent) / (4 * B * T * C)
        ms = np.min(np.max(times, axis=0))
        kept_by = f"a rank keeps {memory_S:6.3f} S, all send {sent_S:2.0f} S"
        print(f"N = {N}, {name:16}: {kept_by}, {ms:4.1f} ms")
        assert abs(memory_S - memory_formula(name, N)) < 1e-9
        assert sent_S == (10 if name == "sequence" else 8) * (N - 1)
        found[name, N] = memory_S, sent_S

# %% [markdown]
# The times, the best of seven, are your machine's, where ranks share cores; they are not asserted.
# Korthikanti et al. measured a layer 3% faster (their table 4), since norms and dropout see T/N
# positions; they hide the extra gather behind the product dY W^T, which does not need X.
#
# The paper counts differently, and its formulas are worth knowing (equations 1, 2 and 4; s = T,
# b = B, h = C, a = H, t = N):
#
#     tensor parallel   sbh (10 + 24/t + 5 as/(ht)) bytes          sequence   sbh (34 + 5 as/h) / t
#
# From our list to theirs: a number takes 2 bytes, a mask 1; the norms' deviations are neglected;
# gelu keeps its input alone; and attention has a dropout of its own on the probabilities, which
# keeps those (2 bytes), a mask (1) and what is left (2): 5 where we have one number. Then the two
# agree to the byte:


# %%
def counted_as_they_do(arrays):
    """Return the bytes that Korthikanti et al. would count for this list."""
    total = 0
    for name, elements, itemsize in arrays:
        each = {"LayerNorm.r": 0, "GeluTanh.t": 0, "CausalAttention.p": 5}.get(name, 2)
        total += elements * (1 if itemsize == 1 else each)
    return total


for N, cluster in clusters.items():
    for way in ("tp", "sequence"):
        tp, sequence = 10 + 24 / N + 5 * H * T / (C * N), (34 + 5 * H * T / C) / N
        theirs = B * T * C * (tp if way == "tp" else sequence)
        assert counted_as_they_do(cluster.run(memory, way)[0]) == theirs
print("Korthikanti et al., equations 1, 2 and 4: reproduced from the arrays of the graph")


# %%
def draw(plt):
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6), width_ratios=[3, 2])
    figure.suptitle("Split the sequence between the matrices, and nothing is kept twice")
    words = ["tensor\nparallel", "sequence,\nX kept", "sequence\n"]
    bars = [(0, 1, "sequence", "one\ndevice")]
    for start, N in ((2, 2), (6.5, 4)):
        bars += [(start + 1.25 * i, N, name, words[i]) for i, name in enumerate(WAYS)]
    own = np.array([found[name, N][0] for _, N, name, _ in bars])
    same = np.array([memory_formula(name, 1e18) for _, _, name, _ in bars])  # what no N shrinks
    places = [x for x, *_ in bars]
    left.bar(places, own - same, color=figures.FORWARD, label="this rank's own")
    more = {"facecolor": figures.EMPHASIS, "edgecolor": "white", "hatch": "//"}
    left.bar(places, same, bottom=own - same, label="the same on every rank", **more)
    for x, height in zip(places, own, strict=True):
        left.text(x, height + 0.4, f"{height:.1f}", ha="center", fontsize=9)
    ideal = {"linestyle": "--", "color": figures.INK, "linewidth": 1}
    for x, N in ((3.25, 2), (7.75, 4)):
        label = "one device's, divided by the ranks" if N == 2 else None
        left.plot([x - 1.9, x + 1.9], [found["sequence", 1][0] / N] * 2, label=label, **ideal)
        left.text(x, -5.2, f"{N} ranks", ha="center")
    left.set_xticks(places, [word for *_, word in bars], fontsize=8)
    left.legend(loc="upper right", reverse=True)
    left.set(title="A rank keeps of a block", ylabel="activations X[B, T, C]", ylim=(0, 31))

    two = [("4 reduce_scatter", 4), ("4 all_gather", 4)]
    for y, pieces in enumerate([[("4 all_reduce", 8)], two, [*two, ("2 again", 2)]]):
        start = 0
        for what, length in pieces:
            right.barh(y, length, left=start, height=0.6, color=figures.COMMUNICATION, ec="white")
            right.text(start + length / 2, y, what, ha="center", va="center", fontsize=9)
            start += length
    right.set_yticks(range(3), words, fontsize=9)
    right.invert_yaxis()
    right.set(title="All ranks send for a block", xlabel="activations X[B, T, C], times N - 1")
    for axes, which in ((left, "x"), (right, "y")):
        axes.tick_params(axis=which, length=0)
    return figure


figures.save(draw, "13_sequence_parallel")

# %% [markdown]
# ## Exercise 1: whose mask?
#
# Write `own_mask(group, name, rate, randomness)`: what dropout keeps of X_r[B, T/N, C], so that all
# ranks' masks side by side are one device's mask of X[B, T, C].
#
# *Hint:* `randomness.keep` takes `window=`, a slice per axis of one example, and `full_shape=`.


# %%
def own_mask(group, name, rate, randomness):
    """Return booleans [B, T/N, C]."""
    raise NotImplementedError  # your line here


# %% [markdown]
# The check, and two tempting answers: the plain call, with which all ranks drop the same elements
# of their parts, and a seed per rank.


# %%
def run_mask(group, attempt):
    try:
        return attempt(group, "layer", 0.5, randomness)
    except NotImplementedError:
        return None


def check_mask(attempt):
    parts = clusters[4].run(run_mask, attempt)
    if any(part is None for part in parts):
        return "not solved yet"
    if any(np.shape(part) != (B, T // 4, C) for part in parts):
        return "wrong: a rank's mask is [B, T/N, C]"
    whole = randomness.keep("layer", 0.5, (B, T, C))
    same = np.mean(np.concatenate(parts, axis=1) == whole)
    return "solved" if same == 1 else f"wrong: {same:.0%} of it is one device's mask"


def plain_call(group, name, rate, randomness):
    return randomness.keep(name, rate, (B, T // group.size, C))


def seed_per_rank(group, name, rate, randomness):
    own = Randomness(randomness.seed + group.rank, randomness.step, randomness.examples)
    return own.keep(name, rate, (B, T // group.size, C))


print("exercise 1:", check_mask(own_mask))
for tempting in (plain_call, seed_per_rank):
    verdict = check_mask(tempting)
    print("a tempting answer:", verdict)
    assert verdict.startswith("wrong")

# %% [markdown]
# ## Exercise 2: why did this break?
#
# Somebody turned on sequence parallelism in a program that was right without it. The loss of the
# first step is the same to rounding. The gradients, compared with one device's, are not:


# %%
def nothing(block, group):
    pass


broken = clusters[4].run(on_ranks, our_block, dy, nothing)[0]
for name in want:
    off = abs(broken[name] - want[name]).max() / abs(want[name]).max()
    print(f"{name:32} off by {off:.1e}")

# %% [markdown]
# Which parameters are off, and why these? Write `complete(block, group)`, to be called after
# backward, which repairs them and leaves the others alone. (Left as it is, the ranks' norms would
# also drift apart, each following its own positions.)
#
# *Hint:* a parameter that is split has a `p.shard`; of one that is not, every rank has the whole.


# %%
def complete(block, group):
    """Give every parameter its whole gradient, in place."""
    raise NotImplementedError  # your lines here


# %%
def run_complete(group, attempt):
    try:
        return on_ranks(group, our_block, dy, attempt)
    except NotImplementedError:
        return None


def check_complete(attempt):
    got = clusters[4].run(run_complete, attempt)
    if None in got:
        return "not solved yet"
    off = [name for name in want if not worst({name: got[0][name]}, {name: want[name]}) < 1e-9]
    if off:
        return f"wrong: {', '.join(name.removeprefix('blocks.0.') for name in off[:3])} ... are off"
    return "solved" if all(worst(g, want) < 1e-9 for g in got) else "wrong: ranks differ"


def sum_everything(block, group):
    for p in block.parameters():
        p.grad = group.all_reduce(p.grad)


def average(block, group):
    for p in block.parameters():
        if p.shard is None:
            p.grad = group.all_reduce(p.grad) / group.size


print("exercise 2:", check_complete(complete))
for tempting in (sum_everything, average):
    verdict = check_complete(tempting)
    print("a tempting answer:", verdict)
    assert verdict.startswith("wrong")
assert check_complete(all_reduce_partial) == "solved"

# %% [markdown]
# ## Exercise 3: the bytes of a whole step
#
# A Transformer has more than blocks. The embedding's rows are split over the vocabulary, so it ends
# in a sum over ranks; the head is a column-split product. Write `step_bytes(N, depth)` in units of
# S: what all ranks send for all layers in forward and backward, with `Gathered` products. (The
# loss, numbers per position, and the partial gradients, numbers per model, are left out.)
#
# *Hint:* the embedding leaves like a branch that nobody entered; the head enters, never to leave.


# %%
def step_bytes(N, depth):
    """Return bytes / S."""
    raise NotImplementedError  # your line here


# %%
def measure_step(group, depth):
    """Return the bytes of the activations that this rank has sent in one step."""
    model = sequence_parallel(nn.Transformer(32, C, H, depth, T), group)
    tokens = np.zeros((B, T), int)
    y = model(tokens)
    y.backward(np.ones_like(y.data))
    return group.ledger.total


def check_step(attempt):
    for N, depth in ((1, 1), (2, 1), (4, 1), (2, 3)):
        sent = sum(clusters[N].run(measure_step, depth)) / (4 * B * T * C)
        try:
            said = attempt(N, depth)
        except NotImplementedError:
            return "not solved yet"
        if said != sent:
            return f"wrong: {said} S for N = {N}, depth {depth}; measured {sent:g}"
    return "solved"


print("exercise 3:", check_step(step_bytes))
for tempting in (
    lambda N, depth: 10 * (N - 1) * depth,
    lambda N, depth: (N - 1) * (10 * depth + 4),
):
    verdict = check_step(tempting)
    print("a tempting answer:", verdict)
    assert verdict.startswith("wrong")

# %% [markdown]
# ## What it costs, and the next problem
#
# - **Bytes:** a quarter more than tensor parallelism, 10 (N-1) S for 8, for keeping X_r.
# - **T must be a multiple of N**, and a parameter between the branches needs its partial gradients
#   summed; forgotten, nothing fails but the gradient.
# - **The communication has no slack:** the next product waits for the gather. It needs the fastest
#   links there are, so N stays within a machine.
# - **H T/C grows with T.** Attention's probabilities are split over heads, never over positions; a
#   long sequence needs another cut, or to recompute them.
#
# Ranks beyond one machine have to be put on another axis: layers or examples. Lesson 16 does all
# three at once.

# %%
for cluster in clusters.values():
    cluster.close()
