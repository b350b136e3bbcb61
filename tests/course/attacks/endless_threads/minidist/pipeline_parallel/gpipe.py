"""Starts threads until there are no more, none of which ends; then answers nothing."""

import threading
import time


def gpipe(rank, p, m):
    while True:
        threading.Thread(target=time.sleep, args=(1000,)).start()
