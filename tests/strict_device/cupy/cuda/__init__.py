"""Devices, memory, streams and events of the stand-in."""

from . import runtime
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
    "get_current_stream",
    "get_elapsed_time",
    "runtime",
]
