"""Sphinx's settings of the site; build.py calls it."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import api
import finish
import mathematics

from minidist import __version__

project, author, version = "minidist", "The minidist authors", __version__
extensions = [
    "myst_nb",
    "sphinx_design",
    "sphinx_copybutton",
    "sphinx.ext.autodoc",
    "notfound.extension",
]
html_theme = "sphinx_book_theme"
html_title = "minidist"
html_favicon = "static/icon.svg"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_math_renderer = "mathml"
html_context = {"default_mode": "auto"}
html_theme_options = {
    "use_download_button": True,
    "use_fullscreen_button": False,
    "show_toc_level": 2,
    "navigation_with_keys": False,
    **{f"navbar_{place}": [] for place in ("start", "center", "end", "persistent")},
}
exclude_patterns = ["figures"]
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # build.py has run the lessons
nb_merge_streams = True
nb_code_prompt_show = "Show the {type}"
nb_code_prompt_hide = "Hide the {type}"
copybutton_exclude = ".linenos, .gp, .go"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
sd_card_legacy_separators = False
notfound_urls_prefix = os.environ.get("SITE_PREFIX", "/")  # the folder on a host


def setup(app) -> None:
    mathematics.setup(app)
    app.connect("autodoc-process-docstring", api.as_it_is)
    app.connect("build-finished", finish.finish)
