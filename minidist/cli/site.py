"""`minidist site FOLDER`: the lessons, the API and the READMEs as pages."""

import argparse
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from minidist.errors import WrongInput

EXAMPLES = (
    "minidist site /tmp/site",
    "minidist site /tmp/site --cache /tmp/executed",
    "minidist site public --cache executed",
)
BUILD = Path(__file__).parents[2] / "lessons" / "site" / "build.py"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command and add its arguments."""
    parser.description = "Run every lesson and make a site of them, in a checkout of the project."
    parser.add_argument("folder", metavar="FOLDER", help="where the pages go")
    parser.add_argument(
        "--cache", metavar="FOLDER", help="executed lessons (default: .cache/minidist-site at home)"
    )
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Build the site with Sphinx. ValueError where lessons or Sphinx are missing."""
    if not BUILD.exists():
        raise WrongInput(
            f"there are no lessons beside {Path(__file__).parents[1]}; clone the project"
        )
    if find_spec("myst_nb") is None:
        raise WrongInput("the site needs Sphinx and MyST-NB: pip install 'minidist[site]'")
    cache = ["--cache", given.cache] if given.cache else []
    return subprocess.call([sys.executable, BUILD, given.folder, *cache])
