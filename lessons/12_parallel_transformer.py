# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
#   minidist: {lesson: 12, minutes: 35, needs: [3, 11], leads_to: [13, 14, 16], lab: splits}
# ---

# %% [markdown]
# (lesson-12)=
# # 12. A Transformer on many ranks: heads, columns, rows and words
#
# **Question.** Attention, the embedding and the loss over a vocabulary are no MLPs. Can they, too,
# be cut by columns and rows, and when does that send less than splitting the batch?
#
# You need [f and g](11_column_and_row.py) and [data parallelism](03_data_parallel.py). Letters: $N$
# ranks; $B$ examples of $T$ positions; $C$ the width; $V$ words; $L$ blocks; $P$ parameters; $z$ a
# logit, the score of a word; $y$ the target, the word that comes; $Z$ the sum of $\exp(z)$ over all
# words; $l$ the loss of a position; $S$ bytes; $H$ heads of width $D$.

# %% tags=["setup", "hide-input"]
import numpy as np
from support import begin, exercise, figures

from minidist import Cluster, nn
from minidist.autograd import functions
from minidist.data_parallel.naive import all_reduce_gradients
from minidist.tensor_parallel import ParallelAttention, ParallelTransformer, vocab_parallel

begin()
N, T, C, H, V, L = 4, 16, 32, 4, 12, 2
cluster = Cluster(N)
tokens, targets = np.random.default_rng(0).integers(0, V, (2, 1, T))
embedding = nn.Embedding(V, C, dtype="float64")
attention = nn.CausalSelfAttention(C, H, dtype="float64")
embedding.weight.data *= 20
TABLE, EARLIER = embedding.weight.data, np.tri(T, dtype=bool)
QKV = attention.qkv.weight.data.reshape(C, 3, H, C // H).transpose(1, 2, 0, 3)  # [3, H, C, D]
OUTPUT = attention.output.weight.data.reshape(H, C // H, C)

# %% [markdown]
# ## Problem: the loss alone keeps 1.65 GB
#
# The loss keeps a probability for every word at every position. For GPT-2's 50,257 words and 8
# sequences of 1024 tokens these are $4 B T V$ bytes, 1.65 GB. If only the blocks' matrices are cut,
# every rank holds this array whole.
#
# ## Idea: a head is a run of columns, a word is a row
#
# *Attention:* heads do not depend on each other. A rank makes q, k and v of its heads: columns. The
# output matrix multiplies each head with its rows, and adds: rows, then $g$. *Embedding:* a rank
# has some rows of the table, zeros for other words: rows, then $g$. *Logits:* a column for each
# word. The *loss* $l = \log Z - z_y$ never joins them. Ranks exchange three numbers per position:
# the largest $z$, $Z$, $z_y$ ([Shoeybi et al. 2019](https://arxiv.org/abs/1909.08053), section 3).


# %%
def own_rows(indices, words, table):
    held = np.isin(indices, words)  # which of them this rank has; it adds 0 for the others
    return np.where(held[:, None], table[(indices - words[0]) * held], 0)


def model(group):
    """Return the loss of embedding, one attention, and logits; their matrix is the table."""
    heads = np.split(np.arange(H), group.size)[group.rank]
    words = np.split(np.arange(V), group.size)[group.rank]
    x = group.all_reduce(own_rows(tokens[0], words, TABLE[words]))  # rows, g: [T, C]
    q, k, v = x @ QKV[:, heads]  # columns: [H/N, T, D] each
    s = np.exp(np.where(EARLIER, q @ k.swapaxes(1, 2) / np.sqrt(C / H), -np.inf))
    o = s / s.sum(axis=-1, keepdims=True) @ v
    x = x + group.all_reduce((o @ OUTPUT[heads]).sum(axis=0))  # rows, g
    z = x @ TABLE[words].T  # columns: [T, V/N]
    z -= group.all_reduce(z.max(axis=1), op="max")[:, None]
    Z = group.all_reduce(np.exp(z).sum(axis=1))
    z_y = group.all_reduce(own_rows(targets[0], words, z.T).diagonal())  # z[i, y of i]
    return (np.log(Z) - z_y).mean()


# %% [markdown]
# The library has layers split by [heads](../minidist/tensor_parallel/parallel_attention.py), its
# strategy `attention`, and by [words](../minidist/tensor_parallel/vocab_parallel.py), `vocab`:


# %%
def library(group):
    split = vocab_parallel.VocabParallelEmbedding(embedding, group)
    x = split(tokens)
    x = x + ParallelAttention(attention, group)(x)
    z = vocab_parallel.split_product(x, split.weight, group, transposed=True)
    return vocab_parallel.cross_entropy(z, targets, group=group, vocab=V).item()


x = embedding(tokens)
x = x + attention(x)
loss = nn.cross_entropy(functions.linear(x, embedding.weight, transposed=True), targets).item()
for name, found in (("ours", cluster.run(model)), ("the library", cluster.run(library))):
    error = max(abs(each - loss) for each in found)
    print(f"{name}: loss {found[0]:.4f} on each of {N} ranks, {error:.0e} from one device's")
    assert error < 1e-12

# %% [markdown]
# :::{admonition} Predict before you run
# For the loss the ranks meet three times in forward. How often do they meet in its backward?
# :::
# :::{dropdown} Answer
# Not once. The gradient of a logit is $\exp(z) / Z$, less 1 for the target, and a rank has its own
# logits and $Z$. Three all_reduces of $B T$ numbers replace an all_gather of $B T V$ numbers.
# :::
#
# ## When does it send less than a split batch?
#
# A block with its [MLP](11_column_and_row.py) has two $g$ in forward and two $f$ in backward; the
# embedding has a $g$, the logits an $f$. With $S = 4 B T C$ all ranks send
# $(N-1) ((8 L + 4) S + 24 B T)$ bytes in a step; $24 B T$ is the loss. A split batch sends the
# gradients, $2 (N-1) 4 P$ bytes. For a block alone the two are equal at $B T = 3 C$ tokens.
#
# :::{dropdown} Where does the number come from?
# A block has about $12 C^2$ parameters, so it sends $32 (N-1) B T C$ or $96 (N-1) C^2$ bytes.
# :::
#
# :::{admonition} Predict before you run
# Biases and norms add $13 C$ parameters to a block. Embedding and logits add two meetings, and few
# parameters if there are few words. Is the crossing of a whole model below or above $3 C$?
# :::


# %% tags=["hide-output"]
def bytes_sent(group, words):
    """Return what this rank sends if matrices are split, and if the batch is split."""
    parts = ParallelTransformer(nn.Transformer(V, C, H, L, T), group, check_weights=False)
    vocab_parallel.cross_entropy(parts(words), words, group=group, vocab=V).backward()
    over_matrices = group.ledger.total
    whole, own = nn.Transformer(V, C, H, L, T), np.split(words, N)[group.rank]
    nn.cross_entropy(whole(own), own, reduction_size=words.size).backward()
    all_reduce_gradients(whole, group)
    return over_matrices, group.ledger.total - over_matrices


P, sent = sum(p.size for p in nn.Transformer(V, C, H, L, T).parameters()), {}
for BT in (64, 128, 192):
    sent[BT] = np.sum(cluster.run(bytes_sent, np.zeros((BT // T, T), int)), axis=0)
    print("{} tokens: split matrices send {:,} bytes, a split batch {:,}".format(BT, *sent[BT]))
    assert tuple(sent[BT]) == ((N - 1) * ((8 * L + 4) * 4 * BT * C + 24 * BT), 8 * (N - 1) * P)
crossing = P / ((4 * L + 2) * C + 3)
print(f"they send the same at {crossing:.0f} tokens; 3 C = {3 * C}")


# %% tags=["hide-input"]
def draw(plt):
    figure, (top, below) = plt.subplots(2, 1, figsize=(9, 5.4), height_ratios=[1, 2])
    meeting, alike = {"color": figures.COMMUNICATION}, {"facecolor": figures.SAME}
    for rank in (0, 1):
        pieces = []
        for names in (["QKV", "heads", "output"], ["expand", "gelu", "contract"]):
            parts = [(2.6, name, figures.part(rank)) for name in names]
            pieces += [(2, "norm", alike), (1, "f", meeting), *parts]
            pieces += [(1, "g", meeting), (2, "+ X", alike)]
        figures.stack(top, rank, pieces, height=0.9)
    top.set_title("A block: the ranks meet at f and g")
    top.set(xticks=[], yticks=[0, 1], yticklabels=["rank 0", "rank 1"], ylim=(1.6, -0.6))
    x, MB = np.array([0, 210]), np.array(list(sent.values())) / 1e6
    below.axvspan(0, crossing, color="#CFE8F7", lw=0)
    below.plot(x, x * MB[0, 0] / 64, "-", x, MB[:2, 1], "--", color=figures.INK)
    below.plot(list(sent), MB, "o", color=figures.INK)
    below.axvline(3 * C, color=figures.INK, lw=1, ls=":")
    below.text(150, 0.95, "split matrices")
    below.text(150, 0.53, "split batch")
    below.text(3 * C + 2, 1.3, f"3 C = {3 * C}: a block without\nbiases and norms")
    below.set(xlabel="tokens in a step (dots: measured)", xlim=x, ylabel="MB sent by all ranks")
    below.set(facecolor=figures.ROW, title="Sends less: matrices (blue), batch (grey)")
    return figure


figures.show(
    draw,
    "12_parallel_transformer",
    caption="Grey: the same on both ranks. Biases and norms move the crossing up from 3 C tokens; "
    "the meetings of embedding and logits move it down, and by more.",
    alt="A strip of a block with pink meetings f and g, and a plot of bytes over tokens: a rising "
    "line for split matrices crosses the flat line of a split batch a little before 3 C tokens.",
)

# %% [markdown]
# And in seconds? Shoeybi et al. (table 1, section 5) cut 72 blocks of width 3072 over 8 GPUs, and
# the batch over 64 such groups, 8192 tokens each. A GPU has 300 GB/s in its server, 6.25 outside.
#
# :::{admonition} Predict before you run
# 8192 tokens are less than $3 C = 9216$. Does a GPU send less for $f$ and $g$ than for gradients?
# :::

# %% tags=["hide-output"]
GB = {"f and g": 8 * 7 / 8 * 72 * 8192 * 3072 * 2e-9, "gradients": 2 * 63 / 64 * 8.3 / 8 * 2}
for what, size in GB.items():  # 2 bytes a number; 8.3 billion parameters
    print(f"{what}: {size:.1f} GB, {size / 300:.2f} s in a server, {size / 6.25:.2f} s outside")

# %% [markdown]
# A GPU sums gradients during backward; for $f$ and $g$ it waits. So split matrices in machines, the
# batch between machines ([Narayanan et al. 2021](https://arxiv.org/abs/2104.04473), section 3).
#
# ## Exercise 1: why did this break?
#
# QKV has $3 C$ columns, in the order [3, H, D]. Somebody cut them into equal runs. All shapes fit,
# nothing is raised, and the output is wrong. Why? Write `my_columns`.


# %% tags=["exercise"]
def equal_runs(width, heads, rank, size):
    return np.array_split(np.arange(3 * width), size)[rank]


def my_columns(width, heads, rank, size):
    """Return the indices of the columns of QKV that a rank needs; width: C."""
    raise NotImplementedError  # your lines here


exercise.judge("12.1", my_columns)

# %% [markdown]
# ## Exercise 2: the next word, without the logits
#
# Every rank needs the most likely word, and has the logits of its own V/N words. A rank may send
# two numbers per example to each other rank. Of equal logits the first word wins.


# %% tags=["exercise"]
def next_words(z, group):
    """Return words[B], the same on all ranks; z[B, V/N]: the logits of this rank's words."""
    raise NotImplementedError  # your lines here


exercise.judge("12.2", next_words)

# %% [markdown]
# ## Exercise 3: the length of the gradient
#
# Clipping needs the root of the sum of all squares of the gradient. A rank has parts of some
# gradients (`p.shard` is not None) and all of the others. One all_reduce is enough.


# %% tags=["exercise"]
def gradient_length(model, group):
    """Return the length; `p.grad` of each p in `model.parameters()` is what this rank has."""
    raise NotImplementedError  # your lines here


exercise.judge("12.3", gradient_length)
cluster.close()

# %% [markdown]
# ## At work
#
# | here | PyTorch | Megatron-LM | DeepSpeed | JAX |
# |---|---|---|---|---|
# | `attention` | `parallelize_module` | `--tensor-model-parallel-size` | | `P(None, "tp")` |
# | `vocab` | `loss_parallel` | `vocab_parallel_cross_entropy` | | |
#
# **What it costs.** Four meetings per block that nothing hides; at most as many ranks as heads;
# every rank does norms, dropout and sums for all positions. *Today's block,* `nn.Llama`, has fewer
# heads of keys and values. Ranks with the same one [sum its
# gradient](../minidist/tensor_parallel/parallel_attention.py), and no others.
#
# **Next:** outside of $f$ and $g$ the [sequence can be split](13_sequence_parallel.py).
