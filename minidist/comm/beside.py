"""What a rank does beside its own thread: in a second one, on a GPU on a stream of its own.

    this thread      backward | put(0) | backward | put(1) | backward | wait()
    second thread                      | work(0)           | work(1)  |

On a GPU a call returns before its work is done. Each thread queues its work on a stream, and the
works of two streams have no order but the one that events give them. Here the second stream waits,
before each piece of work, for all that the first one had queued at `put`; and the first stream
waits, after `wait`, for all that the second one has queued.
"""

import queue
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from minidist.backend import device_module
from minidist.comm.fabric import Fabric
from minidist.errors import WrongInput


class Waits(Protocol):
    """What is needed of a Group."""

    fabric: Fabric

    def waiting(self, operation: str, thread: threading.Thread) -> AbstractContextManager[None]: ...


class Beside:
    """A queue of arguments; a second thread calls `work` with each of them, in their order.

        orders = group.beside(self.all_reduce, "buckets")
        orders.put(0)
        orders.wait("the end of all buckets")

    Until `wait`, keep all arrays that the work uses: CuPy gives freed memory to the next array of
    the same stream, and asks no other stream whether it still reads there.

    name    of the second thread, which lives from the first `put` to `end`
    stream  what it queues its work on; None on the host. There is one for all threads of this
            queue, because CuPy keeps freed memory for each stream apart
    """

    def __init__(self, group: Waits, work: Callable, name: str):
        self.group, self.work, self.name = group, work, name
        device = group.fabric.device
        self.cuda: Any = None if device == "cpu" else device_module(device).cuda  # the module
        self.stream: Any = self.cuda and self.cuda.Stream(non_blocking=True)
        self.thread: threading.Thread | None = None  # to be waited for
        self.ended = True
        self.orders: queue.SimpleQueue = queue.SimpleQueue()
        self.answers: queue.SimpleQueue = queue.SimpleQueue()

    def __reduce__(self):
        raise WrongInput(
            f"what works beside this thread ({self.name}) cannot be copied or pickled; copy "
            "state(), or the model, and make the rest anew"
        )

    def put(self, *args) -> None:
        """Let the second thread call `work(*args)` after all that it has to do already."""
        new = None
        if self.ended:
            self.ended, self.orders, self.answers = False, queue.SimpleQueue(), queue.SimpleQueue()
            self.thread = new = threading.Thread(
                target=self._run, args=(self.orders, self.answers), name=self.name, daemon=True
            )
        self.orders.put((args, self.cuda and self.cuda.get_current_stream().record()))
        if new is not None:  # only now: it begins to work before `start` returns
            new.start()

    def end(self) -> None:
        """Let the second thread end after what it has to do already."""
        if not self.ended:
            self.ended = True
            self.orders.put(None)

    def wait(self, operation: str) -> None:
        """Return when all work is done; raise the first error, after which no more was done.

        operation  what a table of waits shows
        """
        self.end()
        thread, self.thread = self.thread, None
        if thread is None:
            return
        with self.group.waiting(operation, thread):
            error, done = self.answers.get()
        thread.join()
        if done is not None:
            self.cuda.get_current_stream().wait_event(done)
        if error is not None:
            raise error

    def _run(self, orders: queue.SimpleQueue, answers: queue.SimpleQueue) -> None:
        error = None
        try:
            self.group.fabric.use_device()
            with self.stream or nullcontext():
                while (order := orders.get()) is not None:
                    args, ready = order
                    if ready is not None:
                        self.stream.wait_event(ready)
                    self.work(*args)
        except BaseException as raised:  # the first thread raises it
            error = raised
        answers.put((error, self.stream and self.stream.record()))
