"""The pages that step through recorded answers, in Chromium: predicted, revealed, shared, without
a network. Any cut of attention is answered by Pyodide.
"""

import json
import re
from urllib.request import urlopen

import pytest

from minidist.observe.pages import answers, attention
from minidist.observe.pages import mistakes as module
from minidist.verify.mistakes.register import mistakes

pytestmark = [pytest.mark.site, pytest.mark.timeout(600)]
api = pytest.importorskip("playwright.sync_api", reason="pip install 'minidist[browser]'")
expect = api.expect

FIRST = {  # what a page has drawn before anything is asked, and how often
    "attention.html": ("#triangle polygon", 16 * 17 // 2),
    "collectives.html": ("#drawing svg g", 16),  # 4 ranks, 4 slices
    "experts.html": ("#drawing svg g:has(title)", 48),
    "mistakes.html": ("#gradients circle", 6),
}
REVEALED = {  # an address, and what it shows
    "attention.html#hop=1&guess=zigzag": "#revealed table",
    "collectives.html#algorithm=hierarchical&step=2&guess=ring,4,6,1.5,ring": "#revealed table",
    "experts.html#guess=3&step=1": "#matrix table",
    "mistakes.html#step=11": "#verdict",
}


@pytest.mark.parametrize("name", FIRST)
def test_the_first_drawing_is_there_before_any_answer_is_asked(opened, name):
    page, (selector, count) = opened(name), FIRST[name]
    expect(page.locator(selector)).to_have_count(count)
    asked = page.evaluate("performance.getEntriesByType('resource').map((each) => each.name)")
    assert not [name for name in asked if "answers/" in name or "pyodide" in name]


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (400, "light")])
@pytest.mark.parametrize("address", REVEALED, ids=lambda address: address.partition(".")[0])
def test_axe_finds_nothing_serious_and_the_page_fits_its_window(opened, address, width, scheme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    page = opened(address, width, scheme)
    expect(page.locator(REVEALED[address])).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    violations = axe.run(page).response["violations"]
    serious = [each for each in violations if each["impact"] in ("serious", "critical")]
    assert not serious, json.dumps(serious, indent=1)[:3000]


PIECES = "#pieces button"


def lit(page):
    return page.locator("#triangle polygon[stroke='var(--text)']")


def test_attention_goes_from_hop_to_hop_by_button_key_and_range(opened):
    page = opened("attention.html")
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
    page = opened("attention.html")
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


def test_attention_hides_the_balance_until_a_guess(opened):
    page = opened("attention.html")
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


def guess(page, steps, sends, fastest):
    page.fill("#steps", steps)
    page.fill("#sends", sends)
    page.select_option("#fastest", fastest)
    page.click("#reveal")


def test_collectives_step_by_button_key_and_range_and_the_address_keeps_the_step(opened):
    page = opened("collectives.html")
    page.click("#next")
    expect(page.locator("#drawing svg path[marker-end]")).to_have_count(4)
    expect(page.locator("#status")).to_contain_text("Step 1, reduce-scatter: 4 messages")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#status")).to_contain_text("Step 2")
    page.keyboard.press("ArrowLeft")
    page.locator("#back").click()
    expect(page.locator("#status")).to_contain_text("Start")
    page.locator("#range").fill("6")
    expect(page.locator("#status")).to_contain_text("Every rank has the whole sum")
    assert page.url.endswith("#step=6")


def test_collectives_hide_the_numbers_until_a_guess(opened):
    page = opened("collectives.html")
    expect(page.locator("#revealed")).to_be_empty()
    page.click("#reveal")  # without a guess: the browser asks for it
    expect(page.locator("#revealed")).to_be_empty()
    guess(page, "6", "1.5", "tree")
    lines = page.locator("#revealed .panel p")
    expect(lines.first).to_have_text("Right: you said 6 steps; it is 6.")
    expect(lines.last).to_contain_text("No: you said tree; it is")


def test_a_shared_link_restores_a_step_of_a_collective(opened):
    page = opened("collectives.html")
    page.select_option("[data-state=algorithm]", "hierarchical")
    page.select_option("[data-state=ranks]", "6")
    expect(page.locator("#drawing svg g")).to_have_count(36)
    page.click("#next")
    page.locator("[data-state=latency]").fill("5")
    guess(page, "6", "1.7", "hierarchical")
    expect(page.locator("#revealed table")).to_be_visible()
    other = opened(page.url.rpartition("/")[2])
    expect(other.locator("#revealed table")).to_be_visible()
    expect(other.locator("[data-state=latency]")).to_have_value("5")
    for place in ("#drawing", "#revealed", "#status"):
        assert other.locator(place).inner_html() == page.locator(place).inner_html()


@pytest.fixture(scope="module")
def table(pages):
    with urlopen(f"{pages}/answers/mistakes.json") as response:
        text = response.read()
    assert len(text) < 900_000
    return json.loads(text)


def test_every_mistake_with_strategies_was_run_and_has_a_row_of_each_strategy(table):
    assert set(table) == {answers.as_key(question) for question in module.questions()}
    for name, mistake in module.chosen().items():
        rows = table[answers.as_key({"mistake": name})]["rows"]
        strategies = {row["strategy"] for row in rows}
        assert strategies == set(module.FAMILIES[mistake.family]), name
        assert all(row["error"] != module.LOST for row in rows), name


def test_another_mistake_is_chosen_drawn_and_kept_in_the_address(opened, table):
    page = opened("mistakes.html")
    page.select_option("#choice", "divided_by_ranks_twice")
    expect(page.locator("#gradients svg")).to_have_attribute("aria-label", re.compile("times 0.25"))
    expect(page.locator("#sees")).to_contain_text("1 / number of ranks")
    assert page.url.endswith("#mistake=divided_by_ranks_twice")
    page.click("#following")
    expect(page.locator("#title")).not_to_have_text(mistakes()["divided_by_ranks_twice"].title)
    page.click("#previous")
    expect(page.locator("#title")).to_have_text(mistakes()["divided_by_ranks_twice"].title)
    rows = table[answers.as_key({"mistake": "divided_by_ranks_twice"})]["rows"]
    red = page.locator("#rows .red").all_text_contents()
    assert red == [f"✗ {row['wrong']} of {row['all']} wrong" for row in rows if row["wrong"]]


def test_a_deadlock_is_stepped_to_its_circle_by_button_and_by_key(opened, table):
    page = opened("mistakes.html")
    one = table[answers.as_key({"program": "ring_of_rendezvous"})]["seeds"][0]
    last = len(one["steps"]) - 1
    page.click("#next")
    expect(page.locator("#now")).to_contain_text(f"step 2 of {last + 1}")
    page.locator("#graph").focus()
    for _ in range(last - 1):
        page.keyboard.press("ArrowRight")
    expect(page.locator("#graph path[marker-end='url(#never)']")).to_have_count(4)
    expect(page.locator("#verdict")).to_contain_text("Deadlock\nevery rank waits:")
    expect(page.locator("#next")).to_be_disabled()
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#graph path[marker-end='url(#never)']")).to_have_count(0)
