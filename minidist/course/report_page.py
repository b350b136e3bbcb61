"""What became of a class's submissions, as a text, as CSV, and as a page without scripts."""

import csv
import io
from collections import Counter
from html import escape
from statistics import mean, median
from unicodedata import normalize

from minidist.course.grade_all import Result
from minidist.course.grader import NOT_BEGUN
from minidist.course.lab import Lab
from minidist.errors import plural

BAR, MOST = 30, 10  # characters of the longest bar; tasks and causes that are shown
Bars = list[tuple[str, int]]

PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --bar: #0072b2; --line: #d1d5da; }}
@media (prefers-color-scheme: dark) {{ :root {{ --bar: #56b4e9; --line: #48566b; }} }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 1rem auto; padding: 1rem; }}
rect {{ fill: var(--bar); }} .wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: 0.9rem; }}
.wide tr:first-child {{ font-weight: bold; }}
td {{ padding: 0.2rem 0.8rem 0.2rem 0; border-bottom: 1px solid var(--line); }}
</style>
<h1>{title}</h1>
<p>{head}</p>
{pictures}
<h2>Submissions</h2>
<div class="wide"><table>{rows}</table></div>
</html>
"""


def head(results: list[Result]) -> str:
    """Return how many there are, and their points."""
    sums = [result.sum for result in results if result.points]
    words = f"{plural(len(results), 'submission')}, {len(results) - len(sums)} not graded"
    middle = f"; points: mean {mean(sums):.0f}, median {median(sums):g}" if sums else ""
    return f"{words}{middle}; {sum(r.minutes for r in results):.1f} minutes of grading"


def bars(lab: Lab, results: list[Result]) -> dict[str, Bars]:
    """Return {title: [(words, number of submissions)]}: points, tasks that failed, causes."""
    graded = [result for result in results if result.points]
    pairs = [pair for result in graded for pair in result.causes.items()]
    bands = Counter(10 * result.sum // lab.points for result in graded)
    points = [(f"{10 * b} to {10 * b + 9} %", bands[b]) for b in range(10)]
    failed = Counter(id for id, _ in pairs)
    tasks = [(f"{id} {lab.task(id).title}", number) for id, number in failed.most_common(MOST)]
    causes = Counter(why if why == NOT_BEGUN else f"{id}: {why}" for id, why in pairs)
    return {
        "Points": [*points, ("100 %", bands[10])],
        "Tasks that most failed": tasks,
        "Commonest causes": causes.most_common(MOST),
    }


def ranking(results: list[Result]) -> list[tuple[int, Result]]:
    """Return (place, result) of those that have a score; equal scores share a place."""
    found = sorted((r for r in results if r.score is not None), key=lambda r: (r.score, r.name))
    scores = [result.score for result in found]
    return [(1 + scores.index(result.score), result) for result in found]


def summary(lab: Lab, results: list[Result]) -> str:
    """Return the table at the end of `minidist lab grade-all`."""
    lines = [f"Lab {lab.number}, {lab.title}: {head(results)}"]
    for title, found in bars(lab, results).items():
        most = max((number for _, number in found), default=0) or 1
        lines += ["", title]
        lines += [f"{n:>5}  {'#' * round(BAR * n / most):<{BAR}}  {words}" for words, n in found]
    if lab.leaderboard:
        lines += ["", f"Leaderboard: {lab.leaderboard}"]
        lines += [f"{place:>5}  {r.score:.4f}  {r.name}" for place, r in ranking(results)]
    if odd := claims(results):
        lines += ["", "Submissions that name one student, or none", *(f"  {line}" for line in odd)]
    if refused := [f"  {result.name}: {result.why}" for result in results if result.why]:
        lines += ["", "Not graded", *refused]
    return "\n".join(lines)


def table(lab: Lab, results: list[Result]) -> list[list[str]]:
    """Return a head and a row per submission: name, student, points per task, sum, and so on.

    And score and place, if the lab has a leaderboard.
    """
    places = {r.name: [f"{r.score:.4f}", str(place)] for place, r in ranking(results)}
    ids = [task.id for task in lab.tasks]
    rows = [["name", "student", *ids, "sum", "seed", "minutes", "why"]]
    for r in results:
        points = [r.points.get(id, "") for id in ids]
        sum_ = r.sum if r.points else ""
        last = [*points, sum_, r.seed, round(r.minutes, 2), r.why]
        rows.append([r.name, r.student, *map(str, last)])
    if lab.leaderboard:
        more = [["score", "place"], *(places.get(r.name, ["", ""]) for r in results)]
        rows = [row + own for row, own in zip(rows, more, strict=True)]
    return rows


def as_csv(lab: Lab, results: list[Result]) -> str:
    """Return the table as CSV; a spreadsheet shall not take a name for a formula."""
    text = io.StringIO()
    rows = table(lab, results)
    csv.writer(text).writerows([_no_formula(cell) for cell in row] for row in rows)
    return text.getvalue()


def _no_formula(cell: str) -> str:
    plain = normalize("NFKC", cell).lstrip()  # full-width signs are signs to some spreadsheets
    return f"'{cell}" if plain.startswith(("=", "+", "-", "\u2212", "@")) else cell


def claims(results: list[Result]) -> list[str]:
    """Return a line for each student whom several submissions name, and one for those with none."""
    named: dict[str, list[str]] = {}
    for result in results:
        if not result.why:
            named.setdefault(result.student, []).append(result.name)
    nobody = named.pop("", [])
    lines = [f"{who}: {', '.join(own)}" for who, own in named.items() if len(own) > 1]
    return [*lines, f"no student: {', '.join(nobody)}"] if named and nobody else lines


def page(lab: Lab, results: list[Result]) -> str:
    """Return one HTML page."""
    title = escape(f"Lab {lab.number}, {lab.title}")
    drawn = "\n".join(_drawn(name, found) for name, found in bars(lab, results).items())
    if lab.leaderboard:
        drawn += _ranked(lab, results)
    rows = "\n".join(f"<tr><td>{'<td>'.join(map(escape, r))}" for r in table(lab, results))
    return PAGE.format(title=title, head=escape(head(results)), pictures=drawn, rows=rows)


def _drawn(title: str, found: Bars) -> str:
    most = max((number for _, number in found), default=0) or 1
    rows = "\n".join(
        f'<tr><td>{number}<td><svg width="200" height="14" aria-hidden="true">'
        f'<rect width="{200 * number / most:.0f}" height="14"/></svg><td>{escape(words)}'
        for words, number in found
    )
    return f"<h2>{title}</h2>\n<table>{rows}</table>"


def _ranked(lab: Lab, results: list[Result]) -> str:
    rows = "\n".join(
        f"<tr><td>{place}<td>{r.score:.4f}<td>{escape(r.name)}" for place, r in ranking(results)
    )
    return f"\n<h2>Leaderboard: {escape(lab.leaderboard)}</h2>\n<table>{rows}</table>"
