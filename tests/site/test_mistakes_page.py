"""What went wrong, in Chromium: all mistakes that were recorded, and ranks that wait, stepped."""

import json
import re
from urllib.request import urlopen

import pytest

from minidist.observe.pages import answers
from minidist.observe.pages import mistakes as module
from minidist.verify.mistakes.register import mistakes

pytestmark = [pytest.mark.site, pytest.mark.timeout(600)]
api = pytest.importorskip("playwright.sync_api", reason="pip install 'minidist[browser]'")
expect = api.expect

PAGE = "mistakes.html"


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
        assert strategies == set(module.FAMILIES[mistake.family][0]), name
        assert all(row["error"] != module.LOST for row in rows), name


def test_where_the_diagnosis_is_a_wrong_gradient_a_parameter_moves(table):
    wrong = [
        name
        for name in module.chosen()
        if mistakes()[name].diagnosis.startswith(("the numbers are those of", "ratio "))
    ]
    assert len(wrong) > 30
    for name in wrong:
        rows = table[answers.as_key({"mistake": name})]["rows"]
        moved = [one for row in rows for one in row.get("worst", [])]
        assert any(one["fault"] or one["error"] > 1e-9 for one in moved), name


def test_most_mistakes_are_seen_and_some_leave_every_loss_right(table):
    found = [answer for answer in table.values() if "rows" in answer]
    seen = [answer for answer in found if any(row["seen"] for row in answer["rows"])]
    quiet = [a for a in found if "the losses are right and gradients are wrong" in a["sees"]]
    assert len(seen) > 0.7 * len(found) and len(quiet) > 20


def test_the_first_drawing_is_there_before_any_answer_is_asked(opened):
    page = opened(PAGE)
    expect(page.locator("#title")).to_have_text("Gradients are not summed over the ranks")
    expect(page.locator("#gradients circle")).to_have_count(6)
    expect(page.locator("#rows tbody tr")).to_have_count(14)
    expect(page.locator("#diff .minus")).to_contain_text("group.all_reduce(gradient(p)")
    asked = page.evaluate("performance.getEntriesByType('resource').map((each) => each.name)")
    assert not [name for name in asked if "answers/" in name]


def test_another_mistake_is_chosen_drawn_and_kept_in_the_address(opened, table):
    page = opened(PAGE)
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


def test_a_run_that_does_not_end_shows_the_packages_table(opened):
    page = opened(f"{PAGE}#mistake=lost_tag")
    expect(page.locator("#gradients pre")).to_contain_text("rank 0: waits in recv(tag=")
    expect(page.locator("#rows")).to_contain_text("✗ Deadlock")


def test_a_deadlock_is_stepped_to_its_circle_by_button_and_by_key(opened, table):
    page = opened(PAGE)
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


def test_a_race_ends_in_two_ways_and_a_shared_link_restores_the_step(opened, table):
    seeds = table[answers.as_key({"program": "whoever_is_first"})]["seeds"]
    page = opened(f"{PAGE}#program=whoever_is_first&seed=1&step=3")
    expect(page.locator("#now")).to_contain_text("Seed 1, step 4 of")
    words = page.locator("#seeds button").all_text_contents()
    assert words == [f"seed {i}: {one['verdict']}" for i, one in enumerate(seeds)]
    assert len({one["verdict"] for one in seeds}) == 2
    page.click("#seeds button:nth-of-type(3)")
    expect(page.locator("#now")).to_contain_text("Seed 2, step 1 of")
    assert "seed=2" in page.url


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (400, "light")])
def test_axe_finds_nothing_serious_and_the_page_fits_its_window(opened, width, scheme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    page = opened(f"{PAGE}#step=11", width, scheme)
    expect(page.locator("#verdict")).to_contain_text("Deadlock")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    found = axe.run(page).response["violations"]
    serious = [each for each in found if each["impact"] in ("serious", "critical")]
    assert not serious, json.dumps(serious, indent=1)[:3000]
