"""Parameter servers: synchronous ones equal averaged gradients, others their replay, in bits."""

import os
import signal
import time
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from threadpoolctl import threadpool_limits

from minidist import Cluster, nn, optim, run
from minidist.data_parallel.naive import all_reduce_gradients
from minidist.data_parallel.parameter_server import Push, Server, ServerPlan, join, train
from minidist.errors import CollectiveMismatch, RankDied, RankFailed
from minidist.nn.datasets import shard
from minidist.rng import Randomness
from minidist.verify.strategies.parameter_server import replay_server
from tests.data_parallel.serving import (
    OPTIMIZERS,
    backward_on,
    deal,
    mlp,
    mlp_data,
    parameter_server_bytes,
    run_and_replay,
    session,
    violations,
)
from tests.strategies import arrays, assert_same_bits, mlps, seeds, transformers

STEPS = 3


def share_of(case, examples, step):
    """Add the gradient of some examples, divided by all targets; perhaps there are none."""
    _, inputs, targets = case

    def backward(model, batch):
        logits = model(inputs[examples], Randomness(1, step, examples, len(inputs)))
        nn.cross_entropy(logits, targets[examples], targets.size).backward()

    return backward


def served(group, case, plan, rule):
    """Take some synchronous steps; every worker has a share of the same batch."""
    model, inputs, _ = case
    with threadpool_limits(1):
        role = join(group, model, OPTIMIZERS[rule], plan)
        me, workers = group.rank - plan.servers, group.size - plan.servers
        mine = shard(np.arange(len(inputs)), max(me, 0), workers)

        def backward(model, batch):
            share_of(case, mine, batch)(model, batch)

        train(role, backward, range(STEPS))
    return model.state()


def averaged(group, case, rule):
    """Take these steps with all_reduce, as naive data parallelism does."""
    model, inputs, _ = case
    with threadpool_limits(1):
        optimizer = OPTIMIZERS[rule](model.parameters())
        mine = shard(np.arange(len(inputs)), group.rank, group.size)
        for step in range(STEPS):
            share_of(case, mine, step)(model, step)
            all_reduce_gradients(model, group)
            optimizer.step()
            optimizer.zero_grad()
    return model.state()


@st.composite
def cases(draw):
    """Draw (model, inputs, targets): an MLP, or a Transformer with dropout, perhaps tied."""
    examples, seed = draw(st.integers(1, 7)), draw(seeds)
    random = np.random.default_rng(seed)
    if draw(st.booleans()):
        model = draw(transformers(dropout=(0.3,)))
        return model, *random.integers(0, model.vocab, (2, examples, model.context))
    model, sizes = draw(mlps())
    return model, arrays(examples, sizes[0], seed=seed), random.integers(0, sizes[-1], examples)


@settings(max_examples=12)
@given(
    rule=st.sampled_from(sorted(OPTIMIZERS)),
    case=cases(),
    servers=st.integers(1, 3),
    workers=st.integers(1, 4),
    quorum=st.integers(0, 4),
)
def test_staleness_zero_has_the_bits_of_averaged_gradients(
    cluster, rule, case, servers, workers, quorum
):
    """Slices are uneven, some empty; so are the shards of the examples. Quorum 0: there is none."""
    plan = ServerPlan(servers, quorum=min(quorum, workers) or None)
    want = cluster(workers, "thread").run(averaged, case, rule)[0]
    for weights in cluster(servers + workers, "thread").run(served, case, plan, rule):
        assert_same_bits(weights, want)


# The others: stale gradients, and a replay that knows how stale.

PLANS = {
    "downpour": ServerPlan(staleness=None),
    "downpour, 2 slices": ServerPlan(2, staleness=None),
    "ssp 1": ServerPlan(staleness=1),
    "ssp 3, 2 slices": ServerPlan(2, staleness=3),
    "semi-synchronous": ServerPlan(quorum=2, staleness=2),
    "semi-synchronous, 2 slices": ServerPlan(2, quorum=1, staleness=None),
}


def assert_bounded(log, staleness, workers):
    for worker, clock, other, seen in violations(log, staleness, workers):
        least = clock - staleness
        pytest.fail(
            f"worker {worker} computes in clock {clock} with {seen} gradients of worker {other}; "
            f"a staleness of {staleness} allows {least} or more: {least - seen} too few"
        )


@pytest.mark.parametrize(
    "name, rule", list(zip(PLANS, ["momentum", "adagrad", "momentum", "adamw"] * 2, strict=False))
)
def test_the_replay_ends_with_the_same_bits(cluster, name, rule):
    plan = PLANS[name]
    size, naps = plan.servers + 3, {plan.servers: 0.001, plan.servers + 2: 0.004}
    found, logs, want = run_and_replay(cluster(size), plan, rule, count=20, naps=naps)
    for mine in found:
        assert_same_bits(mine["weights"], want)
    if plan.staleness is not None and plan.quorum is None:
        for log in logs:
            assert_bounded(log, plan.staleness, range(plan.servers, size))
    for log in logs:
        batches = [b for update in log for push in update for b in push.batches]
        assert sorted(batches) == list(range(20))


@settings(max_examples=8)
@given(
    n_fetch=st.integers(1, 3),
    n_push=st.integers(1, 3),
    local_lr=st.sampled_from([0.0, 0.1]),
    servers=st.integers(1, 2),
    workers=st.integers(1, 3),
    count=st.integers(0, 14),
    seed=st.integers(0, 99),
)
def test_downpour_fetches_pushes_and_descends_as_its_algorithm_says(
    n_fetch, n_push, local_lr, servers, workers, count, seed
):
    plan = ServerPlan(servers, None, n_fetch=n_fetch, n_push=n_push, local_lr=local_lr)
    with Cluster(servers + workers, "thread", interleaving=seed) as ranks:
        found, logs, want = run_and_replay(ranks, plan, "adagrad", count=count)
    dealt = deal(plan, servers + workers, count)
    for rank, mine in enumerate(found):
        assert_same_bits(mine["weights"], want)
        if rank in dealt:
            assert mine["pulled"] == len(dealt[rank][::n_fetch])
            pushes = [p for update in logs[0] for p in update if p.worker == rank]
            first = [1] * bool(dealt[rank])  # step 0 is pushed alone: 0 mod n_push is 0
            rest = len(dealt[rank]) - 1
            sizes = first + [n_push] * (rest // n_push) + [rest % n_push] * (rest % n_push > 0)
            assert [len(push.batches) for push in pushes] == sizes
    steps = [len(batches) for batches in dealt.values()]
    n = sum(p.size for p in mlp().parameters())
    want = parameter_server_bytes(n, 8, servers, steps, n_fetch, n_push)
    assert sum(mine["bytes"] for mine in found) == want


@settings(max_examples=10)
@given(
    seed=seeds,
    staleness=st.integers(1, 3),
    servers=st.integers(1, 2),
    turns=st.lists(st.integers(0, 12), min_size=2, max_size=4),
    count=st.integers(0, 20),
)
def test_no_interleaving_breaks_the_staleness_bound(seed, staleness, servers, turns, count):
    """Turns: how much slower than the others each worker is."""
    plan, workers = ServerPlan(servers, staleness), len(turns)
    slowness = dict(enumerate(turns, start=servers))
    args = plan, "sgd", mlp(), mlp_data(count), count, None, slowness
    found = run(session, servers + workers, *args, transport="thread", interleaving=seed)
    for mine in found[:servers]:
        assert_bounded(mine["log"], staleness, range(servers, servers + workers))


def test_a_worker_that_has_finished_holds_back_nobody():
    """The three have 2, 7 and no minibatches."""
    own = {1: [0, 1], 2: [2, 3, 4, 5, 6, 7, 8], 3: []}

    def worker(group):
        role = join(group, mlp(), OPTIMIZERS["sgd"], ServerPlan(staleness=1))
        train(role, backward_on(*mlp_data(9)), own.get(group.rank, []))
        return role.log if group.rank == 0 else None

    log = run(worker, 4, transport="thread", timeout=60)[0]
    done = {w: [b for u in log for p in u if p.worker == w for b in p.batches] for w in own}
    assert done == own
    assert_bounded(log, 1, own)


def test_a_worker_that_always_has_a_request_waiting_does_not_starve_the_next():
    def worker(group):
        role = join(group, mlp(), OPTIMIZERS["sgd"], ServerPlan(staleness=None))
        if group.rank > 0:
            for batch in range(5):
                backward_on(*mlp_data(5))(role.model, batch)
                role.add(batch)
                role.push()
            role.finish()
        group.barrier()  # all requests are waiting
        if group.rank == 0:
            return [push.worker for update in role.serve().log for push in update]

    assert run(worker, 4, transport="thread", timeout=60)[0] == [1, 2, 3] * 5


@settings(max_examples=8)
@given(
    seed=seeds,
    quorum=st.integers(1, 3),
    patience=st.sampled_from([None, 0, 1, 2]),
    servers=st.integers(1, 2),
    count=st.integers(0, 13),
)
def test_the_delayed_buffer_sends_every_gradient_once(seed, quorum, patience, servers, count):
    plan = ServerPlan(servers, patience, quorum)
    with Cluster(servers + 3, "thread", interleaving=seed) as ranks:
        found, logs, want = run_and_replay(ranks, plan, "momentum", count=count)
    for mine in found:
        assert_same_bits(mine["weights"], want)
        assert not any(mine.get("pending", []))
    for log in logs:
        missed = dict.fromkeys(range(servers, servers + 3), 0)
        for update, pushes in enumerate(log):
            assert len({push.worker for push in pushes}) == len(pushes)
            for push in pushes:
                left = [p for u in log[update + 1 :] for p in u if p.worker == push.worker]
                # Declined or not, its newest gradient is for this version, unless it is the rest.
                assert push.versions[-1] == update or not left
            for w in missed:
                more = any(p.worker == w for u in log[update:] for p in u)
                missed[w] = 0 if w in {p.worker for p in pushes} or not more else missed[w] + 1
                assert patience is None or missed[w] <= patience


# Wrong programs, and ranks that die.


def test_a_batch_norm_that_trains_is_refused_and_one_that_is_fixed_is_served(cluster):
    """Its worker would move running statistics, and the servers' model would keep the old ones."""

    def worker(group):
        model = nn.Sequential([nn.Linear(3, 4), nn.BatchNorm(4, name="a norm")])
        with pytest.raises(ValueError, match=r"a norm moves its running statistics .* model\.eval"):
            join(group, model, partial(optim.SGD, lr=0.1), ServerPlan())
        return join(group, model.eval(), partial(optim.SGD, lr=0.1), ServerPlan()).flat.size

    assert cluster(2, "thread").run(worker) == [24] * 2


@pytest.mark.parametrize("victim", [0, 3])
def test_a_killed_server_or_worker_ends_the_run_and_nothing_is_left(victim):
    def worker(group):
        role = join(group, mlp(), OPTIMIZERS["sgd"], ServerPlan(2, staleness=None))
        backward = backward_on(*mlp_data(1000), lambda: time.sleep(0.001))

        def until_death(model, batch):
            if batch == 30:
                os.kill(pids[victim], signal.SIGKILL)
            backward(model, batch)

        pids = group.all_gather(np.array([os.getpid()]))
        train(role, until_death, range(group.rank - 2, 1000, 2))

    with Cluster(4) as ranks:
        pids = ranks.run(lambda group: os.getpid())
        begin = time.monotonic()
        with pytest.raises(RankDied, match=f"rank {victim} died .*SIGKILL"):
            ranks.run(worker)
        assert time.monotonic() - begin < 5
        assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
        assert ranks.run(session, ServerPlan(), "sgd", mlp(), mlp_data(4), 4)[0]["log"]


def test_plans_that_mean_nothing_are_refused():
    for plan, message in [
        ({"servers": 0}, "servers is a whole number from 1, not 0"),
        ({"servers": True}, "servers is a whole number from 1, not True"),
        ({"staleness": -1}, "staleness is a whole number from 0, not -1"),
        ({"quorum": 0}, "quorum is a whole number from 1, not 0"),
        ({"staleness": None, "n_push": 0}, "n_push is a whole number from 1, not 0"),
        ({"staleness": None, "n_fetch": 1.5}, "n_fetch is a whole number from 1, not 1.5"),
        ({"staleness": 2, "n_fetch": 2}, "are Downpour's"),
        ({"local_lr": 0.1}, "are Downpour's"),
        ({"staleness": None, "quorum": 1, "n_push": 2}, "use staleness=None without a quorum"),
    ]:
        with pytest.raises(ValueError, match=message):
            ServerPlan(**plan)


def test_ranks_that_cannot_serve_are_refused(cluster):
    def worker(group, plan):
        join(group, nn.MLP([2, 2], dtype="float64"), OPTIMIZERS["sgd"], plan)

    message = "2 servers on 2 ranks leave no worker; use 3 ranks or more"
    with pytest.raises(RankFailed, match=message):
        cluster(2, "thread").run(worker, ServerPlan(servers=2))
    with pytest.raises(CollectiveMismatch, match="staleness=1"):
        cluster(2, "thread").run(lambda group: worker(group, ServerPlan(staleness=group.rank)))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_versions_are_counted_in_integers_whatever_the_weights_are(cluster, dtype):
    """2048 + 1 is 2048 in float16, and 16777216 + 1 is 16777216 in float32."""
    before = 2047 if dtype == "float16" else (1 << 24) - 1

    def worker(group):
        role = join(
            group, nn.MLP([2, 2], dtype=dtype), OPTIMIZERS["sgd"], ServerPlan(staleness=None)
        )
        if isinstance(role, Server):
            role.version = before
        train(role, lambda model, batch: model(np.ones((1, 2), dtype)).sum().backward(), range(6))
        return role.log if isinstance(role, Server) else None

    log = cluster(2, "thread").run(worker)[0]
    assert [push.versions for (push,) in log] == [(before + i,) for i in range(6)]


# The replay by itself.


def in_turns(workers, count):
    """Return the log of workers that take turns: every gradient is workers - 1 updates stale."""
    return [[Push(b % workers, (b,), (max(0, b - workers + 1),))] for b in range(count)]


def dealt(workers, count):
    return {w: list(range(w, count, workers)) for w in range(workers)}


@pytest.mark.parametrize(
    ("logs", "given", "message"),
    [
        (
            [in_turns(2, 4)],
            {0: [0, 2], 1: [1, 3, 5]},
            r"given \[1, 3, 5\], .* logged \[1, 3\]",
        ),
        ([in_turns(2, 4), in_turns(2, 3)], dealt(2, 4), r"given \[1, 3\], a server logged \[1\]"),
        ([in_turns(1, 3) + in_turns(1, 3)[2:]], dealt(1, 3), r"logged \[0, 1, 2, 2\]"),
        ([[[Push(0, (0,), (1,))]]], dealt(1, 1), "an update needs a version made after it"),
    ],
)
def test_logs_that_no_run_can_leave_are_refused(logs, given, message):
    with pytest.raises(ValueError, match=message):
        replay_server(
            mlp(), PLANS["downpour"], logs, given, backward_on(*mlp_data(6)), OPTIMIZERS["sgd"]
        )
