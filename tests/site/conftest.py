"""A browser, and the pages that it opens: `-m site`, skipped loudly where something is missing."""

import shutil
import threading
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from minidist.observe.pages.build import build, unpack_pyodide

CACHE = Path.home() / ".cache" / "minidist-site"  # the site's: recorded answers, and Pyodide


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        pass


@contextmanager
def serving(folder: Path):
    """Serve a folder on a port of this machine; give its address."""
    handler = partial(Quiet, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="session")
def browser():
    api = pytest.importorskip("playwright.sync_api", reason="pip install 'minidist[browser]'")
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("there is no chromium: apt install chromium")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def pyodide(tmp_path_factory):
    """Pyodide's package is in the cache: npm can bring it."""
    try:
        unpack_pyodide(tmp_path_factory.mktemp("pyodide") / "files", CACHE)
    except ValueError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def pages(tmp_path_factory, pyodide):
    """The address of the interactive pages, as the site has them: Pyodide answers."""
    folder = tmp_path_factory.mktemp("pages")
    build(folder / "explore", CACHE)
    with serving(folder) as address:
        yield f"{address}/explore"


@pytest.fixture
def opened(browser, pages):
    """open(name, width=1280, scheme="light") -> a page of Playwright; errors of any fail the test.

    Requests to other hosts are errors, too: each page works without a network.
    """
    complaints: list[str] = []
    contexts = []

    def complain(page, message):
        complaints.append(f"{page.url}: {message}")

    def open(name, width=1280, scheme="light"):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda m: m.type == "error" and complain(page, m.text))
        page.on("pageerror", lambda error: complain(page, error))
        page.on("request", lambda r: r.url.startswith(pages) or complain(page, f"asks {r.url}"))
        page.goto(f"{pages}/{name}")
        return page

    yield open
    for context in contexts:
        context.close()
    assert not complaints, "\n".join(complaints[:20])
