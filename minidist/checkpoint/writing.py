"""Write a checkpoint so that, whenever a rank dies, a whole one is left.

    temporary name -> fsync -> rename       each rank's file; then the folder is synced
    all files are there                     the ranks tell each other their checksums
    temporary name -> fsync -> rename       the manifest, by the first rank: now it counts
    older ones are removed                  their manifests first; the last two are kept

What several ranks hold is written by one of them, in turn.
"""

import json
import os
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from minidist.backend import Array, as_array
from minidist.checkpoint import manifest
from minidist.checkpoint.checksum import checksum
from minidist.checkpoint.parts import Part
from minidist.comm import Group
from minidist.nn import Slice

KEPT = 2  # checkpoints
TEMPORARY = ".tmp"


def save(
    folder: str | Path,
    state: Mapping[str, Array] | list[Part],
    step: int,
    group: Group | None = None,
    about: dict | None = None,
) -> None:
    """Write a checkpoint; it counts once its manifest is there. Keep it and the one before.

    state  arrays by name, or this rank's parts of them. All ranks of the group call this
    about  what the manifest says in addition, JSON; that of the first rank is taken

    ValueError, and nothing is overwritten, if the folder has a checkpoint of this step. ValueError
    if the disk is full; the checkpoints before are whole.
    """
    parts = state if isinstance(state, list) else whole_parts(state)
    write_checkpoint(Path(folder), own_parts(parts, group), step, about or {}, group)


def write_checkpoint(
    folder: Path, own: list[Part], step: int, about: dict, group: Group | None
) -> None:
    """Write each rank's own parts, then the manifest; remove what is too old."""
    manifest.safetensors()
    target = folder / f"step-{step:08d}"
    if group is None or group.rank == 0:
        prepare(folder, target)
    if group is not None:
        group.barrier(label="folder of a checkpoint")
    rank = 0 if group is None else group.rank
    try:
        entry = write_parts(manifest.safetensors(), target, rank, own)
        entries = tell([entry], group)
        if rank == 0:
            written = {"format": manifest.FORMAT, "version": manifest.VERSION, "step": step}
            written |= {"about": about} | merge(entries)
            write(target / manifest.NAME, manifest.encode(written))
            sync(folder)
    except OSError as error:
        raise ValueError(
            f"cannot write the checkpoint {target}: {error.strerror}; those before it are whole"
        ) from error
    if rank == 0:
        remove_old(folder)
    if group is not None:
        group.barrier(label="checkpoint")


def whole_parts(state: Mapping[str, Array]) -> list[Part]:
    """Return whole arrays as parts."""
    arrays = {name: as_array(array) for name, array in state.items()}
    cuts = {n: Slice(n, tuple(a.shape), None, 0, a.size) for n, a in arrays.items()}
    return [Part(cuts[name], array) for name, array in arrays.items()]


def prepare(folder: Path, target: Path) -> None:
    """Make an empty folder for a checkpoint; what a run that died has left there is removed."""
    if (target / manifest.NAME).exists():
        raise ValueError(f"{target} is there already; resume from it, or use another folder")
    try:
        target.mkdir(parents=True, exist_ok=True)
        remove(target)
        target.mkdir(exist_ok=True)
        sync(folder)
    except OSError as error:
        raise ValueError(f"cannot write to the folder {folder}: {error.strerror}") from error


def own_parts(parts: list[Part], group: Group | None) -> list[Part]:
    """Return the parts that this rank is to write: each is written by one of its holders."""
    keys = [json.dumps(manifest.describe(part.cut)) for part in parts]
    holders = defaultdict(list)
    for rank, held in enumerate(tell([keys], group)):
        for key in dict.fromkeys(held):
            holders[key].append(rank)
    turns = {key: ranks[i % len(ranks)] for i, (key, ranks) in enumerate(holders.items())}
    rank, mine = 0 if group is None else group.rank, dict(zip(keys, parts, strict=True))
    return [
        part
        for key, part in mine.items()
        if turns[key] == rank and (len(part.cut) or 0 in part.cut.shape)
    ]


def tell(values: list, group: Group | None) -> list:
    """Return the JSON values of all ranks, in rank order, on every rank."""
    if group is None:
        return values
    line = json.dumps(values).encode() + b"\n"
    every = group.all_gather(np.frombuffer(line, np.uint8).copy(), label="checkpoint")
    return [value for line in every.tobytes().splitlines() for value in json.loads(line)]


def write_parts(library, target: Path, rank: int, parts: list[Part]) -> dict:
    """Write a rank's file; return {} if it has nothing to write, or its entry in the manifest."""
    if not parts:
        return {}
    path, arrays, holds, shapes = target / f"rank-{rank:03d}.safetensors", {}, {}, {}
    for part in parts:
        name = part.cut.name
        key = name if name not in arrays else f"{name}#{len(arrays)}"
        arrays[key] = part.on_host()
        holds[key] = manifest.describe(part.cut) | {"checksum": checksum(arrays[key])}
        if arrays[key].dtype.kind not in "fiub":
            raise ValueError(f"{name} is {arrays[key].dtype}; a checkpoint holds numbers")
        shapes[name] = {"shape": list(part.cut.shape), "dtype": str(arrays[key].dtype)}
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        library.numpy.save_file(arrays, temporary)
        found = finish(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    except library.SafetensorError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(0, str(error)) from error
    return {"file": path.name, "arrays": shapes, "entry": found | {"holds": holds}}


def finish(temporary: Path, path: Path) -> dict:
    """Bring a file to the disk under its name; return its size and its header's checksum."""
    with open(temporary, "rb+") as file:
        os.fsync(file.fileno())
    found = {"bytes": temporary.stat().st_size, "header": checksum(manifest.header(temporary))}
    os.replace(temporary, path)
    sync(path.parent)
    return found


def write(path: Path, data: bytes) -> None:
    """Write a small file: a temporary name, fsync, rename."""
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    os.replace(temporary, path)
    sync(path.parent)


def sync(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def merge(entries: list[dict]) -> dict:
    """Return what the manifest says of arrays and files, given the entries of all ranks."""
    arrays, files = {}, {}
    for entry in filter(None, entries):
        for name, shape in entry["arrays"].items():
            if arrays.setdefault(name, shape) != shape:
                raise ValueError(f"the ranks hold parts of different arrays named {name}")
        files[entry["file"]] = entry["entry"]
    return {"arrays": arrays, "files": files}


def remove_old(folder: Path) -> None:
    """Keep the last checkpoints; remove older ones, and what runs that died have left."""
    kept = list(manifest.whole_ones(folder))[-KEPT:]
    try:
        for step, path in manifest.folders(folder).items():
            if step not in kept:
                remove(path)
    except OSError as error:
        raise ValueError(
            f"cannot remove old checkpoints of {folder}: {error.strerror}; if another run saves "
            "there, give each a folder of its own"
        ) from error


def remove(path: Path) -> None:
    """Remove a checkpoint: first its manifest, so that it never counts without its files."""
    (path / manifest.NAME).unlink(missing_ok=True)
    for file in path.iterdir():
        if manifest.FILE.fullmatch(file.name.removesuffix(TEMPORARY)) or file.suffix == TEMPORARY:
            file.unlink()
    if not any(path.iterdir()):  # else somebody else has put files there
        path.rmdir()
