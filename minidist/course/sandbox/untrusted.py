"""Read untrusted files, from a student or a student's process; remove their folders entirely."""

import contextlib
import json
import math
import os
import stat
import sys
import tempfile
from pathlib import Path

import numpy as np

from minidist.course.answers import Answer
from minidist.errors import WrongInput

LARGEST = 1 << 24  # bytes of an answer
HEAD = 1 << 18  # of them in its line of names, types and shapes
KINDS = "biufU"  # of NumPy's data types


def read(path: Path) -> Answer | str | None:
    """Read an answer, or the text of an error; None if there is none.

    The file is the student's: it may be a pipe, a link, garbage, or claim any size.
    """
    whole = contents(path, LARGEST)
    if whole is None:
        return None
    if len(whole) > LARGEST:
        return f"the answer has more than {LARGEST >> 20} MB"
    head, _, rest = whole.partition(b"\n")
    try:
        if len(head) > HEAD:
            raise WrongInput(f"more than {HEAD} bytes of names")
        fields = json.loads(head)
        if isinstance(fields, dict) and isinstance(fields["error"], str):
            return fields["error"][:4000]
        return _arrays(fields, rest)
    except Exception:  # whatever it is that they have thought of
        return "the answer is not what the sandbox writes"


def _arrays(fields: list, rest: bytes) -> Answer:
    answer, begin = {}, 0
    for name, kind, shape in fields:
        if len(kind) > 16 or len(shape) > 16:  # products of many sizes take their time
            raise WrongInput(f"{name} is no array of numbers")
        dtype = np.dtype(kind)
        if dtype.kind not in KINDS or any(type(size) is not int or size < 0 for size in shape):
            raise WrongInput(f"{name} is no array of numbers")
        if math.prod(max(1, length) for length in shape) > LARGEST:  # [10**12, 0] is as many lists
            raise WrongInput(f"{name} is too large")
        size = math.prod(shape) * dtype.itemsize
        if len(rest) - begin < size:
            raise WrongInput(f"{name} is cut off")
        array = np.frombuffer(rest, np.uint8, size, begin).copy()
        if dtype.kind == "U" and (array.view(f"{dtype.str[0]}u4") > sys.maxunicode).any():
            raise WrongInput(f"{name} is no text")  # NumPy raises SystemError when it is read
        answer[name] = array.view(dtype).reshape(shape)
        begin += size
    return answer


def contents(path: Path, most: int) -> bytes | None:
    """Return the first bytes of a file, at most `most` + 1; None if it is no regular file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        return None
    with open(descriptor, "rb") as file:
        return file.read(most + 1)


def beginning(path: Path) -> str:
    """Return a file's first 4000 bytes as text; "" if it is no regular file."""
    return (contents(path, 4000) or b"")[:4000].decode("utf-8", "replace")


def plain(text: str, lines: bool = False) -> str:
    """Return a text from outside as it may be printed: unprintable characters as their numbers.

    These control a terminal, turn the direction of a line or are not allowed in XML.

    lines  whether it may have several lines, as a message has and a name has not
    """
    kept = "\t\n" if lines else ""
    return "".join(c if c in kept or c.isprintable() else f"\\x{ord(c):02x}" for c in text)


def remove(folder: Path) -> None:
    """Remove a folder, however deep it is and whatever its rights.

    Its folders are moved up to the first level, one by one, so that no path gets too long.
    """
    waiting = [folder]
    while waiting:
        here = waiting.pop()
        os.chmod(here, 0o700)
        with os.scandir(here) as entries:
            found = list(entries)
        for entry in found:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)
            elif here == folder:
                waiting.append(Path(entry.path))
            else:
                os.chmod(entry.path, 0o700)  # to move a folder is to write in it
                waiting.append(Path(tempfile.mkdtemp(dir=folder)))
                os.rename(entry.path, waiting[-1])
        if here != folder:
            os.rmdir(here)
    os.rmdir(folder)


def remove_files_of(user: int) -> None:
    """Remove a user's files and folders in the folders in which all users can write."""
    for place in ("/tmp", "/var/tmp", "/dev/shm"):
        with contextlib.suppress(OSError), os.scandir(place) as entries:
            for entry in [e for e in entries if e.stat(follow_symlinks=False).st_uid == user]:
                if entry.is_dir(follow_symlinks=False):
                    remove(Path(entry.path))
                else:
                    os.unlink(entry.path)
