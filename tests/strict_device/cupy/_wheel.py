"""The signatures and loops that a real wheel has, as `make_signatures.py` has written them."""

from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "signatures"


@cache
def lines(version: int = 14) -> dict[str, str]:
    """Return name -> the rest of its line, "(parameters)" and a ufunc's loops."""
    text = (FOLDER / f"cupy-{version}.txt").read_text()
    starts = (line.index("(") for line in text.splitlines())
    return {line[:at]: line[at:] for line, at in zip(text.splitlines(), starts, strict=True)}


@cache
def loops(name: str) -> list[tuple[str, str]]:
    """Return a ufunc's loops, ("ff", "f") for ff->f, in the order in which CuPy tries them."""
    words = lines()[name].rpartition(") ")[2].split()
    return [tuple(word.split("->")) for word in words if "V" not in word]
