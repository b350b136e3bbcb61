"""The page of attention over ranks in Chromium: any cut, answered by Pyodide, without a network."""

import json
import random

import pytest

from minidist.observe.pages import attention

pytestmark = [pytest.mark.site, pytest.mark.timeout(600)]
api = pytest.importorskip("playwright.sync_api", reason="pip install 'minidist[browser]'")
expect = api.expect

PAGE, PIECES, BLOCKS = "attention.html", "#pieces button", "#triangle polygon"
ASK = """async (questions) => {
    const { ask } = await import("./page.js");
    return await Promise.all(questions.map(ask));
}"""


def lit(page):
    return page.locator(f"{BLOCKS}[stroke='var(--text)']")


def test_the_first_drawing_is_there_before_python_is(opened):
    page = opened(PAGE)
    expect(page.locator(BLOCKS)).to_have_count(16 * 17 // 2)
    expect(page.locator("#status")).to_contain_text("Hop 0 of 3")
    asked = page.evaluate("performance.getEntriesByType('resource').map((each) => each.name)")
    assert not [name for name in asked if "pyodide" in name]


def test_button_keys_and_range_go_from_hop_to_hop(opened):
    page = opened(PAGE)
    expect(lit(page)).to_have_count(4 * 10)
    page.click("#next")
    expect(lit(page)).to_have_count(3 * 16)  # rank 0 has the last keys, and skips them
    expect(page.locator("#status")).to_contain_text("1 rank has nothing to compute")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#ranks caption")).to_have_text("Hop 2")
    page.click("#back")
    page.locator("#range").fill("3")
    expect(page.locator("#ranks tbody tr").first).to_contain_text("rank\u00a01")
    assert page.url.endswith("#hop=3")


def test_a_pressed_piece_goes_to_the_next_rank_and_python_answers(opened):
    page = opened(PAGE)
    page.locator(PIECES).nth(3).click()
    expect(page.locator(PIECES).nth(3)).to_have_text("1", timeout=60_000)
    assert page.url.endswith("#cut=0001111122223333")
    found = attention.answer(**{**attention.FIRST, "cut": "0001111122223333"})
    scores = page.locator("#ranks tbody td:nth-child(5)").all_text_contents()
    assert scores == [f"{work:,}" for work in found["work"][0]]
    assert page.locator("#text").text_content() == found["words"]
    page.keyboard.press("ArrowRight")  # from piece to piece
    page.keyboard.press("Enter")
    expect(page.locator(PIECES).nth(4)).to_have_text("2")
    expect(page.locator("[data-state=cut]")).to_have_value("0001211122223333")


def test_a_shared_link_restores_everything(opened):
    hash = "#cut=01230123&ranks=4&pieces=8&hop=2&bytes=100&guess=own"
    pages = [opened(f"{PAGE}{hash}") for _ in range(2)]
    for page in pages:
        expect(page.locator("#revealed table")).to_be_visible(timeout=60_000)
        expect(page.locator("[data-state=bytes]")).to_have_value("100")
        expect(page.locator("#ranks caption")).to_have_text("Hop 2")
        assert page.url.endswith(hash)


def test_the_balance_is_hidden_until_a_guess(opened):
    page = opened(PAGE)
    expect(page.locator("#revealed")).to_be_empty()
    expect(page.locator("#bars svg text", has_text="hop")).to_have_count(1)  # and the bars to come
    page.select_option("#best", "zigzag")
    page.click("#reveal")
    expect(page.locator("#revealed .good")).to_have_text("Right: best balanced is zig-zag.")
    rows = page.locator("#revealed tbody tr").all_text_contents()
    cuts = attention.answer(**attention.FIRST)["cuts"]
    shown = [f"{100 * each['balance']:.1f} %{100 * each['idle']:.1f} %" for each in cuts]
    assert all(row.endswith(own) for row, own in zip(rows, shown, strict=True))
    expect(page.locator("#bars svg text", has_text="hop")).to_have_count(4)


def test_answers_of_drawn_cuts_are_those_of_the_package(opened):
    page, draw = opened(PAGE), random.Random(0)
    questions = []
    for _ in range(50):
        N, pieces = draw.randint(2, 8), draw.choice([8, 16, 32])
        cut = "".join(str(draw.randrange(N)) for _ in range(pieces))
        questions.append({"cut": cut, "ranks": N, "pieces": pieces, "length": 16384, "bytes": 64})
    found = page.evaluate(ASK, questions)
    assert found == [json.loads(json.dumps(attention.answer(**each))) for each in questions]


def test_a_wrong_cut_is_said_and_can_be_left_again(opened):
    page = opened(f"{PAGE}#cut=0129")
    expect(page.locator("#fault")).to_contain_text("of each of 16 pieces", timeout=60_000)
    expect(page.locator("#shown")).to_be_hidden()
    page.select_option("[data-state=cut]", "zigzag")
    expect(page.locator("#shown")).to_be_visible()
    expect(lit(page)).to_have_count(4 * 10)


def test_a_new_cut_is_drawn_within_200_ms(opened):
    page = opened(f"{PAGE}#ranks=8&cut=zigzag")
    expect(page.locator(PIECES).nth(0)).to_have_text("0", timeout=60_000)
    expect(page.locator("#range")).to_have_attribute("max", "7", timeout=60_000)
    code = """async () => {
        const place = document.getElementById("triangle");
        const drawn = new Promise((resolve) => {
            const seen = new MutationObserver(() => resolve(performance.now()));
            seen.observe(place, { childList: true });
        });
        const start = performance.now();
        document.querySelector("#pieces button").click();
        return (await drawn) - start;
    }"""
    assert page.evaluate(code) < 200


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (400, "light")])
def test_axe_finds_nothing_serious_and_the_page_fits_its_window(opened, width, scheme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    page = opened(f"{PAGE}#hop=1&guess=zigzag", width, scheme)
    expect(page.locator("#revealed table")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    found = axe.run(page).response["violations"]
    serious = [each for each in found if each["impact"] in ("serious", "critical")]
    assert not serious, json.dumps(serious, indent=1)[:3000]
