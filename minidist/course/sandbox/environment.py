"""The environment of a student's processes: variables, libraries, a folder."""

import functools
import importlib.util
import os
import sys
import tempfile
from pathlib import Path

from minidist.course import overlay

DEPENDENCIES = ["numpy", "cloudpickle", "threadpoolctl", "tqdm"]


def variables() -> dict[str, str]:
    """Return the few variables that the student's process gets; BLAS has one thread."""
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    threads = (
        "OPENBLAS_NUM_THREADS",
        "OMP_NUM_THREADS",
        "MKL_NUM_THREADS",
        "VECLIB_MAXIMUM_THREADS",
    )
    return {
        **kept,
        **dict.fromkeys(threads, "1"),
        "MALLOC_ARENA_MAX": "2",
        "PATH": "/usr/bin:/bin",
    }


@functools.cache
def dependencies() -> dict[str, list[str]]:
    """Return the folders to import from, those that may be read, and those to hide."""
    specs = [importlib.util.find_spec(name) for name in DEPENDENCIES]
    readable = [
        found for spec in specs for found in spec.submodule_search_locations or [spec.origin]
    ]
    folders = sorted({str(Path(path).parent) for path in readable})
    readable += [str(found) for folder in folders for found in Path(folder).glob("numpy.libs")]
    site = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    hidden = [*site, str(overlay.PACKAGE.parent)]
    return {
        "dependencies": folders,
        "readable": readable,
        "hidden": hidden,
    }


def open_to_all() -> str:
    """Return a folder for temporary files; for root, one that other users can enter."""
    places = [tempfile.gettempdir(), "/tmp", "/var/tmp"]
    for place in places if os.geteuid() == 0 else []:
        if all(folder.stat().st_mode & 1 for folder in [Path(place), *Path(place).parents]):
            return place
    return places[0]
