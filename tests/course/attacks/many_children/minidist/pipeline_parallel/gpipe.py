"""Starts hundreds of processes, each of which outlives it by far; none is waited for."""

import os
import subprocess
import sys
import time


def gpipe(rank, p, m):
    for _ in range(300):
        try:
            if os.fork() == 0:
                time.sleep(1000)
                os._exit(0)
        except OSError:
            pass
        try:
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        except OSError:
            pass
    return []
