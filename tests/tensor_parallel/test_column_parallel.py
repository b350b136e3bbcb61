"""A weight cut by columns: output, gradients and input's gradient are the whole layer's."""

import numpy as np
import pytest

from minidist import nn
from minidist.errors import RankFailed
from minidist.tensor_parallel import ColumnParallelLinear
from tests.strategies import arrays
from tests.tensor_parallel.judges import check, judge_layers

sizes = pytest.mark.parametrize("size", [1, 2, 3, 4])


@sizes
def test_the_input_may_be_the_same_tensor_twice(cluster, size):
    """Each use of X adds to dX, each after an all_reduce of its own."""

    def build():
        return TwoUses(nn.Linear(3, 12, name="a", dtype="float64"))

    def split(model, group):
        model.layer = ColumnParallelLinear(model.layer, group, gather_output=True)
        return model

    class TwoUses(nn.Module):
        def __init__(self, layer):
            self.layer = layer

        def forward(self, x, randomness=None):
            return self.layer(x) * self.layer(x + x)

    check(cluster(size).run(judge_layers, build, split, arrays(4, 3), 0))


def test_forward_moves_nothing_unless_the_output_is_gathered(cluster):
    def worker(group, gather_output):
        layer = nn.Linear(4, 6, dtype="float64")
        layer = ColumnParallelLinear(layer, group, gather_output=gather_output)
        layer(arrays(5, 4))
        return dict(group.ledger.bytes)

    assert cluster(3).run(worker, False) == [{}] * 3
    assert cluster(3).run(worker, True) == [{"all_gather": 2 * 5 * 2 * 8}] * 3


def test_the_first_layer_asks_nobody_for_the_gradient_of_data(cluster):
    """X needs no gradient there, so backward has nothing to add up."""

    def worker(group):
        layer = ColumnParallelLinear(nn.Linear(4, 6, dtype="float64"), group)
        layer(arrays(5, 4)).sum().backward()
        return group.ledger.total, layer.weight.grad is not None

    assert cluster(3).run(worker) == [(0, True)] * 3


@pytest.mark.parametrize("columns, size", [(7, 2), (2, 3), (9, 4), (1, 2)])
def test_columns_that_do_not_split_are_refused_with_the_numbers(cluster, columns, size):
    message = f"cannot split {columns} columns over {size} ranks; use a multiple of {size}"
    with pytest.raises(RankFailed, match=message) as caught:
        cluster(size, "thread").run(lambda g: ColumnParallelLinear(nn.Linear(4, columns), g))
    assert isinstance(caught.value.__cause__, ValueError)


def test_the_part_is_a_copy_and_the_whole_layer_stays_as_it_is(cluster):
    def worker(group):
        whole = nn.Linear(3, 4)
        before = whole.weight.data.copy()
        split = ColumnParallelLinear(whole, group)
        split.weight.data[...] = 9
        return np.array_equal(whole.weight.data, before)

    assert cluster(2, "thread").run(worker) == [True, True]
