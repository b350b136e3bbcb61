"""Read untrusted files, from a student or a student's process; remove their folders entirely."""

import contextlib
import os
import stat
import tempfile
from pathlib import Path
from typing import Any

from minidist.course.sandbox.inside.values import LARGEST, decode


class NoAnswer(str):
    """The text that says why there is no answer."""


def read(path: Path) -> Any:
    """Return the value that a student's process has written, or the NoAnswer that it says.

    The file is the student's: it may be a pipe, a link, garbage, or claim any size.
    """
    data = contents(path, LARGEST)
    if data is not None and len(data) > LARGEST:
        return NoAnswer(f"the answer has more than {LARGEST >> 20} MB")
    try:
        ((kind, value),) = decode(data or b"").items()
        if kind == "error":
            return NoAnswer(str(value)[:4000])
        if kind == "answer":
            return value
    except Exception:  # whatever it is that they have thought of
        pass
    return NoAnswer("the answer is not what the sandbox writes")


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
