"""Averaged gradients equal one device's: every parameter, on every rank, in float64."""

import copy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist import Tensor, nn, optim
from minidist.backend import to_device
from minidist.data_parallel.naive import all_reduce_gradients
from minidist.datasets import Sampler, shard
from minidist.rng import Randomness
from minidist.tools.compare import compare
from minidist.tools.equivalence import check, gradients
from minidist.tools.strategies import INPUT, Case, collect, one_device
from tests.strategies import arrays, mlps, seeds, transformers


def mlp_case(drawn, examples, seed, loss=nn.cross_entropy):
    model, sizes = drawn
    inputs = arrays(examples, sizes[0], seed=seed)
    if loss is nn.squared_error:
        return Case("drawn", model, inputs, arrays(examples, sizes[-1], seed=seed + 1), loss)
    return Case(
        "drawn", model, inputs, np.random.default_rng(seed).integers(0, sizes[-1], examples)
    )


def transformer_case(model, examples, seed):
    shape = (2, examples, model.context)
    tokens, targets = np.random.default_rng(seed).integers(0, model.vocab, shape)
    return Case("drawn", model, tokens, targets, seed=seed)


def assert_equal_to_one_device(cluster, case, size, transport, micro_batches):
    row = check("naive", case, size, cluster(size, transport), micro_batches=micro_batches)
    assert row["ok"], row["detail"]


splits = {
    "size": st.integers(1, 4),
    "examples": st.integers(1, 9),
    "micro_batches": st.integers(1, 3),
}


@given(
    drawn=mlps(), seed=seeds, loss=st.sampled_from([nn.cross_entropy, nn.squared_error]), **splits
)
def test_an_mlp_on_threads(cluster, drawn, seed, loss, size, examples, micro_batches):
    case = mlp_case(drawn, examples, seed, loss)
    assert_equal_to_one_device(cluster, case, size, "thread", micro_batches)


@given(model=transformers(), seed=seeds, **splits)
def test_a_transformer_on_threads_tied_or_not_with_dropout_or_without(
    cluster, model, seed, size, examples, micro_batches
):
    case = transformer_case(model, examples, seed)
    assert_equal_to_one_device(cluster, case, size, "thread", micro_batches)


@settings(max_examples=8)
@given(drawn=mlps(), model=transformers(), seed=seeds, **splits)
def test_both_on_processes(cluster, drawn, model, seed, size, examples, micro_batches):
    for case in mlp_case(drawn, examples, seed), transformer_case(model, examples, seed):
        assert_equal_to_one_device(cluster, case, size, "process", micro_batches)


@pytest.mark.slow
@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("examples", range(1, 18))
def test_every_number_of_examples_on_every_number_of_ranks(cluster, size, examples):
    model = nn.MLP([3, 5, 4], activation="gelu", dtype="float64")
    case = mlp_case((model, [3, 5, 4]), examples, seed=examples)
    assert_equal_to_one_device(cluster, case, size, "process", 1 + examples % 3)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_frozen_and_unused_parameters(cluster, size):
    class Partial(nn.Sequential):
        def forward(self, x, randomness=None):
            return self.layers[2](self.layers[0](x))  # the layer between is not used

    def layer(i, c_in, c_out):
        return nn.Linear(c_in, c_out, activation="gelu", name=f"layers.{i}", dtype="float64")

    model = Partial([layer(0, 3, 4), layer(1, 4, 4), layer(2, 4, 2)]).freeze("layers.0.bias")
    case = mlp_case((model, [3, 2]), 5, seed=size)
    row = check("naive", case, size, cluster(size, "thread"))
    assert row["ok"], row["detail"]
    want = one_device(case)
    assert not want["layers.0.bias"].any() and not want["layers.1.weight"].any()
    assert want["layers.0.weight"].all()


@pytest.mark.parametrize("size", [2, 4])
def test_small_integers_give_exactly_the_same_bits(cluster, size):
    """ReLU, squared error, power-of-two sizes: every sum is exact, so nothing may differ at all."""
    model, random = nn.MLP([4, 8, 4], dtype="float64"), np.random.default_rng(size)
    for p in model.parameters():
        p.data[...] = random.integers(-3, 4, p.shape)
    inputs, targets = random.integers(-3, 4, (2, 8, 4)).astype("float64")
    case = Case("whole", model, inputs, targets, nn.squared_error)
    want = one_device(case)
    found = gradients("naive", model, inputs, targets, size, nn.squared_error, transport="thread")
    for name, grad in found.items():
        assert np.array_equal(grad, want[name]) and np.abs(grad).max() > 1, name


def train(group, model, optimizer, inputs, targets, steps, micro_batches):
    """Take some steps with accumulation and clipping; return the weights."""
    optimizer = optimizer(model.parameters())
    shares = iter(Sampler(len(inputs), 5, 3, group.rank, group.size, micro_batches))
    for step in range(steps):
        share = next(shares)
        for examples in share.micro_batches:
            logits = model(inputs[examples], Randomness(1, step, examples))
            total = share.total * targets[0].size
            nn.cross_entropy(logits, targets[examples], total).backward()
        all_reduce_gradients(model, group)
        optimizer.clip_global_norm(0.5)
        optimizer.step()
        optimizer.zero_grad()
    return model.state()


@pytest.mark.parametrize(
    ("transport", "optimizer", "micro_batches"),
    [
        ("thread", "sgd", 2),
        ("thread", "adamw", 1),
        *(
            pytest.param(*way, marks=pytest.mark.slow)
            for way in [("thread", "sgd", 1), ("thread", "adamw", 2)]
            + [("process", rule, many) for rule in ("sgd", "adamw") for many in (1, 2)]
        ),
    ],
)
def test_the_weights_after_some_steps_equal_one_devices(
    cluster, transport, optimizer, micro_batches
):
    def make(parameters):
        if optimizer == "sgd":
            return optim.SGD(parameters, 0.1, momentum=0.9, weight_decay=0.01)
        return optim.AdamW(parameters, 0.01, weight_decay=0.1)

    model = nn.Transformer(7, 6, 2, 2, 4, dtype="float64", dropout=0.2, tied=True)
    tokens, targets = np.random.default_rng(0).integers(0, 7, (2, 13, 4))
    work = (model, make, tokens, targets, 6)
    want = cluster(1, transport).run(train, *work, 1)[0]
    assert max(np.abs(want[name] - w).max() for name, w in model.state().items()) > 0.01
    for size in (2, 3, 4):
        got = cluster(size, transport).run(train, *work, micro_batches)
        comparison = compare(got, want)
        assert comparison.ok, comparison


@pytest.mark.parametrize("size", [2, 3])
def test_in_float32_the_difference_is_float32_rounding(cluster, size):
    model = nn.MLP([6, 16, 16, 4], activation="gelu", dtype="float32")
    inputs = arrays(9, 6, dtype="float32")
    targets = np.arange(9) % 4
    case = Case("float32", model, inputs, targets)
    got = gradients("naive", model, inputs, targets, size, transport="thread")
    assert {g.dtype for g in got.values()} == {np.dtype("float32")}
    comparison = compare([got], {k: v for k, v in one_device(case).items() if k in got}, 1e-5)
    assert comparison.ok and comparison.error > 1e-9, comparison


def test_ranks_differ_before_the_sync_and_agree_bit_for_bit_after(cluster):
    def worker(group):
        model = nn.MLP([3, 4, 2], dtype="float64")
        x = arrays(2, 3, seed=group.rank)
        nn.cross_entropy(model(x), np.array([0, 1]), 2 * group.size).backward()
        before = copy.deepcopy({n: p.grad for n, p in model.named_parameters().items()})
        all_reduce_gradients(model, group)
        return before, {n: p.grad for n, p in model.named_parameters().items()}

    (before_0, after_0), (before_1, after_1) = cluster(2, "thread").run(worker)
    for name in before_0:
        assert not np.array_equal(before_0[name], before_1[name])
        assert after_0[name].tobytes() == after_1[name].tobytes()


@pytest.mark.gpu
def test_ranks_on_a_gpu_leave_the_gradient_of_one_device(cluster):
    case = mlp_case((nn.MLP([6, 16, 4], activation="gelu", dtype="float64"), [6, 4]), 7, seed=0)

    def worker(group, case):
        model = case.model.to("gpu")
        rows = shard(np.arange(7), group.rank, group.size)
        x = Tensor(to_device(case.inputs[rows], "gpu"))
        nn.cross_entropy(model(x), case.targets[rows], 7).backward()
        all_reduce_gradients(model, group)
        return collect(model)

    want = {name: grad for name, grad in one_device(case).items() if name != INPUT}
    comparison = compare(cluster(2).run(worker, case), want)
    assert comparison.ok, comparison
