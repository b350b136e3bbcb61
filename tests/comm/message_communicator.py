"""The naive Communicator, made of messages alone; the package's faster ones are held to it."""

import numpy as np

from minidist.backend import Array
from minidist.comm.communicator import Communicator, Key, Ledger, NewGroup
from minidist.comm.diagnosis import Signature
from minidist.comm.fabric import Fabric


class MessageCommunicator:
    """It compares on messages, on any fabric, and leaves every array to collectives.py."""

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
            self.fabric.explain(self.members, self._key(), call)

    def exchange(self, number: int) -> list[int]:
        return [int(its) for its in self._exchange(np.array(number), "split")]

    def _exchange(self, mine: np.ndarray, operation: str) -> list[np.ndarray]:
        return self.fabric.exchange(self.members, self._key(), mine, operation)

    def _key(self) -> Key:
        self.meetings += 1
        return Key(self.run, self.splits, "meeting", self.meetings)

    def all_reduce(self, call: Signature, x: Array, op: str, out: Array | None) -> None:
        self.meet(call)

    def reduce_scatter(self, call: Signature, x: Array, ends: list[int], op: str) -> None:
        self.meet(call)

    def gather_into(self, call: Signature, out: Array, ends: list[int]) -> None:
        self.meet(call)
