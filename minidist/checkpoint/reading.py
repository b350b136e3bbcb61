"""Read a checkpoint: the newest one that has a manifest, whole arrays or any slices of them."""

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from minidist.checkpoint import manifest
from minidist.checkpoint.manifest import checksum
from minidist.errors import WrongInput
from minidist.nn import Slice
from minidist.nn.shard import Piece, pieces

PAGE, THREADS = 4096, 2  # bytes of memory; threads that compare checksums


def load(folder: str | Path, step: int | None = None) -> tuple[dict[str, np.ndarray], int]:
    """Return (state, step) of the newest checkpoint: all arrays by name, from all ranks.

    step  of another checkpoint than the newest

    ValueError that names the file if one is damaged, truncated, missing, foreign or newer, and says
    which checkpoint before it is whole.
    """
    saved = Saved.newest(folder, step)
    with advised(saved.path):
        for file in saved.files:
            saved.read_all(file)
        with ThreadPoolExecutor(THREADS) as threads:
            arrays = threads.map(saved.whole, saved.shapes)
            return dict(zip(saved.shapes, arrays, strict=True)), saved.step


@contextmanager
def advised(path: Path) -> Iterator[None]:
    """If a checkpoint turns out to be damaged, say which one before it is whole."""
    try:
        yield
    except manifest.Damaged as error:
        raise WrongInput(f"{error}; {advice(path)}") from error


def advice(path: Path) -> str:
    """Describe how to go on where the checkpoint at this path is damaged."""
    damaged = int(path.name.removeprefix("step-"))
    for step, before in reversed(manifest.whole_ones(path.parent).items()):
        if step < damaged:
            with suppress(ValueError):  # it is damaged, too
                Saved(before).read_and_forget()
                return (
                    f"the checkpoint of step {step} is whole: go on from it with --resume-from "
                    f"{step}, or in a program load(folder, step={step})"
                )
    return "no checkpoint before it is whole; begin again in another folder"


class Saved:
    """A checkpoint on the disk. A file is checked when it is opened, an array when it is read.

    path    its folder
    step    when it was saved; about: what the manifest says in addition
    shapes  of the global arrays, by name
    run     the names of the run that saved it, see manifest.py
    """

    def __init__(self, path: Path):
        self.path = path
        saved = manifest.read(path / manifest.NAME)
        self.step, self.about, self.files = saved["step"], saved["about"], saved["files"]
        self.shapes = {name: tuple(a["shape"]) for name, a in saved["arrays"].items()}
        self.dtypes = {name: np.dtype(a["dtype"]) for name, a in saved["arrays"].items()}
        self.run = manifest.run_of(self.about)
        self.opened: dict[str, dict] = {}
        self.contents: dict[str, np.ndarray] = {}  # of the files that were read as a whole
        self.stored: dict[str, list[tuple[str, str, dict]]] = {name: [] for name in self.shapes}
        for file, entry in self.files.items():
            for key, described in entry["holds"].items():
                self.stored[described["array"]].append((file, key, described))

    @classmethod
    def newest(cls, folder: str | Path, step: int | None = None) -> "Saved":
        """Return a folder's newest checkpoint, or a step's; ValueError if there is none."""
        checkpoints = manifest.whole_ones(manifest.place(folder))
        if not checkpoints:
            raise WrongInput(f"{folder} has no checkpoint; leave --resume out to begin one")
        if step is not None and step not in checkpoints:
            steps = ", ".join(map(str, checkpoints))
            raise WrongInput(f"{folder} has no checkpoint of step {step}, but of {steps}; use that")
        path = checkpoints[max(checkpoints) if step is None else step]
        with advised(path):
            return cls(path)

    def check(self) -> None:
        """Read all files; ValueError if one is damaged, and which checkpoint before it is whole."""
        with advised(self.path):
            self.read_and_forget()

    def read_and_forget(self) -> None:
        """Read all files; raise Damaged if a byte is not as it was written."""
        for name, stored in self.stored.items():
            for file, key, described in stored:
                self.read(file, key, manifest.slice_of(described, self.shapes[name]))

    def whole(self, name: str) -> np.ndarray:
        """Return a global array."""
        shape = self.shapes[name]
        return self.part(Slice.whole(name, shape)).reshape(shape)

    def part(self, cut: Slice) -> np.ndarray:
        """Return the elements of a slice: a vector."""
        if cut.name not in self.shapes:
            raise WrongInput(f"{self.path} has no array {cut.name}: it is of another model")
        shape = self.shapes[cut.name]
        if cut.shape != shape:
            raise WrongInput(
                f"{cut.name} is {list(shape)} in {self.path}, and {list(cut.shape)} in the model"
            )
        wanted = manifest.describe(cut)
        for file, key, described in self.stored[cut.name]:
            if described == wanted | {"checksum": described["checksum"]}:
                return self.read(file, key, cut).reshape(-1)
        return self.join(cut)

    def join(self, cut: Slice) -> np.ndarray:
        """Return the elements of a slice, put together from the slices that the files hold."""
        stored = self.stored[cut.name]
        cuts = [manifest.slice_of(described, cut.shape) for _, _, described in stored]
        vector, missing = np.zeros(len(cut), self.dtypes[cut.name]), cut.positions() >= 0
        is_whole = cut.shard is None and len(cut) == math.prod(cut.shape)
        parts = pieces_of_all(cuts) if is_whole else pieces(cut, cuts)
        for piece in parts:
            file, key, _ = stored[piece.number]
            read = self.read(file, key, cuts[piece.number])
            vector[piece.places] = read.reshape(-1)[piece.taken]
            missing[piece.places] = False
        if missing.any():
            raise manifest.Damaged(
                f"the files of {self.path} lack {missing.sum()} elements of {cut.name}"
            )
        return vector

    def read(self, file: str, key: str, cut: Slice) -> np.ndarray:
        """Return one array of a file, once its checksum is right.

        It is read into its own memory: the library's get_tensor maps the file, which takes longer
        where the file has to come from the disk.
        """
        path, dtype = self.path / file, self.dtypes[cut.name]
        begin, end = self.open(file)[key]
        if end - begin != len(cut) * dtype.itemsize:
            raise manifest.Damaged(f"{path} has another {key} than its manifest says")
        if file in self.contents:
            array = self.contents[file][begin:end]
        else:
            array = np.fromfile(path, np.uint8, end - begin, offset=begin)
        if checksum(array) != self.files[file]["holds"][key]["checksum"]:
            raise manifest.Damaged(f"{path} is damaged: the checksum of {key} is wrong")
        return array.view(dtype)

    def read_all(self, file: str) -> None:
        """Read a file in one piece; the arrays of it that `read` returns are views of that."""
        # One array of 200 MB is in memory after 600 page faults, 12 of 16 MB are after 6,200.
        self.open(file)
        size = self.files[file]["bytes"]
        memory = np.empty(size + PAGE, np.uint8)
        # It begins half a page behind where the file begins in its own pages. Where memory is
        # copied to an address a few bytes behind, each load waits for a store: 3 times as long.
        begin = (PAGE // 2 - memory.ctypes.data) % PAGE
        self.contents[file] = memory[begin : begin + size]
        with open(self.path / file, "rb") as source:
            source.readinto(self.contents[file].data)

    def open(self, file: str) -> dict[str, tuple[int, int]]:
        """Return where each array of a file begins and ends, once its size and header are right."""
        if file not in self.opened:
            path = self.path / file
            header = check(path, self.files[file])
            placed = manifest.json_in(header[8:], path)
            if missing := sorted(set(self.files[file]["holds"]) - set(placed)):
                raise manifest.Damaged(f"{path} lacks {missing[0]}, which its manifest names")
            self.opened[file] = {
                key: tuple(len(header) + end for end in entry["data_offsets"])
                for key, entry in placed.items()
                if key != "__metadata__"
            }
        return self.opened[file]


def pieces_of_all(saved: Sequence[Slice]) -> Iterator[Piece]:
    """Yield the pieces of the whole array, in C order: faster, but copies are read again."""
    for number, cut in enumerate(saved):
        at = cut.positions()
        real = np.flatnonzero(at >= 0)
        yield Piece(number, real, at[real])


def check(path: Path, entry: dict) -> bytes:
    """Return a file's header; ValueError if it is missing or truncated, or its header damaged."""
    with manifest.in_words(f"read {path}"):
        try:
            size, header = path.stat().st_size, manifest.header(path)
        except FileNotFoundError as error:
            raise manifest.Damaged(f"{path} is missing") from error
    if size != entry["bytes"]:
        how = "truncated" if size < entry["bytes"] else "damaged"
        raise manifest.Damaged(f"{path} is {how}: {size} bytes, not {entry['bytes']}")
    if checksum(header) != entry["header"]:
        raise manifest.Damaged(f"{path} is damaged: the checksum of its header is wrong")
    return header
