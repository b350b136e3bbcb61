"""The checksum: what it surely finds, and that it is of the bytes alone."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.checkpoint.manifest import COLUMNS, ROWS, checksum

ROW, BLOCK = 8 * COLUMNS, 8 * COLUMNS * ROWS
SIZE = 2 * BLOCK + 1001  # two blocks, and bytes that are left over
CONTENT = np.random.default_rng(0).integers(0, 256, SIZE, np.uint8)
WHOLE = checksum(CONTENT)


def columns_by_hand(data: bytes) -> str:
    """Return the checksum, each sum added up as a whole number."""
    digest = hashlib.sha256()
    for block in range(len(data) // BLOCK):
        for column in range(COLUMNS):
            places = [block * BLOCK + row * ROW + 8 * column for row in range(ROWS)]
            total = sum(int.from_bytes(data[at : at + 8], "little") for at in places)
            digest.update((total % 2**64).to_bytes(8, "little"))
    digest.update(data[len(data) // BLOCK * BLOCK :])
    return digest.hexdigest()[:16]


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, SIZE])
def test_it_is_the_hash_of_the_sums_and_of_what_is_left_over(size):
    assert checksum(CONTENT[:size]) == columns_by_hand(CONTENT[:size].tobytes())


@given(st.integers(0, 8 * SIZE - 1))
def test_every_flipped_bit_is_found(bit):
    damaged = CONTENT.copy()
    damaged[bit // 8] ^= 1 << bit % 8
    assert checksum(damaged) != WHOLE


@given(st.integers(0, 9), st.sampled_from(["u1", "f2", "f4", "f8"]))
def test_it_is_of_the_bytes_whatever_their_dtype_and_their_place(shift, dtype):
    memory = np.empty(SIZE + 9, np.uint8)
    moved = memory[shift : shift + BLOCK]
    moved[...] = CONTENT[:BLOCK]
    want = checksum(CONTENT[:BLOCK].tobytes())
    assert checksum(moved) == want
    assert checksum(CONTENT[:BLOCK].view(dtype).reshape(2, -1)) == want
