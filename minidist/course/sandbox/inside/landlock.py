"""Landlock: a process on Linux 5.13 or newer permanently gives up the rights it does not need.

It needs no root. A list of paths is allowed; the kernel refuses everything else to this process and
its children. Newer kernels refuse more: TCP (6.7), signals to processes outside
and abstract sockets (6.12). <https://docs.kernel.org/userspace-api/landlock.html>
"""

import ctypes
import os
import struct
from pathlib import Path

CREATE, ADD, RESTRICT = 444, 445, 446  # system calls, the same on every architecture
EXECUTE, WRITE, READ, READ_FOLDER = 1, 2, 4, 8  # rights
REMOVE_FILE, MAKE_FILE, TRUNCATE = 1 << 5, 1 << 8, 1 << 14
LOOK, CHANGE = READ | READ_FOLDER, WRITE | REMOVE_FILE | MAKE_FILE | TRUNCATE
FILES_BY_VERSION = [0, (1 << 13) - 1, (1 << 14) - 1, (1 << 15) - 1, (1 << 15) - 1, (1 << 16) - 1]
TCP, SCOPES = 3, 3  # bind and connect; abstract sockets and signals

libc = ctypes.CDLL(None, use_errno=True)


def version() -> int:
    """Return the kernel's version of Landlock; 0 if it has none."""
    return max(0, _call(CREATE, None, 0, 1))


def restrict(readable: list[str], writable: list[str]) -> int:
    """Allow reading below some paths and writing below others; refuse all else Landlock can refuse.

    Set no_new_privs first. Returns the version; 0 means that nothing is restricted.
    """
    have = version()
    if have == 0:
        return 0
    files = FILES_BY_VERSION[min(have, 5)]
    net, scopes = TCP if have >= 4 else 0, SCOPES if have >= 6 else 0
    wanted = struct.pack("=QQQ", files, net, scopes)[: 8 if have < 4 else 16 if have < 6 else 24]
    rules = _call(CREATE, wanted, len(wanted), 0)
    if rules < 0:
        return 0
    for path in readable:
        _allow(rules, path, files & LOOK)
    for path in writable:
        _allow(rules, path, files & (LOOK | CHANGE))
    failed = _call(RESTRICT, rules, 0)
    os.close(rules)
    return 0 if failed else have


def but(path: str, hidden: list[str]) -> list[str]:
    """Return paths that cover `path` without what is hidden: `path` itself, or some entries."""
    if any(inside(path, secret) for secret in hidden):
        return []
    if not any(inside(secret, path) for secret in hidden):
        return [path]
    try:
        entries = sorted(os.listdir(path))
    except OSError:
        return []
    return [found for entry in entries for found in but(os.path.join(path, entry), hidden)]


def inside(path: str, folder: str) -> bool:
    """Return whether a path is this folder, or is in it, after following links."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def _allow(rules: int, path: str, rights: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # what is not there need not be read
    if not os.path.isdir(path):
        rights &= EXECUTE | WRITE | READ | TRUNCATE
    _call(ADD, rules, 1, struct.pack("=Qi", rights, place), 0)
    os.close(place)


def _call(number: int, *arguments) -> int:
    words = [ctypes.c_long(a) if isinstance(a, int) else a for a in (number, *arguments)]
    return libc.syscall(*words)
