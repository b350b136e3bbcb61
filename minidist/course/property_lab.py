"""The lab of mutants: write properties that the reference has and wrong implementations lack.

A student hands in one file of functions `property_...()`, which raise if minidist is wrong. They
run in a sandbox, on each mutant in turn. A mutant earns its points if one of them
raises; but if one raises on the reference, all points are lost.

The reference comes first, and then again at random places among the mutants, so raising at random,
or by a clock, a count of runs or a process number does not help. All files have one time.

A property that reads the code, or its checksum, instead of running it is not prevented. Where
cheating matters, read the properties.

`verify/` is left out, because it already judges strategies.
"""

import secrets
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from minidist.course import mutants, starter
from minidist.course.grader import Grade, Verdict, handed_in
from minidist.course.lab import Lab, Task, labs
from minidist.course.labs.mutants import probes
from minidist.course.question import ask
from minidist.course.sandbox import ANSWERS, Sandbox
from minidist.course.sandbox.limits import USUAL, Limits

NAME, FILE, POINTS = "mutants", "properties.py", 2
FIRST, BETWEEN = 2, 6  # how many times the reference is run: before the mutants, and among them
LEFT_OUT = (*ANSWERS, "verify", "observe", "bench", "cli", "__main__.py", "training")

STARTER = '''"""Properties that minidist has, and that wrong versions of it lack."""

import numpy as np

import minidist
from minidist import nn
from minidist.data_parallel.naive import all_reduce_gradients


def close(got, want):
    """Return whether two arrays differ by rounding only."""
    return np.allclose(got, want, rtol=1e-9, atol=1e-12)


def property_two_replicas_get_the_sum_of_their_gradients():
    """An example; it kills one mutant of data parallelism. Which mistakes does it miss?"""

    def worker(group):
        model = nn.MLP([3, 4, 2], activation="gelu", dtype="float64")
        inputs = np.arange(12.0).reshape(4, 3)[2 * group.rank : 2 * group.rank + 2]
        nn.cross_entropy(model(inputs), np.array([0, 1]), reduction_size=4).backward()
        before = model.layers[0].weight.grad.copy()
        all_reduce_gradients(model, group)
        return before, model.layers[0].weight.grad

    (mine, total), (others, _) = minidist.run(worker, 2, transport="thread")
    assert close(total, mine + others)
'''


def lab() -> Lab:
    """Return the lab: a task per mutant."""
    every = [mutants.load(name) for name in mutants.names()]
    last = len(labs()) + 1
    tasks = [
        Task(f"{last}.{number}", f"{m.family}: {m.title}", POINTS, [], m.symptom)
        for number, m in enumerate(every, 1)
    ]
    title = "Mutants: properties that only the right implementation has"
    return Lab(NAME, last, title, "", [], tasks)


def write(folder: Path) -> list[str]:
    """Write what a student begins with into a new or empty folder; return its files' paths."""
    files = {"README.md": _handout(lab()), starter.NAME: f"{NAME}\n", f"minidist/{FILE}": STARTER}
    return starter.write_files(folder, files)


def grade(
    folder: Path,
    lab: Lab,
    seed: int | None = None,
    limits: Limits = USUAL,
    wrapped: bool = True,
    task: str | None = None,
) -> Grade:
    """Run the properties of FOLDER/minidist/properties.py on the reference and every mutant.

    seed  for the places of the reference; None draws one
    task  the only mutant to meet, by its task's id
    """
    chosen = lab.tasks if task is None else [lab.task(task)]
    seed = secrets.randbits(32) if seed is None else seed
    rng = np.random.default_rng(seed)
    files, unusable = handed_in(Path(folder), [FILE])
    if FILE not in files:
        why = unusable.get(FILE, f"there is no minidist/{FILE} in {folder}")
        verdicts = [Verdict(each, 1, [why]) for each in chosen]
        return Grade(replace(lab, tasks=chosen), verdicts, seed, "")
    asked = [ask(FILE, probes.properties, source=files[FILE])]
    every = [mutants.load(name) for name in mutants.names()]
    numbers = [number for number, each in enumerate(lab.tasks) if each in chosen]
    order = rng.permutation([*numbers, *[-1] * BETWEEN]).tolist()
    wrong: dict[int, list[str]] = {}
    seconds: dict[int, float] = {}
    refused: list[str] = []
    with Sandbox(lab, limits, wrapped) as sandbox:
        for number in [-1] * FIRST + order:
            begin = time.monotonic()
            sandbox.build({} if number < 0 else every[number].files(), LEFT_OUT)
            answer = _formed(sandbox.ask(asked).answers[0])
            if number >= 0:
                wrong[number] = _alive(answer)
                seconds[number] = time.monotonic() - begin
            elif refused := _of_the_reference(answer):
                break
        verdicts = [
            Verdict(each, 1, refused or wrong[number], seconds=seconds.get(number, 0.0))
            for number, each in zip(numbers, chosen, strict=True)
        ]
        return Grade(replace(lab, tasks=chosen), verdicts, seed, sandbox.defences)


def _formed(answer: dict[str, np.ndarray] | str) -> dict[str, np.ndarray] | str:
    """Return an answer with the probe's form unchanged; a message for any other, forged, one."""
    if isinstance(answer, str):
        return answer
    texts = all(array.dtype.kind == "U" and array.ndim == 1 for array in answer.values())
    if not texts or answer.keys() != {"properties", "raised", "messages"}:
        return "the answer is not what the sandbox writes"
    if len(answer["raised"]) != len(answer["messages"]):
        return "the answer is not what the sandbox writes"
    return answer


def _of_the_reference(answer: dict[str, np.ndarray] | str) -> list[str]:
    """Return the complaints of the properties about the reference; none if they are right."""
    if isinstance(answer, str):
        return [f"beside the reference: {answer}"]
    if not answer["properties"].size:
        return [f"{FILE} has no function property_...()"]
    if answer["raised"].size:
        return [f"beside the reference: {answer['raised'][0]} raises {answer['messages'][0]}"]
    return []


def _alive(answer: dict[str, np.ndarray] | str) -> list[str]:
    """Return why a mutant is not killed; nothing if it is.

    A crash and a timeout kill as well, because the reference ended in time.
    """
    killed = isinstance(answer, str) or answer["raised"].size
    return [] if killed else ["no property raises beside it"]


def _handout(lab: Lab) -> str:
    named = zip(lab.tasks, mutants.names(), strict=True)
    rows = "\n".join(f"| {t.id} | `{name}` | {t.title} | {t.text} |" for t, name in named)
    return f"""# Lab {lab.number}: {lab.title}

Somebody has changed one to five lines of minidist, {len(lab.tasks)} times, each time in a different
way: the mutants below. Write properties that distinguish them from the reference.

Put functions `property_...()` without arguments into `minidist/{FILE}`; it has one as an example.
A property runs something, mostly on ranks that are threads (`transport="thread"`), and raises
(`assert`) if the result is wrong. Do not look for a mutant's mistake; state what is right: a
gradient that one device would have computed, a schedule with every action once, bytes that equal a
formula, other sizes than 2, uneven shards, more than one step. `minidist.verify`, which has such
checks, is left out.

- A mutant that makes a property raise is killed: {POINTS} points, {lab.points} in all.
- The reference must live: if a property raises on it, nothing counts.
- All properties together have the time limit of one task (20 s) for each mutant.

```
minidist lab test .
```

`minidist mutants --show NAME` shows a mutant's lines, and where such a mistake was seen. Look only
when you are done.

| task | name | mutant | what a user sees |
| --- | --- | --- | --- |
{rows}
"""
