"""A picture that moves, of a page that answers: schedules are chosen, one is broken and repaired.

    cd lessons && python -m support.page_movie ../figures/moving/explore.gif

It opens the page of `minidist explore` in Chromium (pip install -e ".[browser]"; apt install
chromium) and photographs it when the page has answered.
"""

import shutil
import sys
import threading
from io import BytesIO
from pathlib import Path

from PIL import Image

from minidist.observe.pages.server import Server

WIDTH, HEIGHT = 960, 500
MILLISECONDS = 2400  # that a step is shown
COMPACT = ".note, .short, .under, header { display: none !important }"
STEPS = {  # what is asked, and what the page then shows
    "schedule=gpipe": "33 units",
    "schedule=1f1b": "33 units",
    "schedule=zb_h1&path=yes": "27 units",
    "schedule=zb_h1": "27 units",
}


def photographs(page) -> list[Image.Image]:
    """Return the pictures of the steps."""
    taken = []

    def take(seen: str) -> None:
        page.wait_for_function("seen => document.body.innerText.includes(seen)", arg=seen)
        page.evaluate("scrollTo(0, 0)")
        top = page.locator(".controls").first.bounding_box()["y"] - 8
        area = {"x": 0, "y": top, "width": WIDTH, "height": HEIGHT}
        shot = page.screenshot(clip=area, full_page=True, animations="disabled")
        taken.append(Image.open(BytesIO(shot)).convert("RGB"))

    for asked, seen in STEPS.items():
        page.evaluate("asked => { location.hash = asked }", asked)
        take(seen)
    right = page.input_value("#program")
    page.fill("#program", right.replace("I0 W0", "W0 I0", 1))
    take("rank 0, action 4")
    page.fill("#program", right)
    take("27 units")
    return taken


def save(taken: list[Image.Image], path: Path) -> None:
    """Write a GIF of pictures with one palette."""
    sheet = Image.new("RGB", (WIDTH, HEIGHT * len(taken)))
    for number, picture in enumerate(taken):
        sheet.paste(picture, (0, HEIGHT * number))
    palette = sheet.quantize(64)
    drawn = [picture.quantize(palette=palette, dither=Image.Dither.NONE) for picture in taken]
    first, *others = drawn
    first.save(path, save_all=True, append_images=others, duration=MILLISECONDS, loop=0)


def main(path: Path) -> None:
    from playwright.sync_api import sync_playwright

    with Server() as server, sync_playwright() as playwright:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        program = shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        context = browser.new_context(viewport={"width": WIDTH, "height": 900}, bypass_csp=True)
        page = context.new_page()
        page.goto(server.address.replace("/?", "/schedules.html?"))
        page.add_style_tag(content=COMPACT)
        save(photographs(page), path)
        browser.close()
        server.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
