"""The naive communicator, messages alone: what tests hold the faster ones to; only they use it."""

import numpy as np

from minidist.backend import Array
from minidist.comm.diagnosis import Signature, call_site, mismatch
from minidist.comm.fabric import Communicator, Fabric, NewGroup
from minidist.comm.ledger import Ledger
from minidist.comm.message import Key


class MessageCommunicator:
    """A Communicator (see fabric.py) that compares and leaves every array to collectives.py."""

    library = None

    def __init__(self, fabric: Fabric, new: NewGroup):
        self.fabric, self.members, self.splits = fabric, new.members, new.splits
        self.run, self.meetings, self.ledger = fabric.run, 0, Ledger()

    @classmethod
    def connect(
        cls, fabric: Fabric, new: NewGroup, parent: Communicator | None
    ) -> "MessageCommunicator | None":
        return cls(fabric, new) if new.members else None

    def meet(self, call: Signature) -> None:
        mine = np.array(call.fingerprint, np.uint64)
        if any(its != mine for its in self._exchange(mine, call.text)):
            text = f"{call.text} at {call_site()}".encode()
            texts = self._exchange(np.frombuffer(text, np.uint8), "collectives that do not match")
            raise mismatch(self.members, [its.tobytes().decode() for its in texts])

    def _exchange(self, mine: np.ndarray, operation: str) -> list[np.ndarray]:
        """Return what every rank of the group has given, in the order of its ranks."""
        self.meetings += 1
        key = Key(self.run, self.splits, "meeting", self.meetings)
        found, missing = {self.fabric.rank: mine}, list(self.members)
        missing.remove(self.fabric.rank)
        for rank in missing:
            self.fabric.send(rank, key, mine)
        while missing:
            source, found[source] = self.fabric.recv(missing, key, operation)
            missing = [rank for rank in missing if rank != source]
        return [found[rank] for rank in self.members]

    def exchange(self, number: int) -> list[int]:
        """Return the number that each rank has given."""
        return [int(its) for its in self._exchange(np.array(number), "split")]

    def all_reduce(self, call: Signature, x: Array, op: str, out: Array | None) -> None:
        self.meet(call)

    def reduce_scatter(self, call: Signature, x: Array, ends: list[int], op: str) -> None:
        self.meet(call)

    def gather_into(self, call: Signature, out: Array, ends: list[int]) -> None:
        self.meet(call)
