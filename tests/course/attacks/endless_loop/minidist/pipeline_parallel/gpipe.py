"""Never answers, and lets no polite signal end it."""

import signal


def gpipe(rank, p, m):
    for number in range(1, signal.NSIG):
        try:
            signal.signal(number, signal.SIG_IGN)
        except (OSError, ValueError):
            pass
    while True:
        pass
