"""A lesson as cells, and what its front matter says: read by the tests of lessons and of pages."""

import ast
import re
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "lessons"
ENTRY = re.compile(r"(\w+): (\[.*?\]|[^,{}\[\]]+)")  # of the one line of YAML that lessons have


@dataclass(frozen=True)
class Cell:
    markdown: bool
    tags: tuple[str, ...]
    text: str  # of a markdown cell without "# "


@dataclass(frozen=True)
class Lesson:
    path: Path

    @property
    def number(self) -> str:
        return self.path.stem.partition("_")[0]

    @cached_property
    def source(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def about(self) -> dict[str, str | list[str]]:
        """Return the front matter: lesson, minutes, needs, leads_to, lab."""
        (line,) = re.findall(r"^#   minidist: \{(.*)\}$", self.source, re.MULTILINE)
        return {
            key: [*filter(None, re.split(r"[\[\], ]+", value))] if "[" in value else value.strip()
            for key, value in ENTRY.findall(line)
        }

    @cached_property
    def cells(self) -> list[Cell]:
        found = []
        for cell in re.split(r"^# %%", self.source, flags=re.MULTILINE)[1:]:
            head, _, text = cell.partition("\n")
            tags = re.search(r"tags=(\[.*?\])", head)
            if markdown := "[markdown]" in head:
                text = re.sub(r"^# ?", "", text, flags=re.MULTILINE)
            found.append(Cell(markdown, tuple(ast.literal_eval(tags[1])) if tags else (), text))
        return found

    @cached_property
    def prose(self) -> str:
        return "\n".join(cell.text for cell in self.cells if cell.markdown)

    @cached_property
    def code(self) -> list[Cell]:
        return [cell for cell in self.cells if not cell.markdown]

    @cached_property
    def headings(self) -> list[str]:
        return re.findall(r"^## (.*)$", self.prose, re.MULTILINE)


LESSONS = [Lesson(path) for path in sorted(FOLDER.glob("[0-9]*.py"))]


def contents() -> str:
    """Return the table of lessons/README.md: a row per lesson, with its question."""
    rows = []
    for lesson in LESSONS:
        title = re.search(r"^# (.*)$", lesson.prose, re.MULTILINE)[1]
        question = re.search(r"\*\*Question\.\*\* (.*?)\n\n", lesson.prose, re.DOTALL)[1]
        words = " ".join(question.split())
        rows.append(f"| [{title}]({lesson.path.name}) | {words} | {lesson.about['minutes']} |")
    return "\n".join(["| lesson | its question | minutes |", "| --- | --- | --- |", *rows])


@cache
def letters_of_the_notation() -> set[str]:
    rows = re.findall(r"^\| (.+?) \|", (FOLDER / "pages" / "notation.md").read_text(), re.MULTILINE)
    return {letter for row in rows for letter in re.findall(r"\$(\\?\w+)\$", row)}
