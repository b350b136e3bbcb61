"""What the splits lab asks of a student's code; it runs beside that code, and judges nothing.

Ranks are threads.
"""

import numpy as np

from minidist import Tensor, collective_functions, nn
from minidist.course.probes.ranks import on_ranks
from minidist.rng import Randomness
from minidist.tensor_parallel import (
    ColumnParallelLinear,
    ParallelAttention,
    RowParallelLinear,
    VocabParallelEmbedding,
    sequence_parallel,
    vocab_parallel,
)


def there_and_back(group, function, x, grad):
    """Return Y, dX, and the bytes that this rank sent in forward and in backward.

    There is no backward if Y and dY have different shapes on some rank. `overwritten` says whether
    X and dY have changed.
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
    now = zip(given, (own, grad), strict=True)
    return found | {"overwritten": [not np.array_equal(was, is_) for was, is_ in now]}


def pair(name, xs, grads, axes):
    """Put one collective function between each rank's X and its dY."""

    def worker(group):
        function = getattr(collective_functions, name)
        x, grad = xs[group.rank], grads[group.rank]
        return there_and_back(group, lambda x: function(x, group, *axes), x, grad)

    return on_ranks(worker, len(xs))


def refused(kind, N, shape):
    """Return whether a layer that does not split is refused by a ValueError."""

    def worker(group):
        try:
            if kind == "heads":
                ParallelAttention(nn.CausalSelfAttention(*shape), group)
            else:
                split = {"columns": ColumnParallelLinear, "rows": RowParallelLinear}[kind]
                split(nn.Linear(*shape), group)
        except ValueError:
            return {"refused": True}
        return {"refused": False}

    return on_ranks(worker, N)


def parts_of(parameters):
    """Return the gradients of parameters, and which part of the whole ones each of them is."""
    found = {}
    for name, p in parameters.items():
        found[f"d {name}"] = p.grad
        if p.shard is not None:
            found[f"part of {name}"] = p.shard.indices
    return found


def linear(kind, state, activation, xs, grads, options):
    """Run a split linear layer there and back."""

    def worker(group):
        shape = state["linear.weight"].shape
        whole = nn.Linear(*shape, "linear.bias" in state, activation, dtype="float64")
        whole.load_state(state)
        split = {
            "columns": ColumnParallelLinear,
            "rows": RowParallelLinear,
            "sequence rows": sequence_parallel.SequenceRowLinear,
        }[kind]
        own = {k: v[group.rank] if k == "columns" else v for k, v in options.items()}
        layer = split(whole, group, **own)
        found = there_and_back(group, layer, xs[group.rank], grads[group.rank])
        return found | parts_of(layer.named_parameters())

    return on_ranks(worker, len(xs))


def attention(N, heads, state, x, grad):
    def worker(group):
        whole = nn.CausalSelfAttention(x.shape[-1], heads, dtype="float64")
        whole.load_state(state)
        layer = ParallelAttention(whole, group)
        return there_and_back(group, layer, x, grad) | parts_of(layer.named_parameters())

    return on_ranks(worker, N)


def embedding(N, weight, tokens, grad):
    def worker(group):
        whole = nn.Embedding(*weight.shape, dtype="float64")
        whole.load_state({"embedding.weight": weight})
        layer = VocabParallelEmbedding(whole, group)
        y = layer(tokens)
        forward = group.ledger.total
        y.backward(grad)
        found = {"Y": y.data, "bytes forward": forward}
        return found | parts_of(layer.named_parameters())

    return on_ranks(worker, N)


def head(x, weights, grads, transposed):
    """Run the head's product, of which each rank has the weight and the gradient of its words."""

    def worker(group):
        w = Tensor(weights[group.rank], requires_grad=True)
        found = there_and_back(
            group,
            lambda x: vocab_parallel.split_product(x, w, group, transposed),
            x,
            grads[group.rank],
        )
        return found | {"d weight": w.grad}

    return on_ranks(worker, len(weights))


def cross_entropy(parts, targets, vocab, reduction_size, grad):
    """Return loss, dlogits and the most likely words of logits that are split over ranks."""

    def worker(group):
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

    return on_ranks(worker, len(parts))


def transformer(N, config, state, tokens, targets, seed):
    """Run a Transformer split by matrices and by sequence; its gradients, and what was sent."""

    def worker(group):
        model = nn.Transformer(**config, dtype="float64")
        model.load_state(state)
        model = sequence_parallel.sequence_parallel(model, group)
        logits = model(tokens, Randomness(seed, 0, np.arange(len(tokens))))
        loss = vocab_parallel.cross_entropy(logits, targets, group=group, vocab=config["vocab"])
        loss.backward()
        sequence_parallel.all_reduce_partial(model, group)
        found = {"loss": loss.data, "bytes": group.ledger.total}
        return found | parts_of(model.named_parameters())

    return on_ranks(worker, N)


def gathered(xs, weight, bias, grads):
    """Run the product that gathers its input, and forgets it until backward."""

    def worker(group):
        w, b = Tensor(weight, requires_grad=True), Tensor(bias, requires_grad=True)
        product = sequence_parallel.GatheredLinear(group)
        found = there_and_back(group, lambda x: product(x, w, b), xs[group.rank], grads[group.rank])
        return found | {"d weight": w.grad, "d bias": b.grad}

    return on_ranks(worker, len(xs))


def dropped(xs, rate, seed):
    """Drop out of each rank's positions."""

    def worker(group):
        layer = sequence_parallel.SequenceDropout(nn.Dropout(rate), group)
        x = xs[group.rank]
        return {"Y": layer(Tensor(x), Randomness(seed, 0, np.arange(len(x)))).data}

    return on_ranks(worker, len(xs))


def positions(T, N):
    """Return the positions that each rank holds, or whether they are refused."""

    def worker(group):
        try:
            own = sequence_parallel.own_positions(T, group)
        except ValueError:
            return {"refused": True}
        return {"positions": np.arange(T)[own]}

    return on_ranks(worker, N)
