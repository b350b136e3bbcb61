"""How many ranks there can be, and how they share a core; checked before anything is started.

Sockets are open files, whose number is limited in each process (`ulimit -n`) by its soft limit,
which it may raise up to its hard limit. The caller has more open files than the fork server and the
ranks, which inherit the limit when the fork server starts. So the limit is raised before that, for
the largest cluster.
"""

import math
import os
import resource
from pathlib import Path

from threadpoolctl import ThreadpoolController

from minidist.errors import WrongInput

MOST = {
    "process": 123,  # the caller then has 3,800 sockets open during a start
    "thread": 1000,  # every rank maps every rank's block: N^2 objects, 0.7 GB
}
GIVE_WAY = getattr(os, "sched_yield", lambda: None)  # let another thread or process have this core
SPARE = 16  # the shared memory, what is open for a moment during a start, and a few to spare


def open_files(size: int) -> int:
    """Return how many more files the caller has open, at most, while `size` processes start.

    Three per rank that has started; and, with k of them started, a socket for each of the k(N - k)
    pairs of a started rank and another.
    """
    return 3 * size + (size + 1) ** 2 // 4 + SPARE


def check_size(size: int, transport: str) -> None:
    """Raise the soft limit if it is low; ValueError if `size` ranks are impossible."""
    threads = f", or use transport='thread' (at most {MOST['thread']} ranks)"
    remedy = threads if transport == "process" and size <= MOST["thread"] else ""
    if size > MOST[transport]:
        raise WrongInput(
            f"{size} ranks are too many: use at most {MOST[transport]} with "
            f"transport={transport!r}{remedy}"
        )
    if transport == "thread":
        return
    used = len(os.listdir("/dev/fd"))
    limit = _raised_limit(used + open_files(MOST[transport]))
    needed = used + open_files(size)
    if needed > limit:
        enough = [n for n in range(size) if used + open_files(n) <= limit]
        raise WrongInput(
            f"{size} process ranks need {needed} open files, {used} of them open already, but "
            f"the hard limit is {limit}: enough for {max(enough, default=0)} ranks; use fewer "
            f"ranks, let the administrator raise the hard limit (ulimit -Hn){remedy}"
        )


def cores(groups: Path = Path("/sys/fs/cgroup"), mine: Path = Path("/proc/self/cgroup")) -> int:
    """Return how many cores this process may use: its affinity, or its container's quota.

    groups  where Linux shows its groups of processes
    mine    the groups of this process, a line `number:controllers:path` for each
    """
    affinity = getattr(os, "sched_getaffinity", None)
    allowed: float = len(affinity(0)) if affinity else os.cpu_count() or 1
    lines = mine.read_text().splitlines() if mine.exists() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers or "cpu" in controllers.split(","):
            group = groups / ("cpu" if controllers else "") / path.lstrip("/")
            allowed = min(allowed, *map(_quota, (group, *group.parents)))
    return max(1, int(allowed))


def _quota(group: Path) -> float:
    """Return how many cores the processes of a group may use together; infinity: all."""
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota, period = ((group / f"cpu.cfs_{k}_us").read_text() for k in ("quota", "period"))
    except OSError:  # a group that the container does not see
        return math.inf
    return math.inf if quota == "max" or int(quota) < 0 else int(quota) / int(period)


def limit_blas(ranks: int):
    """Return a context in which BLAS has at most cores / ranks threads, and no more than it had.

    OMP_NUM_THREADS and its like, or the caller, chose how many it had.
    """
    blas, share = ThreadpoolController(), max(1, cores() // ranks)
    fewer = [one | {"num_threads": min(share, one["num_threads"] or share)} for one in blas.info()]
    return blas.limit(limits=fewer)


def refuse_interleaving(seed: int | None) -> None:
    """Raise ValueError, with the remedy, if ranks that are processes are to take turns."""
    if seed is not None:
        raise WrongInput("only ranks that are threads can be interleaved; use transport='thread'")


def _raised_limit(wanted: int) -> int:
    """Return how many files this process may have open: if possible, `wanted` or more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return max(soft, allowed)
