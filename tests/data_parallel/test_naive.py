"""Examples dealt to ranks, whatever sums the gradients: one device's, in float64."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist import Tensor, nn
from minidist.backend import to_device
from minidist.data_parallel.naive import all_reduce_gradients
from minidist.nn.datasets import shard
from minidist.verify.compare import compare
from minidist.verify.equivalence import check, gradients
from minidist.verify.strategies import INPUT, Case, collect, one_device
from tests.strategies import arrays, mlps, seeds


def mlp_case(drawn, examples, seed, loss=nn.cross_entropy):
    model, sizes = drawn
    inputs = arrays(examples, sizes[0], seed=seed)
    if loss is nn.squared_error:
        return Case("drawn", model, inputs, arrays(examples, sizes[-1], seed=seed + 1), loss)
    return Case(
        "drawn", model, inputs, np.random.default_rng(seed).integers(0, sizes[-1], examples)
    )


WAYS = {
    "naive": {},
    "bucketed": {"cap": st.sampled_from([1, 50, 300, 1000, 1 << 20])},
    **{f"zero_{stage}": {} for stage in (1, 2, 3)},
}
splits = {
    "size": st.integers(1, 4),
    "examples": st.integers(1, 9),
    "micro_batches": st.integers(1, 3),
    "seed": seeds,
}


def assert_equals_one_device(cluster, strategy, case, size, data, micro_batches):
    options = {name: data.draw(values) for name, values in WAYS[strategy].items()}
    ranks = cluster(size, "thread")
    row = check(strategy, case, size, ranks, micro_batches=micro_batches, **options)
    assert row["ok"], row["detail"]


@pytest.mark.parametrize("strategy", WAYS)
@settings(max_examples=6)
@given(
    drawn=mlps(),
    loss=st.sampled_from([nn.cross_entropy, nn.squared_error]),
    data=st.data(),
    **splits,
)
def test_any_batch_of_an_mlp(
    cluster, strategy, drawn, loss, data, seed, size, examples, micro_batches
):
    """Layers have 2 elements and more: some have fewer than there are ranks."""
    case = mlp_case(drawn, examples, seed, loss)
    assert_equals_one_device(cluster, strategy, case, size, data, micro_batches)


def test_small_integers_give_exactly_the_same_bits():
    """ReLU, squared error, power-of-two sizes: every sum is exact, so nothing may differ at all."""
    model, random = nn.MLP([4, 8, 4], dtype="float64"), np.random.default_rng(2)
    for p in model.parameters():
        p.data[...] = random.integers(-3, 4, p.shape)
    inputs, targets = random.integers(-3, 4, (2, 8, 4)).astype("float64")
    case = Case("whole", model, inputs, targets, nn.squared_error)
    want = one_device(case)
    found = gradients("naive", model, inputs, targets, 2, nn.squared_error, transport="thread")
    for name, grad in found.items():
        assert np.array_equal(grad, want[name]) and np.abs(grad).max() > 1, name


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
