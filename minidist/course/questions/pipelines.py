"""What the answers of the pipelines lab must be."""

from collections.abc import Iterator

import numpy as np

from minidist.course.question import Question, expect
from minidist.pipeline_parallel import programs
from minidist.pipeline_parallel.actions import Backward, BackwardInput, BackwardWeight, Forward

KINDS = [Forward, Backward, BackwardInput, BackwardWeight]


def same_program(schedule: str, p: int, m: int, **options) -> Question:
    want = {
        f"rank {r}": [[KINDS.index(type(a)), a.micro_batch, a.chunk] for a in actions]
        for r, actions in enumerate(programs(schedule, p, m, **options))
    }
    about = f"{schedule}, {p} ranks, {m} micro-batches"
    given = {"schedule": schedule, "p": p, "m": m, **options}
    return Question(about, "program", given, lambda answer: expect(answer, want))


def gpipe(rng: np.random.Generator) -> Iterator[Question]:
    for p in range(1, 5):
        yield same_program("gpipe", p, int(rng.integers(1, 9)))


QUESTIONS = {"4.1": gpipe}
