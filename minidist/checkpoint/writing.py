"""Write a checkpoint so that, whenever a rank dies, a whole one is left.

    every rank tells what it holds          or what is wrong: then all raise the same error, and
                                            nothing is written. What passes is what `load` returns
    temporary name -> fsync -> rename       each rank's file; then the folder is synced
    all files are there                     the ranks tell each other their checksums
    temporary name -> fsync -> rename       the manifest, by the first rank: now it counts
    older ones are removed                  their manifests first; the last two are kept

What several ranks hold is written by one of them, in turn.
"""

import fcntl
import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain, count
from math import prod
from operator import index
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from minidist.backend import Array, as_array
from minidist.checkpoint import manifest
from minidist.checkpoint.manifest import checksum
from minidist.checkpoint.parts import Part, have_all
from minidist.comm import Group
from minidist.errors import WrongInput
from minidist.nn import Slice

MOST_STEPS = 2**63 - 1  # 63 bits
LONGEST = 4096  # bytes of a name: a file's header has all of them
DEEPEST = 100  # dicts and lists in each other: Python's stack holds some 900
RESERVED = "__metadata__"  # in that header
DTYPES = set(
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64".split()
)


def agree(
    folder: Path, parts: list[Part], step: int, about: dict, group: Group | None
) -> list[list[str]]:
    """Return the descriptions of each rank's parts, as JSON.

    ValueError, on every rank, if what one of them has cannot be saved, or does not fit the others'.
    """

    def mine() -> dict:
        number = check_step(step)
        descriptions = [described(part) for part in parts]
        if group is None or group.rank == 0:
            check_about(about)
            check_folder(folder, number, manifest.run_of(about))
        return {"step": number, "parts": descriptions}

    ranks = together(group, mine)
    if len(steps := sorted({rank["step"] for rank in ranks})) > 1:
        raise WrongInput(
            f"the ranks save the steps {steps}; call save with the same on all of them"
        )
    check_arrays([part for rank in ranks for part in rank["parts"]])
    return [[key for key, *_ in rank["parts"]] for rank in ranks]


def together(group: Group | None, act: Callable[[], object]) -> list:
    """Call `act` on every rank; return what each got, JSON, in rank order, on every rank.

    If `act` raises a ValueError on one rank, all raise it: nobody waits for it.
    """
    failure, answer = None, {}
    try:
        answer["got"] = act()
    except ValueError as error:
        failure, answer["wrong"] = error, str(error)
    ranks = tell([answer], group)
    if failure is not None:
        raise failure
    for rank, of_rank in enumerate(ranks):
        if "wrong" in of_rank:
            raise WrongInput(f"{of_rank['wrong']} (rank {rank})")
    return [of_rank["got"] for of_rank in ranks]


def tell(values: list, group: Group | None) -> list:
    """Return the JSON values of all ranks, in rank order, on every rank."""
    if group is None:
        return values
    line = json.dumps(values).encode() + b"\n"
    every = group.all_gather(np.frombuffer(line, np.uint8).copy(), label="checkpoint")
    return [value for line in every.tobytes().splitlines() for value in json.loads(line)]


def check_step(step: int) -> int:
    """Return the number of a step as an int."""
    try:
        number = -1 if isinstance(step, bool) else index(step)
    except TypeError:
        number = -1
    if not 0 <= number <= MOST_STEPS:
        raise WrongInput(f"a step is a whole number from 0 to {MOST_STEPS}, not {step!r:.50}")
    return number


def described(part: Part) -> tuple[str, list[int], str, str]:
    """Return a part's description as JSON; its array's shape, dtype and name."""
    name, values = part.cut.name, part.values
    check_name(name)
    if isinstance(values, getattr(sys.modules.get("numpy.ma"), "MaskedArray", ())):
        raise WrongInput(f"{name} is masked, and a file has no masks; use .filled() or .data")
    dtype = np.dtype(values.dtype).name
    if dtype not in DTYPES:
        kinds = "bool, whole ones, and floats of 16 to 64 bits"
        raise WrongInput(f"{name} is {values.dtype}; a checkpoint holds numbers: {kinds}")
    if values.size != len(part.cut):
        raise WrongInput(f"a part of {name} has {values.size} elements for {len(part.cut)} places")
    shape = list(map(int, part.cut.shape))
    inside = 0 <= part.cut.start <= part.cut.stop <= prod(part.cut.part_shape)
    if not inside or (part.cut.shard is not None and part.cut.shard.indices.min(initial=0) < 0):
        raise WrongInput(f"a part of {name} is outside of the array {shape}")
    return json.dumps(manifest.describe(part.cut)), shape, dtype, name


def check_name(name: str) -> None:
    """Raise ValueError unless a file can name an array so."""
    if not isinstance(name, str) or name == RESERVED:
        raise WrongInput(f"{name!r:.50} is no name of an array; use another string")
    try:
        length = len(name.encode())
    except UnicodeEncodeError:
        raise WrongInput(f"{name!r:.50} is no name of an array: UTF-8 cannot write it") from None
    if length > LONGEST:
        raise WrongInput(f"{name[:50]}... has {length} bytes; a name has {LONGEST} at most")


def check_about(about: dict) -> None:
    """Raise ValueError unless JSON returns the value as it was."""
    try:
        json.loads(json.dumps(about))
    except (TypeError, ValueError, RecursionError) as error:
        raise WrongInput(f"about is to be JSON: {error}") from error
    if not isinstance(about, dict) or not has_string_keys(about, DEEPEST):
        raise WrongInput(
            "about is to be a dict whose keys, and those in it, are strings, and no more than "
            f"{DEEPEST} in each other"
        )
    if "run" in about and about["run"] != manifest.run_of(about):
        raise WrongInput("about's run is to be a list of names: Saved.run")


def has_string_keys(value, deepest: int) -> bool:
    """Return whether a JSON value has string keys alone, and at most `deepest` levels."""
    if not isinstance(value, dict | list | tuple):
        return True
    if isinstance(value, dict) and not all(isinstance(key, str) for key in value):
        return False  # JSON would make it a string
    inner = value.values() if isinstance(value, dict) else value
    return deepest > 0 and all(has_string_keys(member, deepest - 1) for member in inner)


def check_folder(folder: Path, step: int, run: list[str]) -> None:
    """Raise ValueError if a step cannot be saved there, or is not after those that are there.

    run  names: the newest that is there has to be of this run, or of one that it has gone on from
    """
    target = folder / manifest.folder_of(step)
    try:
        os.lstat(target / f"rank-000.safetensors{manifest.TEMPORARY}")  # is its path too long?
    except FileNotFoundError:
        pass
    except OSError as error:
        raise WrongInput(f"cannot write to the folder {target}: {error.strerror}") from error
    if target.is_symlink():
        raise WrongInput(f"{target} is a link, and none is followed; remove it")
    checkpoints = manifest.whole_ones(folder)
    newest = max(checkpoints, default=-1)
    if checkpoints:
        check_run(checkpoints[newest], run)
    if step == newest:
        raise WrongInput(f"{target} is there already; resume from it, or use another folder")
    if step < newest:
        raise WrongInput(
            f"{folder} has a checkpoint of step {newest}, and step {step} is before it; use "
            "another folder, or first rename newer ones: checkpoint.set_aside"
        )


def check_run(path: Path, run: list[str]) -> None:
    """Raise ValueError if a checkpoint is neither of a run nor of one that it has gone on from."""
    if not manifest.is_of(path, run):
        raise WrongInput(
            f"{path} is of another run; use another folder, or go on from it with --resume, or in "
            "a program with about={'run': Saved(path).run}"
        )


def check_arrays(descriptions: list[tuple[str, list[int], str, str]]) -> None:
    """Raise ValueError unless parts with one name are of one array, and have all its elements."""
    arrays: dict[str, tuple[list[int], str]] = {}
    parts: dict[str, set[str]] = defaultdict(set)
    for key, shape, dtype, name in descriptions:
        if arrays.setdefault(name, (shape, dtype)) != (shape, dtype):
            raise WrongInput(f"the ranks hold parts of different arrays named {name}")
        parts[name].add(key)
    for name, (shape, _) in arrays.items():
        if not have_all([json.loads(key) for key in parts[name]], shape):
            raise WrongInput(f"the ranks do not hold all {prod(shape)} elements of {name}")


KEPT = 2  # checkpoints
WHOLE = "; those before it, if any, are whole"
OTHERS = "; if another run saves there, give each a folder of its own"


def save(
    folder: str | Path,
    state: Mapping[str, Array] | list[Part],
    step: int,
    group: Group | None = None,
    about: dict | None = None,
) -> None:
    """Write a checkpoint; it counts once its manifest is there. Keep it and the one before.

    state  arrays by name, or this rank's parts of them. All ranks of the group call this
    about  what the manifest says in addition, JSON; rank 0's is taken. Its "run" is
           whose checkpoints these are (manifest.py)

    ValueError, on every rank and before anything is written, if the folder has a checkpoint of this
    step or of a later one, or of another run, or if an array, a name or `about` cannot be saved
    (see `agree`). ValueError if the disk is full; the checkpoints before are whole.
    """
    folder, about = manifest.place(folder), {} if about is None else about
    parts = state if isinstance(state, list) else whole_parts(state)
    write_checkpoint(folder, own_parts(folder, parts, step, about, group), step, about, group)


def write_checkpoint(
    folder: Path, parts: list[Part], step: int, about: dict, group: Group | None
) -> None:
    """Write each rank's own parts (`own_parts`), then the manifest; remove what is too old.

    The first rank prepares the checkpoint's folder, and holds its lock until all is done (the
    ExitStack of `prepare`). Then each rank writes its parts, and when all ranks have, the first one
    completes the checkpoint, given their entries. A ValueError of one rank is raised by all.
    """
    rank, step = 0 if group is None else group.rank, index(step)
    target, is_first = folder / manifest.folder_of(step), rank == 0
    with ExitStack() as stack:
        together(group, lambda: prepare(folder, step, about, stack) if is_first else None)
        entries = together(group, lambda: write_parts(target, rank, parts))
        together(group, lambda: complete(target, step, about, entries) if is_first else None)


def whole_parts(state: Mapping[str, Array]) -> list[Part]:
    """Return whole arrays as parts."""
    arrays = {name: as_array(array) for name, array in state.items()}
    return [Part(Slice.whole(name, tuple(a.shape)), a) for name, a in arrays.items()]


def own_parts(
    folder: Path, parts: list[Part], step: int, about: dict, group: Group | None
) -> list[Part]:
    """Return the parts that this rank is to write: each is written by one of its holders.

    ValueError, on every rank, if something cannot be saved.
    """
    holders, every = defaultdict(list), agree(folder, parts, step, about, group)
    for rank, keys in enumerate(every):
        for key in dict.fromkeys(keys):
            holders[key].append(rank)
    turns = {key: ranks[i % len(ranks)] for i, (key, ranks) in enumerate(holders.items())}
    rank = 0 if group is None else group.rank
    mine = dict(zip(every[rank], parts, strict=True))
    return [
        part
        for key, part in mine.items()
        if turns[key] == rank and (len(part.cut) or 0 in part.cut.shape)
    ]


def prepare(folder: Path, step: int, about: dict, stack: ExitStack) -> None:
    """Make an empty folder for a checkpoint; what a run that died has left there is removed.

    Until the stack is closed, no other run saves; an error then removes what was begun.
    """
    target = folder / manifest.folder_of(step)
    with manifest.in_words(f"write to the folder {target}"):
        folder.mkdir(parents=True, exist_ok=True)
        stack.enter_context(alone_in(folder))
        check_folder(folder, step, manifest.run_of(about))  # another may have saved since
        target.mkdir(exist_ok=True)
        remove(target)
        target.mkdir(exist_ok=True)
        sync(folder)

    def undo(kind: type | None, *_) -> None:  # a ValueError: all ranks have stopped to write
        if kind is WrongInput and not (target / manifest.NAME).exists():
            remove(target)

    stack.push(undo)


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Let no other run of this machine save in a folder; ValueError if one does at this moment."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise WrongInput(
            f"another run is saving in {folder}; give each a folder of its own"
        ) from error
    except OSError:  # a file system without locks, such as some network's
        pass
    try:
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # also where a fork has the descriptor, too
        os.close(descriptor)


def write_parts(target: Path, rank: int, parts: list[Part]) -> dict:
    """Write a rank's file; return {} if it has nothing to write, or its entry in the manifest."""
    if not parts:
        return {}
    path, holds, shapes = target / f"rank-{rank:03d}.safetensors", {}, {}
    arrays: dict[str, np.ndarray] = {}
    for part in parts:
        key = free(part.cut.name, arrays)
        arrays[key] = part.on_host()
        holds[key] = manifest.describe(part.cut) | {"checksum": checksum(arrays[key])}
        shape = list(map(int, part.cut.shape))
        shapes[part.cut.name] = {"shape": shape, "dtype": arrays[key].dtype.name}
    with manifest.in_words(f"write the checkpoint {target}", WHOLE), new_file(path) as temporary:
        try:
            save_file(arrays, temporary)
        except SafetensorError as error:
            raise OSError(0, str(error)) from error
        header = checksum(manifest.header(temporary))
        entry = {"bytes": temporary.stat().st_size, "header": header, "holds": holds}
    return {"file": path.name, "arrays": shapes, "entry": entry}


def free(name: str, taken: Collection[str]) -> str:
    """Return the name, or one like it that is not taken."""
    numbered = (f"{name}#{number}" for number in count(1))
    return next(key for key in chain([name], numbered) if key not in taken)


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yield a temporary name to write to; then bring the file to the disk, under its own name.

    The temporary name is the file's with manifest.TEMPORARY at its end. First the content is on the
    disk, then it gets its own name, then the folder is synced. An OSError leaves no temporary file,
    and is raised; so is the error if that file is there already.
    """
    temporary = path.with_name(path.name + manifest.TEMPORARY)
    try:
        temporary.touch(exist_ok=False)
        mode = temporary.stat().st_mode  # safetensors' own file is for its owner alone
        yield temporary
        os.chmod(temporary, mode & 0o777)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def sync(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def complete(target: Path, step: int, about: dict, entries: list[dict]) -> None:
    """Write the manifest, given the entries of all ranks; then remove what is too old."""
    folder, entries = target.parent, [entry for entry in entries if entry]
    written = {"format": manifest.FORMAT, "version": manifest.VERSION, "step": step}
    arrays = {name: shape for entry in entries for name, shape in entry["arrays"].items()}
    files = {entry["file"]: entry["entry"] for entry in entries}
    written |= {"about": about, "arrays": arrays, "files": files}
    with manifest.in_words(f"write the checkpoint {target}", WHOLE):
        with new_file(target / manifest.NAME) as temporary:
            temporary.write_bytes(manifest.encode(written))
        sync(folder)
    remove_old(folder, step, manifest.run_of(about))


def remove_old(folder: Path, step: int, run: list[str]) -> None:
    """Keep the checkpoint of a step and those just before it; remove what is older than these.

    run  names: what is whole and of another run stays, and so does what is newer

    What runs that died have left is removed, too.
    """
    with manifest.in_words(f"remove old checkpoints of {folder}", OTHERS):
        checkpoints = manifest.whole_ones(folder)
        others = [number for number, path in checkpoints.items() if not manifest.is_of(path, run)]
        kept = [number for number in checkpoints if number <= step and number not in others][-KEPT:]
        for number, path in manifest.folders(folder).items():
            if number < step and number not in [*kept, *others]:
                remove(path)


def remove(path: Path) -> None:
    """Remove a checkpoint: first its manifest, so that it never counts without its files.

    Only files that have the names of ours are removed (manifest.is_written), half-written ones,
    too; then the folder, if it is empty. A link to a folder stays; a link with one of these names
    is removed, and what it leads to stays.
    """
    if path.is_symlink():
        return
    for file in [path / manifest.NAME, *path.iterdir()]:
        if manifest.is_written(file.name) and (file.is_symlink() or file.is_file()):
            file.unlink()
            if file.name == manifest.NAME:
                sync(path)  # also if the power fails now
    if not any(path.iterdir()):  # else somebody else has put files there
        path.rmdir()


def set_aside(folder: str | Path, after: int) -> list[Path]:
    """Rename the checkpoints after a step, so that a run can go on from it; return their new paths.

    step-00000200 -> aside-step-00000200: it is neither loaded nor removed until it is renamed back.

    ValueError if one of them is of a run that has not gone on from that step's.
    """
    folder, moved = manifest.place(folder), []
    with manifest.in_words(f"rename checkpoints of {folder}"), alone_in(folder):
        checkpoints = manifest.whole_ones(folder)
        newer = {step: path for step, path in checkpoints.items() if step > after}
        for path in newer.values():
            run = manifest.run_at(path)
            if run and after in checkpoints and not manifest.is_of(checkpoints[after], run):
                raise WrongInput(f"{path} is of another run; use another folder for this one")
        for path in newer.values():
            names = [other.name for other in folder.iterdir()]
            new = path.with_name(free(f"aside-{path.name}", names))
            moved.append(path.rename(new))
        if moved:
            sync(folder)
    return moved
