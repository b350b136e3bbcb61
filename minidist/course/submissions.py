"""Read what students hand in, folders and .zip files: a lab's files of a known size, no others."""

import contextlib
import io
import zipfile
from collections.abc import Callable
from pathlib import Path

from minidist.course.sandbox.untrusted import contents, plain
from minidist.errors import WrongInput

LABEL = "lab.txt"  # has a line with the lab's name, and one with the student's
LARGEST, LARGEST_ZIP = 1 << 20, 1 << 24  # bytes


def submissions(folder: Path) -> list[Path]:
    """Return the folders and .zip files in a folder; none if it is a submission itself."""
    if (folder / "minidist").is_dir():
        return []
    inner = (path for path in folder.glob("[!.]*") if path.name != "__MACOSX")
    return sorted(path for path in inner if path.suffix.lower() == ".zip" or path.is_dir())


def check_no_link(path: Path) -> None:
    """Raise ValueError if a class's submission is a link: it could lead to another one."""
    if path.is_symlink():
        raise WrongInput("it is a link; put the folder or .zip itself in its place")


def holder(folder: Path) -> Path | None:
    """Return the folder with minidist/: this one or, as in zipped folders, the only one in it."""
    if (folder / "minidist").is_dir():
        return folder
    inner = [path.parent for path in folder.glob("*/minidist") if path.is_dir()]
    inner = [path for path in inner if not path.is_symlink() and path.name != "__MACOSX"]
    return inner[0] if len(inner) == 1 else None


def handed_in(path: Path, files: list[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return {file: source} of a lab's files, and {file: why} of those that cannot be used.

    A missing file is in neither. minidist/ is in the folder or .zip, or in its only folder; or the
    folder has a .zip, as Moodle gives them. ValueError: there is no such path or no minidist/.
    """
    try:
        read = _opened(path, files)
    except ValueError as error:  # it names the path, which others have chosen
        raise WrongInput(plain(str(error))) from None
    found, unusable = {}, {}
    for file in files:
        try:
            found[file] = _text(read(f"minidist/{file}"))
        except (FileNotFoundError, KeyError):
            continue
        except Exception as error:  # whatever it is that they have thought of
            unusable[file] = str(error)
    return found, unusable


def label(path: Path) -> tuple[str, str]:
    """Return the names of the lab and of the student that lab.txt has beside minidist/, or ""."""
    lines = []
    with contextlib.suppress(Exception):  # of any kind, as above
        lines = _text(_opened(path, [])(LABEL)).removeprefix("\ufeff").splitlines()
    lab, student, *_ = [*lines, "", ""]
    return lab.strip()[:100], student


def _opened(path: Path, files: list[str]) -> Callable[[str], bytes | None]:
    if not path.exists():
        raise WrongInput(f"there is no folder {path}")
    root = holder(path)
    zips = sorted(path.glob("*.zip")) if path.is_dir() else [path]
    if root is None and not zips:
        wanted = ", ".join(f"minidist/{file}" for file in files)
        raise WrongInput(f"{path} has no folder minidist; hand in {wanted}, in these folders")
    return _of_zip(zips[0]) if root is None else _of_folder(root.resolve())


def _of_folder(root: Path) -> Callable[[str], bytes | None]:
    def read(name: str) -> bytes | None:
        path = (root / name).resolve(strict=True)
        if not path.is_relative_to(root):
            raise WrongInput("it is a link that leads out of the folder")
        return contents(path, LARGEST)

    return read


def _of_zip(path: Path) -> Callable[[str], bytes]:
    """Open a .zip in memory. Of each file, no more than LARGEST + 1 bytes are unpacked."""
    whole = contents(path, LARGEST_ZIP) or b""
    if len(whole) > LARGEST_ZIP:
        raise WrongInput(f"{path.name} has more than {LARGEST_ZIP >> 20} MB")
    try:
        archive = zipfile.ZipFile(io.BytesIO(whole))
        names = [name.partition("minidist/") for name in archive.namelist()]
    except Exception as error:  # whatever it is that they have thought of
        raise WrongInput(f"{path.name} cannot be unpacked: {error}") from None
    roots = {before for before, here, _ in names if here and before.count("/") < 2}
    roots = {""} if "" in roots else {r for r in roots if r[-1] == "/"} - {"__MACOSX/"}
    if len(roots) != 1:
        raise WrongInput(f"{path.name} has no folder minidist, or several")

    def read(name: str) -> bytes:
        entry = archive.getinfo(min(roots) + name)
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise WrongInput("it is not packed by Deflate")  # zipfile unpacks others without limit
        with archive.open(entry) as file:
            return file.read(LARGEST + 1)

    return read


def _text(content: bytes | None) -> str:
    if content is None:
        raise WrongInput("it is not a regular file, or it cannot be read")
    if len(content) > LARGEST:
        raise WrongInput(f"it has more than {LARGEST} bytes")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise WrongInput(f"it is not UTF-8: {error.reason} at byte {error.start}") from None
