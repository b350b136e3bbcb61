"""How a process that is a rank starts: without the caller's script, and safe from Ctrl-C.

The processes come from a fork server with NumPy loaded (or are spawned where there is none); they
never import the caller's script, because workers travel by value.

The server listens at a socket, whose folder multiprocessing removes when the caller ends, but not
when a signal ends the caller. So the folder is removed at once: Linux reaches an open socket, which
has no name any more, by its descriptor.
"""

import multiprocessing as mp
import os
import signal
import sys
import tempfile
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, reduction, resource_tracker
from multiprocessing.context import ForkServerContext, SpawnContext
from typing import Any

STARTING = threading.Lock()  # there is one `__main__`
PRELOAD = [
    "numpy",
    "threadpoolctl",
    "cloudpickle",
    "minidist.autograd",
    "minidist.comm.local.rank_process",
]


class Descriptors:
    """File descriptors that a process which is being started inherits as open files of its own."""

    def __init__(self, numbers: list[int]):
        self.numbers = numbers

    def __reduce__(self):
        return _received, ([reduction.DupFd(number) for number in self.numbers],)

    def close(self) -> None:
        for number in self.numbers:
            os.close(number)


def _received(duplicates) -> Descriptors:
    return Descriptors([duplicate.detach() for duplicate in duplicates])


def start_method() -> ForkServerContext | SpawnContext:
    """Return the multiprocessing context that ranks start in: the fork server where there is one.

    It is started, if need be, with Ctrl-C blocked. Ranks inherit that: the caller stops them.
    A process that was forked after the start cannot use its parent's server: its ranks are spawned.
    """
    if "forkserver" not in mp.get_all_start_methods():
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    resource_tracker.ensure_running()  # which would unblock it again
    try:
        with STARTING, ctrl_c_waits():
            _ensure_running()
    except ChildProcessError:  # the server is no child of this process
        return mp.get_context("spawn")
    return context


def _ensure_running() -> None:
    """Start the fork server if it does not run, at a socket without a name where Linux has it."""
    if not (hasattr(os, "O_PATH") and os.path.exists("/proc/self/fd")):
        forkserver.ensure_running()
        return
    config = mp.current_process()._config  # type: ignore[attr-defined]  # no public name
    server: Any = forkserver._forkserver
    with tempfile.TemporaryDirectory(prefix="mp-") as folder:  # a socket's path is short
        usual, config["tempdir"] = config.get("tempdir"), folder
        try:
            forkserver.ensure_running()
        finally:
            config["tempdir"] = usual
        if os.path.dirname(server._forkserver_address) == folder:  # it has been started here
            socket = os.open(server._forkserver_address, os.O_PATH)
            server._forkserver_address = f"/proc/self/fd/{socket}"


@contextmanager
def ctrl_c_waits() -> Iterator[None]:
    """Delay Ctrl-C until this block ends, so that the fork server gets a whole order.

    Processes started here inherit the block. Blocking alone is not enough: another thread,
    such as one of BLAS, may get it, and Python would still interrupt the first thread.
    """
    handler, came = None, []
    if threading.current_thread() is threading.main_thread():
        handler = signal.getsignal(signal.SIGINT)
    if handler is not None:
        signal.signal(signal.SIGINT, lambda *_: came.append(True))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if handler is not None:
            signal.signal(signal.SIGINT, handler)
        if came:
            signal.raise_signal(signal.SIGINT)


@contextmanager
def nameless_main() -> Iterator[None]:
    """Start processes that do not run the caller's script again (as `__mp_main__`).

    A worker that the script defines is sent by value, so the ranks do not need the script, and the
    script needs no `if __name__ == "__main__"`.
    """
    with STARTING:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main
