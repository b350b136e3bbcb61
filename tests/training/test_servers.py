"""Training with servers: every example once, replayed to the bit, sparse, saved for any mesh."""

from dataclasses import replace

import numpy as np
import pytest

from minidist import nn, optim
from minidist.checkpoint import Keep, Saved
from minidist.errors import RankFailed
from minidist.nn.datasets import Text
from minidist.nn.datasets.pairs import padded, teacher_forcing
from minidist.training.loop import train
from minidist.training.servers import (
    Minibatches,
    Scheduled,
    plan_of,
    serve_or_work,
    train_with_servers,
    updates_of,
)
from minidist.training.settings import Settings
from minidist.verify.certificate import replay
from minidist.verify.compare import compare
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
    return model.state(), getattr(role, "log", None)


def assert_replayed(ranks, settings):
    states, logs = zip(*ranks.run(session, settings), strict=True)
    logs = list(logs[: settings.servers])
    want = ranks.run(replay, translator(dropout=0.1), pairs(), settings, logs)[0]
    for state in states:
        assert_same_bits(state, want)
    return logs


@pytest.mark.parametrize("name", PLANS)
def test_a_translator_ends_with_the_bits_of_its_replay_and_every_gradient_counts(cluster, name):
    settings = PLANS[name]
    plan, workers = plan_of(settings), 4 - settings.servers
    for log in assert_replayed(cluster(4), settings):
        applied = sorted(b for update in log for push in update for b in push.batches)
        assert applied == list(range(SMALL.steps * workers))
        assert plan.quorum is not None or len(log) == updates_of(SMALL.steps, workers, plan)


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
    still = Minibatches(*examples, replace(settings, shuffle=False), 4)
    for epoch in range(2):
        parts = [still.part(n).examples for n in range(12 * epoch, 12 * epoch + 12)]
        assert np.concatenate(parts).tolist() == list(range(13))


@pytest.fixture
def unclipped(monkeypatch):
    monkeypatch.setattr(optim.Optimizer, "clip_global_norm", lambda self, *given: None)


def test_the_parts_of_a_batch_add_up_to_its_gradient(unclipped):
    model, whole = (translator(dtype="float64", dropout=0.2) for _ in range(2))
    parts, batch = Minibatches(*pairs(), SMALL, 4), Minibatches(*pairs(), SMALL, 1)
    for n in range(4):
        parts.backward(model, n)  # gradients add up
    batch.backward(whole, 0)
    got, want = ({p.name: p.grad for p in m.parameters()} for m in (model, whole))
    assert compare([got], want).ok
    np.testing.assert_allclose(parts.losses[0], batch.losses[0])


def test_synchronous_servers_train_as_ranks_that_sum_their_gradients(cluster, unclipped):
    settings = Settings(*(3, 5, 8), width=8, heads=2, depth=1, lr=1e-4, dropout=0.2, experts=2)
    synchronous = replace(settings, servers=2, staleness=0)
    served = cluster(4, "thread").run(train_with_servers, text(), synchronous)
    losses, want = cluster(2, "thread").run(train, text(), settings)[0]
    np.testing.assert_allclose(served[0].losses, losses, rtol=1e-5)
    for name, weights in want.items():
        np.testing.assert_allclose(served[0].state[name], weights, atol=1e-5)
    assert set(served[0].staleness) == {0} and served[3].log is None


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
