"""The NCCL library: load it, check that every rank has a GPU of its own, list what it can reduce.

NCCL moves arrays from GPU to GPU, and has one rank per GPU:

    minidist.run(worker, 4, transport="nccl", device="gpu")    4 processes, on 4 GPUs of a machine
    minidist.run(worker, 8, transport="mpi-nccl", device="gpu")    what mpiexec has started

Sources: NCCL's user guide; CuPy's `cupy_backends/cuda/libs/nccl.pyx`, whose methods take addresses,
counts and the numbers of types, operations and streams. CuPy's wheels do not contain NCCL.
"""

import pickle
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from minidist.backend import device_module, gpus
from minidist.comm.message import Key
from minidist.errors import WrongInput

if TYPE_CHECKING:
    from cupy.cuda import Device
    from cupy.cuda.nccl import NcclCommunicator

    from minidist.comm.fabric import Fabric

REDUCTIONS = {  # by kind of dtype: what NCCL does as NumPy does it
    "i": ("sum", "prod", "max", "min"),
    "u": ("sum", "prod", "max", "min"),
    "f": ("sum", "prod"),  # its maximum ignores NaN, as fmax of C does
    "c": ("sum",),  # by parts
}
REMEDY = "use transport='process', whose ranks may share a GPU and its memory (CUDA IPC)"


@cache
def load() -> ModuleType:
    """Return cupy.cuda.nccl; ValueError, with the remedy, if the library is missing."""
    device_module("gpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CuPy warns where we raise
        from cupy.cuda import nccl
    if not nccl.available:
        raise WrongInput(
            "transport='nccl' needs the NCCL library: pip install nvidia-nccl-cu12; "
            "or use transport='process'"
        )
    return nccl


def check_device(device: str, transport: str) -> None:
    """Raise ValueError, with the remedy, unless arrays are on GPUs, and there is NCCL."""
    if device == "cpu":
        raise WrongInput(
            f"transport {transport!r} moves arrays from GPU to GPU; give device 'gpu', or use "
            "transport 'process'"
        )
    load()


def room(device: str) -> int:
    """Return how many ranks of this machine can have a GPU each on "gpu" or "gpu:N"."""
    return gpus() if device == "gpu" else 1


def check_ranks(size: int, device: str) -> None:
    """Raise ValueError, with the remedy, unless `size` ranks of this machine have a GPU each."""
    check_device(device, "nccl")
    if size > (count := room(device)):
        raise WrongInput(
            f"NCCL has one rank per GPU, and {size} ranks would share {count} GPU"
            f"{'s' if count > 1 else ''}: use no more ranks than that, or {REMEDY}"
        )


# One rank per GPU.


def address_of(gpu: "Device") -> int:
    """Return the address of a GPU on the PCI bus; NCCL tells GPUs apart by it, too.

    0000:3B:00.0 is 0x3b000.
    """
    return int(re.sub("[:.]", "", gpu.pci_bus_id), 16)


def check_gpus(addresses: list[int], hosts: list[int]) -> None:
    """Raise ValueError if two ranks have the same GPU of the same host."""
    first: dict[tuple[int, int], int] = {}
    for rank, where in enumerate(zip(hosts, addresses, strict=True)):
        if (other := first.setdefault(where, rank)) != rank:
            raise WrongInput(
                f"ranks {other} and {rank} are on one GPU, {where[1]:#x} on the PCI bus of host "
                f"{where[0]}, and NCCL has one rank per GPU: give each rank another one, or "
                f"{REMEDY}"
            )


# What NCCL can do.


@cache
def types() -> dict[str, tuple[int, int]]:
    """Return {name of a dtype: (how many of NCCL's type are one element, that type)}.

    NCCL has no truth values, and no integers of 16 bits. Floats of 16 bits it has: their sums
    depend so much on NCCL's order that they are done in rank order, without it.
    """
    nccl = load()
    named = "int8 uint8 int32 uint32 int64 uint64 float32 float64".split()
    found = {name: (1, getattr(nccl, f"NCCL_{name.upper()}")) for name in named}
    return found | {"complex64": (2, nccl.NCCL_FLOAT32), "complex128": (2, nccl.NCCL_FLOAT64)}


def reduction(dtype: np.dtype, op: str) -> tuple[int, int, int] | None:
    """Return how many of NCCL's type are one element, that type, and NCCL's operation.

    None where NCCL does not do what NumPy does.
    """
    if dtype.name not in types() or op not in REDUCTIONS[dtype.kind]:
        return None
    return *types()[dtype.name], getattr(load(), f"NCCL_{op.upper()}")


@contextmanager
def grouped() -> Iterator[None]:
    """Let NCCL start together all that this thread calls in the context (NCCL: "Group Calls")."""
    load().groupStart()
    try:
        yield
    finally:
        load().groupEnd()


# Joining.


def join(fabric: "Fabric", members: list[int], splits: tuple[int, ...]) -> "NcclCommunicator":
    """Return NCCL's communicator of these ranks, all of which call this.

    The first of them makes a unique id, which the others get in a message. (`commSplit`, which
    needs none, is not in CuPy 13.)
    """
    nccl, key = load(), Key(fabric.run, splits, "nccl", 0)
    first, *others = members
    if fabric.rank == first:
        unique = nccl.get_unique_id()  # bytes, or, in CuPy 13, a tuple of numbers
        for rank in others:
            fabric.send(rank, key, np.frombuffer(pickle.dumps(unique), np.uint8))
    else:
        unique = pickle.loads(fabric.recv([first], key, "the start of NCCL")[1])
    return nccl.NcclCommunicator(len(members), unique, members.index(fabric.rank))
