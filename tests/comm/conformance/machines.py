"""What the suite runs on: a transport, how it connects the ranks of a group, a device."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from minidist import Cluster
from minidist.comm.cluster import TRANSPORTS
from minidist.comm.fabric import Connect
from minidist.comm.message_communicator import MessageCommunicator


@dataclass(frozen=True)
class Machine:
    """A machine of the suite.

    connect  makes the communicators; None: as the transport does it
    """

    transport: str
    connect: Connect | None = None
    device: str = "cpu"


messages = MessageCommunicator.connect
MACHINES = {
    "process": Machine("process"),
    "thread": Machine("thread"),
    "process, messages": Machine("process", messages),
    "thread, messages": Machine("thread", messages),
    "process, gpu": Machine("process", device="gpu"),
    "process, messages, gpu": Machine("process", messages, "gpu"),
}


class Ranks:
    """Clusters of one machine: ranks(size) is one of that size, which stays up.

    own_process    whether each rank is a process
    outlives_rank  whether the death of a rank is an error of the run, and not the end of all
    """

    def __init__(self, name: str, cluster: Callable[[int, str, str], Cluster]):
        machine, self.cluster = MACHINES[name], cluster
        self.transport, self.device = machine.transport, machine.device
        self.own_process = machine.transport != "thread"
        self.outlives_rank = machine.transport == "process"
        if machine.connect is not None:
            self.transport = name
            start = TRANSPORTS[machine.transport]
            TRANSPORTS.setdefault(name, partial(start, connect=machine.connect))

    def __call__(self, size: int) -> Cluster:
        return self.cluster(size, self.transport, self.device)
