"""Devices, memory, streams and events of the stand-in."""

from . import cublas, runtime
from .cublas import get_cublas_handle
from .device import Device
from .memory import Memory, MemoryPointer, UnownedMemory
from .stream import Event, Stream, get_current_stream, get_elapsed_time

__all__ = [
    "Device",
    "Event",
    "Memory",
    "MemoryPointer",
    "Stream",
    "UnownedMemory",
    "cublas",
    "get_cublas_handle",
    "get_current_stream",
    "get_elapsed_time",
    "runtime",
]
