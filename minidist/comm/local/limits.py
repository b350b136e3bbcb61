"""How many ranks there can be, and how they share a core; checked before anything is started.

Pipes and sockets are open files, whose number is limited in each process (`ulimit -n`) by its soft
limit, which it may raise up to its hard limit. The caller has more open files than the fork server
and the ranks, which inherit the limit when the fork server starts. So the limit is raised before
that, for the largest cluster.
"""

import os
import resource

MOST = {
    "process": 123,  # a start passes 2N + 6 files to the fork server; Linux passes at most 253
    "thread": 1000,  # every rank maps every rank's block: N^2 objects, 0.7 GB
}
GIVE_WAY = getattr(os, "sched_yield", lambda: None)  # let another thread or process have this core
SPARE = 16  # the shared memory, what is open for a moment during a start, and a few to spare


def open_files(size: int, transport: str) -> int:
    """Return how many more files the caller has open, at most, while `size` ranks start.

    thread    a pipe per rank
    process   a pipe per rank until all have started; three per rank that has started; and, with k
              of them started, a socket for each of the k(N - k) pairs of a started rank and another
    """
    pipes = 2 * size + SPARE
    return pipes if transport == "thread" else pipes + 3 * size + (size + 1) ** 2 // 4


def check_size(size: int, transport: str) -> None:
    """Raise the soft limit if it is low; ValueError if `size` ranks are impossible."""
    threads = f", or use transport='thread' (at most {MOST['thread']} ranks)"
    remedy = threads if transport == "process" and size <= MOST["thread"] else ""
    if size > MOST[transport]:
        raise ValueError(
            f"{size} ranks are too many: use at most {MOST[transport]} with "
            f"transport={transport!r}{remedy}"
        )
    used = len(os.listdir("/dev/fd"))
    limit = _raised_limit(used + open_files(MOST[transport], transport))
    needed = used + open_files(size, transport)
    if needed > limit:
        enough = [n for n in range(size) if used + open_files(n, transport) <= limit]
        raise ValueError(
            f"{size} {transport} ranks need {needed} open files, {used} of them open already, but "
            f"the hard limit is {limit}: enough for {max(enough, default=0)} ranks; use fewer "
            f"ranks, let the administrator raise the hard limit (ulimit -Hn){remedy}"
        )


def refuse_interleaving(seed: int | None) -> None:
    """Raise ValueError, with the remedy, if ranks that are processes are to take turns."""
    if seed is not None:
        raise ValueError("only ranks that are threads can be interleaved; use transport='thread'")


def _raised_limit(wanted: int) -> int:
    """Return how many files this process may have open: if possible, `wanted` or more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return max(soft, allowed)
