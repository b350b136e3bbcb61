"""Ranks as threads of this process: they start in a millisecond, and a debugger can step through
any of them.

Like processes they share nothing: the worker and its arguments are copied for each rank, and
messages are copied. A thread cannot be killed: after a failure elsewhere it stops at its next
communication.
"""

import queue
import threading

import cloudpickle
from threadpoolctl import threadpool_limits

from minidist.comm.mailbox import Endpoint, Mailbox, copy_of
from minidist.comm.report import execute, fair_share_of_cores


class ThreadRanks:
    def __init__(self, size: int, device: str):
        self.size, self.device = size, device
        self.mailboxes = [Mailbox() for _ in range(size)]
        self.queue: queue.SimpleQueue = queue.SimpleQueue()
        self.threads: list[threading.Thread] = []

    def submit(self, run: int, payload: bytes) -> None:
        self.limits = threadpool_limits(fair_share_of_cores(self.size))
        for rank in range(self.size):
            endpoint = Endpoint(
                rank, self.size, self.device, self.mailboxes[rank], self._deliver_from(rank)
            )
            thread = threading.Thread(
                target=self._serve, args=(endpoint, run, payload), name=f"rank {rank}", daemon=True
            )
            self.threads.append(thread)
            thread.start()

    def _deliver_from(self, rank):
        def deliver(to, key, message):
            self.mailboxes[to].put(rank, key, copy_of(message))

        return deliver

    def _serve(self, endpoint, run, payload):
        self.queue.put((endpoint.rank, execute(endpoint, run, payload, cloudpickle.loads)))

    def reports(self, timeout: float | None) -> list:
        """Return the (rank, Report) pairs that have come in, waiting for the first; none if
        `timeout` passes before.
        """
        try:
            found = [self.queue.get(timeout=timeout)]
            while not self.queue.empty():
                found.append(self.queue.get())
            return found
        except queue.Empty:
            return []

    def waiting(self, ranks: list[int]) -> dict[int, list[str]]:
        return {rank: self.mailboxes[rank].waiting() for rank in ranks}

    def finish(self) -> None:
        """End a run in which every rank has reported."""
        for thread in self.threads:
            thread.join()
        self.threads.clear()
        self.limits.restore_original_limits()

    def stop(self, patience: float = 0.0) -> None:
        """Stop every rank at its next communication."""
        for mailbox in self.mailboxes:
            mailbox.close()
        for thread in self.threads:
            thread.join(timeout=1)
        if self.threads:
            self.limits.restore_original_limits()
