# %% [markdown]
# # 19. Fewer bytes, fewer meetings: what may be left out of the sum?
#
# In all lessons so far the ranks computed the gradient of one device. Here they do not. They send a
# part of it, or they meet rarely, and so the numbers change. Which part may be left out? There are
# two answers. What is left out at random may be forgotten, if the mean of what is sent is right and
# its variance is bounded. What is left out by a rule, such as the small elements, must be
# remembered, and a share of what is owed must be sent in every step. The library's versions are
# `compression.py`, `power_sgd.py` and `local_sgd.py` in `minidist/data_parallel`.
#
# Letters: `N` ranks; `n` elements of a parameter; `g` a rank's gradient, `e` what it still owes,
# `v = g + e`; `C(v)` what it sends of v; `k` elements, `r` the rank of a matrix; `H` local steps.

# %%
from functools import partial

import numpy as np
from support import exercise, figures

from minidist import Cluster, nn, optim
from minidist.data_parallel.compression import ErrorFeedback, Int8, Sign, TopK, on_grid
from minidist.data_parallel.local_sgd import DiLoCo, LocalSGD
from minidist.data_parallel.naive import all_reduce_gradients
from minidist.data_parallel.power_sgd import PowerSGD
from minidist.datasets import Sampler, digits
from minidist.rng import generator

figures.arguments()
images, labels = digits()
N, STEPS, BATCH, LR = 4, 100, 128, 0.3
ranks = Cluster(N, "thread")

# %% [markdown]
# ## Problem: 600 times its own size
#
# Four ranks learn to read digits with plain SGD. What do they send for it?


# %%
def train(group, method):
    """Return the loss on all digits after STEPS steps, the bytes sent, and the weights."""
    model = nn.MLP([64, 128, 10], seed=0)
    step = method(model, group)
    for _, share in zip(range(STEPS), Sampler(len(images), BATCH, 0, group.rank, N), strict=False):
        x, y = images[share.examples], labels[share.examples]
        nn.cross_entropy(model(x), y, share.total).backward()
        step()
        model.zero_grad()
    return float(nn.cross_entropy(model(images), labels)), group.ledger.total, model.state()


def result(method):
    """Return (loss, MB that all ranks have sent); the ranks' weights are the same at the end."""
    found = ranks.run(train, method)
    for _, _, weights in found:
        assert all(np.array_equal(w, found[0][2][name]) for name, w in weights.items())
    return found[0][0], sum(sent for _, sent, _ in found) / 1e6


def naive(model, group, make=optim.SGD, lr=LR):
    rule = make(model.parameters(), lr)

    def step():
        all_reduce_gradients(model, group)
        rule.step()

    return step


loss, sent = result(naive)
size = sum(p.data.nbytes for p in nn.MLP([64, 128, 10]).parameters()) / 1e6
print(f"a model of {size:.3f} MB; {sent:.1f} MB sent, {sent / size:.0f} times as much")
assert abs(sent - 2 * (N - 1) * size * STEPS) < 1e-9

# %% [markdown]
# Every step sends the gradient there and the sum back, 2 (N - 1) times the model. Are all of these
# bytes needed?
#
# ## Picture
#
#     a rank, one step
#
#       g ---> (+) ---> v ---> C ---> C(v) ---> to all ranks: the sum, which moves the weights
#               ^       |              |
#               |       +----> (-) <---+
#               |               |
#               +------ e <-----+            what was left out waits here, and is added next time
#
# C keeps the k largest elements (`top-k`, [Stich et al. 2018](https://arxiv.org/abs/1809.07599));
# or the signs and one scale (`sign`, [Karimireddy et al. 2019](https://arxiv.org/abs/1901.09847));
# or 8 bits, rounded at random (`int8`, [Alistarh et al. 2017](https://arxiv.org/abs/1610.02132)).
# Or it replaces a matrix by two thin ones (`PowerSGD`, [Vogels et al.
# 2019](https://arxiv.org/abs/1905.13727)). Only `int8` works without the memory: the mean of its
# C(v) is v, so its errors cancel out, and the price is noise (Alistarh's lemma 3.1 bounds it).
#
# ## Math
#
#     e' = v - C(v)                           so    e' + C(v) = v = g + e
#     sum over T steps of C(v)  =  sum over T steps of g  -  e after T steps
#
# The second line is the first one, added up. After T steps the weights have got all gradients but
# the last e. Without memory each step loses v - C(v), and a small gradient may never arrive.
#
# So e must stay small. The papers ask that every C(v) sends a share of v (Stich et al. 2018,
# definition 2.1; Karimireddy et al. 2019, assumption A):
#
#     |v - C(v)|^2  <=  (1 - delta) |v|^2         with one delta > 0 for all v
#
# For the k largest of n elements, delta is k/n at least. A rule that always sends the first element
# has no delta, because v may be 0 there. Its debt grows without end, though it is remembered:


# %%
def largest(v):
    """The largest of the elements alone."""
    return np.where(abs(v) == abs(v).max(), v, 0)


def first(v):
    return np.where(np.arange(v.size) == 0, v, 0)


def debts(C, steps):
    """Return |e| / |g| after each step, for the same g of 100 elements in every step."""
    g = generator(19, "g").standard_normal(100)
    e, sizes = 0, []
    for _ in range(steps):
        v = g + e
        e = v - C(v)
        sizes.append(float(np.linalg.norm(e) / np.linalg.norm(g)))
    return sizes


for C in (largest, first):
    after = ", ".join(f"{debts(C, steps)[-1]:.0f}" for steps in (20, 200, 2000))
    print(f"{C.__name__}: |e| / |g| after 20, 200 and 2000 steps is {after}")
assert debts(largest, 2000)[-1] < 2 * debts(largest, 200)[-1] < debts(first, 2000)[-1] / 10

# %% [markdown]
# Is the first line true in floating point? For top-k it is: C(v) is v or 0. For signs it is not. If
# v is much smaller than the scale s, then v - s has no room for v's last digits:

# %%
random = generator(19, "v")
v = random.standard_normal(10_000) * 10 ** random.uniform(-9, 0, 10_000)
s = abs(v).mean(keepdims=True)


def lost(v, s):
    """Return the share of elements for which e' + C(v) is not v."""
    sent = np.where(v < 0, -s, s)
    return np.mean((v - sent) + sent != v)


print(f"float64: {lost(v, s):.0%} of the elements are not v; on a grid: {lost(*on_grid(v, s)):.0%}")
assert lost(v, s) > 0.5 and lost(*on_grid(v, s)) == 0

# %% [markdown]
# `on_grid` rounds v and s to multiples of one number, 2^-50 of the largest element. Then both the
# difference and the sum fit into 53 bits. The library keeps e in float64, on such a grid, and its
# tests compare e' + C(v) with v by `==`.
#
# *Fewer meetings.* Local SGD ([Stich 2019](https://arxiv.org/abs/1805.09767)): each rank takes H
# steps alone, and then all take the average of their weights. With x the weights at the start of
# a round, and N lr the rate of a step (a rank's g is a share of a mean over N ranks):
#
#     1/N sum_k (x - N lr sum_h g_kh)  =  x - lr sum_k sum_h g_kh
#
# So one may average weights, or sum the gradients of a round. With H = 1 the right side is `naive`,
# to the last bit. DiLoCo ([Douillard et al. 2023](https://arxiv.org/abs/2311.08105)) has AdamW
# inside, and takes x minus the average as a gradient for Nesterov momentum outside.
#
# ## Code
#
# Top-k with its memory. A rank's k places differ from the others', so it sends them, too; and the
# sum is made from gathered pieces, because k values cannot be added up on the way.


# %%
def our_top_k(group, g, e, k):
    """Return (the sum of what all ranks send, e') of flat gradients."""
    v = g + e
    places = np.argpartition(abs(v), v.size - k)[v.size - k :].astype("uint32")
    every_place = group.all_gather(places).reshape(group.size, k)
    every_value = group.all_gather(v[places]).reshape(group.size, k)
    total = np.zeros_like(v)
    for theirs, values in zip(every_place, every_value, strict=True):
        total[theirs] += values
    left = v.copy()
    left[places] = 0
    return total, left


def both(group, share=0.1, steps=5):
    """Train twice; return whether all sums and memories have the library's bits."""
    ours, library = (nn.MLP([64, 16, 10], seed=0, dtype="float64") for _ in range(2))
    feedback, e, same = ErrorFeedback(library, group, TopK(share)), {}, True
    rows = np.arange(group.rank, 400, group.size)
    for _ in range(steps):
        for model in (ours, library):
            x = images[rows].astype("float64")
            nn.cross_entropy(model(x), labels[rows], 400).backward()
        feedback.all_reduce_gradients()
        for (name, p), q in zip(ours.named_parameters().items(), library.parameters(), strict=True):
            k = max(1, int(share * p.size))
            total, e[name] = our_top_k(group, p.grad.reshape(-1), e.get(name, 0.0), k)
            p.grad = total.reshape(p.shape)
            same = same and np.array_equal(p.grad, q.grad)
            same = same and np.array_equal(e[name], feedback.errors[name].reshape(-1))
        for model in (ours, library):
            for p in model.parameters():
                p.data[...] -= LR * p.grad
            model.zero_grad()
    return same


print("our sums and memories have the library's bits:", ranks.run(both))
assert all(ranks.run(both))

# %% [markdown]
# ## Measurement
#
# Bytes that all ranks send for a parameter of n elements, of s bytes each, in one step:
#
#     naive       2 (N - 1) n s                  all_reduce
#     top-k       N (N - 1) k (s + 4)            all_gather: values, and uint32 places
#     sign        N (N - 1) (n / 8 + 8)          all_gather: bits, and a float64
#     int8        N (N - 1) (n + 8)              all_gather: levels, and a float64
#     PowerSGD    2 (N - 1) r (rows + columns) s    all_reduce of P and of Q: both are sums
#     local SGD   2 (N - 1) n s / H              a meeting in H steps
#
# We train with each, and three of them also without memory. Same steps, same batches; the loss is
# that of the digits that were trained on, and SGD's rate is the same in all runs. DiLoCo has AdamW
# inside: compare it with `naive` with AdamW. Each of these gets the better one of two rates.


# %%
def compressed(model, group, compress, remember=True):
    feedback = ErrorFeedback(model, group, compress())
    rule = optim.SGD(model.parameters(), LR)

    def step():
        feedback.all_reduce_gradients()
        if not remember:
            feedback.errors.clear()
        rule.step()

    return step


def local(model, group, every):
    return LocalSGD(model, group, LR, every).step


def diloco(model, group, every, lr):
    return DiLoCo(model, group, optim.AdamW(model.parameters(), lr), every).step


methods = {f"top-k {share:.1%}": partial(TopK, share) for share in (0.1, 0.01, 0.003)}
methods |= {"sign": Sign, "int8": Int8, "PowerSGD 1": partial(PowerSGD, 1)}
methods = {name: partial(compressed, compress=make) for name, make in methods.items()}
methods |= {f"local SGD {H}": partial(local, every=H) for H in (5, 50)}
adamw = {"naive, AdamW": partial(naive, make=optim.AdamW)}
adamw |= {f"DiLoCo {H}": partial(diloco, every=H) for H in (10, 50)}
biased = ("top-k 1.0%", "sign")
forgetful = {name: partial(methods[name], remember=False) for name in (*biased, "int8")}
found = {"naive": (loss, sent)} | {name: result(method) for name, method in methods.items()}
for name, method in adamw.items():
    found[name] = min(result(partial(method, lr=lr)) for lr in (0.01, 0.02))
without = {name: result(method) for name, method in forgetful.items()}
for name, (end, megabytes) in found.items():
    note = f"; {without[name][0]:.3f} without memory" if name in without else ""
    share = f"1/{sent / megabytes:<4.0f} loss {end:.3f}, {end / loss:4.0%} of naive's"
    print(f"{name:13} {megabytes:6.2f} MB, {share}{note}")

elements = [p.size for p in nn.MLP([64, 128, 10]).parameters()]
k = sum(max(1, int(0.01 * n)) for n in elements)
assert round(found["top-k 1.0%"][1] * 1e6) == STEPS * N * (N - 1) * 8 * k
bits = sum(-(-n // 8) + 8 for n in elements)
assert round(found["sign"][1] * 1e6) == STEPS * N * (N - 1) * bits
matrices, vectors = 64 + 128 + 128 + 10, 128 + 10
assert round(found["PowerSGD 1"][1] * 1e6) == STEPS * 2 * (N - 1) * 4 * (matrices + vectors)
assert found["local SGD 50"][1] == sent / 50 and sent / 2 < found["int8"][1] < 0.51 * sent
for name in biased:
    assert abs(found[name][0] - loss) < 0.1 * loss < without[name][0] - loss
assert abs(without["int8"][0] - loss) < 0.01 * loss
assert found["top-k 0.3%"][0] > 1.1 * found["top-k 1.0%"][0]
assert max(found["DiLoCo 10"][0], found["DiLoCo 50"][0]) < 1.1 * found["naive, AdamW"][0] < loss


# %% [markdown]
# With memory, top-k at 1% and `sign` end within a tenth of the loss of `naive` (asserted above).
# Without memory they end far above it; `int8` does not, because it is right on average. So most of
# a gradient may be left out, if it comes later. How much later is the price: at 0.3% an element
# waits so long that the loss is higher. `int8` sends half of what `naive` sends, not a quarter,
# because its all_gather has N where an all_reduce has 2. With AdamW all three losses are below that
# of `naive` with SGD; beside `naive` with AdamW, DiLoCo loses nothing here by meeting rarely.


# %%
def draw(plt):
    figure, axes = plt.subplots(figsize=(9, 5))
    figure.suptitle("What is left out of the sum may be most of it, if it is remembered")
    kinds = {"local": figures.UPDATE, "naive": figures.INK}
    for name, (end, megabytes) in found.items():
        color = figures.BACKWARD if name in adamw else kinds.get(name.split()[0], figures.FORWARD)
        axes.scatter(megabytes, end, s=60, color=color, zorder=3)
        place = {"xytext": (-4, -18)} if name in adamw else {"xytext": (2, 8), "rotation": 40}
        axes.annotate(name, (megabytes, end), textcoords="offset points", fontsize=9, **place)
    points = sorted(found[name][::-1] for name in adamw)
    axes.plot(*zip(*points, strict=True), color=figures.BACKWARD, lw=1, zorder=1)
    axes.text(0.75, 0.1, "orange: with AdamW; compare them with each other", fontsize=9)
    for name, (end, megabytes) in ((name, without[name]) for name in biased):
        axes.plot([megabytes] * 2, [found[name][0], end], ":", color=figures.EMPHASIS, lw=1.5)
        axes.scatter(megabytes, end, s=60, color="white", edgecolor=figures.EMPHASIS, zorder=3)
        words = f"{name}, without memory"
        axes.annotate(words, (megabytes, end), (8, -3), textcoords="offset points", fontsize=9)
    best, front = np.inf, []
    for megabytes, end in sorted((m, end) for name, (end, m) in found.items() if name not in adamw):
        if end < best:
            best = end
            front.append((megabytes, end))
    front.append((30, best))
    axes.step(*zip(*front, strict=True), where="post", color=figures.IDLE, zorder=1)
    axes.text(3.1, best * 0.91, "grey: no run with SGD has fewer bytes and less loss", fontsize=9)
    axes.set(xscale="log", yscale="log", xlim=(0.2, 45), ylim=(0.065, 0.95))
    axes.set(xlabel=f"MB sent by {N} ranks in {STEPS} steps", ylabel="loss on all digits")
    for axis, ticks in (
        (axes.xaxis, (0.3, 1, 3, 10, 30)),
        (axes.yaxis, (0.1, 0.15, 0.2, 0.3, 0.5, 0.8)),
    ):
        axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.set_ticks([], minor=True)
    return figure


figures.save(draw, "19_fewer_bytes")

# %% [markdown]
# ## Exercise 1: the memory
#
# Write `remembering(C)`: a function g -> what is sent, for any compressor C, a function of an
# array. It remembers from call to call.
#
# *Hint:* it needs e, and e has to survive the call: `nonlocal`, or a list of one element.


# %%
def remembering(C):
    """Return a function of g that returns what is sent."""
    raise NotImplementedError  # your lines here


# %%
def check_memory(attempt):
    """Return what is wrong, or None."""
    send, given, arrived = attempt(largest), 0, 0
    for step in range(60):
        g = np.array([1.0, -2.0, 4.0, 8.0]) * (step < 50)  # at the end there is nothing new
        given, arrived = given + g, arrived + send(g)
    wrong = given - arrived
    return f"of {given} these are missing: {wrong}" if wrong.any() else None


def forgets(C):
    return C


def remembers_g(C):
    """e' = g - C(v): what it owed before is forgotten."""
    e = [0.0]

    def send(g):
        sent = C(g + e[0])
        e[0] = g - sent
        return sent

    return send


exercise.judge(1, check_memory, remembering, tempting=[forgets, remembers_g])

# %% [markdown]
# ## Exercise 2: why did this break?
#
# Somebody knew that values can be added up only where the places agree, and gathered both. Then the
# loop over ranks looked slow, and became one line: `total[every_place] += every_value`.

# %%
places = np.array([[0, 3], [3, 1], [3, 2]])
values = np.array([[1.0, 5.0], [7.0, 1.0], [9.0, 1.0]])
total = np.zeros(4)
total[places] += values
print("the sum of three ranks:", total)

# %% [markdown]
# What is wrong with element 3, and when does nobody notice? Write `sparse_sum(places, values, n)`
# without a loop over ranks.
#
# *Hint:* NumPy adds to a copy of the chosen elements, and writes that back. `np.add.at`, or
# `np.bincount`.


# %%
def sparse_sum(places, values, n):
    """Return the sum over ranks, [n], of values[N, k] at places[N, k]."""
    raise NotImplementedError  # your line here


# %%
def check_sum(attempt):
    random = generator(0, "places")
    for n, k in ((4, 4), (20, 5), (100, 3)):
        places = np.stack([random.permutation(n)[:k] for _ in range(3)])
        values = random.integers(-9, 10, (3, k)).astype(float)
        want = sum(np.bincount(p, v, n) for p, v in zip(places, values, strict=True))
        got = attempt(places, values, n)
        if not np.array_equal(got, want):
            return f"{k} of {n} elements per rank: {np.sum(got != want)} elements are wrong"


def one_line(places, values, n):
    total = np.zeros(n)
    total[places] += values
    return total


def summed_by_row(places, values, n):
    """All ranks' values are added up in the order in which they come."""
    total = np.zeros(n)
    total[places[0]] = values.sum(axis=0)
    return total


exercise.judge(2, check_sum, sparse_sum, tempting=[one_line, summed_by_row])

# %% [markdown]
# ## Exercise 3: when is it fewer?
#
# Write `most(n, N, s)`: the largest k for which top-k sends no more bytes than an all_reduce of n
# elements of s bytes over N ranks.
#
# *Hint:* the table under Measurement. What does a rank receive as N grows?


# %%
def most(n, N, s):
    raise NotImplementedError  # your line here


# %%
def bytes_of(group, n, k, dtype):
    """Return the bytes that this rank sends in an all_reduce of n elements, and for top-k."""
    group.all_reduce(np.zeros(n, dtype))
    plain = group.ledger.total
    group.all_gather(np.zeros(k, dtype))
    group.all_gather(np.zeros(k, "uint32"))
    return plain, group.ledger.total - plain


def check_most(attempt):
    for n, dtype in ((1001, "float32"), (1000, "float64")):
        k = attempt(n, N, np.dtype(dtype).itemsize)
        if k != int(k):
            return f"n = {n}, {dtype}: {k} is no number of elements"
        for more, fits in ((0, True), (1, False)):
            plain, sparse = np.sum(ranks.run(bytes_of, n, int(k) + more, dtype), axis=0)
            if (sparse <= plain) != fits:
                return f"n = {n}, {dtype}, k = {k + more}: {sparse} bytes, an all_reduce {plain}"


def without_places(n, N, s):
    return 2 * n // N


def for_two_ranks(n, N, s):
    return n * s // (s + 4)


def a_part_of_an_element(n, N, s):
    return 2 * n * s / (N * (s + 4))


exercise.judge(3, check_most, most, tempting=[without_places, for_two_ranks, a_part_of_an_element])

# %% [markdown]
# ## What it costs, and the next problem
#
# - **It is another training.** Its weights are not those of one device. What can be tested is what
#   the definition says: e' + C(v) = v; k = n and a full rank leave out nothing; H = 1 is `naive`;
#   and a replay on one device has the same bits (`minidist verify --strategy top_k`).
# - **Memory:** e is as large as the model, in float64; DiLoCo keeps the start of the round and a
#   momentum.
# - **Compute:** to find the k largest, or to multiply by P and Q, takes time in every step. It pays
#   where the bytes that it saves would take longer.
# - **N:** an all_gather sends N (N - 1) messages. Of the compressors only PowerSGD is a sum.
# - **Local steps** drift apart when the ranks see different data, or steps are large; H is bounded
#   by learning, not by bytes.
#
# In lesson 20 all strategies are in one table. All of them assume that every rank takes part in
# every meeting; lesson 22 asks what it costs when one dies.

# %%
ranks.close()
