"""Students: folders with the reference of some tasks, the starter of others, and mistakes."""

import re
import runpy
from dataclasses import replace

import numpy as np

from minidist.course.grader import Grade, grade, judge, questions
from minidist.course.lab import Lab, find
from minidist.course.overlay import PACKAGE


def reference(lab: Lab) -> dict[str, str]:
    return {path: (PACKAGE / path).read_text(encoding="utf-8") for path in lab.files}


def starter(lab: Lab, done: tuple[str, ...] = ()) -> dict[str, str]:
    """Return the files of a student who has done these tasks and no other."""
    left = [task for task in lab.tasks if task.id not in done]
    return reference(lab) | replace(lab, tasks=left).blanked()


def with_mistake(lab: Lab, path: str, right, wrong) -> dict[str, str]:
    """Return the reference with a piece of its text, or several, which are there once, replaced."""
    files = reference(lab)
    pieces = [(right, wrong)] if isinstance(right, str) else zip(right, wrong, strict=True)
    for old, new in pieces:
        assert files[path].count(old) == 1, f"{path} has {old!r} {files[path].count(old)} times"
        files[path] = files[path].replace(old, new)
    return files


def only(lab: Lab, id: str) -> Lab:
    """Return the lab with one task, but all files to hand in."""
    (task,) = (task for task in lab.tasks if task.id == id)
    blanks = [entry for task in lab.tasks for entry in task.blanks]
    return replace(lab, tasks=[replace(task, blanks=blanks)])


def graded(folder, lab: Lab, files: dict[str, str], seed: int = 0) -> Grade:
    for path, source in files.items():
        target = folder / "minidist" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(source, encoding="utf-8")
    return grade(folder, lab, seed)


def check_reference(folder, name: str, seed: int = 0) -> None:
    lab = find(name)
    found = graded(folder, lab, reference(lab), seed)
    assert not [line for verdict in found.verdicts for line in verdict.wrong]
    assert found.points == lab.points == 100


def check_starter(folder, name: str) -> None:
    """Every task of the bare starter is asked, and fails by what is not written."""
    lab = find(name)
    found = graded(folder, lab, starter(lab))
    assert found.points == 0 and len(found.verdicts) == len(lab.tasks)
    for verdict in found.verdicts:
        said = f"NotImplementedError: Task {verdict.task.id}: {verdict.task.title}"
        assert len(verdict.wrong) == verdict.questions > 0
        assert said in verdict.wrong[0], verdict.wrong[0]
        assert all("NotImplementedError: Task " in line for line in verdict.wrong)


def check_alone(folder, name: str, id: str, needs: dict[str, tuple[str, ...]]) -> None:
    """Whoever has done one task, and those that it says it builds on, gets just their points."""
    lab = find(name)
    done = (id, *needs.get(id, ()))
    found = graded(folder, lab, starter(lab, done))
    passed = {verdict.task.id for verdict in found.verdicts if verdict.passed}
    assert passed == set(done), [v.wrong[:1] for v in found.verdicts if v.task.id in done]
    (task,) = (task for task in lab.tasks if task.id == id)
    named = {word.strip(".,;:()") for word in task.text.split()}
    assert named >= set(done[1:]), f"the text of {id} does not say that it builds on {done[1:]}"


def check_handout(name: str) -> None:
    """A task has numbers to hit, two or three hints, and no name that the package does not have."""
    lab, words = find(name), set()
    for path in PACKAGE.rglob("*.py"):
        if "course" not in path.parts:
            words.update(re.findall(r"\w+", path.read_text(encoding="utf-8")))
    assert [task.id for task in lab.tasks] == [f"{lab.number}.{n}" for n in range(1, 8)]
    assert [task.id for task in lab.tasks] == list(lab.questions.QUESTIONS)
    for task in lab.tasks:
        assert 2 <= len(task.hints) <= 3 and task.numbers
        for quoted in re.findall(r"`([^`]+)`", "\n".join([task.text, *task.numbers, *task.hints])):
            called = re.match(r"[A-Za-z_][\w.]*", quoted)
            for word in called[0].split(".") if called else []:
                assert word in words, f"{task.id}: {quoted}"


def check_answers(name: str) -> None:
    """Zeros, nothing, and the answers to the questions of another seed are wrong.

    What the package itself answers is right, asked right here.
    """
    lab = find(name)
    room = runpy.run_path(str(lab.probes))
    for task in lab.tasks:
        here, there = (
            [(q, room[q.probe](**q.given)) for q in questions(lab, task, seed)] for seed in (0, 1)
        )
        assert [judge(question, answer) for question, answer in here] == [None] * len(here)
        zeros = [{n: np.zeros_like(a) for n, a in answer.items()} for _, answer in here]
        for others in (zeros, [answer for _, answer in there], [{}] * len(here)):
            wrong = [judge(q, answer) for (q, _), answer in zip(here, others, strict=False)]
            assert any(wrong), task.id


def check_mistake(folder, name: str, id: str, path: str, right, wrong, said: str) -> None:
    """A mistake earns nothing, and is named: `said` stands in what the grader says."""
    lab = find(name)
    found = graded(folder, only(lab, id), with_mistake(lab, path, right, wrong))
    (verdict,) = found.verdicts
    assert not verdict.passed and verdict.points == 0
    assert any(said in line for line in verdict.wrong), "\n".join(verdict.wrong)


def check_other(folder, name: str, id: str, path: str, right, other) -> None:
    """Another right way earns the points, too."""
    lab = find(name)
    found = graded(folder, only(lab, id), with_mistake(lab, path, right, other))
    assert not found.verdicts[0].wrong


def check_trivial(folder, name: str, body: str) -> None:
    """Nothing is earned by one and the same body for everything that is to be written."""
    lab = find(name)
    files = {
        path: re.sub(r"raise NotImplementedError\(\"Task .*\"\)", body, source)
        for path, source in starter(lab).items()
    }
    assert not any('NotImplementedError("Task' in source for source in files.values())
    found = graded(folder, lab, files)
    assert [verdict.task.id for verdict in found.verdicts if verdict.passed] == []


TRIVIAL = {
    "nothing": "return None",
    "echo": "return [*locals().values()][-1]",
    "empty": "return []",
}
