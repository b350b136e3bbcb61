"""Lessons read as pages of one book: the same parts, one notation, links that lead somewhere."""

import ast
import importlib
import re
from collections import Counter
from functools import cache

from tests.lessons.pages import FOLDER, LESSONS, ROOT, contents, letters_of_the_notation

NUMBERS = [lesson.number for lesson in LESSONS]
TAGS = {"setup", "hide-input", "hide-output", "exercise"}
EMPTY_HEADINGS = {"problem", "picture", "math", "code", "measurement", "exercises", "summary"}
# What still reads in a script: no fraction, no matrix, no brackets that grow.
TEX = set(
    r"""\sum \max \min \log \exp \sqrt \qquad \quad \le \ge \ne \times \cdot \to \approx \in \infty
    \alpha \beta \tau \delta \eta \lceil \rceil \lfloor \rfloor \ldots \partial \pm \ll \gg \{ \}
    \_ \, \%""".split()
)
LETTER = re.compile(r"\\?[A-Za-z]+")


def formulas(text: str) -> list[str]:
    """Return what is between dollars, without code."""
    text = re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL)
    return [a or b for a, b in re.findall(r"\$\$(.+?)\$\$|\$(.+?)\$", text, re.DOTALL)]


def letters(formula: str) -> set[str]:
    """Return what a formula names: letters, and words such as TF; no words of an index."""
    formula = re.sub(r"[_^]\{[^}]*\}|_[A-Za-z0-9]", "", formula)
    found = {word for word in LETTER.findall(formula) if word not in TEX}
    return found | {word for word in LETTER.findall(formula) if word in {r"\alpha", r"\beta"}}


def test_front_matter_says_what_a_lesson_needs_and_leads_to():
    for lesson in LESSONS:
        assert lesson.source.startswith("# ---\n# jupyter:\n#   kernelspec: {name: python3, ")
        about = lesson.about
        assert set(about) == {"lesson", "minutes", "needs", "leads_to", "lab"}
        assert about["lesson"] == lesson.number.lstrip("0") or about["lesson"] == "0"
        assert 10 <= int(about["minutes"]) <= 45
        for number in [*about["needs"], *about["leads_to"]]:
            assert number.zfill(2) in NUMBERS or number in NUMBERS, f"there is no lesson {number}"
        labs = {path.stem for path in (ROOT / "minidist" / "course" / "labs").iterdir()}
        assert about["lab"] in labs | {"none"}


def test_it_opens_with_a_title_and_one_question():
    for lesson in LESSONS:
        first = lesson.cells[0]
        assert first.markdown
        number = lesson.number.lstrip("0") or "0"
        assert first.text.startswith(f"\n(lesson-{number})=\n# {number}. "[1:]), first.text[:80]
        assert lesson.prose.count("**Question.**") == 1 and "**Question.**" in first.text
        assert len(re.findall(r"^# ", lesson.prose, re.MULTILINE)) == 1


def test_it_has_the_words_of_a_page_its_idea_near_the_top_and_the_names_of_others_at_its_end():
    for lesson in LESSONS:
        assert len(lesson.prose.split()) <= 1250, f"{lesson.path.name}; about 1,000 are wanted"
        shown = next(cell for cell in lesson.code if not cell.tags)  # no set-up
        assert lesson.source[: lesson.source.index(shown.text)].count("\n") <= 90
        assert not {heading.lower() for heading in lesson.headings} & EMPTY_HEADINGS
        assert (
            len(lesson.headings) == len(set(lesson.headings)) and "At work" in lesson.headings[-1]
        )
        table = lesson.prose.partition("## At work")[2]
        assert "| here | PyTorch | Megatron-LM | DeepSpeed | JAX |" in table


def test_set_up_plots_and_answers_are_folded():
    for lesson in LESSONS:
        assert {tag for cell in lesson.cells for tag in cell.tags} <= TAGS
        setup = lesson.code[0]
        assert setup.tags == ("setup", "hide-input") and "\nbegin()\n" in setup.text
        for cell in lesson.code:
            imports = re.search(r"^(import|from) ", cell.text, re.MULTILINE)
            assert not imports or cell is setup, f"an import in another cell: {cell.text[:60]}"
            if "figures.show(" in cell.text:
                assert cell.tags == ("hide-input",), "a plot is not folded"
        predicted = lesson.prose.count(":::{admonition} Predict before you run")
        assert predicted == 3, f"{predicted} boxes in which the reader predicts"
        assert lesson.prose.count(":::{dropdown} Where does the number come from?") >= 1
        assert lesson.prose.count(":::") % 2 == 0


def test_its_mathematics_reads_in_a_script():
    for lesson in LESSONS:
        for formula in formulas(lesson.prose):
            used = set(re.findall(r"\\(?:[A-Za-z]+|.)", formula))
            assert used <= TEX, f"not in the TeX that is allowed: {sorted(used - TEX)} in {formula}"


def test_a_letter_has_the_meaning_of_the_notation():
    known = letters_of_the_notation()
    for lesson in LESSONS:
        for formula in formulas(lesson.prose):
            assert letters(formula) <= known, f"{lesson.path.name}: ${formula}$"


def test_its_figure_has_a_name_a_caption_and_a_text_for_who_cannot_see_it():
    for lesson in LESSONS:
        (cell,) = [cell for cell in lesson.code if "figures.show(" in cell.text]
        last = ast.parse(cell.text).body[-1]
        assert isinstance(last, ast.Expr) and isinstance(last.value, ast.Call)
        assert ast.unparse(last.value.func) == "figures.show"
        assert ast.literal_eval(last.value.args[1]) == lesson.path.stem
        words = {key.arg: ast.literal_eval(key.value) for key in last.value.keywords}
        assert set(words) == {"caption", "alt"} and min(map(len, words.values())) > 20
        assert (ROOT / "figures" / f"{lesson.path.stem}.png").exists()


def test_it_ends_with_three_exercises_one_of_which_asks_why_something_broke():
    for lesson in LESSONS:
        exercises = [heading for heading in lesson.headings if heading.startswith("Exercise")]
        assert [heading.split(":")[0] for heading in exercises] == [
            f"Exercise {n}" for n in (1, 2, 3)
        ]
        assert sum("why did this break?" in heading for heading in exercises) == 1
        cells = [cell for cell in lesson.code if "exercise" in cell.tags]
        for number, cell in enumerate(cells, 1):
            assert f'exercise.judge("{lesson.number}.{number}", ' in cell.text
            assert "raise NotImplementedError" in cell.text
        assert len(cells) == 3


def test_other_lessons_are_links():
    for lesson in LESSONS:
        words = re.sub(r"\[[^\]]*\]\([^)]*\)", "", lesson.prose, flags=re.DOTALL)
        assert not re.findall(r"\b[Ll]essons? \d+", words)


def test_the_menu_of_the_site_leads_to_pages_of_the_repository(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER / "site")
    pages = importlib.import_module("links").markdown_pages()
    index = (FOLDER / "site" / "index.md").read_text(encoding="utf-8")
    menu = re.findall(r"\b((?:guide|pages)/\w+)>?$", index, re.MULTILINE)
    assert len(menu) > 10 and {f"{page}.md" for page in menu} <= pages.keys()


@cache
def anchors(page) -> set[str]:
    """Return the anchors of a Markdown page: its labels, and its headings in lower case."""
    text = page.read_text(encoding="utf-8")
    labels = set(re.findall(r"^\(([\w-]+)\)=$", text, re.MULTILINE))
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return labels | {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_a_link_leads_somewhere():
    pages = [*FOLDER.glob("*.md"), *FOLDER.glob("pages/**/*.md")]
    texts = {page: page.read_text(encoding="utf-8") for page in pages}
    texts |= {lesson.path: lesson.prose for lesson in LESSONS}
    for page, text in texts.items():
        for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", text)):
            if not target.startswith("http"):
                path, _, anchor = target.partition("#")
                file = page.parent / path if path else page
                assert file.exists(), f"{page} links to {target}"
                assert not anchor or anchor in anchors(file), f"{page} links to {target}"


def test_a_paper_of_a_lesson_is_in_the_bibliography():
    known = (FOLDER / "pages" / "bibliography.md").read_text(encoding="utf-8")
    for lesson in LESSONS:
        for link in re.findall(r"\]\((https?://[^)]+)\)", lesson.prose):
            assert link in known, f"{link} is not in pages/bibliography.md"


def test_a_chinese_lesson_has_the_cells_and_the_links_of_the_english_one():
    for path in sorted((FOLDER / "zh").glob("[0-9]*.md")):
        (lesson,) = [lesson for lesson in LESSONS if lesson.path.stem == path.stem]
        cells = re.split(r"^\+\+\+\n", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        english = [cell.text for cell in lesson.cells if cell.markdown]
        assert len(cells) == len(english)
        for chinese, text in zip(cells, english, strict=True):
            assert len(re.findall(r"^## ", chinese, re.M)) == len(re.findall(r"^## ", text, re.M))
            assert chinese.count(":::") == text.count(":::")
            chinese = chinese.replace("](../", "](")  # it is one folder deeper
            links = re.findall(r"\]\(([^)]+)\)", chinese)
            assert Counter(links) == Counter(re.findall(r"\]\(([^)]+)\)", text))


def test_the_table_of_contents_has_every_lesson_with_its_question():
    expected = contents()
    assert expected in (FOLDER / "README.md").read_text(encoding="utf-8"), expected
