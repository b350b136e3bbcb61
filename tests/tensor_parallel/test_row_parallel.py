"""A weight cut by rows: output, gradients and input's gradient are the whole layer's."""

import pytest

from minidist import Tensor, nn
from minidist.errors import RankFailed
from minidist.tensor_parallel import RowParallelLinear
from minidist.verify.strategies.cases import random_weights
from tests.strategies import arrays

sizes = pytest.mark.parametrize("size", [1, 2, 3, 4])


@sizes
def test_row_parallel_adds_its_bias_once(cluster, size):
    def worker(group):
        layer = RowParallelLinear(random_weights(nn.Linear(12, 3, dtype="float64"), 1), group)
        zeros = Tensor(arrays(2, 12 // group.size) * 0)
        return abs(layer(zeros).data - layer.bias.data).max()

    assert cluster(size, "thread").run(worker) == [0.0] * size


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
