"""Build the site: each lesson becomes a notebook and is run, then Sphinx makes pages of everything.

    minidist site FOLDER         # pip install -e ".[site]"; or: python lessons/site/build.py FOLDER

What Sphinx reads is written into FOLDER/.pages, and the pages into FOLDER. Executed lessons are
kept in --cache, by the content of the lesson and of the package: what has not changed is not run.
"""

import argparse
import hashlib
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import nbformat

SITE = Path(__file__).resolve().parent
ROOT = SITE.parents[1]
sys.path[:0] = [str(SITE), str(ROOT)]

import api  # noqa: E402
import links  # noqa: E402
import pages  # noqa: E402

from minidist.observe.pages import build as interactive  # noqa: E402

CACHE = Path.home() / ".cache" / "minidist-site"
SECONDS = 300  # for a lesson


def build(folder: Path, cache: Path = CACHE) -> int:
    """Build the site into `folder`; return Sphinx's exit status. Warnings are errors."""
    staged = folder / ".pages"
    shutil.rmtree(staged, ignore_errors=True)
    lessons = pages.lessons()
    runs = [lesson for lesson in lessons if not lesson.needs_torch or find_spec("torch")]
    with ThreadPoolExecutor(2) as threads:
        executed = dict(zip(runs, threads.map(lambda one: run(one, cache), runs), strict=True))
    wanted = links.Links()
    for lesson in lessons:
        notebook = executed.get(lesson) or lesson.notebook()
        pages.write(lesson.finished(notebook, wanted), staged / lesson.page)
    pages.write_chinese(executed, staged, wanted)
    pages.write_markdown(staged, wanted)
    api.write(staged / "api")
    wanted.write_sources(staged)
    shutil.copytree(ROOT / "figures", staged / "figures")

    from sphinx.cmd.build import main as sphinx

    options = ["-q", "-c", str(SITE), "-d", str(folder / ".doctrees"), "-W"]
    interactive.build(folder / "explore", cache)
    return sphinx([*options, "--keep-going", str(staged), str(folder)])


def run(lesson: "pages.Page", cache: Path) -> nbformat.NotebookNode:
    """Return the lesson as a notebook with its outputs, from the cache if nothing has changed."""
    from nbclient import NotebookClient

    notebook = lesson.notebook()
    digest = hashlib.sha256(_package())
    digest.update(lesson.source.encode())
    checks = ROOT / "lessons" / "checks" / f"{lesson.number}.py"
    digest.update(checks.read_bytes() if checks.exists() else b"")
    kept = cache / f"{lesson.path.stem}-{digest.hexdigest()[:16]}.ipynb"
    if kept.exists():
        return nbformat.read(kept, 4)
    print(f"running {lesson.path.name}", flush=True)
    client = NotebookClient(notebook, timeout=SECONDS, kernel_name="python3")
    client.resources = {"metadata": {"path": str(ROOT / "lessons")}}
    client.extra_arguments = ["--IPKernelApp.log_level=40"]  # it warns of plain TCP
    client.execute()
    cache.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, kept)
    return notebook


def _package() -> bytes:
    """Return what every lesson depends on, as bytes."""
    files = [*(ROOT / "minidist").rglob("*.py"), *(ROOT / "lessons" / "support").glob("*.py")]
    return b"".join(path.read_bytes() for path in sorted(files))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Build the site of the lessons into a folder.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cache", type=Path, default=CACHE, help="where executed lessons are kept")
    given = parser.parse_args(arguments)
    return build(given.folder.resolve(), given.cache.resolve())


if __name__ == "__main__":
    sys.exit(main())
