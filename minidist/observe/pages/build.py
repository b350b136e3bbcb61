"""The pages as part of the site: copied, with their first answers, and with Pyodide beside them.

build(folder)      folder/*.html                 of static/, in frame.html, with its first answer
                   folder/*.js, *.css, *.svg     as in static/
                   folder/answers/*.json         answers, where they need NumPy or ranks
                   folder/minidist.zip           the package's sources, which Pyodide imports
                   folder/pyodide/               Python for the browser, from its npm package
"""

import hashlib
import json
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
from html import escape
from pathlib import Path

from minidist.errors import WrongInput
from minidist.observe.pages import answers

STATIC, PACKAGE = Path(__file__).with_name("static"), Path(__file__).parents[2]
FRAME = Path(__file__).with_name("frame.html")  # around each page: what all have alike
PYODIDE = "pyodide-314.0.7.tgz"
DIGEST = "66b7949e5a0cba2250b586d7e368bf12fb482800748d182c4618254b685ffaa0"  # sha256
FILES = """pyodide.mjs pyodide.asm.mjs pyodide.asm.wasm pyodide-lock.json
python_stdlib.zip""".split()


def build(folder: Path, cache: Path) -> None:
    """Write the pages into a folder of the site; Pyodide's package is kept in `cache`."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(STATIC, folder)
    (folder / "answers").mkdir()
    for name in ("index", *answers.PAGES):
        first = None
        if is_recorded(name):
            kept = recorded_once(name, cache)
            shutil.copy(kept, folder / "answers" / f"{name}.json")
            first = json.loads(kept.read_text("utf-8"))[answers.as_key(answers.page(name).FIRST)]
        (folder / f"{name}.html").write_text(page_of(name, first), "utf-8")
    with zipfile.ZipFile(folder / "minidist.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(PACKAGE.rglob("*")):
            if path.suffix in (".py", ".toml") and "course" not in path.parts:
                archive.write(path, Path("minidist") / path.relative_to(PACKAGE))
    unpack_pyodide(folder / "pyodide", cache)


def recorded_once(name: str, cache: Path) -> Path:
    """Return the file of a page's answers: the one in the cache, if the package is as it was."""
    others = {PACKAGE / "observe/pages" / f"{page}.py" for page in answers.PAGES if page != name}
    digest = hashlib.sha256()
    for path in sorted({*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.toml")} - others):
        digest.update(path.read_bytes())
    kept = cache / f"{name}-{digest.hexdigest()[:16]}.json"
    if not kept.exists():
        cache.mkdir(parents=True, exist_ok=True)
        table = json.dumps(answers.recorded(name), separators=(",", ":"), allow_nan=False)
        (new := kept.with_suffix(".new")).write_text(table, "utf-8")
        new.replace(kept)  # whole, or not there
    return kept


def is_recorded(name: str) -> bool:
    """Return whether a page has its answers from a table that was made before."""
    return name in answers.PAGES and hasattr(answers.page(name), "questions")


def page_of(name: str, first: dict | None = None) -> str:
    """Return a page in its frame, with the answer to its first question, which it draws at once."""
    title, _, inside = (STATIC / f"{name}.html").read_text("utf-8").partition("\n")
    link, recorded = f'href="{name}.html"', ' data-answers="recorded"' if is_recorded(name) else ""
    text = FRAME.read_text("utf-8").replace(link, f'{link} aria-current="page"')
    holes = {'<!-- name -->"': f'{name}"{recorded}', "<!-- title -->": title}
    holes |= {"<!-- script -->": "page" if name == "index" else name, "<!-- page -->\n": inside}
    if name in answers.PAGES:
        page = answers.page(name)
        first = first or answers.answer({"page": name, **page.FIRST})
        data = json.dumps({"question": page.FIRST, "answer": first}).replace("<", "\\u003c")
        holes |= {"<!-- first -->": data, "<!-- text -->": escape(page.as_text(first))}
    for hole, filling in holes.items():
        if hole not in text:
            raise WrongInput(f"{name}.html has no place for its first answer: {hole}")
        text = text.replace(hole, filling)
    return text


def unpack_pyodide(folder: Path, cache: Path) -> None:
    """Copy Pyodide's files from its npm package, which npm brings once. ValueError: it cannot."""
    kept = cache / PYODIDE
    if not kept.exists():
        cache.mkdir(parents=True, exist_ok=True)
        name, _, version = PYODIDE.removesuffix(".tgz").rpartition("-")
        command = ["npm", "pack", "--silent", f"{name}@{version}"]
        with tempfile.TemporaryDirectory(dir=cache) as place:
            try:
                subprocess.run(command, cwd=place, check=True, stdout=subprocess.DEVNULL)
            except (OSError, subprocess.CalledProcessError) as error:
                raise WrongInput(
                    f"the pages need {PYODIDE}, which npm brings from its registry: {error}; "
                    f"install npm, or put the file into {cache}"
                ) from None
            (Path(place) / PYODIDE).replace(kept)
    if (digest := hashlib.sha256(kept.read_bytes()).hexdigest()) != DIGEST:
        raise WrongInput(f"{kept} has the digest {digest}, not {DIGEST}; remove it")
    folder.mkdir(parents=True)
    with tarfile.open(kept) as archive:
        for name in FILES:
            file = archive.extractfile(f"package/{name}")
            assert file is not None
            (folder / name).write_bytes(file.read())
