"""Validate programs: is every action there, once, in an order that ranks can execute?"""

from collections import Counter

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
)
from minidist.pipeline_parallel.communication import transfers_of
from minidist.pipeline_parallel.execution_order import Stuck, in_order

ROOM, RANKS = 8, 16  # actions shown on either side of a fault, and ranks
BEFORE = {Forward: "", Backward: "F", BackwardInput: "F", BackwardWeight: "FI"}
KNOWN = {*COMPUTE, *SENDS, *RECEIVES, Reduce}
WHOLE = ("FB", "FIW")  # what a stage does for one micro-batch


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
    for rank, own in enumerate(placement_of(programs)):
        if not own or min(own) < 0:
            raise WrongInput(f"rank {rank} holds the stages {own}; a rank has one or more, from 0")
        _check_rank(programs, rank, m)
    if m < 1:
        raise WrongInput(f"the programs of {p} ranks have no micro-batch; begin one with F0")
    _check_stages(programs, m)
    _check_updates(programs, m)
    if communicates(programs):
        _check_transfers(programs)
    _check_order(programs)
    if pairs_of(programs):
        _check_pairs(_without_transfers(programs))


def _check_rank(programs, rank: int, m: int) -> None:
    """Check what one rank shows: foreign, double and missing actions, and their order."""
    chunks, sums = len(placement_of(programs)[rank]), reduces(programs)
    done: dict[tuple, str] = {}  # {(micro-batch, chunk): signs of its actions so far}
    last: dict[tuple | Action, int] = {}  # {(micro-batch, chunk), or U or R: its last place}
    for at, action in enumerate(programs[rank]):
        if not isinstance(action, Action) or type(action) not in KNOWN:
            raise _fault(programs, rank, at, f"{action!r} is no action")
        if isinstance(action, Update) and sums:
            what = f"{action} sums its gradients itself, so no R may; leave out one of them"
            raise _fault(programs, rank, at, what)
        i, c = place = action.micro_batch, action.chunk
        here = f"there are {m} micro-batches, and here"
        if isinstance(action, Reduce):  # of all micro-batches
            i, here = 0, "here are"
        if not (0 <= i < m and 0 <= c < chunks):
            what = f"{action} is foreign: {here} chunks 0 to {chunks - 1}"
            raise _fault(programs, rank, at, what)
        so_far = done.get(place, "")
        if isinstance(action, Update | Reduce):
            if action in last:
                raise _fault(programs, rank, at, f"{action} comes twice")
            last[action] = at
            if late := [a for a in programs[rank][at:] if _is_summed_by(a, action)]:
                why = "whose gradient it sums" if isinstance(action, Reduce) else "which it applies"
                raise _fault(programs, rank, at, f"{action} comes before {late[-1]}, {why}")
        elif type(action) in BEFORE:
            if BEFORE[type(action)] != so_far:
                needed = " and ".join(BEFORE[type(action)]) or "nothing"
                found = f"not after {' and '.join(so_far)}" if so_far else "which has not come"
                what = f"{action} must come after {needed} of its micro-batch, {found}"
                what = f"{action} comes twice" if action.sign in so_far else what
                raise _fault(programs, rank, at, what)
            done[place], last[place] = so_far + action.sign, at
    for place, signs in done.items():
        if signs not in WHOLE:
            at = last[place]
            what = f"{programs[rank][at]} is the last of its micro-batch; missing: "
            raise _fault(programs, rank, at, what + ("W" if signs == "FI" else "B, or I and W"))
    for action in map(Reduce, range(chunks if sums else 0)):
        if action not in last:
            what = f"{action} is missing; the gradients of other chunks are summed"
            raise _fault(programs, rank, len(programs[rank]), what)


def _is_summed_by(action: Action, total: Update | Reduce) -> bool:
    """Return whether a U or R must wait for this action, which may be an earlier update."""
    if isinstance(total, Reduce):
        part = isinstance(action, Backward | BackwardInput | BackwardWeight)
    else:
        part = isinstance(action, Backward | BackwardWeight | Update) and action != total
        part &= action.micro_batch <= total.micro_batch
    return part and action.chunk == total.chunk


def _check_stages(programs, m: int) -> None:
    """Check that every stage takes every micro-batch once, on any one of its replicas."""
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
                what += f"{stage}; micro-batches count from 0"
                raise _fault(programs, rank, len(programs[rank]), what)


def _check_updates(programs, m: int) -> None:
    """Check that no gradient is left unapplied, and that a stage's replicas update together."""
    updates = {
        (k, rank): [a.micro_batch for a in programs[rank] if type(a) is Update and a.chunk == c]
        for rank, own in enumerate(placement_of(programs))
        for c, k in enumerate(own)
    }
    if not any(updates.values()):
        return
    first: dict[int, tuple] = {}
    for (k, rank), applied in updates.items():
        replica, theirs = first.setdefault(k, (rank, applied))
        what = None
        if applied[-1:] != [m - 1]:
            what = f"no update of stage {k} applies micro-batch {m - 1}"
        elif applied != theirs:
            what = f"stage {k} updates at {applied} here, and at {theirs} on rank {replica}"
        if what:
            raise _fault(programs, rank, len(programs[rank]), what)


def _check_transfers(programs) -> None:
    """Check that each use has one receive before it, each result one send after it; no others."""
    transfers = transfers_of(_without_transfers(programs))
    for rank, program in enumerate(programs):
        position, due = {a: at for at, a in reversed(list(enumerate(program)))}, set()
        for at, action in enumerate(program):
            if isinstance(action, Transfer):
                continue
            for end, side in zip(transfers(rank, action), ("before", "after"), strict=True):
                if end is None:
                    continue
                due.add(end)
                found = position.get(end)
                if found is None or (found < at) != (side == "before"):
                    raise _fault(programs, rank, at, f"{action} needs {end} {side} it")
        for at, action in enumerate(program):
            if isinstance(action, Transfer) and (action not in due or position[action] != at):
                what = "comes twice" if action in due else f"with rank {action.peer} is not due"
                raise _fault(programs, rank, at, f"{action} {what}")


def _without_transfers(programs) -> Programs:
    bare = [[a for a in program if not isinstance(a, Transfer)] for program in programs]
    return Programs(bare, placement_of(programs), pairs_of(programs))


def _check_order(programs, overlap: bool = False) -> None:
    """Check that there is an order in which all ranks finish."""
    try:
        for _ in in_order(programs, overlap):
            pass
    except Stuck as stuck:
        rank, action = next(iter(stuck.waiting.items()))
        what = f"{stuck}, if pairs overlap; remove the pair" if overlap else str(stuck)
        raise _fault(programs, rank, programs[rank].index(action), what) from None


def _check_pairs(programs: Programs) -> None:
    """Check that pairs are neighbours, forward first, and that they can begin together."""
    for rank, forward, backward in sorted(programs.pairs, key=str):
        if not 0 <= rank < len(programs):
            raise WrongInput(f"{forward} and {backward} are a pair on rank {rank}, which is none")
        program = programs[rank]
        at = program.index(forward) if forward in program else len(program)
        pair = f"{forward} and {backward} are a pair"
        if not (isinstance(forward, Forward) and passes_backward(backward)):
            raise _fault(programs, rank, at, f"{pair}, not a forward and then a backward")
        if program[at + 1 : at + 2] != [backward]:
            raise _fault(programs, rank, at, f"{pair}, but {backward} is not next to {forward}")
    _check_order(programs, overlap=True)


class Fault(WrongInput):
    """Programs that are wrong: at action `at` of rank `rank`, or after its last one."""

    def __init__(self, message: str, rank: int | None = None, at: int | None = None):
        super().__init__(message)
        self.rank, self.at = rank, at


def _fault(programs, rank: int, at: int, what: str) -> Fault:
    return Fault(f"rank {rank}, action {at}: {what}\n{grid(programs, rank, at)}", rank, at)


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
