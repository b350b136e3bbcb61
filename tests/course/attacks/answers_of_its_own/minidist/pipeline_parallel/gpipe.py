"""Writes the answers itself: empty, endless, of objects, and no answer at all."""

import json
import os


def gpipe(rank, p, m):
    values = [
        [],
        {"array": ["<f8", [1 << 62]]},
        [{"array": ["|O", [1]]}, {"array": ["V8", [-1]]}, {"array": ["<f4,<f4", [2]]}],
    ]
    for number, value in enumerate(values):
        with open(str(number), "wb") as file:
            line = json.dumps({"dict": [["answer", value]]})
            file.write(line.encode() + b"\n" + bytes(8))
    os._exit(0)
