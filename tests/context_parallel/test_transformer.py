"""A Transformer on cut sequences: dropout, positions, documents, the loss are one device's."""

import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from minidist import nn
from minidist.autograd import recompute
from minidist.context_parallel import axes_of, columns, context_parallel, plain, zigzag
from minidist.errors import RankFailed, is_wrong_input
from minidist.rng import Randomness
from minidist.verify import equivalence
from minidist.verify.compare import compare
from minidist.verify.strategies import Case
from minidist.verify.strategies.cases import documents, random_weights

STRATEGIES = "ring_attention", "gathered_attention", "ulysses", "usp"


def small(T, depth=2, dropout=0.2, tied=True):
    return random_weights(nn.Transformer(7, 24, 12, depth, T, 2, "float64", dropout, tied))


def tokens(B, T, seed=0):
    return np.random.default_rng(seed).integers(0, 7, (2, B, T))


def recomputed(group, attention, again):
    """Return the gradients, and the bytes that attention has sent; blocks may run again."""
    model, (x, targets) = context_parallel(small(9), group, attention), tokens(2, 9)
    held = zigzag(9, group.size)[group.rank]
    randomness = Randomness(0, 0, np.arange(2), positions=held)
    embedding, *blocks, head = model.layers
    y = embedding(columns(x, held), randomness)
    for block in blocks:
        run = partial(block, randomness=randomness)
        y = recompute(run, y, parameters=block.parameters()) if again else run(y)
    logits = head(y, randomness)
    nn.cross_entropy(logits, columns(targets, held), targets.size).backward()
    sent = group.ledger.total
    return {name: p.grad for name, p in model.named_parameters().items()}, sent


@pytest.mark.parametrize(
    "attention, more", [("ring", 8 / 6), ("gathered", 6 / 4), ("ulysses", 12 / 8)]
)
def test_blocks_may_be_run_again_in_backward(cluster, attention, more):
    """It costs the bytes of one more forward pass."""
    ranks = cluster(3, "thread")
    want, got = ranks.run(recomputed, attention, False), ranks.run(recomputed, attention, True)
    for (gradients, _), (again, _) in zip(want, got, strict=True):
        assert compare([again], gradients).ok
    assert sum(sent for _, sent in got) == more * sum(sent for _, sent in want)


@pytest.mark.parametrize("name", STRATEGIES)
def test_grouped_queries_and_documents_on_four_ranks(cluster, name):
    """Heads of keys and values: fewer than ranks, and a number that the ranks do not divide."""
    for K in (2, 6):
        model = random_weights(nn.Llama(7, 24, 12, K, 2, 13, 2, "float64"))
        case = Case("grouped", model, *tokens(2, 13), documents=documents(2, 13))
        case = replace(case, options={"ulysses": 2} if name == "usp" else {})
        row = equivalence.check(name, case, 4, cluster(4, "thread"))
        assert row["ok"], row["detail"]


def called(cut=zigzag, documents=None, positions=True):
    """Return a worker that calls a model, cut by `cut`, on what zigzag gives its rank."""

    def worker(group):
        held = zigzag(8, group.size)[group.rank]
        where = Randomness(0, 0, np.arange(2), positions=held if positions else None)
        model = context_parallel(small(8), group, cut=cut)
        model(columns(tokens(2, 8)[0], held), replace(where, documents=documents))

    return worker


TRANSLATOR = nn.Seq2Seq(7, 7, 8, 4, 1, 4, 3)
REFUSED = [
    (
        lambda g: context_parallel(small(8), g, "star"),
        "unknown attention 'star'; choose one of ring, gathered, ulysses",
    ),
    (lambda g: context_parallel(nn.MLP([2, 3]), g), "no layer of this MLP attends"),
    (lambda g: context_parallel(TRANSLATOR, g), "a source of 4 positions and"),
    (
        lambda g: context_parallel(small(8), g, "ulysses", axes=axes_of(g, 2)),
        "exchanged inside a ring already; use attention='ring' or 'gathered'",
    ),
    (lambda g: axes_of(g, 3), "2 ranks are not cut into groups of 3 that exchange heads; use a"),
    (
        called(documents=np.zeros((2, 4), int)),
        "documents [2, 4] for sequences of 8 positions; give one entry",
    ),
    (called(cut=plain), "rank 0 of 2 was given positions ((0, 2), (6, 8)) of 8, but its cut says"),
    (called(positions=False), "cut tokens and targets by the same function, and pass Randomness("),
]


def test_what_cannot_be_right_is_refused(cluster):
    for worker, message in REFUSED:
        with pytest.raises(RankFailed, match=re.escape(message)) as caught:
            cluster(2, "thread").run(worker)
        assert is_wrong_input(caught.value)


def on_one_rank(group, attention, randomness):
    model = nn.Transformer(7, 8, 4, 2, 5, dtype="float64", experts=3)
    model = context_parallel(model, group, attention)
    return model(tokens(2, 5)[0], randomness).data


def test_one_rank_has_all_positions_and_need_not_name_them(cluster):
    whole = nn.Transformer(7, 8, 4, 2, 5, dtype="float64", experts=3)(tokens(2, 5)[0]).data
    for attention in "ring", "gathered", "ulysses":
        for randomness in None, Randomness(0, 0, np.arange(2)):
            own = cluster(1, "thread").run(on_one_rank, attention, randomness)[0]
            np.testing.assert_allclose(own, whole, rtol=1e-12)


def test_the_heads_of_ulysses_and_the_positions_must_be_enough(cluster):
    x, targets = tokens(2, 8)
    model = nn.Transformer(7, 8, 4, 1, 8, dtype="float64")
    for name, T, said in (
        ("ulysses", 8, "cannot give 4 heads to 3 ranks; use a multiple of 3"),
        ("ring_attention", 2, "cannot cut 2 positions over 3 ranks"),
    ):
        with pytest.raises(ValueError, match=said):
            equivalence.gradients(
                name, model, x[:, :T], targets[:, :T], 3, cluster=cluster(3, "thread")
            )
