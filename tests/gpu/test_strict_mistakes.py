"""Mistakes that only a GPU shows are found by the stand-in: each is made, and a test must fail."""

import re
import tomllib
from pathlib import Path

import pytest

from minidist.verify.mistakes.edits import Edit
from minidist.verify.mistakes.overlay import PACKAGE
from tests.gpu.test_strict_device import LIMIT, strict

MISTAKES = tomllib.loads(
    (Path(__file__).parents[1] / "strict_device" / "mistakes.toml").read_text(encoding="utf-8")
)


def wrong(mistake: dict) -> dict[str, str]:
    """Return {path in the package: source} with the mistake made."""
    edit = Edit(mistake["function"], mistake["by"], mistake.get("replace", ""))
    return {edit.path: edit.apply((PACKAGE / edit.path).read_text(encoding="utf-8"))}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_can_be_made(name):
    for path, source in wrong(MISTAKES[name]).items():
        compile(source, path, "exec")


@pytest.mark.slow
@pytest.mark.timeout(LIMIT)
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found_by_the_stand_in_and_it_says_why(name, tmp_path):
    for path, source in wrong(MISTAKES[name]).items():
        place = tmp_path / "minidist" / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(source, encoding="utf-8")
    tests = MISTAKES[name]["tests"].split()
    done = strict(f"--impl={tmp_path}", "-x", "-m", "gpu and not slow", *tests)
    assert done.returncode == 1, f"{name} survives:\n{done.stdout[-2000:]}"
    assert re.search(MISTAKES[name]["says"], done.stdout), done.stdout[-4000:]
