"""What the splits lab asks of a student's code; it runs beside that code, and judges nothing.

Ranks are threads.
"""

import numpy as np

from minidist import Tensor, nn
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


@each_rank("N")
def attention(group, N, heads, state, x, grad):
    whole = nn.CausalSelfAttention(x.shape[-1], heads, dtype="float64")
    whole.load_state(state)
    layer = ParallelAttention(whole, group)
    return there_and_back(group, layer, x, grad) | parts_of(layer.named_parameters())


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


@each_rank("xs", len)
def gathered(group, xs, weight, bias, grads):
    """Run the product that gathers its input, and forgets it until backward."""
    w, b = Tensor(weight, requires_grad=True), Tensor(bias, requires_grad=True)
    product = sequence_parallel.GatheredLinear(group)
    found = there_and_back(group, lambda x: product(x, w, b), xs[group.rank], grads[group.rank])
    return found | {"d weight": w.grad, "d bias": b.grad}


@each_rank("xs", len)
def dropped(group, xs, rate, seed):
    """Drop out of each rank's positions."""
    layer = sequence_parallel.SequenceDropout(nn.Dropout(rate), group)
    x = xs[group.rank]
    return {"Y": layer(Tensor(x), Randomness(seed, 0, np.arange(len(x)))).data}


@each_rank("N")
def positions(group, T, N):
    """Return the positions that each rank holds, or whether they are refused."""
    if refused(sequence_parallel.own_positions, T, group):
        return {"refused": True}
    return {"positions": np.arange(T)[sequence_parallel.own_positions(T, group)]}
