"""Every trainer: where its state is, what it asks of a batch, what it sums and clips once."""

from functools import partial

import numpy as np
import pytest

from minidist import Mesh, nn, optim
from minidist.data_parallel.bucketed import Bucketed
from minidist.data_parallel.naive import all_reduce_gradients
from minidist.data_parallel.parameter_server import ServerPlan, join
from minidist.data_parallel.replicated import DataParallel
from minidist.data_parallel.zero import Zero
from minidist.hybrid import Hybrid
from minidist.nn.datasets import Batch
from minidist.parallel import sum_gradients
from minidist.parallel.mixed_precision import LossScale, MixedPrecision
from minidist.pipeline_parallel import PipeDream, Pipeline
from minidist.rng import Randomness
from minidist.tensor_parallel.sequence_parallel import sequence_parallel

TOKENS = np.arange(16).reshape(4, 4) % 7
STAGES = [1, 2, 3]


def transformer(seed=0, **more):
    return nn.Transformer(7, 8, 2, 2, 4, seed, dtype="float64", **more)


def sgd(parameters):
    return optim.SGD(parameters, 0.5)


def zero(model, group, stage, **more):
    return Zero(model.flatten(group.empty), group, stage, **more)


def on_mesh(model, group, dp=1, pp=1, tp=1, cp=1, **more):
    return Hybrid(model, Mesh(group, dp=dp, pp=pp, cp=cp, tp=tp), **more)


TRAINERS = {  # name: how it is made of (model, group), and the ranks
    "naive": (DataParallel, 2),
    "zero_1": (partial(zero, stage=1), 2),
    "zero_3": (partial(zero, stage=3), 2),
    "zb_v": (partial(Pipeline, schedule="zb_v", chunks=2), 2),
    "hybrid": (partial(on_mesh, pp=2, tp=2), 4),
    "hybrid, ZeRO 2": (partial(on_mesh, dp=2, cp=2, zero=2, shards=2), 4),
    "hybrid, ZeRO 3": (partial(on_mesh, dp=2, pp=2, zero=3), 4),
}


def refused(call, *arguments):
    """Return what a ValueError says, or None if there is none."""
    try:
        call(*arguments)
    except ValueError as error:
        return str(error)
    return None


def same(state, other):
    return all(np.array_equal(state[name], other[name]) for name in other)


wrapped = pytest.mark.parametrize("name", [*TRAINERS, "pipedream_2bw"])


def wrap(name, group, model):
    """Return what splits the model, and how it takes a step."""
    if name == "pipedream_2bw":
        pipe = PipeDream(model, group, sgd, "2bw")
        return pipe, lambda: pipe.train(Batch(TOKENS, TOKENS).micro_batches(1))
    trainer = TRAINERS[name][0](model, group)

    def step():
        loss = trainer.backward(Batch(TOKENS, TOKENS))
        trainer.step(sgd(trainer.parameters()))
        return loss

    return trainer, step


def ranks_of(name):
    return TRAINERS[name][1] if name in TRAINERS else 2


@wrapped
def test_a_state_that_is_loaded_is_what_is_trained_and_what_is_shown(cluster, name):
    """Every rank has the loss of one device, too."""
    other = transformer(seed=5)
    want = transformer(seed=5)
    loss = nn.cross_entropy(want(TOKENS), TOKENS)
    loss.backward()
    sgd(want.parameters()).step()

    def worker(group):
        holder, train = wrap(name, group, transformer())
        first = holder.state()
        train()
        moved = holder.state()
        holder.load_state(other.state())
        loaded = holder.state()
        return first, moved, loaded, train(), holder.state()

    for first, moved, loaded, got, trained in cluster(ranks_of(name), "thread").run(worker):
        assert same(first, transformer().state()) and not same(moved, first)
        assert same(loaded, other.state())
        if name in TRAINERS:
            assert got == pytest.approx(loss.item(), rel=1e-12)
        for key, array in want.state().items():
            np.testing.assert_allclose(trained[key], array, rtol=1e-10, atol=1e-14)


@wrapped
def test_the_models_own_state_is_right_or_refused(cluster, name):
    """What `model.state()` gives is the state; what `model.load_state` takes is loaded."""
    other = transformer(seed=5).state()

    def worker(group):
        model = transformer()
        holder, train = wrap(name, group, model)
        train()
        shown, no_state = None, refused(lambda: model.state())
        if no_state is None:
            shown = same(model.state(), holder.state())
        no_load = refused(model.load_state, other)
        return shown, no_state, no_load or same(holder.state(), other)

    for shown, no_state, loaded in cluster(ranks_of(name), "thread").run(worker):
        if name in ("naive", "zero_1"):
            assert shown is True and loaded is True
        else:
            assert "this model no longer has the value of" in no_state and no_state == loaded
            assert "state()" in no_state and "load_state" in no_state


@wrapped
def test_a_state_that_does_not_fit_is_refused_and_nothing_is_loaded(cluster, name):
    good = transformer(seed=5).state()
    key = "head.norm.gain"
    wrong = [
        ({n: w for n, w in good.items() if n != key}, f"{key!r} is missing in the state"),
        (good | {"more": np.ones(1)}, "'more' is missing in the model"),
        (good | {key: np.ones(9)}, r"is \[8\] in the model, \[9\] in the state"),
        (good | {key: np.ones(8, complex)}, "complex128 in the state; parameters are floats"),
        (good | {key: np.array(["1"] * 8)}, "in the state; parameters are floats"),
    ]

    def worker(group, state):
        holder, _ = wrap(name, group, transformer())
        said = refused(holder.load_state, state)
        return said, same(holder.state(), transformer().state())

    for state, message in wrong:
        found = cluster(ranks_of(name), "thread").run(worker, state)
        assert all(said is None or unchanged for said, unchanged in found)
        with pytest.raises(ValueError, match=message):
            raise ValueError(next(said for said, _ in found if said))


def test_a_state_may_be_of_lists_and_of_what_its_parameters_have_room_for():
    model = nn.MLP([2, 2])
    model.load_state({"layers.0.weight": [[1.0, 2.0], [3.0, 4.0]], "layers.0.bias": [np.inf, 6.0]})
    np.testing.assert_array_equal(model.layers[0].bias.data, [np.inf, 6])
    with pytest.raises(ValueError, match=r"1 numbers of layers\.0\.bias overflow float32"):
        model.load_state(model.state() | {"layers.0.bias": np.array([1e300, 0.0])})


def test_shards_of_a_mesh_are_stepped_by_the_hybrid_alone(cluster):
    def worker(group):
        model = transformer()
        before = sgd(model.parameters())
        hybrid = Hybrid(model, Mesh(group, dp=2, pp=1, tp=1), zero=1)
        hybrid.backward(Batch(TOKENS, TOKENS))
        own, whole = sgd(hybrid.parameters()), sgd(list(hybrid.named_parameters().values()))
        said = [refused(whole.step), refused(own.step), refused(own.clip_global_norm, 1.0)]
        said += [refused(hybrid.step, whole), refused(hybrid.step, sgd(hybrid.parameters()[1:]))]
        assert refused(before.step) and refused(hybrid.backward, Batch(TOKENS, TOKENS))
        hybrid.step(own)
        clip = own.clip_global_norm
        return said, [refused(hybrid.step, own), refused(clip, 1.0, hybrid.sum_squares)]

    for said, again in cluster(2, "thread").run(worker):
        words = ["hybrid.step(optimizer)"] * 2 + ["sum_squares=hybrid.sum_squares"]
        words += ["the optimizer lacks the shard from"] * 2
        assert all(part in text for part, text in zip(words, said, strict=True)), said
        assert all("no gradient has been summed" in text for text in again)


BUILT = {
    "naive": DataParallel,
    "zero_1": TRAINERS["zero_1"][0],
    "hybrid": partial(on_mesh, pp=2),
    "bucketed": Bucketed,
    "pipedream": lambda model, group, **more: PipeDream(model, group, sgd, **more),
    "sequence": sequence_parallel,
    "server": lambda model, group, **more: join(group, model, sgd, ServerPlan(**more)),
}


@pytest.mark.parametrize("name", BUILT)
def test_replicas_with_different_weights_are_refused_where_the_strategy_is_built(cluster, name):
    def worker(group, differ, **more):
        model = transformer()
        if group.rank == 1 and differ == "a bit":
            weight = model.named_parameters()["blocks.1.expand.weight"].data
            weight[0, 0] = np.nextafter(weight[0, 0], 1)
        elif group.rank == 1 and differ == "the seed":
            model = transformer(seed=1)
        before = group.ledger.total
        said = refused(partial(BUILT[name], model, group, **more))
        return said, group.ledger.total - before

    ranks = cluster(2, "thread")
    for said, moved in ranks.run(worker, "a bit"):
        assert (
            "1 of 29 parameters differ between ranks; the first is blocks.1.expand.weight, on"
            in said
        )
        assert "check_weights=False" in said and moved == 0
    for said, _ in ranks.run(worker, "the seed"):
        assert "the first is embedding.token.weight, on ranks 0 and 1" in said
    for differ, more in (("nothing", {}), ("the seed", {"check_weights": False})):
        assert all(said is None for said, _ in ranks.run(partial(worker, **more), differ))


def test_sums_over_one_axis_after_the_other_are_right_and_over_one_twice_are_refused(cluster):
    """Two groups that share this rank alone are axes of a grid; what shares two counts twice."""

    def worker(group):
        rows, columns = group.split(group.rank // 2), group.split(group.rank % 2)
        model = nn.MLP([2, 2], dtype="float64")
        for p in model.parameters():
            p.grad = np.full(p.shape, 10.0**group.rank)
        sum_gradients(model.parameters(), rows)
        sum_gradients(model.parameters(), columns)
        said = [
            refused(sum_gradients, model.parameters(), again) for again in (rows, columns, group)
        ]
        return said, model.parameters()[0].grad

    for said, total in cluster(4, "thread").run(worker):
        assert all("in it, and would be summed over them again" in words for words in said)
        assert (total == 1111).all()


@pytest.mark.parametrize("stage", STAGES)
def test_zero_clips_and_steps_only_what_has_been_reduced(cluster, stage):
    def worker(group):
        model = transformer()
        zero = Zero(model.flatten(group.empty), group, stage)
        optimizer = sgd(zero.parameters())
        loss = nn.cross_entropy(model(TOKENS), TOKENS, 2 * TOKENS.size)
        said = refused(optimizer.clip_global_norm, 1.0, zero.sum_squares)
        early = refused(zero.step, optimizer)
        zero.accumulate(loss)  # which a step that came too early has not made old
        old = nn.cross_entropy(model(TOKENS), TOKENS, 2 * TOKENS.size)
        zero.step(optimizer)
        stale = refused(zero.accumulate, old)
        old = nn.cross_entropy(model(TOKENS), TOKENS, 2 * TOKENS.size)
        zero.load_state(transformer(seed=5).state())
        return said, early, stale, refused(zero.accumulate, old)

    for said, early, *stale in cluster(2, "thread").run(worker):
        assert "no gradient has been summed" in said and "no gradient has been summed" in early
        assert all("was updated after the forward pass" in words for words in stale)


@pytest.mark.parametrize("stage", STAGES)
def test_zero_loads_and_steps_no_model_that_has_left_it(cluster, stage):
    def worker(group):
        model = transformer()
        zero = Zero(model.flatten(group.empty), group, stage)
        optimizer = sgd(zero.parameters())
        zero.backward(Batch(TOKENS, TOKENS))
        model.flatten()
        calls = (zero.step, optimizer), (zero.load_state, transformer(5).state())
        calls += ((zero.accumulate, nn.cross_entropy(model(TOKENS), TOKENS)),)
        return [refused(*call) for call in calls]

    for said in cluster(2, "thread").run(worker):
        assert all("is no longer in this flat vector" in words for words in said)


def test_an_optimizer_of_some_parameters_cannot_clip_by_the_norm_of_all(cluster):
    def worker(group):
        hybrid = on_mesh(transformer(), group, tp=2)
        hybrid.backward(Batch(TOKENS, TOKENS))
        some = sgd([p for p in hybrid.parameters() if p.ndim == 2])
        return refused(some.clip_global_norm, 1.0, hybrid.sum_squares)

    for said in cluster(2, "thread").run(worker):
        assert "clip by one optimizer that has all of the rank's parameters" in said


@wrapped
def test_ranks_that_load_different_states_are_told(cluster, name):
    def worker(group):
        holder, _ = wrap(name, group, transformer())
        said = refused(holder.load_state, transformer(seed=group.rank).state())
        return said, same(holder.state(), transformer().state())

    for said, unchanged in cluster(ranks_of(name), "thread").run(worker):
        assert "parameters differ between ranks" in said and unchanged


@pytest.mark.parametrize("name", TRAINERS)
def test_a_batch_without_the_optimizers_loss_scale_is_refused(cluster, name):
    """Its gradient would be divided by a scale that it never had."""
    make, size = TRAINERS[name]

    def worker(group):
        trainer = make(transformer(), group)
        optimizer = MixedPrecision(sgd(trainer.parameters()), group, LossScale(4.0))
        words = refused(trainer.backward, Batch(TOKENS, TOKENS))
        trainer.backward(Batch(TOKENS, TOKENS, loss_scale=optimizer.loss_scale))
        trainer.step(optimizer)
        return words

    for words in cluster(size, "thread").run(worker):
        assert "divides gradients by its loss scale 4.0" in words


@pytest.mark.parametrize("batch", [4, None])
def test_a_balancing_loss_of_a_part_is_not_summed_as_if_it_were_of_the_batch(cluster, batch):
    def worker(group):
        model, mine = transformer(experts=3), np.arange(4)[group.rank :: 2]
        logits = model(TOKENS[mine], Randomness(0, 0, mine, batch))
        nn.cross_entropy(logits, TOKENS[mine], TOKENS.size).backward()
        return refused(all_reduce_gradients, model, group)

    for words in cluster(2, "thread").run(worker):
        assert (words is None) if batch else "has a part of the batch" in words
