"""The calculator in a browser, where Pyodide answers: no server, no NumPy, no network."""

import json

import pytest

from minidist.observe.pages import calculator
from minidist.planning.plans.published import RUNS

api = pytest.importorskip("playwright.sync_api", reason="pip install 'minidist[browser]'")
expect = api.expect
pytestmark = [pytest.mark.site, pytest.mark.timeout(600)]
LOADED = 60_000  # milliseconds in which Pyodide is there
RUN = next(run for run in RUNS if run.name.startswith("175b on 64"))
SMALL = {"layers": 4, "width": 64, "heads": 4, "sequence": 64, "vocab": 100, "batch": 8, "dp": 2}
SMALL |= {"pp": 1, "tp": 1, "micro_batches": 1}


def address(**fields):
    return "calculator.html#" + "&".join(f"{name}={value}" for name, value in fields.items())


def glance(page):
    return dict(
        zip(
            page.locator("#glance dt").all_inner_texts(),
            page.locator("#glance dd").all_inner_texts(),
            strict=True,
        )
    )


def step(fields):
    return calculator.answer(**fields)["totals"][0]["text"]


def ready(opened, *given, **fields):
    """Open the page with these fields in its address, and wait for their answer."""
    page = opened(address(**fields), *given)
    expect(page.locator("#glance dd").first).to_have_text(step(fields), timeout=LOADED)
    return page


def test_the_first_drawing_is_there_before_python_is(browser, pages, opened):
    page = opened("calculator.html")
    expect(page.locator(".bar")).to_have_count(2)
    assert glance(page)["One step"] == step({})
    expect(page.locator("#status")).to_be_empty()  # nothing has been asked
    context = browser.new_context(java_script_enabled=False)
    plain = context.new_page()
    plain.goto(f"{pages}/calculator.html")
    assert plain.locator("#text").text_content() == calculator.as_text(calculator.answer())
    context.close()


def test_an_edit_redraws_within_a_fifth_of_a_second_and_is_in_the_address(opened):
    page = ready(opened, tp=8)
    page.evaluate("""() => {
      new MutationObserver(() => { window.drawn = performance.now(); })
        .observe(document.getElementById("glance"), { childList: true });
      addEventListener("input", () => { window.typed = performance.now(); }, { capture: true });
    }""")
    taken = []
    for m in (16, 64, 32):
        page.fill("[data-state=micro_batches]", str(m))
        expect(page.locator("#glance dd").first).to_have_text(step({"tp": 8, "micro_batches": m}))
        taken.append(page.evaluate("drawn - typed"))
    assert min(taken) < 200, taken
    page.fill("[data-state=micro_batches]", "16")
    page.wait_for_function("location.hash === '#tp=8&micro_batches=16'")


def test_a_wrong_combination_shows_the_packages_sentence_until_it_is_mended(opened):
    page = opened(address(tp=3))
    fault = page.locator("#fault")
    expect(fault).to_have_text(
        "tp=3 does not divide 32 heads; use a divisor of them", timeout=LOADED
    )
    page.fill("[data-state=tp]", "8")
    expect(fault).to_be_hidden()
    expect(page.locator("#glance dd").first).to_have_text(step({"tp": 8}))


def test_a_published_run_fills_the_form_and_is_beside_its_prediction(opened):
    page = opened("calculator.html")
    page.select_option("#runs", RUN.name)
    expect(page.locator(".bar")).to_have_count(3, timeout=LOADED)
    want = calculator.answer(**calculator.choices()["runs"][RUN.name])
    shown = glance(page)
    assert shown["One step"] == want["totals"][0]["text"]
    assert shown["Published"] == f"{want['published']['seconds']}, {want['published']['mfu']}"
    assert shown["Predicted / published"] == want["published"]["ratio"]
    assert page.input_value("[data-state=pp]") == str(RUN.plan.pp)
    page.fill("[data-state=efficiency]", "60")  # the run is the same, the prediction is not
    expect(page.locator("#glance dd").last).not_to_have_text(want["published"]["ratio"])
    page.fill("[data-state=per_node]", "4")
    expect(page.locator(".bar")).to_have_count(2)
    assert page.input_value("#runs") == ""


def test_the_search_finds_plans_beside_the_form_and_a_plan_fills_it(opened):
    page = ready(opened, **SMALL)
    want = calculator.answer("search", **SMALL)["plans"]
    page.click("#search")
    rows = page.locator("#plans tbody tr")
    expect(rows).to_have_count(len(want), timeout=LOADED)
    texts = [row["why"] or "the best" for row in want]
    assert page.locator("#plans tbody td:nth-child(5)").all_inner_texts() == texts
    other = next(i for i, row in enumerate(want) if row["fields"]["pp"] == 2)
    rows.nth(other).get_by_role("button").click()
    for name in ("dp", "pp", "micro_batches", "schedule", "zero"):
        assert page.input_value(f"[data-state={name}]") == str(want[other]["fields"][name])
    now = calculator.answer(**SMALL | want[other]["fields"])["totals"][0]["text"]
    expect(page.locator("#glance dd").first).to_have_text(now)


def test_axe_finds_nothing_serious_and_the_page_is_never_wider_than_its_window(opened):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    page = ready(opened, **SMALL)
    page.click("#search")
    expect(page.locator("#plans tbody tr").first).to_be_visible(timeout=LOADED)
    for summary in page.locator("summary").all():
        summary.click()
    for width, scheme in ((1280, "light"), (400, "dark")):
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size({"width": width, "height": 900})
        expect(page.locator("html")).to_have_attribute("data-theme", scheme)
        found = axe.run(page).response["violations"]
        serious = [each for each in found if each["impact"] in ("serious", "critical")]
        assert not serious, json.dumps(serious, indent=1)[:2000]
        assert page.evaluate("document.documentElement.scrollWidth") <= width
