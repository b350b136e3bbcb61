"""A lab of two tasks in two files, for tests of the grader: the first is attacked, the second not.

It stands on its own, so that what the real labs ask may change.
"""

from pathlib import Path
from types import SimpleNamespace

from minidist.course.lab import Lab, Task
from minidist.course.question import Question, counted, expect
from minidist.pipeline_parallel import programs

GPIPE, OTHER = "pipeline_parallel/gpipe.py", "pipeline_parallel/one_f_one_b.py"


def order(schedule, p, m):
    want = {f"rank {r}": [str(a) for a in prog] for r, prog in enumerate(programs(schedule, p, m))}
    given = {"schedule": schedule, "p": p, "m": m}
    about = f"{schedule}, {counted(p, 'rank')}, {m} micro-batches"
    return Question(about, "order", given, lambda answer: expect(answer, want))


def asks(schedule):
    return lambda rng: [order(schedule, p, int(rng.integers(3, 9))) for p in (1, 2, 3)]


class Tiny(Lab):
    questions = SimpleNamespace(QUESTIONS={"9.1": asks("gpipe"), "9.2": asks("1f1b")})
    probes = Path(__file__).with_name("tiny_probes.py")


def task(number, function, points):
    return Task(f"9.{number}", function, points, [function], "", [], [])


TINY = Tiny(
    name="tiny",
    number=9,
    title="A lab for tests",
    about="",
    lessons=[],
    tasks=[task(1, f"{GPIPE}:gpipe", 10), task(2, f"{OTHER}:one_f_one_b", 5)],
)
