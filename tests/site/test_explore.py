"""`minidist explore` in Chromium: this package answers, real ranks run, strangers are refused."""

import threading
from functools import partial
from urllib.parse import quote

import pytest

from minidist.observe.pages import server
from minidist.observe.pages.written import Written
from tests.site.conftest import serving

pytestmark = [pytest.mark.site, pytest.mark.timeout(300)]
expect = pytest.importorskip("playwright.sync_api", reason="pip install 'minidist[browser]'").expect

PYTHON = """def program(rank, p, m):
    yield from (f"F{i}" for i in range(m))
    yield from (f"B{i}" for i in range(m))
"""
HOSTILE = {
    "while True: pass": "stopped after 2 s",
    "x = bytearray(1 << 30)": "MemoryError",
    "import socket\nsocket.create_connection(('127.0.0.1', PORT))": "Error",
}


@pytest.fixture(scope="module")
def explore():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "Written", partial(Written, 2.0))
        running = server.Server()
    with running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.shutdown()


@pytest.fixture
def page(browser, explore):
    """A page of Playwright, at the address that is printed; errors fail the test."""
    complaints: list[str] = []
    own = explore.address.partition("/?")[0]
    with browser.new_context() as context:
        page = context.new_page()
        page.on("console", lambda m: m.type == "error" and complaints.append(m.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda r: r.url.startswith((own, "blob:")) or complaints.append(r.url))
        page.goto(explore.address)
        yield page
    assert not complaints, "\n".join(complaints[:20])


def schedules(page, state=""):
    """Go to the schedules as a reader does, from the first page."""
    page.get_by_role("navigation").get_by_role("link", name="Schedules").click()
    expect(page.locator("#timeline svg").first).to_be_visible()
    if state:
        page.goto(f"{page.url}#{state}")
        page.reload()
    expect(page.locator("#numbers dd").first).to_be_visible()
    return page


def test_every_page_opens_from_the_address_that_is_printed(page, explore):
    assert page.url == explore.address.replace("/?", "/index.html?")
    names = page.get_by_role("main").get_by_role("link").all_inner_texts()
    assert len(names) == 6
    for name in names:
        page.get_by_role("main").get_by_role("link", name=name).click()
        expect(page.locator("h1")).not_to_have_text("Pages that answer back")
        assert page.url.endswith(f".html?token={explore.token}")
        expect(page.locator("a[href^='../']")).to_have_count(0)  # the site's pages are not here
        page.locator("header .home").click()
        expect(page.locator("h1")).to_have_text("Pages that answer back")


def write(page, source):
    page.locator("#as-python").click()
    page.locator("#python").fill(source)
    if page.locator("#use-python").is_visible():
        page.locator("#use-python").click()


def test_a_readers_python_is_answered_and_a_hostile_one_is_ended_and_named(page, explore):
    schedules(page)
    for source, words in HOSTILE.items():
        write(page, source.replace("PORT", str(explore.server_port)))
        expect(page.locator("#fault")).to_contain_text(words, timeout=20_000)
    write(page, PYTHON)
    expect(page.locator("#fault")).to_be_hidden()
    expect(page.locator("#numbers dd").first).to_contain_text("33")


def test_python_of_a_link_runs_when_its_reader_has_pressed_a_button(page):
    schedules(page)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.post_data or ""))
    page.goto(f"{page.url}#python={quote(PYTHON)}")
    for _ in range(2):  # a link that is followed in this page, and one that opens it
        expect(page.locator("#brought")).to_be_visible()
        expect(page.locator("#python")).to_have_value(PYTHON)
        page.reload()
        expect(page.locator("#numbers dd").first).to_be_visible()
    assert not any("yield from" in text for text in asked)
    with page.expect_request(lambda request: "yield from" in (request.post_data or "")):
        page.locator("#use-python").click()
    expect(page.locator("#schedule")).to_have_value("own")
    expect(page.locator("#brought")).to_be_hidden()


def test_run_it_certifies_on_four_real_ranks_and_draws_what_was_measured(page):
    schedules(page)
    page.get_by_role("button", name="Run it on real processes").click()
    expect(page.locator("#run-result")).to_contain_text(
        "On 4 processes every parameter of 5 models has one device's gradient", timeout=120_000
    )
    expect(page.locator("#measured svg")).to_have_count(2)
    expect(page.locator("#progress-words")).to_contain_text("times the simulated makespan")


ATTACK = """async ([address, token]) => {
    const found = [];
    const headers = { "Content-Type": "application/json", "X-Token": token };
    const plain = { "Content-Type": "text/plain" };
    const body = JSON.stringify({ page: "schedules" });
    for (const [path, options] of [
        ["answer", { method: "POST", headers, body }],
        ["answer", { method: "POST", headers: plain, body, mode: "no-cors" }],
        [`schedules.html?token=${token}`, {}],
        [`schedules.html?token=${token}`, { mode: "no-cors" }],
    ]) {
        try { found.push(await (await fetch(`${address}/${path}`, options)).text()); }
        catch (error) { found.push(""); }
    }
    const frame = document.createElement("iframe");
    frame.src = `${address}/schedules.html?token=${token}`;
    document.body.append(frame);
    await new Promise((resolve) => { frame.onload = resolve; });
    return found;
}"""


def test_a_page_of_another_origin_gets_nothing_even_with_the_token(browser, explore, tmp_path):
    (tmp_path / "index.html").write_text("<!doctype html><title>another</title>")
    with serving(tmp_path) as other:
        page = browser.new_page()
        page.goto(other)
        address = explore.address.partition("/?")[0]
        assert page.evaluate(ATTACK, [address, explore.token]) == [""] * 4
        assert all("minidist" not in frame.content() for frame in page.frames)
        page.close()
