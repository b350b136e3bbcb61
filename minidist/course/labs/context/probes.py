"""What the lab of context and experts asks of a student's code; it judges nothing.

Ranks are threads; `held` has the runs of positions of each rank.
"""

from functools import partial
from itertools import pairwise

import numpy as np

from minidist import Tensor, nn
from minidist.context_parallel import cuts, ring_attention
from minidist.context_parallel.transformer import gather_choices
from minidist.course.labs.ranks import each_rank
from minidist.expert_parallel.dispatch import Dispatch, Exchange
from minidist.nn.router import route
from minidist.pieces import Positions
from minidist.rng import Randomness


def positions(held):
    length = max(end for runs in held for _, end in runs)
    return [Positions(tuple(map(tuple, runs)), length) for runs in held]


def there_and_back(group, y, x, grad):
    """Return Y and the bytes of forward; then dX and the bytes of backward, given a dY."""
    found = {"Y": y.data.copy(), "bytes forward": group.ledger.total}
    if grad is None or not y.requires_grad:
        return found
    y.backward(grad.copy())
    sent = group.ledger.total - found["bytes forward"]
    return found | {"dX": x.grad, "bytes backward": sent}


def merge(scores, v, parts):
    """Join softmaxes over disjoint sets of keys, of `parts` keys each."""
    o, log_z = np.zeros((*scores.shape[:-1], 2)), np.full((*scores.shape[:-1], 1), -np.inf)
    ends = np.cumsum([0, *parts])
    for a, b in pairwise(ends):
        s = scores[..., a:b]
        z = np.logaddexp.reduce(s, axis=-1, keepdims=True)
        ring_attention.join(o, log_z, np.exp(s - z) @ v[a:b], z)
    return {"O": o, "log Z": log_z}


@each_rank("held", len)
def attention(group, held, qkv, grad, backward):
    """Attend with the positions of this rank; count bytes of K, V, dK and dV."""
    held = positions(held)
    own = held[group.rank].indices
    x = Tensor(qkv[..., own, :].copy(), requires_grad=backward)
    y = ring_attention.ring_attention(x, group, held)
    return there_and_back(group, y, x, grad[..., own, :] if backward else None)


def cut(name, T, N):
    """Return the positions of each rank and its pairs of query and key, or that it is refused."""
    try:
        held = getattr(cuts, name)(T, N)
    except ValueError:
        return {"refused": True}
    found = {"refused": False, "the ranks": len(held)}
    for r, own in enumerate(held):
        found[f"positions on rank {r}"] = own.indices
        found[f"pairs of query and key on rank {r}"] = int((own.indices + 1).sum())
    return found


@each_rank("xs", len)
def exchange(group, rows, xs, grads):
    """Send rows[r, s] rows from rank r to rank s, and the gradients back."""
    x = Tensor(xs[group.rank].copy(), requires_grad=True)
    y = Exchange(group, rows[group.rank].tolist(), rows[:, group.rank].tolist())(x)
    return there_and_back(group, y, x, grads[group.rank])


@each_rank("xs", len)
def dispatch(group, ends, loads, seed, trained, wanted, xs, grads):
    """Run each rank's rows through experts on all ranks; loads[N, E] are the rows for each."""
    x = Tensor(xs[group.rank].copy(), requires_grad=wanted)
    run = range(ends[group.rank], ends[group.rank + 1])
    own = [nn.Expert(x.shape[1], name=str(e), seed=seed, dtype="float64") for e in run]
    mine = {n: p for expert in own for n, p in expert.named_parameters().items()}
    for p in mine.values():
        p.requires_grad = trained
    y = Dispatch(group, ends, trained)(own, x, loads[group.rank])
    found = {"takes part in backward": y.requires_grad}
    found |= there_and_back(group, y, x, grads[group.rank])
    return found | {f"d {name}": p.grad for name, p in mine.items()}


def queues(chosen, experts, capacity):
    found = route(chosen, experts, capacity)
    return {"kept": found.kept, "rows of each expert": found.load}


@each_rank("held", len)
def routed(group, held, chosen, experts, capacity):
    """Return which choices are kept: of whole sequences, and of this rank's positions."""
    held = positions(held)
    own = held[group.rank]
    mixture = nn.MixtureOfExperts(1, experts, chosen.shape[-1], capacity, dtype="float64")
    mixture.gather_choices = partial(gather_choices, group=group, cut=lambda T, N: held)
    randomness = Randomness(0, 0, np.arange(len(chosen)), positions=own)
    whole, mine = mixture.routed(chosen[:, own.indices], experts, randomness)
    found = {"bytes": group.ledger.total}
    for name, routing in (("of the whole", whole), ("of this rank", mine)):
        found[f"kept {name}"], found[f"chosen {name}"] = routing.kept, routing.chosen
    return found
