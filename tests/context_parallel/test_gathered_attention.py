"""Gathered attention: all keys and values first; their gradients come back as a sum."""

import numpy as np
from hypothesis import given

from minidist import Tensor
from minidist.context_parallel.gathered_attention import GatherPositions
from tests.strategies import arrays, cut_sequences, seeds


def there_and_back(group, held, whole, grads):
    """Return the gathered array, and the gradient of this rank's part."""
    x = Tensor(whole[:, held[group.rank].indices].copy(), requires_grad=True)
    y = GatherPositions(group, held)(x)
    y.backward(grads[group.rank])
    return y.data, x.grad


@given(held=cut_sequences(), seed=seeds)
def test_every_rank_gets_all_positions_in_order_and_the_sum_of_their_gradients(cluster, held, seed):
    T, N = held[0].length, len(held)
    whole, grads = arrays(2, T, 3, seed=seed), arrays(N, 2, T, 3, seed=seed + 1)
    found = cluster(N, "thread").run(there_and_back, held, whole, grads)
    for (y, dx), own in zip(found, held, strict=True):
        assert np.array_equal(y, whole)
        np.testing.assert_allclose(dx, grads.sum(axis=0)[:, own.indices], rtol=1e-12)
