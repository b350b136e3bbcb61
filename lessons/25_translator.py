# %% [markdown]
# # 25. A translator: which ingredient buys what?
#
# Large translators were trained with everything at once: layers on ranks, batches over ranks, an
# asynchronous server ([Wu et al. 2016](https://arxiv.org/abs/1609.08144)). Here all of it meets on
# one task that you can judge by reading: numbers in words, from English to Chinese. Each ingredient
# is then left out. The library's files: `nn/seq2seq.py`, `nn/dual.py`, `decoding.py`,
# `training/servers.py`.
#
# Letters: `B` pairs of a batch; `S` source and `T` target positions; `C` width; `V` words of a
# vocabulary, `E[V, C]` its embedding; `P` probabilities of words; `n` targets that count.

# %%
from functools import partial

import numpy as np
from support import exercise, figures

from minidist import Cluster, Mesh, datasets, nn, no_grad, optim
from minidist.autograd import functions
from minidist.data_parallel.naive import all_reduce_gradients
from minidist.data_parallel.parameter_server import Server, ServerPlan, join, train
from minidist.data_parallel.sparse_update import Blocks
from minidist.datasets import Batch, Sampler, shard
from minidist.hybrid import Hybrid
from minidist.nn import generate as decoding
from minidist.nn.flat_parameters import FlatParameters
from minidist.nn.seq2seq import joined
from minidist.nn.tokens import BEGIN, END, PAD
from minidist.rng import generator
from minidist.training.loop import warm_up_and_decay
from minidist.training.servers import Minibatches, Scheduled
from minidist.training.settings import Settings

figures.arguments()
SHORT, LONG, SEEDS, BATCH, LR = 12, 160, 3, 64, 8e-3
pairs = datasets.numbers(examples=8000, held_out=200)
inputs, targets = pairs.train
S, T = pairs.source_length, pairs.target_length
sizes = {"width": 32, "heads": 4, "depth": 1}


def translator(seed=0):
    words = len(pairs.source), len(pairs.target)
    return nn.Seq2Seq(*words, source_length=S, target_length=T, seed=seed, **sizes)


# %% [markdown]
# ## Problem: English counts thousands, Chinese counts ten thousands
#
# So the model cannot replace word by word: a million is one hundred 万 (ten thousand). A pair is a
# row: the source, then what the decoder reads.

# %%
row = inputs[np.argmax((inputs[:, :S] != PAD).sum(axis=1))]
goal = targets[np.argmax((inputs[:, :S] != PAD).sum(axis=1))]
print(f"source  {pairs.source.decode(row[:S])}\ntarget  {pairs.target.decode(goal)}")
held = (inputs[:, :S] != PAD).mean(), (targets != nn.IGNORED).mean()
print(f"{held[0]:.0%} of all source positions and {held[1]:.0%} of the targets are no padding")

# %% [markdown]
# Padding is the first trap: ranks have equal numbers of pairs and unequal numbers of words.
#
# ## Picture
#
#     tokens[B, S + T]     source, padding            | BEGIN, target, padding
#                               |                           |
#     X[B, S + T, C + 1]   embedding, encoder blocks -----> embedding, decoder blocks
#     (a column says what is padding)                reads        |
#                                                               head -> logits[B, T, V]
#
#     dp: the rows of tokens      tp: heads, matrices, both vocabularies      pp: the blocks
#     servers: the weights, which workers pull, and push gradients to
#
# The decoder reads the right words up to t and predicts the next one: *teacher forcing*
# ([Vaswani et al. 2017](https://arxiv.org/abs/1706.03762)).
#
# ## Math
#
#     supervised      L = 1/n sum of -log P[word]     n: words of the whole batch, without padding
#     reconstruction  L' = L_there + L_back + w CE(back(what `there` wrote), source)
#     what it wrote   X = P E, a mixture of the embeddings of all words, each as likely as P says
#
# Two translators teach each other: what the first one wrote has to tell the second one the source
# ([He et al. 2016](https://arxiv.org/abs/1611.00179); [Tu et al.
# 2017](https://arxiv.org/abs/1611.01874)). w is the weight of that term; in L', n counts the words
# of both directions. A word is discrete, so no gradient passes through the choice of one. Through
# the mixture P E it passes, to the first translator too.
#
# ## Code
#
# The reconstruction, written out, and its gradient against `nn.Dual`'s:


# %%
def both_ways(weight, dtype="float32"):
    """Return two translators, English to Chinese and back, that are trained together."""
    words = len(pairs.source), len(pairs.target)
    more = sizes | {"dtype": dtype}
    there = nn.Seq2Seq(*words, source_length=S, target_length=T, name="there", **more)
    back = nn.Seq2Seq(*words[::-1], source_length=T - 1, target_length=S + 1, name="back", **more)
    return nn.Dual(there, back, weight)


def our_reconstruction(dual, tokens):
    """Return the cross-entropy of the sources, as `back` reads them from what `there` wrote."""
    read, table = dual.back.layers[0].source, dual.back.layers[0].source.token.weight
    turned = np.concatenate([tokens[:, S + 1 :], tokens[:, S : S + 1], tokens[:, :S]], axis=1)
    P = functions.softmax(dual.there(tokens)[:, :-1])  # the last word is followed by END
    x = functions.linear(P, table) + read.position.weight  # P E
    held = turned[:, : T - 1] != PAD  # as long as the right target
    x = joined(x, held, dual.back.layers[0].target(turned[:, T - 1 :]))
    for layer in dual.back.layers[1:]:
        x = layer(x)
    return nn.cross_entropy(x, dual.targets(tokens)[:, T:], nn.counted(dual.targets(tokens)))


def gradient(model, loss):
    loss.backward()
    found = {name: p.grad.copy() for name, p in model.named_parameters().items()}
    model.zero_grad()
    return found


tokens, dual, plain = inputs[:9], both_ways(1.0, "float64"), both_ways(0.0, "float64")
whole = gradient(dual, dual.loss(dual(tokens), dual.targets(tokens)))
without = gradient(plain, plain.loss(plain(tokens), plain.targets(tokens)))
ours = gradient(dual, our_reconstruction(dual, tokens))
error = max(np.abs(without[name] + ours[name] - whole[name]).max() for name in whole)
reaches = np.abs(ours["there.head.linear.weight"]).max()
print(f"largest difference to nn.Dual {error:.1e}; the first translator's head gets {reaches:.1e}")
assert error < 1e-12 < reaches

# %% [markdown]
# ## Measurement: what is held, and what travels
#
# The same translator, the same batches, in eleven ways. Three training loops: ranks that wait for
# each other, a server with its workers, both directions. Each returns the weights that it ends
# with, the bytes that this rank has sent, and those of the weights that it has.

# %%
adam = partial(optim.AdamW, lr=LR, betas=(0.9, 0.98))


class Sent:
    """Counts the bytes that this rank sends, from here to `result`."""

    def __init__(self, ledgers, parameters):
        self.ledgers, self.holds = ledgers, sum(p.data.nbytes for p in parameters)
        self.before = sum(ledger.total for ledger in ledgers)

    def result(self, state):
        """Return (weights, bytes sent, bytes of the weights that this rank has)."""
        sent = sum(ledger.total for ledger in self.ledgers) - self.before
        return state(), sent, self.holds


def synchronous(group, steps, seed=0, shuffle=True, **axes):
    """Batch over dp, layers over pp, matrices and vocabularies over tp."""
    mesh = Mesh(group, **{"dp": 1, "pp": 1, "tp": 1} | axes)
    hybrid = Hybrid(translator(seed), mesh, micro_batches=2 * mesh.pp.size)
    optimizer = adam(hybrid.parameters())
    count = Sent([axis.ledger for axis in hybrid.groups], hybrid.parameters())
    batches = Sampler(len(inputs), BATCH, seed, shuffle=shuffle)
    for step, batch in zip(range(steps), batches, strict=False):
        rows = batch.examples if shuffle else by_length[batch.examples]
        hybrid.backward(Batch(inputs[rows], targets[rows], step=step, examples=rows))
        optimizer.clip_global_norm(1.0, hybrid.sum_squares)
        optimizer.lr = LR * warm_up_and_decay(step, steps)
        hybrid.step(optimizer)
    return count.result(hybrid.state)


def alone(group, steps, **options):
    """Each rank trains a whole translator, from its own seed: its rank."""
    return synchronous(group.split(group.rank), steps, seed=group.rank, **options)


def asynchronous(group, steps, seed=0, rule=adam, **options):
    """One server keeps the weights; each worker has its part of every batch, and nobody waits."""
    model, workers = translator(seed), group.size - 1
    plan = ServerPlan(servers=1, staleness=None, **options)
    updates = steps * workers // plan.n_push
    role = join(group, model, lambda slices: Scheduled(rule(slices), updates), plan)
    settings = Settings(steps=steps, batch=BATCH, seed=seed)
    minibatches = Minibatches(inputs, targets, settings, workers)
    count = Sent([role.group.ledger], model.parameters())
    mine = [] if isinstance(role, Server) else minibatches.of(group.rank - 1)
    train(role, minibatches.backward, mine)
    return count.result(model.state)


def reconstructing(group, steps, weight):
    """Both directions; every rank has both models and its part of every batch."""
    dual = both_ways(weight)
    optimizer = adam(dual.parameters())
    count = Sent([group.ledger], dual.parameters())
    for step, batch in zip(range(steps), Sampler(len(inputs), BATCH), strict=False):
        tokens = inputs[batch.examples]
        goals, mine = dual.targets(tokens), shard(np.arange(len(tokens)), group.rank, group.size)
        dual.loss(dual(tokens[mine]), goals[mine], nn.counted(goals)).backward()
        all_reduce_gradients(dual, group)
        optimizer.clip_global_norm(1.0)
        optimizer.lr = LR * warm_up_and_decay(step, steps)
        optimizer.step()
        optimizer.zero_grad()
    return count.result(dual.there.state)


# %%
by_length = np.argsort((inputs[:, :S] != PAD).sum(axis=1), kind="stable")
adagrad = partial(optim.Adagrad, lr=0.03)
methods = {
    "one rank": (1, synchronous, {}),
    "data": (2, synchronous, {"dp": 2}),
    "vocabulary": (2, synchronous, {"tp": 2}),
    "layers": (2, synchronous, {"pp": 2}),
    "data x vocabulary": (4, synchronous, {"dp": 2, "tp": 2}),
    "asynchronous": (3, asynchronous, {}),
    "with a buffer": (3, asynchronous, {"n_push": 2}),
    "Adagrad": (3, asynchronous, {"rule": adagrad}),
    "Adagrad, sparse": (3, asynchronous, {"rule": adagrad, "sparse": True}),
    "both directions": (2, reconstructing, {"weight": 0.0}),
    "reconstruction": (2, reconstructing, {"weight": 0.5}),
}
clusters = {N: Cluster(N) for N in (1, 2, 3, 4)}
weights, sent, holds = {}, {}, {}
print(f"{SHORT} steps; kB: of weights on the fullest rank, and sent per step by all ranks")
for name, (N, method, options) in methods.items():
    ranks = clusters[N].run(partial(method, steps=SHORT, **options))
    weights[name] = ranks[0][0]
    sent[name] = sum(rank[1] for rank in ranks) / 1e3 / SHORT
    holds[name] = max(rank[2] for rank in ranks) / 1e3
    print(f"{name:18} {N} ranks: {holds[name]:4.0f} kB of weights, {sent[name]:5.0f} kB sent")


def held_out_loss(state):
    """Return the loss of a translator with these weights, on pairs that were held out."""
    model, (tokens, goals) = translator(), pairs.held_out
    model.load_state(state)
    with no_grad():
        return float(nn.cross_entropy(model(tokens), goals))


alike = ("data", "vocabulary", "layers", "data x vocabulary")
loss = {name: held_out_loss(weights[name]) for name in ("one rank", *alike)}
error = max(abs(loss[name] / loss["one rank"] - 1) for name in alike)
print(f"loss {loss['one rank']:.3f}; the others' that wait for each other differ by {error:.0e}")
assert error < 1e-3
assert 1 < sent["data"] / (2 * holds["data"]) < 1.01
assert max(holds["layers"], holds["vocabulary"]) < 0.6 * holds["one rank"]
assert sent["vocabulary"] == max(sent[name] for name in ("data", "vocabulary", "layers"))
assert 0.75 < sent["with a buffer"] / sent["asynchronous"] < 0.85
assert sent["Adagrad, sparse"] > sent["Adagrad"]
assert sent["reconstruction"] == sent["both directions"]

# %% [markdown]
# What each one changes here:
#
# - **data** sends twice the gradient in a step. The loss is one rank's, to rounding, because the
#   gradients are; so it translates as well. How many seconds it saves depends on the cores.
# - **vocabulary** (with heads and matrices) and **layers** buy memory. The split of matrices sends
#   most.
# - **asynchronous**: nobody waits, but gradients are of old weights, and each is of half a batch.
#   A **buffer** (two gradients, sent as one) saves up to a quarter of the bytes, and half of the
#   updates are gone.
# - **reconstruction** (beside *both directions*, which it needs) costs a third pass and no bytes.
#   He et al. gain from texts without a translation; here each has one. Tu et al. gain with pairs
#   alone, but read the decoder's hidden states, not its words. One run would not show a gain.
# - **sparse** pushes need a rule like Adagrad, which leaves a row without a gradient as it is. They
#   buy nothing here: with so few words every row is touched, and each row costs 8 bytes for its
#   number. When do they?


# %%
def sparse_share(V):
    """Return the bytes of a sparse push over those of a dense one; word k is as frequent as 1/k."""
    model, often = nn.Seq2Seq(V, V, 64, 4, 1, S, T), 1 / np.arange(1, V - END)
    flat = FlatParameters(model.parameters())
    drawn = generator(25, "words").choice(V - END - 1, (32, S + T), p=often / often.sum())
    nn.cross_entropy(model(END + 1 + drawn), END + 1 + drawn[:, S:]).backward()
    flat.collect_gradients()
    packed = Blocks(flat, 0, flat.size).pack(flat.gradient)
    return sum(array.nbytes for array in packed) / flat.gradient.nbytes


print("sparse / dense bytes:", {V: round(sparse_share(V), 2) for V in (35, 1000, 10_000)})

# %% [markdown]
# ## Measurement: how well do they translate?
#
# Now 160 steps, and 200 numbers that were held out. *Exact*: every word is right. A single run says
# little: another seed, which draws the weights and the order of the batches, or the same
# asynchronous run once more, ends elsewhere. So each method runs from three seeds, and where
# the ranges of two methods overlap, nothing is claimed.


# %%
def exact(state):
    """Return the share of numbers that weights translate without a wrong word."""
    model, (tokens, goals) = translator(), pairs.held_out
    model.load_state(state)
    written = decoding.translate(model, tokens[:, :S])
    return np.mean((written == np.where(goals == nn.IGNORED, PAD, goals)).all(axis=1))


def from_seeds(method, **options):
    """Return the exact shares of runs from SEEDS seeds; asynchronous ones run one after another."""
    run = partial(method, steps=LONG, **options)
    if method is alone:
        return [exact(state) for state, *_ in clusters[SEEDS].run(run)]
    return [exact(clusters[3].run(partial(run, seed=seed))[1][0]) for seed in range(SEEDS)]


accuracy = {
    "shuffled": from_seeds(alone),
    "in order of length": from_seeds(alone, shuffle=False),
}

# %%
accuracy["asynchronous"] = from_seeds(asynchronous)
accuracy["with a buffer"] = from_seeds(asynchronous, n_push=2)
for name, shares in accuracy.items():
    print(f"{name:18} exact: {min(shares):4.0%} to {max(shares):4.0%} in {SEEDS} runs")
lengths = (inputs[by_length, :S] != PAD).sum(axis=1)
sorted_batches = [lengths[i : i + BATCH] for i in range(0, len(lengths), BATCH)]
one_length = np.mean([np.ptp(batch) == 0 for batch in sorted_batches])
print(f"in order of length, {one_length:.0%} of the batches have sources of one length only")
assert one_length > 0.5
assert max(accuracy["in order of length"]) < min(accuracy["shuffled"])

# %% [markdown]
# Batches in order of length end worse from every seed (asserted); most have sources of one length
# only. Few sort on purpose, but a file may come sorted. What it costs to wait for nobody, and what
# a buffer costs, is in the ranges: they depend on the machine, and on what else it does.


# %%
def draw(plt):
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), width_ratios=[3, 4])
    figure.suptitle("What each ingredient changes")
    for row, shares in enumerate(accuracy.values()):
        left.plot([min(shares), max(shares)], [row, row], color=figures.IDLE, lw=5)
        left.plot(shares, [row] * len(shares), "o", color=figures.FORWARD, ms=7)
    left.set_yticks(range(len(accuracy)), list(accuracy))
    left.set(xlim=(0, 1), ylim=(len(accuracy) - 0.5, -0.5), xlabel="exact translations")
    left.set(title=f"{LONG} steps; a dot is a run from one of {SEEDS} seeds")
    rows = np.arange(len(methods))
    right.barh(rows - 0.2, sent.values(), 0.4, color=figures.COMMUNICATION, label="sent in a step")
    right.barh(rows + 0.2, holds.values(), 0.4, color=figures.IDLE, label="weights, fullest rank")
    right.set_yticks(rows, [f"{name} on {methods[name][0]}" for name in methods])
    right.set(
        ylim=(len(methods) - 0.5, -0.5),
        xlabel="kB",
        title="What travels and is held, on how many ranks",
    )
    right.legend(loc="center right", fontsize=9)
    return figure


figures.save(draw, "25_translator")

# %% [markdown]
# ## Exercise 1: what the decoder reads
#
# Write `decoder_inputs(targets)`: from targets[B, T] (words, END, IGNORED) the tokens [B, T] that
# the decoder reads: BEGIN, then the words, then PAD.
#
# *Hint:* column t has to predict targets[:, t]. What may it know by then?


# %%
def decoder_inputs(targets):
    raise NotImplementedError  # your lines here


# %%
def check_inputs(attempt):
    got, want = attempt(targets[:50].copy()), inputs[:50, S:]
    if np.shape(got) != want.shape:
        return f"the shape is {np.shape(got)}, not {want.shape}"
    if np.any(got != want):
        return f"row 0 is {got[0]}, not {want[0]}"


def the_answers(targets):
    return np.where(targets == nn.IGNORED, PAD, targets)


def rolled(targets):
    """END goes to the front, or stays in the row."""
    tokens = np.roll(the_answers(targets), 1, axis=1)
    tokens[:, 0] = BEGIN
    return tokens


exercise.judge(1, check_inputs, decoder_inputs, tempting=[the_answers, rolled])

# %% [markdown]
# ## Exercise 2: why did this break?
#
# Each of two ranks took the mean over its own targets, and the ranks averaged their gradients. With
# texts of equal length all tests passed. Then came padding:

# %%
own = [nn.counted(part) for part in np.array_split(targets[:6], 2)]
right = " and ".join(f"{count / sum(own):.2f}" for count in own)
print(f"targets that count: {own}; weights of the two means: 0.5 and 0.5, but right are {right}")

# %% [markdown]
# Write `divisor(group, mine)`: the number by which a rank divides the sum of its losses, so that
# the ranks' gradients only have to be summed. `mine`: its targets, [B/N, T].
#
# *Hint:* `nn.counted(mine)` is the number of this rank; one all_reduce makes it the same on all.


# %%
def divisor(group, mine):
    raise NotImplementedError  # your line here


# %%
def check_divisor(attempt):
    def worker(group):
        parts = [targets[:3], targets[3:5], targets[5:5]]
        return float(np.asarray(attempt(group, parts[group.rank])))

    with Cluster(3, "thread") as cluster:
        got = cluster.run(worker)
    want = float(nn.counted(targets[:5]))
    return None if got == [want] * 3 else f"three ranks divide by {got}, not by {want}"


def its_own(group, mine):
    return nn.counted(mine)


def with_padding(group, mine):
    return group.all_reduce(np.array(float(mine.size)))


exercise.judge(2, check_divisor, divisor, tempting=[its_own, with_padding])

# %% [markdown]
# ## Exercise 3: one step of a beam
#
# Greedy decoding takes the most likely next word, which may lead nowhere. A beam keeps the K best
# beginnings of the sentence. Write `step(scores, following, K)`: from the log-probabilities of K'
# beginnings, scores[K'], and of each next word, following[K', V], return (beginning, word, score)
# of the K best, three sequences, best first.
#
# *Hint:* of K' V sums take the K largest; `np.divmod` gives beginning and word back.


# %%
def step(scores, following, K):
    raise NotImplementedError  # your lines here


# %%
def check_step(attempt):
    random = generator(0, "beam")
    for kept, V, K in ((1, 5, 3), (3, 7, 3), (4, 2, 5)):
        scores, following = np.log(random.random(kept)), np.log(random.random((kept, V)))
        all_of_them = sorted(
            ((scores[k] + following[k, v], k, v) for k in range(kept) for v in range(V)),
            reverse=True,
        )
        want = [(k, v) for _, k, v in all_of_them[:K]]
        beginning, word, score = attempt(scores, following, K)
        kept_now = [(int(k), int(v)) for k, v in zip(beginning, word, strict=True)]
        if kept_now != want:
            return f"{kept} beginnings, {V} words: kept {kept_now}, not {want}"
        if not np.allclose(score, [total for total, _, _ in all_of_them[:K]]):
            return f"the scores are {score}"


def best_of_each(scores, following, K):
    word = following.argmax(axis=1)
    return range(len(scores)), word, scores + following.max(axis=1)


def words_alone(scores, following, K):
    """Forgets how likely the beginnings were."""
    best = np.argsort(-following, axis=None)[:K]
    beginning, word = np.divmod(best, following.shape[1])
    return beginning, word, following.reshape(-1)[best]


exercise.judge(3, check_step, step, tempting=[best_of_each, words_alone])

# %% [markdown]
# ## What it costs, and what comes next
#
# - **Steps are not seconds.** Compare at equal time and at equal steps.
# - **No two asynchronous runs are equal.** But `minidist train
#   --data numbers --servers 1 --ranks 3 --replay` repeats a run from the server's log, to the bit.
# - **Memory** is what the splits of vocabulary and layers buy; the bytes they send need fast links.
# - **Certified:** `minidist verify` compares such a model's gradient with one device's for naive,
#   ZeRO, GPipe, 1F1B, attention, vocabulary and the hybrid.
#
# Each ingredient is an option of `minidist train --data numbers`: `--strategy`, `--servers`,
# `--push-every`, `--sparse`, `--reconstruction` (and `--no-shuffle`, but there the pairs' own order
# is random). To judge by reading, train longer with `--checkpoint FOLDER`, then `minidist
# translate --checkpoint FOLDER 321`. The strategies are all here now. Take your own model, and ask
# lesson 20 which of them it needs.

# %%
for cluster in clusters.values():
    cluster.close()
