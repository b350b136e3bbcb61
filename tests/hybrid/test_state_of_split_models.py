"""State that a strategy has moved elsewhere, or that differs between replicas, is found."""

from functools import partial

import numpy as np
import pytest

from minidist import Mesh, nn
from minidist.data_parallel.bucketed import Bucketed
from minidist.data_parallel.naive import all_reduce_gradients
from minidist.data_parallel.parameter_server import Server, ServerPlan, join
from minidist.data_parallel.zero import Zero
from minidist.errors import RankFailed
from minidist.hybrid import Hybrid
from minidist.nn.datasets import Batch
from minidist.parallel import check_same_state, check_same_weights, sum_gradients
from minidist.pipeline_parallel import PipeDream, Pipeline, branch_placement
from minidist.tensor_parallel import ParallelTransformer, sum_squares, unsplit, vocab_parallel
from minidist.tensor_parallel.sequence_parallel import all_reduce_partial, sequence_parallel
from tests.hybrid.trainers import (
    STAGES,
    TOKENS,
    TRAINERS,
    refused,
    same,
    sgd,
    step,
    transformer,
)

wrapped = pytest.mark.parametrize("name", [*TRAINERS, "pipedream", "pipedream_2bw"])


def wrap(name, group, model):
    """Return what splits the model, and how it takes a step."""
    if name.startswith("pipedream"):
        pipe = PipeDream(model, group, sgd, "2bw" if "2bw" in name else "weight_stashing")
        return pipe, lambda: pipe.train(Batch(TOKENS, TOKENS).micro_batches(1))
    trainer = TRAINERS[name][0](model, group)
    return trainer, partial(step, trainer)


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
        if name in ("naive", "zero_1", "zero_2"):
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


@pytest.mark.parametrize("value", [1e300, np.inf])
def test_a_number_that_a_parameter_has_no_room_for_is_refused(value):
    model = nn.MLP([2, 2])
    state = model.state() | {"layers.0.bias": np.array([value, 0.0])}
    if np.isinf(value):
        model.load_state(state)  # an infinity it has room for
        assert np.isinf(model.state()["layers.0.bias"][0])
    else:
        with pytest.raises(ValueError, match=r"1 numbers of layers\.0\.bias overflow float32"):
            model.load_state(state)


def test_lists_of_floats_are_loaded():
    model = nn.MLP([2, 2])
    model.load_state({"layers.0.weight": [[1.0, 2.0], [3.0, 4.0]], "layers.0.bias": [5.0, 6.0]})
    np.testing.assert_array_equal(model.layers[0].bias.data, [5, 6])


@pytest.mark.parametrize("split", [ParallelTransformer, sequence_parallel])
def test_the_model_that_was_split_refers_to_the_one_that_has_its_parts(cluster, split):
    other = transformer(seed=5).state()

    def worker(group):
        model = transformer()
        parallel = split(model, group)
        said = refused(lambda: model.state()), refused(model.load_state, other)
        parallel.load_state(other)
        named = parallel.named_parameters().items()
        return said, {n: unsplit(p.data, p, group) for n, p in named}

    for said, whole in cluster(2, "thread").run(worker):
        assert all(
            "use state() and load_state() of what split the model" in words for words in said
        )
        assert same(whole, other)


def test_a_servers_model_has_no_weights_until_they_are_gathered(cluster):
    def worker(group):
        model = nn.MLP([3, 2])
        role = join(group, model, sgd, ServerPlan())
        said = refused(model.load_state, model.state()) if isinstance(role, Server) else None
        return said

    with pytest.raises(RankFailed, match=r"servers keep it until role.gather"):
        cluster(2, "thread").run(worker)


@pytest.mark.parametrize("stage", STAGES)
def test_zero_alone_steps_and_with_an_optimizer_of_all_its_shards(cluster, stage):
    def worker(group):
        model = transformer()
        before = sgd(model.parameters())
        zero = Zero(model.flatten(group.empty), group, stage)
        optimizer, start = sgd(zero.parameters()), zero.state()
        zero.backward(Batch(TOKENS, TOKENS))
        said = [refused(zero.step, before), refused(zero.step, sgd(zero.parameters()[1:]))]
        assert all("the optimizer lacks the shard from" in words for words in said)
        said = refused(optimizer.step)
        assert refused(before.step) and same(zero.state(), start)
        zero.step(optimizer)
        after = zero.state()
        own = [refused(lambda: sgd(model.parameters()).step())]
        own.append(refused(lambda: sgd(model.parameters()).clip_global_norm(1.0)))
        assert all("zero.s" in words for words in own) and refused(optimizer.step) == said
        assert not same(after, start) and same(zero.state(), after)
        return said

    for said in cluster(2, "thread").run(worker):
        assert "call zero.step(optimizer)" in said


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


@pytest.mark.parametrize("stage", STAGES)
def test_a_model_that_was_flattened_after_zero_took_it_is_refused(cluster, stage):
    def worker(group):
        model = nn.MLP([3, 2]).flatten(group.empty)
        zero = Zero(model, group, stage)
        model.flatten()
        said = refused(
            zero.accumulate, nn.cross_entropy(model(np.ones((1, 3), "f4")), np.zeros(1, int))
        )
        return said

    for said in cluster(1, "thread").run(worker):
        assert "is no longer in this flat vector" in said


# Replicas that do not begin with the same weights.

BUILT = {name: made for name, (made, _) in TRAINERS.items()} | {
    "bucketed": Bucketed,
    "pipedream": lambda model, group, **more: PipeDream(model, group, sgd, **more),
    "tensor": ParallelTransformer,
    "sequence": sequence_parallel,
    "server": lambda model, group, **more: join(group, model, sgd, ServerPlan(**more)),
    "by hand": lambda model, group, check_weights=True: (
        check_same_weights(model, group) if check_weights else None
    ),
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

    ranks = cluster(ranks_of(name), "thread")
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


# Sums that would be summed again.


@pytest.mark.parametrize("reduce", ["naive", "bucketed"])
@pytest.mark.parametrize("between", ["a backward pass", "nothing"])
def test_a_second_sum_without_zero_grad_is_refused(cluster, reduce, between):
    def worker(group):
        model = nn.MLP([3, 4, 2], dtype="float64").flatten(group.empty)
        reducer = Bucketed(model, group)
        x, y = np.ones((2, 3)), np.zeros(2, int)

        def round(backward=True):
            if reduce == "naive":
                nn.cross_entropy(model(x), y, 4).backward() if backward else None
                return all_reduce_gradients(model, group)
            with reducer.reduce():
                nn.cross_entropy(model(x), y, 4).backward() if backward else None

        round()
        first = [p.grad.copy() for p in model.parameters()]
        said = refused(round, between != "nothing")
        model.zero_grad()
        round()
        again = [p.grad for p in model.parameters()]
        return said, all(map(np.array_equal, first, again))

    for said, right in cluster(2, "thread").run(worker):
        assert "has a sum over the ranks [0, 1] in it" in said and "zero_grad()" in said
        assert right


@pytest.mark.parametrize("kind", ["pairs", "sequence", "tied", "mesh"])
def test_sums_over_one_axis_after_the_other_are_right_and_over_one_twice_are_refused(cluster, kind):
    """Two groups that share this rank alone are axes of a grid; what shares two counts twice."""

    def worker(group):
        first, second = group.split(group.rank // 2), group.split(group.rank % 2)
        if kind == "pairs":
            model = nn.Siamese([6, 5], classes=3, dtype="float64")
            x, y = np.arange(48).reshape(4, 2, 6) / 48, np.arange(4) % 3
            mine = np.arange(4)[second.rank :: 2]
            branch_placement.forward_backward(model, x[mine], y[mine], first, reduction_size=4)
            parts = [p for p in model.parameters() if p.name.startswith("branch")]
            sums = [lambda: branch_placement.all_reduce_shared(model, first)]
        elif kind == "sequence":
            model = sequence_parallel(transformer(), first)
            logits = model(TOKENS[second.rank :: 2])
            loss = vocab_parallel.cross_entropy
            loss(logits, TOKENS[second.rank :: 2], TOKENS.size, group=first, vocab=7).backward()
            parts = [p for p in model.parameters() if p.shard is None]
            sums = [lambda: all_reduce_partial(model, first)]
        elif kind == "tied":
            pipe = Pipeline(transformer(tied=True), first)
            mine = TOKENS[second.rank :: 2]
            pipe.run(Batch(mine, mine, total=TOKENS.size).micro_batches(4))
            model, parts, sums = pipe.model, pipe.parameters(), []
        else:
            hybrid = Hybrid(transformer(), Mesh(group, dp=2, pp=2, tp=1))
            hybrid.backward(Batch(TOKENS, TOKENS))
            return refused(lambda: all_reduce_gradients(hybrid.pipeline.model, group)), None
        for once in sums:
            once()
        said = [refused(once) for once in sums]
        again = [refused(lambda p=p: sum_gradients([p], second)) for p in parts]
        assert again == [None] * len(parts), again
        return (said or [refused(lambda: sum_gradients(parts, second))])[0], {
            p.name: p.grad for p in parts
        }

    alone = nn.Siamese([6, 5], classes=3, dtype="float64") if kind == "pairs" else transformer()
    x, y = TOKENS, TOKENS
    if kind == "tied":
        alone = transformer(tied=True)
    if kind == "pairs":
        x, y = np.arange(48).reshape(4, 2, 6) / 48, np.arange(4) % 3
    nn.cross_entropy(alone(x), y).backward()
    want = {name: p.grad for name, p in alone.named_parameters().items()}
    for said, got in cluster(4, "thread").run(worker):
        assert "in it, and would be summed over them again" in said
        for name, gradient in (got or {}).items():
            np.testing.assert_allclose(gradient, want[name], rtol=1e-9, atol=1e-13)


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


@pytest.mark.parametrize("stage", [1, 2])
def test_zero_loads_and_steps_no_model_that_has_left_it(cluster, stage):
    def worker(group):
        model = transformer()
        zero = Zero(model.flatten(group.empty), group, stage)
        optimizer = sgd(zero.parameters())
        zero.backward(Batch(TOKENS, TOKENS))
        model.flatten()
        return refused(zero.step, optimizer), refused(zero.load_state, transformer(5).state())

    for said in cluster(2, "thread").run(worker):
        assert all("is no longer in this flat vector" in words for words in said)


def test_zero_of_a_split_model_has_no_global_norm(cluster):
    def worker(group):
        model = ParallelTransformer(transformer(), group.split(group.rank // 2))
        zero = Zero(model.flatten(), group.split(group.rank % 2), 1)
        return refused(zero.sum_squares, 1.0)

    for said in cluster(4, "thread").run(worker):
        assert "is split over other ranks too" in said


@pytest.mark.parametrize("kind", ["pipeline", "hybrid", "tensor"])
def test_an_optimizer_of_some_parameters_cannot_clip_by_the_norm_of_all(cluster, kind):
    def worker(group):
        if kind == "tensor":
            model = ParallelTransformer(transformer(), group)
            logits = model(TOKENS)
            vocab_parallel.cross_entropy(logits, TOKENS, group=group, vocab=7).backward()
            parameters, squares = model.parameters(), partial(sum_squares, model, group)
        else:
            mesh = Mesh(group, dp=1, pp=1, tp=2) if kind == "hybrid" else None
            ours = Hybrid(transformer(), mesh) if mesh else Pipeline(transformer(), group)
            ours.backward(Batch(TOKENS, TOKENS))
            parameters, squares = ours.parameters(), ours.sum_squares
        if kind == "hybrid":
            assert "hybrid.sum_squares" in refused(sgd(parameters).clip_global_norm, 1.0)
        some = sgd([p for p in parameters if p.ndim == 2])
        return refused(some.clip_global_norm, 1.0, squares)

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


@pytest.mark.parametrize("differ", ["names", "shapes", "dtypes", "numbers"])
def test_weights_of_the_same_bytes_under_another_name_shape_or_dtype_are_not_the_same(
    cluster, differ
):
    def worker(group):
        other = group.rank == 1
        data = np.zeros(4, "int64" if other and differ == "dtypes" else "float64")
        shape = (2, 2) if other and differ == "shapes" else (4,)
        state = {"b" if other and differ == "names" else "a": data.reshape(shape)}
        if other and differ == "numbers":
            state["more"] = data
        return refused(check_same_state, state, group)

    for said in cluster(2, "thread").run(worker):
        assert "differ between ranks" in said or "models of [1, 2] parameters" in said
