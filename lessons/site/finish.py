"""The last hand on each page: what the theme leaves undone for those who cannot see or use a mouse.

Icons come from the theme's font, which its style loads; the script that draws them again is three
times as heavy as a page.
"""

import re
from pathlib import Path

REPLACED = {
    r'<script defer src="[^"]*fontawesome\.js[^"]*"></script>': "",
    r'<summary><span class="toctree-toggle"': '<summary aria-label="Pages below">'
    '<span class="toctree-toggle"',
    r"<table (?!tabindex)": '<table tabindex="0" ',  # so that keys can scroll it
    r"<pre>": '<pre tabindex="0">',
}


def finish(app, error: Exception | None) -> None:
    if error is None:
        for page in Path(app.outdir).rglob("*.html"):
            text = page.read_text("utf-8")
            for pattern, replacement in REPLACED.items():
                text = re.sub(pattern, replacement, text)
            page.write_text(text, "utf-8")
