"""Links of the repository as links of the site: a script is a page, a source file gets a page."""

import os
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\]\(((?!https?:|mailto:)[^)\s#]+)(#[^)\s]*)?\)")
FENCE = re.compile(r"(^```.*?^```|`[^`\n]*`)", re.DOTALL | re.MULTILINE)
INTERACTIVE = re.compile(r"\[([^\]]*)\]\([^)\s]*minidist/observe/pages/static/(\w+\.html)\)")


class Links:
    """Rewrites links, and notes which source files need a page."""

    def __init__(self) -> None:
        self.sources: set[str] = set()

    def rewrite(self, text: str, path: Path, page: str) -> str:
        """Return the Markdown of a file for a page, with its links to other pages."""

        def moved(link: re.Match) -> str:
            target = (path.parent / link[1]).resolve().relative_to(ROOT)
            place = os.path.relpath(self.page_of(target), Path(page).parent)
            return f"]({place}{link[2] or ''})"

        up = "../" * (len(Path(page).parts) - 1)  # Sphinx does not know the interactive pages
        parts = FENCE.split(text)  # at odd places: code, which stays as it is
        for i in range(0, len(parts), 2):
            anchors = INTERACTIVE.sub(rf'<a href="{up}explore/\2">\1</a>', parts[i])
            parts[i] = LINK.sub(moved, anchors)
        return "".join(parts)

    def page_of(self, target: Path) -> str:
        """Return the page of a file or folder, relative to the site."""
        if (ROOT / target).is_dir():
            inside = [target / name for name in ("README.md", "__init__.py")]
            found = [each for each in inside if (ROOT / each).exists()]
            if not found:
                raise ValueError(f"no page for the folder {target}; link to one of its files")
            return self.page_of(found[0])
        if target.suffix in (".png", ".svg", ".gif"):
            return str(target)
        if target.suffix == ".md":
            return page_of_markdown(target)
        if target.parent == Path("lessons"):
            return str(target.with_suffix(".ipynb"))
        self.sources.add(str(target))
        return f"source/{target}.md"

    def write_sources(self, staged: Path) -> None:
        """Write a page for each source file that something links to."""
        for source in sorted(self.sources):
            page = staged / "source" / f"{source}.md"
            page.parent.mkdir(parents=True, exist_ok=True)
            path = os.path.relpath(ROOT / source, page.parent)
            languages = {".py": "python", ".toml": "toml", ".yml": "yaml"}
            language = languages.get(Path(source).suffix, "text")
            page.write_text(
                f"---\norphan: true\nnosearch: true\n---\n# `{source}`\n\n"
                f"```{{literalinclude}} {path}\n:language: {language}\n:linenos:\n```\n"
            )


def markdown_pages() -> dict[str, Path]:
    """Return {page: file} of lessons/pages, the package's READMEs, and what else is a page."""
    paths = [*(ROOT / "lessons" / "pages").glob("*.md"), *(ROOT / "minidist").rglob("README.md")]
    paths += [ROOT / name for name in ("README.md", "tests/README.md", ".github/CONTRIBUTING.md")]
    paths.append(ROOT / "lessons" / "zh" / "README.md")
    return {page_of_markdown(path.relative_to(ROOT)): path for path in paths}


def page_of_markdown(target: Path) -> str:
    """Return the page of a Markdown file: pages/..., or guide/ for the READMEs of the package."""
    if target.parts[:2] == ("lessons", "pages"):
        return str(Path(*target.parts[1:]))
    if target == Path("lessons/zh/README.md"):
        return "zh/index.md"
    if target == Path("lessons/README.md"):
        return "lessons/index.md"
    if target.name != "README.md":
        return f"guide/{target.stem.lower()}.md"
    return f"guide/{'_'.join(target.parent.parts) or 'readme'}.md"
