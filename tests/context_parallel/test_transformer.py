"""A Transformer on cut sequences: dropout, positions and the loss are those of one device."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist import nn, optim
from minidist.autograd import recompute
from minidist.comm import Mesh
from minidist.context_parallel import columns, context_parallel, plain, zigzag
from minidist.errors import RankFailed
from minidist.replicas import sum_gradients
from minidist.rng import Randomness
from minidist.tensor_parallel import ParallelTransformer, vocab_parallel
from minidist.tensor_parallel.whole import unsplit
from minidist.tools import equivalence
from minidist.tools.compare import compare
from minidist.tools.costs.measured import measure_costs
from minidist.tools.strategies import Case
from minidist.tools.strategies.cases import random_weights
from tests.planted import mistaken
from tests.strategies import seeds

STRATEGIES = "ring_attention", "ulysses"


def small(T, depth=2, dropout=0.2, tied=True):
    return random_weights(nn.Transformer(7, 24, 12, depth, T, 2, "float64", dropout, tied))


def tokens(B, T, seed=0):
    return np.random.default_rng(seed).integers(0, 7, (2, B, T))


@pytest.mark.parametrize("name", STRATEGIES)
@given(
    size=st.integers(1, 4),
    more=st.integers(0, 9),
    B=st.integers(1, 3),
    depth=st.integers(1, 2),
    tied=st.booleans(),
    dropout=st.sampled_from([0.0, 0.3]),
    cut=st.sampled_from([plain, zigzag]),
    seed=seeds,
)
def test_any_cut_of_any_transformer_leaves_one_devices_gradients(
    cluster, name, size, more, B, depth, tied, dropout, cut, seed
):
    T = size + more
    case = Case("drawn", small(T, depth, dropout, tied), *tokens(B, T, seed), seed=seed)
    case = replace(case, options={"cut": cut})
    row = equivalence.check(name, case, size, cluster(size, "thread"))
    assert row["ok"], row["detail"]


def step(group, model, x, targets, held, randomness):
    """Leave the whole batch's gradients; return this rank's part of the loss."""
    randomness = replace(randomness, positions=held)
    logits = model(columns(x, held), randomness)
    loss = nn.cross_entropy(logits, columns(targets, held), reduction_size=targets.size)
    loss.backward()
    sum_gradients(model.parameters(), group)
    return loss.item()


def train(group, attention, T):
    """Return the weights after three steps of AdamW, and the sum of the ranks' losses."""
    model = context_parallel(small(T), group, attention)
    held, losses = zigzag(T, group.size)[group.rank], []
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    for i in range(3):
        own = step(group, model, *tokens(2, T, i), held, Randomness(0, i, np.arange(2)))
        losses.append(float(group.all_reduce(np.array(own))))
        optimizer.step()
        model.zero_grad()
    return model.state(), losses


@pytest.mark.parametrize("attention", ["ring", "ulysses"])
def test_training_goes_as_on_one_device(cluster, attention):
    (want, losses), *_ = cluster(1).run(train, attention, 13)
    for got, found in cluster(3).run(train, attention, 13):
        assert compare([got], want).error < 1e-8
        np.testing.assert_allclose(found, losses, rtol=1e-10)


def on_a_mesh(group, attention, T):
    """Return whole gradients of a model whose matrices are split over tp, its sequence over cp."""
    mesh = Mesh(group, cp=2, tp=2)
    cp, tp, model = mesh.cp, mesh.tp, small(T)
    model = context_parallel(ParallelTransformer(model, tp), cp, attention)
    x, targets = tokens(2, T)
    held = zigzag(T, cp.size)[cp.rank]
    logits = model(columns(x, held), Randomness(0, 0, np.arange(2), positions=held))
    vocab_parallel.cross_entropy(
        logits, columns(targets, held), targets.size, group=tp, vocab=model.vocab
    ).backward()
    sum_gradients(model.parameters(), cp)
    return {name: unsplit(p.grad, p, tp) for name, p in model.named_parameters().items()}


@pytest.mark.parametrize("attention", ["ring", "ulysses"])
def test_matrices_and_the_sequence_can_both_be_split(cluster, attention):
    model, (x, targets) = small(11), tokens(2, 11)
    nn.cross_entropy(model(x, Randomness(0, 0, np.arange(2))), targets).backward()
    want = {name: p.grad for name, p in model.named_parameters().items()}
    assert compare(cluster(4).run(on_a_mesh, attention, 11), want).ok


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


@pytest.mark.parametrize("attention, more", [("ring", 8 / 6), ("ulysses", 12 / 8)])
def test_blocks_may_be_run_again_in_backward(cluster, attention, more):
    """It costs the bytes of one more forward pass."""
    ranks = cluster(3)
    want, got = ranks.run(recomputed, attention, False), ranks.run(recomputed, attention, True)
    for (gradients, _), (again, _) in zip(want, got, strict=True):
        assert compare([again], gradients).ok
    assert sum(sent for _, sent in got) == more * sum(sent for _, sent in want)


@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("size", range(1, 9))
def test_every_length_on_every_number_of_ranks(cluster, name, size):
    for T in range(size, 3 * size + 3):
        for cut in (plain, zigzag):
            model = random_weights(nn.Transformer(7, 8 * size, 2 * size, 1, T, 2, "float64", 0.2))
            case = Case("every length", model, *tokens(2, T), options={"cut": cut})
            row = equivalence.check(name, case, size, cluster(size, "thread"))
            assert row["ok"], f"{cut.__name__}({T}, {size}): {row['detail']}"


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("T", [13, 16, 150])
def test_memory_and_work_of_every_rank_are_the_closed_forms(cluster, name, T):
    strategy = equivalence.find(name)
    model = nn.Transformer(7, 24, 12, 2, T, dtype="float64")
    case = Case("untied", model, *tokens(3, T))
    ranks = cluster(3, "thread")
    found, forms = measure_costs(name, case, ranks), strategy.predict(case, 3)
    for cost, form in zip(found, forms, strict=True):
        assert (cost.held, cost.work) == (form.held, form.work)
        assert (cost.examples, cost.positions, cost.layers) == (
            form.examples,
            form.positions,
            form.layers,
        )


def refusing(group, how):
    model, T = small(8), 8
    held = zigzag(T, group.size)[group.rank]
    randomness = Randomness(0, 0, np.arange(2), positions=held)
    x = columns(tokens(2, T)[0], held)
    try:
        if how == "no such attention":
            context_parallel(model, group, "star")
        elif how == "no attention at all":
            context_parallel(nn.MLP([2, 3]), group)
        elif how == "another cut":
            context_parallel(model, group, cut=plain)(x, randomness)
        else:
            without = replace(randomness, positions=None)
            context_parallel(model, group)(x, without)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "how, said",
    [
        ("no such attention", "unknown attention 'star'; choose one of ring, ulysses"),
        ("no attention at all", "no layer of this MLP attends"),
        ("another cut", "rank 0 of 2 was given positions ((0, 2), (6, 8)) of 8, but its cut says"),
        ("no positions", "cut tokens and targets by the same function, and pass Randomness("),
    ],
)
def test_what_cannot_be_right_is_refused(cluster, how, said):
    assert said in cluster(2, "thread").run(refusing, how)[0]


def on_one_rank(group, attention, randomness):
    model = nn.Transformer(7, 8, 4, 2, 5, dtype="float64", experts=3)
    model = context_parallel(model, group, attention)
    return model(tokens(2, 5)[0], randomness).data


@pytest.mark.parametrize("attention", ["ring", "ulysses"])
@pytest.mark.parametrize("randomness", [None, Randomness(0, 0, np.arange(2))])
def test_one_rank_has_all_positions_and_need_not_name_them(cluster, attention, randomness):
    own = cluster(1, "thread").run(on_one_rank, attention, randomness)[0]
    whole = nn.Transformer(7, 8, 4, 2, 5, dtype="float64", experts=3)
    np.testing.assert_allclose(own, whole(tokens(2, 5)[0]).data, rtol=1e-12)


def test_the_two_sequences_of_a_translator_stay_whole(cluster):
    def worker(group):
        context_parallel(nn.Seq2Seq(7, 7, 8, 4, 1, 4, 3), group)

    with pytest.raises(RankFailed, match=r"cuts one sequence, .* has a source of 4 positions and"):
        cluster(2, "thread").run(worker)


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


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "strategy, name, words",
    [
        ("ring_attention", "partial_softmaxes_added", "softmaxes added up"),
        ("ring_attention", "masked_by_local_rows", "a mask by the rows"),
        ("ring_attention", "gradients_one_hop_short", "left one hop before"),
        ("ring_attention", "own_keys_in_backward", "own K and V for every block"),
        ("ulysses", "sequence_in_the_order_of_ranks", "in the order of the ranks"),
        ("ulysses", "positions_counted_from_0_on_every_rank", "counted from 0"),
    ],
)
def test_a_mistake_is_found_and_its_cause_is_named(
    cluster, monkeypatch, strategy, name, words, size
):
    entry = equivalence.find(strategy)
    case = Case("drawn", small(12, depth=1), *tokens(2, 12))
    wrong = replace(entry, worker=mistaken(name, entry.worker))
    monkeypatch.setitem(equivalence.STRATEGIES, strategy, wrong)
    row = equivalence.check(strategy, case, size, cluster(size))
    assert not row["ok"] and row["error"] > 1e-3 and words in row["detail"], row
    monkeypatch.setitem(equivalence.STRATEGIES, strategy, entry)
    assert equivalence.check(strategy, case, size, cluster(size))["ok"]  # it is gone again
