"""An order that no paper has: drawn at random from all orders that ranks can execute.

    placement 0 2 | 1, m = 2      rank 0   F0 F0.1 B0.1 F1 B0 F1.1 I1.1 B1 W1.1
                                  rank 1   F0 B0 F1 I1 W1

All actions of all micro-batches are put in one random order in which each comes after what it
needs, a topological order; each rank takes its own of them in this order. So it can be executed.
"""

from collections import deque
from random import Random

from minidist.pipeline_parallel.actions import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Programs,
)


def random_placement(random: Random, p: int, stages: int) -> list[list[int]]:
    """Return any placement of S >= p stages on p ranks: each has one or more, in any order."""
    shuffled = random.sample(range(stages), stages)
    placement = [[k] for k in shuffled[:p]]
    for k in shuffled[p:]:
        random.choice(placement).append(k)
    return placement


def random_order(random: Random, placement: list[list[int]], m: int) -> Programs:
    """Return any programs of m micro-batches; of some passes, backward is in two halves."""
    where = {k: (r, c) for r, own in enumerate(placement) for c, k in enumerate(own)}
    down = [where[k] for k in sorted(where)]
    # Per micro-batch what is left of its way through the stages; and weight halves.
    ahead: list[deque[tuple[int, Action]]] = []
    for i in range(m):
        way: list[tuple[int, Action]] = [(r, Forward(i, c)) for r, c in down]
        for r, c in reversed(down):
            way.append((r, random.choice([Backward, BackwardInput])(i, c)))
        ahead.append(deque(way))
    result: list[list[Action]] = [[] for _ in placement]
    while ahead:
        left = random.choice(ahead)
        rank, action = left.popleft()
        result[rank].append(action)
        if isinstance(action, BackwardInput):
            ahead.append(deque([(rank, BackwardWeight(action.micro_batch, action.chunk))]))
        if not left:
            ahead.remove(left)
    return Programs(result, placement)
