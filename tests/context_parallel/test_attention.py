"""What ring attention and Ulysses have in common: long sequences, transports, dtypes."""

import pytest

from minidist.context_parallel import plain, ring_attention, ulysses, zigzag
from tests.context_parallel.judges import attend, errors, inputs

both = pytest.mark.parametrize("attention", [ring_attention.ring_attention, ulysses.ulysses])


@both
@pytest.mark.parametrize("transport", ["process", "thread"])
def test_a_long_sequence_over_uneven_pieces(cluster, transport, attention):
    for held in (plain(301, 3), zigzag(301, 3)):
        qkv, grad = inputs(1, 3, 4, held)
        found = cluster(3, transport).run(attend, attention, held, qkv, grad)
        assert max(errors(found, held, qkv, grad).values()) <= 1e-9


@both
@pytest.mark.parametrize("dtype, bound", [("float32", 1e-5), ("float16", 4e-3)])
def test_every_dtype_is_as_good_as_its_rounding(cluster, device, dtype, bound, attention):
    for held in (zigzag(13, 3), plain(140, 3)):
        qkv, grad = inputs(2, 3, 8, held, dtype=dtype)
        found = cluster(3, "thread", device).run(attend, attention, held, qkv, grad)
        assert all(y.dtype == dx.dtype == dtype for y, dx, _ in found)
        assert max(errors(found, held, qkv, grad).values()) <= bound
