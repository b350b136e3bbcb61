# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
#   minidist: {lesson: 13, minutes: 30, needs: [2, 11, 12], leads_to: [14, 16], lab: splits}
# ---

# %% [markdown]
# (lesson-13)=
# # 13. Sequence parallelism: no activation is kept twice
#
# **Question.** With [split matrices](12_parallel_transformer.py) every rank still does and keeps
# norms, dropout and sums for all positions. What does it cost to split them, too?
#
# You need [f and g](11_column_and_row.py), [all_gather and reduce_scatter](02_collectives.py). New
# word: [sequence parallelism](pages/glossary.md#sequence-parallelism). Letters: $N$ ranks; $B$
# examples of $T$ positions; $C$ the width; $H$ heads; $S$ the bytes of one activation X[B, T, C].

# %% tags=["setup", "hide-input"]
import numpy as np
from support import begin, exercise, figures

from minidist import Cluster, Tensor, nn
from minidist.autograd import Function
from minidist.autograd.attention import causal_attention
from minidist.autograd.functions import gelu, linear
from minidist.autograd.recomputation import kept
from minidist.parallel.collective_functions import reduce_scatter_along
from minidist.rng import Randomness
from minidist.tensor_parallel import ParallelTransformer
from minidist.tensor_parallel.sequence_parallel import sequence_parallel

begin()
N, B, T, C, H = 4, 2, 64, 64, 8
cluster = Cluster(N)
X, dY = np.random.default_rng(0).standard_normal((2, B, T, C))
randomness = Randomness(seed=0, step=0, examples=np.arange(B))

# %% [markdown]
# ## Problem: 24 GB are the same on all eight ranks
#
# GPT-3 has 96 blocks with $C = 12288$. For one example of 2048 positions, in 16 bits, each of 8
# ranks keeps 56 GB for backward ([Korthikanti et al. 2022](https://arxiv.org/abs/2205.05198),
# equation 2). $10 B T C$ bytes of a block, 24 GB, are the same on all ranks: what is made *between*
# $g$ and the next $f$.
#
# ## Idea: an all_reduce has two halves
#
# An all_reduce is a reduce_scatter and then an all_gather. Between $g$ and the next $f$ are norm,
# dropout and the sum with X, which never mix two positions. So do the first half after the rows, go
# on with $T/N$ positions, and do the second half where the next columns need all of them.


# %%
class Enter(Function):
    """In the place of f.  Forward: all_gather along T;  backward: reduce_scatter."""

    def __init__(self, group):
        self.group = group

    def forward(self, x):
        return self.group.all_gather(x, axis=1)

    def backward(self, dx):
        return reduce_scatter_along(dx, self.group, axis=1)


class Leave(Enter):
    forward, backward = Enter.backward, Enter.forward  # in the place of g: the other way round


def ours(block, x, group):
    """X[B, T/N, C] -> the same shape; the block has this rank's heads, columns and rows."""
    a, first, last = block.attention, block.expand, block.contract
    qkv = linear(Enter(group)(block.norm_1(x)), a.qkv.weight, a.qkv.bias)  # all positions
    qkv = qkv.reshape(B, T, 3, H // N, C // H).transpose(2, 0, 3, 1, 4)
    heads = causal_attention(qkv).transpose(0, 2, 1, 3).reshape(B, T, C // N)
    y = Leave(group)(linear(heads, a.output.weight)) + a.output.bias  # this rank's positions
    x = x + block.dropout_1(y, randomness)
    hidden = gelu(linear(Enter(group)(block.norm_2(x)), first.weight, first.bias))
    y = Leave(group)(linear(hidden, last.weight)) + last.bias
    return x + block.dropout_2(y, randomness)


# %% [markdown]
# Is it right? One device, [split matrices](../minidist/tensor_parallel/parallel_transformer.py) and
# the library's [`sequence`](../minidist/tensor_parallel/sequence_parallel.py) do the same block:


# %%
def run(group, split, forward=None):
    """Return Y and dX, [(what, how many S)] that this rank keeps, and how many S it sends."""
    parts = N if split is sequence_parallel else 1
    own, dy = (np.split(array, parts, axis=1)[group.rank % parts] for array in (X, dY))
    model, x = nn.Transformer(32, C, H, 1, T, 0, "float64", dropout=0.1), Tensor(own, True)
    block = (split(model, group, check_weights=False) if split else model).layers[1]
    y = forward(block, x, group) if forward else block(x, randomness)
    arrays = [(what, array.nbytes / X.nbytes) for what, array in kept(y)]
    y.backward(dy)
    return np.stack([y.data, x.grad]), arrays, group.ledger.total / X.nbytes


WAYS = {"one device": (None,), "tensor": (ParallelTransformer,)}
WAYS |= {"ours": (sequence_parallel, ours), "sequence": (sequence_parallel,)}
found = {name: [*zip(*cluster.run(run, *way), strict=True)] for name, way in WAYS.items()}
for name in ("ours", "sequence"):
    error = abs(np.concatenate(found[name][0], axis=2) - found["one device"][0][0]).max()
    print(f"{name}: Y and dX are within {error:.0e} of one device's")
    assert error < 1e-9

# %% [markdown]
# ## What is kept N times?
#
# :::{admonition} Predict before you run
# Of all that a block keeps for backward (norms, inputs of matrices, q, k, v, probabilities, gelu,
# dropout masks), what is whole on every rank of tensor parallelism? And with ours?
# :::

# %% tags=["hide-output"]
print(f"kept, in S:       {''.join(f'{name:>12}' for name in WAYS)}")
for lines in zip(*[kept_by[0] for _, kept_by, _ in found.values()], strict=True):
    print(f"{lines[0][0]:18}{''.join(f'{size:12.3f}' for _, size in lines)}")
total = [sum(size for _, size in kept_by[0]) for _, kept_by, _ in found.values()]
print(f"{'all':18}{''.join(f'{size:12.3f}' for size in total)}")
outside, inside = 4 + 2 / 8 + 2 / C, (16 + H * T / C) / N
formulas = [outside + inside * N, outside + inside, 2 + (outside - 2) / N + inside]
assert np.allclose(total, [*formulas, outside / N + inside])

# %% [markdown]
# :::{dropdown} Where does the number come from?
# | tensor parallelism, in $S$ | array | where |
# |---|---|---|
# | $2 + 2/C$ | normalised X, a deviation per position | two norms |
# | 2 | X after the norm | inputs of QKV and expand |
# | 2/8 | masks of one byte; a number has 8 | two dropouts |
# | $4/N$ | q, k, v; the heads' output | attention; input of the output rows |
# | $(H T / C) / N$ | probabilities, T x T for each head | attention |
# | $12/N$ | gelu's input, factor and output, $4 C$ wide | gelu; input of contract |
# :::
#
# ## What travels?
#
# With the sequence split lines 1 to 3 are divided by $N$, too. But ours keeps the gathered X (line
# 2) for the gradient of the columns. The library keeps a part, and gathers X again in backward.
#
# :::{admonition} Predict before you run
# A block of tensor parallelism has 4 all_reduces: $8 (N-1) S$ bytes over all ranks. How many does
# it send with the sequence split, if the gathered X is kept, and if it is gathered again?
# :::

# %% tags=["hide-output"]
sent = {name: sum(of_ranks) / (N - 1) for name, (_, _, of_ranks) in found.items()}
print("sent, in (N - 1) S:", sent)
assert sent == {"one device": 0, "tensor": 8, "ours": 8, "sequence": 10}


# %% tags=["hide-input"]
def draw(plt):
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.2), width_ratios=[3, 2])
    pink, alike = {"color": figures.COMMUNICATION}, {"color": figures.SAME}
    grey = 0, outside, 2, 0  # what is the same on all ranks
    words = "", ", grey: the same on all ranks", "", ", line: a quarter of one device"
    for y, (all_, same) in enumerate(zip(total, grey, strict=True)):
        figures.stack(left, -y, [(all_ - same, "", {"color": figures.OWN}), (same, "", alike)])
        left.text(all_ + 0.3, -y, f"{all_:.1f}{words[y]}", va="center")
    left.axvline(total[0] / N, color=figures.INK, lw=1)
    left.set_yticks([0, -1, -2, -3], ["one device", "tensor", "sequence,\nX kept", "sequence"])
    left.set(title="One of 4 ranks keeps", xlabel="activations of $S$ bytes", xlim=(0, 32))
    halves = [(4, "4 reduce_\nscatter", pink), (4, "4 all_\ngather", pink)]
    figures.stack(right, -1, [(2, "all_\nreduce", pink)] * 4)
    figures.stack(right, -2, halves)
    figures.stack(right, -3, [*halves, (2, "2 more", pink)])
    right.set(
        title="All ranks send", xlabel="bytes, in $(N-1)$ $S$", yticks=[], ylim=left.get_ylim()
    )
    return figure


figures.show(
    draw,
    "13_sequence_parallel",
    caption="With the sequence split no activation is kept twice, unless the gathered X is kept.",
    alt="Bars of memory: tensor parallelism on four ranks has a grey part that all ranks have "
    "alike, the split sequence has none. Bars of bytes: 8, 8 and 10 units.",
)

# %% [markdown]
# So the split costs the same bytes, or a quarter more. The paper's layers become 3% faster (table
# 4): norms and dropout see $T/N$ positions, and the extra gather runs during another product.
#
# :::{admonition} Predict before you run
# GPT-3 on 8 ranks, as in the problem: of 56 GB on each rank, how many are left?
# :::
# :::{dropdown} Answer
# 34 GB. The paper counts $B T C (10 + 24/N + 5 H T / (N C))$ bytes for a block with split matrices,
# and $B T C (34 + 5 H T / C) / N$ with the sequence split as well; $H = 96$.
# :::
#
# *Sequence parallelism has three meanings.* Here positions are split between the matrices only, and
# attention sees all of them. A ring ([Li et al. 2021](https://arxiv.org/abs/2105.13120)) and
# Ulysses split them in attention, too: that is [context parallelism](14_context_parallel.py).
#
# ## Exercise 1: whose mask?
#
# All ranks' dropout masks, side by side, must be one device's mask of X. `randomness.keep(name,
# rate, shape, window=..., full_shape=...)` is a window of a mask: a slice per axis of one example.


# %% tags=["exercise"]
def own_mask(group, name, rate, randomness, T, C):
    """Return booleans [B, T/N, C]: what dropout keeps; B is len(randomness.examples)."""
    raise NotImplementedError  # your lines here


exercise.judge("13.1", own_mask)

# %% [markdown]
# ## Exercise 2: why did this break?
#
# Somebody turned on sequence parallelism in a program that was right without it. The loss of the
# first step is still right, some gradients are not. Run the stub with `pass` to see which. Why
# these? Write `complete`, which is called after backward and repairs them.


# %% tags=["exercise"]
def complete(block, group):
    """Give each p of block.parameters() its whole p.grad; p.shard: None if ranks hold all of p."""
    raise NotImplementedError  # your lines here


exercise.judge("13.2", complete)

# %% [markdown]
# ## Exercise 3: the bytes of a whole step
#
# Write `step_bytes(N, L)`: what all ranks send for a Transformer of $L$ blocks in forward and
# backward, in $S$. The embedding ends in a sum over ranks, the logits begin with columns, and no
# gathered array is kept. Leave out the loss and the partial gradients.


# %% tags=["exercise"]
def step_bytes(N, L):
    """Return the number of S."""
    raise NotImplementedError  # your line here


exercise.judge("13.3", step_bytes)
cluster.close()

# %% [markdown]
# ## At work
#
# | here | PyTorch | Megatron-LM | DeepSpeed | JAX |
# |---|---|---|---|---|
# | `sequence` | `SequenceParallel` | `--sequence-parallel` | | `P(None, "tp", None)` |
#
# **What it costs.** $T$ is a multiple of $N$. The next product waits for the gather, so $N$ ranks
# are in one machine. Forget the partial gradients, and nothing is raised.
#
# **Next:** $H T / C$ grows with $T$, and heads are few. [Split attention](14_context_parallel.py).
