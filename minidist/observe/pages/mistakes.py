"""What went wrong: a mistake of the register on real ranks; what moves, and which check sees it.

    {}                             what there is to choose, and one of each
    {"mistake": "no_all_reduce"}   its words, its diff, a row for each case of its strategies
    {"program": "one_rank_skips"}  its steps with each seed (waits.py)

A row: `error`, what ended the run; `wrong` of `all` gradients; whether ranks `agree`; whether
`losses` equal the losses of right code (None: it has no fixed ones); `bytes` moved, and by the
closed form; `seen`, the checks that see it. A strategy's first wrong row has its worst gradients
and the `cause` that verify finds; a deadlock is its last row.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import cache, partial
from itertools import groupby

import numpy as np

from minidist.comm import Cluster
from minidist.course.mutants import FAMILIES
from minidist.errors import CommError, check_name, plural
from minidist.observe.pages import waits
from minidist.verify import equivalence
from minidist.verify.causes.reasons import UNKNOWN
from minidist.verify.compare import Comparison, by_parameter
from minidist.verify.mistakes.overlay import PACKAGE
from minidist.verify.mistakes.register import Mistake, mistakes, planted
from minidist.verify.outcomes import of_job
from minidist.verify.strategies import Case, Strategy

FIRST: dict[str, str] = {}
WORDS = "title", "seen", "symptom", "family", "diagnosis"
LIMIT = 180.0  # seconds for a mistake
LOST = "the process of these ranks has ended without an answer"
HOME = PACKAGE.parent


def chosen() -> dict[str, Mistake]:
    """Return the mistakes of families that have strategies, in the order of families."""
    return {m.name: m for family in FAMILIES for m in mistakes().values() if m.family == family}


def outcomes_of(entry: Strategy, case: Case, size: int, name: str = "") -> tuple[list, list]:
    """Run a case on ranks, with a mistake if one is named; return their outcomes and losses."""
    with planted(name) if name else nullcontext(), Cluster(size, "thread") as ranks:
        outcomes = ranks.run(partial(of_job, entry.start, **case.options), case, timeout=60)
    return outcomes, [outcome.losses for outcome in outcomes]


@cache
def expected(strategy: str, name: str, size: int) -> tuple[list, int]:
    """Return the losses of a case's right ranks, [] if two runs differ, and the bytes of all."""
    entry = equivalence.find(strategy)
    case = next(case for case in entry.cases(size) if case.name == name)
    (outcomes, losses), (_, again) = (outcomes_of(entry, case, size) for _ in range(2))
    return losses if same(losses, again) else [], sum(outcome.bytes for outcome in outcomes)


def row_of(name: str, entry: Strategy, case: Case, size: int, explain: bool = True) -> dict:
    """Return the row of a case; with the worst gradients and a cause if it is to explain."""
    row = {"strategy": entry.name, "case": case.name, "ranks": size, "error": ""}
    right, right_bytes = expected(entry.name, case.name, size)
    try:
        outcomes, losses = outcomes_of(entry, case, size, name)
    except CommError as error:
        return row | {"error": ended(error), "seen": ["it ends"]}
    promise = equivalence.promise_of(entry, case, outcomes)
    got, moved = [one.gradients for one in outcomes], sum(one.bytes for one in outcomes)
    each = by_parameter(got, promise.want, promise.bound).values()
    worst = sorted([one for one in each if not one.ok], key=lambda one: -one.error)
    agree = all(one.ok for one in by_parameter(got, got[0]).values())
    as_right = same(losses, right) if any(right) else None
    checks = {"losses": as_right is False, "gradients": worst, "ranks agree": not agree}
    checks["bytes"] = moved != right_bytes
    row |= {"wrong": len(worst), "all": len(each), "agree": agree, "losses": as_right}
    row |= {"bytes": [moved, right_bytes], "seen": [check for check, red in checks.items() if red]}
    if worst and explain:
        row["worst"] = [factor(one, got[one.rank], promise.want) for one in worst[:8]]
        _, *reasons = equivalence.row(case, outcomes, promise, got)["detail"]
        row["cause"] = "; ".join(each for each in reasons if each != UNKNOWN)
    return row


def rows_of(name: str, size: int | None = None) -> Iterator[dict]:
    """Yield the rows of the strategies of a mistake's family, on up to 4 ranks or on `size`."""
    for entry in map(equivalence.find, FAMILIES[chosen()[name].family]):
        ranks, explain = size or entry.most_ranks, True
        if ranks not in entry.ranks:
            continue
        for case in entry.cases(ranks):
            yield (row := row_of(name, entry, case, ranks, explain))
            explain = explain and "worst" not in row
            if row["error"].startswith("Deadlock"):  # the next ones would take as long
                break


def same(losses: list[list[float]], others: list[list[float]]) -> bool:
    pairs = zip(losses, others, strict=True)
    return all(len(a) == len(b) and np.allclose(a, b, 1e-9, 1e-9) for a, b in pairs)


def ended(error: CommError) -> str:
    """Return the error that ended a run: the package's table, or the exception of a rank."""
    cause = error.__cause__
    ours = cause is None or isinstance(cause, CommError)
    return f"{type(error).__name__}: {error if ours else f'{type(cause).__name__}: {cause}'}"


def factor(one: Comparison, got: dict, want: dict) -> dict:
    """Return a gradient's name, fault, error and median of got / want; None: no such number."""
    row = {"name": one.parameter, "fault": one.fault, "error": None, "factor": None}
    if one.fault:
        return row
    g, w = got[one.parameter], want[one.parameter]
    large = np.abs(w) > 1e-6 * np.abs(w).max(initial=0.0)
    middle = float(f"{np.median(g[large] / w[large]):.6g}") if large.any() else None
    return row | {"error": float(f"{one.error:.3g}"), "factor": middle}


def judged(name: str) -> dict:
    """Return a mistake's answer. Where all checks pass on 4 ranks, 2 ranks are tried, too."""
    rows = list(rows_of(name))
    if not any(row["seen"] for row in rows):
        fewer = list(rows_of(name, 2))
        rows = fewer if any(row["seen"] for row in fewer) else rows
    return described(name, rows)


def described(name: str, rows: list[dict]) -> dict:
    fields = {word: getattr(chosen()[name], word) for word in WORDS}
    evidence = {"diff": chosen()[name].diff(), "rows": rows, "sees": summary(rows)}
    return {"mistake": name, **fields, **evidence}


def summary(rows: list[dict]) -> str:
    """Return in how many cases which checks see the mistake."""
    wrong = [row for row in rows if row.get("wrong")]
    counts = {
        "the losses are right and gradients are wrong": sum(row["losses"] is True for row in wrong),
        "the ranks agree on wrong gradients": sum(row["agree"] for row in wrong),
        "the run does not end well": sum(bool(row["error"]) for row in rows),
        "all checks pass": sum(not row["seen"] for row in rows),
    }
    sentences = [
        f"{n} of {plural(len(rows), 'case')}: {outcome}" for outcome, n in counts.items() if n
    ]
    return ". ".join(sentences or [f"In each of {plural(len(rows), 'case')} a check sees it"]) + "."


def in_a_new_process(names: list[str]) -> list[dict]:
    """Return the answers of mistakes, planted in a process that ends.

    Where it dies, or is over its time, the answer says so, and the rest runs in another one.
    """
    if not names:
        return []
    command, limit = [sys.executable, "-m", __name__, *names], LIMIT * len(names)
    try:
        out = subprocess.run(command, cwd=HOME, stdout=subprocess.PIPE, timeout=limit).stdout
    except subprocess.TimeoutExpired as late:
        out = late.stdout or b""
    answers = [json.loads(line) for line in out.splitlines() if line.startswith(b"{")]
    if left := names[len(answers) :]:
        lost = {"strategy": "", "case": "", "ranks": 0, "error": LOST, "seen": ["it ends"]}
        answers += [described(left[0], [lost]), *in_a_new_process(left[1:])]
    return answers


def answer(mistake: str = "", program: str = "") -> dict:
    """Return the answer to one of the questions above."""
    if program:
        return waits.answer(program)
    if mistake:
        check_name("mistake", mistake, chosen())
        return in_a_new_process([mistake])[0]
    return beginning()


@cache
def beginning() -> dict:
    """Return the answer to {}: what there is to choose, with one mistake and one program."""
    choices = [{"name": m.name, "title": m.title, "family": m.family} for m in chosen().values()]
    listed = {"choices": choices, "programs": [*waits.PROGRAMS]}
    return answer("no_all_reduce") | listed | {"waits": waits.answer("ring_of_rendezvous")}


def questions() -> list[dict[str, str]]:
    names = [{"mistake": name} for name in chosen()]
    return [FIRST, *names, *({"program": name} for name in waits.PROGRAMS)]


def record() -> Iterator[tuple[dict[str, str], dict]]:
    """Yield all questions with their answers; two processes at a time run a family each."""
    groups = groupby(chosen().values(), key=lambda mistake: mistake.family)
    families = [[mistake.name for mistake in members] for _, members in groups]
    with ThreadPoolExecutor(2) as threads:
        for answers in threads.map(in_a_new_process, families):
            yield from (({"mistake": each["mistake"]}, each) for each in answers)
    yield from ((each, answer(**each)) for each in questions() if "mistake" not in each)


def as_text(answer: dict) -> str:
    if "source" in answer:
        ends = [f"seed {n}: {one['verdict']}" for n, one in enumerate(answer["seeds"])]
        return "\n".join([*answer["source"], "", *ends, "", answer["seeds"][0]["words"]])
    lines = [answer[word] for word in (*WORDS[:3], "sees")]
    for row in answer["rows"]:
        outcome = row["error"] or f"{row['wrong']} of {row['all']} gradients are wrong"
        by = ", ".join(row["seen"]) or "nothing"
        where = f"{row['strategy']}, {row['case']}, {row['ranks']} ranks"
        lines.append(f"{where}: {outcome}; seen by {by}")
    waited = [as_text(answer["waits"])] if "waits" in answer else []
    return "\n\n".join(["\n".join(lines), answer["diff"], *waited])


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(json.dumps(judged(name)), flush=True)
