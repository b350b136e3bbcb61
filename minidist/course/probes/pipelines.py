"""What the pipelines lab asks of a student's code; it runs beside that code, and judges nothing."""

import numpy as np

from minidist.pipeline_parallel import programs
from minidist.pipeline_parallel.actions import Backward, BackwardInput, BackwardWeight, Forward

KINDS = [Forward, Backward, BackwardInput, BackwardWeight]


def program(schedule, p, m, **options):
    """Return {"rank r": [[kind, micro-batch, chunk], ...]}."""
    return {
        f"rank {r}": np.array([[KINDS.index(type(a)), a.micro_batch, a.chunk] for a in actions])
        for r, actions in enumerate(programs(schedule, p, m, **options))
    }
