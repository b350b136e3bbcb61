"""What Sphinx reads: lessons as notebooks, their gallery, and the Markdown of the repository."""

import ast
import re
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import jupytext
import nbformat
from links import ROOT, Links, markdown_pages
from nbformat import NotebookNode
from nbformat.v4 import new_markdown_cell

LESSONS = ROOT / "lessons"
TORCH = "check_your_own"  # the one page that is run only where PyTorch is
JUDGE = re.compile(r"exercise\.judge\(\s*\"(\w+)\.(\d)\"")


@dataclass(frozen=True)
class Page:
    """A script of lessons/."""

    path: Path

    @cached_property
    def source(self) -> str:
        return self.path.read_text("utf-8")

    @property
    def number(self) -> str:
        return self.path.stem.partition("_")[0]

    @property
    def page(self) -> str:
        return f"lessons/{self.path.stem}.ipynb"

    @property
    def needs_torch(self) -> bool:
        return self.path.stem == TORCH

    @cached_property
    def about(self) -> dict:
        return self.notebook().metadata.get("minidist", {})

    @cached_property
    def title(self) -> str:
        return re.search(r"^# # (.*)$", self.source, re.MULTILINE)[1]

    @cached_property
    def question(self) -> str:
        (text,) = re.findall(r"\*\*Question\.\*\* (.*?)\n#\n", self.source, re.DOTALL)
        return text.replace("\n# ", " ")

    def notebook(self) -> NotebookNode:
        """Return the script as a notebook whose figure has a caption and words for its place."""
        notebook = jupytext.read(self.path)
        notebook.metadata["language_info"] = {"name": "python"}
        for cell in notebook.cells:
            if cell.cell_type == "code" and "figures.show(" in cell.source:
                cell.metadata["mystnb"] = figure_of(cell.source)
        return notebook

    def finished(self, notebook: NotebookNode, links: Links) -> NotebookNode:
        """Add hints and solutions behind exercises, and what to read before and after."""
        cells = []
        for cell in notebook.cells:
            if cell.cell_type == "markdown":
                cell.source = links.rewrite(cell.source, self.path, self.page)
            cells.append(cell)
            if exercise := JUDGE.search(cell.source):
                cells.append(new_markdown_cell(folds(*exercise.groups())))
        if self.about:
            cells.append(new_markdown_cell(self._neighbours()))
        notebook.cells = cells
        return notebook

    def _neighbours(self) -> str:
        def named(numbers: list) -> str:
            wanted = [str(number).zfill(2) for number in numbers]
            found = [one for one in lessons() if one.number.zfill(2) in wanted]
            return ", ".join(f"[{one.title}]({one.path.stem}.ipynb)" for one in found) or "nothing"

        needs, leads_to, lab = (self.about[key] for key in ("needs", "leads_to", "lab"))
        words = f"**Read before:** {named(needs)}. **Then:** {named(leads_to)}."
        return words + (f" **Lab:** `minidist lab new {lab}`." if lab != "none" else "")


@cache
def lessons() -> list[Page]:
    return [Page(path) for path in [*sorted(LESSONS.glob("[0-9]*.py")), LESSONS / f"{TORCH}.py"]]


def figure_of(source: str) -> dict:
    """Return MyST-NB's metadata of a figure, from the arguments of figures.show."""
    call = ast.parse(source).body[-1].value
    words = {key.arg: ast.literal_eval(key.value) for key in call.keywords}
    figure = {"name": f"figure-{ast.literal_eval(call.args[1])}", "caption": words["caption"]}
    return {"figure": figure, "image": {"alt": words["alt"]}}


def folds(lesson: str, number: str) -> str:
    """Return the hints and the solution of an exercise, folded."""
    source = (LESSONS / "checks" / f"{lesson}.py").read_text("utf-8")
    named = {}
    for node in ast.parse(source).body:
        names = [each.id for each in getattr(node, "targets", []) if isinstance(each, ast.Name)]
        named |= dict.fromkeys([*names, getattr(node, "name", None)], node)
    hints = ast.literal_eval(named[f"hints_{number}"].value)
    solution = ast.get_source_segment(source, named[f"solution_{number}"])
    folded = [f":::{{dropdown}} Hint {i}\n{hint}\n:::" for i, hint in enumerate(hints, 1)]
    folded.append(f":::{{dropdown}} A worked solution\n```python\n{solution}\n```\n:::")
    return "\n".join(folded)


def write(notebook: NotebookNode, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    notebook.metadata.pop("jupytext", None)
    nbformat.write(notebook, path)


def write_chinese(executed: dict[Page, NotebookNode], staged: Path, links: Links) -> None:
    """Write the lessons that are translated: the prose of zh/NN.md, the code and its outputs."""
    for path in sorted((LESSONS / "zh").glob("[0-9]*.md")):
        notebook = next(found for one, found in executed.items() if one.path.stem == path.stem)
        page = f"zh/{path.stem}.ipynb"
        prose = iter(re.split(r"^\+\+\+\n", path.read_text("utf-8"), flags=re.MULTILINE))
        for cell in notebook.cells:
            if cell.cell_type == "markdown" and "dropdown} Hint 1" not in cell.source:
                cell.source = links.rewrite(next(prose, ""), path, page)
            cell.metadata.get("mystnb", {}).get("figure", {}).pop("name", None)
        write(notebook, staged / page)


def write_markdown(staged: Path, links: Links) -> None:
    """Write the front page, the gallery of lessons, lessons/pages, and the package's READMEs."""
    front = {"index.md": LESSONS / "site" / "index.md"}
    for page, path in (markdown_pages() | front).items():
        (staged / page).parent.mkdir(parents=True, exist_ok=True)
        (staged / page).write_text(links.rewrite(path.read_text("utf-8"), path, page), "utf-8")
    cards = links.rewrite(gallery(), LESSONS / "README.md", "lessons/index.md")
    (staged / "lessons" / "index.md").write_text(cards, "utf-8")


def gallery() -> str:
    """Return a page with a card per lesson: its figure, its title, its question."""
    cards = [
        f":::{{grid-item-card}} {one.title}\n:link: {one.path.stem}\n:link-type: doc\n"
        f":img-top: ../figures/{one.path.stem}.png\n:img-alt: Its figure\n"
        f"{one.question}\n\n{one.about['minutes']} minutes\n:::"
        for one in lessons()
        if one.about
    ]
    head = "# Lessons\n\nScript, notebook and page in one; [the path](pages/path.md) orders them."
    contents = "```{toctree}\n:hidden:\n:glob:\n\n[0-9]*\n```\n"
    return "\n".join([head, "", contents, "::::{grid} 1 2 2 3\n:gutter: 3\n", *cards, "::::", ""])
