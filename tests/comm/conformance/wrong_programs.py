"""How a test runs a program that is wrong: with a timeout, so that it ends soon in any case."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pytest

from minidist import Cluster
from minidist.errors import RankFailed

OWN_GROUPS = r"give each thread a group of its own: group.split\(0\)"


def fails(ranks: Cluster, worker: Callable, error: type[Exception], *patterns: str) -> Exception:
    """Return the error of a run: of this type, within 2 seconds, and it says all of this.

    The ranks work well after it.
    """
    begin = time.monotonic()
    with pytest.raises(error) as caught:
        ranks.run(worker, timeout=8)
    seconds = time.monotonic() - begin
    assert ranks.run(lambda g: float(g.all_reduce(np.ones(1))[0])) == [float(ranks.size)] * (
        ranks.size
    )
    assert caught.type is error and seconds < 2.5  # the half: ranks start anew
    for pattern in patterns:
        caught.match(pattern)
    return caught.value


def refused(ranks: Cluster, worker: Callable, message: str) -> str:
    """Return what the run says; it fails with a ValueError of a rank, and this message."""
    error = fails(ranks, worker, RankFailed, message)
    assert isinstance(error.__cause__, ValueError)
    return str(error)


def quietly(call: Callable) -> None:
    """Call it in a thread; what it raises is lost, for the run has its own report of that."""
    with suppress(BaseException):
        call()


def side_by_side(*calls: Callable) -> None:
    """Let each call run quietly in a thread of its own; join them."""
    threads = [threading.Thread(target=quietly, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
