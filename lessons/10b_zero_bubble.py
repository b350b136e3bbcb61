# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
#   minidist: {lesson: 10b, minutes: 35, needs: [8, 10], leads_to: [11, 20, 24], lab: pipelines}
# ---

# %% [markdown]
# (lesson-10b)=
# # 10b. Zero bubble: half of a backward can wait
#
# **Question.** Which half of a backward does no other rank wait for, and what does a pipeline gain
# if that half waits instead of the ranks?
#
# You need [1F1B](08_one_f_one_b.py) and [chunks](10_interleaved.py). New word: [weight
# half](pages/glossary.md#weight-half). Letters: $p$ ranks, $r$ one of them; $m$ micro-batches; $v$
# chunks; $TF$ the time of a forward on one rank, $TI$ and $TW$ those of the halves of backward, for
# the input and for the weights: $TB = TI + TW$. So `B3` is `I3` and `W3`.

# %% tags=["setup", "hide-input"]
from itertools import product
from random import Random

from support import begin, exercise, figures

from minidist import Cluster, nn
from minidist.nn.datasets import Batch, digits
from minidist.observe.timeline.figure import draw_into
from minidist.pipeline_parallel import Pipeline, programs, read
from minidist.pipeline_parallel.actions import BackwardInput, BackwardWeight, Forward
from minidist.pipeline_parallel.random_order import random_order
from minidist.planning import simulate

begin()
images, labels = digits("float64")
cluster = Cluster(4)

# %% [markdown]
# ## Problem: 3 ranks wait 40 % of the time, for products that they do not need
#
# In 1F1B 3 ranks with 3 micro-batches take 15 units, and each works 9 ($TF = TI = TW = 1$).
# Backward of $Y = X W$ is two products, `dX = dY @ W.T` and `dW = X.T @ dY`. `I3` makes $dX$, for
# which the rank before waits. `W3` makes $dW$, for which *nobody* waits but the optimizer, at the
# end. Yet `B3` sends $dX$ only when it has also computed $dW$, on every rank of the way back.
#
# ## Idea: move one W by hand
#
# Write each `B` as `I` and `W`. Then move a single `W`, the first one of rank 2, towards the end:

# %%
split = """rank 0   F0 F1 F2 I0 W0 I1 W1 I2 W2
           rank 1   F0 F1 I0 W0 F2 I1 W1 I2 W2
           rank 2   F0 I0 W0 F1 I1 W1 F2 I2 W2"""
moved = split.replace("F0 I0 W0 F1 I1 W1 F2 I2 W2", "F0 I0 F1 I1 W1 F2 I2 W0 W2")

# %% [markdown]
# :::{admonition} Predict before you run
# 1F1B takes 15. How long does `split` take, and how long does `moved`?
# :::

# %% tags=["hide-output"]
for name, text in (("split", split), ("moved", moved)):
    result = simulate(read(text))
    print(f"{name}: {result.makespan}, and the stash of the ranks is {result.peak_stash}")

# %% [markdown]
# Rank 2 paid for `W0` while the others waited for `I1` and `I2`; now it pays when it has nothing
# else to do. Where may all the others go? Rank $r$ has $r$ micro-batches fewer in flight than rank
# 0, so it has room for $r$ that wait for their `W`. This is the rule of ZB-H1 ([Qi et al.
# 2024](https://arxiv.org/abs/2401.10241), section 2.1), for any program of 1F1B:


# %%
def late_weights(program, late):
    """Split every B; each W waits for `late` more I, and the last ones for the end."""
    result, waiting = [], []
    for action in program:
        if isinstance(action, Forward):
            result.append(action)
        else:
            result.append(BackwardInput(action.micro_batch))
            waiting.append(BackwardWeight(action.micro_batch))
            if len(waiting) > late:
                result.append(waiting.pop(0))
    return result + waiting


def our_zb_h1(p, m):
    return [late_weights(own, late=rank) for rank, own in enumerate(programs("1f1b", p, m))]


for p, m in product(range(1, 6), range(1, 10)):
    assert our_zb_h1(p, m) == programs("zb_h1", p, m)


def step(group, order):
    """Return this rank's gradients, and the bytes that it sent."""
    model = nn.MLP([64, *[32] * 7, 10], activation="gelu", dtype="float64")
    pipeline = Pipeline(model, group, order)
    pipeline.backward(Batch(images[:40], labels[:40]))
    return {name: p.grad for name, p in pipeline.named_parameters().items()}, group.ledger.total


one = nn.MLP([64, *[32] * 7, 10], activation="gelu", dtype="float64")
nn.cross_entropy(one(images[:40]), labels[:40]).backward()
ranks = cluster.run(step, our_zb_h1(4, 8))
found = {name: grad for grads, _ in ranks for name, grad in grads.items()}
error = max(abs(found[name] - p.grad).max() for name, p in one.named_parameters().items())
sent = sum(sent for _, sent in ranks)
print(f"the library's zb_h1; 4 ranks: {error:.0e} from one device, {sent:,} bytes, as in 1F1B")
assert error < 1e-12 and sent == 2 * (4 - 1) * 40 * 32 * 8

# %% [markdown]
# ## How much is gained?
#
# :::{admonition} Predict before you run
# 4 ranks, 8 micro-batches. In 1F1B a rank is idle for $(p - 1)(TF + TI + TW) = 9$. In ZB-H1? And
# with attention, whose products without weights make `I` longer: $TF, TI, TW = 2, 3, 1$?
# :::

# %% tags=["hide-output"]
for p, (TF, TI, TW) in product((2, 3, 4), ((1, 1, 1), (2, 3, 1), (3, 2, 2), (3, 4, 3))):
    idle = simulate(programs("zb_h1", p, 8), TF, TI, TW).makespan - 8 * (TF + TI + TW)
    assert idle == (p - 1) * (TF + TI - TW)
    if p == 4:
        print(f"{TF, TI, TW}: idle for {idle}, in 1F1B for {3 * (TF + TI + TW)}")

# %% [markdown]
# :::{dropdown} Where does the number come from?
# The last rank begins after $(p - 1) TF$ and then never waits. Its last $p$ actions are `W`, so its
# last $dX$ is there $p TW$ before its end. It passes the other $p - 1$ ranks, $TI$ each, and rank 0
# ends with one `W`. In sum this is $(p - 1) (TF + TI - TW)$ longer than the work of a rank. (It
# holds for $m \ge p$ and $TW \le TF$, $TW \le TI$: a longer `W` makes the next rank wait.)
# :::
#
# ## Which other orders are there?
#
# `zb_h2` does more forwards first (section 2.2). Two chunks laid out as a V, stages $r$ and
# $2 p - 1 - r$ on rank $r$, bring a micro-batch back to rank 0, which computes the loss and begins
# its backward at once: `zb_v` (section 6), DeepSeek's `dualpipe_v` ([DeepSeek-AI
# 2024](https://arxiv.org/abs/2412.19437), section 3.2.1, cut in half), `v_half` and `v_min` ([Qi et
# al. 2024](https://arxiv.org/abs/2405.15362), sections 2 and 3).
#
# :::{admonition} Predict before you run
# 4 ranks, 8 micro-batches, $TF = TI = TW$. Which ends first? Which needs the smallest stash, in
# which 1F1B has 4? "Own": idle from a rank's own start to its own end, which is what is left if
# the ranks may begin the next step one after another.
# :::

# %% tags=["hide-output"]
ORDERS = {  # chunks; what it buys; what it costs
    "1f1b": (1, "at most p in the stash", "its bubble"),
    "zb_h1": (1, "a third of this bubble", "p in the stash of every rank"),
    "zb_h2": (1, "no pause after a rank's own start", "2 p - 1 in the stash"),
    "zb_auto": (1, "the best that a search finds for your times", "you measure them (here: equal)"),
    "interleaved_zb": (2, "zb_h1's bubble over v", "(v p - 1)/(p - 1) times the messages"),
    "zb_v": (2, "no pause, in 1F1B's stash", "TF = TI = TW; twice the messages"),
    "dualpipe_v": (2, "F and B in pairs: messages of one hide", "2 streams; p + 1/2 in the stash"),
    "v_half": (2, "half of 1F1B's stash, on many ranks", "a longer bubble than zb_v"),
    "v_min": (2, "a third of 1F1B's stash, on many ranks", "a still longer bubble"),
    "pipeline": (0, "any order that ranks can do: yours", "you find it (here: drawn at random)"),
}
print("                idle  own stash  buys; costs")
for name, (v, buys, costs) in ORDERS.items():
    drawn = random_order(Random(10), [[0], [1], [2], [3]], 8)
    result = simulate(programs(name, 4, 8, v) if v else drawn)
    numbers = float(result.bubble), float(result.span_bubble), float(max(result.peak_stash))
    print("{:14} {:5.0%} {:4.0%} {:5.1f}".format(name, *numbers), f" {buys}; {costs}")


# %% tags=["hide-input"]
def draw(plt):
    figure, axes = plt.subplots(2, 2, figsize=(12, 4), sharex=True, sharey=True)
    orders = programs("1f1b", 3, 3), read(split), read(moved), programs("zb_h1", 3, 3)
    titles = "1F1B", "each B in halves", "W0 of rank 2 moved", "ZB-H1, on rank r each W is r late"
    for ax, order, title in zip(axes.flat, orders, titles, strict=True):
        result = simulate(order)
        ax.barh([0.43, 1.43, 2.43], 15, 0.86, color=figures.ROW)
        draw_into(ax, result.timeline)
        ax.set(title=f"{title}: {result.makespan} units", xlim=(0, 15), xticks=range(0, 16, 3))
    axes[1, 0].barh(2.43, 1, 0.86, 9, fill=False, edgecolor=figures.EMPHASIS, linewidth=3)
    axes[1, 0].set_xlabel("time (1 = one forward); blue F, orange B or I, yellow W, grey idle")
    return figure


figures.show(
    draw,
    "10b_zero_bubble",
    caption="Nobody waits for a W (yellow), so it can move to where its rank is idle.",
    alt="Four timelines of 3 ranks and 3 micro-batches: 15 units in 1F1B, 13 with backward in "
    "halves, 12 when one weight half has moved to the end of rank 2, 11 in ZB-H1.",
)

# %% [markdown]
# ## Exercise 1: an order of your own
#
# `Pipeline(model, group, order)` runs your order, and `minidist verify --program FILE` compares its
# gradient. Write one like `split`: 3 ranks, 3 micro-batches, at most 2 in the stash of *every* rank
# (1F1B needs 3), and less than 1F1B's 15 units.


# %% tags=["exercise"]
def own_order():
    """Return a text like `split`, or three lists of actions."""
    raise NotImplementedError  # your lines here


exercise.judge("10b.1", own_order)

# %% [markdown]
# ## Exercise 2: why did this break?
#
# To save memory, a stage receives all micro-batches into one buffer. In ZB-H1 rank 0 is right. On
# the others every $dX$ is right, and $dW$ is wrong. Write the stage, with `late + 1` buffers.


# %% tags=["exercise"]
def stage(inputs, gradients, w, late, allocate):
    """Return ([dX of each micro-batch], dW); allocate() returns a new buffer.

    For each x and dy: receive, that is, copy x into a buffer; then I: dX = dY W^T; then the W of
    the micro-batch `late` before, which reads its buffer. The last W come at the end.
    """
    raise NotImplementedError  # your lines here


exercise.judge("10b.2", stage)

# %% [markdown]
# ## Exercise 3: a planner
#
# Which of `ORDERS`, without `pipeline`, is the shortest on 4 ranks that has room? Some refuse a
# number of micro-batches with a ValueError. Try a latency, and a long `W`.


# %% tags=["exercise"]
def best(m, times, latency, room):
    """Return its name; times: (TF, TI, TW); room: the largest stash that a rank may have."""
    raise NotImplementedError  # your lines here


exercise.judge("10b.3", best)
cluster.close()

# %% [markdown]
# ## At work
#
# | here | PyTorch | Megatron-LM | DeepSpeed | JAX |
# |---|---|---|---|---|
# | `interleaved_zb` | `ScheduleInterleavedZeroBubble` | | | |
# | `zb_v` | `ScheduleZBVZeroBubble` | | | |
# | `dualpipe_v` | `ScheduleDualPipeV` | | | |
# | your own | `_PipelineScheduleRuntime` | | | |
#
# **What it costs.** Between `I` and `W` a stage keeps $X$ and its output's gradient. And all ranks
# may never meet: a norm of the whole gradient, for clipping, brings the bubble back.
#
# **Try:** [write a schedule](../minidist/observe/pages/static/schedules.html).
# **Next:** a layer that does not fit one rank. [Lesson 11](11_column_and_row.py) cuts the matrix.
