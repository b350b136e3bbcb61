# %% [markdown]
# # 15. Experts: what if only a part of the model runs?
#
# In a larger model every position runs through more parameters, so it takes more work. In a mixture
# of experts a block has E feed-forward networks, and a gate sends each position to k of them
# ([Shazeer et al. 2017](https://arxiv.org/abs/1701.06538);
# [Lepikhin et al. 2020](https://arxiv.org/abs/2006.16668), GShard;
# [Fedus et al. 2021](https://arxiv.org/abs/2101.03961), Switch Transformer). The
# parameters grow with E, the work with k. But now the data decide which part runs: experts may be
# crowded or idle. The library's versions are `minidist/nn/mixture_of_experts.py` and
# `minidist/expert_parallel/`.
#
# Letters: `N` ranks, `r` one of them; `E` experts, of which rank r holds E/N; `B` examples of `T`
# positions, `C` the width; `k` choices per position; a *row* is one choice of one position that is
# kept; `e` bytes a number.

# %%
from functools import partial

import numpy as np
from support import exercise, figures

from minidist import Cluster, nn, no_grad, optim
from minidist.autograd import Function, functions
from minidist.datasets import Sampler, shard, text
from minidist.expert_parallel import ExpertParallel, expert_parameters
from minidist.nn.router import route
from minidist.pipeline_parallel.partition import counted_costs
from minidist.planning.costs.expert_parallel import arriving
from minidist.rng import Randomness

figures.arguments()
clusters = {N: Cluster(N) for N in (2, 4)}
T, C, E, K = 32, 32, 8, 2
words = text(context=T)
inputs, targets = words.windows(T)


def make_model(dtype="float32", width=C, **options):
    """Return a Transformer with one block; `experts=0`: its feed-forward part is dense."""
    options = {"experts": E, "top_k": K, "capacity": 1.25} | options
    return nn.Transformer(words.vocab, width, 4, 1, T, dtype=dtype, **options)


# %% [markdown]
# ## Problem
#
# What does a block's feed-forward part hold, and what does a position cost? We count parameters and
# multiply-adds; at width 128 the gate's own work is small. And we count what data parallelism
# would send for it: every rank holds all experts, so 4 ranks all_reduce all their gradients.

# %%
for experts in (0, 8, 64):
    block = make_model(width=128, experts=experts, capacity=None).layers[1]
    held = sum(p.size for name, p in block.named_parameters().items() if "attention" not in name)
    model = nn.Sequential([make_model(width=128).layers[0], block])
    work = counted_costs(model, inputs[:1])[1] / T - 4 * 128**2 - 2 * T * 128  # less attention
    print(
        f"{experts or 'no':>2} experts: {held / 1e3:6.0f} thousand parameters, {work / 1e3:4.0f} "
        f"thousand multiply-adds a position, {2 * 3 * 4 * held / 1e6:5.0f} MB in an all_reduce"
    )

# %% [markdown]
# 64 experts have 64 times the parameters and twice the work. But every rank would hold and send all
# of them. So each rank keeps E/N experts, and positions travel to them.
#
# ## Picture
#
#     rank 0: its examples              all_to_all        experts 0 1      all_to_all
#       X -> gate -> rows sorted          ------>          of rank 0         ------>     add up
#            by expert  | 0 1 | 2 3 |     <------                            <------     with gates
#     rank 1: others                    (backward: dX)     experts 2 3    (backward: dY)
#       X -> gate -> rows | 0 1 | 2 3 |
#
# ## Math
#
#     P[T, E] = softmax(X W_gate)         the k largest are chosen; g: these, divided by their sum
#     Y_t = sum over the chosen e of g_e expert_e(X_t)
#     capacity = ceil(k T / E * 1.25)     rows of one example that an expert takes, in the order of
#                                         positions; later ones are dropped: X passes by the block
#     balancing loss = alpha E sum over e of f_e P_e        f_e: expert e's share of the choices,
#                                         P_e: mean of P; at an even load it is alpha
#
# f counts, so it has no gradient; P has one, which pushes down the experts that are crowded. Both
# are computed per example, and so are the queues (GShard's groups, of one example each). This is
# what makes the gradients of any split equal: if a queue held all examples of a rank, then another
# number of ranks would drop other positions.
#
# ## Code
#
# The rows arrive sorted by expert (`load[E]`: how many for each); experts run; results go back. The
# order must be undone before they do: a rank receives rows by sender, but its experts need them by
# expert.


# %%
class Travel(Function):
    """Forward: `sent` rows to each rank, `received` from each;  backward: the way back."""

    def __init__(self, group, sent, received):
        self.group, self.sent, self.received = group, sent, received

    def move(self, x, sizes):
        return np.concatenate(self.group.all_to_all(np.split(x, np.cumsum(sizes)[:-1])))

    def forward(self, x):
        return self.move(x, self.sent)

    def backward(self, dy):
        return self.move(dy, self.received)


def our_dispatch(experts, rows, load, group):
    """X[R, C] -> Y[R, C], both sorted by expert; `experts` are this rank's."""
    coming = np.array(group.all_to_all(np.split(load, group.size)))  # [N, E/N]
    sent, received = load.reshape(group.size, -1).sum(axis=1), coming.sum(axis=1)
    rows = Travel(group, sent, received)(rows)
    expert = np.repeat(np.tile(np.arange(len(experts)), group.size), coming.reshape(-1))
    results = [experts[e](rows[expert == e]) for e in range(len(experts))]
    back = np.argsort(np.argsort(expert, kind="stable"))
    return Travel(group, received, sent)(functions.concatenate(results)[back])


# %% [markdown]
# `ExpertParallel` keeps a rank's experts; after backward it sums all gradients but the experts'.
# An expert's rank gets its rows from all ranks, so its gradient is the whole sum already.
# We put our dispatch in the place of the library's and compare with one device, in float64.


# %%
B = 10  # uneven shares on 4 ranks
x, y = inputs[:B], targets[:B]


def on_ranks(group, dispatch=None, finish=ExpertParallel.sum_gradients):
    """Return {name: gradient} of the whole batch, put together from all ranks; and a report."""
    model = ExpertParallel(make_model("float64"), group)
    mixture = next(nn.mixtures(model))
    if dispatch is not None:
        mixture.run_experts = partial(dispatch, group=group)
    mine = shard(np.arange(B), group.rank, group.size)
    logits = model(x[mine], Randomness(0, 0, mine, batch=B))
    nn.cross_entropy(logits, y[mine], reduction_size=y.size).backward()
    finish(model)
    return model.whole({n: p.grad for n, p in model.named_parameters().items()}), mixture.report


def off(got):
    """Return {name: largest difference from one device, relative to its largest element}."""
    return {name: abs(got[name] - want[name]).max() / abs(want[name]).max() for name in want}


alone = make_model("float64")
nn.cross_entropy(alone(x), y).backward()
want = {name: p.grad for name, p in alone.named_parameters().items()}
whole = next(nn.mixtures(alone)).report
for name, dispatch in (("ours", our_dispatch), ("the library's", None)):
    for N, cluster in clusters.items():
        found = cluster.run(on_ranks, dispatch)
        error = max(max(off(gradients).values()) for gradients, _ in found)
        dropped = sum(report.dropped for _, report in found)
        print(f"{N} ranks, {name}: gradients within {error:.0e}, {dropped.sum()} rows dropped")
        assert error < 1e-9 and (dropped == whole.dropped).all()

# %% [markdown]
# The same rows are dropped on 1, 2 and 4 ranks.
#
# ## Measurement
#
# Does a gate use all of its experts? We train the model on text, without the balancing loss, with
# it, and with too much of it, and look at windows that it has not seen.

# %%
ALPHAS, STEPS = (0.0, 0.03, 3.0), 200
unseen = np.arange(len(inputs))[-64:]


def train(group):
    """Train with this rank's alpha; return the loss on unseen windows, the report, the weights."""
    model = make_model(balance=ALPHAS[group.rank])
    optimizer = optim.AdamW(model.parameters(), lr=5e-3)
    for _, batch in zip(range(STEPS), Sampler(len(inputs) - 64, 16), strict=False):
        logits = model(inputs[batch.examples])
        nn.cross_entropy(logits, targets[batch.examples]).backward()
        optimizer.clip_global_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
    with no_grad():
        loss = nn.cross_entropy(model(inputs[unseen]), targets[unseen]).item()
    return loss, next(nn.mixtures(model)).report, model.state()


with Cluster(len(ALPHAS)) as one_each:
    trained = one_each.run(train)
for alpha, (loss, report, _) in zip(ALPHAS, trained, strict=True):
    choices = report.load + report.dropped
    print(f"alpha {alpha}: loss {loss:.3f}, dropped {report.dropped.sum() / choices.sum():.0%}")
    print(f"  share of the choices per expert: {np.sort(choices / choices.sum())[::-1].round(2)}")
(_, crowded, _), (best, even, _), (forced, _, _) = trained
assert crowded.dropped.sum() > 2 * even.dropped.sum() and forced > best

# %% [markdown]
# Without the loss the gate keeps choosing the experts that it has chosen before, since only those
# learn. A few take nearly all, and what exceeds their capacity is dropped. With too large an alpha
# the text's loss is larger again. Now the first two models run on 4 ranks. A row that leaves its
# rank travels four times: there, back, and both ways in backward; besides, each rank tells the
# others how many rows will come, 8 bytes for each expert:
#
#     bytes = 4 C e (rows away from their expert) + 8 E (N - 1)

# %%
N, batch = 4, unseen[:16]


def step_on_4_ranks(group, state):
    """Return the load [E] of this rank's examples, and the bytes of its all_to_alls."""
    whole = make_model()
    whole.load_state(state)
    model = ExpertParallel(whole, group)
    mine = shard(batch, group.rank, group.size)
    logits = model(inputs[mine], Randomness(0, 0, mine, batch=len(batch)))
    nn.cross_entropy(logits, targets[mine], reduction_size=targets[batch].size).backward()
    return next(nn.mixtures(model)).report.load, group.ledger.bytes["all_to_all"]


for alpha, (_, _, state) in zip(ALPHAS[:2], trained[:2], strict=True):
    found = clusters[N].run(step_on_4_ranks, state)
    rows = np.array([load for load, _ in found])  # [N, E]
    travelling = arriving(rows[:, None])[..., 0]  # [from, to]
    away = travelling.sum() - travelling.trace()
    sent, busiest = sum(moved for _, moved in found), travelling.sum(axis=0).max()
    print(
        f"alpha {alpha}: {away} of {rows.sum()} rows travel, {sent} bytes; the busiest rank runs "
        f"{busiest} rows, {busiest / rows.sum() * N:.2f} of the mean"
    )
    assert sent == 4 * C * 4 * away + 8 * E * (N - 1)
copies = 2 * (N - 1) * 4 * sum(p.size for p in expert_parameters(make_model()))
print(f"all_reduce of the experts' gradients, if every rank held all of them: {copies} bytes")

# %% [markdown]
# Every rank waits for the busiest one. The capacity bounds that wait by dropping rows; the
# balancing loss makes both small. The bytes of rows grow with the number of positions and not with
# E; the bytes of the all_reduce grow with E and not with the positions. Does an even gate still
# choose? How often do a character's positions go to its two most chosen experts, of eight?


# %%
def gate_choices(state):
    """Return how often the gate chose each expert for each character: [V, E]."""
    model = make_model()
    model.load_state(state)
    embedding, block = model.layers[:2]
    with no_grad():
        inner = embedding(inputs[unseen])
        inner = block.norm_2(inner + block.attention(block.norm_1(inner)))
        shares = block.mixture.gate(inner).data
    chosen = np.argsort(-shares, axis=-1)[..., :K]
    counts = np.zeros((words.vocab, E))
    np.add.at(counts, (inputs[unseen][..., None], chosen), 1)
    return counts


for alpha, (_, _, state) in zip(ALPHAS, trained, strict=True):
    share = np.sort(gate_choices(state))[:, -2:].sum() / (K * unseen.size * T)
    print(f"alpha {alpha}: {share:.0%} of the choices; of a gate that is even and ignores X: 25%")
    assert share > 0.4


def draw(plt):
    figure, axes = plt.subplots(2, 2, figsize=(11, 7), height_ratios=[1, 4], sharex="col")
    figure.suptitle("The balancing loss gives every expert work, and characters still choose")
    common = np.argsort(-np.bincount(inputs[unseen].reshape(-1), minlength=words.vocab))[:22]
    for (above, map_), alpha, (_, report, state) in zip(axes.T, ALPHAS, trained, strict=False):
        counts = gate_choices(state)
        order = np.argsort(-counts.sum(axis=0))
        scale = 1 / counts.sum() * E  # 1: an even load
        look = {"color": figures.OWN, "edgecolor": "white"}
        above.bar(range(E), report.load[order] * scale, label="computed", **look)
        look = {"color": figures.SAME, "edgecolor": "white", "hatch": "///"}
        above.bar(range(E), report.dropped[order] * scale, bottom=report.load[order] * scale,
                  label="dropped", **look)  # fmt: skip
        above.axhline(1, color=figures.INK, lw=1)
        share = report.dropped.sum() / counts.sum()
        above.set(title=f"alpha = {alpha}: {share:.0%} of the choices are dropped", ylim=(0, 4.2))
        of_character = counts[common][:, order] / counts[common].sum(axis=1, keepdims=True)
        image = map_.imshow(of_character, cmap="Blues", vmin=0, vmax=0.5, aspect="auto")
        names = [{" ": "space", "\n": "line end"}.get(c, c) for c in words.decode(common)]
        map_.set_yticks(range(len(common)), names, fontsize=8)
        map_.set(xlabel="experts, the most chosen first")
        map_.set_xticks(range(E), order)
    axes[0, 0].set_ylabel("load; line: even")
    axes[0, 0].legend(fontsize=9)
    axes[1, 0].set_ylabel("character")
    figure.colorbar(image, ax=axes[1], label="share of a character's choices")
    return figure


figures.save(draw, "15_experts")

# %% [markdown]
# ## Exercise 1: who is dropped?
#
# Write `kept(chosen, capacity)`: which choices of chosen[B, T, k] are within the experts' capacity,
# so that each example drops the same whatever rank it is on, and a later position never drops an
# earlier one (else the logits would depend on the future).
#
# *Hint:* one queue per example and expert; walk through the positions in order.


# %%
def kept(chosen, capacity):
    """Return booleans [B, T, k]."""
    raise NotImplementedError  # your lines here


# %%
def check_kept(attempt):
    """Return what is wrong, or None."""
    random = np.random.default_rng(1)
    for capacity in (1, 2, 5):
        chosen = np.argsort(random.random((3, 6, 4)), axis=-1)[..., :2]
        right, got = route(chosen, 4, capacity).kept, np.asarray(attempt(chosen, capacity))
        if got.shape != right.shape:
            return "there is one answer per choice: [B, T, k]"
        if not np.array_equal(got[-1:], attempt(chosen[-1:], capacity)):
            return "an example alone drops others than in its batch"
        if not np.array_equal(got[:, :4], attempt(chosen[:, :4], capacity)):
            return "later positions change what earlier ones drop"
        if not np.array_equal(got, right):
            return f"{(got != right).sum()} of {right.size} choices differ, capacity {capacity}"


def by_queue(chosen, capacity, order):
    """Return what is kept if the choices queue in this order of their indices."""
    length, answer = {}, np.zeros(chosen.shape, bool)
    for index, key in order:
        length[key] = length.get(key, 0) + 1
        answer[index] = length[key] <= capacity
    return answer


def one_queue_for_the_batch(chosen, capacity):
    order = [((b, t, j), e) for (b, t, j), e in np.ndenumerate(chosen)]
    return by_queue(chosen, capacity, order)


def first_choices_first(chosen, capacity):
    """GShard's order."""
    order = [((b, t, j), (b, e)) for (b, t, j), e in np.ndenumerate(chosen)]
    return by_queue(chosen, capacity, sorted(order, key=lambda entry: entry[0][2]))


exercise.judge(1, check_kept, kept, tempting=[one_queue_for_the_batch, first_choices_first])

# %% [markdown]
# ## Exercise 2: why did this break?
#
# Somebody moved experts into a data-parallel program which summed all gradients and divided them by
# the number of ranks, and whose losses were means over a rank's own targets. The experts' sums had
# to go, since ranks hold different experts. The division stayed:


# %%
def divided(model):
    model.sum_gradients()
    for p in expert_parameters(model):
        p.grad = p.grad / model.group.size


broken = clusters[4].run(on_ranks, None, divided)[0][0]
for name in ("blocks.0.gate.weight", "blocks.0.experts.3.expand.weight"):
    print(f"{name:34} got / want = {(broken[name] / want[name]).mean():.2f}")

# %% [markdown]
# The loss here divides by all targets of the batch. Why is an expert's gradient complete without
# any sum or factor? Write `finish(model)`, to be called after backward, which leaves every rank
# with whole gradients of what it holds. (Adam divides by the size of the gradients, so it hides a
# factor: DeepSpeed had one in its experts' gradients,
# [#6545](https://github.com/deepspeedai/DeepSpeed/issues/6545).)
#
# *Hint:* `expert_parameters(model)`, `model.parameters()`, `model.group.all_reduce`.


# %%
def finish(model):
    """Give every parameter its whole gradient, in place."""
    raise NotImplementedError  # your lines here


# %%
def check_finish(attempt):
    for got, _ in clusters[4].run(on_ranks, None, attempt):
        wrong = [name for name, distance in off(got).items() if not distance < 1e-9]
        if wrong:
            return f"{len(wrong)} of {len(want)} gradients are off: {wrong[0]} ..."


def sum_everything(model):
    """The ranks' n-th experts are different ones."""
    for p in model.parameters():
        p.grad = model.group.all_reduce(p.grad)


def nothing(model):
    """As if every gradient were complete."""


exercise.judge(2, check_finish, finish, tempting=[divided, sum_everything, nothing])

# %% [markdown]
# ## Exercise 3: which rank sends how much?
#
# Write `sends(rows, C, r)`: the bytes that rank r alone sends in the all_to_alls of one block, in
# forward and backward, in float32, given rows[N, E], the rows that each rank has for each expert.
# Each rank holds E/N neighbours. Before its rows it sends every other rank the counts for that
# rank's experts, of 8 bytes each.
#
# *Hint:* forward it sends the counts, its rows, and the results of the rows that came; backward the
# rows' gradients the other way round, and no counts.


# %%
def sends(rows, C, r):
    """Return bytes."""
    raise NotImplementedError  # your lines here


# %%
def travel_alone(group, rows):
    """Send rows through experts that do nothing, forward and backward; return the bytes."""
    load = rows[group.rank]
    data = nn.Parameter(np.ones((load.sum(), C), "float32"), "x")
    own = [lambda part: part] * (rows.shape[1] // group.size)
    y = our_dispatch(own, data, load, group)
    y.backward(np.ones_like(y.data))
    return group.ledger.total


def check_sends(attempt):
    rows = np.random.default_rng(2).integers(0, 9, (4, E))
    for r, measured in enumerate(clusters[4].run(travel_alone, rows)):
        if (said := attempt(rows, C, r)) != measured:
            return f"rank {r} sends {measured} bytes, not {said}"


def own_rows_four_times(rows, C, r):
    N, E = rows.shape
    own = rows.reshape(N, N, -1).sum(axis=2)
    return 4 * 4 * C * (own[r].sum() - own[r, r]) + 8 * (E - E // N)


def with_rows_that_stay(rows, C, r):
    N, E = rows.shape
    own = rows.reshape(N, N, -1).sum(axis=2)
    return 2 * 4 * C * (own[r].sum() + own[:, r].sum()) + 8 * (E - E // N)


def without_counts(rows, C, r):
    N = len(rows)
    own = rows.reshape(N, N, -1).sum(axis=2)
    return 2 * 4 * C * (own[r].sum() + own[:, r].sum() - 2 * own[r, r])


wrong = [own_rows_four_times, with_rows_that_stay, without_counts]
exercise.judge(3, check_sends, sends, tempting=wrong)

# %% [markdown]
# ## What it costs, and the next problem
#
# - **Memory:** a rank holds E/N experts with their gradients and Adam's moments: E/k times what the
#   work needs.
# - **Bytes:** in an all_to_all every rank sends to every other rank, and no position of the block
#   can go on meanwhile. So it needs fast links.
# - **Waiting:** sizes are known only after the gate, so counts travel first, and then all ranks
#   wait for the busiest one. Capacity and balance bound that wait.
# - **Learning:** what is dropped does not learn, and the two losses pull against each other: of
#   the three alphas above, the one between is the best.
#
# Ranks now hold the same attention and different experts: two axes over the same ranks. Lesson 16
# puts all axes on one mesh, and asks which of them belongs inside a machine.

# %%
for cluster in clusters.values():
    cluster.close()
