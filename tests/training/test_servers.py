"""Training with servers: every example once, replayed to the bit, sparse, saved for any mesh."""

from dataclasses import replace

import numpy as np
import pytest

from minidist import nn, optim
from minidist.checkpoint import Keep, Saved
from minidist.data_parallel.parameter_server import ServerPlan
from minidist.errors import RankFailed
from minidist.nn.datasets import Text
from minidist.nn.datasets.pairs import padded, teacher_forcing
from minidist.nn.embedding import PAD
from minidist.training.loop import train
from minidist.training.servers import (
    Minibatches,
    Scheduled,
    plan_of,
    rule,
    serve_or_work,
    train_with_servers,
    updates_of,
)
from minidist.training.settings import Settings
from minidist.verify.certificate import replay
from minidist.verify.compare import compare
from minidist.verify.strategies.parameter_server import replay_server
from tests.data_parallel.serving import parameter_server_bytes
from tests.planted import mistaken
from tests.strategies import assert_same_bits

S, T, SMALL = 6, 5, Settings(steps=7, batch=6, lr=1e-3)
PLANS = {
    "asynchronous": replace(SMALL, servers=1),
    "buffer": replace(SMALL, servers=1, push_every=3),
    "buffer, two servers": replace(SMALL, servers=2, push_every=2, fetch_every=2),
    "sparse": replace(SMALL, servers=1, sparse=True),
    "sparse buffer, two servers": replace(
        SMALL, servers=2, push_every=3, fetch_every=2, sparse=True
    ),
    "bounded": replace(SMALL, servers=2, staleness=1),
    "quorum": replace(SMALL, servers=1, quorum=2, staleness=1),
}


def pairs(count=10, vocabs=(40, 30), seed=0, shortest=1):
    """Return random sentences of many lengths; a batch has few of the words."""
    random = np.random.default_rng(seed)

    def sentences(vocab, longest):
        return [
            random.integers(3, vocab, random.integers(shortest, longest + 1)) for _ in range(count)
        ]

    sources, words = (sentences(v, n) for v, n in zip(vocabs, (S, T - 1), strict=True))
    return teacher_forcing(padded(sources, S), padded(words, T - 1))


def translator(vocabs=(40, 30), width=8, **more):
    return nn.Seq2Seq(*vocabs, width, 2, 1, S, T, **more)


def text():
    return Text(np.random.default_rng(0).integers(0, 5, 400), "abcde", "five characters")


def session(group, settings, model=None, examples=None):
    """Train; return what this rank has at the end."""
    model = translator(dropout=0.1) if model is None else model
    examples = pairs() if examples is None else examples
    role, _ = serve_or_work(group, model, examples, settings)
    return model.state(), getattr(role, "log", None), role.group.ledger.bytes["send"]


def run_and_replay(ranks, settings, worker=session):
    states, logs, _ = zip(*ranks.run(worker, settings), strict=True)
    logs = list(logs[: settings.servers])
    want = ranks.run(replay, translator(dropout=0.1), pairs(), settings, logs)[0]
    return states, logs, want


def never_applied(ranks, settings, got, logs):
    """Say which minibatches' gradients are in no update, if that explains the weights."""
    last = {push.batches[-1] for update in logs[0] for push in update}
    lost = sorted({b for update in logs[0] for push in update for b in push.batches} - last)
    only = ranks.run(replay_of_the_last, settings, logs)[0]
    if all(np.array_equal(got[name], w) for name, w in only.items()):
        return f"a buffer that forgets: the gradients of minibatches {lost} were never applied"
    return "not the weights of the replay"


def replay_of_the_last(group, settings, logs):
    if group.rank > 0:
        return None
    plan, workers = plan_of(settings), group.size - settings.servers
    minibatches = Minibatches(*pairs(), settings, workers)
    dealt = {plan.servers + w: list(minibatches.of(w)) for w in range(workers)}
    optimizer, kept = rule(settings, workers), slice(-1, None)
    model = translator(dropout=0.1)
    return replay_server(model, plan, logs, dealt, minibatches.backward, optimizer, kept)


def assert_replayed(ranks, settings, worker=session):
    states, logs, want = run_and_replay(ranks, settings, worker)
    for state in states:
        if any(not np.array_equal(state[name], w) for name, w in want.items()):
            pytest.fail(never_applied(ranks, settings, state, logs))
    return logs


@pytest.mark.parametrize("name", PLANS)
def test_a_translator_ends_with_the_bits_of_its_replay_and_every_gradient_counts(cluster, name):
    settings = PLANS[name]
    plan, workers = plan_of(settings), 4 - settings.servers
    for log in assert_replayed(cluster(4), settings):
        applied = sorted(b for update in log for push in update for b in push.batches)
        assert applied == list(range(SMALL.steps * workers))
        assert plan.quorum is not None or len(log) == updates_of(SMALL.steps, workers, plan)


def test_a_buffer_that_forgets_is_named(cluster):
    settings = PLANS["buffer"]
    message = r"a buffer that forgets: the gradients of minibatches \[3, 4, 5, 6, 7, 8, 12, .*never"
    with pytest.raises(pytest.fail.Exception, match=message):
        assert_replayed(cluster(4), settings, mistaken("buffer_forgets", session))


def test_every_example_of_every_batch_is_in_one_minibatch():
    """An epoch's last batch has fewer examples than there are workers."""
    examples, settings = pairs(13), replace(SMALL, steps=9)
    minibatches = Minibatches(*examples, settings, 4)
    dealt = sorted(n for w in range(4) for n in minibatches.of(w))
    assert dealt == list(range(36))
    for epoch in range(3):
        parts = [minibatches.part(n).examples for n in range(12 * epoch, 12 * epoch + 12)]
        assert sorted(np.concatenate(parts)) == list(range(13))
        assert len(parts[-1]) == 0


def test_without_shuffling_every_epoch_has_the_order_of_the_data():
    minibatches = Minibatches(*pairs(13), replace(SMALL, steps=9, shuffle=False), 4)
    for epoch in range(2):
        parts = [minibatches.part(n).examples for n in range(12 * epoch, 12 * epoch + 12)]
        assert np.concatenate(parts).tolist() == list(range(13))


@pytest.fixture
def unclipped(monkeypatch):
    monkeypatch.setattr(optim.Optimizer, "clip_global_norm", lambda self, max_norm: None)


def test_the_parts_of_a_batch_add_up_to_its_gradient(unclipped):
    model, whole = (translator(dtype="float64", dropout=0.2) for _ in range(2))
    parts, batch = Minibatches(*pairs(), SMALL, 4), Minibatches(*pairs(), SMALL, 1)
    for n in range(4):
        parts.backward(model, n)  # gradients add up
    batch.backward(whole, 0)
    got, want = ({p.name: p.grad for p in m.parameters()} for m in (model, whole))
    assert compare([got], want).ok
    np.testing.assert_allclose(parts.losses[0], batch.losses[0])


def test_a_part_is_clipped_to_its_share_of_the_targets():
    inputs, targets = pairs()
    model = translator()
    for p in model.parameters():
        p.data *= 30
    minibatches = Minibatches(inputs, targets, SMALL, 4)
    part = minibatches.part(1)
    minibatches.backward(model, 1)
    norm = sum(float((p.grad**2).sum()) for p in model.parameters()) ** 0.5
    share = nn.counted(targets[part.examples]) / part.total
    np.testing.assert_allclose(norm, share, rtol=1e-5)


def test_synchronous_servers_train_as_ranks_that_sum_their_gradients(cluster, monkeypatch):
    monkeypatch.setattr(optim.Optimizer, "clip_global_norm", lambda self, *given: None)
    settings = Settings(*(3, 5, 8), width=8, heads=2, depth=1, lr=1e-4, dropout=0.2, experts=2)
    synchronous = replace(settings, servers=2, staleness=0)
    served = cluster(4, "thread").run(train_with_servers, text(), synchronous)
    losses, want = cluster(2, "thread").run(train, text(), settings)[0]
    np.testing.assert_allclose(served[0].losses, losses, rtol=1e-5)
    for name, weights in want.items():
        np.testing.assert_allclose(served[0].state[name], weights, atol=1e-5)
    assert set(served[0].staleness) == {0} and served[3].log is None


@pytest.mark.parametrize(
    "sparse, kind, highest", [(False, optim.AdamW, 1e-3), (True, optim.Adagrad, 1e-2)]
)
def test_a_rule_begins_with_the_settings_rate(sparse, kind, highest):
    scheduled = rule(replace(SMALL, sparse=sparse), 3)([])
    assert isinstance(scheduled.optimizer, kind)
    assert (scheduled.highest, scheduled.updates) == (highest, 21)


@pytest.mark.parametrize("quorum, updates", [(1, 21), (2, 11), (3, 7)])
def test_a_quorum_makes_so_many_updates(quorum, updates):
    assert updates_of(7, 3, ServerPlan(staleness=None, quorum=quorum)) == updates


def test_the_rate_follows_the_schedule_over_all_updates_and_stays():
    rates = []

    class Noted(optim.SGD):
        def step(self):
            rates.append(self.lr)
            self.steps += 1

    scheduled = Scheduled(Noted([], lr=2.0), 40)
    for _ in range(60):
        scheduled.step()
    assert rates[:2] == [1.0, 2.0] and max(rates) == 2.0 and 0.2 < rates[39] < 0.21
    assert set(rates[40:]) == {rates[39]}


def words_in(tokens):
    return len(set(tokens.reshape(-1).tolist()) - {PAD})


def rows_touched(examples, rows):
    """Return how many rows of each table a minibatch touches; PAD's is none of them."""
    source, target = examples[0][rows, :S], examples[0][rows, S:]
    return {
        "embedding.source.token.weight": words_in(source),
        "embedding.target.token.weight": words_in(target),
        "embedding.source.position.weight": int((source != PAD).sum(axis=1).max()),
        "embedding.target.position.weight": int((target != PAD).sum(axis=1).max()),
    }


def sparse_push_bytes(model, touched):
    """Return the bytes of a sparse push to one server: 8 per row that is sent, and its elements.

    touched  {table: rows that are not zero}, by name; of all other parameters every row is sent,
             and a vector is one row
    """
    total = 0
    for p in (p for p in model.parameters() if p.requires_grad):
        width = p.shape[-1] if len(p.shape) > 1 else p.size
        total += touched.get(str(p.name), p.size // width) * (8 + p.dtype.itemsize * width)
    return total


@pytest.mark.parametrize("vocab", [20, 200, 1000])
def test_a_sparse_push_has_the_rows_of_the_words_read_and_written_and_no_padding(cluster, vocab):
    vocabs = (vocab, 30)
    examples = pairs(vocabs=vocabs, shortest=2)  # attention to one word alone has no gradient
    model = translator(vocabs)
    found = cluster(4).run(session, replace(SMALL, servers=1, sparse=True), model, examples)
    minibatches = Minibatches(*examples, SMALL, 3)
    pushes = [
        sparse_push_bytes(model, rows_touched(examples, minibatches.part(n).examples))
        for n in range(3 * SMALL.steps)
    ]
    n = sum(p.size for p in model.parameters())
    dense = parameter_server_bytes(n, 4, 1, [SMALL.steps] * 3)
    want = dense - 4 * n * len(pushes) + sum(pushes)
    assert sum(sent for *_, sent in found) == want
    assert (sum(pushes) < 4 * n * len(pushes)) == (vocab > 20), "a small table costs its numbers"


@pytest.mark.parametrize("sparse", [False, True])
def test_its_checkpoint_has_the_weights_and_the_optimizer_under_the_models_names(
    cluster, tmp_path, sparse
):
    settings = Settings(2, 5, 8, width=8, heads=2, depth=1, servers=2, sparse=sparse)
    folder = str(tmp_path / "run")
    served = cluster(4).run(train_with_servers, text(), settings, Keep(folder))[0]
    saved = Saved.newest(folder)
    assert saved.step == 2 and saved.whole("losses").tolist() == served.losses
    assert_same_bits({name: saved.whole(name) for name in served.state}, served.state)
    assert saved.about["optimizer"]["kind"] == ("Adagrad" if sparse else "AdamW")
    for name, weights in served.state.items():
        state = saved.whole(f"optimizer.0/{name}")
        assert state.shape == weights.shape and state.any()


@pytest.mark.parametrize(
    "settings, message",
    [
        (Settings(dp=1, tp=2), "use no other axis than dp"),
        (Settings(precision="float16"), "precision float32"),
        (Settings(reconstruction=0.5), "no reconstruction"),
        (Settings(servers=3), "3 servers on 3 ranks leave no worker; use 4 ranks or more"),
        (Settings(quorum=3), "quorum=3 of 2 workers is never reached; use 2 or fewer"),
    ],
)
def test_what_servers_cannot_train_is_refused(cluster, settings, message):
    with pytest.raises(RankFailed, match=message):
        cluster(3, "thread").run(session, settings)


def test_a_loss_that_is_no_number_ends_the_run(cluster):
    model = translator()
    for p in model.parameters():
        p.data[...] = np.nan
    with pytest.raises(RankFailed, match="the loss is nan at step 0; use a lower lr"):
        cluster(2, "thread").run(session, SMALL, model)
