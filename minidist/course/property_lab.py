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
from typing import Any

import numpy as np

from minidist.course import starter
from minidist.course.grader import Grade, Verdict
from minidist.course.lab import MUTANTS, Lab, mutants, of_mutants
from minidist.course.sandbox import ANSWERS, LABS, Sandbox
from minidist.course.sandbox.limits import USUAL, Limits
from minidist.course.sandbox.untrusted import NoAnswer
from minidist.course.submissions import LABEL, handed_in

FILE = "properties.py"
REFERENCE = "the reference"
FIRST, BETWEEN = 2, 6  # how many times it is run: before the mutants, and among them
LEFT_OUT = (*ANSWERS, "verify", "observe", "cli", "__main__.py", "training")

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


def write(folder: Path) -> list[str]:
    """Write what a student begins with into a new or empty folder; return its files' paths."""
    files = {
        "README.md": _handout(of_mutants()),
        LABEL: f"{MUTANTS}\n",
        f"minidist/{FILE}": STARTER,
    }
    return starter.write_files(folder, files)


def grade(
    folder: Path, lab: Lab, seed: int | None = None, limits: Limits = USUAL, task: str | None = None
) -> Grade:
    """Run the properties of FOLDER/minidist/properties.py on the reference and every mutant.

    seed  for the places of the reference; None draws one
    task  the only mutant to meet, by its task's id
    """
    chosen = lab.tasks if task is None else [lab.task(task)]
    seed = secrets.randbits(32) if seed is None else seed
    files, unusable = handed_in(folder, [FILE])
    missing = unusable.get(FILE, f"there is no minidist/{FILE} in {folder}")
    call = f"{LABS}.{MUTANTS}.{lab.tests.stem}", "properties", {"source": files.get(FILE)}
    every = dict(zip((each.id for each in lab.tasks), mutants(), strict=True))
    order = [*(each.id for each in chosen), *[REFERENCE] * BETWEEN]
    order = [REFERENCE] * FIRST + np.random.default_rng(seed).permutation(order).tolist()
    verdicts: dict[str, Verdict] = {}
    with Sandbox(lab, limits) as sandbox:
        for id in order if FILE in files else ():
            begin, edited = time.monotonic(), id != REFERENCE
            sandbox.build(every[id].files() if edited else {}, LEFT_OUT)
            complaint = _complaint(sandbox.call([call]).answers[0])
            if edited:  # a crash and a timeout kill as well, because the reference ended in time
                wrong = [] if complaint else ["no property raises beside it"]
                took = time.monotonic() - begin
                verdicts[id] = Verdict(lab.task(id), 1, wrong, seconds=took)
            elif complaint:
                missing, verdicts = f"beside the reference: {complaint}", {}
                break
        defences = sandbox.defences
    found = [verdicts.get(each.id, Verdict(each, 1, [missing])) for each in chosen]
    return Grade(replace(lab, tasks=chosen), found, seed, defences)


def _complaint(answer: Any) -> str:
    """Return why an answer does not say that all properties hold: "", if it does."""
    if isinstance(answer, NoAnswer):
        return answer
    match answer:
        case {"properties": [], "raised": _}:
            return f"{FILE} has no function property_...()"
        case {"properties": [*names], "raised": dict(raised)} if set(raised) <= set(
            map(str, names)
        ):
            return next((f"{name} raises {why}" for name, why in raised.items()), "")
    return "the answer is not what the sandbox writes"


def _handout(lab: Lab) -> str:
    named = zip(lab.tasks, mutants(), strict=True)
    rows = "\n".join(f"| {t.id} | `{m.name}` | {t.title} | {t.text} |" for t, m in named)
    return f"""# Lab {lab.number}: {lab.title}

Somebody has changed one to five lines of minidist, {len(lab.tasks)} times, each time in a different
way: the mutants below. Write properties that distinguish them from the reference.

Put functions `property_...()` without arguments into `minidist/{FILE}`; it has one as an example.
A property runs something, mostly on ranks that are threads (`transport="thread"`), and raises
(`assert`) if the result is wrong. Do not look for a mutant's mistake; state what is right: a
gradient that one device would have computed, a schedule with every action once, bytes that equal a
formula, other sizes than 2, uneven shards, more than one step. `minidist.verify`, which has such
checks, is left out.

- A mutant that makes a property raise is killed: {lab.tasks[0].points} points, {lab.points} in all.
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
