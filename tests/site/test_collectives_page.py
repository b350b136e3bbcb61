"""The collectives page in Chromium: stepped, predicted, revealed, shared, without a network."""

import json

import pytest

from minidist.observe.pages import collectives

pytestmark = [pytest.mark.site, pytest.mark.timeout(600)]
api = pytest.importorskip("playwright.sync_api", reason="pip install 'minidist[browser]'")
expect = api.expect

PAGE, PICTURE = "collectives.html", "#drawing svg"
ARROWS = f"{PICTURE} path[marker-end]"


def guess(page, steps, sends, fastest):
    page.fill("#steps", steps)
    page.fill("#sends", sends)
    page.select_option("#fastest", fastest)
    page.click("#reveal")


def test_the_first_drawing_is_there_before_any_answer_is_asked(opened):
    page = opened(PAGE)
    expect(page.locator(f"{PICTURE} g")).to_have_count(16)  # 4 ranks, 4 slices
    asked = page.evaluate("performance.getEntriesByType('resource').map((each) => each.name)")
    assert not [name for name in asked if "answers/" in name or "pyodide" in name]


def test_button_keys_and_range_step_and_the_address_keeps_the_step(opened):
    page = opened(PAGE)
    page.click("#next")
    expect(page.locator(ARROWS)).to_have_count(4)
    expect(page.locator("#status")).to_contain_text("Step 1, reduce-scatter: 4 messages")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#status")).to_contain_text("Step 2")
    page.keyboard.press("ArrowLeft")
    page.locator("#back").click()
    expect(page.locator("#status")).to_contain_text("Start")
    page.locator("#range").fill("6")
    expect(page.locator("#status")).to_contain_text("Every rank has the whole sum")
    assert page.url.endswith("#step=6")


@pytest.mark.parametrize("algorithm", ["ring", "tree", "halving_doubling", "hierarchical"])
def test_each_slice_is_said_to_hold_what_was_recorded(opened, algorithm):
    page = opened(f"{PAGE}#algorithm={algorithm}&ranks=8&step=3")
    holds = collectives.answer(8)["algorithms"][algorithm]["steps"][3]["holds"]
    expect(page.locator("#status")).to_contain_text("Step 3")
    titles = page.locator(f"{PICTURE} g title").all_text_contents()
    assert titles == [
        f"rank {r}, slice {at}: {{{', '.join(str(k) for k in range(8) if bits >> k & 1)}}}"
        for r, row in enumerate(holds)
        for at, bits in enumerate(row)
    ]
    assert "  rank 0 sends " in page.locator("#text").text_content()


def test_the_numbers_are_hidden_until_a_guess_and_are_those_of_the_steps(opened):
    page = opened(PAGE)
    expect(page.locator("#revealed")).to_be_empty()
    page.click("#reveal")  # without a guess: the browser asks for it
    expect(page.locator("#revealed")).to_be_empty()
    guess(page, "6", "1.5", "tree")
    lines = page.locator("#revealed .panel p")
    expect(lines).to_have_text(
        [
            "Right: you said 6 steps; it is 6.",
            "Right: you said 1.5 S; it is 1.5\u00a0S.",
            "No: you said tree; it is halving and doubling, or two levels.",
        ]
    )
    for name, latency, size, rate in [("ring", 7, 1000, 3), ("tree", 100, 10**8, 12)]:
        for field, value in (("latency", latency), ("size", size), ("rate", rate)):
            page.locator(f"[data-state={field}]").fill(str(value))
        row = page.locator("#revealed tbody tr", has_text=name).locator("td")
        steps, seconds = closed_form(name, latency, size, rate)
        assert row.first.text_content() == str(steps)
        shown, unit = row.last.text_content().split("\u00a0")
        scale = {"µs": 1e-6, "ms": 1e-3, "s": 1}[unit]
        assert float(shown) * scale == pytest.approx(seconds, rel=1e-3)


def closed_form(name, latency, size, rate):
    """The alpha-beta time on 4 ranks, as the head of comm/collectives.py has it."""
    alpha, beta = latency * 1e-6, 1e-9 / rate
    steps, each = (6, size / 4) if name == "ring" else (4, size)
    return steps, steps * (alpha + beta * each)


def test_a_shared_link_restores_everything(opened):
    page = opened(PAGE)
    page.select_option("[data-state=algorithm]", "hierarchical")
    page.select_option("[data-state=ranks]", "6")
    expect(page.locator(f"{PICTURE} g")).to_have_count(36)
    page.click("#next")
    page.locator("[data-state=latency]").fill("5")
    guess(page, "6", "1.7", "hierarchical")
    expect(page.locator("#revealed table")).to_be_visible()
    other = opened(page.url.rpartition("/")[2])
    expect(other.locator("#revealed table")).to_be_visible()
    expect(other.locator("[data-state=latency]")).to_have_value("5")
    for place in ("#drawing", "#revealed", "#status"):
        assert other.locator(place).inner_html() == page.locator(place).inner_html()


def test_what_the_package_refuses_is_said_in_its_words_and_can_be_left_again(opened):
    page = opened(f"{PAGE}#algorithm=halving_doubling&ranks=6")
    expect(page.locator("#drawing .fault")).to_contain_text("power of two, not 6 ranks")
    page.select_option("[data-state=ranks]", "8")
    expect(page.locator(f"{PICTURE} g")).to_have_count(64)


def test_a_step_is_drawn_within_200_ms(opened):
    page = opened(f"{PAGE}#ranks=8&guess=x")
    expect(page.locator(f"{PICTURE} g")).to_have_count(64)
    code = """() => { const start = performance.now(); document.getElementById("next").click();
    return [performance.now() - start, document.querySelectorAll("path[marker-end]").length]; }"""
    milliseconds, arrows = page.evaluate(code)
    assert arrows == 8 and milliseconds < 200


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (400, "light")])
def test_axe_finds_nothing_serious_and_the_page_fits_its_window(opened, width, scheme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    page = opened(f"{PAGE}#algorithm=hierarchical&step=2&guess=ring,4,6,1.5,ring", width, scheme)
    expect(page.locator("#revealed table")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    found = axe.run(page).response["violations"]
    serious = [each for each in found if each["impact"] in ("serious", "critical")]
    assert not serious, json.dumps(serious, indent=1)[:3000]
