"""A weight cut by rows: output, gradients and input's gradient are the whole layer's."""

from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist import Tensor, nn
from minidist.errors import RankFailed
from minidist.planning.costs.collectives import all_reduce_bytes
from minidist.tensor_parallel import RowParallelLinear
from minidist.tools.strategies.cases import random_weights
from tests.strategies import arrays, seeds
from tests.tensor_parallel.judges import check, judge_layers

sizes = pytest.mark.parametrize("size", [1, 2, 3, 4])


@sizes
@settings(max_examples=6)
@given(
    each=st.integers(1, 3),
    outputs=st.integers(1, 6),
    activation=st.sampled_from(["identity", "relu", "gelu"]),
    bias=st.booleans(),
    batch=st.lists(st.integers(0, 4), min_size=1, max_size=2),
    scatter_input=st.booleans(),
    seed=seeds,
)
def test_rows_leave_the_whole_layers_gradients(
    cluster, size, each, outputs, activation, bias, batch, scatter_input, seed
):
    build = partial(nn.Linear, each * size, outputs, bias, activation, dtype="float64")
    split = partial(RowParallelLinear, scatter_input=scatter_input)
    x = arrays(*batch, each * size, seed=seed)
    judge = partial(judge_layers, split_input=not scatter_input)
    check(cluster(size).run(judge, build, split, x, seed))


@sizes
def test_row_parallel_adds_its_bias_once(cluster, size):
    def worker(group):
        layer = RowParallelLinear(random_weights(nn.Linear(12, 3, dtype="float64"), 1), group)
        zeros = Tensor(arrays(2, 12 // group.size) * 0)
        return abs(layer(zeros).data - layer.bias.data).max()

    assert cluster(size, "thread").run(worker) == [0.0] * size


@sizes
def test_one_all_reduce_forward_and_none_backward(cluster, size):
    def worker(group):
        layer = RowParallelLinear(nn.Linear(12, 3, dtype="float64"), group)
        x = Tensor(arrays(5, 12 // group.size), requires_grad=True)
        y = layer(x)
        forward = group.ledger.total
        y.backward(arrays(5, 3))
        return forward, group.ledger.total

    bill = all_reduce_bytes(None, 5 * 3, 8, size)
    assert cluster(size).run(worker) == [(own, own) for own in bill]


@pytest.mark.parametrize("rows, size", [(7, 2), (2, 3), (9, 4), (1, 2)])
def test_rows_that_do_not_split_are_refused_with_the_numbers(cluster, rows, size):
    message = f"cannot split {rows} rows over {size} ranks; use a multiple of {size}"
    with pytest.raises(RankFailed, match=message) as caught:
        cluster(size, "thread").run(lambda group: RowParallelLinear(nn.Linear(rows, 4), group))
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_whole_input_without_scatter_input_is_refused(cluster):
    def worker(group):
        RowParallelLinear(nn.Linear(6, 4), group)(Tensor(arrays(2, 6, dtype="float32")))

    with pytest.raises(RankFailed, match=r"input \[2, 6\] needs 3 columns"):
        cluster(2, "thread").run(worker)
