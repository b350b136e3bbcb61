"""A grade as a text, as JUnit XML, and as Gradescope's results.json.

Nothing here trusts the output of the student's code: it is shortened, and `plain` shows what is
unprintable as numbers.
"""

import json
import textwrap
from xml.etree import ElementTree

from minidist.course.grader import NOT_BEGUN, Grade, Verdict
from minidist.course.sandbox.untrusted import plain

LINES, WIDTH = 30, 160  # of the message about one test
LINK = 1500  # characters of the longest line that is not folded, if it is one word
SHOWN = 3  # failed tests of a task


def text(grade: Grade, foot: bool = True) -> str:
    """Return a line per task, what is wrong below it, and the sum.

    foot  name the seed and the defences, too
    """
    lab = grade.lab
    wide = len(str(lab.points))
    student = f", for {lab.student}" if lab.student else ""
    lines = [f"Lab {lab.number}, {lab.title}{student}", *filter(None, [grade.remark]), ""]
    for verdict in grade.verdicts:
        task, state = verdict.task, "" if verdict.begun else f"  ({NOT_BEGUN})"
        score = f"{verdict.points:>{wide}} / {task.points:>{wide}}"
        lines.append(f"{score}  {task.id}  {task.title}{state}")
        if verdict.begun and not verdict.passed:
            lines += [textwrap.indent(_shown(verdict), " " * (2 * wide + 5)), ""]
    lines.append(f"{grade.points:>{wide}} / {lab.points:>{wide}}  points")
    if lab.leaderboard:
        score = "none: an answer is not valid" if grade.score is None else f"{grade.score:.4f}"
        lines.append(f"for the leaderboard, {lab.leaderboard} (lower is better): {score}")
    if foot:
        lines += ["", f"seed: {grade.seed}", f"defences: {grade.defences or 'none'}"]
    return "\n".join(lines) + "\n"


def junit(grade: Grade) -> str:
    """Return pytest's own JUnit XML, with what is said of the whole, and of each task."""
    suites = ElementTree.fromstring(grade.junit)
    (suite,) = suites.iter("testsuite")
    suite.set("name", f"minidist.lab.{grade.lab.name}")
    properties = ElementTree.Element("properties")
    suite.insert(0, properties)
    of_grade = {"points": grade.points, "max_points": grade.lab.points, "seed": grade.seed}
    of_grade |= {"student": grade.lab.student, "remark": grade.remark, "defences": grade.defences}
    for verdict in grade.verdicts:
        of_grade[f"points {verdict.task.id}"] = verdict.points
        of_grade[f"mistakes {verdict.task.id}"] = "; ".join(verdict.mistakes)
    for key, value in of_grade.items():
        ElementTree.SubElement(properties, "property", {"name": key, "value": plain(str(value))})
    ElementTree.indent(suites)
    return ElementTree.tostring(suites, encoding="unicode", xml_declaration=False) + "\n"


def gradescope(grade: Grade) -> str:
    """Return Gradescope's results.json: a test per task, with its score."""
    tests = [
        {
            "number": verdict.task.id,
            "name": verdict.task.title,
            "score": verdict.points,
            "max_score": verdict.task.points,
            "status": "passed" if verdict.passed else "failed",
            "output": "" if verdict.passed else _shown(verdict),
            "output_format": "text",
            "visibility": "visible",
        }
        for verdict in grade.verdicts
    ]
    whole = {
        "score": grade.points,
        "execution_time": round(sum(verdict.seconds for verdict in grade.verdicts)),
        "visibility": "visible",
        "stdout_visibility": "hidden",
        "output": grade.remark,
        "output_format": "text",
        "extra_data": {"seed": grade.seed, "defences": grade.defences},  # for staff alone
        "tests": tests,
    }
    if grade.lab.leaderboard and grade.score is not None:
        row = {"name": grade.lab.leaderboard, "value": grade.score, "order": "asc"}
        whole["leaderboard"] = [row]  # it knows students by pseudonyms
    return json.dumps(whole, indent=2) + "\n"


def gradescope_refusal(why: str) -> str:
    """Return a results.json for an ungradable submission, so that the student sees the reason."""
    output = plain(why, lines=True)
    return json.dumps({"score": 0, "output": output, "output_format": "text"}, indent=2) + "\n"


def cause(verdict: Verdict) -> str:
    """Return in a line the known mistake, or the last line of what is wrong."""
    lines = [line.strip() for line in plain(verdict.wrong[0], lines=True).splitlines()]
    stopped = [line.partition(";")[0] for line in lines[:-1] if line.startswith("no answer: ")]
    return (" ".join(verdict.mistakes) or ": ".join([*stopped[:1], lines[-1]]))[:WIDTH]


def _shown(verdict: Verdict) -> str:
    """Return a task's faults, in a few short lines."""
    lines = [_earned(verdict)] if len(verdict.groups) > 1 else []
    before: list[str] = []
    for wrong in verdict.wrong[:SHOWN]:
        first, *rest = plain(wrong, lines=True).splitlines()
        lines += [f"{first} the same"] if rest and rest == before else _short([first, *rest])
        before = rest
    if len(verdict.wrong) > SHOWN:
        lines.append(f"and {len(verdict.wrong) - SHOWN} more of {verdict.cases} tests")
    lines += [f"a known mistake gives these answers: {says}" for says in verdict.mistakes]
    if verdict.output:
        lines += ["it printed:", *_short(plain(verdict.output, lines=True).splitlines())]
    return "\n".join(lines)


def _earned(verdict: Verdict) -> str:
    """Return which groups of tests pass, and how many points the others have."""
    parts: dict[bool, list[str]] = {True: [], False: []}
    for group, points in verdict.worth.items():
        parts[verdict.groups[group]].append(f"{group} ({points})")
    answered, missed = (", ".join(parts[state]) or "nothing" for state in (True, False))
    return f"answered: {answered}; not yet: {missed}"


def _short(lines: list[str]) -> list[str]:
    if len(lines) > LINES:
        half = LINES // 2
        lines = [*lines[:half], f"... {len(lines) - 2 * half} lines", *lines[-half:]]
    return [part for line in lines for part in _folded(line)]


def _folded(line: str) -> list[str]:
    """Fold a long line into two or three; of a longer one, keep the two ends."""
    if " " not in line.strip() and len(line) < LINK:
        return [line]
    if len(line) > 2 * WIDTH:
        ends = WIDTH // 2 - 3  # what was expected, and what it means, often stand last
        return [f"{line[:ends]} ... {line[-ends:]}"]
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    return textwrap.wrap(line, WIDTH, subsequent_indent=indent) or [line]
