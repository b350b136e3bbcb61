"""Validate programs: is every action there, once, in an order that ranks can execute?

And a proof by symbols: programs run with sets of micro-batches in the place of gradients.

    F3 on stages 0, 1      passed (0,), then (0, 1)
    B3 on stages 1, 0      passed (1,), then (1, 0); now dW of stage 0 has 3 once more

B or W of stage k adds a micro-batch whose forward passed the stages 0 to k, in this order, and
whose backward passed all stages from the last one to k. If every stage ends with the micro-batches
0 to m - 1, once each, its gradient is that of the whole batch, whatever the stages compute.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import chain

from minidist.errors import WrongInput
from minidist.pipeline_parallel.actions import (
    COMPUTE,
    RECEIVES,
    SENDS,
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Programs,
    Reduce,
    Transfer,
    Update,
    communicates,
    last_stage,
    pairs_of,
    passes_backward,
    placement_of,
    reduces,
    updates,
)
from minidist.pipeline_parallel.communication import transfers_of
from minidist.pipeline_parallel.execution_order import Stuck, in_order

ROOM, RANKS = 8, 16  # actions shown on either side of a fault, and ranks
BEFORE = {Forward: "", Backward: "F", BackwardInput: "F", BackwardWeight: "FI"}
KNOWN = {*COMPUTE, *SENDS, *RECEIVES, Reduce}
WHOLE = ("FB", "FIW")  # what a stage does for one micro-batch
Faults = Iterator[tuple[int, int, str]]  # the rank, the place in its program, what is wrong there


def validate(programs: list[list[Action]], p: int, m: int) -> None:
    """Raise ValueError where programs are wrong: a Fault, with the grid and a mark, at an action.

    Structure: there are p programs. For each of m micro-batches every virtual stage does F once,
    then B once, or I once and then W once. An Update comes once, after what it applies; if there
    are updates, every stage's last one applies micro-batch m - 1, and replicas of a stage have the
    same updates. If there is an R, every chunk has one, after its last part of a backward, and
    there are no updates. Transfers, if any: one receive before each use, one send after each
    result, nothing else. Executability: there is an order in which every rank finishes. Pairs: a
    forward and the backward next to it, which can begin together.
    """
    if len(programs) != p:
        raise WrongInput(f"there are {len(programs)} programs for {p} ranks")
    if len(placement_of(programs)) != p:
        raise WrongInput(f"the placement is for {len(placement_of(programs))} ranks, not {p}")
    checks = of_ranks(programs, m), of_stages(programs, m), of_updates(programs, m)
    for faults in (*checks, of_transfers(programs), of_order(programs)):
        refuse_first(faults, programs)
    if pairs_of(programs):
        bare = without_transfers(programs)
        refuse_first(of_pairs(bare), bare)


def refuse_first(faults: Faults, programs: list[list[Action]]) -> None:
    for rank, at, what in faults:
        message = f"rank {rank}, action {at}: {what}\n{grid(programs, rank, at)}"
        raise Fault(message, rank, at)


def of_ranks(programs: list[list[Action]], m: int) -> Faults:
    """Yield what each rank shows: foreign, double and missing actions, and their order."""
    for rank, own in enumerate(placement_of(programs)):
        if not own or min(own) < 0:
            raise WrongInput(f"rank {rank} holds the stages {own}; a rank has one or more, from 0")
        for at, what in of_rank(programs[rank], len(own), m, reduces(programs)):
            yield rank, at, what


def of_rank(program: list[Action], chunks: int, m: int, sums: bool) -> Iterator[tuple[int, str]]:
    """Yield the faults of one program; only the first is reliable.

    sums  whether any program has an R
    """
    done: dict[tuple, str] = {}  # {(micro-batch, chunk): signs of its actions so far}
    last: dict[tuple | Action, int] = {}  # {(micro-batch, chunk), or U or R: its last place}
    for at, action in enumerate(program):
        if not isinstance(action, Action) or type(action) not in KNOWN:
            yield at, f"{action!r} is no action"
        if isinstance(action, Update) and sums:
            yield at, f"{action} sums its gradients itself, so no R may; leave out one of them"
        i, c = place = action.micro_batch, action.chunk
        here = f"there are {m} micro-batches, and here"
        if isinstance(action, Reduce):  # of all micro-batches
            i, here = 0, "here are"
        if not (0 <= i < m and 0 <= c < chunks):
            yield at, f"{action} is foreign: {here} chunks 0 to {chunks - 1}"
        so_far = done.get(place, "")
        if isinstance(action, Update | Reduce):
            if action in last:
                yield at, f"{action} comes twice"
            last[action] = at
            if late := [a for a in program[at:] if is_summed_by(a, action)]:
                why = "whose gradient it sums" if isinstance(action, Reduce) else "which it applies"
                yield at, f"{action} comes before {late[-1]}, {why}"
        elif type(action) in BEFORE:
            needed = BEFORE[type(action)]
            if action.sign in so_far:
                yield at, f"{action} comes twice"
            if needed != so_far:
                instead = f"not after {' and '.join(so_far)}" if so_far else "which has not come"
                needed = " and ".join(needed) or "nothing"
                yield at, f"{action} must come after {needed} of its micro-batch, {instead}"
            done[place], last[place] = so_far + action.sign, at
    for place, signs in done.items():
        if signs not in WHOLE:
            missing = "W" if signs == "FI" else "B, or I and W"
            at = last[place]
            yield at, f"{program[at]} is the last of its micro-batch; missing: {missing}"
    for action in map(Reduce, range(chunks if sums else 0)):
        if action not in last:
            yield len(program), f"{action} is missing; the gradients of other chunks are summed"


def is_summed_by(action: Action, total: Update | Reduce) -> bool:
    """Return whether a U or R must wait for this action, which may be an earlier update."""
    if action.chunk != total.chunk:
        return False
    if isinstance(total, Reduce):
        return isinstance(action, Backward | BackwardInput | BackwardWeight)
    part = isinstance(action, Backward | BackwardWeight | Update) and action != total
    return part and action.micro_batch <= total.micro_batch


def of_stages(programs: list[list[Action]], m: int) -> Faults:
    """Yield the micro-batches that do not pass a stage exactly once, on one of its replicas."""
    if m < 1:
        raise WrongInput(
            f"the programs of {len(programs)} ranks have no micro-batch; begin one with F0"
        )
    placement = placement_of(programs)
    takes = Counter(
        (placement[r][a.chunk], a.micro_batch)
        for r, program in enumerate(programs)
        for a in program
        if type(a) is Forward
    )
    for stage in range(1 + last_stage(placement)):
        rank = next((r for r, own in enumerate(placement) if stage in own), None)
        if rank is None:
            raise WrongInput(f"no rank holds stage {stage}; a placement has every stage from 0")
        for i in range(m):
            if takes[stage, i] != 1:
                what = f"micro-batch {i} goes {takes[stage, i]} times, not once, through stage "
                yield rank, len(programs[rank]), f"{what}{stage}; micro-batches count from 0"


def of_updates(programs: list[list[Action]], m: int) -> Faults:
    """Yield where a gradient is left unapplied, or a stage's replicas do not update together."""
    if not updates(programs):
        return
    first: dict[int, tuple[int, list[int]]] = {}  # {stage: its first rank, and what this applies}
    for rank, own in enumerate(placement_of(programs)):
        for chunk, k in enumerate(own):
            of_chunk = (a for a in programs[rank] if type(a) is Update and a.chunk == chunk)
            applied = [a.micro_batch for a in of_chunk]
            replica, theirs = first.setdefault(k, (rank, applied))
            at = len(programs[rank])
            if applied[-1:] != [m - 1]:
                yield rank, at, f"no update of stage {k} applies micro-batch {m - 1}"
            if applied != theirs:
                what = f"stage {k} updates at {applied} here, and at {theirs} on rank {replica}"
                yield rank, at, what


def of_transfers(programs: list[list[Action]]) -> Faults:
    """Yield uses without a receive before, results without a send after them; other transfers."""
    if not communicates(programs):
        return
    transfers = transfers_of(without_transfers(programs))
    for rank, program in enumerate(programs):
        position = {action: at for at, action in reversed(list(enumerate(program)))}
        due: set[Transfer | None] = set()
        for at, action in enumerate(program):
            if isinstance(action, Transfer):
                continue
            receive, send = transfers(rank, action)
            due |= {receive, send}
            if receive and position.get(receive, at) >= at:
                yield rank, at, f"{action} needs {receive} before it"
            if send and position.get(send, at) <= at:
                yield rank, at, f"{action} needs {send} after it"
        for at, action in enumerate(program):
            if isinstance(action, Transfer) and (action not in due or position[action] != at):
                what = "comes twice" if action in due else f"with rank {action.peer} is not due"
                yield rank, at, f"{action} {what}"


def without_transfers(programs: list[list[Action]]) -> Programs:
    bare = [[a for a in program if not isinstance(a, Transfer)] for program in programs]
    return Programs(bare, placement_of(programs), pairs_of(programs))


def of_order(programs: list[list[Action]], overlap: bool = False) -> Faults:
    """Yield where ranks wait, if there is no order in which all of them finish."""
    try:
        for _ in in_order(programs, overlap):
            pass
    except Stuck as stuck:
        rank, action = next(iter(stuck.waiting.items()))
        remedy = ", if pairs overlap; remove the pair" if overlap else ""
        yield rank, programs[rank].index(action), f"{stuck}{remedy}"


def of_pairs(programs: Programs) -> Faults:
    """Yield pairs that are no neighbours, forward first, or that cannot begin together."""
    for rank, forward, backward in sorted(programs.pairs, key=str):
        if not 0 <= rank < len(programs):
            raise WrongInput(f"{forward} and {backward} are a pair on rank {rank}, which is none")
        program = programs[rank]
        at = program.index(forward) if forward in program else len(program)
        pair = f"{forward} and {backward} are a pair"
        if not (isinstance(forward, Forward) and passes_backward(backward)):
            yield rank, at, f"{pair}, not a forward and then a backward"
        if program[at + 1 : at + 2] != [backward]:
            yield rank, at, f"{pair}, but {backward} is not next to {forward}"
    yield from of_order(programs, overlap=True)


class Fault(WrongInput):
    """Programs that are wrong: at action `at` of rank `rank`, or after its last one."""

    def __init__(self, message: str, rank: int | None = None, at: int | None = None):
        super().__init__(message)
        self.rank, self.at = rank, at


def grid(programs: list[list[Action]], rank: int | None = None, at: int = 0) -> str:
    """Return programs as lines, one per rank; on request, the part around one marked action."""
    longest = max(map(len, programs), default=0)
    first, stop = (0, longest) if rank is None else (max(0, at - ROOM), at + ROOM + 1)
    top = 0 if rank is None else max(0, rank - RANKS // 2)
    shown = range(len(programs))[top : None if rank is None else top + RANKS]
    cells = {r: [str(a) for a in programs[r][first:stop]] for r in shown}
    width = max((len(cell) for row in cells.values() for cell in row), default=1)
    lines = []
    for r, row in cells.items():
        head = f"rank {r:<3}" + (" ... " if first else " ")
        more = " ..." if len(programs[r]) > stop else ""
        lines.append(head + " ".join(cell.ljust(width) for cell in row).rstrip() + more)
        if r == rank:
            lines.append(" " * (len(head) + (at - first) * (width + 1)) + "^" * width)
    return "\n".join(lines)


Counts = dict[tuple[int, int], Counter]  # (rank, chunk): how often each micro-batch is in its dW


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


def gradients(
    placement: list[list[int]], steps: Iterable[tuple[int, Action]]
) -> tuple[Counts, Counts]:
    """Return the micro-batches left in dW at the end, and those that U or R took from it.

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
