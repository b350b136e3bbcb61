"""The experts page in Chromium: predicted, revealed, stepped, shared, without a network."""

import pytest

from minidist.observe.pages import experts

pytestmark = [pytest.mark.site, pytest.mark.timeout(600)]
api = pytest.importorskip("playwright.sync_api", reason="pip install 'minidist[browser]'")
expect = api.expect

PAGE, DOTS = "experts.html", "#drawing svg g:has(title)"


def revealed(page, guess="20"):
    page.fill("#guess", guess)
    page.click("text=Reveal")


def places(page):
    return page.locator(DOTS).evaluate_all("all => all.map((node) => node.style.transform)")


def test_the_first_drawing_is_there_and_the_numbers_are_hidden(opened):
    page = opened(PAGE)
    expect(page.locator(DOTS)).to_have_count(48)
    expect(page.locator("#numbers")).to_contain_text("Choices dropped?")
    expect(page.locator("#matrix table")).to_have_count(0)
    expect(page.get_by_role("button", name="2 Dispatch")).to_be_disabled()


def test_a_guess_reveals_what_the_package_says(opened):
    page, answer = opened(PAGE), experts.answer(**experts.FIRST)
    revealed(page)
    dropped = sum(answer["dropped"])
    expect(page.locator("#status")).to_contain_text(f"{dropped} of 48 choices are dropped")
    expect(page.locator("#numbers")).to_contain_text(f"Choices dropped{dropped}")
    cells = page.locator("#matrix td.number").all_text_contents()
    assert cells == [str(n) for row in answer["matrix"] for n in row]
    expect(page.locator("#text")).to_have_text(answer["words"])
    page.click("#again")
    expect(page.locator("#numbers")).to_contain_text("Choices dropped?")


def test_steps_move_the_dots_by_button_and_by_key(opened):
    page = opened(f"{PAGE}#guess=1&step=0")
    at_home = places(page)
    page.click("text=2 Dispatch")
    expect(page.locator("#status")).to_contain_text("all_to_all brings every row")
    assert places(page) != at_home
    page.locator("#drawing").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#status")).to_contain_text("Compute")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#status")).to_contain_text("Return")
    assert places(page) == at_home


def test_an_edit_redraws_within_200_milliseconds(opened):
    page = opened(f"{PAGE}#guess=1&step=1")
    page.select_option("[data-state=k]", "2")  # the table is there from now on
    expect(page.locator(DOTS)).to_have_count(96)
    spent = page.evaluate(
        """async () => {
          const input = document.querySelector("[data-state=skew]"), from = performance.now();
          const words = document.querySelector("#status").textContent;
          input.value = 5;
          input.dispatchEvent(new Event("input"));
          while (document.querySelector("#status").textContent === words) {
            await new Promise(requestAnimationFrame);
          }
          return performance.now() - from;
        }"""
    )
    assert spent < 200


def test_a_shared_link_restores_everything(opened):
    page = opened(f"{PAGE}#ranks=2&experts=4&k=2&capacity=none&skew=5&guess=7&step=2")
    answer = experts.answer(2, 4, 2, "none", 5)
    expect(page.locator("#status")).to_contain_text("0 of 48 choices are dropped; your guess was 7")
    expect(page.locator("#drawing svg")).to_have_attribute("aria-label", answer["words"])
    assert page.locator("[data-state=capacity]").input_value() == "none"


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (400, "dark")])
def test_axe_finds_nothing_serious_and_the_page_fits_its_window(opened, width, scheme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    page = opened(f"{PAGE}#guess=3&step=1", width, scheme)
    expect(page.locator("#matrix table")).to_have_count(1)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    found = axe.run(page).response["violations"]
    assert [each["id"] for each in found if each["impact"] in ("serious", "critical")] == []
