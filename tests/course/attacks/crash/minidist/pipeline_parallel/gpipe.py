"""Ends the interpreter by a fault in memory."""

import ctypes


def gpipe(rank, p, m):
    ctypes.string_at(0)
