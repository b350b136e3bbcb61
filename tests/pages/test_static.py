"""What the pages' files say of each other."""

import re

from minidist.observe.pages.build import STATIC


def test_every_colour_that_a_page_uses_is_defined():
    """A style sheet does not say that a variable is missing: what has its colour is not seen."""
    texts = {path.name: path.read_text("utf-8") for path in STATIC.iterdir()}
    pages = {name: text + texts["page.css"] for name, text in texts.items()}
    for name, text in pages.items():
        defined = set(re.findall(r"(--[a-z][\w-]*)\s*:", text))
        used = set(re.findall(r"""(?:var\(\s*|["'`])(--[a-z][\w-]*)""", text))
        prefixes = {each for each in used if each.endswith("-")}  # `--of-${kind}`
        assert used - prefixes <= defined, f"{name}: {used - prefixes - defined}"
        assert all(any(each.startswith(prefix) for each in defined) for prefix in prefixes), name
