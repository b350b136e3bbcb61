"""Context and experts: merged softmaxes, cuts of a sequence, dispatch, drops as of the whole.

Letters: N ranks, B examples, T positions, H heads of width D, E experts, k choices, C the width.
`held` has the runs of positions of each rank.
"""

from functools import partial
from itertools import pairwise

import numpy as np
import pytest

from minidist import Tensor, nn
from minidist.context_parallel import cuts, plain, ring_attention, zigzag
from minidist.context_parallel.transformer import gather_choices
from minidist.course.answers import check
from minidist.course.inside import inside, task
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


@inside
def merge(scores, v, parts):
    """Join softmaxes over disjoint sets of keys, of `parts` keys each."""
    o, log_z = np.zeros((*scores.shape[:-1], 2)), np.full((*scores.shape[:-1], 1), -np.inf)
    ends = np.cumsum([0, *parts])
    for a, b in pairwise(ends):
        s = scores[..., a:b]
        z = np.logaddexp.reduce(s, axis=-1, keepdims=True)
        ring_attention.join(o, log_z, np.exp(s - z) @ v[a:b], z)
    return {"O": o, "log Z": log_z}


@inside
@each_rank("held", len)
def attention(group, held, qkv, grad, backward):
    """Attend with the positions of this rank; count bytes of K, V, dK and dV."""
    held = positions(held)
    own = held[group.rank].indices
    x = Tensor(qkv[..., own, :].copy(), requires_grad=backward)
    y = ring_attention.ring_attention(x, group, held)
    return there_and_back(group, y, x, grad[..., own, :] if backward else None)


@inside
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


@inside
@each_rank("xs", len)
def exchange(group, rows, xs, grads):
    """Send rows[r, s] rows from rank r to rank s, and the gradients back."""
    x = Tensor(xs[group.rank].copy(), requires_grad=True)
    y = Exchange(group, rows[group.rank].tolist(), rows[:, group.rank].tolist())(x)
    return there_and_back(group, y, x, grads[group.rank])


@inside
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


@inside
def queues(chosen, experts, capacity):
    found = route(chosen, experts, capacity)
    return {"kept": found.kept, "rows of each expert": found.load}


@inside
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


@task("7.1")
@pytest.mark.parametrize("size", [1, 800])
def test_softmaxes_over_parts_of_the_keys_join(size, rng):
    parts = rng.integers(1, 5, int(rng.integers(2, 5))).tolist()
    scores = size * rng.standard_normal((2, 3, sum(parts)))
    merge.check(scores, rng.standard_normal((sum(parts), 2)), parts)


def runs_of(made):
    return [list(own.runs) for own in made]


def dealt(rng, T, N):
    """Deal pieces of T positions to N ranks by chance; one rank or more has none."""
    ends = [0, *sorted(rng.integers(0, T + 1, 2 * N - 1).tolist()), T]
    owner = rng.choice(rng.permutation(N)[1:], 2 * N)
    return [[(ends[i], ends[i + 1]) for i in np.flatnonzero(owner == r)] for r in range(N)]


# {how a sequence is cut: (the ranks, T, rng) -> the runs of each}
CUTS = {
    "one rank": lambda T, rng: runs_of(plain(T, 1)),
    "two runs": lambda T, rng: runs_of(plain(T, 2)),
    "zigzag of few": lambda T, rng: runs_of(zigzag(5, 4)),
    "zigzag": lambda T, rng: runs_of(zigzag(T, 3)),
    "drawn": lambda T, rng: dealt(rng, T, int(rng.integers(3, 6))),
    "long": lambda T, rng: [[(0, 140)]],
}


@task("7.1")
@pytest.mark.parametrize("how", CUTS)
@pytest.mark.parametrize("group", ["forward", "backward"])
def test_a_ring_attends_to_all_positions(group, how, rng):
    held = CUTS[how](int(rng.integers(7, 19)), rng)
    T, (B, H, D) = max(end for runs in held for _, end in runs), rng.integers(1, 4, 3).tolist()
    qkv, grad = rng.standard_normal((3, B, H, T, D)), rng.standard_normal((B, H, T, D))
    attention.check(held=held, qkv=qkv, grad=grad, backward=group == "backward")


@task("7.2")
@pytest.mark.parametrize("T, N", [(24, 4), (26, 4), (5, 5), (6, 5), (7, 1), (17, 4), (4, 5)])
@pytest.mark.parametrize("group", ["plain", "zigzag"])
def test_a_cut_has_every_position_once(group, T, N):
    cut.check(group, T, N)


def check_bytes(function, **given):
    check(function(**given), function.package(**given), at_most=("bytes",))


@task("7.3")
@pytest.mark.parametrize("N", [1, 2, 4])
def test_rows_are_exchanged_there_and_back(N, rng):
    rows = rng.integers(0, 4, (N, N))
    xs = [rng.standard_normal((n, 3)) for n in rows.sum(axis=1)]
    grads = [rng.standard_normal((n, 3)) for n in rows.sum(axis=0)]
    check_bytes(exchange, rows=rows, xs=xs, grads=grads)


FEW, ANY, ROWS = "one or two ranks", "any number of ranks", "rows without a gradient"


@task("7.3")
@pytest.mark.parametrize(
    "group, N, trained, wanted",
    [
        (FEW, 1, True, True),
        (FEW, 2, True, True),
        (ANY, 4, True, True),
        (ROWS, 3, True, False),
        (ROWS, 4, False, False),
    ],
)
def test_rows_go_to_their_experts_and_back(group, N, trained, wanted, rng):
    E, C = N + 2, int(rng.integers(1, 5))
    inner, loads = rng.integers(0, E + 1, N - 1), rng.integers(0, 4, (N, E))
    if N > 2:  # a rank without experts, and one without rows
        inner[-1], loads[rng.integers(N)] = inner[0], 0
    ends = [0, *sorted(inner.tolist()), E]
    xs, grads = ([rng.standard_normal((n, C)) for n in loads.sum(axis=1)] for _ in range(2))
    given = {"ends": ends, "loads": loads, "seed": int(rng.integers(99)), "xs": xs, "grads": grads}
    check_bytes(dispatch, **given, trained=trained, wanted=wanted)


def choices(rng, B, T, E, k):
    return np.argsort(rng.random((B, T, E)) + 0.1 * np.arange(E), axis=-1)[..., :k]


@task("7.4")
@pytest.mark.parametrize("k, capacity", [(1, 2), (2, 3), (3, 1), (2, None)])
def test_a_queue_keeps_the_first(k, capacity, rng):
    (B, T), E = rng.integers(3, 7, 2).tolist(), int(rng.integers(4, 6))
    queues.check(choices(rng, B, T, E, k), E, capacity)


@task("7.4")
@pytest.mark.parametrize("how", [how for how in CUTS if how != "long"])
def test_drops_do_not_depend_on_the_cut(how, rng):
    held = CUTS[how](int(rng.integers(7, 14)), rng)
    T, (B, k) = max(end for runs in held for _, end in runs), rng.integers(2, 4, 2).tolist()
    E = int(rng.integers(3, 6))
    routed.check(held=held, chosen=choices(rng, B, T, E, k), experts=E, capacity=0.8)
