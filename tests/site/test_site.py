"""The site is built from the lessons as they stand, and every page can be read by everybody.

The everyday tests read its parts; `-m site` builds it, which runs every lesson as a notebook, and
opens its pages in headless Chromium (`pip install -e ".[site,browser]"`, and Debian's chromium).
"""

import gzip
import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lessons.pages import LESSONS, ROOT
from tests.lessons.test_lessons import changes
from tests.site.conftest import CACHE, serving

SITE = ROOT / "lessons" / "site"
HEAVIEST = 600_000  # bytes of a page as a server sends it (compressed), without its figures
WIDTHS = (400, 1600)
STILL = "* { transition: none !important; }"  # a colour on its way from light to dark is neither


@pytest.fixture
def links(monkeypatch):
    monkeypatch.syspath_prepend(SITE)
    return importlib.import_module("links")


def test_a_link_to_a_script_a_page_or_a_source_file_becomes_one_to_its_page(links):
    found = links.Links()
    lesson = LESSONS[0].path
    text = "[a](02_collectives.py#x) [b](pages/path.md) [c](../minidist/comm/mesh.py) `[d](e.py)`"
    assert found.rewrite(text, lesson, "lessons/00.ipynb") == (
        "[a](02_collectives.ipynb#x) [b](../pages/path.md) "
        "[c](../source/minidist/comm/mesh.py.md) `[d](e.py)`"
    )
    assert found.sources == {"minidist/comm/mesh.py"}
    outside = "[x](https://example.org/a.py) [y](#here)"
    assert found.rewrite(outside, lesson, "lessons/00.ipynb") == outside


@pytest.fixture(scope="session")
def site(tmp_path_factory, pyodide) -> Path:
    """The whole site, built by the command of the documentation; warnings are errors."""
    pytest.importorskip("myst_nb", reason="the site needs: pip install 'minidist[site]'")
    folder = tmp_path_factory.mktemp("site")
    (folder / ".executed").mkdir()
    for kept in [*CACHE.glob("*.json"), *CACHE.glob("*.tgz")]:  # not the lessons, which run
        shutil.copy(kept, folder / ".executed")
    before = changes()
    command = [sys.executable, "-m", "minidist", "site", folder, "--cache", folder / ".executed"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    assert changes() == before, "the lessons wrote into the repository"
    return folder


@pytest.mark.site
@pytest.mark.timeout(1500)
def test_every_lesson_runs_in_a_notebook_and_shows_its_figure(site):
    nbformat = pytest.importorskip("nbformat")
    for lesson in LESSONS:
        notebook = nbformat.read(site / ".pages" / "lessons" / f"{lesson.path.stem}.ipynb", 4)
        outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
        printed = "".join(output.get("text", "") for output in outputs)
        assert printed.count("not solved yet") == 3, lesson.path.name
        pictures = [output for output in outputs if "image/svg+xml" in output.get("data", {})]
        assert len(pictures) == 1, lesson.path.name
        errors = [output["text"] for output in outputs if output.get("name") == "stderr"]
        assert not errors, (lesson.path.name, errors)


@pytest.fixture(scope="session")
def served(site):
    """The site on a port of this machine."""
    with serving(site) as address:
        yield address


def pages_of(site: Path) -> list[str]:
    found = (path.relative_to(site) for path in site.rglob("*.html"))
    return sorted(str(path) for path in found if path.parts[0] != "_static")


@pytest.mark.site
@pytest.mark.timeout(900)
@pytest.mark.parametrize("width", WIDTHS)
def test_no_page_scrolls_sideways_or_complains_or_has_a_figure_without_words(
    site, served, browser, width
):
    page = browser.new_page(viewport={"width": width, "height": 900})
    complaints: list[str] = []
    page.on("console", lambda m: m.type == "error" and complaints.append(f"{page.url}: {m.text}"))
    page.on("pageerror", lambda error: complaints.append(f"{page.url}: {error}"))
    for name in pages_of(site):
        page.goto(f"{served}/{name}", wait_until="load")
        if page.evaluate("document.documentElement.scrollWidth > window.innerWidth"):
            complaints.append(f"{name} is wider than {width} pixels")
        without = page.evaluate(
            "[...document.images].filter(i => !i.alt && !i.closest('a.home')).map(i => i.src)"
        )  # a.home: the sign beside the name
        complaints += [f"{name}: no words for {image}" for image in without]
    assert not complaints, "\n".join(complaints[:20])


@pytest.mark.site
@pytest.mark.timeout(900)
def test_no_page_is_closed_to_a_reader_who_cannot_see_well(site, served, browser):
    """axe-core finds nothing serious: contrast, names, keys; some pages also in the dark."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    light = [name for name in pages_of(site) if not name.startswith("source/")]  # all alike
    dark = ["index.html", "lessons/07_gpipe.html", "api/minidist.nn.html", "pages/glossary.html"]
    found = []
    for scheme, names in {"light": light, "dark": dark}.items():
        page = browser.new_page(viewport={"width": 1600, "height": 900}, color_scheme=scheme)
        for name in names:
            page.goto(f"{served}/{name}", wait_until="load")
            page.add_style_tag(content=STILL)
            for each in axe.run(page).response["violations"]:
                if each["impact"] in ("serious", "critical"):
                    node = each["nodes"][0]["html"][:120]
                    found.append(f"{scheme}, {name}: {each['id']}: {node}")
    assert not found, "\n".join(found[:20])


@pytest.mark.site
@pytest.mark.timeout(300)
def test_a_page_is_light(site, served, browser):
    for name in ("index.html", "lessons/00_single_device.html", "pages/glossary.html"):
        page = browser.new_page()
        sizes: dict[str, int] = {}

        def note(response, sizes=sizes):
            if not response.url.endswith((".png", ".svg", ".gif")):
                sizes[response.url] = len(gzip.compress(response.body()))

        page.on("response", note)
        page.goto(f"{served}/{name}", wait_until="networkidle")
        assert sum(sizes.values()) < HEAVIEST, (
            name,
            sorted(sizes.items(), key=lambda x: -x[1])[:5],
        )
        assert all(url.startswith(served) for url in sizes), "something comes from another host"
