"""What the suite runs on: a transport, how it connects the ranks of a group, a device."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest

from minidist import Cluster
from minidist.backend import why_no_gpu
from minidist.comm.cluster import TRANSPORTS
from minidist.comm.fabric import Connect
from minidist.comm.nccl import check_ranks
from tests.comm.message_communicator import MessageCommunicator


@dataclass(frozen=True)
class Machine:
    """A machine of the suite.

    connect        makes the communicators; None: as the transport does it
    in_rank_order  whether reductions have the bits of a sum in rank order; MPI promises the same
                   bits on every rank, and no order. Those of 16-bit floats always have them
    """

    transport: str
    connect: Connect | None = None
    device: str = "cpu"
    in_rank_order: bool = True


messages = MessageCommunicator.connect
MACHINES = {
    "process": Machine("process"),
    "thread": Machine("thread"),
    "process, messages": Machine("process", messages),
    "thread, messages": Machine("thread", messages),
    "process, gpu": Machine("process", device="gpu"),
    "process, one gpu": Machine("process", device="gpu:0"),
    "process, messages, gpu": Machine("process", messages, "gpu"),
    "thread, gpu": Machine("thread", device="gpu"),
    "thread, messages, gpu": Machine("thread", messages, "gpu"),
    "process, nccl": Machine("nccl", device="gpu", in_rank_order=False),
    "mpi": Machine("mpi-subset", in_rank_order=False),
    "mpi, messages": Machine("mpi-subset", messages),
    "mpi, gpu": Machine("mpi-subset", device="gpu", in_rank_order=False),
    "mpi, nccl": Machine("mpi-nccl", device="gpu", in_rank_order=False),
}


def chosen(names: list[str]) -> list[str]:
    """Return the machines of the options; if there are none, those that need no `mpiexec`."""
    if unknown := [name for name in names if name not in MACHINES]:
        raise pytest.UsageError(f"no --machine {unknown[0]!r}; choose from {list(MACHINES)}")
    return names or [name for name in MACHINES if not name.startswith("mpi")]


def lacks(name: str) -> str | None:
    """Return why this computer does not have the machine, or None."""
    if MACHINES[name].device == "cpu":
        return None
    if MACHINES[name].transport.endswith("nccl") and why_no_gpu() is None:
        try:
            check_ranks(4, "gpu")
        except ValueError as error:
            return str(error)
    return why_no_gpu()


def marks(name: str) -> list:
    return [pytest.mark.gpu] if MACHINES[name].device != "cpu" else []


class Ranks:
    """Clusters of one machine: ranks(size) is one of that size, which stays up.

    transport      its name; a row of TRANSPORTS
    outlives_rank  whether the death of a rank is an error of the run, and not the end of all
    """

    def __init__(self, name: str, cluster: Callable[[int, str, str], Cluster]):
        machine, self.cluster = MACHINES[name], cluster
        self.device, self.in_rank_order = machine.device, machine.in_rank_order
        self.outlives_rank = machine.transport in ("process", "nccl")
        self.transport, options = machine.transport, {}
        if machine.connect is not None:
            options["connect"] = machine.connect
        if machine.transport == "mpi-nccl":
            options["subset"] = True
        if options:
            self.transport = name
            TRANSPORTS.setdefault(name, partial(TRANSPORTS[machine.transport], **options))

    def __call__(self, size: int) -> Cluster:
        return self.cluster(size, self.transport, self.device)
