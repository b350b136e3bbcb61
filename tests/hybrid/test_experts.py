"""Experts under strategies that know nothing of them: one device's gradients, drops and biases.

Drops and the balancing loss are decided for each example alone, so no split can change them. A
router's load belongs to the gate's gradient: it is counted, summed and dropped with it.
"""

import copy
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist import Mesh, nn, optim
from minidist.context_parallel import columns, context_parallel, zigzag
from minidist.data_parallel.naive import all_reduce_gradients
from minidist.data_parallel.parameter_server import ServerPlan, join
from minidist.data_parallel.replicated import DataParallel
from minidist.errors import RankFailed
from minidist.expert_parallel import ExpertParallel
from minidist.hybrid import Hybrid
from minidist.nn.datasets import Batch
from minidist.parallel import sum_gradients, sum_loads
from minidist.parallel.trainer import loss_of, update
from minidist.pipeline_parallel import Pipeline
from minidist.rng import Randomness
from minidist.tensor_parallel.sequence_parallel import sequence_parallel
from minidist.verify.compare import compare
from minidist.verify.strategies.cases import choice_shares, padded, todays_experts
from tests.strategies import assert_same_bits, gradients, seeds

BATCHES = [Batch(*np.random.default_rng(n).integers(0, 7, (2, 4, 8)), step=n) for n in range(9)]
OPTIONS = {"experts": 4, "top_k": 1, "capacity": None, "bias_rate": 0.125, "balance": 0.1}


def experts():
    return nn.Transformer(7, 8, 2, 2, 8, 1, "float64", **OPTIONS)


class ByHand:
    """A loop that a program writes itself: `backward` is (model, batch) -> None."""

    def __init__(self, model, backward):
        self.model, self.backward = model, lambda batch: backward(model, batch)
        self.parameters, self.state = model.parameters, model.state
        self.load_state = model.load_state

    def step(self, optimizer):
        update(optimizer, self.model)


def alone(group):
    return ByHand(experts(), lambda model, batch: loss_of(model, batch).backward())


def naive(group):
    def backward(model, batch):
        loss_of(model, batch.share(group.rank, group.size)).backward()
        all_reduce_gradients(model, group)

    return ByHand(experts(), backward)


def context(group, loads=True):
    def backward(model, batch):
        held = zigzag(8, group.size)[group.rank]
        part = {"inputs": columns(batch.inputs, held), "targets": columns(batch.targets, held)}
        part |= {"positions": held, "counted": batch.counted, "total": batch.total}
        loss_of(model, Batch(step=batch.step, **part)).backward()
        sum_gradients(model.parameters(), group)
        if loads:
            sum_loads(model, group)

    return ByHand(context_parallel(experts(), group), backward)


def mesh(group, dp=1, pp=1, cp=1, **options):
    return Hybrid(experts(), Mesh(group, dp=dp, pp=pp, cp=cp, tp=1), **options)


TRAINERS = {
    "one device": alone,
    "naive": naive,
    "data parallel": lambda group: DataParallel(experts(), group),
    "context": context,
    "experts": lambda group: ExpertParallel(experts(), group),
    "zero bubble": lambda group: Pipeline(experts(), group, "zb_h1", 2),
    "hybrid, recomputed": partial(mesh, pp=2, recompute=True, micro_batches=2),
    "hybrid, ZeRO 1": partial(mesh, dp=2, zero=1),
    "hybrid, ZeRO 2": partial(mesh, dp=2, zero=2, micro_batches=2),
    "hybrid, ZeRO 3": partial(mesh, dp=2, zero=3, ep=2),
    "hybrid, cp": partial(mesh, cp=2),
}


def drop_by_hand(trainer, optimizer, batch):
    trainer.backward(batch)
    for p in trainer.parameters():
        p.grad = None


def drop(trainer, optimizer, batch):
    trainer.backward(batch)
    optimizer.zero_grad()


def evaluate(trainer, optimizer, batch):
    trainer.model(batch.inputs)


def fail(trainer, optimizer, batch):
    """Take a step that raises, load what was saved before, and begin again."""
    state, lr = trainer.state(), optimizer.lr
    trainer.backward(batch)
    optimizer.lr = "none"
    with pytest.raises(ValueError, match="lr must be"):
        trainer.step(optimizer)
    optimizer.lr = lr
    optimizer.zero_grad()
    trainer.load_state(state)


DROPS = drop, drop_by_hand, fail


def trained(group, name, disturbances=()):
    """Return the biases after four batches, before each of which something happens."""
    trainer = TRAINERS[name](group)
    optimizer = optim.SGD(trainer.parameters(), 0.1)
    for n in range(4):
        for number, disturb in enumerate(disturbances):
            disturb(trainer, optimizer, BATCHES[(n + number) % 5 + 4])
        trainer.backward(BATCHES[n])
        trainer.step(optimizer)
    return {name: b for name, b in trainer.state().items() if "choice_bias" in name}


@pytest.fixture(scope="module")
def never_disturbed(cluster):
    (biases,) = cluster(1, "thread").run(trained, "one device")
    assert all(b.any() for b in biases.values()) and len(biases) == 2
    return biases


EVERYDAY = ["one device", "naive", "hybrid, recomputed", "hybrid, ZeRO 2"]


@pytest.mark.parametrize(
    "name",
    [name if name in EVERYDAY else pytest.param(name, marks=pytest.mark.slow) for name in TRAINERS],
)
def test_what_leaves_no_gradient_moves_no_bias(cluster, never_disturbed, name):
    """Between batches something happens that leaves no gradient, or is made undone."""
    size = 1 if name == "one device" else 2
    disturbances = (evaluate,) if name in ("one device", "naive", "data parallel") else ()
    for biases in cluster(size, "thread").run(trained, name, (*disturbances, *DROPS)):
        assert_same_bits(biases, never_disturbed)


def test_a_load_that_is_not_summed_as_the_gradient_is_an_error(cluster):
    """Whoever sums the gradients by hand is told; who could not sum the loads refuses the model."""

    def forgets(group):
        trainer = context(group, loads=False)
        trainer.backward(BATCHES[0])
        trainer.step(optim.SGD(trainer.parameters(), 0.1))

    def sums_twice(group):
        trainer = naive(group)
        trainer.backward(BATCHES[0])
        sum_loads(trainer.model, group)

    def serves(group):
        join(group, experts(), partial(optim.SGD, lr=0.1), ServerPlan())

    for worker, words in {
        forgets: r"the load of blocks.0.gate.choice_bias leaves out \[0, 1\]: .*call sum_loads",
        sums_twice: "blocks.0.gate.choice_bias has a sum over the ranks .* be summed over them",
        serves: "choice_bias moves by the loads of the whole batch",
    }.items():
        with pytest.raises(RankFailed, match=words):
            cluster(2, "thread").run(worker)


def gradient(batch):
    model = experts()
    loss_of(model, batch).backward()
    return gradients(model) | choice_shares(model)


def test_positions_that_do_not_count_are_in_no_balance_and_no_load():
    """Other words in their place, and an example of nothing else, change nothing."""
    x, y = BATCHES[0].inputs, padded(BATCHES[0].targets)
    want = gradient(Batch(x, y))
    others = np.where(y == nn.IGNORED, (x + 1) % 7, x)
    more = np.vstack([others, x[:1]]), np.vstack([y, np.full_like(y[:1], nn.IGNORED)])
    for found in gradient(Batch(others, y)), gradient(Batch(*more)):
        assert compare([found], want).ok
    assert not compare([gradient(Batch(x, y, counted=np.ones(y.shape, bool)))], want).ok


@given(seeds, st.integers(1, 3), st.sampled_from([None, 0.5, 1.25]))
def test_parts_of_a_batch_add_up_to_its_gradient_and_drop_the_same(seed, parts, capacity):
    options = {"experts": 3, "capacity": capacity, "balance": 0.3}
    whole = nn.Transformer(7, 4, 2, 1, 5, 3, "float64", dropout=0.2, **options)
    tokens, targets = np.random.default_rng(seed).integers(0, 7, (2, 4, 5))
    cut, reports = copy.deepcopy(whole), []
    nn.cross_entropy(whole(tokens, Randomness(0, 0, np.arange(4))), targets).backward()
    for rows in np.array_split(np.arange(4), parts):
        logits = cut(tokens[rows], Randomness(0, 0, rows, batch=4))
        nn.cross_entropy(logits, targets[rows], targets.size).backward()
        reports.append(cut.layers[1].mixture.report)
    want = whole.layers[1].mixture.report
    for name, g in gradients(cut).items():
        np.testing.assert_allclose(g, gradients(whole)[name], rtol=1e-9, atol=1e-12, err_msg=name)
    np.testing.assert_array_equal(sum(r.load for r in reports), want.load)
    np.testing.assert_array_equal(sum(r.dropped for r in reports), want.dropped)
    assert sum(r.balance for r in reports) == pytest.approx(want.balance)


def test_a_sequence_that_is_split_between_the_matrices_is_refused():
    with pytest.raises(ValueError, match="show a mixture of experts a part of each sequence"):
        sequence_parallel(nn.Transformer(11, 6, 3, 2, 6, experts=3), None)


def steps(trainer, optimizer, count=3):
    for step in range(count):
        tokens, targets = np.random.default_rng(step).integers(0, 11, (2, 5, 8))
        trainer.backward(Batch(tokens, targets, step=step))
        optimizer.clip_global_norm(0.5, trainer.sum_squares)
        trainer.step(optimizer)
    return trainer.state()


@pytest.mark.parametrize(
    "size, axes, zero", [(2, {"pp": 2, "tp": 1}, 0), (4, {"dp": 2, "ep": 2}, 1), (2, {"cp": 2}, 1)]
)
def test_weights_and_biases_after_some_steps_are_one_device_s(cluster, size, axes, zero):
    def worker(group, alone):
        if alone:
            trainer = DataParallel(todays_experts(16, 8), group)
        else:
            own = {"dp": 1, "pp": 1, "cp": 1} | {n: k for n, k in axes.items() if n != "ep"}
            mesh = Mesh(group, **own | {"tp": group.size // np.prod(list(own.values()))})
            trainer = Hybrid(todays_experts(16, 8), mesh, ep=axes.get("ep", 1), zero=zero)
        return steps(trainer, optim.SGD(trainer.parameters(), lr=0.1))

    (want,) = cluster(1, "thread").run(worker, True)
    first = todays_experts(16, 8).state()
    biases = [name for name in want if name.endswith("choice_bias")]
    assert len(biases) == 2 and all((want[name] != first[name]).any() for name in biases)
    assert compare(cluster(size, "thread").run(worker, False), want).ok
