"""Read untrusted files, from a student or a student's process; remove their folders entirely."""

import contextlib
import io
import json
import math
import os
import stat
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from minidist.course.answers import Answer

LARGEST = 1 << 24  # bytes of an answer, of a .zip
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
            raise ValueError(f"more than {HEAD} bytes of names")
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
            raise ValueError(f"{name} is no array of numbers")
        dtype = np.dtype(kind)
        if dtype.kind not in KINDS or any(type(size) is not int or size < 0 for size in shape):
            raise ValueError(f"{name} is no array of numbers")
        size = math.prod(shape) * dtype.itemsize
        if len(rest) - begin < size:
            raise ValueError(f"{name} is cut off")
        array = np.frombuffer(rest, np.uint8, size, begin)
        answer[name] = array.copy().view(dtype).reshape(shape)
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


def holder(folder: Path, name: str, is_there: Callable[[Path], bool]) -> Path | None:
    """Return the folder that has `name`: this one or, as in zipped folders, the only one in it."""
    if is_there(folder / name):
        return folder
    inner = [path.parent for path in folder.glob(f"*/{name}") if is_there(path)]
    inner = [path for path in inner if not path.is_symlink() and path.name != "__MACOSX"]
    return inner[0] if len(inner) == 1 else None


def unzip(path: Path, folder: Path, files: list[str], most: int) -> Path:
    """Write folder/minidist/FILE for each of `files` in a .zip; return `folder`.

    They are at its root or in its only folder. No more than `most` + 1 bytes of each are read, and
    nothing else. ValueError if it cannot be read, or has no minidist.
    """
    whole = contents(path, LARGEST) or b""
    if len(whole) > LARGEST:
        raise ValueError(f"{path.name} has more than {LARGEST >> 20} MB")
    try:
        with zipfile.ZipFile(io.BytesIO(whole)) as archive:
            found = [name.partition("minidist/") for name in archive.namelist()]
            roots = {before for before, here, _ in found if here and before.count("/") < 2}
            roots = {""} if "" in roots else {r for r in roots if r[-1] == "/"} - {"__MACOSX/"}
            for file in files if len(roots) == 1 else ():
                with (
                    contextlib.suppress(KeyError),
                    archive.open(f"{min(roots)}minidist/{file}") as f,
                ):
                    (folder / "minidist" / file).parent.mkdir(parents=True, exist_ok=True)
                    (folder / "minidist" / file).write_bytes(f.read(most + 1))
    except Exception as error:  # whatever it is that they have thought of
        raise ValueError(f"{path.name} cannot be unpacked: {error}") from None
    if not folder.is_dir():
        raise ValueError(f"{path.name} has no folder minidist with a file of the lab")
    return folder


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
