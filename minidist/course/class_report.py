"""What became of a class's submissions, as a text and as CSV."""

import csv
import io
from collections import Counter
from statistics import mean, median
from unicodedata import normalize

from minidist.course.grade_all import Result
from minidist.course.grader import NOT_BEGUN
from minidist.course.lab import Lab
from minidist.errors import plural

BAR, MOST = 30, 10  # characters of the longest bar; tasks, causes and pairs that are shown
ALIKE = 0.4  # the least share of a pair that is shown
Pairs = dict[tuple[str, str], float]


def summary(lab: Lab, results: list[Result], pairs: Pairs) -> str:
    """Return the table at the end of `minidist lab grade-all`."""
    graded = [result for result in results if result.points]
    causes = Counter(pair for result in graded for pair in result.causes.items())
    failed = Counter(id for result in graded for id in result.causes)
    bands = Counter(10 * result.sum // lab.points for result in graded)
    words = f"{plural(len(results), 'submission')}, {len(results) - len(graded)} not graded"
    sums = [result.sum for result in graded]
    middle = f"; points: mean {mean(sums):.0f}, median {median(sums):g}" if sums else ""
    minutes = f"{sum(result.minutes for result in results):.1f} minutes of grading"
    bars = {
        "Points": [(f"{10 * b} % and more", bands[b]) for b in range(11)],
        "Tasks that most failed": [
            (f"{id} {lab.task(id).title}", n) for id, n in failed.most_common(MOST)
        ],
        "Commonest causes": [
            (why if why == NOT_BEGUN else f"{id}: {why}", n)
            for (id, why), n in causes.most_common(MOST)
        ],
    }
    lines = [f"Lab {lab.number}, {lab.title}: {words}{middle}; {minutes}"]
    for title, rows in bars.items():
        most = max([n for _, n in rows], default=0) or 1
        lines += ["", title]
        lines += [f"{n:>5}  {'#' * round(BAR * n / most):<{BAR}}  {label}" for label, n in rows]
    ranked = [f"{place:>5}  {r.score:.4f}  {r.name}" for place, r in ranking(results)]
    alike = [f"{share:>7.2f}  {a}  {b}" for (a, b), share in pairs.items() if share >= ALIKE]
    more = {
        f"Leaderboard: {lab.leaderboard}": ranked if lab.leaderboard else [],
        "Pairs that share code; read them before you judge": alike[:MOST],
        "Names": claims(results),
        "Not graded": [f"  {result.name}: {result.why}" for result in results if result.why],
    }
    return "\n".join([*lines, *(x for t, own in more.items() if own for x in ("", t, *own))])


def ranking(results: list[Result]) -> list[tuple[int, Result]]:
    """Return (place, result) of those that have a score; equal scores share a place."""
    found = sorted((r for r in results if r.score is not None), key=lambda r: (r.score, r.name))
    scores = [result.score for result in found]
    return [(1 + scores.index(result.score), result) for result in found]


def claims(results: list[Result]) -> list[str]:
    """Return a line for each submission that names a classmate, and two that name one student.

    A submission's student is in its lab.txt; a classmate is one whose folder has the name.
    """
    lines, named = [], dict[str, list[str]]()
    for result in results:
        stem = result.student or result.name.lower().removesuffix(".zip")
        named.setdefault(stem, []).append(result.name)
        first = result.student.partition("@")[0]
        if first and first not in result.name.lower():
            others = [r.name for r in results if first in r.name.lower()]
            lines += [f"  {result.name} names {result.student}, as {name}" for name in others]
    twice = [f"  {who}: {', '.join(own)}" for who, own in named.items() if len(own) > 1]
    nobody = [result.name for result in results if not result.student and not result.why]
    if nobody and len(nobody) < len([result for result in results if not result.why]):
        twice.append(f"  no student: {', '.join(nobody)}")
    return lines + twice


def as_csv(lab: Lab, results: list[Result], like: dict[str, float], pairs: Pairs) -> str:
    """Return a row per submission; a spreadsheet shall not take a name for a formula.

    like   {name: its share with the package}
    pairs  most alike first: the row names the first one, and the share
    """
    places: dict[str, list] = {r.name: [f"{r.score:.4f}", place] for place, r in ranking(results)}
    ids = [task.id for task in lab.tasks]
    head = ["name", "student", *ids, "sum", "seed", "minutes", "why"]
    rows: list[list] = [[*head, "like the package", "like", "share"]]
    for r in results:
        row: list = [r.name, r.student, *(r.points.get(id, "") for id in ids)]
        row += [r.sum if r.points else "", r.seed, round(r.minutes, 2), r.why]
        row += [f"{like[r.name]:.2f}" if r.name in like else ""]
        nearest = next((pair for pair in pairs if r.name in pair), None)
        others = [name for name in nearest or () if name != r.name]
        rows.append([*row, *others, f"{pairs[nearest]:.2f}"] if nearest else [*row, "", ""])
    if lab.leaderboard:
        more = [["score", "place"], *(places.get(r.name, ["", ""]) for r in results)]
        rows = [row + own for row, own in zip(rows, more, strict=True)]
    text = io.StringIO()
    csv.writer(text).writerows([_no_formula(str(cell)) for cell in row] for row in rows)
    return text.getvalue()


def _no_formula(cell: str) -> str:
    plain = normalize("NFKC", cell).lstrip()  # full-width signs are signs to some spreadsheets
    return f"'{cell}" if plain.startswith(("=", "+", "-", "\u2212", "@")) else cell
