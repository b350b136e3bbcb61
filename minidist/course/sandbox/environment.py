"""The environment of a student's processes: variables, libraries, a folder."""

import functools
import importlib.util
import os
import tempfile
from pathlib import Path

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
def folders() -> tuple[str, ...]:
    """Return the folders that the dependencies are imported from."""
    specs = [importlib.util.find_spec(name) for name in DEPENDENCIES]
    found = [spec.submodule_search_locations or [spec.origin or ""] for spec in specs if spec]
    return tuple(sorted({str(Path(path).parent) for paths in found for path in paths}))


def open_to_all() -> str:
    """Return a folder for temporary files; for root, one that other users can enter."""
    places = [tempfile.gettempdir(), "/tmp", "/var/tmp"]
    if os.geteuid() == 0:
        for place in places:
            if all(folder.stat().st_mode & 1 for folder in [Path(place), *Path(place).parents]):
                return place
    return places[0]
