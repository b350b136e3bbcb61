"""Board: where the ranks of a group meet, and show each other what they call.

Each rank writes to a block of its own, in shared memory, and reads the others'. Before any data
moves the ranks compare what they call. A rank that waits spins for a moment, and yields its core
each time, since ranks may outnumber cores; then it sleeps on a pipe until the last one has come.
"""

import threading

import numpy as np

from minidist.comm.diagnosis import Signature, Wait, call_site, mismatch
from minidist.comm.local.limits import GIVE_WAY
from minidist.comm.local.wiring import Wiring

ARRIVED, SLEEPS, FINGERPRINT, OFFSET = 0, 1, 2, 4  # 8-byte words; the last two exist twice
TEXT, TEXT_BYTES = 64, 480  # what is shown to people when ranks disagree; twice as well
BLOCK = TEXT + 2 * TEXT_BYTES


class Board:
    """The blocks of a group's ranks, one per member, at these offsets of the shared memory.

    What a rank shows has two places, used in turn: a fast rank may already show its next call while
    a slow one still reads the one before.

    run      the number of the run
    me       this rank's number in the group
    members  the ranks' numbers in the world
    blocks   where each member's block begins; they are zeros at first, or from an earlier run
    block    this rank's own, as an array: its memory is not reused while a thread has this board
    """

    def __init__(
        self,
        wiring: Wiring,
        run: int,
        me: int,
        members: list[int],
        blocks: list[int],
        block: np.ndarray,
    ):
        self.members, self.me, self.block = members, me, block
        self.alarm, self.mailbox, self.spins = wiring.alarm, wiring.mailbox, wiring.spins
        shared = memoryview(wiring.memory.map)
        self.bytes = [shared[start : start + BLOCK] for start in blocks]
        self.words = [block.cast("Q") for block in self.bytes]
        self.mine = self.words[self.me]
        self.others = [(words, rank) for words, rank in zip(self.words, members, strict=True)]
        del self.others[self.me]
        self.run, self.step, self.meetings = run, run << 32, 0
        self.lock = threading.Lock()

    def meet(self, signature: Signature, offset: int = 0) -> list[int]:
        """Wait for all ranks. The signature must be the same on all of them.

        Return the offset that each rank has shown. Raise CollectiveMismatch, on every rank, if the
        signatures differ.
        """
        self.mailbox.check_open(self.run)
        self.meetings += 1
        side = self.meetings % 2
        self.mine[FINGERPRINT + side] = signature.fingerprint
        self.mine[OFFSET + side] = offset
        self.barrier(signature.text)
        if any(words[FINGERPRINT + side] != signature.fingerprint for words, _ in self.others):
            self._explain(signature, side)
        return [words[OFFSET + side] for words in self.words]

    def barrier(self, operation: str) -> None:
        """Return when every rank has called this."""
        if not self.others:
            return
        self.mailbox.enter(self.run)
        self.step += 1
        self._fence()
        self.mine[ARRIVED] = self.step
        self._fence()  # else each might miss the other: we its sleep, it our arrival
        for words, rank in self.others:
            if words[SLEEPS]:
                assert self.alarm is not None  # who has none polls
                self.alarm.wake(rank)
        for _ in range(self.spins):
            if self._all_have_come():
                break
            GIVE_WAY()  # a rank that this one waits for may need this core
        else:
            self._sleep(operation)
        self._fence()
        self.mailbox.check_open(self.run)  # else the blocks may be another run's by now

    def _fence(self) -> None:
        """Order all memory accesses before this call before all that follow, on any processor."""
        for _ in range(2):
            self.lock.acquire()  # `with` would take twice as long
            self.lock.release()

    def _all_have_come(self) -> bool:
        for words, _ in self.others:
            if words[ARRIVED] < self.step:
                return False
        return True

    def missing(self) -> list[int]:
        return [rank for words, rank in self.others if words[ARRIVED] < self.step]

    def _sleep(self, operation: str) -> None:
        def ready():
            return not self.missing() or self.mailbox.is_over(self.run)

        with self.mailbox.waiting(Wait(operation, self.missing, call_site())):
            if self.mailbox.pace is not None and self.mailbox.pace.wait_until(ready):
                return
            assert self.alarm is not None
            self.mine[SLEEPS] = 1
            self._fence()
            while not ready():
                self.alarm.sleep(0.01)  # a call may be lost between the check and the sleep
            self.mine[SLEEPS] = 0

    def _explain(self, signature: Signature, side: int) -> None:
        """Exchange in words what was called, and where; then raise."""
        start = TEXT + side * TEXT_BYTES
        text = self._fitting(signature, f" at {call_site()}")
        self.bytes[self.me][start : start + TEXT_BYTES] = text.ljust(TEXT_BYTES, b"\0")
        self.barrier("collectives that do not match")
        shown = [bytes(block[start : start + TEXT_BYTES]).rstrip(bytes(1)) for block in self.bytes]
        raise mismatch(self.members, [text.decode(errors="replace") for text in shown])

    def _fitting(self, signature: Signature, site: str) -> bytes:
        """Return what was called and where. What does not fit is cut, and its digest shown."""
        text = signature.text.encode()
        if len(text) + len(site.encode()) > TEXT_BYTES:
            site = f"... (all of it has the digest {signature.fingerprint:016x}){site}"
            room = TEXT_BYTES - len(site.encode())
            text = text[:room].decode(errors="ignore").encode()
        return text + site.encode()
