"""Splits of matrices: conjugate pairs, columns, rows, heads, the vocabulary, the sequence.

Letters: N ranks, B examples, T positions, C and F widths, H heads of width D, V words.
"""

import numpy as np
import pytest

from minidist import Tensor, nn
from minidist.course.inside import inside, task
from minidist.course.labs.ranks import each_rank, refused
from minidist.parallel import collective_functions
from minidist.rng import Randomness
from minidist.tensor_parallel import (
    ColumnParallelLinear,
    ParallelAttention,
    RowParallelLinear,
    VocabParallelEmbedding,
    sequence_parallel,
    vocab_parallel,
)
from minidist.verify.strategies.cases import random_weights


def there_and_back(group, function, x, grad):
    """Return Y, dX, and the bytes that this rank sent in forward and in backward.

    There is no backward if Y and dY have different shapes on some rank.
    """
    given, (own, grad) = (x, grad), (x.copy(), grad.copy())  # not shared with other ranks
    x = Tensor(own, requires_grad=True)
    y = function(x)
    value = None if y.data.dtype == object else y.data.copy()  # np.array(None)
    found = {"Y": value, "bytes forward": group.ledger.total}
    if group.all_gather(np.array([y.shape == grad.shape])).all():
        before = group.ledger.total
        y.backward(grad)
        found |= {"dX": x.grad, "bytes backward": group.ledger.total - before}
    found["X was written to"] = not np.array_equal(own, given[0])
    return found | {"dY was written to": not np.array_equal(grad, given[1])}


@inside
@each_rank("xs", len)
def pair(group, name, xs, grads, axes):
    """Put one collective function between each rank's X and its dY."""
    function = getattr(collective_functions, name)
    x, grad = xs[group.rank], grads[group.rank]
    return there_and_back(group, lambda x: function(x, group, *axes), x, grad)


LAYERS = {
    "columns": ColumnParallelLinear,
    "rows": RowParallelLinear,
    "sequence rows": sequence_parallel.SequenceRowLinear,
    "heads": ParallelAttention,
}


@inside
@each_rank("N")
def refusal(group, kind, N, shape):
    """Return whether a layer that does not split is refused."""
    whole = nn.CausalSelfAttention if kind == "heads" else nn.Linear
    return {"refused": refused(LAYERS[kind], whole(*shape), group)}


def parts_of(parameters):
    """Return the gradients of parameters, and which part of the whole ones each of them is."""
    found = {}
    for name, p in parameters.items():
        found[f"d {name}"] = p.grad
        if p.shard is not None:
            found[f"part of {name}"] = p.shard.indices
    return found


@inside
@each_rank("xs", len)
def linear(group, kind, state, activation, xs, grads, options):
    """Run a split linear layer there and back."""
    shape = state["linear.weight"].shape
    whole = nn.Linear(*shape, "linear.bias" in state, activation, dtype="float64")
    whole.load_state(state)
    own = {k: v[group.rank] if k == "columns" else v for k, v in options.items()}
    layer = LAYERS[kind](whole, group, **own)
    found = there_and_back(group, layer, xs[group.rank], grads[group.rank])
    return found | parts_of(layer.named_parameters())


@inside
@each_rank("N")
def attention(group, N, heads, state, x, grad):
    whole = nn.CausalSelfAttention(x.shape[-1], heads, dtype="float64")
    whole.load_state(state)
    layer = ParallelAttention(whole, group)
    return there_and_back(group, layer, x, grad) | parts_of(layer.named_parameters())


@inside
@each_rank("N")
def embedding(group, N, weight, tokens, grad):
    whole = nn.Embedding(*weight.shape, dtype="float64")
    whole.load_state({"embedding.weight": weight})
    layer = VocabParallelEmbedding(whole, group)
    y = layer(tokens)
    forward = group.ledger.total
    y.backward(grad)
    found = {"Y": y.data, "bytes forward": forward}
    return found | parts_of(layer.named_parameters())


@inside
@each_rank("weights", len)
def head(group, x, weights, grads, transposed):
    """Run the head's product, of which each rank has the weight and the gradient of its words."""
    w = Tensor(weights[group.rank], requires_grad=True)
    found = there_and_back(
        group,
        lambda x: vocab_parallel.split_product(x, w, group, transposed),
        x,
        grads[group.rank],
    )
    return found | {"d weight": w.grad}


@inside
@each_rank("parts", len)
def cross_entropy(group, parts, targets, vocab, reduction_size, grad):
    """Return loss, dlogits and the most likely words of logits that are split over ranks."""
    own = parts[group.rank]
    found = there_and_back(
        group,
        lambda logits: vocab_parallel.cross_entropy(
            logits, targets, reduction_size, group=group, vocab=vocab
        ),
        own,
        np.array(grad),
    )
    return found | {"argmax": vocab_parallel.argmax(own, group, vocab)}


@inside
@each_rank("N")
def transformer(group, N, config, state, tokens, targets, seed):
    """Run a Transformer split by matrices and by sequence; its gradients, and what was sent."""
    model = nn.Transformer(**config, dtype="float64")
    model.load_state(state)
    model = sequence_parallel.sequence_parallel(model, group)
    logits = model(tokens, Randomness(seed, 0, np.arange(len(tokens))))
    loss = vocab_parallel.cross_entropy(logits, targets, group=group, vocab=config["vocab"])
    loss.backward()
    sequence_parallel.all_reduce_partial(model, group)
    found = {"loss": loss.data, "bytes": group.ledger.total}
    return found | parts_of(model.named_parameters())


@inside
@each_rank("xs", len)
def gathered(group, xs, weight, bias, grads):
    """Run the product that gathers its input, and forgets it until backward."""
    w, b = Tensor(weight, requires_grad=True), Tensor(bias, requires_grad=True)
    product = sequence_parallel.GatheredLinear(group)
    found = there_and_back(group, lambda x: product(x, w, b), xs[group.rank], grads[group.rank])
    return found | {"d weight": w.grad, "d bias": b.grad}


@inside
@each_rank("xs", len)
def dropped(group, xs, rate, seed):
    """Drop out of each rank's positions."""
    layer = sequence_parallel.SequenceDropout(nn.Dropout(rate), group)
    x = xs[group.rank]
    return {"Y": layer(Tensor(x), Randomness(seed, 0, np.arange(len(x)))).data}


@inside
@each_rank("N")
def positions(group, T, N):
    """Return the positions that each rank holds, or whether they are refused."""
    if refused(sequence_parallel.own_positions, T, group):
        return {"refused": True}
    return {"positions": np.arange(T)[sequence_parallel.own_positions(T, group)]}


# {function: (what the ranks have of X, and of dY, how many axes it takes)}
LAYOUTS = {
    "copy_to": ("same", "own", 0),
    "reduce_from": ("own", "same", 0),
    "scatter": ("same", "parts", 1),
    "gather": ("parts", "same", 1),
    "all_gather": ("parts", "own", 1),
    "reduce_scatter": ("own", "parts", 1),
    "all_to_all": ("parts", "parts", 2),
}
PAIRS = [pytest.param(name, marks=task("5.2" if LAYOUTS[name][2] else "5.1")) for name in LAYOUTS]


def held(rng, layout, N, shape, axis):
    """Draw what each rank has: an array of its own, the same one, or a part of it."""
    if layout == "own":
        return list(rng.standard_normal((N, *shape)))
    whole = rng.standard_normal(shape)
    return np.array_split(whole, N, axis) if layout == "parts" else [whole] * N


@pytest.mark.parametrize("N", [1, 2, 3, 4])
@pytest.mark.parametrize("group", PAIRS)
def test_a_pair_goes_there_and_back(group, N, rng):
    x_layout, grad_layout, count = LAYOUTS[group]
    for axes in ((0, 1)[:count], (1, 0)[:count]):
        parts = rng.integers(0, 3, 2).tolist()  # which N does not divide; some may be empty
        shape = tuple(N * n + int(rng.integers(1, max(2, N))) for n in parts)
        xs = held(rng, x_layout, N, shape, axes[-1] if axes else 0)
        grads = held(rng, grad_layout, N, shape, axes[0] if axes else 0)
        pair.check(name=group, xs=xs, grads=grads, axes=axes)


def check_linear(rng, kind, xs, grads, shape, bias=True, activation="identity", **options):
    """Ask for a split layer there and back; xs: what it is given, grads: of what it returns."""
    state = {"linear.weight": rng.standard_normal(shape)}
    if bias:
        state["linear.bias"] = rng.standard_normal(shape[1])
    given = {"activation": activation, "xs": xs, "grads": grads, "options": options}
    linear.check(kind=kind, state=state, **given)


@pytest.mark.parametrize(
    "group, kind",
    [
        pytest.param("split", "columns", marks=task("5.3")),
        pytest.param("split", "rows", marks=task("5.4")),
        pytest.param("any number of ranks", "heads", marks=task("5.5")),
    ],
)
def test_what_does_not_split_evenly_is_refused(group, kind, rng):
    N = int(rng.integers(2, 5))
    n = N * int(rng.integers(2, 5)) + int(rng.integers(1, N))
    shape = {"columns": (3, n), "rows": (n, 3), "heads": (N * n, n)}[kind]
    refusal.check(kind=kind, N=N, shape=shape)


@task("5.3")
@pytest.mark.parametrize(
    "N, group", [(1, "split"), (2, "split"), (3, "gathered"), (2, "chosen"), (4, "no bias")]
)
def test_columns_are_split_there_and_back(N, group, rng):
    C, F, B = int(rng.integers(2, 6)), N * int(rng.integers(2, 4)), int(rng.integers(1, 5))
    x, grad = rng.standard_normal((B, C)), rng.standard_normal((B, F))
    own, options = np.split(np.arange(F), N), {}
    if group == "chosen":
        own = list(np.sort(rng.permutation(F).reshape(N, -1), axis=1))
        options = {"columns": own}
    grads = [grad[:, mine] for mine in own]
    if group == "gathered":
        grads, options = [grad] * N, {"gather_output": True}
    bias = group != "no bias"
    check_linear(rng, "columns", [x] * N, grads, (C, F), bias, "gelu", **options)


@task("5.4")
@pytest.mark.parametrize(
    "N, group", [(1, "split"), (2, "split"), (3, "scattered"), (4, "no bias"), (3, "gelu")]
)
def test_rows_are_split_there_and_back(N, group, rng):
    C, F, B = N * int(rng.integers(2, 4)), int(rng.integers(2, 6)), int(rng.integers(1, 5))
    x, grads = rng.standard_normal((B, C)), [rng.standard_normal((B, F))] * N
    xs, options = np.split(x, N, axis=-1), {}
    if group == "scattered":
        xs, options = [x] * N, {"scatter_input": True}
    activation = "gelu" if group in ("gelu", "scattered") else "identity"
    check_linear(rng, "rows", xs, grads, (C, F), group != "no bias", activation, **options)


FEW, ANY = "one or two ranks", "any number of ranks"


@task("5.5")
@pytest.mark.parametrize("group, N, each, D", [(FEW, 1, 2, 3), (FEW, 2, 1, 2), (ANY, 3, 2, 3)])
def test_heads_are_split_there_and_back(group, N, each, D, rng):
    H, B, T = N * each, int(rng.integers(1, 4)), int(rng.integers(2, 5))
    drawn = nn.CausalSelfAttention(H * D, H, dtype="float64").named_parameters().items()
    state = {name: rng.standard_normal(p.shape) for name, p in drawn}
    x, grad = rng.standard_normal((2, B, T, H * D))
    attention.check(N=N, heads=H, state=state, x=x, grad=grad)


def words(rng, N):
    """Draw a number of words of which a rank may have padding, and tokens."""
    V = N * int(rng.integers(2, 4)) - int(rng.integers(1, max(2, N)))
    tokens = rng.integers(0, V, rng.integers(1, 5, 2))
    tokens[0, 0] = V - 1
    return V, tokens


@task("5.6")
@pytest.mark.parametrize("N", [1, 2, 3, 4])
def test_an_embedding_has_its_words(N, rng):
    V, tokens = words(rng, N)
    weight = rng.standard_normal((V, 3))
    embedding.check(N=N, weight=weight, tokens=tokens, grad=rng.standard_normal((*tokens.shape, 3)))


@task("5.6")
@pytest.mark.parametrize("N", [1, 2, 3, 4])
def test_a_head_has_its_words(N, rng):
    (B, T, C, each), transposed = rng.integers(1, 5, 4).tolist(), bool(N % 2)
    weights = list(rng.standard_normal((N, each, C) if transposed else (N, C, each)))
    x, grads = rng.standard_normal((B, T, C)), list(rng.standard_normal((N, B, T, each)))
    head.check(x=x, weights=weights, grads=grads, transposed=transposed)


@task("5.6")
@pytest.mark.parametrize("N, V", [(1, 2), (2, 3), (3, 7), (4, 6), (4, 5), (2, 4)])
def test_a_loss_leaves_padding_out(N, V, rng):
    (B, T), each = rng.integers(1, 5, 2).tolist(), -(-V // N)
    real = 3 * rng.standard_normal((B, T, V)) + 800 * rng.choice([-1, 0, 1], (B, T, 1))
    padding = [(0, 0), (0, 0), (0, each * N - V)]
    logits = np.pad(real, padding, constant_values=900.0)  # more than any real one
    given = {"parts": np.split(logits, N, axis=-1), "vocab": V, "grad": rng.uniform(0.5, 2)}
    given |= {"targets": rng.integers(nn.IGNORED, V, (B, T))}
    cross_entropy.check(**given, reduction_size=float(rng.integers(3, 40)))


# 5.7: the sequence.


def pieces_of(rng, N):
    """Draw what each rank has of X[B, T/N, C], and the whole of X and of dY[B, T, F]."""
    B, T, C, F = (n * k for n, k in zip(rng.integers(1, 4, 4).tolist(), (1, N, N, 1), strict=True))
    x = rng.standard_normal((B, T, C))
    return np.split(x, N, axis=1), x, rng.standard_normal((B, T, F))


@task("5.7")
@pytest.mark.parametrize("N", [1, 2, 3])
def test_a_product_gathers_its_positions(N, rng):
    xs, x, grad = pieces_of(rng, N)
    C, F = x.shape[-1], grad.shape[-1]
    weight, bias = rng.standard_normal((C, F)), rng.standard_normal(F)
    grads = list(rng.standard_normal((N, *grad.shape)))
    gathered.check(xs=xs, weight=weight, bias=bias, grads=grads)


@task("5.7")
@pytest.mark.parametrize("N", [1, 2, 3])
def test_rows_leave_each_rank_its_positions(N, rng):
    _, x, grad = pieces_of(rng, N)
    split, grads = np.split(x, N, axis=-1), np.split(grad, N, axis=1)
    check_linear(rng, "sequence rows", split, grads, (x.shape[-1], grad.shape[-1]))


@task("5.7")
@pytest.mark.parametrize("T, N", [(6, 3), (8, 4), (5, 1), (7, 2)])
def test_positions_are_split_evenly_and_dropped_as_one_device_does(T, N, rng):
    positions.check(T=T, N=N)
    xs = pieces_of(rng, N)[0]
    dropped.check(xs=xs, rate=0.5, seed=int(rng.integers(99)))


@task("5.7")
@pytest.mark.parametrize(
    "N, tied, depth", [(1, True, 1), (2, False, 2), (2, True, 1), (3, True, 1)]
)
def test_a_transformer_is_split_by_matrices_and_sequence(N, tied, depth, rng):
    V, B, T, seed = 11, int(rng.integers(1, 4)), N * int(rng.integers(1, 4)), int(rng.integers(99))
    config = {"vocab": V, "width": 6, "heads": 6, "depth": depth, "context": 12}
    config |= {"dropout": 0.2, "tied": tied}
    model = random_weights(nn.Transformer(**config, dtype="float64"), seed)
    tokens, targets = rng.integers(0, V, (2, B, T))
    given = {"N": N, "config": config, "state": model.state(), "seed": seed}
    transformer.check(**given, tokens=tokens, targets=targets)
