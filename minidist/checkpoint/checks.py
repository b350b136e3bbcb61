"""What may be saved: asked on all ranks before the first byte is written.

    every rank      its step; the name, dtype and length of each array
    the first rank  the folder, and what the manifest is to say in addition
    all ranks       tell each other what they hold, or what is wrong: all raise the same error

What passes here is what `load` returns.
"""

import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable
from math import prod
from operator import index
from pathlib import Path

import numpy as np

from minidist.checkpoint import manifest
from minidist.checkpoint.parts import Part
from minidist.checkpoint.resharding import have_all
from minidist.comm import Group
from minidist.errors import WrongInput

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
    """Return what each rank holds: the descriptions of its parts, as JSON.

    ValueError, on every rank, if what one of them has cannot be saved, or does not fit the others'.
    """

    def mine() -> dict:
        number = check_step(step)
        held = [described(part) for part in parts]
        if group is None or group.rank == 0:
            check_about(about)
            check_folder(folder, number, manifest.run_of(about))
        return {"step": number, "held": held}

    ranks = together(group, mine)
    if len(steps := sorted({rank["step"] for rank in ranks})) > 1:
        raise WrongInput(
            f"the ranks save the steps {steps}; call save with the same on all of them"
        )
    check_arrays([entry for rank in ranks for entry in rank["held"]])
    return [[key for key, *_ in rank["held"]] for rank in ranks]


def together(group: Group | None, act: Callable[[], object]) -> list:
    """Call `act` on every rank; return what each got, JSON, in rank order, on every rank.

    If `act` raises a ValueError on one rank, all raise it: nobody waits for it.
    """
    own, answer = None, {}
    try:
        answer["got"] = act()
    except ValueError as error:
        own, answer["wrong"] = error, str(error)
    ranks = tell([answer], group)
    if own is not None:
        raise own
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
    """Raise ValueError unless JSON can say it, and says it again as it was."""
    try:
        json.loads(json.dumps(about))
    except (TypeError, ValueError, RecursionError) as error:
        raise WrongInput(f"about is to be JSON: {error}") from error
    if not isinstance(about, dict) or not has_words(about, DEEPEST):
        raise WrongInput(
            "about is to be a dict whose keys, and those in it, are strings, and no more than "
            f"{DEEPEST} in each other"
        )
    if "run" in about and about["run"] != manifest.run_of(about):
        raise WrongInput("about's run is to be a list of names: Saved.run")


def has_words(value, deepest: int) -> bool:
    """Return whether every key in a JSON value is a string: another would become one."""
    if not isinstance(value, dict | list | tuple):
        return True
    if isinstance(value, dict) and not all(isinstance(key, str) for key in value):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return deepest > 0 and all(has_words(held, deepest - 1) for held in inner)


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
    whole = manifest.whole_ones(folder)
    newest = max(whole, default=-1)
    if whole:
        check_run(whole[newest], run)
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


def check_arrays(held: list[tuple[str, list[int], str, str]]) -> None:
    """Raise ValueError unless parts with one name are of one array, and have all its elements."""
    arrays: dict[str, tuple[list[int], str]] = {}
    parts: dict[str, set[str]] = defaultdict(set)
    for key, shape, dtype, name in held:
        if arrays.setdefault(name, (shape, dtype)) != (shape, dtype):
            raise WrongInput(f"the ranks hold parts of different arrays named {name}")
        parts[name].add(key)
    for name, (shape, _) in arrays.items():
        if not have_all([json.loads(key) for key in parts[name]], shape):
            raise WrongInput(f"the ranks do not hold all {prod(shape)} elements of {name}")
