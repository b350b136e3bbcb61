"""How a test runs a program that is wrong: with a timeout, so that it ends soon in any case."""

import threading
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pytest

from minidist import Cluster
from minidist.errors import RankFailed

OWN_GROUPS = r"give each thread a group of its own: group.split\(0\)"


def fails(ranks: Cluster, worker: Callable, error: type[Exception], *patterns: str) -> Exception:
    """Return the error of a run: of this type, and it says all of this; the ranks work after it.

    A run that does not find its error ends with a CommTimeout, on a busy machine too.
    """
    with pytest.raises(error) as caught:
        ranks.run(worker, timeout=20)
    after = ranks.run(lambda group: float(group.all_reduce(np.ones(1))[0]))
    assert after == [float(ranks.size)] * ranks.size
    assert caught.type is error
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
