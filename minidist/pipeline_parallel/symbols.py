"""A proof by symbols: programs run with sets of micro-batches in the place of gradients.

    F3 on stages 0, 1      passed (0,), then (0, 1)
    B3 on stages 1, 0      passed (1,), then (1, 0); now dW of stage 0 has 3 once more

B or W of stage k adds a micro-batch whose forward passed the stages 0 to k, in this order, and
whose backward passed all stages from the last one to k. If every stage ends with the micro-batches
0 to m - 1, once each, its gradient is that of the whole batch, whatever the stages compute.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import chain

from minidist.pipeline_parallel.actions import (
    Action,
    Backward,
    BackwardWeight,
    Forward,
    Programs,
    Reduce,
    Update,
    last_stage,
    passes_backward,
    reduces,
    updates,
)
from minidist.pipeline_parallel.execution_order import in_order

Sums = dict[tuple[int, int], Counter]  # (rank, chunk): how often each micro-batch is in its dW


def certificate(programs: Programs, m: int) -> dict:
    """Run programs, which need not be valid; Stuck if they deadlock.

    Returns {"ok", "rows": [{"stage", "rank", "micro_batches"}], "words"}. If there are updates, or
    R, a gradient that they do not sum is lost.
    """
    left, summed = gradients(programs.placement, chain.from_iterable(in_order(programs)))
    asynchronous, stages, rows = updates(programs), defaultdict[int, Counter](Counter), []
    for (rank, chunk), own in (summed if asynchronous or reduces(programs) else left).items():
        stages[stage := programs.placement[rank][chunk]] += own
        rows.append({"stage": stage, "rank": rank, "micro_batches": sorted(own.elements())})
    goal = f"exactly the micro-batch{f'es 0 to {m - 1}' if m > 1 else ' 0'}, once"
    wrong = next((k for k in sorted(stages) if stages[k] != Counter(range(m))), None)
    words = f"every stage's {'updates apply' if asynchronous else 'parameters end with'} {goal}"
    if wrong is not None:
        words = f"stage {wrong} ends with {sorted(stages[wrong].elements())}, not with {goal}"
    elif asynchronous:
        words += "; weights change in between, so the gradients are not those of one device"
    rows.sort(key=lambda row: (row["stage"], row["rank"]))
    return {"ok": wrong is None, "rows": rows, "words": words}


def gradients(placement: list[list[int]], steps: Iterable[tuple[int, Action]]) -> tuple[Sums, Sums]:
    """Return what is left in dW at the end, and what U or R took from it.

    steps  (rank, action) in the order of execution
    """
    places = [(rank, chunk) for rank, own in enumerate(placement) for chunk in range(len(own))]
    left, summed = ({place: Counter[int]() for place in places} for _ in range(2))
    forward: dict[tuple[int, int], tuple] = {}  # (stage, micro-batch): the stages that it passed
    backward: dict[tuple[int, int], tuple] = {}
    last = last_stage(placement)
    for rank, action in steps:
        place, i, k = (rank, action.chunk), action.micro_batch, placement[rank][action.chunk]
        if isinstance(action, Forward):
            forward[k, i] = (*forward.get((k - 1, i), ()), k)
        elif passes_backward(action):
            backward[k, i] = (*backward.get((k + 1, i), ()), k)
        elif isinstance(action, Update | Reduce):
            summed[place] += left[place]
            left[place].clear()
        if isinstance(action, Backward | BackwardWeight):
            passed = forward.get((k, i)), backward.get((k, i))
            if passed == (tuple(range(k + 1)), tuple(range(last, k - 1, -1))):
                left[place][i] += 1
    return left, summed
