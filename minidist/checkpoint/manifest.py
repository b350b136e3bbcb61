"""The manifest of a checkpoint: a JSON object, how it is written and read, and its checksums.

    {"format": "minidist checkpoint", "version": 2, "step": 200, "about": {...},
     "arrays": {"head.norm.gain": {"shape": [64], "dtype": "float32"}, ...},
     "files": {"rank-000.safetensors": {"bytes": 4096, "header": "9a3f00c1d2e4a5b6",
               "holds": {"head.norm.gain": {"array": "head.norm.gain", "axis": null, "runs": null,
                                            "start": 0, "stop": 32,
                                            "checksum": "77e0b3d210c5f46a"}}}},
     "checksum": "01c2ffe09bb8a37d"}

A file's key names a vector or an array in it; its entry says which elements of which global array
these are (see nn.Slice). Every byte has a checksum: a file's header and each of its arrays, and the
manifest, whose checksum covers the rest of it.

"about" is what the saver says in addition. Its "run" is a list of names: of the run that saved, the
last one, and before it of the runs that it has gone on from, each with the step of that checkpoint:
["1f0c@200", "9a3e"]. No other run saves in the folder.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np

from minidist.errors import WrongInput
from minidist.nn import Shard, Slice

ROWS, COLUMNS = 64, 513


def checksum(data: bytes | np.ndarray) -> str:
    """Return a checksum of an array's bytes at the speed of memory, 16 hexadecimal digits.

    It is SHA-256 of the sums of columns, and of the bytes left over:

        w0    w1    ...  w512       the words of 8 bytes, in rows of 513
        w513  w514  ...  w1025
        ...
        s0    s1    ...  s512       every 64 rows, modulo 2^64

    Up to 4,104 damaged bytes side by side are surely found: they are in different columns, so that
    a sum changes. (If they begin inside a word, the first and the last word share a column; one
    differs in its high bytes only, the other in its low bytes only.) A row is not as long as a page
    or a sector of a disk, so that pages which change places are in other columns. On two cores of
    an AMD EPYC server 200 MB take 20 ms of a core; SHA-256 alone takes 137.
    """
    data = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data
    data = data.reshape(-1).view(np.uint8)
    blocks = len(data) // (8 * ROWS * COLUMNS)
    end = blocks * 8 * ROWS * COLUMNS
    sums = data[:end].view("<u8").reshape(blocks, ROWS, COLUMNS).sum(axis=1)
    digest = hashlib.sha256(sums.astype("<u8", copy=False).data)
    digest.update(data[end:].data)
    return digest.hexdigest()[:16]


FORMAT, VERSION = "minidist checkpoint", 2
NAME, TEMPORARY = "manifest.json", ".tmp"
FOLDER = re.compile(r"step-([0-9]{8,})")
FILE = re.compile(r"rank-[0-9]{3,}\.safetensors")
BEGUN = re.compile(r"\.tmp[A-Za-z0-9]{6}")  # what the library writes before it takes our name


class Damaged(WrongInput):
    """A file of a checkpoint is not what was written."""


@contextmanager
def in_words(doing: str, remedy: str = "") -> Iterator[None]:
    """Raise an OSError again as a ValueError: what cannot be done, why, and what is left to do."""
    try:
        yield
    except OSError as error:
        raise WrongInput(f"cannot {doing}: {error.strerror or error}{remedy}") from error


def place(folder: str | Path) -> Path:
    """Return the path of a folder of checkpoints."""
    if not str(folder) or "\0" in str(folder):
        raise WrongInput(f"{str(folder)!r} is no folder; the one where you are is '.'")
    return Path(folder)


def run_of(about: dict) -> list[str]:
    """Return the names of a run, given its manifest's "about"; [""] if it has no name."""
    names = about.get("run") or [""]
    return names if isinstance(names, list) and {*map(type, names)} == {str} else [""]


def run_at(path: Path) -> list[str]:
    """Return the names of the run that saved a checkpoint; [] if its manifest is damaged."""
    try:
        return run_of(read(path / NAME)["about"])
    except ValueError:
        return []


def is_of(path: Path, run: list[str]) -> bool:
    """Return whether a checkpoint is of a run, or of one that it went on from, or does not say.

    What another run has saved after the step at which this one left it is not of this run.
    """
    names = run_at(path)
    if not names or names[-1] in run:
        return True
    left = dict(name.rsplit("@", 1) for name in run if re.search(r"@\d+$", name))
    return names[-1] in left and int(path.name.rsplit("-", 1)[1]) <= int(left[names[-1]])


def folder_of(step: int) -> str:
    """Return the name of a checkpoint's folder."""
    return f"step-{step:08d}"


def is_written(name: str) -> bool:
    """Return whether a checkpoint's file has this name, for good or while it is written."""
    if BEGUN.fullmatch(name):
        return True
    name = name.removesuffix(TEMPORARY)
    return name == NAME or bool(FILE.fullmatch(name))


def folders(folder: Path) -> dict[int, Path]:
    """Return the folders of checkpoints by step, oldest first, whole or not."""
    with in_words(f"read the folder {folder}"):
        try:
            matches = {path: FOLDER.fullmatch(path.name) for path in folder.iterdir()}
        except FileNotFoundError:
            return {}
        steps = sorted((int(match[1]), path) for path, match in matches.items() if match)
        return {n: path for n, path in steps if path.name == folder_of(n) and path.is_dir()}


def whole_ones(folder: Path) -> dict[int, Path]:
    """Return the folders that have a manifest, by step, oldest first: only those count."""
    with in_words(f"read the folder {folder}"):
        return {step: path for step, path in folders(folder).items() if (path / NAME).is_file()}


def describe(cut: Slice) -> dict:
    """Return a slice as JSON; a part that is the whole array is described as such."""
    shard = cut.shard
    if shard is not None and np.array_equal(shard.indices, np.arange(shard.full)):
        shard = None
    where: dict[str, object] = {"axis": None, "runs": None}
    if shard is not None:
        indices = shard.indices.tolist()
        breaks = [i for i, (a, b) in enumerate(pairwise(indices), 1) if b != a + 1]
        ends = pairwise([0, *breaks, len(indices)])
        runs = [[indices[a], indices[b - 1] + 1] for a, b in ends if a < b]
        where = {"axis": shard.axis, "runs": runs}
    return {"array": cut.name, **where, "start": cut.start, "stop": cut.stop}


def slice_of(described: dict, shape: Sequence[int]) -> Slice:
    """Return the slice that `describe` has described."""
    axis, shard = described["axis"], None
    if axis is not None:
        indices = np.concatenate([np.arange(0), *(np.arange(a, b) for a, b in described["runs"])])
        shard = Shard(axis, indices, shape[axis])
    return Slice(described["array"], tuple(shape), shard, described["start"], described["stop"])


def header(path: Path) -> bytes:
    """Return the header of a safetensors file: 8 bytes, n, and n bytes of JSON."""
    with open(path, "rb") as file:
        length = file.read(8)
        return length + file.read(min(int.from_bytes(length, "little"), path.stat().st_size))


def encode(manifest: dict) -> bytes:
    """Return the text of a manifest, with its checksum."""
    return json.dumps(manifest | {"checksum": own_checksum(manifest)}, indent=1).encode()


def own_checksum(manifest: dict) -> str:
    rest = {key: value for key, value in manifest.items() if key != "checksum"}
    return checksum(json.dumps(rest, sort_keys=True).encode())


def read_json(path: Path):
    """Return the value in a file of JSON; ValueError if it cannot be read or is none."""
    with in_words(f"read {path}"):
        return json_in(path.read_bytes(), path)


def json_in(text: bytes, path: Path):
    """Return the value that the text of a file holds; ValueError if it is none, or too deep."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{path} is damaged: it is no JSON ({error})") from error


def read(path: Path) -> dict:
    """Return the manifest in a file; ValueError if it is damaged, foreign or of a newer version."""
    manifest = read_json(path)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise WrongInput(f"{path} is foreign: it is not the manifest of a minidist checkpoint")
    if manifest.get("version") != VERSION:
        raise WrongInput(
            f"{path} has version {manifest.get('version')}, and this minidist reads version "
            f"{VERSION}; use the minidist that wrote it"
        )
    if manifest.get("checksum") != own_checksum(manifest):
        raise Damaged(f"{path} is damaged: its checksum is wrong")
    if missing := {"step", "about", "arrays", "files"} - manifest.keys():
        raise Damaged(f"{path} is damaged: it has no {min(missing)}")
    if path.parent.name != folder_of(manifest["step"]):
        raise WrongInput(f"{path} is of step {manifest['step']}: its folder has got another name")
    if strange := [name for name in manifest["files"] if not FILE.fullmatch(name)]:
        raise WrongInput(f"{path} names {strange[0]!r}, which is no file of a checkpoint")
    return manifest
