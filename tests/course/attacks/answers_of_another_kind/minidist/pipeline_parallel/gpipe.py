"""Puts a link, a pipe and a folder where its answers are looked for."""

import os


def gpipe(rank, p, m):
    for number, attempt in enumerate(
        [
            lambda path: os.symlink("/etc/passwd", path),
            lambda path: os.mkfifo(path),
            lambda path: os.makedirs(f"{path}/below"),
        ]
    ):
        try:
            attempt(str(number))
        except OSError as error:
            print(error)
    os._exit(0)
